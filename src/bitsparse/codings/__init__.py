"""Codings of positions (supports) and of values, one file each, registered here.

To add one: write ``codings/<name>.py`` with a ``CODING`` object (see :mod:`bitsparse.codings.base`)
and add its name to the list below.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

import torch

from bitsparse.codings.base import SupportCoding, ValueCoding

SUPPORTS = ("flat",)
VALUES = ("raw", "unsigned")


@cache
def support_coding(name: str) -> SupportCoding:
    """The support coding of that name; its file is imported at first use."""
    return import_module(f"bitsparse.codings.{name}").CODING  # type: ignore[no-any-return]


@cache
def value_coding(name: str) -> ValueCoding:
    """The value coding of that name; its file is imported at first use."""
    return import_module(f"bitsparse.codings.{name}").CODING  # type: ignore[no-any-return]


def stream_nbytes(coding: ValueCoding, count: int, dtype: torch.dtype) -> int:
    """Bytes of ``count`` values of ``dtype``."""
    return coding.stream_length(count, dtype) * coding.stream_dtype(dtype).itemsize


def applicable_values(dtype: torch.dtype, any_sign: bool) -> list[ValueCoding]:
    """The value codings that keep such values without loss."""
    return [c for c in map(value_coding, VALUES) if c.applies(dtype, any_sign)]


def smallest_values(count: int, dtype: torch.dtype, any_sign: bool) -> ValueCoding:
    """The applicable value coding that takes the fewest bytes."""
    return min(applicable_values(dtype, any_sign), key=lambda c: stream_nbytes(c, count, dtype))


def check_support_name(name: str) -> None:
    """Raise ValueError unless ``name`` is "auto" or a registered support coding."""
    if name not in ("auto", *SUPPORTS):
        raise ValueError(f"support: got {name!r}, allowed: {('auto', *SUPPORTS)}")


def check_values_name(name: str) -> None:
    """Raise ValueError unless ``name`` is "auto", "dense" or a registered value coding."""
    if name not in ("auto", "dense", *VALUES):
        raise ValueError(f"values: got {name!r}, allowed: {('auto', 'dense', *VALUES)}")


__all__ = [
    "SUPPORTS",
    "VALUES",
    "SupportCoding",
    "ValueCoding",
    "applicable_values",
    "check_support_name",
    "check_values_name",
    "smallest_values",
    "stream_nbytes",
    "support_coding",
    "value_coding",
]
