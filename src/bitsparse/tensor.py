"""Lossless compression of any tensor: :func:`compress` and :class:`BitSparseTensor`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from bitsparse import codings, dtypes, layout, memory
from bitsparse.backends import Support, backend_for


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
    """Coding of the positions; "full" where every element is stored."""
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
        _check_parts(torch.Size(shape), dtype, nnz, support, values, buffers)
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
        else:
            patterns = backend_for(self.device).scatter(
                _support_of(self.support, self._buffers),
                codings.value_coding(self.values),
                self._buffers["values"],
                self.numel(),
                self.dtype,
            )
        return dtypes.from_patterns(patterns, self.dtype, self.shape)

    def to(self, device: torch.device | str) -> BitSparseTensor:
        """A copy on ``device``, or the tensor itself if it is there already."""
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


def compress(x: Tensor, support: str = "auto", values: str = "auto") -> BitSparseTensor:
    """Compress a tensor without losing a bit.

    Args:
        x: any strided tensor of float32, float16, bfloat16 or float8, on any device, of any shape,
            strides and density. Not changed; no gradient flows through.
        support: coding of the positions: "auto" or "flat" (one bit an element).
        values: coding of the values: "auto"; "raw" (full width); "unsigned" (without the sign bit,
            possible where none is set); "dense" (every element, full width). "auto" takes what is
            smallest, which is "dense" where nothing is smaller than the tensor itself.

    Returns:
        The compressed tensor, on the device of ``x``.

    Raises:
        TypeError: ``x`` is not a tensor of a supported dtype and layout.
        ValueError: an unknown coding, or one that cannot hold the values of ``x``.
    """
    _check_compressible(x)
    codings.check_support_name(support)
    codings.check_values_name(values)
    if values == "dense" and support != "auto":
        raise ValueError(
            f"values: got 'dense' with support={support!r}, "
            "'dense' stores every position: allowed with support='auto'"
        )
    patterns = dtypes.to_patterns(x)
    if values == "dense" or patterns.numel() == 0:
        nnz = int(torch.count_nonzero(patterns))
        return _dense(x, patterns, nnz)

    backend = backend_for(x.device)
    coding = codings.support_coding("flat" if support == "auto" else support)
    found = backend.find_support(coding, patterns)
    assert found.totals is not None
    nnz, any_sign, _ = found.totals.tolist()
    if values == "auto":
        value_coding = codings.smallest_values(nnz, x.dtype, bool(any_sign))
        size = coding.nbytes(x.numel()) + codings.stream_nbytes(value_coding, nnz, x.dtype)
        if support == "auto" and size >= x.numel() * x.element_size():
            return _dense(x, patterns, nnz)
    else:
        value_coding = codings.value_coding(values)
        applicable = codings.applicable_values(x.dtype, bool(any_sign))
        if value_coding not in applicable:
            raise ValueError(
                f"values: got {values!r}, but a sign bit is set in x; allowed: "
                f"'auto', {', '.join(repr(c.name) for c in applicable)}"
            )
    raw = backend.gather(found, patterns, nnz, relu=False)
    stream = backend.encode(value_coding, raw, x.dtype)
    buffers = {"mask": found.mask, "offsets": found.offsets, "values": stream}
    return BitSparseTensor(x.shape, x.dtype, nnz, coding.name, value_coding.name, buffers)


def decompress(c: BitSparseTensor) -> Tensor:
    """The dense tensor of ``c``, every bit as it was: :meth:`BitSparseTensor.to_dense`."""
    if not isinstance(c, BitSparseTensor):
        raise TypeError(f"c: got {type(c).__name__}, allowed: BitSparseTensor")
    return c.to_dense()


def _dense(x: Tensor, patterns: Tensor, nnz: int) -> BitSparseTensor:
    # `patterns` may be a view of x: the copy makes the result independent of it.
    stored = patterns.clone() if patterns.data_ptr() == x.data_ptr() else patterns
    return BitSparseTensor(x.shape, x.dtype, nnz, "full", "dense", {"values": stored})


def _support_of(name: str, buffers: dict[str, Tensor]) -> Support:
    return Support(codings.support_coding(name), buffers["mask"], buffers["offsets"])


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
    if any(not isinstance(s, int) or s < 0 for s in shape):
        raise ValueError(f"shape: got {tuple(shape)}, allowed: sizes >= 0")
    numel = shape.numel()
    if not isinstance(nnz, int) or not 0 <= nnz <= numel:
        raise ValueError(f"nnz: got {nnz}, allowed: 0 to {numel} for shape {tuple(shape)}")
    wanted = {"values"} if values == "dense" else {"mask", "offsets", "values"}
    if set(buffers) != wanted:
        raise ValueError(f"buffers: got {sorted(buffers)}, values={values!r} has {sorted(wanted)}")
    if len({b.device for b in buffers.values()}) != 1:
        raise ValueError("buffers: got more than one device, allowed: one")
    if not all(b.is_contiguous() for b in buffers.values()):
        raise ValueError("buffers: got a tensor that is not contiguous")
    stream = buffers["values"]

    def check_stream(stream_dtype: torch.dtype, length: int) -> None:
        if stream.dtype != stream_dtype or stream.shape != (length,):
            raise ValueError(
                f"values: got {stream.dtype} of shape {tuple(stream.shape)}, "
                f"{nnz} values coded {values!r} are {stream_dtype} of shape ({length},)"
            )

    if values == "dense":
        if support != "full":
            raise ValueError(f"support: got {support!r} with values='dense', allowed: 'full'")
        check_stream(dtypes.pattern_dtype(dtype), numel)
        if int(torch.count_nonzero(stream)) != nnz:
            raise ValueError(f"nnz: got {nnz}, the values have another number of nonzeros")
        return
    if support not in codings.SUPPORTS:
        raise ValueError(f"support: got {support!r}, allowed: {codings.SUPPORTS}")
    if values not in codings.VALUES:
        raise ValueError(f"values: got {values!r}, allowed: {codings.VALUES}")
    coding, value_coding = codings.support_coding(support), codings.value_coding(values)
    check_stream(value_coding.stream_dtype(dtype), value_coding.stream_length(nnz, dtype))
    coding.check(buffers["mask"], numel)
    positions = coding.positions(buffers["mask"], numel)
    if positions.numel() != nnz:
        raise ValueError(f"nnz: got {nnz}, the mask has {positions.numel()} positions")
    counts = torch.bincount(positions // layout.TILE, minlength=layout.num_tiles(numel))
    offsets = buffers["offsets"]
    offset_dtype = dtypes.offset_dtype(numel)
    if offsets.dtype != offset_dtype or not torch.equal(
        offsets.to(torch.int64), counts.cumsum(0) - counts
    ):
        raise ValueError(
            f"offsets: got {offsets.dtype} of shape {tuple(offsets.shape)}, allowed: "
            f"{offset_dtype}, for each tile the number of nonzeros in the tiles before it"
        )
