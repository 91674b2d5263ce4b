"""One training step without values: how many bytes it holds at its peak, and what for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from bitsparse import backends, memory
from bitsparse.conversion import block as conversion_block
from bitsparse.ops import block, chunked
from bitsparse.planning import backend as planning_backend
from bitsparse.planning import tracker as t
from bitsparse.planning.backend import PlanningBackend
from bitsparse.planning.gpu import GpuMode
from bitsparse.planning.models import CHUNKED, COMPRESSED, Source, kinds, without_values
from bitsparse.training.errors import UserError

OPTIMIZERS = {"adamw": 2, "sgd": 1, "none": 0}
"""Tensors of a parameter's size that each keeps: AdamW (fused), SGD with momentum, nothing."""

CUBLAS_WORKSPACES = 2 * 32 * 2**20
"""Of the threads that run forward and backward, as PyTorch allocates them on Hopper GPUs."""


@dataclass(frozen=True)
class StepSettings:
    """How a step is done."""

    batch_size: int
    seq_len: int
    dtype: str
    """Of autocast; "float32": without."""
    param_dtype: str
    optimizer: str
    densities: Sequence[float]
    """Of the blocks, in order; or one for all."""
    positions: str


@dataclass(frozen=True)
class StepPeak:
    """The bytes held when most are."""

    nbytes: int
    by_kind: dict[str, tuple[int, int]]
    """What was allocated before backward, and in backward."""
    parameter_bytes: int
    largest_layer: int
    """Bytes of the parameters of the largest layer, or other part, that is sharded as one."""
    root: int
    """Bytes of the parameters that belong to no layer."""


def predict_step(source: Source, mode: str, settings: StepSettings) -> StepPeak:
    """What the second step of a run allocates at its peak, in a mode that ``source`` has."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    dtype, param_dtype = dtypes[settings.dtype], dtypes[settings.param_dtype]
    autocast = settings.dtype != settings.param_dtype
    model = source.build()
    model.set_mode(mode, settings.batch_size * settings.seq_len)
    densities = list(settings.densities)
    if len(densities) == 1:
        densities *= len(model.blocks)
    if len(densities) != len(model.blocks):
        raise UserError(
            f"--density: got {len(densities)} numbers, allowed: 1, or {len(model.blocks)}, one for "
            "each feed-forward block"
        )
    plan_backend = PlanningBackend(settings.positions)
    if mode in (COMPRESSED, CHUNKED):
        for block, density in zip(model.blocks, densities, strict=True):
            planning_backend.prepare(block.activation, density, settings.positions, dtype)
    purposes = kinds(model)
    tracker = t.Tracker(purposes, {b.hidden for b in model.blocks})
    gpu = GpuMode(source.deterministic, tracker.workspace)
    with _stand_ins(plan_backend), FakeTensorMode(), ExitStack() as stack:
        without_values(model.module, param_dtype)
        stack.callback(tracker.close)
        tracker.watch(model.module)
        for block, density in zip(model.blocks, densities, strict=True):

            def tell(module: object, args: object, density: float = density) -> None:
                plan_backend.density = density

            stack.callback(block.module.register_forward_pre_hook(tell).remove)
        state = [
            torch.empty_like(p)
            for p in model.module.parameters()
            for _ in range(OPTIMIZERS[settings.optimizer])
        ]
        for tensor in state:
            tracker.hold(tensor, t.OPTIMIZER)
        shape = (settings.batch_size, settings.seq_len)
        tokens, targets = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
        tracker.hold(tokens, t.INPUTS)
        tracker.hold(targets, t.INPUTS)
        stack.enter_context(gpu)
        stack.enter_context(tracker)
        stack.enter_context(_cuda_autocast(dtype, autocast))  # in what is recomputed, too
        with torch.autocast("cpu", dtype, enabled=autocast):
            loss = model.loss(tokens, targets)
        tracker.backward = True
        # What loss.backward() calls; inside of that the function mode is off, which what is
        # recomputed needs.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.run_backward(
            *((loss,), (torch.ones_like(loss),), False, False, ()),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        tracker.see_peak()  # the optimizer works in place, on what is there now
    held = Counter(tracker.at_peak)
    held[t.WORKSPACES, False] += CUBLAS_WORKSPACES
    by_kind = {
        k: (held[k, False], held[k, True]) for k in t.KINDS if held[k, False] + held[k, True]
    }
    sizes = [
        sum(p.numel() * p.itemsize for p in m.parameters())
        for m, kind in purposes.items()
        if kind == t.RESIDUALS
    ]
    parameters = sum(p.numel() * p.itemsize for p in model.module.parameters())
    return StepPeak(
        sum(map(sum, by_kind.values())),
        by_kind,
        parameters,
        max(sizes, default=0),
        parameters - sum(sizes),
    )


@contextmanager
def _cuda_autocast(dtype: torch.dtype, enabled: bool) -> Iterator[None]:
    """What models that ask whether autocast is on, without saying where, are told on a GPU.

    (``torch.autocast("cuda")`` is never on without one.)
    """
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@contextmanager
def _stand_ins(backend: PlanningBackend) -> Iterator[None]:
    """Have the library take tensors without values, and do what it does on a GPU.

    In all threads: while this lasts, nothing else should be computed.
    """
    with ExitStack() as stack:
        for owner, name, value in (
            (backends, "_default_backend", lambda device_type: backend),
            (block, "is_watched", lambda: False),
            (memory, "track_live", lambda buffers, dense_bytes: None),
            (memory, "storage_bytes", lambda buffers: 0),
            (conversion_block, "_is_ordinary", lambda x: isinstance(x, torch.Tensor)),
            (chunked._Sum, "add_product", _add_product),
            (conversion_block.Pending, "wrap", staticmethod(_wrap)),
        ):
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        yield


_pending = conversion_block.Pending.wrap


def _wrap(*arguments: Any) -> torch.Tensor:
    """What has no values anyway must not become a tensor of another class without values."""
    with _disable_current_modes():
        return _pending(*arguments)


def _add_product(total: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    """As on a GPU: in place, without a copy in float32."""
