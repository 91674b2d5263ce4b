"""The block as an operator: what the compiler, fake tensors, policies and counters see of it."""

import gc
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import bitsparse
import bitsparse.ops.library
from bitsparse.activations import ACTIVATIONS
from helpers import assert_same_bits

OPERATOR = torch.ops.bitsparse.feed_forward.default
BACKWARD = torch.ops.bitsparse.feed_forward_backward.default
GATED = {name for name, activation in ACTIVATIONS.items() if activation.gated}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@pytest.fixture(autouse=True)
def _afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(
    activation: str, device: torch.device, bias: bool = False, tokens: int = 48, **frozen: bool
) -> dict[str, Tensor]:
    """Arguments of :func:`bitsparse.ffn` that need gradients, but those named."""
    d_model, d_ff = 24, 104
    generator = torch.Generator().manual_seed(3)
    shapes = {"x": (2, tokens // 2, d_model), "w_up": (d_ff, d_model), "w_down": (d_model, d_ff)}
    if activation in GATED:
        shapes["w_gate"] = (d_ff, d_model)
    if bias:
        shapes |= {"b_" + n[2:]: s[:1] for n, s in shapes.items() if n.startswith("w_")}
    made = {
        n: torch.randn(s, generator=generator).to(DTYPES[device.type]) for n, s in shapes.items()
    }
    return {n: t.to(device).requires_grad_(not frozen.get(n, False)) for n, t in made.items()}


def results(function, arguments: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """The output of ``function`` and the gradients of its arguments."""
    fresh = {n: t.detach().requires_grad_(t.requires_grad) for n, t in arguments.items()}
    y = function(**fresh)
    torch.manual_seed(7)
    y.backward(torch.randn(y.shape).to(y))
    return {"output": y.detach(), **{n: t.grad for n, t in fresh.items()}}


def assert_same(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        got = actual[name]
        if wanted is None:
            assert got is None, name
        else:
            assert got is not None, name
            assert_same_bits(got, wanted, name)
            assert got.stride() == wanted.stride(), name


def block(activation: str, memory: str = "compressed", **options):
    def run(**tensors: Tensor) -> Tensor:
        return bitsparse.ffn(**tensors, activation=activation, memory=memory, **options)

    return run


class Seen(TorchDispatchMode):
    """Counts the operators it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_compiled_without_breaks_it_has_the_same_bits(activation, bias, device):
    tensors = inputs(activation, device, bias)
    compiled = torch.compile(block(activation), backend="aot_eager", fullgraph=True)
    assert_same(results(compiled, tensors), results(block(activation, "dense"), tensors))


@pytest.mark.parametrize("activation", ["relu", "reglu2"])
def test_compiled_by_inductor(activation, device, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tensors = inputs(activation, device, bias=True)
    compiled = torch.compile(block(activation), fullgraph=True)
    assert_same(results(compiled, tensors), results(block(activation, "dense"), tensors))


@pytest.mark.parametrize("codec", ["fast", "small"])
def test_compiled_with_other_codecs(codec, device):
    tensors = inputs("relu2", device)
    compiled = torch.compile(block("relu2", codec=codec), backend="aot_eager", fullgraph=True)
    assert_same(results(compiled, tensors), results(block("relu2", "dense"), tensors))


def test_what_the_compiler_sees(device):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(
        block("relu2"),
        backend=aot_autograd(fw_compiler=backend, bw_compiler=backend),
        fullgraph=True,
    )
    results(compiled, inputs("relu2", device))
    assert len(graphs) == 2
    assert graphs[0].count(OPERATOR) == 1 and graphs[1].count(BACKWARD) == 1
    # Nothing else computes or keeps a hidden tensor.
    assert torch.ops.aten.mm.default not in graphs[0] + graphs[1]


def test_lengths_do_not_recompile(device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block("relu"), backend=counter, fullgraph=True, dynamic=True)
    for tokens in (50, 20, 64, 500, 34):
        tensors = inputs("relu", device, tokens=tokens)
        assert_same(results(compiled, tensors), results(block("relu", "dense"), tensors))
    assert counter.frame_count == 1


def test_values_do_not_recompile(device):
    """What is kept changes its size and its coding with the density."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block("relu"), backend=counter, fullgraph=True)
    tensors = inputs("relu", device, bias=True)
    for shift in (0.0, -20.0, 3.0, 1000.0, -1e5):
        with torch.no_grad():
            tensors["b_up"].fill_(shift)
        assert_same(results(compiled, tensors), results(block("relu", "dense"), tensors))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "frozen", [("x",), ("w_up", "b_up"), ("w_down",), ("x", "w_up", "b_up", "b_down")], ids=str
)
@pytest.mark.parametrize("activation", ["relu", "reglu"])
def test_compiled_with_frozen_tensors(activation, frozen, device):
    tensors = inputs(activation, device, True, **dict.fromkeys(frozen, True))
    compiled = torch.compile(block(activation), backend="aot_eager", fullgraph=True)
    assert_same(results(compiled, tensors), results(block(activation, "dense"), tensors))


@pytest.mark.parametrize("activation", ["relu", "drelu"])
def test_compiled_under_autocast(activation, device):
    tensors = {
        n: t.detach().float().requires_grad_() for n, t in inputs(activation, device).items()
    }

    def run(memory):
        def under_autocast(**arguments):
            with torch.autocast(device.type, torch.bfloat16):
                return block(activation, memory)(**arguments)

        return under_autocast

    compiled = torch.compile(run("compressed"), backend="aot_eager", fullgraph=True)
    expected = results(torch.compile(run("dense"), backend="aot_eager", fullgraph=True), tensors)
    assert_same(results(compiled, tensors), expected)
    assert_same(results(run("compressed"), tensors), results(run("dense"), tensors))


def test_compiled_with_strides(device):
    """PyTorch chooses products by the strides of input and weights."""
    tensors = inputs("relu2", device)
    x = tensors["x"].detach().reshape(-1, 24)
    for columns in (("x",), ("w_up",), ("w_down",), ("x", "w_up", "w_down")):
        arguments = {**tensors, "x": x}
        for name in columns:
            arguments[name] = arguments[name].detach().t().contiguous().t()
        arguments = {n: t.detach().requires_grad_() for n, t in arguments.items()}
        torch._dynamo.reset()
        compiled = torch.compile(block("relu2"), backend="aot_eager", fullgraph=True)
        got, wanted = results(compiled, arguments), results(block("relu2", "dense"), arguments)
        for name, tensor in wanted.items():
            assert_same_bits(got[name], tensor, f"{name}, {columns}")


def test_a_compiled_module_frees_what_it_keeps(device):
    m = bitsparse.nn.FeedForward(24, 96, activation="relu2", device=device)
    compiled = torch.compile(nn.Sequential(m, nn.ReLU()), backend="aot_eager", fullgraph=True)
    gc.collect()
    before = bitsparse.memory_stats()["live_tensors"]
    y = compiled(torch.randn(50, 24, device=device))
    assert bitsparse.memory_stats()["live_tensors"] == before + 1
    y.sum().backward()
    del y
    gc.collect()
    assert bitsparse.memory_stats()["live_tensors"] == before


def test_without_gradients_nothing_is_kept(device):
    compiled = torch.compile(block("relu"), backend="aot_eager", fullgraph=True)
    tensors = inputs("relu", device)
    before = bitsparse.memory_stats()["live_tensors"]
    with torch.no_grad():
        y = compiled(**tensors)
    assert bitsparse.memory_stats()["live_tensors"] == before
    assert_same_bits(y, block("relu", "dense")(**tensors).detach())


@pytest.mark.parametrize("activation", ["relu", "relu2", "drelu"])
def test_opcheck(activation, device):
    t = inputs(activation, device, bias=True)
    arguments = [t["x"], t["w_up"], t["w_down"], t.get("w_gate"), t["b_up"], t["b_down"]]
    arguments += [t.get("b_gate"), None, activation, "balanced", False, True]
    torch.library.opcheck(OPERATOR, tuple(arguments))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_under_a_mode_it_is_one_operator_with_the_same_bits(activation, device):
    tensors = inputs(activation, device, bias=True)
    with Seen() as seen:
        actual = results(block(activation), tensors)
    assert seen.operators.count(OPERATOR) == 1 and seen.operators.count(BACKWARD) == 1
    assert_same(actual, results(block(activation, "dense"), tensors))


@pytest.mark.parametrize("frozen", [(), ("x",), ("w_up",), ("w_down",), ("x", "w_gate")], ids=str)
@pytest.mark.parametrize("activation", ["relu2", "reglu"])
def test_operations_are_counted(activation, frozen, device):
    tensors = inputs(activation, device, True, **dict.fromkeys(frozen, True))
    counts = {}
    for memory in ("compressed", "dense"):
        with FlopCounterMode(display=False) as counter:
            results(block(activation, memory), tensors)
        counts[memory] = counter.get_total_flops()
    assert counts["compressed"] == counts["dense"] > 0


def keep_products(ctx, operator, *args, **kwargs):
    saved = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE


def keep_blocks(ctx, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator == OPERATOR else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [keep_products, keep_blocks])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{}, {"tokens_per_chunk": 16}, {"storage": "fp8"}], ids=str)
def test_policies_of_selective_checkpointing(policy, compiled, options, device):
    if compiled and options:
        pytest.skip("not one operator")
    tensors = inputs("relu", device)
    if "storage" in options:
        tensors = {n: t.detach().bfloat16().requires_grad_() for n, t in tensors.items()}

    def run(checkpointed):
        def around(**arguments):
            if not checkpointed:
                return block("relu", **options)(**arguments)
            return checkpoint(
                lambda: block("relu", **options)(**arguments) * 2 / 2,
                use_reentrant=False,
                context_fn=partial(create_selective_checkpoint_contexts, policy),
            )

        return around

    expected = results(run(False), tensors)
    around = run(True)
    if compiled:
        around = torch.compile(around, backend="aot_eager", fullgraph=True)
    assert_same(results(around, tensors), expected)


def test_a_policy_that_keeps_the_block_does_not_run_it_again(device):
    tensors = inputs("relu2", device)
    calls = []

    def policy(ctx, operator, *args, **kwargs):
        calls.append((ctx.is_recompute, operator))
        return keep_blocks(ctx, operator, *args, **kwargs)

    def around(**arguments):
        return checkpoint(
            lambda: block("relu2")(**arguments),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    assert_same(results(around, tensors), results(block("relu2", "dense"), tensors))
    assert (False, OPERATOR) in calls


def test_fake_tensors(device):
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        tensors = {
            n: torch.empty(t.shape, dtype=t.dtype, device=device, requires_grad=True)
            for n, t in inputs("reglu", device, bias=True).items()
        }
        y = block("reglu")(**tensors)
        assert y.shape == tensors["x"].shape and y.dtype == tensors["x"].dtype
        y.sum().backward()
        for name, tensor in tensors.items():
            assert tensor.grad is not None and tensor.grad.shape == tensor.shape, name


@pytest.mark.parametrize("activation", ["relu", "reglu"])
def test_transforms_of_torch_func(activation, device):
    """These get the plain computation."""
    tensors = {n: t.detach() for n, t in inputs(activation, device).items()}

    def loss(memory):
        return lambda t: block(activation, memory)(**t).square().sum()

    for name, got in torch.func.grad(loss("compressed"))(tensors).items():
        assert_same_bits(got, torch.func.grad(loss("dense"))(tensors)[name], name)
    x = torch.randn(3, *tensors.pop("x").shape, device=device).to(DTYPES[device.type])

    def over_batch(memory):
        return torch.func.vmap(lambda x: block(activation, memory)(x=x, **tensors))(x)

    assert_same_bits(over_batch("compressed"), over_batch("dense"))
    tangent = (torch.ones_like(x),)
    for a, b in zip(
        *(
            torch.func.jvp(lambda x, m=m: block(activation, m)(x=x, **tensors), (x,), tangent)
            for m in ("compressed", "dense")
        ),
        strict=True,
    ):
        assert_same_bits(a, b)


def test_exported_it_is_plain(device):
    m = bitsparse.nn.FeedForward(24, 96, activation="relu2", device=device)
    x = torch.randn(50, 24, device=device)
    program = torch.export.export(m, (x,))
    assert OPERATOR not in [node.target for node in program.graph.nodes]
    assert_same_bits(program.module()(x).detach(), m(x).detach())


def test_chunks_and_fp8_break_the_graph_but_run(device):
    tensors = {n: t.detach().bfloat16().requires_grad_() for n, t in inputs("relu", device).items()}
    for options in ({"tokens_per_chunk": 16}, {"storage": "fp8"}):
        torch._dynamo.reset()
        compiled = torch.compile(block("relu", **options), backend="aot_eager")
        assert_same(results(compiled, tensors), results(block("relu", **options), tensors))
