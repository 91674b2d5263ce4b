"""Feed-forward blocks in FP8 (``precision="fp8"``) and with values kept in FP8 (``storage="fp8"``).

What is computed and what is kept: ``docs/fp8.md``. Both kinds of block keep the same *streams* of
their hidden activations: ``power``, which is ``relu(gate)`` or its square, and for gated forms
``up``, each an e4m3 tensor with power-of-two scales. The streams have one support: ``up`` has
nonzero patterns where ``power`` has, and nowhere else. Memory modes differ in how the streams are
kept (coded, dense, or not at all) and in nothing else, so they give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from bitsparse import codings, layout
from bitsparse.activations import Activation
from bitsparse.backends import Kept, backend_for
from bitsparse.ops.block import (
    Report,
    Restore,
    Tensors,
    Totals,
    account,
    as_autocast_would,
    as_rows,
    bias_gradient,
    only_once,
    owned,
    take_apart,
)

PRECISIONS = {"fp8": torch.float8_e5m2, "fp8_e4m3": torch.float8_e4m3fn}
"""Precisions of the products, and what gradients are rounded to in each."""

STORAGES = ("fp8",)
SCALINGS = ("tensor", "row")

E4M3 = torch.float8_e4m3fn
_LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""The largest finite number is 1.75 times two to this power (448 and 57,344)."""

_MULTIPLE = 16
"""The hardware's products want the summed and the second matrix's dimension in multiples."""

_CAPABILITY = (8, 9)

NOT_TWICE = (
    "a feed-forward with precision or storage in FP8 cannot be differentiated twice, nor its "
    "gradients be computed with create_graph=True; allowed then: precision=None, storage=None, "
    "memory='dense'"
)


def check_names(precision: str | None, storage: str | None, scaling: str) -> None:
    """Raise ValueError unless these can be had together."""
    if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
        allowed = ", ".join(map(repr, (None, *PRECISIONS)))
        raise ValueError(f"precision: got {precision!r}, allowed: {allowed}")
    if storage is not None and storage not in STORAGES:
        allowed = ", ".join(map(repr, (None, *STORAGES)))
        raise ValueError(f"storage: got {storage!r}, allowed: {allowed}")
    if scaling not in SCALINGS:
        raise ValueError(f"scaling: got {scaling!r}, allowed: {', '.join(map(repr, SCALINGS))}")
    if precision is not None and storage is not None:
        raise ValueError(
            f"storage: got {storage!r} with precision={precision!r}, which keeps FP8 values "
            "without further loss; allowed: None"
        )


def check_storage_mode(storage: str | None, memory: str) -> None:
    """Raise ValueError where nothing is kept that ``storage`` could be about."""
    if storage is not None and memory != "compressed":
        raise ValueError(
            f"storage: got {storage!r} with memory={memory!r}; allowed: None, or "
            "memory='compressed'"
        )


def check_plain_children(precision: str | None, storage: str | None) -> None:
    """Raise ValueError where a module's children, called as such, would compute something else."""
    for name, value in (("precision", precision), ("storage", storage)):
        if value is not None:
            raise ValueError(
                f"{name}: got {value!r} for a block with a child that has hooks or was replaced, "
                "which is called as it is; allowed: None"
            )


# Quantization.


class Quantized(NamedTuple):
    """A matrix in FP8: ``data * scale``."""

    data: Tensor
    """float8 ``[rows, columns]``, contiguous."""
    scale: Tensor
    """float32, powers of two: ``[]``, or ``[rows, 1]``. NaN where something is not finite."""

    @property
    def patterns(self) -> Tensor:
        """The bit patterns of ``data``, uint8; shares its memory."""
        return self.data.view(torch.uint8)


def quantize(t: Tensor, dtype: torch.dtype, scaling: str) -> Quantized:
    """Round a matrix to FP8, with one scale, or one for each row.

    A scale is the smallest power of two (from 2**-126 on) with which nothing overflows: dividing by
    it is exact, and rounding a second time, with another scale, changes only what becomes too small
    for it. Where the largest magnitude is not finite the scale is NaN, as is every product with it.
    """
    if t.dtype == torch.float16:
        t = t.float()  # float16 has no room for the scales
    if t.numel() == 0:
        largest = t.new_zeros((t.shape[0], 1) if scaling == "row" else (), dtype=torch.float32)
    elif scaling == "row":
        largest = torch.linalg.vector_norm(t, torch.inf, dim=1, keepdim=True).float()
    else:
        largest = torch.linalg.vector_norm(t, torch.inf).float()
    # On the bits: exact on every device, and no number goes to the host.
    bits = largest.view(torch.int32)
    exponent = (bits >> 23) - 127 - _LARGEST_EXPONENT[dtype] + ((bits & 0x7FFFFF) > 0x600000)
    exponent = exponent.clamp(min=-126)
    scale = ((exponent + 127) << 23).view(torch.float32)
    inverse = ((127 - exponent) << 23).view(torch.float32)
    data = (t * inverse.to(t.dtype)).to(dtype).contiguous()
    return Quantized(data, torch.where(largest.isfinite(), scale, torch.nan))


def dequantize(q: Quantized, dtype: torch.dtype) -> Tensor:
    """The matrix in ``dtype``; exact in bfloat16 and float32, within their range."""
    if dtype == torch.float16:
        most = torch.finfo(dtype).max  # which rounds up to a number that float16 does not have
        return (q.data.float() * q.scale).clamp(-most, most).to(dtype)
    return q.data.to(dtype) * q.scale.to(dtype)


def transposed(q: Quantized, scaling: str, source: Tensor | None = None) -> Quantized:
    """``q`` for a sum over its rows: transposed.

    Scales by row cannot be had there, so the transposed matrix is rounded anew: from ``source``, of
    which ``q`` was made, or else from ``q``, which changes only values that become too small.
    """
    if scaling == "tensor":
        return Quantized(q.data.t().contiguous(), q.scale)
    if source is None:
        source = dequantize(q, torch.bfloat16)
    return quantize(source.t(), q.data.dtype, scaling)


def product(a: Quantized, b: Quantized) -> Tensor:
    """``a @ b.T``, summed in float32, in bfloat16.

    On CUDA the hardware's FP8 products. Elsewhere they are emulated: a float32 product of the FP8
    values, then the scales.
    """
    (rows, depth), cols = a.data.shape, b.data.shape[0]
    if rows == 0 or cols == 0 or depth == 0:
        return a.scale.new_zeros(rows, cols, dtype=torch.bfloat16)
    scale = b.scale.t() if b.scale.dim() == 2 else b.scale
    if not a.data.is_cuda:
        total = a.data.float() @ b.data.float().t()
        return (total * a.scale * scale).to(torch.bfloat16)
    more_depth, more_cols = -depth % _MULTIPLE, -cols % _MULTIPLE
    if more_cols and scale.dim() == 2:
        scale = F.pad(scale, (0, more_cols), value=1.0)
    out = torch._scaled_mm(
        _pad(a.data, 0, more_depth),
        _pad(b.data, more_cols, more_depth).t(),
        scale_a=a.scale,
        scale_b=scale,
        out_dtype=torch.bfloat16,
    )
    return out[:, :cols].contiguous() if more_cols else out


def _pad(data: Tensor, rows: int, cols: int) -> Tensor:
    """``data`` with so many rows and columns of zeros appended."""
    if not rows and not cols:
        return data
    return F.pad(data.view(torch.uint8), (0, cols, 0, rows)).view(data.dtype)


# The streams of the hidden activations.


def streams(
    activation: Activation, gate: Tensor, up: Tensor | None, scaling: str
) -> list[Quantized]:
    """What is kept of ``gate`` and ``up`` (matrices): see the module's description.

    An unsquared ``relu`` has a derivative of 1 however small its result is. So its positive values
    are rounded to the smallest FP8 number rather than to zero, and the support is that of ReLU.
    """
    power = torch.relu(gate)
    if activation.squared:
        power = torch.square(power)
    if activation.relu_up:
        assert up is not None
        up = torch.relu(up)
        fires = (power != 0) & (up != 0)
        return [
            _without_sign(quantize(t, E4M3, scaling), t)
            for t in (torch.where(fires, power, 0), torch.where(fires, up, 0))
        ]
    coded = _without_sign(quantize(power, E4M3, scaling), None if activation.squared else power)
    if up is None:
        return [coded]
    fires = coded.patterns != 0
    other = quantize(torch.where(fires, up, 0), E4M3, scaling)
    # A zero in the support is -0.0: the same number, but its pattern is not that of no value.
    other.patterns.masked_fill_(fires & (other.patterns == 0), 0x80)
    return [coded, other]


def _without_sign(q: Quantized, nonzero: Tensor | None) -> Quantized:
    """``q``, of no negative values, without the sign of -0.0 and NaN; changed in place.

    Where ``nonzero`` is not zero, zeros become the smallest number above.
    """
    q.patterns.bitwise_and_(0x7F)
    if nonzero is not None:
        torch.maximum(q.patterns, (nonzero != 0).view(torch.uint8), out=q.patterns)
    return q


def hidden(activation: Activation, kept: list[Quantized], dtype: torch.dtype) -> Tensor:
    """The hidden tensor that the streams stand for."""
    power = dequantize(kept[0], dtype)
    return power * dequantize(kept[1], dtype) if activation.gated else power


def gradients(
    activation: Activation, kept: list[Quantized], grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``gate`` and ``up``, zero off the support; ``grad``: of the hidden tensor."""
    fires = kept[0].patterns != 0
    if activation.plain:
        return torch.where(fires, grad, 0), None
    power = dequantize(kept[0], grad.dtype)
    grad_up = None
    if activation.gated:
        grad_up = torch.where(fires, grad * power, 0)
        grad = grad * dequantize(kept[1], grad.dtype)
    if activation.squared:
        grad = grad * (2 * power.sqrt())  # the derivative of relu(gate)**2
    return torch.where(fires, grad, 0), grad_up


# Keeping them.


class _Encoder:
    """Streams on their way to being coded. Between the two steps the device has other work."""

    def __init__(self, kept: list[Quantized], codec: str) -> None:
        self._backend = backend_for(kept[0].data.device)
        self._codec = codec
        self._patterns = [q.patterns.view(-1) for q in kept]
        geometry = layout.geometry(kept[0].data.shape)
        statistics = codings.needs_statistics(codec)
        # One survey a stream: they find the same positions, and each counts its own values.
        self._surveys = [
            self._backend.survey(geometry, p, E4M3, statistics) for p in self._patterns
        ]
        self._totals = Totals(torch.cat([s.totals for s in self._surveys]))

    def encode(self, only_positions: bool) -> Kept:
        """The streams, coded; the inverse is :func:`_decode`."""
        totals = self._totals.wait()
        size = len(totals) // len(self._surveys)
        counts = [s.counts(totals[i * size : (i + 1) * size]) for i, s in enumerate(self._surveys)]
        of_values = () if only_positions else tuple(c.streams[0] for c in counts)
        choice = codings.choose(replace(counts[0], streams=of_values), self._codec)
        support = self._backend.encode_support(choice.support, self._surveys[0], counts[0])
        coded = [
            self._backend.encode_values(
                coding, self._surveys[i], counts[i], self._patterns[i], 0, relu=False
            )
            for i, coding in enumerate(choice.values)
        ]
        return Kept(support, E4M3, *coded)


def _decode(coded: Kept, scales: list[Tensor]) -> list[Quantized]:
    support = coded.support
    backend = backend_for(support.offsets.device)
    kept = []
    for stream, scale in zip((coded.gate, coded.up), scales, strict=False):
        assert stream is not None
        data = backend.scatter(support, stream, E4M3).view(E4M3)
        data = data.view(support.geometry.rows, support.geometry.cols)
        kept.append(Quantized(data, scale))
    return kept


class _Kept(NamedTuple):
    """What forward leaves for backward, besides the tensors."""

    streams: int
    coded: int = 0
    """Tensors of the coded streams."""
    restore: Restore | None = None
    """None: kept dense."""

    def kept(self, tensors: Mapping[str, Tensor]) -> Kept:
        """The coded streams."""
        assert self.restore is not None
        return self.restore([tensors[f"coded{i}"] for i in range(self.coded)])


def _keep(
    kept: list[Quantized], encoder: _Encoder | None, only_positions: bool, report: Report | None
) -> tuple[_Kept, dict[str, Tensor]]:
    """The streams' tensors by name, coded where there is an ``encoder``."""
    scales = {f"scale{i}": q.scale for i, q in enumerate(kept)}
    if encoder is None:
        return _Kept(len(kept)), {**scales, **{f"data{i}": q.data for i, q in enumerate(kept)}}
    coded = encoder.encode(only_positions)
    tensors, restore = take_apart(coded)
    dense_bytes = sum(q.data.nbytes for q in kept)
    account(tensors, coded.support.nnz, kept[0].data.numel(), dense_bytes, report)
    names = {f"coded{i}": t for i, t in enumerate(tensors)}
    return _Kept(len(kept), len(tensors), restore), {**scales, **names}


def _restore(kept: _Kept, tensors: Mapping[str, Tensor]) -> list[Quantized]:
    scales = [tensors[f"scale{i}"] for i in range(kept.streams)]
    if kept.restore is not None:
        return _decode(kept.kept(tensors), scales)
    return [Quantized(tensors[f"data{i}"], scale) for i, scale in enumerate(scales)]


def _mask_gradient(
    activation: Activation, kept: _Kept, tensors: Mapping[str, Tensor], grad: Tensor
) -> Tensor:
    """:func:`gradients` of plain ReLU from the positions alone; may overwrite ``grad``."""
    only = Kept(kept.kept(tensors).support, grad.dtype)
    backend = backend_for(grad.device)
    found, _ = backend.gradient(activation, only, grad.view(-1), False, True, False)
    assert found is not None
    return found.view_as(grad)


# The block in FP8.


class _Recipe(NamedTuple):
    activation: Activation
    memory: str
    """A memory mode, or "none": no gradient is wanted."""
    codec: str
    grad_dtype: torch.dtype
    scaling: str
    report: Report | None


def fp8_feed_forward(
    t: Tensors,
    activation: Activation,
    memory: str,
    codec: str,
    precision: str,
    scaling: str,
    report: Report | None,
) -> Tensor:
    """:func:`bitsparse.ffn` with ``precision``; the arguments have been checked but for dtypes."""
    _check_fp8(t.x, precision)
    wants_grad = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in t)
    mode = memory if wants_grad else "none"
    recipe = _Recipe(activation, mode, codec, PRECISIONS[precision], scaling, report)
    run = _apply_uncompiled if torch.compiler.is_compiling() else _Fp8FeedForward.apply
    out: Tensor = run(*t, recipe)
    return out


@_disable_dynamo
def _apply_uncompiled(*arguments: Any) -> Any:
    return _Fp8FeedForward.apply(*arguments)


def _check_fp8(x: Tensor, precision: str) -> None:
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    if dtype != torch.bfloat16:
        raise TypeError(
            f"x: got dtype {x.dtype} with precision={precision!r}"
            + (f" under autocast to {dtype}" if dtype != x.dtype else "")
            + "; allowed: bfloat16, or autocast to bfloat16"
        )
    if x.is_cuda:
        capability = torch.cuda.get_device_capability(x.device)
        if capability < _CAPABILITY:
            raise ValueError(
                f"precision: got {precision!r} on a device of compute capability "
                f"{capability[0]}.{capability[1]}, which has no FP8 products; "
                f"allowed: {_CAPABILITY[0]}.{_CAPABILITY[1]} or more"
            )


def _refuse_capture(x: Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "memory: got 'compressed' with precision or storage in FP8 inside CUDA graph capture, "
            "where the size of the compressed storage cannot be waited for; allowed: "
            "precision=None with storage=None, or precision with memory='dense' or 'checkpoint'"
        )


def _projection(x8: Quantized, weight: Tensor, bias: Tensor | None, scaling: str) -> Tensor:
    out = product(x8, quantize(weight, E4M3, scaling))
    return out if bias is None else out.add_(bias.to(out.dtype))


def _pre_activations(
    x8: Quantized, t: Mapping[str, Tensor], scaling: str
) -> tuple[Tensor, Tensor | None]:
    """``(gate, up)``, or ``(up, None)`` where ReLU is applied to ``up`` itself."""
    up = _projection(x8, t["w_up"], t.get("b_up"), scaling)
    if "w_gate" not in t:
        return up, None
    return _projection(x8, t["w_gate"], t.get("b_gate"), scaling), up


class _Fp8FeedForward(torch.autograd.Function):
    """The whole block, so that its input is kept in FP8 too."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.recipe = arguments
        t = Tensors(*tensors)
        ctx.kept = None
        ctx.dtypes = [None if p is None else p.dtype for p in t]
        ctx.shape = t.x.shape
        # Autocast would have other dtypes for what follows, and is not there in backward.
        with torch.autocast(t.x.device.type, enabled=False):
            return _Fp8FeedForward._forward(ctx, t)

    @staticmethod
    def _forward(ctx: Any, t: Tensors) -> Tensor:
        x, w_up, w_down, w_gate, b_up, b_down, b_gate = t
        activation, mode, codec, _, scaling, report = ctx.recipe
        need = _needs(ctx)
        rows = math.prod(x.shape[:-1])
        x8 = quantize(x.to(torch.bfloat16).reshape(rows, x.shape[-1]), E4M3, scaling)
        weights = {"w_up": w_up} if w_gate is None else {"w_up": w_up, "w_gate": w_gate}
        biases = {n: b for n, b in (("b_up", b_up), ("b_gate", b_gate)) if b is not None}
        gate, up = _pre_activations(x8, {**weights, **biases}, scaling)
        wanted = mode != "none" and (need["hidden"] or need["w_down"])
        found: list[Quantized] = []
        if activation.plain or (wanted and mode != "checkpoint"):
            found = streams(activation, gate, up, scaling)
        encoder = None
        if wanted and mode == "compressed" and gate.numel():
            _refuse_capture(x)
            encoder = _Encoder(found, codec)
        # ReLU's stream is the hidden tensor in FP8. Else that is rounded once, here; backward makes
        # its own of the streams, each of which has been rounded.
        h8 = found[0] if activation.plain else quantize(activation.dense(gate, up), E4M3, scaling)
        del gate, up
        out = _projection(h8, w_down, b_down, scaling)
        saved: dict[str, Tensor] = {}
        if wanted:
            if mode == "checkpoint":
                saved |= weights | biases
            else:
                only_positions = activation.plain and not need["w_down"]
                ctx.kept, saved = _keep(found, encoder, only_positions, report)
            if need["x"]:
                saved |= weights
            if need["w_up"] or need["w_gate"] or mode == "checkpoint":
                saved |= {"x": x8.data, "x_scale": x8.scale}
            if need["hidden"]:
                saved["w_down"] = w_down
        ctx.names = tuple(saved)
        ctx.save_for_backward(*saved.values())
        return owned(out.view(*x.shape[:-1], w_down.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        only_once(NOT_TWICE)
        with torch.no_grad(), torch.autocast(grad_out.device.type, enabled=False):
            grads = _Fp8FeedForward._backward(ctx, grad_out)
        cast = [
            grads[name].to(dtype) if name in grads else None
            for name, dtype in zip(Tensors._fields, ctx.dtypes, strict=True)
        ]
        return (*cast, None)

    @staticmethod
    def _backward(ctx: Any, grad_out: Tensor) -> dict[str, Tensor]:
        """The gradients that are needed, by name."""
        recipe: _Recipe = ctx.recipe
        activation, scaling = recipe.activation, recipe.scaling
        need = _needs(ctx)
        saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        grad = grad_out.reshape(math.prod(ctx.shape[:-1]), grad_out.shape[-1])
        grads: dict[str, Tensor] = {}
        if need["b_down"]:
            grads["b_down"] = grad.sum(0, dtype=torch.float32)
        if not saved:
            return grads
        x8 = Quantized(saved["x"], saved["x_scale"]) if "x" in saved else None
        kept: _Kept | None = ctx.kept
        from_mask = activation.plain and kept is not None and kept.restore is not None
        found: list[Quantized] = []
        if kept is None:
            assert x8 is not None
            found = streams(activation, *_pre_activations(x8, saved, scaling), scaling)
        elif need["w_down"] or not from_mask:
            found = _restore(kept, saved)
        grad8 = quantize(grad, recipe.grad_dtype, scaling)
        if need["w_down"]:
            if activation.gated:
                h8 = quantize(hidden(activation, found, torch.bfloat16).t(), E4M3, scaling)
            else:
                h8 = transposed(found[0], scaling)
            grads["w_down"] = product(transposed(grad8, scaling, grad), h8)
            del h8
        if not need["hidden"]:
            return grads
        grad_hidden = product(grad8, quantize(saved["w_down"].t(), E4M3, scaling))
        if from_mask:
            assert kept is not None
            grad_gate = _mask_gradient(activation, kept, saved, grad_hidden)
            grad_up = None
        else:
            grad_gate, grad_up = gradients(activation, found, grad_hidden)
        del found, grad8, grad_hidden
        x_across = None
        if need["w_up"] or need["w_gate"]:
            assert x8 is not None
            x_across = transposed(x8, scaling)
        outputs = {"up": grad_gate} if grad_up is None else {"up": grad_up, "gate": grad_gate}
        for name, of_output in outputs.items():
            if need[f"b_{name}"]:
                grads[f"b_{name}"] = of_output.sum(0, dtype=torch.float32)
            if not need[f"w_{name}"] and not need["x"]:
                continue
            grad8 = quantize(of_output, recipe.grad_dtype, scaling)
            if need[f"w_{name}"]:
                assert x_across is not None
                across = transposed(grad8, scaling, of_output)
                grads[f"w_{name}"] = product(across, x_across)
            if need["x"]:
                part = product(grad8, quantize(saved[f"w_{name}"].t(), E4M3, scaling))
                grads["x"] = grads["x"].add_(part) if "x" in grads else part
        if need["x"]:
            grads["x"] = grads["x"].view(ctx.shape)
        return grads


def _needs(ctx: Any) -> dict[str, bool]:
    """Which gradients are needed; "hidden": those of the pre-activations."""
    need = dict(zip(Tensors._fields, ctx.needs_input_grad, strict=False))
    return {
        **need,
        "hidden": any(need[n] for n in Tensors._fields if n not in ("w_down", "b_down")),
    }


# Exact arithmetic, values kept in FP8.


def stored_feed_forward(
    t: Tensors, activation: Activation, codec: str, scaling: str, report: Report | None
) -> Tensor:
    """:func:`bitsparse.ffn` with ``storage="fp8"``; the arguments have been checked."""
    _refuse_capture(t.x)
    gate, up = t.project(activation)
    w_down, b_down = t.w_down, t.b_down
    if torch.is_autocast_enabled(gate.device.type):
        w_down = as_autocast_would(w_down)
        b_down = None if b_down is None else as_autocast_would(b_down)
    out: Tensor = _StoredActivationDown.apply(
        gate, up, w_down, b_down, activation, codec, scaling, report
    )
    return out


class _StoredActivationDown(torch.autograd.Function):
    """``linear(activation(gate, up), w_down, b_down)``, backward from values rounded to FP8."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor | None,
        w_down: Tensor,
        b_down: Tensor | None,
        activation: Activation,
        codec: str,
        scaling: str,
        report: Report | None,
    ) -> Tensor:
        need_gate, need_up, need_weight, *_ = ctx.needs_input_grad
        need_input = need_gate or need_up
        ctx.activation = activation
        ctx.bias_shape = None if b_down is None else b_down.shape
        ctx.kept = None
        saved: dict[str, Tensor] = {}
        if need_input or need_weight:
            rows = [None if t is None else as_rows(t) for t in (gate, up)]
            assert rows[0] is not None
            found = streams(activation, rows[0], rows[1], scaling)
            encoder = _Encoder(found, codec)
        out = owned(F.linear(activation.dense(gate, up).to(gate.dtype), w_down, b_down))
        if need_input or need_weight:
            only_positions = activation.plain and not need_weight
            ctx.kept, saved = _keep(found, encoder, only_positions, report)
            if need_input:
                saved["w_down"] = w_down
        ctx.names = tuple(saved)
        ctx.save_for_backward(*saved.values())
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        only_once(NOT_TWICE)
        with torch.no_grad(), torch.autocast(grad_out.device.type, enabled=False):
            grads = _StoredActivationDown._backward(ctx, grad_out)
        return (*grads, None, None, None, None)

    @staticmethod
    def _backward(ctx: Any, grad_out: Tensor) -> list[Tensor | None]:
        need_gate, need_up, need_weight, need_bias, *_ = ctx.needs_input_grad
        activation: Activation = ctx.activation
        grad_gate = grad_up = grad_weight = grad_bias = None
        grad_2d = as_rows(grad_out)
        if need_bias:
            grad_bias = bias_gradient(grad_out, ctx.bias_shape)
        if ctx.kept is not None:
            saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
            found: list[Quantized] = []
            if need_weight or not activation.plain:
                found = _restore(ctx.kept, saved)
            if need_weight:
                grad_weight = grad_2d.t().mm(hidden(activation, found, grad_2d.dtype))
            if need_gate or need_up:
                grad_hidden = grad_2d.mm(saved["w_down"])
                if activation.plain:
                    grad_gate = _mask_gradient(activation, ctx.kept, saved, grad_hidden)
                else:
                    grad_gate, grad_up = gradients(activation, found, grad_hidden)
                shape = (*grad_out.shape[:-1], grad_hidden.shape[-1])
                grad_gate = grad_gate.view(shape)
                grad_up = None if grad_up is None else grad_up.view(shape)
        return [grad_gate, grad_up, grad_weight, grad_bias]
