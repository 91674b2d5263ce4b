"""The feed-forward block with compressed activations, exact to the bit.

The up (and gate) projection is PyTorch's own ``linear``. Activation and down projection are one
autograd function, so that the dense hidden tensor dies with the forward pass, and in backward one
buffer serves as hidden tensor, its gradient and the gradient of the pre-activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitsparse import codings, dtypes
from bitsparse.activations import Activation, get_activation
from bitsparse.ops import capture, chunked, fp8, library
from bitsparse.ops.block import (
    Down,
    Report,
    Tensors,
    account,
    as_autocast_would,
    bias_gradient,
    check_hidden_dtype,
    dense_nbytes,
    down_compressed,
    down_gradients,
    is_transformed,
    only_once,
    owned,
    rounds_to_float32,
    row_major,
    take_apart,
    writable,
)

MEMORY_MODES = ("compressed", "dense", "checkpoint")


def ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    activation: str = "relu",
    w_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    b_gate: Tensor | None = None,
    memory: str = "compressed",
    codec: str = "balanced",
    precision: str | None = None,
    storage: str | None = None,
    scaling: str = "tensor",
    tokens_per_chunk: int | None = None,
) -> Tensor:
    """A feed-forward block, ``down(activation(up(x)))``, differentiable once.

    Output and gradients have the same bits in every memory mode. After "BitSparse: Compact
    Activation Storage for ReLU Feed-Forward Networks" (2026).

    Args:
        x: ``[..., d_model]``; float32, float16 or bfloat16 (``memory="compressed"``), or whatever
            autocast casts to these.
        w_up: ``[d_ff, d_model]``, as in ``nn.Linear``.
        w_down: ``[d_model, d_ff]``.
        activation: "relu", "relu2" (squared ReLU), or gated: "reglu" ``relu(gate) * up``, "reglu2"
            ``relu(gate)**2 * up``, "drelu" ``relu(gate) * relu(up)``.
        w_gate: ``[d_ff, d_model]``; for gated activations, and only for these.
        b_up: ``[d_ff]`` or None.
        b_down: ``[d_model]`` or None.
        b_gate: ``[d_ff]`` or None; for gated activations only.
        memory: what is kept of the hidden activations for backward: "compressed" (positions and
            values of the nonzeros), "dense" (plain PyTorch), "checkpoint" (nothing: recomputed).
        codec: how positions and values are coded with ``memory="compressed"``: "fast", "balanced"
            or "small", see :func:`bitsparse.compress`. Speed and size depend on it, results do not.
        precision: None: matrix products in the dtype of ``x``. In FP8, for bfloat16 (or autocast to
            it): "fp8" (e4m3, gradients e5m2) or "fp8_e4m3" (gradients too). Every memory mode has
            the same bits as ``memory="dense"`` with that precision.
        storage: None: what is kept has every bit. "fp8" (``memory="compressed"``): values are
            rounded to e4m3; lossy. The output is the same, gradients are approximate.
        scaling: of FP8: one scale a "tensor", or one a "row".
        tokens_per_chunk: None, or how many tokens to work through at a time, best a multiple of 64
            (``memory="compressed"``): no temporary tensor is larger than two chunks. Gradients of
            weights are then added up in float32 from chunk to chunk, to other bits.

    Returns:
        ``[..., d_model]``.

    Raises:
        TypeError: an argument that is not a floating-point tensor of an allowed dtype.
        ValueError: an unknown name, a missing or superfluous weight, or shapes or devices that do
            not fit.
    """
    return feed_forward(
        x, w_up, w_down, get_activation(activation), w_gate, b_up, b_down, b_gate, memory, codec,
        precision=precision, storage=storage, scaling=scaling, tokens_per_chunk=tokens_per_chunk,
    )  # fmt: skip


def check_options(
    memory: str,
    codec: str,
    precision: str | None,
    storage: str | None,
    scaling: str,
    tokens_per_chunk: int | None,
) -> None:
    """Raise ValueError unless these are options of :func:`ffn` that go together."""
    if memory not in MEMORY_MODES:
        raise ValueError(f"memory: got {memory!r}, allowed: {', '.join(map(repr, MEMORY_MODES))}")
    codings.check_policy(codec)
    fp8.check_names(precision, storage, scaling)
    fp8.check_storage_mode(storage, memory)
    _check_chunks(tokens_per_chunk, memory, precision, storage)


def _check_chunks(
    tokens_per_chunk: int | None, memory: str, precision: str | None, storage: str | None
) -> None:
    """Raise ValueError unless ``tokens_per_chunk`` is None, or a positive integer that goes
    together with the other arguments."""
    if tokens_per_chunk is None:
        return
    is_integer = isinstance(tokens_per_chunk, int) and not isinstance(tokens_per_chunk, bool)
    if not is_integer or tokens_per_chunk < 1:
        raise ValueError(
            f"tokens_per_chunk: got {tokens_per_chunk!r}, allowed: None, a positive integer"
        )
    others = {"memory": (memory, "compressed"), "precision": (precision, None)}
    others["storage"] = (storage, None)
    for name, (got, allowed) in others.items():
        if got != allowed:
            raise ValueError(
                f"tokens_per_chunk: got {tokens_per_chunk} with {name}={got!r}; "
                f"allowed: None, or {name}={allowed!r}"
            )


def feed_forward(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    activation: Activation,
    w_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    b_gate: Tensor | None,
    memory: str,
    codec: str,
    report: Report | None = None,
    precision: str | None = None,
    storage: str | None = None,
    scaling: str = "tensor",
    tokens_per_chunk: int | None = None,
) -> Tensor:
    """:func:`ffn`; ``report`` is told what a compressed forward pass keeps."""
    check_options(memory, codec, precision, storage, scaling, tokens_per_chunk)
    t = Tensors(x, w_up, w_down, w_gate, b_up, b_down, b_gate)
    check_arguments(t, activation, memory)
    if precision is not None:
        return fp8.fp8_feed_forward(t, activation, memory, codec, precision, scaling, report)

    def dense(*tensors: Tensor | None) -> Tensor:
        t = Tensors(*tensors)  # type: ignore[arg-type]
        return F.linear(activation.dense(*t.project(activation)), t.w_down, t.b_down)

    # Where no gradient is wanted nothing is kept. One token is kept dense: it is d_ff elements, and
    # its weight gradient is an outer product, where PyTorch's sign of zero depends on -0.0 inputs.
    wants_grad = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in t)
    tokens = x.numel() // max(x.shape[-1], 1)
    compiling = torch.compiler.is_compiling()
    run: Callable[..., Tensor]
    if tokens_per_chunk is not None and 0 < w_up.shape[0] and tokens_per_chunk < tokens:
        run = _chunked_uncompiled if compiling else chunked.chunked
        return run(t, activation, codec, report, tokens_per_chunk, wants_grad)
    if memory == "dense" or not wants_grad or tokens <= 1 or w_up.shape[0] == 0:
        return dense(*t)
    if is_transformed():  # by torch.func, torch.export: these need to see the whole computation
        return dense(*t)
    if memory == "checkpoint":
        return checkpoint(dense, *t, use_reentrant=False)  # type: ignore[no-any-return]
    if storage is not None:
        run = _stored_uncompiled if compiling else fp8.stored_feed_forward
        return run(t, activation, codec, scaling, report)
    if library.sees_operators():
        return library.feed_forward_operator(t, activation, codec)
    return _compressed(t, activation, codec, report)


def _compressed(t: Tensors, activation: Activation, codec: str, report: Report | None) -> Tensor:
    if capture.applies(t.x):
        return capture.fixed(t, activation, codec, report)
    gate, up = t.project(activation)
    check_hidden_dtype(gate.dtype)
    return activate_and_project(gate, up, t.w_down, t.b_down, activation, codec, report)


def activate_and_project(
    gate: Tensor,
    up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    activation: Activation,
    codec: str,
    report: Report | None = None,
) -> Tensor:
    """``linear(activation(gate, up), w_down, b_down)``, compressed for backward.

    Consumes ``gate`` and ``up``, of a dtype that can be kept compressed: their memory is reused.
    """
    if torch.is_autocast_enabled(gate.device.type):
        w_down = as_autocast_would(w_down)
        b_down = None if b_down is None else as_autocast_would(b_down)
    fp32_math = rounds_to_float32(activation, gate)
    out: Tensor = _ActivationDown.apply(
        gate, up, w_down, b_down, activation, fp32_math, codec, report
    )
    return out


# torch.compile runs these parts eagerly, between two compiled graphs. (Unlike the public
# torch.compiler.disable this wrapper does not import the compiler with the package.)
_chunked_uncompiled = _disable_dynamo(chunked.chunked)
_stored_uncompiled = _disable_dynamo(fp8.stored_feed_forward)


class _ActivationDown(torch.autograd.Function):
    """``linear(activation(gate, up), w_down, b_down)``; consumes ``gate`` and ``up``.

    The caller gives ``gate`` and ``up`` away: their memory is reused.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor | None,
        w_down: Tensor,
        b_down: Tensor | None,
        activation: Activation,
        fp32_math: bool,
        codec: str,
        report: Report | None,
    ) -> Tensor:
        need_input = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        need_weight = ctx.needs_input_grad[2]
        ctx.down = None
        ctx.bias_shape = None if b_down is None else b_down.shape
        if not need_input and not need_weight:
            ctx.save_for_backward()
            return owned(F.linear(activation.dense(gate, up).to(gate.dtype), w_down, b_down))

        gate, up = writable(gate), None if up is None else writable(up)
        out, kept = down_compressed(
            activation, gate, up, w_down, b_down, fp32_math, codec, need_weight
        )
        tensors, restore = take_apart(kept)
        account(tensors, kept.support.nnz, gate.numel(), dense_nbytes(gate, up), report)
        ctx.save_for_backward(w_down if need_input else None, *tensors)
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
                w_down, *tensors = ctx.saved_tensors
                grad_gate, grad_up, grad_weight = down_gradients(
                    ctx.down, w_down, tensors, grad_out, need_gate, need_up, need_weight
                )
        return grad_gate, grad_up, grad_weight, grad_bias, None, None, None, None


def check_arguments(t: Tensors, activation: Activation, memory: str) -> None:
    """Raise unless :func:`ffn` allows these, as it says."""
    tensors, x, w_up, w_down = t._asdict(), t.x, t.w_up, t.w_down
    for name in ("w_gate", "b_gate"):
        if tensors[name] is not None and not activation.gated:
            raise ValueError(
                f"{name}: got a tensor with activation={activation.name!r}, which has no gate; "
                "allowed: None"
            )
    if activation.gated and t.w_gate is None:
        raise ValueError(
            f"w_gate: got None with activation={activation.name!r}; "
            "allowed: a tensor [d_ff, d_model]"
        )
    for name, tensor in tensors.items():
        if tensor is None and name in ("w_gate", "b_up", "b_down", "b_gate"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, allowed: torch.Tensor")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}: got layout {tensor.layout}, allowed: torch.strided")
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: got dtype {tensor.dtype}, allowed: a floating-point dtype")
        if tensor.device != x.device:
            raise ValueError(
                f"{name}: got device {tensor.device}, x is on {x.device}; allowed: the same"
            )
        if memory == "compressed" and tensor.device.type == "meta":
            raise TypeError(f"{name}: got a meta tensor, which has no values; allowed: cpu, cuda")
        if tensor.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"{name}: got dtype {tensor.dtype}, x is {x.dtype}; allowed: the same, or autocast"
            )
    if memory == "compressed" and x.dtype not in dtypes.COMPUTE_DTYPES:
        raise TypeError(
            f"x: got dtype {x.dtype}; memory='compressed' allows: "
            f"{dtypes.names(dtypes.COMPUTE_DTYPES)}"
        )
    if x.dim() == 0:
        raise ValueError("x: got shape (), allowed: [..., d_model]")
    if w_up.dim() != 2 or w_up.shape[1] != x.shape[-1]:
        raise ValueError(
            f"w_up: got shape {tuple(w_up.shape)}, allowed: [d_ff, {x.shape[-1]}] "
            f"for x of shape {tuple(x.shape)}"
        )
    d_ff, d_model = w_up.shape
    if w_down.dim() != 2 or w_down.shape[1] != d_ff:
        raise ValueError(
            f"w_down: got shape {tuple(w_down.shape)}, allowed: [d_out, {d_ff}] "
            f"for w_up of shape {tuple(w_up.shape)}"
        )
    wanted = {"w_gate": (d_ff, d_model), "b_up": (d_ff,), "b_gate": (d_ff,)}
    wanted["b_down"] = (w_down.shape[0],)
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, allowed: {shape}")
