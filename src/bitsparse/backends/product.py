"""The gradient of the hidden tensor and that of the pre-activation in one kernel, where that pays.

``mm(grad, w_down)`` and :meth:`Backend.gradient` are two passes over a tensor of tokens * d_ff.
:mod:`bitsparse.backends.triton_product` does both in one, but it adds up in an order of its own,
and the bits must be those of PyTorch's product, whose order depends on sizes and settings. So both
are tried in the first backward passes of each size: the two passes give the result, the kernel
does the same beside them, and what is found reaches the host without anyone waiting. From then on
the kernel is used where every bit was the same and it took less time.

What a trial compares:

- the whole product, which the kernel stores as it is where all hidden values are 1/4. Batches in
  which a part of it is zero, or whose sums are the same in any order (of few or round numbers),
  show nothing: such a trial does not count.
- for some tokens, the gradient itself, with their hidden values.

The environment variable ``BITSPARSE_FUSED=0`` keeps to the two passes.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bitsparse import backends, layout
from bitsparse.activations import Activation
from bitsparse.backends.base import Kept

_LEAST = 2**24
"""Elements of the hidden tensor below which there is little to gain."""
_MOST_KEYS = 64
_TRIALS = 4
"""How many must have shown the same bits; the times of the first are left out."""
_PARTS = 32
"""A trial holds two of so many parts of the hidden tensor, a part being some tokens."""
_MOST_BLANK = 1024
"""A trial counts if one in so many elements of the product, or fewer, is zero or NaN, ..."""
_SAMPLE = 1024
_LEAST_TELLING = 4
"""... and another order of summation changes so many elements of a sample of so many columns.
(Of normal random numbers about one in 10,000 changes, by an emulation of such sums.)"""

Gradients = tuple[Tensor | None, Tensor | None]
"""Of ``gate`` and ``up``, as :meth:`Backend.gradient` returns them."""


class Outcome(NamedTuple):
    """What a trial has shown."""

    differing: int
    """Elements whose bits differ."""
    telling: bool
    """Whether other orders of summation would have shown."""
    fused: float
    separate: float
    """Time of the kernel and of the two passes, in ms."""


class Trial(Protocol):
    def finished(self) -> bool:
        """Whether :meth:`outcome` is known, without waiting for it."""

    def outcome(self) -> Outcome:
        """Once it is finished."""


class _Record:
    def __init__(self) -> None:
        self.verdict: bool | None = None
        self.why = ""
        self.asked = 0
        self.due = 0  # when asked so often: another trial
        self.blank = 0  # trials that have shown nothing
        self.pending: list[Trial] = []
        self.good: list[Outcome] = []

    def decide(self, verdict: bool, why: str) -> None:
        self.verdict, self.why = verdict, why
        self.pending.clear()
        self.good.clear()

    def judge(self) -> None:
        """Take in the trials that have finished."""
        while self.pending and self.pending[0].finished():
            outcome = self.pending.pop(0).outcome()
            if outcome.differing:
                self.decide(False, f"two passes: {outcome.differing} elements had other bits")
                return
            if outcome.telling:
                self.good.append(outcome)
            else:
                # Weights that start at zero may stay so for many backward passes.
                self.blank += 1
                self.due = self.asked + 2**self.blank
        if len(self.good) >= _TRIALS:
            timed = self.good[1:]
            fused = statistics.median(o.fused for o in timed)
            separate = statistics.median(o.separate for o in timed)
            times = f"{fused:.3f} ms fused, {separate:.3f} ms in two passes"
            if fused < separate:
                self.decide(True, f"fused: {times}")
            else:
                self.decide(False, f"two passes: {times}")


class Selector:
    """Which of the two ways to take; for use by several threads."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self.used = 0
        """How often the kernel gave the result."""
        self._most_keys = most_keys
        self._lock = threading.Lock()
        self._records: dict[Hashable, _Record] = {}

    def ask(self, key: Hashable) -> str:
        """ "fused", "separate", or "trial": both, which :meth:`add` or :meth:`fail` is told of."""
        with self._lock:
            record = self._records.get(key)
            if record is None:
                if len(self._records) >= self._most_keys:
                    return "separate"
                record = self._records[key] = _Record()
            record.asked += 1
            if record.verdict is None:
                record.judge()
            if record.verdict is not None:
                self.used += record.verdict
                return "fused" if record.verdict else "separate"
            enough = len(record.good) + len(record.pending) >= _TRIALS
            return "separate" if enough or record.asked < record.due else "trial"

    def add(self, key: Hashable, trial: Trial) -> None:
        """A trial has begun."""
        with self._lock:
            record = self._records[key]
            if record.verdict is None:
                record.pending.append(trial)

    def fail(self, key: Hashable, why: str, anywhere: bool = False) -> None:
        """The kernel must not be used for ``key``; ``anywhere``: nor be tried for others."""
        with self._lock:
            self._records[key].decide(False, f"two passes: {why}")
            if anywhere:
                self._most_keys = 0

    def decisions(self) -> dict[Hashable, str]:
        with self._lock:
            return {
                key: record.why or f"undecided: {len(record.good)} of {_TRIALS} trials"
                for key, record in self._records.items()
            }


def _override_of_environment() -> str | None:
    value = os.environ.get("BITSPARSE_FUSED", "1")
    if value not in ("0", "1"):
        raise ValueError(f"BITSPARSE_FUSED: got {value!r}; allowed: '0', '1'")
    return None if value == "1" else "never"


_selector = Selector()
_override = _override_of_environment()


def uses() -> int:
    """How often the kernel gave the result in this process."""
    return _selector.used


def decisions() -> dict[Hashable, str]:
    """For each size (and settings) that was met, which way is taken, and why."""
    return _selector.decisions()


@contextlib.contextmanager
def override(choice: str) -> Iterator[None]:
    """Use the kernel wherever it can work ("always") or nowhere ("never"), in all threads, or start
    anew with trials, of any size ("afresh"): for tests and comparisons."""
    global _override, _selector
    if choice not in ("always", "never", "afresh"):
        raise ValueError(f"choice: got {choice!r}; allowed: 'always', 'never', 'afresh'")
    before = _override, _selector
    _override = choice
    if choice == "afresh":
        _selector = Selector()
    try:
        yield
    finally:
        _override, _selector = before


def gradients(
    activation: Activation,
    kept: Kept,
    grad: Tensor,
    w_down: Tensor,
    rows: Tensor,
    two_passes: Callable[[], Gradients],
) -> Gradients:
    """Gradients of ``gate`` and ``up``; that of ``gate`` is wanted.

    Args:
        grad: ``[tokens, d_out]``, of the block's output.
        w_down: ``[d_out, d_ff]``.
        rows: ``[tokens, d_ff]``, contiguous: the hidden tensor. Overwritten.
        two_passes: computes them in two passes and may overwrite ``rows``.
    """
    if not _applies(activation, kept, grad, w_down, rows):
        return two_passes()
    kernels = _kernels()
    assert kernels is not None
    selector = _selector
    key = _key(activation, grad, w_down, rows)
    choice = "fused" if _override == "always" else selector.ask(key)
    if choice == "fused":
        kernels.product_gradient(activation.squared, grad, w_down, rows)
        return rows.view(-1), None
    if choice == "separate":
        return two_passes()
    return _try(selector, key, kernels, activation, grad, w_down, rows, two_passes)


def _applies(
    activation: Activation, kept: Kept, grad: Tensor, w_down: Tensor, rows: Tensor
) -> bool:
    """Whether the kernel can be used, and may."""
    if (
        activation.gated
        or (activation.squared and not kept.roots)
        or _override == "never"
        or (_override is None and (backends.is_forced() or rows.numel() < _LEAST))
        or not rows.is_cuda
    ):
        return False
    tensors = grad, w_down, rows
    d_out, d_ff = w_down.shape
    return (
        all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
        and all(t.dtype == torch.bfloat16 for t in tensors)
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
        and d_out > 0
        and d_out % 8 == 0
        and d_ff % 8 == 0
        and rows.numel() > 0
        and grad.shape[0] < 2**31 - 2**16
        and _capability(rows.device) == 9
        # What tuning finds next time may be another product.
        and not torch.cuda.tunable.is_enabled()
        and not torch.cuda.is_current_stream_capturing()
        and _kernels() is not None
    )


@cache
def _capability(device: torch.device) -> int:
    """The major number of the compute capability; 0 for other makes of GPUs."""
    return 0 if torch.version.cuda is None else torch.cuda.get_device_capability(device)[0]


@cache
def _kernels() -> ModuleType | None:
    """None without Triton, or without its tensor descriptors."""
    try:
        from bitsparse.backends import triton_product
    except ImportError:
        return None
    return triton_product


class Key(NamedTuple):
    """Whatever the order of summation of PyTorch's product might depend on, and the time."""

    device: torch.device
    activation: str
    tokens: int
    d_out: int
    d_ff: int
    settings: tuple[Any, ...]
    """Alignments of the tensors, and PyTorch's settings."""


def _key(activation: Activation, grad: Tensor, w_down: Tensor, rows: Tensor) -> Key:
    matmul = torch.backends.cuda.matmul
    settings = (
        # Up to 256 bytes, the largest alignment that libraries ask for.
        *(t.data_ptr() % 256 for t in (grad, w_down, rows)),
        torch.backends.cuda.preferred_blas_library(),
        getattr(matmul, "allow_bf16_reduced_precision_reduction", None),
        getattr(matmul, "allow_bf16_reduced_precision_reduction_split_k", None),
        torch.are_deterministic_algorithms_enabled(),
        getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)(),
    )
    (tokens, d_out), d_ff = grad.shape, rows.shape[1]
    return Key(rows.device, activation.name, tokens, d_out, d_ff, settings)


def _try(
    selector: Selector,
    key: Key,
    kernels: Any,
    activation: Activation,
    grad: Tensor,
    w_down: Tensor,
    rows: Tensor,
    two_passes: Callable[[], Gradients],
) -> Gradients:
    """The gradients in two passes, and a trial."""

    def fail(error: Exception) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            selector.fail(key, "no memory for a trial")
            return
        selector.fail(key, f"the kernel fails ({error})", anywhere=True)
        warnings.warn(
            f"bitsparse: the kernel that fuses a product with the gradient of {activation.name} "
            f"cannot be used ({error}); using two",
            RuntimeWarning,
            stacklevel=3,
        )

    # Without room for it, or with a version of Triton that does not compile it, nothing is lost.
    trial: _DeviceTrial | None = None
    try:
        trial = _DeviceTrial(kernels, activation, grad, w_down, rows)
    except Exception as error:
        fail(error)
    start = _record(rows.device)
    gate, up = two_passes()
    end = _record(rows.device)
    if trial is not None and gate is not None:
        try:
            trial.compare(gate, start, end)
            selector.add(key, trial)
        except Exception as error:
            fail(error)
    return gate, up


class _DeviceTrial:
    """See :class:`Trial`. To be made before the two passes, and told of their result after them.

    Besides small things it holds two parts of the hidden tensor.
    """

    def __init__(
        self, kernels: Any, activation: Activation, grad: Tensor, w_down: Tensor, rows: Tensor
    ) -> None:
        self._kernels, self._squared = kernels, activation.squared
        self._numel = rows.numel()
        # Of the whole product, of the sample, of the gradient: what differs, what is 0 or NaN.
        self._counts = torch.zeros(3, 2, dtype=torch.int64, device=rows.device)
        # On their way to the host until `_done`; nobody else's.
        self._host = torch.empty(3, 2, dtype=torch.int64, pin_memory=True)
        tokens = grad.shape[0]
        # Whole tiles of the kernel.
        size = layout.ceil_div(layout.ceil_div(tokens, _PARTS), 128) * 128
        self._grad, self._w_down = grad[:size], w_down
        self._hidden = rows[:size].clone()
        torch.mm(grad, w_down, out=rows)
        self._sample(rows)
        part = torch.empty_like(self._hidden)
        for first in range(0, tokens, size):
            wanted = rows[first : first + size]
            got = part[: wanted.shape[0]]
            got.fill_(0.25)  # whose root's double is 1
            self._run(grad[first : first + size], w_down, got)
            kernels.count_differences(got, wanted, self._counts[0])
        del part, got
        start = _record(rows.device)
        self._run(grad, w_down, rows)
        self._fused = start, _record(rows.device)

    def _run(self, grad: Tensor, w_down: Tensor, hidden: Tensor) -> None:
        self._kernels.product_gradient(self._squared, grad, w_down, hidden)

    def _sample(self, rows: Tensor) -> None:
        """Compare with another order of summation: the last term first."""
        cols = min(_SAMPLE, rows.shape[1])
        other = torch.mm(self._grad.flip(1), self._w_down[:, :cols].flip(0))
        wanted = rows[: other.shape[0], :cols].contiguous()
        self._kernels.count_differences(other, wanted, self._counts[1])

    def compare(self, gate: Tensor, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """``gate``: the gradient that took from ``start`` to ``end``."""
        self._separate = start, end
        self._run(self._grad, self._w_down, self._hidden)
        wanted = gate.view(-1, self._hidden.shape[1])[: self._hidden.shape[0]]
        self._kernels.count_differences(self._hidden, wanted, self._counts[2])
        self._host.copy_(self._counts, non_blocking=True)
        self._done = _record(gate.device)
        del self._grad, self._w_down, self._hidden, self._counts

    def finished(self) -> bool:
        return self._done.query()  # type: ignore[no-any-return]

    def outcome(self) -> Outcome:
        (differing, blank), (reordered, _), (also_differing, _) = self._host.tolist()
        telling = blank * _MOST_BLANK <= self._numel and reordered >= _LEAST_TELLING
        fused, separate = (a.elapsed_time(b) for a, b in (self._fused, self._separate))
        return Outcome(differing + also_differing, telling, fused, separate)


def _record(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
