"""Backends: the same operations by different means, chosen by the tensor's device.

``reference`` (plain PyTorch, the specification), ``cpu`` (Numba), ``triton`` (CUDA and ROCm),
``cuda`` (Triton and, for what these are faster at, kernels in CUDA C++).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module

import torch

from bitsparse.backends.base import Backend, Kept, Support, Survey, backend_names

BACKENDS = ("reference", "cpu", "triton", "cuda")

_forced: str | None = None


@cache
def get_backend(name: str) -> Backend:
    """The backend of that name; imported at first use.

    Raises:
        ValueError: if there is none of that name.
        ImportError: if it needs a package that is not installed.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}, allowed: {BACKENDS}")
    return import_module(f"bitsparse.backends.{name}").BACKEND  # type: ignore[no-any-return]


_OPTIONAL = ("cuda",)  # what the next one in line does nearly as well: no warning without it


@cache
def _default_backend(device_type: str) -> Backend:
    for name in backend_names(device_type):
        try:
            return get_backend(name)
        except ImportError as error:
            if name not in _OPTIONAL:
                warnings.warn(
                    f"bitsparse: the {name} backend cannot be used ({error}); "
                    "falling back to the slow reference backend",
                    RuntimeWarning,
                    stacklevel=3,
                )
    raise AssertionError("the reference backend serves every device")


def backend_for(device: torch.device) -> Backend:
    """The backend that serves tensors on ``device``."""
    return _default_backend(device.type) if _forced is None else get_backend(_forced)


def is_forced() -> bool:
    """Whether :func:`force_backend` has chosen the backend."""
    return _forced is not None


@contextlib.contextmanager
def force_backend(name: str) -> Iterator[None]:
    """Use one backend whatever the device, in all threads: for tests and comparisons."""
    global _forced
    get_backend(name)
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


__all__ = [
    "BACKENDS",
    "Backend",
    "Kept",
    "Support",
    "Survey",
    "backend_for",
    "force_backend",
    "get_backend",
    "is_forced",
]
