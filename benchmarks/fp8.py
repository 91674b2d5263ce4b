"""Print the tables of docs/fp8.md: errors against float64, and bits that are kept.

    python benchmarks/fp8.py

512 tokens, 256 × 1024, normal random weights and inputs, on the CPU; takes seconds.
"""

from typing import Any

import torch
from torch import Tensor

import bitsparse
from bitsparse.activations import ACTIVATIONS
from bitsparse.nn import FeedForward

TOKENS, D_MODEL, D_FF = 512, 256, 1024
NAMES = ("y", "x", "w_up", "w_down", "w_gate")
WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    '`storage="fp8"`': {"storage": "fp8"},
    '`precision="fp8_e4m3"`': {"precision": "fp8_e4m3"},
    '`precision="fp8"`': {"precision": "fp8"},
}


def tensors(activation: str) -> dict[str, Tensor]:
    """Input and weights in bfloat16, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    found = {
        "x": normal(TOKENS, D_MODEL),
        "w_up": normal(D_FF, D_MODEL, scale=D_MODEL**-0.5),
        "w_down": normal(D_MODEL, D_FF, scale=D_FF**-0.5),
        "grad": normal(TOKENS, D_MODEL),
    }
    if ACTIVATIONS[activation].gated:
        found["w_gate"] = normal(D_FF, D_MODEL, scale=D_MODEL**-0.5)
    return found


def results(activation: str, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Output and gradients, in float64."""
    t = {name: tensor.to(dtype) for name, tensor in tensors(activation).items()}
    grad = t.pop("grad")
    leaves = {name: tensor.requires_grad_() for name, tensor in t.items()}
    y = bitsparse.ffn(**leaves, activation=activation, **options)  # type: ignore[arg-type]
    y.backward(grad)
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {name: r.detach().double() for name, r in ({"y": y} | gradients).items()}


def percent(actual: Tensor, expected: Tensor) -> str:
    """Norm of the error by the norm, two digits."""
    value = 100 * float((actual - expected).norm() / expected.norm())
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def bits(activation: str, **options: Any) -> str:
    """Kept for each element of the hidden tensor."""
    torch.manual_seed(0)
    block = FeedForward(D_MODEL, D_FF, activation, dtype=torch.bfloat16, **options)
    block(torch.randn(TOKENS, D_MODEL).bfloat16())
    assert block.kept is not None
    return f"{8 * block.kept.nbytes / block.kept.numel:.1f}"


def main() -> None:
    print("| activation | arithmetic |", " | ".join(NAMES), "|")
    print("| --- | --- |" + " --- |" * len(NAMES))
    for name in ACTIVATIONS:
        expected = results(name, torch.float64, memory="dense")
        for i, (way, options) in enumerate(WAYS.items()):
            actual = results(name, torch.bfloat16, **options)
            cells = [percent(actual[n], expected[n]) if n in actual else "" for n in NAMES]
            row = " | ".join(["" if i else f"`{name}`", way, *cells])
            print(f"| {row} |".replace("|  |", "| |").replace("|  |", "| |"))
    print("\n| |", " | ".join(f"`{name}`" for name in ACTIVATIONS), "|")
    print("| --- |" + " --- |" * len(ACTIVATIONS))
    for way in ("bfloat16", '`storage="fp8"`', '`precision="fp8"`'):
        print("|", way, "|", " | ".join(bits(name, **WAYS[way]) for name in ACTIVATIONS), "|")


if __name__ == "__main__":
    main()
