"""Checkpoints: whole or not there, and applied only where they fit."""

import errno

import pytest
import torch

from bitsparse.training import checkpoint
from bitsparse.training.errors import UserError
from bitsparse.training.metrics import MetricsFile
from bitsparse.training.model import ModelConfig, build_model
from bitsparse.training.step import make_trainee, train_step

CONFIG = ModelConfig(vocab_size=16, layers=1, d_model=16, heads=2, seq_len=8)
CPU = torch.device("cpu")


def make(config=CONFIG, seed=0):
    return make_trainee(build_model(config, "dense", seed, CPU), "float32", 1e-2, 0.1, 1.0)


def batch():
    tokens = torch.arange(16).view(2, 8)
    return [(tokens, tokens.flip(1))]


def save(path, trainee, step=1):
    parts = (trainee.model, trainee.optimizer, trainee.scaler)
    checkpoint.save(path, step, {"lr": 1e-2}, *parts)


def restore(path, trainee):
    content = checkpoint.load(path)
    return checkpoint.restore(path, content, trainee.model, trainee.optimizer, trainee.scaler)


def test_restored_run_continues_with_the_same_bits(tmp_path):
    a, b = make(), make(seed=1)
    train_step(a, batch(), 1e-2)
    save(tmp_path / "c.pt", a)
    assert restore(tmp_path / "c.pt", b) == 1
    for _ in range(3):
        assert torch.equal(train_step(a, batch(), 1e-2)[0], train_step(b, batch(), 1e-2)[0])


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch, where):
    path = tmp_path / "c.pt"
    trainee = make()
    save(path, trainee)
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "write":
        monkeypatch.setattr(torch, "save", full)
    else:
        monkeypatch.setattr(f"bitsparse.files.os.{where}", full)
    with pytest.raises(UserError, match="no space left"):
        save(path, trainee, step=2)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_inside_torch_save(tmp_path, monkeypatch):
    """A file that fails half-way, as on a full disk: torch.save hides the OSError."""
    path = tmp_path / "c.pt"
    trainee = make()
    save(path, trainee)
    before = path.read_bytes()

    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            if self.file.tell() + len(data) > 3000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

    real = torch.save
    monkeypatch.setattr(torch, "save", lambda content, file: real(content, Full(file)))
    with pytest.raises(UserError, match=r"c\.pt: "):
        save(path, trainee, step=2)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_misfit_changes_nothing(tmp_path):
    path = tmp_path / "c.pt"
    save(path, make())
    other = make(ModelConfig(vocab_size=16, layers=1, d_model=32, heads=2, seq_len=8))
    before = {k: v.clone() for k, v in other.model.state_dict().items()}
    with pytest.raises(UserError, match="does not fit the model: blocks"):
        restore(path, other)
    assert all(torch.equal(v, before[k]) for k, v in other.model.state_dict().items())
    with pytest.raises(UserError, match=r"--lr: got 0\.5, .* was made with 0\.01"):
        checkpoint.check_config(path, checkpoint.load(path), {"lr": 0.5})


def test_damaged_files(tmp_path):
    path = tmp_path / "c.pt"
    save(path, make())
    content = path.read_bytes()
    for damaged in (b"", b"nonsense", content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged or not a checkpoint"):
            checkpoint.load(path)
    torch.save({"format": 99}, path)
    with pytest.raises(UserError, match="not a checkpoint of format"):
        checkpoint.load(path)


def test_metrics_drop_what_a_resumed_run_repeats(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    metrics = MetricsFile(path, last_step=2)
    metrics.write(step=3, loss=0.1)
    metrics.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "loss": 0.1}\n'
