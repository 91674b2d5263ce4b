"""The tensors inside what a forward pass keeps, apart from all that is known without them.

Autograd wants tensors by themselves (``save_for_backward``): it then frees them as it frees its
own, and saved-tensor hooks see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from bitsparse.backends import Kept, Support
from bitsparse.codings import Mask, Stream


def take_apart(kept: Kept) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Kept]]:
    """The tensors of ``kept``, and a function that makes it again from them."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> _Place:
        tensors.append(tensor)
        return _Place(len(tensors) - 1)

    bare = _replace(kept, Tensor, take)

    def restore(tensors: Sequence[Tensor]) -> Kept:
        return _replace(bare, _Place, lambda place: tensors[place])  # type: ignore[no-any-return]

    return tensors, restore


class _Place(int):
    """Which of the tensors belongs here."""


def _replace(part: Any, kind: type, new: Callable[[Any], Any]) -> Any:
    """``part`` with everything of type ``kind`` inside it replaced."""
    changes: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, kind):
            changes[field.name] = new(value)
        elif isinstance(value, (Support, Mask, Stream)):
            changes[field.name] = _replace(value, kind, new)
    return replace(part, **changes)
