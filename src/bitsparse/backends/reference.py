"""The reference backend: plain PyTorch, slow and obvious. It is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from bitsparse import dtypes, layout
from bitsparse.activations import Activation
from bitsparse.backends.base import Kept, Support
from bitsparse.codings.base import SupportCoding, ValueCoding


class ReferenceBackend:
    """See :class:`bitsparse.backends.base.Backend`."""

    name = "reference"

    def find_support(self, coding: SupportCoding, patterns: Tensor) -> Support:
        nonzero = patterns != 0
        return _support(coding, nonzero, nonzero, None, patterns, None)

    def activate(
        self,
        coding: SupportCoding,
        activation: Activation,
        gate: Tensor,
        up: Tensor | None,
        fp32_math: bool,
    ) -> tuple[Tensor, Support]:
        flat_gate, flat_up = torch.relu(gate).view(-1), None if up is None else up.view(-1)
        fires = ~(flat_gate <= 0)  # NaN fires
        up_fires: Tensor | None = None
        if flat_up is not None:
            # PyTorch multiplies by zeros too, which gives NaN where the other factor is not
            # finite, and another sign where the zero is -0.0: these positions are kept as well.
            if activation.relu_up:
                flat_up = torch.relu(flat_up)
            either = _special(flat_gate) | _special(flat_up)
            if activation.relu_up:
                up_fires = ~(flat_up <= 0) | either
            fires = fires | either
        kept = fires if up_fires is None else fires & up_fires
        support = _support(
            coding,
            fires,
            kept,
            up_fires,
            dtypes.to_patterns(flat_gate),
            None if flat_up is None else dtypes.to_patterns(flat_up),
        )
        hidden = _multiply(activation, torch.relu(gate), up, fp32_math)
        return (gate.copy_(hidden) if activation.plain else hidden), support

    def gather(self, support: Support, source: Tensor, nnz: int, relu: bool) -> Tensor:
        if relu:
            source = torch.relu(source)
        numel = source.numel()
        positions = support.coding.positions(support.value_mask(), numel)
        return dtypes.to_patterns(source)[positions]

    def encode(self, coding: ValueCoding, patterns: Tensor, dtype: torch.dtype) -> Tensor:
        return coding.encode(patterns, dtype)

    def scatter(
        self,
        support: Support,
        values: ValueCoding,
        stream: Tensor,
        numel: int,
        dtype: torch.dtype,
    ) -> Tensor:
        positions = support.coding.positions(support.value_mask(), numel)
        dense = stream.new_zeros(numel, dtype=dtypes.pattern_dtype(dtype))
        dense[positions] = values.decode(stream, positions.numel(), dtype)
        return dense

    def hidden(self, activation: Activation, kept: Kept, fp32_math: bool, out: Tensor) -> Tensor:
        gate, up = self._dense(kept)
        assert gate is not None
        out.copy_(_multiply(activation, gate, up, fp32_math))
        # Outside the support the product may be -0.0 in PyTorch; +0.0 adds the same to any sum.
        return out

    def gradient(
        self,
        activation: Activation,
        kept: Kept,
        grad_hidden: Tensor,
        fp32_math: bool,
        need_gate: bool,
        need_up: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        support = kept.support
        gate, up = self._dense(kept)
        fires = torch.zeros(kept.numel, dtype=torch.bool, device=grad_hidden.device)
        fires[support.coding.positions(support.mask, kept.numel)] = True
        up_fires: Tensor | None = None
        if gate is None:  # only the support is kept: every kept position fires
            gate = fires.to(kept.dtype)
        elif support.up_mask is not None:
            assert up is not None
            up_fires = torch.zeros_like(fires)
            up_fires[support.coding.positions(support.up_mask, kept.numel)] = True
            both = fires & up_fires
            up_fires = torch.where(both, ~(up <= 0), up_fires)
            fires = torch.where(both, ~(gate <= 0), fires)
        else:
            fires = ~(gate <= 0)
        grad = grad_hidden.float() if fp32_math else grad_hidden
        grad_gate = grad_up = None
        if need_up:
            factor = _square(gate, fp32_math) if activation.squared else gate
            grad_up = (grad * factor).to(kept.dtype)
            if up_fires is not None:
                grad_up = torch.where(up_fires, grad_up, 0)
        if need_gate:
            if activation.gated:
                assert up is not None
                grad = grad * up
            if activation.squared:
                grad = grad * (2 * (gate.float() if fp32_math else gate))
            grad_gate = torch.where(fires, grad.to(kept.dtype), 0)
        return grad_gate, grad_up

    def _dense(self, kept: Kept) -> tuple[Tensor | None, Tensor | None]:
        """relu(gate) and up, with +0.0 where they are not kept."""

        def expand(stream: Tensor | None, coding: ValueCoding) -> Tensor | None:
            if stream is None:
                return None
            return self.scatter(kept.support, coding, stream, kept.numel, kept.dtype).view(
                kept.dtype
            )

        return expand(kept.gate, kept.gate_coding), expand(kept.up, kept.up_coding)


def _special(values: Tensor) -> Tensor:
    """Infinite, NaN, or -0.0."""
    return ~values.isfinite() | ((values == 0) & values.signbit())


def _square(gate: Tensor, fp32_math: bool) -> Tensor:
    return torch.square(gate.float() if fp32_math else gate)


def _multiply(
    activation: Activation, relu_gate: Tensor, up: Tensor | None, fp32_math: bool
) -> Tensor:
    """The hidden tensor from relu(gate) and up, rounded step by step as PyTorch does."""
    hidden = _square(relu_gate, fp32_math) if activation.squared else relu_gate
    if up is not None:
        hidden = hidden * (torch.relu(up) if activation.relu_up else up)
    return hidden.to(relu_gate.dtype)


def _support(
    coding: SupportCoding,
    fires: Tensor,
    kept: Tensor,
    up_fires: Tensor | None,
    patterns: Tensor,
    up_patterns: Tensor | None,
) -> Support:
    """Code the masks and count: bool ``[numel]`` masks, integer patterns of the two streams."""
    numel = kept.numel()
    padded = kept.new_zeros(layout.num_tiles(numel) * layout.TILE)
    padded[:numel] = kept
    per_tile = padded.view(-1, layout.TILE).sum(1)

    def any_sign(values: Tensor | None) -> Tensor:
        if values is None:
            return kept.new_zeros((), dtype=torch.int64)
        sign = values < 0 if values.dtype != torch.uint8 else values >= 128
        return (sign & kept).any().to(torch.int64)

    return Support(
        coding,
        coding.encode(fires),
        (per_tile.cumsum(0) - per_tile).to(dtypes.offset_dtype(numel)),
        None if up_fires is None else coding.encode(up_fires),
        torch.stack([per_tile.sum(), any_sign(patterns), any_sign(up_patterns)]),
    )


BACKEND = ReferenceBackend()
