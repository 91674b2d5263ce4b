"""Two processes: data parallel, fully sharded and tensor parallel training as with dense blocks."""

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import bitsparse

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed, gloo"
)

WORLD, D_MODEL, D_FF, TOKENS = 2, 32, 128, 96
CONVERTED = "plain modules, converted"


class Net(nn.Module):
    def __init__(self, activation, memory):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(D_MODEL, D_FF), nn.ReLU(), nn.Linear(D_FF, D_MODEL))
            if activation == CONVERTED
            else bitsparse.nn.FeedForward(D_MODEL, D_FF, activation, bias=True, memory=memory)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(D_MODEL)
        if activation == CONVERTED and memory == "compressed":
            bitsparse.convert(self)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x


def data_parallel(net):
    net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    return net, net.no_sync


def fully_sharded(net, precision=None, reshard=True):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)

    @contextlib.contextmanager
    def no_sync():
        net.set_requires_gradient_sync(False)
        yield
        net.set_requires_gradient_sync(True)

    return net, no_sync


def tensor_parallel(net):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh("cpu", (WORLD,))
    plan = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    for block in net.blocks:
        parallelize_module(block, mesh, {n: p for n, p in plan.items() if hasattr(block, n)})
    return net, contextlib.nullcontext


SETUPS = {
    "data parallel": data_parallel,
    "fully sharded": fully_sharded,
    "fully sharded, bfloat16": lambda net: fully_sharded(net, torch.bfloat16),
    "fully sharded, kept": lambda net: fully_sharded(net, reshard=False),
    "tensor parallel": tensor_parallel,
}


def train(setup, activation, memory, rank):
    """Three steps of two accumulated batches each: losses, then all parameters."""
    net, no_sync = SETUPS[setup](Net(activation, memory))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    # Tensor parallel ranks see the same tokens.
    seed = 1 if setup == "tensor parallel" else 1 + rank
    generator = torch.Generator().manual_seed(seed)
    results, kept = [], 0
    for _ in range(3):
        optimizer.zero_grad()
        for context in (no_sync(), contextlib.nullcontext()):
            with context:
                loss = net(torch.randn(TOKENS, D_MODEL, generator=generator)).square().mean()
                kept = bitsparse.memory_stats()["live_tensors"]
                loss.backward()
            results.append(loss.detach())
        optimizer.step()
    for p in net.parameters():
        results.append(p.detach().to_local() if hasattr(p, "to_local") else p.detach().clone())
    return results, kept


def check(setup, rank):
    for activation in ("relu2", "reglu", CONVERTED):
        if activation == CONVERTED and setup == "tensor parallel":
            continue  # its plan names other modules
        expected, _ = train(setup, activation, "dense", rank)
        for memory in ("compressed",) if activation == CONVERTED else ("compressed", "checkpoint"):
            actual, kept = train(setup, activation, memory, rank)
            # Sharded projections are called as modules: nothing is compressed.
            compressed = memory == "compressed" and setup != "tensor parallel"
            assert (kept > 0) == compressed, (setup, activation, memory, kept)
            for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
                assert torch.equal(a, e), f"{setup} {activation} {memory} {i}"


def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        for setup in SETUPS:
            check(setup, rank)
            gc.collect()  # wrapped models are cycles, and must end before the group does
    finally:
        dist.destroy_process_group()


def test_as_dense(tmp_path):
    """One pair of processes for all: starting them takes longer than the steps."""
    mp.spawn(work, (str(tmp_path / "store"),), nprocs=WORLD)
