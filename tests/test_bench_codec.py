"""The codec benchmark: entropy line, sizes, rates and the command."""

import dataclasses
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bitsparse
from bitsparse import codings
from bitsparse.backends import force_backend
from bitsparse.bench import general, inputs, lossless
from bitsparse.bench.codec import CodecConfig, run_codec
from bitsparse.bench.entropy import entropy_line
from bitsparse.bench.general import general_codecs
from bitsparse.bench.rates import measure_rates
from bitsparse.bench.sizes import measure_sizes, methods
from bitsparse.cli.app import run
from bitsparse.training.data import Corpus
from bitsparse.training.errors import UserError
from bitsparse.training.model import ModelConfig, Preset
from helpers import assert_same_bits, from_bits, random_sparse

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
ACTIVATIONS = Path(os.environ.get("BITSPARSE_ACTIVATIONS", SHARED / "data" / "activations"))
CODEC_BOUND = SHARED / "tools" / "codec_bound.py"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def reference_backend():
    """Nothing to compile: the arrays here are tiny."""
    with force_backend("reference"):
        yield


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    x = random_sparse((256, 16), 0.2, torch.bfloat16)
    path = tmp_path / "some.npz"
    np.savez(
        path,
        patterns=x.view(torch.int16).numpy().view(np.uint16),
        half=x.half().numpy(),
        single=x.float().numpy(),
    )
    return path


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["bitsparse", "bench", "codec", *map(str, arguments)])
    return run()


QUICK = ("--device", "cpu", "--no-synthetic", "--zstd-levels", "1")


# ------------------------------------------------------------------------- entropy line


@pytest.mark.parametrize("dtype, mantissa", [(torch.bfloat16, 7), (torch.float32, 23)])
def test_entropy_line_by_hand(dtype, mantissa):
    # Neurons fire at rates 1 and 1/2; of six exponents four are that of 1, one is of 2, one of 4.
    x = torch.tensor([[1.0, 0.0], [1.5, 2.0], [1.0, 0.0], [1.25, 4.0]]).to(dtype)
    exponent = 4 / 6 * math.log2(6 / 4) + 2 * (1 / 6) * math.log2(6)
    assert entropy_line(x) == pytest.approx(0.5 + 0.75 * (exponent + mantissa))


def test_entropy_line_at_the_edges():
    assert entropy_line(torch.zeros(8, 4)) == 0
    assert entropy_line(torch.ones(8, 4, dtype=torch.float16)) == pytest.approx(10)
    # The sign goes with the exponent; leading dimensions are tokens.
    signs = torch.tensor([1.0, -1.0]).repeat(4).view(2, 4, 1)
    assert entropy_line(signs) == pytest.approx(23 + 1)


@pytest.mark.skipif(
    not CODEC_BOUND.exists() or not list(ACTIVATIONS.glob("*.npz")),
    reason="the reference script or its activations are not there",
)
def test_entropy_line_is_that_of_the_reference_script():
    done = subprocess.run(
        [sys.executable, str(CODEC_BOUND)], capture_output=True, text=True, check=True, timeout=60
    )
    expected = {
        name: (float(density), float(bound), float(flat))
        for name, density, bound, flat in re.findall(
            r"^(\S+) +density (\S+) +bound (\S+) +flat15 (\S+)", done.stdout, re.M
        )
    }
    arrays = inputs.from_files([ACTIVATIONS])
    assert {a.name for a in arrays} == set(expected)
    for array in arrays:
        x = array.load()
        density, bound, flat = expected[array.name]
        assert entropy_line(x) == pytest.approx(bound, abs=5.1e-4)
        published = 1 + 15 * (x != 0).double().mean().item() + 32 / 4096
        assert published == pytest.approx(flat, abs=5.1e-4)
        assert (x != 0).double().mean().item() == pytest.approx(density, abs=5.1e-5)


# ------------------------------------------------------------------------------- inputs


def test_arrays_of_files(npz, tmp_path):
    arrays = inputs.from_files([tmp_path, npz])
    assert [(a.name, a.file) for a in arrays] == 2 * [
        ("half", "some.npz"),
        ("patterns", "some.npz"),
        ("single", "some.npz"),
    ]
    x = random_sparse((256, 16), 0.2, torch.bfloat16)
    half, patterns, single = (a.load() for a in arrays[:3])
    assert_same_bits(patterns, x)
    assert_same_bits(half, x.half())
    assert_same_bits(single, x.float())
    # As NumPy stores bfloat16, and numbers of the other byte order.
    bits = x.view(torch.int16).numpy()
    np.savez(tmp_path / "odd.npz", void=bits.view("V2"), big=bits.astype(">i2"))
    for array in inputs.from_files([tmp_path / "odd.npz"]):
        assert_same_bits(array.load(), x, array.name)


def test_synthetic_arrays():
    arrays = {a.name: a.load() for a in inputs.synthetic([0.05, 1.0], seed=0)}
    density = {name: (x != 0).double().mean().item() for name, x in arrays.items()}
    assert density["half-normal"] == pytest.approx(0.5, abs=0.01)
    assert density["bernoulli 0.05"] == pytest.approx(0.05, abs=0.01)
    assert (density["bernoulli 1"], density["zero"]) == (1, 0)
    assert {x.dtype for x in arrays.values()} == {torch.bfloat16}
    assert not any(torch.signbit(x).any() for x in arrays.values())


@pytest.mark.parametrize("activation", ["relu", "relu2", "reglu"])
def test_activations_of_a_training_run(monkeypatch, activation):
    model = ModelConfig(layers=2, d_model=32, heads=2, d_ff=48, seq_len=16)
    monkeypatch.setattr(inputs, "get_preset", lambda name: Preset(model, 4, 1e-3))
    corpus = Corpus([np.tile(np.arange(256, dtype=np.uint8), 8)], 256)
    monkeypatch.setattr(inputs, "load_corpus", lambda paths: corpus)
    steps: list[int] = []
    arrays = inputs.from_training(3, activation, CPU, 0, lambda: steps.append(1))
    assert len(steps) == 3
    assert [a.name for a in arrays] == [f"{activation}_trained_0{i}" for i in range(2)]
    for array in arrays:
        x = array.load()
        assert (x.shape, x.dtype) == ((4 * 16, 48), torch.bfloat16)
        assert x.min() == 0 and 0.1 < (x > 0).double().mean() < 0.9
    again = inputs.from_training(3, activation, CPU, 0)
    assert_same_bits(again[1].load(), arrays[1].load())


# ------------------------------------------------------------------------------- sizes


def array_of(x: torch.Tensor) -> inputs.Activations:
    return inputs.Activations("x", inputs.SYNTHETIC, lambda: x)


@pytest.mark.parametrize(
    "x",
    [
        random_sparse((320, 24), 0.1, torch.bfloat16),
        random_sparse((64, 5), 0.5, torch.float16, signed=True),
        random_sparse((70, 9), 0.3, torch.float32),
        torch.ones(64, 64, dtype=torch.bfloat16),
        torch.zeros(64, 64, dtype=torch.bfloat16),
        from_bits(torch.arange(2**16).view(1024, 64), torch.bfloat16),
    ],
    ids=["sparse", "signed", "float32", "full", "zero", "every pattern"],
)
def test_sizes_are_those_of_compress(x):
    sizes = measure_sizes(array_of(x), CPU, (1,))
    assert list(sizes.bits) == list(methods((1,)))
    assert (sizes.rows, sizes.cols) == x.shape
    assert sizes.density == bitsparse.compress(x).density
    for policy in codings.POLICIES:
        c = bitsparse.compress(x, codec=policy)
        assert sizes.bits[policy] == 8 * c.nbytes / x.numel()
        assert sizes.chosen[policy] == f"{c.support} + {c.values}"
    for support in codings.SUPPORTS:
        for values in codings.VALUES:
            bits = sizes.bits[f"{support} + {values}"]
            try:
                expected = bitsparse.compress(x, support, values).bits_per_element
            except ValueError:
                expected = None
            assert bits == expected
    signed = bool(torch.signbit(x).any())
    width = 8 * x.element_size() - 1
    published = None if signed else 1 + width * sizes.density + 32 / 4096
    assert sizes.bits["published"] == published


@pytest.mark.parametrize("codec", general_codecs(), ids=lambda c: c.name)
def test_general_purpose_compressors_give_back_the_bits(codec):
    if not codec.installed:
        pytest.skip(f"{codec.package} is not installed")
    for dtype in (np.int16, np.int32):
        matrix = np.arange(-300, 300, dtype=dtype).reshape(20, 30)
        compressed = codec.compress(matrix)
        restored = codec.decompress(compressed, matrix.shape, matrix.dtype)
        assert restored.dtype == dtype and np.array_equal(restored, matrix)


def test_rates():
    copy, rates = measure_rates((64, 32), 0.2, CPU, repetitions=3, seed=0, zstd_levels=(1, 19))
    assert copy.nbytes == 2 * 64 * 32 and copy.gbps > 0
    names = {r.method for r in rates}
    assert {*codings.POLICIES} <= names and "zstd-19" not in names
    assert {c.name for c in general_codecs((1,)) if c.installed} <= names
    for rate in rates:
        assert rate.compress.fastest <= rate.compress.median <= rate.compress.slowest
        assert rate.compress_gbps == pytest.approx(rate.nbytes / rate.compress.median / 1e9)
        assert rate.decompress_per_copy == pytest.approx(rate.decompress_gbps / copy.gbps)
        assert 0 < rate.bits_per_element < 17


# ----------------------------------------------------------------------------- command


def test_the_command(npz, tmp_path, monkeypatch, capsys):
    out, chart = tmp_path / "codec.json", tmp_path / "codec.png"
    options = ("--activations", npz, *QUICK, "--shape", "64x32", "--rate-densities", "0.2")
    status = command(monkeypatch, *options, "--repetitions", 2, "--json", out, "--plot", chart)
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    assert "Bits per element, 256 × 16 bfloat16" in captured.out and "patterns" in captured.out
    assert chart.read_bytes().startswith(b"\x89PNG")
    text = out.read_text()
    assert str(tmp_path) not in text
    content = json.loads(text)
    assert content["benchmark"] == "codec"
    assert {"device", "torch", "git_commit", "zstandard", "lz4"} <= set(content["environment"])
    assert content["config"]["activations"] == ["some.npz"]
    x = random_sparse((256, 16), 0.2, torch.bfloat16)
    (found,) = (a for a in content["arrays"] if a["name"] == "patterns")
    assert found["bits"]["small"] == bitsparse.compress(x, codec="small").bits_per_element
    assert found["entropy_line"] == pytest.approx(entropy_line(x))
    ratios = [a["bits"]["small"] / a["entropy_line"] for a in content["arrays"]]
    summary = content["summary"]["files"]["small"]
    assert summary["arrays"] == 3 and summary["mean"] == pytest.approx(sum(ratios) / 3)
    assert (summary["smallest"], summary["largest"]) == (min(ratios), max(ratios))
    assert len(content["copies"]) == 1 and content["rates"]
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    lines = table["rows"](out)
    assert any(line.startswith("| small |") for line in lines)
    assert any(line.startswith("| 0.2 | copy |") for line in lines)
    assert "64 × 32" in table["caption"](out)


def test_the_script_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["codec.py", "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(ROOT / "benchmarks" / "codec.py"), run_name="__main__")
    assert done.value.code == 0
    out = capsys.readouterr().out
    assert "bench codec [OPTIONS]" in out and "--activations" in out


def test_missing_packages_are_said(npz, monkeypatch, capsys):
    general.package_version.cache_clear()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "lz4", None)
    try:
        result = run_codec(CodecConfig(activations=(npz,), synthetic=False, rates=False))
        assert result.environment["zstandard"] is None and result.environment["lz4"] is None
        assert result.sizes[0].bits["zstd-19"] is None and result.sizes[0].bits["lz4"] is None
        options = ("--shape", "64x32", "--rate-densities", "0.2", "--repetitions", 1)
        assert command(monkeypatch, "--activations", npz, *QUICK, *options) == 0
    finally:
        general.package_version.cache_clear()
    lines = capsys.readouterr().out.splitlines()
    assert sum("lz4 split" in line and "not installed" in line for line in lines) == 2


def test_a_loss_is_not_reported(npz, monkeypatch, capsys):
    real = lossless.compress
    monkeypatch.setattr(lossless, "compress", lambda x, *a, **k: real(-x, *a, **k))
    assert command(monkeypatch, "--activations", npz, *QUICK, "--no-rates") == 3
    out = capsys.readouterr().out
    assert "not lossless: half" in out and "Bits per element" not in out


def bad_files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.npz").write_text("no")
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name, array in {
        "int64": np.zeros((2, 2), np.int64),
        "none": np.zeros((0, 4), np.float32),
        "scalar": np.float32(1),
        "object": np.array([None]),
    }.items():
        np.savez(tmp_path / f"{name}.npz", a=array)
    np.savez(tmp_path / "nothing.npz")
    cut = tmp_path / "cut.npz"
    cut.write_bytes((tmp_path / "int64.npz").read_bytes()[:-30])
    return {p.stem: p for p in tmp_path.iterdir()}


ERRORS: dict[str, tuple[str, ...]] = {
    "is not there, allowed: a .npz file or a folder": ("--activations", "missing"),
    "no .npz files in": ("--activations", "{empty}"),
    "text.npz is not a .npz file": ("--activations", "{text}"),
    "cut.npz is not a .npz file": ("--activations", "{cut}"),
    "array.npy is not a .npz file": ("--activations", "{array}"),
    "has no arrays": ("--activations", "{nothing}"),
    "is int64, allowed: uint16": ("--activations", "{int64}"),
    "has shape (0, 4), allowed: [tokens, neurons]": ("--activations", "{none}"),
    "has shape (), allowed": ("--activations", "{scalar}"),
    "a of {object} cannot be read": ("--activations", "{object}"),
    "--train-steps: got -1, allowed: at least 0": ("--train-steps", "-1"),
    "--activation: got 'gelu', allowed: relu": ("--activation", "gelu"),
    "--densities: got 1.5, allowed: at least 0 and at most 1": ("--densities", "0.1,1.5"),
    "--densities: got 'x', allowed: numbers": ("--densities", "x"),
    "--rate-densities: got nan": ("--rate-densities", "nan"),
    "--zstd-levels: got 23, allowed: at least 1 and at most 22": ("--zstd-levels", "23"),
    "--zstd-levels: got 'x', allowed: whole numbers": ("--zstd-levels", "x"),
    "--shape: got '12', allowed: ROWSxCOLS": ("--shape", "12"),
    "--shape: got 0x5, allowed": ("--shape", "0x5"),
    "--shape: got 999999999x999999999, allowed": ("--shape", "999999999x999999999"),
    "--repetitions: got 0, allowed: at least 1": ("--repetitions", "0"),
    "--seed: got -1, allowed": ("--seed", "-1"),
    "--device: got 'tpu', allowed: cpu": ("--device", "tpu"),
    "nothing is left to measure": ("--no-rates",),
    "--json: got missing/x.json, allowed: a file in a folder": ("--json", "missing/x.json"),
    "--plot: got {empty}, allowed: a file": ("--plot", "{empty}"),
    "No such option": ("--nope",),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_are_one_line(message, tmp_path, monkeypatch, capsys):
    files = bad_files(tmp_path)
    arguments = [argument.format_map(files) for argument in ERRORS[message]]
    assert command(monkeypatch, *QUICK, *arguments) in (1, 2)
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message.format_map(files) in captured.err


def test_config_is_checked_without_the_command():
    config = CodecConfig(synthetic=False, rates=False)
    with pytest.raises(UserError, match="nothing is left"):
        run_codec(config)
    with pytest.raises(UserError, match="--repetitions"):
        run_codec(dataclasses.replace(config, synthetic=True, repetitions=0))


# ------------------------------------------------------------------------ documentation


def test_tables_of_the_documentation_are_those_of_the_result_files():
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    lines: set[str] = set()
    for path in (ROOT / "benchmarks" / "results").glob("codec-*.json"):
        result = json.loads(path.read_text())
        sizes_header = table["codec_size_header"](result).splitlines()
        rates_header = table["CODEC_RATES"].splitlines()
        lines |= {*sizes_header, *rates_header, *table["rows"](path)}
        lines.add("- " + table["caption"](path))
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    section = re.search(r"^## Codec.*?(?=^## |\Z)", text, re.M | re.S)
    assert section is not None
    shown = re.findall(r"^(?:\| |- codec-).*", section[0], re.M)
    assert shown
    assert set(shown) <= lines
