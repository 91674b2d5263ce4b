"""Converted models in what trainers do with models: every bit as with the same model dense."""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bitsparse
from bitsparse.backends import force_backend
from convert_helpers import live_tensors

VOCAB, D, FF, BATCH, TOKENS = 60, 16, 48, 2, 9
FAMILIES = {
    "nemotron": ("Nemotron", {"intermediate_size": FF, "num_key_value_heads": 2}),
    "llama": ("Llama", {"intermediate_size": FF, "hidden_act": "relu", "mlp_bias": True}),
    "opt": ("OPT", {"ffn_dim": FF, "word_embed_proj_dim": D, "dropout": 0.0}),
}
PROJECTIONS = {
    "plain": ("0", "2"),
    "nemotron": ("up_proj", "down_proj"),
    "llama": ("gate_proj", "up_proj", "down_proj"),
    "opt": ("fc1", "fc2"),
}
"""Their names; the last one projects down."""


class Plain(nn.Module):
    """Residual blocks of plain modules, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCAB, D), nn.LayerNorm(D), nn.Linear(D, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Linear(FF, D)) for _ in range(2)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(self.norm(x))
        return self.head(x)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "plain":
        return Plain()
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    family, sizes = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB,
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        **sizes,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


Forward = Callable[[Tensor], object]


def loss_of(forward: Forward, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    out = forward(torch.randint(VOCAB, (BATCH, TOKENS), generator=generator))
    logits = out if isinstance(out, Tensor) else out.logits
    return logits.float().square().mean()


Results = list[Tensor]
Train = Callable[[nn.Module], Results]


def parameters(model: nn.Module) -> Results:
    return [p.detach().clone() for p in model.parameters()]


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, count: int = 3
) -> Results:
    """Losses, then what became of the parameters. Without ``optimizer``: something else steps."""
    losses = []
    for i in range(count):
        loss = loss_of(model, i)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses + parameters(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def assert_same(actual: Results, expected: Results, what: object = "") -> None:
    assert len(actual) == len(expected) > 1
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == e.dtype and torch.equal(a, e), (what, i)
    assert all(torch.isfinite(e).all() for e in expected)


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """How many activations were compressed at the beginning of each backward pass."""
    counts: list[int] = []
    backward = torch.Tensor.backward

    def counting(self: Tensor, *args: object, **kwargs: object) -> None:
        counts.append(live_tensors())
        backward(self, *args, **kwargs)

    torch.Tensor.backward = counting
    try:
        yield counts
    finally:
        torch.Tensor.backward = backward


def check(name: str, train: Train, compressed: int | None = 2) -> None:
    """``train`` gives the same results with the model of that name dense and converted.

    ``compressed``: blocks that keep something compressed in each backward pass; None: any number.
    """
    expected = train(make(name))
    model = make(name)
    assert len(bitsparse.convert(model).converted) == 2
    gc.collect()
    with counted() as counts:
        assert_same(train(model), expected, name)
    assert counts
    if compressed is not None:
        assert set(counts) == {compressed}, counts


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Of tiny models, threads that wait for each other and compiling take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with force_backend("reference"):
        yield
    torch.set_num_threads(before)


everywhere = pytest.mark.parametrize("name", PROJECTIONS)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    def train(model: nn.Module) -> Results:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return steps(model, adamw(model))

    check(name, train, None)  # of the last layer, whose forward pass is not repeated, perhaps


@everywhere
def test_grad_scaler(name: str) -> None:
    """Under autocast to float16, with a scale that overflows at first."""

    def train(model: nn.Module) -> Results:
        optimizer, scales = adamw(model), []
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        losses = []
        for i in range(30):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, i)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            losses.append(loss.detach())
        assert scales[0] < 2.0**40 and any(b > a for a, b in pairwise(scales))
        return losses + [torch.tensor(scales)] + parameters(model)

    check(name, train)


@everywhere
def test_functional_call(name: str) -> None:
    """With parameters that are not the model's own, and are no leaves."""

    def train(model: nn.Module) -> Results:
        own = {n: p.detach().clone() for n, p in model.named_parameters()}
        trained = {n: p.clone().requires_grad_() for n, p in own.items()}
        results = []
        for i in range(3):
            scaled = {n: 1.5 * p for n, p in trained.items()}
            loss = loss_of(lambda ids, p=scaled: torch.func.functional_call(model, p, (ids,)), i)
            loss.backward()
            results.append(loss.detach())
            with torch.no_grad():
                for p in trained.values():
                    if p.grad is not None:
                        results.append(p.grad)
                        p -= 0.1 * p.grad
                        p.grad = None
        assert all(p.grad is None for p in model.parameters())
        for n, p in model.named_parameters():
            assert torch.equal(p, own[n])
        return results

    check(name, train)


@everywhere
def test_functional_gradients_run_as_before(name: str) -> None:
    def train(model: nn.Module) -> Results:
        own = {n: p.detach() for n, p in model.named_parameters()}
        grads = torch.func.grad(
            lambda p: loss_of(lambda ids: torch.func.functional_call(model, p, (ids,)), 0)
        )(own)
        return [*grads.values(), *steps(model, adamw(model))]

    check(name, train)


@everywhere
@pytest.mark.parametrize("average", ["AveragedModel", "deepcopy"])
def test_averaged_copies(name: str, average: str) -> None:
    """A copy is converted as well, and computes with its own weights."""

    def train(model: nn.Module) -> Results:
        optimizer, results = adamw(model), []
        if average == "AveragedModel":
            averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            ema = averaged.module
        else:
            ema = copy.deepcopy(model)
        for i in range(3):
            results += steps(model, optimizer, 1)
            if average == "AveragedModel":
                averaged.update_parameters(model)
            else:
                with torch.no_grad():
                    for mean, p in zip(ema.parameters(), model.parameters(), strict=True):
                        mean.lerp_(p, 0.1)
            with torch.no_grad():
                results += [loss_of(ema, i)]
        assert not torch.equal(results[-1], loss_of(model, 2))
        gc.collect()
        return results + steps(ema, adamw(ema))  # it may be trained, too

    check(name, train)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@everywhere
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("which", ["all", "down"])
def test_parametrizations_run_as_before(name: str, when: str, which: str) -> None:
    """They give a module another class."""
    names = PROJECTIONS[name] if which == "all" else PROJECTIONS[name][-1:]

    def parametrized(model: nn.Module) -> None:
        for block_name, module in list(model.named_modules()):
            if block_name.split(".")[-1] in names and isinstance(module, nn.Linear):
                nn.utils.parametrizations.weight_norm(module)
                parametrize.register_parametrization(module, "weight", Doubled())

    expected_model, model = make(name), make(name)
    parametrized(expected_model)
    if when == "before":
        parametrized(model)
        with pytest.warns(UserWarning, match="found no feed-forward block"):
            assert bitsparse.convert(model).converted == ()
    else:
        assert len(bitsparse.convert(model).converted) == 2
        parametrized(model)
    with counted() as counts:
        actual = steps(model, adamw(model))
    assert_same(actual, steps(expected_model, adamw(expected_model)))
    assert set(counts) == {0}
    if when == "after":  # without them it is compressed again
        for module in model.modules():
            if parametrize.is_parametrized(module):
                parametrize.remove_parametrizations(module, "weight")
        with counted() as counts:
            steps(model, adamw(model), 1)
        assert counts == [2]


@everywhere
def test_optimizer_in_backward(name: str) -> None:
    """Weights change while the backward pass is still going on."""

    def train(model: nn.Module) -> Results:
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

        def update(p: Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        results = steps(model)
        assert all(p.grad is None for p in model.parameters())
        return results

    check(name, train)


@everywhere
def test_gradient_accumulation(name: str) -> None:
    def train(model: nn.Module) -> Results:
        optimizer, results = adamw(model), []
        for i in range(4):
            loss = loss_of(model, i) / 2
            loss.backward()
            results.append(loss.detach())
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        # Two forward passes before the backward pass of both.
        loss = loss_of(model, 8) + loss_of(model, 9)
        gc.collect()
        loss.backward()
        return results + [p.grad.clone() for p in model.parameters()] + parameters(model)

    check(name, train, None)


# Adapters with frozen base weights.


def attention_adapters(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft", reason="needs peft: pip install 'bitsparse[examples]'")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(name: str, when: str) -> None:
    dense = attention_adapters(make(name))
    model = make(name)
    if when == "before":
        bitsparse.convert(model)
        model = attention_adapters(model)
    else:
        model = attention_adapters(model)
        assert len(bitsparse.convert(model).converted) == 2
    assert not any(p.requires_grad for n, p in model.named_parameters() if "lora" not in n)
    with counted() as counts:
        actual = steps(model, adamw(model))
    assert_same(actual, steps(dense, adamw(dense)))
    assert set(counts) == {2}


@pytest.mark.parametrize("name", FAMILIES)
def test_lora_on_a_projection_runs_as_before(name: str) -> None:
    peft = pytest.importorskip("peft", reason="needs peft: pip install 'bitsparse[examples]'")

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=[PROJECTIONS[name][-1]])
        return peft.get_peft_model(model, config)

    def merged(model: nn.Module) -> Results:
        model = adapted(model)
        results = steps(model, adamw(model))
        # Merged into the weights, it is a model of plain projections again.
        model = model.merge_and_unload().requires_grad_(True)
        return results + steps(model, adamw(model))

    expected, model = merged(make(name)), make(name)
    bitsparse.convert(model)
    with counted() as counts:
        assert_same(merged(model), expected)
    assert counts == [0, 0, 0, 2, 2, 2]


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """What autograd keeps of ``forward``, but for parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward()
    assert out.requires_grad
    return sum(s.nbytes() for s in storages.values())


@pytest.mark.parametrize("activation", ["relu", "relu2", "reglu"])
def test_frozen_weights_keep_what_gradients_need(activation: str) -> None:
    """Of the input nothing, of the hidden activations what their own gradient depends on."""
    tokens, d_ff = 64, 256
    block: nn.Module = bitsparse.nn.FeedForward(D, d_ff, activation, bias=True)
    if activation == "relu":
        block = nn.Sequential(nn.Linear(D, d_ff), nn.ReLU(), nn.Linear(d_ff, D))
        bitsparse.convert(block)
    x = torch.randn(tokens, D, requires_grad=True)
    trained = saved_bytes(block, lambda: block(x))
    block.requires_grad_(False)
    frozen = saved_bytes(block, lambda: block(x))
    numel = tokens * d_ff
    mask = numel // 8 + 4 * (numel // 4096 + 2) + 64  # a bit an element, and offsets of tiles
    assert trained - frozen >= x.nbytes
    if activation == "relu":
        assert frozen <= mask
    else:
        # Squared: the values that are not zero. Gated: of `gate` also the sign of zero.
        density = 0.5 if activation == "relu2" else 1.0
        assert frozen <= mask + 4 * numel * density * 1.2
    # Without a gradient for the input, nothing at all.
    assert not block(x.detach()).requires_grad
    assert live_tensors() == 0


def test_blocks_below_the_first_adapter_keep_nothing() -> None:
    model = make("plain").requires_grad_(False)
    bitsparse.convert(model)
    model.blocks[1][0].bias.requires_grad_(True)  # all that is trained
    loss = loss_of(model, 0)
    assert live_tensors() == 1
    loss.backward()
    assert live_tensors() == 0


# In two processes.


def batches(model: nn.Module, rank: int, no_sync: Callable[[], object]) -> Results:
    """Three steps on two accumulated batches each."""
    optimizer, losses = adamw(model), []
    for i in range(3):
        for j, context in enumerate((no_sync(), contextlib.nullcontext())):
            with context:
                loss = loss_of(model, 100 * rank + 2 * i + j)
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses + [getattr(p, "_local_tensor", p) for p in parameters(model)]


def data_parallel(rank: int) -> Train:
    def train(model: nn.Module) -> Results:
        wrapped = nn.parallel.DistributedDataParallel(model)
        return batches(wrapped, rank, wrapped.no_sync)

    return train


def parallelized(model: nn.Module, name: str) -> nn.Module:
    """Its feed-forward projections split: up and gate by columns, down by rows."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    *first, last = PROJECTIONS[name]
    plan = {**{n: ColwiseParallel() for n in first}, last: RowwiseParallel()}
    owners = [
        module
        for module in model.modules()
        if all(type(getattr(module, n, None)) is nn.Linear for n in (*first, last))
    ]
    assert len(owners) == 2
    mesh = dist.init_device_mesh("cpu", (2,))
    for module in owners:
        parallelize_module(module, mesh, plan)
    return model


def tensor_parallel(name: str) -> Train:
    # Both processes see the same tokens.
    return lambda model: batches(parallelized(model, name), 0, contextlib.nullcontext)


def in_two_processes(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        with force_backend("reference"):
            for name in PROJECTIONS if has_transformers() else ["plain"]:
                check(name, data_parallel(rank))
                # Split projections must be called as modules.
                check(name, tensor_parallel(name), 0)
                gc.collect()  # wrapped models are cycles, and must end before the group does
    finally:
        dist.destroy_process_group()


def has_transformers() -> bool:
    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed, gloo"
)
def test_distributed(tmp_path) -> None:
    """One pair of processes for all: starting them takes longer than the steps."""
    mp.spawn(in_two_processes, (str(tmp_path / "store"),), nprocs=2)
