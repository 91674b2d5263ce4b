"""The CUDA backend: kernels in CUDA C++ (``kernels.cu``) where they apply, Triton's elsewhere.

They apply to 16-bit dtypes whose columns are a multiple of 64. NVRTC compiles them at first use for
the device at hand, by way of the ``cuda-core`` package: no toolkit or compiler is needed.
"""

from __future__ import annotations

import os
import threading
import warnings
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from cuda.core import Device, LaunchConfig, ObjectCode, Program, ProgramOptions, launch
from cuda.core import Stream as CudaStream
from cuda.core.utils import FileStreamProgramCache, make_program_cache_key
from torch import Tensor

from bitsparse import dtypes, layout
from bitsparse.activations import Activation
from bitsparse.backends.base import (
    NNZ,
    Kept,
    Slots,
    Support,
    Survey,
    allocate_survey,
    gradient_buffers,
)
from bitsparse.backends.triton import (
    TritonBackend,
    on_device,
    rounds_late,
)
from bitsparse.codings import Counts, Mask, Stream, ValueCoding
from bitsparse.layout import Geometry

_OLDEST = (8, 0)  # compute capability: warp-wide reductions
_WARPS = 2  # tiles a block, as in kernels.cu
_MOST_SLOTS = 1024  # of a tile, likewise
_SCAN_THREADS = 512  # likewise
_SCAN_TABLES = 7  # likewise
_CACHE_BYTES = 256 * 2**20

_lock = threading.Lock()
_thread = threading.local()


class CudaBackend(TritonBackend):
    """See :class:`bitsparse.backends.base.Backend`."""

    name = "cuda"

    def survey(
        self, geometry: Geometry, patterns: Tensor, dtype: torch.dtype, statistics: bool
    ) -> Survey:
        if not _applies(geometry, dtype, patterns):
            return super().survey(geometry, patterns, dtype, statistics)
        survey, counts = allocate_survey(geometry, dtype, patterns.device, 1, 1, statistics, True)
        name = _name("survey", statistics, dtypes.mantissa_bits(dtype))
        with on_device(patterns.device):
            _run(name, geometry, patterns, survey.words, counts, *_exponents(survey, 1))
            _scan(counts, survey)
        return survey

    def activate(
        self,
        geometry: Geometry,
        activation: Activation,
        gate: Tensor,
        up: Tensor | None,
        fp32_math: bool,
        statistics: bool,
    ) -> tuple[Tensor, Survey]:
        dtype = gate.dtype
        both = [t for t in (gate, up) if t is not None]
        if not _applies(geometry, dtype, *both):
            return super().activate(geometry, activation, gate, up, fp32_math, statistics)
        survey, counts = allocate_survey(
            geometry, dtype, gate.device, len(both), 1 + activation.relu_up, statistics, True
        )
        if activation.plain:
            # `gate` becomes the hidden tensor.
            hidden, capacity = gate, _MOST_SLOTS
            slots = gate.new_empty(geometry.tiles * capacity)
            survey.slots = Slots([slots], capacity)
        else:
            hidden, capacity, slots = torch.empty_like(gate), 0, None
            survey.slots = Slots(both, capacity)
        name = _name(
            "activate",
            dtypes.mantissa_bits(dtype),
            activation.gated,
            activation.squared,
            activation.relu_up,
            rounds_late(activation, dtype, fp32_math),
            statistics,
        )
        with on_device(gate.device):
            _run(
                name,
                geometry,
                gate,
                up,
                hidden,
                survey.words,
                survey.up_words,
                counts,
                *_exponents(survey, 2),
                slots,
                capacity,
            )
            _scan(counts, survey)
        return hidden, survey

    def _bucket(self, flat: Tensor, mask: Mask, geometry: Geometry) -> None:
        if not _applies(geometry, torch.bfloat16, flat):
            super()._bucket(flat, mask, geometry)
            return
        with on_device(flat.device):
            _run("bucket", geometry, flat, *mask.tensors)

    def encode_values(
        self,
        coding: ValueCoding,
        survey: Survey,
        counts: Counts,
        source: Tensor,
        stream: int,
        relu: bool,
    ) -> Stream:
        geometry, dtype, nnz = survey.geometry, survey.dtype, counts.nnz
        if not _applies(geometry, dtype, source) or nnz == 0:
            return super().encode_values(coding, survey, counts, source, stream, relu)
        width, device = coding.width(dtype), source.device
        if width == dtypes.bit_width(dtype):
            codes = torch.empty(nnz, dtype=dtypes.pattern_dtype(dtype), device=device)
        else:  # words that two tiles share are written by both
            words = layout.packed_words(nnz, width)
            codes = torch.zeros(words, dtype=torch.int32, device=device)
        parts = survey.exponent_buffers(coding, counts, stream)
        kind = width, coding.field, dtypes.mantissa_bits(dtype)
        to = survey.tables[NNZ], codes, *parts
        slots = survey.slots
        with on_device(device):
            if slots is not None:
                values = slots.streams[stream]
                _run(_name("pack", *kind), geometry, values, slots.capacity, *to)
            if slots is None or slots.capacity:  # all tiles, or those with more than their slots
                least = 1 if slots is None else slots.capacity + 1
                up_words = survey.words if survey.up_words is None else survey.up_words
                name = _name("encode", *kind, relu)
                _run(name, geometry, source, survey.words, up_words, least, *to)
        return Stream(coding, codes, *parts)

    def _scatter(
        self, kept: Kept, out: Tensor, kind: int, gated: bool, squared: bool, late: bool
    ) -> None:
        # Triton's kernel was the faster one for crowded plain values when they were last compared
        # (H200, density 0.5); the kernel here has become faster since.
        simple = not (gated or squared) and kept.gate is not None and not kept.gate.coding.field
        crowded = simple and kept.support.nnz > kept.support.geometry.numel // 4
        if crowded or not _applies(kept.support.geometry, kept.dtype, out, *_words(kept.support)):
            super()._scatter(kept, out, kind, gated, squared, late)
            return
        two = kept.support.up_mask is not None
        with on_device(out.device):
            _run(
                _name("decode", *_codings(kept), gated, squared, two, late),
                kept.support.geometry,
                *_pointers(kept),
                out,
            )

    def gradient(
        self,
        activation: Activation,
        kept: Kept,
        grad_hidden: Tensor,
        fp32_math: bool,
        need_gate: bool,
        need_up: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        need_up = need_up and activation.gated
        support = kept.support
        applies = _applies(support.geometry, kept.dtype, grad_hidden, *_words(support))
        if not applies or not (need_gate or need_up):
            return super().gradient(activation, kept, grad_hidden, fp32_math, need_gate, need_up)
        grad_gate, grad_up = gradient_buffers(grad_hidden, need_gate, need_up)
        name = _name(
            "gradient",
            *_codings(kept),
            activation.gated,
            activation.squared,
            support.up_mask is not None,
            fp32_math,
            need_gate,
            need_up,
        )
        with on_device(grad_hidden.device):
            _run(name, support.geometry, grad_hidden, grad_gate, grad_up, *_pointers(kept))
        return grad_gate, grad_up


BACKEND = CudaBackend()


def _name(kernel: str, *arguments: bool | int | str) -> str:
    """The kernel with these template arguments."""
    return f"{kernel}<{', '.join(str(a).lower() for a in arguments)}>"


def _codings(kept: Kept) -> list[int | str]:
    """Template arguments from ``SUPPORT`` to ``UP_FIELD``; without values: any."""
    found: list[int | str] = [kept.support.mask.coding.name, dtypes.mantissa_bits(kept.dtype)]
    for stream in (kept.gate, kept.up or kept.gate):
        found += (
            [0, 0] if stream is None else [stream.coding.width(kept.dtype), stream.coding.field]
        )
    return found


def _pointers(kept: Kept) -> list[Tensor | None]:
    """The kernels' arguments from ``mask`` to ``up_escape_offsets``."""
    support = kept.support
    found = [*support.mask.tensors, *(support.up_mask or support.mask).tensors, support.offsets]
    for stream in (kept.gate, kept.up or kept.gate):
        found += [None] * 4 if stream is None else stream.tensors
    return found


def _words(support: Support) -> list[Tensor]:
    masks = [support.mask, support.up_mask]
    return [m.words for m in masks if m is not None and m.words is not None]


def _applies(geometry: Geometry, dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether the kernels can be used: they read and write ``tensors`` 16 bytes at a time."""
    return (
        dtype.itemsize == 2
        and geometry.height == layout.GROUP
        and geometry.cols % layout.GROUP == 0
        and all(t.data_ptr() % 16 == 0 for t in tensors)
        and _works(tensors[0].device.index or 0)
    )


@cache
def _works(device: int) -> bool:
    """Whether kernels can be compiled for the device."""
    capability = _capability(device)
    if torch.version.cuda is None or capability < _OLDEST:
        return False
    try:
        compile_kernel("survey<true, 7>", capability)
    except Exception as error:  # whatever a broken installation brings: Triton still works
        warnings.warn(
            f"bitsparse: kernels in CUDA C++ cannot be compiled ({error}); using Triton's",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _exponents(survey: Survey, count: int) -> list[Tensor | None]:
    """Those of ``count`` streams, as far as there are any."""
    found: list[Tensor | None] = [] if survey.exponents is None else [*survey.exponents]
    return [*found, *[None] * (count - len(found))]


def _run(name: str, geometry: Geometry, *arguments: Tensor | int | None) -> None:
    """Launch a kernel over the tiles, on the current device and stream."""
    grid = layout.ceil_div(geometry.tiles, _WARPS)
    _launch(name, grid, 32 * _WARPS, *arguments, geometry.rows, geometry.cols, geometry.tiles)


def _scan(counts: Tensor, survey: Survey) -> None:
    """Offset tables and totals from the counts, int32 ``[rows, tiles]``."""
    rows, tiles = counts.shape
    words = survey.tables[NNZ].numel()
    grid = layout.ceil_div(words, layout.TABLE_WORDS * _SCAN_THREADS), rows
    tables = [*survey.tables, *[None] * (_SCAN_TABLES - rows)]
    _launch("scan", grid, _SCAN_THREADS, counts, *tables, survey.totals, tiles, words)


def _launch(
    name: str, grid: int | tuple[int, int], block: int, *arguments: Tensor | int | None
) -> None:
    device = torch.cuda.current_device()
    if getattr(_thread, "device", None) != device:
        # PyTorch may not have made a context current in this thread yet (autograd has its own).
        Device(device).set_current()
        _thread.device = device
    # Every microsecond here is one that the device may wait for; `torch.cuda.current_stream` takes
    # several.
    launch(
        _stream(torch._C._cuda_getCurrentRawStream(device)),
        _config(grid, block),
        _kernel(name, _capability(device)),
        *[a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments],
    )


@lru_cache(maxsize=1024)
def _config(grid: int | tuple[int, int], block: int) -> LaunchConfig:
    return LaunchConfig(grid=grid, block=block)


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _stream(handle: int) -> Any:
    return CudaStream.from_handle(handle)


_kernels: dict[tuple[str, tuple[int, int]], Any] = {}


def _kernel(name: str, capability: tuple[int, int]) -> Any:
    key = (name, capability)
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = compile_kernel(name, capability).get_kernel(name)
    return found


@cache
def _source() -> str:
    return files("bitsparse.backends").joinpath("kernels.cu").read_text()


def compile_kernel(name: str, capability: tuple[int, int]) -> Any:
    """The object code of one kernel, say ``"survey<true, 7>"``, for a compute capability.

    Compiled code is kept on disk, see :func:`cache_directory`. Its key holds the source, the
    options and the compiler's version.
    """
    options = ProgramOptions(std="c++17", arch="sm_{}{}".format(*capability))
    try:
        with FileStreamProgramCache(cache_directory(), max_size_bytes=_CACHE_BYTES) as cache:
            return _compile(name, options, cache)
    except OSError:  # a directory that cannot be written, a full disk
        return _compile(name, options, {})


def _compile(name: str, options: ProgramOptions, cache: Any) -> Any:
    # Not `Program.compile(cache=...)`, which does not keep the linker's name of the kernel.
    keys = [
        make_program_cache_key(
            code=_source(),
            code_type="c++",
            options=options,
            target_type="cubin",
            name_expressions=(name,),
            extra_digest=part,
        )
        for part in (b"code", b"name")
    ]
    code, linked = (cache.get(key) for key in keys)
    if code is None or linked is None:
        made = Program(_source(), "c++", options).compile("cubin", name_expressions=(name,))
        cache[keys[0]], cache[keys[1]] = made.code, _bytes(made.symbol_mapping[name])
        return made
    return ObjectCode.from_cubin(code, symbol_mapping={name: linked})


def _bytes(name: str | bytes) -> bytes:
    return name if isinstance(name, bytes) else name.encode()


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``$BITSPARSE_CACHE_DIR``, or ``bitsparse`` in the user's
    cache directory."""
    own = os.environ.get("BITSPARSE_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitsparse"
