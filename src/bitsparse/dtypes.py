"""The dtypes that can be stored, and their bit patterns as integers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_PATTERN_BY_SIZE = {4: torch.int32, 2: torch.int16, 1: torch.uint8}

SUPPORTED_DTYPES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name)
    for name in (
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    )
    if hasattr(torch, name)
)
"""Dtypes that :func:`bitsparse.compress` accepts."""

COMPUTE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that a compressed feed-forward computes in."""


def pattern_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integer dtype that holds one bit pattern of ``dtype``."""
    return _PATTERN_BY_SIZE[dtype.itemsize]


def bit_width(dtype: torch.dtype) -> int:
    """Bits of one element of ``dtype``."""
    return 8 * dtype.itemsize


_MANTISSA_BITS = {"float32": 23, "bfloat16": 7, "float16": 10, "e4m3": 3, "e5m2": 2}


@cache
def mantissa_bits(dtype: torch.dtype) -> int:
    """Bits of the mantissa that are stored; sign and exponent are the rest."""
    return next(bits for name, bits in _MANTISSA_BITS.items() if name in str(dtype))


def exponent_bits(dtype: torch.dtype) -> int:
    """Bits of the exponent field."""
    return bit_width(dtype) - 1 - mantissa_bits(dtype)


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """A readable list for error messages."""
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def to_patterns(x: Tensor) -> Tensor:
    """The bit patterns of ``x`` in row-major order, 1-d; a view where ``x`` is contiguous."""
    return x.detach().resolve_neg().contiguous().view(pattern_dtype(x.dtype)).reshape(-1)


def from_patterns(patterns: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """The inverse of :func:`to_patterns`; shares memory with ``patterns``."""
    return patterns.view(dtype).view(shape)
