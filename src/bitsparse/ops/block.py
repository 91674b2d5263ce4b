"""What the forms of the compressed feed-forward block share.

Their autograd functions differ in what they span and when they wait; how a block is projected,
encoded, saved and differentiated is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from bitsparse import codings, dtypes, layout, memory
from bitsparse.activations import Activation
from bitsparse.backends import Kept, Support, Survey, backend_for, product
from bitsparse.codings import Choice, Counts, Stream


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


Report = Callable[[KeptReport], None]


class Tensors(NamedTuple):
    """A block's input, weights and biases, as :func:`bitsparse.ffn` takes them."""

    x: Tensor
    w_up: Tensor
    w_down: Tensor
    w_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None
    b_gate: Tensor | None

    def project(
        self, activation: Activation, x_up: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Pre-activations: ``(gate, up)``, or ``(up, None)`` where ReLU is applied to ``up``.

        ``x_up``: what ``up`` is computed from, where that is not ``x``.
        """
        if not activation.gated:
            return F.linear(self.x, self.w_up, self.b_up), None
        assert self.w_gate is not None
        gate = F.linear(self.x, self.w_gate, self.b_gate)
        return gate, F.linear(self.x if x_up is None else x_up, self.w_up, self.b_up)

    def with_cast_parameters(self) -> Tensors:
        """Weights and biases as autocast, which is on, hands them to ``linear``."""
        x, *parameters = self
        return Tensors(x, *(None if p is None else as_autocast_would(p) for p in parameters))  # type: ignore[arg-type]


def as_autocast_would(weight: Tensor) -> Tensor:
    """The tensor that autocast hands to ``linear`` for this weight or bias, connected to it.

    Autocast casts a parameter once and reuses the cast, so that the gradients of several uses add
    up in the lower precision. A cast of our own would add them in float32: other bits. The cast
    that autocast remembers is not exposed, but a product with an empty matrix saves it.
    """
    dtype = torch.get_autocast_dtype(weight.device.type)
    if weight.dtype == dtype:
        return weight
    if not torch.is_grad_enabled():
        return weight.to(dtype)
    empty = weight.new_empty(0, weight.shape[0], requires_grad=True)
    # Own hooks on top: those of a caller (offloading, say) must not see this product.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        node: Any = torch.matmul(empty, weight).grad_fn
        cast: Tensor = node._saved_mat2 if weight.dim() == 2 else node._saved_vec
    return cast


def as_rows(x: Tensor) -> Tensor:
    """``x`` as a matrix, also where it has no elements."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def check_hidden_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless hidden activations of ``dtype`` can be kept compressed."""
    if dtype not in dtypes.COMPUTE_DTYPES:
        raise TypeError(
            f"x: the hidden activations are {dtype}; memory='compressed' allows: "
            f"{dtypes.names(dtypes.COMPUTE_DTYPES)}"
        )


def rounds_to_float32(activation: Activation, gate: Tensor) -> bool:
    """Whether intermediate results are rounded to float32 instead of the dtype of ``gate``.

    On some devices autocast runs `square` in float32: ask, on an empty tensor.
    """
    if not activation.squared or not torch.is_autocast_enabled(gate.device.type):
        return False
    return torch.square(gate.new_empty(0)).dtype != gate.dtype


class Totals:
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


def encode(
    activation: Activation,
    survey: Survey,
    counts: Counts,
    choice: Choice,
    gate: Tensor,
    up: Tensor | None,
) -> Kept:
    """Code what backward needs of ``gate`` and ``up``, in the codings of ``choice``."""
    backend = backend_for(gate.device)
    sources = [(gate, True), (up, activation.relu_up)]
    streams: list[Stream | None] = [
        backend.encode_values(coding, survey, counts, source, i, relu)
        for i, (coding, (source, relu)) in enumerate(zip(choice.values, sources, strict=False))
        if source is not None
    ]
    support = backend.encode_support(choice.support, survey, counts)
    roots = activation.squared and not activation.gated and gate.dtype == torch.bfloat16
    return Kept(support, gate.dtype, *streams, roots=roots and not counts.outside)


def down_compressed(
    activation: Activation,
    gate: Tensor,
    up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    fp32_math: bool,
    codec: str,
    need_weight: bool,
) -> tuple[Tensor, Kept]:
    """``linear(activation(gate, up), w_down, b_down)``, and what its backward needs.

    ``gate`` and ``up``, contiguous, may be overwritten. ``need_weight``: whether the weight's
    gradient is wanted, and not only the input's.
    """
    hidden, survey = backend_for(gate.device).activate(
        layout.geometry(gate.shape),
        activation,
        gate,
        up,
        fp32_math,
        codings.needs_statistics(codec),
    )
    totals = Totals(survey.totals)
    # The projection needs the dense tensor anyway and runs for longer than the counts take to
    # reach the host: nothing idles while we wait for them.
    out = owned(F.linear(hidden, w_down, b_down))
    del hidden  # the memory of `gate` where plain ReLU has overwritten it, else free now
    counts = survey.counts(totals.wait())
    only_positions = activation.plain and not need_weight
    choice = codings.choose(replace(counts, streams=()) if only_positions else counts, codec)
    return out, encode(activation, survey, counts, choice, gate, up)


def is_watched() -> bool:
    """Whether a mode sees the operators that run, and may keep what they return."""
    return torch._C._len_torch_dispatch_stack() > 0


def writable(tensor: Tensor) -> Tensor:
    """``tensor``, contiguous, to be overwritten by kernels; a copy where somebody may have kept it,
    as policies of selective activation checkpointing do."""
    if is_watched():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


def dense_nbytes(gate: Tensor, up: Tensor | None) -> int:
    """Bytes of the pre-activations, which is what dense training keeps at least."""
    return gate.nbytes * (1 if up is None else 2)


def account(
    tensors: list[Tensor], nnz: int, numel: int, dense_bytes: int, report: Report | None
) -> None:
    """Count ``tensors`` as live compressed storage, and tell ``report``."""
    memory.track_live(tensors, dense_bytes)
    if report is not None:
        report(KeptReport(nnz, numel, memory.storage_bytes(tensors), dense_bytes))


Restore = Callable[[Sequence[Tensor]], Kept]


def take_apart(kept: Kept) -> tuple[list[Tensor], Restore]:
    """The tensors of ``kept``, and a function, without any tensor, that makes it again from them.

    Autograd wants tensors by themselves (``save_for_backward``): it then frees them as it frees its
    own, and saved-tensor hooks see them.
    """
    support = kept.support
    geometry, nnz, dtype, roots = support.geometry, support.nnz, kept.dtype, kept.roots
    tensors = [support.offsets]
    plans: list[tuple[Any, Any, list[bool]] | None] = []
    for part in (support.mask, support.up_mask, kept.gate, kept.up):
        if part is None:
            plans.append(None)
            continue
        plans.append((type(part), part.coding, [t is not None for t in part.tensors]))
        tensors += [t for t in part.tensors if t is not None]

    def restore(tensors: Sequence[Tensor]) -> Kept:
        rest = iter(tensors)
        offsets = next(rest)
        parts: list[Any] = []
        for plan in plans:
            if plan is None:
                parts.append(None)
                continue
            kind, coding, there = plan
            parts.append(kind(coding, *(next(rest) if t else None for t in there)))
        mask, up_mask, gate, up = parts
        return Kept(Support(geometry, nnz, offsets, mask, up_mask), dtype, gate, up, roots=roots)

    return tensors, restore


def row_major(weight: Tensor) -> bool:
    """Whether it is, as PyTorch asks before it chooses a product for the weight's gradient."""
    return weight.stride() == (weight.shape[1], 1)


class Recomputation(NamedTuple):
    """What overwrites results that come from something incomplete; see :func:`down_gradients`."""

    hidden: Callable[[Tensor], None]
    """Of ``[tokens * d_ff]``."""
    gradient: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], None]
    """Of the gradient of the output ``[tokens, d_out]``, ``w_down`` and the gradients of ``gate``
    and ``up``."""


class Down(NamedTuple):
    """How ``linear(activation(gate, up), w_down)`` was computed."""

    activation: Activation
    fp32_math: bool
    restore: Restore
    d_ff: int
    row_major: bool
    """Of ``w_down``."""


def down_gradients(
    down: Down,
    w_down: Tensor | None,
    tensors: Sequence[Tensor],
    grad_out: Tensor,
    need_gate: bool,
    need_up: bool,
    need_weight: bool,
    again: Recomputation | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``gate``, ``up`` and ``w_down`` from the tensors of :func:`take_apart`.

    ``w_down`` is not used where neither ``gate`` nor ``up`` needs a gradient.
    """
    grad_gate = grad_up = grad_weight = None
    grad_2d = as_rows(grad_out)
    activation, fp32_math = down.activation, down.fp32_math
    kept = down.restore(tensors)
    backend = backend_for(grad_out.device)
    # One buffer: the hidden tensor, then its gradient, then the pre-activation's.
    buffer = torch.empty(kept.support.geometry.numel, dtype=kept.dtype, device=grad_out.device)
    rows = buffer.view(-1, down.d_ff)
    if need_weight:
        backend.hidden(activation, kept, fp32_math, out=buffer)
        if again is not None:
            again.hidden(buffer)
        grad_weight = weight_gradient(grad_2d, rows, down.row_major)
    if need_gate or need_up:
        assert w_down is not None
        weight = w_down

        def two_passes() -> tuple[Tensor | None, Tensor | None]:
            torch.mm(grad_2d, weight, out=rows)
            return backend.gradient(activation, kept, buffer, fp32_math, need_gate, need_up)

        if need_gate and need_weight and again is None:  # the buffer holds the hidden tensor
            grad_gate, grad_up = product.gradients(
                activation, kept, grad_2d, w_down, rows, two_passes
            )
        else:
            grad_gate, grad_up = two_passes()
        if again is not None:
            again.gradient(grad_2d, w_down, grad_gate, grad_up)
        shape = (*grad_out.shape[:-1], down.d_ff)
        grad_gate = None if grad_gate is None else grad_gate.view(shape)
        grad_up = None if grad_up is None else grad_up.view(shape)
    return grad_gate, grad_up, grad_weight


def weight_gradient(grad: Tensor, x: Tensor, row_major: bool) -> Tensor:
    """Gradient of the weight of ``linear(x)``, both ``[tokens, features]``.

    The product and its order decide the bits: as PyTorch chooses by the weight's strides.
    """
    return grad.t().mm(x) if row_major else x.t().mm(grad).t()


def bias_gradient(grad_out: Tensor, shape: torch.Size) -> Tensor:
    """Gradient of the bias, of that shape, of a ``linear``: summed in the order of PyTorch's."""
    flattened = grad_out.dim() <= 3 or _linear_flattens(grad_out.device.type)
    flat = as_rows(grad_out) if flattened else grad_out
    return flat.sum_to_size(shape)


@cache
def _linear_flattens(device_type: str) -> bool:
    """Whether ``linear`` flattens more than three dimensions before it adds the bias.

    Versions of PyTorch differ, and with it the order in which the bias's gradient is summed.
    """
    with torch.enable_grad(), torch.autocast(device_type, enabled=False):
        x, w, b = (torch.ones(s, device=device_type) for s in ((2, 2, 2, 2), (2, 2), (2,)))
        return "Add" not in type(F.linear(x, w, b.requires_grad_()).grad_fn).__name__


def is_transformed() -> bool:
    """Whether what runs is being transformed or written down by ``torch.func``, forward-mode
    differentiation, ``torch.export`` or ``torch.jit.trace``, which need plain operators."""
    if torch.compiler.is_compiling():
        # Not is_exporting(), which torch.compile takes for true up to PyTorch 2.11.
        return getattr(torch.compiler, "_is_exporting_flag", False)
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


NOT_TWICE = (
    "a feed-forward with memory='compressed' cannot be differentiated twice, nor its gradients be "
    "computed with create_graph=True; allowed then: memory='dense'"
)


def only_once(error: str = NOT_TWICE) -> None:
    """Raise ``error`` in a backward pass under ``create_graph=True``.

    At once, and not where a second derivative is taken: what is kept has no path to the inputs, so
    that autograd would leave out its terms without a word. (`once_differentiable` does.)
    """
    if torch.is_grad_enabled():
        raise RuntimeError(error)


def owned(out: Tensor) -> Tensor:
    """``out``, a view of memory that nobody else sees, as no view: what an autograd function
    returns can then be changed in place, as the result of ``linear`` can."""
    if not out._is_view():
        return out
    return torch.ops.aten._unsafe_view(out.detach(), out.shape)  # type: ignore[no-any-return]
