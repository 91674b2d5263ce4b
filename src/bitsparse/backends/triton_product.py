"""A product whose result passes through the derivative of (squared) ReLU before it is stored.

``grad @ w_down`` is the gradient of the hidden tensor; while a tile of it is in registers, the
hidden values at its place are read, and overwritten with the gradient of the pre-activation. See
:mod:`bitsparse.backends.product` for when this is used.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bitsparse import layout
from bitsparse.backends.triton import _INTERPRETED, on_device

# One tile of the result a program at a time, its product in steps of _DEPTH. The fastest on an H200
# of some twenty configurations.
_ROWS = 128
_COLS = 256
_DEPTH = 64
_GROUP = 8  # rows of tiles that are worked on together, for the sake of the cache
_OPTIONS: dict[str, Any] = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}

_COMPARED = 4096

# Two elements at once: $1 the gradient of the hidden values $2. All bits are cleared where these
# are +-0: adding 0x7fff to a magnitude sets the sign bit where it is not 0, without a carry between
# the halves, and prmt makes masks of the signs.
_RELU = tl.constexpr("""{
.reg .b32 m;
and.b32 m, $2, 0x7fff7fff;
add.u32 m, m, 0x7fff7fff;
prmt.b32 m, m, m, 0xBB99;
and.b32 $0, $1, m;
}""")
# The same, times 2 * r, where r = h * rsqrt(h) rounded.
_SQUARED_RELU = tl.constexpr("""{
.reg .b32 m, l, h, p;
.reg .f32 a, b, c, d;
shl.b32 l, $2, 16;
and.b32 h, $2, 0xffff0000;
mov.b32 a, l;
mov.b32 b, h;
rsqrt.approx.ftz.f32 c, a;
rsqrt.approx.ftz.f32 d, b;
mul.rn.f32 a, a, c;
mul.rn.f32 b, b, d;
cvt.rn.bf16x2.f32 p, b, a;
add.rn.bf16x2 p, p, p;
mul.rn.bf16x2 p, p, $1;
and.b32 m, $2, 0x7fff7fff;
add.u32 m, m, 0x7fff7fff;
prmt.b32 m, m, m, 0xBB99;
and.b32 $0, p, m;
}""")


@triton.jit
def _round(x):
    """float32 to bfloat16, to nearest even (the interpreter truncates)."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def _derive(grad, hidden, SQUARED: tl.constexpr):
    """Patterns of the pre-activation's gradient from the hidden tensor's (float32, rounded here)
    and the hidden values' patterns. ``SQUARED``: these are 0 or squares of [2**-60, 2**60)."""
    grad = _round(grad)
    pattern = grad.to(tl.int16, bitcast=True)
    if _INTERPRETED:
        if SQUARED:
            square = (hidden.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            root = _round(square * tl.rsqrt(square)).to(tl.float32)
            wide = (pattern.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            pattern = _round(wide * (root * 2.0)).to(tl.int16, bitcast=True)
        return tl.where((hidden & 0x7FFF) != 0, pattern, tl.zeros_like(pattern))
    else:
        return tl.inline_asm_elementwise(
            _SQUARED_RELU if SQUARED else _RELU,
            "=r,r,r",
            [pattern, hidden],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )


# As many tokens as there happen to be: no reason to compile again.
@triton.jit(do_not_specialize=["M"])
def product_kernel(
    grad_desc,
    w_down_desc,
    hidden_ptr,
    M,
    N,
    K,
    SQUARED: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Every ``num_programs``-th tile of the result.

    Args:
        grad_desc: descriptor of the block's output gradient, bfloat16 ``[M, K]``.
        w_down_desc: descriptor of the weight, bfloat16 ``[K, N]``.
        hidden_ptr: int16 ``[M, N]``: patterns of the hidden tensor, overwritten with the gradient
            of the pre-activation.
        WHOLE: whether ``N`` is a multiple of ``COLS``.
    """
    down = tl.cdiv(M, ROWS)
    across = tl.cdiv(N, COLS)
    HALF: tl.constexpr = COLS // 2
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * across)
        first = group * GROUP
        size = min(down - first, GROUP)
        inner = tile - group * (GROUP * across)
        row = (first + inner % size) * ROWS
        col = (inner // size) * COLS
        total = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, K, DEPTH):
            x = grad_desc.load([row, k])
            y = w_down_desc.load([k, col])
            if _INTERPRETED:
                total += tl.dot(x.to(tl.float32), y.to(tl.float32))
            else:
                total = tl.dot(x, y, total)
        rows = row + tl.arange(0, ROWS)
        cols = col + tl.arange(0, HALF)
        at = hidden_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        # Half of the columns after the other: fewer registers.
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, HALF)), (0, 2, 1)))
        inside = (rows < M)[:, None]
        right_inside = inside
        if not WHOLE:
            right_inside = inside & (cols + HALF < N)[None, :]
            inside = inside & (cols < N)[None, :]
        left_hidden = tl.load(at, mask=inside, other=0)
        right_hidden = tl.load(at + HALF, mask=right_inside, other=0)
        tl.store(at, _derive(left, left_hidden, SQUARED), mask=inside)
        tl.store(at + HALF, _derive(right, right_hidden, SQUARED), mask=right_inside)


@triton.jit
def compare_kernel(got_ptr, wanted_ptr, counts_ptr, numel, BLOCK: tl.constexpr):
    """Count what differs among ``BLOCK`` bfloat16 patterns; NaN equals NaN.

    Args:
        got_ptr, wanted_ptr: int16 ``[numel]``.
        counts_ptr: int64 ``[2]``, added to: elements that differ; wanted ones that are 0 or NaN.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    got = tl.load(got_ptr + at, mask=at < numel, other=1).to(tl.int32)
    wanted = tl.load(wanted_ptr + at, mask=at < numel, other=1).to(tl.int32)
    nan = (wanted & 0x7FFF) > 0x7F80
    differs = (got != wanted) & ~(nan & ((got & 0x7FFF) > 0x7F80))
    blank = nan | ((wanted & 0x7FFF) == 0)
    tl.atomic_add(counts_ptr, tl.sum(differs.to(tl.int32), 0).to(tl.int64))
    tl.atomic_add(counts_ptr + 1, tl.sum(blank.to(tl.int32), 0).to(tl.int64))


def product_gradient(squared: bool, grad: Tensor, w_down: Tensor, hidden: Tensor) -> None:
    """Overwrite the hidden tensor with the gradient of the pre-activation of (squared) ReLU.

    All bfloat16, contiguous, at addresses and with columns that are a multiple of 16 bytes.

    Args:
        squared: whether it is squared ReLU. The hidden values are then 0 or squares of [2**-60,
            2**60), rounded.
        grad: ``[tokens, d_out]``, of the block's output.
        w_down: ``[d_out, d_ff]``.
        hidden: ``[tokens, d_ff]``.
    """
    launch(product_kernel, squared, grad, w_down, hidden)


def launch(kernel: Any, squared: bool, grad: Tensor, w_down: Tensor, hidden: Tensor) -> Any:
    """:func:`product_gradient` by means of ``kernel``, which is called as a Triton kernel is."""
    (m, k), n = grad.shape, w_down.shape[1]
    tiles = layout.ceil_div(m, _ROWS) * layout.ceil_div(n, _COLS)
    with on_device(grad.device):
        return kernel[(min(tiles, _processors(grad.device)),)](
            TensorDescriptor(grad, [m, k], [k, 1], [_ROWS, _DEPTH]),
            TensorDescriptor(w_down, [k, n], [n, 1], [_DEPTH, _COLS]),
            hidden.view(torch.int16),
            m,
            n,
            k,
            SQUARED=squared,
            WHOLE=n % _COLS == 0,
            ROWS=_ROWS,
            COLS=_COLS,
            DEPTH=_DEPTH,
            GROUP=_GROUP,
            **_OPTIONS,
        )


def count_differences(got: Tensor, wanted: Tensor, counts: Tensor) -> None:
    """Add to ``counts`` (int64 ``[2]``) how many patterns of two contiguous bfloat16 tensors of the
    same shape differ, where any NaN equals any NaN, and how many of ``wanted`` are 0 or NaN."""
    numel = got.numel()
    with on_device(got.device):
        compare_kernel[(layout.ceil_div(numel, _COMPARED),)](
            got.view(torch.int16), wanted.view(torch.int16), counts, numel, BLOCK=_COMPARED
        )


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter: some, so that a program has several tiles
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
