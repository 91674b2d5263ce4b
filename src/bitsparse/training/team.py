"""The processes that train one model together, with DistributedDataParallel or FSDP2.

``torchrun`` starts them and tells each in environment variables who it is. Without them a team has
one member, and everything here does nothing.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitsparse.training.errors import UserError, check_choice
from bitsparse.training.model import Transformer

T = TypeVar("T")

PARALLEL = ("none", "ddp", "fsdp2")
MIXED_PRECISION = ("autocast", "parameters")

_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets and a process group needs."""

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def choose_parallel(parallel: str | None) -> str:
    """``parallel``, or what suits how this process was started: "ddp" by torchrun, else "none".

    Raises:
        UserError: it is not allowed, or does not go with the environment.
    """
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if parallel is None:
        return "none" if missing else "ddp"
    check_choice("--parallel", parallel, PARALLEL)
    if parallel != "none" and missing:
        raise UserError(
            f"--parallel: got {parallel!r} without torchrun's environment ({missing[0]} is not "
            "set); allowed: none, or start with torchrun --nproc-per-node N --no-python bitsparse "
            "train ..."
        )
    if parallel == "none" and not missing and os.environ["WORLD_SIZE"] != "1":
        raise UserError(
            "--parallel: got 'none' in several processes, which would overwrite each other's "
            "files; allowed: ddp, fsdp2"
        )
    return parallel


def local_device_name(device: str | None) -> str:
    """The device of this process of several: its own GPU, or the CPU.

    Raises:
        UserError: a GPU was chosen by number.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda:"):
        raise UserError(
            f"--device: got {device!r} with --parallel, where each process has a GPU of its own; "
            "allowed: cpu, cuda"
        )
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device


@dataclass(frozen=True)
class Team:
    """The processes of a run, and which of them this one is."""

    parallel: str = "none"
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes what is there once."""
        return self.rank == 0

    def share(self, batch_size: int) -> slice:
        """The sequences of a batch that this process trains on.

        Raises:
            UserError: the batch cannot be split evenly.
        """
        if batch_size % self.size:
            raise UserError(
                f"--batch-size: got {batch_size} with {self.size} processes, allowed: multiples "
                f"of {self.size}"
            )
        each = batch_size // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of ``value`` over all processes, added up in the same order by each."""
        if self.parallel == "none":
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether ``flag`` is set in one of the processes."""
        if self.parallel == "none":
            return flag
        flags = torch.tensor(float(flag), device=device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags.item())

    def led(self, compute: Callable[[], T]) -> T:
        """What ``compute`` returns in the leading process, the only one that calls it.

        Raises:
            UserError: it raised one; so does every process then.
        """
        if self.parallel == "none":
            return compute()
        box: list[Any] = [None]
        if self.leads:
            try:
                box = [compute()]
            except UserError as error:
                box = [error]
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], UserError):
            raise box[0]
        result: T = box[0]
        return result


@contextmanager
def joined(parallel: str, device: torch.device) -> Iterator[Team]:
    """The team of this process, as long as the context lasts.

    A UserError of a process other than the leading one names it. On GPUs a process that has failed
    cannot join again: it is to end.
    """
    if parallel == "none":
        yield Team()
        return
    dist.init_process_group(
        _BACKENDS[device.type], device_id=device if device.type == "cuda" else None
    )
    team = Team(parallel, dist.get_rank(), dist.get_world_size())
    failed = True
    try:
        yield team
        failed = False
    except UserError as error:
        if team.leads:
            raise
        raise UserError(f"process {team.rank}: {error}") from error
    finally:
        gc.collect()  # wrapped models are cycles, and must end before the group does
        # NCCL may wait here for the others, which wait for this one: until torchrun, which is to
        # end them, sees that this process has ended.
        if not (failed and device.type == "cuda"):
            dist.destroy_process_group()


def distribute(
    model: Transformer, team: Team, device: torch.device, parameters: torch.dtype | None = None
) -> nn.Module:
    """Put ``model`` on ``device`` in the way of ``team``.

    Args:
        model: on the CPU, the same in every process. With FSDP2 it is changed in place: each layer
            is sharded, then the rest, and gathered parameters are dropped again after forward.
        parameters: FSDP2 gathers the parameters in this dtype, and everything is computed in it;
            gradients are reduced in float32. None: float32.

    Returns:
        What is called in training: ``model``, or what wraps it.
    """
    if team.parallel == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(
            model.to(device),
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            # Else buckets are made anew after the first step, in the order in which gradients came.
            # Where an element is in its bucket decides in which order several processes add it up:
            # a resumed run, or another memory mode, would round differently. (PyTorch warns, once,
            # that it finds none.)
            find_unused_parameters=True,
        )
    if team.parallel == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (team.size,))
        # Inputs are not cast: those of a layer are in its dtype already, but for the rotary
        # embedding, which is float32 on purpose.
        policy = MixedPrecisionPolicy(
            param_dtype=parameters, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model.to(device)


def without_reduction(module: nn.Module) -> AbstractContextManager[object]:
    """Forward and backward under this add gradients up in this process alone, where that pays.

    With FSDP2 it does not: whole gradients would stay in memory instead of their shards.
    """
    from torch.nn.parallel import DistributedDataParallel

    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """``tensor``, put together from the shards of all processes, each of which must call this."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()
