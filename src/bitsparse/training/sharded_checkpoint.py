"""Checkpoints of several processes, each of which writes its part.

A checkpoint is a folder ``checkpoints/step-NNNNNNNN``: tensors as ``torch.distributed.checkpoint``
writes them, and ``run.json``. It is written under another name and renamed when all of it is on the
disk; older ones are removed after that. So there is a whole one at any moment, once there is one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitsparse.files import sync_folder
from bitsparse.training.errors import UserError, os_error
from bitsparse.training.files import os_cause, write_atomically
from bitsparse.training.step import Trainee

FORMAT = 1
FOLDER = "checkpoints"
_HEADER = "run.json"
_KEYS = ("step", "processes", "config", "scaler")
_NAME = re.compile(r"step-(\d+)")


def newest(output_dir: Path) -> Path | None:
    """The folder of the last whole checkpoint in ``output_dir``."""
    folder = output_dir / FOLDER
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name)] if folder.is_dir() else []
    return max(found, key=lambda p: int(p.name.split("-")[1]), default=None)


def save(output_dir: Path, step: int, config: dict[str, Any], trainee: Trainee) -> None:
    """Write a checkpoint after ``step`` finished steps; every process must call this.

    Args:
        config: names and plain values of what must be the same when the run is resumed.

    Raises:
        UserError: it cannot be written; the previous one is intact then.
    """
    from torch.distributed.checkpoint import state_dict_saver  # slow to import

    team = trainee.team
    target = output_dir / FOLDER / f"step-{step:08}"
    temporary = target.with_name(target.name + ".tmp")
    header = {
        "format": FORMAT,
        "step": step,
        "processes": team.size,
        "config": config,
        "scaler": trainee.scaler.state_dict(),
    }

    def begin() -> None:
        with _os_errors(target):
            shutil.rmtree(temporary, ignore_errors=True)  # of a killed run
            temporary.mkdir(parents=True)

    def finish() -> None:
        with _os_errors(target):
            text = json.dumps(header, indent=1).encode()
            write_atomically(temporary / _HEADER, lambda file: file.write(text))
            os.rename(temporary, target)
            sync_folder(target.parent)
            _remove_others(target)

    team.led(begin)
    if team.any(not temporary.is_dir(), trainee.device):
        raise UserError(
            f"--output-dir: {output_dir} is not the same folder for all processes; allowed: one on "
            "a file system that all machines share"
        )
    tensors = {**_state(trainee), **_random_states(team.rank)}
    with _os_errors(target):
        # Each file is on the disk when this returns.
        state_dict_saver.save(tensors, checkpoint_id=temporary)
    team.led(finish)


def load_header(path: Path) -> dict[str, Any]:
    """What is in a checkpoint besides tensors: step, processes, config, scaler.

    Raises:
        UserError: it cannot be read or is none.
    """
    try:
        text = (path / _HEADER).read_bytes()
    except OSError as error:
        raise os_error(path / _HEADER, error) from error
    try:
        header = json.loads(text)
    except ValueError as error:
        raise _damaged(path) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of format {FORMAT}")
    if missing := [k for k in _KEYS if k not in header]:
        raise UserError(f"{path} is not a whole checkpoint: {missing[0]!r} is missing")
    return header


def restore(path: Path, header: dict[str, Any], trainee: Trainee) -> int:
    """Put a checkpoint into ``trainee`` and the random generators; every process must call this.

    It may have been written by another number of processes, or with the other of DDP and FSDP2:
    tensors are split anew. Random generators are left alone then.

    Returns:
        The number of finished steps.

    Raises:
        UserError: it is damaged, or does not fit the model.
    """
    from torch.distributed.checkpoint import state_dict_loader

    _make_optimizer_state(trainee)
    tensors = _state(trainee)
    random: dict[str, Tensor] = {}
    if header["processes"] == trainee.team.size:
        random = _random_states(trainee.team.rank)
    try:
        state_dict_loader.load({**tensors, **random}, checkpoint_id=path)
    except Exception as error:  # of many kinds for what is damaged
        raise _damaged(path) from error
    trainee.scaler.load_state_dict(header["scaler"])
    for name, state in random.items():
        setter = torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state
        setter(state)
    return int(header["step"])


def _state(trainee: Trainee) -> dict[str, Tensor]:
    """Parameters and optimizer state by name, which share memory with those in use.

    Tensors only: they are read with ``weights_only=True``. (The table of contents, which
    ``torch.distributed.checkpoint`` writes, is a pickle.)
    """
    state = {}
    for name, parameter in trainee.model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for key, value in trainee.optimizer.state[parameter].items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def _make_optimizer_state(trainee: Trainee) -> None:
    """Have the optimizer allocate its state, which is made in its first step; values are any."""
    for parameter in trainee.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)


def _random_states(rank: int) -> dict[str, Tensor]:
    states = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def _remove_others(kept: Path) -> None:
    for path in kept.parent.iterdir():
        if path == kept or not re.fullmatch(r"step-\d+(\.tmp)?", path.name):
            continue
        # First it stops being one: a folder that is half removed must not look whole.
        doomed = path if path.suffix == ".tmp" else path.with_name(path.name + ".tmp")
        if doomed != path:
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _damaged(path: Path) -> UserError:
    return UserError(
        f"{path} is damaged or does not fit the model; allowed: another --output-dir, or this one "
        "once the folder is removed"
    )


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Show failures of the disk, in this process or as told by another, as a UserError."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        failures = getattr(error, "failures", {})  # of a CheckpointException, by rank
        causes = [os_cause(e) for e in (error, *(failure[0] for failure in failures.values()))]
        cause = next((c for c in causes if c is not None), None)
        if cause is None:
            raise
        raise os_error(path, cause) from error
