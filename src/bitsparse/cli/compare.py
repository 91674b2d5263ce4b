"""``bitsparse compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bitsparse.cli import options as o
from bitsparse.cli.bench.common import checking_options
from bitsparse.training.compare import (
    ORDER,
    CompareConfig,
    Comparison,
    ModeResult,
    StepReport,
)
from bitsparse.training.compare import compare as run_comparison
from bitsparse.training.errors import UserError
from bitsparse.training.files import write_atomically
from bitsparse.training.plot import save_chart
from bitsparse.training.step import be_deterministic, get_device

CPU_STEPS, GPU_STEPS = 40, 200
DIFFERENT = 3
"""Exit status where a memory mode changed the training."""
SECONDS = 110
"""Limit for the default number of steps, on slow or busy machines."""


def compare(
    preset: o.PresetOption = None,
    activation: o.ActivationOption = "relu2",
    modes: Annotated[
        str, typer.Option(help=f"Memory modes, separated by commas, out of: {', '.join(ORDER)}.")
    ] = ",".join(ORDER),
    steps: Annotated[
        int | None,
        typer.Option(help=f"Steps. (default: {CPU_STEPS} on a CPU, {GPU_STEPS} on a GPU)"),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(help=f"Stop after this time. (default: {SECONDS}; with --steps: no limit)"),
    ] = None,
    batch_size: o.BatchOption = None,
    lr: o.LrOption = None,
    codec: o.CodecOption = "balanced",
    dtype: o.DtypeOption = None,
    precision: o.PrecisionOption = None,
    storage: o.StorageOption = None,
    scaling: o.ScalingOption = None,
    device: o.DeviceOption = None,
    seed: o.SeedOption = 0,
    layers: o.LayersOption = None,
    d_model: o.DModelOption = None,
    heads: o.HeadsOption = None,
    d_ff: o.DFfOption = None,
    seq_len: o.SeqLenOption = None,
    tied: o.TiedOption = False,
    vocab_size: o.VocabOption = None,
    data: o.DataOption = None,
    tokenizer: o.TokenizerOption = None,
    output_dir: Annotated[
        Path, typer.Option(help="Where compare.json and compare.png are written.")
    ] = Path("runs/compare"),
    plot: Annotated[bool, typer.Option(help="Draw compare.png.")] = True,
) -> None:
    """Train the same model in each memory mode, side by side: are losses equal, what is saved?

    The exit status is 3 if any loss or final weight differs, 1 after an error, 2 after an option
    that is malformed or not allowed.
    """
    be_deterministic()
    with checking_options():
        chosen_device = get_device(device)
        base = o.choose_preset(preset, chosen_device)
        if steps is None:
            max_seconds = SECONDS if max_seconds is None else max_seconds
            steps = GPU_STEPS if chosen_device.type == "cuda" else CPU_STEPS
        config = CompareConfig(
            model=o.choose_model(
                base,
                activation,
                layers,
                d_model,
                heads,
                d_ff,
                seq_len,
                tied,
                precision,
                storage,
                scaling,
            ),
            modes=tuple(m.strip() for m in modes.split(",") if m.strip()),
            data=data or [],
            tokenizer=tokenizer,
            output_dir=output_dir,
            vocab_size=vocab_size,
            codec=codec,
            dtype=o.choose_dtype(dtype, chosen_device, precision),
            device=str(chosen_device),
            seed=seed,
            steps=steps,
            max_seconds=max_seconds,
            batch_size=base.batch_size if batch_size is None else batch_size,
            lr=base.lr if lr is None else lr,
        )
        config.check()
        if storage is not None and "compressed" not in config.modes:
            raise UserError(
                f"--storage: got {storage!r} with --modes {','.join(config.modes)}, "
                "allowed: with compressed among the modes"
            )
    console = Console()
    comparison = _run(config, console)
    _show(comparison, console)  # first: it is not lost if the disk is full
    content = json.dumps(comparison.to_json(), indent=1).encode() + b"\n"
    write_atomically(output_dir / "compare.json", lambda file: file.write(content))
    if plot:
        save_chart(comparison, output_dir / "compare.png")
    console.print(f"written to {output_dir}", highlight=False)
    if not comparison.identical:
        raise typer.Exit(DIFFERENT)


def _run(config: CompareConfig, console: Console) -> Comparison:
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} tokens/s"),
        TextColumn("kept {task.fields[kept]}  left"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console)
    rates = dict.fromkeys(config.modes, 0.0)
    tasks = {
        mode: bar.add_task(mode, total=config.steps, loss=float("nan"), rate=0.0, kept="–")
        for mode in config.modes
    }

    def show(p: StepReport) -> None:
        bar.start()  # with the first step: an error before that is shown alone
        if p.tokens_per_s is not None:
            rates[p.mode] = p.tokens_per_s
        bar.update(
            tasks[p.mode],
            completed=p.step,
            loss=p.loss,
            rate=rates[p.mode],
            kept=_mib(p.kept, "–"),
        )

    try:
        return run_comparison(config, show)
    finally:
        if bar.live.is_started:
            bar.stop()


def _show(comparison: Comparison, console: Console) -> None:
    model, env = comparison.model, comparison.environment
    table = Table(
        title=f"{model.layers} layers, {model.d_model} × {model.hidden}, {model.activation}, "
        f"{comparison.config.batch_size} × {model.seq_len} tokens, {comparison.config.dtype}, "
        f"{env['device']}",
        caption=f"Times × {comparison.reference}: the median of the steps' own ratios; spread: "
        "their middle half. Peak: the largest, with parameters, gradients and optimizer state. "
        "Kept: for backward, in the last step.",
    )
    table.add_column("")
    for result in comparison.results:
        table.add_column(result.mode, justify="right")
    columns = [_cells(result, comparison) for result in comparison.results]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    console.print(table)
    compressed = next((r for r in comparison.results if r.last and r.last.density), None)
    if compressed is not None and compressed.last is not None:
        densities = " ".join(f"{d:.3f}" for d in compressed.last.density)
        console.print(f"density by layer, last step: {densities}", highlight=False)


def _cells(result: ModeResult, comparison: Comparison) -> dict[str, str]:
    """One column of the table, by the name of the row."""
    reference = next(r for r in comparison.results if r.mode == comparison.reference)
    base, last, reference_last = comparison.reference, result.last, reference.last
    kept = last.kept_feed_forward if last else None
    spread = result.ratio_quartiles
    time = result.seconds_median
    return {
        "final loss": "out of memory" if result.out_of_memory else f"{result.losses[-1]:.6f}",
        f"every loss as {base}": _yes(result.same_losses, result.first_difference),
        f"final weights as {base}": _yes(result.same_weights, None),
        "steps": str(len(result.losses)),
        "ms / step, median": "–" if time is None else f"{time * 1e3:.1f}",
        f"  × {base}": "–" if result.ratio_median is None else f"{result.ratio_median:.3f}",
        "  spread": "–" if spread is None else f"{spread[0]:.3f}–{spread[1]:.3f}",
        "peak memory": _mib(result.peak),
        f"  × {base} ": _ratio(result.peak, reference.peak),
        "kept by feed-forward": _mib(kept),
        f"  × {base}  ": _ratio(kept, reference_last.kept_feed_forward if reference_last else None),
        "hidden tensors, dense": _mib(last.dense_feed_forward if last else None, "–"),
    }


def _yes(same: bool | None, first_difference: int | None) -> str:
    if same is None:
        return "–"
    if same:
        return "yes"
    return "NO" if first_difference is None else f"NO, from step {first_difference + 1}"


def _mib(nbytes: int | None, missing: str = "not measured") -> str:
    return missing if nbytes is None else f"{nbytes / 2**20:,.1f} MiB"


def _ratio(value: int | None, reference: int | None) -> str:
    return "–" if value is None or not reference else f"{value / reference:.2f}"
