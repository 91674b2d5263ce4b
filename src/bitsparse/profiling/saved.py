"""What autograd keeps for backward, storage by storage, as it comes and goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitsparse.saved_tensors import Packer, unpack

RECOMPUTED = "recomputed"
"""The kind of what is saved in the backward pass, outside of modules: to be computed again."""


class Owner(NamedTuple):
    """What a storage was saved by."""

    name: str
    """Of the module or the feed-forward block; "" is the model, or the code around it."""
    kind: str
    visit: int | None = None
    """Number of the feed-forward block's forward pass."""
    hidden: bool = False
    """Whether it is of the block's hidden activations, which compression changes."""


class Event(NamedTuple):
    """A storage is saved for the first time, or (negative) let go for the last."""

    owner: Owner
    nbytes: int


class _Saved:
    """A saved tensor; when autograd drops it, so does the recorder."""

    __slots__ = ("drop", "packed")

    def __init__(self, packed: Any, drop: Callable[[], None] | None) -> None:
        self.packed, self.drop = packed, drop

    def __del__(self) -> None:
        if self.drop is not None:
            self.drop()


class _Keeper(Packer):
    """Keeps every tensor as it is."""

    def may_be_worth_it(self, tensor: Tensor) -> bool:
        return False


class SavedMemory:
    """Saved-tensor hooks that note each storage once, those of parameters and buffers excluded.

    Args:
        model: whose parameters and buffers do not count.
        owner: asked for each new storage, with the tensor.
    """

    def __init__(self, model: nn.Module, owner: Callable[[Tensor], Owner]) -> None:
        self.events: list[Event] = []
        self._owner = owner
        self._packer = _Keeper("fast", 0)
        self._skip = {
            t.untyped_storage().data_ptr()
            for t in (*model.parameters(), *model.buffers())
            if t.layout == torch.strided
        }
        self._uses: Counter[int] = Counter()
        self._first: dict[int, Event] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _take_out)

    def _pack(self, tensor: Tensor) -> _Saved:
        packed = self._packer.pack(tensor)
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return _Saved(packed, None)
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or address in self._skip:
            return _Saved(packed, None)
        if not self._uses[address]:
            self._first[address] = Event(self._owner(tensor), storage.nbytes())
            self.events.append(self._first[address])
        self._uses[address] += 1
        return _Saved(packed, lambda: self._drop(address))

    def _drop(self, address: int) -> None:
        self._uses[address] -= 1
        if not self._uses[address]:
            owner, nbytes = self._first.pop(address)
            self.events.append(Event(owner, -nbytes))


def _take_out(saved: _Saved) -> Tensor:
    return unpack(saved.packed)


def at_peak(events: list[Event]) -> tuple[int, dict[tuple[str, str], int]]:
    """The largest number of bytes that are saved at a time, and then whose they are, by name and
    kind."""
    total = peak = end = 0
    for i, event in enumerate(events):
        total += event.nbytes
        if total > peak:
            peak, end = total, i + 1
    held: Counter[tuple[str, str]] = Counter()
    for owner, nbytes in events[:end]:
        held[owner.name, owner.kind] += nbytes
    return peak, {key: nbytes for key, nbytes in held.items() if nbytes}


class Hidden(NamedTuple):
    """Bytes of the hidden activations of one forward pass of a block."""

    dense: int
    compressed: int


class Level(NamedTuple):
    """Bytes that are saved after an event."""

    measured: int
    dense: int
    """With what plain PyTorch keeps in the place of the blocks' hidden activations."""
    compressed: int


def timeline(events: list[Event], visits: dict[int, Hidden]) -> list[Level]:
    """The bytes after each event, as they were and as they would be with other blocks.

    ``visits``: of blocks that were measured; others stay as they are. What takes the place of a
    block's hidden activations is there from the last storage that the block saves to the first that
    it lets go, as far as that can be told.
    """
    last: dict[int, int] = {}
    for i, (owner, nbytes) in enumerate(events):
        if owner.visit in visits and nbytes > 0:
            last[owner.visit] = i
    levels = []
    measured = rest = again = dense = compressed = 0
    gone: set[int] = set()
    for i, (owner, nbytes) in enumerate(events):
        measured += nbytes
        visit = owner.visit
        known = visit is not None and visit in visits
        if owner.kind == RECOMPUTED:
            again += nbytes
        elif not (known and owner.hidden):
            rest += nbytes
        if visit is not None and known:
            sizes = visits[visit]
            if last[visit] == i:
                dense += sizes.dense
                compressed += sizes.compressed
            elif nbytes < 0 and visit not in gone and i > last[visit]:
                gone.add(visit)
                dense -= sizes.dense
                compressed -= sizes.compressed
        levels.append(Level(measured, rest + dense, rest + again + compressed))
    return levels
