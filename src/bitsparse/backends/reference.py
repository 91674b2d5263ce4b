"""The reference backend: plain PyTorch, slow and obvious. It is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from bitsparse import dtypes
from bitsparse.activations import Activation
from bitsparse.backends.base import Kept, Support, Survey, count_rows
from bitsparse.codings import Counts, Mask, Stream, SupportCoding, ValueCoding, slots, tables, words
from bitsparse.codings.exponent import FIELDS
from bitsparse.layout import TILE, Geometry


class ReferenceBackend:
    """See :class:`bitsparse.backends.base.Backend`."""

    name = "reference"

    def survey(
        self, geometry: Geometry, patterns: Tensor, dtype: torch.dtype, statistics: bool
    ) -> Survey:
        return _survey(geometry, dtype, patterns != 0, None, [patterns], statistics)

    def activate(
        self,
        geometry: Geometry,
        activation: Activation,
        gate: Tensor,
        up: Tensor | None,
        fp32_math: bool,
        statistics: bool,
    ) -> tuple[Tensor, Survey]:
        flat_gate, flat_up = torch.relu(gate).view(-1), None if up is None else up.view(-1)
        fires = ~(flat_gate <= 0)  # NaN fires
        up_fires: Tensor | None = None
        streams = [dtypes.to_patterns(flat_gate)]
        if flat_up is not None:
            # PyTorch multiplies by zeros too, which gives NaN where the other factor is not
            # finite, and another sign where the zero is -0.0: these positions are kept as well.
            if activation.relu_up:
                flat_up = torch.relu(flat_up)
            either = _special(flat_gate) | _special(flat_up)
            if activation.relu_up:
                up_fires = ~(flat_up <= 0) | either
            fires = fires | either
            streams.append(dtypes.to_patterns(flat_up))
        survey = _survey(geometry, gate.dtype, fires, up_fires, streams, statistics)
        if activation.squared and not activation.gated and gate.dtype == torch.bfloat16:
            inside = (flat_gate >= 2.0**-60) & (flat_gate < 2.0**60)
            survey.totals[1] = (fires & ~inside).any()
        hidden = _multiply(activation, torch.relu(gate), up, fp32_math)
        return (gate.copy_(hidden) if activation.plain else hidden), survey

    def encode_support(self, coding: SupportCoding, survey: Survey, counts: Counts) -> Support:
        up = survey.up_words
        return Support(
            survey.geometry,
            counts.nnz,
            survey.table(0),
            coding.encode(survey.words, survey.geometry),
            None if up is None else coding.encode(up, survey.geometry),
        )

    def encode_values(
        self,
        coding: ValueCoding,
        survey: Survey,
        counts: Counts,
        source: Tensor,
        stream: int,
        relu: bool,
    ) -> Stream:
        patterns = dtypes.to_patterns(torch.relu(source) if relu else source)
        kept = survey.words if survey.up_words is None else survey.words & survey.up_words
        positions = _positions(kept, survey.geometry)
        values = slots.from_elements(patterns, survey.geometry)[positions]
        return coding.encode(values, survey.dtype, positions // TILE, survey.geometry.tiles)

    def scatter(self, support: Support, stream: Stream, dtype: torch.dtype) -> Tensor:
        geometry = support.geometry
        kept = self._words(support.mask, geometry)
        if support.up_mask is not None:
            kept = kept & self._words(support.up_mask, geometry)
        positions = _positions(kept, geometry)
        dense = stream.values.new_zeros(geometry.tiles * TILE, dtype=dtypes.pattern_dtype(dtype))
        dense[positions] = stream.coding.decode(stream, dtype, positions // TILE, geometry.tiles)
        return slots.to_elements(dense, geometry)

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
        fires = self._fires(support.mask, support.geometry)
        up_fires: Tensor | None = None
        if gate is None:  # only the support is kept: every kept position fires
            gate = fires.to(kept.dtype)
        elif support.up_mask is not None:
            assert up is not None
            up_fires = self._fires(support.up_mask, support.geometry)
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

        def expand(stream: Stream | None) -> Tensor | None:
            if stream is None:
                return None
            return self.scatter(kept.support, stream, kept.dtype).view(kept.dtype)

        return expand(kept.gate), expand(kept.up)

    def _words(self, mask: Mask, geometry: Geometry) -> Tensor:
        return mask.coding.decode(mask, geometry)

    def _fires(self, mask: Mask, geometry: Geometry) -> Tensor:
        """Whether the mask is set: bool ``[numel]``."""
        set_bits = words.unpack(self._words(mask, geometry), geometry.slots)
        return slots.to_elements(set_bits != 0, geometry)


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


def _positions(kept: Tensor, geometry: Geometry) -> Tensor:
    """Slots whose bits are set in the words of a mask: int64, ascending."""
    return words.unpack(kept, geometry.slots).nonzero().view(-1)


def _survey(
    geometry: Geometry,
    dtype: torch.dtype,
    fires: Tensor,
    up_fires: Tensor | None,
    streams: list[Tensor],
    statistics: bool,
) -> Survey:
    """Masks and counts from bool ``[numel]`` masks and the integer patterns of the streams."""
    masks = [slots.from_elements(m, geometry) for m in (fires, up_fires) if m is not None]
    kept = torch.stack(masks).all(0).view(-1, TILE)
    mask_words = [words.pack(m[: geometry.slots]) for m in masks]
    m, e = dtypes.mantissa_bits(dtype), dtypes.exponent_bits(dtype)
    signs, escapes, exponents = [], [], []
    for patterns in streams:
        values = slots.from_elements(patterns, geometry).view(-1, TILE).to(torch.int64)
        signs.append(((values >> (m + e)) & 1 != 0) & kept)
        exponent = torch.where(kept, (values >> m) & ((1 << e) - 1), 0)
        largest = exponent.amax(1, keepdim=True)
        exponents.append(largest.view(-1).to(torch.uint8))
        for field in FIELDS:
            escapes.append((kept & (largest - exponent >= (1 << field) - 1)).sum(1))
    rows = [kept.sum(1)]
    if statistics:
        rows += [_bucket_bytes(masks[0]), *escapes]
        if up_fires is not None:
            rows.append(_bucket_bytes(masks[1]))
    assert len(rows) == count_rows(len(streams), len(masks), statistics)
    any_sign = [s.any() for s in signs] + [kept.new_zeros(())] * (2 - len(signs))
    return Survey(
        geometry,
        dtype,
        len(streams),
        mask_words[0],
        None if up_fires is None else mask_words[1],
        torch.stack([*(s.to(torch.int64) for s in any_sign), *(r.sum() for r in rows)]),
        torch.stack([tables.build(r) for r in rows]),
        torch.stack(exponents) if statistics else None,
    )


def _bucket_bytes(mask: Tensor) -> Tensor:
    """Nonempty groups and buckets of each tile of a bool mask in slot order."""
    buckets = mask.view(-1, TILE // 8, 8).any(2)
    groups = mask.view(-1, TILE // 64, 64).any(2)
    return buckets.sum(1) + groups.sum(1)


BACKEND = ReferenceBackend()
