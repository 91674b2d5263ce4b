"""Compressed training steps inside CUDA graphs: replays of any density give right gradients."""

import pytest
import torch
from torch import nn

import bitsparse
from bitsparse.activations import ACTIVATIONS
from conftest import needs_cuda
from helpers import assert_same_values

pytestmark = [needs_cuda, pytest.mark.gpu]

TOKENS, D_MODEL, D_FF = 1024, 256, 1024


@pytest.fixture(autouse=True)
def no_overflows_yet():
    bitsparse.graph_overflows(reset=True)


class Step:
    """A training step of some blocks, without the update; inputs are copied into place."""

    def __init__(self, activation, memory, layers=2, autocast=False, codec="balanced"):
        torch.manual_seed(0)
        dtype = torch.float32 if autocast else torch.bfloat16
        self.blocks = nn.Sequential(
            *(
                bitsparse.nn.FeedForward(
                    D_MODEL,
                    D_FF,
                    activation,
                    bias=True,
                    memory=memory,
                    codec=codec,
                    device="cuda",
                    dtype=dtype,
                )
                for _ in range(layers)
            )
        )
        self.x = torch.randn(TOKENS, D_MODEL, device="cuda", dtype=dtype).requires_grad_()
        self.grad = torch.randn(TOKENS, D_MODEL, device="cuda", dtype=dtype)
        self.autocast = autocast
        self.graph = None
        self.set_bias(-0.5)

    def set_bias(self, value):
        """The density follows from it."""
        with torch.no_grad():
            for block in self.blocks:
                name = "gate" if ACTIVATIONS[block.activation].gated else "up"
                getattr(block, name).bias.fill_(value)

    def eager(self):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            self.y = self.blocks(self.x)
        self.y.backward(self.grad.to(self.y.dtype))

    def warm_up(self, times=3):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), bitsparse.graph_warmup():
            for _ in range(times):
                self.zero()
                self.eager()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self):
        self.zero()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.eager()

    def zero(self):
        # Else the nodes that add up gradients live on, and belong to the stream they were made on.
        self.y = None
        for t in (self.x, *self.blocks.parameters()):
            t.grad = None

    def results(self):
        if self.graph is None:
            self.zero()
            self.eager()
        else:
            self.graph.replay()
        grads = {n: p.grad.clone() for n, p in self.blocks.named_parameters()}
        return {"y": self.y.detach().clone(), "x": self.x.grad.clone(), **grads}


def assert_close(actual, expected, what):
    for name, e in expected.items():
        scale = e.float().abs().max().item()
        torch.testing.assert_close(
            actual[name], e, rtol=0.05, atol=0.02 * scale, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_replays_of_any_density(activation, autocast):
    step = Step(activation, "compressed", autocast=autocast)
    dense = Step(activation, "dense", autocast=autocast)
    step.warm_up()
    step.capture()
    bitsparse.graph_overflows(reset=True)
    for i, bias in enumerate((-0.5, -1.0, 1.5, -0.5, 3.0, -0.7)):
        x = torch.randn_like(step.x)
        for s in (step, dense):
            s.set_bias(bias)
            with torch.no_grad():
                s.x.copy_(x)
        actual, expected = step.results(), dense.results()
        overflows = bitsparse.graph_overflows(reset=True)
        what = f"{activation} replay {i} with bias {bias}"
        # The output never depends on what was kept.
        assert_same_values(actual["y"], expected["y"], what)
        if bias > 0:
            assert overflows > 0, what
            assert_close(actual, expected, what)
        else:
            assert overflows == 0, what
            for name, e in expected.items():
                assert_same_values(actual[name], e, f"{what} {name}")


@pytest.mark.parametrize("codec", ["fast", "balanced", "small"])
def test_codecs(codec):
    step, dense = (Step("reglu", memory, codec=codec) for memory in ("compressed", "dense"))
    step.warm_up()
    step.capture()
    bitsparse.graph_overflows(reset=True)
    actual, expected = step.results(), dense.results()
    assert bitsparse.graph_overflows() == 0
    for name, e in expected.items():
        assert_same_values(actual[name], e, f"{codec} {name}")


def test_make_graphed_callables():
    step, dense = (Step("relu2", memory) for memory in ("compressed", "dense"))
    with bitsparse.graph_warmup():
        graphed = torch.cuda.make_graphed_callables(step.blocks, (step.x.detach().clone(),))
    step.zero()
    y = graphed(step.x)
    y.backward(step.grad)
    expected = dense.results()
    assert_same_values(y.detach(), expected["y"])
    for name, p in step.blocks.named_parameters():
        assert_same_values(p.grad, expected[name], name)


def test_compiled_with_graphs():
    """Between the graphs that torch.compile makes, the block runs as ever."""
    torch._dynamo.reset()
    step, dense = (Step("relu2", memory) for memory in ("compressed", "dense"))
    compiled = torch.compile(
        nn.Sequential(nn.LayerNorm(D_MODEL, device="cuda", dtype=torch.bfloat16), step.blocks),
        mode="reduce-overhead",
    )
    norm = nn.LayerNorm(D_MODEL, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):
        step.zero()
        dense.zero()
        y = compiled(step.x)
        y.backward(step.grad)
        dense.blocks(norm(dense.x)).backward(dense.grad)
    for (name, p), q in zip(step.blocks.named_parameters(), dense.blocks.parameters(), strict=True):
        assert torch.isfinite(p.grad).all(), name
        scale = q.grad.float().abs().max().item()
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.02 * scale, msg=name)


def test_a_graph_takes_less_memory_than_a_dense_one():
    reserved = {}
    for memory in ("dense", "compressed"):
        step = Step("relu2", memory, layers=8)
        step.x = torch.randn(16 * TOKENS, D_MODEL, device="cuda", dtype=torch.bfloat16)
        step.x.requires_grad_()
        step.grad = torch.randn_like(step.x)
        step.set_bias(-0.8)
        step.warm_up()
        step.zero()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        step.capture()
        reserved[memory] = torch.cuda.memory_reserved() - before
        step.graph.reset()
        del step
        torch.cuda.empty_cache()
    assert reserved["compressed"] < 0.7 * reserved["dense"], reserved


def test_a_graph_without_warm_up_is_refused_and_nothing_breaks():
    Step("reglu", "dense").results()  # what libraries prepare at first use cannot be captured
    step = Step("reglu", "compressed")
    with pytest.raises(RuntimeError, match=r"CUDA graph.*graph_warmup"):
        step.capture()
    torch.cuda.synchronize()
    step.graph = None
    step.results()
    step.warm_up()
    step.capture()
    expected = Step("reglu", "dense")
    with torch.no_grad():
        expected.x.copy_(step.x)
        expected.grad.copy_(step.grad)
    for name, e in expected.results().items():
        assert_same_values(step.results()[name], e, name)


def test_warming_up_again_leaves_older_graphs_as_they_are():
    """An older graph keeps its own limits: its buffers have not grown."""
    step = Step("relu2", "compressed")
    step.warm_up()
    step.capture()
    older, step.graph = step.graph, None
    step.set_bias(2.0)
    step.warm_up()
    step.capture()
    bitsparse.graph_overflows(reset=True)
    expected = step.results()  # of the new graph, which has room
    assert bitsparse.graph_overflows(reset=True) == 0
    dense = Step("relu2", "dense")
    dense.set_bias(2.0)
    with torch.no_grad():
        dense.x.copy_(step.x)
        dense.grad.copy_(step.grad)
    for name, e in dense.results().items():
        assert_same_values(expected[name], e, name)
    older.replay()
    torch.cuda.synchronize()
    assert bitsparse.graph_overflows(reset=True) == len(step.blocks)
