"""What a coding must provide.

Each coding is one file that holds, in this order: the layout in plain arithmetic, the reference in
plain PyTorch (the specification), the functions that the CPU kernels call (Numba), and the
functions that the GPU kernels call (Triton).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor


class SupportCoding(Hashable, Protocol):
    """Where the nonzeros are, and in which order they are enumerated."""

    name: str

    def nbytes(self, numel: int) -> int:
        """Bytes of the support, offsets included."""

    def mask_length(self, numel: int) -> int:
        """Elements (int32) of the mask buffer."""

    # Reference.
    def encode(self, nonzero: Tensor) -> Tensor:
        """``nonzero``: bool ``[numel]``. Returns the mask buffer, int32, 1-d."""

    def positions(self, mask: Tensor, numel: int) -> Tensor:
        """Element indices of the nonzeros in enumeration order: int64 ``[nnz]``, tile by tile."""

    def check(self, mask: Tensor, numel: int) -> None:
        """Raise ValueError if ``mask`` is not a support of ``numel`` elements."""

    # CPU: functions compiled by Numba, called by the kernels. Masks are uint32 there.
    cpu_positions: Any
    """``(mask, tile, numel, index) -> count``: write the offsets in the tile of its nonzeros, in
    order, to ``index`` (int64 ``[TILE + 1]``)."""
    cpu_store: Any
    """``(mask, tile, numel, nonzero) -> None``: write one tile's mask from flags ``[TILE]``."""

    # Triton: jit functions passed to the kernels as compile-time arguments.
    triton_locate: Any
    """``(mask_ptr, tile, numel) -> (index, inside, nonzero, rank)``, tensors over one tile: element
    index inside the tile, whether it lies inside the tensor, whether it is a nonzero, and its rank
    among the tile's nonzeros."""
    triton_index: Any
    """``(tile, numel) -> (index, inside)``: as above, for tiles that have no mask yet."""
    triton_store: Any
    """``(mask_ptr, tile, numel, nonzero) -> count``: write one tile's mask, return its nonzeros."""


class ValueCoding(Protocol):
    """How the bit patterns of the nonzeros are stored."""

    name: str

    def applies(self, dtype: torch.dtype, any_sign: bool) -> bool:
        """Whether values of ``dtype``, with or without any sign bit set, are kept without loss."""

    def stream_length(self, count: int, dtype: torch.dtype) -> int:
        """Elements of the stream buffer that holds ``count`` values."""

    def stream_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Integer dtype of the stream buffer."""

    def width(self, dtype: torch.dtype) -> int:
        """Bits of one stored value: full width (the patterns themselves) or fewer (bit-packed)."""

    # Reference.
    def encode(self, patterns: Tensor, dtype: torch.dtype) -> Tensor:
        """``patterns``: integer ``[count]`` in enumeration order. Returns the stream."""

    def decode(self, stream: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """The inverse of :meth:`encode`: integer patterns ``[count]``."""

    # Triton: a jit function passed to the kernels as a compile-time argument.
    triton_load: Any
    """``(stream_ptr, rank, mask, WIDTH) -> int32``: the patterns of the values at those ranks:
    int32, counted from ``stream_ptr``, which stands at a value whose rank is a multiple of 32."""
