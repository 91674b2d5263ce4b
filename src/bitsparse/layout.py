"""The storage layout in plain arithmetic: no tensors, no device code.

Every backend and the documentation can be read against this page.

A tensor is seen as a matrix: its last dimension are the columns (neurons), all others together the
rows (tokens). Rows are taken in blocks of ``height``; the *slots* enumerate block by block, in a
block column by column, in a column row by row. With a height of 64, eight consecutive slots are
eight consecutive tokens of one neuron, which tend to fire together; with a height of 1 the slots
are the elements in row-major order. Slots of rows that the last block lacks are empty.

The slots are cut into *tiles* of ``TILE``; a tile is 64 *groups* of 64 slots, a group is eight
*buckets* of eight. A *support coding* says which slots are nonzero (their bit pattern is not zero),
a *value coding* stores the patterns of these in slot order. *Offset tables* say, for every tile,
how much of a stream belongs to the tiles before it, so that tiles can be decoded independently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

TILE = 4096
"""Slots in a tile."""

GROUP = 64
"""Slots in a group: one column of a block of the greatest height."""

BUCKET = 8
"""Slots in a bucket: one byte of a mask."""

WORD_BITS = 32
"""Bits in a word of a mask or of a packed value stream; bit 0 is the least significant."""

TABLE_TILES = 16
"""Tiles that share a 64-bit base in an offset table; what precedes a tile within them is less than
``16 * TILE`` and fits 16 bits."""

TABLE_WORDS = 10
"""32-bit words that these take: base (low, high), then 16 numbers of 16 bits, first one lowest."""

_MAX_PADDING = 1.25  # rows of whole blocks per row, at most
_MAX_COLUMNS = 2**24  # with blocks: addresses inside a tile fit in 32 bits


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


class Geometry(NamedTuple):
    """How the elements of a tensor become slots."""

    rows: int
    cols: int
    height: int
    """Rows in a block: ``GROUP`` or 1."""

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def blocks(self) -> int:
        return ceil_div(self.rows, self.height)

    @property
    def slots(self) -> int:
        return self.blocks * self.height * self.cols

    @property
    def tiles(self) -> int:
        """Tiles, of which the last one may be partial."""
        return ceil_div(self.slots, TILE)

    @property
    def mask_words(self) -> int:
        """Words of one bit a slot: slot ``i`` is bit ``i % 32`` of word ``i // 32``."""
        return ceil_div(self.slots, WORD_BITS)


def geometry(shape: Sequence[int]) -> Geometry:
    """The geometry of a contiguous tensor of this shape.

    Blocks of 64 rows where whole blocks take at most a quarter more rows than there are (any
    number from 205 on), else row-major order.
    """
    cols = shape[-1] if len(shape) else 1
    rows = math.prod(shape[:-1]) if len(shape) else 1
    blocked = rows > 0 and ceil_div(rows, GROUP) * GROUP <= _MAX_PADDING * rows
    return Geometry(rows, cols, GROUP if blocked and 0 < cols <= _MAX_COLUMNS else 1)


def table_words(tiles: int) -> int:
    """Words of an offset table: an entry for every tile, and one more, the total."""
    return TABLE_WORDS * ceil_div(tiles + 1, TABLE_TILES)


def packed_words(count: int, width: int) -> int:
    """Words of ``count`` codes; code ``i`` is bits ``[i * width, (i + 1) * width)``."""
    return ceil_div(count * width, WORD_BITS)
