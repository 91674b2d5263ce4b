"""The compressed feed-forward block, some tokens at a time.

Every tensor of tokens * d_ff elements (pre-activations, hidden tensor, their gradients) exists for
one chunk of tokens only, at most two chunks at a time, in forward and in backward. This takes one
autograd function around the whole block: it keeps the input and, chunk by chunk, the compressed
activations. Rows of a matrix product do not depend on each other, so output and input gradient are
those of the whole block; the gradients of weights are sums over tokens, added up in float32 from
chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitsparse import codings, layout
from bitsparse.activations import Activation
from bitsparse.backends import Kept, Survey, backend_for
from bitsparse.ops.block import (
    Report,
    Tensors,
    Totals,
    account,
    as_rows,
    check_hidden_dtype,
    dense_nbytes,
    encode,
    only_once,
    owned,
    rounds_to_float32,
    take_apart,
    writable,
)


def chunked(
    t: Tensors,
    activation: Activation,
    codec: str,
    report: Report | None,
    tokens_per_chunk: int,
    wants_grad: bool,
) -> Tensor:
    """The block with ``memory="compressed"``, in chunks.

    ``wants_grad``: whether anything is to be kept for backward.
    """
    if t.x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"tokens_per_chunk: got {tokens_per_chunk} inside CUDA graph capture, where the sizes "
            "of the chunks cannot be waited for; allowed: None"
        )
    if torch.is_autocast_enabled(t.x.device.type):
        x = t.x.to(torch.get_autocast_dtype(t.x.device.type))
        t = t._replace(x=x).with_cast_parameters()
    check_hidden_dtype(t.x.dtype)
    fp32_math = rounds_to_float32(activation, t.x)
    settings = _Settings(activation, fp32_math, codec, tokens_per_chunk, report)
    if not wants_grad:
        return _forward(settings, t, lambda gate, up: (activation.dense(gate, up), None))
    out: Tensor = _Chunked.apply(settings, *t)
    return out


class _Settings(NamedTuple):
    activation: Activation
    fp32_math: bool
    codec: str
    rows: int
    report: Report | None


@dataclass
class _Open:
    """A chunk whose counts are on their way: its dense tensors are still there."""

    gate: Tensor
    up: Tensor | None
    survey: Survey
    totals: Totals


def _forward(
    settings: _Settings,
    t: Tensors,
    activate: Callable[[Tensor, Tensor | None], tuple[Tensor, _Open | None]],
    close: Callable[[_Open], None] | None = None,
) -> Tensor:
    """The block's output. ``activate`` gives the hidden tensor of one chunk; what it leaves open is
    closed after the next chunk's projection has been launched: the device never waits."""
    rows, activation = settings.rows, settings.activation
    flat = as_rows(t.x)
    out = flat.new_empty(flat.shape[0], t.w_down.shape[0])
    down = t.w_down.t()
    before: _Open | None = None
    for first in range(0, flat.shape[0], rows):
        gate, up = t._replace(x=flat[first : first + rows]).project(activation)
        if before is not None:
            assert close is not None
            close(before)
            before = None
        hidden, before = activate(gate, up)
        del gate, up
        part = out[first : first + rows]
        hidden = hidden.to(part.dtype)
        if t.b_down is None:
            torch.mm(hidden, down, out=part)
        else:
            torch.addmm(t.b_down, hidden, down, out=part)
        del hidden
    if before is not None:
        assert close is not None
        close(before)
    return owned(out.view(*t.x.shape[:-1], t.w_down.shape[0]))


class _Chunked(torch.autograd.Function):
    """The whole block; keeps its input, and the activations compressed."""

    @staticmethod
    def forward(ctx: Any, settings: _Settings, *tensors: Tensor | None) -> Tensor:
        t = Tensors(*tensors)  # type: ignore[arg-type]
        need_x, need_w_up, need_w_down, need_w_gate, need_b_up, _, need_b_gate = (
            ctx.needs_input_grad[1:]
        )
        activation = settings.activation
        need_input = need_x or need_w_up or need_w_gate or need_b_up or need_b_gate
        ctx.settings, ctx.restore = settings, []
        ctx.bias_shape = None if t.b_down is None else t.b_down.shape
        if not need_input and not need_w_down:
            ctx.save_for_backward()
            return _forward(settings, t, lambda gate, up: (activation.dense(gate, up), None))
        backend = backend_for(t.x.device)
        only_positions = activation.plain and not need_w_down
        statistics = codings.needs_statistics(settings.codec)
        saved: list[Tensor] = []
        nnz = dense_bytes = 0

        def activate(gate: Tensor, up: Tensor | None) -> tuple[Tensor, _Open]:
            gate, up = writable(gate), None if up is None else writable(up)
            hidden, survey = backend.activate(
                layout.geometry(gate.shape), activation, gate, up, settings.fp32_math, statistics
            )
            return hidden, _Open(gate, up, survey, Totals(survey.totals))

        def close(chunk: _Open) -> None:
            nonlocal nnz, dense_bytes
            survey = chunk.survey
            counts = survey.counts(chunk.totals.wait())
            wanted = replace(counts, streams=()) if only_positions else counts
            choice = codings.choose(wanted, settings.codec)
            kept = encode(activation, survey, counts, choice, chunk.gate, chunk.up)
            parts, restore = take_apart(kept)
            ctx.restore.append((len(parts), restore))
            saved.extend(parts)
            nnz += counts.nnz
            dense_bytes += dense_nbytes(chunk.gate, chunk.up)

        out = _forward(settings, t, activate, close)
        d_ff = t.w_up.shape[0]
        account(saved, nnz, out.shape[:-1].numel() * d_ff, dense_bytes, settings.report)
        ctx.save_for_backward(
            t.x if need_w_up or need_w_gate else None,
            t.w_up if need_x else None,
            t.w_gate if need_x else None,
            t.w_down if need_input else None,
            *saved,
        )
        ctx.d_ff, ctx.shape = d_ff, t.x.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        only_once()
        with torch.no_grad():
            grads = _Chunked._backward(ctx, grad_out)
        return None, *grads

    @staticmethod
    def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_w_up, need_w_down, need_w_gate, need_b_up, need_b_down, need_b_gate = (
            ctx.needs_input_grad[1:]
        )
        settings: _Settings = ctx.settings
        activation, rows, fp32_math = settings.activation, settings.rows, settings.fp32_math
        grads: dict[str, Tensor | None] = {}
        grad_rows = as_rows(grad_out)
        if need_b_down:
            grads["b_down"] = grad_rows.sum_to_size(ctx.bias_shape)
        if not ctx.restore:
            return _in_order(grads)
        x, w_up, w_gate, w_down, *saved = ctx.saved_tensors
        backend = backend_for(grad_out.device)
        d_ff: int = ctx.d_ff
        dtype: torch.dtype = grad_out.dtype
        chunks: list[tuple[slice, Kept]] = []
        for first, (count, restore) in zip(
            range(0, grad_rows.shape[0], rows), ctx.restore, strict=True
        ):
            chunks.append((slice(first, first + rows), restore(saved[:count])))
            saved = saved[count:]
        # One for all chunks: the hidden tensor, then its gradient, then the pre-activation's.
        buffer = grad_out.new_empty(min(rows, grad_rows.shape[0]) * d_ff)

        # One weight after the other: there is one sum in float32 at a time (gated forms: two).
        if need_w_down:
            total = _Sum((grad_rows.shape[1], d_ff), grad_out)
            for where, kept in chunks:
                grad = grad_rows[where]
                hidden = buffer[: kept.support.geometry.numel]
                backend.hidden(activation, kept, fp32_math, out=hidden)
                total.add_product(grad.t(), hidden.view(-1, d_ff))
            grads["w_down"] = total.rounded(dtype)
            del total

        gated = activation.gated
        need_gate = need_x or (need_w_gate or need_b_gate if gated else need_w_up or need_b_up)
        need_up = gated and (need_x or need_w_up or need_b_up)
        if not need_gate and not need_up:
            return _in_order(grads)
        flat = None if x is None else as_rows(x)
        grad_x = grad_out.new_empty(grad_rows.shape[0], ctx.shape[-1]) if need_x else None
        # In the order of what `gradient` returns.
        sides = {"gate": (w_gate, need_w_gate, need_b_gate)} if gated else {}
        sides["up"] = (w_up, need_w_up, need_b_up)
        sums: dict[str, _Sum] = {}
        for side, (_, need_w, need_b) in sides.items():
            if need_w:
                sums[f"w_{side}"] = _Sum((d_ff, ctx.shape[-1]), grad_out)
            if need_b:
                sums[f"b_{side}"] = _Sum((d_ff,), grad_out)
        for where, kept in chunks:
            grad_hidden = buffer[: kept.support.geometry.numel]
            torch.mm(grad_rows[where], w_down, out=grad_hidden.view(-1, d_ff))
            both = backend.gradient(activation, kept, grad_hidden, fp32_math, need_gate, need_up)
            first_side = True
            for (side, (weight, need_w, need_b)), part in zip(sides.items(), both, strict=False):
                if part is None:
                    continue
                grad = part.view(-1, d_ff)
                if need_w:
                    assert flat is not None
                    sums[f"w_{side}"].add_product(grad.t(), flat[where])
                if need_b:
                    sums[f"b_{side}"].add_rows(grad)
                if grad_x is not None:
                    assert weight is not None
                    if first_side:
                        torch.mm(grad, weight, out=grad_x[where])
                    else:
                        grad_x[where] += grad.mm(weight)
                first_side = False
            del both, part, grad, grad_hidden
        grads.update((name, total.rounded(dtype)) for name, total in sums.items())
        grads["x"] = None if grad_x is None else grad_x.view(ctx.shape)
        return _in_order(grads)


def _in_order(grads: dict[str, Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(grads.get(name) for name in Tensors._fields)


class _Sum:
    """A sum over chunks, in float32."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self._total = torch.zeros(shape, dtype=torch.float32, device=like.device)

    def add_rows(self, part: Tensor) -> None:
        self._total += part.sum(0, dtype=torch.float32)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """``a @ b``; the product is not rounded to the dtype of these before it is added."""
        total = self._total
        if a.dtype == torch.float32:
            total.addmm_(a, b)
        elif a.device.type != "cuda":
            total.addmm_(a.float(), b.float())
        else:
            add = _adds_products(a.device.index, a.dtype)
            if add is None:
                total += a.mm(b)
            else:
                add(total, a, b)

    def rounded(self, dtype: torch.dtype) -> Tensor:
        return self._total.to(dtype)


@cache
def _adds_products(
    device: int, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor], object] | None:
    """How a product of 16-bit matrices is added to a float32 one without being rounded to 16 bits;
    None where this PyTorch cannot: it then is rounded."""
    mm: Any = torch.mm
    addmm: Any = torch.addmm

    def in_place(total: Tensor, a: Tensor, b: Tensor) -> object:
        return addmm(total, a, b, out_dtype=torch.float32, out=total)

    def by_itself(total: Tensor, a: Tensor, b: Tensor) -> object:
        return total.add_(mm(a, b, out_dtype=torch.float32))

    # Versions of PyTorch differ in what they take: ask, on small matrices.
    a = torch.zeros(16, 16, dtype=dtype, device=torch.device("cuda", device))
    for add in (in_place, by_itself):
        try:
            add(a.float(), a, a)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        return add
    return None
