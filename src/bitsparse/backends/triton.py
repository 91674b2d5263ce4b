"""The Triton backend: CUDA and ROCm, and CPU tensors in Triton's interpreter.

Every kernel is a skeleton over one tile a program. What depends on a coding (where the nonzeros
are, how a value is stored) is a jit function of that coding, passed as a compile-time argument.

Conventions of all kernels:

- Values travel as *patterns*: int32 that holds the sign-extended (bytes: zero-extended) bits. What
  is only moved therefore keeps every bit, float8 needs no hardware support, and comparisons are
  integer comparisons (the interpreter compares bfloat16 wrongly).
- A tile is a block ``[64 groups, 2 words, 32 bits]``: the slots in their order.
- ``rows`` and ``cols`` are left to Triton's specialisation because the divisibility of ``cols`` by
  16 is what lets loads and stores be vectorised; a size of 1 arrives as a constant, hence
  ``tl.cast`` rather than ``.to``.
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
from bitsparse.backends.base import (
    BUCKETS,
    ESCAPES,
    ROOT_LEAST,
    ROOT_LIMIT,
    UP_BUCKETS,
    Kept,
    Support,
    Survey,
    allocate_survey,
    encode_masks,
    gradient_buffers,
)
from bitsparse.codings import (
    Counts,
    Mask,
    Stream,
    SupportCoding,
    ValueCoding,
    bucketed,
    support_coding,
    tables,
    words,
)
from bitsparse.codings.exponent import FIELDS
from bitsparse.layout import Geometry

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FP32 = tl.constexpr(0)
_FP16 = tl.constexpr(1)
_BF16 = tl.constexpr(2)

# Two things differ in the interpreter: it truncates where compiled code rounds float32 to bfloat16
# (in one instruction), and its tensors are on the CPU.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on"))

# Products are rounded as written (nothing is added, so this only says so).
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_SCAN_BLOCK = 512  # of 16 tiles
_SCAN_WARPS = 16
_PACK_BLOCK = 1024

# The first count of a tile carries the sign flags above the count itself (at most TILE = 2**12):
# neither a zeroed buffer nor an atomic is needed for them.
_GATE_SIGN = tl.constexpr(16)
_UP_SIGN = tl.constexpr(17)  # or, of squared ReLU: a value out of range

_ROOT_LEAST = tl.constexpr(ROOT_LEAST)
_ROOT_LIMIT = tl.constexpr(ROOT_LIMIT)

# Rows of the counts.
_BUCKETS = tl.constexpr(BUCKETS)
_ESCAPES = tl.constexpr(ESCAPES)
_UP_BUCKETS = tl.constexpr(UP_BUCKETS)
_UP_ESCAPES = tl.constexpr(ESCAPES + len(FIELDS))
# How far below the tile's largest an exponent escapes, by width of the field.
_FIRST_ESCAPE = tl.constexpr((1 << FIELDS[0]) - 1)
_SECOND_ESCAPE = tl.constexpr((1 << FIELDS[1]) - 1)


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


# --------------------------------------------------------------------- functions on tiles


@triton.jit
def _locate(tile, rows, cols, HEIGHT: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the elements of a tile are: a 64-bit base, offsets from it, and which exist.

    ``ALIGNED``: the columns are a multiple of 64, so that no tile spans two blocks.
    """
    rows = tl.cast(rows, tl.int64)
    cols = tl.cast(cols, tl.int64)
    g = tl.arange(0, 64)[:, None, None]
    row = tl.arange(0, 2)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    if HEIGHT == 1:
        base = tile.to(tl.int64) * 4096
        index = g * 64 + row
        inside = index < words.left(rows * cols - base, 4096)
    else:
        first = tile.to(tl.int64) * 64  # column of the first group, counted over all blocks
        block = first // cols
        column = first - block * cols
        width = cols.to(tl.int32)
        if ALIGNED:
            base = block * 64 * cols + column
            index = row * width + g
            inside = (row < words.left(rows - block * 64, 64)) & (g < 64)
        else:
            base = block * 64 * cols
            column = column.to(tl.int32) + g
            further = column // width
            index = (further * 64 + row) * width + (column - further * width)
            # The tile spans at most 64 columns, so at most 64 blocks.
            inside = row < words.left(rows - block * 64, 4096) - further * 64
    return base, index, inside


@triton.jit
def _is_set(tile_words):
    """The bits ``[64, 2, 32]`` of a tile's words ``[64, 2]``."""
    return ((tile_words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1) != 0


@triton.jit
def _to_words(flags):
    """The inverse of :func:`_is_set`."""
    return tl.sum(flags.to(tl.int32) << tl.arange(0, 32)[None, None, :], axis=2)


@triton.jit
def _sum(x):
    return tl.sum(tl.reshape(x, [x.numel]), axis=0)


@triton.jit
def _max(x):
    return tl.max(tl.reshape(x, [x.numel]), axis=0)


@triton.jit
def _store_words(words_ptr, tile, mask_words, tile_words):
    index = tl.arange(0, 64)[:, None] * 2 + tl.arange(0, 2)[None, :]
    base = tile.to(tl.int64) * 128
    tl.store(words_ptr + base + index, tile_words, mask=index < words.left(mask_words - base, 128))


@triton.jit
def _count_buckets(counts_ptr, tile, tiles, ROW: tl.constexpr, tile_words):
    """Count the bytes of nonempty groups and buckets of one tile's words."""
    groups = (tl.max((tile_words != 0).to(tl.int32), axis=1)).to(tl.int32)
    count = _sum(bucketed.nonzero_bytes(tile_words)) + tl.sum(groups, axis=0)
    tl.store(counts_ptr + ROW * tl.cast(tiles, tl.int64) + tile, count)


@triton.jit
def _exponent(pattern, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr):
    return (pattern >> MANTISSA) & ((1 << EXPONENT) - 1)


@triton.jit
def _count_escapes(
    counts_ptr,
    exponents_ptr,
    tile,
    tiles,
    pattern,
    kept,
    STREAM: tl.constexpr,
    ROW: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
):
    """The largest exponent of the kept values, and how many lie too far below it."""
    exponent = tl.where(kept, _exponent(pattern, MANTISSA, EXPONENT), 0)
    largest = _max(exponent)
    # Exponents of what is not kept are 0 here: their distance must not count.
    distance = tl.where(kept, largest - exponent, 0)
    first = (distance >= _FIRST_ESCAPE).to(tl.int32)
    second = (distance >= _SECOND_ESCAPE).to(tl.int32)
    both = _sum(first | (second << 16))  # each at most 4096
    wide = tl.cast(tiles, tl.int64)
    row = counts_ptr + ROW * wide + tile
    tl.store(row, both & 0xFFFF)
    tl.store(row + wide, both >> 16)
    tl.store(exponents_ptr + STREAM * wide + tile, largest.to(tl.uint8))


@triton.jit
def _load_codes(stream_ptr, offset, rank, mask, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """The codes at ``offset + rank``, int32."""
    # 32 values fill whole words, so the 64-bit part of the address is a scalar.
    first = offset >> 5
    rank += (offset & 31).to(tl.int32)
    if PACKED:
        stream_ptr += first * WIDTH
        bit = rank * WIDTH
        word = bit >> 5
        shift = bit & 31
        low = tl.load(stream_ptr + word, mask=mask, other=0).to(tl.uint32, bitcast=True)
        # A value spans at most two words.
        spills = mask & (shift + WIDTH > 32)
        high = tl.load(stream_ptr + word + 1, mask=spills, other=0).to(tl.uint32, bitcast=True)
        # `& 31`: a shift by 32 is undefined. It would occur only where high is 0.
        upper = high << ((32 - shift) & 31).to(tl.uint32)
        value = (low >> shift.to(tl.uint32)) | upper
        code = (value & ((1 << WIDTH) - 1)).to(tl.int32, bitcast=True)
    else:
        code = tl.load(stream_ptr + first * 32 + rank, mask=mask, other=0).to(tl.int32)
    return code


@triton.jit
def _load_values(
    stream_ptr,
    exponents_ptr,
    escapes_ptr,
    escape_offsets_ptr,
    tile,
    offset,
    rank,
    kept,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    FIELD: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
):
    """Patterns of one tile's values, 0 where nothing is kept."""
    code = _load_codes(stream_ptr, offset, rank, kept, WIDTH, PACKED)
    if FIELD > 0:
        escape: tl.constexpr = (1 << FIELD) - 1
        distance = (code >> MANTISSA) & escape
        exponent = tl.load(exponents_ptr + tile).to(tl.int32) - distance
        begin = tables.entry(escape_offsets_ptr, tile)
        if tables.entry(escape_offsets_ptr, tile + 1) != begin:
            escaped = kept & (distance == escape)
            number = words.ranks(_to_words(escaped))
            full = tl.load(escapes_ptr + begin + number, mask=escaped, other=0).to(tl.int32)
            exponent = tl.where(escaped, full, exponent)
        pattern = (code & ((1 << MANTISSA) - 1)) | (exponent << MANTISSA)
        pattern |= (code >> (MANTISSA + FIELD)) << (MANTISSA + EXPONENT)
        if MANTISSA + EXPONENT == 15:
            pattern = (pattern << 16) >> 16  # 16-bit patterns are sign-extended
        code = tl.where(kept, pattern, 0)
    return code


# --------------------------------------------------------------------------------- kernels
# Arguments that several kernels have:
#     rows, cols, HEIGHT, ALIGNED: the geometry, see `_locate`
#     mask_words: words of a flat mask
#     words_ptr: int32 [mask_words], one bit a slot
#     mask_ptr, buckets_ptr, bucket_offsets_ptr, WORDS: a coded mask, and the coding's function
#     offsets_ptr: offset table of the values
#     X_ptr, X_exponents_ptr, X_escapes_ptr, X_escape_offsets_ptr, X_WIDTH, X_PACKED, X_FIELD:
#         a stream of values and the form of its codes, see `_load_values`


@triton.jit
def survey_kernel(
    patterns_ptr,
    words_ptr,
    counts_ptr,
    exponents_ptr,
    rows,
    cols,
    mask_words,
    tiles,
    HEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """Find and count the nonzero patterns of one tile.

    Args:
        patterns_ptr: int ``[numel]``, read.
        words_ptr: written.
        counts_ptr: int32 ``[rows of counts, tiles]``, written.
        exponents_ptr: uint8 ``[tiles]``, written if ``STATISTICS``.
    """
    tile = tl.program_id(0)
    base, index, inside = _locate(tile, rows, cols, HEIGHT, ALIGNED)
    pattern = tl.load(patterns_ptr + base + index, mask=inside, other=0).to(tl.int32)
    kept = pattern != 0
    tile_words = _to_words(kept)
    _store_words(words_ptr, tile, mask_words, tile_words)
    sign = _max((pattern >> (MANTISSA + EXPONENT)) & 1)
    tl.store(counts_ptr + tile, _sum(words.popcount(tile_words)) | (sign << _GATE_SIGN))
    if STATISTICS:
        _count_buckets(counts_ptr, tile, tiles, _BUCKETS, tile_words)
        _count_escapes(
            counts_ptr, exponents_ptr, tile, tiles, pattern, kept, 0, _ESCAPES, MANTISSA, EXPONENT
        )


@triton.jit
def activate_kernel(
    gate_ptr,
    up_ptr,
    hidden_ptr,
    words_ptr,
    up_words_ptr,
    counts_ptr,
    exponents_ptr,
    rows,
    cols,
    mask_words,
    tiles,
    HEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    RELU_UP: tl.constexpr,
    FP32_MATH: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """Activation and positions of one tile.

    Args:
        gate_ptr: int ``[numel]`` patterns, read; may be ``hidden_ptr``.
        up_ptr: the same of the second pre-activation; not touched unless ``GATED``.
        hidden_ptr: int ``[numel]``, written: the result.
        words_ptr: written: where relu(gate) counts.
        up_words_ptr: the same of relu(up); not touched unless ``RELU_UP``.
        counts_ptr: int32 ``[rows of counts, tiles]``, written.
        exponents_ptr: uint8 ``[streams, tiles]``, written if ``STATISTICS``.
    """
    tile = tl.program_id(0)
    base, index, inside = _locate(tile, rows, cols, HEIGHT, ALIGNED)
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
        if not GATED and KIND == _BF16:
            magnitude = _magnitude(gate, KIND)
            outside = (magnitude < _ROOT_LEAST) | (magnitude >= _ROOT_LIMIT)
            up_sign = _max((kept & outside).to(tl.int32))
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
            up_words = _to_words(up_fires)
            _store_words(up_words_ptr, tile, mask_words, up_words)
        up_sign = _max((kept & (up < 0)).to(tl.int32))
    tl.store(hidden_ptr + base + index, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)
    tile_words = _to_words(fires)
    _store_words(words_ptr, tile, mask_words, tile_words)
    kept_words = tile_words
    if RELU_UP:
        kept_words = tile_words & up_words
    gate_sign = _max((kept & (gate < 0)).to(tl.int32))
    count = _sum(words.popcount(kept_words))
    tl.store(counts_ptr + tile, count | (gate_sign << _GATE_SIGN) | (up_sign << _UP_SIGN))
    if STATISTICS:
        _count_buckets(counts_ptr, tile, tiles, _BUCKETS, tile_words)
        _count_escapes(
            counts_ptr, exponents_ptr, tile, tiles, gate, kept, 0, _ESCAPES, MANTISSA, EXPONENT
        )
        if GATED:
            _count_escapes(
                counts_ptr, exponents_ptr, tile, tiles, up, kept, 1, _UP_ESCAPES, MANTISSA, EXPONENT
            )
        if RELU_UP:
            _count_buckets(counts_ptr, tile, tiles, _UP_BUCKETS, up_words)


@triton.jit
def scan_kernel(counts_ptr, tables_ptr, totals_ptr, tiles, table_words, BLOCK: tl.constexpr):
    """Offset tables and totals of the counts, one row a program.

    Args:
        counts_ptr: int32 ``[rows, tiles]``, read: counts; the first row carries the sign flags.
        tables_ptr: int16 ``[rows, 2 * table_words]``, written: the offset tables as 16-bit halves.
        totals_ptr: int64 ``[2 + rows]``, written: sign flags, sums.
        tiles: at least 1.
    """
    row = tl.program_id(0)
    counts_ptr += row.to(tl.int64) * tiles
    tables_ptr += row.to(tl.int64) * table_words * 2
    blocks = table_words // 10
    total = tl.full((), 0, tl.int64)
    flags = tl.full((BLOCK, 16), 0, tl.int32)
    block = tl.arange(0, BLOCK)
    lane = tl.arange(0, 16)[None, :]
    for start in range(0, blocks, BLOCK):
        index = (start + block)[:, None] * 16 + lane
        packed = tl.load(counts_ptr + index, mask=index < tiles, other=0)
        flags = flags | (packed >> _GATE_SIGN)
        # At most BLOCK * 16 * TILE = 2**28: the sums within a block fit in 32 bits.
        counts = packed & 0xFFFF
        sums = tl.sum(counts, axis=1)
        distance = tl.cumsum(counts, axis=1) - counts
        bases = total + (tl.cumsum(sums, axis=0) - sums)
        out = tables_ptr + ((start + block) * 20)[:, None]
        exists = (start + block < blocks)[:, None]
        tl.store(out + 4 + lane, distance.to(tl.int16), mask=exists)
        quarter = tl.arange(0, 4)[None, :]
        tl.store(out + quarter, (bases[:, None] >> (16 * quarter)).to(tl.int16), mask=exists)
        total += tl.sum(sums, axis=0)
    tl.store(totals_ptr + 2 + row, total)
    if row == 0:
        tl.store(totals_ptr, _max(flags & 1).to(tl.int64))
        tl.store(totals_ptr + 1, _max(flags >> 1).to(tl.int64))


@triton.jit
def bucket_kernel(words_ptr, mask_ptr, buckets_ptr, bucket_offsets_ptr, mask_words):
    """Store one tile of a flat mask in buckets."""
    tile = tl.program_id(0)
    index = tl.arange(0, 64)[:, None] * 2 + tl.arange(0, 2)[None, :]
    base = tile.to(tl.int64) * 128
    stored = index < words.left(mask_words - base, 128)
    tile_words = tl.load(words_ptr + base + index, mask=stored, other=0)
    bucketed.store(tile_words, mask_ptr, buckets_ptr, bucket_offsets_ptr, tile)


@triton.jit
def gather_kernel(
    source_ptr,
    words_ptr,
    up_words_ptr,
    offsets_ptr,
    out_ptr,
    exponents_ptr,
    escapes_ptr,
    escape_offsets_ptr,
    rows,
    cols,
    mask_words,
    HEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    RELU: tl.constexpr,
    TWO_MASKS: tl.constexpr,
    FIELD: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Move the codes of one tile's kept patterns to their ranks.

    Args:
        source_ptr: int ``[numel]`` patterns, read.
        words_ptr, up_words_ptr: read: where both are set a pattern is kept; the second one only if
            ``TWO_MASKS``.
        out_ptr: int ``[nnz]``, written: codes.
        exponents_ptr: uint8 ``[tiles]``, read if ``FIELD``.
        escapes_ptr: uint8, written where a code escapes.
        RELU: store relu of the source (``KIND`` says of which dtype).
    """
    tile = tl.program_id(0)
    base, index, inside = _locate(tile, rows, cols, HEIGHT, ALIGNED)
    tile_words = WORDS(words_ptr, words_ptr, words_ptr, tile, mask_words, inside)
    if TWO_MASKS:
        tile_words &= WORDS(up_words_ptr, up_words_ptr, up_words_ptr, tile, mask_words, inside)
    kept = _is_set(tile_words)
    rank = words.ranks(tile_words)
    offset = tables.entry(offsets_ptr, tile)
    # All of the tile is read: whole rows load faster than their scattered nonzeros.
    pattern = tl.load(source_ptr + base + index, mask=inside, other=0).to(tl.int32)
    if RELU:
        pattern = _relu(pattern, KIND)
    code = pattern
    if FIELD != 0:
        escape: tl.constexpr = (1 << FIELD) - 1
        exponent = _exponent(pattern, MANTISSA, EXPONENT)
        distance = tl.load(exponents_ptr + tile).to(tl.int32) - exponent
        begin = tables.entry(escape_offsets_ptr, tile)
        if tables.entry(escape_offsets_ptr, tile + 1) != begin:
            escaped = kept & (distance >= escape)
            number = words.ranks(_to_words(escaped))
            tl.store(escapes_ptr + begin + number, exponent.to(tl.uint8), mask=escaped)
        sign = (pattern >> (MANTISSA + EXPONENT)) & 1
        code = (pattern & ((1 << MANTISSA) - 1)) | (tl.minimum(distance, escape) << MANTISSA)
        code |= sign << (MANTISSA + FIELD)
    tl.store(out_ptr + offset + rank, code.to(out_ptr.dtype.element_ty), mask=kept)


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
    mask_ptr,
    buckets_ptr,
    bucket_offsets_ptr,
    up_mask_ptr,
    up_buckets_ptr,
    up_bucket_offsets_ptr,
    offsets_ptr,
    gate_ptr,
    gate_exponents_ptr,
    gate_escapes_ptr,
    gate_escape_offsets_ptr,
    up_ptr,
    up_exponents_ptr,
    up_escapes_ptr,
    up_escape_offsets_ptr,
    out_ptr,
    rows,
    cols,
    mask_words,
    HEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
    TWO_MASKS: tl.constexpr,
    GATE_WIDTH: tl.constexpr,
    GATE_PACKED: tl.constexpr,
    GATE_FIELD: tl.constexpr,
    UP_WIDTH: tl.constexpr,
    UP_PACKED: tl.constexpr,
    UP_FIELD: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    FP32_MATH: tl.constexpr,
):
    """The hidden tensor of one tile, straight from the coded values; or the values themselves.

    Args:
        gate_ptr: stream of relu(gate), read.
        up_ptr: stream of up; not touched unless ``GATED``.
        out_ptr: int ``[numel]`` patterns, written; +0.0 where nothing is kept.
    """
    tile = tl.program_id(0)
    base, index, inside = _locate(tile, rows, cols, HEIGHT, ALIGNED)
    tile_words = WORDS(mask_ptr, buckets_ptr, bucket_offsets_ptr, tile, mask_words, inside)
    if TWO_MASKS:
        tile_words &= WORDS(
            up_mask_ptr, up_buckets_ptr, up_bucket_offsets_ptr, tile, mask_words, inside
        )
    kept = _is_set(tile_words)
    rank = words.ranks(tile_words)
    offset = tables.entry(offsets_ptr, tile)
    pattern = _load_values(
        gate_ptr, gate_exponents_ptr, gate_escapes_ptr, gate_escape_offsets_ptr,
        tile, offset, rank, kept, GATE_WIDTH, GATE_PACKED, GATE_FIELD, MANTISSA, EXPONENT,
    )  # fmt: skip
    if SQUARED or GATED:
        x = _to_float(pattern, KIND)
        if SQUARED:
            x = _multiply(x, x, KIND, FP32_MATH)
        if GATED:
            up = _load_values(
                up_ptr, up_exponents_ptr, up_escapes_ptr, up_escape_offsets_ptr,
                tile, offset, rank, kept, UP_WIDTH, UP_PACKED, UP_FIELD, MANTISSA, EXPONENT,
            )  # fmt: skip
            x = x * _to_float(up, KIND)
        # Where nothing is kept the loads gave zeros, whose product is +0.0.
        pattern = _to_pattern(x, KIND)
    tl.store(out_ptr + base + index, pattern.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def mask_gradient_kernel(
    grad_ptr,
    mask_ptr,
    buckets_ptr,
    bucket_offsets_ptr,
    rows,
    cols,
    mask_words,
    HEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Gradient of plain relu, in place: one tile of the incoming gradient where the unit fires.

    Args:
        grad_ptr: int ``[numel]`` patterns, read at the kept positions and written.
    """
    tile = tl.program_id(0)
    base, index, inside = _locate(tile, rows, cols, HEIGHT, ALIGNED)
    tile_words = WORDS(mask_ptr, buckets_ptr, bucket_offsets_ptr, tile, mask_words, inside)
    grad = tl.load(grad_ptr + base + index, mask=_is_set(tile_words), other=0)
    tl.store(grad_ptr + base + index, grad, mask=inside)


@triton.jit
def gradient_kernel(
    grad_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    mask_ptr,
    buckets_ptr,
    bucket_offsets_ptr,
    up_mask_ptr,
    up_buckets_ptr,
    up_bucket_offsets_ptr,
    offsets_ptr,
    gate_ptr,
    gate_exponents_ptr,
    gate_escapes_ptr,
    gate_escape_offsets_ptr,
    up_ptr,
    up_exponents_ptr,
    up_escapes_ptr,
    up_escape_offsets_ptr,
    rows,
    cols,
    mask_words,
    HEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
    TWO_MASKS: tl.constexpr,
    GATE_WIDTH: tl.constexpr,
    GATE_PACKED: tl.constexpr,
    GATE_FIELD: tl.constexpr,
    UP_WIDTH: tl.constexpr,
    UP_PACKED: tl.constexpr,
    UP_FIELD: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    FP32_MATH: tl.constexpr,
    NEED_GATE: tl.constexpr,
    NEED_UP: tl.constexpr,
):
    """Gradients of one tile, straight from the coded values. Not for plain relu.

    Args:
        grad_ptr: int ``[numel]`` patterns of the hidden tensor's gradient, read once.
        grad_gate_ptr: the same, written if ``NEED_GATE``; may be ``grad_ptr``.
        grad_up_ptr: the same, written if ``NEED_UP``; may be ``grad_ptr`` unless both are.
        gate_ptr: stream of relu(gate), read.
        up_ptr: stream of up; read if ``GATED`` and where its values matter.
        TWO_MASKS: dReLU; values are kept where both masks are set.
    """
    tile = tl.program_id(0)
    base, index, inside = _locate(tile, rows, cols, HEIGHT, ALIGNED)
    gate_words = WORDS(mask_ptr, buckets_ptr, bucket_offsets_ptr, tile, mask_words, inside)
    kept_words = gate_words
    if TWO_MASKS:
        up_words = WORDS(
            up_mask_ptr, up_buckets_ptr, up_bucket_offsets_ptr, tile, mask_words, inside
        )
        kept_words = gate_words & up_words
    kept = _is_set(kept_words)
    rank = words.ranks(kept_words)
    offset = tables.entry(offsets_ptr, tile)
    # Values that are not kept are +0.0, and are multiplied by, as eager does: the product may be
    # -0.0 or NaN. Only where relu's derivative is 0 eager selects 0.
    gate = _load_values(
        gate_ptr, gate_exponents_ptr, gate_escapes_ptr, gate_escape_offsets_ptr,
        tile, offset, rank, kept, GATE_WIDTH, GATE_PACKED, GATE_FIELD, MANTISSA, EXPONENT,
    )  # fmt: skip
    gate_value = _to_float(gate, KIND)
    fires = _fires(gate, KIND)
    if GATED:
        up = _load_values(
            up_ptr, up_exponents_ptr, up_escapes_ptr, up_escape_offsets_ptr,
            tile, offset, rank, kept, UP_WIDTH, UP_PACKED, UP_FIELD, MANTISSA, EXPONENT,
        )  # fmt: skip
        up_value = _to_float(up, KIND)
        if TWO_MASKS:
            # Where both masks are set the values decide (they also are where a value is special);
            # elsewhere the masks do.
            fires = tl.where(kept, fires, _is_set(gate_words))
            up_fires = tl.where(kept, _fires(up, KIND), _is_set(up_words))
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
        if TWO_MASKS:
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

    def survey(
        self, geometry: Geometry, patterns: Tensor, dtype: torch.dtype, statistics: bool
    ) -> Survey:
        survey, counts = allocate_survey(geometry, dtype, patterns.device, 1, 1, statistics)
        with on_device(patterns.device):
            survey_kernel[(geometry.tiles,)](
                patterns,
                survey.words,
                counts,
                counts if survey.exponents is None else survey.exponents,
                *_sizes(geometry),
                geometry.tiles,
                **_shape(geometry),
                **_fields(dtype),
                STATISTICS=statistics,
                **_OPTIONS,
            )
            scan(counts, survey)
        return survey

    def activate(
        self,
        geometry: Geometry,
        activation: Activation,
        gate: Tensor,
        up: Tensor | None,
        fp32_math: bool,
        statistics: bool,
    ) -> tuple[Tensor, Survey]:
        survey, counts = allocate_survey(
            geometry,
            gate.dtype,
            gate.device,
            1 + activation.gated,
            1 + activation.relu_up,
            statistics,
        )
        hidden = gate if activation.plain else torch.empty_like(gate)
        bits = _bits(gate)
        with on_device(gate.device):
            activate_kernel[(geometry.tiles,)](
                bits,
                bits if up is None else _bits(up),
                _bits(hidden),
                survey.words,
                survey.words if survey.up_words is None else survey.up_words,
                counts,
                counts if survey.exponents is None else survey.exponents,
                *_sizes(geometry),
                geometry.tiles,
                **_shape(geometry),
                KIND=_KINDS[gate.dtype],
                GATED=activation.gated,
                SQUARED=activation.squared,
                RELU_UP=activation.relu_up,
                FP32_MATH=rounds_late(activation, gate.dtype, fp32_math),
                **_fields(gate.dtype),
                STATISTICS=statistics,
                **_OPTIONS,
            )
            scan(counts, survey)
        return hidden, survey

    def encode_support(self, coding: SupportCoding, survey: Survey, counts: Counts) -> Support:
        return encode_masks(coding, survey, counts, self._bucket)

    def _bucket(self, flat: Tensor, mask: Mask, geometry: Geometry) -> None:
        """Fill in ``mask`` from the words of a flat one."""
        with on_device(flat.device):
            bucket_kernel[(geometry.tiles,)](
                flat,
                mask.words,
                mask.buckets,
                mask.bucket_offsets,
                geometry.mask_words,
                **_OPTIONS,
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
        geometry, dtype, nnz = survey.geometry, survey.dtype, counts.nnz
        bits = _bits(source)
        codes = torch.empty(nnz, dtype=bits.dtype, device=bits.device)
        parts = survey.exponent_buffers(coding, counts, stream)
        if nnz:
            with on_device(bits.device):
                gather_kernel[(geometry.tiles,)](
                    bits,
                    survey.words,
                    survey.words if survey.up_words is None else survey.up_words,
                    survey.tables,
                    codes,
                    *(codes if b is None else b for b in parts),
                    *_sizes(geometry),
                    **_shape(geometry),
                    KIND=_KINDS[source.dtype] if relu else 0,
                    RELU=relu,
                    TWO_MASKS=survey.up_words is not None,
                    FIELD=coding.field,
                    **_fields(dtype),
                    WORDS=support_coding("flat").triton_words,
                    **_OPTIONS,
                )
        width = coding.width(dtype)
        if width < dtypes.bit_width(dtype):
            codes = _pack(codes, width)
        return Stream(coding, codes, *parts)

    def scatter(self, support: Support, stream: Stream, dtype: torch.dtype) -> Tensor:
        out = torch.empty(
            support.geometry.numel, dtype=dtypes.pattern_dtype(dtype), device=stream.values.device
        )
        self._scatter(Kept(support, dtype, stream), out, 0, False, False, False)
        return out

    def hidden(self, activation: Activation, kept: Kept, fp32_math: bool, out: Tensor) -> Tensor:
        late = rounds_late(activation, kept.dtype, fp32_math)
        kind = 0 if activation.plain else _KINDS[kept.dtype]
        self._scatter(kept, _bits(out), kind, activation.gated, activation.squared, late)
        return out

    def _scatter(
        self, kept: Kept, out: Tensor, kind: int, gated: bool, squared: bool, late: bool
    ) -> None:
        geometry = kept.support.geometry
        with on_device(out.device):
            scatter_kernel[(geometry.tiles,)](
                *_pointers(kept),
                out,
                *_sizes(geometry),
                **_shape(geometry),
                **_codings(kept),
                KIND=kind,
                GATED=gated,
                SQUARED=squared,
                FP32_MATH=late,
                **_OPTIONS,
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
        need_up = need_up and activation.gated
        if not need_gate and not need_up:
            return None, None
        geometry = kept.support.geometry
        grad_gate, grad_up = gradient_buffers(grad_hidden, need_gate, need_up)
        grad = _bits(grad_hidden)
        grid = (geometry.tiles,)
        with on_device(grad.device):
            if activation.plain:
                mask_gradient_kernel[grid](
                    grad,
                    *_pointers_of(kept.support.mask, grad),
                    *_sizes(geometry),
                    **_shape(geometry),
                    WORDS=kept.support.mask.coding.triton_words,
                    **_OPTIONS,
                )
                return grad_gate, grad_up
            gradient_kernel[grid](
                grad,
                grad,
                grad if grad_up is None else _bits(grad_up),
                *_pointers(kept),
                *_sizes(geometry),
                **_shape(geometry),
                **_codings(kept),
                KIND=_KINDS[kept.dtype],
                GATED=activation.gated,
                SQUARED=activation.squared,
                FP32_MATH=fp32_math and kept.dtype != torch.float32,
                NEED_GATE=need_gate,
                NEED_UP=need_up,
                **_OPTIONS,
            )
        return grad_gate, grad_up


def _bits(tensor: Tensor) -> Tensor:
    """A contiguous tensor as integers of the same bits (a view)."""
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.detach().view(dtypes.pattern_dtype(tensor.dtype))


def on_device(device: torch.device) -> Any:
    """Triton launches on the current device: make it the tensor's where it is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def rounds_late(activation: Activation, dtype: torch.dtype, fp32_math: bool) -> bool:
    """``fp32_math`` where it changes the result: fewer kernels to compile."""
    return fp32_math and activation.gated and activation.squared and dtype != torch.float32


def _sizes(geometry: Geometry) -> tuple[int, int, int]:
    return geometry.rows, geometry.cols, geometry.mask_words


def _shape(geometry: Geometry) -> dict[str, Any]:
    """The kernels' compile-time arguments about the geometry."""
    return {"HEIGHT": geometry.height, "ALIGNED": geometry.cols % layout.GROUP == 0}


def _fields(dtype: torch.dtype) -> dict[str, int]:
    """The kernels' compile-time arguments about the dtype."""
    return {"MANTISSA": dtypes.mantissa_bits(dtype), "EXPONENT": dtypes.exponent_bits(dtype)}


def _pointers_of(part: Mask | Stream, unused: Tensor) -> list[Tensor]:
    """The tensors of a coded mask or stream; ``unused`` stands for those that it does not have."""
    return [unused if t is None else t for t in part.tensors]


def _pointers(kept: Kept) -> list[Tensor]:
    """The kernels' arguments from ``mask_ptr`` to ``up_escape_offsets_ptr``."""
    support = kept.support
    assert kept.gate is not None
    return [
        *_pointers_of(support.mask, support.offsets),
        *_pointers_of(support.up_mask or support.mask, support.offsets),
        support.offsets,
        *_pointers_of(kept.gate, kept.gate.values),
        *_pointers_of(kept.up or kept.gate, kept.gate.values),
    ]


def _codings(kept: Kept) -> dict[str, Any]:
    """The kernels' compile-time arguments about codings and dtype."""
    bits = dtypes.bit_width(kept.dtype)
    assert kept.gate is not None
    arguments: dict[str, Any] = {
        "WORDS": kept.support.mask.coding.triton_words,
        "TWO_MASKS": kept.support.up_mask is not None,
        **_fields(kept.dtype),
    }
    for name, stream in (("GATE", kept.gate), ("UP", kept.gate if kept.up is None else kept.up)):
        width = stream.coding.width(kept.dtype)
        arguments[f"{name}_WIDTH"] = width
        arguments[f"{name}_PACKED"] = width < bits
        arguments[f"{name}_FIELD"] = stream.coding.field
    return arguments


def scan(counts: Tensor, survey: Survey) -> None:
    rows, tiles = counts.shape
    assert isinstance(survey.tables, Tensor)
    scan_kernel[(rows,)](
        counts,
        survey.tables.view(torch.int16),
        survey.totals,
        tiles,
        survey.tables.shape[1],
        BLOCK=_SCAN_BLOCK,
        num_warps=_SCAN_WARPS,
        enable_fp_fusion=False,
    )


def _pack(codes: Tensor, width: int) -> Tensor:
    """The low ``width`` bits of integer codes, one after the other in words."""
    length = layout.packed_words(codes.numel(), width)
    stream = torch.empty(length, dtype=torch.int32, device=codes.device)
    if length:
        with on_device(codes.device):
            pack_kernel[(layout.ceil_div(length, _PACK_BLOCK),)](
                codes, stream, codes.numel(), length, WIDTH=width, BLOCK=_PACK_BLOCK, **_OPTIONS
            )
    return stream


BACKEND = TritonBackend()
