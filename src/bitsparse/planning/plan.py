"""What fits into memory: peaks of every memory mode, the largest batch, a recommendation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bitsparse.bench.inputs import PRE_ACTIVATIONS
from bitsparse.planning import tracker
from bitsparse.planning.models import CHECKPOINT, CHUNKED, COMPRESSED, DENSE, Source
from bitsparse.planning.step import OPTIMIZERS, StepPeak, StepSettings, predict_step
from bitsparse.training.errors import (
    LARGEST_BATCH,
    UserError,
    check_at_least,
    check_batch,
    check_choice,
    check_names,
)
from bitsparse.training.step import DTYPES

GIB = 2**30
SHARDINGS = ("ddp", "fsdp")
PREFERRED = (DENSE, COMPRESSED, CHUNKED, CHECKPOINT)
"""Of the modes that fit, the first is recommended: dense needs nothing; on an H200 compressed took
less time than checkpoint, and chunked saves more at a little more time."""

CONTEXT_BYTES = 600 * 2**20
"""Of a GPU's memory, what the CUDA context and the loaded kernels take beside the allocator."""

FRAGMENTATION = 0.03
"""Share of the memory that is left for what the allocator cannot use."""

_SECANTS = 12


@dataclass(frozen=True)
class PlanConfig:
    """What is asked."""

    modes: tuple[str, ...] | None = None
    """None: all that the model has."""
    batch_size: int = 8
    """Sequences on each GPU."""
    seq_len: int | None = None
    """None: the model's longest."""
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    optimizer: str = "adamw"
    densities: tuple[float, ...] = (0.1,)
    """One for all blocks, or one for each."""
    positions: str = "correlated"
    memory_gb: float | None = None
    """In GiB, of each GPU; None: not asked what fits."""
    gpus: int = 1
    sharding: str = "ddp"

    def check(self, source: Source) -> None:
        """Raise UserError for a value that is not allowed."""
        if self.modes is not None:
            check_names("--modes", self.modes, source.modes)
        check_at_least("--batch-size", self.batch_size, 1)
        seq_len = source.seq_len if self.seq_len is None else self.seq_len
        check_at_least("--seq-len", seq_len, 1)
        check_batch(self.batch_size, seq_len)
        check_choice("--dtype", self.dtype, DTYPES)
        check_choice("--param-dtype", self.param_dtype, DTYPES)
        if self.param_dtype not in ("float32", self.dtype):
            raise UserError(
                f"--param-dtype: got {self.param_dtype} with --dtype {self.dtype}, "
                f"allowed: float32, {self.dtype}"
            )
        check_choice("--optimizer", self.optimizer, OPTIMIZERS)
        check_densities("--density", self.densities)
        check_choice("--positions", self.positions, PRE_ACTIVATIONS)
        if self.memory_gb is not None:
            check_at_least("--memory-gb", self.memory_gb, 1, 2**20)
        check_at_least("--gpus", self.gpus, 1, 2**16)
        check_choice("--sharding", self.sharding, SHARDINGS)


@dataclass
class ModePlan:
    """One memory mode."""

    mode: str
    peak_bytes: int
    """What PyTorch's allocator holds when it holds most."""
    by_kind: dict[str, dict[str, int]]
    """Of that, by what it is for: bytes allocated before backward, and in it."""
    fits: bool | None = None
    largest_batch: int | None = None
    """Sequences on each GPU; None: not asked. 0: not even one."""


@dataclass
class Plan:
    """The answer."""

    model: str
    config: dict[str, Any]
    parameters_bytes: int
    limit_bytes: int | None
    """Of the memory, what the allocator can have."""
    modes: list[ModePlan]
    recommended: str | None
    reason: str
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def check_densities(name: str, densities: Sequence[float]) -> None:
    """Raise UserError unless there are some, all of them from 0 to 1."""
    if not densities:
        raise UserError(f"{name}: got none, allowed: at least one")
    for density in densities:
        if not 0 <= density <= 1:
            raise UserError(f"{name}: got {density:g}, allowed: from 0 to 1")


def read_densities(text: str) -> tuple[float, ...]:
    """``"0.1"``, ``"0.1,0.2"``, or a file of ``bitsparse profile``: of its last step, the density
    of each layer.

    Raises:
        UserError: neither.
    """
    try:
        densities = tuple(float(part) for part in text.split(","))
    except ValueError:
        densities = None
    if densities is None:
        if not Path(text).exists():
            raise UserError(
                f"--density: got {text!r}, allowed: a number, numbers with commas between them, or "
                "a file written by bitsparse profile"
            )
        from bitsparse.profiling.results import load

        try:
            profile = load(text)
        except (OSError, ValueError) as error:
            raise UserError(f"--density: {error}") from error
        layers: dict[str, list[float]] = {}
        for row in profile.at("layers", profile.last_step()):
            layers.setdefault(row["layer"], []).append(row["density"])
        densities = tuple(sum(d) / len(d) for d in layers.values())
    check_densities("--density", densities)
    return densities


def make_plan(
    source: Source, config: PlanConfig, on_progress: Callable[[str], None] | None = None
) -> Plan:
    """Predict every mode; ``on_progress`` is told what is looked at.

    Raises:
        UserError: a value is not allowed.
    """
    config.check(source)
    modes = config.modes or source.modes
    seq_len = source.seq_len if config.seq_len is None else config.seq_len
    limit = None
    if config.memory_gb is not None:
        limit = int(config.memory_gb * GIB * (1 - FRAGMENTATION)) - CONTEXT_BYTES
    found: dict[tuple[str, int], StepPeak] = {}

    def peak(mode: str, batch_size: int) -> StepPeak:
        if (mode, batch_size) not in found:
            if on_progress is not None:
                on_progress(f"{mode}, batch {batch_size}")
            settings = StepSettings(
                *(batch_size, seq_len, config.dtype, config.param_dtype, config.optimizer),
                *(config.densities, config.positions),
            )
            one = predict_step(source, mode, settings)
            found[mode, batch_size] = on_several(one, config.gpus, config.sharding)
        return found[mode, batch_size]

    def nbytes(mode: str, batch_size: int) -> int:
        return peak(mode, batch_size).nbytes

    plans = []
    for mode in modes:
        here = peak(mode, config.batch_size)
        plan = ModePlan(
            mode,
            here.nbytes,
            {k: {"forward": f, "backward": b} for k, (f, b) in here.by_kind.items()},
        )
        if limit is not None:
            plan.fits = here.nbytes <= limit
            most = max(1, LARGEST_BATCH // seq_len)
            plan.largest_batch = largest_batch(
                partial(nbytes, mode), limit, config.batch_size, most
            )
        plans.append(plan)
    recommended, reason = recommend(plans, config)
    notes = [] if source.note is None else [source.note]
    if config.gpus > 1:
        notes.append("several GPUs: an estimate from sizes, which has not been measured")
    return Plan(
        source.name,
        {**asdict(config), "seq_len": seq_len},
        peak(modes[0], config.batch_size).parameter_bytes,
        limit,
        plans,
        recommended,
        reason,
        notes,
    )


def on_several(one: StepPeak, gpus: int, sharding: str) -> StepPeak:
    """The peak on each of several GPUs, from that on one with the same batch.

    DistributedDataParallel copies gradients into buckets of the same size. FSDP2 (each layer by
    itself, the rest together) keeps its share of parameters, gradients and optimizer state, and
    whole: the rest's parameters; of two layers the parameters; of one the gradients, and the copy
    of these that is scattered.
    """
    if gpus == 1:
        return one
    held = dict(one.by_kind)
    if sharding == "ddp":
        extra = one.parameter_bytes
    else:
        for kind in (tracker.PARAMETERS, tracker.GRADIENTS, tracker.OPTIMIZER):
            forward, backward = held.get(kind, (0, 0))
            held[kind] = -(-forward // gpus), -(-backward // gpus)
        extra = one.root + 4 * one.largest_layer
    forward, backward = held.get(tracker.WORKSPACES, (0, 0))
    held[tracker.WORKSPACES] = forward + extra, backward
    return replace(one, nbytes=sum(map(sum, held.values())), by_kind=held)


def largest_batch(peak: Callable[[int], int], limit: int, start: int, most: int) -> int:
    """The largest batch whose peak is within ``limit``.

    The peak grows with the batch, nearly in proportion: it is looked at where a line through two
    points meets the limit, until that is next to the answer.
    """
    fits, fails = 0, most + 1
    points: dict[int, int] = {}
    size = min(start, most)
    for _ in range(_SECANTS):
        points[size] = peak(size)
        if points[size] <= limit:
            fits = size
        else:
            fails = size
        if fails - fits == 1:
            break
        if len(points) == 1:
            size = 2 * size if fits else size // 2
        else:
            # Through the points on both sides of the limit, or the two that are closest to it.
            near = {s for s in (fits, fails) if s in points}
            for other in sorted(points, key=lambda s: abs(points[s] - limit)):
                if len(near) < 2:
                    near.add(other)
            a, b = sorted(near)
            slope = max((points[b] - points[a]) / (b - a), 1)
            size = int(a + (limit - points[a]) / slope)
        size = min(max(size, fits + 1), fails - 1)
    return fits


def recommend(plans: Sequence[ModePlan], config: PlanConfig) -> tuple[str | None, str]:
    """A mode, and why."""
    if config.memory_gb is None:
        least = min(plans, key=lambda p: p.peak_bytes)
        return least.mode, "the least memory; with --memory-gb: what fits"
    where = f"{config.memory_gb:g} GiB"
    fitting = {p.mode: p for p in plans if p.fits}
    for mode in PREFERRED:
        if mode not in fitting:
            continue
        if mode == DENSE:
            return mode, f"it fits into {where} as it is"
        others = [p.mode for p in plans if not p.fits]
        beside = (
            f"{', '.join(others)} does not fit into {where}" if others else f"fits into {where}"
        )
        return mode, beside
    best = max(plans, key=lambda p: p.largest_batch or 0)
    if not best.largest_batch:
        return None, f"not one sequence fits into {where} in any mode"
    return best.mode, (
        f"a batch of {config.batch_size} does not fit into {where} in any mode; "
        f"{best.largest_batch} does in this one"
    )


def total_memory_gb() -> float | None:
    """In GiB, of this machine's GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(0).total_memory / GIB)
