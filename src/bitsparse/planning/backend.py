"""A backend for tensors without values: it allocates what the CUDA backend does.

The blocks' own code runs with it. What it cannot know, how many values are kept, comes from
assumed densities.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from bitsparse import dtypes, layout
from bitsparse.activations import Activation, get_activation
from bitsparse.backends import get_backend
from bitsparse.backends.base import (
    Kept,
    Slots,
    Support,
    Survey,
    allocate_survey,
    encode_masks,
    gradient_buffers,
)
from bitsparse.bench.inputs import PRE_ACTIVATIONS
from bitsparse.codings import Counts, Stream, SupportCoding, ValueCoding
from bitsparse.layout import Geometry

_SLOTS = 1024  # of a tile, as in bitsparse.backends.cuda
_SAMPLE = (1024, 256)


class Known(list[int]):
    """Counts where a backend has a tensor: the host need not wait for them."""

    device = torch.device("cpu")

    def tolist(self) -> list[int]:
        return list(self)


class PlanningBackend:
    """See :class:`bitsparse.backends.base.Backend`; ``density`` is that of the block at work."""

    name = "planning"

    def __init__(self, positions: str) -> None:
        self.positions = positions
        """One of ``PRE_ACTIVATIONS``: how nonzeros lie."""
        self.density = 0.1

    def survey(self, *_: Any) -> Survey:
        raise NotImplementedError("only feed-forward blocks are planned")

    def scatter(self, *_: Any) -> Tensor:
        raise NotImplementedError("only feed-forward blocks are planned")

    def activate(
        self,
        geometry: Geometry,
        activation: Activation,
        gate: Tensor,
        up: Tensor | None,
        fp32_math: bool,
        statistics: bool,
    ) -> tuple[Tensor, Survey]:
        fast = has_kernels(geometry, gate.dtype)
        streams = 1 if up is None else 2
        survey, counts = allocate_survey(
            *(geometry, gate.dtype, gate.device, streams, 1 + activation.relu_up),
            *(statistics, fast),
        )
        if activation.plain:
            hidden = gate
            if fast:
                survey.slots = Slots([gate.new_empty(geometry.tiles * _SLOTS)], _SLOTS)
        else:
            hidden = torch.empty_like(gate)
        rows = counts.shape[0]
        sample = _sample(activation.name, self.density, self.positions, gate.dtype)
        scale = geometry.numel / sample.geometry.numel
        sums = [sample.nnz, sample.bucket_bytes[0]]
        for stream in sample.streams:
            sums += stream.escapes.values()
        sums += sample.bucket_bytes[1:]
        totals = [int(s.any_sign) for s in sample.streams]
        totals += [0] * (2 - len(totals))
        totals += [round(s * scale) for s in sums][:rows]
        return hidden, replace(survey, totals=cast(Tensor, Known(totals)))

    def encode_support(self, coding: SupportCoding, survey: Survey, counts: Counts) -> Support:
        return encode_masks(coding, survey, counts, lambda *_: None)

    def encode_values(
        self,
        coding: ValueCoding,
        survey: Survey,
        counts: Counts,
        source: Tensor,
        stream: int,
        relu: bool,
    ) -> Stream:
        dtype, width = survey.dtype, coding.width(survey.dtype)
        parts = survey.exponent_buffers(coding, counts, stream)
        pattern = dtypes.pattern_dtype(dtype)
        if width == dtypes.bit_width(dtype):
            return Stream(coding, source.new_empty(counts.nnz, dtype=pattern), *parts)
        if not has_kernels(survey.geometry, dtype):  # Triton gathers the patterns first
            source.new_empty(counts.nnz, dtype=pattern)
        words = layout.packed_words(counts.nnz, width)
        return Stream(coding, source.new_empty(words, dtype=torch.int32), *parts)

    def hidden(self, activation: Activation, kept: Kept, fp32_math: bool, out: Tensor) -> Tensor:
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
        need_up = need_up and activation.gated
        if not need_gate and not need_up:
            return None, None
        return gradient_buffers(grad_hidden, need_gate, need_up)


def has_kernels(geometry: Geometry, dtype: torch.dtype) -> bool:
    """Whether the CUDA backend's own kernels apply, and not Triton's."""
    blocked = geometry.height == layout.GROUP
    return dtype.itemsize == 2 and blocked and geometry.cols % layout.GROUP == 0


def prepare(activation: str, density: float, positions: str, dtype: torch.dtype) -> None:
    """Make the counts for this density known; they cannot be made among tensors without values."""
    _sample(activation, density, positions, dtype)


@lru_cache(maxsize=1024)
def _sample(activation: str, density: float, positions: str, dtype: torch.dtype) -> Counts:
    """The exact counts of a small random block of that density."""
    act, cpu = get_activation(activation), torch.device("cpu")
    fires = density**0.5 if act.relu_up else density
    draw = PRE_ACTIVATIONS[positions]
    fires = min(max(fires, 1e-6), 1 - 1e-6)
    gate = draw(_SAMPLE, fires, cpu, dtype, 1)
    up = None
    if act.gated:
        generator = torch.Generator().manual_seed(2)
        up = torch.randn(_SAMPLE, generator=generator).to(dtype)
        if act.relu_up:
            up = draw(_SAMPLE, fires, cpu, dtype, 3)
    geometry = layout.geometry(_SAMPLE)
    _, survey = get_backend("reference").activate(geometry, act, gate, up, False, True)
    counts = survey.counts(survey.totals.tolist())
    if counts.nnz == 0:
        return counts
    # The sample's density is near what was asked for: what grows with it is made so.
    return replace(counts, nnz=round(density * geometry.numel))
