"""One optimizer step, the same for every command."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bitsparse.training.errors import UserError, check_choice
from bitsparse.training.model import Transformer
from bitsparse.training.team import Team, distribute, whole, without_reduction

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def get_device(name: str | None) -> torch.device:
    """The device called ``name``; None: a GPU if there is one.

    Raises:
        UserError: no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"--device: got {name!r}, allowed: cpu, cuda, cuda:0, ...")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"--device: got {name!r}, but no GPU can be used; allowed: cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise UserError(
                f"--device: got {name!r}, allowed: cuda:0 to cuda:{torch.cuda.device_count() - 1}"
            )
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def be_deterministic() -> None:
    """Have every operation give the same bits each time. Call it before CUDA is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling memory that is about to be overwritten costs time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


@dataclass
class Trainee:
    """A model with what trains it."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    dtype: torch.dtype
    """Of autocast; float32: it is off."""
    grad_clip: float
    """Largest norm of the gradient; 0: no limit."""
    module: nn.Module
    """What is called: the model, or what wraps it."""
    team: Team = field(default_factory=Team)

    @property
    def device(self) -> torch.device:
        return self.model.cos.device

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of forward passes."""
        return torch.autocast(
            self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32
        )

    def state_bytes(self) -> int:
        """Bytes of parameters, buffers and optimizer state; gradients live within a step."""
        state = [v for s in self.optimizer.state.values() for v in s.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *state]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


def make_trainee(
    model: Transformer,
    dtype: str,
    lr: float,
    weight_decay: float,
    grad_clip: float,
    team: Team | None = None,
    device: torch.device | None = None,
    mixed_precision: str = "autocast",
) -> Trainee:
    """AdamW for ``model``; weight decay on matrices only. A scaler for float16.

    Args:
        team: the processes that train it; None: this one alone.
        device: where it is put, for a team; None: where it is.
        mixed_precision: how ``dtype`` comes about, one of ``MIXED_PRECISION``: by autocast, or by
            FSDP2, which gathers the parameters in it.
    """
    check_choice("--dtype", dtype, DTYPES)
    by_autocast = mixed_precision == "autocast"
    module: nn.Module = model
    if team is not None:
        parameters = None if by_autocast else DTYPES[dtype]
        module = distribute(model, team, device or model.cos.device, parameters)
    device = model.cos.device
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "float16")
    autocast = DTYPES[dtype] if by_autocast else torch.float32
    return Trainee(model, optimizer, scaler, autocast, grad_clip, module, team or Team())


def learning_rate(step: int, steps: int, warmup: int, peak: float, floor: float = 0.1) -> float:
    """Linear warm-up to ``peak``, then a cosine down to ``floor * peak`` at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(steps - warmup - 1, 1)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def train_step(
    trainee: Trainee, batches: list[tuple[Tensor, Tensor]], lr: float
) -> tuple[Tensor, Tensor]:
    """One optimizer step on the mean loss of ``batches``, which are on the device.

    With a team, ``batches`` are this process's share of them.

    Returns:
        The loss, with a team its mean over all processes, and the norm of the gradient before
        clipping, float32 ``[]``.
    """
    for group in trainee.optimizer.param_groups:
        group["lr"] = lr
    losses = []
    for i, (tokens, targets) in enumerate(batches):
        last = i == len(batches) - 1
        with nullcontext() if last else without_reduction(trainee.module):
            with trainee.autocast():
                loss = trainee.module(tokens, targets) / len(batches)
            trainee.scaler.scale(loss).backward()
        losses.append(loss.detach())
    trainee.scaler.unscale_(trainee.optimizer)
    # Of shards it is the norm of the whole gradient.
    norm = nn.utils.clip_grad_norm_(
        trainee.model.parameters(), trainee.grad_clip or math.inf, foreach=True
    )
    trainee.scaler.step(trainee.optimizer)
    trainee.scaler.update()
    trainee.optimizer.zero_grad(set_to_none=True)
    return trainee.team.mean(torch.stack(losses).sum()), whole(norm)
