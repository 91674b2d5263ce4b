"""Support coding "full": every element of the tensor is nonzero; nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bitsparse.backends.optional import numba_jit, tl, triton_jit
from bitsparse.codings import words
from bitsparse.codings.base import Mask
from bitsparse.layout import GROUP, TILE, Geometry


class FullSupport:
    """See the module's description."""

    name = "full"
    cost = 0

    def applies(self, geometry: Geometry, nnz: int) -> bool:
        return nnz == geometry.numel

    def nbytes(self, geometry: Geometry, bucket_bytes: int) -> int:
        return 0

    def encode(self, words: Tensor, geometry: Geometry) -> Mask:
        return Mask(self)

    def decode(self, mask: Mask, geometry: Geometry) -> Tensor:
        return inside(geometry, 0, geometry.tiles)[: geometry.mask_words]

    def check(self, mask: Mask, geometry: Geometry, step: int) -> Iterator[Tensor]:
        for first in range(0, geometry.tiles, step):
            yield inside(geometry, first, min(first + step, geometry.tiles))

    @property
    def cpu_words(self) -> object:
        return _cpu_words

    @property
    def triton_words(self) -> object:
        return _words


def inside(geometry: Geometry, first: int, last: int) -> Tensor:
    """Words of the tiles ``[first, last)``: the slots that lie inside the tensor."""
    word = torch.arange(first * TILE // 32, last * TILE // 32, device="cpu")
    left = geometry.numel - 32 * word  # elements, or rows of the word's column
    if geometry.height > 1:
        left = geometry.rows - word // (2 * geometry.cols) * GROUP - word % 2 * 32
    return words.to_int32((1 << left.clamp(0, 32)) - 1)


CODING = FullSupport()

# --------------------------------------------------------------------------------- CPU


@numba_jit
def _cpu_words(mask, buckets, offset, tile, rows, cols, height, words):
    for w in range(words.size):
        # Rows of this word's column, or elements in row-major order.
        slot = (tile * words.size + w) * 32
        left = rows * cols - slot
        if height > 1:
            left = rows - slot // (height * cols) * height - slot % height
        ones = np.uint64(1) << np.uint64(min(max(left, 0), 32))
        words[w] = np.uint32(ones - np.uint64(1))


# ------------------------------------------------------------------------------ Triton


@triton_jit
def _words(mask_ptr, buckets_ptr, bucket_offsets_ptr, tile, mask_words, inside):
    return tl.sum(inside.to(tl.int32) << tl.arange(0, 32)[None, None, :], axis=2)
