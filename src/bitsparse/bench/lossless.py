"""Nothing is reported about a method before it has given back every bit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bitsparse import dtypes
from bitsparse.bench.general import GeneralCodec
from bitsparse.tensor import BitSparseTensor, compress


class NotLossless(Exception):
    """A method did not give back the bits of what it was given."""


def compress_checked(
    x: Tensor, what: str, support: str = "auto", values: str = "auto", codec: str = "balanced"
) -> BitSparseTensor:
    """:func:`bitsparse.compress`, checked.

    Raises:
        NotLossless: naming ``what`` was compressed.
    """
    c = compress(x, support, values, codec=codec)
    restored = c.to_dense()
    same = restored.shape == x.shape and restored.dtype == x.dtype
    if not same or not torch.equal(dtypes.to_patterns(restored), dtypes.to_patterns(x)):
        raise NotLossless(f"{what}, {c.support} + {c.values} ({codec})")
    return c


def general_checked(codec: GeneralCodec, matrix: np.ndarray, what: str) -> bytes:
    """``codec`` on the bytes of ``matrix`` ``[rows, cols]``, checked.

    Raises:
        NotLossless: naming ``what`` was compressed.
    """
    compressed = codec.compress(matrix)
    restored = codec.decompress(compressed, matrix.shape, matrix.dtype)
    if restored.tobytes() != matrix.tobytes():
        raise NotLossless(f"{what}, {codec.name}")
    return compressed
