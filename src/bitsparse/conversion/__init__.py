"""Making the feed-forward blocks of a whole model keep compressed activations."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from bitsparse import codings
from bitsparse.conversion.block import known_method, read_family, read_sequential
from bitsparse.conversion.families import BY_CLASS, FAMILIES, class_name
from bitsparse.conversion.patch import ActivationPatch, MethodPatch, Patch, SequentialPatch

SEQUENTIAL = "torch Sequential"


@dataclass(frozen=True)
class Converted:
    """A feed-forward block that keeps compressed activations."""

    name: str
    """The module's name in the model ("" is the model); of a part of an ``nn.Sequential``, with
    its slice."""
    family: str
    activation: str


@dataclass(frozen=True)
class Skipped:
    """A module that is nearly such a block."""

    name: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did; ``print`` it for a table."""

    converted: tuple[Converted, ...]
    skipped: tuple[Skipped, ...]
    already: tuple[Converted, ...] = ()
    """Blocks that were converted before, and were left as they are."""

    def __str__(self) -> str:
        counts = f"{len(self.converted)} converted"
        if self.already:
            counts += f", {len(self.already)} already converted"
        rows = [("converted", c.name, c.activation, c.family) for c in self.converted]
        rows += [("already", c.name, c.activation, c.family) for c in self.already]
        rows += [("skipped", s.name, "", s.reason) for s in self.skipped]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        return "\n".join([f"{counts}, {len(self.skipped)} skipped", *map(str.rstrip, lines)])


Filter = Callable[[str, nn.Module], bool]


def convert(
    model: nn.Module, *, codec: str = "balanced", filter: Filter | None = None, strict: bool = False
) -> ConversionReport:
    """Make the feed-forward blocks of ``model`` keep compressed activations, in place.

    Outputs, loss and gradients have the same bits as before; so have parameters, their names and
    the state dict, which are not touched. Where a block cannot be computed exactly (active dropout,
    hooks, replaced children), it runs as before. See docs/convert.md.

    Args:
        model: any module; blocks anywhere in it are found.
        codec: "fast", "balanced" or "small", see :func:`bitsparse.compress`.
        filter: called with the name and the module of each block (of an ``nn.Sequential``, once for
            all in it); those for which it returns False are left alone. None: all are converted.
        strict: whether it is an error, instead of a warning, that there is nothing to convert.

    Raises:
        TypeError: ``model`` is no module, or ``filter`` not callable.
        ValueError: an unknown codec; with ``strict``, no block. Nothing has been changed then.
    """
    _check_model(model)
    codings.check_policy(codec)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter: got {filter!r}, allowed: None, a callable (name, module) -> bool")
    if not isinstance(strict, bool):
        raise TypeError(f"strict: got {strict!r}, allowed: True, False")
    plan: list[Patch] = []
    converted: list[Converted] = []
    already: list[Converted] = []
    skipped: list[Skipped] = []
    parents = Counter(id(c) for m in model.modules() for c in m._modules.values())
    for name, module in model.named_modules():
        patch, found = _examine(name, module, codec, parents)
        blocks = [f for f in found if isinstance(f, Converted)]
        skipped += [f for f in found if isinstance(f, Skipped)]
        if patch is None or not blocks:
            already += blocks
        elif filter is not None and not filter(name, module):
            skipped += [Skipped(b.name, "left out by filter") for b in blocks]
        else:
            plan.append(patch)
            converted += blocks
    report = ConversionReport(tuple(converted), tuple(skipped), tuple(already))
    if not converted and not already:
        looked = ", ".join([SEQUENTIAL, *(f.name for f in FAMILIES)])
        message = (
            "model: found no feed-forward block with ReLU or squared ReLU to convert; looked for: "
            f"{looked} (docs/convert.md)\n{report}"
        )
        if strict:
            raise ValueError(message)
        warnings.warn(message, UserWarning, stacklevel=2)
    for patch in plan:
        patch.install()
    return report


def revert(model: nn.Module) -> int:
    """Undo :func:`convert`: every module of ``model`` is again as it was before.

    Returns:
        How many feed-forward blocks were converted.
    """
    _check_model(model)
    blocks = 0
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, Patch):
                blocks += value.blocks
                del module.__dict__[name]
    return blocks


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, allowed: torch.nn.Module")


def _examine(
    name: str, module: nn.Module, codec: str, parents: Counter[int]
) -> tuple[Patch | None, list[Converted | Skipped]]:
    """A patch for ``module``, and the blocks that it covers; no patch if there is one already."""
    if type(module) is nn.Sequential:
        return _examine_sequential(name, module, codec)
    family = BY_CLASS.get(class_name(type(module)))
    if family is None:
        return None, []
    block = read_family(module, family)
    if isinstance(block, str):
        return None, [Skipped(name, block)]
    holder, method = (block.act, "forward") if family.inline else (module, family.method)
    found = Converted(name, family.name, block.activation.name)
    if not isinstance(holder, nn.Module):
        return None, [Skipped(name, f"{family.act} is a function, not a module")]
    if family.inline and parents[id(holder)] > 1:
        return None, [Skipped(name, f"{family.act} belongs to several modules")]
    if isinstance(holder.__dict__.get(method), Patch):
        return None, [found]
    if method in holder.__dict__ or not known_method(module, family):
        return None, [Skipped(name, f"its {method} is not the one that is known")]
    if family.inline:
        return ActivationPatch(holder, module, family.name, codec), [found]
    return MethodPatch(module, family.name, codec), [found]


def _examine_sequential(
    name: str, module: nn.Sequential, codec: str
) -> tuple[Patch | None, list[Converted | Skipped]]:
    found: list[Converted | Skipped] = []
    modules = list(module)
    i = 0
    while i < len(modules):
        result = read_sequential(modules, i)
        i += 1
        if result is None:
            continue
        block, length = result
        label = f"{name}[{i - 1}:{i - 1 + length}]"
        if isinstance(block, str):
            found.append(Skipped(label, block))
        else:
            found.append(Converted(label, SEQUENTIAL, block.activation.name))
            i += length - 1
    blocks = [f for f in found if isinstance(f, Converted)]
    if isinstance(module.__dict__.get("forward"), Patch):
        return None, found
    if "forward" in module.__dict__ and blocks:
        return None, [Skipped(b.name, "its forward is not the one that is known") for b in blocks]
    return SequentialPatch(module, "forward", codec, len(blocks)), found


__all__ = ["ConversionReport", "Converted", "Skipped", "convert", "revert"]
