"""A few training steps of a preset, looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bitsparse.codings import POLICIES
from bitsparse.ops.feed_forward import MEMORY_MODES
from bitsparse.profiling.live import OnStep
from bitsparse.profiling.profiler import profile
from bitsparse.profiling.results import Profile
from bitsparse.training.compare import environment
from bitsparse.training.data import load_corpus
from bitsparse.training.errors import (
    UserError,
    check_at_least,
    check_batch,
    check_choice,
    check_finite,
)
from bitsparse.training.model import ModelConfig, build_model, fit_vocabulary
from bitsparse.training.step import DTYPES, get_device, learning_rate, make_trainee, train_step
from bitsparse.training.train import LARGEST_SEED

_WARMUP, _WEIGHT_DECAY, _GRAD_CLIP = 10, 0.1, 1.0


@dataclass(frozen=True)
class ProfileConfig:
    """What is trained, and at which steps it is looked at."""

    model: ModelConfig
    data: list[Path] = field(default_factory=list)
    tokenizer: Path | None = None
    vocab_size: int | None = None
    memory: str = "compressed"
    codec: str = "balanced"
    dtype: str = "float32"
    device: str | None = None
    seed: int = 0
    steps: int = 20
    every: int | None = 5
    """None: as the overhead allows."""
    batch_size: int = 8
    lr: float = 1e-3

    def check(self) -> None:
        """Raise UserError for a value that is not allowed."""
        self.model.check()
        if self.model.precision is not None:
            raise UserError(
                f"--precision: got {self.model.precision!r}, allowed: none; products in FP8 are "
                "not watched"
            )
        check_choice("--memory", self.memory, MEMORY_MODES)
        check_choice("--codec", self.codec, POLICIES)
        check_choice("--dtype", self.dtype, DTYPES)
        check_at_least("--steps", self.steps, 1)
        check_at_least("--every", 1 if self.every is None else self.every, 1)
        check_at_least("--lr", self.lr, 0)
        check_at_least("--batch-size", self.batch_size, 1)
        check_batch(self.batch_size, self.model.seq_len)
        check_at_least("--seed", self.seed, 0, LARGEST_SEED)


def run_profile(config: ProfileConfig, on_step: OnStep | None = None) -> Profile:
    """Train for ``config.steps`` steps and return what was found out.

    Raises:
        UserError: a value or the data is not usable, or training diverged.
    """
    config.check()
    device = get_device(config.device)
    corpus = load_corpus(config.data, config.tokenizer, config.vocab_size)
    model_config = fit_vocabulary(config.model, corpus.vocab_size)
    split, _ = corpus.split(0.0)
    split.check_length(model_config.seq_len, "training")
    model = build_model(model_config, config.memory, config.seed, device, config.codec)
    trainee = make_trainee(model, config.dtype, config.lr, _WEIGHT_DECAY, _GRAD_CLIP)
    watched = profile(model, every=config.every, codec=config.codec, on_step=on_step)
    with watched:
        for step in range(config.steps):
            tokens, targets = split.batch(
                config.seed, step, 0, config.batch_size, model_config.seq_len
            )
            lr = learning_rate(step, config.steps, _WARMUP, config.lr)
            loss, _ = train_step(trainee, [(tokens.to(device), targets.to(device))], lr)
            check_finite(loss.item(), step, config.memory)
            watched.step()
    result = watched.result
    result.header |= {
        "layers": model_config.layers,
        "d_model": model_config.d_model,
        "d_ff": model_config.hidden,
        "batch_size": config.batch_size,
        "seq_len": model_config.seq_len,
        "dtype": config.dtype,
        "seed": config.seed,
        **environment(device),
    }
    return result
