"""``bitsparse profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bitsparse.cli import options as o
from bitsparse.profiling.charts import MIB
from bitsparse.profiling.report import summary, table
from bitsparse.profiling.results import Profile
from bitsparse.profiling.run import ProfileConfig, run_profile
from bitsparse.training.errors import UserError, os_error
from bitsparse.training.step import be_deterministic, get_device


def profile(
    preset: o.PresetOption = None,
    activation: o.ActivationOption = "relu2",
    memory: o.MemoryOption = "compressed",
    codec: o.CodecOption = "balanced",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    every: Annotated[
        int, typer.Option(help="Look at every n-th step; 0: as often as 5 % overhead allows.")
    ] = 5,
    batch_size: o.BatchOption = None,
    lr: o.LrOption = None,
    dtype: o.DtypeOption = None,
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
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the results are written, as JSON lines.")
    ] = Path("runs/profile.jsonl"),
) -> None:
    """Look into a few training steps: density, sizes and times by layer, memory by kind.

    `bitsparse report` makes a page of the file that this writes.
    """
    be_deterministic()
    chosen_device = get_device(device)
    base = o.choose_preset(preset, chosen_device)
    model = o.choose_model(base, activation, layers, d_model, heads, d_ff, seq_len, tied)
    config = ProfileConfig(
        model=model,
        data=data or [],
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        memory=memory,
        codec=codec,
        dtype=o.choose_dtype(dtype, chosen_device),
        device=str(chosen_device),
        seed=seed,
        steps=steps,
        every=every or None,
        batch_size=base.batch_size if batch_size is None else batch_size,
        lr=base.lr if lr is None else lr,
    )
    config.check()
    if output.is_dir():
        raise UserError(f"--output: got {output}, which is a folder; allowed: a file")
    console = Console()
    result = _run(config, console)
    _show(result, console)  # first: it is not lost if the file cannot be written
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        result.save(output)
    except OSError as error:
        raise os_error(output, error) from error
    console.print(f"written to {output}; a page of it: bitsparse report {output}", highlight=False)


def _run(config: ProfileConfig, console: Console) -> Profile:
    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("density {task.fields[density]:.3f}  saved {task.fields[saved]:,.1f} MiB  left"),
        TimeRemainingColumn(),
        console=console,
    )
    task = bar.add_task("", total=config.steps, density=float("nan"), saved=float("nan"))

    def show(metrics: Any) -> None:
        bar.start()  # with the first step: an error before that is shown alone
        values = metrics.scalars()
        saved = values["saved_bytes"] / MIB
        bar.update(task, completed=metrics.step + 1, density=values["density"], saved=saved)

    try:
        return run_profile(config, show)
    finally:
        if bar.live.is_started:
            bar.stop()


def _show(result: Profile, console: Console) -> None:
    columns, lines = table(result)
    # Two tables, since one would be too wide for a terminal of 80 columns.
    sizes = ["tokens × neurons", *columns[columns.index("dense MiB") :]]
    for title, names in (
        (
            f"step {result.last_step()}; fast, balanced, small: bits per element",
            [name for name in columns if name not in sizes],
        ),
        ("dense: what plain PyTorch keeps of the hidden activations", columns[:1] + sizes),
    ):
        shown = Table(title=title, box=SIMPLE_HEAD)
        places = [columns.index(name) for name in names]
        for place in places:
            shown.add_column(columns[place], justify="right" if place else "left")
        for line in lines:
            shown.add_row(*(line[place] for place in places))
        console.print(shown)
    for name, value in summary(result):
        console.print(f"{name}: {value}", highlight=False, markup=False)
    kinds: dict[str, int] = {}
    for row in result.at("memory", result.last_step()):
        kinds[row["kind"]] = kinds.get(row["kind"], 0) + row["bytes"]
    total = max(sum(kinds.values()), 1)
    parts = ", ".join(
        f"{kind} {nbytes / MIB:,.1f} MiB ({nbytes / total:.0%})"
        for kind, nbytes in sorted(kinds.items(), key=lambda item: -item[1])
    )
    console.print(f"saved by kind: {parts}", highlight=False)
