"""Watching the feed-forward blocks of a model while it trains.

A step that is looked at runs with hooks on modules (outside of blocks: a block with hooks inside is
not compressed), with saved-tensor hooks, and in a mode that sees the projections, as calls of
``linear`` with a weight of a block. Other steps run as if nothing was there.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bitsparse import codings, dtypes
from bitsparse.ops.feed_forward import MEMORY_MODES
from bitsparse.profiling.blocks import ProfiledBlock, find_blocks
from bitsparse.profiling.live import OnStep, StepMetrics
from bitsparse.profiling.measure import measure
from bitsparse.profiling.results import Profile, Row
from bitsparse.profiling.saved import RECOMPUTED, Hidden, Owner, SavedMemory, at_peak, timeline
from bitsparse.profiling.schedule import Schedule

FEED_FORWARD = "feed-forward"

# By parts of the name of a class.
_BY_NAME = {"attention": "attention", "attn": "attention", "norm": "normalization"}
_BY_CLASS = {nn.Embedding: "embedding", nn.Linear: "linear", nn.Dropout: "dropout"}
# Functions that modules call outside of modules with a kind.
_BY_FUNCTION = {
    "scaled_dot_product_attention": "attention",
    "multi_head_attention_forward": "attention",
    "cross_entropy": "loss",
    "layer_norm": "normalization",
    "rms_norm": "normalization",
    "embedding": "embedding",
    "dropout": "dropout",
    "linear": "linear",
}


def profile(
    model: nn.Module,
    *,
    every: int | None = None,
    max_overhead: float = 0.05,
    codec: str = "balanced",
    timed: bool = True,
    path: str | os.PathLike[str] | None = None,
    on_step: OnStep | None = None,
) -> Profiler:
    """Look into a training loop::

        with bitsparse.profile(model, path="profile.jsonl") as p:
            for batch in batches:
                ...  # forward, backward, optimizer
                p.step()

    Outputs and gradients keep their bits. Works with :class:`bitsparse.nn.FeedForward` in every
    memory mode, with converted models, and with models that could be converted: sizes are those
    that compression has, or would have.

    Args:
        model: what is trained.
        every: look at every n-th step; None: at the first and then at as many as ``max_overhead``
            allows.
        max_overhead: how much longer training may take, as a share; the first step aside. Not
            used where ``every`` says which steps.
        codec: what compressed sizes and times are of; sizes of the others are there too.
        timed: whether to compress and decompress once more, to time that.
        path: where the results are written at the end, also if an exception ends the loop.
        on_step: called after each step that was looked at, with an object that has ``step`` and
            ``scalars()``: see :class:`bitsparse.profiling.live.TensorBoardLogger`.

    Raises:
        TypeError: ``model`` is no module, or ``on_step`` not callable.
        ValueError: a value that is not allowed, or a model without a feed-forward block.
    """
    return Profiler(model, every, max_overhead, codec, timed, path, on_step)


class Profiler:
    """The context of :func:`profile`; afterwards ``result`` has what was found out."""

    def __init__(
        self,
        model: nn.Module,
        every: int | None,
        max_overhead: float,
        codec: str,
        timed: bool,
        path: str | os.PathLike[str] | None,
        on_step: OnStep | None,
    ) -> None:
        self.blocks, skipped = find_blocks(model)
        codings.check_policy(codec)
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(f"every: got {every!r}, allowed: None, a positive integer")
        is_number = isinstance(max_overhead, (int, float)) and not isinstance(max_overhead, bool)
        if not is_number or not 0 < max_overhead < float("inf"):
            raise ValueError(f"max_overhead: got {max_overhead!r}, allowed: a positive number")
        if on_step is not None and not callable(on_step):
            raise TypeError(f"on_step: got {on_step!r}, allowed: None, a callable")
        self.model, self.codec, self.timed = model, codec, timed
        self.result = Profile()
        """What has been found out so far."""
        self._path, self._on_step = path, on_step
        self._schedule = Schedule(every, float(max_overhead))
        self._step = 0
        self._began = 0.0
        self._sample: Sample | None = None
        self._inside = False
        modes = sorted({b.memory for b in self.blocks}, key=MEMORY_MODES.index)
        self.result.header = {
            "model": type(model).__name__,
            "memory": "+".join(modes),
            "activation": "+".join(sorted({b.activation.name for b in self.blocks})),
            "codec": codec,
            "torch": torch.__version__,
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        self.result.skipped = [{"layer": s.name, "reason": s.reason} for s in skipped]

    def __enter__(self) -> Profiler:
        if self._inside:
            raise RuntimeError("this profile is running already")
        self._inside = True
        self._start()
        return self

    def step(self) -> None:
        """The step is done; the next one begins. At the level of the ``with`` statement, not
        inside of another context.

        Raises:
            RuntimeError: called outside of the ``with`` statement, or inside of another mode.
        """
        if not self._inside:
            raise RuntimeError("step: called outside of `with bitsparse.profile(...)`")
        self._finish()
        self._start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._inside = False
        self._finish(keep=kind is None)
        if kind is None and not self.result.layers:
            warnings.warn(
                "profile: no forward pass with gradients of any feed-forward block was seen "
                f"({len(self.blocks)} in the model); nothing is reported or written. In compiled "
                "and sharded models, and under reentrant checkpointing, it cannot be: profile the "
                "plain model",
                UserWarning,
                stacklevel=2,
            )
        elif self._path is not None and self.result.layers:
            self.result.save(self._path)

    def _start(self) -> None:
        self._began = time.perf_counter()
        if self._schedule.wants():
            self._sample = Sample(self.model, self.blocks, self.codec, self.timed)
            self._sample.start()

    def _finish(self, keep: bool = True) -> None:
        """End a step; without ``keep`` or anything seen, one that was not whole."""
        sample = self._sample
        if sample is not None:
            sample.stop()  # where it raises, the end of the `with` statement tries again
            self._sample = None
            if keep and sample.rows:
                self._add(sample)
        self._schedule.note(sample is not None, time.perf_counter() - self._began)
        self.result.header["overhead"] = self._schedule.overhead()
        self._step += 1

    def _add(self, sample: Sample) -> None:
        step, result = self._step, self.result
        sizes = {
            row["visit"]: Hidden(row["dense_bytes"], row["compressed_bytes"]) for row in sample.rows
        }
        events = sample.memory.events
        levels = timeline(events, sizes)
        saved, held = at_peak(events)
        kinds: Counter[str] = Counter()
        for (_, kind), nbytes in held.items():
            kinds[kind] += nbytes
        hidden: Counter[int] = Counter()
        for owner, nbytes in events:
            if owner.hidden and owner.visit is not None and nbytes > 0:
                hidden[owner.visit] += nbytes
        layers = [
            {"step": step, "hidden_bytes": hidden[row["visit"]], **row} for row in sample.rows
        ]
        for row in layers:
            del row["visit"]
        elements = sum(row["tokens"] * row["neurons"] for row in layers)
        summary = {
            "step": step,
            "saved_bytes": saved,
            "feed_forward_bytes": kinds[FEED_FORWARD],
            "dense_bytes": max((level.dense for level in levels), default=0),
            "compressed_bytes": max((level.compressed for level in levels), default=0),
            "hidden_dense_bytes": sum(row["dense_bytes"] for row in layers),
            "hidden_compressed_bytes": sum(row["compressed_bytes"] for row in layers),
            "density": sum(r["density"] * r["tokens"] * r["neurons"] for r in layers) / elements,
            "silent_neurons": sum(row["silent_neurons"] for row in layers),
        }
        result.steps.append(summary)
        result.layers += layers
        result.memory += [
            {"step": step, "name": name, "kind": kind, "bytes": nbytes}
            for (name, kind), nbytes in held.items()
        ]
        self._keep_two(
            {
                "timeline": [
                    {
                        "step": step,
                        "event": i,
                        "name": event.owner.name,
                        "kind": event.owner.kind,
                        "bytes": event.nbytes,
                        **level._asdict(),
                    }
                    for i, (event, level) in enumerate(zip(events, levels, strict=True))
                ],
                "exponents": [{"step": step, **row} for row in sample.exponents],
                "positions": [{"step": step, **row} for row in sample.positions],
            }
        )
        if self._on_step is not None:
            self._on_step(StepMetrics(step, _scalars(summary, kinds, layers)))

    def _keep_two(self, tables: dict[str, list[Row]]) -> None:
        """Of what is large, only the first and the latest step are kept."""
        first = self.result.steps[0]["step"]
        for name, rows in tables.items():
            kept = [row for row in getattr(self.result, name) if row["step"] == first]
            setattr(self.result, name, kept + rows)


def _scalars(summary: Row, kinds: Counter[str], layers: list[Row]) -> dict[str, float]:
    values = {name: value for name, value in summary.items() if name != "step"}
    values |= {f"saved/{kind}": nbytes for kind, nbytes in kinds.items()}
    values |= {f"density/{row['layer']}": row["density"] for row in layers}
    values |= {f"bits/{row['layer']}": row[f"bits_{row['codec']}"] for row in layers}
    return values


@dataclass
class _Visit:
    """A forward pass of a block."""

    number: int
    block: ProfiledBlock
    projecting: bool = False
    """Whether an up or gate projection runs."""
    packed: bool = False
    """Whether compressed buffers were saved: that ends a block without a module of its own."""
    projected: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Scope:
    """A module that runs."""

    name: str
    kind: str
    visit: _Visit | None = None


class _Mode(TorchFunctionMode):
    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.sample.call(func, args, kwargs or {})


class Sample:
    """A step that is looked at, between :meth:`start` and :meth:`stop`."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[ProfiledBlock],
        codec: str,
        timed: bool,
    ) -> None:
        self.model, self.blocks, self.codec, self.timed = model, blocks, codec, timed
        self.rows: list[Row] = []
        self.exponents: list[Row] = []
        self.positions: list[Row] = []
        self.memory = SavedMemory(model, self._owner)
        self._roles = {
            id(linear.weight): (block, part)
            for block in blocks
            for part in ("up", "gate", "down")
            if (linear := getattr(block, part)) is not None
        }
        self._scopes: list[_Scope] = []
        self._open: _Visit | None = None
        self._function_kind: str | None = None
        self._visits = 0
        self._calls: Counter[str] = Counter()
        self._stack = ExitStack()
        self._depth = 0

    def start(self) -> None:
        """Install hooks and modes."""
        whole = {id(b.module): b for b in self.blocks if b.module is not None}
        parts = {id(part) for block in self.blocks for part in block.parts}
        scopes: dict[str, _Scope] = {}
        for name, module in self.model.named_modules():
            parent = scopes.get(name.rpartition(".")[0]) if name else None
            block = whole.get(id(module))
            scope = _Scope(name, _kind(name, module, parent) if block is None else FEED_FORWARD)
            scopes[name] = scope
            if id(module) not in parts:
                self._watch(module, scope, block)
        self._stack.enter_context(self.memory.hooks)
        self._stack.enter_context(_Mode(self))
        self._depth = torch._C._len_torch_function_stack()

    def stop(self) -> None:
        """Remove them.

        Raises:
            RuntimeError: a context that was entered later is still there.
        """
        depth = torch._C._len_torch_function_stack()
        if depth != self._depth:
            raise RuntimeError(
                "profile: step() was called inside of a context that was entered after "
                "`with bitsparse.profile(...)` or the last step(); call it outside"
            )
        self._stack.close()

    def _watch(self, module: nn.Module, scope: _Scope, block: ProfiledBlock | None) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._leave()
            visit = None if block is None else self._visit(block)
            self._scopes.append(_Scope(scope.name, scope.kind, visit))
            if block is not None and block.recomputes_input and torch.is_grad_enabled():
                self._project(block, args[0])

        def leave(*_: object) -> None:
            self._leave()
            if self._scopes:
                self._scopes.pop()

        self._stack.callback(module.register_forward_pre_hook(enter).remove)
        self._stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _visit(self, block: ProfiledBlock) -> _Visit:
        self._visits += 1
        return _Visit(self._visits, block)

    def _leave(self) -> None:
        self._open = None

    def _current(self) -> _Visit | None:
        if self._open is not None:
            return self._open
        return self._scopes[-1].visit if self._scopes else None

    def _owner(self, tensor: Tensor) -> Owner:
        visit = self._current()
        if visit is None and not self._scopes and _in_backward():
            return Owner("", RECOMPUTED)
        if visit is None:
            scope = self._scopes[-1] if self._scopes else _Scope("", "other")
            kind = scope.kind
            if kind == "other" and self._function_kind is not None:
                kind = self._function_kind
            return Owner(scope.name, kind)
        block = visit.block
        buffer = not tensor.is_floating_point() and tensor.dtype != torch.bool
        visit.packed |= buffer
        if block.memory == "checkpoint" or block.recomputes_input:
            hidden = buffer
        else:
            weight = tuple(block.down.weight.shape)
            hidden = not visit.projecting and tuple(tensor.shape) not in (weight, weight[::-1])
        return Owner(block.name, FEED_FORWARD, visit.number, hidden)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any function of PyTorch, watched."""
        if self._open is not None and self._open.packed and torch.is_grad_enabled():
            self._leave()
        if func is F.linear:
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            found = self._roles.get(id(weight))
            if found is not None:
                return self._linear(*found, func, args, kwargs)
        name = getattr(func, "__name__", "")
        kind = _BY_FUNCTION.get(name, "loss" if name.endswith("_loss") else None)
        if kind is None or self._function_kind is not None:
            return func(*args, **kwargs)
        self._function_kind = kind
        try:
            return func(*args, **kwargs)
        finally:
            self._function_kind = None

    def _linear(
        self,
        block: ProfiledBlock,
        part: str,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A projection of a block."""
        if not torch.is_grad_enabled():  # evaluation, or inside of a compressed block
            return func(*args, **kwargs)
        visit = self._current()
        if part == "down":
            out = func(*args, **kwargs)
            if self._open is not None and self._open.block is block:
                self._leave()
            return out
        if visit is None or visit.block is not block:
            visit = self._open = self._visit(block)
        visit.projecting = True
        try:
            out = func(*args, **kwargs)
        finally:
            visit.projecting = False
        again = _in_backward() and self._calls[block.name]  # recomputed
        if not again and not block.recomputes_input:
            self._note(visit, part, out)
        return out

    def _note(self, visit: _Visit, part: str, out: Tensor) -> None:
        """One pre-activation; once all of a block are there, look at them."""
        if part in visit.projected:
            return
        gated = visit.block.gate is not None
        # The block may write over it before the other one is there.
        visit.projected[part] = out.detach().clone() if gated else out
        if len(visit.projected) == (2 if gated else 1):
            self._measure(visit)

    def _project(self, block: ProfiledBlock, x: Tensor) -> None:
        """The pre-activations of a block whose own cannot be watched."""
        visit = self._current()
        assert visit is not None
        with torch.no_grad():
            for part in ("up", "gate"):
                linear = getattr(block, part)
                if linear is not None:
                    visit.projected[part] = F.linear(x, linear.weight, linear.bias)
        self._measure(visit)

    def _measure(self, visit: _Visit) -> None:
        block = visit.block
        up = visit.projected["up"]
        gate = visit.projected.get("gate")
        visit.projected = dict.fromkeys(visit.projected, up.new_empty(0))  # seen, not held
        capturing = up.is_cuda and torch.cuda.is_current_stream_capturing()
        if up.dtype not in dtypes.COMPUTE_DTYPES or up.numel() == 0 or capturing:
            return
        first, second = (up, None) if gate is None else (gate, up)
        found = measure(
            block.activation,
            first,
            second,
            block.down.weight,
            block.between,
            self.codec,
            self.timed,
        )
        self.rows.append(
            {
                "layer": block.name,
                "call": self._calls[block.name],
                "activation": block.activation.name,
                "memory": block.memory,
                "codec": self.codec,
                "visit": visit.number,
                "compressed_bytes": found.scalars[f"bytes_{self.codec}"],
                **found.scalars,
            }
        )
        if not self._calls[block.name]:
            self.exponents += [
                {"layer": block.name, "exponent": exponent, "count": count}
                for exponent, count in found.exponents.items()
            ]
            self.positions.append({"layer": block.name, **found.positions})
        self._calls[block.name] += 1


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _kind(name: str, module: nn.Module, parent: _Scope | None) -> str:
    """The kind of memory that a module outside of blocks saves."""
    if parent is not None and parent.kind in ("attention", "normalization"):
        return parent.kind
    for part, kind in _BY_NAME.items():
        if part in type(module).__name__.lower():
            return kind
    for cls, kind in _BY_CLASS.items():
        if isinstance(module, cls):
            return kind
    return "attention" if "attn" in name.rpartition(".")[2] else "other"
