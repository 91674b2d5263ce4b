"""Oracles and inputs for the tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitsparse import dtypes


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Every bit equal, the payload and sign of NaN included."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} != {expected.dtype}"
    a, e = dtypes.to_patterns(actual), dtypes.to_patterns(expected)
    assert torch.equal(a, e), f"{what}: {int((a != e).sum())} of {a.numel()} patterns differ"


def assert_same_values(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Every bit equal, but any NaN equals any NaN: IEEE 754 leaves computed payloads open."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} != {expected.dtype}"
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(actual), nan), f"{what}: NaN in other places"
    zero = torch.zeros((), dtype=actual.dtype, device=actual.device)
    assert_same_bits(torch.where(nan, zero, actual), torch.where(nan, zero, expected), what)


def from_bits(patterns: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers as the bit patterns of ``dtype``."""
    bits = patterns.to(torch.int64) & ((1 << 8 * dtype.itemsize) - 1)
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    if wide != torch.uint8:
        half = 1 << (8 * dtype.itemsize - 1)
        bits = torch.where(bits >= half, bits - 2 * half, bits)
    return bits.to(wide).view(dtype)


def random_sparse(
    shape: tuple[int, ...], density: float, dtype: torch.dtype, seed: int = 0, signed: bool = False
) -> Tensor:
    """Random values of ``dtype``, each nonzero with probability ``density``."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if not signed:
        values = values.abs()
    return torch.where(torch.rand(shape, generator=generator) < density, values, 0).to(dtype)


def assert_refused(done, message: str) -> None:
    """A command told of a malformed or forbidden option; ``done``: the result of its runner."""
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


COMPILE_TARGETS = {
    "sm_90": ("cuda", 90, 32),
    "sm_80": ("cuda", 80, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""What Triton kernels are compiled for: arguments of ``GPUTarget``."""


def assert_compiles(script: str, target: str, cache: Path) -> None:
    """Run a test file as a script that compiles its kernels for ``target``, interpreter off."""
    pytest.importorskip("triton", reason="needs Triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)  # compile for real
    result = subprocess.run(
        [sys.executable, script, target], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
