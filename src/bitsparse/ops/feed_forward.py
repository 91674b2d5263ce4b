"""The feed-forward block with compressed activations, exact to the bit.

The up (and gate) projection is PyTorch's own ``linear``. Activation and down projection are one
autograd function, so that the dense hidden tensor dies with the forward pass, and in backward one
buffer serves as hidden tensor, its gradient and the gradient of the pre-activation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitsparse import codings, dtypes, layout, memory
from bitsparse.activations import Activation, get_activation
from bitsparse.backends import Kept, Support, backend_for
from bitsparse.codings import Mask, Stream, SupportCoding, ValueCoding

MEMORY_MODES = ("compressed", "dense", "checkpoint")


class KeptReport(NamedTuple):
    """What one compressed forward pass keeps of its hidden activations for backward."""

    nnz: int
    """Positions whose values are kept."""
    numel: int
    """Elements of the hidden tensor, tokens * d_ff."""
    nbytes: int
    """Bytes kept."""
    dense_nbytes: int
    """Bytes of the same one (gated: two) tensors kept dense."""

    @property
    def density(self) -> float:
        return self.nnz / max(self.numel, 1)


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


def check_memory_mode(memory: str) -> None:
    """Raise ValueError unless ``memory`` is one of ``MEMORY_MODES``."""
    if memory not in MEMORY_MODES:
        raise ValueError(f"memory: got {memory!r}, allowed: {', '.join(map(repr, MEMORY_MODES))}")


def check_chunks(
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
    report: Callable[[KeptReport], None] | None = None,
    precision: str | None = None,
    storage: str | None = None,
    scaling: str = "tensor",
    tokens_per_chunk: int | None = None,
) -> Tensor:
    """:func:`ffn`; ``report`` is told what a compressed forward pass keeps."""
    from bitsparse.ops import fp8  # here: it imports this module

    check_memory_mode(memory)
    codings.check_policy(codec)
    fp8.check_names(precision, storage, scaling)
    fp8.check_storage_mode(storage, memory)
    check_chunks(tokens_per_chunk, memory, precision, storage)
    _check_arguments(x, w_up, w_down, activation, w_gate, b_up, b_down, b_gate, memory)
    if precision is not None:
        return fp8.fp8_feed_forward(
            x, w_up, w_down, activation, w_gate, b_up, b_down, b_gate, memory, codec,
            precision, scaling, report,
        )  # fmt: skip

    def dense(*tensors: Tensor | None) -> Tensor:
        x, w_up, w_down, w_gate, b_up, b_down, b_gate = tensors
        assert x is not None and w_up is not None and w_down is not None
        gate, up = _project(x, w_up, activation, w_gate, b_up, b_gate)
        return F.linear(activation.dense(gate, up), w_down, b_down)

    tensors = (x, w_up, w_down, w_gate, b_up, b_down, b_gate)
    # Where no gradient is wanted nothing is kept. One token is kept dense: it is d_ff elements, and
    # its weight gradient is an outer product, where PyTorch's sign of zero depends on -0.0 inputs.
    wants_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    tokens = x.numel() // max(x.shape[-1], 1)
    if tokens_per_chunk is not None and 0 < w_up.shape[0] and tokens_per_chunk < tokens:
        return _in_chunks(*tensors, activation, codec, report, tokens_per_chunk, wants_grad)
    if memory == "dense" or not wants_grad or tokens <= 1 or w_up.shape[0] == 0:
        return dense(*tensors)
    if memory == "checkpoint":
        return checkpoint(dense, *tensors, use_reentrant=False)  # type: ignore[no-any-return]
    if storage is not None:
        return fp8.stored_feed_forward(
            x, w_up, w_down, activation, w_gate, b_up, b_down, b_gate, codec, scaling, report
        )
    run = _compressed_uncompiled if torch.compiler.is_compiling() else _compressed
    return run(*tensors, activation, codec, report)


def _project(
    x: Tensor,
    w_up: Tensor,
    activation: Activation,
    w_gate: Tensor | None,
    b_up: Tensor | None,
    b_gate: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Pre-activations: ``(gate, up)``, or ``(up, None)`` where ReLU is applied to ``up`` itself."""
    if not activation.gated:
        return F.linear(x, w_up, b_up), None
    assert w_gate is not None
    gate = F.linear(x, w_gate, b_gate)
    return gate, F.linear(x, w_up, b_up)


def _compressed(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    b_gate: Tensor | None,
    activation: Activation,
    codec: str,
    report: Callable[[KeptReport], None] | None,
) -> Tensor:
    from bitsparse.ops import capture  # here: it imports this module

    if capture.applies(x):
        return capture.fixed(
            x, w_up, w_down, w_gate, b_up, b_down, b_gate, activation, codec, report
        )
    gate, up = _project(x, w_up, activation, w_gate, b_up, b_gate)
    if gate.dtype not in dtypes.COMPUTE_DTYPES:
        raise TypeError(
            f"x: the hidden activations are {gate.dtype}; memory='compressed' allows: "
            f"{dtypes.names(dtypes.COMPUTE_DTYPES)}"
        )
    fp32_math = False
    if torch.is_autocast_enabled(x.device.type):
        w_down = _as_autocast_would(w_down)
        b_down = None if b_down is None else _as_autocast_would(b_down)
        # On some devices autocast runs `square` in float32: ask, on an empty tensor.
        fp32_math = activation.squared and torch.square(gate.new_empty(0)).dtype != gate.dtype
    out: Tensor = _ActivationDown.apply(
        gate, up, w_down, b_down, activation, fp32_math, codec, report
    )
    return out


def _in_chunks(*arguments: Any) -> Tensor:
    from bitsparse.ops import chunked  # here: it imports this module

    run = chunked.chunked_uncompiled if torch.compiler.is_compiling() else chunked.chunked
    return run(*arguments)


# torch.compile runs this part eagerly, between two compiled graphs. (Unlike the public
# torch.compiler.disable this wrapper does not import the compiler with the package.)
_compressed_uncompiled = _disable_dynamo(_compressed)


def _as_autocast_would(weight: Tensor) -> Tensor:
    """The tensor that autocast hands to ``linear`` for this weight or bias, connected to it.

    Autocast casts a parameter once and reuses the cast, so that the gradients of several uses add
    up in the lower precision. A cast of our own would add them in float32: other bits. The cast
    that autocast remembers is not exposed, but a product with an empty matrix saves it.
    """
    if weight.dtype == torch.get_autocast_dtype(weight.device.type):
        return weight
    empty = weight.new_empty(0, weight.shape[0], requires_grad=True)
    # Own hooks on top: those of a caller (offloading, say) must not see this product.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        node: Any = torch.matmul(empty, weight).grad_fn
        cast: Tensor = node._saved_mat2 if weight.dim() == 2 else node._saved_vec
    return cast


class _Meta(NamedTuple):
    """What :class:`Kept` is besides its tensors, and what else backward needs."""

    activation: Activation
    fp32_math: bool
    geometry: layout.Geometry
    nnz: int
    dtype: torch.dtype
    support: SupportCoding
    gate: ValueCoding | None
    up: ValueCoding | None
    d_ff: int
    row_major: bool
    """Whether ``w_down`` is, as PyTorch asks before it chooses a product for its gradient."""


_MASK_TENSORS = 3
_STREAM_TENSORS = 4


def _tensors(kept: Kept) -> list[Tensor | None]:
    """The tensors of ``kept``; the inverse of :func:`_kept`."""
    found: list[Tensor | None] = [kept.support.offsets]
    for mask in (kept.support.mask, kept.support.up_mask):
        found += [None] * _MASK_TENSORS if mask is None else mask.tensors
    for stream in (kept.gate, kept.up):
        found += [None] * _STREAM_TENSORS if stream is None else stream.tensors
    return found


def _kept(meta: _Meta, tensors: list[Tensor | None]) -> Kept:
    offsets, *rest = tensors
    assert offsets is not None
    masks, streams = rest[: 2 * _MASK_TENSORS], rest[2 * _MASK_TENSORS :]

    def stream(coding: ValueCoding | None, parts: list[Tensor | None]) -> Stream | None:
        if coding is None:
            return None
        values, *others = parts
        assert values is not None
        return Stream(coding, values, *others)

    up_mask = None
    if meta.activation.relu_up:
        up_mask = Mask(meta.support, *masks[_MASK_TENSORS:])
    return Kept(
        Support(
            meta.geometry, meta.nnz, offsets, Mask(meta.support, *masks[:_MASK_TENSORS]), up_mask
        ),
        meta.dtype,
        stream(meta.gate, streams[:_STREAM_TENSORS]),
        stream(meta.up, streams[_STREAM_TENSORS:]),
    )


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
        report: Callable[[KeptReport], None] | None,
    ) -> Tensor:
        need_input = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        need_weight = ctx.needs_input_grad[2]
        ctx.meta = None
        ctx.bias_shape = None if b_down is None else b_down.shape
        if not need_input and not need_weight:
            ctx.save_for_backward()
            return F.linear(activation.dense(gate, up).to(gate.dtype), w_down, b_down)

        gate = gate.contiguous()
        up = None if up is None else up.contiguous()
        backend = backend_for(gate.device)
        hidden, survey = backend.activate(
            layout.geometry(gate.shape),
            activation,
            gate,
            up,
            fp32_math,
            codings.needs_statistics(codec),
        )
        totals = _Totals(survey.totals)
        # The projection needs the dense tensor anyway and runs for longer than the counts take to
        # reach the host: nothing idles while we wait for them.
        out = F.linear(hidden, w_down, b_down)
        del hidden  # the memory of `gate` where plain ReLU has overwritten it, else free now
        counts = survey.counts(totals.wait())
        only_positions = activation.plain and not need_weight
        choice = codings.choose(replace(counts, streams=()) if only_positions else counts, codec)
        sources = [(gate, True), (up, activation.relu_up)]
        streams: list[Stream | None] = [
            backend.encode_values(coding, survey, counts, source, i, relu)
            for i, (coding, (source, relu)) in enumerate(zip(choice.values, sources, strict=False))
            if source is not None
        ]
        support = backend.encode_support(choice.support, survey, counts)
        kept = Kept(support, gate.dtype, *streams)
        tensors = _tensors(kept)
        buffers = [t for t in tensors if t is not None]
        dense_bytes = gate.numel() * gate.element_size() * (1 if up is None else 2)
        memory.track_live(buffers, dense_bytes)
        if report is not None:
            report(KeptReport(counts.nnz, gate.numel(), memory.storage_bytes(buffers), dense_bytes))
        ctx.save_for_backward(w_down if need_input else None, *tensors)
        ctx.meta = _Meta(
            activation,
            fp32_math,
            survey.geometry,
            counts.nnz,
            gate.dtype,
            choice.support,
            None if kept.gate is None else kept.gate.coding,
            None if kept.up is None else kept.up.coding,
            gate.shape[-1],
            w_down.stride() == (w_down.shape[1], 1),
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = _ActivationDown._backward(ctx, grad_out)
        if torch.is_grad_enabled():  # create_graph=True: fail if these gradients are differentiated
            grads = tuple(g if g is None else _NotTwice.apply(g.requires_grad_()) for g in grads)
        return (*grads, None, None, None, None)

    @staticmethod
    def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        need_gate, need_up, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad_gate = grad_up = grad_weight = grad_bias = None
        grad_2d = grad_out.reshape(-1, grad_out.shape[-1])
        if need_bias:
            flattened = grad_out.dim() <= 3 or _linear_flattens(grad_out.device.type)
            flat = grad_2d if flattened else grad_out
            grad_bias = flat.sum_to_size(ctx.bias_shape)
        meta: _Meta | None = ctx.meta
        if meta is not None:
            w_down, *tensors = ctx.saved_tensors
            kept = _kept(meta, tensors)
            device = kept.support.offsets.device
            backend = backend_for(device)
            # One buffer: the hidden tensor, then its gradient, then the pre-activation's.
            buffer = torch.empty(meta.geometry.numel, dtype=meta.dtype, device=device)
            rows = buffer.view(-1, meta.d_ff)
            if need_weight:
                backend.hidden(meta.activation, kept, meta.fp32_math, out=buffer)
                # The product and its order decide the bits: as PyTorch chooses by the strides.
                if meta.row_major:
                    grad_weight = grad_2d.t().mm(rows)
                else:
                    grad_weight = rows.t().mm(grad_2d).t()
            if need_gate or need_up:
                torch.mm(grad_2d, w_down, out=rows)
                grad_gate, grad_up = backend.gradient(
                    meta.activation, kept, buffer, meta.fp32_math, need_gate, need_up
                )
                shape = (*grad_out.shape[:-1], meta.d_ff)
                grad_gate = None if grad_gate is None else grad_gate.view(shape)
                grad_up = None if grad_up is None else grad_up.view(shape)
        return grad_gate, grad_up, grad_weight, grad_bias


@cache
def _linear_flattens(device_type: str) -> bool:
    """Whether ``linear`` flattens more than three dimensions before it adds the bias.

    Versions of PyTorch differ, and with it the order in which the bias's gradient is summed.
    """
    with torch.enable_grad(), torch.autocast(device_type, enabled=False):
        x, w, b = (torch.ones(s, device=device_type) for s in ((2, 2, 2, 2), (2, 2), (2,)))
        return "Add" not in type(F.linear(x, w, b.requires_grad_()).grad_fn).__name__


class _NotTwice(torch.autograd.Function):
    """Identity whose backward is an error.

    (`once_differentiable` stays silent where the incoming gradient is a constant, although the
    second derivative is not zero.)
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(
            "a feed-forward with memory='compressed' cannot be differentiated twice; "
            "allowed for double backward: memory='dense'"
        )


class _Totals:
    """Counts on their way to the host, without stopping the device."""

    def __init__(self, totals: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = totals
        if totals.device.type == "cuda":
            stream = torch.cuda.current_stream(totals.device)
            self._host = memory.pinned_scratch(totals, stream.cuda_stream)
            self._host.copy_(totals, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def wait(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def _check_arguments(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    activation: Activation,
    w_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    b_gate: Tensor | None,
    memory: str,
) -> None:
    tensors = {
        "x": x,
        "w_up": w_up,
        "w_down": w_down,
        "w_gate": w_gate,
        "b_up": b_up,
        "b_down": b_down,
        "b_gate": b_gate,
    }
    for name in ("w_gate", "b_gate"):
        if tensors[name] is not None and not activation.gated:
            raise ValueError(
                f"{name}: got a tensor with activation={activation.name!r}, which has no gate; "
                "allowed: None"
            )
    if activation.gated and w_gate is None:
        raise ValueError(
            f"w_gate: got None with activation={activation.name!r}; "
            "allowed: a tensor [d_ff, d_model]"
        )
    for name, t in tensors.items():
        if t is None and name in ("w_gate", "b_up", "b_down", "b_gate"):
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, allowed: torch.Tensor")
        if t.layout != torch.strided:
            raise TypeError(f"{name}: got layout {t.layout}, allowed: torch.strided")
        if not t.is_floating_point():
            raise TypeError(f"{name}: got dtype {t.dtype}, allowed: a floating-point dtype")
        if t.device != x.device:
            raise ValueError(
                f"{name}: got device {t.device}, x is on {x.device}; allowed: the same"
            )
        if memory == "compressed" and t.device.type == "meta":
            raise TypeError(f"{name}: got a meta tensor, which has no values; allowed: cpu, cuda")
        if t.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"{name}: got dtype {t.dtype}, x is {x.dtype}; allowed: the same, or autocast"
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
        t = tensors[name]
        if t is not None and tuple(t.shape) != shape:
            raise ValueError(f"{name}: got shape {tuple(t.shape)}, allowed: {shape}")
