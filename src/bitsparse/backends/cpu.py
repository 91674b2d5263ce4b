"""The CPU backend: loops over tiles, compiled by Numba, on PyTorch's number of threads.

Kernels work on unsigned bit patterns. They are made for one support coding and one dtype at a time,
by closures over the coding's own functions, and compiled at first use.
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
from bitsparse.backends.base import Kept, Support
from bitsparse.backends.optional import numba_jit
from bitsparse.codings.base import SupportCoding, ValueCoding
from bitsparse.layout import TILE

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_EMPTY = torch.empty(0, dtype=torch.int32)


class CpuBackend:
    """See :class:`bitsparse.backends.base.Backend`."""

    name = "cpu"

    def find_support(self, coding: SupportCoding, patterns: Tensor) -> Support:
        numel = patterns.numel()
        support = _allocate_support(coding, numel, two_masks=False)
        counts, signs = _allocate_counts(numel)
        kernels = _kernels(coding, patterns.dtype)
        _over_tiles(
            kernels.find_support, numel, _np(patterns), numel, _np(support.mask), counts, signs
        )
        return _finish(support, numel, counts, signs)

    def activate(
        self,
        coding: SupportCoding,
        activation: Activation,
        gate: Tensor,
        up: Tensor | None,
        fp32_math: bool,
    ) -> tuple[Tensor, Support]:
        numel = gate.numel()
        support = _allocate_support(coding, numel, activation.relu_up)
        counts, signs = _allocate_counts(numel)
        hidden = gate if activation.plain else torch.empty_like(gate)
        _over_tiles(
            _kernels(coding, gate.dtype).activate,
            numel,
            _np(gate),
            _np(gate if up is None else up),
            _np(hidden),
            numel,
            activation.gated,
            activation.squared,
            activation.relu_up,
            fp32_math,
            _np(support.mask),
            _np(_EMPTY if support.up_mask is None else support.up_mask),
            counts,
            signs,
        )
        return hidden, _finish(support, numel, counts, signs)

    def gather(self, support: Support, source: Tensor, nnz: int, relu: bool) -> Tensor:
        patterns = dtypes.to_patterns(source)
        out = torch.empty(nnz, dtype=patterns.dtype)
        _over_tiles(
            _kernels(support.coding, source.dtype).gather,
            patterns.numel(),
            _np(patterns),
            patterns.numel(),
            _np(support.value_mask()),
            support.offsets.numpy(),
            relu,
            _np(out),
        )
        return out

    def encode(self, coding: ValueCoding, patterns: Tensor, dtype: torch.dtype) -> Tensor:
        width = coding.width(dtype)
        if width == dtypes.bit_width(dtype):
            return patterns
        count = patterns.numel()
        stream = torch.empty(coding.stream_length(count, dtype), dtype=torch.int32)
        # 32 values fill whole words, so blocks of 32 values can be packed independently.
        _in_parallel(_pack, layout.ceil_div(count, 32), _np(patterns), width, _np(stream))
        return stream

    def scatter(
        self,
        support: Support,
        values: ValueCoding,
        stream: Tensor,
        numel: int,
        dtype: torch.dtype,
    ) -> Tensor:
        out = torch.empty(numel, dtype=dtypes.pattern_dtype(dtype))
        _over_tiles(
            _kernels(support.coding, dtype).scatter,
            numel,
            _np(support.value_mask()),
            support.offsets.numpy(),
            _decode(values, stream, dtype),
            numel,
            _np(out),
        )
        return out

    def hidden(self, activation: Activation, kept: Kept, fp32_math: bool, out: Tensor) -> Tensor:
        assert kept.gate is not None
        gate = _decode(kept.gate_coding, kept.gate, kept.dtype)
        up = gate if kept.up is None else _decode(kept.up_coding, kept.up, kept.dtype)
        _over_tiles(
            _kernels(kept.support.coding, kept.dtype).hidden,
            kept.numel,
            _np(kept.support.value_mask()),
            kept.support.offsets.numpy(),
            gate,
            up,
            kept.numel,
            activation.gated,
            activation.squared,
            fp32_math,
            _np(out),
        )
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
        kernels = _kernels(kept.support.coding, kept.dtype)
        support, grad = kept.support, _np(grad_hidden)
        mask, offsets, numel = _np(support.mask), support.offsets.numpy(), kept.numel
        if activation.plain:
            _over_tiles(kernels.mask_gradient, numel, mask, numel, grad)
            return grad_hidden, None
        assert kept.gate is not None
        gate = _decode(kept.gate_coding, kept.gate, kept.dtype)
        if not activation.gated:
            _over_tiles(kernels.square_gradient, numel, mask, offsets, gate, numel, fp32_math, grad)
            return grad_hidden, None
        assert kept.up is not None
        up = _decode(kept.up_coding, kept.up, kept.dtype)
        grad_up = torch.empty_like(grad_hidden)
        up_mask = mask if support.up_mask is None else _np(support.up_mask)
        _over_tiles(
            kernels.gated_gradient,
            numel,
            mask,
            up_mask,
            _np(kept.support.value_mask()),
            offsets,
            gate,
            up,
            numel,
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
        futures = [_pool.submit(kernel, bounds[t], bounds[t + 1], *args) for t in range(1, threads)]
    kernel(bounds[0], bounds[1], *args)
    for future in futures:
        future.result()


def _over_tiles(kernel: Callable[..., None], numel: int, *args: Any) -> None:
    _in_parallel(kernel, layout.num_tiles(numel), *args)


# ------------------------------------------------------------------------------- launch


def _np(tensor: Tensor) -> Any:
    """The bit patterns of a contiguous tensor as a 1-d unsigned numpy array (no copy)."""
    patterns = tensor.detach().view(dtypes.pattern_dtype(tensor.dtype)).view(-1).numpy()
    return patterns.view(_UNSIGNED[tensor.dtype.itemsize])


def _allocate_support(coding: SupportCoding, numel: int, two_masks: bool) -> Support:
    words = coding.mask_length(numel)
    return Support(
        coding,
        torch.empty(words, dtype=torch.int32),
        _EMPTY,
        torch.empty(words, dtype=torch.int32) if two_masks else None,
    )


def _allocate_counts(numel: int) -> tuple[Any, Any]:
    tiles = layout.num_tiles(numel)
    return np.zeros(tiles, np.int64), np.zeros((tiles, 2), np.uint8)


def _finish(support: Support, numel: int, counts: Any, signs: Any) -> Support:
    ends = np.cumsum(counts)
    nnz = int(ends[-1]) if ends.size else 0
    support.offsets = torch.from_numpy(ends - counts).to(dtypes.offset_dtype(numel))
    support.totals = torch.tensor([nnz, int(signs[:, 0].any()), int(signs[:, 1].any())])
    return support


def _decode(coding: ValueCoding, stream: Tensor, dtype: torch.dtype) -> Any:
    """The stream's patterns, full width."""
    width = coding.width(dtype)
    if width == dtypes.bit_width(dtype):
        return _np(stream)
    count = stream.numel() * 32 // width  # a few zeros more than were stored
    out = np.empty(count, _UNSIGNED[dtype.itemsize])
    _in_parallel(_unpack, layout.ceil_div(count, 32), _np(stream), width, count, out)
    return out


# ------------------------------------------------------------------------------ kernels


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


@cache
def _kernels(coding: SupportCoding, dtype: torch.dtype) -> SimpleNamespace:
    """The kernels for one support coding and one dtype, or one dtype of plain patterns.

    Each runs over the tiles ``[first, last)``. Arrays are 1-d: ``patterns``, ``gate``, ``up``,
    ``hidden``, ``grad``: ``[numel]`` bit patterns; ``counts`` ``[tiles]`` and ``signs``
    ``[tiles, 2]``: outputs; ``values``: patterns of the nonzeros, starting for tile ``t`` at
    ``offsets[t]``.
    """
    unsigned: Any = _UNSIGNED[dtype.itemsize]
    zero = unsigned(0)
    sign = unsigned(1 << (8 * dtype.itemsize - 1))
    positions, store = coding.cpu_positions, coding.cpu_store

    # Loops over slices of a tile, one simple thing each, are what the compiler turns into vectors.

    @numba_jit
    def total(flags):
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

    @numba_jit
    def find_support(first, last, patterns, numel, mask, counts, signs):
        nonzero = np.zeros(TILE, np.uint8)
        for tile in range(first, last):
            base = tile * TILE
            size = min(TILE, numel - base)
            nonzero[size:] = 0
            tile_patterns = patterns[base : base + size]
            seen = zero
            for i in range(size):
                seen |= tile_patterns[i]
                nonzero[i] = tile_patterns[i] != zero
            store(mask, tile, numel, nonzero)
            counts[tile] = total(nonzero)
            signs[tile, 0] = seen >= sign

    @numba_jit
    def scatter(first, last, mask, offsets, values, numel, out):
        index = np.empty(TILE + 1, np.int64)
        for tile in range(first, last):
            base, offset = tile * TILE, offsets[tile]
            out[base : min(base + TILE, numel)] = zero
            count = positions(mask, tile, numel, index)
            for k in range(count):
                out[base + index[k]] = values[offset + k]

    kernels = SimpleNamespace(find_support=find_support, scatter=scatter)
    negative_infinity, exponent = (unsigned(p) for p in _FLOAT_PATTERNS.get(dtype, (0, 0)))

    @numba_jit
    def fires(pattern):
        """Whether relu passes this value on: positive or NaN."""
        return ((pattern > zero) & (pattern < sign)) | (pattern > negative_infinity)

    @numba_jit
    def special(pattern):
        """Infinite, NaN, or -0.0: what makes products with zero other than +0.0."""
        return ((pattern & exponent) == exponent) | (pattern == sign)

    @numba_jit
    def relu(pattern):
        """As torch.relu on the CPU, which keeps -0.0."""
        return zero if (pattern > sign) & (pattern <= negative_infinity) else pattern

    @numba_jit
    def gather(first, last, source, numel, mask, offsets, apply_relu, out):
        index = np.empty(TILE + 1, np.int64)
        for tile in range(first, last):
            base, offset = tile * TILE, offsets[tile]
            count = positions(mask, tile, numel, index)
            if apply_relu:
                for k in range(count):
                    out[offset + k] = relu(source[base + index[k]])
            else:
                for k in range(count):
                    out[offset + k] = source[base + index[k]]

    kernels.gather = gather
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
    def activate(
        first, last, gate, up, hidden, numel, gated, squared, relu_up, fp32_math,
        mask, up_mask, counts, signs,
    ):  # fmt: skip
        gate_fires = np.zeros(TILE, np.uint8)
        up_fires = np.zeros(TILE, np.uint8)
        both = np.zeros(TILE, np.uint8)
        for tile in range(first, last):
            base = tile * TILE
            size = min(TILE, numel - base)
            gate_fires[size:] = 0
            up_fires[size:] = 0
            both[size:] = 0
            count, gate_seen, up_seen = 0, zero, zero
            if not gated:
                tile_gate, tile_hidden = gate[base : base + size], hidden[base : base + size]
                for i in range(size):
                    pattern = tile_gate[i]
                    gate_fires[i] = fires(pattern)
                    # Of what is kept only a NaN can have its sign set: -0.0 does not fire.
                    gate_seen |= pattern if pattern > negative_infinity else zero
                    tile_hidden[i] = relu(pattern)
                count = total(gate_fires)
                if squared:
                    for i in range(size):
                        tile_hidden[i] = product(tile_hidden[i], zero, False, True, fp32_math)
            else:
                tile_gate, tile_up = gate[base : base + size], up[base : base + size]
                tile_hidden = hidden[base : base + size]
                for i in range(size):
                    g = relu(tile_gate[i])
                    u = relu(tile_up[i]) if relu_up else tile_up[i]
                    either = special(g) | special(u)
                    gate_fires[i] = fires(g) | either
                    up_fires[i] = fires(u) | either | (not relu_up)
                    both[i] = gate_fires[i] & up_fires[i]
                    gate_seen |= g if both[i] != 0 else zero
                    up_seen |= u if both[i] != 0 else zero
                for i in range(size):
                    g = relu(tile_gate[i])
                    u = relu(tile_up[i]) if relu_up else tile_up[i]
                    tile_hidden[i] = product(g, u, True, squared, fp32_math)
                count = total(both)
                if relu_up:
                    store(up_mask, tile, numel, up_fires)
            store(mask, tile, numel, gate_fires)
            counts[tile] = count
            signs[tile, 0] = gate_seen >= sign
            signs[tile, 1] = up_seen >= sign

    @numba_jit
    def hidden(first, last, mask, offsets, gate, up, numel, gated, squared, fp32_math, out):
        index = np.empty(TILE + 1, np.int64)
        for tile in range(first, last):
            base, offset = tile * TILE, offsets[tile]
            out[base : min(base + TILE, numel)] = zero
            count = positions(mask, tile, numel, index)
            if not gated and not squared:
                for k in range(count):
                    out[base + index[k]] = gate[offset + k]
            elif not gated:
                for k in range(count):
                    out[base + index[k]] = product(gate[offset + k], zero, False, True, fp32_math)
            else:
                for k in range(count):
                    out[base + index[k]] = product(
                        gate[offset + k], up[offset + k], True, squared, fp32_math
                    )

    @numba_jit
    def mask_gradient(first, last, mask, numel, grad):
        index = np.empty(TILE + 1, np.int64)
        passed = np.empty(TILE, unsigned)
        for tile in range(first, last):
            base = tile * TILE
            count = positions(mask, tile, numel, index)
            for k in range(count):
                passed[k] = grad[base + index[k]]
            grad[base : min(base + TILE, numel)] = zero
            for k in range(count):
                grad[base + index[k]] = passed[k]

    @numba_jit
    def doubled(gate, fp32_math):
        return rounded(np.float32(2.0) * to_float(gate), fp32_math)

    @numba_jit
    def square_gradient(first, last, mask, offsets, gate, numel, fp32_math, grad):
        index = np.empty(TILE + 1, np.int64)
        passed = np.empty(TILE, unsigned)
        for tile in range(first, last):
            base, offset = tile * TILE, offsets[tile]
            count = positions(mask, tile, numel, index)
            for k in range(count):
                passed[k] = from_float(
                    to_float(grad[base + index[k]]) * doubled(gate[offset + k], fp32_math)
                )
            grad[base : min(base + TILE, numel)] = zero
            for k in range(count):
                grad[base + index[k]] = passed[k]

    @numba_jit
    def gated_gradient(
        first, last, mask, up_mask, value_mask, offsets, gate, up, numel, squared, relu_up,
        fp32_math, grad, grad_up,
    ):  # fmt: skip
        # `grad` is the gradient of the hidden tensor on entry, of the gate on return.
        index = np.empty(TILE + 1, np.int64)
        gate_grads = np.empty(TILE, unsigned)
        for tile in range(first, last):
            base, offset = tile * TILE, offsets[tile]
            end = min(base + TILE, numel)
            # Where one factor is zero PyTorch multiplies by it: the zero takes the gradient's
            # sign, and a NaN or infinite gradient gives NaN. Where relu is zero it selects 0.
            if relu_up:
                grad_up[base:end] = zero
                count = positions(up_mask, tile, numel, index)
                for k in range(count):
                    i = base + index[k]
                    grad_up[i] = from_float(to_float(grad[i]) * np.float32(0.0))
            else:
                tile_grad, tile_grad_up = grad[base:end], grad_up[base:end]
                for i in range(end - base):
                    tile_grad_up[i] = from_float(to_float(tile_grad[i]) * np.float32(0.0))
            count = positions(value_mask, tile, numel, index)
            for k in range(count):
                i = base + index[k]
                g, u, dh = gate[offset + k], up[offset + k], to_float(grad[i])
                factor = to_float(g)
                if squared:
                    factor = rounded(factor * factor, fp32_math)
                if relu_up and not fires(u):
                    grad_up[i] = zero
                else:
                    grad_up[i] = from_float(dh * factor)
                gate_grad = dh * to_float(u)
                if squared:
                    gate_grad = rounded(gate_grad, fp32_math) * doubled(g, fp32_math)
                gate_grads[k] = from_float(gate_grad) if fires(g) else zero
            if relu_up:
                # Positions where only the gate fires are not kept: 0 * gradient there.
                gate_count = positions(mask, tile, numel, index)
                zeros = np.empty(gate_count, unsigned)
                for k in range(gate_count):
                    zeros[k] = from_float(to_float(grad[base + index[k]]) * np.float32(0.0))
                grad[base:end] = zero
                for k in range(gate_count):
                    grad[base + index[k]] = zeros[k]
                count = positions(value_mask, tile, numel, index)
            else:
                grad[base:end] = zero
            for k in range(count):
                grad[base + index[k]] = gate_grads[k]

    kernels.activate = activate
    kernels.hidden = hidden
    kernels.mask_gradient = mask_gradient
    kernels.square_gradient = square_gradient
    kernels.gated_gradient = gated_gradient
    return kernels
