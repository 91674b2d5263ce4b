"""The chart of the codec benchmark."""

from __future__ import annotations

import io
from pathlib import Path

from bitsparse.bench.codec import CodecResult
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
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    pyplot.close(figure)
    write_atomically(path, lambda file: file.write(buffer.getvalue()))
