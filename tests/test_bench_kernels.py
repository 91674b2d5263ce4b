"""`bitsparse bench kernels`, the tensors it draws, and how times are taken."""

import json
import runpy
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bitsparse.backends import force_backend
from bitsparse.bench import inputs, kernels, nvcomp
from bitsparse.bench.kernels import STEPS, WHOLE, WHOLE_STEPS, KernelsConfig, run_kernels
from bitsparse.bench.timing import Spread, Task, TimeLimit, alternate, reason, same_bits
from bitsparse.cli.app import app
from bitsparse.training.errors import UserError, check_at_least
from helpers import assert_refused

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def reference_backend():
    """Nothing to compile, and no threads: the tensors here are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with force_backend("reference"):
        yield
    torch.set_num_threads(threads)


def command(*arguments: object):
    return CliRunner().invoke(
        app, ["bench", "kernels", "--device", "cpu", *map(str, arguments)], env={"COLUMNS": "200"}
    )


# ------------------------------------------------------------------------------ timing


def test_spread():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)


def test_tasks_alternate_in_an_order_that_rotates():
    ran: list[str] = []
    tasks = {
        name: Task(lambda given, name=name: ran.append(name + given), lambda: "!") for name in "abc"
    }
    times = alternate(tasks, CPU, repetitions=3, warmup=1)
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3, "c": 3}
    rounds = [ran[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(r) == ["a!", "b!", "c!"] for r in rounds)
    assert [r[0] for r in rounds[1:]] == ["a!", "b!", "c!"]


def test_a_task_that_raises_is_dropped_and_the_others_go_on():
    def bad(_: object) -> None:
        raise RuntimeError("no\nmore")

    told = []
    times = alternate(
        {"good": Task(lambda _: None), "bad": Task(bad)},
        CPU,
        4,
        on_error=lambda key, error: told.append((key, reason(error))),
    )
    assert told == [("bad", "RuntimeError: no")]
    assert list(times) == ["good"] and len(times["good"]) == 4
    with pytest.raises(RuntimeError):
        alternate({"bad": Task(bad)}, CPU, 1)


def test_rounds_end_after_a_time_but_not_before_three():
    times = alternate({"a": Task(lambda _: None)}, CPU, 10, max_seconds=0)
    assert len(times["a"]) == 3


def test_same_bits():
    x = torch.tensor([0.0, 1.0])
    assert same_bits(x, x.clone()) and same_bits(None, None)
    assert not same_bits(x, torch.tensor([-0.0, 1.0]))
    assert not same_bits(x, None) and not same_bits(x, x.double()) and not same_bits(x, x[:1])


# ------------------------------------------------------------------------------ inputs


@pytest.mark.parametrize("density", [0.05, 0.3])
@pytest.mark.parametrize("name", inputs.PRE_ACTIVATIONS)
def test_pre_activations(name, density):
    draw = inputs.PRE_ACTIVATIONS[name]
    x = draw((2048, 1024), density, CPU, torch.bfloat16, 0)
    fires = (x > 0).float()
    assert x.shape == (2048, 1024) and x.dtype == torch.bfloat16
    assert fires.mean().item() == pytest.approx(density, abs=0.02)
    assert same_bits(x, draw((2048, 1024), density, CPU, torch.bfloat16, 0))
    # Neurons differ, and neighbouring tokens fire the same ones, where they should.
    differ = fires.mean(0).std().item() > 3 * (density / 2048) ** 0.5
    alike = (fires[0::16] * fires[1::16]).mean().item() > 1.2 * (fires.mean(0) ** 2).mean().item()
    assert (differ, alike) == ((name == "correlated"),) * 2


# ----------------------------------------------------------------------------- command


def test_the_command(tmp_path):
    out, chart = tmp_path / "kernels.json", tmp_path / "kernels.png"
    done = command(
        *("--shape", "256x128", "--densities", "0.2,0.05", "--activations", "relu,reglu,drelu"),
        *("--backends", "auto,reference", "--repeats", 2, "--output-json", out),
        *("--plot", chart),
    )
    assert done.exit_code == 0, done.output
    assert chart.read_bytes().startswith(b"\x89PNG")
    content = json.loads(out.read_text())
    assert content["benchmark"] == "kernels"
    assert {"device", "torch", "git_commit"} <= set(content["environment"])
    cases = content["cases"]
    assert len(cases) == 2 * 2 * 4
    for case in cases:
        # "auto" is the reference backend here, and is not measured twice.
        wanted = WHOLE_STEPS if case["activation"] == WHOLE else STEPS
        assert [s["step"] for s in case["steps"] if s["backend"] == "reference"] == list(wanted)
        assert case["density"] == pytest.approx(case["asked_density"], abs=0.05)
        for step in case["steps"]:
            rate = case["copy_gbps"] * 1e9
            assert rate == pytest.approx(2 * 2 * 256 * 128 / case["copy"]["median"])
            assert step["floor_seconds"] == pytest.approx(step["moved_bytes"] / rate)
            assert step["share"] == pytest.approx(step["floor_seconds"] / step["seconds"]["median"])
            assert step["seconds"]["repetitions"] == 2
            assert step["device_only"] == (step["step"] not in ("compress", "to_dense"))
    dense = 2 * 256 * 128
    activate = {
        c["activation"]: s["moved_bytes"]
        for c in cases
        for s in c["steps"]
        if s["step"] == "activate"
    }
    assert 2 * dense < activate["relu"] < 3 * dense < activate["reglu"] < 4 * dense
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    lines = table["long_tables"](out)[0][1]
    assert sum("| copy |" in line for line in lines) == len(cases)
    assert all(line.count("|") == table["KERNELS"].splitlines()[0].count("|") for line in lines)
    assert "256 × 128 bfloat16" in table["caption"](out)


def test_backends_side_by_side(tmp_path):
    out = tmp_path / "kernels.json"
    done = command(
        *("--shape", "128x64", "--densities", "0.3,0.1", "--activations", "relu2"),
        *("--inputs", "correlated", "--repeats", 1, "--output-json", out),
    )
    assert done.exit_code == 0, done.output
    content = json.loads(out.read_text())
    for case in content["cases"]:  # another backend, twice as fast, that has no survey
        twice = [s for s in case["steps"] if s["step"] != "survey"]
        case["steps"] += [
            step
            | {"backend": "other", "share": 2 * step["share"]}
            | {"seconds": step["seconds"] | {"median": step["seconds"]["median"] / 2}}
            for step in twice
        ]
    out.write_text(json.dumps(content))
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    ((header, lines),) = table["compact_tables"](out)
    assert header.splitlines()[0].endswith(
        "| copy, ms | reference, ms | reference, floor / time | other, ms | other, floor / time |"
    )
    assert len(lines) == 2 * (len(STEPS) + len(WHOLE_STEPS))
    assert {line.count("|") for line in (*header.splitlines(), *lines)} == {10}
    assert lines[0].split(" | ")[3] == "survey" and lines[0].endswith("| – | – |")
    (hidden,) = (s for s in content["cases"][1]["steps"][: len(STEPS)] if s["step"] == "hidden")
    median, share = hidden["seconds"]["median"] * 1e3, hidden["share"]
    shown = next(li for li in lines if "| hidden |" in li)
    figures = f"{median:.3f} | {share:.2f} | {median / 2:.3f} | {2 * share:.2f}"
    assert shown.endswith(f"| {figures} |")


def test_a_time_limit_leaves_cases_out(tmp_path):
    out = tmp_path / "kernels.json"
    done = command(
        *("--shape", "64x64", "--activations", "relu", "--inputs", "independent"),
        *("--repeats", 1, "--time-limit", 0, "--output-json", out),
    )
    assert done.exit_code == 0, done.output
    content = json.loads(out.read_text())
    assert [c["activation"] for c in content["cases"]] == [WHOLE]
    assert content["skipped"] == ["0.1 independent relu"]
    assert "time limit: not measured: 0.1 independent relu" in done.output


def test_a_limit_lets_a_part_as_long_as_the_longest_begin(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    limit = TimeLimit(10, began=0.0)
    for began, took, allowed in ((0, 4, True), (4, 1, True), (6, 2, True), (6.1, 0, False)):
        now[0] = began
        assert limit.allows_another() is allowed
        with limit.part():
            now[0] += took
    assert TimeLimit(None).left() == float("inf")


def test_a_backend_that_fails_is_reported(monkeypatch):
    real = kernels.get_backend

    def broken(name: str):
        if name == "triton":
            raise ImportError("no such package")
        return real(name)

    monkeypatch.setattr(kernels, "get_backend", broken)
    config = KernelsConfig((64, 64), activations=("relu2",), inputs=("correlated",), device="cpu")
    result = run_kernels(
        KernelsConfig(**{**vars(config), "backends": ("triton", "reference"), "repeats": 1})
    )
    for case in result.cases:
        assert case.failed == {"triton": "ImportError: no such package"}
        assert {s.backend for s in case.steps} == {"reference"}


def test_a_wrong_hidden_tensor_is_a_failure(monkeypatch):
    backend = kernels.get_backend("reference")
    monkeypatch.setattr(type(backend), "hidden", lambda self, a, k, f, out: out.fill_(1))
    config = KernelsConfig((64, 64), activations=("relu",), inputs=("correlated",), repeats=1)
    case = run_kernels(config).cases[-1]
    assert case.steps == [] and "not what it was" in case.failed["reference"]


def test_results_are_written_after_each_case(tmp_path, monkeypatch):
    out = tmp_path / "kernels.json"
    real = kernels._case

    def stop(config, device, kind, density, name):
        if name == "relu2":
            raise KeyboardInterrupt
        return real(config, device, kind, density, name)

    monkeypatch.setattr(kernels, "_case", stop)
    options = ("--shape", "64x64", "--inputs", "independent", "--activations", "relu,relu2")
    command(*options, "--repeats", 1, "--output-json", out)
    assert [c["activation"] for c in json.loads(out.read_text())["cases"]] == [WHOLE, "relu"]


def test_nvcomp_is_optional():
    if nvcomp._package() is None:
        assert nvcomp.algorithms() == ()


ERRORS: dict[str, tuple[str, ...]] = {
    "--shape: got '12', allowed: ROWSxCOLS": ("--shape", "12"),
    "--shape: got 0x5, allowed": ("--shape", "0x5"),
    "--densities: got 1, allowed: more than 0 and less than 1": ("--densities", "0.1,1"),
    "--densities: got none": ("--densities", ""),
    "--densities: got 'x', allowed: numbers": ("--densities", "x"),
    "--activations: got 'gelu', allowed: relu": ("--activations", "gelu"),
    "--activations: got relu,relu, allowed: each once": ("--activations", "relu,relu"),
    "--inputs: got 'x', allowed: independent, correlated": ("--inputs", "x"),
    "--backends: got 'x', allowed: auto": ("--backends", "x"),
    "--backends: got none, allowed: auto": ("--backends", ","),
    "--dtype: got 'int8', allowed": ("--dtype", "int8"),
    "--codec: got 'x', allowed": ("--codec", "x"),
    "--repeats: got 0, allowed: at least 1": ("--repeats", "0"),
    "--seed: got -1, allowed": ("--seed", "-1"),
    "--device: got 'tpu', allowed: cpu": ("--device", "tpu"),
    "--output-json: got missing/x.json, allowed": ("--output-json", "missing/x.json"),
    "--plot: got missing/x.png, allowed": ("--plot", "missing/x.png"),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_options(message):
    done = command(*ERRORS[message])
    assert_refused(done, message)


def test_config_is_checked_without_the_command():
    with pytest.raises(UserError, match="--repeats"):
        run_kernels(KernelsConfig(repeats=0))


@pytest.mark.parametrize(
    "files, message",
    [
        (["/dev/null", None], "--output-json: got /dev/null, allowed: a file in a folder"),
        (["there.json", "there.json"], "--plot: got .*there.json, which --output-json names too"),
    ],
)
def test_outputs_are_refused_before_anything_is_measured(files, message, tmp_path):
    from bitsparse.cli.bench.common import check_outputs

    paths = [None if f is None else tmp_path / f for f in files]
    with pytest.raises(UserError, match=message):
        check_outputs(("--output-json", paths[0]), ("--plot", paths[1]))
    assert not list(tmp_path.iterdir())


def test_infinite_limits_are_refused():
    with pytest.raises(UserError, match="--max-seconds: got inf"):
        check_at_least("--max-seconds", float("inf"), 0)
