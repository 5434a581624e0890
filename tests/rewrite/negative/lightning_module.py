"""Lightning without a sharding strategy of torch's: look-alikes only."""
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy
from pytorch_lightning.strategies import DDPFullyShardedNativeStrategy  # noqa: F401


class FSDP(L.LightningModule):
    """Fast Sequence Data Predictor."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(4, 4)

    def training_step(self, batch, _):
        return self.module(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val)


def main(data):
    trainer = L.Trainer(strategy=DDPStrategy(static_graph=True), callbacks=[ModelCheckpoint()])
    with trainer.strategy.model.no_sync():
        pass
    trainer.fit(FSDP(), data)
    return trainer.strategy.model.module, FSDPPrecision
