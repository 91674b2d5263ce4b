"""What PyTorch does on an NVIDIA GPU, for tensors without values that are said to be on the CPU.

PyTorch chooses other kernels on a GPU, which keep other tensors; a build of it without CUDA cannot
even pretend. A step that is predicted therefore runs on CPU tensors without values, under a mode
that replaces the operations that differ by stand-ins which allocate what those of a GPU do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bitsparse.conversion.block import Pending
from bitsparse.layout import ceil_div

MULTIPROCESSORS = 132
"""Of an H200 (and an H100 SXM): how attention's backward splits its sums depends on it."""

Workspace = Callable[[int], None]


def _functions(*names: str) -> list[Any]:
    """Functions of these names, wherever PyTorch has them."""
    places = (torch, F, Tensor, torch.special)
    found = [getattr(place, name) for name in names for place in places if hasattr(place, name)]
    return list(dict.fromkeys(found))


_IN_FLOAT32 = frozenset(
    _functions(
        *(
            "pow",
            "__pow__",
            "__rpow__",
            "square",
            "rsqrt",
            "reciprocal",
            "__rtruediv__",
            "__rdiv__",
        ),
        *("exp", "expm1", "log", "log10", "log2", "log1p", "softmax", "log_softmax", "softmin"),
        *("softplus", "cumsum", "cumprod", "sum", "prod", "norm", "layer_norm", "group_norm"),
        *("cosine_similarity", "normalize", "cross_entropy", "nll_loss", "mse_loss", "l1_loss"),
        *("smooth_l1_loss", "kl_div", "binary_cross_entropy_with_logits", "sinh", "cosh", "tan"),
        *("acos", "asin", "erfinv", "renorm"),
    )
)
"""What CUDA's autocast runs in float32."""

_SDPA = F.scaled_dot_product_attention


class GpuMode(TorchFunctionMode):
    """Replaces what a GPU does otherwise.

    ``deterministic``: as under ``torch.use_deterministic_algorithms``. ``workspace`` is told of
    memory that an operation needs while it runs.
    """

    def __init__(self, deterministic: bool, workspace: Workspace) -> None:
        super().__init__()
        self.deterministic = deterministic
        self.workspace = workspace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        pending = next((a for a in args if isinstance(a, Pending)), None)
        if pending is not None:
            with self:
                return type(pending).__torch_function__(func, types, args, kwargs)
        if func is _SDPA:
            return self._attention(*args, **kwargs)
        if func is F.rms_norm or func is torch.rms_norm:
            return _rms_norm(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = _in_float32(args, kwargs)
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (t.to(dtype) for t in (query, key, value))
        fused = query.dim() == 4 and query.shape[-1] <= 256
        flash = fused and attn_mask is None and query.dtype != torch.float32
        if not fused:
            return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
        if not flash and key.shape[1] != query.shape[1]:  # grouped heads: repeated
            groups = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        out: Tensor = _Attention.apply(
            query, key, value, attn_mask, flash, self.deterministic, self.workspace
        )
        return out


class _Attention(torch.autograd.Function):
    """FlashAttention 2 or, in float32 or with a mask, the memory-efficient kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        flash: bool,
        deterministic: bool,
        workspace: Workspace,
    ) -> Tensor:
        batch, heads, seq, size = query.shape
        if flash and value.shape[-1] == size:
            out = torch.empty_like(query)  # in the order in which the query lies in memory
        else:
            out = query.new_empty(batch, seq, heads, value.shape[-1]).transpose(1, 2)
        rows = seq if flash else ceil_div(seq, 32) * 32
        log_sum_exp = query.new_empty(batch, heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sum_exp, mask)
        ctx.how = flash, deterministic, workspace
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        flash, deterministic, workspace = ctx.how
        grads = [torch.empty_like(t) for t in (query, key, value)]
        batch, heads, seq, size = query.shape
        if not flash:
            workspace(4 * batch * heads * seq)
        else:
            rows = ceil_div(seq, 128) * 128
            splits = ceil_div(MULTIPROCESSORS, batch * heads) if deterministic else 1
            sums = splits * batch * rows * heads * ceil_div(size, 32) * 32
            if key.shape[1] != heads:  # grouped heads: a gradient for each first
                sums += batch * key.shape[2] * heads * size * key.itemsize * 2 // 4
            workspace(4 * (sums + batch * heads * rows))
        return *grads, None, None, None, None


def _rms_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    out: Tensor = _RmsNorm.apply(input, weight, len(normalized_shape))
    return out


class _RmsNorm(torch.autograd.Function):
    """The fused kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        x = x.contiguous()
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        inverse = x.new_empty(*x.shape[:-dims], *[1] * dims, dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse)
        return torch.empty_like(x, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        grad.contiguous()
        return (
            torch.empty_like(x) if need_x else None,
            torch.empty_like(weight) if need_weight else None,
            None,
        )


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    out: Tensor = torch.native_dropout(input, p, True)[0]
    return out


def _in_float32(args: Any, kwargs: Any) -> Any:
    def cast(x: Any) -> Any:
        low = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float32
        return x.float() if low and x.dtype != torch.float64 else x

    return torch.utils._pytree.tree_map(cast, (args, kwargs))
