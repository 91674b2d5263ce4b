"""What a method computes, found by running it on names instead of tensors.

Names of classes and attributes say little: another version of a library, or a subclass, may compute
something else under the same ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import Any

from torch import Tensor

from bitsparse.conversion.families import Family


class _Value:
    """An expression, as nested tuples; anything but a product of two is an error."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expression: Any) -> None:
        self.expression = expression

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # to methods that ask what they are given
        return Tensor

    def __mul__(self, other: Any) -> _Value:
        return _Value(("*", self.expression, other.expression))

    def _unknown(self, *_: Any) -> Any:
        raise TypeError("not a product of two values")

    __imul__ = __bool__ = __eq__ = __ne__ = _unknown


class _Child:
    """Of a module; called with one value. Its weight is no tensor, so it is not cast to either."""

    weight = None

    def __init__(self, name: str, called: list[str]) -> None:
        self.name, self.called = name, called

    def __call__(self, value: Any) -> _Value:
        self.called.append(self.name)
        return _Value((self.name, value.expression))


def computes(method: Callable[..., Any], family: Family) -> bool:
    """Whether ``method`` of a module is nothing but what ``family`` says.

    It may mention no other names, so that running it has no effects.
    """
    code = getattr(method, "__code__", None)
    if not isinstance(code, CodeType) or not set(code.co_names) <= family.names:
        return False
    if code.co_freevars or any(isinstance(c, CodeType) for c in code.co_consts):
        return False
    called: list[str] = []
    children = {name: _Child(name, called) for name in family.children}
    try:
        out = method(SimpleNamespace(**children), _Value("x")).expression
    except Exception:  # whatever it does with a value
        return False
    return bool(out == _expression(family) and called == list(family.children))


def _expression(family: Family) -> Any:
    out: Any = (family.act, (family.gate or family.up, "x"))
    if family.gate is not None:
        out = ("*", out, (family.up, "x"))
    for name in (family.dropout, family.norm, family.down, family.then):
        out = out if name is None else (name, out)
    return out


def unwrapped(module: Any, family: Family, *, decorated: bool) -> Callable[..., Any] | None:
    """The method of the class of ``module`` that ``family`` names, if it is a plain function.

    ``decorated``: or, within decorators.
    """
    method = inspect.getattr_static(type(module), family.method, None)
    if not callable(method):
        return None
    inner: Callable[..., Any] = inspect.unwrap(method)
    return inner if decorated or inner is method else None
