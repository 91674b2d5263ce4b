"""Offset tables: for every tile, how much of a stream belongs to the tiles before it.

A table of ``tiles`` tiles has ``tiles + 1`` entries, the last of which is the total. Each 16
entries take 10 32-bit words: the first entry in two words (low, high), then for each of the 16 its
distance from the first, 16 bits each, two in a word, the first one lowest. Entries after the total
repeat it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitsparse import layout
from bitsparse.backends.optional import tl, triton_jit
from bitsparse.codings import words
from bitsparse.layout import TABLE_TILES, TABLE_WORDS


def build(counts: Tensor) -> Tensor:
    """``counts``: int64 ``[tiles]``, each at most ``TILE``. Returns int32 ``[table_words]``."""
    blocks = layout.ceil_div(counts.numel() + 1, TABLE_TILES)
    entries = counts.new_zeros(blocks * TABLE_TILES)
    ends = counts.cumsum(0)
    entries[1 : counts.numel() + 1] = ends
    if counts.numel():
        entries[counts.numel() + 1 :] = ends[-1]
    entries = entries.view(blocks, TABLE_TILES)
    base = entries[:, :1]
    halves = (entries - base).view(blocks, TABLE_TILES // 2, 2)
    table = torch.cat([base & 0xFFFFFFFF, base >> 32, halves[..., 0] | halves[..., 1] << 16], dim=1)
    return words.to_int32(table.reshape(-1))


def read(table: Tensor, tiles: int) -> Tensor:
    """The entries of a table: int64 ``[tiles + 1]``."""
    blocks = table.view(-1, TABLE_WORDS).to(torch.int64)
    base = (blocks[:, 0] & 0xFFFFFFFF) | blocks[:, 1] << 32
    pairs = blocks[:, 2:]
    distance = torch.stack([pairs & 0xFFFF, (pairs >> 16) & 0xFFFF], dim=2).view(-1, TABLE_TILES)
    return (base[:, None] + distance).view(-1)[: tiles + 1]


def check(name: str, table: Tensor | None, tiles: int, limit: int, total: int) -> Tensor:
    """The entries of a table of unknown origin: int64 ``[tiles + 1]``, from 0 to ``total``.

    Raises:
        ValueError: it is not a table of ``tiles`` tiles that have up to ``limit`` and together
            ``total``.
    """
    words.check_buffer(name, table, torch.int32, layout.table_words(tiles))
    assert table is not None
    entries = read(table, tiles)
    counts = entries[1:] - entries[:-1]
    if int(counts.min()) < 0 or int(counts.max()) > limit or int(entries[0]) != 0:
        raise ValueError(f"{name}: got a tile that has too much; allowed: 0 to {limit}, in order")
    if int(entries[-1]) != total:
        raise ValueError(f"{name}: got a total of {int(entries[-1])}, allowed: {total}")
    if not torch.equal(table, build(counts)):
        raise ValueError(f"{name}: got a table that is not written as the format says")
    return entries


def between(entries: Tensor, first: int, last: int) -> tuple[slice, Tensor]:
    """The tiles of the items ``[first, last)``, and where their items start, counted from
    ``first``: int64 ``[tiles + 1]``. ``entries`` as :func:`read` gives them."""
    ends = torch.tensor([first, last - 1], device=entries.device)
    low, high = torch.searchsorted(entries, ends, right=True) - 1
    tiles = slice(int(low), int(high) + 1)
    return tiles, entries[tiles.start : tiles.stop + 1].clamp(first, last) - first


# ------------------------------------------------------------------------------ Triton


@triton_jit
def entry(table_ptr, tile):
    """Entry ``tile`` (a scalar) of a table: int64."""
    block = table_ptr + (tile >> 4).to(tl.int64) * 10
    low = tl.load(block).to(tl.uint32, bitcast=True).to(tl.int64)
    high = tl.load(block + 1).to(tl.int64)
    pair = tl.load(block + 2 + ((tile & 15) >> 1))
    return (low | (high << 32)) + ((pair >> ((tile & 1) * 16)) & 0xFFFF).to(tl.int64)
