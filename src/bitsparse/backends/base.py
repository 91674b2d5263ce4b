"""What a backend provides, and the data that flows through it.

    activate -> survey -> (choice of codings) -> support, streams -> (backward) hidden, gradient

The reference backend (:mod:`bitsparse.backends.reference`) is the specification; every other one
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bitsparse.activations import Activation
from bitsparse.codings import Counts, Mask, Stream, StreamCounts, SupportCoding, ValueCoding
from bitsparse.codings.exponent import FIELDS
from bitsparse.layout import Geometry, table_words

# Rows of the counts per tile, in the order in which the first pass needs them.
NNZ = 0
BUCKETS = 1
ESCAPES = 2  # of the first stream, one row for each of FIELDS; then of the second
UP_BUCKETS = ESCAPES + 2 * len(FIELDS)

# bfloat16 patterns of 2**-60 and 2**60. For values r between them, the second one excluded,
# squared ReLU can be undone: neither r**2 nor 2 * r leaves the normal numbers, and r is the square
# root of the rounded square, rounded.
ROOT_LEAST = (127 - 60) << 7
ROOT_LIMIT = (127 + 60) << 7


def count_rows(streams: int, masks: int, statistics: bool) -> int:
    """How many rows of counts there are for so many streams and masks."""
    if not statistics:
        return 1
    return UP_BUCKETS + 1 if masks == 2 else ESCAPES + streams * len(FIELDS)


class Slots(NamedTuple):
    """Kept values that wait to be coded."""

    streams: list[Tensor]
    capacity: int
    """Of each tile; 0: any number, in the tensor's own memory."""


@dataclass
class Survey:
    """What the first pass leaves: positions, one bit a slot, and exact counts."""

    geometry: Geometry
    dtype: torch.dtype
    streams: int
    words: Tensor
    """int32 ``[mask_words]``: nonzeros. dReLU: where relu(gate) fires (or either is special)."""
    up_words: Tensor | None
    """dReLU only: where relu(up) fires (or either is special). Values are kept where both are."""
    totals: Tensor
    """int64 ``[2 + rows]``: whether any kept value of the first, second stream has its sign bit
    set; then the sums of the counts, in the order above. After squared ReLU of bfloat16, which has
    no second stream, its place says whether any kept value of relu(gate) lies outside
    [2**-60, 2**60)."""
    tables: Tensor | list[Tensor]
    """int32 ``[rows, table_words]``, or a list of rows: the offset tables of the counts."""
    exponents: Tensor | list[Tensor] | None
    """uint8 ``[streams, tiles]``, or a list of rows: the largest exponent among the kept values of
    each tile."""
    slots: Slots | None = None
    """Where a backend's first pass has put the kept values, if it has."""

    def counts(self, totals: list[int]) -> Counts:
        """``totals``: the tensor's numbers on the host."""
        masks = 1 if self.up_words is None else 2
        sums = totals[2:]
        statistics = len(sums) > 1
        buckets = (
            [sums[row] for row in (BUCKETS, UP_BUCKETS)[:masks]] if statistics else [0] * masks
        )
        streams = []
        for i in range(self.streams):
            first = ESCAPES + i * len(FIELDS)
            escapes = dict(zip(FIELDS, sums[first:], strict=False)) if statistics else {}
            streams.append(StreamCounts(bool(totals[i]), escapes))
        outside = self.streams == 1 and bool(totals[1])
        return Counts(self.geometry, self.dtype, sums[NNZ], tuple(buckets), tuple(streams), outside)

    def table(self, row: int) -> Tensor:
        """One table, in memory of its own."""
        return _alone(self.tables[row])

    def exponent_buffers(
        self, coding: ValueCoding, counts: Counts, stream: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """``exponents``, ``escapes`` (to be written) and ``escape_offsets`` of a coded stream;
        ``None`` where the coding has no such buffers."""
        if not coding.field:
            return None, None, None
        assert self.exponents is not None
        exponents = _alone(self.exponents[stream])
        escapes = exponents.new_empty(counts.streams[stream].escapes[coding.field])
        row = ESCAPES + stream * len(FIELDS) + FIELDS.index(coding.field)
        return exponents, escapes, self.table(row)


def _alone(row: Tensor) -> Tensor:
    """A copy, unless nothing else is in its memory."""
    return row if row.untyped_storage().nbytes() == row.nbytes else row.clone()


def allocate_survey(
    geometry: Geometry,
    dtype: torch.dtype,
    device: torch.device,
    streams: int,
    masks: int,
    statistics: bool,
    apart: bool = False,
) -> tuple[Survey, Tensor]:
    """A survey to be filled in, and the counts: int32 ``[rows, tiles]``.

    ``apart``: tables and exponents as lists of rows, which can be kept without a copy.
    """
    rows = count_rows(streams, masks, statistics)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def matrix(rows: int, cols: int, dtype: torch.dtype) -> Tensor | list[Tensor]:
        if apart:
            return [empty(cols, dtype=dtype) for _ in range(rows)]
        return empty(rows, cols, dtype=dtype)

    survey = Survey(
        geometry,
        dtype,
        streams,
        empty(geometry.mask_words),
        empty(geometry.mask_words) if masks == 2 else None,
        empty(2 + rows, dtype=torch.int64),
        matrix(rows, table_words(geometry.tiles), torch.int32),
        matrix(streams, geometry.tiles, torch.uint8) if statistics else None,
    )
    return survey, empty(rows, geometry.tiles)


@dataclass(frozen=True)
class Support:
    """Positions of the nonzeros of one tensor (or of the pair of tensors of a gated activation)."""

    geometry: Geometry
    nnz: int
    offsets: Tensor
    """Offset table of the values."""
    mask: Mask
    up_mask: Mask | None = None
    """dReLU only; values are kept where both masks are set."""


def encode_masks(
    coding: SupportCoding,
    survey: Survey,
    counts: Counts,
    fill: Callable[[Tensor, Mask, Geometry], None],
) -> Support:
    """:meth:`Backend.encode_support` by means of ``fill``, which writes a bucketed mask from the
    words of a flat one."""
    geometry = survey.geometry

    def encode(flat: Tensor, row: int, size: int) -> Mask:
        if coding.name != "bucketed":
            return Mask(coding, flat if coding.name == "flat" else None)
        mask = Mask(
            coding,
            flat.new_empty(2 * geometry.tiles),
            flat.new_empty(size, dtype=torch.uint8),
            survey.table(row),
        )
        fill(flat, mask, geometry)
        return mask

    up = survey.up_words
    sizes = counts.bucket_bytes
    return Support(
        geometry,
        counts.nnz,
        survey.table(NNZ),
        encode(survey.words, BUCKETS, sizes[0]),
        None if up is None else encode(up, UP_BUCKETS, sizes[1]),
    )


def gradient_buffers(
    grad_hidden: Tensor, need_gate: bool, need_up: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Where the gradients of ``gate`` and ``up`` go: one of them over the incoming gradient, of
    which the kernels read every element before they overwrite it."""
    if not need_up:
        return grad_hidden, None
    return (grad_hidden, torch.empty_like(grad_hidden)) if need_gate else (None, grad_hidden)


@dataclass(frozen=True)
class Kept:
    """What a compressed feed-forward keeps for backward; ``None`` for what no gradient needs."""

    support: Support
    dtype: torch.dtype
    gate: Stream | None = None
    """relu(gate) at the kept positions."""
    up: Stream | None = None
    """up (dReLU: relu(up)) at the kept positions."""
    roots: bool = field(default=False, kw_only=True)
    """Squared ReLU of bfloat16: whether every kept value of relu(gate) is the square root of the
    hidden value, rounded, and lies in [2**-60, 2**60)."""


class Backend(Protocol):
    """Operations on bit patterns. Every tensor is contiguous and on one device."""

    name: str

    def survey(
        self, geometry: Geometry, patterns: Tensor, dtype: torch.dtype, statistics: bool
    ) -> Survey:
        """Find the nonzeros of ``patterns`` (integer ``[numel]``): any bit set.

        Without ``statistics`` only nonzeros and signs are counted.
        """

    def activate(
        self,
        geometry: Geometry,
        activation: Activation,
        gate: Tensor,
        up: Tensor | None,
        fp32_math: bool,
        statistics: bool,
    ) -> tuple[Tensor, Survey]:
        """The hidden tensor (shape and dtype of ``gate``) and what its backward must keep.

        Kept positions: relu(gate) positive or NaN; gated forms also where relu(gate) or ``up``
        (dReLU: relu(up)) is infinite, NaN or -0.0, since products with zero show these.
        For an activation that keeps no more than its result ("relu") the hidden tensor overwrites
        ``gate``; for others ``gate`` and ``up`` may be overwritten too, and are of use only to
        :meth:`encode_values`. ``fp32_math``: round intermediate results to float32 instead of the
        tensors' dtype, as CUDA autocast does around ``torch.square``.
        """

    def encode_support(self, coding: SupportCoding, survey: Survey, counts: Counts) -> Support:
        """Code the positions that a survey found."""

    def encode_values(
        self,
        coding: ValueCoding,
        survey: Survey,
        counts: Counts,
        source: Tensor,
        stream: int,
        relu: bool,
    ) -> Stream:
        """Code the patterns of ``source`` at the kept positions, of relu(source) if ``relu``.

        After :meth:`activate` it is ``gate`` or ``up``, or what has become of them.

        ``stream``: 0 or 1, which of the survey's streams they are.
        """

    def scatter(self, support: Support, stream: Stream, dtype: torch.dtype) -> Tensor:
        """Decode: integer patterns ``[numel]`` with zero where nothing is stored."""

    def hidden(self, activation: Activation, kept: Kept, fp32_math: bool, out: Tensor) -> Tensor:
        """Write the hidden tensor into ``out`` (``[numel]`` of ``kept.dtype``) and return it.

        Where nothing is kept the result is +0.0.
        """

    def gradient(
        self,
        activation: Activation,
        kept: Kept,
        grad_hidden: Tensor,
        fp32_math: bool,
        need_gate: bool,
        need_up: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of ``gate`` and ``up`` (``[numel]``); may overwrite ``grad_hidden``."""


def backend_names(device_type: str) -> tuple[str, ...]:
    """The backends that serve tensors on devices of this type, the fastest first."""
    return {"cuda": ("cuda", "triton"), "cpu": ("cpu",)}.get(device_type, ()) + ("reference",)


__all__ = ["Backend", "Kept", "Support", "Survey", "backend_names"]
