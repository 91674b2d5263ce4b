"""What stands in for a method of one module, in its ``__dict__``.

Plain objects that hold modules, no closures: copying and pickling a model copies them with it, and
the copy's hold the copy's modules.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from bitsparse.conversion.block import pend, read_family, read_sequential, run
from bitsparse.conversion.families import BY_NAME


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


class ActivationPatch(Patch):
    """Of the forward of an activation module that ``owner`` calls between its projections."""

    def __init__(self, holder: nn.Module, owner: nn.Module, family: str, codec: str) -> None:
        super().__init__(holder, "forward", codec)
        self.owner = owner
        self.family = family

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = read_family(self.owner, BY_NAME[self.family])
        out = None
        if len(args) == 1 and not kwargs and not isinstance(block, str):
            if block.act is self.holder:
                out = pend(block, args[0], self.codec)
        return self.original(*args, **kwargs) if out is None else out
