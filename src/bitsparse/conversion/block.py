"""Finding a feed-forward block in modules, and computing it with compressed activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitsparse import dtypes
from bitsparse.activations import Activation, get_activation
from bitsparse.conversion.between import (
    Between,
    Dropout,
    Norm,
    activate_then_project,
)
from bitsparse.conversion.families import BY_CHILDREN, BY_CLASS, NORMS, Family, class_name
from bitsparse.conversion.recording import computes, unwrapped
from bitsparse.nn import is_untouched
from bitsparse.ops import capture
from bitsparse.ops.block import Tensors, is_transformed
from bitsparse.ops.feed_forward import activate_and_project, check_arguments, feed_forward

_GATED = {"relu": "reglu", "relu2": "reglu2"}


@dataclass(frozen=True)
class Block:
    """The modules of ``down(dropout(activation(up(x))))``, or of the gated form; with a norm in the
    place of dropout."""

    up: nn.Linear
    down: nn.Linear
    gate: nn.Linear | None
    act: Any
    """None where a method calls functions instead."""
    dropout: nn.Dropout | None
    activation: Activation
    norm: nn.Module | None = None


def read_family(module: nn.Module, family: Family) -> Block | str:
    """The block that ``module``, of a class of ``family``, computes; or why it is none."""

    def child(name: str | None) -> tuple[str, Any]:
        return name or "", None if name is None else getattr(module, name, None)

    norm = None if family.norm is None else getattr(module, family.norm, None)
    if family.norm is not None and class_name(type(norm)) not in NORMS:
        return f"{family.norm} is {type(norm).__name__}, which is not known"
    block = read_children(
        child(family.up),
        child(family.act),
        child(family.down),
        None if family.gate is None else child(family.gate),
        None if family.dropout is None else child(family.dropout),
        family.functional,
    )
    if isinstance(block, str):
        return block
    called = family.inline and not isinstance(block.act, nn.Module)
    return replace(block, act=None if called else block.act, norm=norm)


def read_sequential(modules: list[nn.Module], start: int) -> tuple[Block | str, int] | None:
    """The block that begins at ``modules[start]``, or why it is none, and its length.

    None where there is nothing like one.
    """
    has_dropout = len(modules) > start + 3 and type(modules[start + 2]) is nn.Dropout
    length = 4 if has_dropout else 3
    if len(modules) < start + length:
        return None
    children = [(str(start + i), m) for i, m in enumerate(modules[start : start + length])]
    first, act, last = children[0], children[1], children[-1]
    if not (isinstance(first[1], nn.Linear) and isinstance(last[1], nn.Linear)):
        return None
    if activation_name(act[1]) is None and "activation" not in type(act[1]).__module__:
        return None
    return read_children(first, act, last, None, children[2] if has_dropout else None), length


def read_children(
    up: tuple[str, Any],
    act: tuple[str, Any],
    down: tuple[str, Any],
    gate: tuple[str, Any] | None,
    dropout: tuple[str, Any] | None,
    functional: str | None = None,
) -> Block | str:
    """The block of these children, each with its name; or why it is none."""
    name = functional or activation_name(act[1])
    if name is None:
        got = getattr(act[1], "__name__", type(act[1]).__name__)
        return f"{act[0]} is {got}, not ReLU or squared ReLU"
    for child, cls in (
        (up, nn.Linear),
        (down, nn.Linear),
        (gate, nn.Linear),
        (dropout, nn.Dropout),
    ):
        if child is None:
            continue
        if type(child[1]) is not cls:
            return f"{child[0]} is {type(child[1]).__name__}, not nn.{cls.__name__}"
        # That of `up` may be ours, where the activation is a function.
        ours = child[1] is up[1] and not isinstance(act[1], nn.Module)
        if "forward" in child[1].__dict__ and not ours:
            return f"{child[0]} has a forward of its own"
    return Block(
        up[1],
        down[1],
        None if gate is None else gate[1],
        act[1],
        None if dropout is None else dropout[1],
        get_activation(name if gate is None else _GATED[name]),
    )


def activation_name(act: Any) -> str | None:
    """ "relu" or "relu2" if ``act``, a function or module, computes it, else None."""
    if act is F.relu or act is torch.relu or type(act) is nn.ReLU:
        return "relu"
    if class_name(type(act)) == "transformers.activations.ReLUSquaredActivation":
        return "relu2"
    return None


def family_of(module: nn.Module) -> Family | None:
    """The family whose block ``module`` computes; or one that it resembles, to say what differs."""
    family = BY_CLASS.get(class_name(type(module)))
    if family is not None:
        return family
    alike = [
        f
        for f in BY_CHILDREN
        if f.up in module._modules and all(hasattr(module, name) for name in f.children)
    ]
    return next((f for f in alike if known_method(module, f)), alike[0] if alike else None)


def known_method(module: nn.Module, family: Family) -> bool:
    """Whether the method of the class of ``module`` computes what ``family`` says.

    Inline ones are not looked at: they compute other things too, and what stands in for the
    activation is right in whatever they do.
    """
    named = class_name(type(module)) in family.classes
    method = unwrapped(module, family, decorated=named)
    return method is not None and (family.inline or computes(method, family))


def is_exact(block: Block, patched: nn.Module | None = None) -> bool:
    """Whether the compressed block has the bits of calling the modules one by one, as they are.

    ``patched``: the one whose forward is a patch of ours.
    """
    linears = [m for m in (block.up, block.down, block.gate) if m is not None]
    # The activation may be a function, or none.
    modules = [m for m in (block.act, block.dropout, block.norm) if isinstance(m, nn.Module)]
    if not all(is_untouched(m, m is patched) for m in (*linears, *modules)):
        return False
    dropout = block.dropout
    if dropout is not None and dropout.inplace and dropout.training and dropout.p > 0:
        return False
    parameters = [p for m in linears for p in (m.weight, m.bias) if p is not None]
    if block.norm is not None:
        parameters += block.norm.parameters()
    if not all(_is_ordinary(p) for p in parameters):
        return False
    device = block.down.weight.device.type
    if device == "meta":
        return False
    if torch.is_autocast_enabled(device):
        # A cast that a module makes itself, to the dtype of a weight, changes nothing then.
        allowed = (torch.float32, torch.get_autocast_dtype(device))
        if not all(p.dtype in allowed for p in parameters):
            return False
    if torch.compiler.is_compiling() and between_of(block) is not None:
        return False
    return not is_transformed()


def hooks_apply() -> bool:
    """Whether saved-tensor hooks of ours may be added: nobody else has any, whose they would hide
    (activation checkpointing, offloading), and what runs is eager."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return False
    hooks: Any = torch._C._autograd
    return (
        hooks._saved_tensors_hooks_is_enabled()
        and hooks._top_saved_tensors_default_hooks(True) is None
    )


def _is_ordinary(x: Any) -> bool:
    """Whether ``x`` is a tensor of no other type (quantized, distributed), which may compute
    otherwise."""
    return type(x) in (Tensor, nn.Parameter) and not x.is_nested


def run(block: Block, x: Any, codec: str) -> Tensor | None:
    """The block of ``x``; None where it is to be computed by the modules themselves."""
    if not torch.is_grad_enabled() or not _is_ordinary(x) or not is_exact(block):
        return None
    up, down, gate = block.up, block.down, block.gate
    t = Tensors(
        x,
        up.weight,
        down.weight,
        None if gate is None else gate.weight,
        up.bias,
        down.bias,
        None if gate is None else gate.bias,
    )
    between = between_of(block)
    wanted = (*t, *(() if between is None else between.parameters.values()))
    if not any(p is not None and p.requires_grad for p in wanted):
        return None
    try:
        check_arguments(t, block.activation, "compressed")
    except (TypeError, ValueError):
        return None
    if between is None:
        return feed_forward(*t[:3], block.activation, *t[3:], "compressed", codec)
    if x.numel() <= x.shape[-1] or up.weight.shape[0] == 0 or capture.applies(x):
        return None
    gate_pre, up_pre = t.project(block.activation)
    return activate_then_project(
        gate_pre, up_pre, down.weight, down.bias, block.activation, between, codec
    )


def between_of(block: Block) -> Between | None:
    """What changes the hidden tensor before the down projection, this time."""
    if block.norm is not None:
        return Norm(block.norm)
    dropout = block.dropout
    if dropout is not None and dropout.training and dropout.p > 0:
        return Dropout(dropout.p)
    return None


@dataclass
class _Source:
    """What several stand-ins of one pre-activation share."""

    pre: Tensor
    block: Block
    codec: str
    consumed: bool = False
    """Its memory has been reused: by ReLU's result, of plain ReLU."""


# What a method calls for these, one after the other.
_RELU = (torch.relu, F.relu)
_STEPS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "relu": (_RELU,),
    "relu2": (_RELU, (torch.square,)),
}


class Pending(Tensor):
    """What a patched module of an inline block returns: the pre-activation, not activated yet.

    It is no more than a name for ``activation(pre)``, or that after active dropout; or, where a
    method calls functions for the activation, for what those called so far give. The down
    projection finds it and computes all at once; any other operation gets the result, so that
    nobody can see a difference. (It holds no values itself: what would go around
    `__torch_function__` fails.)
    """

    source: _Source
    steps: int
    """How many of the functions were called already."""
    dropout: Dropout | None
    dense: Tensor | None

    @staticmethod
    def wrap(source: _Source, steps: int, dropout: Dropout | None = None) -> Pending:
        pre = source.pre
        pending = torch.empty(pre.shape, dtype=pre.dtype, device="meta").as_subclass(Pending)
        pending.source, pending.steps, pending.dropout = source, steps, dropout
        pending.dense = None
        return pending

    @property
    def activated(self) -> bool:
        return self.steps == len(_STEPS[self.source.block.activation.name])

    def materialized(self) -> Tensor:
        source = self.source
        activation = source.block.activation
        if self.dense is None:
            if source.consumed and not (activation.plain and self.activated):
                raise RuntimeError(
                    "an activation of a converted block is used after its down projection has "
                    "consumed it; bitsparse.revert(model) undoes the conversion"
                )
            if self.activated:
                self.dense = activation.dense(source.pre)
            else:
                self.dense = source.pre if self.steps == 0 else torch.relu(source.pre)
            if self.dropout is not None:
                self.dense = self.dropout(self.dense)
        return self.dense

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = args[0]._next(func, args, kwargs) if _is_pending(args) else None
        if result is not None:
            return result
        args, kwargs = torch.utils._pytree.tree_map_only(
            Pending, Pending.materialized, (args, kwargs)
        )
        return func(*args, **kwargs)

    def _next(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The result of an operation that an inline block makes; None if it is another."""
        source = self.source
        down = source.block.down
        if self.dense is not None:
            return None
        if not self.activated:
            if (
                func in _STEPS[source.block.activation.name][self.steps]
                and len(args) == 1
                and not any(kwargs.values())
            ):
                return Pending.wrap(source, self.steps + 1)
        elif func is F.linear and len(args) == 3 and args[1] is down.weight and not kwargs:
            if args[2] is down.bias and not source.consumed:
                return _activate_and_project(self)
        elif func is F.dropout and len(args) == 1 and not kwargs.get("inplace"):
            p = kwargs.get("p", 0.5)
            if not kwargs.get("training", True) or p == 0:
                return self
            if 0 < p <= 1 and self.dropout is None:
                dropout = Dropout(p)
                # Draws here, where the method does; what is drawn for is computed later.
                dropout(torch.empty_like(source.pre))
                return Pending.wrap(source, self.steps, dropout)
        return None


def _is_pending(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], Pending)


def pend(block: Block, patched: nn.Module, pre: Any, codec: str) -> Pending | None:
    """``pre``, or the activation of it where that is a module, pending.

    None where the ``patched`` module itself is to compute it.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not _is_ordinary(pre):
        return None
    if not is_exact(block, patched):
        return None
    w, b = block.down.weight, block.down.bias
    autocast = torch.is_autocast_enabled(w.device.type)
    dtype = torch.get_autocast_dtype(w.device.type) if autocast else w.dtype
    fits = (
        (pre.requires_grad or w.requires_grad)
        and pre.device == w.device
        and pre.layout == torch.strided
        and pre.dim() > 0
        and pre.shape[-1] == w.shape[1] > 0
        and pre.numel() > pre.shape[-1]  # one token is kept dense, as in `feed_forward`
        and pre.dtype in dtypes.COMPUTE_DTYPES
        and pre.dtype == dtype
        and (autocast or b is None or b.dtype == dtype)
        and not capture.applies(pre)
    )
    steps = 0 if block.act is None else len(_STEPS[block.activation.name])
    return Pending.wrap(_Source(pre, block, codec), steps) if fits else None


def _activate_and_project(pending: Pending) -> Tensor:
    source = pending.source
    pre, block, down = source.pre, source.block, source.block.down
    source.consumed = True
    if pending.dropout is None:
        return activate_and_project(
            pre, None, down.weight, down.bias, block.activation, source.codec
        )
    return activate_then_project(
        pre, None, down.weight, down.bias, block.activation, pending.dropout, source.codec
    )
