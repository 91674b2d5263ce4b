"""LoRA with PEFT and compressed activations.

    pip install 'bitsparse[examples]'
    python examples/peft_lora.py            # a tiny random OPT, on random tokens
    python examples/peft_lora.py --dense    # the same without bitsparse: the same losses

Adapters are on the projections of attention; the feed-forward blocks are frozen. What no gradient
needs is not kept: of a frozen ReLU block one bit an element, which tells where ReLU passes the
gradient on. A projection that has an adapter of its own is not compressed, so leave those of the
feed-forward blocks out of `target_modules`.
"""

import argparse
from collections.abc import Sequence

import torch
from peft import LoraConfig, get_peft_model
from transformers import OPTConfig, OPTForCausalLM

import bitsparse

VOCAB, BATCH, TOKENS, D_FF, LAYERS = 128, 4, 64, 256, 2


def make_model() -> OPTForCausalLM:
    torch.manual_seed(0)
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            word_embed_proj_dim=64,
            ffn_dim=D_FF,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            max_position_embeddings=TOKENS,
            dropout=0.0,
        )
    )


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="LoRA with compressed activations.")
    parser.add_argument("--dense", action="store_true", help="leave the model as it is")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(make_model(), lora)
    if not options.dense:
        print(bitsparse.convert(model))  # the one line; before `get_peft_model` is as good
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)

    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    for step in range(options.steps):
        tokens = torch.randint(VOCAB, (BATCH, TOKENS), generator=generator).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        if step == 0 and not options.dense:
            kept, elements = (
                bitsparse.memory_stats()["live_compressed_bytes"],
                BATCH * TOKENS * D_FF * LAYERS,
            )
            print(f"kept of {elements} hidden activations: {8 * kept / elements:.2f} bits each")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("losses:", *(f"{loss:.6f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
