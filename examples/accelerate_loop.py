"""A training loop with Accelerate and compressed activations.

    pip install 'bitsparse[examples]'
    python examples/accelerate_loop.py             # a tiny random classifier, on random data
    python examples/accelerate_loop.py --dense     # the same without bitsparse: the same losses
    accelerate launch examples/accelerate_loop.py  # on all GPUs

Convert before `prepare`, which may wrap the model.
"""

import argparse
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bitsparse

CLASSES, TOKENS, WIDTH = 4, 16, 32


class Classifier(nn.Module):
    """Transformer layers of PyTorch, then a linear layer on the mean of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        # Dropout between the feed-forward projections would keep them from being compressed.
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens, width]`` to logits ``[batch, classes]``."""
        out: Tensor = self.head(self.layers(x).mean(1))
        return out


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Accelerate with compressed activations.")
    parser.add_argument("--dense", action="store_true", help="leave the model as it is")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model: nn.Module = Classifier()
    if not options.dense:
        report = bitsparse.convert(model)  # the one line
        accelerator.print(report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(64, TOKENS, WIDTH), torch.randint(CLASSES, (64,)))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses: list[float] = []
    while len(losses) < 2 * options.steps:
        for x, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == 2 * options.steps:
                break
    accelerator.print("losses:", *(f"{loss:.6f}" for loss in losses))
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
