"""``bitsparse bench kernels``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bitsparse.activations import ACTIVATIONS
from bitsparse.backends import BACKENDS
from bitsparse.bench.inputs import PRE_ACTIVATIONS
from bitsparse.bench.kernels import AUTO, WHOLE, KernelsConfig, KernelsResult, run_kernels
from bitsparse.bench.plot import save_kernels_chart
from bitsparse.bench.result import Progress
from bitsparse.cli import options as o
from bitsparse.cli.bench import common as c
from bitsparse.training.step import get_device

CPU_SHAPE, GPU_SHAPE = "512x2048", "16000x21504"
CPU_DENSITIES, GPU_DENSITIES = "0.1", "0.5,0.2,0.1,0.03,0.01"
CPU_BACKENDS, GPU_BACKENDS = AUTO, f"{AUTO},triton"
CPU_REPEATS, GPU_REPEATS = 5, 20
ALL = ",".join(ACTIVATIONS)


def _default(cpu: object, gpu: object) -> str:
    return f"(default: {cpu} on a CPU, {gpu} on a GPU)"


def kernels(
    device: o.DeviceOption = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help=f"ROWSxCOLS (tokens × d_ff) of the tensors. {_default(CPU_SHAPE, GPU_SHAPE)}"
        ),
    ] = None,
    densities: Annotated[
        str | None,
        typer.Option(
            help="Shares of the elements that are kept, separated by commas. "
            + _default(CPU_DENSITIES, GPU_DENSITIES)
        ),
    ] = None,
    activations: c.ActivationsOption = ALL,
    inputs: Annotated[
        str,
        typer.Option(
            help="How pre-activations are drawn: every element on its own, or neurons that differ "
            f"and neighbouring tokens alike. Out of: {', '.join(PRE_ACTIVATIONS)}."
        ),
    ] = ",".join(PRE_ACTIVATIONS),
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    codec: o.CodecOption = "balanced",
    backends: Annotated[
        str | None,
        typer.Option(
            help=f"{AUTO} (the one that serves the device) or out of: {', '.join(BACKENDS)}; "
            f"separated by commas. {_default(CPU_BACKENDS, GPU_BACKENDS)}"
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(help=f"Timed repetitions. {_default(CPU_REPEATS, GPU_REPEATS)}"),
    ] = None,
    time_limit: c.TimeLimitOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the tensors.")] = 0,
    json_path: c.JsonOption = None,
    plot: c.PlotOption = None,
) -> None:
    """Times of each step of a backend, beside what a copy of as many bytes takes.

    The result file is written after each tensor.
    """
    with c.checking_options():
        chosen = get_device(device)
        config = KernelsConfig(
            shape=c.shape(
                "--shape", c.by_device(chosen, CPU_SHAPE, GPU_SHAPE) if shape is None else shape
            ),
            densities=c.densities(
                "--densities",
                c.by_device(chosen, CPU_DENSITIES, GPU_DENSITIES)
                if densities is None
                else densities,
            ),
            activations=c.words(activations),
            inputs=c.words(inputs),
            dtype=dtype,
            codec=codec,
            backends=c.words(
                c.by_device(chosen, CPU_BACKENDS, GPU_BACKENDS) if backends is None else backends
            ),
            repeats=c.by_device(chosen, CPU_REPEATS, GPU_REPEATS) if repeats is None else repeats,
            time_limit=time_limit,
            device=str(chosen),
            seed=seed,
        )
        config.check()
        c.check_outputs(("--output-json", json_path), ("--plot", plot))
    console = Console()
    write = c.writer(json_path)
    with c.progress_bar(console) as show:

        def on_case(result: KernelsResult, total: int) -> None:
            last = result.cases[-1]
            write(result)
            show(Progress(f"{last.asked_density:g} {last.inputs}", len(result.cases), total))

        result = run_kernels(config, on_case)
    _show(result, console)
    if plot is not None:
        save_kernels_chart(result, plot)


def _show(result: KernelsResult, console: Console) -> None:
    c.show_environment(console, result.environment)
    console.print(_table(result))
    failed = {
        f"{name} on {case.activation}: {why}"
        for case in result.cases
        for name, why in case.failed.items()
    }
    for line in sorted(failed):
        console.print(f"failed: {line}", highlight=False)
    c.show_skipped(console, result.skipped)


def _table(result: KernelsResult) -> Table:
    config = result.config
    table = c.table(
        f"Steps on {config.shape[0]} × {config.shape[1]} {config.dtype}, codec {config.codec}",
        "ms: median (quartiles). Floor: what a copy takes for the bytes that must move, dense "
        "tensors each once and what is compressed; share: floor by median. Of compress and "
        "to_dense the whole call is timed, else the device's work.",
        *("", "MB", "floor, ms", "ms", "share"),
    )
    for case in result.cases:
        table.add_section()
        size = "–" if case.bits_per_element is None else f"{case.bits_per_element:.2f} bits"
        what = "compression" if case.activation == WHOLE else case.activation
        table.add_row(
            f"{what}, {case.inputs}, density {case.density:.3f}, {size}",
            *("", "", "", ""),
            style="dim",
        )
        copied = case.copy_gbps * case.copy.median * 1e3
        table.add_row("copy", f"{copied:,.1f}", "", c.milliseconds(case.copy), "1.000")
        for step in case.steps:
            table.add_row(
                f"{step.backend} {step.step}",
                f"{step.moved_bytes / 1e6:,.1f}",
                f"{step.floor_seconds * 1e3:.3f}",
                c.milliseconds(step.seconds),
                c.ratio(step.share),
            )
    return table
