"""Corpora: formats, errors, and batches that depend on their arguments only."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bitsparse.training.data import load_corpus
from bitsparse.training.errors import UserError


def write_shard(path: Path, tokens: np.ndarray, magic: int, version: int, count=None) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


def stream(corpus) -> list[int]:
    return corpus.read(0, corpus.tokens).tolist()


def test_bytes_of_a_folder_in_sorted_order(tmp_path):
    for name, text in (("b.txt", "two"), ("a.txt", "one"), (".hidden", "no")):
        (tmp_path / name).write_text(text)
    corpus = load_corpus([tmp_path])
    assert bytes(stream(corpus)) == b"onetwo"
    assert corpus.vocab_size == 256
    assert corpus.decode(stream(corpus)) == "onetwo"


def test_default_is_the_standard_library():
    corpus = load_corpus([])
    assert corpus.tokens > 1_000_000
    assert corpus.fingerprint() == load_corpus([]).fingerprint()


@pytest.mark.parametrize(
    "magic, version, dtype", [(None, 0, "<u2"), (20240520, 1, "<u2"), (20240801, 7, "<u4")]
)
def test_shards(tmp_path, magic, version, dtype):
    tokens = np.arange(1000, dtype=dtype)
    path = tmp_path / "x.bin"
    if magic is None:
        path.write_bytes(tokens.tobytes())
    else:
        write_shard(path, tokens, magic, version)
    assert stream(load_corpus([path])) == list(range(1000))


def test_windows_cross_files(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.bin").write_bytes(np.arange(3 * i, 3 * i + 3, dtype="<u2").tobytes())
    corpus = load_corpus([tmp_path])
    assert corpus.read(2, 8).tolist() == list(range(2, 10))


def test_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    codec = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    )
    codec.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    codec.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a b b c")
    corpus = load_corpus([tmp_path / "text.txt"], tmp_path / "tokenizer.json")
    assert stream(corpus) == [0, 1, 1, 2]
    assert corpus.vocab_size == 3


def test_batches_are_a_function_of_their_arguments(tmp_path):
    (tmp_path / "t.bin").write_bytes(np.arange(5000, dtype="<u2").tobytes())
    corpus = load_corpus([tmp_path / "t.bin"])
    train, held_out = corpus.split(0.1)
    x, y = train.batch(1, 2, 3, batch_size=64, seq_len=32)
    again, _ = load_corpus([tmp_path / "t.bin"]).split(0.1)[0].batch(1, 2, 3, 64, 32)
    assert torch.equal(x, again)
    assert torch.equal(x[:, 1:], y[:, :-1])
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert not torch.equal(x, train.batch(*other, 64, 32)[0])
    assert y.max() < 4500
    assert held_out.batch(1, 2, 3, 64, 32)[0].min() >= 4500


def bad_shards(tmp_path: Path) -> dict[str, Path]:
    tokens = np.arange(10, dtype="<u2")
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"abc")
    short = tmp_path / "short.bin"
    short.write_bytes(np.array([20240520, 1], "<i4").tobytes())
    return {
        "unknown magic number 20240521": write_shard(tmp_path / "m.bin", tokens, 20240521, 1),
        "version 3": write_shard(tmp_path / "v.bin", tokens, 20240520, 3),
        "header says 11 tokens": write_shard(tmp_path / "c.bin", tokens, 20240520, 1, 11),
        "even number": odd,
        "within its header": short,
    }


@pytest.mark.parametrize("index", range(5))
def test_bad_shards(tmp_path, index):
    message, path = list(bad_shards(tmp_path).items())[index]
    with pytest.raises(UserError, match=message):
        load_corpus([path])


def test_other_errors(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(UserError, match="no tokens"):
        load_corpus([empty])
    with pytest.raises(UserError, match="not there"):
        load_corpus([tmp_path / "missing"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="no files"):
        load_corpus([tmp_path / "folder"])
    shard = tmp_path / "x.bin"
    shard.write_bytes(np.arange(100, dtype="<u2").tobytes())
    with pytest.raises(UserError, match="only shards, or only text"):
        load_corpus([tmp_path])
    with pytest.raises(UserError, match="got token 99, allowed: below"):
        load_corpus([shard], vocab_size=99).read(0, 100)
    with pytest.raises(UserError, match="at least --seq-len"):
        load_corpus([shard]).split(0.5)[1].check_length(64, "evaluation")
