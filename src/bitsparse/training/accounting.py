"""Measuring what a training step holds: what autograd saves, and the peak of a step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitsparse.training.model import Transformer


@dataclass
class SavedBytes:
    """Bytes of the distinct storages saved for backward, parameters not counted."""

    whole_model: int = 0
    feed_forward: int = 0
    """Of that, saved inside feed-forward blocks (input, hidden activations, cast weights)."""


@dataclass
class _Recorder:
    skip: set[int]
    """Addresses of the parameters' storages."""
    inside: int = 0
    model: dict[int, int] = field(default_factory=dict)
    feed_forward: dict[int, int] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self.skip:
            self.model[address] = storage.nbytes()
            if self.inside:
                self.feed_forward[address] = storage.nbytes()
        return tensor.detach()  # the tensor itself would be a reference cycle


@contextmanager
def count_saved(model: Transformer) -> Iterator[SavedBytes]:
    """Count what a forward pass under this context saves for backward.

    What autograd is handed is counted, for every memory mode in the same way: a checkpointed block
    saves its inputs, a compressed one its compressed buffers. Numbers are there when it ends.
    """
    recorder = _Recorder({p.untyped_storage().data_ptr() for p in model.parameters()})
    result = SavedBytes()

    def enter(*_: object) -> None:
        recorder.inside += 1

    def leave(*_: object) -> None:
        recorder.inside -= 1

    with ExitStack() as stack:
        for block in model.feed_forwards():
            stack.callback(block.register_forward_pre_hook(enter).remove)
            stack.callback(block.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(
            torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor)
        )
        yield result
    result.whole_model = sum(recorder.model.values())
    result.feed_forward = sum(recorder.feed_forward.values())


def step_peak(device: torch.device, run: Callable[[], Any]) -> tuple[Any, int | None]:
    """Run ``run`` and measure how far PyTorch's allocator rises above its level before.

    Returns:
        The result of ``run``, and the rise in bytes (of tensors, in the device's memory), or None
        where it could not be measured.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    result, changes = _cpu_changes(run)
    if changes is None:
        return result, None
    level = peak = 0
    for nbytes in changes:
        level += nbytes
        peak = max(peak, level)
    return result, peak or None


def allocated_by(run: Callable[[], Any], device: torch.device) -> tuple[Any, int | None]:
    """Run ``run`` and measure how much more PyTorch's allocator holds after than before.

    Returns:
        The result of ``run``, and the bytes in the device's memory, the result's included; None
        where they could not be measured.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        result = run()
        return result, torch.cuda.memory_allocated(device) - before
    result, changes = _cpu_changes(run)
    return result, None if changes is None else sum(changes)


def _cpu_changes(run: Callable[[], Any]) -> tuple[Any, list[int] | None]:
    """Run ``run``; also the bytes that were allocated (or freed: negative), in order, or None."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    with _quiet_stderr():
        profiler.start()
    try:
        result = run()
    finally:
        with _quiet_stderr():
            profiler.stop()
    try:
        found: Any = profiler.profiler
        events = found.kineto_results.events()
        changes = sorted(
            (e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]"
        )
    except (AttributeError, TypeError):  # not a public interface: it may go away
        return result, None
    return result, [nbytes for _, _, nbytes in changes]


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Discard what native code writes: the profiler logs its starts and stops, come what may."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
