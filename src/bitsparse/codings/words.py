"""Bits in 32-bit words, least significant first: what codings share."""

from __future__ import annotations

import torch
from torch import Tensor

from bitsparse import layout
from bitsparse.backends.optional import tl, triton_jit

STEP = 1 << 18
"""Codes that are checked at once; a multiple of 32."""


def pack(bits: Tensor) -> Tensor:
    """``bits``: 0/1 of any integer dtype or bool, 1-d. Returns int32 words, zero-padded."""
    words = layout.ceil_div(bits.numel(), layout.WORD_BITS)
    padded = bits.new_zeros(words * layout.WORD_BITS, dtype=torch.int64)
    padded[: bits.numel()] = bits
    weights = 1 << torch.arange(layout.WORD_BITS, device=bits.device)
    return to_int32((padded.view(words, layout.WORD_BITS) * weights).sum(1))


def unpack(words: Tensor, count: int) -> Tensor:
    """The inverse of :func:`pack`: int32 0/1 ``[count]``."""
    shifts = torch.arange(layout.WORD_BITS, device=words.device, dtype=torch.int32)
    return ((words[:, None] >> shifts) & 1).reshape(-1)[:count]


def to_int32(words: Tensor) -> Tensor:
    """Unsigned 32-bit numbers, held in int64, as int32 of the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_bytes(stream: Tensor) -> Tensor:
    """uint8 ``[count]`` to int64 0/1 ``[count, 8]``."""
    shifts = torch.arange(8, device=stream.device)
    return (stream.to(torch.int64)[:, None] >> shifts) & 1


def pack_codes(codes: Tensor, width: int) -> Tensor:
    """Codes (non-negative integers ``[count]`` of ``width`` bits) one after the other in words."""
    shifts = torch.arange(width, device=codes.device)
    return pack(((codes.to(torch.int64)[:, None] >> shifts) & 1).reshape(-1))


def unpack_codes(words: Tensor, count: int, width: int) -> Tensor:
    """The inverse of :func:`pack_codes`: int64 ``[count]``."""
    return codes_between(words, 0, count, width).to(torch.int64)


def codes_between(words: Tensor, first: int, last: int, width: int) -> Tensor:
    """The codes ``[first, last)`` of a stream: int32. ``first`` is a multiple of 32."""
    part = words[first * width // 32 : layout.packed_words(last, width)].to(torch.int64)
    blocks = layout.ceil_div(last - first, 32)  # 32 codes fill whole words
    part = torch.nn.functional.pad(part & 0xFFFFFFFF, (0, blocks * width - part.numel()))
    part = part.view(blocks, width)
    bit = torch.arange(0, 32 * width, width, device=words.device)
    at = bit >> 5
    high = part.index_select(1, (at + 1).clamp(max=width - 1))
    both = part.index_select(1, at) | high << 32
    codes = (both >> (bit & 31)) & ((1 << width) - 1)
    return codes.to(torch.int32).view(-1)[: last - first]


def count_bits(words: Tensor) -> Tensor:
    """How many bits are set in each of int32 or uint8 ``[count]``: int64."""
    table = torch.tensor([byte.bit_count() for byte in range(256)], device=words.device)
    return table[words.view(torch.uint8).to(torch.int32)].view(-1, words.element_size()).sum(1)


def check_buffer(name: str, got: Tensor | None, dtype: torch.dtype, length: int) -> None:
    """Raise ValueError unless ``got`` is a 1-d tensor of this dtype and length."""
    if got is None or got.dtype != dtype or got.shape != (length,):
        found = "nothing" if got is None else f"{got.dtype} of shape {tuple(got.shape)}"
        raise ValueError(f"{name}: got {found}, allowed: {dtype} of shape ({length},)")


def check_padding(name: str, words: Tensor, bits: int) -> None:
    """Raise ValueError unless the bits after the first ``bits`` are zero."""
    tail = bits % layout.WORD_BITS
    if tail and (int(words[-1]) & 0xFFFFFFFF) >> tail:
        raise ValueError(f"{name}: bits after the last one are set")


# ------------------------------------------------------------------------------ Triton


@triton_jit
def popcount(x):
    # Population count of int32. In just this form LLVM recognises it and emits the instruction.
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton_jit
def left(count, most):
    """``count`` (int64 scalar) but at most ``most``, as int32.

    What indices within a tile are compared with: 32-bit comparisons are cheaper, and of 64-bit ones
    Triton 3.6 makes wrong addresses where a load and a store have them in common.
    """
    return tl.minimum(count, most).to(tl.int32)


@triton_jit
def ranks(words):
    """Ranks ``[64, 2, 32]`` of the set bits of a tile's words ``[64, 2]``, in slot order."""
    counts = popcount(words)
    group = tl.sum(counts, axis=1)
    before = (tl.cumsum(group, axis=0) - group)[:, None] + (tl.cumsum(counts, axis=1) - counts)
    lower = words[:, :, None] & ((1 << tl.arange(0, 32)[None, None, :]) - 1)
    return before[:, :, None] + popcount(lower)
