"""What stands in for a method of one module, in its ``__dict__``.

Plain objects that hold modules, no closures: copying and pickling a model copies them with it, and
the copy's hold the copy's modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitsparse.conversion.block import hooks_apply, pend, read_family, read_sequential, run
from bitsparse.conversion.families import BY_NAME
from bitsparse.saved_tensors import Packer, unpack

EXPERT_MIN_BYTES = 1 << 16
"""Activations of one expert, or of all, that are smaller are kept as they are."""


class Patch:
    """A replacement of ``holder.method`` that falls back to that of the class."""

    def __init__(self, holder: nn.Module, method: str, codec: str, blocks: int = 1) -> None:
        self.holder = holder
        self.method = method
        self.codec = codec
        self.blocks = blocks
        """How many feed-forward blocks it covers."""

    def install(self) -> None:
        # Not by setattr: what a subclass of nn.Module makes of that is no concern of ours.
        self.holder.__dict__[self.method] = self

    def original(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.holder), self.method)(self.holder, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class MethodPatch(Patch):
    """Of a method that computes a feed-forward block and nothing else."""

    def __init__(self, holder: nn.Module, family: str, codec: str) -> None:
        super().__init__(holder, BY_NAME[family].method, codec)
        # Not found again by the class: sharding libraries give a module a class of their own.
        self.family = family

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        family = BY_NAME[self.family]
        block = read_family(self.holder, family)
        out = None
        if len(args) == 1 and not kwargs and not isinstance(block, str):
            out = run(block, args[0], self.codec)
        if out is None:
            return self.original(*args, **kwargs)
        return out if family.then is None else getattr(self.holder, family.then)(out)


class SequentialPatch(Patch):
    """Of the forward of an ``nn.Sequential``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return self.original(*args, **kwargs)
        (x,) = args
        assert isinstance(self.holder, nn.Sequential)
        modules = list(self.holder)
        i = 0
        while i < len(modules):
            found = read_sequential(modules, i)
            out = None
            if found is not None and not isinstance(found[0], str):
                out = run(found[0], x, self.codec)
            if found is None or out is None:
                x = modules[i](x)
                i += 1
            else:
                x = out
                i += found[1]
        return x


class InlinePatch(Patch):
    """Of the forward of a module that ``owner`` calls in the middle of a method: the activation,
    or, where functions are called for that, the up projection."""

    def __init__(self, holder: nn.Module, owner: nn.Module, family: str, codec: str) -> None:
        super().__init__(holder, "forward", codec)
        self.owner = owner
        self.family = family

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = read_family(self.owner, BY_NAME[self.family])
        out = None
        if len(args) == 1 and not kwargs and not isinstance(block, str):
            if block.act is self.holder:
                out = pend(block, self.holder, args[0], self.codec)
            elif block.act is None and block.up is self.holder:
                pre = self.original(args[0])
                out = pend(block, self.holder, pre, self.codec)
                return pre if out is None else out
        return self.original(*args, **kwargs) if out is None else out


class ExpertsPatch(Patch):
    """Of the forward of experts whose weights are in one tensor.

    The class's own method runs; what autograd saves of the activations in it is compressed.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not hooks_apply():
            return self.original(*args, **kwargs)
        down: Any = self.holder.down_proj
        packer = _Activations(self.codec, EXPERT_MIN_BYTES)
        packer.columns = down.shape[-1]
        with torch.autograd.graph.saved_tensors_hooks(packer.pack, unpack):
            return self.original(*args, **kwargs)


class _Activations(Packer):
    """Compresses intermediate results with so many columns."""

    columns: int

    def may_be_worth_it(self, tensor: Tensor) -> bool:
        return (
            tensor.dim() == 2
            and tensor.shape[0] > 1
            and tensor.shape[1] == self.columns
            and tensor.grad_fn is not None
            and not tensor._is_view()  # of the parameters, or the pre-activations of gated forms
            and super().may_be_worth_it(tensor)
        )
