"""The Triton backend: CUDA and ROCm, and CPU tensors in Triton's interpreter.

Every kernel is a skeleton over one tile a program. What depends on a coding (where the nonzeros
are, how a value is stored) is a jit function of that coding, passed as a compile-time argument.

Conventions of all kernels:

- Values travel as *patterns*: int32 that holds the sign-extended (bytes: zero-extended) bits. What
  is only moved therefore keeps every bit, float8 needs no hardware support, and comparisons are
  integer comparisons (the interpreter compares bfloat16 wrongly).
- ``numel`` may be 32- or 64-bit. It is left to Triton's specialisation because its divisibility by
  16 is what lets masked loads and stores be vectorised; a ``numel`` of 1 arrives as a constant,
  hence ``tl.cast`` rather than ``.to``.
- Addresses are a 64-bit scalar base for the tile plus 32-bit offsets within it.
- Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitsparse import dtypes, layout
from bitsparse.activations import Activation
from bitsparse.backends.base import Kept, Support
from bitsparse.codings.base import SupportCoding, ValueCoding
from bitsparse.layout import TILE

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FP32 = tl.constexpr(0)
_FP16 = tl.constexpr(1)
_BF16 = tl.constexpr(2)

# Two things differ in the interpreter: it truncates where compiled code rounds float32 to bfloat16
# (in one instruction), and its tensors are on the CPU.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on"))

# Products are rounded as written (nothing is added, so this only says so).
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_SCAN_BLOCK = 4096
_SCAN_WARPS = 16
_PACK_BLOCK = 1024

# Counts of a tile carry the sign flags above the count itself (at most TILE = 2**12): neither a
# zeroed buffer nor an atomic is needed for them.
_GATE_SIGN = tl.constexpr(16)
_UP_SIGN = tl.constexpr(17)


# ------------------------------------------------------------------- functions on patterns


@triton.jit
def _magnitude(pattern, KIND: tl.constexpr):
    """The pattern without its sign bit."""
    if KIND == _FP32:
        return pattern & 0x7FFFFFFF
    else:
        return pattern & 0x7FFF


@triton.jit
def _infinity(KIND: tl.constexpr):
    """The pattern of infinity; larger magnitudes are NaN."""
    if KIND == _FP32:
        return 0x7F800000
    elif KIND == _FP16:
        return 0x7C00
    else:
        return 0x7F80


@triton.jit
def _relu(pattern, KIND: tl.constexpr):
    """Patterns of torch.relu: what is positive or NaN unchanged, else +0.0."""
    # A sign-extended pattern is positive where the float is.
    keep = (pattern > 0) | (_magnitude(pattern, KIND) > _infinity(KIND))
    if _INTERPRETED:
        # torch.relu(-0.0) is +0.0 on CUDA and -0.0 on CPU: follow the device.
        keep = keep | (_magnitude(pattern, KIND) == 0)
    return tl.where(keep, pattern, 0)


@triton.jit
def _fires(relu_pattern, KIND: tl.constexpr):
    """Whether a result of relu is positive or NaN (the others are zeros)."""
    return _magnitude(relu_pattern, KIND) != 0


@triton.jit
def _is_special(pattern, KIND: tl.constexpr):
    """Infinite, NaN or -0.0: products with zero show these."""
    magnitude = _magnitude(pattern, KIND)
    return (magnitude >= _infinity(KIND)) | ((magnitude == 0) & (pattern < 0))


@triton.jit
def _to_float(pattern, KIND: tl.constexpr):
    """The float32 of the same value."""
    if KIND == _FP32:
        return pattern.to(tl.float32, bitcast=True)
    elif KIND == _FP16:
        return pattern.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (pattern << 16).to(tl.float32, bitcast=True)


@triton.jit
def _to_pattern(x, KIND: tl.constexpr):
    """The pattern of float32 ``x`` rounded to the nearest value of the dtype, ties to even."""
    if KIND == _FP32:
        return x.to(tl.int32, bitcast=True)
    elif KIND == _FP16:
        return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    elif _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    else:
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _multiply(a, b, KIND: tl.constexpr, FP32_MATH: tl.constexpr):
    """Product of two float32 tensors as eager computes it: rounded to the dtype (or float32)."""
    product = a * b
    if not FP32_MATH and KIND != _FP32:
        product = _to_float(_to_pattern(product, KIND), KIND)
    return product


@triton.jit
def _load_values(
    stream_ptr,
    offset,
    rank,
    mask,
    LOAD: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Patterns of the values ``offset + rank``; 32 values take ``STRIDE`` stream elements."""
    # 32 values fill whole elements, so the 64-bit part of the address is a scalar.
    first = offset >> 5
    return LOAD(stream_ptr + first * STRIDE, rank + (offset & 31).to(tl.int32), mask, WIDTH)


@triton.jit
def _count(kept):
    # Support codings lay a tile out in two dimensions.
    return tl.sum(tl.sum(kept.to(tl.int32), axis=1), axis=0)


@triton.jit
def _any(flags):
    return tl.max(tl.max(flags.to(tl.int32), axis=1), axis=0)


# --------------------------------------------------------------------------------- kernels


@triton.jit
def find_support_kernel(
    patterns_ptr,
    mask_ptr,
    counts_ptr,
    numel,
    SIGN_BIT: tl.constexpr,
    INDEX: tl.constexpr,
    STORE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Mask and count the nonzero patterns of one tile.

    Args:
        patterns_ptr: int ``[numel]``, read.
        mask_ptr: int32 ``[mask_length]``, written: the support.
        counts_ptr: int32 ``[tiles]``, written: nonzeros of the tile and its sign flag.
        SIGN_BIT: which bit of a pattern is the sign.
    """
    tile = tl.program_id(0)
    numel = tl.cast(numel, tl.int64)
    index, inside = INDEX(tile, numel, TILE)
    base = tile.to(tl.int64) * TILE
    pattern = tl.load(patterns_ptr + base + index, mask=inside, other=0).to(tl.int32)
    STORE(mask_ptr, tile, numel, pattern != 0, TILE)
    sign = _any((pattern >> SIGN_BIT) & 1)
    tl.store(counts_ptr + tile, _count(pattern != 0) | (sign << _GATE_SIGN))


@triton.jit
def activate_kernel(
    gate_ptr,
    up_ptr,
    hidden_ptr,
    mask_ptr,
    up_mask_ptr,
    counts_ptr,
    numel,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    RELU_UP: tl.constexpr,
    FP32_MATH: tl.constexpr,
    INDEX: tl.constexpr,
    STORE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Activation and support of one tile.

    Args:
        gate_ptr: int ``[numel]`` patterns, read; may be ``hidden_ptr``.
        up_ptr: the same of the second pre-activation; not touched unless ``GATED``.
        hidden_ptr: int ``[numel]``, written: the result.
        mask_ptr: int32 ``[mask_length]``, written: where relu(gate) counts.
        up_mask_ptr: the same of relu(up); not touched unless ``RELU_UP``.
        counts_ptr: int32 ``[tiles]``, written: kept positions of the tile and two sign flags.
    """
    tile = tl.program_id(0)
    numel = tl.cast(numel, tl.int64)
    index, inside = INDEX(tile, numel, TILE)
    base = tile.to(tl.int64) * TILE
    gate = tl.load(gate_ptr + base + index, mask=inside, other=0).to(tl.int32)
    gate = _relu(gate, KIND)
    # Outside the tensor zeros were loaded, which neither fire nor are special.
    fires = _fires(gate, KIND)
    kept = fires
    hidden = gate
    up_sign = 0
    if SQUARED:
        x = _to_float(gate, KIND)
        x = _multiply(x, x, KIND, FP32_MATH)
        hidden = _to_pattern(x, KIND)
    if GATED:
        if not SQUARED:
            x = _to_float(gate, KIND)
        up = tl.load(up_ptr + base + index, mask=inside, other=0).to(tl.int32)
        if RELU_UP:
            up = _relu(up, KIND)
        # Also where relu(gate) is 0: eager's 0 * up has a sign, or is NaN where up is not finite.
        hidden = _to_pattern(x * _to_float(up, KIND), KIND)
        special = _is_special(gate, KIND) | _is_special(up, KIND)
        fires = fires | special
        kept = fires
        if RELU_UP:
            up_fires = _fires(up, KIND) | special
            kept = fires & up_fires
            STORE(up_mask_ptr, tile, numel, up_fires, TILE)
        up_sign = _any(kept & (up < 0))
    tl.store(hidden_ptr + base + index, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)
    STORE(mask_ptr, tile, numel, fires, TILE)
    gate_sign = _any(kept & (gate < 0))
    tl.store(counts_ptr + tile, _count(kept) | (gate_sign << _GATE_SIGN) | (up_sign << _UP_SIGN))


@triton.jit
def scan_kernel(counts_ptr, offsets_ptr, totals_ptr, tiles, BLOCK: tl.constexpr):
    """Exclusive prefix sums of the counts, and the totals. One program does it all.

    Args:
        counts_ptr: int32 ``[tiles]``, read: counts and sign flags.
        offsets_ptr: int32 or int64 ``[tiles]``, written: nonzeros before each tile.
        totals_ptr: int64 ``[3]``, written: nonzeros; first sign flag; second sign flag.
        tiles: at least 1.
    """
    total = tl.full((), 0, tl.int64)
    flags = tl.full((BLOCK,), 0, tl.int32)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, tiles, BLOCK):
        index = start + lanes
        packed = tl.load(counts_ptr + index, mask=index < tiles, other=0)
        flags = flags | (packed >> _GATE_SIGN)
        # At most BLOCK * TILE = 2**24: the sums within a block fit in 32 bits.
        counts = packed & 0xFFFF
        ends = tl.cumsum(counts, axis=0)
        offsets = total + (ends - counts)
        tl.store(offsets_ptr + index, offsets.to(offsets_ptr.dtype.element_ty), mask=index < tiles)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr, total)
    tl.store(totals_ptr + 1, tl.max(flags & 1, axis=0).to(tl.int64))
    tl.store(totals_ptr + 2, tl.max(flags >> 1, axis=0).to(tl.int64))


@triton.jit
def gather_kernel(
    source_ptr,
    mask_ptr,
    offsets_ptr,
    out_ptr,
    numel,
    KIND: tl.constexpr,
    RELU: tl.constexpr,
    LOCATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Move the kept patterns of one tile to their ranks.

    Args:
        source_ptr: int ``[numel]`` patterns, read at the kept positions.
        mask_ptr: int32 ``[mask_length]``, read: the kept positions.
        offsets_ptr: int32 or int64 ``[tiles]``, read.
        out_ptr: int ``[nnz]``, written.
        RELU: store relu of the source (``KIND`` says of which dtype).
    """
    tile = tl.program_id(0)
    numel = tl.cast(numel, tl.int64)
    index, inside, nonzero, rank = LOCATE(mask_ptr, tile, numel, TILE)
    base = tile.to(tl.int64) * TILE
    offset = tl.load(offsets_ptr + tile).to(tl.int64)
    # All of the tile is read: whole rows load faster than their scattered nonzeros.
    pattern = tl.load(source_ptr + base + index, mask=inside, other=0)
    if RELU:
        pattern = _relu(pattern.to(tl.int32), KIND).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset + rank, pattern, mask=nonzero & inside)


@triton.jit
def pack_kernel(patterns_ptr, stream_ptr, count, words, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Pack the low ``WIDTH`` bits of values; ``BLOCK`` words of the stream a program.

    Args:
        patterns_ptr: int ``[count]``, read: the values.
        stream_ptr: int32 ``[words]``, written: value ``i`` at bits ``[i * WIDTH, (i+1) * WIDTH)``.
    """
    program = tl.program_id(0).to(tl.int64)
    count = tl.cast(count, tl.int64)
    words = tl.cast(words, tl.int64)
    # The value that holds the block's first bit, and where in that value the bit is.
    start = program * (BLOCK * 32)
    first = start // WIDTH
    lanes = tl.arange(0, BLOCK)
    bit = (start - first * WIDTH).to(tl.int32) + 32 * lanes
    value = bit // WIDTH
    shift = value * WIDTH - bit  # in (-WIDTH, 0]: where the value starts, relative to the word
    remaining = tl.minimum(count - first, BLOCK * 32 + 32).to(tl.int32)
    packed = tl.zeros((BLOCK,), tl.uint32)
    # A word meets at most one partial value at its start and ceil(31 / WIDTH) more.
    for k in tl.static_range((31 + WIDTH - 1) // WIDTH + 1):
        here = (shift < 32) & (value < remaining)
        pattern = tl.load(patterns_ptr + first + value, mask=here, other=0).to(tl.int32)
        pattern = (pattern & ((1 << WIDTH) - 1)).to(tl.uint32, bitcast=True)
        # Shifts by 32 or more are undefined: both amounts are brought into range.
        left = tl.minimum(tl.maximum(shift, 0), 31).to(tl.uint32)
        right = tl.maximum(-shift, 0).to(tl.uint32)
        packed |= (pattern << left) >> right
        value += 1
        shift += WIDTH
    left_words = tl.minimum(words - program * BLOCK, BLOCK).to(tl.int32)
    out = stream_ptr + program * BLOCK + lanes
    tl.store(out, packed.to(tl.int32, bitcast=True), mask=lanes < left_words)


@triton.jit
def scatter_kernel(
    stream_ptr,
    mask_ptr,
    offsets_ptr,
    out_ptr,
    numel,
    LOAD: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    LOCATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Decode one tile.

    Args:
        stream_ptr: the values' stream, read; 32 values take ``STRIDE`` elements.
        mask_ptr: int32 ``[mask_length]``, read: the kept positions.
        offsets_ptr: int32 or int64 ``[tiles]``, read.
        out_ptr: int ``[numel]``, written: patterns, zero where nothing is kept.
    """
    tile = tl.program_id(0)
    numel = tl.cast(numel, tl.int64)
    index, inside, nonzero, rank = LOCATE(mask_ptr, tile, numel, TILE)
    base = tile.to(tl.int64) * TILE
    offset = tl.load(offsets_ptr + tile).to(tl.int64)
    pattern = _load_values(stream_ptr, offset, rank, nonzero, LOAD, WIDTH, STRIDE)
    tl.store(out_ptr + base + index, pattern.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def hidden_kernel(
    gate_ptr,
    up_ptr,
    mask_ptr,
    offsets_ptr,
    out_ptr,
    numel,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    FP32_MATH: tl.constexpr,
    LOAD_GATE: tl.constexpr,
    GATE_WIDTH: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    LOAD_UP: tl.constexpr,
    UP_WIDTH: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    LOCATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The hidden tensor of one tile, straight from the coded values. Not for plain relu.

    Args:
        gate_ptr: stream of relu(gate), read.
        up_ptr: stream of up; not touched unless ``GATED``.
        mask_ptr: int32 ``[mask_length]``, read: the kept positions.
        offsets_ptr: int32 or int64 ``[tiles]``, read.
        out_ptr: int ``[numel]`` patterns, written; +0.0 where nothing is kept.
    """
    tile = tl.program_id(0)
    numel = tl.cast(numel, tl.int64)
    index, inside, nonzero, rank = LOCATE(mask_ptr, tile, numel, TILE)
    base = tile.to(tl.int64) * TILE
    offset = tl.load(offsets_ptr + tile).to(tl.int64)
    gate = _load_values(gate_ptr, offset, rank, nonzero, LOAD_GATE, GATE_WIDTH, GATE_STRIDE)
    x = _to_float(gate, KIND)
    if SQUARED:
        x = _multiply(x, x, KIND, FP32_MATH)
    if GATED:
        up = _load_values(up_ptr, offset, rank, nonzero, LOAD_UP, UP_WIDTH, UP_STRIDE)
        x = x * _to_float(up, KIND)
    # Where nothing is kept the loads gave zeros, whose product is +0.0.
    pattern = _to_pattern(x, KIND)
    tl.store(out_ptr + base + index, pattern.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def mask_gradient_kernel(grad_ptr, mask_ptr, numel, LOCATE: tl.constexpr, TILE: tl.constexpr):
    """Gradient of plain relu, in place: one tile of the incoming gradient where the unit fires.

    Args:
        grad_ptr: int ``[numel]`` patterns, read at the kept positions and written.
        mask_ptr: int32 ``[mask_length]``, read: where relu fires.
    """
    tile = tl.program_id(0)
    numel = tl.cast(numel, tl.int64)
    index, inside, nonzero, _rank = LOCATE(mask_ptr, tile, numel, TILE)
    grad_ptr += tile.to(tl.int64) * TILE
    grad = tl.load(grad_ptr + index, mask=nonzero & inside, other=0)
    tl.store(grad_ptr + index, grad, mask=inside)


@triton.jit
def gradient_kernel(
    grad_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    gate_ptr,
    up_ptr,
    value_mask_ptr,
    mask_ptr,
    up_mask_ptr,
    offsets_ptr,
    numel,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    RELU_UP: tl.constexpr,
    FP32_MATH: tl.constexpr,
    NEED_GATE: tl.constexpr,
    NEED_UP: tl.constexpr,
    LOAD_GATE: tl.constexpr,
    GATE_WIDTH: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    LOAD_UP: tl.constexpr,
    UP_WIDTH: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    LOCATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Gradients of one tile, straight from the coded values. Not for plain relu.

    Args:
        grad_ptr: int ``[numel]`` patterns of the hidden tensor's gradient, read once.
        grad_gate_ptr: the same, written if ``NEED_GATE``; may be ``grad_ptr``.
        grad_up_ptr: the same, written if ``NEED_UP``; may be ``grad_ptr`` unless both are.
        gate_ptr: stream of relu(gate), read.
        up_ptr: stream of up; read if ``GATED`` and where its values matter.
        value_mask_ptr: int32 ``[mask_length]``, read: positions whose values are kept.
        mask_ptr: the same, where relu(gate) counts; read if ``RELU_UP``, else the value mask.
        up_mask_ptr: the same of relu(up); read if ``RELU_UP``.
        offsets_ptr: int32 or int64 ``[tiles]``, read.
    """
    tile = tl.program_id(0)
    numel = tl.cast(numel, tl.int64)
    index, inside, nonzero, rank = LOCATE(value_mask_ptr, tile, numel, TILE)
    base = tile.to(tl.int64) * TILE
    offset = tl.load(offsets_ptr + tile).to(tl.int64)
    # Values that are not kept are +0.0, and are multiplied by, as eager does: the product may be
    # -0.0 or NaN. Only where relu's derivative is 0 eager selects 0.
    gate = _load_values(gate_ptr, offset, rank, nonzero, LOAD_GATE, GATE_WIDTH, GATE_STRIDE)
    gate_value = _to_float(gate, KIND)
    fires = _fires(gate, KIND)
    if GATED:
        up = _load_values(up_ptr, offset, rank, nonzero, LOAD_UP, UP_WIDTH, UP_STRIDE)
        up_value = _to_float(up, KIND)
        up_fires = inside
        if RELU_UP:
            # Where both masks are set the values decide (they also are where a value is special);
            # elsewhere the masks do.
            _i, _n, in_gate, _r = LOCATE(mask_ptr, tile, numel, TILE)
            _i, _n, in_up, _r = LOCATE(up_mask_ptr, tile, numel, TILE)
            fires = tl.where(nonzero, fires, in_gate)
            up_fires = tl.where(nonzero, _fires(up, KIND), in_up)
    wanted = inside
    if not NEED_UP:
        wanted = wanted & fires
    grad = tl.load(grad_ptr + base + index, mask=wanted, other=0).to(tl.int32)
    grad_value = _to_float(grad, KIND)
    if NEED_UP:
        factor = gate_value
        if SQUARED:
            factor = _multiply(gate_value, gate_value, KIND, FP32_MATH)
        result = _to_pattern(grad_value * factor, KIND)
        if RELU_UP:
            result = tl.where(up_fires, result, 0)
        tl.store(grad_up_ptr + base + index, result.to(grad_up_ptr.dtype.element_ty), mask=inside)
    if NEED_GATE:
        x = grad_value
        if GATED:
            x = _multiply(x, up_value, KIND, FP32_MATH)
        if SQUARED:
            # 2 * gate may overflow to infinity in the dtype.
            x = x * _multiply(gate_value, 2.0, KIND, FP32_MATH)
        result = tl.where(fires, _to_pattern(x, KIND), 0)
        tl.store(
            grad_gate_ptr + base + index, result.to(grad_gate_ptr.dtype.element_ty), mask=inside
        )


# ---------------------------------------------------------------------------------- launch


class TritonBackend:
    """See :class:`bitsparse.backends.base.Backend`."""

    name = "triton"

    def find_support(self, coding: SupportCoding, patterns: Tensor) -> Support:
        numel = patterns.numel()
        support, counts = _allocate_support(coding, numel, patterns.device, two_masks=False)
        if numel:
            with _on(patterns.device):
                find_support_kernel[(layout.num_tiles(numel),)](
                    patterns,
                    support.mask,
                    counts,
                    numel,
                    SIGN_BIT=8 * patterns.element_size() - 1,
                    INDEX=coding.triton_index,
                    STORE=coding.triton_store,
                    TILE=TILE,
                    **_OPTIONS,
                )
                _scan(counts, support)
        return support

    def activate(
        self,
        coding: SupportCoding,
        activation: Activation,
        gate: Tensor,
        up: Tensor | None,
        fp32_math: bool,
    ) -> tuple[Tensor, Support]:
        numel = gate.numel()
        support, counts = _allocate_support(coding, numel, gate.device, activation.relu_up)
        hidden = gate if activation.plain else torch.empty_like(gate)
        if numel:
            bits = _bits(gate)
            with _on(gate.device):
                activate_kernel[(layout.num_tiles(numel),)](
                    bits,
                    bits if up is None else _bits(up),
                    _bits(hidden),
                    support.mask,
                    support.mask if support.up_mask is None else support.up_mask,
                    counts,
                    numel,
                    KIND=_KINDS[gate.dtype],
                    GATED=activation.gated,
                    SQUARED=activation.squared,
                    RELU_UP=activation.relu_up,
                    FP32_MATH=_rounds_late(activation, gate.dtype, fp32_math),
                    INDEX=coding.triton_index,
                    STORE=coding.triton_store,
                    TILE=TILE,
                    **_OPTIONS,
                )
                _scan(counts, support)
        return hidden, support

    def gather(self, support: Support, source: Tensor, nnz: int, relu: bool) -> Tensor:
        bits = _bits(source)
        out = torch.empty(nnz, dtype=bits.dtype, device=bits.device)
        if nnz:
            numel = bits.numel()
            with _on(bits.device):
                gather_kernel[(layout.num_tiles(numel),)](
                    bits,
                    support.value_mask(),
                    support.offsets,
                    out,
                    numel,
                    KIND=_KINDS[source.dtype] if relu else 0,
                    RELU=relu,
                    LOCATE=support.coding.triton_locate,
                    TILE=TILE,
                    **_OPTIONS,
                )
        return out

    def encode(self, coding: ValueCoding, patterns: Tensor, dtype: torch.dtype) -> Tensor:
        width = coding.width(dtype)
        if width == dtypes.bit_width(dtype):
            return patterns
        count = patterns.numel()
        words = coding.stream_length(count, dtype)
        stream = torch.empty(words, dtype=torch.int32, device=patterns.device)
        if words:
            with _on(patterns.device):
                pack_kernel[(layout.ceil_div(words, _PACK_BLOCK),)](
                    patterns,
                    stream,
                    count,
                    words,
                    WIDTH=width,
                    BLOCK=_PACK_BLOCK,
                    **_OPTIONS,
                )
        return stream

    def scatter(
        self,
        support: Support,
        values: ValueCoding,
        stream: Tensor,
        numel: int,
        dtype: torch.dtype,
    ) -> Tensor:
        out = torch.empty(numel, dtype=dtypes.pattern_dtype(dtype), device=stream.device)
        self._scatter(support, values, stream, numel, dtype, out)
        return out

    def hidden(self, activation: Activation, kept: Kept, fp32_math: bool, out: Tensor) -> Tensor:
        assert kept.gate is not None
        bits = _bits(out)
        if activation.plain:  # the kept values themselves
            self._scatter(kept.support, kept.gate_coding, kept.gate, kept.numel, kept.dtype, bits)
        elif kept.numel:
            with _on(out.device):
                hidden_kernel[(layout.num_tiles(kept.numel),)](
                    kept.gate,
                    kept.gate if kept.up is None else kept.up,
                    kept.support.value_mask(),
                    kept.support.offsets,
                    bits,
                    kept.numel,
                    KIND=_KINDS[kept.dtype],
                    GATED=activation.gated,
                    SQUARED=activation.squared,
                    FP32_MATH=_rounds_late(activation, kept.dtype, fp32_math),
                    **_streams(kept),
                    LOCATE=kept.support.coding.triton_locate,
                    TILE=TILE,
                    **_OPTIONS,
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
        need_up = need_up and activation.gated
        if not need_gate and not need_up:
            return None, None
        support, numel = kept.support, kept.numel
        # Each element is read before it is overwritten, by the same program.
        grad_gate = grad_hidden if need_gate else None
        grad_up = None
        if need_up:
            grad_up = torch.empty_like(grad_hidden) if need_gate else grad_hidden
        if not numel:
            return grad_gate, grad_up
        grad = _bits(grad_hidden)
        grid = (layout.num_tiles(numel),)
        with _on(grad.device):
            if activation.plain:
                mask_gradient_kernel[grid](
                    grad,
                    support.mask,
                    numel,
                    LOCATE=support.coding.triton_locate,
                    TILE=TILE,
                    **_OPTIONS,
                )
                return grad_gate, grad_up
            assert kept.gate is not None
            gradient_kernel[grid](
                grad,
                grad,
                grad if grad_up is None else _bits(grad_up),
                kept.gate,
                kept.gate if kept.up is None else kept.up,
                support.value_mask(),
                support.mask,
                support.mask if support.up_mask is None else support.up_mask,
                support.offsets,
                numel,
                KIND=_KINDS[kept.dtype],
                GATED=activation.gated,
                SQUARED=activation.squared,
                RELU_UP=activation.relu_up,
                FP32_MATH=fp32_math and kept.dtype != torch.float32,
                NEED_GATE=need_gate,
                NEED_UP=need_up,
                **_streams(kept),
                LOCATE=support.coding.triton_locate,
                TILE=TILE,
                **_OPTIONS,
            )
        return grad_gate, grad_up

    def _scatter(
        self,
        support: Support,
        values: ValueCoding,
        stream: Tensor,
        numel: int,
        dtype: torch.dtype,
        out: Tensor,
    ) -> None:
        if not numel:
            return
        with _on(out.device):
            scatter_kernel[(layout.num_tiles(numel),)](
                stream,
                support.value_mask(),
                support.offsets,
                out,
                numel,
                LOAD=values.triton_load,
                WIDTH=values.width(dtype),
                STRIDE=values.stream_length(32, dtype),
                LOCATE=support.coding.triton_locate,
                TILE=TILE,
                **_OPTIONS,
            )


def _bits(tensor: Tensor) -> Tensor:
    """A contiguous tensor as integers of the same bits (a view)."""
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.detach().view(dtypes.pattern_dtype(tensor.dtype))


def _on(device: torch.device) -> Any:
    """Triton launches on the current device: make it the tensor's where it is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _rounds_late(activation: Activation, dtype: torch.dtype, fp32_math: bool) -> bool:
    """``fp32_math`` where it changes the result: fewer kernels to compile."""
    return fp32_math and activation.gated and activation.squared and dtype != torch.float32


def _streams(kept: Kept) -> dict[str, Any]:
    """The kernels' compile-time arguments about the two value streams."""
    gate, up, dtype = kept.gate_coding, kept.up_coding, kept.dtype
    return {
        "LOAD_GATE": gate.triton_load,
        "GATE_WIDTH": gate.width(dtype),
        "GATE_STRIDE": gate.stream_length(32, dtype),
        "LOAD_UP": up.triton_load,
        "UP_WIDTH": up.width(dtype),
        "UP_STRIDE": up.stream_length(32, dtype),
    }


def _allocate_support(
    coding: SupportCoding, numel: int, device: torch.device, two_masks: bool
) -> tuple[Support, Tensor]:
    """A support to be filled in, and the counts of its tiles; complete if ``numel`` is 0."""
    tiles, length = layout.num_tiles(numel), coding.mask_length(numel)
    allocate_totals = torch.empty if numel else torch.zeros
    support = Support(
        coding,
        torch.empty(length, dtype=torch.int32, device=device),
        torch.empty(tiles, dtype=dtypes.offset_dtype(numel), device=device),
        torch.empty(length, dtype=torch.int32, device=device) if two_masks else None,
        allocate_totals(3, dtype=torch.int64, device=device),
    )
    return support, torch.empty(tiles, dtype=torch.int32, device=device)


def _scan(counts: Tensor, support: Support) -> None:
    scan_kernel[(1,)](
        counts,
        support.offsets,
        support.totals,
        counts.numel(),
        BLOCK=_SCAN_BLOCK,
        num_warps=_SCAN_WARPS,
        enable_fp_fusion=False,
    )


BACKEND = TritonBackend()
