"""Training runs that can be stopped at any moment and resumed to the same losses."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bitsparse.codings import POLICIES
from bitsparse.ops.feed_forward import MEMORY_MODES
from bitsparse.profiling.live import TensorBoardLogger, summary_writer
from bitsparse.training import checkpoint, sharded_checkpoint
from bitsparse.training.data import Corpus, Split, load_corpus
from bitsparse.training.errors import (
    UserError,
    check_at_least,
    check_batch,
    check_choice,
    check_finite,
)
from bitsparse.training.files import make_output_dir, write_atomically
from bitsparse.training.metrics import MetricsFile
from bitsparse.training.model import ModelConfig, Transformer, build_model, fit_vocabulary, generate
from bitsparse.training.step import (
    DTYPES,
    Trainee,
    be_deterministic,
    get_device,
    learning_rate,
    make_trainee,
    train_step,
)
from bitsparse.training.team import MIXED_PRECISION, PARALLEL, Team, joined, whole

LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Model and data sizes are in tokens, intervals in steps."""

    model: ModelConfig
    output_dir: Path
    data: list[Path] = field(default_factory=list)
    tokenizer: Path | None = None
    vocab_size: int | None = None
    memory: str = "compressed"
    codec: str = "balanced"
    dtype: str = "float32"
    device: str | None = None
    seed: int = 0
    steps: int = 200
    batch_size: int = 8
    grad_accum: int = 1
    lr: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    """0: no clipping."""
    eval_every: int = 50
    eval_batches: int = 4
    eval_fraction: float = 0.1
    checkpoint_every: int = 50
    sample_tokens: int = 200
    resume: bool = False
    tensorboard: bool = False
    parallel: str = "none"
    """How several processes train together, one of ``PARALLEL``; each has its share of a batch."""
    mixed_precision: str = "autocast"
    """How ``dtype`` comes about, one of ``MIXED_PRECISION``."""

    def check(self) -> None:
        """Raise UserError for a value that is not allowed."""
        self.model.check()
        check_choice("--memory", self.memory, MEMORY_MODES)
        check_choice("--codec", self.codec, POLICIES)
        check_choice("--dtype", self.dtype, DTYPES)
        for name in ("steps", "batch_size", "grad_accum", "checkpoint_every", "eval_every"):
            check_at_least("--" + name.replace("_", "-"), getattr(self, name), 1)
        for name in ("warmup", "weight_decay", "grad_clip", "eval_batches", "sample_tokens", "lr"):
            check_at_least("--" + name.replace("_", "-"), getattr(self, name), 0)
        check_batch(self.batch_size, self.model.seq_len)
        check_at_least("--seed", self.seed, 0, LARGEST_SEED)
        check_at_least("--eval-fraction", self.eval_fraction, 0, 0.9)
        check_choice("--parallel", self.parallel, PARALLEL)
        check_choice("--mixed-precision", self.mixed_precision, MIXED_PRECISION)
        if self.mixed_precision != "autocast" and self.parallel != "fsdp2":
            raise UserError(
                f"--mixed-precision: got {self.mixed_precision!r} with --parallel {self.parallel}, "
                "allowed: autocast; with --parallel fsdp2 also parameters"
            )

    def fixed(self, model: ModelConfig, corpus: Corpus) -> dict[str, Any]:
        """What a resumed run must share. Memory mode and codec may differ: losses are the same."""
        names = (
            *("dtype", "seed", "steps", "batch_size", "grad_accum", "lr", "warmup"),
            *("weight_decay", "grad_clip", "eval_fraction"),
        )
        values = {name: getattr(self, name) for name in names}
        if self.parallel != "none":  # else it is not a choice
            values["mixed_precision"] = self.mixed_precision
        return {**asdict(model), "d_ff": model.hidden, **values, "data": corpus.fingerprint()}


@dataclass(frozen=True)
class Progress:
    """What is told after every step."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    eval_loss: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    """Of the step, by name; with compressed blocks also ``density`` (the mean of their hidden
    activations), ``kept_bytes`` (of these, for backward) and ``dense_bytes`` (of the same
    tensors)."""

    def scalars(self) -> dict[str, float]:
        """The numbers of the step, for loggers (:mod:`bitsparse.profiling.live`)."""
        return {**self.values, "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    finished: bool
    """False: stopped by a signal, resumable."""
    loss: float | None
    eval_loss: float | None = None
    sample: str = ""
    note: str = ""
    """What the user should know."""


def train(config: TrainConfig, on_step: Callable[[Progress], None] | None = None) -> TrainResult:
    """Train, or resume training, and write into ``config.output_dir``.

    Written are ``metrics.jsonl``, ``checkpoint.pt`` and at the end ``model.safetensors``. With
    ``config.parallel`` every process calls this; the leading one alone calls ``on_step`` and
    writes, but for the parts of sharded checkpoints in ``checkpoints``.

    Raises:
        UserError: a value, the data or the checkpoint is not usable, or the disk is full.
    """
    config.check()
    be_deterministic()
    device = get_device(config.device)
    with joined(config.parallel, device) as team:
        return _train(config, team, device, on_step)


def _train(
    config: TrainConfig,
    team: Team,
    device: torch.device,
    on_step: Callable[[Progress], None] | None,
) -> TrainResult:
    share = team.share(config.batch_size)
    if config.tensorboard:
        _check_tensorboard()
    corpus = load_corpus(config.data, config.tokenizer, config.vocab_size)
    model_config = fit_vocabulary(config.model, corpus.vocab_size)
    train_split, eval_split = corpus.split(config.eval_fraction)
    train_split.check_length(model_config.seq_len, "training")
    if config.eval_batches and config.eval_fraction:
        eval_split.check_length(model_config.seq_len, "evaluation")
    fixed = config.fixed(model_config, corpus)

    def prepare() -> tuple[Path, dict[str, Any]] | None:
        make_output_dir(config.output_dir)
        return _find_checkpoint(config, fixed)

    found = team.led(prepare)

    # FSDP2 moves to a GPU what it has sharded.
    first = torch.device("cpu") if config.parallel == "fsdp2" else device
    model = build_model(model_config, config.memory, config.seed, first, config.codec)
    trainee = make_trainee(
        model,
        config.dtype,
        config.lr,
        config.weight_decay,
        config.grad_clip,
        team,
        device,
        config.mixed_precision,
    )
    start, note = (0, "") if found is None else _restore(*found, trainee)
    del found
    run = _Run(config, trainee, train_split, eval_split, share, fixed)
    if team.leads:
        run.metrics = MetricsFile(config.output_dir / "metrics.jsonl", start)
        if config.tensorboard:
            run.board = TensorBoardLogger(config.output_dir / "tensorboard", start)
    try:
        result = run.loop(start, on_step if team.leads else None)
    finally:
        run.close()
    result = replace(result, note=note)
    if not result.finished:
        return result
    _save_weights(config.output_dir / "model.safetensors", trainee)
    return _with_sample(result, config, trainee, corpus, train_split)


def has_checkpoint(output_dir: Path) -> bool:
    """Whether there is something to resume."""
    single = output_dir / checkpoint.FILE_NAME
    return single.exists() or sharded_checkpoint.newest(output_dir) is not None


def _find_checkpoint(
    config: TrainConfig, fixed: dict[str, Any]
) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to resume and what it says; None: there is none.

    Raises:
        UserError: there is one that is not to be resumed, or not with this ``config``.
    """
    single = config.output_dir / checkpoint.FILE_NAME
    sharded = sharded_checkpoint.newest(config.output_dir)
    if not single.exists() and sharded is None:
        return None
    if not config.resume:
        raise UserError(
            f"--output-dir: {config.output_dir} has a checkpoint; "
            "allowed: --resume to continue it, or another folder"
        )
    if (sharded is None) == (config.parallel != "none"):
        made, allowed = (
            ("one process", "none") if sharded is None else ("several processes", "ddp, fsdp2")
        )
        raise UserError(
            f"--parallel: got {config.parallel!r}, the checkpoint in {config.output_dir} is one of "
            f"{made}; allowed: {allowed}, or another --output-dir"
        )
    if sharded is None:
        content = checkpoint.load(single)
        checkpoint.check_config(single, content, fixed)
        return single, content
    header = sharded_checkpoint.load_header(sharded)
    checkpoint.check_config(sharded, header, fixed)
    return sharded, header


def _restore(path: Path, content: dict[str, Any], trainee: Trainee) -> tuple[int, str]:
    """The number of finished steps, and what the user should know."""
    team = trainee.team
    if team.parallel == "none":
        parts = (trainee.model, trainee.optimizer, trainee.scaler)
        return checkpoint.restore(path, content, *parts), ""
    start, before = sharded_checkpoint.restore(path, content, trainee), content["processes"]
    if before == team.size:
        return start, ""
    return start, (
        f"resumed after step {start} in {team.size} processes, before that in {before}: sums are "
        "rounded in another order, so the losses are not, bit for bit, those of an unbroken run"
    )


@dataclass
class _Run:
    config: TrainConfig
    trainee: Trainee
    train_split: Split
    eval_split: Split
    share: slice
    """Of each batch, what this process computes."""
    fixed: dict[str, Any]
    metrics: MetricsFile | None = None
    """None: this process does not write."""
    board: TensorBoardLogger | None = None

    def loop(self, start: int, on_step: Callable[[Progress], None] | None) -> TrainResult:
        """Steps ``start`` to the last, or to the one in which a signal comes."""
        config, loss, eval_loss, saved = self.config, None, None, start
        team, device = self.trainee.team, self.trainee.device
        with _stop_signals(interrupt=team.parallel == "none") as received:
            for step in range(start, config.steps):
                progress = self._step(step)
                done = step + 1
                loss, eval_loss = progress.loss, progress.eval_loss
                if on_step is not None:
                    on_step(progress)
                # A signal may reach several processes in different steps.
                stopped = team.any(bool(received), device)
                if stopped or done == config.steps or done % config.checkpoint_every == 0:
                    self._save(done)
                    saved = done
                if stopped and done < config.steps:
                    return TrainResult(saved, False, loss, eval_loss)
        return TrainResult(config.steps, True, loss, eval_loss)

    def _step(self, step: int) -> Progress:
        config, seq_len = self.config, self.trainee.model.config.seq_len
        began = time.perf_counter()
        device = self.trainee.device
        batches = []
        for micro in range(config.grad_accum):
            pair = self.train_split.batch(
                config.seed, step, micro, config.batch_size, seq_len, self.share
            )
            batches.append((pair[0].to(device), pair[1].to(device)))
        lr = learning_rate(step, config.steps, config.warmup, config.lr)
        loss, norm = train_step(self.trainee, batches, lr)
        check_finite(loss.item(), step, config.memory)
        values: dict[str, Any] = {"loss": loss.item(), "lr": lr, "grad_norm": norm.item()}
        seconds = time.perf_counter() - began
        rate = config.grad_accum * config.batch_size * seq_len / seconds
        done = step + 1
        eval_loss = None
        if done % config.eval_every == 0 or done == config.steps:
            eval_loss = self._evaluate()
        if eval_loss is not None:
            values["eval_loss"] = eval_loss
        values |= _kept(self.trainee.model)
        if self.metrics is not None:
            self.metrics.write(step=done, **values, tokens_per_s=round(rate, 1))
        progress = Progress(done, config.steps, values["loss"], rate, eval_loss, values)
        if self.board is not None:
            self.board(progress)
        return progress

    @torch.no_grad()
    def _evaluate(self) -> float | None:
        """Mean loss of the same held-out batches every time; with a team, over its shares."""
        config, seq_len = self.config, self.trainee.model.config.seq_len
        losses = []
        for i in range(config.eval_batches if config.eval_fraction else 0):
            tokens, targets = self.eval_split.batch(
                config.seed, i, 0, config.batch_size, seq_len, self.share
            )
            with self.trainee.autocast():
                loss = self.trainee.model(
                    tokens.to(self.trainee.device), targets.to(self.trainee.device)
                )
            losses.append(self.trainee.team.mean(loss).item())
        return sum(losses) / len(losses) if losses else None

    def _save(self, step: int) -> None:
        if self.metrics is not None:
            self.metrics.sync()
        folder, trainee = self.config.output_dir, self.trainee
        if trainee.team.parallel != "none":
            sharded_checkpoint.save(folder, step, self.fixed, trainee)
            return
        path = folder / checkpoint.FILE_NAME
        parts = (trainee.model, trainee.optimizer, trainee.scaler)
        checkpoint.save(path, step, self.fixed, *parts)

    def close(self) -> None:
        """Close the files."""
        if self.metrics is not None:
            self.metrics.close()
        if self.board is not None:
            self.board.close()


@contextmanager
def _stop_signals(interrupt: bool) -> Iterator[list[int]]:
    """A list that Ctrl-C and SIGTERM append to.

    Args:
        interrupt: whether a second one interrupts at once. torchrun passes on what the terminal has
            sent to each process already; if a process takes too long, it kills it.
    """
    received: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def note(number: int, frame: object) -> None:
        received.append(number)
        if interrupt:
            restore()

    def restore() -> None:
        for which, handler in previous.items():
            signal.signal(which, handler)

    try:
        for which in (signal.SIGINT, signal.SIGTERM):
            previous[which] = signal.signal(which, note)
    except ValueError:  # not in the main thread: signals are the business of others
        pass
    try:
        yield received
    finally:
        restore()


def _save_weights(path: Path, trainee: Trainee) -> None:
    from safetensors.torch import save

    weights = {}
    for name, tensor in trainee.model.state_dict().items():
        full = whole(tensor)  # every process helps
        if trainee.team.leads:
            weights[name] = full.detach().cpu().contiguous()
    if not trainee.team.leads:
        return
    write_atomically(path, lambda file: file.write(save(weights)))


def _with_sample(
    result: TrainResult, config: TrainConfig, trainee: Trainee, corpus: Corpus, split: Split
) -> TrainResult:
    """``result`` with text that the model writes; every process computes it."""
    if not config.sample_tokens:
        return result
    prompt = corpus.read(split.start, min(16, split.stop - split.start)).tolist()
    with trainee.autocast():
        tokens = generate(trainee.model, prompt, config.sample_tokens, config.seed)
    return replace(result, sample=corpus.decode(tokens))


def _kept(model: Transformer) -> dict[str, float]:
    """What the blocks kept in the last forward pass with gradients; nothing of dense ones."""
    kept = [block.kept for block in model.feed_forwards() if block.kept is not None]
    if not kept:
        return {}
    return {
        "density": sum(k.nnz for k in kept) / max(sum(k.numel for k in kept), 1),
        "kept_bytes": sum(k.nbytes for k in kept),
        "dense_bytes": sum(k.dense_nbytes for k in kept),
    }


def _check_tensorboard() -> None:
    try:
        summary_writer()
    except ImportError as error:
        raise UserError(f"--tensorboard: {error}") from None
