"""The charts of the benchmarks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from bitsparse.bench.codec import CodecResult
from bitsparse.bench.ffn import PLAIN, FfnResult
from bitsparse.bench.kernels import WHOLE, KernelsResult
from bitsparse.bench.model import ModelResult
from bitsparse.bench.sizes import CODING, methods
from bitsparse.training.files import write_atomically

_MARKERS = "osD^vP*X<>ph"


def save_chart(result: CodecResult, path: Path) -> None:
    """Bits per element against the entropy line, one panel for codings, as a PNG file.

    Arrays whose entropy line is 0 cannot be on logarithmic axes and are left out.

    Raises:
        UserError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arrays = [s for s in result.sizes if s.entropy_line > 0]
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 8), sharex=True, sharey=True)
    kinds = methods(result.config.zstd_levels)
    panels = {
        "Policies, published format, general-purpose compressors": [
            name for name, kind in kinds.items() if kind != CODING
        ],
        "Codings": [name for name, kind in kinds.items() if kind == CODING],
    }
    colours = pyplot.colormaps["tab20"]
    for panel, (title, names) in zip(axes, panels.items(), strict=True):
        panel.axline((1, 1), (2, 2), color="black", linewidth=1, label="entropy line")
        shown = [n for n in names if any(s.bits[n] is not None for s in arrays)]
        for i, name in enumerate(shown):
            points = [(s.entropy_line, s.bits[name]) for s in arrays if s.bits[name] is not None]
            panel.scatter(
                *zip(*points, strict=True),
                label=name,
                s=22,
                alpha=0.8,
                color=colours(i % 20),
                marker=_MARKERS[i % len(_MARKERS)],
            )
        panel.set(title=title, xlabel="entropy line, bits per element", xscale="log", yscale="log")
        panel.grid(True, which="both", linewidth=0.3)
        panel.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(matplotlib.ticker.LogLocator(base=2, numticks=20))
            axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
            axis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes[0].set(ylabel="bits per element")
    figure.suptitle(f"{len(arrays)} arrays; {result.environment['device']}", fontsize=10)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    pyplot.close(figure)
    write_atomically(path, lambda file: file.write(buffer.getvalue()))


def _panels(count: int, columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure of so many panels, at least one, in rows; unused ones are hidden."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = max(1, min(columns, count))
    rows = max(1, -(-count // columns))
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False
    )
    panels = list(axes.flat)
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, panels[:count]


def save_kernels_chart(result: KernelsResult, path: Path) -> None:
    """For each activation and kind of inputs, the share of a copy's rate by density and step.

    Raises:
        UserError: the file cannot be written.
    """
    groups = list(dict.fromkeys((c.activation, c.inputs) for c in result.cases))
    figure, panels = _panels(len(groups), 4, 5, 4)
    for panel, (activation, inputs) in zip(panels, groups, strict=True):
        cases = [c for c in result.cases if (c.activation, c.inputs) == (activation, inputs)]
        lines: dict[str, list[tuple[float, float]]] = {}
        for case in sorted(cases, key=lambda c: c.density):
            for step in case.steps:
                name = f"{step.backend} {step.step}"
                lines.setdefault(name, []).append((case.density, step.share))
        for i, (name, points) in enumerate(lines.items()):
            marker = _MARKERS[i % len(_MARKERS)]
            panel.plot(*zip(*points, strict=True), label=name, marker=marker, linewidth=1)
        title = "compression" if activation == WHOLE else activation
        panel.set(title=f"{title}, {inputs}", xlabel="density", xscale="log", ylim=(0, None))
        panel.set(ylabel="floor / time")
        panel.grid(True, linewidth=0.3)
        if lines:
            panel.legend(fontsize=7)
    rows, cols = result.config.shape
    figure.suptitle(
        f"{rows} × {cols} {result.config.dtype}; {result.environment['device']}", fontsize=10
    )
    _save(figure, path)


def save_ffn_chart(result: FfnResult, path: Path) -> None:
    """For each case, time and peak memory of all peers by the first one's.

    Raises:
        UserError: the file cannot be written.
    """
    figure, panels = _panels(len(result.cases), 3, 5.5, 4.5)
    for panel, case in zip(panels, result.cases, strict=True):
        for i, peer in enumerate(case.peers):
            if peer.ratio_first is not None and peer.peak_ratio_first is not None:
                point = (peer.peak_ratio_first, peer.ratio_first)
                marker = _MARKERS[i % len(_MARKERS)]
                panel.scatter(*point, label=peer.peer, marker=marker, s=40)
                panel.annotate(
                    peer.peer, point, fontsize=7, xytext=(4, 4), textcoords="offset points"
                )
        precision = "" if case.precision == PLAIN else f", {case.precision}"
        panel.set(
            title=f"{case.tokens} × {case.d_model} × {case.d_ff}, {case.layers} layers, "
            f"{case.activation}, density {case.density:g}{precision}",
            xlabel=f"peak memory, × {case.first}",
            ylabel=f"time, × {case.first}",
        )
        panel.title.set_fontsize(9)
        panel.grid(True, linewidth=0.3)
    figure.suptitle(f"{result.config.dtype}; {result.environment['device']}", fontsize=10)
    _save(figure, path)


def save_model_chart(result: ModelResult, path: Path) -> None:
    """For each model, tokens per second, and the largest batch by memory.

    Raises:
        UserError: the file cannot be written.
    """
    columns = 2 if any(mode.fits for case in result.cases for mode in case.modes) else 1
    figure, panels = _panels(columns * len(result.cases), columns, 5.5, 4)
    for i, case in enumerate(result.cases):
        speed = panels[columns * i]
        shown = [mode for mode in case.modes if mode.tokens_per_s is not None]
        bars = speed.bar([m.mode for m in shown], [m.tokens_per_s for m in shown])
        speed.bar_label(bars, fmt="{:,.0f}")
        speed.margins(y=0.12)
        size = f"{case.batch_size} × {case.seq_len} tokens"
        speed.set(title=f"{case.preset}, {case.activation}, {size}", ylabel="tokens/s")
        if columns == 1:
            continue
        fits = panels[2 * i + 1]
        for j, mode in enumerate(case.modes):
            points = [(fit.memory_gb, fit.batch_size) for fit in mode.fits]
            if points:
                fits.plot(*zip(*points, strict=True), label=mode.mode, marker=_MARKERS[j])
        fits.set(title="Largest batch", xlabel="memory, GiB", ylabel="sequences")
        if fits.lines:
            fits.legend()
    figure.suptitle(f"{result.config.dtype}; {result.environment['device']}", fontsize=10)
    _save(figure, path)
