"""NVIDIA's GPU compressors (the package ``nvidia-nvcomp-cu12`` or ``-cu13``), for comparison.

Optional: nothing here is used where the package is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bitsparse import dtypes

ALGORITHMS = ("LZ4", "ANS", "Bitcomp")


def _package() -> Any | None:
    try:
        return import_module("nvidia.nvcomp")
    except ImportError:
        return None


def algorithms() -> tuple[str, ...]:
    """What can be compared; nothing where the package is not installed."""
    return () if _package() is None else ALGORITHMS


class NvcompCodec:
    """One algorithm on the bytes of one tensor; checked to give them back.

    Raises:
        ValueError: it does not. Whatever the package raises comes as it is.
    """

    def __init__(self, algorithm: str, x: Tensor) -> None:
        package = _package()
        assert package is not None
        self._codec = package.Codec(
            algorithm=algorithm, cuda_stream=torch.cuda.current_stream(x.device).cuda_stream
        )
        patterns = dtypes.to_patterns(x).view(torch.uint8)
        self._dense = package.as_array(patterns)
        torch.cuda.synchronize()
        self._compressed = self.compress()
        self.nbytes = int(self._compressed.buffer_size)
        restored = torch.as_tensor(self.decompress(), device=x.device).view(torch.uint8)
        if not torch.equal(restored.view(-1), patterns):
            raise ValueError(f"{algorithm} did not give back the bits")

    def compress(self) -> Any:
        """The compressed array of the package; the device may still be at work."""
        return self._codec.encode(self._dense)

    def decompress(self) -> Any:
        """The dense array of the package."""
        return self._codec.decode(self._compressed)
