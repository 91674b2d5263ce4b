"""The storage layout in plain arithmetic: no tensors, no device code.

Every backend and the documentation can be read against this page.

A tensor of ``n`` elements is enumerated in row-major order and cut into *tiles* of ``TILE``
consecutive elements. A *support coding* says where the nonzeros (elements whose bit pattern is not
zero) are and in which order they are enumerated; a *value coding* stores their bit patterns in that
order. The *offsets* give, for every tile, the number of nonzeros in the tiles before it, so that a
tile can be decoded without reading any other.
"""

from __future__ import annotations

TILE = 4096
"""Elements in a tile. 4 bytes of offset a tile cost 1/128 bit an element."""

WORD_BITS = 32
"""Bits in a word of a mask or of a packed value stream; bit 0 is the least significant."""

INT32_MAX = 2**31 - 1


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def num_tiles(numel: int) -> int:
    """Tiles of a tensor of ``numel`` elements; the last one may be partial."""
    return ceil_div(numel, TILE)


def num_mask_words(numel: int) -> int:
    """Words of a one-bit-per-element mask: element ``i`` is bit ``i % 32`` of word ``i // 32``."""
    return ceil_div(numel, WORD_BITS)


def offset_bytes(numel: int) -> int:
    """Bytes of one tile offset: 4, or 8 where a rank may pass 2**31 - 1."""
    return 4 if numel <= INT32_MAX else 8


def num_packed_words(count: int, width: int) -> int:
    """Words of ``count`` values; value ``i`` is bits ``[i * width, (i + 1) * width)``."""
    return ceil_div(count * width, WORD_BITS)
