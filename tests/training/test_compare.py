"""Comparisons of memory modes."""

import json

import pytest
import torch

from bitsparse.training import compare as module
from bitsparse.training.compare import CompareConfig, compare
from bitsparse.training.errors import UserError
from bitsparse.training.model import ModelConfig
from bitsparse.training.plot import save_chart

MODEL = ModelConfig(layers=2, d_model=32, heads=2, seq_len=16)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "t.txt").write_bytes(bytes(range(256)) * 8)
    return CompareConfig(MODEL, data=[tmp_path / "t.txt"], device="cpu", steps=7, batch_size=4)


@pytest.fixture(autouse=True)
def restore_determinism():
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def change(config, **values):
    return CompareConfig(**{**config.__dict__, **values})


@pytest.mark.parametrize("activation, dtype", [("relu2", "float32"), ("reglu", "bfloat16")])
def test_modes_are_identical(config, tmp_path, activation, dtype):
    model = ModelConfig(**{**MODEL.__dict__, "activation": activation})
    result = compare(change(config, model=model, dtype=dtype))
    assert result.identical and result.reference == "dense"
    for r in result.results:
        assert r.same_losses and r.same_weights and len(r.losses) == 7
        assert r.ratio_median > 0
        assert r.last.step == 6
    by_mode = {r.mode: r for r in result.results}
    kept = {mode: r.last.kept_feed_forward for mode, r in by_mode.items()}
    assert kept["compressed"] < kept["dense"]
    assert len(by_mode["compressed"].last.density) == 2
    save_chart(result, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(result.to_json(), allow_nan=False)


def test_a_difference_is_found(config, monkeypatch):
    real = module.train_step

    def wrong(trainee, batches, lr):
        loss, norm = real(trainee, batches, lr)
        if trainee.model.feed_forwards()[0].memory == "compressed":
            with torch.no_grad():
                trainee.model.norm.weight.mul_(1 + 1e-6)
        return loss, norm

    monkeypatch.setattr(module, "train_step", wrong)
    result = compare(config)
    assert not result.identical
    assert [r.mode for r in result.results if r.same_weights is False] == ["compressed"]


def test_a_mode_without_memory_is_dropped(config, monkeypatch):
    real = module.train_step

    def exhausted(trainee, batches, lr):
        if trainee.model.feed_forwards()[0].memory == "dense":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(trainee, batches, lr)

    monkeypatch.setattr(module, "train_step", exhausted)
    result = compare(config)
    assert result.reference == "checkpoint" and result.identical
    assert [r.out_of_memory for r in result.results] == [True, False, False]
    with pytest.raises(UserError, match="out of memory in every mode"):
        compare(change(config, modes=("dense",)))


def test_time_limit(config):
    result = compare(change(config, steps=10_000, max_seconds=0.5))
    assert 1 <= len(result.results[0].losses) < 10_000
    assert len({len(r.losses) for r in result.results}) == 1
    assert all(r.last.step == len(r.losses) - 1 for r in result.results)
