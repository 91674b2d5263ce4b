"""Tensors in files: :func:`save` and :func:`load`.

A file is an ordinary safetensors file. The buffers of a compressed tensor ``name`` are its entries
``name.bitsparse.<buffer>``; what else there is to know about the compressed tensors is JSON in the
string metadata, under the key ``bitsparse``.

The ``safetensors`` package reads files. They are written here: one tensor at a time, whatever its
device, strides and shared memory, with the system's own errors, and to the same bytes every time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor

from bitsparse import codings, dtypes
from bitsparse.files import replacing
from bitsparse.tensor import BitSparseTensor, buffer_names, check_shape

FORMAT_VERSION = 1
"""Version of the index; a reader refuses those that it does not know."""

_INDEX = "bitsparse"
_MARK = ".bitsparse."
_METADATA = "__metadata__"  # safetensors' own key beside the names
_MAX_HEADER = 100_000_000  # bytes; what safetensors reads
_MAX_DIGITS = 20
_ATTEMPTS = 100

_DTYPES = {str(d).removeprefix("torch."): d for d in dtypes.SUPPORTED_DTYPES}
_SAFETENSORS_DTYPES = {
    getattr(torch, name): code
    for name, code in (
        ("bool", "BOOL"),
        ("uint8", "U8"),
        ("int8", "I8"),
        ("uint16", "U16"),
        ("int16", "I16"),
        ("uint32", "U32"),
        ("int32", "I32"),
        ("uint64", "U64"),
        ("int64", "I64"),
        ("float16", "F16"),
        ("bfloat16", "BF16"),
        ("float32", "F32"),
        ("float64", "F64"),
        ("float8_e4m3fn", "F8_E4M3"),
        ("float8_e5m2", "F8_E5M2"),
        ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
        ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
    )
    if hasattr(torch, name)
}

PathLike: TypeAlias = "str | os.PathLike[str]"
AnyTensor: TypeAlias = "Tensor | BitSparseTensor"


@dataclass(frozen=True)
class TensorInfo:
    """What a file says about a tensor; the last three are ``None`` for a plain one."""

    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    """Bytes in the file."""
    nnz: int | None = None
    support: str | None = None
    values: str | None = None


class TensorDict(dict[str, AnyTensor]):
    """The tensors of a file by name; ``metadata`` are the strings that were stored with them."""

    metadata: dict[str, str]

    def __init__(self, tensors: Mapping[str, AnyTensor], metadata: dict[str, str]) -> None:
        super().__init__(tensors)
        self.metadata = metadata


def save(
    path: PathLike,
    tensors: Mapping[str, AnyTensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a safetensors file, from which :func:`load` gets them bit for bit.

    ``path`` is replaced at once when everything is on the disk; if anything fails before, it is as
    it was. Plain tensors are ordinary entries, for any reader of safetensors files.

    Args:
        path: the file. Its folder must exist.
        tensors: compressed and plain tensors by name, on any device. Plain ones may be of any
            strides, and of any real dtype. Names must not contain ".bitsparse.".
        metadata: strings to store with them. The key "bitsparse" is taken.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has been written then.
        OSError: the file cannot be written.
    """
    path = _as_path(path)
    entries, index = _entries(tensors)
    strings = _checked_metadata(metadata)
    strings[_INDEX] = _dumps({"version": FORMAT_VERSION, "tensors": index})
    # The widest dtypes first: everything is aligned then.
    order = sorted(entries, key=lambda key: (-entries[key].element_size(), key))
    header: dict[str, Any] = {_METADATA: strings}
    end = 0
    for key in order:
        tensor, begin = entries[key], end
        end += tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = _dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > _MAX_HEADER:
        raise ValueError(
            f"tensors, metadata: got {len(encoded)} bytes of names and strings, "
            f"allowed: {_MAX_HEADER}"
        )
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for key in order:
            file.write(_little_endian(entries[key]))


@overload
def load(
    path: PathLike, *, lazy: Literal[False] = False, device: torch.device | str = "cpu"
) -> TensorDict: ...


@overload
def load(
    path: PathLike, *, lazy: Literal[True], device: torch.device | str = "cpu"
) -> TensorFile: ...


@overload
def load(
    path: PathLike, *, lazy: bool, device: torch.device | str = "cpu"
) -> TensorDict | TensorFile: ...


def load(
    path: PathLike, *, lazy: bool = False, device: torch.device | str = "cpu"
) -> TensorDict | TensorFile:
    """Read a file that :func:`save` wrote, or any other safetensors file.

    The content may come from anywhere: all of it is checked before it is used, and what is read
    takes memory in proportion to the file's size, whatever sizes it claims. (``to_dense`` of a
    tensor takes what its shape says: look at that first if you do not know the source.)

    Args:
        path: the file.
        lazy: read a tensor when it is asked for, from the open file, instead of all now.
        device: where the tensors shall be.

    Returns:
        The tensors by name, in the order of the names, compressed ones as
        :class:`~bitsparse.BitSparseTensor`; ``metadata`` has the strings. With ``lazy`` a
        :class:`TensorFile`, to be closed.

    Raises:
        ValueError: the file, or a tensor in it, is not as the format says; it is named.
        OSError: the file cannot be read (FileNotFoundError, for instance).
        ImportError: the package ``safetensors`` is not installed.
    """
    file = TensorFile(path, device)
    if lazy:
        return file
    with file:
        return TensorDict(file, file.metadata)


class TensorFile(Mapping[str, AnyTensor]):
    """A file whose tensors are read when they are asked for, each time anew; nothing is cached.

    Made by :func:`load` with ``lazy=True``. Close it with :meth:`close` or ``with``. ``metadata``
    are the strings that were stored with the tensors. Asking for a tensor raises KeyError if there
    is none of that name and ValueError if its content is not as the format says.
    """

    metadata: dict[str, str]

    def __init__(self, path: PathLike, device: torch.device | str = "cpu") -> None:
        self._file: Any = None
        self._path = _as_path(path)
        try:
            self._device = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device: got {device!r}, allowed: as for torch.device") from error
        try:
            with _naming(self._path):
                self._file = _open(self._path)
                self.metadata = dict(self._file.metadata() or {})
                index = self.metadata.pop(_INDEX, None)
                self._index = {} if index is None else _read_index(index)
                self._keys = _sort_keys(self._file.keys(), None if index is None else self._index)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> AnyTensor:
        keys = self._keys[name]
        with _naming(self._path, name):
            views = {buffer: self._view(key) for buffer, key in keys.items()}
            for view in views.values():
                if view.dtype == torch.bool and bool((view.view(torch.uint8) > 1).any()):
                    raise ValueError("got a byte of a bool that is neither 0 nor 1")
            # Copies: what has been checked cannot be changed by another process that writes to the
            # file, and a tensor does not keep the file open.
            read = {buffer: view.clone() for buffer, view in views.items()}
            tensor: AnyTensor
            if name in self._index:
                entry = self._index[name]
                tensor = BitSparseTensor.from_buffers(
                    entry.shape, entry.dtype, entry.nnz, entry.support, entry.values, read
                )
            else:
                tensor = read[""]
        return tensor.to(self._device)

    def info(self, name: str) -> TensorInfo:
        """What the file says about a tensor; its data is neither read nor checked.

        Raises:
            KeyError: there is no tensor of that name.
            ValueError: PyTorch has no such tensors, or the file is closed.
        """
        keys = self._keys[name].values()
        with _naming(self._path, name):
            views = [self._view(key) for key in keys]
        nbytes = sum(v.numel() * v.element_size() for v in views)
        entry = self._index.get(name)
        if entry is None:
            return TensorInfo(views[0].shape, views[0].dtype, nbytes)
        return TensorInfo(entry.shape, entry.dtype, nbytes, entry.nnz, entry.support, entry.values)

    def close(self) -> None:
        """Close the file. Tensors that were read remain valid."""
        file, self._file = self._file, None
        if file is not None:
            file.__exit__(None, None, None)

    def _view(self, key: str) -> Tensor:
        """The tensor in the memory-mapped file."""
        if self._file is None:
            raise ValueError("the file is closed")
        with _as_value_errors():
            check_shape(self._file.get_slice(key).get_shape())
            view: Tensor = self._file.get_tensor(key)
        return view

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._file is None else ""
        return f"TensorFile({str(self._path)!r}, {len(self)} tensors{closed})"


# ---------------------------------------------------------------------------------- save


class _Entry(NamedTuple):
    """What the index says about a compressed tensor."""

    shape: torch.Size
    dtype: torch.dtype
    nnz: int
    support: str
    values: str


def _entries(
    tensors: Mapping[str, AnyTensor],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The file's entries and the tensors of its index, from checked arguments."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors: got {type(tensors).__name__}, allowed: a dict")
    entries: dict[str, Tensor] = {}
    index: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        _check_text("tensors: a name", name)
        if _MARK in name or name == _METADATA:
            raise ValueError(
                f"tensors: got the name {_short(name)}, allowed: names without {_MARK!r} "
                f"other than {_METADATA!r}"
            )
        if isinstance(tensor, BitSparseTensor):
            index[name] = {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "nnz": tensor.nnz,
                "support": tensor.support,
                "values": tensor.values,
            }
            entries.update({name + _MARK + b: buffer for b, buffer in tensor.buffers.items()})
        else:
            _check_plain(name, tensor)
            entries[name] = tensor
    return entries, index


def _check_plain(name: str, tensor: object) -> None:
    what = f"tensors[{_short(name)}]"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: got {type(tensor).__name__}, allowed: Tensor, BitSparseTensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError(f"{what}: got a sparse, quantized or nested tensor, allowed: dense ones")
    if tensor.dtype not in _SAFETENSORS_DTYPES:
        allowed = dtypes.names(tuple(_SAFETENSORS_DTYPES))
        raise TypeError(f"{what}: got dtype {tensor.dtype}, allowed: {allowed}")
    if tensor.device.type == "meta":
        raise TypeError(f"{what}: got a meta tensor, which has no values; allowed: cpu, cuda")


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """A copy."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata: got {type(metadata).__name__}, allowed: a dict of strings")
    for key, text in metadata.items():
        _check_text("metadata: a key", key)
        _check_text(f"metadata[{_short(key)}]", text)
    if _INDEX in metadata:
        raise ValueError(f"metadata: got the key {_INDEX!r}, allowed: any other")
    return dict(metadata)


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{what}: got {type(text).__name__}, allowed: str")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what}: got {_short(text)}, allowed: valid Unicode") from None


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _little_endian(tensor: Tensor) -> Any:
    """The elements in row-major order as a numpy array of integers, in host memory."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().resolve_neg().cpu().contiguous().view(-1)
    array = flat.view(integers[tensor.element_size()]).numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


# ---------------------------------------------------------------------------------- load


def _open(path: Path) -> Any:
    """An open ``safe_open``; ValueError unless ``path`` is a regular file that it can read."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "bitsparse.load needs the package safetensors: pip install 'bitsparse[files]'"
        ) from error
    for _ in range(_ATTEMPTS):
        before = _identity(path)
        open(path, "rb").close()  # the system's own errors
        try:
            with _as_value_errors():
                file = safe_open(path, framework="pt")
        except ValueError:
            if _identity(path) == before:
                raise
        else:
            # It opens the path twice, for the header and for the data.
            if _identity(path) == before:
                return file
            file.__exit__(None, None, None)
    raise ValueError("the file changes all the time")


def _identity(path: Path) -> tuple[int, ...]:
    """Numbers that change if the file is replaced or written to."""
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("got a pipe, device or socket, allowed: a regular file")
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read_index(text: str) -> dict[str, _Entry]:
    """The compressed tensors by name, from the JSON that :func:`save` writes.

    Raises:
        ValueError: it is not such JSON, or of a version that is not read here.
    """
    try:
        index = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_refuse,
            parse_constant=_refuse,
        )
    except RecursionError:
        raise ValueError("index: got JSON that is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"index: got text that is not JSON ({error})") from None
    version = index.get("version") if isinstance(index, dict) else None
    if type(version) is not int:
        raise ValueError("index: got no version")
    if version != FORMAT_VERSION:
        raise ValueError(f"index: got version {version}, this release reads: {FORMAT_VERSION}")
    tensors = _fields("index", index, "version", "tensors")["tensors"]
    if not isinstance(tensors, dict):
        raise ValueError("index: got tensors that are not an object")
    return {name: _read_entry(name, fields) for name, fields in tensors.items()}


def _read_entry(name: str, fields: object) -> _Entry:
    what = f"index of {_short(name)}"
    if _MARK in name or name == _METADATA:
        raise ValueError(f"{what}: got a name that is not allowed")
    entry = _fields(what, fields, *_Entry._fields)
    shape, nnz = entry["shape"], entry["nnz"]
    if not isinstance(shape, list) or any(type(size) is not int for size in shape):
        raise ValueError(f"{what}: got {_short(shape)} as shape, allowed: a list of numbers")
    check_shape(shape)
    if type(nnz) is not int:
        raise ValueError(f"{what}: got {_short(nnz)} as nnz, allowed: a number")
    for field, allowed in (
        ("dtype", tuple(_DTYPES)),
        ("support", ("empty", *codings.SUPPORTS)),
        ("values", ("dense", *codings.VALUES)),
    ):
        if entry[field] not in allowed:
            raise ValueError(f"{what}: got {_short(entry[field])} as {field}, allowed: {allowed}")
    return _Entry(
        torch.Size(shape), _DTYPES[entry["dtype"]], nnz, entry["support"], entry["values"]
    )


def _fields(what: str, found: object, *names: str) -> dict[str, Any]:
    if not isinstance(found, dict) or found.keys() != set(names):
        got = sorted(found) if isinstance(found, dict) else found
        raise ValueError(f"{what}: got {_short(got)}, allowed: an object with {sorted(names)}")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("index: got an object that has a key twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"index: got a number of {len(digits)} digits")
    return int(digits)


def _refuse(number: str) -> None:
    raise ValueError(f"index: got {_short(number)}, allowed: whole numbers")


def _sort_keys(keys: list[str], index: dict[str, _Entry] | None) -> dict[str, dict[str, str]]:
    """For each tensor, in the order of the names, the keys of its buffers by their names.

    A plain tensor has one buffer, named "". Without an index all tensors are plain.
    """
    if index is None:
        return {key: {"": key} for key in sorted(keys)}
    found: dict[str, dict[str, str]] = {name: {} for name in index}
    for key in keys:
        name, mark, buffer = key.rpartition(_MARK)
        if not mark:
            if key in index:
                raise ValueError(f"{_short(key)} is both a plain and a compressed tensor")
            found[key] = {"": key}
        elif name in index:
            found[name][buffer] = key
        else:
            raise ValueError(f"{_short(key)} is in the file, but not in its index")
    for name, entry in index.items():
        wanted = buffer_names(entry.support, entry.values)
        if found[name].keys() != wanted:
            raise ValueError(
                f"{_short(name)} has the entries {_short(sorted(found[name]))}, "
                f"its index says {sorted(wanted)}"
            )
    return dict(sorted(found.items()))


# -------------------------------------------------------------------------------- errors


def _as_path(path: PathLike) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: got {type(path).__name__}, allowed: str, os.PathLike")
    return Path(path)


@contextlib.contextmanager
def _naming(path: Path, name: str | None = None) -> Iterator[None]:
    """Add to a ValueError's message where it occurred."""
    try:
        yield
    except ValueError as error:
        where = f"{path}" if name is None else f"{path}: {_short(name)}"
        raise ValueError(f"{where}: {error}") from error


@contextlib.contextmanager
def _as_value_errors() -> Iterator[None]:
    """Errors of safetensors and PyTorch about a file's content, which are of many kinds."""
    try:
        yield
    except (OSError, MemoryError, ValueError):
        raise
    except Exception as error:
        raise ValueError(str(error)) from error


def _short(value: object) -> str:
    """Printable, and not longer than a line, whatever a file contains."""
    return _repr.repr(value)


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
