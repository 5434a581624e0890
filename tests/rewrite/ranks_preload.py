"""What every rank imports, loaded once in the process that ranks are forked from."""

import torch._dynamo  # the first optimizer asks for it: most of what a tiny run would cost
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.data  # noqa: F401
