"""Modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from bitsparse.activations import get_activation
from bitsparse.ops import fp8
from bitsparse.ops.block import KeptReport
from bitsparse.ops.feed_forward import check_options, feed_forward


class FeedForward(nn.Module):
    """A feed-forward block that keeps its hidden activations compressed for backward.

    Outputs, gradients and state dict are those of the same block written with ``nn.Linear``: its
    children are ``up``, ``down`` and, for gated activations, ``gate``.

    Args:
        d_model: size of the last dimension of input and output.
        d_ff: hidden size.
        activation: "relu", "relu2", "reglu", "reglu2" or "drelu"; see :func:`bitsparse.ffn`.
        bias: whether the projections have biases.
        memory: "compressed", "dense" or "checkpoint"; may be changed between steps.
        codec: "fast", "balanced" or "small"; may be changed between steps.
        precision: None, "fp8" or "fp8_e4m3"; may be changed between steps.
        storage: None or "fp8" (lossy); may be changed between steps.
        scaling: of FP8, "tensor" or "row"; may be changed between steps.
        tokens_per_chunk: None, or how many tokens to work through at a time; see
            :func:`bitsparse.ffn`; may be changed between steps.
        device: where the parameters are made.
        dtype: dtype of the parameters.

    Raises:
        ValueError: an unknown name or a size that is not positive.
    """

    kept: KeptReport | None
    """What the last compressed forward pass kept; None before the first."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str = "relu2",
        bias: bool = False,
        memory: str = "compressed",
        *,
        codec: str = "balanced",
        precision: str | None = None,
        storage: str | None = None,
        scaling: str = "tensor",
        tokens_per_chunk: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        act = get_activation(activation)
        check_options(memory, codec, precision, storage, scaling, tokens_per_chunk)
        for name, size in (("d_model", d_model), ("d_ff", d_ff)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}: got {size!r}, allowed: a positive integer")
        self.activation = activation
        self.memory = memory
        self.codec = codec
        self.precision = precision
        self.storage = storage
        self.scaling = scaling
        self.tokens_per_chunk = tokens_per_chunk
        self.kept = None
        self.up = nn.Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype)
        if act.gated:
            self.gate = nn.Linear(d_model, d_ff, bias=bias, device=device, dtype=dtype)
        self.down = nn.Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[..., d_model]``. Returns ``[..., d_model]``."""
        act = get_activation(self.activation)
        gate = self.gate if act.gated else None
        if not all(is_plain_linear(m) for m in (self.up, self.down, gate) if m is not None):
            # A child that was replaced or patched (an adapter), or that has hooks (its own, global
            # ones), must be called as a module, and may compute something else: plain PyTorch,
            # nothing compressed.
            check_options(
                self.memory, self.codec, self.precision, self.storage, self.scaling,
                self.tokens_per_chunk,
            )  # fmt: skip
            fp8.check_plain_children(self.precision, self.storage)
            hidden = act.dense(*(m(x) for m in (gate, self.up) if m is not None))
            return self.down(hidden)  # type: ignore[no-any-return]
        return feed_forward(
            x,
            self.up.weight,
            self.down.weight,
            act,
            None if gate is None else gate.weight,
            self.up.bias,
            self.down.bias,
            None if gate is None else gate.bias,
            self.memory,
            self.codec,
            self._set_kept,
            self.precision,
            self.storage,
            self.scaling,
            self.tokens_per_chunk,
        )

    def _set_kept(self, kept: KeptReport) -> None:
        self.kept = kept

    def extra_repr(self) -> str:
        parts = f"activation={self.activation!r}, memory={self.memory!r}, codec={self.codec!r}"
        for name in ("precision", "storage"):
            if getattr(self, name) is not None:
                parts += f", {name}={getattr(self, name)!r}, scaling={self.scaling!r}"
        if self.tokens_per_chunk is not None:
            parts += f", tokens_per_chunk={self.tokens_per_chunk}"
        return parts


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling ``module`` is nothing but ``F.linear`` with its weight and bias."""
    return type(module) is nn.Linear and is_untouched(module)


def is_untouched(module: nn.Module, patched: bool = False) -> bool:
    """Whether calling ``module`` runs its class's forward and no hooks.

    ``patched``: its forward may be an instance's own.
    """
    return not (
        ("forward" in module.__dict__ and not patched)
        or _has_any_global_hook()
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
