"""The model benchmark: training steps of the presets in every memory mode, and what fits."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitsparse import codings
from bitsparse.activations import ACTIVATIONS
from bitsparse.bench.inputs import neuron_shifts
from bitsparse.bench.peers import default_chunk
from bitsparse.bench.result import Progress, Result
from bitsparse.bench.timing import OUT_OF_MEMORY, Spread, Task, TimeLimit, alternate, forget, reason
from bitsparse.training.accounting import step_peak
from bitsparse.training.compare import environment
from bitsparse.training.errors import (
    LARGEST_BATCH,
    check_at_least,
    check_batch,
    check_choice,
    check_density,
    check_names,
    is_out_of_memory,
)
from bitsparse.training.model import PRESETS, ModelConfig, build_model, get_preset
from bitsparse.training.step import DTYPES, Trainee, get_device, make_trainee, train_step
from bitsparse.training.train import LARGEST_SEED

GIB = 2**30
MODES = ("dense", "checkpoint", "compressed", "chunked")
"""The memory modes of blocks; "chunked" is the compressed one with ``tokens_per_chunk``."""
DEFAULT_MODES = MODES[:3]
WARMUP = 1
_CALIBRATION = 2048
"""Tokens from which densities are set."""
_CONSTANT = 4.0
_NEARLY = 1.05
"""A device that has at least its share of a limit stands for one that has it all: 141 GB of memory
are 139 or 140 GiB."""


@dataclass(frozen=True)
class ModelBenchConfig:
    """What is measured."""

    presets: tuple[str, ...] = ("tiny",)
    activations: tuple[str, ...] = ("relu2", "reglu")
    modes: tuple[str, ...] = DEFAULT_MODES
    batch_size: int | None = None
    """None: the preset's."""
    seq_len: int | None = None
    """None: the preset's."""
    vocab_size: int = 256
    density: float = 0.1
    """Of the hidden tensors; 0: as the random weights make it, about a half."""
    codec: str = "balanced"
    tokens_per_chunk: int | None = None
    """Of the mode "chunked"; None: :func:`~bitsparse.bench.peers.default_chunk`."""
    dtype: str = "float32"
    steps: int = 5
    """Timed ones, of each mode."""
    memory_gb: tuple[float, ...] = ()
    """In GiB: limits under which the largest batch is looked for."""
    time_limit: float | None = None
    """Seconds for everything: when they are over no step is tried, and what fits is predicted; no
    model begins that would not end by then, if it took as long as the longest before."""
    device: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise UserError for a value that is not allowed."""
        check_names("--preset", self.presets, tuple(PRESETS))
        check_names("--activations", self.activations, tuple(ACTIVATIONS))
        check_names("--modes", self.modes, MODES)
        for name in ("batch_size", "seq_len", "tokens_per_chunk"):
            value = getattr(self, name)
            if value is not None:
                check_at_least("--" + name.replace("_", "-"), value, 1)
        check_at_least("--vocab-size", self.vocab_size, 1)
        if self.density:
            check_density("--density", self.density)
        check_choice("--codec", self.codec, codings.POLICIES)
        check_choice("--dtype", self.dtype, DTYPES)
        check_at_least("--steps", self.steps, 1)
        for limit in self.memory_gb:
            check_at_least("--memory-gb", limit, 2**-10, 2**20)
        if self.time_limit is not None:
            check_at_least("--time-limit", self.time_limit, 0)
        check_at_least("--seed", self.seed, 0, LARGEST_SEED)
        for preset in self.presets:
            check_batch(*self.batch(preset))

    def batch(self, preset: str) -> tuple[int, int]:
        """Sequences, and tokens in each."""
        chosen = get_preset(preset)
        return self.batch_size or chosen.batch_size, self.seq_len or chosen.model.seq_len

    def model(self, preset: str, activation: str) -> ModelConfig:
        """The preset's, with what was asked for."""
        return replace(
            get_preset(preset).model,
            activation=activation,
            vocab_size=self.vocab_size,
            seq_len=self.batch(preset)[1],
        )


@dataclass(frozen=True)
class Fit:
    """The largest batch under one limit."""

    memory_gb: float
    """Asked for."""
    limit_bytes: int
    """What a step may take: where the device has a little less, what it has."""
    batch_size: int
    """Sequences in one step; 0: not one fits."""
    predicted: int | None
    """The same, from the peaks of smaller steps alone; None: their peaks could not be measured."""
    verified: bool
    """Whether a step of ``batch_size`` was done, and one of a sequence more ran out of memory or
    would not have stayed within the limit; else ``batch_size`` is what can be said without."""
    tries: int
    """Steps that were tried."""
    bounded: bool
    """Whether larger ones are not allowed, although they might fit."""


@dataclass
class ModeResult:
    """One memory mode."""

    mode: str
    failed: str | None = None
    seconds: Spread | None = None
    """Of a training step."""
    tokens_per_s: float | None = None
    ratio_first: float | None = None
    """Median over steps of this mode's time by the first mode's in the same round."""
    peak_bytes: int | None = None
    """Of a step: parameters, optimizer state, gradients and activations."""
    density: list[float] = field(default_factory=list)
    """By layer, of what compressed blocks kept."""
    peaks: dict[int, int] = field(default_factory=dict)
    """Peak in bytes by batch size, of steps that were done in the search."""
    fits: list[Fit] = field(default_factory=list)
    fits_failed: str | None = None


@dataclass
class ModelCase:
    """All modes on one model."""

    preset: str
    activation: str
    layers: int
    d_model: int
    d_ff: int
    parameters: int
    batch_size: int
    seq_len: int
    first: str
    """The mode that the others are compared with."""
    modes: list[ModeResult]


@dataclass
class ModelResult(Result[ModelBenchConfig, ModelCase]):
    """All that was measured."""

    benchmark = "model"


def run_model(
    config: ModelBenchConfig,
    on_progress: Callable[[Progress], None] | None = None,
    on_case: Callable[[ModelResult], None] | None = None,
) -> ModelResult:
    """Measure all models; ``on_case`` is told the result so far after each.

    Raises:
        UserError: a value is not allowed.
    """
    config.check()
    device = get_device(config.device)
    result = ModelResult(config, environment(device))
    limits = tuple(sorted(config.memory_gb))
    models = [(p, a) for p in config.presets for a in config.activations]
    clock = TimeLimit(config.time_limit)
    each = len(config.modes) * (1 + len(limits)) + config.steps
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(Progress(what, done, each * len(models)))

    def save() -> None:
        if on_case is not None:
            on_case(result)

    for i, (preset, activation) in enumerate(models):
        if not clock.allows_another():
            result.skipped.append(f"{preset} {activation}")
            continue
        with clock.part():
            bench = _Bench(config, device, preset, activation, clock)
            result.cases.append(bench.case)
            bench.measure_steps(tell)
            save()
            for mode in bench.case.modes:
                if limits and mode.failed in (None, OUT_OF_MEMORY):
                    bench.measure_fits(mode, limits, tell)
                    save()
            done = each * (i + 1)
            del bench
            forget()
    save()
    return result


class _Bench:
    """One model, whose blocks change their memory mode between steps."""

    def __init__(
        self,
        config: ModelBenchConfig,
        device: torch.device,
        preset: str,
        activation: str,
        clock: TimeLimit,
    ) -> None:
        self.config, self.device, self.clock = config, device, clock
        self.batch_size, self.seq_len = config.batch(preset)
        model_config = config.model(preset, activation)
        model = build_model(model_config, "dense", config.seed, device, config.codec)
        # A learning rate of 0: steps do all their work, and weights and densities stay.
        self.trainee = make_trainee(model, config.dtype, 0.0, weight_decay=0.1, grad_clip=1.0)
        if config.density:
            batch = max(1, _CALIBRATION // self.seq_len)
            set_density(self.trainee, config.density, self.batch(batch)[0], config.seed)
        self.case = ModelCase(
            preset,
            activation,
            model_config.layers,
            model_config.d_model,
            model_config.hidden,
            sum(p.numel() for p in model.parameters()),
            self.batch_size,
            self.seq_len,
            config.modes[0],
            [ModeResult(mode) for mode in config.modes],
        )

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Random tokens, and what should come after each."""
        generator = torch.Generator().manual_seed(self.config.seed)
        shape = (size, self.seq_len + 1)
        tokens = torch.randint(self.config.vocab_size, shape, generator=generator).to(self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def set_mode(self, mode: str, batch_size: int) -> None:
        """Of all blocks."""
        chunked = mode == "chunked"
        tokens = batch_size * self.seq_len
        chunk = self.config.tokens_per_chunk or default_chunk(tokens)
        for block in self.trainee.model.feed_forwards():
            block.memory = "compressed" if chunked else mode
            block.tokens_per_chunk = chunk if chunked else None

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """One training step."""
        loss, _ = train_step(self.trainee, [batch], 0.0)
        return loss

    def task(self, mode: str, batch: tuple[Tensor, Tensor]) -> Task:
        """A step in this mode, to be timed."""
        return Task(lambda _: self.step(batch), lambda: self.set_mode(mode, self.batch_size))

    def measure_steps(self, tell: Callable[[str], None]) -> None:
        """Fill in speed, peak and density of all modes."""
        by_name = {mode.mode: mode for mode in self.case.modes}
        batch = self.batch(self.batch_size)
        tasks: dict[str, Task] = {}

        def drop(name: str, error: Exception) -> None:
            tasks.pop(name, None)
            by_name[name].failed = reason(error)
            self.clean(error)

        label = f"{self.case.preset} {self.case.activation}"
        for name, mode in by_name.items():
            tell(f"{label}: {name}")
            try:
                self.set_mode(name, self.batch_size)
                self.step(batch)
                _, rise = step_peak(self.device, lambda: self.step(batch))
                state = self.trainee.state_bytes()
                mode.peak_bytes = None if rise is None else rise + state
                if name in ("compressed", "chunked"):
                    kept = [b.kept for b in self.trainee.model.feed_forwards()]
                    mode.density = [k.density for k in kept if k is not None]
                tasks[name] = self.task(name, batch)
            except Exception as error:
                drop(name, error)
            finally:
                forget()
        times = alternate(
            tasks,
            self.device,
            self.config.steps,
            WARMUP,
            on_error=drop,
            on_round=lambda: tell(f"{label}: steps"),
        )
        judge(self.case, times)

    def measure_fits(
        self, mode: ModeResult, limits: tuple[float, ...], tell: Callable[[str], None]
    ) -> None:
        """Fill in the largest batch of a mode under each limit, in rising order.

        The peak of a step is close to linear in the batch. So it is measured at two sizes, and
        predicts the largest batch; that one and the next are then tried, and more if need be.
        """
        total = device_memory(self.device)
        most = max(1, LARGEST_BATCH // self.seq_len)
        peaks = mode.peaks
        used = 1.0  # share of the limit that the last batch that fits takes
        try:
            for size in two_sizes(self.batch_size, most):
                self.fits(mode, size, total)
            for limit in limits:
                tell(f"{self.case.preset} {self.case.activation}: {mode.mode}, {limit:g} GiB")
                asked = int(limit * GIB)
                nbytes = min(asked, total) if asked <= total * _NEARLY else asked
                predicted = predict(peaks, nbytes, most)
                found = Found(predicted or 0, 0, False)
                if nbytes <= total:
                    guess = predict(peaks, int(nbytes * used), most)
                    self.hold_to(nbytes / total)
                    found = largest(
                        lambda size, nbytes=nbytes: self.fits(mode, size, nbytes),  # type: ignore[misc]
                        self.batch_size if guess is None else guess,
                        most,
                        lambda: self.clock.left() > 0,
                    )
                size = found.number
                if not found.exact and predicted is not None:
                    size = min(max(size, predicted), found.most)
                mode.fits.append(
                    Fit(limit, nbytes, size, predicted, found.exact, found.tries, size == most)
                )
                if found.exact and size in peaks:
                    used = min(1.0, peaks[size] / nbytes)
        except Exception as error:
            mode.fits_failed = reason(error)
            self.clean(error)
        finally:
            self.hold_to(1.0)
            forget()

    def hold_to(self, share: float) -> None:
        """Let PyTorch's allocator have so much of a GPU."""
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(share, self.device)

    def fits(self, mode: ModeResult, batch_size: int, nbytes: int) -> bool:
        """Whether a step of so many sequences can be done and takes at most ``nbytes``."""
        forget()
        try:
            self.set_mode(mode.mode, batch_size)
            batch = self.batch(batch_size)
            _, rise = step_peak(self.device, lambda: self.step(batch))
        except Exception as error:
            if not _ran_out(error):
                raise
            self.clean(error)
            return False
        if rise is None:
            return True
        mode.peaks[batch_size] = rise + self.trainee.state_bytes()
        return mode.peaks[batch_size] <= nbytes

    def clean(self, error: BaseException) -> None:
        """Undo a step that failed."""
        self.trainee.optimizer.zero_grad(set_to_none=True)
        forget(error)


def _ran_out(error: Exception) -> bool:
    """Whether memory was short, in PyTorch's allocator or in a library beside it."""
    text = str(error).lower()
    return is_out_of_memory(error) or "out of memory" in text or "alloc_failed" in text


def device_memory(device: torch.device) -> int:
    """Bytes of memory that a device has."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def two_sizes(batch_size: int, most: int) -> tuple[int, ...]:
    """Batches from whose peaks others are predicted."""
    return (1, min(2, most)) if batch_size == 1 else ((batch_size + 1) // 2, batch_size)


def predict(peaks: dict[int, int], nbytes: int, most: int) -> int | None:
    """The largest batch, from 0 to ``most``, whose peak is at most ``nbytes``, if the peak goes on
    as it does between the two largest batches of ``peaks``; None where they do not say."""
    if len(peaks) < 2:
        return None
    (low, low_peak), (high, high_peak) = sorted(peaks.items())[-2:]
    if high_peak <= low_peak:
        return None
    per_sequence = (high_peak - low_peak) / (high - low)
    return min(max(int(high + (nbytes - high_peak) / per_sequence), 0), most)


class Found(NamedTuple):
    """What :func:`largest` knows."""

    number: int
    """The largest that is known to fit; 0: none is."""
    tries: int
    exact: bool
    """Whether the next one is known not to fit, or not allowed."""
    most: int = 2**63
    """The largest that is not known not to fit."""


def largest(
    fits: Callable[[int], bool],
    guess: int,
    most: int,
    goes_on: Callable[[], bool] = lambda: True,
) -> Found:
    """The largest number from 0 to ``most`` that fits, if all smaller ones do.

    Args:
        fits: whether a number, at least 1, does.
        guess: where to look first; two tries if it is right, more the further it is off.
        most: the largest that is tried.
        goes_on: asked before each try whether there is to be one.
    """
    tries = 0
    low, high = 0, most + 1  # fits, and does not (or is not tried)
    number = min(max(guess, 1), most)
    step, next_step = 1, max(2, number // 64)
    while high - low > 1:
        if not goes_on():
            return Found(low, tries, False, high - 1)
        tries += 1
        if fits(number):
            low = number
            number = number + step
        else:
            high = number
            number = number - step
        step, next_step = next_step, 2 * next_step
        if not low < number < high or (low > 0 and high <= most):
            number = (low + high) // 2
    return Found(low, tries, True, low)


def judge(case: ModelCase, times: dict[str, list[float]]) -> None:
    """Fill in speeds and ratios from the seconds of each round."""
    tokens = case.batch_size * case.seq_len
    for mode in case.modes:
        seconds = times.get(mode.mode)
        if not seconds:
            continue
        mode.seconds = Spread.of(seconds)
        mode.tokens_per_s = tokens / mode.seconds.median
        if case.first in times:
            pairs = zip(seconds, times[case.first], strict=True)
            mode.ratio_first = statistics.median(a / b for a, b in pairs)


@torch.no_grad()
def set_density(trainee: Trainee, density: float, tokens: Tensor, seed: int) -> None:
    """Change the weights so that about ``density`` of the hidden tensors is not zero.

    One feature of the stream becomes constant, and its weights shift the pre-activations, neuron
    by neuron (:func:`~bitsparse.bench.inputs.neuron_shifts`): like the biases of a trained network.
    No block adds to the feature. ``tokens``: ``[batch, seq]``, on which densities are set.
    """
    model = trainee.model
    device = tokens.device
    model.embed.weight[:, 0] = _CONSTANT * model.embed.weight.std()
    layers: Any = model.blocks
    for layer in layers:
        layer.attn.out.weight[0] = 0
    handles = []
    for i, block in enumerate(model.feed_forwards()):
        block.down.weight[0] = 0
        names = [block.gate if hasattr(block, "gate") else block.up]
        fires = density
        if block.activation == "drelu":
            names, fires = [block.gate, block.up], density**0.5
        for j, projection in enumerate(names):
            shifts = neuron_shifts(projection.weight.shape[0], fires, device, seed + 10 * i + j)

            def shift(
                module: object,
                inputs: tuple[Tensor, ...],
                projection: torch.nn.Linear = projection,
                shifts: Tensor = shifts,
            ) -> None:
                x = inputs[0].flatten(0, -2).float()
                constant = x[:, 0].mean()
                weight = projection.weight
                weight[:, 0] = 0
                z = x @ weight.float().t()
                # From the mean and deviation of each neuron over the tokens, as if it were normal.
                weight[:, 0] = (shifts * z.std(0) - z.mean(0)) / constant

            handles.append(block.register_forward_pre_hook(shift))
    try:
        model(tokens)
    finally:
        for handle in handles:
            handle.remove()
