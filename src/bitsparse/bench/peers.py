"""Ways to run a stack of feed-forward blocks: what ``bitsparse bench ffn`` puts side by side.

All of them compute ``y = y + ffn(rms_norm(y))`` for one layer after the other, from the same
weights. A *factory* makes the ``ffn`` of one layer; a *peer* makes the whole stack, for what also
concerns the norm and the sum (compiling, checkpointing).
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import bitsparse
from bitsparse.activations import Activation, get_activation
from bitsparse.training.errors import UserError

Weights = dict[str, Tensor]
"""``w_up``, ``w_down`` and, for gated activations, ``w_gate``, as :func:`bitsparse.ffn` takes
them: leaves that require a gradient."""

Block = Callable[[Tensor], Tensor]
"""``[tokens, d_model]`` to the same."""

Factory = Callable[[str, Weights], Block]
"""Of the name of an activation and the weights of one layer."""

EAGER, COMPILE, DENSE = "eager", "compile", "dense"
COMPILE_STACK, BUDGET = "compile-stack", "budget"

_BUDGET = 0.5
_CHUNKS = 4


def default_chunk(tokens: int) -> int:
    """A quarter of the tokens, rounded up to a multiple of 64."""
    return -(-tokens // (64 * _CHUNKS)) * 64


class Unsupported(Exception):
    """A peer cannot do what is asked; says why."""


@dataclass(frozen=True)
class Options:
    """What peers may be told."""

    tokens_per_chunk: int | None = None
    """Of the peer "chunked"; None: :func:`default_chunk`."""
    precision: str | None = None
    """Of :data:`FP8_PEERS`, as :func:`bitsparse.ffn` takes it."""
    compiled: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """By peer, what was compiled; stacks of the same activation and shapes can share it, whatever
    their weights."""


Build = Callable[[str, list[Weights], Options], Block]


@dataclass(frozen=True)
class Peer:
    """One way."""

    name: str
    build: Build
    """The stack, of an activation and the weights of each layer. May raise anything."""
    compiled: bool = False
    """Whether torch.compile is used."""


def _norm(y: Tensor) -> Tensor:
    return F.rms_norm(y, (y.shape[-1],), eps=1e-6)


def stack(blocks: list[Block]) -> Block:
    """The blocks, each on a normalized input and added to the stream."""

    def run(y: Tensor) -> Tensor:
        for block in blocks:
            y = y + block(_norm(y))
        return y

    return run


def from_factory(name: str, factory: Factory) -> Peer:
    """A peer whose blocks a factory makes."""

    def build(activation: str, layers: list[Weights], _: Options) -> Block:
        return stack([factory(activation, weights) for weights in layers])

    return Peer(name, build)


def _ffn(x: Tensor, activation: Activation, weights: Mapping[str, Tensor]) -> Tensor:
    """A feed-forward block in plain PyTorch."""
    names = ("w_gate", "w_up") if activation.gated else ("w_up",)
    hidden = activation.dense(*(F.linear(x, weights[name]) for name in names))
    return F.linear(hidden, weights["w_down"])


def _residual(y: Tensor, activation: Activation, weights: Mapping[str, Tensor]) -> Tensor:
    """One layer in plain PyTorch: what is compiled or checkpointed."""
    return y + _ffn(_norm(y), activation, weights)


def _eager(activation: str, weights: Weights) -> Block:
    return partial(_ffn, activation=get_activation(activation), weights=weights)


def _layers(run: Callable[..., Tensor], activation: str, layers: list[Weights]) -> Block:
    """``run(y, activation, weights)`` for one layer after the other."""
    act = get_activation(activation)

    def whole(y: Tensor) -> Tensor:
        for weights in layers:
            y = run(y, act, weights)
        return y

    return whole


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy: compiled code is remembered by code object, settings are not told apart."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None
    )


def _compiled(options: Options, peer: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled, or what was compiled for this peer before."""
    if peer not in options.compiled:
        options.compiled[peer] = torch.compile(function, dynamic=False)
    return options.compiled[peer]


def _compile(
    activation: str, layers: list[Weights], options: Options, peer: str = COMPILE
) -> Block:
    """One layer is compiled, and used for all."""
    return _layers(_compiled(options, peer, _own_code(_residual)), activation, layers)


def _compile_stack(activation: str, layers: list[Weights], options: Options) -> Block:
    """All layers are compiled together, which takes longer."""
    act = get_activation(activation)

    def whole(y: Tensor, layers: list[Weights]) -> Tensor:
        for weights in layers:
            y = _residual(y, act, weights)
        return y

    # Not by _own_code: a closure; nothing else compiles this one.
    return partial(_compiled(options, COMPILE_STACK, whole), layers=layers)


def _budget(activation: str, layers: list[Weights], options: Options) -> Block:
    from torch._functorch import config

    compiled = _compile(activation, layers, options, BUDGET)

    def run(y: Tensor) -> Tensor:
        # Read when the first call compiles.
        with config.patch(activation_memory_budget=_BUDGET):
            return compiled(y)

    return run


class _SquareAfterRelu(torch.autograd.Function):
    """``square(relu(x))`` that keeps its result alone, as the next product does anyway: relu(x) is
    its rounded square root, but where the square has become 0 or infinite (and, in float32, where
    the device's square root is not the nearest number)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)  # the caller gives it away
        hidden = x.relu_().square_()
        ctx.save_for_backward(hidden)
        return hidden

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        doubled: Tensor = torch.sqrt(hidden).mul_(2)
        return doubled.mul_(grad).masked_fill_(hidden == 0, 0)


def _square_root(activation: str, weights: Weights) -> Block:
    if activation != "relu2":
        raise Unsupported("computes relu2 only")

    def block(x: Tensor) -> Tensor:
        hidden: Tensor = _SquareAfterRelu.apply(F.linear(x, weights["w_up"]))
        return F.linear(hidden, weights["w_down"])

    return block


def _checkpoint(activation: str, layers: list[Weights], _: Options) -> Block:
    """Of a layer its input is kept, nothing else."""
    run = partial(checkpoint, _residual, use_reentrant=False, preserve_rng_state=False)
    return _layers(run, activation, layers)


def _selective(activation: str, layers: list[Weights], _: Options) -> Block:
    """Of a layer its input and the results of matrix products are kept."""
    aten = torch.ops.aten
    products = [aten.mm.default, aten.addmm.default, aten.bmm.default]
    contexts = partial(create_selective_checkpoint_contexts, products)
    run = partial(
        checkpoint, _residual, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
    return _layers(run, activation, layers)


def _offload(activation: str, layers: list[Weights], _: Options) -> Block:
    """All that autograd saves waits in page-locked memory of the host."""
    eager = _layers(_residual, activation, layers)
    on_cuda = layers[0]["w_up"].is_cuda

    def run(y: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=on_cuda):
            return eager(y)

    return run


def _bitsparse(activation: str, weights: Weights, **options: Any) -> Block:
    arguments: dict[str, Any] = {"activation": activation, **weights, **options}
    return partial(bitsparse.ffn, **arguments)


def _from_options(name: str, **given: Any) -> Peer:
    """A peer that is :func:`bitsparse.ffn` with these options."""

    def build(activation: str, layers: list[Weights], options: Options) -> Block:
        precision = options.precision
        blocks = [_bitsparse(activation, w, precision=precision, **given) for w in layers]
        return stack(blocks)

    return Peer(name, build)


def _chunked(activation: str, layers: list[Weights], options: Options) -> Block:
    def block(weights: Weights) -> Block:
        def run(x: Tensor) -> Tensor:
            tokens = options.tokens_per_chunk or default_chunk(x.shape[0])
            return _bitsparse(activation, weights, tokens_per_chunk=tokens)(x)

        return run

    return stack([block(weights) for weights in layers])


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        from_factory(EAGER, _eager),
        Peer(COMPILE, _compile, compiled=True),
        Peer(COMPILE_STACK, _compile_stack, compiled=True),
        Peer(BUDGET, _budget, compiled=True),
        from_factory("sqrt", _square_root),
        Peer("checkpoint", _checkpoint),
        Peer("selective", _selective),
        Peer("offload", _offload),
        _from_options(DENSE, memory="dense"),
        _from_options("compressed"),
        _from_options("fast", codec="fast"),
        _from_options("small", codec="small"),
        Peer("chunked", _chunked),
    )
}
"""By name. "compressed" is bitsparse with its default codec, "fast" and "small" with others."""

DEFAULT_PEERS = tuple(name for name in PEERS if name not in (COMPILE_STACK, DENSE))

FP8_PEERS: dict[str, Peer] = {
    DENSE: PEERS[DENSE],
    "checkpoint": _from_options("checkpoint", memory="checkpoint"),
    **{name: PEERS[name] for name in ("compressed", "fast", "small")},
}
"""Those that compute in FP8, all the same, and keep different things for backward."""


def load_peer(text: str) -> Peer:
    """The peer of a factory, ``module:factory``; modules in the working directory are found.

    Raises:
        UserError: there is no such thing.
    """
    module, colon, name = text.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module.split("."), name))):
        raise UserError(f"--peer: got {text!r}, allowed: module:factory")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        factory = getattr(import_module(module), name, None)
    except Exception as error:  # whatever the module's own code raises
        raise UserError(
            f"--peer: got {text!r}, which cannot be imported ({type(error).__name__}: {error}); "
            "allowed: module:factory"
        ) from error
    finally:
        sys.path.remove(here)
    if not callable(factory):
        raise UserError(f"--peer: got {text!r}, but {module} has no such function")
    return from_factory(text, factory)
