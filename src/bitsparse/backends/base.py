"""What a backend provides, and the data that flows through it.

    activation -> support -> values -> (backward) -> hidden, gradients

The reference backend (:mod:`bitsparse.backends.reference`) is the specification; every other one
gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bitsparse.activations import Activation
from bitsparse.codings.base import SupportCoding, ValueCoding


@dataclass
class Support:
    """Positions of the nonzeros of one tensor (or of the pair of tensors of a gated activation)."""

    coding: SupportCoding
    mask: Tensor
    """int32: the coded positions. For dReLU: where relu(gate) fires (or either is special)."""
    offsets: Tensor
    """int32 or int64 ``[tiles]``: nonzeros before each tile."""
    up_mask: Tensor | None = None
    """dReLU only: where relu(up) fires (or either is special). Values are kept where both are."""

    totals: Tensor | None = None
    """int64 ``[3]`` on the same device, of a support that was just found: number of nonzeros;
    whether any kept value of the first stream has its sign bit set; the same for the second."""

    def value_mask(self) -> Tensor:
        """The mask of the positions whose values are kept."""
        return self.mask if self.up_mask is None else self.mask & self.up_mask


@dataclass
class Kept:
    """What a compressed feed-forward keeps for backward; ``None`` for what no gradient needs."""

    support: Support
    nnz: int
    numel: int
    dtype: torch.dtype
    gate_coding: ValueCoding
    up_coding: ValueCoding
    gate: Tensor | None = None
    """Stream of relu(gate) at the kept positions."""
    up: Tensor | None = None
    """Stream of up (dReLU: relu(up)) at the kept positions."""


class Backend(Protocol):
    """Operations on bit patterns. Every tensor is contiguous and on one device."""

    name: str

    def find_support(self, coding: SupportCoding, patterns: Tensor) -> Support:
        """Support of ``patterns`` (integer ``[numel]``): nonzero means that any bit is set."""

    def activate(
        self,
        coding: SupportCoding,
        activation: Activation,
        gate: Tensor,
        up: Tensor | None,
        fp32_math: bool,
    ) -> tuple[Tensor, Support]:
        """The hidden tensor (shape and dtype of ``gate``) and the support for its backward.

        Kept positions: relu(gate) positive or NaN; gated forms also where relu(gate) or ``up``
        (dReLU: relu(up)) is infinite, NaN or -0.0, since products with zero show these.
        For an activation that keeps no more than its result ("relu") the hidden tensor overwrites
        ``gate``. ``fp32_math``: round intermediate results to float32 instead of the tensors'
        dtype, as CUDA autocast does around ``torch.square``.
        """

    def gather(self, support: Support, source: Tensor, nnz: int, relu: bool) -> Tensor:
        """Patterns ``[nnz]`` of ``source`` at the kept positions, of relu(source) if ``relu``."""

    def encode(self, coding: ValueCoding, patterns: Tensor, dtype: torch.dtype) -> Tensor:
        """Store ``patterns`` (integer ``[count]``) as a stream of ``coding``."""

    def scatter(
        self,
        support: Support,
        values: ValueCoding,
        stream: Tensor,
        numel: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Decode: integer patterns ``[numel]`` with zero where nothing is stored."""

    def hidden(self, activation: Activation, kept: Kept, fp32_math: bool, out: Tensor) -> Tensor:
        """Write the hidden tensor into ``out`` (``[numel]`` of ``kept.dtype``) and return it.

        Where nothing is kept the result is +0.0.
        """

    def gradient(
        self,
        activation: Activation,
        kept: Kept,
        grad_hidden: Tensor,
        fp32_math: bool,
        need_gate: bool,
        need_up: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of ``gate`` and ``up`` (``[numel]``); may overwrite ``grad_hidden``."""


def find_backend_module(device: torch.device) -> str:
    """Which backend serves tensors on ``device``."""
    return {"cuda": "triton", "cpu": "cpu"}.get(device.type, "reference")


__all__ = ["Backend", "Kept", "Support", "find_backend_module"]
