"""The chart of a comparison."""

from __future__ import annotations

import io
from pathlib import Path

from bitsparse.training.compare import Comparison, ModeResult
from bitsparse.training.files import write_atomically

COLOURS = {"dense": "#4c72b0", "checkpoint": "#dd8452", "compressed": "#55a868"}
MIB = 2**20


def save_chart(comparison: Comparison, path: Path) -> None:
    """Losses, memory, time and density by layer, as a PNG file.

    Raises:
        UserError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [r for r in comparison.results if r.losses]
    figure, ((losses, memory), (time, density)) = pyplot.subplots(2, 2, figsize=(11, 7.5))
    for width, result in zip((5.0, 3.0, 1.2), results, strict=False):
        losses.plot(
            range(1, len(result.losses) + 1),
            result.losses,
            label=result.mode,
            color=COLOURS[result.mode],
            linewidth=width,
        )
    losses.set(title="Loss", xlabel="step", ylabel="nats per token")
    losses.legend()
    _memory_bars(memory, results)
    timed = [r for r in results if r.seconds_median is not None]
    bars = time.bar(
        [r.mode for r in timed],
        [(r.seconds_median or 0) * 1e3 for r in timed],
        color=[COLOURS[r.mode] for r in timed],
    )
    time.margins(y=0.12)
    time.bar_label(bars, [f"{r.ratio_median:.2f}×" for r in timed])
    time.set(title=f"Time per step (× {comparison.reference})", ylabel="ms, median")
    compressed = next((r for r in results if r.last and r.last.density), None)
    if compressed is not None and compressed.last is not None:
        values = compressed.last.density
        density.xaxis.get_major_locator().set_params(integer=True)
        density.bar(range(1, len(values) + 1), values, color=COLOURS["compressed"])
    density.set(title="Density by layer, last step", xlabel="layer", ylim=(0, 1))
    model, env = comparison.model, comparison.environment
    figure.suptitle(
        f"{model.layers} layers, {model.d_model} × {model.hidden}, {model.activation}, "
        f"{comparison.config.batch_size} × {model.seq_len} tokens, {comparison.config.dtype}\n"
        f"{env['device']}, PyTorch {env['torch']}",
        fontsize=10,
    )
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    pyplot.close(figure)
    write_atomically(path, lambda file: file.write(buffer.getvalue()))


def _memory_bars(axes, results: list[ModeResult]) -> None:  # type: ignore[no-untyped-def]
    """Two groups of bars: the peak of a step, and what feed-forward blocks keep."""
    names = ["peak of a step", "kept by feed-forward"]
    for i, result in enumerate(results):
        last = result.last
        values = [(result.peak or 0) / MIB, (last.kept_feed_forward if last else 0) / MIB]
        places = [group + (i - 1) * 0.27 for group in range(2)]
        bars = axes.bar(places, values, width=0.25, label=result.mode, color=COLOURS[result.mode])
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(2), names)
    axes.set(title="Memory", ylabel="MiB")
    axes.legend()
