"""The entropy line: what sizes are compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitsparse import dtypes


def entropy_line(x: Tensor) -> float:
    """Bits per element of ``x`` (its last dimension: neurons) under a simple independent model.

    ``mean over neurons of H(p) + density * (H(sign and exponent) + mantissa bits)``, where ``p`` is
    the share of tokens at which a neuron is nonzero: every element fires independently of its
    neighbours at the rate of its neuron, the exponent (with the sign) is coded at its zero-order
    entropy, and the mantissa is stored as it is. Not a lower bound: codings that use the
    correlation between neighbouring tokens can get below the first term.
    """
    patterns = dtypes.to_patterns(x).view(-1, x.shape[-1])
    nonzero = patterns != 0
    density = nonzero.mean(dtype=torch.float64).item()
    rates = nonzero.mean(0, dtype=torch.float64)
    positions = (_bits(rates) + _bits(1 - rates)).mean().item()
    mantissa = dtypes.mantissa_bits(x.dtype)
    values = patterns[nonzero].to(torch.int64) & ((1 << dtypes.bit_width(x.dtype)) - 1)
    counts = torch.bincount(values >> mantissa).to(torch.float64)
    exponent = _bits(counts / max(values.numel(), 1)).sum().item()
    return positions + density * (exponent + mantissa)


def _bits(p: Tensor) -> Tensor:
    """``-p * log2(p)``; 0 for 0."""
    nats: Tensor = torch.special.entr(p)
    return nats / math.log(2)
