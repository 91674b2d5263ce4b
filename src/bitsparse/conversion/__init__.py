"""Making the feed-forward blocks of a whole model keep compressed activations."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from bitsparse import codings
from bitsparse.activations import get_activation
from bitsparse.conversion.block import (
    Block,
    activation_name,
    family_of,
    known_method,
    read_family,
    read_sequential,
)
from bitsparse.conversion.families import EXPERTS, FAMILIES, class_name
from bitsparse.conversion.patch import (
    ExpertsPatch,
    InlinePatch,
    MethodPatch,
    Patch,
    SequentialPatch,
)

SEQUENTIAL = "torch Sequential"
EXPERTS_FAMILY = "Nemotron-H experts"
EXPECTED_DENSITY = 0.1
_KEPT_DENSE = {"relu": 1, "relu2": 2, "reglu": 3, "reglu2": 4}  # tensors, see docs/training.md


@dataclass(frozen=True)
class Converted:
    """A feed-forward block that keeps compressed activations."""

    name: str
    """The module's name in the model ("" is the model); of a part of an ``nn.Sequential``, with
    its slice."""
    family: str
    activation: str
    d_ff: int | None = None
    """Hidden size; None where the weights of several experts are in one tensor."""
    itemsize: int = 0
    """Bytes of an element, in the dtype of the parameters."""

    @property
    def dense_bytes(self) -> int:
        """Of hidden activations that plain PyTorch keeps for each token; 0 if not known."""
        return (self.d_ff or 0) * self.itemsize * _KEPT_DENSE[self.activation]

    def expected_bytes(self, density: float = EXPECTED_DENSITY) -> float:
        """Likewise after conversion, at most, where so much of the activations is not zero:
        positions at their entropy, values as they are."""
        if not 0 <= density <= 1:
            raise ValueError(f"density: got {density!r}, allowed: from 0 to 1")
        parts = (p for p in (density, 1 - density) if p > 0)
        positions = sum(-p * math.log2(p) for p in parts) / 8
        streams = 2 if get_activation(self.activation).gated else 1
        return (self.d_ff or 0) * (positions + density * streams * self.itemsize)


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
        if dense := sum(c.dense_bytes for c in self.converted):
            expected = sum(c.expected_bytes() for c in self.converted)
            lines.append(
                f"expected at density {EXPECTED_DENSITY}: {expected:,.0f} of {dense:,} bytes of "
                "hidden activations a token"
            )
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
        looked = ", ".join([SEQUENTIAL, *(f.name for f in FAMILIES), EXPERTS_FAMILY])
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
    if class_name(type(module)) in EXPERTS:
        return _examine_experts(name, module, codec)
    family = family_of(module)
    if family is None:
        return None, []
    block = read_family(module, family)
    if isinstance(block, str):
        return None, [Skipped(name, block)]
    holder, method = module, family.method
    if family.inline:
        holder, method = block.up if block.act is None else block.act, "forward"
    found = _converted(name, family.name, block)
    if family.inline and parents[id(holder)] > 1:
        child = family.up if block.act is None else family.act
        return None, [Skipped(name, f"{child} belongs to several modules")]
    if isinstance(holder.__dict__.get(method), Patch):
        return None, [found]
    if method in holder.__dict__ or not known_method(module, family):
        return None, [Skipped(name, f"its {method} is not the one that is known")]
    if family.inline:
        return InlinePatch(holder, module, family.name, codec), [found]
    return MethodPatch(module, family.name, codec), [found]


def _converted(name: str, family: str, block: Block) -> Converted:
    weight = block.up.weight
    return Converted(name, family, block.activation.name, weight.shape[0], weight.itemsize)


def _examine_experts(
    name: str, module: nn.Module, codec: str
) -> tuple[Patch | None, list[Converted | Skipped]]:
    act = getattr(module, "act_fn", None)
    activation = activation_name(act)
    if activation is None:
        got = type(act).__name__
        return None, [Skipped(name, f"act_fn is {got}, not ReLU or squared ReLU")]
    found = Converted(name, EXPERTS_FAMILY, activation)
    forward = module.__dict__.get("forward")
    if isinstance(forward, Patch):
        return None, [found]
    if forward is not None or not isinstance(getattr(module, "down_proj", None), Tensor):
        return None, [Skipped(name, "its forward is not the one that is known")]
    return ExpertsPatch(module, "forward", codec), [found]


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
            found.append(_converted(label, SEQUENTIAL, block))
            i += length - 1
    blocks = [f for f in found if isinstance(f, Converted)]
    if isinstance(module.__dict__.get("forward"), Patch):
        return None, found
    if "forward" in module.__dict__ and blocks:
        return None, [Skipped(b.name, "its forward is not the one that is known") for b in blocks]
    return SequentialPatch(module, "forward", codec, len(blocks)), found


__all__ = ["ConversionReport", "Converted", "Skipped", "convert", "revert"]
