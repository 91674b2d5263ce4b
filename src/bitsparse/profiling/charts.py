"""What a report shows, independent of how it is drawn."""

from __future__ import annotations

import colorsys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from bitsparse.codings import POLICIES
from bitsparse.profiling.results import Profile, Row

MIB = 2**20

DENSE, COMPRESSED, MEASURED = "#4c78b8", "#3fa66b", "#8c8c8c"
_OTHERS = ("#4c78b8", "#e08a3c", "#3fa66b")


@dataclass(frozen=True)
class Series:
    """One set of points."""

    name: str
    x: list[Any]
    y: list[float]
    colour: str
    low: list[float] | None = None
    """Where each bar's spread begins and ends."""
    high: list[float] | None = None


@dataclass(frozen=True)
class Chart:
    """One chart with its explanation."""

    key: str
    """A word, for file names."""
    title: str
    note: str
    kind: str
    """"bars" (``x`` are names), "lines" or "levels" (constant between points)."""
    series: list[Series]
    x_title: str
    y_title: str


def charts(profile: Profile) -> list[Chart]:
    """All charts that these results allow."""
    made = [
        _density(profile),
        _training(profile),
        _timeline(profile),
        _savings(profile),
        _bits(profile),
        _kinds(profile),
        _exponents(profile),
        _times(profile),
    ]
    return [chart for chart in made if chart is not None]


def short_names(names: list[str]) -> dict[str, str]:
    """Names without the parts, between dots, that all of them begin or end with."""
    split = {name: name.split(".") for name in names}
    if len(split) < 2:
        return {name: name for name in names}
    while len({tuple(p[:1]) for p in split.values()}) == 1 and all(map(_several, split.values())):
        split = {name: parts[1:] for name, parts in split.items()}
    while len({tuple(p[-1:]) for p in split.values()}) == 1 and all(map(_several, split.values())):
        split = {name: parts[:-1] for name, parts in split.items()}
    return {name: ".".join(parts) for name, parts in split.items()}


def _several(parts: list[str]) -> bool:
    return len(parts) > 1


def by_layer(profile: Profile, step: int) -> dict[str, Row]:
    """The blocks of one step by name; of several forward passes in it, the first."""
    rows: dict[str, Row] = {}
    for row in profile.at("layers", step):
        rows.setdefault(row["layer"], row)
    return rows


def _last(profile: Profile) -> tuple[list[str], list[Row]]:
    """Labels and rows of the layers in the last step."""
    rows = by_layer(profile, profile.last_step())
    return list(short_names(list(rows)).values()), list(rows.values())


def _density(profile: Profile) -> Chart:
    labels, rows = _last(profile)
    density = Series(
        "density",
        labels,
        [row["density"] for row in rows],
        COMPRESSED,
        [row["neuron_density_p10"] for row in rows],
        [row["neuron_density_p90"] for row in rows],
    )
    silent = Series(
        "silent neurons", labels, [r["silent_neurons"] / r["neurons"] for r in rows], MEASURED
    )
    return Chart(
        "density",
        f"Density by layer, step {profile.last_step()}",
        "Share of the hidden elements that are kept. The lines span from the neuron at the tenth "
        "to that at the ninetieth percentile. Silent neurons: share that no token of the step "
        "fires.",
        "bars",
        [density, silent],
        "layer",
        "share",
    )


def _training(profile: Profile) -> Chart | None:
    if len(profile.steps) < 2:
        return None
    names = list(dict.fromkeys(row["layer"] for row in profile.layers))
    short = short_names(names)
    series = []
    for i, name in enumerate(names):
        points = {
            row["step"]: row["density"]
            for row in profile.layers
            if row["layer"] == name and row["call"] == 0
        }
        colour = _shade(i, len(names))
        series.append(Series(short[name], list(points), list(points.values()), colour))
    return Chart(
        "training",
        "Density over training",
        "One line a layer, at the steps that were looked at.",
        "lines",
        series,
        "step",
        "density",
    )


def _shade(index: int, count: int) -> str:
    """A colour that changes with depth, from blue to orange, to be seen on light and dark."""
    hue = (210 + 180 * index / max(count - 1, 1)) % 360
    channels = colorsys.hls_to_rgb(hue / 360, 0.53, 0.6)
    return "#" + "".join(f"{round(255 * c):02x}" for c in channels)


def _timeline(profile: Profile) -> Chart | None:
    step = profile.last_step()
    rows = profile.at("timeline", step)
    if not rows:
        return None
    x = [row["event"] for row in rows]
    lines = (("measured", MEASURED), ("dense", DENSE), ("compressed", COMPRESSED))
    series = [Series(n, x, [row[n] / MIB for row in rows], colour) for n, colour in lines]
    return Chart(
        "timeline",
        f"Memory saved for backward during step {step}",
        "Each storage that autograd keeps, parameters excluded, as it is saved (forward, rising) "
        "and freed (backward, falling). Dense and compressed: with what plain PyTorch and this "
        "codec keep of the feed-forward blocks' hidden activations; measured: as the step ran.",
        "levels",
        series,
        "storages saved and freed, in order",
        "MiB",
    )


def _savings(profile: Profile) -> Chart:
    labels, rows = _last(profile)
    codec = profile.header.get("codec")
    return Chart(
        "savings",
        f"Hidden activations by layer, step {profile.last_step()}",
        "What plain PyTorch keeps of a block's hidden activations for backward, and what "
        f"compression keeps (codec {codec}); in one forward pass.",
        "bars",
        [
            Series("dense", labels, [row["dense_bytes"] / MIB for row in rows], DENSE),
            Series(
                "compressed", labels, [row["compressed_bytes"] / MIB for row in rows], COMPRESSED
            ),
        ],
        "layer",
        "MiB",
    )


def _bits(profile: Profile) -> Chart:
    labels, rows = _last(profile)
    return Chart(
        "bits",
        f"Bits per element by codec, step {profile.last_step()}",
        "What each codec needs, positions and values, by elements of the hidden tensor. Gated "
        "forms keep two values at each position.",
        "bars",
        [
            Series(policy, labels, [row[f"bits_{policy}"] for row in rows], colour)
            for policy, colour in zip(POLICIES, _OTHERS, strict=True)
        ],
        "layer",
        "bits per element",
    )


def _kinds(profile: Profile) -> Chart | None:
    step = profile.last_step()
    kinds: Counter[str] = Counter()
    for row in profile.at("memory", step):
        kinds[row["kind"]] += row["bytes"]
    if not kinds:
        return None
    ordered = kinds.most_common()
    series = Series("measured", [k for k, _ in ordered], [n / MIB for _, n in ordered], DENSE)
    return Chart(
        "kinds",
        f"Saved activations by kind, step {step}",
        "When most is saved. Feed-forward: the blocks, their inputs and, under autocast, their "
        "weights' casts included, as the step ran.",
        "bars",
        [series],
        "kind",
        "MiB",
    )


def _exponents(profile: Profile) -> Chart | None:
    series = []
    steps = list(dict.fromkeys((profile.steps[0]["step"], profile.last_step())))
    for step, colour in zip(reversed(steps), (COMPRESSED, MEASURED), strict=False):
        counts: Counter[int] = Counter()
        for row in profile.at("exponents", step):
            counts[row["exponent"]] += row["count"]
        total = counts.total()
        if total:
            powers = sorted(counts)
            shares = [counts[p] / total for p in powers]
            series.append(Series(f"step {step}", powers, shares, colour))
    if not series:
        return None
    return Chart(
        "exponents",
        "Exponents of the values",
        "Of the nonzeros that ReLU leaves, over all layers: the exponent of their power of two. "
        "The fewer there are, the less they take.",
        "bars",
        series,
        "exponent",
        "share of the values",
    )


def _times(profile: Profile) -> Chart | None:
    labels, rows = _last(profile)
    if not all("compress_seconds" in row for row in rows):
        return None
    names = {
        "activation_seconds": "activation alone",
        "compress_seconds": "activation and compression",
        "decompress_seconds": "decompression and gradient",
    }
    return Chart(
        "times",
        f"Time by layer, step {profile.last_step()}",
        "One run each, beside the training step: the activation in plain PyTorch; activation and "
        "compression as a compressed block's forward pass does them; rebuilding the hidden tensor "
        "and the activation's gradient as its backward pass does. Without matrix products.",
        "bars",
        [
            Series(name, labels, [1e3 * row[column] for row in rows], colour)
            for (column, name), colour in zip(names.items(), _OTHERS, strict=True)
        ],
        "layer",
        "ms",
    )
