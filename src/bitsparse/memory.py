"""What the library holds: live compressed storage, and scratch that is reused between calls."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

_lock = threading.Lock()
_live: dict[int, tuple[int, int]] = {}  # compressed and dense bytes
_next_key = 0
_scratch: dict[tuple[object, ...], Tensor] = {}


def track_live(buffers: list[Tensor], dense_bytes: int) -> None:
    """Count ``buffers`` as live compressed storage of ``dense_bytes`` until they are freed.

    The first of them is watched, since they are kept and freed together: what autograd holds is
    counted for exactly as long as it keeps it.
    """
    global _next_key
    nbytes = storage_bytes(buffers)
    with _lock:
        key = _next_key
        _next_key += 1
        _live[key] = nbytes, dense_bytes
    weakref.finalize(buffers[0], _live.pop, key, None).atexit = False


def storage_bytes(buffers: list[Tensor]) -> int:
    """Bytes of the distinct storages that ``buffers`` keep alive, unused capacity included."""
    storages = [b.untyped_storage() for b in buffers]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def pinned_scratch(like: Tensor, stream: int) -> Tensor:
    """Page-locked host memory for an asynchronous copy of ``like`` (small) on a CUDA stream.

    One buffer a shape, thread, device and stream, valid until the next call for these; the caller
    waits for its copy before it asks again. :func:`release_workspace` frees it.
    """
    key = (tuple(like.shape), str(like.device), stream, threading.get_ident())
    buffer = _scratch.get(key)
    if buffer is None:
        buffer = _scratch[key] = torch.empty(
            like.shape, dtype=like.dtype, device="cpu", pin_memory=True
        )
    return buffer


def memory_stats() -> dict[str, int]:
    """What the library holds right now, in bytes, over all devices.

    Returns:
        A dict with ``scratch_bytes`` (buffers kept for reuse between calls, freed by
        :func:`release_workspace`), ``live_tensors`` (compressed tensors alive, those that autograd
        keeps for backward included), ``live_compressed_bytes`` (what they occupy) and
        ``live_dense_bytes`` (what the same activations would occupy dense).
    """
    with _lock:
        live = list(_live.values())
    return {
        "scratch_bytes": sum(b.nbytes for b in list(_scratch.values())),
        "live_tensors": sum(1 for _, dense in live if dense),
        "live_compressed_bytes": sum(nbytes for nbytes, _ in live),
        "live_dense_bytes": sum(dense for _, dense in live),
    }


def release_workspace() -> None:
    """Free the scratch buffers. Nothing that a backward pass needs is lost."""
    _scratch.clear()
