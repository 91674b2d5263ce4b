"""How many bits an element takes, by method; every method is checked to be lossless first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bitsparse import codings, dtypes, layout
from bitsparse.bench.entropy import entropy_line
from bitsparse.bench.general import ZSTD_LEVELS, general_codecs
from bitsparse.bench.inputs import Activations
from bitsparse.bench.lossless import compress_checked, general_checked

POLICY, CODING, PUBLISHED, GENERAL = "policy", "coding", "published", "general"
"""Kinds of methods. The published format is calculated: one bit an element, a value without its
sign bit (15 bits for 16-bit dtypes) for each nonzero, 4 bytes of offset for each 64 x 64 tile."""

_PUBLISHED_OFFSET = 32 / 4096


@dataclass
class Sizes:
    """One array, and the bits per element that each method takes."""

    name: str
    source: str
    file: str | None
    rows: int
    cols: int
    dtype: str
    density: float
    entropy_line: float
    """Bits per element."""
    bits: dict[str, float | None] = field(default_factory=dict)
    """By method; None: it does not apply, or its package is not installed."""
    chosen: dict[str, str] = field(default_factory=dict)
    """By policy, the codings that it chose."""


def coding_name(support: str, values: str) -> str:
    """What a pair of codings is called in results."""
    return f"{support} + {values}"


def methods(zstd_levels: Sequence[int] = ZSTD_LEVELS) -> dict[str, str]:
    """All methods and the kind of each, in the order of the results."""
    pairs = [coding_name(s, v) for s in codings.SUPPORTS for v in codings.VALUES]
    return {
        **dict.fromkeys(codings.POLICIES, POLICY),
        **dict.fromkeys(pairs, CODING),
        "published": PUBLISHED,
        **{codec.name: GENERAL for codec in general_codecs(zstd_levels)},
    }


def measure_sizes(
    array: Activations, device: torch.device, zstd_levels: Sequence[int] = ZSTD_LEVELS
) -> Sizes:
    """Compress one array by every method.

    Raises:
        NotLossless: a method did not give back the bits.
        UserError: the array cannot be loaded.
    """
    x = array.load().to(device)
    x = x.reshape(-1, x.shape[-1])
    patterns = dtypes.to_patterns(x)
    nnz = int(torch.count_nonzero(patterns))
    sizes = Sizes(
        array.name,
        array.source,
        array.file,
        rows=x.shape[0],
        cols=x.shape[1],
        dtype=str(x.dtype).removeprefix("torch."),
        density=nnz / x.numel(),
        entropy_line=entropy_line(x),
    )
    for policy in codings.POLICIES:
        c = compress_checked(x, array.name, codec=policy)
        sizes.bits[policy] = 8 * c.nbytes / x.numel()
        sizes.chosen[policy] = coding_name(c.support, c.values)
    signed = bool(torch.signbit(x).any())
    geometry = layout.geometry(x.shape)
    for support, values in itertools.product(codings.SUPPORTS, codings.VALUES):
        name = coding_name(support, values)
        sizes.bits[name] = None
        holds_positions = codings.support_coding(support).applies(geometry, nnz)
        if holds_positions and codings.value_coding(values).applies(x.dtype, signed):
            c = compress_checked(x, array.name, support, values)
            sizes.bits[name] = 8 * c.nbytes / x.numel()
    unsigned_width = dtypes.bit_width(x.dtype) - 1
    published = 1 + unsigned_width * sizes.density + _PUBLISHED_OFFSET
    sizes.bits["published"] = None if signed else published
    matrix = patterns.view(x.shape).cpu().numpy()
    for codec in general_codecs(zstd_levels):
        sizes.bits[codec.name] = None
        if codec.installed:
            compressed = general_checked(codec, matrix, array.name)
            sizes.bits[codec.name] = 8 * len(compressed) / x.numel()
    return sizes
