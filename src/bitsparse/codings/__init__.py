"""Codings of positions (supports) and of values, registered here, and the choice among them.

To add one: write a file with a ``CODING`` (support) or ``CODINGS`` (values) object, see
:mod:`bitsparse.codings.base`, and add the names to the tables below.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch

from bitsparse.codings.base import Mask, Stream, SupportCoding, ValueCoding
from bitsparse.layout import Geometry, table_words

SUPPORTS = ("full", "flat", "bucketed")

_VALUE_FILES = {
    "raw": "plain",
    "unsigned": "plain",
    "exponent4": "exponent",
    "signed_exponent4": "exponent",
    "exponent3": "exponent",
    "signed_exponent3": "exponent",
}
VALUES = tuple(_VALUE_FILES)

FAMILIES = {"exponent": tuple(name for name in VALUES if "exponent" in name)}
"""Names that stand for one of several value codings, as the policy prefers."""

POLICIES = ("fast", "balanced", "small")

_TOLERANCE = 1.05
"""How many times the smallest size "balanced" accepts for codings that take less time."""


@cache
def support_coding(name: str) -> SupportCoding:
    """The support coding of that name; its file is imported at first use."""
    return import_module(f"bitsparse.codings.{name}").CODING  # type: ignore[no-any-return]


@cache
def value_coding(name: str) -> ValueCoding:
    """The value coding of that name; its file is imported at first use."""
    module = import_module(f"bitsparse.codings.{_VALUE_FILES[name]}")
    found: ValueCoding = next(c for c in module.CODINGS if c.name == name)
    return found


@dataclass(frozen=True)
class StreamCounts:
    """What the first pass found out about the values of one stream."""

    any_sign: bool
    escapes: dict[int, int]
    """By width of the exponent field, the number of escapes; empty where they were not counted."""


@dataclass(frozen=True)
class Counts:
    """What the first pass found out: exact numbers, from which sizes follow."""

    geometry: Geometry
    dtype: torch.dtype
    nnz: int
    """Positions whose values are kept."""
    bucket_bytes: tuple[int, ...]
    """For each mask, bytes of its nonempty groups and buckets; empty where not counted."""
    streams: tuple[StreamCounts, ...]

    def support_nbytes(self, coding: SupportCoding) -> int:
        """Bytes of the masks and of the table of the values' offsets."""
        masks = sum(coding.nbytes(self.geometry, b) for b in self.bucket_bytes)
        return masks + 4 * table_words(self.geometry.tiles)

    def values_nbytes(self, coding: ValueCoding, stream: int) -> int:
        """Bytes of one stream of values."""
        escapes = self.streams[stream].escapes.get(coding.field, 0)
        return coding.nbytes(self.nnz, self.dtype, self.geometry.tiles, escapes)


class Choice(NamedTuple):
    """Codings for the positions and for each stream of values."""

    support: SupportCoding
    values: tuple[ValueCoding, ...]
    nbytes: int


def choose(counts: Counts, policy: str, support: str = "auto", values: str = "auto") -> Choice:
    """The codings that suit these counts best; exact sizes decide, nothing is sampled.

    "small": the smallest. "balanced": the fastest of those within 5 % of the smallest. "fast": the
    smallest of flat or full masks with raw or unsigned values. A name given for ``support`` or
    ``values`` (a coding's or a family's) leaves only these, whatever the policy.

    Raises:
        ValueError: a coding asked for by name cannot hold the values.
    """
    supports = [
        c
        for c in map(support_coding, _wanted(support, SUPPORTS, policy, "bucketed"))
        # Of two masks (dReLU) neither is full where both together are.
        if c.applies(counts.geometry, counts.nnz) and (c.cost or len(counts.bucket_bytes) == 1)
    ]
    if not supports:
        raise ValueError(f"support: got {support!r}, but x has elements that are zero")
    per_stream = []
    for stream in counts.streams:
        every = [c for c in map(value_coding, VALUES) if c.applies(counts.dtype, stream.any_sign)]
        wanted = _wanted(values, VALUES, policy, *FAMILIES["exponent"])
        fits = [c for c in every if c.name in wanted]
        if not fits:
            why = ", some of which have their sign bit set" if stream.any_sign else ""
            raise ValueError(
                f"values: got {values!r}, which cannot hold these values of {counts.dtype}"
                f"{why}; allowed: 'auto', " + ", ".join(repr(c.name) for c in every)
            )
        per_stream.append(fits)
    sizes = {c.name: counts.support_nbytes(c) for c in supports}
    value_sizes = [
        {c.name: counts.values_nbytes(c, i) for c in fits} for i, fits in enumerate(per_stream)
    ]
    choices = [
        Choice(s, v, sizes[s.name] + sum(value_sizes[i][c.name] for i, c in enumerate(v)))
        for s in supports
        for v in itertools.product(*per_stream)
    ]
    smallest = min(c.nbytes for c in choices)
    limit = smallest * (_TOLERANCE if policy == "balanced" else 1)
    small_enough = [c for c in choices if c.nbytes <= limit]
    return min(small_enough, key=lambda c: (_cost(c), c.nbytes))


def _cost(choice: Choice) -> int:
    return choice.support.cost + sum(v.cost for v in choice.values)


def _wanted(name: str, every: Sequence[str], policy: str, *slow: str) -> Sequence[str]:
    if name == "auto":
        return [n for n in every if policy != "fast" or n not in slow]
    return FAMILIES.get(name, (name,))


def needs_statistics(policy: str, support: str = "auto", values: str = "auto") -> bool:
    """Whether the choice needs more than the number of nonzeros and the signs."""
    return policy != "fast" or support == "bucketed" or "exponent" in values


def check_names(codec: str, support: str = "auto", values: str = "auto") -> None:
    """Raise ValueError unless these are a policy, a support and a value coding."""
    check_policy(codec)
    if support not in ("auto", *SUPPORTS):
        raise ValueError(f"support: got {support!r}, allowed: {('auto', *SUPPORTS)}")
    allowed = ("auto", "dense", *FAMILIES, *VALUES)
    if values not in allowed:
        raise ValueError(f"values: got {values!r}, allowed: {allowed}")


def check_policy(codec: str) -> None:
    """Raise ValueError unless ``codec`` is one of ``POLICIES``."""
    if codec not in POLICIES:
        raise ValueError(f"codec: got {codec!r}, allowed: {', '.join(map(repr, POLICIES))}")


__all__ = [
    "POLICIES",
    "SUPPORTS",
    "VALUES",
    "Choice",
    "Counts",
    "Mask",
    "Stream",
    "StreamCounts",
    "SupportCoding",
    "ValueCoding",
    "check_names",
    "check_policy",
    "choose",
    "needs_statistics",
    "support_coding",
    "value_coding",
]
