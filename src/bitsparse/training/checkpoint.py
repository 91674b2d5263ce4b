"""Checkpoints: everything that the rest of a run depends on, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitsparse.training.errors import UserError, os_error
from bitsparse.training.files import write_atomically

FORMAT = 1
FILE_NAME = "checkpoint.pt"
_KEYS = ("step", "config", "model", "optimizer", "scaler", "rng")


def save(
    path: Path,
    step: int,
    config: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Write a checkpoint after ``step`` finished steps.

    Args:
        config: names and plain values of what must be the same when the run is resumed.

    Raises:
        UserError: it cannot be written (the disk is full, say); the previous one is intact then.
    """
    rng: dict[str, torch.Tensor] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        rng["cuda"] = torch.cuda.get_rng_state()
    content = {
        "format": FORMAT,
        "step": step,
        "config": config,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "rng": rng,
    }
    write_atomically(path, lambda file: torch.save(content, file))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU, without applying it.

    Raises:
        UserError: it cannot be read or is none.
    """
    try:
        file = open(path, "rb")
    except OSError as error:
        raise os_error(path, error) from error
    with file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many kinds for a file that is damaged
            raise UserError(
                f"{path} is damaged or not a checkpoint; allowed: another --output-dir, or this "
                "one once the file is removed"
            ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of format {FORMAT}")
    if missing := [k for k in _KEYS if k not in content]:
        raise UserError(f"{path} is not a whole checkpoint: {missing[0]!r} is missing")
    return content


def check_config(path: Path, content: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise UserError unless the run that made the checkpoint had this ``config``."""
    saved = content["config"]
    # Last what follows from something else: the error names what was given.
    for name in sorted(config.keys() | saved.keys(), key=lambda name: (name == "d_ff", name)):
        if saved.get(name) != config.get(name):
            raise UserError(
                f"--{name.replace('_', '-')}: got {config.get(name)}, {path} was made with "
                f"{saved.get(name)}; allowed: the same, or another --output-dir"
            )


def restore(
    path: Path,
    content: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> int:
    """Put a checkpoint into ``model``, ``optimizer``, ``scaler`` and the random generators.

    Returns:
        The number of finished steps.

    Raises:
        UserError: the checkpoint does not fit the model; nothing is changed then.
    """
    _check_fits(path, content, model, optimizer)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    scaler.load_state_dict(content["scaler"])
    torch.set_rng_state(content["rng"]["cpu"])
    if "cuda" in content["rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(content["rng"]["cuda"])
    return int(content["step"])


def _check_fits(
    path: Path, content: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    def shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in state.items()}

    saved, wanted = shapes(content["model"]), shapes(model.state_dict())
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise UserError(
                f"{path} does not fit the model: {name} is {saved.get(name)} there, "
                f"{wanted.get(name)} in the model"
            )
    groups = content["optimizer"]["param_groups"]
    sizes = [len(g["params"]) for g in groups]
    if sizes != [len(g["params"]) for g in optimizer.param_groups]:
        raise UserError(f"{path} does not fit the optimizer: its parameter groups are others")
    for ids, group in zip((g["params"] for g in groups), optimizer.param_groups, strict=True):
        for index, parameter in zip(ids, group["params"], strict=True):
            moment = content["optimizer"]["state"].get(index, {}).get("exp_avg", parameter)
            if moment.shape != parameter.shape:
                raise UserError(
                    f"{path} does not fit the optimizer: a moment is {tuple(moment.shape)}, "
                    f"its parameter {tuple(parameter.shape)}"
                )
