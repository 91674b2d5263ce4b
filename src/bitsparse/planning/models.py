"""The models that can be planned: our own transformer, and causal language models of transformers.

They are built without values, on PyTorch's ``meta`` device.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bitsparse
from bitsparse.bench.peers import default_chunk
from bitsparse.conversion.block import read_family
from bitsparse.conversion.families import BY_CLASS, class_name
from bitsparse.nn import FeedForward
from bitsparse.planning import tracker
from bitsparse.training.errors import UserError, os_error
from bitsparse.training.model import ModelConfig, Transformer

DENSE, CHECKPOINT, COMPRESSED, CHUNKED = "dense", "checkpoint", "compressed", "chunked"
MODES = (DENSE, CHECKPOINT, COMPRESSED, CHUNKED)


@dataclass(frozen=True)
class Block:
    """A feed-forward block of a model."""

    module: nn.Module
    """Whose forward computes it, and perhaps more."""
    activation: str
    hidden: int


@dataclass(frozen=True)
class Model:
    """A model that a step can be run of."""

    module: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    """Of tokens and targets, int64 ``[batch, seq]``."""
    blocks: list[Block]
    """Feed-forward blocks that can be compressed, in order."""
    set_mode: Callable[[str, int], None]
    """Of the blocks, given the number of tokens."""


@dataclass(frozen=True)
class Source:
    """What is planned."""

    name: str
    vocab_size: int
    seq_len: int
    """The longest sequence."""
    modes: tuple[str, ...]
    build: Callable[[], Model]
    note: str | None = None
    deterministic: bool = False
    """Whether it is trained with deterministic algorithms."""


def own(config: ModelConfig, name: str, codec: str, tokens_per_chunk: int | None) -> Source:
    """The transformer of ``bitsparse train``.

    Raises:
        UserError: a size that is not allowed.
    """
    config.check()

    def build() -> Model:
        with torch.device("meta"):
            module = Transformer(config, DENSE, codec)

        def set_mode(mode: str, tokens: int) -> None:
            for block in module.feed_forwards():
                block.memory = COMPRESSED if mode == CHUNKED else mode
                block.tokens_per_chunk = (
                    (tokens_per_chunk or default_chunk(tokens)) if mode == CHUNKED else None
                )

        blocks = [Block(b, config.activation, config.hidden) for b in module.feed_forwards()]
        return Model(module, module, blocks, set_mode)

    return Source(name, config.vocab_size, config.seq_len, MODES, build, deterministic=True)


def from_transformers(path: Path, codec: str, seq_len: int | None, layers: int | None) -> Source:
    """A causal language model, from its ``config.json`` or the folder that holds it.

    Raises:
        UserError: it cannot be read, or is of an architecture that is not known here.
    """
    given = read_config(path)
    try:
        import transformers
    except ImportError:
        raise UserError(
            "--config: the package transformers is missing: pip install 'bitsparse[hf]'"
        ) from None
    kind = str(given.get("model_type"))
    if kind not in transformers.CONFIG_MAPPING:
        raise UserError(
            f"--config: got model_type {kind!r} in {path}, allowed: one that transformers "
            f"{transformers.__version__} knows"
        )
    if layers is not None:
        given = {**given, "num_hidden_layers": layers}
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(given)
        # Checked here, not when a step is predicted.
        _causal_lm(transformers, config)
        vocab, longest = int(config.vocab_size), getattr(config, "max_position_embeddings", None)
    except UserError:
        raise
    except Exception as error:  # whatever a configuration class or a model makes of wrong values
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"--config: no model can be made from {path}: {reason[0]}") from error
    if seq_len is not None and longest is not None and seq_len > longest:
        raise UserError(f"--seq-len: got {seq_len}, allowed: at most {longest} for this model")

    def build() -> Model:
        module = _causal_lm(transformers, config)
        module.train()
        blocks = _blocks(module)

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            found: Tensor = module(input_ids=tokens, labels=targets, use_cache=False).loss
            return found

        def set_mode(mode: str, tokens: int) -> None:
            with warnings.catch_warnings():  # of names that versions of transformers change
                warnings.simplefilter("ignore")
                bitsparse.revert(module)
                module.gradient_checkpointing_disable()
                if mode == CHECKPOINT:
                    module.gradient_checkpointing_enable({"use_reentrant": False})
                elif mode == COMPRESSED:
                    bitsparse.convert(module, codec=codec)

        return Model(module, loss, blocks, set_mode)

    module = _causal_lm(transformers, config)
    modes = [DENSE]
    if module.supports_gradient_checkpointing:
        modes.append(CHECKPOINT)
    note = "checkpoint: whole layers, as gradient_checkpointing_enable() does"
    if _blocks(module):
        modes.append(COMPRESSED)
    else:
        note = (
            "compressed: no feed-forward block with ReLU or squared ReLU that bitsparse.convert "
            f"knows; {note}"
        )
    name = f"{type(module).__name__}, {path}"
    return Source(name, vocab, seq_len or min(longest or 1024, 4096), tuple(modes), build, note)


def read_config(path: Path) -> dict[str, Any]:
    """The content of a ``config.json``, or of the one in a folder.

    Raises:
        UserError: it cannot be read.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config: {os_error(file, error)}") from error
    except (ValueError, RecursionError):
        raise UserError(f"--config: {file} is not a JSON file") from None
    if not isinstance(content, dict):
        raise UserError(f"--config: {file} holds no JSON object, allowed: a model's config.json")
    return content


def _causal_lm(transformers: Any, config: Any) -> Any:
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise UserError(
            f"--config: got model_type {config.model_type!r}, which has no causal language model "
            "in transformers; allowed: one that has"
        )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def _blocks(module: nn.Module) -> list[Block]:
    """The blocks that ``convert`` finds by their class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = bitsparse.convert(module)
    bitsparse.revert(module)
    found = []
    for converted in report.converted:
        name = converted.name.split("[")[0]
        owner = module.get_submodule(name)
        family = BY_CLASS.get(class_name(type(owner)))
        block = None if family is None else read_family(owner, family)
        if block is None or isinstance(block, str):
            continue  # a part of an nn.Sequential: it has no module of its own
        found.append(Block(owner, converted.activation, block.up.out_features))
    return found


def kinds(model: Model) -> dict[nn.Module, str]:
    """What the modules of ``model`` are for; those that are left out belong to what is around.

    Modules that compressed blocks call are left out: with a hook on them, they would be dense.
    """
    root = model.module
    found: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    layers = _layers(root)
    blocks = {b.module for b in model.blocks}
    for module in root.modules():
        if module in inside or module is root:
            continue
        name = type(module).__name__.lower()
        kind = None
        if isinstance(module, FeedForward) or (module in blocks and module not in layers):
            kind = tracker.FEED_FORWARD
        elif module in layers:
            kind = tracker.RESIDUALS
        elif "attention" in name or "attn" in name:
            kind = tracker.ATTENTION
        elif "norm" in name:
            kind = tracker.NORMS
        elif "mlp" in name or "feedforward" in name or "experts" in name:
            kind = tracker.FEED_FORWARD
        elif isinstance(module, nn.Embedding) or "rotary" in name:
            kind = tracker.EMBEDDING
        if kind is None:
            continue
        found[module] = kind
        if kind != tracker.RESIDUALS:
            inside |= set(module.modules())
    return found


def _layers(root: nn.Module) -> set[nn.Module]:
    """The members of lists of modules that have attention: decoder layers."""
    found: set[nn.Module] = set()
    for module in root.modules():
        if isinstance(module, nn.ModuleList) and len(module):
            if any("att" in type(m).__name__.lower() for m in module[0].modules()):
                found |= set(module)
    return found


def without_values(model: nn.Module, dtype: torch.dtype) -> None:
    """Give ``model`` CPU tensors in place of those on ``meta``, under the fake mode at hand;
    floating-point ones of ``dtype``."""
    memo: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in memo:
                empty = torch.empty(parameter.shape, dtype=dtype, device="cpu")
                memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            module._parameters[name] = memo[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
