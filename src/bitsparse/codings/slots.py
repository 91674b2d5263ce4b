"""Elements in the order of their slots, in plain PyTorch (see :mod:`bitsparse.layout`)."""

from __future__ import annotations

import torch
from torch import Tensor

from bitsparse.layout import TILE, Geometry


def from_elements(elements: Tensor, geometry: Geometry) -> Tensor:
    """``[numel]`` in row-major order to ``[tiles * TILE]`` in slot order, zero outside."""
    rows, cols, height = geometry
    padded = elements.new_zeros(geometry.blocks * height, cols)
    padded[:rows] = elements.view(rows, cols)
    ordered = padded.view(geometry.blocks, height, cols).transpose(1, 2).reshape(-1)
    return torch.nn.functional.pad(ordered, (0, geometry.tiles * TILE - geometry.slots))


def to_elements(slots: Tensor, geometry: Geometry) -> Tensor:
    """The inverse of :func:`from_elements`; new memory."""
    rows, cols, height = geometry
    blocks = slots[: geometry.slots].view(geometry.blocks, cols, height).transpose(1, 2)
    return blocks.reshape(geometry.blocks * height, cols)[:rows].reshape(-1).clone()
