"""The same training run in every memory mode, side by side: losses, time and memory."""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import struct
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bitsparse
from bitsparse.codings import POLICIES
from bitsparse.ops.feed_forward import MEMORY_MODES
from bitsparse.training.accounting import SavedBytes, count_saved, step_peak
from bitsparse.training.data import load_corpus
from bitsparse.training.errors import (
    UserError,
    check_at_least,
    check_batch,
    check_choice,
    check_finite,
    is_out_of_memory,
)
from bitsparse.training.files import make_output_dir
from bitsparse.training.model import ModelConfig, build_model, fit_vocabulary
from bitsparse.training.step import (
    DTYPES,
    Trainee,
    be_deterministic,
    get_device,
    learning_rate,
    make_trainee,
    train_step,
)
from bitsparse.training.train import LARGEST_SEED

ORDER = ("dense", "checkpoint", "compressed")
"""The memory modes, the one that the others are compared with first."""


@dataclass(frozen=True)
class CompareConfig:
    """A comparison. Sizes are in tokens."""

    model: ModelConfig
    modes: tuple[str, ...] = ORDER
    data: list[Path] = field(default_factory=list)
    tokenizer: Path | None = None
    vocab_size: int | None = None
    output_dir: Path | None = None
    """Made once the rest is known to be usable."""
    codec: str = "balanced"
    """Of the compressed mode."""
    dtype: str = "float32"
    device: str | None = None
    seed: int = 0
    steps: int = 40
    batch_size: int = 8
    lr: float = 1e-3
    warmup: int = 10
    """Steps in which the learning rate rises."""
    max_seconds: float | None = None
    """After this time the next step is the last one."""
    untimed: int = 3
    """First steps that are not timed: kernels are compiled and caches filled."""

    def check(self) -> None:
        """Raise UserError for a value that is not allowed."""
        self.model.check()
        check_choice("--codec", self.codec, POLICIES)
        check_choice("--dtype", self.dtype, DTYPES)
        if not self.modes:
            raise UserError(f"--modes: got none, allowed: {', '.join(ORDER)}")
        for mode in self.modes:
            check_choice("--modes", mode, MEMORY_MODES)
        if len(set(self.modes)) != len(self.modes):
            raise UserError(f"--modes: got {','.join(self.modes)}, allowed: each mode once")
        check_at_least("--steps", self.steps, 1)
        check_at_least("--batch-size", self.batch_size, 1)
        check_batch(self.batch_size, self.model.seq_len)
        if self.max_seconds is not None:
            check_at_least("--max-seconds", self.max_seconds, 0)
        check_at_least("--lr", self.lr, 0)
        check_at_least("--seed", self.seed, 0, LARGEST_SEED)

    def accounting_steps(self) -> set[int]:
        """Steps in which memory is measured, and time is not; the last one always."""
        last = self.steps - 1
        return {min(2, last), last // 3, 2 * last // 3, last} - ({0, 1} if last > 1 else set())


@dataclass
class Accounting:
    """What one step held, in bytes."""

    step: int
    kept: int
    """Saved for backward by the whole model."""
    kept_feed_forward: int
    step_peak: int | None
    """Rise of the allocator within the step, gradients included."""
    peak: int | None
    """That, and the parameters and optimizer state."""
    density: list[float]
    """By layer; empty where nothing was compressed."""
    dense_feed_forward: int | None
    """Bytes of the tensors that compressed buffers stand for, kept dense (one or two a block)."""


@dataclass
class ModeResult:
    """What became of one memory mode."""

    mode: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)
    """By step; None where it is not timed."""
    accounting: list[Accounting] = field(default_factory=list)
    out_of_memory: bool = False
    same_losses: bool | None = None
    """Whether the float32 bits of every loss are those of the reference mode."""
    first_difference: int | None = None
    same_weights: bool | None = None
    """Whether the final weights are, bit for bit; None: one of them is not there."""
    seconds_median: float | None = None
    ratio_median: float | None = None
    """Median over steps of this mode's time by the reference's in the same step."""
    ratio_quartiles: tuple[float, float] | None = None

    @property
    def last(self) -> Accounting | None:
        """Of the last accounting step."""
        return self.accounting[-1] if self.accounting else None

    @property
    def peak(self) -> int | None:
        """The largest peak of a step."""
        return max((a.peak for a in self.accounting if a.peak is not None), default=None)


@dataclass(frozen=True)
class StepReport:
    """Told after a step of one mode."""

    mode: str
    step: int
    steps: int
    loss: float
    tokens_per_s: float | None
    """None: a step that is not timed."""
    kept: int | None
    """Bytes that the whole model kept for backward, when last measured."""


@dataclass
class Comparison:
    """Results of all modes."""

    config: CompareConfig
    model: ModelConfig
    source: str
    reference: str
    """The mode that the others are compared with."""
    results: list[ModeResult]
    environment: dict[str, Any]

    @property
    def identical(self) -> bool:
        """Whether no loss and no final weight differs from the reference."""
        return all(r.same_losses is not False and r.same_weights is not False for r in self.results)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        config = asdict(self.config)
        config["data"] = [str(p) for p in self.config.data]
        del config["output_dir"]
        config["tokenizer"] = self.config.tokenizer and str(self.config.tokenizer)
        config["model"] = {**asdict(self.model), "d_ff": self.model.hidden}
        modes = {r.mode: {**asdict(r), "peak_bytes": r.peak} for r in self.results}
        return {
            "environment": self.environment,
            "config": config,
            "data": self.source,
            "reference": self.reference,
            "identical": self.identical,
            "modes": modes,
        }


def compare(
    config: CompareConfig, on_step: Callable[[StepReport], None] | None = None
) -> Comparison:
    """Train one model in each of ``config.modes``, in lockstep.

    A step is done in every mode before the next one begins, in an order that rotates, so that
    ratios of times come from the same moments. A mode that runs out of memory is dropped.

    Raises:
        UserError: a value or the data is not usable, or no mode had enough memory.
    """
    config.check()
    be_deterministic()
    device = get_device(config.device)
    corpus = load_corpus(config.data, config.tokenizer, config.vocab_size)
    model_config = fit_vocabulary(config.model, corpus.vocab_size)
    split, _ = corpus.split(0.0)
    split.check_length(model_config.seq_len, "training")
    if config.output_dir is not None:
        make_output_dir(config.output_dir)

    modes = sorted(config.modes, key=ORDER.index)
    results = {mode: ModeResult(mode) for mode in modes}
    trainees: dict[str, Trainee] = {}
    began = time.perf_counter()
    for mode in modes:
        with _dropping_out_of_memory(results[mode], trainees):
            trainees[mode] = _make(config, model_config, mode, device)
    accounting_steps = config.accounting_steps()
    for step in range(config.steps):
        late = time.perf_counter() - began > (config.max_seconds or math.inf)
        tokens, targets = split.batch(config.seed, step, 0, config.batch_size, model_config.seq_len)
        batch = (tokens.to(device), targets.to(device))
        turn = step % len(modes)
        for mode in modes[turn:] + modes[:turn]:
            if mode in trainees:
                with _dropping_out_of_memory(results[mode], trainees):
                    accounting = late or step in accounting_steps
                    _do_step(config, trainees[mode], results[mode], step, batch, accounting)
                    if on_step is not None:
                        on_step(_report(config, results[mode], step))
        if not trainees:
            raise UserError(
                "out of memory in every mode: a smaller --batch-size, --seq-len or --preset may fit"
            )
        if late:
            break
    comparison = Comparison(
        config,
        model_config,
        corpus.source,
        next(m for m in modes if m in trainees),
        list(results.values()),
        environment(device),
    )
    _judge(comparison, trainees)
    return comparison


@contextmanager
def _dropping_out_of_memory(result: ModeResult, trainees: dict[str, Trainee]) -> Iterator[None]:
    """If memory runs out, note it and free what the mode held."""
    try:
        yield
        return
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the failed step
    result.out_of_memory = True
    trainees.pop(result.mode, None)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _make(config: CompareConfig, model: ModelConfig, mode: str, device: torch.device) -> Trainee:
    built = build_model(model, mode, config.seed, device, config.codec)
    return make_trainee(built, config.dtype, config.lr, weight_decay=0.1, grad_clip=1.0)


def _do_step(
    config: CompareConfig,
    trainee: Trainee,
    result: ModeResult,
    step: int,
    batch: tuple[Tensor, Tensor],
    accounting: bool,
) -> None:
    lr = learning_rate(step, config.steps, config.warmup, config.lr)
    _synchronize(trainee.device)
    began = time.perf_counter()
    if accounting:
        loss = _accounting_step(trainee, result, step, batch, lr)
    else:
        loss, _ = train_step(trainee, [batch], lr)
    _synchronize(trainee.device)
    seconds = time.perf_counter() - began
    check_finite(loss.item(), step, result.mode)
    result.losses.append(loss.item())
    timed = not accounting and step >= config.untimed
    result.seconds.append(seconds if timed else None)


def _report(config: CompareConfig, result: ModeResult, step: int) -> StepReport:
    seconds = result.seconds[-1]
    return StepReport(
        mode=result.mode,
        step=step + 1,
        steps=config.steps,
        loss=result.losses[-1],
        tokens_per_s=config.batch_size * config.model.seq_len / seconds if seconds else None,
        kept=result.last.kept if result.last else None,
    )


def _accounting_step(
    trainee: Trainee, result: ModeResult, step: int, batch: tuple[Tensor, Tensor], lr: float
) -> Tensor:
    saved = SavedBytes()

    def run() -> Tensor:
        nonlocal saved
        with count_saved(trainee.model) as saved:
            loss, _ = train_step(trainee, [batch], lr)
        return loss

    loss: Tensor
    loss, rise = step_peak(trainee.device, run)
    kept = [b.kept for b in trainee.model.feed_forwards() if b.kept is not None]
    result.accounting.append(
        Accounting(
            step=step,
            kept=saved.whole_model,
            kept_feed_forward=saved.feed_forward,
            step_peak=rise,
            peak=None if rise is None else rise + trainee.state_bytes(),
            density=[k.nnz / max(k.numel, 1) for k in kept],
            dense_feed_forward=sum(k.dense_nbytes for k in kept) if kept else None,
        )
    )
    return loss


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _judge(comparison: Comparison, trainees: dict[str, Trainee]) -> None:
    """Fill in how each mode compares with the reference."""
    by_mode = {r.mode: r for r in comparison.results}
    reference = by_mode[comparison.reference]
    for result in comparison.results:
        pairs = list(zip(result.losses, reference.losses, strict=False))
        differing = [i for i, (a, b) in enumerate(pairs) if _bits(a) != _bits(b)]
        result.same_losses = not differing if pairs else None
        result.first_difference = differing[0] if differing else None
        if result.mode in trainees:
            result.same_weights = _same_weights(
                trainees[result.mode], trainees[comparison.reference]
            )
        times = [
            (a, b)
            for a, b in zip(result.seconds, reference.seconds, strict=False)
            if a is not None and b is not None
        ]
        if times:
            ratios = [a / b for a, b in times]
            result.seconds_median = statistics.median(a for a, _ in times)
            result.ratio_median = statistics.median(ratios)
            if len(ratios) > 1:
                low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
                result.ratio_quartiles = (low, high)


def _bits(loss: float) -> bytes:
    """The bits of a float32 value."""
    return struct.pack("<f", loss)


def _same_weights(a: Trainee, b: Trainee) -> bool:
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return all(
        torch.equal(p.detach().view(torch.int32), q.detach().view(torch.int32)) for p, q in pairs
    )


def environment(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on besides the configuration."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "device_type": device.type,
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.system(),
        "bitsparse": bitsparse.__version__,
        "git_commit": _git_commit(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """The commit of this source tree, None where it is not one.

    A copy of the tree without its history can be told by the variable BITSPARSE_GIT_COMMIT.
    """
    if commit := os.environ.get("BITSPARSE_GIT_COMMIT"):
        return commit
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here.parents[1]))
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("-dirty" if changed else "")
