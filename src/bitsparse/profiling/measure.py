"""What the hidden activations of one forward pass of a block are like, and what they would take."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitsparse import codings, dtypes, layout
from bitsparse.activations import Activation
from bitsparse.backends import Kept, Survey, backend_for
from bitsparse.bench.timing import seconds
from bitsparse.codings import POLICIES, Counts
from bitsparse.ops.block import as_rows, encode, rounds_to_float32

SHOWN_TOKENS, SHOWN_NEURONS = 128, 512
"""Of the positions that are kept for the report: the first ones."""

QUANTILES = (0.1, 0.5, 0.9)


class Measured(NamedTuple):
    """Rows of results; what is not a scalar apart from the rest."""

    scalars: dict[str, Any]
    exponents: dict[int, int]
    """How many values of ReLU's result have which exponent (the power of two)."""
    positions: dict[str, Any]
    """Where the nonzeros of the first tokens and neurons are."""


def measure(
    activation: Activation,
    gate: Tensor,
    up: Tensor | None,
    w_down: Tensor,
    between: Sequence[nn.Module],
    codec: str,
    timed: bool,
) -> Measured:
    """Look at pre-activations ``[..., d_ff]``, which are not changed.

    Args:
        gate: what ReLU is applied to.
        up: the other pre-activation; None for forms without a gate.
        w_down: the weight of the down projection, ``[d_out, d_ff]``.
        between: modules that change the hidden tensor before that.
        codec: what is timed.
        timed: whether anything is.
    """
    gate = gate.detach()
    up = None if up is None else up.detach()
    dense = plain_nbytes(activation, gate, up, w_down, between)
    with torch.no_grad():
        fires = _fires(activation, gate, up)
        scalars = {
            "tokens": gate.shape[:-1].numel(),
            "neurons": gate.shape[-1],
            "dtype": str(gate.dtype).removeprefix("torch."),
            **_densities(fires),
            "dense_bytes": dense,
        }
        inputs = gate.clone(memory_format=torch.contiguous_format), _clone(up)
        _, counts = _survey(activation, *inputs, statistics=True)
        scalars["density"] = counts.nnz / gate.numel()
        for policy in POLICIES:
            nbytes = codings.choose(counts, policy).nbytes
            scalars[f"bytes_{policy}"] = nbytes
            scalars[f"bits_{policy}"] = 8 * nbytes / gate.numel()
        choice = codings.choose(counts, codec)
        scalars["support"] = choice.support.name
        scalars["values"] = "+".join(c.name for c in choice.values)
        if timed:
            scalars |= _times(activation, gate, up, codec)
        return Measured(scalars, _exponents(gate, fires), _positions(fires))


def plain_nbytes(
    activation: Activation,
    gate: Tensor,
    up: Tensor | None,
    w_down: Tensor,
    between: Sequence[nn.Module] = (),
) -> int:
    """Bytes of hidden activations that plain PyTorch keeps for the backward pass of such a block.

    Autocast decides about dtypes on the way, so two tokens are computed and what is saved counted.
    No random number is used up.
    """
    tokens, d_ff = gate.shape[:-1].numel(), gate.shape[-1]
    found: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == 2 * d_ff:
            held.append(tensor.detach())  # alive, so that no other storage has its address
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    def two(x: Tensor) -> Tensor:
        return x.new_zeros(2, d_ff).requires_grad_()

    with (
        torch.random.fork_rng([gate.device] if gate.is_cuda else [], enabled=bool(between)),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        hidden = activation.dense(two(gate), None if up is None else two(up))
        for module in between:
            hidden = module(hidden)
        F.linear(hidden, w_down.detach()[:1].clone().requires_grad_())
    return sum(found.values()) * tokens // 2


def _clone(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone(memory_format=torch.contiguous_format)


def _fires(activation: Activation, gate: Tensor, up: Tensor | None) -> Tensor:
    """Where values are kept, bool ``[tokens, d_ff]``; special values aside, that is where the
    hidden tensor can be nonzero."""
    fires = gate > 0
    if activation.relu_up:
        assert up is not None
        fires &= up > 0
    return as_rows(fires)


def _densities(fires: Tensor) -> dict[str, Any]:
    """How density is spread over tokens and over neurons."""
    found: dict[str, Any] = {}
    for name, dim in (("token", 1), ("neuron", 0)):
        rates = fires.mean(dim, dtype=torch.float32)
        points = torch.quantile(rates, rates.new_tensor(QUANTILES)).tolist()
        found[f"{name}_density_std"] = rates.std(correction=0).item()
        found[f"{name}_density_min"] = rates.min().item()
        found[f"{name}_density_max"] = rates.max().item()
        for q, point in zip(QUANTILES, points, strict=True):
            found[f"{name}_density_p{round(100 * q)}"] = point
        if name == "neuron":
            found["silent_neurons"] = int((rates == 0).sum())
    return found


def _survey(
    activation: Activation, gate: Tensor, up: Tensor | None, statistics: bool
) -> tuple[Survey, Counts]:
    """The first pass over pre-activations, which are consumed."""
    geometry, fp32_math = layout.geometry(gate.shape), rounds_to_float32(activation, gate)
    backend = backend_for(gate.device)
    _, survey = backend.activate(geometry, activation, gate, up, fp32_math, statistics)
    return survey, survey.counts(survey.totals.tolist())


def _keep(
    into: list[Kept], activation: Activation, gate: Tensor, up: Tensor | None, codec: str
) -> None:
    """As a compressed block's forward pass does."""
    survey, counts = _survey(activation, gate, up, codings.needs_statistics(codec))
    into.append(encode(activation, survey, counts, codings.choose(counts, codec), gate, up))


def _decompress(activation: Activation, kept: Kept, fp32_math: bool) -> None:
    """As the backward pass does: the hidden tensor again, then the pre-activations' gradients."""
    geometry = kept.support.geometry
    buffer = torch.empty(geometry.numel, dtype=kept.dtype, device=kept.support.offsets.device)
    backend = backend_for(buffer.device)
    backend.hidden(activation, kept, fp32_math, out=buffer)
    backend.gradient(activation, kept, buffer, fp32_math, True, activation.gated)


_warm: set[tuple[Any, ...]] = set()
"""What has run before, so that compilation is not timed."""


def _times(activation: Activation, gate: Tensor, up: Tensor | None, codec: str) -> dict[str, float]:
    fp32_math = rounds_to_float32(activation, gate)
    key = (activation.name, gate.dtype, gate.device, codec)
    runs = 1 if key in _warm else 2
    _warm.add(key)
    found: dict[str, float] = {}
    for _ in range(runs):
        inputs = gate.clone(memory_format=torch.contiguous_format), _clone(up)
        kept: list[Kept] = []
        compress = partial(_keep, kept, activation, *inputs, codec)
        found = {
            "activation_seconds": seconds(partial(activation.dense, gate, up), gate.device),
            "compress_seconds": seconds(compress, gate.device),
        }
        decompress = partial(_decompress, activation, kept[0], fp32_math)
        found["decompress_seconds"] = seconds(decompress, gate.device)
    return found


def _exponents(gate: Tensor, fires: Tensor) -> dict[int, int]:
    patterns = dtypes.to_patterns(gate)[fires.reshape(-1)].to(torch.int64)
    bits = dtypes.exponent_bits(gate.dtype)
    field = (patterns >> dtypes.mantissa_bits(gate.dtype)) & ((1 << bits) - 1)
    counts = torch.bincount(field, minlength=1).tolist()
    bias = (1 << (bits - 1)) - 1
    return {i - bias: n for i, n in enumerate(counts) if n}


def _positions(fires: Tensor) -> dict[str, Any]:
    shown = fires[:SHOWN_TOKENS, :SHOWN_NEURONS].cpu().numpy()
    tokens, neurons = shown.shape
    packed = base64.b64encode(np.packbits(shown).tobytes()).decode()
    return {"tokens": tokens, "neurons": neurons, "bits": packed}


def unpack_positions(row: dict[str, Any]) -> np.ndarray:
    """Positions as they are in results, as bool ``[tokens, neurons]``."""
    tokens, neurons = row["tokens"], row["neurons"]
    packed = np.frombuffer(base64.b64decode(row["bits"]), np.uint8)
    return np.unpackbits(packed, count=tokens * neurons).astype(bool).reshape(tokens, neurons)
