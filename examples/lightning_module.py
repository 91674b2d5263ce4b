"""Lightning with compressed activations.

    pip install 'bitsparse[examples]'
    python examples/lightning_module.py            # a tiny random network, on random data
    python examples/lightning_module.py --dense    # the same without bitsparse: the same losses

Convert in the constructor: `Trainer` wraps the module later.
"""

import argparse
from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bitsparse

WIDTH, OUT = 32, 8


class Network(L.LightningModule):
    """Residual feed-forward blocks."""

    def __init__(self, compressed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, OUT)
        self.losses: list[float] = []
        if compressed:
            print(bitsparse.convert(self))  # the one line

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, width]`` to ``[batch, out]``."""
        for block in self.blocks:
            x = x + block(self.norm(x))
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Lightning with compressed activations.")
    parser.add_argument("--dense", action="store_true", help="leave the model as it is")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)

    L.seed_everything(0, verbose=False)
    network = Network(compressed=not options.dense)
    data = TensorDataset(torch.randn(256, WIDTH), torch.randn(256, OUT))
    trainer = L.Trainer(
        max_steps=options.steps,
        accelerator="auto",
        devices=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(network, DataLoader(data, batch_size=16, shuffle=True))
    print("losses:", *(f"{loss:.6f}" for loss in network.losses))
    return network.losses


if __name__ == "__main__":
    main()
