"""Compression of whatever autograd saves, for networks without a feed-forward block of ours."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.multiprocessing.reductions import StorageWeakRef

from bitsparse import dtypes
from bitsparse.codings import check_policy
from bitsparse.tensor import BitSparseTensor, compress

_SPARSE_ENOUGH = 0.75
"""Tensors are compressed to at most this much of their size, or left alone."""


class _Key(NamedTuple):
    """Memory that holds the same bits as long as it is alive and this is equal."""

    storage: int
    """Of the storage itself, not of its address, which another one may have too."""
    dtype: torch.dtype
    version: int


class _Alone(NamedTuple):
    """A tensor that is kept as it is."""

    tensor: Tensor
    version: int | None


class _Compressed(NamedTuple):
    """A tensor whose elements, in the order of their addresses, are kept compressed."""

    block: BitSparseTensor
    shape: torch.Size
    stride: tuple[int, ...]


_Packed = _Alone | _Compressed


class Packer:
    """What the hooks of one context do; :func:`unpack` undoes it."""

    def __init__(self, codec: str, min_bytes: int) -> None:
        self._codec, self._min_bytes = codec, min_bytes
        self._prune_at = 64
        self._seen: dict[_Key, tuple[StorageWeakRef, weakref.ref[BitSparseTensor] | None]] = {}

    def pack(self, tensor: Tensor) -> _Packed:
        block = self._compressed(tensor) if self.may_be_worth_it(tensor) else None
        if block is not None:
            return _Compressed(block, tensor.shape, tensor.stride())
        version = None if tensor.is_inference() else tensor._version
        # An output that its own node holds would never be freed: autograd gives it back its
        # history. A leaf is handed on as it is.
        return _Alone(tensor if tensor.grad_fn is None else tensor.detach(), version)

    def may_be_worth_it(self, tensor: Tensor) -> bool:
        """Whether to try; a subclass may ask for more."""
        return (
            type(tensor) is Tensor
            and not (tensor.is_leaf and tensor.requires_grad)
            and tensor.layout == torch.strided
            and not tensor.is_nested
            and not tensor._is_zerotensor()
            and tensor.numel() > 0
            and tensor.device.type != "meta"
            and tensor.dtype in dtypes.SUPPORTED_DTYPES
            and tensor.nbytes >= self._min_bytes
            and not tensor.is_inference()
            and not tensor.is_neg()
            and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
            # Else the rest of the memory would stay, or elements share it.
            and tensor.untyped_storage().nbytes() == tensor.nbytes
            and _is_dense(tensor)
        )

    def _compressed(self, tensor: Tensor) -> BitSparseTensor | None:
        """The block of the tensor's memory, None if that does not pay; each is tried once."""
        key = _Key(tensor.untyped_storage()._cdata, tensor.dtype, tensor._version)
        found = self._seen.get(key)
        if found is not None and not found[0].expired():
            if found[1] is None:
                return None
            known = found[1]()
            if known is not None:
                return known
        if len(self._seen) >= self._prune_at:
            self._seen = {k: v for k, v in self._seen.items() if not v[0].expired()}
            self._prune_at = 2 * len(self._seen) + 64
        # What lies next to each other comes last, as the neurons of a token do.
        cols = max(tensor.shape[i] for i in range(tensor.dim()) if tensor.stride(i) == 1)
        flat = tensor.detach().as_strided((tensor.numel() // cols, cols), (cols, 1))
        block = compress(flat, codec=self._codec)
        pays = block.nbytes <= _SPARSE_ENOUGH * tensor.nbytes
        storage = StorageWeakRef(tensor.untyped_storage())
        self._seen[key] = storage, weakref.ref(block) if pays else None
        return block if pays else None


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a piece of memory, each with its own place, from offset 0 on."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.storage_offset() == 0 and tensor.dim() > 0 and 1 in tensor.stride()


@_disable_dynamo
def unpack(packed: _Packed) -> Tensor:
    """What :meth:`Packer.pack` was given."""
    if isinstance(packed, _Compressed):
        return packed.block.to_dense().as_strided(packed.shape, packed.stride)
    tensor, version = packed
    # With hooks autograd leaves this check to them.
    if version is not None and tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.dtype} {list(tensor.shape)}] is at version {tensor._version}; "
            f"expected version {version} instead."
        )
    return tensor


@contextlib.contextmanager
def compressed_saved_tensors(
    *, codec: str = "balanced", min_bytes: int = 1 << 20
) -> Iterator[None]:
    """Compress what autograd saves for backward in this context, where that pays; losslessly.

    For any network: maps after a ReLU, outputs of dropout, padded batches, gradients' factors that
    are mostly zeros. ::

        with bitsparse.compressed_saved_tensors():
            loss = model(x).sum()
        loss.backward()

    Gradients have the same bits as without. A tensor is compressed when it is saved for the first
    time, at most to three quarters of its size; otherwise, and if it is a parameter, a part or an
    expanded view of other memory, of another dtype, or small, it is kept as it is. Built on
    :class:`torch.autograd.graph.saved_tensors_hooks`: contexts nest, the innermost hooks apply, and
    other threads are not concerned. Memory is saved if nothing else holds the dense tensor.

    As everywhere in autograd, memory must not be changed behind its back (``.data``). Each tensor
    that may pay is read once more in forward, and on a GPU the host waits for its counts. Where a
    whole feed-forward block can be converted, that is faster and keeps less: :func:`bitsparse.ffn`.

    Args:
        codec: "fast", "balanced" or "small", as in :func:`bitsparse.compress`.
        min_bytes: smaller tensors are kept as they are.

    Raises:
        ValueError: an unknown codec, or ``min_bytes`` is not an integer of at least 0.
    """
    check_policy(codec)
    if not isinstance(min_bytes, int) or isinstance(min_bytes, bool) or min_bytes < 0:
        raise ValueError(f"min_bytes: got {min_bytes!r}, allowed: an integer of at least 0")
    packer = Packer(codec, min_bytes)

    # torch.compile does not look into them.
    @_disable_dynamo
    def pack(tensor: Tensor) -> _Packed:
        return packer.pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


__all__ = ["compressed_saved_tensors"]
