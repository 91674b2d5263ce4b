"""Value codings "raw" and "unsigned": the lowest bits of the patterns.

"raw" stores the patterns themselves. "unsigned" drops the sign bit, and applies only where none is
set, which is found out from the data: value ``i`` occupies bits ``[i * width, (i + 1) * width)`` of
a stream of 32-bit words, width being 31, 15 or 7, least significant bit first; the bits after the
last value are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitsparse import dtypes, layout
from bitsparse.codings import words
from bitsparse.codings.base import Stream


@dataclass(frozen=True)
class PlainValues:
    """See the module's description."""

    name: str
    cost: int
    signed: bool
    field: int = 0

    def applies(self, dtype: torch.dtype, any_sign: bool) -> bool:
        return self.signed or not any_sign

    def width(self, dtype: torch.dtype) -> int:
        return dtypes.bit_width(dtype) - (not self.signed)

    def nbytes(self, count: int, dtype: torch.dtype, tiles: int, escapes: int) -> int:
        if self.signed:
            return count * dtype.itemsize
        return 4 * layout.packed_words(count, self.width(dtype))

    def encode(self, patterns: Tensor, dtype: torch.dtype, tile_of: Tensor, tiles: int) -> Stream:
        if self.signed:
            return Stream(self, patterns)
        return Stream(self, words.pack_codes(patterns, self.width(dtype)))

    def decode(self, stream: Stream, dtype: torch.dtype, tile_of: Tensor, tiles: int) -> Tensor:
        if self.signed:
            return stream.values
        codes = words.unpack_codes(stream.values, tile_of.numel(), self.width(dtype))
        return codes.to(dtypes.pattern_dtype(dtype))

    def check(self, stream: Stream, dtype: torch.dtype, starts: Tensor) -> None:
        if self.signed:
            zeros = stream.values.numel() - int(torch.count_nonzero(stream.values))
        else:
            count, width, zeros = int(starts[-1]), self.width(dtype), 0
            words.check_padding("values", stream.values, count * width)
            for first in range(0, count, words.STEP):
                last = min(first + words.STEP, count)
                codes = words.codes_between(stream.values, first, last, width)
                zeros += codes.numel() - int(torch.count_nonzero(codes))
        if zeros:
            raise ValueError("values: got a zero, which is not stored")


CODINGS = (PlainValues("raw", 0, signed=True), PlainValues("unsigned", 1, signed=False))
