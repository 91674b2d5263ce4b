"""Computing a layer's activations again where what was kept of them did not fit its buffers.

What decides is a flag on the tensors' device. On GPUs no one waits for it: see
:mod:`bitsparse.backends.triton_recompute`. What follows is plain PyTorch: the specification, and
what runs elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bitsparse.activations import Activation
from bitsparse.backends.base import Backend


class Inputs(NamedTuple):
    """What the pre-activations are computed from. ``gate`` is the one that relu is applied to."""

    x: Tensor
    """``[tokens, d_model]``."""
    w_gate: Tensor
    b_gate: Tensor | None
    w_up: Tensor | None
    b_up: Tensor | None


def hidden(
    backend: Backend,
    fits: Tensor,
    activation: Activation,
    inputs: Inputs,
    fp32_math: bool,
    out: Tensor,
) -> None:
    """Overwrite ``out`` (``[tokens * d_ff]``) with the hidden tensor unless ``fits`` (a bool)."""
    if _in_kernels(backend):
        from bitsparse.backends.triton_recompute import recompute

        recompute(fits, activation, fp32_math, *inputs, None, None, out, None)
    elif not bool(fits):
        gate, up = _pre_activations(activation, inputs)
        value = _square(gate, fp32_math) if activation.squared else gate
        out.copy_((value if up is None else value * up).view(-1))


def gradient(
    backend: Backend,
    fits: Tensor,
    activation: Activation,
    inputs: Inputs,
    fp32_math: bool,
    grad_out: Tensor,
    w_down: Tensor,
    grad_gate: Tensor | None,
    grad_up: Tensor | None,
) -> None:
    """Overwrite the gradients of the pre-activations that are not None unless ``fits``.

    ``grad_out``: ``[tokens, d_out]``; ``w_down``: ``[d_out, d_ff]``.
    """
    if _in_kernels(backend):
        from bitsparse.backends.triton_recompute import recompute

        recompute(
            fits, activation, fp32_math, *inputs, grad_out, w_down, grad_gate, grad_up
        )  # fmt: skip
        return
    if bool(fits):
        return
    gate, up = _pre_activations(activation, inputs)
    grad = grad_out.mm(w_down)
    dtype = grad.dtype
    if fp32_math:
        grad = grad.float()
    if grad_up is not None:
        assert up is not None
        result = (grad * (_square(gate, fp32_math) if activation.squared else gate)).to(dtype)
        if activation.relu_up:
            result = torch.where(up <= 0, 0, result)
        grad_up.copy_(result.view(-1))
    if grad_gate is not None:
        if up is not None:
            grad = grad * up
        if activation.squared:
            grad = grad * (2 * (gate.float() if fp32_math else gate))
        grad_gate.copy_(torch.where(gate <= 0, 0, grad.to(dtype)).view(-1))


def _in_kernels(backend: Backend) -> bool:
    return backend.name in ("triton", "cuda")


def _pre_activations(activation: Activation, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """relu(gate), and up (dReLU: relu(up))."""
    x, w_gate, b_gate, w_up, b_up = inputs
    gate = torch.relu(F.linear(x, w_gate, b_gate))
    if w_up is None:
        return gate, None
    up = F.linear(x, w_up, b_up)
    return gate, torch.relu(up) if activation.relu_up else up


def _square(gate: Tensor, fp32_math: bool) -> Tensor:
    return torch.square(gate.float() if fp32_math else gate)
