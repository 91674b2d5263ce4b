"""Reports: one HTML file that needs nothing else, and PNG files of the same charts."""

from __future__ import annotations

import base64
import gzip
import html
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from bitsparse.profiling.charts import (
    COMPRESSED,
    MIB,
    Chart,
    by_layer,
    charts,
    short_names,
)
from bitsparse.profiling.measure import unpack_positions
from bitsparse.profiling.results import Profile
from bitsparse.training.files import write_atomically


def save_html(profile: Profile, path: Path, title: str = "bitsparse profile") -> None:
    """Write a page with all charts; it loads nothing.

    Raises:
        ImportError: the package plotly is missing.
        UserError: the file cannot be written.
    """
    script = gzip.compress(_plotly().encode(), mtime=0)
    template = resources.files("bitsparse.profiling").joinpath("report.html").read_text("utf-8")
    data = {
        "charts": [asdict(chart) for chart in charts(profile)],
        "positions": _position_images(profile),
    }
    parts = {
        "TITLE": html.escape(title),
        "SUMMARY": "".join(
            f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
            for name, value in summary(profile)
        ),
        "TABLE": _html_table(*table(profile)),
        # A name may hold anything: no "</script>" may end the data.
        "DATA": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "PLOTLY": base64.b64encode(script).decode(),
    }
    page = template
    for name, text in parts.items():
        page = page.replace(f"@@{name}@@", text)
    write_atomically(path, lambda file: file.write(page.encode()))


def save_pngs(profile: Profile, folder: Path) -> list[Path]:
    """Write each chart as a PNG file of its name.

    Returns:
        The files.

    Raises:
        UserError: a file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for chart in charts(profile):
        figure, axes = pyplot.subplots(figsize=(8, 4.5))
        _draw(axes, chart)
        written.append(_save(figure, folder / f"{chart.key}.png"))
    rows = profile.at("positions", profile.last_step())
    if rows:
        figure, axes = pyplot.subplots(figsize=(8, 3))
        axes.imshow(unpack_positions(rows[0]), cmap="Greys", interpolation="nearest", aspect="auto")
        axes.set(title=f"Nonzeros of {rows[0]['layer']}", xlabel="neuron", ylabel="token")
        written.append(_save(figure, folder / "positions.png"))
    return written


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    pyplot.close(figure)
    write_atomically(path, lambda file: file.write(buffer.getvalue()))
    return path


def _draw(axes: Any, chart: Chart) -> None:
    width = 0.8 / len(chart.series)
    for i, series in enumerate(chart.series):
        options = {"label": series.name, "color": series.colour}
        if chart.kind != "bars":
            style = "steps-post" if chart.kind == "levels" else "default"
            marker = "" if chart.kind == "levels" else "."
            axes.plot(series.x, series.y, drawstyle=style, marker=marker, linewidth=1.2, **options)
            continue
        numeric = all(isinstance(x, int) for x in series.x)
        shift = (i + 0.5) * width - 0.4
        places = [(x if numeric else j) + shift for j, x in enumerate(series.x)]
        axes.bar(places, series.y, width, **options)
        if series.low is not None and series.high is not None:
            axes.vlines(places, series.low, series.high, color="black", linewidth=1)
        if not numeric:
            long = max(map(len, series.x)) > 6
            axes.set_xticks(range(len(series.x)), series.x, rotation=45 if long else 0)
    axes.set(title=chart.title, xlabel=chart.x_title, ylabel=chart.y_title)
    axes.set_ylim(bottom=0)
    axes.grid(True, linewidth=0.3)
    if 1 < len(chart.series) <= 12:
        axes.legend(fontsize=8)


def summary(profile: Profile) -> list[tuple[str, str]]:
    """The main numbers of the last step, as text."""
    header, last = profile.header, profile.steps[-1]
    saved, feed_forward = last["saved_bytes"], last.get("feed_forward_bytes", 0)
    dense, compressed = last["dense_bytes"], last["compressed_bytes"]
    rows = by_layer(profile, last["step"]).values()
    items = [
        ("model", str(header.get("model", "–"))),
        ("blocks", f"{len(rows)}, {header.get('activation', '–')}"),
        ("memory mode, codec", f"{header.get('memory', '–')}, {header.get('codec', '–')}"),
        ("steps looked at", f"{len(profile.steps)}, the last is {last['step']}"),
        ("density", f"{last.get('density', 0):.4f}"),
        ("saved for backward, measured", f"{saved / MIB:,.1f} MiB"),
        ("of it by feed-forward blocks", f"{feed_forward / MIB:,.1f} MiB"),
        ("dense", f"{dense / MIB:,.1f} MiB"),
        ("compressed", f"{compressed / MIB:,.1f} MiB, {compressed / max(dense, 1):.2f} × dense"),
    ]
    if saved:
        items[6] = (items[6][0], f"{items[6][1]}, {feed_forward / saved:.0%}")
    if header.get("overhead") is not None:
        items.append(("time added by looking", f"{header['overhead']:.1%}"))
    if header.get("device"):
        items.append(("device", str(header["device"])))
    return items


def table(profile: Profile) -> tuple[list[str], list[list[str]]]:
    """Column names, and the layers of the last step as text."""
    rows = by_layer(profile, profile.last_step())
    short = short_names(list(rows))
    columns = [
        "layer", "tokens × neurons", "density", "neurons p10–p90", "silent", "fast", "balanced",
        "small", "dense MiB", "compressed MiB", "×", "compress ms", "decompress ms",
    ]  # fmt: skip
    lines = []
    for name, row in rows.items():
        times = [row.get("compress_seconds"), row.get("decompress_seconds")]
        lines.append(
            [
                short[name],
                f"{row['tokens']}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}{row['neurons']}",
                f"{row['density']:.3f}",
                f"{row['neuron_density_p10']:.3f}–{row['neuron_density_p90']:.3f}",
                str(row["silent_neurons"]),
                *(f"{row[f'bits_{policy}']:.2f}" for policy in ("fast", "balanced", "small")),
                f"{row['dense_bytes'] / MIB:.2f}",
                f"{row['compressed_bytes'] / MIB:.2f}",
                f"{row['compressed_bytes'] / max(row['dense_bytes'], 1):.2f}",
                *("–" if t is None else f"{1e3 * t:.2f}" for t in times),
            ]
        )
    return columns, lines


def _html_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
        for line in lines
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _position_images(profile: Profile) -> list[dict[str, Any]]:
    """A picture for each layer, a pixel an element: nonzeros coloured, zeros transparent."""
    from matplotlib.colors import to_rgba
    from matplotlib.image import imsave

    rows = profile.at("positions", profile.last_step())
    short = short_names([row["layer"] for row in rows])
    images = []
    for row in rows:
        mask = unpack_positions(row)
        pixels = np.zeros((*mask.shape, 4), np.uint8)
        pixels[mask] = [round(255 * c) for c in to_rgba(COMPRESSED)]
        buffer = io.BytesIO()
        imsave(buffer, pixels, format="png")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        sizes = {"tokens": row["tokens"], "neurons": row["neurons"]}
        images.append({"layer": short[row["layer"]], **sizes, "url": url})
    return images


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ImportError(
            "the package plotly is missing: pip install 'bitsparse[report]'"
        ) from None
    return str(get_plotlyjs())
