"""Times and memory: one way of measuring for all benchmarks."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from bitsparse import dtypes, memory
from bitsparse.training.errors import is_out_of_memory

Key = TypeVar("Key", bound=Hashable)

FLUSH_BYTES = 256 * 2**20
"""Written before what is timed alone: more than the cache of a GPU holds."""

_HEAD_START = 2_000_000
"""Cycles, about a millisecond, in which the host gets ahead of a GPU."""

OUT_OF_MEMORY = "out of memory"

_REASON = 300
"""Characters of an error that are kept."""


@dataclass(frozen=True)
class Spread:
    """Seconds over the repetitions."""

    median: float
    low: float
    """Lower quartile."""
    high: float
    """Upper quartile."""
    repetitions: int

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        """Of at least one time."""
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))


@dataclass
class TimeLimit:
    """Of a whole benchmark: says whether there is time for one more part."""

    seconds: float | None
    """From now on; None: no limit."""
    longest: float = 0.0
    """Seconds of the longest part so far."""
    began: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        """Seconds until the limit."""
        if self.seconds is None:
            return math.inf
        return self.seconds - (time.perf_counter() - self.began)

    def allows_another(self) -> bool:
        """Whether a part as long as the longest would end in time; the first one may always run."""
        return self.longest == 0 or self.left() >= self.longest

    @contextmanager
    def part(self) -> Iterator[None]:
        """What runs under this is a part."""
        began = time.perf_counter()
        yield
        self.longest = max(self.longest, time.perf_counter() - began)


@dataclass(frozen=True)
class Task:
    """Something to time."""

    run: Callable[[Any], object]
    """Given what ``prepare`` returned."""
    prepare: Callable[[], Any] = lambda: None
    """Not timed."""
    waits: bool = True
    """Whether the host waits for something on the way. Of a task where it does not, the device's
    work is timed alone: the host gets a head start."""


def seconds(run: Callable[[], object], device: torch.device, head_start: bool = False) -> float:
    """The time that ``run`` takes, with what it waits for on the host; its result is dropped.

    ``head_start``: keep a GPU busy before, so that what ``run`` launches waits there.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    torch.cuda.synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if head_start:
        torch.cuda._sleep(_HEAD_START)
    start.record()
    run()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


class Flush:
    """Empties the caches of a GPU; does nothing elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._buffer: Tensor | None = None
        if device.type == "cuda":
            self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        if self._buffer is not None:
            self._buffer.zero_()


def alternate(
    tasks: Mapping[Key, Task],
    device: torch.device,
    repetitions: int,
    warmup: int = 0,
    *,
    flush: bool = False,
    max_seconds: float | None = None,
    on_error: Callable[[Key, Exception], None] | None = None,
    on_round: Callable[[], None] | None = None,
) -> dict[Key, list[float]]:
    """Time all tasks, one after the other in each round, in an order that rotates.

    Args:
        tasks: by any key.
        device: where they run.
        repetitions: timed rounds.
        warmup: rounds before that.
        flush: whether the caches of a GPU are emptied before every task.
        max_seconds: after this time no round begins but the first three.
        on_error: told of a task that raised; it is dropped, its times with it. Without, errors are
            the caller's.
        on_round: called after each timed round.

    Returns:
        The seconds of each round, by key. Lists are of the same length.
    """
    left = dict(tasks)
    found: dict[Key, list[float]] = {key: [] for key in tasks}
    empty_cache = Flush(device) if flush else None
    began = time.perf_counter()
    for number in range(-warmup, repetitions):
        late = max_seconds is not None and time.perf_counter() - began > max_seconds
        if late and number >= min(3, repetitions):
            break
        keys = list(tasks)
        turn = number % len(keys) if keys else 0
        for key in keys[turn:] + keys[:turn]:
            if key not in left:
                continue
            try:
                taken = _time(left[key], device, empty_cache)
            except Exception as error:
                if on_error is None:
                    raise
                del left[key]
                found.pop(key, None)
                on_error(key, error)
                continue
            if number >= 0:
                found[key].append(taken)
        if number >= 0 and on_round is not None:
            on_round()
    return found


def _time(task: Task, device: torch.device, empty_cache: Flush | None) -> float:
    prepared = task.prepare()
    if empty_cache is not None:
        empty_cache()
    return seconds(lambda: task.run(prepared), device, head_start=not task.waits)


def reason(error: BaseException) -> str:
    """One line that says why something failed."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:_REASON]


def forget(error: BaseException | None = None) -> None:
    """Free what a failed or finished part held: tensors in the frames of ``error``, the
    library's scratch, caches."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    memory.release_workspace()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors (or two absent ones) are equal in every bit."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(dtypes.to_patterns(a.contiguous()), dtypes.to_patterns(b.contiguous()))
