"""`bitsparse bench model`: steps of whole models, and the search for the largest batch."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from bitsparse.backends import force_backend
from bitsparse.bench import model as bench
from bitsparse.bench.model import ModelBenchConfig, ModelCase, ModeResult, judge, largest, run_model
from bitsparse.bench.timing import Spread
from bitsparse.cli.app import app
from bitsparse.training import model as training_model
from bitsparse.training.errors import UserError
from bitsparse.training.model import ModelConfig, Preset
from helpers import assert_refused

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Nothing to compile, no threads, and a preset that takes no time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = ModelConfig(layers=2, d_model=32, heads=2, d_ff=64, seq_len=32)
    monkeypatch.setitem(training_model.PRESETS, "tiny", Preset(config, 4, 1e-3))
    with force_backend("reference"):
        yield
    torch.set_num_threads(threads)


def command(*arguments: object):
    return CliRunner().invoke(
        app, ["bench", "model", "--device", "cpu", *map(str, arguments)], env={"COLUMNS": "200"}
    )


# -------------------------------------------------------------------------------- search


@pytest.mark.parametrize("fitting", [0, 1, 2, 37, 64, 99, 100])
def test_the_largest_number_is_found_from_any_guess(fitting):
    for guess in (-5, 0, 1, 20, 36, 37, 38, 64, 500):
        tried = []

        def fits(number: int, tried: list[int] = tried) -> bool:
            assert 1 <= number <= 100
            tried.append(number)
            return number <= fitting

        assert largest(fits, guess, 100) == (fitting, len(tried))
        assert len(tried) == len(set(tried)) <= 14


def test_a_good_guess_takes_few_tries():
    _, tries = largest(lambda n: n <= 1003, 1000, 2**14)
    assert tries <= 8


def test_fits_are_searched_under_each_limit(monkeypatch):
    config = ModelBenchConfig(activations=("relu2",), modes=("compressed",), steps=1, device="cpu")
    measured = bench._Bench(config, torch.device("cpu"), "tiny", "relu2")
    fractions = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: SimpleNamespace(total_memory=100 * bench.GIB)
    )
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda f, d: fractions.append(f)
    )
    monkeypatch.setattr(measured, "fits", lambda mode, size: size <= 1000 * fractions[-1])
    mode = ModeResult("compressed", peak_bytes=10 * bench.GIB)
    measured.measure_fits(mode, (25.0, 50.0, 141.0), lambda what: None)
    assert [f.batch_size for f in mode.fits] == [250, 500, 1000]
    assert [f.memory_gb for f in mode.fits] == [25.0, 50.0, 141.0]
    assert mode.fits[-1].limit_bytes == 100 * bench.GIB  # what there is
    assert fractions == [0.25, 0.5, 1.0, 1.0]  # and none at the end


def test_a_step_that_does_not_fit_is_undone(monkeypatch):
    config = ModelBenchConfig(activations=("relu2",), modes=("dense",), steps=1, device="cpu")
    measured = bench._Bench(config, torch.device("cpu"), "tiny", "relu2")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    before = [p.clone() for p in measured.trainee.model.parameters()]
    real = bench.train_step

    def step(trainee, batches, lr):
        if batches[0][0].shape[0] > 3:
            trainee.model(*batches[0]).backward()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(trainee, batches, lr)

    monkeypatch.setattr(bench, "train_step", step)
    assert [measured.fits("compressed", size) for size in (2, 4, 3)] == [True, False, True]
    parameters = list(measured.trainee.model.parameters())
    assert all(p.grad is None for p in parameters)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


# ------------------------------------------------------------------------------- ratios


def test_ratios_by_hand():
    modes = [ModeResult(name) for name in ("dense", "compressed", "chunked")]
    case = ModelCase("tiny", "relu2", 2, 32, 64, 1, 4, 32, "dense", modes)
    judge(case, {"dense": [2.0, 1.0, 4.0], "compressed": [1.0, 2.0, 2.0]})
    dense, compressed, chunked = modes
    assert (dense.ratio_first, dense.tokens_per_s) == (1.0, 64.0)
    assert (compressed.ratio_first, compressed.tokens_per_s) == (0.5, 64.0)
    assert compressed.seconds == Spread(2.0, 1.5, 2.0, 3)
    assert chunked.seconds is None


# ------------------------------------------------------------------------------ command


def test_the_command(tmp_path):
    out, chart = tmp_path / "model.json", tmp_path / "model.png"
    done = command(
        *("--activations", "relu2,drelu", "--modes", "dense,checkpoint,compressed"),
        *("--batch-size", 8, "--steps", 2, "--density", 0.2, "--memory-gb", "24,40"),
        *("--output-json", out, "--plot", chart),
    )
    assert done.exit_code == 0, done.output
    assert "--memory-gb: skipped" in done.output
    assert chart.read_bytes().startswith(b"\x89PNG")
    content = json.loads(out.read_text())
    assert content["benchmark"] == "model"
    assert {"device", "torch", "git_commit"} <= set(content["environment"])
    assert [c["activation"] for c in content["cases"]] == ["relu2", "drelu"]
    for case in content["cases"]:
        assert [m["mode"] for m in case["modes"]] == ["dense", "checkpoint", "compressed"]
        for mode in case["modes"]:
            assert mode["failed"] is None and mode["fits"] == []
            assert mode["tokens_per_s"] == pytest.approx(8 * 32 / mode["seconds"]["median"])
            assert mode["peak_bytes"] > 0
        assert all(0.1 < d < 0.3 for d in case["modes"][2]["density"])
        assert len(case["modes"][2]["density"]) == 2
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    ((header, lines),) = table["tables"](out)
    assert len(lines) == 6 and lines == table["rows"](out)
    assert {line.count("|") for line in (*header.splitlines(), *lines)} == {8}
    assert "density 0.2, float32" in table["caption"](out)
    # With limits, each has a column.
    fit = {"memory_gb": 24.0, "limit_bytes": 1, "batch_size": 77, "tries": 3, "bounded": False}
    content["cases"][0]["modes"][0]["fits"] = [fit]
    out.write_text(json.dumps(content))
    ((header, lines),) = table["tables"](out)
    assert "| batch in 24 GiB |" in header.splitlines()[0]
    assert {line.count("|") for line in (*header.splitlines(), *lines)} == {9}
    assert lines[0].endswith("| 77 |") and lines[1].endswith("| – |")


def test_random_weights_are_left_alone():
    config = ModelBenchConfig(
        activations=("relu2",), modes=("compressed",), density=0, steps=1, device="cpu"
    )
    (case,) = run_model(config).cases
    assert all(0.4 < d < 0.6 for d in case.modes[0].density)


def test_a_mode_that_fails_is_reported(monkeypatch):
    real = bench.train_step

    def step(trainee, batches, lr):
        if trainee.model.feed_forwards()[0].memory == "checkpoint":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if trainee.model.feed_forwards()[0].tokens_per_chunk is not None:
            raise RuntimeError("has no tokens_per_chunk")
        return real(trainee, batches, lr)

    monkeypatch.setattr(bench, "train_step", step)
    config = ModelBenchConfig(activations=("relu2",), modes=bench.MODES, steps=1, device="cpu")
    (case,) = run_model(config).cases
    failed = {m.mode: m.failed for m in case.modes}
    assert (
        failed["checkpoint"] == "out of memory" and "has no tokens_per_chunk" in failed["chunked"]
    )
    assert failed["dense"] is failed["compressed"] is None
    assert case.modes[2].ratio_first is not None


ERRORS: dict[str, tuple[str, ...]] = {
    "--preset: got 'huge', allowed: tiny": ("--preset", "huge"),
    "--activations: got 'gelu', allowed: relu": ("--activations", "gelu"),
    "--modes: got 'x', allowed: dense": ("--modes", "x"),
    "--modes: got none, allowed": ("--modes", ""),
    "--batch-size: got 0, allowed": ("--batch-size", "0"),
    "--batch-size: got 16777216 x --seq-len 32 tokens": ("--batch-size", str(2**24)),
    "--seq-len: got 0, allowed": ("--seq-len", "0"),
    "--vocab-size: got 0, allowed": ("--vocab-size", "0"),
    "--density: got 1, allowed: more than 0 and less than 1": ("--density", "1"),
    "--codec: got 'x', allowed": ("--codec", "x"),
    "--dtype: got 'x', allowed": ("--dtype", "x"),
    "--steps: got 0, allowed": ("--steps", "0"),
    "--memory-gb: got 0.5, allowed: at least 1": ("--memory-gb", "0.5"),
    "--memory-gb: got 'x', allowed: numbers": ("--memory-gb", "x"),
    "--output-json: got missing/x.json, allowed": ("--output-json", "missing/x.json"),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_options(message):
    done = command(*ERRORS[message])
    assert_refused(done, message)


def test_config_is_checked_without_the_command():
    with pytest.raises(UserError, match="--steps"):
        run_model(ModelBenchConfig(steps=0))
