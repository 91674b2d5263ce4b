"""``bitsparse train`` in several processes: as dense, as one process, stopped and resumed."""

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bitsparse.backends import force_backend
from bitsparse.training import sharded_checkpoint
from bitsparse.training.errors import UserError
from bitsparse.training.model import ModelConfig
from bitsparse.training.team import Team, choose_parallel, local_device_name
from bitsparse.training.train import TrainConfig, train

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed, gloo"
)

WEIGHTS = "model.safetensors"
ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def config_for(folder: Path, name: str, **changes: object) -> TrainConfig:
    config = TrainConfig(
        model=ModelConfig(layers=2, d_model=16, heads=2, seq_len=8),
        output_dir=folder / name,
        data=[folder / "text.txt"],
        memory="compressed",
        device="cpu",
        steps=5,
        batch_size=6,
        grad_accum=2,
        warmup=2,
        lr=1e-2,
        grad_clip=0.5,  # less than the norms: something is clipped
        eval_every=3,
        eval_batches=1,
        checkpoint_every=2,
        sample_tokens=2,
    )
    return replace(config, **changes)


def numbers(config: TrainConfig) -> list[dict[str, float]]:
    """What is in the metrics of every step and does not depend on the machine or the memory."""
    names = ("step", "loss", "grad_norm", "eval_loss", "lr")
    lines = (config.output_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k in names} for line in lines]


def weights(config: TrainConfig) -> bytes:
    return (config.output_dir / WEIGHTS).read_bytes()


class Worker:
    """Trains in one of several processes, each time in a new group."""

    def __init__(self, rank: int, ports: list[int], size: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.ports = rank, iter(ports)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ["MASTER_ADDR"] = "127.0.0.1"

    def train(self, config: TrainConfig, on_step=None):
        os.environ["MASTER_PORT"] = str(next(self.ports))
        # Others compile in every process.
        quick = force_backend("reference") if config.device == "cpu" else contextlib.nullcontext()
        with quick:
            return train(config, on_step)

    def fails(self, config: TrainConfig, message: str) -> None:
        try:
            self.train(config)
        except UserError as error:
            assert message in str(error), error
            assert str(error).startswith("process 1: ") == (self.rank == 1)
        else:
            raise AssertionError(f"no error: {message}")


def spawn(work, folder: Path, size: int = 2) -> None:
    """Run ``work`` in ``size`` processes, with as many free ports as it may need."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(32)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    mp.spawn(work, (ports, folder, size), nprocs=size)


def same_as_dense(rank: int, ports: list[int], folder: Path, size: int) -> None:
    worker = Worker(rank, ports, size)
    setups = {
        "ddp": {"parallel": "ddp"},
        "fsdp2": {"parallel": "fsdp2"},
        # float16: the scaler has to agree on what overflowed.
        "autocast": {"parallel": "fsdp2", "dtype": "float16"},
        "parameters": {
            "parallel": "fsdp2",
            "dtype": "bfloat16",
            "mixed_precision": "parameters",
        },
    }
    for name, setup in setups.items():
        dense = config_for(folder, f"{name} dense", memory="dense", **setup)
        compressed = config_for(folder, f"{name} compressed", **setup)
        told: list[object] = []
        assert worker.train(dense).finished
        assert worker.train(compressed, told.append).finished
        assert len(told) == (5 if rank == 0 else 0)
        if rank == 0:
            assert numbers(compressed) == numbers(dense), name
            assert len(numbers(dense)) == 5 and weights(compressed) == weights(dense), name


def stop_after(step: int):
    def on_step(progress) -> None:
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGINT)  # of the first process alone

    return on_step


def stopped_and_resumed(rank: int, ports: list[int], folder: Path, size: int) -> None:
    worker = Worker(rank, ports, size)
    for parallel in ("ddp", "fsdp2"):
        unbroken = config_for(folder, f"{parallel} compressed", parallel=parallel)
        broken = config_for(folder, f"{parallel} broken", parallel=parallel, resume=True)
        result = worker.train(broken, stop_after(3))
        assert (result.step, result.finished) == (3, False)
        if rank == 0:  # nothing is changed before it has joined the next group
            assert checkpoints(broken.output_dir) == ["step-00000003"]
            for name in ("one", "the other", "three"):
                left = config_for(folder, f"{parallel} left for {name}").output_dir
                shutil.copytree(broken.output_dir, left)
        result = worker.train(broken)
        assert result.finished and result.note == ""
        if rank == 0:
            assert numbers(broken) == numbers(unbroken)
            assert weights(broken) == weights(unbroken)
        worker.fails(replace(broken, lr=0.5), "--lr: got 0.5, ")
        worker.fails(replace(broken, resume=False), "has a checkpoint; allowed: --resume")


def failing_saves(rank: int, ports: list[int], folder: Path, size: int) -> None:
    """Whatever fails, and wherever: the last checkpoint is there, and the run goes on from it."""
    worker = Worker(rank, ports, size)
    config = config_for(folder, "full disk", parallel="fsdp2", resume=True)
    unbroken = config_for(folder, "fsdp2 compressed")
    assert worker.train(config, stop_after(2)).step == 2
    if rank == 0:  # what a process that was killed leaves
        (config.output_dir / sharded_checkpoint.FOLDER / "step-00000004.tmp" / "x").mkdir(
            parents=True
        )
    full = OSError(errno.ENOSPC, "No space left on device")
    header = "bitsparse.training.sharded_checkpoint.write_atomically"
    for where, of in (("torch.save", 1), ("torch.save", 0), ("os.rename", 0), (header, 0)):
        with mock.patch(where, side_effect=full) if rank == of else contextlib.nullcontext():
            try:
                worker.train(config)
                raise AssertionError(f"no error: {where}")
            except UserError as error:  # of both
                assert "no space left on the disk" in str(error), error
        if rank == 0:
            last = sharded_checkpoint.newest(config.output_dir)
            assert last is not None and last.name == "step-00000002"
    with (
        mock.patch("pathlib.Path.is_dir", return_value=False) if rank else contextlib.nullcontext()
    ):
        worker.fails(config, "is not the same folder for all processes; allowed: ")
    assert worker.train(config).finished
    if rank == 0:
        assert numbers(config) == numbers(unbroken) and weights(config) == weights(unbroken)
        assert checkpoints(config.output_dir) == ["step-00000005"]


def checkpoints(output_dir: Path) -> list[str]:
    return sorted(p.name for p in (output_dir / sharded_checkpoint.FOLDER).iterdir())


def as_one_process(rank: int, ports: list[int], folder: Path, size: int) -> None:
    """One process: the same batches, sums in another order."""
    worker = Worker(rank, ports, size)
    alone = config_for(folder, "alone")
    assert worker.train(alone).finished
    for parallel in ("ddp", "fsdp2"):
        close(numbers(alone), numbers(config_for(folder, f"{parallel} compressed")))
        # Checkpoints of two processes: continued by one, and by one with the other of the two.
        for name in ("one", "the other"):
            how = {"ddp": "fsdp2", "fsdp2": "ddp"}[parallel] if name == "the other" else parallel
            left = config_for(folder, f"{parallel} left for {name}", parallel=how, resume=True)
            result = worker.train(left)
            assert result.finished and "in 1 processes, before that in 2" in result.note
            close(numbers(alone), numbers(left))
    misfit = config_for(folder, "ddp broken", resume=True)
    worker.fails(misfit, "--parallel: got 'none', the checkpoint in ")
    misfit = config_for(folder, "alone", resume=True, parallel="ddp")
    worker.fails(misfit, "is one of one process; allowed: none")


def in_three_processes(rank: int, ports: list[int], folder: Path, size: int) -> None:
    """Parameters that cannot be split evenly, and checkpoints of two processes."""
    worker = Worker(rank, ports, size)
    for parallel in ("ddp", "fsdp2"):
        dense = config_for(folder, f"{parallel} dense, three", parallel=parallel, memory="dense")
        compressed = config_for(folder, f"{parallel} compressed, three", parallel=parallel)
        assert worker.train(dense).finished and worker.train(compressed).finished
        left = config_for(folder, f"{parallel} left for three", parallel=parallel, resume=True)
        result = worker.train(left)
        assert result.finished and "in 3 processes, before that in 2" in result.note
        if rank == 0:
            assert numbers(compressed) == numbers(dense) and weights(compressed) == weights(dense)
            for config in (compressed, left):
                close(numbers(config), numbers(config_for(folder, "alone")))


def close(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(actual) == len(expected) == 5
    for a, e in zip(actual, expected, strict=True):
        assert a == pytest.approx(e, rel=1e-4)


def in_two_processes(rank: int, ports: list[int], folder: Path, size: int) -> None:
    same_as_dense(rank, ports[:8], folder, size)
    stopped_and_resumed(rank, ports[8:24], folder, size)
    failing_saves(rank, ports[24:], folder, size)


def test_training(tmp_path: Path) -> None:
    """Few processes for all: starting them takes longer than the steps."""
    (tmp_path / "text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(200)))
    spawn(in_two_processes, tmp_path, 2)
    assert max(line["grad_norm"] for line in numbers(config_for(tmp_path, "ddp dense"))) > 0.5
    spawn(as_one_process, tmp_path, 1)
    spawn(in_three_processes, tmp_path, 3)


def on_gpus(rank: int, ports: list[int], folder: Path, size: int) -> None:
    worker = Worker(rank, ports, size)
    device = local_device_name("cuda")
    for parallel in ("ddp", "fsdp2"):

        def config(name: str, how: str = parallel, **changes: object) -> TrainConfig:
            changes = {"parallel": how, "device": device, "dtype": "bfloat16", **changes}
            return config_for(folder, f"{how} {name}", **changes)

        assert worker.train(config("dense", memory="dense")).finished
        assert worker.train(config("compressed")).finished
        broken = config("broken", resume=True)
        assert worker.train(broken, stop_after(3)).step == 3
        assert worker.train(broken).finished
        if rank == 0:
            for name in ("compressed", "broken"):
                assert numbers(config(name)) == numbers(config("dense"))
                assert weights(config(name)) == weights(config("dense"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_gpus(tmp_path: Path) -> None:
    """NCCL, with two GPUs if there are two."""
    (tmp_path / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(200)))
    spawn(on_gpus, tmp_path, min(2, torch.cuda.device_count()))


COMMAND = """
import os, signal, sys
from torch.distributed.checkpoint import state_dict_saver
if sys.argv.pop(1) == "killed" and os.environ["RANK"] == "1":
    save = state_dict_saver.save

    def save_or_die(tensors, checkpoint_id):
        if checkpoint_id.name.startswith("step-00000002"):
            os.kill(os.getpid(), signal.SIGKILL)
        save(tensors, checkpoint_id=checkpoint_id)

    state_dict_saver.save = save_or_die
from bitsparse.cli import main
main()
"""


def test_torchrun(tmp_path: Path) -> None:
    """The command: one process speaks, and if one is killed, all end, and the run can go on."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("some text " * 50)
    arguments = (
        "--device cpu --layers 1 --d-model 16 --heads 2 --seq-len 8 --memory dense --steps 3 "
        "--batch-size 4 --checkpoint-every 1 --sample-tokens 0 --resume"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def run(how: str) -> "subprocess.CompletedProcess[str]":
        line = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--no-python", sys.executable, "-c", COMMAND, how, "train"),
            *arguments.split(),
            *("--data", str(text), "--output-dir", str(out)),
        ]
        return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)

    killed = run("killed")
    assert killed.returncode != 0
    assert checkpoints(out) == ["step-00000001", "step-00000002.tmp"]
    last = sharded_checkpoint.newest(out)
    assert last is not None and last.name == "step-00000001"
    done = run("whole")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("weights and metrics: ") == 1
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert checkpoints(out) == ["step-00000003"]


def test_the_environment_decides(monkeypatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert choose_parallel(None) == choose_parallel("none") == "none"
    for parallel in ("ddp", "fsdp2"):
        with pytest.raises(UserError, match=rf"--parallel: got '{parallel}' without torchrun's"):
            choose_parallel(parallel)
    with pytest.raises(UserError, match=r"--parallel: got 'tp', allowed: none, ddp, fsdp2"):
        choose_parallel("tp")
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    assert (choose_parallel(None), choose_parallel("fsdp2")) == ("ddp", "fsdp2")
    assert choose_parallel("none") == "none"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="--parallel: got 'none' in several processes"):
        choose_parallel("none")
    assert local_device_name("cuda") == "cuda:1" and local_device_name("cpu") == "cpu"
    with pytest.raises(UserError, match=r"--device: got 'cuda:0' with --parallel"):
        local_device_name("cuda:0")


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for parallel in ("none", "ddp"):
        config = config_for(tmp_path, "x", parallel=parallel, mixed_precision="parameters")
        with pytest.raises(UserError, match="--mixed-precision: got 'parameters' with --parallel"):
            config.check()
    with pytest.raises(UserError, match=r"--parallel: got 'x', allowed: none, ddp, fsdp2"):
        config_for(tmp_path, "x", parallel="x").check()


def test_shares_make_up_the_batch() -> None:
    shares = [Team("ddp", rank, 3).share(6) for rank in range(3)]
    assert [list(range(6))[s] for s in shares] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(UserError, match=r"--batch-size: got 4 with 3 processes, allowed: mul"):
        Team("ddp", 0, 3).share(4)


def test_damaged_checkpoints(tmp_path: Path) -> None:
    assert sharded_checkpoint.newest(tmp_path) is None
    folder = tmp_path / sharded_checkpoint.FOLDER
    for name in ("step-00000009", "step-00000010", "step-00000011.tmp", "other"):
        (folder / name).mkdir(parents=True)
    last = sharded_checkpoint.newest(tmp_path)
    assert last == folder / "step-00000010"
    with pytest.raises(UserError, match="No such file"):
        sharded_checkpoint.load_header(last)
    contents = {
        "{": "damaged",
        "[]": "not a checkpoint of format 1",
        '{"format": 2}': "not a checkpoint of format 1",
        '{"format": 1, "step": 1}': "not a whole checkpoint: 'processes' is missing",
    }
    for text, message in contents.items():
        (last / "run.json").write_text(text)
        with pytest.raises(UserError, match=message):
            sharded_checkpoint.load_header(last)
