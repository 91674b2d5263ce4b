"""Support coding "flat": one bit an element.

Element ``i`` is bit ``i % 32`` (least significant first) of 32-bit word ``i // 32``; the bits after
the last element are zero. Nonzeros are enumerated in row-major order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bitsparse import layout
from bitsparse.backends.optional import numba_jit, tl, triton_jit
from bitsparse.codings import words
from bitsparse.layout import TILE

# --------------------------------------------------------------------------- reference


class FlatSupport:
    """See the module's description."""

    name = "flat"

    def nbytes(self, numel: int) -> int:
        return 4 * self.mask_length(numel) + layout.offset_bytes(numel) * layout.num_tiles(numel)

    def mask_length(self, numel: int) -> int:
        return layout.num_mask_words(numel)

    def encode(self, nonzero: Tensor) -> Tensor:
        return words.pack(nonzero)

    def positions(self, mask: Tensor, numel: int) -> Tensor:
        return words.unpack(mask, numel).nonzero().view(-1)

    def check(self, mask: Tensor, numel: int) -> None:
        length = self.mask_length(numel)
        if mask.dtype != torch.int32 or mask.shape != (length,):
            raise ValueError(
                f"mask: got {mask.dtype} of shape {tuple(mask.shape)}, "
                f"a flat mask of {numel} elements is torch.int32 of shape ({length},)"
            )
        tail = numel % layout.WORD_BITS
        if tail and (int(mask[-1]) & 0xFFFFFFFF) >> tail:
            raise ValueError(f"mask: bits after the last of {numel} elements are set")

    @property
    def cpu_positions(self) -> object:
        return _cpu_positions

    @property
    def cpu_store(self) -> object:
        return _cpu_store

    @property
    def triton_locate(self) -> object:
        return _locate

    @property
    def triton_index(self) -> object:
        return _index

    @property
    def triton_store(self) -> object:
        return _store


CODING = FlatSupport()

# --------------------------------------------------------------------------------- CPU


# Index of the lowest set bit `b` of a word, by de Bruijn's sequence: table[(b * sequence) >> 27].
_DE_BRUIJN = np.uint32(0x077CB531)
_LOWEST_BIT = np.array(
    [int((0x077CB531 << i & 0xFFFFFFFF) >> 27) for i in range(32)], np.int64
).argsort()
# Multiplying eight 0/1 bytes by this gathers them as the bits of the highest byte.
_GATHER_BITS = np.uint64(0x0102040810204080)


@numba_jit
def _cpu_positions(mask, tile, numel, index):
    count = 0
    first = tile * (TILE // 32)
    words = mask[first : min(first + TILE // 32, mask.size)]
    for w in range(words.size):
        word = words[w]
        while word != 0:  # one step a nonzero: the work follows the density
            lowest = np.uint32(word & (~word + np.uint32(1)))
            index[count] = w * 32 + _LOWEST_BIT[np.uint32(lowest * _DE_BRUIJN) >> np.uint32(27)]
            count += 1
            word ^= lowest
    return count


@numba_jit
def _cpu_store(mask, tile, numel, nonzero):
    first = tile * (TILE // 32)
    words = mask[first : min(first + TILE // 32, mask.size)]
    eights = nonzero.view(np.uint64)
    for w in range(words.size):
        word = np.uint64(0)
        for byte in range(4):
            bits = (eights[4 * w + byte] * _GATHER_BITS) >> np.uint64(56)
            word |= bits << np.uint64(8 * byte)
        words[w] = np.uint32(word)


# ------------------------------------------------------------------------------ Triton
# A tile is seen as [TILE / 32, 32]: one row a word of the mask. `numel` is int64; what is left of
# the tensor from a tile on stays 64-bit until it is compared.


@triton_jit
def _index(tile, numel, TILE: tl.constexpr):
    index = tl.arange(0, TILE // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return index, index < numel - tile.to(tl.int64) * TILE


@triton_jit
def _store(mask_ptr, tile, numel, nonzero, TILE: tl.constexpr):
    lanes = tl.arange(0, 32)[None, :]
    words = tl.sum(nonzero.to(tl.int32) << lanes, axis=1)
    rows = tl.arange(0, TILE // 32)
    remaining = ((numel + 31) >> 5) - tile.to(tl.int64) * (TILE // 32)
    tl.store(mask_ptr + tile.to(tl.int64) * (TILE // 32) + rows, words, mask=rows < remaining)
    return tl.sum(tl.sum(nonzero.to(tl.int32), axis=1), axis=0)


@triton_jit
def _popcount(x):
    # Population count of uint32. In just this form LLVM recognises it and emits the instruction.
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton_jit
def _locate(mask_ptr, tile, numel, TILE: tl.constexpr):
    lanes = tl.arange(0, 32)[None, :]
    rows = tl.arange(0, TILE // 32)
    remaining = ((numel + 31) >> 5) - tile.to(tl.int64) * (TILE // 32)
    words = tl.load(
        mask_ptr + tile.to(tl.int64) * (TILE // 32) + rows, mask=rows < remaining, other=0
    )
    counts = _popcount(words.to(tl.uint32, bitcast=True))
    before = (tl.cumsum(counts, axis=0) - counts)[:, None]
    nonzero = ((words[:, None] >> lanes) & 1) != 0
    lower = words[:, None] & ((1 << lanes) - 1)
    rank = before + _popcount(lower.to(tl.uint32, bitcast=True))
    index = rows[:, None] * 32 + lanes
    inside = index < numel - tile.to(tl.int64) * TILE
    return index, inside, nonzero, rank
