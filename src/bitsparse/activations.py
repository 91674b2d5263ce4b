"""The feed-forward activations: what they compute, and plain PyTorch for it.

``gate`` is the pre-activation that ReLU is applied to; ungated forms have no ``up``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """One activation of the family ``relu(gate)^p * [relu](up)``."""

    name: str
    gated: bool = False
    """Whether the result is multiplied by a second pre-activation ``up``."""
    squared: bool = False
    """Whether ``relu(gate)`` is squared."""
    relu_up: bool = False
    """Whether ReLU is applied to ``up`` too."""

    @property
    def plain(self) -> bool:
        """ReLU itself: its result is all that it depends on, and may overwrite its input."""
        return not self.gated and not self.squared

    def dense(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """The plain PyTorch computation that every compressed one equals bit for bit."""
        hidden = torch.relu(gate)
        if self.squared:
            hidden = torch.square(hidden)
        if self.gated:
            assert up is not None
            hidden = hidden * (torch.relu(up) if self.relu_up else up)
        return hidden


ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("relu"),
        Activation("relu2", squared=True),
        Activation("reglu", gated=True),
        Activation("reglu2", gated=True, squared=True),
        Activation("drelu", gated=True, relu_up=True),
    )
}


def get_activation(name: str) -> Activation:
    """Look an activation up.

    Raises:
        ValueError: if there is none of that name.
    """
    try:
        return ACTIVATIONS[name]
    except (KeyError, TypeError):
        raise ValueError(
            f"activation: got {name!r}, allowed: {', '.join(map(repr, ACTIVATIONS))}"
        ) from None
