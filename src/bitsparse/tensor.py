"""Lossless compression of any tensor: :func:`compress` and :class:`BitSparseTensor`."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitsparse import codings, dtypes, layout, memory
from bitsparse.backends import Support, backend_for
from bitsparse.codings import Mask, Stream, full, tables, words

_MAX_NUMEL = 2**60
_CHECKED_TILES = 256
_MAX_DIMS = 64  # PyTorch's own limit


class BitSparseTensor:
    """A tensor kept as the positions and the bit patterns of its nonzeros. Immutable.

    Made by :func:`compress`; :meth:`to_dense` gives back every bit. ``shape``, ``dtype`` and
    ``device`` are those of the dense tensor. Can be copied, pickled and moved between devices.
    """

    __slots__ = ("__weakref__", "_buffers", "dtype", "nnz", "shape", "support", "values")

    shape: torch.Size
    dtype: torch.dtype
    nnz: int
    """Elements whose bit pattern is not zero (-0.0 counts, +0.0 does not)."""
    support: str
    """Coding of the positions; "empty" where no element is nonzero."""
    values: str
    """Coding of the values; "dense" where every element is stored at full width."""

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        nnz: int,
        support: str,
        values: str,
        buffers: dict[str, Tensor],
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.nnz = nnz
        self.support = support
        self.values = values
        self._buffers = buffers
        memory.track_live(list(buffers.values()), self.numel() * dtype.itemsize)

    @classmethod
    def from_buffers(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        nnz: int,
        support: str,
        values: str,
        buffers: dict[str, Tensor],
    ) -> BitSparseTensor:
        """Build from parts that may come from anywhere, checking all of them first.

        Raises:
            ValueError: naming what is not as the format says.
        """
        check_shape(shape)
        shape = torch.Size(shape)
        _check_parts(shape, dtype, nnz, support, values, buffers)
        return cls(shape, dtype, nnz, support, values, buffers)

    @property
    def device(self) -> torch.device:
        return next(iter(self._buffers.values())).device

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The stored 1-d tensors by name (see the format's description); not to be changed."""
        return dict(self._buffers)

    def numel(self) -> int:
        """Elements of the dense tensor."""
        return self.shape.numel()

    @property
    def density(self) -> float:
        """``nnz / numel``; 0.0 for a tensor without elements."""
        return self.nnz / max(self.numel(), 1)

    @property
    def nbytes(self) -> int:
        """Every byte of tensor storage kept alive: masks, offsets, values, padding."""
        return memory.storage_bytes(list(self._buffers.values()))

    @property
    def bits_per_element(self) -> float:
        """``8 * nbytes / numel``; 0.0 for a tensor without elements."""
        return 8 * self.nbytes / max(self.numel(), 1)

    def to_dense(self) -> Tensor:
        """The dense tensor: contiguous, new memory, every bit as it was."""
        if self.values == "dense":
            patterns = self._buffers["values"].clone()
        elif self.nnz == 0:
            pattern = dtypes.pattern_dtype(self.dtype)
            patterns = self._buffers["values"].new_zeros(self.numel(), dtype=pattern)
        else:
            support, stream = _parts(self.shape, self.nnz, self.support, self.values, self._buffers)
            patterns = backend_for(self.device).scatter(support, stream, self.dtype)
        return dtypes.from_patterns(patterns, self.dtype, self.shape)

    def to(self, device: torch.device | str) -> BitSparseTensor:
        """A copy on ``device``, or the tensor itself if it is there already.

        Raises:
            TypeError: ``device`` is something else, a dtype for instance.
        """
        if not isinstance(device, (str, torch.device)):
            raise TypeError(f"device: got {device!r}, allowed: str, torch.device")
        buffers = {name: b.to(device) for name, b in self._buffers.items()}
        if all(buffers[name] is b for name, b in self._buffers.items()):
            return self
        return BitSparseTensor(self.shape, self.dtype, self.nnz, self.support, self.values, buffers)

    def __deepcopy__(self, memo: dict[int, Any]) -> BitSparseTensor:
        return BitSparseTensor(
            self.shape,
            self.dtype,
            self.nnz,
            self.support,
            self.values,
            copy.deepcopy(self._buffers, memo),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling goes through the checks: a damaged pickle is refused, not decoded.
        return BitSparseTensor.from_buffers, (
            tuple(self.shape),
            self.dtype,
            self.nnz,
            self.support,
            self.values,
            self._buffers,
        )

    def __repr__(self) -> str:
        return (
            f"BitSparseTensor(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}', nnz={self.nnz}, density={self.density:.4f}, "
            f"support={self.support!r}, values={self.values!r}, nbytes={self.nbytes}, "
            f"bits_per_element={self.bits_per_element:.3f})"
        )


def compress(
    x: Tensor, support: str = "auto", values: str = "auto", *, codec: str = "balanced"
) -> BitSparseTensor:
    """Compress a tensor without losing a bit.

    Args:
        x: any strided tensor of float32, float16, bfloat16 or float8, on any device, of any shape,
            strides and density. Not changed; no gradient flows through. The last dimension should
            be the neurons: the format makes use of neighbouring tokens firing the same ones.
        support: coding of the positions: "auto"; "flat" (one bit an element); "bucketed" (only
            nonempty groups of eight tokens); "full" (possible where every element is nonzero).
        values: coding of the values: "auto"; "raw" (full width); "unsigned" (without the sign bit,
            possible where none is set); "exponent" (mantissas whole, exponents in 3 or 4 bits:
            "exponent4" or "exponent3", or, where a sign occurs, "signed_exponent4" or
            "signed_exponent3", as the codec prefers); "dense" (every element, full width).
        codec: what "auto" prefers: "small" the smallest codings; "balanced" the fastest of those
            within 5 % of the smallest; "fast" the smallest of the flat, raw and unsigned ones.
            Whatever the codec, a tensor that nothing makes smaller is stored dense.

    Returns:
        The compressed tensor, on the device of ``x``.

    Raises:
        TypeError: ``x`` is not a tensor of a supported dtype and layout.
        ValueError: an unknown coding, or one that cannot hold the values of ``x``.
    """
    _check_compressible(x)
    codings.check_names(codec, support, values)
    if values == "dense" and support not in ("auto", "full"):
        raise ValueError(
            f"values: got 'dense' with support={support!r}, "
            "'dense' stores every position: allowed with support='auto'"
        )
    patterns = dtypes.to_patterns(x)
    if values == "dense" or patterns.numel() == 0:
        return _dense(x, patterns, int(torch.count_nonzero(patterns)))

    backend = backend_for(x.device)
    survey = backend.survey(
        layout.geometry(x.shape),
        patterns,
        x.dtype,
        codings.needs_statistics(codec, support, values),
    )
    counts = survey.counts(survey.totals.tolist())
    if counts.nnz == 0 and support == "auto" and values == "auto":
        none = torch.empty(0, dtype=patterns.dtype, device=patterns.device)
        return BitSparseTensor(x.shape, x.dtype, 0, "empty", "raw", {"values": none})
    choice = codings.choose(counts, codec, support, values)
    if support == values == "auto" and choice.nbytes >= x.numel() * x.element_size():
        return _dense(x, patterns, counts.nnz)
    (value_coding,) = choice.values
    # The values take the device longest: what else there is to prepare hides behind them.
    stream = backend.encode_values(value_coding, survey, counts, patterns, 0, relu=False)
    found = backend.encode_support(choice.support, survey, counts)
    return BitSparseTensor(
        x.shape,
        x.dtype,
        counts.nnz,
        choice.support.name,
        value_coding.name,
        _buffers(found, stream),
    )


def decompress(c: BitSparseTensor) -> Tensor:
    """The dense tensor of ``c``, every bit as it was: :meth:`BitSparseTensor.to_dense`."""
    if not isinstance(c, BitSparseTensor):
        raise TypeError(f"c: got {type(c).__name__}, allowed: BitSparseTensor")
    return c.to_dense()


def check_shape(shape: Sequence[int]) -> None:
    """Raise ValueError unless these are the sizes of a tensor whose bytes 64 bits can count."""
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"shape: got {len(shape)} dimensions, allowed: at most {_MAX_DIMS}")
    if any(type(size) is not int or not 0 <= size <= _MAX_NUMEL for size in shape):
        raise ValueError(
            f"shape: got {tuple(shape)}, allowed: whole numbers from 0 to {_MAX_NUMEL}"
        )
    if math.prod(size or 1 for size in shape) > _MAX_NUMEL:
        raise ValueError(f"shape: got {tuple(shape)}, allowed: at most {_MAX_NUMEL} elements")


def _dense(x: Tensor, patterns: Tensor, nnz: int) -> BitSparseTensor:
    # `patterns` may be a view of x: the copy makes the result independent of it.
    stored = patterns.clone() if patterns.data_ptr() == x.data_ptr() else patterns
    return BitSparseTensor(x.shape, x.dtype, nnz, "full", "dense", {"values": stored})


def _buffers(support: Support, stream: Stream) -> dict[str, Tensor]:
    """The buffers by name; the inverse of :func:`_parts`."""
    flat = support.mask.coding.name == "flat"
    named = {
        "mask" if flat else "groups": support.mask.words,
        "buckets": support.mask.buckets,
        "bucket_offsets": support.mask.bucket_offsets,
        "offsets": support.offsets,
        "values": stream.values,
        "exponents": stream.exponents,
        "escapes": stream.escapes,
        "escape_offsets": stream.escape_offsets,
    }
    return {name: buffer for name, buffer in named.items() if buffer is not None}


_SUPPORT_BUFFERS = {
    "flat": ("mask", "offsets"),
    "bucketed": ("groups", "buckets", "bucket_offsets", "offsets"),
    "full": ("offsets",),
}


def buffer_names(support: str, values: str) -> set[str]:
    """The buffers of a tensor that is coded so; any known codings may be given."""
    if support == "empty" or values == "dense":
        return {"values"}
    names = {*_SUPPORT_BUFFERS[support], "values"}
    if codings.value_coding(values).field:
        names |= {"exponents", "escapes", "escape_offsets"}
    return names


def _parts(
    shape: torch.Size, nnz: int, support: str, values: str, buffers: dict[str, Tensor]
) -> tuple[Support, Stream]:
    mask = Mask(
        codings.support_coding(support),
        buffers.get("mask", buffers.get("groups")),
        buffers.get("buckets"),
        buffers.get("bucket_offsets"),
    )
    stream = Stream(
        codings.value_coding(values),
        buffers["values"],
        buffers.get("exponents"),
        buffers.get("escapes"),
        buffers.get("escape_offsets"),
    )
    return Support(layout.geometry(shape), nnz, buffers["offsets"], mask), stream


def _check_compressible(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, allowed: torch.Tensor")
    if x.layout != torch.strided or x.is_quantized:
        raise TypeError(f"x: got layout {x.layout}, allowed: torch.strided (a dense tensor)")
    if x.dtype not in dtypes.SUPPORTED_DTYPES:
        raise TypeError(f"x: got dtype {x.dtype}, allowed: {dtypes.names(dtypes.SUPPORTED_DTYPES)}")
    if x.device.type == "meta":
        raise TypeError("x: got a meta tensor, which has no values; allowed: cpu, cuda")


def _check_parts(
    shape: torch.Size,
    dtype: torch.dtype,
    nnz: int,
    support: str,
    values: str,
    buffers: dict[str, Tensor],
) -> None:
    if dtype not in dtypes.SUPPORTED_DTYPES:
        raise ValueError(f"dtype: got {dtype}, allowed: {dtypes.names(dtypes.SUPPORTED_DTYPES)}")
    numel = shape.numel()
    if type(nnz) is not int or not 0 <= nnz <= numel:
        raise ValueError(f"nnz: got {nnz}, allowed: 0 to {numel} for shape {tuple(shape)}")
    empty, dense = support == "empty", values == "dense"
    if empty and values != "raw":
        raise ValueError(f"values: got {values!r} with support='empty', allowed: 'raw'")
    if dense and support != "full":
        raise ValueError(f"support: got {support!r} with values='dense', allowed: 'full'")
    if not empty and support not in codings.SUPPORTS:
        allowed = ("empty", *codings.SUPPORTS)
        raise ValueError(f"support: got {support!r}, allowed: {allowed}")
    if not dense and values not in codings.VALUES:
        raise ValueError(f"values: got {values!r}, allowed: {('dense', *codings.VALUES)}")
    wanted = buffer_names(support, values)
    if set(buffers) != wanted:
        raise ValueError(
            f"buffers: got {sorted(buffers)}, support={support!r} with values={values!r} "
            f"has {sorted(wanted)}"
        )
    if not all(isinstance(b, Tensor) and b.layout == torch.strided for b in buffers.values()):
        raise ValueError("buffers: got something that is not a strided tensor")
    if len({b.device for b in buffers.values()}) != 1:
        raise ValueError("buffers: got more than one device, allowed: one")
    if not all(b.is_contiguous() for b in buffers.values()):
        raise ValueError("buffers: got a tensor that is not contiguous")
    stored = buffers["values"]
    if empty or dense:
        length = numel if dense else 0
        words.check_buffer("values", stored, dtypes.pattern_dtype(dtype), length)
        if int(torch.count_nonzero(stored)) != nnz:
            raise ValueError(f"nnz: got {nnz}, the values have another number of nonzeros")
        return
    if numel == 0:
        raise ValueError(f"support: got {support!r} for a tensor without elements, allowed: 'full'")
    found, stream = _parts(shape, nnz, support, values, buffers)
    geometry, coding = found.geometry, found.mask.coding
    # Lengths come first: nothing below takes memory for a number that no buffer stands behind.
    if not coding.applies(geometry, nnz):
        raise ValueError(f"nnz: got {nnz} with support={support!r}, allowed: {numel}")
    width = stream.coding.width(dtype)
    if width == dtypes.bit_width(dtype):
        words.check_buffer("values", stored, dtypes.pattern_dtype(dtype), nnz)
    else:
        words.check_buffer("values", stored, torch.int32, layout.packed_words(nnz, width))
    starts = tables.check("offsets", found.offsets, geometry.tiles, layout.TILE, nnz)
    stream.coding.check(stream, dtype, starts)
    # A part after the other: what decoding takes is not taken here.
    for i, mask_words in enumerate(coding.check(found.mask, geometry, _CHECKED_TILES)):
        first = i * _CHECKED_TILES
        last = min(first + _CHECKED_TILES, geometry.tiles)
        inside = full.inside(geometry, first, last).to(stored.device)
        lacking = inside.numel() - mask_words.numel()
        mask_words = torch.nn.functional.pad(mask_words.to(stored.device), (0, lacking))
        if bool((mask_words & ~inside).any()):
            raise ValueError("mask: got a bit that is set outside the tensor")
        per_tile = words.count_bits(mask_words).view(last - first, -1).sum(1)
        if not torch.equal(per_tile, starts[first + 1 : last + 1] - starts[first:last]):
            raise ValueError("nnz, offsets: got a tile whose mask has another number of positions")
