"""The compressed feed-forward block inside CUDA graphs: buffers of a size that is fixed beforehand.

In a graph nothing can wait for the exact size. So the largest counts that warm-up steps have seen,
and some slack, say how large the buffers are and which codings are used. Whether a tensor fits is
found out on the device. If it does not, its masks and offset tables are set to zero before anything
is encoded, so that nothing is; and backward computes the layer's activations again from its input,
as activation checkpointing does. That may cost time, and never a value.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from bitsparse import codings, layout
from bitsparse.activations import Activation
from bitsparse.backends import backend_for, recompute
from bitsparse.backends.base import BUCKETS, ESCAPES, NNZ, UP_BUCKETS, count_rows
from bitsparse.codings import Choice, Counts, StreamCounts
from bitsparse.codings.exponent import FIELDS
from bitsparse.layout import BUCKET, GROUP, TILE
from bitsparse.ops.block import (
    Down,
    Recomputation,
    Report,
    Tensors,
    account,
    as_rows,
    bias_gradient,
    check_hidden_dtype,
    dense_nbytes,
    down_gradients,
    encode,
    only_once,
    owned,
    rounds_to_float32,
    row_major,
    take_apart,
)

_SPARE = 1024  # added to every capacity: small counts vary more
_BUCKET_BYTES = TILE // BUCKET + TILE // GROUP  # of a tile, at most

_lock = threading.Lock()
_slacks: list[float] = []  # of the warm-ups under way, in any thread
_rehearsals: list[None] = []  # likewise
_in_graphs: list[Tensor] = []
"""Limits that captured graphs read, as long as the process lives: a graph holds no references, and
a limit that is no longer there would let it write past its buffers."""
_counters: list[Tensor] = []
"""Of overflows, of every kind of call there has been; captured graphs write them."""
_records: Any = WeakIdKeyDictionary()
"""For each down projection's weight, and then for each kind of call, what warm-up has found."""


@contextlib.contextmanager
def graph_warmup(slack: float = 1.25) -> Iterator[None]:
    """Run warm-up steps in this context before a CUDA graph is captured.

    Blocks with ``memory="compressed"`` then learn how large their buffers must be inside a graph:
    the largest counts of these steps times ``slack``. They do just what they will do in the graph,
    so that all kernels are compiled; gradients are exact. Steps take longer than usual, because the
    host waits for the counts. ::

        with bitsparse.graph_warmup():
            for _ in range(3):
                step()
        with torch.cuda.graph(graph):
            step()

    In all threads. Run it again, and capture again, when activations have become denser.

    Args:
        slack: at least 1. What does not fit is computed again in backward, see
            :func:`graph_overflows`.

    Raises:
        ValueError: ``slack`` is not a finite number of at least 1.
    """
    if (
        isinstance(slack, bool)
        or not isinstance(slack, (int, float))
        or not 1 <= slack <= sys.float_info.max
    ):
        raise ValueError(f"slack: got {slack!r}, allowed: a finite number of at least 1")
    with _lock:
        _slacks.append(float(slack))
    try:
        yield
    finally:
        with _lock:
            _slacks.remove(float(slack))


def graph_overflows(reset: bool = False) -> int:
    """How many times a block in a CUDA graph did not fit its buffers, and was computed again.

    Counted over all blocks, on their devices, for which this call waits. Results are right all the
    same; a number that grows step by step says that warming up and capturing again, or more slack,
    would save time.

    Args:
        reset: start again at 0.
    """
    with _lock:
        counters = list(_counters)
    total = sum(int(c) for c in counters)
    if reset:
        for counter in counters:
            counter.zero_()
    return total


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Do as inside a CUDA graph, on any device and without one: for tests and comparisons."""
    _rehearsals.append(None)
    try:
        yield
    finally:
        _rehearsals.pop()


def applies(x: Tensor) -> bool:
    """Whether a block is to use buffers of fixed sizes now."""
    return bool(_slacks) or _in_graph(x)


def _in_graph(x: Tensor) -> bool:
    return bool(_rehearsals) or (x.is_cuda and torch.cuda.is_current_stream_capturing())


class _Kind(NamedTuple):
    """What must be equal for what was learned to be of use."""

    geometry: layout.Geometry
    dtype: torch.dtype
    device: torch.device
    activation: Activation
    codec: str
    only_positions: bool


class _Record:
    """What warm-up has found out about one kind of call, and what follows for a graph."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.overflows = torch.zeros((), dtype=torch.int64, device=kind.device)
        _counters.append(self.overflows)
        self.seen: Counts | None = None
        self.capacity: Counts | None = None
        self.choice: Choice | None = None
        self.limits = self.overflows

    def learn(self, counts: Counts, slack: float) -> None:
        """Make room for ``counts`` too."""
        if self.kind.only_positions:
            counts = replace(counts, streams=())
        self.seen = counts if self.seen is None else _largest(self.seen, counts)
        self.set(_with_slack(self.seen, slack))

    def set(self, capacity: Counts) -> None:
        """Buffers of these sizes, and the codings that suit them best."""
        self.capacity, self.choice = capacity, _choose(capacity, self.kind.codec)
        limits = _limits(self.kind, capacity, self.choice)
        self.limits = torch.tensor(limits, dtype=torch.int64, device=self.overflows.device)


def _largest(a: Counts, b: Counts) -> Counts:
    streams = tuple(
        StreamCounts(
            s.any_sign or t.any_sign, {k: max(n, t.escapes[k]) for k, n in s.escapes.items()}
        )
        for s, t in zip(a.streams, b.streams, strict=True)
    )
    buckets = tuple(map(max, a.bucket_bytes, b.bucket_bytes))
    return replace(a, nnz=max(a.nnz, b.nnz), bucket_bytes=buckets, streams=streams)


def _with_slack(counts: Counts, slack: float) -> Counts:
    def more(count: int, most: int) -> int:
        return min(int(count * slack) + _SPARE, most)

    nnz = more(counts.nnz, counts.geometry.numel)
    return replace(
        counts,
        nnz=nnz,
        bucket_bytes=tuple(
            more(n, counts.geometry.tiles * _BUCKET_BYTES) for n in counts.bucket_bytes
        ),
        streams=tuple(
            replace(s, escapes={k: more(n, nnz) for k, n in s.escapes.items()})
            for s in counts.streams
        ),
    )


def _choose(capacity: Counts, codec: str) -> Choice:
    """As without a graph, but no full masks: they fit nothing but tensors without any zero."""
    flat = codings.choose(capacity, codec, support="flat")
    if codec == "fast":
        return flat
    bucketed = codings.choose(capacity, codec, support="bucketed")
    tolerance = 1.05 if codec == "balanced" else 1.0
    return bucketed if bucketed.nbytes * tolerance < flat.nbytes else flat


def _limits(kind: _Kind, capacity: Counts, choice: Choice) -> list[int]:
    """What each of a survey's totals may be at most, in their order."""
    activation = kind.activation
    statistics = codings.needs_statistics(kind.codec)
    count = count_rows(1 + activation.gated, 1 + activation.relu_up, statistics)
    anything = 2**62
    signs = [0 if not coding.signed else 1 for coding in choice.values]
    rows = {NNZ: capacity.nnz}
    if choice.support.name == "bucketed":
        rows.update(zip((BUCKETS, UP_BUCKETS), capacity.bucket_bytes, strict=False))
    for i, coding in enumerate(choice.values):
        if coding.field:
            row = ESCAPES + i * len(FIELDS) + FIELDS.index(coding.field)
            rows[row] = capacity.streams[i].escapes[coding.field]
    return [*signs, *[1] * (2 - len(signs)), *(rows.get(r, anything) for r in range(count))]


def _record(weight: Tensor, kind: _Kind, capturing: bool) -> _Record:
    with _lock:
        kinds = _records.get(weight, {})
        found: _Record | None = kinds.get(kind)
        if found is None and not capturing:
            found = _Record(kind)
            _records[weight] = {**kinds, kind: found}
    if found is None or (capturing and found.capacity is None):
        raise RuntimeError(
            "memory: got 'compressed' inside CUDA graph capture, where the size of the compressed "
            f"storage cannot be waited for, and no warm-up of {kind.activation.name!r} for "
            f"{kind.geometry.rows} tokens with these weights and this codec has fixed it; allowed: "
            "warm-up steps in `with bitsparse.graph_warmup():` first, or memory='dense', "
            "'checkpoint'"
        )
    return found


def fixed(t: Tensors, activation: Activation, codec: str, report: Report | None) -> Tensor:
    """The block with ``memory="compressed"`` and buffers of fixed sizes."""
    x = x_up = t.x
    owner = t.w_down
    if torch.is_autocast_enabled(x.device.type):
        # As autocast does it: parameters are cast once, others for every use.
        x_up = x.to(torch.get_autocast_dtype(x.device.type))
        once_only = not activation.gated or (
            x.is_leaf
            and x.requires_grad
            and x.dtype == torch.float32
            and not x._is_view()
            and torch.is_autocast_cache_enabled()
        )
        x = x_up if once_only else x.to(x_up.dtype)
        t = t.with_cast_parameters()
    _, w_up, w_down, w_gate, b_up, b_down, b_gate = t
    up: Tensor | None = None
    second: tuple[Tensor | None, Tensor | None] = (None, None)
    if activation.gated:
        assert w_gate is not None
        first, second = (w_gate, b_gate), (w_up, b_up)
        gate = F.linear(x, *first)
        up = F.linear(x_up, w_up, b_up)
    else:
        first = (w_up, b_up)
        gate = F.linear(x, *first)
    check_hidden_dtype(gate.dtype)
    fp32_math = rounds_to_float32(activation, gate)
    record = None
    if w_down.requires_grad or gate.requires_grad or (up is not None and up.requires_grad):
        only_positions = activation.plain and not w_down.requires_grad
        geometry = layout.geometry(gate.shape)
        kind = _Kind(geometry, gate.dtype, gate.device, activation, codec, only_positions)
        record = _record(owner, kind, _in_graph(gate))
    inputs = [None if t is None else t.detach() for t in (x, *first, *second)]
    out: Tensor = _Fixed.apply(
        gate, up, w_down, b_down, *inputs, activation, fp32_math, record, report
    )
    return out


class _Fixed(torch.autograd.Function):
    """``linear(activation(gate, up), w_down, b_down)``; consumes ``gate`` and ``up``.

    What it keeps has a size that does not depend on values; besides, it keeps what ``gate`` and
    ``up`` are computed from, in case they do not fit.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor | None,
        w_down: Tensor,
        b_down: Tensor | None,
        x: Tensor,
        w_gate: Tensor,
        b_gate: Tensor | None,
        w_up: Tensor | None,
        b_up: Tensor | None,
        activation: Activation,
        fp32_math: bool,
        record: _Record | None,
        report: Report | None,
    ) -> Tensor:
        need_input = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        ctx.down = None
        ctx.bias_shape = None if b_down is None else b_down.shape
        if record is None:
            ctx.save_for_backward()
            return owned(F.linear(activation.dense(gate, up).to(gate.dtype), w_down, b_down))

        geometry, capturing = record.kind.geometry, _in_graph(gate)
        gate = gate.contiguous()
        up = None if up is None else up.contiguous()
        backend = backend_for(gate.device)
        statistics = codings.needs_statistics(record.kind.codec)
        hidden, survey = backend.activate(geometry, activation, gate, up, fp32_math, statistics)
        out = owned(F.linear(hidden, w_down, b_down))
        del hidden
        if not capturing and _slacks:
            counts = survey.counts(survey.totals.tolist())
            record.learn(counts, _slacks[-1])
        if capturing and not _rehearsals:
            _in_graphs.append(record.limits)
        capacity, choice = record.capacity, record.choice
        assert capacity is not None and choice is not None
        fits = (survey.totals <= record.limits).all()
        record.overflows += ~fits
        # What does not fit is an empty tensor from here on: nothing is written.
        for positions in (survey.words, survey.up_words, *survey.tables):
            if positions is not None:
                positions *= fits
        kept = encode(activation, survey, capacity, choice, gate, up)
        tensors, restore = take_apart(kept)
        account(tensors, capacity.nnz, gate.numel(), dense_nbytes(gate, up), report)
        ctx.save_for_backward(
            w_down if need_input else None, fits, x, w_gate, b_gate, w_up, b_up, *tensors
        )
        ctx.down = Down(activation, fp32_math, restore, gate.shape[-1], row_major(w_down))
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        only_once()
        need_gate, need_up, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad_gate = grad_up = grad_weight = grad_bias = None
        with torch.no_grad():
            if need_bias:
                grad_bias = bias_gradient(grad_out, ctx.bias_shape)
            if ctx.down is not None:
                w_down, fits, x, w_gate, b_gate, w_up, b_up, *tensors = ctx.saved_tensors
                inputs = recompute.Inputs(as_rows(x), w_gate, b_gate, w_up, b_up)
                layer = (
                    backend_for(grad_out.device),
                    fits,
                    ctx.down.activation,
                    inputs,
                    ctx.down.fp32_math,
                )
                again = Recomputation(
                    partial(recompute.hidden, *layer), partial(recompute.gradient, *layer)
                )
                grad_gate, grad_up, grad_weight = down_gradients(
                    ctx.down, w_down, tensors, grad_out, need_gate, need_up, need_weight, again
                )
        return (grad_gate, grad_up, grad_weight, grad_bias, *[None] * 10)
