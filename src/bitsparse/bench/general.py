"""General-purpose compressors for comparison: zstd and LZ4, on the CPU, one thread.

Each of them is given the bytes of a matrix in several orders: as they are (row by row); *split*,
the lowest byte of every element, then the next one of every element, which brings signs and
exponents together; *transposed*, column by column, which brings the tokens of a neuron together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

ZSTD_LEVELS = (1, 3, 19)
LARGEST_LEVEL = 22
PACKAGES = ("zstandard", "lz4")
ORDERS = ("", "split", "transposed")
_SLOW_LEVEL = 10


@dataclass(frozen=True)
class GeneralCodec:
    """A compressor of bytes, and an order of the bytes."""

    name: str
    package: str
    order: str
    """One of ``ORDERS``."""
    slow: bool
    """Whether its rate is left out: it is far too slow for training."""
    _compress: Callable[[Any], bytes]
    _decompress: Callable[[bytes, int], bytes]

    @property
    def installed(self) -> bool:
        return package_version(self.package) is not None

    def compress(self, matrix: np.ndarray) -> bytes:
        """``matrix``: ``[rows, cols]``, contiguous."""
        if self.order == "transposed":
            matrix = np.ascontiguousarray(matrix.T)
        data = matrix.reshape(-1).view(np.uint8)
        if self.order == "split":
            data = np.concatenate([data[i :: matrix.itemsize] for i in range(matrix.itemsize)])
        return self._compress(data)

    def decompress(self, compressed: bytes, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The inverse of :meth:`compress` for matrices of this shape and dtype."""
        rows, cols = shape
        data = np.frombuffer(
            self._decompress(compressed, rows * cols * dtype.itemsize), dtype=np.uint8
        )
        if self.order == "split":
            planes, data = data.reshape(dtype.itemsize, -1), np.empty_like(data)
            for i, plane in enumerate(planes):
                data[i :: dtype.itemsize] = plane
        if self.order == "transposed":
            return np.ascontiguousarray(data.view(dtype).reshape(cols, rows).T)
        return data.view(dtype).reshape(rows, cols)


@cache
def package_version(name: str) -> str | None:
    """The version of an installed package, else None."""
    try:
        version = import_module(name).__version__
    except ImportError:
        return None
    return str(version)


def general_codecs(zstd_levels: Sequence[int] = ZSTD_LEVELS) -> list[GeneralCodec]:
    """zstd at each level, and LZ4, in every order; whether or not they are installed."""
    return [
        codec
        for order in ORDERS
        for codec in (*(_zstd(level, order) for level in zstd_levels), _lz4(order))
    ]


def _zstd(level: int, order: str) -> GeneralCodec:
    def compress(data: Any) -> bytes:
        package = import_module("zstandard")
        result: bytes = package.ZstdCompressor(level=level).compress(data)
        return result

    def decompress(compressed: bytes, size: int) -> bytes:
        package = import_module("zstandard")
        result: bytes = package.ZstdDecompressor().decompress(compressed, max_output_size=size)
        return result

    name = f"zstd-{level} {order}".strip()
    return GeneralCodec(name, "zstandard", order, level >= _SLOW_LEVEL, compress, decompress)


def _lz4(order: str) -> GeneralCodec:
    def compress(data: Any) -> bytes:
        result: bytes = import_module("lz4.block").compress(data, store_size=False)
        return result

    def decompress(compressed: bytes, size: int) -> bytes:
        result: bytes = import_module("lz4.block").decompress(compressed, uncompressed_size=size)
        return result

    return GeneralCodec(f"lz4 {order}".strip(), "lz4", order, False, compress, decompress)
