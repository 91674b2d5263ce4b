"""Finding the feed-forward blocks of a model, whether they are compressed or not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from bitsparse.activations import Activation, get_activation
from bitsparse.conversion import SEQUENTIAL, Skipped
from bitsparse.conversion.block import Block, read_family, read_sequential
from bitsparse.conversion.families import BY_CLASS, FAMILIES, class_name
from bitsparse.conversion.patch import Patch
from bitsparse.nn import FeedForward

COMPRESSED, DENSE = "compressed", "dense"


@dataclass(frozen=True)
class ProfiledBlock:
    """A feed-forward block, and where it is computed."""

    name: str
    """As :func:`bitsparse.convert` names it."""
    activation: Activation
    up: nn.Linear
    down: nn.Linear
    gate: nn.Linear | None
    parts: tuple[nn.Module, ...]
    """The modules that make it up. They must not get hooks: a block with hooks inside is not
    compressed."""
    module: nn.Module | None
    """One that computes the block and nothing else, if there is one."""
    between: tuple[nn.Module, ...] = ()
    """What changes the hidden tensor before the down projection: dropout, a norm."""
    patched: nn.Module | None = None
    """What :func:`bitsparse.convert` gives another method."""

    @property
    def memory(self) -> str:
        """The memory mode, as it is now."""
        if isinstance(self.module, FeedForward):
            return self.module.memory
        patched = self.patched
        if patched is not None and any(isinstance(v, Patch) for v in patched.__dict__.values()):
            return COMPRESSED
        return DENSE

    @property
    def recomputes_input(self) -> bool:
        """Whether its projections run where they cannot be watched: in chunks."""
        return isinstance(self.module, FeedForward) and self.module.tokens_per_chunk is not None


def find_blocks(model: nn.Module) -> tuple[list[ProfiledBlock], list[Skipped]]:
    """The blocks of ``model``, and what is nearly one, with the reason why it is not watched.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: it has no block.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, allowed: torch.nn.Module")
    blocks: list[ProfiledBlock] = []
    skipped: list[Skipped] = []
    for name, module in model.named_modules():
        for found in _examine(name, module):
            (skipped if isinstance(found, Skipped) else blocks).append(found)  # type: ignore[arg-type]
    if not blocks:
        looked = ", ".join(["bitsparse.nn.FeedForward", SEQUENTIAL, *(f.name for f in FAMILIES)])
        nearly = "".join(f"; {s.name or 'model'}: {s.reason}" for s in skipped[:5])
        raise ValueError(
            f"model: got {type(model).__name__} without a feed-forward block with ReLU or squared "
            f"ReLU; allowed: models with one of: {looked} (docs/convert.md){nearly}"
        )
    return blocks, skipped


def _examine(name: str, module: nn.Module) -> list[ProfiledBlock | Skipped]:
    if isinstance(module, FeedForward):
        return [_feed_forward(name, module)]
    if type(module) is nn.Sequential:
        return _sequential(name, module)
    family = BY_CLASS.get(class_name(type(module)))
    if family is None:
        return []
    block = read_family(module, family)
    if isinstance(block, str):
        return [Skipped(name, block)]
    whole = not family.inline and family.method == "forward"
    patched = module
    if family.inline:
        patched = block.up if block.act is None else block.act
    return [_block(name, block, module if whole else None, patched)]


def _feed_forward(name: str, module: FeedForward) -> ProfiledBlock | Skipped:
    activation = get_activation(module.activation)
    gate = module.gate if activation.gated else None
    for child, linear in (("up", module.up), ("down", module.down), ("gate", gate)):
        if linear is not None and type(linear) is not nn.Linear:
            return Skipped(name, f"{child} is {type(linear).__name__}, not nn.Linear")
    if module.precision is not None:
        return Skipped(name, f"precision is {module.precision!r}: products in FP8 are not watched")
    parts = (module.up, module.down, *(() if gate is None else (gate,)))
    return ProfiledBlock(name, activation, module.up, module.down, gate, parts, module)


def _block(
    name: str, block: Block, module: nn.Module | None, patched: nn.Module | None
) -> ProfiledBlock:
    children = (block.up, block.down, block.gate, block.act, block.dropout, block.norm)
    parts = tuple(c for c in children if isinstance(c, nn.Module))
    return ProfiledBlock(
        name,
        block.activation,
        block.up,
        block.down,
        block.gate,
        parts,
        module,
        tuple(m for m in (block.norm, block.dropout) if m is not None),
        patched,
    )


def _sequential(name: str, module: nn.Sequential) -> list[ProfiledBlock | Skipped]:
    found: list[ProfiledBlock | Skipped] = []
    modules = list(module)
    i = 0
    while i < len(modules):
        result = read_sequential(modules, i)
        if result is None:
            i += 1
            continue
        block, length = result
        label = f"{name}[{i}:{i + length}]"
        if isinstance(block, str):
            found.append(Skipped(label, block))
            i += 1
        else:
            found.append(_block(label, block, None, module))
            i += length
    return found
