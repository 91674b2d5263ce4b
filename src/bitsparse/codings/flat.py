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
from bitsparse.layout import TILE

# --------------------------------------------------------------------------- reference


class FlatSupport:
    """See the module's description."""

    name = "flat"

    def nbytes(self, numel: int) -> int:
        return 4 * layout.num_mask_words(numel) + layout.offset_bytes(numel) * layout.num_tiles(
            numel
        )

    def mask_length(self, numel: int) -> int:
        return layout.num_mask_words(numel)

    def encode(self, nonzero: Tensor) -> Tensor:
        words = layout.num_mask_words(nonzero.numel())
        bits = nonzero.new_zeros(words * layout.WORD_BITS, dtype=torch.int64)
        bits[: nonzero.numel()] = nonzero
        weights = 1 << torch.arange(layout.WORD_BITS, device=nonzero.device)
        return _as_int32((bits.view(words, layout.WORD_BITS) * weights).sum(1))

    def positions(self, mask: Tensor, numel: int) -> Tensor:
        shifts = torch.arange(layout.WORD_BITS, device=mask.device, dtype=torch.int32)
        bits = (mask[:, None] >> shifts) & 1
        return bits.reshape(-1)[:numel].nonzero().view(-1)

    def check(self, mask: Tensor, numel: int) -> None:
        words = layout.num_mask_words(numel)
        if mask.dtype != torch.int32 or mask.shape != (words,):
            raise ValueError(
                f"mask: got {mask.dtype} of shape {tuple(mask.shape)}, "
                f"a flat mask of {numel} elements is torch.int32 of shape ({words},)"
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


def _as_int32(values: Tensor) -> Tensor:
    """Unsigned 32-bit values held in int64, as int32 of the same bits."""
    return torch.where(values > layout.INT32_MAX, values - (1 << 32), values).to(torch.int32)


CODING = FlatSupport()

# --------------------------------------------------------------------------------- CPU


@numba_jit
def _cpu_positions(mask, tile, numel, index):
    count = 0
    first = tile * (TILE // 32)
    for w in range(first, min(first + TILE // 32, mask.size)):
        word = mask[w]
        if word == 0:
            continue
        base = (w - first) * 32
        # Branchless: activations are too irregular for branch prediction.
        for bit in range(32):
            index[count] = base + bit
            count += (word >> np.uint32(bit)) & np.uint32(1)
    return count


@numba_jit
def _cpu_store(mask, tile, numel, nonzero):
    first = tile * (TILE // 32)
    for w in range(first, min(first + TILE // 32, mask.size)):
        base = (w - first) * 32
        word = np.uint32(0)
        for bit in range(32):
            word |= np.uint32(nonzero[base + bit]) << np.uint32(bit)
        mask[w] = word


# ------------------------------------------------------------------------------ Triton
# A tile is seen as [TILE / 32, 32]: one row a word of the mask.


@triton_jit
def _index(tile, numel, TILE: tl.constexpr):
    index = tl.arange(0, TILE // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    remaining = numel - tile.to(tl.int64) * TILE
    return index, index < remaining


@triton_jit
def _store(mask_ptr, tile, numel, nonzero, TILE: tl.constexpr):
    lanes = tl.arange(0, 32)[None, :]
    words = tl.sum(nonzero.to(tl.int32) << lanes, axis=1)
    rows = tl.arange(0, TILE // 32)
    remaining = (numel + 31) // 32 - tile.to(tl.int64) * (TILE // 32)
    tl.store(mask_ptr + tile.to(tl.int64) * (TILE // 32) + rows, words, mask=rows < remaining)
    return tl.sum(tl.sum(nonzero.to(tl.int32), axis=1), axis=0)


@triton_jit
def _popcount(x):
    # Portable population count of 32-bit words, in shifts that keep the sign out of the way.
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 0xFF


@triton_jit
def _locate(mask_ptr, tile, numel, TILE: tl.constexpr):
    lanes = tl.arange(0, 32)[None, :]
    rows = tl.arange(0, TILE // 32)
    remaining = (numel + 31) // 32 - tile.to(tl.int64) * (TILE // 32)
    words = tl.load(
        mask_ptr + tile.to(tl.int64) * (TILE // 32) + rows, mask=rows < remaining, other=0
    )
    counts = _popcount(words)
    before = (tl.cumsum(counts, axis=0) - counts)[:, None]
    nonzero = ((words[:, None] >> lanes) & 1) != 0
    rank = before + _popcount(words[:, None] & ((1 << lanes) - 1))
    index = rows[:, None] * 32 + lanes
    inside = index < numel - tile.to(tl.int64) * TILE
    return index, inside, nonzero, rank
