"""Options that several sub-commands share, and what they amount to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from bitsparse.activations import ACTIVATIONS
from bitsparse.codings import POLICIES
from bitsparse.ops import fp8
from bitsparse.ops.feed_forward import MEMORY_MODES
from bitsparse.training.errors import UserError
from bitsparse.training.model import PRESETS, ModelConfig, Preset, get_preset
from bitsparse.training.step import DTYPES


def one_of(names: Iterable[str]) -> str:
    return "One of: " + ", ".join(names) + "."


MODEL = "Model"
DATA = "Data"
FP8 = "FP8"

PresetOption = Annotated[
    str | None,
    typer.Option(
        help=f"Model size. {one_of(PRESETS)} (default: tiny on a CPU, gpt2 on a GPU)",
        rich_help_panel=MODEL,
    ),
]
ActivationOption = Annotated[str, typer.Option(help=one_of(ACTIVATIONS), rich_help_panel=MODEL)]
MemoryOption = Annotated[
    str, typer.Option(help="What feed-forward blocks keep. " + one_of(MEMORY_MODES))
]
CodecOption = Annotated[
    str,
    typer.Option(
        help="How compressed blocks code what they keep: speed against size. " + one_of(POLICIES)
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        help="FP8 for the products of feed-forward blocks, with --dtype bfloat16. "
        + one_of(fp8.PRECISIONS),
        rich_help_panel=FP8,
    ),
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        help="Round what compressed blocks keep; lossy. " + one_of(fp8.STORAGES),
        rich_help_panel=FP8,
    ),
]
ScalingOption = Annotated[
    str | None,
    typer.Option(
        help=f"What has a scale of its own. {one_of(fp8.SCALINGS)} (default: tensor)",
        rich_help_panel=FP8,
    ),
]
LayersOption = Annotated[int | None, typer.Option(help="Layers.", rich_help_panel=MODEL)]
DModelOption = Annotated[int | None, typer.Option(help="Model width.", rich_help_panel=MODEL)]
HeadsOption = Annotated[int | None, typer.Option(help="Attention heads.", rich_help_panel=MODEL)]
DFfOption = Annotated[
    int | None,
    typer.Option(
        help="Hidden size. (default: 4 x width; two thirds of that for gated activations)",
        rich_help_panel=MODEL,
    ),
]
SeqLenOption = Annotated[int | None, typer.Option(help="Sequence length.", rich_help_panel=MODEL)]
TiedOption = Annotated[
    bool, typer.Option("--tied", help="Embedding as output projection.", rich_help_panel=MODEL)
]
VocabOption = Annotated[
    int | None,
    typer.Option(help="Vocabulary size. (default: the data's)", rich_help_panel=MODEL),
]
BatchOption = Annotated[int | None, typer.Option(help="Sequences a batch. (default: the preset's)")]
LrOption = Annotated[
    float | None, typer.Option(help="Largest learning rate. (default: the preset's)")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help=f"Precision of the forward pass (autocast). {one_of(DTYPES)} "
        "(default: float32 on a CPU, bfloat16 on a GPU)"
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu or cuda[:N]. (default: a GPU if there is one)")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the weights and the batches.")]
DataOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text file, folder, or token shard (.bin of nanoGPT, modded-nanogpt or llm.c); may be "
        "repeated. (default: source code of Python's standard library)",
        rich_help_panel=DATA,
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        help="A Hugging Face tokenizer.json. (default: tokens are bytes)", rich_help_panel=DATA
    ),
]


def choose_preset(preset: str | None, device: torch.device) -> Preset:
    """The preset asked for, or the one for this device."""
    return get_preset(preset or ("gpt2" if device.type == "cuda" else "tiny"))


def choose_dtype(dtype: str | None, device: torch.device, precision: str | None = None) -> str:
    """The precision asked for, or the one for this device, or for FP8.

    Raises:
        UserError: one that FP8 cannot be had with.
    """
    if precision is not None and dtype not in (None, "bfloat16"):
        raise UserError(
            f"--dtype: got {dtype!r} with --precision {precision}, allowed: bfloat16 (the default)"
        )
    fast = device.type == "cuda" or precision is not None
    return dtype or ("bfloat16" if fast else "float32")


def choose_model(
    preset: Preset,
    activation: str,
    layers: int | None,
    d_model: int | None,
    heads: int | None,
    d_ff: int | None,
    seq_len: int | None,
    tied: bool,
    precision: str | None = None,
    storage: str | None = None,
    scaling: str | None = None,
) -> ModelConfig:
    """The preset's model, with what was given on the command line in its place."""
    given = {"layers": layers, "d_model": d_model, "heads": heads, "d_ff": d_ff, "seq_len": seq_len}
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(
        preset.model,
        activation=activation,
        tied=tied,
        precision=precision,
        storage=storage,
        scaling=scaling,
        **changes,
    )
