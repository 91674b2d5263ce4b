"""Finding a feed-forward block in modules, and computing it with compressed activations."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from bitsparse import dtypes
from bitsparse.activations import Activation, get_activation
from bitsparse.conversion.families import Family, class_name
from bitsparse.nn import is_plain_linear, is_untouched
from bitsparse.ops import capture
from bitsparse.ops.block import Tensors
from bitsparse.ops.feed_forward import activate_and_project, check_arguments, feed_forward

_GATED = {"relu": "reglu", "relu2": "reglu2"}


@dataclass(frozen=True)
class Block:
    """The modules of ``down(dropout(activation(up(x))))``, or of the gated form."""

    up: nn.Linear
    down: nn.Linear
    gate: nn.Linear | None
    act: Any
    dropout: nn.Dropout | None
    activation: Activation


def read_family(module: nn.Module, family: Family) -> Block | str:
    """The block that ``module``, of a class of ``family``, computes; or why it is none."""

    def child(name: str | None) -> tuple[str, Any]:
        return name or "", None if name is None else getattr(module, name, None)

    return read_children(
        child(family.up),
        child(family.act),
        child(family.down),
        None if family.gate is None else child(family.gate),
        None if family.dropout is None else child(family.dropout),
    )


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
) -> Block | str:
    """The block of these children, each with its name; or why it is none."""
    name = activation_name(act[1])
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
        if "forward" in child[1].__dict__:
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


def known_method(module: nn.Module, family: Family) -> bool:
    """Whether the method of ``module`` is its class's, and mentions what ``family`` says at most.

    Another version of a library may compute something else under the same name.
    """
    cls = type(module)
    method = getattr(cls, family.method, None)
    code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
    if code is None or getattr(method, "__module__", None) != cls.__module__:
        return False
    return family.inline or set(code.co_names) <= family.names


def is_exact(block: Block, patched_act: bool = False) -> bool:
    """Whether the compressed block has the bits of calling the modules one by one, as they are."""
    linears = [m for m in (block.up, block.down, block.gate) if m is not None]
    if not all(map(is_plain_linear, linears)):
        return False
    # It may be a function, too.
    if isinstance(block.act, nn.Module) and not is_untouched(block.act, patched_act):
        return False
    dropout = block.dropout
    if dropout is not None and not is_untouched(dropout):
        return False
    if dropout is not None and dropout.training and dropout.p > 0:
        return False
    parameters = [p for m in linears for p in (m.weight, m.bias) if p is not None]
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
    if torch.compiler.is_compiling():
        return not getattr(torch.compiler, "is_exporting", lambda: False)()
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not transformed and not torch._C._is_tracing()


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
    if not any(p is not None and p.requires_grad for p in t):
        return None
    try:
        check_arguments(t, block.activation, "compressed")
    except (TypeError, ValueError):
        return None
    return feed_forward(*t[:3], block.activation, *t[3:], "compressed", codec)


class Pending(Tensor):
    """What the activation of an inline block returns: a pre-activation, not activated yet.

    It is no more than a name for ``activation(pre)``. The down projection finds it and computes
    both at once; any other operation gets the activation's result, so that nobody can see a
    difference. (It holds no values itself: what would go around `__torch_function__` fails.)
    """

    pre: Tensor | None
    """None when the down projection has consumed it, squared forms."""
    block: Block
    codec: str
    dense: Tensor | None

    @staticmethod
    def wrap(pre: Tensor, block: Block, codec: str) -> Pending:
        pending = torch.empty(pre.shape, dtype=pre.dtype, device="meta").as_subclass(Pending)
        pending.pre, pending.block, pending.codec, pending.dense = pre, block, codec, None
        return pending

    def activated(self) -> Tensor:
        if self.dense is None:
            if self.pre is None:
                raise RuntimeError(
                    "an activation of a converted block is used after its down projection has "
                    "consumed it; bitsparse.revert(model) undoes the conversion"
                )
            self.dense = self.block.activation.dense(self.pre)
        return self.dense

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Pending):
            down = first.block.down
            if func is F.linear and len(args) == 3 and args[1] is down.weight and not kwargs:
                if args[2] is down.bias and first.dense is None and first.pre is not None:
                    return _activate_and_project(first)
            elif func is F.dropout and len(args) == 1 and not kwargs.get("inplace"):
                if not kwargs.get("training", True) or kwargs.get("p", 0.5) == 0:
                    return first
        args, kwargs = torch.utils._pytree.tree_map_only(Pending, Pending.activated, (args, kwargs))
        return func(*args, **kwargs)


def pend(block: Block, pre: Any, codec: str) -> Pending | None:
    """The activation of ``pre``, pending; None where the module itself is to compute it."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not _is_ordinary(pre):
        return None
    if not is_exact(block, patched_act=True):
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
    return Pending.wrap(pre, block, codec) if fits else None


def _activate_and_project(pending: Pending) -> Tensor:
    pre, block, down = pending.pre, pending.block, pending.block.down
    assert pre is not None
    if not block.activation.plain:
        pending.pre = (
            None  # its memory is reused; relu's holds its result, of which relu is the same
        )
    return activate_and_project(pre, None, down.weight, down.bias, block.activation, pending.codec)
