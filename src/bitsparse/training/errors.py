"""The one exception that is shown to users as a line instead of a traceback."""

from __future__ import annotations

import errno
from collections.abc import Iterable

import torch


class UserError(Exception):
    """Something the user can put right; the message is one line that says what and how."""


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise UserError unless ``value`` is one of ``allowed``."""
    allowed = list(allowed)
    if value not in allowed:
        raise UserError(f"{name}: got {value!r}, allowed: {', '.join(allowed)}")


def check_at_least(name: str, value: float, least: float, most: float | None = None) -> None:
    """Raise UserError unless ``least <= value`` (``<= most``). NaN is refused too."""
    if not (value >= least and (most is None or value <= most)):
        upper = "" if most is None else f" and at most {most}"
        raise UserError(f"{name}: got {value}, allowed: at least {least}{upper}")


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
