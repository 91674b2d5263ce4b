"""Blocks with active dropout, or a norm, between activation and down projection.

``down(between(activation(gate, up)))``: what is between depends on the hidden tensor, on parameters
of its own, and on random numbers. So backward computes it again, from the compressed hidden tensor
and the generator's state of before, and differentiates that by autograd: the operations, and
with them the bits, are those of the modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitsparse import codings, layout
from bitsparse.activations import Activation
from bitsparse.backends import backend_for
from bitsparse.ops.block import (
    Totals,
    account,
    as_autocast_would,
    as_rows,
    bias_gradient,
    dense_nbytes,
    encode,
    only_once,
    owned,
    rounds_to_float32,
    row_major,
    take_apart,
    weight_gradient,
    writable,
)


def _generator_state(device: torch.device) -> Tensor:
    """Of the default generator of ``device``."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextlib.contextmanager
def _replayed(device: torch.device, state: Tensor) -> Iterator[None]:
    now = _generator_state(device)
    _set_generator_state(device, state)
    try:
        yield
    finally:
        _set_generator_state(device, now)


@dataclass
class Dropout:
    """Active dropout, once: whatever is computed after the first time drops the same elements."""

    p: float
    state: Tensor | None = None
    """The generator's before the first time."""

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.state is None:
            self.state = _generator_state(hidden.device)
            return F.dropout(hidden, self.p, True)
        with _replayed(hidden.device, self.state):
            return F.dropout(hidden, self.p, True)

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {}


@dataclass
class Norm:
    """A module that computes the same from the same input and parameters."""

    module: nn.Module

    def __call__(self, hidden: Tensor, *parameters: Tensor) -> Tensor:
        values = dict(zip(self.parameters, parameters, strict=True))
        out: Tensor = torch.func.functional_call(self.module, values, (hidden,))
        return out

    @property
    def parameters(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())


Between = Dropout | Norm


def activate_then_project(
    gate: Tensor,
    up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    activation: Activation,
    between: Between,
    codec: str,
) -> Tensor:
    """``linear(between(activation(gate, up)), w_down, b_down)``, compressed for backward.

    Consumes ``gate`` and ``up``, of a dtype that can be kept compressed: their memory is reused.
    Nothing is kept compressed where ``gate`` is not contiguous: the order in which
    dropout draws would be another.
    """
    parameters = tuple(between.parameters.values())
    if not gate.is_contiguous() or not (up is None or up.is_contiguous()):
        return F.linear(between(activation.dense(gate, up), *parameters), w_down, b_down)
    autocast = torch.is_autocast_enabled(gate.device.type)
    if autocast:
        w_down = as_autocast_would(w_down)
        b_down = None if b_down is None else as_autocast_would(b_down)
    fp32_math = rounds_to_float32(activation, gate)
    out: Tensor = _ActivationBetweenDown.apply(
        gate, up, w_down, b_down, activation, fp32_math, between, autocast, codec, *parameters
    )
    return out


class _ActivationBetweenDown(torch.autograd.Function):
    """``linear(between(activation(gate, up)), w_down, b_down)``; consumes ``gate`` and ``up``."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor | None,
        w_down: Tensor,
        b_down: Tensor | None,
        activation: Activation,
        fp32_math: bool,
        between: Between,
        autocast: bool,
        codec: str,
        *parameters: Tensor,
    ) -> Tensor:
        backend = backend_for(gate.device)
        gate, up = writable(gate), None if up is None else writable(up)
        hidden, survey = backend.activate(
            layout.geometry(gate.shape),
            activation,
            gate,
            up,
            fp32_math,
            codings.needs_statistics(codec),
        )
        totals = Totals(survey.totals)
        out = owned(F.linear(between(hidden, *parameters), w_down, b_down))
        del hidden
        counts = survey.counts(totals.wait())
        kept = encode(activation, survey, counts, codings.choose(counts, codec), gate, up)
        tensors, restore = take_apart(kept)
        account(tensors, counts.nnz, gate.numel(), dense_nbytes(gate, up), None)
        ctx.save_for_backward(w_down, *parameters, *tensors)
        ctx.activation, ctx.fp32_math, ctx.restore = activation, fp32_math, restore
        ctx.between, ctx.autocast, ctx.shape = between, autocast, gate.shape
        ctx.row_major = row_major(w_down)
        ctx.bias_shape = None if b_down is None else b_down.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        only_once()
        need_gate, need_up, need_weight, need_bias, *_ = ctx.needs_input_grad
        first = 9  # of the parameters among the arguments
        need_parameters = ctx.needs_input_grad[first:]
        need_hidden = need_gate or need_up
        grad_gate = grad_up = grad_weight = grad_bias = None
        grad_parameters: list[Tensor | None] = [None] * len(need_parameters)
        w_down, *rest = ctx.saved_tensors
        parameters, tensors = rest[: len(need_parameters)], rest[len(need_parameters) :]
        with torch.no_grad():
            if need_bias:
                grad_bias = bias_gradient(grad_out, ctx.bias_shape)
            kept = ctx.restore(tensors)
            backend = backend_for(grad_out.device)
            hidden = torch.empty(ctx.shape, dtype=kept.dtype, device=grad_out.device)
            backend.hidden(ctx.activation, kept, ctx.fp32_math, out=hidden.view(-1))
            grad_2d = as_rows(grad_out)
            leaves = [
                t.detach().requires_grad_(need)
                for t, need in zip(
                    (hidden, *parameters), (need_hidden, *need_parameters), strict=True
                )
            ]
            with torch.enable_grad():
                z = ctx.between(*leaves)
                if ctx.autocast:
                    z = z.to(w_down.dtype)
            if need_weight:
                grad_weight = weight_gradient(grad_2d, as_rows(z.detach()), ctx.row_major)
            wanted = [t for t in leaves if t.requires_grad]
            if wanted:
                grad_z = grad_2d.mm(w_down).view(z.shape)
                grads = dict(
                    zip(map(id, wanted), torch.autograd.grad(z, wanted, grad_z), strict=True)
                )
                del z, grad_z
                grad_parameters = [grads.get(id(t)) for t in leaves[1:]]
                if need_hidden:
                    flat = grads[id(leaves[0])].contiguous().view(-1)
                    gradients = backend.gradient(
                        ctx.activation, kept, flat, ctx.fp32_math, need_gate, need_up
                    )
                    grad_gate, grad_up = (
                        None if g is None else g.view(ctx.shape) for g in gradients
                    )
        nones = (None,) * (first - 4)
        return grad_gate, grad_up, grad_weight, grad_bias, *nones, *grad_parameters
