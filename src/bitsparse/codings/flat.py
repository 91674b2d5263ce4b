"""Support coding "flat": one bit a slot.

Slot ``i`` is bit ``i % 32`` (least significant first) of 32-bit word ``i // 32``; the bits of slots
outside the tensor and after the last slot are zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bitsparse.backends.optional import numba_jit, tl, triton_jit
from bitsparse.codings import words
from bitsparse.codings.base import Mask
from bitsparse.layout import TILE, Geometry


class FlatSupport:
    """See the module's description."""

    name = "flat"
    cost = 1

    def applies(self, geometry: Geometry, nnz: int) -> bool:
        return True

    def nbytes(self, geometry: Geometry, bucket_bytes: int) -> int:
        return 4 * geometry.mask_words

    def encode(self, words: Tensor, geometry: Geometry) -> Mask:
        return Mask(self, words)

    def decode(self, mask: Mask, geometry: Geometry) -> Tensor:
        assert mask.words is not None
        return mask.words

    def check(self, mask: Mask, geometry: Geometry, step: int) -> Iterator[Tensor]:
        words.check_buffer("mask", mask.words, torch.int32, geometry.mask_words)
        assert mask.words is not None
        yield from mask.words.split(step * TILE // 32)

    @property
    def cpu_words(self) -> object:
        return _cpu_words

    @property
    def triton_words(self) -> object:
        return _words


CODING = FlatSupport()

# --------------------------------------------------------------------------------- CPU


@numba_jit
def _cpu_words(mask, buckets, offset, tile, rows, cols, height, words):
    first = tile * (TILE // 32)
    stored = mask[first : min(first + TILE // 32, mask.size)]
    words[: stored.size] = stored
    words[stored.size :] = np.uint32(0)


# ------------------------------------------------------------------------------ Triton


@triton_jit
def _words(mask_ptr, buckets_ptr, bucket_offsets_ptr, tile, mask_words, inside):
    index = tl.arange(0, 64)[:, None] * 2 + tl.arange(0, 2)[None, :]
    base = tile.to(tl.int64) * 128
    inside_words = index < words.left(mask_words - base, 128)
    return tl.load(mask_ptr + base + index, mask=inside_words, other=0)
