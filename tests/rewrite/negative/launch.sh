#!/bin/sh
# torchrun train.py --fsdp full_shard
torchrun train.py --strategy fsdp --no-fsdp-debug "$@"
accelerate launch --fsdp_version 2 --use_fsdp --fsdp_reshard_after_forward true train.py
