"""``bitsparse bench model``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bitsparse.bench.model import (
    MODES,
    Fit,
    ModelBenchConfig,
    ModelCase,
    run_model,
)
from bitsparse.bench.plot import save_model_chart
from bitsparse.cli import options as o
from bitsparse.cli.bench import common as c
from bitsparse.training.model import PRESETS
from bitsparse.training.step import get_device

CPU_PRESET, GPU_PRESETS = "tiny", "gpt2,1b"
CPU_STEPS, GPU_STEPS = 5, 10
MEMORY_GB = "24,40,80,141"


def model(
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"Out of: {', '.join(PRESETS)}; separated by commas. "
            f"(default: {CPU_PRESET} on a CPU, {GPU_PRESETS} on a GPU)"
        ),
    ] = None,
    activations: c.ActivationsOption = "relu2,reglu",
    modes: Annotated[
        str | None,
        typer.Option(
            help=f"Memory modes, the one that the others are compared with first. Out of: "
            f"{', '.join(MODES)}. (default: all)"
        ),
    ] = None,
    batch_size: o.BatchOption = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Sequence length. (default: the preset's)")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size.")] = 256,
    density: Annotated[
        float,
        typer.Option(
            help="Of the hidden tensors, about: weights are changed to have it. 0: as the random "
            "weights make it, about a half."
        ),
    ] = 0.1,
    codec: o.CodecOption = "balanced",
    tokens_per_chunk: c.ChunkOption = None,
    dtype: o.DtypeOption = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Timed steps of each mode. (default: {CPU_STEPS} on a CPU, {GPU_STEPS} on a GPU)"
        ),
    ] = None,
    memory_gb: Annotated[
        str | None,
        typer.Option(
            help="Limits in GiB, separated by commas, under which the largest batch is looked for; "
            f"none where empty. (default: {MEMORY_GB} on a GPU, none on a CPU)"
        ),
    ] = None,
    time_limit: c.TimeLimitOption = None,
    device: o.DeviceOption = None,
    seed: o.SeedOption = 0,
    json_path: c.JsonOption = None,
    plot: c.PlotOption = None,
) -> None:
    """Training steps of whole models: tokens per second, peak memory, the largest batch that fits.

    The result file is written after each model and each search.
    """
    with c.checking_options():
        chosen = get_device(device)
        limits = c.by_device(chosen, "", MEMORY_GB) if memory_gb is None else memory_gb
        config = ModelBenchConfig(
            presets=c.words(
                c.by_device(chosen, CPU_PRESET, GPU_PRESETS) if preset is None else preset
            ),
            activations=c.words(activations),
            modes=MODES if modes is None else c.words(modes),
            batch_size=batch_size,
            seq_len=seq_len,
            vocab_size=vocab_size,
            density=density,
            codec=codec,
            tokens_per_chunk=tokens_per_chunk,
            dtype=o.choose_dtype(dtype, chosen),
            steps=c.by_device(chosen, CPU_STEPS, GPU_STEPS) if steps is None else steps,
            memory_gb=c.numbers("--memory-gb", limits),
            time_limit=time_limit,
            device=str(chosen),
            seed=seed,
        )
        config.check()
        c.check_outputs(("--output-json", json_path), ("--plot", plot))
    console = Console()
    with c.progress_bar(console) as show:
        result = run_model(config, show, c.writer(json_path))
    c.show_environment(console, result.environment)
    for case in result.cases:
        console.print(_table(case, config))
        for mode in case.modes:
            for why in (mode.failed, mode.fits_failed):
                if why is not None:
                    console.print(f"{mode.mode}: failed, {why}", highlight=False)
    c.show_skipped(console, result.skipped)
    if plot is not None:
        save_model_chart(result, plot)


def _table(case: ModelCase, config: ModelBenchConfig) -> Table:
    limits = sorted({fit.memory_gb for mode in case.modes for fit in mode.fits})
    largest = (
        " Largest batch, in sequences, whose step takes no more; ~: predicted from the peaks of "
        "smaller ones, not tried."
        if limits
        else ""
    )
    table = c.table(
        f"{case.preset} {case.activation}: {case.layers} layers, {case.d_model} × {case.d_ff}, "
        f"{case.parameters / 1e6:,.0f} M parameters, {case.batch_size} × {case.seq_len} tokens, "
        f"{config.dtype}",
        f"ms: median (quartiles) of a step. Peak: with parameters and optimizer state.{largest}",
        *("", "tokens/s", "ms", f"× {case.first}", "peak, MiB"),
        *(f"{limit:g} GiB" for limit in limits),
    )
    for mode in case.modes:
        table.add_row(
            mode.mode,
            "failed" if mode.tokens_per_s is None else f"{mode.tokens_per_s:,.0f}",
            c.milliseconds(mode.seconds),
            c.ratio(mode.ratio_first),
            c.mib(mode.peak_bytes),
            *(_fit(mode.fits, limit) for limit in limits),
        )
    return table


def _fit(fits: list[Fit], limit: float) -> str:
    found = next((fit for fit in fits if fit.memory_gb == limit), None)
    if found is None:
        return "–"
    return f"{'' if found.verified else '~'}{found.batch_size}"
