"""The kernel that computes a layer again, on the device, where its activations did not fit.

A CUDA graph cannot branch on the host: the kernel is launched always, reads the flag, and returns
at once where everything fitted. Else it computes the pre-activations with a matrix product of its
own and applies the activation, or its gradient, to each block of them in registers: no buffer is
needed. The products are summed in float32 in the order of the depth; a library's may differ in the
last bit.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitsparse.activations import Activation
from bitsparse.backends.triton import (
    _INTERPRETED,
    _KINDS,
    _bits,
    _fires,
    _multiply,
    _relu,
    _to_float,
    _to_pattern,
    on_device,
)
from bitsparse.layout import ceil_div

_FP32 = tl.constexpr(0)


@triton.jit
def _product(
    a_ptr,
    b_ptr,
    row,
    col,
    rows,
    cols,
    depth,
    a_row,
    a_depth,
    b_col,
    b_depth,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """``a @ b`` for some rows and columns (int64, 1-d): float32 ``[BLOCK_ROWS, BLOCK_COLS]``."""
    k = tl.arange(0, BLOCK_DEPTH)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    a_ptr += row[:, None] * a_row
    b_ptr += col[None, :] * b_col
    for first in range(0, depth, BLOCK_DEPTH):
        here = first + k
        inside = here < depth
        at = here.to(tl.int64)
        a = tl.load(
            a_ptr + at[None, :] * a_depth, mask=(row < rows)[:, None] & inside[None, :], other=0.0
        )
        b = tl.load(
            b_ptr + at[:, None] * b_depth, mask=(col < cols)[None, :] & inside[:, None], other=0.0
        )
        if _INTERPRETED:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def recompute_kernel(
    fits_ptr,
    x_ptr,
    w_gate_ptr,
    b_gate_ptr,
    w_up_ptr,
    b_up_ptr,
    grad_out_ptr,
    w_down_ptr,
    gate_ptr,
    up_ptr,
    rows,
    cols,
    d_model,
    d_out,
    x_row,
    x_col,
    w_gate_row,
    w_gate_col,
    w_up_row,
    w_up_col,
    grad_out_row,
    grad_out_col,
    w_down_row,
    w_down_col,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    RELU_UP: tl.constexpr,
    FP32_MATH: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    UP_BIAS: tl.constexpr,
    GRADIENT: tl.constexpr,
    NEED_GATE: tl.constexpr,
    NEED_UP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """The hidden tensor, or the gradients of the pre-activations, if the flag is not set.

    Args:
        fits_ptr: uint8, read: whether there is nothing to do.
        x_ptr: ``[rows, d_model]``, read.
        w_gate_ptr, b_gate_ptr: ``[cols, d_model]``, ``[cols]``, read: of the pre-activation that
            relu is applied to. The bias only if ``GATE_BIAS``.
        w_up_ptr, b_up_ptr: the same of the other one, if ``GATED``.
        grad_out_ptr, w_down_ptr: ``[rows, d_out]``, ``[d_out, cols]``, read if ``GRADIENT``.
        gate_ptr: int ``[rows, cols]`` patterns, written: the hidden tensor, or the gradient of the
            gate if ``NEED_GATE``.
        up_ptr: the same, written: the gradient of the other one if ``NEED_UP``.
        X_row, X_col: strides.
    """
    rows = tl.cast(rows, tl.int64)
    cols = tl.cast(cols, tl.int64)
    if tl.load(fits_ptr) == 0:
        across = (cols + BLOCK_COLS - 1) // BLOCK_COLS
        blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS * across
        for block in range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0)):
            row = block // across * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            col = block % across * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
            x = _product(
                x_ptr, w_gate_ptr, row, col, rows, cols, d_model,
                x_row, x_col, w_gate_row, w_gate_col, BLOCK_ROWS, BLOCK_COLS, BLOCK_DEPTH,
            )  # fmt: skip
            if GATE_BIAS:
                x += tl.load(b_gate_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
            gate = _relu(_to_pattern(x, KIND), KIND)
            gate_value = _to_float(gate, KIND)
            if GATED:
                x = _product(
                    x_ptr, w_up_ptr, row, col, rows, cols, d_model,
                    x_row, x_col, w_up_row, w_up_col, BLOCK_ROWS, BLOCK_COLS, BLOCK_DEPTH,
                )  # fmt: skip
                if UP_BIAS:
                    x += tl.load(b_up_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
                up = _to_pattern(x, KIND)
                if RELU_UP:
                    up = _relu(up, KIND)
                up_value = _to_float(up, KIND)
            at = row[:, None] * cols + col[None, :]
            inside = (row < rows)[:, None] & (col < cols)[None, :]
            if GRADIENT:
                x = _product(
                    grad_out_ptr, w_down_ptr, row, col, rows, cols, d_out,
                    grad_out_row, grad_out_col, w_down_col, w_down_row,
                    BLOCK_ROWS, BLOCK_COLS, BLOCK_DEPTH,
                )  # fmt: skip
                grad = _to_float(_to_pattern(x, KIND), KIND)
                if NEED_UP:
                    factor = gate_value
                    if SQUARED:
                        factor = _multiply(gate_value, gate_value, KIND, FP32_MATH)
                    result = _to_pattern(grad * factor, KIND)
                    if RELU_UP:
                        result = tl.where(_fires(up, KIND), result, 0)
                    tl.store(up_ptr + at, result.to(up_ptr.dtype.element_ty), mask=inside)
                if NEED_GATE:
                    x = grad
                    if GATED:
                        x = _multiply(x, up_value, KIND, FP32_MATH)
                    if SQUARED:
                        x = x * _multiply(gate_value, 2.0, KIND, FP32_MATH)
                    result = tl.where(_fires(gate, KIND), _to_pattern(x, KIND), 0)
                    tl.store(gate_ptr + at, result.to(gate_ptr.dtype.element_ty), mask=inside)
            else:
                x = gate_value
                if SQUARED:
                    x = _multiply(x, x, KIND, FP32_MATH)
                if GATED:
                    x = x * up_value
                result = gate
                if SQUARED or GATED:
                    result = _to_pattern(x, KIND)
                tl.store(gate_ptr + at, result.to(gate_ptr.dtype.element_ty), mask=inside)


def recompute(
    fits: Tensor,
    activation: Activation,
    fp32_math: bool,
    x: Tensor,
    w_gate: Tensor,
    b_gate: Tensor | None,
    w_up: Tensor | None,
    b_up: Tensor | None,
    grad_out: Tensor | None,
    w_down: Tensor | None,
    gate: Tensor | None,
    up: Tensor | None,
) -> None:
    """Launch the kernel: see there. With ``grad_out`` gradients are written, those not None."""
    gradient = grad_out is not None
    out = gate if gate is not None else up
    assert out is not None
    rows, cols = x.shape[0], w_gate.shape[0]
    w_up = w_gate if w_up is None else w_up
    grad_out = x if grad_out is None else grad_out
    w_down = w_gate if w_down is None else w_down
    wide = x.dtype == torch.float32
    blocks: dict[str, Any] = {"BLOCK_ROWS": 64 if wide else 128, "BLOCK_COLS": 64}
    if not activation.gated and not wide:
        blocks["BLOCK_COLS"] = 128
    tiles = ceil_div(rows, blocks["BLOCK_ROWS"]) * ceil_div(cols, blocks["BLOCK_COLS"])
    with on_device(x.device):
        recompute_kernel[(min(tiles, _programs(x.device)),)](
            fits.view(torch.uint8),
            x,
            w_gate,
            w_gate if b_gate is None else b_gate,
            w_up,
            w_up if b_up is None else b_up,
            grad_out,
            w_down,
            _bits(out),
            _bits(out if up is None else up),
            rows,
            cols,
            x.shape[1],
            grad_out.shape[1],
            *x.stride(),
            *w_gate.stride(),
            *w_up.stride(),
            *grad_out.stride(),
            *w_down.stride(),
            KIND=_KINDS[x.dtype],
            GATED=activation.gated,
            SQUARED=activation.squared,
            RELU_UP=activation.relu_up,
            FP32_MATH=fp32_math,
            GATE_BIAS=b_gate is not None,
            UP_BIAS=b_up is not None,
            GRADIENT=gradient,
            NEED_GATE=gradient and gate is not None,
            NEED_UP=gradient and up is not None,
            **blocks,
            BLOCK_DEPTH=32 if wide else 64,
            num_warps=4 if wide else 8,
            num_stages=2,
            enable_fp_fusion=False,
        )


@cache
def _programs(device: torch.device) -> int:
    """How many programs a launch starts at most: enough to fill the device, few to return from."""
    if device.type != "cuda":
        return 2
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
