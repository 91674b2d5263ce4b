"""How fast arrays are compressed and decompressed, in bytes of the dense array per second."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bitsparse import codings, dtypes
from bitsparse.bench.general import ZSTD_LEVELS, GeneralCodec, general_codecs
from bitsparse.bench.inputs import bernoulli
from bitsparse.bench.lossless import compress_checked, general_checked
from bitsparse.bench.sizes import GENERAL, POLICY
from bitsparse.bench.timing import seconds as seconds_of
from bitsparse.tensor import compress

WARMUP = 2
"""Rounds that are not timed: kernels are compiled and memory is allocated."""

GENERAL_CAP = 16 * 2**20
"""Bytes that general-purpose compressors are given at most: the first rows of the array."""

COPY = "copy"


@dataclass(frozen=True)
class Timing:
    """Seconds over the repetitions."""

    median: float
    fastest: float
    slowest: float


@dataclass(frozen=True)
class Rate:
    """One method on one array."""

    density: float
    method: str
    kind: str
    device: str
    """Where it runs: "cpu" or "cuda"."""
    threads: int | None
    """On the CPU."""
    nbytes: int
    """Of the dense array that it was given."""
    bits_per_element: float
    compress: Timing
    decompress: Timing
    compress_gbps: float
    """1e9 bytes of the dense array per second, from the median."""
    decompress_gbps: float
    compress_per_copy: float | None
    """Rate as a share of that of a copy on the same device; None: the device is another."""
    decompress_per_copy: float | None


@dataclass(frozen=True)
class CopyRate:
    """A copy of the dense array on its device."""

    density: float
    nbytes: int
    copy: Timing
    gbps: float
    """1e9 bytes of the dense array per second; reads and writes are not counted separately."""


@dataclass(frozen=True)
class _Task:
    method: str
    kind: str
    device: torch.device
    threads: int | None
    nbytes: int
    elements: int
    compressed_bytes: int
    compress: Callable[[], object]
    decompress: Callable[[], object]


def measure_rates(
    shape: tuple[int, int],
    density: float,
    device: torch.device,
    repetitions: int,
    seed: int,
    zstd_levels: Sequence[int] = ZSTD_LEVELS,
) -> tuple[CopyRate, list[Rate]]:
    """Time every policy and the general-purpose compressors on one random array.

    Each repetition runs everything once, so that all figures come from the same moments.

    Raises:
        NotLossless: a method did not give back the bits.
    """
    x = bernoulli(shape, density, device, seed)
    target = torch.empty_like(x)
    tasks = [_policy_task(x, policy, None) for policy in codings.POLICIES]
    if device.type == "cpu" and torch.get_num_threads() > 1:
        tasks += [_policy_task(x, policy, 1) for policy in codings.POLICIES]
    first = x[: max(1, GENERAL_CAP // (x.nbytes // shape[0]))]
    matrix = dtypes.to_patterns(first).view(first.shape).cpu().numpy()
    codecs = [c for c in general_codecs(zstd_levels) if c.installed and not c.slow]
    tasks += [_general_task(matrix, codec) for codec in codecs]

    seconds: dict[tuple[int, str], list[float]] = {}
    for repetition in range(WARMUP + repetitions):
        found = {(-1, COPY): seconds_of(lambda: target.copy_(x), device)}
        for i, task in enumerate(tasks):
            with _threads(task.threads):
                found[i, "compress"] = seconds_of(task.compress, task.device)
                found[i, "decompress"] = seconds_of(task.decompress, task.device)
        if repetition >= WARMUP:
            for key, value in found.items():
                seconds.setdefault(key, []).append(value)

    timings = {key: Timing(statistics.median(s), min(s), max(s)) for key, s in seconds.items()}
    copy = timings[-1, COPY]
    copy_rate = CopyRate(density, x.nbytes, copy, x.nbytes / copy.median / 1e9)
    return copy_rate, [
        _rate(task, density, copy_rate, device, timings[i, "compress"], timings[i, "decompress"])
        for i, task in enumerate(tasks)
    ]


def _policy_task(x: Tensor, policy: str, threads: int | None) -> _Task:
    c = compress_checked(x, "random array", codec=policy)
    if x.device.type == "cpu" and threads is None:
        threads = torch.get_num_threads()
    return _Task(
        *(policy, POLICY, x.device, threads, x.nbytes, x.numel(), c.nbytes),
        compress=lambda: compress(x, codec=policy),
        decompress=c.to_dense,
    )


def _general_task(matrix: np.ndarray, codec: GeneralCodec) -> _Task:
    compressed = general_checked(codec, matrix, "random array")
    cpu = torch.device("cpu")
    return _Task(
        *(codec.name, GENERAL, cpu, 1, matrix.nbytes, matrix.size, len(compressed)),
        compress=lambda: codec.compress(matrix),
        decompress=lambda: codec.decompress(compressed, matrix.shape, matrix.dtype),
    )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _rate(
    task: _Task,
    density: float,
    copy: CopyRate,
    device: torch.device,
    compress: Timing,
    decompress: Timing,
) -> Rate:
    compress_gbps, decompress_gbps = (
        task.nbytes / timing.median / 1e9 for timing in (compress, decompress)
    )
    comparable = task.device.type == device.type
    return Rate(
        density=density,
        method=task.method,
        kind=task.kind,
        device=task.device.type,
        threads=task.threads,
        nbytes=task.nbytes,
        bits_per_element=8 * task.compressed_bytes / task.elements,
        compress=compress,
        decompress=decompress,
        compress_gbps=compress_gbps,
        decompress_gbps=decompress_gbps,
        compress_per_copy=compress_gbps / copy.gbps if comparable else None,
        decompress_per_copy=decompress_gbps / copy.gbps if comparable else None,
    )
