"""Counting the bytes that a step holds, operation by operation, and what they are for."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
CASTS = "autocast weight casts"
INPUTS = "inputs"
EMBEDDING = "embeddings and positions"
ATTENTION = "attention"
NORMS = "norms"
RESIDUALS = "residual stream"
FEED_FORWARD = "feed-forward"
LOSS = "logits and loss"
WORKSPACES = "workspaces"
OTHER = "other"
KINDS = (
    *(PARAMETERS, GRADIENTS, OPTIMIZER, CASTS, INPUTS, EMBEDDING, ATTENTION, NORMS, RESIDUALS),
    *(FEED_FORWARD, LOSS, WORKSPACES, OTHER),
)
"""What bytes are for, in the order of a table."""

BLOCK = 512
"""Bytes that the CUDA allocator rounds to."""

_IN_PLACE = torch.ops.aten.add.Tensor


def rounded(nbytes: int) -> int:
    """What the CUDA allocator counts for a tensor of so many bytes."""
    return -(-nbytes // BLOCK) * BLOCK


class Tracker(TorchDispatchMode):
    """Follows every storage that operations under this mode allocate, until it is freed.

    On entry of a module in ``kinds`` what follows is for that; in backward, what the operation was
    for that is differentiated. Tensors need have no values (``FakeTensorMode``).
    """

    def __init__(self, kinds: dict[nn.Module, str], hidden_sizes: Iterable[int] = ()) -> None:
        super().__init__()
        self.kinds = kinds
        self.hidden_sizes = frozenset(hidden_sizes)
        """Last dimensions of what belongs to feed-forward blocks that have no module."""
        self.level = 0
        self.peak = 0
        self.at_peak: Counter[tuple[str, bool]] = Counter()
        """Bytes by kind, and whether they were allocated in backward, when most were held."""
        self.backward = False
        self._stack: list[str] = [LOSS]
        self._held: Counter[tuple[str, bool]] = Counter()
        self._known: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._parameters: weakref.WeakSet[Any] = weakref.WeakSet()
        self._numbers: list[int] = []
        self._kinds_from: list[str] = []
        self._extra = 0
        self._handles = ExitStack()

    # ------------------------------------------------------------------------------ tagging

    def watch(self, model: nn.Module) -> None:
        """Count the parameters and buffers of ``model``, and have its modules say what runs."""
        for parameter in model.parameters():
            self.hold(parameter, PARAMETERS)
            self._parameters.add(parameter.untyped_storage())
            handle = parameter.register_post_accumulate_grad_hook(self._accumulated)
            self._handles.callback(handle.remove)
        for buffer in model.buffers():
            self.hold(buffer, PARAMETERS)
        for module, kind in self.kinds.items():
            for handle in (
                module.register_forward_pre_hook(lambda m, args, kind=kind: self._enter(kind)),
                module.register_forward_hook(lambda m, args, out: self._leave(), always_call=True),
            ):
                self._handles.callback(handle.remove)

    def close(self) -> None:
        """Take the hooks away."""
        self._handles.close()

    def _enter(self, kind: str) -> None:
        self._stack.append(kind)
        self._mark()

    def _leave(self) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        """Remember which operations, by their number in the graph, are for what."""
        self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._kinds_from.append(self._stack[-1])

    def _kind(self) -> str:
        node = torch._C._current_autograd_node() if len(self._stack) == 1 else None
        if node is None:
            return self._stack[-1]
        at = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._kinds_from[at] if at >= 0 else LOSS

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.hold(parameter.grad, GRADIENTS)

    # ----------------------------------------------------------------------------- counting

    def hold(self, tensor: Tensor, kind: str) -> None:
        """Count ``tensor`` as being for ``kind``, whatever it was counted for."""
        storage = tensor.untyped_storage()
        entry = self._known.get(storage)
        if entry is None:
            self._add(storage, (kind, self.backward))
            return
        self._held[entry[0]] -= entry[1]
        entry[0] = (kind, self.backward)
        self._held[entry[0]] += entry[1]

    def workspace(self, nbytes: int) -> None:
        """Count memory that an operation needs while it runs."""
        self.see_peak(rounded(nbytes))

    def _add(self, storage: Any, key: tuple[str, bool]) -> None:
        nbytes = rounded(storage.nbytes())
        entry = [key, nbytes]
        self._known[storage] = entry
        weakref.finalize(storage, self._free, entry).atexit = False
        self._held[key] += nbytes
        self.level += nbytes

    def _free(self, entry: list[Any]) -> None:
        self._held[entry[0]] -= entry[1]
        self.level -= entry[1]

    def see_peak(self, workspace: int = 0) -> None:
        """Compare what is held now, and ``workspace`` bytes, with the peak so far."""
        if self.level + workspace > self.peak:
            self.peak = self.level + workspace
            self.at_peak = +self._held
            if workspace:
                self.at_peak[WORKSPACES, self.backward] += workspace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            found: list[Any] = [out]
        elif isinstance(out, (tuple, list)):
            found = tree_leaves(out)
        else:
            return out
        new = False
        for tensor in found:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage not in self._known:
                    new = True
                    self._add(storage, (self._kind_of(func, args, tensor), self.backward))
        if new and not self._adds_gradients(func, args):
            self.see_peak()
        return out

    def _kind_of(self, func: Any, args: tuple[Any, ...], out: Tensor) -> str:
        if func is torch.ops.aten._to_copy.default and not self.backward:
            if args[0].untyped_storage() in self._parameters:
                return CASTS
        kind = self._kind()
        if kind != RESIDUALS or out.dim() == 0:
            return kind
        # Of a block without a module of its own: hidden tensors, and what is compressed.
        packed = out.dim() == 1 and not out.is_floating_point()
        return FEED_FORWARD if packed or out.shape[-1] in self.hidden_sizes else kind

    def _adds_gradients(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether this is a sum of two gradients that autograd computes in the memory of one.

        It does not under a dispatch mode such as this one; so the peak is not looked at before the
        gradients are gone.
        """
        return (
            func is _IN_PLACE
            and self.backward
            and not torch.is_grad_enabled()
            and isinstance(args[1], Tensor)
            and args[0].shape == args[1].shape
            and args[0].dtype == args[1].dtype
        )
