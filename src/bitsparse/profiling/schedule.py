"""Which steps are looked at."""

from __future__ import annotations

import statistics
from collections import deque

_FIRST_GUESS = 10
"""What the second look is taken to cost at most, in steps: the first one had kernels compiled."""

_PLAIN_STEPS = 32
"""The latest steps that were not looked at, whose median is what a step takes."""


class Schedule:
    """Every n-th step, or as many as leave the overhead below a limit.

    Args:
        every: n; None: the time of steps decides.
        max_overhead: the time that looking may add, as a share of what training takes without it.
    """

    def __init__(self, every: int | None, max_overhead: float) -> None:
        self._every, self._max_overhead = every, max_overhead
        self._plain: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._plain_total = 0.0
        self._sampled: list[float] = []
        self._step = 0

    def wants(self) -> bool:
        """Whether to look at the next step. The first one always is."""
        if self._every is not None:
            return self._step % self._every == 0
        if not self._sampled:
            return True
        if not self._plain:
            return False
        # The next look is expected to cost as much as the last one.
        step = statistics.median(self._plain)
        expected = max(self._sampled[-1] - step, 0.0)
        if len(self._sampled) == 1:
            expected = min(expected, _FIRST_GUESS * step)
        return self._extra() + expected <= self._max_overhead * self._training()

    def note(self, sampled: bool, seconds: float) -> None:
        """A step is done, and has taken so long."""
        self._step += 1
        if sampled:
            self._sampled.append(seconds)
        else:
            self._plain.append(seconds)
            self._plain_total += seconds

    def _extra(self) -> float:
        """Seconds that looking has added, after the first time."""
        typical = statistics.median(self._plain)
        return sum(max(seconds - typical, 0.0) for seconds in self._sampled[1:])

    def _training(self) -> float:
        """Seconds that the steps after the first look would have taken alone."""
        return self._plain_total + sum(self._sampled[1:]) - self._extra()

    def overhead(self) -> float | None:
        """The share of time that looking has added, after the first time; None: not known."""
        return self._extra() / self._training() if self._plain else None
