"""A decoder-only transformer around :class:`bitsparse.nn.FeedForward`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitsparse.activations import ACTIVATIONS, get_activation
from bitsparse.nn import FeedForward
from bitsparse.ops import fp8
from bitsparse.training.errors import UserError, check_at_least, check_choice


@dataclass(frozen=True)
class ModelConfig:
    """A model: its sizes, and what else the losses depend on; the memory mode is not in here."""

    vocab_size: int = 256
    layers: int = 4
    d_model: int = 256
    heads: int = 4
    d_ff: int | None = None
    """Hidden size; None: 4 * d_model, for gated activations two thirds of it (same parameters)."""
    seq_len: int = 256
    """Longest sequence, in tokens."""
    activation: str = "relu2"
    tied: bool = False
    """Whether the output projection is the embedding matrix."""
    precision: str | None = None
    """FP8 for the feed-forward blocks: "fp8" or "fp8_e4m3"."""
    storage: str | None = None
    """What compressed blocks round the values that they keep to: "fp8", lossy."""
    scaling: str | None = None
    """Of FP8: "tensor" (also where None) or "row"."""

    def check(self) -> None:
        """Raise UserError for a value that is not allowed."""
        check_choice("--activation", self.activation, ACTIVATIONS)
        for name in ("vocab_size", "layers", "d_model", "heads", "seq_len"):
            check_at_least("--" + name.replace("_", "-"), getattr(self, name), 1)
        if self.d_ff is not None:
            check_at_least("--d-ff", self.d_ff, 1)
        try:
            fp8.check_names(self.precision, self.storage, self.scaling or "tensor")
        except ValueError as error:
            raise UserError(f"--{error}") from None
        if self.d_model % (2 * self.heads):
            raise UserError(
                f"--heads: got {self.heads} with --d-model {self.d_model}, "
                "allowed: numbers that divide it into heads of even size"
            )

    @property
    def hidden(self) -> int:
        """d_ff, resolved."""
        if self.d_ff is not None:
            return self.d_ff
        if not get_activation(self.activation).gated:
            return 4 * self.d_model
        return max(64, round(4 * self.d_model * 2 / 3 / 64) * 64)


@dataclass(frozen=True)
class Preset:
    """A model and the training settings that suit it; vocab_size is set from the data."""

    model: ModelConfig
    batch_size: int
    lr: float


PRESETS: dict[str, Preset] = {
    "tiny": Preset(ModelConfig(layers=4, d_model=256, heads=4, seq_len=256), 8, 1e-3),
    "gpt2": Preset(ModelConfig(layers=12, d_model=768, heads=12, seq_len=1024), 16, 6e-4),
    "gpt2-medium": Preset(ModelConfig(layers=24, d_model=1024, heads=16, seq_len=1024), 16, 3e-4),
    "1b": Preset(ModelConfig(layers=18, d_model=2048, heads=16, seq_len=2048), 8, 2e-4),
}


def get_preset(name: str) -> Preset:
    """Look a preset up; UserError if there is none of that name."""
    check_choice("--preset", name, PRESETS)
    return PRESETS[name]


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x``: ``[batch, seq, d_model]``; ``cos``, ``sin``: ``[seq, d_head / 2]``."""
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, width))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x``, ``[batch, heads, seq, d_head]``; same dtype."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalized input and added to the stream."""

    def __init__(self, config: ModelConfig, memory: str, codec: str) -> None:
        super().__init__()
        self.norm_attn = nn.RMSNorm(config.d_model, eps=1e-6)
        self.attn = Attention(config)
        self.norm_ffn = nn.RMSNorm(config.d_model, eps=1e-6)
        self.ffn = FeedForward(
            config.d_model,
            config.hidden,
            activation=config.activation,
            memory=memory,
            codec=codec,
            precision=config.precision,
            # Of several modes side by side one keeps something that can be rounded.
            storage=config.storage if memory == "compressed" else None,
            scaling=config.scaling or "tensor",
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[batch, seq, d_model]`` to the same."""
        x = x + self.attn(self.norm_attn(x), cos, sin)
        out: Tensor = x + self.ffn(self.norm_ffn(x))
        return out


class Transformer(nn.Module):
    """The model. Parameters are float32; a lower precision is the business of autocast.

    Raises:
        UserError: a value in ``config`` that is not allowed.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: ModelConfig, memory: str = "compressed", codec: str = "balanced"
    ) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, memory, codec) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.head = (
            None if config.tied else nn.Linear(config.d_model, config.vocab_size, bias=False)
        )
        half = config.d_model // config.heads // 2
        angles = torch.outer(torch.arange(config.seq_len), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Normal weights; the projections that end a residual branch are smaller with depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            ends_branch = name.endswith(("attn.out.weight", "ffn.down.weight"))
            std = 0.02 / (2 * self.config.layers) ** 0.5 if ends_branch else 0.02
            nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """``tokens``, ``targets``: int64 ``[batch, seq]``.

        Returns:
            The mean loss, float32 ``[]``, or without targets the logits ``[batch, seq, vocab]``.
        """
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        weight = self.embed.weight if self.head is None else self.head.weight
        logits = F.linear(self.norm(x), weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def feed_forwards(self) -> list[FeedForward]:
        """The feed-forward block of each layer."""
        return [block.ffn for block in self.blocks]  # type: ignore[misc]


def build_model(
    config: ModelConfig, memory: str, seed: int, device: torch.device, codec: str = "balanced"
) -> Transformer:
    """A model whose weights depend on ``config`` and ``seed`` only, not on the device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(config, memory, codec)
    return model.to(device)


def fit_vocabulary(config: ModelConfig, vocab_size: int) -> ModelConfig:
    """``config`` with the vocabulary of the data."""
    return replace(config, vocab_size=vocab_size)


@torch.no_grad()
def generate(model: Transformer, prompt: list[int], count: int, seed: int) -> list[int]:
    """Sample ``count`` tokens after ``prompt``; the result depends on ``seed`` only."""
    device = model.cos.device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-model.config.seq_len :]], device=device)
        logits = model(window)[0, -1].float().cpu()
        choice = torch.multinomial(torch.softmax(logits / 0.8, dim=-1), 1, generator=generator)
        tokens.append(int(choice))
    return tokens
