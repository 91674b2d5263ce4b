"""``bitsparse plan``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bitsparse.cli import options as o
from bitsparse.codings import POLICIES
from bitsparse.planning import tracker
from bitsparse.planning.models import MODES, Source, from_transformers, own
from bitsparse.planning.plan import (
    CONTEXT_BYTES,
    SHARDINGS,
    Plan,
    PlanConfig,
    make_plan,
    read_densities,
    total_memory_gb,
)
from bitsparse.planning.step import OPTIMIZERS
from bitsparse.training.errors import UserError, check_at_least, check_choice
from bitsparse.training.model import get_preset

MIB = 2**20


def plan(
    preset: Annotated[
        str | None,
        typer.Option(help="A model of bitsparse train. (default: gpt2)", rich_help_panel=o.MODEL),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A Hugging Face config.json, or the folder that holds it, of a causal language "
            "model; --layers may change its depth.",
            rich_help_panel=o.MODEL,
        ),
    ] = None,
    activation: o.ActivationOption = "relu2",
    layers: o.LayersOption = None,
    d_model: o.DModelOption = None,
    heads: o.HeadsOption = None,
    d_ff: o.DFfOption = None,
    seq_len: o.SeqLenOption = None,
    tied: o.TiedOption = False,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Vocabulary size. (default: 256)", rich_help_panel=o.MODEL),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Sequences a batch, on each GPU. (default: the preset's, else 8)"),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Precision of forward: bfloat16, float16, float32.")
    ] = "bfloat16",
    param_dtype: Annotated[
        str,
        typer.Option(help="Of the parameters; other than --dtype, which then is autocast's."),
    ] = "float32",
    optimizer: Annotated[
        str, typer.Option(help="What is kept for each parameter. One of: " + ", ".join(OPTIMIZERS))
    ] = "adamw",
    density: Annotated[
        str,
        typer.Option(
            help="Share of hidden activations that are not zero: a number; one for each layer, "
            "with commas; or a file of bitsparse profile."
        ),
    ] = "0.1",
    positions: Annotated[
        str,
        typer.Option(
            help="How they lie: correlated (as in trained networks: some neurons fire more than "
            "others, neighbouring tokens alike) or independent."
        ),
    ] = "correlated",
    modes: Annotated[
        str | None, typer.Option(help=f"Some of: {','.join(MODES)}. (default: all)")
    ] = None,
    codec: o.CodecOption = "balanced",
    tokens_per_chunk: Annotated[
        int | None, typer.Option(help="Of chunked. (default: a quarter of the tokens)")
    ] = None,
    memory_gb: Annotated[
        float | None,
        typer.Option(help="GiB of each GPU: what fits is looked for. (default: this machine's)"),
    ] = None,
    gpus: Annotated[int, typer.Option(help="How many.")] = 1,
    sharding: Annotated[
        str, typer.Option(help="On several GPUs, one of: " + ", ".join(SHARDINGS))
    ] = "ddp",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict the peak memory of a training step, what fits, and where each MiB goes.

    Nothing is trained and no GPU is needed: the step runs on tensors without values, and every
    allocation that it makes on an NVIDIA GPU is counted.
    """
    check_choice("--codec", codec, POLICIES)
    if tokens_per_chunk is not None:
        check_at_least("--tokens-per-chunk", tokens_per_chunk, 1)
    default_batch = 8
    if config is None:
        chosen = get_preset(preset or "gpt2")
        default_batch = chosen.batch_size
        model = o.choose_model(chosen, activation, layers, d_model, heads, d_ff, seq_len, tied)
        if vocab_size is not None:
            model = replace(model, vocab_size=vocab_size)
        source = own(model, f"{preset or 'gpt2'}, {activation}", codec, tokens_per_chunk)
    else:
        source = _from_config(
            config, codec, seq_len, layers, preset=preset, d_model=d_model, heads=heads, d_ff=d_ff,
            vocab_size=vocab_size,
        )  # fmt: skip
    settings = PlanConfig(
        modes=None if modes is None else tuple(part.strip() for part in modes.split(",")),
        batch_size=default_batch if batch_size is None else batch_size,
        seq_len=seq_len,
        dtype=dtype,
        param_dtype=param_dtype,
        optimizer=optimizer,
        densities=read_densities(density),
        positions=positions,
        memory_gb=total_memory_gb() if memory_gb is None else memory_gb,
        gpus=gpus,
        sharding=sharding,
    )
    console = Console()
    with Console(stderr=True).status("predicting") as status:
        result = make_plan(source, settings, lambda what: status.update(f"predicting {what}"))
    if as_json:
        print(json.dumps(result.as_dict(), indent=1))
    else:
        show(console, result)


def _from_config(
    config: Path, codec: str, seq_len: int | None, layers: int | None, **others: object
) -> Source:
    given = [name for name, value in others.items() if value is not None]
    if given:
        name = "--" + given[0].replace("_", "-")
        raise UserError(f"{name}: got a value with --config, which says it; allowed: without")
    for name, value in (("--seq-len", seq_len), ("--layers", layers)):
        if value is not None:
            check_at_least(name, value, 1)
    return from_transformers(config, codec, seq_len, layers)


def show(console: Console, plan: Plan) -> None:
    """Print tables, the recommendation and notes."""
    c = plan.config
    console.print(
        f"{plan.model}: batch {c['batch_size']} x {c['seq_len']}, {c['dtype']}, parameters "
        f"{c['param_dtype']} ({plan.parameters_bytes / MIB:,.0f} MiB), {c['optimizer']}",
        highlight=False,
    )
    table = Table(title="MiB at the peak", title_justify="left")
    table.add_column("what for")
    for mode in plan.modes:
        table.add_column(mode.mode, justify="right")
    for kind in tracker.KINDS:
        held = [sum(m.by_kind.get(kind, {}).values()) for m in plan.modes]
        if any(held):
            table.add_row(kind, *(f"{n / MIB:,.0f}" for n in held))
    table.add_section()
    table.add_row("peak", *(f"{m.peak_bytes / MIB:,.0f}" for m in plan.modes), style="bold")
    backward = [sum(k["backward"] for k in m.by_kind.values()) for m in plan.modes]
    table.add_row("of it, allocated in backward", *(f"{n / MIB:,.0f}" for n in backward))
    first = plan.modes[0]
    if len(plan.modes) > 1:
        ratios = [m.peak_bytes / first.peak_bytes for m in plan.modes]
        table.add_row(f"x {first.mode}", *(f"{r:.2f}" for r in ratios))
    if plan.limit_bytes is not None:
        table.add_section()
        table.add_row("fits", *("yes" if m.fits else "no" for m in plan.modes))
        table.add_row("largest batch", *(f"{m.largest_batch:,}" for m in plan.modes))
    console.print(table)
    if plan.limit_bytes is not None:
        console.print(
            f"of {c['memory_gb']:g} GiB {plan.limit_bytes / MIB:,.0f} MiB can be used: without "
            f"{CONTEXT_BYTES / MIB:,.0f} MiB for CUDA, and what the allocator cannot use",
            highlight=False,
        )
    console.print(f"recommended: {plan.recommended or 'none'} ({plan.reason})", highlight=False)
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False)
