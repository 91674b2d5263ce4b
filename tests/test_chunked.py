"""Working through the tokens in chunks: same outputs, gradients no less accurate, less memory."""

import copy

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bitsparse
from bitsparse.activations import ACTIVATIONS
from bitsparse.ops import chunked
from helpers import assert_same_values
from test_feed_forward import inputs, plain, run

TOKENS = 150


def chunks(n):
    return lambda **t: bitsparse.ffn(**t, tokens_per_chunk=n)


def error(actual, exact):
    return (actual.double() - exact).square().mean().sqrt().item()


def assert_as_good(actual, eager, exact, what, worse=2.0):
    """No less accurate than plain PyTorch."""
    assert (actual is None) == (eager is None), what
    if actual is None:
        return
    assert actual.dtype == eager.dtype and actual.shape == eager.shape, what
    scale = exact.square().mean().sqrt().item()
    # In float32 the order of a sum is all that differs, and which one has the luck is chance (a
    # product of one row is summed in another order); in 16 bits one more rounding would show.
    factor = worse if actual.dtype == torch.float32 else 1.03
    slack = 1e-2 * scale * torch.finfo(actual.dtype).eps
    assert error(actual, exact) <= factor * error(eager, exact) + slack, what


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_plain_pytorch(device, activation, dtype, bias):
    t = inputs(activation, (3, TOKENS // 3, 24), 72, dtype, device, bias)
    eager = run(lambda **t: plain(activation, **t), t)
    wide = {k: v.detach().double().requires_grad_() for k, v in t.items()}
    grad = torch.randn(eager["y"].shape, generator=torch.Generator().manual_seed(5)).to(eager["y"])
    exact = run(lambda **t: plain(activation, **t), wide, grad=grad.double())
    sizes = (7, 64, TOKENS - 1, TOKENS, 4096) if bias else (1, 100)
    for n in sizes if dtype == torch.float32 else sizes[1:]:
        actual = run(lambda **t: chunks(n)(**t, activation=activation), t)  # noqa: B023
        assert actual.keys() == eager.keys()
        for name, e in exact.items():
            what = f"{activation} {dtype} chunks of {n}: {name}"
            if n >= TOKENS:  # one chunk: nothing differs at all
                assert_same_values(actual[name], eager[name], what)
            else:
                # One token after the other is the worst order in which to add.
                assert_as_good(actual[name], eager[name], e, what, 2.0 if n < 64 else 1.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_output_and_input_gradient_are_those_of_the_chunks(device, activation, dtype):
    """Bit for bit: rows of a product do not depend on each other. (Which product a library chooses
    may depend on the number of rows.)"""
    t = inputs(activation, (TOKENS, 24), 72, dtype, device, bias=True)
    for n in (7, 64):
        actual = run(lambda **t: chunks(n)(**t, activation=activation), t)  # noqa: B023

        def by_hand(x, **rest):
            parts = [plain(activation, part, **rest) for part in x.split(n)]  # noqa: B023
            return torch.cat(parts)

        expected = run(by_hand, t)
        for name in ("y", "x"):
            assert_same_values(actual[name], expected[name], f"{n} {name}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_under_autocast(device, activation):
    t = inputs(activation, (TOKENS, 24), 72, torch.float32, device, bias=True)

    def cast(fn):
        def forward(**t):
            with torch.autocast(device.type, torch.bfloat16):
                return fn(**t)

        return forward

    eager = run(cast(lambda **t: plain(activation, **t)), t)
    actual = run(cast(lambda **t: chunks(64)(**t, activation=activation)), t)
    wide = {k: v.detach().double().requires_grad_() for k, v in t.items()}
    grad = torch.randn(eager["y"].shape, generator=torch.Generator().manual_seed(5))
    exact = run(lambda **t: plain(activation, **t), wide, grad=grad.to(eager["y"]).double())
    for name, e in exact.items():
        assert actual[name].dtype == eager[name].dtype
        assert error(actual[name], e) <= 1.1 * error(eager[name], e), name


@pytest.mark.parametrize("activation", ["relu", "relu2", "drelu"])
def test_frozen_tensors(device, activation):
    """What no gradient needs is neither kept nor computed; the other gradients do not change."""
    t = inputs(activation, (TOKENS, 24), 72, torch.float32, device, bias=True)
    every = run(lambda **t: chunks(64)(**t, activation=activation), t)
    for wanted in (*t, None):
        for name, tensor in t.items():
            tensor.requires_grad_(name == wanted or (wanted is None and name in ("x", "w_down")))
        actual = run(lambda **t: chunks(64)(**t, activation=activation), t)
        for name, result in actual.items():
            assert_same_values(result, every[name], f"only {wanted}: {name}")

    def kept_bytes(*names):
        for name, tensor in t.items():
            tensor.requires_grad_(name in names)
        before = bitsparse.memory_stats()["live_compressed_bytes"]
        y = chunks(64)(**t, activation=activation)
        return bitsparse.memory_stats()["live_compressed_bytes"] - before + 0 * y.numel()

    assert kept_bytes("b_down") == 0
    assert kept_bytes("w_down") > 0
    if activation == "relu":
        assert kept_bytes("x") < kept_bytes("x", "w_down") / 4


def test_without_gradients(device):
    t = inputs("reglu2", (TOKENS, 24), 72, torch.float32, device, bias=True)
    before = bitsparse.memory_stats()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = bitsparse.ffn(**t, activation="reglu2", tokens_per_chunk=64)
            assert bitsparse.memory_stats() == before
            expected = torch.cat(
                [plain("reglu2", p, **{k: v for k, v in t.items() if k != "x"}) for p in
                 t["x"].split(64)]
            )  # fmt: skip
            assert_same_values(y, expected)


@pytest.mark.parametrize("shape", [(0, 24), (3, 0, 24), (1, 24), (24,), (2, 24), (2, 3, 4, 24)])
def test_shapes(device, shape):
    t = inputs("reglu", shape, 72, torch.float32, device, bias=True)
    actual = run(lambda **t: chunks(1)(**t, activation="reglu"), t)
    expected = run(lambda **t: plain("reglu", **t), t)
    for name, e in expected.items():
        torch.testing.assert_close(actual[name], e, msg=name)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_other_backends(device, backend):
    pytest.importorskip("triton") if backend == "triton" else None
    t = inputs("drelu", (70, 16), 40, torch.bfloat16, device, bias=True)
    expected = run(lambda **t: chunks(32)(**t, activation="drelu"), t)
    with bitsparse.backends.force_backend(backend):
        actual = run(lambda **t: chunks(32)(**t, activation="drelu"), t)
    for name, e in expected.items():
        assert_same_values(actual[name], e, name)


class Watch(TorchDispatchMode):
    """What is allocated: the largest tensor, in elements, and the most bytes alive at once."""

    def __init__(self):
        super().__init__()
        self.largest = self.peak = 0
        self._live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
                ref = StorageWeakRef(t.untyped_storage())
                self._live[ref.cdata] = (ref, t.untyped_storage().nbytes())
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return out


def step(activation, dtype, memory, n=None):
    m = bitsparse.nn.FeedForward(
        32, 512, activation, bias=True, memory=memory, tokens_per_chunk=n, dtype=dtype
    )
    with torch.no_grad():  # sparse, as after training: what is kept must not hide what is measured
        (m.gate if ACTIVATIONS[activation].gated else m.up).bias.fill_(-1.0)
    x = torch.randn(2048, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.requires_grad_()
    m(x).sum().backward()
    for p in (x, *m.parameters()):
        p.grad = None
    with Watch() as watch:
        m(x).sum().backward()
    return watch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_temporary_is_larger_than_a_chunk(activation, dtype):
    hidden = 2048 * 512
    checkpoint = step(activation, dtype, "checkpoint")
    assert checkpoint.largest >= hidden  # the measurement sees what it should
    watch = step(activation, dtype, "compressed", 128)
    # A weight's sum in float32 and what is kept are there besides; no tensor of the hidden size.
    assert watch.largest <= hidden / 8
    assert watch.peak <= 0.85 * checkpoint.peak


def test_no_gradient_needs_no_more_than_a_chunk():
    m = bitsparse.nn.FeedForward(32, 512, "reglu2", tokens_per_chunk=128)
    x = torch.randn(2048, 32)
    with torch.no_grad(), Watch() as watch:
        m(x)
    assert watch.largest <= 128 * 512


def test_module_habits(device):
    """Accumulation, several forwards first, a second backward, no second derivative; the report."""
    torch.manual_seed(0)
    m = bitsparse.nn.FeedForward(24, 72, "reglu", device=device, tokens_per_chunk=32)
    dense = copy.deepcopy(m)
    dense.memory, dense.tokens_per_chunk = "dense", None
    assert "tokens_per_chunk=32" in repr(m)
    for module in (m, dense):
        g = torch.Generator().manual_seed(1)
        xs = [torch.randn(10, 7, 24, generator=g).to(device).requires_grad_() for _ in range(2)]
        outs = [module(module(x)) for x in xs]
        for y in reversed(outs):
            y.sin().sum().backward(retain_graph=True)
        outs[0].cos().sum().backward()
    for (name, p), q in zip(m.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    assert 0 < m.kept.nnz < m.kept.numel == 70 * 72
    assert 0 < m.kept.nbytes < m.kept.dense_nbytes
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(m(xs[0]).sum(), m.up.weight, create_graph=True)
    y = m(xs[0])
    with torch.no_grad():
        m.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_saved_tensor_hooks_and_storage(device):
    m = bitsparse.nn.FeedForward(24, 72, "relu2", device=device, tokens_per_chunk=32)
    x = torch.randn(100, 24, device=device, requires_grad=True)
    before = bitsparse.memory_stats()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(device)):
        y = m(x)
    y.sum().backward()
    y = m(x)
    during = bitsparse.memory_stats()
    assert during["live_tensors"] == before["live_tensors"] + 1
    y.sum().backward()
    assert bitsparse.memory_stats()["live_compressed_bytes"] == before["live_compressed_bytes"]


def test_inside_torch_compile(device):
    torch._dynamo.reset()
    m = bitsparse.nn.FeedForward(24, 72, "relu2", device=device, tokens_per_chunk=32)
    x = torch.randn(100, 24, device=device)
    expected = run(lambda x: m(x), {"x": x.requires_grad_()})
    compiled = torch.compile(m, backend="aot_eager")
    actual = run(lambda x: compiled(x), {"x": x})
    for name, e in expected.items():
        assert_same_values(actual[name], e, name)


@pytest.mark.parametrize(
    "arguments,match",
    [
        ({"tokens_per_chunk": 0}, "tokens_per_chunk: got 0, allowed"),
        ({"tokens_per_chunk": 2.5}, "tokens_per_chunk: got 2.5, allowed"),
        ({"tokens_per_chunk": True}, "tokens_per_chunk: got True, allowed"),
        ({"tokens_per_chunk": 8, "memory": "dense"}, "with memory='dense'; allowed: None"),
        ({"tokens_per_chunk": 8, "memory": "checkpoint"}, "with memory='checkpoint'; allowed"),
    ],
)
def test_bad_arguments(arguments, match):
    t = {"x": torch.randn(5, 8), "w_up": torch.randn(16, 8), "w_down": torch.randn(8, 16)}
    with pytest.raises(ValueError, match=match):
        bitsparse.ffn(**t, **arguments)
    with pytest.raises(ValueError, match=match):
        bitsparse.nn.FeedForward(8, 16, **arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_not_rounded_between_chunks(dtype):
    a = torch.randn(64, 256, device="cuda", dtype=dtype)
    b = torch.randn(256, 48, device="cuda", dtype=dtype)
    total = chunked._Sum((64, 48), a)
    for _ in range(3):
        total.add_product(a, b)
    assert chunked._adds_products(a.device.index, dtype) is not None
    torch.testing.assert_close(
        total.rounded(torch.float32), 3 * (a.double() @ b.double()).float(), rtol=1e-4, atol=1e-3
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_peak_and_waits_on_a_gpu(activation):
    def measure(memory, n):
        m = bitsparse.nn.FeedForward(
            512, 4096, activation, memory=memory, tokens_per_chunk=n, device="cuda",
            dtype=torch.bfloat16, bias=True,
        )  # fmt: skip
        with torch.no_grad():
            (m.gate if ACTIVATIONS[activation].gated else m.up).bias.fill_(-0.8)
        x = torch.randn(16384, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(x)
        m(x).backward(grad)
        m.zero_grad(set_to_none=True)
        x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            m(x).backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return torch.cuda.max_memory_allocated() - before

    assert measure("compressed", 2048) <= 0.85 * measure("checkpoint", None)
