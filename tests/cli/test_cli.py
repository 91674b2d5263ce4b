"""The command, run in processes of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

COMMAND = [sys.executable, "-c", "from bitsparse.cli import main; main()"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
TINY = (
    *("--device", "cpu", "--layers", "2", "--d-model", "32", "--heads", "2"),
    *("--seq-len", "16", "--batch-size", "4", "--dtype", "float32"),
)


def bitsparse(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(300)))
    return path


def losses(folder: Path) -> list[tuple[int, float, float | None]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(v["step"], v["loss"], v.get("eval_loss")) for v in lines]


def wait_for_lines(path: Path, count: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_killed_runs_resume_to_the_same_bits(text: Path, tmp_path: Path) -> None:
    common = ("train", *TINY, "--data", text, "--grad-accum", 2, "--warmup", 3, "--resume")
    common += ("--steps", 60, "--checkpoint-every", 7, "--eval-every", 20, "--sample-tokens", 5)
    whole = bitsparse(*common, "--output-dir", tmp_path / "whole", "--memory", "dense")
    assert whole.returncode == 0, whole.stderr

    broken = tmp_path / "broken"
    for how, lines in ((signal.SIGKILL, 12), (signal.SIGINT, 25)):
        process = subprocess.Popen(
            [*COMMAND, *map(str, common), "--output-dir", str(broken)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for_lines(broken / "metrics.jsonl", lines, process)
        process.send_signal(how)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == (130 if how == signal.SIGINT else -how), errors
        if how == signal.SIGINT:
            assert "error: interrupted" in errors
        assert "Traceback" not in errors
    assert "--resume continues" in output
    assert len(losses(broken)) < 60
    last = bitsparse(*common, "--output-dir", broken)
    assert last.returncode == 0, last.stderr
    assert losses(broken) == losses(tmp_path / "whole")
    weights = "model.safetensors"
    assert (broken / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()

    misfit = bitsparse(*common, "--output-dir", broken, "--d-ff", 96)
    assert misfit.returncode == 1
    assert "--d-ff: got 96" in misfit.stderr and "was made with 128" in misfit.stderr
    again = bitsparse(*[a for a in common if a != "--resume"], "--output-dir", broken)
    assert "has a checkpoint" in again.stderr and again.returncode == 1


def test_compare(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = bitsparse("compare", *TINY, "--data", text, "--steps", 6, "--output-dir", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    content = json.loads((out / "compare.json").read_text())
    assert content["identical"] is True
    assert {m["same_losses"] for m in content["modes"].values()} == {True}
    assert (out / "compare.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("--modes: got 'x', allowed: compressed", ("--modes", "dense,x")),
        (
            "--storage: got 'fp8' with --modes dense, allowed",
            ("--storage", "fp8", "--modes", "dense"),
        ),
        (
            "--dtype: got 'float32' with --precision fp8",
            ("--precision", "fp8", "--dtype", "float32"),
        ),
    ],
)
def test_compare_refuses_options_as_the_other_commands_do(
    message: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    done = bitsparse("compare", *TINY, *options, "--output-dir", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_help_and_version() -> None:
    assert bitsparse("--version").stdout.startswith("bitsparse ")
    text = bitsparse("compare", "--help").stdout
    for name in ("drelu", "gpt2-medium", "bfloat16", "checkpoint"):
        assert name in text


def test_core_import_and_missing_extra(tmp_path: Path) -> None:
    names = ("typer", "rich", "matplotlib", "safetensors", "tokenizers")
    check = f"import sys, bitsparse; sys.exit(any(n in sys.modules for n in {names}))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
    hide = "import sys; sys.modules['typer'] = None; from bitsparse.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "the bitsparse command needs extra packages: pip install 'bitsparse[cli]'\n"
    )


def errors(tmp_path: Path) -> dict[str, tuple[object, ...]]:
    bad = tmp_path / "bad.bin"
    bad.write_bytes(np.array([20240521] * 300, "<i4").tobytes())
    (tmp_path / "file").touch()
    return {
        "--activation: got 'gelu', allowed: relu, ": ("train", "--activation", "gelu"),
        "--memory: got 'x', allowed: compressed": ("train", "--memory", "x"),
        "--modes: got 'x', allowed: ": ("compare", "--modes", "dense,x"),
        "--preset: got 'huge', allowed: tiny": ("compare", "--preset", "huge"),
        "--dtype: got 'int8', allowed: float32": ("compare", "--dtype", "int8"),
        "--device: got 'tpu', allowed: cpu": ("train", "--device", "tpu"),
        "--device: got 'cuda:99'": ("train", "--device", "cuda:99"),
        "--steps: got 0, allowed: at least 1": ("train", "--steps", "0"),
        "--lr: got nan, allowed: at least 0": ("train", "--lr", "nan"),
        "--heads: got 3 with --d-model": ("compare", *TINY, "--heads", "3"),
        "unknown magic number": ("train", *TINY, "--data", bad),
        "is not there": ("compare", *TINY, "--data", tmp_path / "missing"),
        "Invalid value for '--steps'": ("train", "--steps", "x"),
        "No such option: --nope": ("compare", "--nope"),
        "--output-dir: ": ("train", *TINY, "--output-dir", tmp_path / "file" / "x"),
    }


@pytest.mark.parametrize("index", range(15))
def test_errors_are_one_line(tmp_path: Path, index: int, capsys, monkeypatch) -> None:
    """In this process, for speed: ``run`` is what ``main`` calls."""
    from bitsparse.cli.app import run

    message, arguments = list(errors(tmp_path).items())[index]
    if "--output-dir" not in arguments:
        arguments += ("--output-dir", tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["bitsparse", *map(str, arguments)])
    try:
        status = run()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    captured = capsys.readouterr()
    assert status in (1, 2)
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX limits")
def test_a_full_disk_is_one_line(text: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000)); "
    arguments = ("train", *TINY, "--data", text, "--steps", "3", "--output-dir", tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", limit + COMMAND[2], *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "checkpoint.pt" in done.stderr
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("command", ["train", "compare"])
def test_divergence_is_an_error_and_leaves_no_weights(command, tmp_path, text):
    out = tmp_path / "run"
    options = ("--steps", 6, "--lr", 1e5, "--data", text, "--output-dir", out)
    done = bitsparse(command, *TINY, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "diverged" in done.stderr and "--lr" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (out / "model.safetensors").exists()
    assert not (out / "checkpoint.pt").exists()
    if command == "train":
        written = (out / "metrics.jsonl").read_text()
        assert "NaN" not in written and "Infinity" not in written


def test_a_batch_that_no_machine_holds_is_refused(tmp_path, text):
    options = ("--batch-size", 10**8, "--data", text, "--output-dir", tmp_path / "run")
    done = bitsparse("train", *TINY, *options)
    assert done.returncode == 1
    assert "--batch-size: got 100000000" in done.stderr
    assert not (tmp_path / "run").exists()
