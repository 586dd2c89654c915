"""Lightning's Trainer with DeepSpeedStrategy: fit, save, and go on from the checkpoint; predict afterwards.

The strategy asks for CUDA devices. Here it gets an accelerator that says so and has CPUs.
"""

import argparse
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Pretended(CUDAAccelerator):
    """CPUs under the name of CUDA devices."""

    def setup_device(self, device: torch.device) -> None: ...

    def setup(self, trainer: L.Trainer) -> None: ...

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(devices)) if isinstance(devices, int) else devices

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cpu", i) for i in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 2

    @staticmethod
    def is_available() -> bool:
        return True


class Classifier(L.LightningModule):
    def __init__(self, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        torch.manual_seed(3)
        width = self.hparams["width"]
        middle = [
            m
            for _ in range(self.hparams["layers"])
            for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
        ]
        self.net = nn.Sequential(nn.Linear(16, width), *middle, nn.Linear(width, 4))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int)
    parser.add_argument("--out")
    parser.add_argument("--validate", action="store_true")
    args = parser.parse_args()
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 16, generator=g), torch.randint(4, (64,), generator=g))

    def trainer(epochs: int) -> L.Trainer:
        strategy = DeepSpeedStrategy(stage=args.stage, process_group_backend="gloo")
        strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # the model is tiny
        return L.Trainer(
            accelerator=Pretended(), devices=2, max_epochs=epochs, default_root_dir=args.out, logger=False,
            enable_progress_bar=False, gradient_clip_val=0.5, accumulate_grad_batches=2, precision="32-true",
            strategy=strategy, enable_checkpointing=False,
        )  # fmt: skip

    L.seed_everything(1)
    train = DataLoader(data, batch_size=4, shuffle=True)
    check = DataLoader(data, batch_size=8)
    first = trainer(2)
    first.fit(Classifier(), train, check)
    first.save_checkpoint(f"{args.out}/saved.ckpt")
    before = float(first.callback_metrics["val_loss"])
    again = trainer(4)
    if args.validate:
        again.validate(Classifier(), check, ckpt_path=f"{args.out}/saved.ckpt", weights_only=False)
        assert abs(float(again.callback_metrics["val_loss"]) - before) < 1e-6
    again.fit(Classifier(), train, check, ckpt_path=f"{args.out}/saved.ckpt", weights_only=False)
    assert again.current_epoch == 4
    again.predict(again.lightning_module, check)


if __name__ == "__main__":
    main()
