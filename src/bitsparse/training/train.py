"""Training runs that can be stopped at any moment and resumed to the same losses."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bitsparse.codings import POLICIES
from bitsparse.ops.feed_forward import MEMORY_MODES
from bitsparse.training import checkpoint
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
from bitsparse.training.model import ModelConfig, build_model, fit_vocabulary, generate
from bitsparse.training.step import (
    DTYPES,
    Trainee,
    be_deterministic,
    get_device,
    learning_rate,
    make_trainee,
    train_step,
)

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

    def fixed(self, model: ModelConfig, corpus: Corpus) -> dict[str, Any]:
        """What a resumed run must share. Memory mode and codec may differ: losses are the same."""
        names = (
            *("dtype", "seed", "steps", "batch_size", "grad_accum", "lr", "warmup"),
            *("weight_decay", "grad_clip", "eval_fraction"),
        )
        values = {name: getattr(self, name) for name in names}
        return {**asdict(model), "d_ff": model.hidden, **values, "data": corpus.fingerprint()}


@dataclass(frozen=True)
class Progress:
    """What is told after every step."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    eval_loss: float | None = None


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    finished: bool
    """False: stopped by a signal, resumable."""
    loss: float | None
    eval_loss: float | None = None
    sample: str = ""


def train(config: TrainConfig, on_step: Callable[[Progress], None] | None = None) -> TrainResult:
    """Train, or resume training, and write into ``config.output_dir``.

    Written are ``metrics.jsonl``, ``checkpoint.pt`` and at the end ``model.safetensors``.

    Raises:
        UserError: a value, the data or the checkpoint is not usable, or the disk is full.
    """
    config.check()
    writer_class = _summary_writer() if config.tensorboard else None
    be_deterministic()
    device = get_device(config.device)
    corpus = load_corpus(config.data, config.tokenizer, config.vocab_size)
    model_config = fit_vocabulary(config.model, corpus.vocab_size)
    train_split, eval_split = corpus.split(config.eval_fraction)
    train_split.check_length(model_config.seq_len, "training")
    if config.eval_batches and config.eval_fraction:
        eval_split.check_length(model_config.seq_len, "evaluation")
    make_output_dir(config.output_dir)
    path = config.output_dir / checkpoint.FILE_NAME
    fixed = config.fixed(model_config, corpus)
    content = None
    if path.exists():
        if not config.resume:
            raise UserError(
                f"--output-dir: {config.output_dir} has a checkpoint; "
                "allowed: --resume to continue it, or another folder"
            )
        content = checkpoint.load(path)
        checkpoint.check_config(path, content, fixed)

    model = build_model(model_config, config.memory, config.seed, device, config.codec)
    trainee = make_trainee(model, config.dtype, config.lr, config.weight_decay, config.grad_clip)
    start = 0
    if content is not None:
        start = checkpoint.restore(path, content, model, trainee.optimizer, trainee.scaler)
        del content
    metrics = MetricsFile(config.output_dir / "metrics.jsonl", start)
    board = writer_class and writer_class(str(config.output_dir / "tensorboard"), purge_step=start)
    try:
        run = _Run(config, trainee, train_split, eval_split, metrics, board, fixed)
        result = run.loop(start, on_step)
    finally:
        metrics.close()
        if board:
            board.close()
    if not result.finished:
        return result
    _save_weights(config.output_dir / "model.safetensors", model)
    return _with_sample(result, config, trainee, corpus, train_split)


@dataclass
class _Run:
    config: TrainConfig
    trainee: Trainee
    train_split: Split
    eval_split: Split
    metrics: MetricsFile
    board: Any
    fixed: dict[str, Any]

    def loop(self, start: int, on_step: Callable[[Progress], None] | None) -> TrainResult:
        """Steps ``start`` to the last, or to the one in which a signal comes."""
        config, loss, eval_loss, saved = self.config, None, None, start
        with _stop_signals() as stopped:
            for step in range(start, config.steps):
                progress = self._step(step)
                done = step + 1
                loss, eval_loss = progress.loss, progress.eval_loss
                if on_step is not None:
                    on_step(progress)
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
            pair = self.train_split.batch(config.seed, step, micro, config.batch_size, seq_len)
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
        self.metrics.write(step=done, **values, tokens_per_s=round(rate, 1))
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(name, value, done)
        return Progress(done, config.steps, values["loss"], rate, eval_loss)

    @torch.no_grad()
    def _evaluate(self) -> float | None:
        """Mean loss of the same held-out batches every time."""
        config, seq_len = self.config, self.trainee.model.config.seq_len
        losses = []
        for i in range(config.eval_batches if config.eval_fraction else 0):
            tokens, targets = self.eval_split.batch(config.seed, i, 0, config.batch_size, seq_len)
            with self.trainee.autocast():
                loss = self.trainee.model(
                    tokens.to(self.trainee.device), targets.to(self.trainee.device)
                )
            losses.append(loss.item())
        return sum(losses) / len(losses) if losses else None

    def _save(self, step: int) -> None:
        self.metrics.sync()
        checkpoint.save(
            self.config.output_dir / checkpoint.FILE_NAME,
            step,
            self.fixed,
            self.trainee.model,
            self.trainee.optimizer,
            self.trainee.scaler,
        )


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that Ctrl-C and SIGTERM append to, once; a second one interrupts at once."""
    received: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def note(number: int, frame: object) -> None:
        received.append(number)
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
        for which, handler in previous.items():
            signal.signal(which, handler)


def _save_weights(path: Path, model: torch.nn.Module) -> None:
    from safetensors.torch import save

    weights = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    write_atomically(path, lambda file: file.write(save(weights)))


def _with_sample(
    result: TrainResult, config: TrainConfig, trainee: Trainee, corpus: Corpus, split: Split
) -> TrainResult:
    """``result`` with text that the model writes."""
    if not config.sample_tokens:
        return result
    prompt = corpus.read(split.start, min(16, split.stop - split.start)).tolist()
    with trainee.autocast():
        tokens = generate(trainee.model, prompt, config.sample_tokens, config.seed)
    return TrainResult(
        result.step, True, result.loss, result.eval_loss, sample=corpus.decode(tokens)
    )


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "--tensorboard: the package tensorboard is missing: "
            "pip install 'bitsparse[tensorboard]'"
        ) from None
    return SummaryWriter
