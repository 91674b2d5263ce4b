"""The model, and memory modes within it."""

import pytest
import torch

from bitsparse.activations import ACTIVATIONS
from bitsparse.training.accounting import count_saved, step_peak
from bitsparse.training.errors import UserError
from bitsparse.training.model import PRESETS, ModelConfig, Transformer, build_model, generate
from bitsparse.training.step import learning_rate

SMALL = {"vocab_size": 32, "layers": 2, "d_model": 32, "heads": 2, "seq_len": 16}
CPU = torch.device("cpu")


def test_presets():
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in Transformer(preset.model).parameters())
            for name, preset in PRESETS.items()
        }
    assert sizes["tiny"] < sizes["gpt2"] < sizes["gpt2-medium"] < sizes["1b"]
    assert 0.8e9 < sizes["1b"] < 1.3e9


def test_hidden_size():
    assert ModelConfig(d_model=768).hidden == 3072
    assert ModelConfig(d_model=768, activation="reglu").hidden == 2048
    assert ModelConfig(d_model=768, activation="reglu", d_ff=100).hidden == 100


@pytest.mark.parametrize("change", [{"heads": 3}, {"layers": 0}, {"activation": "gelu"}])
def test_bad_values(change):
    name = next(iter(change)).replace("_", "-")
    with pytest.raises(UserError, match=f"--{name}: got .*allowed: "):
        Transformer(ModelConfig(**{**SMALL, **change}))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_modes_give_the_same_bits(activation, tied):
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(0))
    seen = []
    for memory in ("dense", "checkpoint", "compressed"):
        model = build_model(ModelConfig(**SMALL, activation=activation, tied=tied), memory, 0, CPU)
        loss = model(tokens, tokens.flip(1))
        loss.backward()
        seen.append([loss, *(p.grad for p in model.parameters())])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_accounting():
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(0))
    kept = {}
    for memory in ("dense", "checkpoint", "compressed"):
        model = build_model(ModelConfig(**SMALL), memory, 0, CPU)
        with count_saved(model) as saved:
            loss, peak = step_peak(CPU, lambda model=model: model(tokens, tokens.flip(1)))
        loss.backward()
        kept[memory] = saved
        assert peak is None or peak > saved.feed_forward
    inputs = 2 * 64 * 32 * 4  # layers * tokens * d_model * float32
    hidden = 2 * 64 * 128 * 4
    assert kept["checkpoint"].feed_forward == inputs
    # relu2 keeps relu and its square
    assert kept["dense"].feed_forward == inputs + 2 * hidden
    compressed = sum(b.kept.nbytes for b in model.feed_forwards())
    assert kept["compressed"].feed_forward == inputs + compressed
    assert kept["compressed"].whole_model < kept["dense"].whole_model


def test_generate_and_schedule():
    model = build_model(ModelConfig(**SMALL), "compressed", 0, CPU)
    first = generate(model, [1, 2], 20, seed=3)
    assert first == generate(model, [1, 2], 20, seed=3)
    assert len(first) == 22
    rates = [learning_rate(s, 20, 5, 1.0) for s in range(20)]
    assert max(rates) == 1.0 and rates[0] == 0.2 and rates[-1] == pytest.approx(0.1)
