"""accelerate hides the wrapper: the script itself has nothing to migrate."""
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, save_fsdp_model


def main(model, optimizer, loader, scheduler):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                print(norm.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        with accelerator.no_sync(model):
            model(**batch)
    if accelerator.distributed_type == DistributedType.FSDP:
        save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, "out")
    unwrapped = accelerator.unwrap_model(model)
    state_dict = accelerator.get_state_dict(model)
    unwrapped.save_pretrained("out", state_dict=state_dict)
    return getattr(model, "module", model), torch.compile(unwrapped)
