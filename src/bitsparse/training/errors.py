"""The one exception that is shown to users as a line instead of a traceback."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterable

import torch

LARGEST_BATCH = 2**24
"""Tokens in one batch."""


class UserError(Exception):
    """Something the user can put right; the message is one line that says what and how."""


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise UserError unless ``value`` is one of ``allowed``."""
    allowed = list(allowed)
    if value not in allowed:
        raise UserError(f"{name}: got {value!r}, allowed: {', '.join(allowed)}")


def check_names(name: str, values: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    """Raise UserError unless ``values`` are some of ``allowed``, each once."""
    if not values:
        raise UserError(f"{name}: got none, allowed: {', '.join(allowed)}")
    for value in values:
        check_choice(name, value, allowed)
    if len(set(values)) != len(values):
        raise UserError(f"{name}: got {','.join(values)}, allowed: each once")


def check_density(name: str, *densities: float) -> None:
    """Raise UserError unless all of them are between 0 and 1, both excluded."""
    for density in densities:
        if not 0 < density < 1:
            raise UserError(f"{name}: got {density:g}, allowed: more than 0 and less than 1")


def check_at_least(name: str, value: float, least: float, most: float | None = None) -> None:
    """Raise UserError unless ``least <= value`` (``<= most``). NaN and infinity are refused too."""
    if not (least <= value < math.inf and (most is None or value <= most)):
        upper = "" if most is None else f" and at most {most}"
        raise UserError(f"{name}: got {value}, allowed: at least {least}{upper}")


def check_batch(batch_size: int, seq_len: int) -> None:
    """Raise UserError for a batch that no machine holds, before the machine tries to."""
    if batch_size * seq_len > LARGEST_BATCH:
        raise UserError(
            f"--batch-size: got {batch_size} x --seq-len {seq_len} tokens, allowed: at most "
            f"{LARGEST_BATCH} tokens (more in one step: --grad-accum)"
        )


def check_finite(loss: float, step: int, mode: str) -> None:
    """Raise UserError if training has diverged: nothing worth keeping would follow."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss of step {step + 1} (memory mode {mode}) is {loss}: training diverged; "
            "a smaller --lr may help, an earlier checkpoint is kept"
        )


def os_error(path: object, error: BaseException) -> UserError:
    """A UserError for a failed file operation on ``path``."""
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            reason = "no space left on the disk"
    else:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(f"{path}: {reason}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on the GPU or in the CPU allocator."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
