"""The kernel benchmark: each step of a backend against the time that a copy of its bytes takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitsparse import codings, dtypes, layout
from bitsparse.activations import ACTIVATIONS, Activation, get_activation
from bitsparse.backends import (
    BACKENDS,
    Backend,
    Kept,
    Survey,
    backend_for,
    force_backend,
    get_backend,
)
from bitsparse.bench import nvcomp
from bitsparse.bench.inputs import PRE_ACTIVATIONS
from bitsparse.bench.lossless import compress_checked
from bitsparse.bench.result import Result
from bitsparse.bench.timing import Spread, Task, TimeLimit, alternate, forget, reason
from bitsparse.codings import Stream
from bitsparse.tensor import compress
from bitsparse.training.compare import environment
from bitsparse.training.errors import (
    UserError,
    check_at_least,
    check_choice,
    check_density,
    check_names,
)
from bitsparse.training.step import DTYPES, get_device
from bitsparse.training.train import LARGEST_SEED

LARGEST_SHAPE = 2**32
"""Elements of a pre-activation."""

WARMUP = 2
AUTO = "auto"
COPY = "copy"

WHOLE = "compress, to_dense"
"""In place of an activation: the public functions, on relu of the pre-activation."""

STEPS = ("activate", "encode_values", "encode_support", "hidden", "gradient")
"""Of a feed-forward block, in the order in which they run."""

WHOLE_STEPS = ("survey", "compress", "to_dense")


@dataclass(frozen=True)
class KernelsConfig:
    """What is measured, on what."""

    shape: tuple[int, int] = (512, 2048)
    densities: tuple[float, ...] = (0.1,)
    """Shares of the elements whose values are kept."""
    activations: tuple[str, ...] = tuple(ACTIVATIONS)
    inputs: tuple[str, ...] = tuple(PRE_ACTIVATIONS)
    dtype: str = "bfloat16"
    codec: str = "balanced"
    backends: tuple[str, ...] = (AUTO,)
    repeats: int = 5
    time_limit: float | None = None
    """Seconds for everything: no case begins that would not end by then, if it took as long as the
    longest before."""
    device: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise UserError for a value that is not allowed."""
        rows, cols = self.shape
        if rows < 1 or cols < 1 or rows * cols > LARGEST_SHAPE:
            raise UserError(
                f"--shape: got {rows}x{cols}, allowed: ROWSxCOLS with 1 to 2**32 elements"
            )
        check_density("--densities", *self.densities)
        for name, values, allowed in (
            ("--activations", self.activations, tuple(ACTIVATIONS)),
            ("--inputs", self.inputs, tuple(PRE_ACTIVATIONS)),
            ("--backends", self.backends, (AUTO, *BACKENDS)),
        ):
            check_names(name, values, allowed)
        if not self.densities:
            raise UserError("--densities: got none, allowed: at least one")
        check_choice("--dtype", self.dtype, DTYPES)
        check_choice("--codec", self.codec, codings.POLICIES)
        check_at_least("--repeats", self.repeats, 1)
        if self.time_limit is not None:
            check_at_least("--time-limit", self.time_limit, 0)
        check_at_least("--seed", self.seed, 0, LARGEST_SEED)


@dataclass(frozen=True)
class StepTime:
    """One step of one backend."""

    backend: str
    step: str
    device_only: bool
    """Whether it is the work of the device alone; else the call, with what it waits for."""
    support: str | None
    """Coding of the positions that it wrote or read."""
    values: list[str] | None
    seconds: Spread
    moved_bytes: int
    """Of dense tensors, each read or written once, and of what is compressed."""
    floor_seconds: float
    """In which a copy moves so many bytes."""
    share: float
    """``floor_seconds`` by the median."""


@dataclass(frozen=True)
class KernelCase:
    """All steps on one input."""

    inputs: str
    asked_density: float
    activation: str
    density: float
    """Of the kept values."""
    bits_per_element: float | None
    """Of what is kept, by elements of one dense tensor; None: nothing could be compressed."""
    copy: Spread
    """A copy of one dense tensor."""
    copy_gbps: float
    """1e9 bytes read and written per second."""
    steps: list[StepTime]
    failed: dict[str, str]
    """By backend, or backend and step, why."""


@dataclass
class KernelsResult(Result[KernelsConfig, KernelCase]):
    """All that was measured."""

    benchmark = "kernels"


@dataclass
class _Step:
    task: Task
    moved: int
    support: str | None = None
    values: list[str] | None = None


@dataclass
class _Steps:
    """What is to be timed of one backend."""

    kept_bytes: int
    nnz: int
    steps: dict[str, _Step]


def run_kernels(
    config: KernelsConfig,
    on_case: Callable[[KernelsResult, int], None] | None = None,
) -> KernelsResult:
    """Time all steps; ``on_case`` is told the result so far and the number of cases to come in all.

    Raises:
        UserError: a value is not allowed.
    """
    config.check()
    device = get_device(config.device)
    result = KernelsResult(config, environment(device))
    wholes = (WHOLE, *config.activations)
    total = len(config.densities) * len(config.inputs) * len(wholes)
    limit = TimeLimit(config.time_limit)
    for density, inputs, name in itertools.product(config.densities, config.inputs, wholes):
        if not limit.allows_another():
            result.skipped.append(f"{density:g} {inputs} {name}")
            continue
        with limit.part():
            result.cases.append(_case(config, device, inputs, density, name))
            forget()
        if on_case is not None:
            on_case(result, total)
    if result.skipped and on_case is not None:
        on_case(result, total)
    return result


def _case(
    config: KernelsConfig, device: torch.device, inputs: str, density: float, name: str
) -> KernelCase:
    activation = None if name == WHOLE else get_activation(name)
    gate, up = _pre_activations(config, device, inputs, density, activation)
    found: dict[str, _Steps] = {}
    failed: dict[str, str] = {}
    for wanted in config.backends:
        label = backend_for(device).name if wanted == AUTO else wanted
        if label in found or label in failed:
            continue
        try:
            if activation is None:
                found[label] = _whole_steps(label, torch.relu(gate), config.codec)
            else:
                backend = get_backend(label)
                found[label] = _block_steps(backend, activation, gate, up, config.codec)
        except Exception as error:
            failed[label] = reason(error)
            forget(error)
    if activation is None and device.type == "cuda":
        found |= _nvcomp_steps(torch.relu(gate), failed)

    target = torch.empty_like(gate)
    tasks: dict[tuple[str, str], Task] = {
        (COPY, COPY): Task(lambda _: target.copy_(gate), waits=False)
    }
    for label, steps in found.items():
        tasks |= {(label, step): s.task for step, s in steps.steps.items()}

    def drop(key: tuple[str, str], error: Exception) -> None:
        if key == (COPY, COPY):
            raise error
        failed[" ".join(key)] = reason(error)
        forget(error)

    times = alternate(tasks, device, config.repeats, WARMUP, flush=True, on_error=drop)
    spreads = {key: Spread.of(seconds) for key, seconds in times.items()}
    copy = spreads.pop((COPY, COPY))
    rate = 2 * gate.nbytes / copy.median
    first = next(iter(found.values()), None)
    return KernelCase(
        inputs,
        density,
        name,
        density=(first.nnz if first else int((gate > 0).sum())) / gate.numel(),
        bits_per_element=8 * first.kept_bytes / gate.numel() if first else None,
        copy=copy,
        copy_gbps=rate / 1e9,
        steps=[
            _step_time(key, found[key[0]].steps[key[1]], spread, rate)
            for key, spread in spreads.items()
        ],
        failed=failed,
    )


def _step_time(key: tuple[str, str], step: _Step, spread: Spread, rate: float) -> StepTime:
    floor = step.moved / rate
    return StepTime(
        *key,
        device_only=not step.task.waits,
        support=step.support,
        values=step.values,
        seconds=spread,
        moved_bytes=step.moved,
        floor_seconds=floor,
        share=floor / spread.median,
    )


def _pre_activations(
    config: KernelsConfig,
    device: torch.device,
    inputs: str,
    density: float,
    activation: Activation | None,
) -> tuple[Tensor, Tensor | None]:
    """``gate`` and, for gated activations, ``up``; ``density`` of the values will be kept."""
    draw = PRE_ACTIVATIONS[inputs]
    dtype = DTYPES[config.dtype]
    if activation is None or not activation.gated:
        return draw(config.shape, density, device, dtype, config.seed), None
    if activation.relu_up:  # both have to fire
        density = density**0.5
        up = draw(config.shape, density, device, dtype, config.seed + 100)
    else:
        generator = torch.Generator(device).manual_seed(config.seed + 100)
        up = torch.randn(config.shape, generator=generator, device=device).to(dtype)
    return draw(config.shape, density, device, dtype, config.seed), up


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


def _summary_nbytes(survey: Survey) -> int:
    """Of what the first pass writes besides positions."""
    exponents = [] if survey.exponents is None else survey.exponents
    return _nbytes(survey.totals, *survey.tables, *exponents)


def _block_steps(
    backend: Backend, activation: Activation, gate: Tensor, up: Tensor | None, codec: str
) -> _Steps:
    """The steps of a feed-forward block, each of them run once."""
    geometry = layout.geometry(gate.shape)
    statistics = codings.needs_statistics(codec)
    inputs = [t for t in (gate, up) if t is not None]
    scratch = [torch.empty_like(t) for t in inputs]

    def restored() -> list[Tensor]:
        # The first pass overwrites its inputs.
        for t, original in zip(scratch, inputs, strict=True):
            t.copy_(original)
        return scratch

    def activate(consumed: Sequence[Tensor]) -> tuple[Tensor, Survey]:
        pair = consumed[0], (None if up is None else consumed[1])
        return backend.activate(geometry, activation, *pair, False, statistics)

    consumed = [t.clone() for t in restored()]
    hidden, survey = activate(consumed)
    counts = survey.counts(survey.totals.tolist())
    choice = codings.choose(counts, codec)
    sources = list(zip(consumed, (True, activation.relu_up), strict=False))

    def encode_values() -> list[Stream]:
        return [
            backend.encode_values(coding, survey, counts, source, i, relu)
            for i, (coding, (source, relu)) in enumerate(zip(choice.values, sources, strict=True))
        ]

    streams = encode_values()
    support = backend.encode_support(choice.support, survey, counts)
    kept = Kept(support, gate.dtype, *streams)
    out = gate.new_empty(geometry.numel)
    backend.hidden(activation, kept, False, out)
    if not torch.equal(out, hidden.view(-1)):  # -0.0 is 0.0 here
        raise ValueError("the hidden tensor is not what it was")
    del hidden
    grad = torch.randn(geometry.numel, device=gate.device).to(gate.dtype)
    grad_scratch = torch.empty_like(grad)

    masks = [support.mask, *([] if support.up_mask is None else [support.up_mask])]
    mask_bytes = _nbytes(*(t for mask in masks for t in mask.tensors))
    stream_bytes = _nbytes(*(t for stream in streams for t in stream.tensors))
    offset_bytes = support.offsets.nbytes
    word_bytes = _nbytes(survey.words, survey.up_words)
    survey_bytes = word_bytes + _summary_nbytes(survey)
    kept_bytes = mask_bytes + stream_bytes + offset_bytes
    dense = gate.nbytes
    # Where the first pass leaves the values for the second one, which then reads these alone.
    slot_bytes = 0 if survey.slots is None else counts.nnz * gate.itemsize * len(sources)
    coded = {"support": choice.support.name, "values": [c.name for c in choice.values]}
    recoded = choice.support.name == "bucketed"  # a flat mask is what the first pass wrote

    def step(run: Callable[[Any], object], moved: int, prepare: Any = lambda: None) -> _Step:
        return _Step(Task(run, prepare, waits=False), moved, **coded)  # type: ignore[arg-type]

    steps = {
        "activate": step(
            activate, dense * (1 + len(sources)) + survey_bytes + slot_bytes, restored
        ),
        "encode_values": step(
            lambda _: encode_values(),
            (slot_bytes or len(sources) * (dense + word_bytes)) + offset_bytes + stream_bytes,
        ),
        "encode_support": step(
            lambda _: backend.encode_support(choice.support, survey, counts),
            2 * offset_bytes + (word_bytes + mask_bytes if recoded else 0),
        ),
        "hidden": step(lambda _: backend.hidden(activation, kept, False, out), kept_bytes + dense),
        "gradient": step(
            lambda g: backend.gradient(activation, kept, g, False, True, activation.gated),
            dense * (1 + len(sources)) + (mask_bytes if activation.plain else kept_bytes),
            lambda: grad_scratch.copy_(grad),
        ),
    }
    return _Steps(kept_bytes, counts.nnz, steps)


def _whole_steps(name: str, x: Tensor, codec: str) -> _Steps:
    """Compression of a tensor: its first pass, and the public functions."""
    backend = get_backend(name)
    geometry, patterns = layout.geometry(x.shape), dtypes.to_patterns(x)
    statistics = codings.needs_statistics(codec)
    survey = backend.survey(geometry, patterns, x.dtype, statistics)
    survey_bytes = _nbytes(survey.words) + _summary_nbytes(survey)
    with force_backend(name):
        c = compress_checked(x, f"{tuple(x.shape)} {x.dtype}", codec=codec)

    def compress_it(_: object) -> object:
        with force_backend(name):
            return compress(x, codec=codec)

    def decompress_it(_: object) -> object:
        with force_backend(name):
            return c.to_dense()

    coded = partial(_Step, support=c.support, values=[c.values])
    return _Steps(
        c.nbytes,
        c.nnz,
        {
            "survey": _Step(
                Task(
                    lambda _: backend.survey(geometry, patterns, x.dtype, statistics), waits=False
                ),
                x.nbytes + survey_bytes,
            ),
            "compress": coded(Task(compress_it), x.nbytes + c.nbytes),
            "to_dense": coded(Task(decompress_it), x.nbytes + c.nbytes),
        },
    )


def _nvcomp_steps(x: Tensor, failed: dict[str, str]) -> dict[str, _Steps]:
    """NVIDIA's general-purpose compressors on the same tensor, where they are installed."""
    found = {}
    for algorithm in nvcomp.algorithms():
        name = f"nvcomp {algorithm}"
        try:
            codec = nvcomp.NvcompCodec(algorithm, x)
        except Exception as error:
            failed[name] = reason(error)
            forget(error)
            continue
        found[name] = _general_steps(codec, x)
    return found


def _general_steps(codec: nvcomp.NvcompCodec, x: Tensor) -> _Steps:
    moved = x.nbytes + codec.nbytes
    return _Steps(
        codec.nbytes,
        int(torch.count_nonzero(x)),
        {
            "compress": _Step(Task(lambda _: codec.compress()), moved),
            "to_dense": _Step(Task(lambda _: codec.decompress()), moved),
        },
    )
