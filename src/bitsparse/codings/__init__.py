"""Codings of positions (supports) and of values, registered here, and the choice among them.

To add one: write a file with a ``CODING`` (support) or ``CODINGS`` (values) object, see
:mod:`bitsparse.codings.base`, and add the names to the tables below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import itemgetter
from typing import Any, NamedTuple

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
    outside: bool = False
    """Squared ReLU of bfloat16: whether any kept value lies outside [2**-60, 2**60)."""

    def support_nbytes(self, coding: SupportCoding) -> int:
        """Bytes of the masks and of the table of the values' offsets."""
        masks = sum(coding.nbytes(self.geometry, b) for b in self.bucket_bytes)
        return masks + 4 * table_words(self.geometry.tiles)


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
    nnz, dtype, tiles = counts.nnz, counts.dtype, counts.geometry.tiles
    found = _undominated([(counts.support_nbytes(c), c.cost, (c,)) for c in supports])
    for stream in counts.streams:
        escapes = stream.escapes
        options = _undominated(
            [
                (c.nbytes(nnz, dtype, tiles, escapes.get(c.field, 0)), c.cost, (c,))
                for c in _fitting(dtype, stream.any_sign, policy, values)
            ]
        )
        found = _undominated(
            [(m + n, p + q, (*chosen, *c)) for m, p, chosen in found for n, q, c in options]
        )
    limit = found[0][0] * (_TOLERANCE if policy == "balanced" else 1)
    nbytes, _, (mask, *coded) = [f for f in found if f[0] <= limit][-1]
    return Choice(mask, tuple(coded), nbytes)


_Option = tuple[int, int, tuple[Any, ...]]
"""Bytes, cost, codings."""


def _undominated(options: list[_Option]) -> list[_Option]:
    """Without those that are neither smaller nor faster than another: smallest first."""
    found: list[_Option] = []
    for option in sorted(options, key=itemgetter(0, 1)):
        if not found or option[1] < found[-1][1]:
            found.append(option)
    return found


@cache
def _fitting(
    dtype: torch.dtype, any_sign: bool, policy: str, values: str
) -> tuple[ValueCoding, ...]:
    """The value codings that may be chosen for such values."""
    every = [c for c in map(value_coding, VALUES) if c.applies(dtype, any_sign)]
    wanted = _wanted(values, VALUES, policy, *FAMILIES["exponent"])
    fits = tuple(c for c in every if c.name in wanted)
    if not fits:
        why = ", some of which have their sign bit set" if any_sign else ""
        raise ValueError(
            f"values: got {values!r}, which cannot hold these values of {dtype}"
            f"{why}; allowed: 'auto', " + ", ".join(repr(c.name) for c in every)
        )
    return fits


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
