"""Lossless compressed activations for training ReLU-family feed-forward networks.

After "BitSparse: Compact Activation Storage for ReLU Feed-Forward Networks" (2026).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import bitsparse.nn as nn
    from bitsparse.conversion import ConversionReport, convert, revert
    from bitsparse.io import TensorFile, TensorInfo, load, save
    from bitsparse.memory import memory_stats, release_workspace
    from bitsparse.ops.capture import graph_overflows, graph_warmup
    from bitsparse.ops.feed_forward import ffn
    from bitsparse.profiling import profile
    from bitsparse.saved_tensors import compressed_saved_tensors
    from bitsparse.tensor import BitSparseTensor, compress, decompress

    __version__: str

_HOMES = {
    "BitSparseTensor": "bitsparse.tensor",
    "ConversionReport": "bitsparse.conversion",
    "TensorFile": "bitsparse.io",
    "TensorInfo": "bitsparse.io",
    "compress": "bitsparse.tensor",
    "compressed_saved_tensors": "bitsparse.saved_tensors",
    "convert": "bitsparse.conversion",
    "decompress": "bitsparse.tensor",
    "ffn": "bitsparse.ops.feed_forward",
    "graph_overflows": "bitsparse.ops.capture",
    "graph_warmup": "bitsparse.ops.capture",
    "load": "bitsparse.io",
    "memory_stats": "bitsparse.memory",
    "profile": "bitsparse.profiling",
    "release_workspace": "bitsparse.memory",
    "revert": "bitsparse.conversion",
    "save": "bitsparse.io",
}

__all__ = [
    "BitSparseTensor",
    "ConversionReport",
    "TensorFile",
    "TensorInfo",
    "__version__",
    "compress",
    "compressed_saved_tensors",
    "convert",
    "decompress",
    "ffn",
    "graph_overflows",
    "graph_warmup",
    "load",
    "memory_stats",
    "nn",
    "profile",
    "release_workspace",
    "revert",
    "save",
]


def __getattr__(name: str) -> Any:
    # Imported at first use: the command's usage errors do not wait for PyTorch.
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value: Any = version("bitsparse")
        except PackageNotFoundError:  # imported from a source tree that is not installed
            value = "0+unknown"
    elif name == "nn":
        value = import_module("bitsparse.nn")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'bitsparse' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
