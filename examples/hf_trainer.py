"""Hugging Face `Trainer` with compressed activations.

    pip install 'bitsparse[examples]'
    python examples/hf_trainer.py            # a tiny random Llama with ReLU², random tokens
    python examples/hf_trainer.py --dense    # the same without bitsparse: the same losses

With a model of your own: `AutoModelForCausalLM.from_pretrained(...)` in the place of `make_model`.
Leave gradient checkpointing off, as it is by default: it keeps no activations in the first place.
"""

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import bitsparse

VOCAB, TOKENS = 128, 32


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            hidden_act="relu2",
        )
    )


class RandomTokens(torch.utils.data.Dataset):
    """Sequences that are always the same."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCAB, (TOKENS,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class RecordingTrainer(Trainer):
    """A `Trainer` that keeps the loss of every batch, unrounded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Trainer with compressed activations.")
    parser.add_argument("--dense", action="store_true", help="leave the model as it is")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)

    model = make_model()
    if not options.dense:
        print(bitsparse.convert(model))  # the one line

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            use_cpu=not torch.cuda.is_available(),
            seed=0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = RecordingTrainer(model=model, args=settings, train_dataset=RandomTokens())
        trainer.train()
    print("losses:", *(f"{loss:.6f}" for loss in trainer.losses))
    return trainer.losses


if __name__ == "__main__":
    main()
