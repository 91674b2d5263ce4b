"""What a coding must provide.

Each coding is one file that holds, in this order: the layout in plain arithmetic, the reference in
plain PyTorch (the specification), the functions that the CPU kernels call (Numba), and the
functions that the GPU kernels call (Triton).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bitsparse.layout import Geometry


@dataclass(frozen=True)
class Mask:
    """Coded positions."""

    coding: SupportCoding
    words: Tensor | None = None
    """int32, 1-d."""
    buckets: Tensor | None = None
    """uint8, 1-d: bytes of which a tile may have any number."""
    bucket_offsets: Tensor | None = None
    """Offset table of ``buckets``."""

    @property
    def tensors(self) -> list[Tensor | None]:
        """All of them, in the order of the constructor's arguments."""
        return [self.words, self.buckets, self.bucket_offsets]


@dataclass(frozen=True)
class Stream:
    """Coded values."""

    coding: ValueCoding
    values: Tensor
    """Patterns, or int32 words of packed codes; 1-d."""
    exponents: Tensor | None = None
    """uint8 ``[tiles]``: the largest exponent of each tile."""
    escapes: Tensor | None = None
    """uint8, 1-d: exponents that the codes have no room for."""
    escape_offsets: Tensor | None = None
    """Offset table of ``escapes``."""

    @property
    def tensors(self) -> list[Tensor | None]:
        """All of them, in the order of the constructor's arguments."""
        return [self.values, self.exponents, self.escapes, self.escape_offsets]


class SupportCoding(Hashable, Protocol):
    """Where the nonzeros are. The bits of slots outside the tensor are zero."""

    @property
    def name(self) -> str:
        """What it is called in arguments and files."""

    @property
    def cost(self) -> int:
        """Rank among the supports by the time they take, fastest first."""

    def applies(self, geometry: Geometry, nnz: int) -> bool:
        """Whether these masks can be stored at all."""

    def nbytes(self, geometry: Geometry, bucket_bytes: int) -> int:
        """Bytes of a mask with so many bytes of nonempty groups and buckets."""

    # Reference.
    def encode(self, words: Tensor, geometry: Geometry) -> Mask:
        """``words``: int32 ``[mask_words]``, one bit a slot."""

    def decode(self, mask: Mask, geometry: Geometry) -> Tensor:
        """The inverse of :meth:`encode`."""

    def check(self, mask: Mask, geometry: Geometry, step: int) -> Iterator[Tensor]:
        """What :meth:`decode` gives for ``step`` tiles after another, from parts of any origin.

        Takes memory in proportion to ``step`` and to the buffers' sizes. The last words may lack.
        The caller checks that no bits outside the tensor are set.

        Raises:
            ValueError: ``mask`` is not one for ``geometry``.
        """

    # Kernels.
    @property
    def cpu_words(self) -> Any:
        """``(mask, buckets, offset, tile, rows, cols, height, words) -> None``: write the words of
        one tile, uint32 ``[TILE / 32]``; ``offset`` is where the tile's bytes start."""

    @property
    def triton_words(self) -> Any:
        """``(mask_ptr, buckets_ptr, bucket_offsets_ptr, tile, mask_words, inside) -> words``: int32
        ``[64, 2]``, of one tile; ``inside`` ``[64, 2, 32]``: slots that lie inside the tensor."""


class ValueCoding(Hashable, Protocol):
    """How the bit patterns of the nonzeros are stored.

    Every value has a code of ``width`` bits. Where ``field`` is 0 the code is the lowest ``width``
    bits of the pattern. Else it is, from the lowest bit up, the mantissa, a field of ``field`` bits
    for the exponent, and the sign bit if ``signed``.
    """

    @property
    def name(self) -> str:
        """What it is called in arguments and files."""

    @property
    def cost(self) -> int:
        """Rank among the values by the time they take, fastest first."""

    @property
    def field(self) -> int:
        """Bits for the exponent's distance from the tile's largest, 0 if there is no such field;
        the highest number that they hold means that the exponent is among the escapes."""

    @property
    def signed(self) -> bool:
        """Whether a sign is kept."""

    def applies(self, dtype: torch.dtype, any_sign: bool) -> bool:
        """Whether values of ``dtype``, with or without any sign bit set, are kept without loss."""

    def width(self, dtype: torch.dtype) -> int:
        """Bits of a code; all of the dtype's bits mean that the patterns are stored as they are."""

    def nbytes(self, count: int, dtype: torch.dtype, tiles: int, escapes: int) -> int:
        """Bytes of ``count`` values."""

    # Reference.
    def encode(self, patterns: Tensor, dtype: torch.dtype, tile_of: Tensor, tiles: int) -> Stream:
        """``patterns``: integer ``[count]`` in slot order; ``tile_of``: int64 ``[count]``."""

    def decode(self, stream: Stream, dtype: torch.dtype, tile_of: Tensor, tiles: int) -> Tensor:
        """The inverse of :meth:`encode`: integer patterns ``[count]``."""

    def check(self, stream: Stream, dtype: torch.dtype, starts: Tensor) -> None:
        """Raise ValueError if ``stream``, of any origin, does not hold nonzeros of ``dtype``.

        ``starts``: int64 ``[tiles + 1]``, where the values of each tile start and, last, how many
        there are; the length of ``stream.values`` has been checked.
        """
