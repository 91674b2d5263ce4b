"""One training step of a model, and comparing two of them bit for bit."""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import bitsparse


class Step(NamedTuple):
    output: Tensor
    loss: Tensor
    grads: dict[str, Tensor | None]
    live: int
    """Compressed activations that forward kept."""


def step(model: nn.Module, x: Tensor) -> Step:
    """Forward and backward from the same random state, for any module of one tensor."""
    return step_of(model, lambda: (out := model(x), out.float().square().mean()), x)


def step_of(
    model: nn.Module, forward: Callable[[], tuple[Tensor, Tensor]], *inputs: Tensor
) -> Step:
    model.zero_grad()
    for x in inputs:
        x.grad = None
    if live_tensors():
        gc.collect()  # compiling a kernel leaves cycles that hold its arguments
    torch.manual_seed(7)
    output, loss = forward()
    live = live_tensors()
    if loss.requires_grad:
        loss.backward()
    tensors: dict[str, Any] = {**dict(model.named_parameters()), **dict(enumerate(inputs))}
    grads = {name: None if t.grad is None else _local(t.grad) for name, t in tensors.items()}
    return Step(output.detach(), loss.detach(), grads, live)


def _local(grad: Any) -> Tensor:
    """A copy; of a sharded one, of the part that is here."""
    copied: Tensor = (grad.to_local() if hasattr(grad, "to_local") else grad).clone()
    return copied


def live_tensors() -> int:
    return bitsparse.memory_stats()["live_tensors"]


def assert_same_step(actual: Step, expected: Step) -> None:
    _assert_same_bits(actual.output, expected.output, "output")
    _assert_same_bits(actual.loss, expected.loss, "loss")
    assert actual.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        got = actual.grads[name]
        assert (got is None) == (grad is None), name
        if got is not None and grad is not None:
            _assert_same_bits(got, grad, f"gradient of {name}")


def _assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    # Of any dtype, also those that are not compressed.
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    a, e = (t.contiguous().reshape(-1).view(torch.uint8) for t in (actual, expected))
    assert torch.equal(a, e), what


class Adapter(nn.Module):
    """As LoRA wraps a projection."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 2)
        self.b = nn.Linear(2, base.out_features)
        self.weight = base.weight  # some models ask for its dtype

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))
