"""Lossless compressed activations for training ReLU-family feed-forward networks.

After "BitSparse: Compact Activation Storage for ReLU Feed-Forward Networks" (2026).
"""

from importlib.metadata import PackageNotFoundError, version

import bitsparse.nn as nn
from bitsparse.memory import memory_stats, release_workspace
from bitsparse.ops.feed_forward import ffn
from bitsparse.tensor import BitSparseTensor, compress, decompress

try:
    __version__ = version("bitsparse")
except PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "BitSparseTensor",
    "__version__",
    "compress",
    "decompress",
    "ffn",
    "memory_stats",
    "nn",
    "release_workspace",
]
