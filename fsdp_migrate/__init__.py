"""Move a running PyTorch FSDP1 project to FSDP2: checkpoints, code, and proof of loss parity."""

__version__ = "0.1.0"
