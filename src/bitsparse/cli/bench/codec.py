"""``bitsparse bench codec``."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from bitsparse.bench.codec import CodecConfig, CodecResult, run_codec
from bitsparse.bench.general import ORDERS
from bitsparse.bench.inputs import FILES, SYNTHETIC, TRAINING
from bitsparse.bench.lossless import NotLossless
from bitsparse.bench.plot import save_chart
from bitsparse.bench.result import Progress
from bitsparse.bench.sizes import GENERAL, POLICY, PUBLISHED, methods
from bitsparse.cli import options as o
from bitsparse.cli.bench import common as c
from bitsparse.training.errors import UserError, is_out_of_memory
from bitsparse.training.step import get_device

DIFFERENT = 3
"""Exit status where a method did not give back the bits."""
CPU_SHAPE, GPU_SHAPE = "2048x4096", "16000x21504"
_SHORT = {FILES: "files", TRAINING: "trained", SYNTHETIC: "synthetic"}
_MISSING = "not installed"


def codec(
    activations: Annotated[
        list[Path] | None,
        typer.Option(
            help="File .npz of arrays, tokens × neurons, or a folder of such files; may be "
            "repeated. 16-bit integers are bit patterns of bfloat16; float16 and float32 are used "
            "as they are."
        ),
    ] = None,
    train_steps: Annotated[
        int,
        typer.Option(
            help="Train the tiny preset for so many steps, and add the activations of each layer."
        ),
    ] = 0,
    activation: Annotated[
        str, typer.Option(help="Activation of the model that --train-steps trains.")
    ] = "relu2",
    synthetic: Annotated[bool, typer.Option(help="Add random arrays and one of zeros.")] = True,
    densities: Annotated[
        str, typer.Option(help="Densities of the synthetic arrays, separated by commas.")
    ] = "0.05,0.2,1",
    zstd_levels: Annotated[
        str, typer.Option(help="Levels of zstd, separated by commas; 19 takes most of the time.")
    ] = "1,3,19",
    rates: Annotated[bool, typer.Option(help="Measure rates too.")] = True,
    shape: Annotated[
        str | None,
        typer.Option(
            help="ROWSxCOLS of the arrays that rates are measured on. "
            f"(default: {CPU_SHAPE} on a CPU, {GPU_SHAPE} on a GPU)"
        ),
    ] = None,
    rate_densities: Annotated[
        str, typer.Option(help="Densities of these arrays, separated by commas.")
    ] = "0.05,0.2,0.5",
    repetitions: Annotated[int, typer.Option(help="Timed repetitions.")] = 7,
    device: o.DeviceOption = None,
    seed: Annotated[int, typer.Option(help="Seed of random arrays and of the training run.")] = 0,
    json_path: c.JsonOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw bits per element against the entropy line, as a PNG file."),
    ] = None,
) -> None:
    """Bits per element of every policy and coding, beside zstd and LZ4, and rates.

    Every method is checked to give back every bit before anything is reported about it.
    """
    chosen_device = get_device(device)
    default = GPU_SHAPE if chosen_device.type == "cuda" else CPU_SHAPE
    config = CodecConfig(
        activations=tuple(activations or ()),
        train_steps=train_steps,
        activation=activation,
        synthetic=synthetic,
        densities=c.densities("--densities", densities),
        zstd_levels=tuple(dict.fromkeys(c.whole_numbers("--zstd-levels", zstd_levels))),
        rates=rates,
        shape=c.shape("--shape", default if shape is None else shape),
        rate_densities=c.densities("--rate-densities", rate_densities),
        repetitions=repetitions,
        device=str(chosen_device),
        seed=seed,
    )
    c.check_outputs(("--json", json_path), ("--plot", plot))
    console = Console()
    try:
        result = _run(config, console)
    except NotLossless as error:
        console.print(f"not lossless: {error}", highlight=False)
        raise typer.Exit(DIFFERENT) from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError("out of memory: a smaller --shape or smaller arrays may fit") from error
    _show(result, console)
    if json_path is not None:
        c.write_json(json_path, result.to_json())
    if plot is not None:
        save_chart(result, plot)


def _run(config: CodecConfig, console: Console) -> CodecResult:
    bar = Bar(
        TextColumn("{task.description:9}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        console=console,
        transient=True,
    )
    tasks = {what: bar.add_task(what, total=None) for what in ("training", "sizes", "rates")}

    def show(progress: Progress) -> None:
        bar.start()  # with the first part: an error before that is shown alone
        bar.update(tasks[progress.what], completed=progress.done, total=progress.total)

    try:
        return run_codec(config, show)
    finally:
        if bar.live.is_started:
            bar.stop()


def _show(result: CodecResult, console: Console) -> None:
    env = result.environment
    console.print(
        f"{env['device']}, PyTorch {env['torch']}, Python {env['python']}, "
        f"zstandard {env['zstandard'] or _MISSING}, lz4 {env['lz4'] or _MISSING}",
        highlight=False,
    )
    if result.sizes:
        console.print(*_array_tables(result))
        console.print(_methods_table(result))
    if result.rates:
        console.print(_rates_table(result))


def _array_tables(result: CodecResult) -> list[Table]:
    """One for each group of arrays of the same shape and dtype."""
    kinds = _methods(result)
    shown = [name for name, kind in kinds.items() if kind in (POLICY, PUBLISHED)]
    highest = max(result.config.zstd_levels, default=None)
    orders = [f"zstd-{highest} {order}".strip() for order in ORDERS]
    has_zstd = orders[0] in kinds and orders[0] not in result.not_installed()
    last = [name for name in ("lz4",) if name not in result.not_installed()]
    tables = []
    for (rows, cols, dtype), group in groupby(result.sizes, lambda s: (s.rows, s.cols, s.dtype)):
        table = c.table(
            f"Bits per element, {rows} × {cols} {dtype}",
            None,
            *("", "density", "line", *shown, *orders[:has_zstd], *last),
        )
        for s in group:
            cells = [_cell(s.bits[name], name, result) for name in shown]
            if has_zstd:
                best = min(b for name in orders if (b := s.bits[name]) is not None)
                cells.append(_cell(best, orders[0], result))
            cells += [_cell(s.bits[name], name, result) for name in last]
            table.add_row(s.name, f"{s.density:.4f}", f"{s.entropy_line:.3f}", *cells)
        tables.append(table)
    tables[-1].caption = (
        "Line: entropy line. Published: 1 bit an element, a value without its sign bit for each "
        "nonzero, 4 bytes for each 64 × 64; calculated. zstd: the best order of the bytes."
    )
    return tables


def _methods_table(result: CodecResult) -> Table:
    summaries = {source: result.summary(source) for source in result.sources()}
    counts = {source: sum(s.source == source for s in result.sizes) for source in summaries}
    headers = [name for source in counts for name in (_SHORT[source], "× line")]
    arrays = ", ".join(f"{_SHORT[source]} {count}" for source, count in counts.items())
    table = c.table(
        "Bits per element by method",
        f"Means over arrays ({arrays}); × line: mean of the arrays' own ratios to the entropy "
        "line. *: does not apply to all of them. Split: bytes grouped by significance; transposed: "
        "column by column.",
        *("", *headers),
    )
    for name, kind in _methods(result).items():
        cells: list[str] = []
        for source, summary in summaries.items():
            ratio = summary.get(name)
            values = (None, None) if ratio is None else (ratio.bits, ratio.mean)
            mark = "" if ratio is None or ratio.arrays == counts[source] else "*"
            cells += [_cell(value, name, result) + mark for value in values]
        if kind == GENERAL or any(name in summary for summary in summaries.values()):
            table.add_row(name, *cells)
    return table


def _rates_table(result: CodecResult) -> Table:
    config = result.config
    rows, cols = config.shape
    table = c.table(
        f"Rates on {rows} × {cols} bfloat16",
        f"GB/s of the dense array, median of {config.repetitions}; × copy: share of the rate of a "
        "copy of the dense array on the same device. zstd and LZ4 run on the CPU, on the first "
        "16 MiB at most; levels of zstd above 9: not measured.",
        *("", "threads", "bits", "compress", "× copy", "decompress", "× copy"),
    )
    for copy in result.copies:
        table.add_section()
        table.add_row(f"density {copy.density:g}", style="dim")
        table.add_row("copy", "", "16.000", f"{copy.gbps:.2f}", "", "", "")
        for rate in result.rates:
            if rate.density == copy.density:
                table.add_row(
                    rate.method,
                    "" if rate.threads is None else str(rate.threads),
                    f"{rate.bits_per_element:.3f}",
                    f"{rate.compress_gbps:.2f}",
                    _cell(rate.compress_per_copy, rate.method, result),
                    f"{rate.decompress_gbps:.2f}",
                    _cell(rate.decompress_per_copy, rate.method, result),
                )
        for name in result.not_installed():
            table.add_row(name, "", "", _MISSING, "", _MISSING, "")
    return table


def _methods(result: CodecResult) -> dict[str, str]:
    return methods(result.config.zstd_levels)


def _cell(value: float | None, method: str, result: CodecResult) -> str:
    if value is None:
        return _MISSING if method in result.not_installed() else "–"
    return f"{value:.3f}"
