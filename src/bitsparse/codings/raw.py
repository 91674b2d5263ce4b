"""Value coding "raw": the bit patterns themselves, full width, in enumeration order."""

from __future__ import annotations

import torch
from torch import Tensor

from bitsparse import dtypes
from bitsparse.backends.optional import tl, triton_jit


class RawValues:
    """See the module's description."""

    name = "raw"

    def applies(self, dtype: torch.dtype, any_sign: bool) -> bool:
        return True

    def stream_length(self, count: int, dtype: torch.dtype) -> int:
        return count

    def stream_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtypes.pattern_dtype(dtype)

    def width(self, dtype: torch.dtype) -> int:
        return dtypes.bit_width(dtype)

    def encode(self, patterns: Tensor, dtype: torch.dtype) -> Tensor:
        return patterns

    def decode(self, stream: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return stream[:count]

    @property
    def triton_load(self) -> object:
        return _load


CODING = RawValues()


@triton_jit
def _load(stream_ptr, rank, mask, WIDTH: tl.constexpr):
    return tl.load(stream_ptr + rank, mask=mask, other=0).to(tl.int32)
