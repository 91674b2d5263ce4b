"""A small GPT, trained by a plain loop, in the manner of nanoGPT. Needs nothing but bitsparse.

python examples/nanogpt.py                      # a tiny model, on made-up text
python examples/nanogpt.py --dense              # the same without bitsparse: the same losses
python examples/nanogpt.py --data FILE --layers 6 --width 384 --heads 6 --tokens 256 --steps 2000
"""

import argparse
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitsparse


class Block(nn.Module):
    """Causal self-attention, then a feed-forward block with ReLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attn, self.norm_ffn = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ffn = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens, width]`` to the same."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm_attn(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        out: Tensor = x + self.ffn(self.norm_ffn(x))
        return out


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Both int64 ``[batch, tokens]``; the mean loss, ``[]``."""
        x = self.embed(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="A small GPT with compressed activations.")
    parser.add_argument("--dense", action="store_true", help="leave the model as it is")
    parser.add_argument("--data", type=Path, help="a file, read as bytes")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    autocast = torch.autocast(device, torch.bfloat16) if device == "cuda" else nullcontext()
    made_up = "".join(f"{i} plus {i} is {2 * i}.\n" for i in range(500)).encode()
    text = made_up if options.data is None else options.data.read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    torch.manual_seed(0)
    model = GPT(options.layers, options.width, options.heads, options.tokens).to(device)
    if not options.dense:
        print(bitsparse.convert(model))  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)

    losses: list[float] = []
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        starts = torch.randint(len(data) - options.tokens, (options.batch,)).tolist()
        windows = torch.stack([data[s : s + options.tokens + 1] for s in starts]).to(device)
        with autocast:
            loss = model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0 or step == options.steps - 1:
            print(f"step {step + 1}: loss {losses[-1]:.6f}")
    return losses


if __name__ == "__main__":
    main()
