"""Value coding "unsigned": the bit patterns without their sign bit: 31, 15 or 7 bits.

Applies only where no sign bit is set, which is found out from the data. Value ``i`` occupies bits
``[i * width, (i + 1) * width)`` of a stream of 32-bit words, least significant bit first; the bits
after the last value are zero. 32 values fill ``width`` whole words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitsparse import dtypes, layout
from bitsparse.backends.optional import tl, triton_jit
from bitsparse.codings import words


class UnsignedValues:
    """See the module's description."""

    name = "unsigned"

    def applies(self, dtype: torch.dtype, any_sign: bool) -> bool:
        return not any_sign

    def stream_length(self, count: int, dtype: torch.dtype) -> int:
        return layout.num_packed_words(count, self.width(dtype))

    def stream_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int32

    def width(self, dtype: torch.dtype) -> int:
        return dtypes.bit_width(dtype) - 1

    def encode(self, patterns: Tensor, dtype: torch.dtype) -> Tensor:
        shifts = torch.arange(self.width(dtype), device=patterns.device)
        bits = (patterns.to(torch.int64)[:, None] >> shifts) & 1
        return words.pack(bits.reshape(-1))

    def decode(self, stream: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        width = self.width(dtype)
        bits = words.unpack(stream, count * width).view(count, width)
        weights = 1 << torch.arange(width, device=stream.device)
        return (bits * weights).sum(1).to(dtypes.pattern_dtype(dtype))

    @property
    def triton_load(self) -> object:
        return _load


CODING = UnsignedValues()


@triton_jit
def _load(stream_ptr, rank, mask, WIDTH: tl.constexpr):
    # A value spans at most two words. Ranks are relative to a nearby whole word (see
    # `_load_values` of the backend), so bit addresses fit in 32 bits.
    bit = rank * WIDTH
    word = bit >> 5
    shift = bit & 31
    low = tl.load(stream_ptr + word, mask=mask, other=0).to(tl.uint32, bitcast=True)
    spills = shift + WIDTH > 32
    high = tl.load(stream_ptr + word + 1, mask=mask & spills, other=0).to(tl.uint32, bitcast=True)
    # `& 31`: a shift by 32 is undefined. It would occur only where nothing spills and high is 0.
    upper = high << ((32 - shift) & 31).to(tl.uint32)
    value = (low >> shift.to(tl.uint32)) | upper
    return (value & ((1 << WIDTH) - 1)).to(tl.int32, bitcast=True)
