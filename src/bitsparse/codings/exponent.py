"""Value codings "exponent3" and "exponent4": mantissas whole, exponents in 3 or 4 bits.

Every tile keeps the largest exponent field of its values (0 if it has none) as one byte. A value is
a code: the mantissa; then, in 3 or 4 bits, how far its exponent lies below the tile's largest, or
all ones if that number or a greater one; the codings that start with "signed" keep the sign bit
on top. Exponents behind an all-ones field are *escapes*: one byte each, in slot order, in a stream
of their own with an offset table. Codes are packed as 32-bit words, least significant bit first;
the bits after the last code are zero.

Of trained networks' activations 4 bits leave less than 1 in 2,000 to escapes, 3 bits 4 to 10 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitsparse import dtypes, layout
from bitsparse.codings import tables, words
from bitsparse.codings.base import Stream

FIELDS = (4, 3)
"""Widths of the exponent field that there are codings for, in the order of the counts' rows."""


@dataclass(frozen=True)
class ExponentValues:
    """See the module's description."""

    name: str
    cost: int
    field: int
    signed: bool

    def applies(self, dtype: torch.dtype, any_sign: bool) -> bool:
        fits = self.field < dtypes.exponent_bits(dtype)
        return fits and (self.signed or not any_sign)

    def width(self, dtype: torch.dtype) -> int:
        return dtypes.mantissa_bits(dtype) + self.field + self.signed

    def nbytes(self, count: int, dtype: torch.dtype, tiles: int, escapes: int) -> int:
        codes = 4 * layout.packed_words(count, self.width(dtype))
        return codes + tiles + escapes + 4 * layout.table_words(tiles)

    def encode(self, patterns: Tensor, dtype: torch.dtype, tile_of: Tensor, tiles: int) -> Stream:
        mantissa, exponent, sign = _split(patterns, dtype)
        largest = torch.zeros(tiles, dtype=torch.int64, device=patterns.device)
        largest.scatter_reduce_(0, tile_of, exponent, "amax")
        distance = largest[tile_of] - exponent
        escape = (1 << self.field) - 1
        escapes = distance >= escape
        m = dtypes.mantissa_bits(dtype)
        codes = mantissa | distance.clamp(max=escape) << m | sign << (m + self.field)
        counts = torch.bincount(tile_of[escapes], minlength=tiles)
        return Stream(
            self,
            words.pack_codes(codes, self.width(dtype)),
            largest.to(torch.uint8),
            exponent[escapes].to(torch.uint8),
            tables.build(counts),
        )

    def decode(self, stream: Stream, dtype: torch.dtype, tile_of: Tensor, tiles: int) -> Tensor:
        assert stream.exponents is not None and stream.escapes is not None
        codes = words.unpack_codes(stream.values, tile_of.numel(), self.width(dtype))
        m, e = dtypes.mantissa_bits(dtype), dtypes.exponent_bits(dtype)
        escape = (1 << self.field) - 1
        distance = (codes >> m) & escape
        exponent = stream.exponents.to(torch.int64)[tile_of] - distance
        exponent[distance == escape] = stream.escapes.to(torch.int64)
        sign = codes >> (m + self.field)
        patterns = (codes & ((1 << m) - 1)) | exponent << m | sign << (m + e)
        return _as_patterns(patterns, dtype)

    def check(self, stream: Stream, dtype: torch.dtype, starts: Tensor) -> None:
        m, e = dtypes.mantissa_bits(dtype), dtypes.exponent_bits(dtype)
        if self.field >= e:
            raise ValueError(f"values: got {self.name!r} for {dtype}, whose exponents are narrower")
        tiles, count, width = starts.numel() - 1, int(starts[-1]), self.width(dtype)
        words.check_padding("values", stream.values, count * width)
        words.check_buffer("exponents", stream.exponents, torch.uint8, tiles)
        escapes = stream.escapes
        if escapes is None or escapes.dtype != torch.uint8 or escapes.dim() != 1:
            raise ValueError("escapes: got another tensor, allowed: torch.uint8, one dimension")
        ends = tables.check(
            "escape_offsets", stream.escape_offsets, tiles, layout.TILE, escapes.numel()
        )
        assert stream.exponents is not None
        for exponents in (stream.exponents, escapes):
            if exponents.numel() and int(exponents.max()) >= 1 << e:
                raise ValueError(f"exponents, escapes: got one that {dtype} does not have")
        limit, done = (1 << self.field) - 1, 0
        found = torch.zeros_like(starts[1:])
        for first in range(0, count, words.STEP):
            last = min(first + words.STEP, count)
            codes = words.codes_between(stream.values, first, last, width)
            distance = (codes >> m) & limit
            escaped = distance == limit
            here, bounds = tables.between(starts, first, last)
            upto = torch.nn.functional.pad(escaped.cumsum(0), (1, 0))[bounds]
            found[here] += upto[1:] - upto[:-1]
            begin, done = done, done + int(upto[-1])
            if done > escapes.numel():
                raise ValueError("escapes: got fewer than the codes say")
            largest = stream.exponents[here].to(torch.int32)
            exponent = torch.repeat_interleave(largest, bounds[1:] - bounds[:-1]) - distance
            exponent.masked_scatter_(escaped, escapes[begin:done].to(torch.int32))
            rest = (codes & ((1 << m) - 1)) | codes >> (m + self.field)
            if bool(((exponent | rest) <= 0).any()):
                raise ValueError("values: got a zero, or an exponent below 0; neither is stored")
        if not torch.equal(found, ends[1:] - ends[:-1]):
            raise ValueError("escape_offsets: got a table that does not say where the codes escape")


def _split(patterns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Mantissa, exponent and sign of patterns: int64."""
    m, e = dtypes.mantissa_bits(dtype), dtypes.exponent_bits(dtype)
    bits = patterns.to(torch.int64)
    return bits & ((1 << m) - 1), (bits >> m) & ((1 << e) - 1), (bits >> (m + e)) & 1


def _as_patterns(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Unsigned numbers, in int64, as patterns of the same bits."""
    if dtype.itemsize > 1:
        sign = 1 << (dtypes.bit_width(dtype) - 1)
        bits = torch.where(bits >= sign, bits - 2 * sign, bits)
    return bits.to(dtypes.pattern_dtype(dtype))


CODINGS = tuple(
    ExponentValues(f"{'signed_' if signed else ''}exponent{field}", cost, field, signed)
    for field, cost in zip(FIELDS, (2, 3), strict=True)
    for signed in (False, True)
)
