"""The CPU backend: loops over tiles, compiled by Numba, on PyTorch's number of threads.

Kernels work on unsigned bit patterns, a tile at a time: the tile's elements are copied to a local
buffer of 64 rows by 64 columns, where loops over all of them, one simple thing each, are what the
compiler turns into vectors. Kernels are made for one support coding and one dtype at a time, by
closures over the coding's own functions, and compiled at first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

import numba  # noqa: F401  (without it this backend cannot be used: say so at import)
import numpy as np
import torch
from torch import Tensor

from bitsparse import dtypes, layout
from bitsparse.activations import Activation
from bitsparse.backends.base import (
    BUCKETS,
    ESCAPES,
    NNZ,
    ROOT_LEAST,
    ROOT_LIMIT,
    UP_BUCKETS,
    Kept,
    Support,
    Survey,
    allocate_survey,
    encode_masks,
)
from bitsparse.backends.optional import numba_jit
from bitsparse.codings import (
    Counts,
    Mask,
    Stream,
    SupportCoding,
    ValueCoding,
    bucketed,
    support_coding,
    tables,
)
from bitsparse.codings.exponent import FIELDS
from bitsparse.layout import GROUP, TILE, Geometry

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_NONE = np.zeros(1, np.uint8)
_NONE_WORDS = np.zeros(1, np.uint32)
_NO_STARTS = np.zeros(1, np.int64)


class CpuBackend:
    """See :class:`bitsparse.backends.base.Backend`."""

    name = "cpu"

    def survey(
        self, geometry: Geometry, patterns: Tensor, dtype: torch.dtype, statistics: bool
    ) -> Survey:
        survey, counts, signs = _allocate(geometry, dtype, 1, 1, statistics)
        _over_tiles(
            _kernels(support_coding("flat"), dtype).survey,
            geometry,
            _np(patterns),
            _np(survey.words),
            counts,
            signs,
            _exponents(survey),
            statistics,
        )
        return _finish(survey, counts, signs)

    def activate(
        self,
        geometry: Geometry,
        activation: Activation,
        gate: Tensor,
        up: Tensor | None,
        fp32_math: bool,
        statistics: bool,
    ) -> tuple[Tensor, Survey]:
        survey, counts, signs = _allocate(
            geometry, gate.dtype, 1 + activation.gated, 1 + activation.relu_up, statistics
        )
        hidden = gate if activation.plain else torch.empty_like(gate)
        _over_tiles(
            _kernels(support_coding("flat"), gate.dtype).activate,
            geometry,
            _np(gate),
            _np(gate if up is None else up),
            _np(hidden),
            activation.gated,
            activation.squared,
            activation.relu_up,
            fp32_math,
            _np(survey.words),
            _NONE_WORDS if survey.up_words is None else _np(survey.up_words),
            counts,
            signs,
            _exponents(survey),
            statistics,
        )
        return hidden, _finish(survey, counts, signs)

    def encode_support(self, coding: SupportCoding, survey: Survey, counts: Counts) -> Support:
        return encode_masks(coding, survey, counts, _bucket)

    def encode_values(
        self,
        coding: ValueCoding,
        survey: Survey,
        counts: Counts,
        source: Tensor,
        stream: int,
        relu: bool,
    ) -> Stream:
        geometry, dtype, nnz = survey.geometry, survey.dtype, counts.nnz
        parts = survey.exponent_buffers(coding, counts, stream)
        exponents, escapes, escape_offsets = parts
        codes = torch.empty(nnz, dtype=dtypes.pattern_dtype(dtype), device="cpu")
        flat = _np(survey.words)
        _over_tiles(
            _kernels(support_coding("flat"), dtype).gather,
            geometry,
            _np(source),
            flat,
            flat if survey.up_words is None else _np(survey.up_words),
            _starts(survey.tables[NNZ], geometry.tiles),
            relu,
            coding.field,
            _NONE if exponents is None else _np(exponents),
            _starts(escape_offsets, geometry.tiles),
            _NONE if escapes is None else _np(escapes),
            _np(codes),
        )
        width = coding.width(dtype)
        if width < dtypes.bit_width(dtype):
            packed = torch.empty(layout.packed_words(nnz, width), dtype=torch.int32, device="cpu")
            # 32 codes fill whole words, so blocks of 32 codes can be packed independently.
            _in_parallel(_pack, layout.ceil_div(nnz, 32), _np(codes), width, _np(packed))
            codes = packed
        return Stream(coding, codes, *parts)

    def scatter(self, support: Support, stream: Stream, dtype: torch.dtype) -> Tensor:
        out = torch.empty(support.geometry.numel, dtype=dtypes.pattern_dtype(dtype), device="cpu")
        starts = _starts(support.offsets, support.geometry.tiles)
        self._scatter(support, starts, _decode(support, stream, dtype, starts), dtype, out)
        return out

    def hidden(self, activation: Activation, kept: Kept, fp32_math: bool, out: Tensor) -> Tensor:
        support, dtype = kept.support, kept.dtype
        starts = _starts(support.offsets, support.geometry.tiles)
        assert kept.gate is not None
        values = _decode(support, kept.gate, dtype, starts)
        if not activation.plain:
            gate = values
            up = gate if kept.up is None else _decode(support, kept.up, dtype, starts)
            values = np.empty_like(gate)
            _in_parallel(
                _kernels(support_coding("flat"), dtype).multiply,
                layout.ceil_div(support.nnz, TILE),
                gate,
                up,
                activation.gated,
                activation.squared,
                fp32_math,
                values,
            )
        self._scatter(support, starts, values, dtype, out)
        return out

    def _scatter(
        self, support: Support, starts: Any, values: Any, dtype: torch.dtype, out: Tensor
    ) -> None:
        _over_tiles(
            _kernels(support.mask.coding, dtype).scatter,
            support.geometry,
            *_mask(support),
            starts,
            values,
            _np(out),
        )

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
        geometry = support.geometry
        kernels = _kernels(support.mask.coding, kept.dtype)
        grad, masks = _np(grad_hidden), _mask(support)
        if activation.plain:
            _over_tiles(kernels.mask_gradient, geometry, *masks, grad)
            return grad_hidden, None
        assert kept.gate is not None
        starts = _starts(support.offsets, geometry.tiles)
        gate = _decode(support, kept.gate, kept.dtype, starts)
        if not activation.gated:
            _over_tiles(kernels.square_gradient, geometry, *masks, starts, gate, fp32_math, grad)
            return grad_hidden, None
        assert kept.up is not None
        up = _decode(support, kept.up, kept.dtype, starts)
        grad_up = torch.empty_like(grad_hidden)
        _over_tiles(
            kernels.gated_gradient,
            geometry,
            *masks,
            starts,
            gate,
            up,
            activation.squared,
            activation.relu_up,
            fp32_math,
            grad,
            _np(grad_up),
        )
        return grad_hidden if need_gate else None, grad_up if need_up else None


BACKEND = CpuBackend()

# ------------------------------------------------------------------------------ threads

_pool: ThreadPoolExecutor | None = None
_MIN_BLOCKS = 8  # below this a second thread costs more than it brings


def _drop_pool() -> None:
    global _pool
    _pool = None  # threads do not survive a fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_pool)


def _in_parallel(kernel: Callable[..., None], blocks: int, *args: Any) -> None:
    """Run ``kernel(first, last, *args)`` over ranges that cover ``range(blocks)``."""
    global _pool
    threads = min(torch.get_num_threads(), blocks // _MIN_BLOCKS) or 1
    bounds = [blocks * t // threads for t in range(threads + 1)]
    futures = []
    if threads > 1:
        # Plain threads: the kernels release the interpreter lock, and unlike Numba's own threading
        # layers this is safe when autograd calls from several threads at once.
        if _pool is None:
            _pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1)
        for t in range(1, threads):
            try:
                futures.append(_pool.submit(kernel, bounds[t], bounds[t + 1], *args))
            except RuntimeError:  # the interpreter is shutting down and starts no threads
                kernel(bounds[t], bounds[t + 1], *args)
    kernel(bounds[0], bounds[1], *args)
    for future in futures:
        future.result()


def _over_tiles(kernel: Callable[..., None], geometry: Geometry, *args: Any) -> None:
    _in_parallel(kernel, geometry.tiles, *geometry, *args)


# ------------------------------------------------------------------------------- launch


def _np(tensor: Tensor) -> Any:
    """The bit patterns of a contiguous tensor as a 1-d unsigned numpy array (no copy)."""
    tensor = tensor.detach()
    if tensor.is_floating_point():
        tensor = tensor.view(dtypes.pattern_dtype(tensor.dtype))
    return tensor.view(-1).numpy().view(_UNSIGNED[tensor.dtype.itemsize])


def _starts(table: Tensor | None, tiles: int) -> Any:
    """The entries of an offset table as int64 ``[tiles + 1]``."""
    return _NO_STARTS if table is None else tables.read(table, tiles).numpy()


def _mask(support: Support) -> tuple[Any, ...]:
    """The kernels' arguments ``mask`` to ``up_starts``."""
    both = (support.mask, support.mask if support.up_mask is None else support.up_mask)
    found = []
    for mask in both:
        found += [
            _NONE_WORDS if mask.words is None else _np(mask.words),
            _NONE if mask.buckets is None else _np(mask.buckets),
            _starts(mask.bucket_offsets, support.geometry.tiles),
        ]
    return (*found[:3], support.up_mask is not None, *found[3:])


def _exponents(survey: Survey) -> Any:
    """uint8 ``[streams, tiles]``."""
    if survey.exponents is None:
        return _NONE.reshape(1, 1)
    assert isinstance(survey.exponents, Tensor)
    return survey.exponents.numpy()


def _allocate(
    geometry: Geometry, dtype: torch.dtype, streams: int, masks: int, statistics: bool
) -> tuple[Survey, Any, Any]:
    """A survey to be filled in, the counts ``[rows, tiles]`` and the signs ``[tiles, 2]``."""
    survey, counts = allocate_survey(
        geometry, dtype, torch.device("cpu"), streams, masks, statistics
    )
    return survey, counts.numpy(), np.zeros((geometry.tiles, 2), np.bool_)


def _bucket(flat: Tensor, mask: Mask, geometry: Geometry) -> None:
    """Fill in ``mask`` from the words of a flat one."""
    assert mask.words is not None and mask.buckets is not None
    _in_parallel(
        bucketed.cpu_store,
        geometry.tiles,
        _np(flat),
        _starts(mask.bucket_offsets, geometry.tiles),
        _np(mask.words),
        _np(mask.buckets),
    )


def _finish(survey: Survey, counts: Any, signs: Any) -> Survey:
    per_tile = torch.from_numpy(counts).to(torch.int64)
    any_sign = torch.from_numpy(signs).any(0).to(torch.int64)
    survey.totals = torch.cat([any_sign, per_tile.sum(1)])
    survey.tables = torch.stack([tables.build(row) for row in per_tile])
    return survey


def _decode(support: Support, stream: Stream, dtype: torch.dtype, starts: Any) -> Any:
    """The stream's patterns, full width."""
    coding = stream.coding
    width = coding.width(dtype)
    if width == dtypes.bit_width(dtype) and not coding.field:
        return _np(stream.values)
    count = support.nnz
    out = np.empty(count, _UNSIGNED[dtype.itemsize])
    if width == dtypes.bit_width(dtype):
        out[:] = _np(stream.values)
    else:
        _in_parallel(_unpack, layout.ceil_div(count, 32), _np(stream.values), width, count, out)
    if coding.field:
        assert stream.exponents is not None and stream.escapes is not None
        tiles = support.geometry.tiles
        _in_parallel(
            _kernels(support_coding("flat"), dtype).restore,
            tiles,
            starts,
            coding.field,
            _np(stream.exponents),
            _starts(stream.escape_offsets, tiles),
            _np(stream.escapes),
            out,
        )
    return out


# ------------------------------------------------------------------------------ kernels

# Index of the lowest set bit `b` of a word, by de Bruijn's sequence: table[(b * sequence) >> 27].
_DE_BRUIJN = np.uint32(0x077CB531)
_LOWEST_BIT = np.array(
    [int((0x077CB531 << i & 0xFFFFFFFF) >> 27) for i in range(32)], np.int64
).argsort()
# Multiplying eight 0/1 bytes by this gathers them as the bits of the highest byte.
_GATHER_BITS = np.uint64(0x0102040810204080)
_TILE_WORDS = TILE // 32


@numba_jit
def _pack(first, last, patterns, width, stream):
    for block in range(first, last):
        begin, end = block * 32, min(block * 32 + 32, patterns.size)
        word, filled, pending = block * width, np.uint64(0), np.uint64(0)
        for i in range(begin, end):
            pending |= np.uint64(patterns[i]) << filled
            filled += np.uint64(width)
            if filled >= np.uint64(32):
                stream[word] = np.uint32(pending & np.uint64(0xFFFFFFFF))
                pending >>= np.uint64(32)
                filled -= np.uint64(32)
                word += 1
        if filled > np.uint64(0):
            stream[word] = np.uint32(pending)


@numba_jit
def _unpack(first, last, stream, width, count, out):
    keep = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for block in range(first, last):
        begin, end = block * 32, min(block * 32 + 32, count)
        word, filled, pending = block * width, np.uint64(0), np.uint64(0)
        for i in range(begin, end):
            if filled < np.uint64(width):
                pending |= np.uint64(stream[word]) << filled
                filled += np.uint64(32)
                word += 1
            out[i] = pending & keep
            pending >>= np.uint64(width)
            filled -= np.uint64(width)


@numba_jit
def _load(source, tile, rows, cols, height, local):
    """Copy the tile's elements to ``local`` ``[TILE]``, row by row; zeros outside the tensor."""
    if height == 1:
        base = tile * TILE
        size = min(TILE, rows * cols - base)
        local[:size] = source[base : base + size]
        local[size:] = 0
        return
    # A tile is 64 groups, a group a column of a block: runs of columns of one block each.
    first = tile * GROUP
    at = 0
    while at < GROUP:
        block = (first + at) // cols
        column = first + at - block * cols
        width = min(GROUP - at, cols - column)
        inside = max(0, min(GROUP, rows - block * GROUP))
        for r in range(inside):
            begin = (block * GROUP + r) * cols + column
            source_row = source[begin : begin + width]
            row = local[r * GROUP + at : r * GROUP + at + width]
            for i in range(width):
                row[i] = source_row[i]
        for r in range(inside, GROUP):
            local[r * GROUP + at : r * GROUP + at + width] = 0
        at += width


@numba_jit
def _store(local, tile, rows, cols, height, out):
    """The inverse of :func:`_load`."""
    if height == 1:
        base = tile * TILE
        size = min(TILE, rows * cols - base)
        out[base : base + size] = local[:size]
        return
    first = tile * GROUP
    at = 0
    while at < GROUP:
        block = (first + at) // cols
        column = first + at - block * cols
        width = min(GROUP - at, cols - column)
        for r in range(max(0, min(GROUP, rows - block * GROUP))):
            begin = (block * GROUP + r) * cols + column
            out_row = out[begin : begin + width]
            row = local[r * GROUP + at : r * GROUP + at + width]
            for i in range(width):
                out_row[i] = row[i]
        at += width


@numba_jit
def _transpose(bits):
    """Transpose a matrix of 64 by 64 bits, one row a word, in place: halves, quarters, and so on
    change places (Warren, Hacker's Delight, 7-3)."""
    step = 32
    mask = np.uint64(0xFFFFFFFF)
    while step != 0:
        shift = np.uint64(step)
        i = 0
        while i < 64:
            swapped = ((bits[i] >> shift) ^ bits[i + step]) & mask
            bits[i + step] ^= swapped
            bits[i] ^= swapped << shift
            i = (i + step + 1) & ~step
        step >>= 1
        mask ^= mask << np.uint64(step)


@numba_jit
def _to_words(flags, height, words):
    """The words ``[TILE / 32]`` of a tile from 0/1 bytes in local order."""
    eights = flags.view(np.uint64)
    groups = words.view(np.uint64)
    for g in range(GROUP):
        word = np.uint64(0)
        for byte in range(8):
            bits = (eights[8 * g + byte] * _GATHER_BITS) >> np.uint64(56)
            word |= bits << np.uint64(8 * byte)
        groups[g] = word
    if height != 1:
        _transpose(groups)


@numba_jit
def _save_words(words, tile, out):
    stored = out[tile * _TILE_WORDS : min((tile + 1) * _TILE_WORDS, out.size)]
    stored[:] = words[: stored.size]


@numba_jit
def _positions(words, height, index):
    """Local indices of the set bits, in slot order; returns how many."""
    count = 0
    for w in range(_TILE_WORDS):
        word = words[w]
        if height == 1:
            first, stride = w * 32, 1
        else:
            first, stride = (w & 1) * 32 * GROUP + (w >> 1), GROUP
        while word != 0:  # one step a nonzero: the work follows the density
            lowest = np.uint32(word & (~word + np.uint32(1)))
            bit = _LOWEST_BIT[np.uint32(lowest * _DE_BRUIJN) >> np.uint32(27)]
            index[count] = first + bit * stride
            count += 1
            word ^= lowest
    return count


@numba_jit
def _bucket_bytes(words):
    """Bytes of the nonempty groups and buckets of a tile."""
    count = np.int64(0)
    groups = words.view(np.uint64)
    for g in range(GROUP):
        x = groups[g]
        if x != np.uint64(0):
            x |= x >> np.uint64(4)
            x |= x >> np.uint64(2)
            x |= x >> np.uint64(1)
            x &= np.uint64(0x0101010101010101)
            count += 1 + np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))
    return count


@numba_jit
def _total(flags):
    """Sum of 0/1 bytes ``[TILE]``, eight at a time; no byte of the partial sums overflows."""
    eights = flags.view(np.uint64)
    count = np.uint64(0)
    for begin in range(0, TILE // 8, 128):
        partial = np.uint64(0)
        for i in range(begin, begin + 128):
            partial += eights[i]
        low = partial & np.uint64(0x00FF00FF00FF00FF)
        high = (partial >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
        count += ((low + high) * np.uint64(0x0001000100010001)) >> np.uint64(48)
    return np.int64(count)


def _float_functions(dtype: torch.dtype) -> tuple[Any, Any]:
    """Compiled ``(to_float, from_float)`` between a pattern of ``dtype`` and float32.

    (Numba computes with 64 bits where two uint32 meet: hence the casts before each ``view``.)
    ``from_float`` rounds to nearest, ties to even, as PyTorch does; NaN becomes some NaN.
    """

    if dtype == torch.float32:

        @numba_jit
        def to_float(pattern):
            return np.uint32(pattern).view(np.float32)

        @numba_jit
        def from_float(value):
            return np.float32(value).view(np.uint32)

    elif dtype == torch.bfloat16:

        @numba_jit
        def to_float(pattern):
            return np.uint32(np.uint32(pattern) << np.uint32(16)).view(np.float32)

        @numba_jit
        def from_float(value):
            if value != value:
                return np.uint16(0x7FC0)
            bits = np.float32(value).view(np.uint32)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    else:

        @numba_jit
        def to_float(pattern):
            bits = np.uint32(pattern)
            sign = (bits & np.uint32(0x8000)) << np.uint32(16)
            rest = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
            if rest >= np.uint32(0x7C00 << 13):  # infinity, NaN
                return np.uint32(sign | np.uint32(0x7F800000) | rest).view(np.float32)
            # The exponent bias differs by 112; the multiplication also makes subnormals right.
            magnitude = np.float32(rest.view(np.float32) * np.float32(2.0**112))
            return np.uint32(sign | magnitude.view(np.uint32)).view(np.float32)

        @numba_jit
        def from_float(value):
            bits = np.float32(value).view(np.uint32)
            sign = np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)
            rest = np.uint32(bits & np.uint32(0x7FFFFFFF))
            if rest > np.uint32(0x7F800000):
                return np.uint16(0x7E00)
            if rest >= np.uint32(0x477FF000):  # rounds to 2**16 or more
                return np.uint16(sign | np.uint32(0x7C00))
            if rest < np.uint32(0x38800000):  # below 2**-14: subnormal, spacing 2**-24
                # Adding 0.5 aligns the last bit of the sum with that spacing: it rounds for us.
                shifted = np.float32(rest.view(np.float32) + np.float32(0.5))
                return np.uint16(sign | (shifted.view(np.uint32) - np.uint32(0x3F000000)))
            odd = (rest >> np.uint32(13)) & np.uint32(1)
            rounded = (rest + np.uint32(0xFFF) + odd) >> np.uint32(13)
            return np.uint16(sign | (rounded - np.uint32(112 << 10)))

    return to_float, from_float


_FLOAT_PATTERNS = {
    # dtype: pattern of -inf, mask of the exponent
    torch.float32: (0xFF800000, 0x7F800000),
    torch.bfloat16: (0xFF80, 0x7F80),
    torch.float16: (0xFC00, 0x7C00),
}


_FORMATS = {(d.itemsize, dtypes.mantissa_bits(d)): d for d in reversed(dtypes.SUPPORTED_DTYPES)}


def _kernels(coding: SupportCoding, dtype: torch.dtype) -> SimpleNamespace:
    """The kernels for one support coding and one dtype; dtypes of the same fields share them."""
    return _compile(coding, _FORMATS[dtype.itemsize, dtypes.mantissa_bits(dtype)])


@cache
def _compile(coding: SupportCoding, dtype: torch.dtype) -> SimpleNamespace:
    """The kernels for one support coding and one dtype.

    Each runs over the tiles ``[first, last)`` of a tensor of ``rows``, ``cols`` and ``height``.
    Arrays are 1-d unless shown:

    - ``patterns``, ``gate``, ``up``, ``hidden``, ``grad``: ``[numel]`` bit patterns;
    - ``counts`` ``[rows of counts, tiles]``, ``signs`` ``[tiles, 2]``, ``largest`` ``[streams,
      tiles]``: written by the first pass;
    - ``mask``, ``buckets``, ``starts``: a coded mask and where the tiles' bytes in ``buckets``
      start; ``two``: whether there is a second one, which starts with ``up_``;
    - ``values``: patterns of the nonzeros, starting for tile ``t`` at ``offsets[t]``.
    """
    unsigned: Any = _UNSIGNED[dtype.itemsize]
    zero = unsigned(0)
    sign = unsigned(1 << (8 * dtype.itemsize - 1))
    read_words = coding.cpu_words
    mantissa = dtypes.mantissa_bits(dtype)
    # The bits of the exponent, in place: their differences compare as the exponents do.
    exponents = unsigned(((1 << dtypes.exponent_bits(dtype)) - 1) << mantissa)
    limits = tuple(unsigned(((1 << field) - 1) << mantissa) for field in FIELDS)
    first_limit, second_limit = limits
    mantissa_mask = unsigned((1 << mantissa) - 1)
    mantissa_shift = unsigned(mantissa)
    pattern_sign_shift = unsigned(mantissa + dtypes.exponent_bits(dtype))
    one = unsigned(1)
    has_roots = dtype == torch.bfloat16
    root_least, root_limit = (unsigned(p if has_roots else 0) for p in (ROOT_LEAST, ROOT_LIMIT))

    @numba_jit
    def count_exponents(local, kept, flags, tile, row, stream, counts, largest):
        """Statistics of one stream of a tile: ``local`` patterns, ``kept`` 0/1."""
        top = zero
        for i in range(TILE):
            exponent = unsigned((local[i] & exponents) * unsigned(kept[i]))
            top = max(top, exponent)
        largest[stream, tile] = np.uint8(top >> mantissa_shift)
        for i in range(TILE):
            distance = unsigned(top - unsigned(local[i] & exponents))
            flags[i] = kept[i] & (distance >= first_limit)
        counts[row, tile] = _total(flags)
        for i in range(TILE):
            distance = unsigned(top - unsigned(local[i] & exponents))
            flags[i] = kept[i] & (distance >= second_limit)
        counts[row + 1, tile] = _total(flags)

    @numba_jit
    def survey(
        first, last, rows, cols, height, patterns, words_out, counts, signs, largest, statistics
    ):
        local = np.empty(TILE, unsigned)
        kept = np.empty(TILE, np.uint8)
        flags = np.empty(TILE, np.uint8)
        words = np.empty(_TILE_WORDS, np.uint32)
        for tile in range(first, last):
            _load(patterns, tile, rows, cols, height, local)
            seen = zero
            for i in range(TILE):
                seen |= local[i]
                kept[i] = local[i] != zero
            _to_words(kept, height, words)
            _save_words(words, tile, words_out)
            counts[NNZ, tile] = _total(kept)
            signs[tile, 0] = seen >= sign
            if statistics:
                counts[BUCKETS, tile] = _bucket_bytes(words)
                count_exponents(local, kept, flags, tile, ESCAPES, 0, counts, largest)

    @numba_jit
    def read_kept(
        mask, buckets, starts, two, up_mask, up_buckets, up_starts,
        tile, rows, cols, height, words, up_words,
    ):  # fmt: skip
        """``words``: where values are kept; ``up_words``: the second mask if there is one."""
        start = starts[min(tile, starts.size - 1)]
        read_words(mask, buckets, start, tile, rows, cols, height, words)
        if two:
            start = up_starts[min(tile, up_starts.size - 1)]
            read_words(up_mask, up_buckets, start, tile, rows, cols, height, up_words)
            for w in range(_TILE_WORDS):
                words[w] &= up_words[w]

    @numba_jit
    def restore(first, last, offsets, field, tile_exponents, escape_starts, escapes, values):
        """Codes to patterns, in place."""
        shift = unsigned(field)
        limit = unsigned((one << shift) - one)
        sign_shift = unsigned(mantissa_shift + shift)
        for tile in range(first, last):
            top = unsigned(tile_exponents[tile])
            codes = values[offsets[tile] : offsets[tile + 1]]
            escape, escape_end = escape_starts[tile], escape_starts[tile + 1]
            if escape == escape_end:
                for i in range(codes.size):
                    code = codes[i]
                    exponent = unsigned(top - unsigned(unsigned(code >> mantissa_shift) & limit))
                    high = unsigned(unsigned(code >> sign_shift) << pattern_sign_shift)
                    codes[i] = (code & mantissa_mask) | unsigned(exponent << mantissa_shift) | high
                continue
            for i in range(codes.size):
                code = codes[i]
                distance = unsigned(unsigned(code >> mantissa_shift) & limit)
                exponent = unsigned(top - distance)
                if distance == limit:
                    exponent = unsigned(escapes[escape])
                    escape += 1
                high = unsigned(unsigned(code >> sign_shift) << pattern_sign_shift)
                codes[i] = (code & mantissa_mask) | unsigned(exponent << mantissa_shift) | high

    kernels = SimpleNamespace(survey=survey, restore=restore)
    negative_infinity, exponent_mask = (unsigned(p) for p in _FLOAT_PATTERNS.get(dtype, (0, 0)))

    @numba_jit
    def fires(pattern):
        """Whether relu passes this value on: positive or NaN."""
        return ((pattern > zero) & (pattern < sign)) | (pattern > negative_infinity)

    @numba_jit
    def special(pattern):
        """Infinite, NaN, or -0.0: what makes products with zero other than +0.0."""
        return ((pattern & exponent_mask) == exponent_mask) | (pattern == sign)

    @numba_jit
    def relu(pattern):
        """As torch.relu on the CPU, which keeps -0.0."""
        return zero if (pattern > sign) & (pattern <= negative_infinity) else pattern

    @numba_jit
    def gather(
        first, last, rows, cols, height, source, words_in, up_words_in, offsets, apply_relu,
        field, tile_exponents, escape_starts, escapes, out,
    ):  # fmt: skip
        local = np.empty(TILE, unsigned)
        index = np.empty(TILE + 1, np.int64)
        words = np.zeros(_TILE_WORDS, np.uint32)
        shift = unsigned(field)
        limit = unsigned((one << shift) - one)
        sign_shift = unsigned(mantissa_shift + shift)
        for tile in range(first, last):
            begin = tile * _TILE_WORDS
            size = min(_TILE_WORDS, words_in.size - begin)
            for w in range(size):
                words[w] = words_in[begin + w] & up_words_in[begin + w]
            words[size:] = 0
            count = _positions(words, height, index)
            _load(source, tile, rows, cols, height, local)
            codes = out[offsets[tile] : offsets[tile] + count]
            if apply_relu:
                for k in range(count):
                    codes[k] = relu(local[index[k]])
            else:
                for k in range(count):
                    codes[k] = local[index[k]]
            if field == 0:
                continue
            top = unsigned(tile_exponents[tile])
            escape = escape_starts[tile]
            for k in range(count):
                pattern = codes[k]
                exponent = unsigned((pattern & exponents) >> mantissa_shift)
                distance = unsigned(top - exponent)
                if distance >= limit:
                    distance = limit
                    escapes[escape] = np.uint8(exponent)
                    escape += 1
                high = unsigned(unsigned(pattern >> pattern_sign_shift) << sign_shift)
                codes[k] = (pattern & mantissa_mask) | unsigned(distance << mantissa_shift) | high

    kernels.gather = gather

    @numba_jit
    def scatter(
        first, last, rows, cols, height,
        mask, buckets, starts, two, up_mask, up_buckets, up_starts,
        offsets, values, out,
    ):  # fmt: skip
        local = np.zeros(TILE, unsigned)
        index = np.empty(TILE + 1, np.int64)
        words = np.empty(_TILE_WORDS, np.uint32)
        up_words = np.empty(_TILE_WORDS, np.uint32)
        for tile in range(first, last):
            read_kept(
                mask, buckets, starts, two, up_mask, up_buckets, up_starts,
                tile, rows, cols, height, words, up_words,
            )  # fmt: skip
            offset = offsets[tile]
            count = _positions(words, height, index)
            for k in range(count):
                local[index[k]] = values[offset + k]
            _store(local, tile, rows, cols, height, out)
            for k in range(count):
                local[index[k]] = zero

    kernels.scatter = scatter
    if dtype not in _FLOAT_PATTERNS:
        return kernels
    to_float, from_float = _float_functions(dtype)

    @numba_jit
    def rounded(value, fp32_math):
        """An intermediate result, in float32, as precise as PyTorch keeps it."""
        return np.float32(value) if fp32_math else to_float(from_float(value))

    @numba_jit
    def product(gate, up, gated, squared, fp32_math):
        """The hidden value, from relu(gate) and up."""
        value = to_float(gate)
        if squared:
            value = value * value
            if gated:
                value = rounded(value, fp32_math)
        if gated:
            value = value * to_float(up)
        return from_float(value)

    @numba_jit
    def multiply(first, last, gate, up, gated, squared, fp32_math, out):
        for i in range(first * TILE, min(last * TILE, out.size)):
            out[i] = product(gate[i], up[i], gated, squared, fp32_math)

    @numba_jit
    def activate(
        first, last, rows, cols, height, gate, up, hidden, gated, squared, relu_up, fp32_math,
        words_out, up_words_out, counts, signs, largest, statistics,
    ):  # fmt: skip
        local_gate = np.empty(TILE, unsigned)
        local_up = np.empty(TILE, unsigned)
        local_hidden = np.empty(TILE, unsigned)
        gate_fires = np.empty(TILE, np.uint8)
        up_fires = np.empty(TILE, np.uint8)
        both = np.empty(TILE, np.uint8)
        flags = np.empty(TILE, np.uint8)
        words = np.empty(_TILE_WORDS, np.uint32)
        for tile in range(first, last):
            _load(gate, tile, rows, cols, height, local_gate)
            gate_seen, up_seen = zero, zero
            if not gated:
                for i in range(TILE):
                    pattern = local_gate[i]
                    both[i] = fires(pattern)
                    # Of what is kept only a NaN can have its sign set: -0.0 does not fire.
                    gate_seen |= pattern if pattern > negative_infinity else zero
                    local_gate[i] = relu(pattern)
                _to_words(both, height, words)
                if squared:
                    if has_roots:
                        for i in range(TILE):
                            pattern = local_gate[i]
                            outside = (pattern < root_least) | (pattern >= root_limit)
                            up_seen |= sign if outside & (both[i] != 0) else zero
                    for i in range(TILE):
                        local_hidden[i] = product(local_gate[i], zero, False, True, fp32_math)
                    _store(local_hidden, tile, rows, cols, height, hidden)
                else:
                    _store(local_gate, tile, rows, cols, height, hidden)
            else:
                _load(up, tile, rows, cols, height, local_up)
                for i in range(TILE):
                    g = relu(local_gate[i])
                    u = relu(local_up[i]) if relu_up else local_up[i]
                    local_gate[i] = g
                    local_up[i] = u
                    either = special(g) | special(u)
                    gate_fires[i] = fires(g) | either
                    up_fires[i] = fires(u) | either
                    both[i] = gate_fires[i] & (up_fires[i] | (not relu_up))
                    gate_seen |= g if both[i] != 0 else zero
                    up_seen |= u if both[i] != 0 else zero
                for i in range(TILE):
                    local_hidden[i] = product(local_gate[i], local_up[i], True, squared, fp32_math)
                _store(local_hidden, tile, rows, cols, height, hidden)
                if relu_up:
                    _to_words(up_fires, height, words)
                    _save_words(words, tile, up_words_out)
                    if statistics:
                        counts[UP_BUCKETS, tile] = _bucket_bytes(words)
                _to_words(gate_fires, height, words)
            _save_words(words, tile, words_out)
            counts[NNZ, tile] = _total(both)
            signs[tile, 0] = gate_seen >= sign
            signs[tile, 1] = up_seen >= sign
            if statistics:
                counts[BUCKETS, tile] = _bucket_bytes(words)
                count_exponents(local_gate, both, flags, tile, ESCAPES, 0, counts, largest)
                if gated:
                    row = ESCAPES + 2
                    count_exponents(local_up, both, flags, tile, row, 1, counts, largest)

    @numba_jit
    def mask_gradient(
        first, last, rows, cols, height,
        mask, buckets, starts, two, up_mask, up_buckets, up_starts, grad,
    ):  # fmt: skip
        local = np.empty(TILE, unsigned)
        passed = np.zeros(TILE, unsigned)
        index = np.empty(TILE + 1, np.int64)
        words = np.empty(_TILE_WORDS, np.uint32)
        for tile in range(first, last):
            start = starts[min(tile, starts.size - 1)]
            read_words(mask, buckets, start, tile, rows, cols, height, words)
            count = _positions(words, height, index)
            _load(grad, tile, rows, cols, height, local)
            for k in range(count):
                passed[index[k]] = local[index[k]]
            _store(passed, tile, rows, cols, height, grad)
            for k in range(count):
                passed[index[k]] = zero

    @numba_jit
    def doubled(gate, fp32_math):
        return rounded(np.float32(2.0) * to_float(gate), fp32_math)

    @numba_jit
    def square_gradient(
        first, last, rows, cols, height,
        mask, buckets, starts, two, up_mask, up_buckets, up_starts,
        offsets, gate, fp32_math, grad,
    ):  # fmt: skip
        local = np.empty(TILE, unsigned)
        passed = np.zeros(TILE, unsigned)
        index = np.empty(TILE + 1, np.int64)
        words = np.empty(_TILE_WORDS, np.uint32)
        for tile in range(first, last):
            start = starts[min(tile, starts.size - 1)]
            read_words(mask, buckets, start, tile, rows, cols, height, words)
            offset = offsets[tile]
            count = _positions(words, height, index)
            _load(grad, tile, rows, cols, height, local)
            for k in range(count):
                passed[index[k]] = from_float(
                    to_float(local[index[k]]) * doubled(gate[offset + k], fp32_math)
                )
            _store(passed, tile, rows, cols, height, grad)
            for k in range(count):
                passed[index[k]] = zero

    @numba_jit
    def times_zero(pattern):
        return from_float(to_float(pattern) * np.float32(0.0))

    @numba_jit
    def gated_gradient(
        first, last, rows, cols, height,
        mask, buckets, starts, two, up_mask, up_buckets, up_starts,
        offsets, gate, up, squared, relu_up, fp32_math, grad, grad_up,
    ):  # fmt: skip
        # `grad` is the gradient of the hidden tensor on entry, of the gate on return.
        # Where one factor is zero PyTorch multiplies by it: the zero takes the gradient's sign, and
        # a NaN or infinite gradient gives NaN. Where relu is zero it selects 0.
        local = np.empty(TILE, unsigned)
        to_gate = np.zeros(TILE, unsigned)
        to_up = np.zeros(TILE, unsigned)
        index = np.empty(TILE + 1, np.int64)
        words = np.empty(_TILE_WORDS, np.uint32)
        up_words = np.empty(_TILE_WORDS, np.uint32)
        for tile in range(first, last):
            _load(grad, tile, rows, cols, height, local)
            to_gate[:] = zero
            if relu_up:
                # Positions where only one of both fires are not kept: 0 * gradient there.
                to_up[:] = zero
                start = starts[min(tile, starts.size - 1)]
                read_words(mask, buckets, start, tile, rows, cols, height, words)
                for k in range(_positions(words, height, index)):
                    to_gate[index[k]] = times_zero(local[index[k]])
                read_kept(
                    mask, buckets, starts, two, up_mask, up_buckets, up_starts,
                    tile, rows, cols, height, words, up_words,
                )  # fmt: skip
                for k in range(_positions(up_words, height, index)):
                    to_up[index[k]] = times_zero(local[index[k]])
            else:
                start = starts[min(tile, starts.size - 1)]
                read_words(mask, buckets, start, tile, rows, cols, height, words)
                for i in range(TILE):
                    to_up[i] = times_zero(local[i])
            offset = offsets[tile]
            for k in range(_positions(words, height, index)):
                i = index[k]
                g, u, dh = gate[offset + k], up[offset + k], to_float(local[i])
                factor = to_float(g)
                if squared:
                    factor = rounded(factor * factor, fp32_math)
                to_up[i] = zero if relu_up and not fires(u) else from_float(dh * factor)
                gate_grad = dh * to_float(u)
                if squared:
                    gate_grad = rounded(gate_grad, fp32_math) * doubled(g, fp32_math)
                to_gate[i] = from_float(gate_grad) if fires(g) else zero
            _store(to_gate, tile, rows, cols, height, grad)
            _store(to_up, tile, rows, cols, height, grad_up)

    kernels.multiply = multiply
    kernels.activate = activate
    kernels.mask_gradient = mask_gradient
    kernels.square_gradient = square_gradient
    kernels.gated_gradient = gated_gradient
    return kernels
