"""Small profiled runs."""

from pathlib import Path

import torch
from torch import Tensor, nn

import bitsparse
from bitsparse.profiling import Profile


class Stack(nn.Module):
    """Two blocks with something around them."""

    def __init__(self, activation: str = "relu2", **options: object) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList(
            bitsparse.nn.FeedForward(16, 48, activation, **options)  # type: ignore[arg-type]
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return x


def inputs(seed: int = 0, tokens: int = 40) -> Tensor:
    return torch.randn(2, tokens, 16, generator=torch.Generator().manual_seed(seed))


def stack(activation: str = "relu2", **options: object) -> Stack:
    torch.manual_seed(1)
    return Stack(activation, **options)


def profiled(model: nn.Module, steps: int = 1, path: Path | None = None, **options) -> Profile:
    """Forward and backward passes, and what was found out."""
    options.setdefault("every", 1)
    options.setdefault("timed", False)
    with bitsparse.profile(model, path=path, **options) as p:
        for step in range(steps):
            model(inputs(step)).square().mean().backward()
            p.step()
    return p.result
