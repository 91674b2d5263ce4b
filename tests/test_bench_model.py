"""`bitsparse bench model`: steps of whole models, and the search for the largest batch."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bitsparse.backends import force_backend
from bitsparse.bench import model as bench
from bitsparse.bench.model import (
    GIB,
    ModelBenchConfig,
    ModelCase,
    ModeResult,
    judge,
    largest,
    predict,
    run_model,
)
from bitsparse.bench.timing import Spread, TimeLimit
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

        assert largest(fits, guess, 100) == (fitting, len(tried), True, fitting)
        assert len(tried) == len(set(tried)) <= 14


def test_a_good_guess_takes_few_tries():
    for guess, most_tries in ((1003, 2), (1004, 2), (1000, 8), (1100, 14)):
        assert largest(lambda n: n <= 1003, guess, 2**14).tries <= most_tries


def test_a_search_that_is_stopped_says_what_it_knows():
    answers = iter([True, True, False])
    found = largest(lambda n: n <= 1003, 1000, 2**14, lambda: next(answers))
    assert (found.number, found.tries, found.exact) == (1001, 2, False)
    assert largest(lambda n: True, 5, 9, lambda: False) == (0, 0, False, 9)


def test_peaks_predict_what_fits():
    assert predict({4: 600, 8: 1000}, 1000, 99) == 8
    assert predict({4: 600, 8: 1000, 1: 500}, 1399, 99) == 11  # from the two largest
    assert predict({4: 600, 8: 1000}, 199, 99) == 0
    assert predict({4: 600, 8: 1000}, 10**6, 99) == 99
    assert predict({8: 1000}, 2000, 99) is None
    assert predict({4: 1000, 8: 1000}, 2000, 99) is None


@pytest.fixture
def simulated(monkeypatch):
    """A search on a GPU of 100 GiB: a step takes 2 GiB, and 0.5 for each sequence, of which the
    allocator needs a tenth more."""
    config = ModelBenchConfig(
        activations=("relu2",), modes=("compressed",), batch_size=8, steps=1, device="cpu"
    )
    cpu = torch.device("cpu")
    measured = bench._Bench(config, cpu, "tiny", "relu2", TimeLimit(None))
    measured.held, measured.tried, measured.waste = [1.0], [], 1.1

    def fits(mode, size, nbytes):
        measured.tried.append(size)
        peak = 2 * GIB + size * GIB // 2
        if peak * measured.waste > measured.held[-1] * 100 * GIB:
            return False
        mode.peaks[size] = peak
        return peak <= nbytes

    monkeypatch.setattr(bench, "device_memory", lambda device: 100 * GIB)
    monkeypatch.setattr(measured, "hold_to", measured.held.append)
    monkeypatch.setattr(measured, "fits", fits)
    return measured


def test_fits_are_searched_under_each_limit(simulated):
    mode = ModeResult("compressed")
    simulated.measure_fits(mode, (22.0, 55.0, 104.0, 141.0), lambda what: None)
    assert mode.fits_failed is None
    assert [f.memory_gb for f in mode.fits] == [22.0, 55.0, 104.0, 141.0]
    # (limit / 1.1 - 2) / 0.5; without the tenth it would be (limit - 2) / 0.5.
    assert [f.batch_size for f in mode.fits] == [36, 96, 177, 278]
    assert [f.predicted for f in mode.fits] == [40, 106, 196, 278]
    assert [f.verified for f in mode.fits] == [True, True, True, False]
    assert mode.fits[2].limit_bytes == 100 * GIB  # what there is
    assert mode.fits[3].tries == 0  # more than there is: predicted, not tried
    assert simulated.held == [1.0, 0.22, 0.55, 1.0, 1.0]  # and none at the end
    assert simulated.tried[:2] == [4, 8]
    for fit in mode.fits[:3]:
        assert {fit.batch_size, fit.batch_size + 1} <= set(simulated.tried)


def test_a_right_prediction_takes_two_steps_a_limit(simulated):
    simulated.waste = 1.0
    mode = ModeResult("compressed")
    simulated.measure_fits(mode, (12.0, 52.0), lambda what: None)
    assert [(f.batch_size, f.predicted, f.tries) for f in mode.fits] == [(20, 20, 2), (100, 100, 2)]
    assert simulated.tried == [4, 8, 20, 21, 100, 101]


def test_without_time_the_prediction_is_given(simulated):
    simulated.clock = TimeLimit(0)
    mode = ModeResult("compressed")
    simulated.measure_fits(mode, (22.0,), lambda what: None)
    (fit,) = mode.fits
    assert (fit.batch_size, fit.predicted, fit.verified, fit.tries) == (40, 40, False, 0)


def test_what_fits_on_this_machine(tmp_path):
    """The search is real on a CPU too: peaks of steps that were done."""
    out = tmp_path / "model.json"
    options = ("--activations", "relu2", "--modes", "dense,checkpoint", "--steps", 1)
    done = command(*options, "--batch-size", 8, "--memory-gb", "0.01,1048576", "--output-json", out)
    assert done.exit_code == 0, done.output
    content = json.loads(out.read_text())
    batches = {}
    for mode in content["cases"][0]["modes"]:
        assert mode["fits_failed"] is None
        tried, far = mode["fits"]
        peaks = {int(size): peak for size, peak in mode["peaks"].items()}
        batches[mode["mode"]] = size = tried["batch_size"]
        assert tried["verified"] and tried["limit_bytes"] == int(0.01 * GIB)
        assert peaks[size] <= tried["limit_bytes"] < peaks[size + 1]
        assert abs(tried["predicted"] - size) <= 0.15 * size
        assert not far["verified"] and far["tries"] == 0 and far["batch_size"] == far["predicted"]
    assert batches["checkpoint"] > 0 and batches["dense"] > 0
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    ((header, lines),) = table["tables"](out)
    assert header.splitlines()[0].endswith("| batch in 0.01 GiB | batch in 1.04858e+06 GiB |")
    assert f"| {batches['dense']} | ~" in lines[0] and f"| {batches['checkpoint']} | ~" in lines[1]


def test_a_time_limit_leaves_models_out(tmp_path):
    config = ModelBenchConfig(
        modes=("dense",), steps=1, memory_gb=(0.01,), time_limit=0, device="cpu"
    )
    result = run_model(config)
    assert [c.activation for c in result.cases] == ["relu2"]
    assert result.skipped == ["tiny reglu"]
    assert not result.cases[0].modes[0].fits[0].verified


def test_a_step_that_does_not_fit_is_undone(monkeypatch):
    config = ModelBenchConfig(activations=("relu2",), modes=("dense",), steps=1, device="cpu")
    measured = bench._Bench(config, torch.device("cpu"), "tiny", "relu2", TimeLimit(None))
    mode = ModeResult("compressed")
    before = [p.clone() for p in measured.trainee.model.parameters()]
    real = bench.train_step

    def step(trainee, batches, lr):
        if batches[0][0].shape[0] > 3:
            trainee.model(*batches[0]).backward()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(trainee, batches, lr)

    monkeypatch.setattr(bench, "train_step", step)
    assert [measured.fits(mode, size, GIB) for size in (2, 4, 3)] == [True, False, True]
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
        *("--batch-size", 8, "--steps", 2, "--density", 0.2),
        *("--output-json", out, "--plot", chart),
    )
    assert done.exit_code == 0, done.output
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
    "--memory-gb: got 0.0, allowed: at least": ("--memory-gb", "0"),
    "--time-limit: got -1.0, allowed": ("--time-limit", "-1"),
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
