"""``bitsparse bench ffn``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bitsparse.bench.ffn import (
    PLAIN,
    PRECISIONS,
    FfnCase,
    FfnConfig,
    PeerResult,
    finished_cases,
    run_ffn,
)
from bitsparse.bench.peers import DEFAULT_PEERS, FP8_PEERS, PEERS
from bitsparse.bench.plot import save_ffn_chart
from bitsparse.cli import options as o
from bitsparse.cli.bench import common as c
from bitsparse.training.errors import UserError
from bitsparse.training.step import get_device

CPU_SHAPES = "2048x256x1024"
GPU_SHAPES = "16000x4096x21504,16384x2048x8192,65536x768x3072"
MAX_SECONDS = 20.0


def ffn(
    shapes: Annotated[
        str | None,
        typer.Option(
            help="TOKENSxD_MODELxD_FF, separated by commas. "
            f"(default: {CPU_SHAPES} on a CPU, {GPU_SHAPES} on a GPU)"
        ),
    ] = None,
    layers: Annotated[
        str, typer.Option(help="Blocks in the stack: one number, or one for each shape.")
    ] = "1",
    activations: c.ActivationsOption = "relu,relu2,reglu",
    densities: Annotated[
        str,
        typer.Option(
            "--densities", "--density", help="Of the hidden tensors, about; separated by commas."
        ),
    ] = "0.1",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16, of everything. "
            "(default: float32 on a CPU, bfloat16 on a GPU)"
        ),
    ] = None,
    precisions: Annotated[
        str,
        typer.Option(
            help=f"Of the products, out of: {', '.join(PRECISIONS)}; separated by commas. In FP8, "
            f"of the peers these: {', '.join(FP8_PEERS)}, all of them compared with dense."
        ),
    ] = PLAIN,
    peers: Annotated[
        str, typer.Option(help=f"Out of: {', '.join(PEERS)}; separated by commas.")
    ] = ",".join(DEFAULT_PEERS),
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="One more: MODULE:FACTORY, called with the name of an activation and a dict of "
            "weights, gives a function of x. May be repeated."
        ),
    ] = None,
    tokens_per_chunk: c.ChunkOption = None,
    repeats: Annotated[int, typer.Option(help="Timed rounds of each case.")] = 10,
    max_seconds: Annotated[
        float,
        typer.Option(help="Time for the rounds of one case: none but the first three begin later."),
    ] = MAX_SECONDS,
    time_limit: c.TimeLimitOption = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Take over the cases that are finished in the file of --output-json, if there is "
            "one, and measure the others.",
        ),
    ] = False,
    device: o.DeviceOption = None,
    seed: Annotated[int, typer.Option(help="Seed of inputs and weights.")] = 0,
    json_path: c.JsonOption = None,
    plot: c.PlotOption = None,
) -> None:
    """Forward and backward of feed-forward blocks, in bitsparse and other ways, side by side.

    A way that fails is reported, and the others go on. The result file is written after each of
    them.
    """
    with c.checking_options():
        chosen = get_device(device)
        default_shapes = c.by_device(chosen, CPU_SHAPES, GPU_SHAPES)
        config = FfnConfig(
            shapes=c.ffn_shapes("--shapes", default_shapes if shapes is None else shapes),
            layers=c.whole_numbers("--layers", layers),
            activations=c.words(activations),
            densities=c.densities("--densities", densities),
            dtype=o.choose_dtype(dtype, chosen),
            precisions=c.words(precisions),
            peers=c.words(peers),
            own_peers=tuple(peer or ()),
            tokens_per_chunk=tokens_per_chunk,
            repeats=repeats,
            max_seconds=max_seconds,
            time_limit=time_limit,
            device=str(chosen),
            seed=seed,
        )
        config.check()
        config.all_peers()
        c.check_outputs(("--output-json", json_path), ("--plot", plot))
        finished = _finished(config, json_path) if resume else []
    console = Console()
    with c.progress_bar(console) as show:
        result = run_ffn(config, show, c.writer(json_path), finished)
    c.show_environment(console, result.environment)
    for case in result.cases:
        console.print(_table(case, config))
        for found in case.peers:
            if found.failed is not None:
                console.print(f"{found.peer}: failed, {found.failed}", highlight=False)
    c.show_skipped(console, result.skipped)
    if plot is not None:
        save_ffn_chart(result, plot)


def _finished(config: FfnConfig, path: Path | None) -> list[FfnCase]:
    """What an earlier run left in the result file."""
    if path is None:
        raise UserError("--resume: got no --output-json, allowed: with it")
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text())
        return finished_cases(config, content)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"--resume: {path} cannot be used: {error}") from error


def _table(case: FfnCase, config: FfnConfig) -> Table:
    densities, first = ", ".join(f"{d:.3f}" for d in case.densities), case.first
    table = c.table(
        f"{case.tokens} × {case.d_model} × {case.d_ff}, {case.layers} layers, {case.activation}, "
        f"{config.dtype if case.precision == PLAIN else case.precision}",
        f"ms: median of forward and backward; × {first}, × best (of {first} and compile, here "
        f"{case.best}). Peak: above what stood before. Kept: after forward. Same: bits as {first}. "
        f"Density by layer: {densities}.",
        *("", "ms", f"× {first}", "× best", "peak, MiB", f"× {first}", "kept, MiB"),
        *(f"× {first}", "same"),
    )
    for found in case.peers:
        if found.failed is None:
            table.add_row(*_cells(found))
        else:
            table.add_row(found.peer, "failed", *[""] * 7)
    return table


def _cells(found: PeerResult) -> list[str]:
    return [
        found.peer,
        "–" if found.seconds is None else f"{found.seconds.median * 1e3:.2f}",
        c.ratio(found.ratio_first),
        c.ratio(found.ratio_best),
        c.mib(found.peak_bytes),
        c.ratio(found.peak_ratio_first, 2),
        c.mib(found.kept_bytes),
        c.ratio(found.kept_ratio_first, 2),
        {True: "yes", False: "NO", None: "–"}[found.identical],
    ]
