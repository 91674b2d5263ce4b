"""``bitsparse train``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bitsparse.cli import options as o
from bitsparse.profiling.live import WandbLogger, import_wandb
from bitsparse.training.errors import UserError
from bitsparse.training.step import be_deterministic, get_device
from bitsparse.training.team import MIXED_PRECISION, PARALLEL, choose_parallel, local_device_name
from bitsparse.training.train import Progress as StepProgress
from bitsparse.training.train import TrainConfig, has_checkpoint
from bitsparse.training.train import train as run_training

SEVERAL = "Several processes"


def train(
    preset: o.PresetOption = None,
    activation: o.ActivationOption = "relu2",
    memory: o.MemoryOption = "compressed",
    codec: o.CodecOption = "balanced",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 200,
    batch_size: o.BatchOption = None,
    grad_accum: Annotated[int, typer.Option(help="Batches a step.")] = 1,
    lr: o.LrOption = None,
    warmup: Annotated[int, typer.Option(help="Steps in which the learning rate rises.")] = 20,
    weight_decay: Annotated[float, typer.Option(help="On matrices.")] = 0.1,
    grad_clip: Annotated[float, typer.Option(help="Largest gradient norm; 0: none.")] = 1.0,
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
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 50,
    eval_batches: Annotated[int, typer.Option(help="Batches an evaluation.")] = 4,
    eval_fraction: Annotated[float, typer.Option(help="Held-out end of the data.")] = 0.1,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
    sample_tokens: Annotated[int, typer.Option(help="Length of the sample at the end.")] = 200,
    output_dir: Annotated[Path, typer.Option(help="Where everything is written.")] = Path(
        "runs/train"
    ),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the checkpoint, if there is one. Model, data, --steps and all that "
            "the losses depend on must be the same; --memory and --codec may differ.",
        ),
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write for TensorBoard too.")
    ] = False,
    wandb: Annotated[
        str | None, typer.Option(help="Log to this project of Weights & Biases too.")
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help=f"How the processes that torchrun starts train together. {o.one_of(PARALLEL)} "
            "(default: ddp under torchrun, else none)",
            rich_help_panel=SEVERAL,
        ),
    ] = None,
    mixed_precision: Annotated[
        str,
        typer.Option(
            help="How --dtype comes about: by autocast, or by FSDP2, which gathers the parameters "
            f"in it. {o.one_of(MIXED_PRECISION)}",
            rich_help_panel=SEVERAL,
        ),
    ] = "autocast",
) -> None:
    """Train a small language model; a run can be stopped at any moment and resumed exactly.

    In several processes: torchrun --nproc-per-node N --no-python bitsparse train ...
    """
    be_deterministic()
    parallel = choose_parallel(parallel)
    chosen_device = get_device(device if parallel == "none" else local_device_name(device))
    if storage is not None and memory != "compressed":
        raise UserError(
            f"--storage: got {storage!r} with --memory {memory}, which keeps nothing that could be "
            "rounded; allowed with: --memory compressed"
        )
    base = o.choose_preset(preset, chosen_device)
    config = TrainConfig(
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
        output_dir=output_dir,
        data=data or [],
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        memory=memory,
        codec=codec,
        dtype=o.choose_dtype(dtype, chosen_device, precision),
        device=str(chosen_device),
        seed=seed,
        steps=steps,
        batch_size=base.batch_size if batch_size is None else batch_size,
        grad_accum=grad_accum,
        lr=base.lr if lr is None else lr,
        warmup=warmup,
        weight_decay=weight_decay,
        grad_clip=grad_clip,
        eval_every=eval_every,
        eval_batches=eval_batches,
        eval_fraction=eval_fraction,
        checkpoint_every=checkpoint_every,
        sample_tokens=sample_tokens,
        resume=resume,
        tensorboard=tensorboard,
        parallel=parallel,
        mixed_precision=mixed_precision,
    )
    _run(config, wandb)


def _run(config: TrainConfig, wandb: str | None) -> None:
    # Of several processes the first one speaks.
    leads = config.parallel == "none" or os.environ["RANK"] == "0"
    console = Console(quiet=not leads)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} tokens/s"),
        TextColumn("{task.fields[kept]}left"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console)
    task = bar.add_task("", total=config.steps, loss=float("nan"), rate=0.0, kept="")
    if wandb is not None:
        _check_wandb()
    loggers: list[WandbLogger] = []

    def show(p: StepProgress) -> None:
        bar.start()  # with the first step: an error before that is shown alone
        kept = _kept(p.scalars())
        bar.update(task, completed=p.step, loss=p.loss, rate=p.tokens_per_s, kept=kept)
        if wandb is not None and leads and not loggers:  # not before there is something to log
            loggers.append(WandbLogger(wandb))
        for logger in loggers:
            logger(p)
        if p.eval_loss is not None:
            bar.console.print(f"step {p.step}: loss {p.loss:.4f}, eval {p.eval_loss:.4f}")

    if config.resume and not has_checkpoint(config.output_dir):
        console.print(f"no checkpoint in {config.output_dir}: starting anew", highlight=False)
    try:
        result = run_training(config, show)
    finally:
        if bar.live.is_started:
            bar.stop()
        for logger in loggers:
            logger.close()
    if result.note:
        console.print(f"note: {result.note}", highlight=False)
    if result.loss is None:
        console.print(f"the run in {config.output_dir} is finished", highlight=False)
    if not result.finished:
        console.print(f"stopped after step {result.step}; the same command with --resume continues")
        raise typer.Exit(130)
    if result.sample:
        console.print("a sample of what the model writes:")
        console.print(escape(result.sample), style="dim", highlight=False)
    console.print(f"weights and metrics: {config.output_dir}", highlight=False)


def _kept(values: dict[str, float]) -> str:
    """What compressed blocks keep and save, for the line of progress; empty without any."""
    if "kept_bytes" not in values:
        return ""
    kept, dense = values["kept_bytes"] / 2**20, values["dense_bytes"] / 2**20
    density = values["density"]
    return f"kept {kept:,.1f} MiB, saved {dense - kept:,.1f} MiB, density {density:.3f}  "


def _check_wandb() -> None:
    try:
        import_wandb()
    except ImportError as error:
        raise UserError(f"--wandb: {error}") from None
