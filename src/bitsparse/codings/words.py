"""Bits in 32-bit words, least significant first: the reference that codings share."""

from __future__ import annotations

import torch
from torch import Tensor

from bitsparse import layout


def pack(bits: Tensor) -> Tensor:
    """``bits``: 0/1 of any integer dtype or bool, 1-d. Returns int32 words, zero-padded."""
    words = layout.ceil_div(bits.numel(), layout.WORD_BITS)
    padded = bits.new_zeros(words * layout.WORD_BITS, dtype=torch.int64)
    padded[: bits.numel()] = bits
    weights = 1 << torch.arange(layout.WORD_BITS, device=bits.device)
    values = (padded.view(words, layout.WORD_BITS) * weights).sum(1)
    # Unsigned 32-bit values, held in int64, as int32 of the same bits.
    return torch.where(values > layout.INT32_MAX, values - (1 << 32), values).to(torch.int32)


def unpack(words: Tensor, count: int) -> Tensor:
    """The inverse of :func:`pack`: int32 0/1 ``[count]``."""
    shifts = torch.arange(layout.WORD_BITS, device=words.device, dtype=torch.int32)
    return ((words[:, None] >> shifts) & 1).reshape(-1)[:count]
