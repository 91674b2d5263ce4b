"""Triton and Numba where they are installed; harmless stand-ins where it is not.

Codings define their GPU functions beside their arithmetic, so their files must import on machines
without them. Nothing here is called there: the backend is chosen by the tensor's device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

try:
    import triton
    import triton.language as tl

    triton_jit: Any = triton.jit
    HAVE_TRITON = True
except ImportError:
    triton = None
    tl = SimpleNamespace(constexpr=Any)

    def triton_jit(fn: Any) -> Any:
        return fn

    HAVE_TRITON = False

try:
    import numba

    def numba_jit(fn: Any) -> Any:
        """Compile at first call; the compiled code runs without the interpreter lock."""
        return numba.njit(nogil=True, error_model="numpy")(fn)

except ImportError:

    def numba_jit(fn: Any) -> Any:
        return fn


__all__ = ["HAVE_TRITON", "numba_jit", "tl", "triton", "triton_jit"]
