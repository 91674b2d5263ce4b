"""The compressed feed-forward block as an operator, ``torch.ops.bitsparse.feed_forward``.

Where PyTorch looks at the operators of a program (``torch.compile``, fake tensors, policies of
selective activation checkpointing, counters of operations), the block is one of them. Its outputs
are the block's, and what is kept for backward, in sizes that depend on values. Elsewhere the
autograd function of :mod:`bitsparse.ops.feed_forward` does the same with less overhead. Both have
the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bitsparse import codings, layout
from bitsparse.activations import Activation, get_activation
from bitsparse.backends import Kept, Support
from bitsparse.codings import Mask, Stream
from bitsparse.ops import block
from bitsparse.ops.block import (
    Down,
    Tensors,
    account,
    as_rows,
    bias_gradient,
    check_hidden_dtype,
    dense_nbytes,
    down_compressed,
    down_gradients,
    rounds_to_float32,
    row_major,
    weight_gradient,
)

_TENSORS = (*Tensors._fields, "x_up")
_CODINGS = (*codings.SUPPORTS, *codings.VALUES)
_DTYPES = (torch.uint8, torch.int16, torch.int32)


def sees_operators() -> bool:
    """Whether somebody looks at operators: the compiler, or a mode that dispatches them."""
    return torch.compiler.is_compiling() or block.is_watched()


def feed_forward_operator(t: Tensors, activation: Activation, codec: str) -> Tensor:
    """The block with ``memory="compressed"``, by means of the operator."""
    x = x_up = t.x
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        # Cast for every use, as autocast does: then gradients add up in the dtype of the input.
        x, x_up = x.to(dtype), x.to(dtype)
        t = Tensors(x, *(None if p is None else p.to(dtype) for p in t[1:]))  # type: ignore[arg-type]
    check_hidden_dtype(x.dtype)
    if not torch.compiler.is_compiling():
        _register_flops()
    outputs: list[Tensor] = torch.ops.bitsparse.feed_forward(
        *t,
        x_up if activation.gated and x_up is not x else None,
        activation.name,
        codec,
        rounds_to_float32(activation, x),
        t.w_down.requires_grad,
    )
    return outputs[0]


def _feed_forward(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    b_gate: Tensor | None,
    x_up: Tensor | None,
    activation: str,
    codec: str,
    fp32_math: bool,
    need_w_down: bool,
) -> list[Tensor]:
    """The output, and what is kept. ``x_up``: what ``w_up`` is applied to, where that is not ``x``;
    ``need_w_down``: whether the gradient of ``w_down`` is wanted."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "memory: got 'compressed' in a compiled model inside CUDA graph capture, where the "
            "size of the compressed storage cannot be waited for; allowed: "
            "torch.compile(mode='reduce-overhead'), or a capture without torch.compile"
        )
    act = get_activation(activation)
    with torch.autocast(x.device.type, enabled=False):
        gate, up = Tensors(x, w_up, w_down, w_gate, b_up, b_down, b_gate).project(act, x_up)
        dense_bytes, numel = dense_nbytes(gate, up), gate.numel()
        out, kept = down_compressed(act, gate, up, w_down, b_down, fp32_math, codec, need_w_down)
    numbers, *tensors = _take_apart(act, kept)
    account(tensors, kept.support.nnz, numel, dense_bytes, None)
    return [out, numbers, *tensors]


def _fake_feed_forward(x: Tensor, w_up: Tensor, w_down: Tensor, *rest: Any) -> list[Tensor]:
    activation = get_activation(rest[5])
    sizes = torch.library.get_ctx()
    parts, tensors = len(_part_sizes(activation)), sum(_part_sizes(activation))
    return [
        x.new_empty(*x.shape[:-1], w_down.shape[0]),
        torch.empty(1 + parts + tensors, dtype=torch.int64, device="cpu"),
        *(x.new_empty(sizes.new_dynamic_size(), dtype=torch.uint8) for _ in range(tensors)),
    ]


def _feed_forward_backward(
    grad_out: Tensor,
    x: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None,
    x_up: Tensor | None,
    kept: Sequence[Tensor],
    activation: str,
    fp32_math: bool,
    x_by_columns: bool,
    two_inputs: bool,
    needed: Sequence[bool],
) -> list[Tensor]:
    """Gradients of those tensors of the block that need one, in order. ``two_inputs``: there was an
    ``x_up``; inputs themselves are there where the gradient of a weight needs them."""
    act = get_activation(activation)
    need = dict(zip(_TENSORS, needed, strict=True))
    geometry = layout.geometry((*grad_out.shape[:-1], w_up.shape[0]))

    def restore(tensors: Sequence[Tensor]) -> Kept:
        return _put_together(act, geometry, grad_out.dtype, tensors)

    down = Down(act, fp32_math, restore, w_up.shape[0], row_major(w_down))
    second = "x_up" if two_inputs else "x"
    sides = {"gate": ("x", x, w_gate)} if act.gated else {}
    sides["up"] = (second, x_up if two_inputs else x, w_up)
    wanted = [
        need[x_name] or need[f"w_{side}"] or need[f"b_{side}"]
        for side, (x_name, _, _) in sides.items()
    ]
    grads: dict[str, Tensor] = {}
    with torch.autocast(grad_out.device.type, enabled=False):
        if need["b_down"]:
            grads["b_down"] = bias_gradient(grad_out, w_down.shape[:1])
        *hidden, grad_weight = down_gradients(
            down, w_down, kept, grad_out, wanted[0], act.gated and wanted[-1], need["w_down"]
        )
        if grad_weight is not None:
            grads["w_down"] = grad_weight
        del hidden[len(sides) :]
        while sides:  # the last one first, as autograd does; what is done with is freed
            side, (x_name, of, weight) = sides.popitem()
            grad = hidden.pop()
            if grad is None:
                continue
            assert weight is not None
            rows = as_rows(grad)
            if need[f"b_{side}"]:
                grads[f"b_{side}"] = bias_gradient(grad, weight.shape[:1])
            if need[x_name]:
                # By the input's strides, too.
                part = weight.t().mm(rows.t()).t() if x_by_columns else rows.mm(weight)
                part = part.view(*grad.shape[:-1], weight.shape[1])
                grads[x_name] = grads[x_name].add_(part) if x_name in grads else part
            if need[f"w_{side}"]:
                assert of is not None
                grads[f"w_{side}"] = weight_gradient(rows, as_rows(of), row_major(weight))
    return [grads[name] for name in _TENSORS if need[name]]


def _fake_feed_forward_backward(
    grad_out: Tensor,
    x: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None,
    x_up: Tensor | None,
    kept: Sequence[Tensor],
    activation: str,
    fp32_math: bool,
    x_by_columns: bool,
    two_inputs: bool,
    needed: Sequence[bool],
) -> list[Tensor]:
    def like(weight: Tensor | None) -> Tensor:
        assert weight is not None
        rows, cols = weight.shape
        empty = grad_out.new_empty
        return empty(rows, cols) if row_major(weight) else empty(cols, rows).t()

    def like_input() -> Tensor:
        shape = (*grad_out.shape[:-1], w_up.shape[1])
        return grad_out.new_empty(shape[::-1]).t() if x_by_columns else grad_out.new_empty(shape)

    def like_bias(weight: Tensor | None) -> Tensor:
        assert weight is not None
        return grad_out.new_empty(weight.shape[0])

    weights = {"up": w_up, "down": w_down, "gate": w_gate}
    made: dict[str, Callable[[], Tensor]] = {"x": like_input, "x_up": like_input}
    for side, weight in weights.items():
        made[f"w_{side}"] = partial(like, weight)
        made[f"b_{side}"] = partial(like_bias, weight)
    return [made[name]() for name, need in zip(_TENSORS, needed, strict=True) if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, w_up, w_down, w_gate, _, _, _, x_up, activation, _, fp32_math, _ = inputs
    kept = output[1:]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(x, w_up, w_down, w_gate, x_up, *kept)
    # PyTorch chooses the product for the input's gradient by the strides of the input.
    by_columns = x.dim() == 2 and x.stride() == (1, x.shape[0])
    ctx.arguments = activation, fp32_math, by_columns, x_up is not None


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[: len(_TENSORS)]
    x, w_up, w_down, w_gate, x_up, *kept = ctx.saved_tensors
    need = dict(zip(_TENSORS, needed, strict=True))
    if not need["w_up"] and not need["w_gate"]:
        x = x_up = None
    elif x_up is not None:
        x, x_up = x if need["w_gate"] else None, x_up if need["w_up"] else None
    found = iter(
        torch.ops.bitsparse.feed_forward_backward(
            grads[0], x, w_up, w_down, w_gate, x_up, kept, *ctx.arguments, needed
        )
    )
    return (*(next(found) if need else None for need in needed), *[None] * 4)


def _part_sizes(activation: Activation) -> list[int]:
    """How many tensors there may be of each part of what is kept: offsets, masks, streams."""
    return [1, *[3] * (1 + activation.relu_up), *[4] * (1 + activation.gated)]


def _take_apart(activation: Activation, kept: Kept) -> list[Tensor]:
    """``kept`` as tensors of bytes, as many as there may be (empty where there is none). Before
    them, int64 on the CPU: the number of values, ``kept.roots``, and the coding of each part and
    the dtype of each tensor, by their places in lists, or -1."""
    support = kept.support
    masks = [support.mask, support.up_mask][: 1 + activation.relu_up]
    streams = [kept.gate, kept.up][: 1 + activation.gated]
    numbers = [support.nnz, int(kept.roots)]
    tensors: list[Tensor | None] = [support.offsets]
    for part, size in zip([*masks, *streams], _part_sizes(activation)[1:], strict=True):
        numbers.append(-1 if part is None else _CODINGS.index(part.coding.name))
        tensors += [None] * size if part is None else part.tensors
    numbers += [-1 if t is None else _DTYPES.index(t.dtype) for t in tensors]
    offsets = support.offsets
    return [
        torch.tensor(numbers, dtype=torch.int64),
        *(
            offsets.new_empty(0, dtype=torch.uint8) if t is None else t.view(torch.uint8)
            for t in tensors
        ),
    ]


def _put_together(
    activation: Activation, geometry: layout.Geometry, dtype: torch.dtype, kept: Sequence[Tensor]
) -> Kept:
    """The inverse of :func:`_take_apart`."""
    sizes = _part_sizes(activation)
    nnz, roots, *numbers = kept[0].tolist()
    codings_of, dtypes_of = numbers[: len(sizes) - 1], numbers[len(sizes) - 1 :]
    tensors = iter(
        None if which < 0 else t.view(_DTYPES[which])
        for t, which in zip(kept[1:], dtypes_of, strict=True)
    )
    offsets = next(tensors)
    assert offsets is not None
    masks = 1 + activation.relu_up
    parts: list[Any] = []
    for i, (coding, size) in enumerate(zip(codings_of, sizes[1:], strict=True)):
        of: list[Any] = list(islice(tensors, size))
        if coding < 0:
            parts.append(None)
        elif i < masks:
            parts.append(Mask(codings.support_coding(_CODINGS[coding]), *of))
        else:
            parts.append(Stream(codings.value_coding(_CODINGS[coding]), *of))
    mask, up_mask = (parts[:masks] + [None])[:2]
    gate, up = (parts[masks:] + [None])[:2]
    support = Support(geometry, nnz, offsets, mask, up_mask)
    return Kept(support, dtype, gate, up, roots=bool(roots))


def _define() -> None:
    tags = [tag for name in ("cudagraph_unsafe",) if (tag := getattr(torch.Tag, name, None))]
    forward = torch.library.custom_op(
        "bitsparse::feed_forward",
        _feed_forward,
        mutates_args=(),
        schema="(Tensor x, Tensor w_up, Tensor w_down, Tensor? w_gate, Tensor? b_up, "
        "Tensor? b_down, Tensor? b_gate, Tensor? x_up, str activation, str codec, bool fp32_math, "
        "bool need_w_down) -> Tensor[]",
        tags=tags,
    )
    forward.register_fake(_fake_feed_forward)
    forward.register_autograd(_backward, setup_context=_setup_context)
    backward = torch.library.custom_op(
        "bitsparse::feed_forward_backward",
        _feed_forward_backward,
        mutates_args=(),
        schema="(Tensor grad_out, Tensor? x, Tensor w_up, Tensor w_down, Tensor? w_gate, "
        "Tensor? x_up, Tensor[] kept, str activation, bool fp32_math, bool x_by_columns, "
        "bool two_inputs, bool[] needed) -> Tensor[]",
        tags=tags,
    )
    backward.register_fake(_fake_feed_forward_backward)


def _flops(
    x: torch.Size,
    w_up: torch.Size,
    w_down: torch.Size,
    w_gate: torch.Size | None,
    *_: Any,
    **__: Any,
) -> int:
    """Of the products, given the shapes of tensors."""
    return 2 * x[:-1].numel() * (w_up.numel() + w_down.numel() + (w_gate.numel() if w_gate else 0))


def _backward_flops(
    grad_out: torch.Size,
    x: torch.Size | None,
    w_up: torch.Size,
    w_down: torch.Size,
    w_gate: torch.Size | None,
    *arguments: Any,
    **_: Any,
) -> int:
    need = dict(zip(_TENSORS, arguments[-1], strict=True))
    two_inputs = arguments[-2]
    of_up = need["x_up"] if two_inputs else need["x"]
    up = of_up or need["w_up"] or need["b_up"]
    gate = w_gate is not None and (need["x"] or need["w_gate"] or need["b_gate"])
    products: int = (need["w_down"] + (up or gate)) * w_down.numel()
    products += (of_up + need["w_up"]) * w_up.numel()
    if w_gate is not None:
        products += (need["x"] + need["w_gate"]) * w_gate.numel()
    return 2 * grad_out[:-1].numel() * products


def _register_flops() -> None:
    """Have ``FlopCounterMode`` count the products of the block, where it has been imported."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None or torch.ops.bitsparse.feed_forward in counter.flop_registry:
        return
    counter.register_flop_formula(torch.ops.bitsparse.feed_forward)(_flops)
    counter.register_flop_formula(torch.ops.bitsparse.feed_forward_backward)(_backward_flops)


_define()
