"""Buffers of fixed sizes, as inside a CUDA graph, on any device: no value is ever lost."""

import gc
from dataclasses import replace

import pytest
import torch

import bitsparse
from bitsparse.activations import ACTIVATIONS
from bitsparse.dtypes import COMPUTE_DTYPES
from bitsparse.ops import capture
from helpers import assert_same_values
from test_feed_forward import inputs, plain, run


@pytest.fixture(autouse=True)
def no_overflows_yet():
    bitsparse.graph_overflows(reset=True)


def warm_up(t, activation, codec="balanced", slack=1.25):
    with bitsparse.graph_warmup(slack):
        return bitsparse_run(t, activation, codec)


def bitsparse_run(t, activation, codec="balanced"):
    """The tensors themselves, not copies: what is learned belongs to the weights."""
    y = bitsparse.ffn(**t, activation=activation, codec=codec)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
    wanted = {k: v for k, v in t.items() if v.requires_grad}
    grads = torch.autograd.grad(y, list(wanted.values()), grad)
    return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}


def in_graph(t, activation, codec="balanced"):
    with capture.rehearsal():
        return bitsparse_run(t, activation, codec)


def shrink(t, **changes):
    """Less room for the calls with these weights; ``changes``: of the capacity's counts."""
    for record in capture._records[t["w_down"]].values():
        capacity = record.capacity
        if "escapes" in changes:
            streams = tuple(
                replace(s, escapes=dict.fromkeys(s.escapes, 0)) for s in capacity.streams
            )
            record.set(replace(capacity, streams=streams))
        else:
            record.set(replace(capacity, **changes))


def assert_results(actual, expected, what, exact=True):
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        if exact:
            assert_same_values(actual[name], e, f"{what} {name}")
        else:
            scale = e.float().abs().max().item()
            eps = torch.finfo(e.dtype).eps
            close = (64 if e.dtype == torch.float32 else 4) * eps
            torch.testing.assert_close(
                actual[name], e, rtol=close, atol=close * scale, msg=f"{what} {name}"
            )


@pytest.fixture(autouse=True)
def counters():
    bitsparse.graph_overflows(reset=True)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_fits_and_what_does_not(backend_device, interpreted, request, activation, dtype):
    """The bits of plain PyTorch: while warming up, where it fits, and where it does not."""
    backend = request.node.callspec.params["backend_device"].split("-")[0]
    shape, d_ff = ((70, 16), 40) if interpreted else ((3, 90, 24), 200)
    for codec in ("balanced",) if interpreted else ("fast", "balanced", "small"):
        t = inputs(activation, shape, d_ff, dtype, backend_device, bias=True)
        expected = run(lambda **t: plain(activation, **t), t)
        assert_results(warm_up(t, activation, codec), expected, f"{codec} warm-up")
        assert_results(in_graph(t, activation, codec), expected, f"{codec} fits")
        assert bitsparse.graph_overflows() == 0
        shrink(t, nnz=64)
        # The kernels' own product may differ from the library's in the last bit.
        exact = backend in ("reference", "cpu")
        assert_results(in_graph(t, activation, codec), expected, f"{codec} overflow", exact)
        assert bitsparse.graph_overflows(reset=True) == 1
        assert bitsparse.graph_overflows() == 0


@pytest.mark.parametrize("what", ["bucket_bytes", "escapes", "signs"])
def test_every_limit_is_watched(device, monkeypatch, what):
    """Room for the values is not enough: buckets, escapes and signs need theirs."""
    t = inputs("reglu", (200, 16), 64, torch.bfloat16, device)
    if what == "signs":
        with torch.no_grad():
            for tensor in t.values():
                tensor.abs_()
    choice = {
        "bucket_bytes": ("bucketed", ("raw", "raw")),
        "escapes": ("flat", ("exponent3", "signed_exponent3")),
        "signs": ("flat", ("unsigned", "unsigned")),
    }[what]
    support = bitsparse.codings.support_coding(choice[0])
    values = tuple(bitsparse.codings.value_coding(v) for v in choice[1])
    monkeypatch.setattr(capture, "_choose", lambda *_: bitsparse.codings.Choice(support, values, 0))
    warm_up(t, "reglu", "small")
    expected = run(lambda **t: plain("reglu", **t), t)
    assert_results(in_graph(t, "reglu", "small"), expected, "fits")
    assert bitsparse.graph_overflows() == 0
    if what == "signs":
        with torch.no_grad():
            t["w_up"][3] *= -1
        expected = run(lambda **t: plain("reglu", **t), t)
    else:
        shrink(t, **{what: (8,)})
    exact = device.type == "cpu"
    assert_results(in_graph(t, "reglu", "small"), expected, "overflow", exact)
    assert bitsparse.graph_overflows() == 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_other_densities(device, activation):
    """Warmed up sparse, then denser, then sparse again; the buffers' size never changes."""
    t = inputs(activation, (256, 24), 128, torch.bfloat16, device, bias=True)
    bias = t["b_gate" if ACTIVATIONS[activation].gated else "b_up"]
    sizes = set()

    def with_bias(value, fn):
        with torch.no_grad():
            bias.fill_(value)
        expected = run(lambda **t: plain(activation, **t), t)
        return fn(t, activation), expected

    assert_results(*with_bias(-1.5, warm_up), "warm-up")
    for value, overflows in ((-1.5, 0), (-2.5, 0), (1.0, 1), (-1.5, 1), (9.0, 2), (-9.0, 2)):
        before = bitsparse.memory_stats()["live_compressed_bytes"]
        with capture.rehearsal():
            y = bitsparse.ffn(**t, activation=activation)
        sizes.add(bitsparse.memory_stats()["live_compressed_bytes"] - before)
        del y
        bitsparse.graph_overflows(reset=True)
        actual, expected = with_bias(value, in_graph)
        exact = device.type == "cpu" or overflows == 0
        assert_results(actual, expected, f"bias {value}", exact)
        assert (bitsparse.graph_overflows() > 0) == (value > 0)
    assert len(sizes) == 1


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_autocast_and_modules_used_twice(device, activation, fits):
    torch.manual_seed(0)
    m = bitsparse.nn.FeedForward(24, 72, activation, bias=True, device=device)
    x = torch.randn(3, 50, 24, device=device)
    results = []
    for memory in ("dense", "compressed"):
        m.memory = memory
        m.zero_grad()

        def step():
            leaf = x.clone().requires_grad_()
            with torch.autocast(device.type, torch.bfloat16):
                y = m(m(leaf) + leaf)
            y.float().square().sum().backward()
            return leaf.grad

        if memory == "dense":
            grad = step()
        else:
            with bitsparse.graph_warmup():
                step()
            m.zero_grad()
            if not fits:
                shrink({"w_down": m.down.weight}, nnz=64)
            with capture.rehearsal():
                grad = step()
            assert bitsparse.graph_overflows() == (0 if fits else 2)
        results.append({"x": grad, **{n: p.grad.clone() for n, p in m.named_parameters()}})
    assert_results(results[1], results[0], activation, fits or device.type == "cpu")


@pytest.mark.parametrize("activation", ["relu", "relu2", "drelu"])
@pytest.mark.parametrize("fits", [True, False])
def test_frozen_tensors(device, activation, fits):
    t = inputs(activation, (70, 24), 72, torch.float32, device, bias=True)
    every = run(lambda **t: plain(activation, **t), t)
    for wanted in t:
        for name, tensor in t.items():
            tensor.requires_grad_(name == wanted)
        warm_up(t, activation)
        if not fits and t["w_down"] in capture._records:
            shrink(t, nnz=64)
        for name, result in in_graph(t, activation).items():
            assert_results({name: result}, {name: every[name]}, wanted, device.type == "cpu")


def test_without_warm_up_is_a_clear_error(device):
    t = inputs("relu2", (70, 24), 72, torch.float32, device)
    with pytest.raises(RuntimeError, match=r"CUDA graph.*'relu2' for 70 tokens.*graph_warmup"):
        in_graph(t, "relu2")
    warm_up(t, "relu2")
    in_graph(t, "relu2")
    t["x"] = torch.randn(71, 24, device=device)
    with pytest.raises(RuntimeError, match="71 tokens"):
        in_graph(t, "relu2")
    with pytest.raises(ValueError, match=r"slack: got 0.5, allowed"), bitsparse.graph_warmup(0.5):
        pass


def test_nothing_is_learned_outside_of_warm_up(device):
    t = inputs("relu2", (70, 24), 72, torch.float32, device)
    bitsparse_run(t, "relu2")
    assert t["w_down"] not in capture._records
    warm_up(t, "relu2")
    assert t["w_down"] in capture._records
    with torch.no_grad(), capture.rehearsal():  # nothing is kept: nothing need be known
        bitsparse.ffn(**{**t, "x": torch.randn(9, 24, device=device)}, activation="relu2")


def test_higher_derivatives_and_changed_weights_are_errors(device):
    t = inputs("relu2", (70, 24), 72, torch.float32, device)
    warm_up(t, "relu2")
    with capture.rehearsal():
        y = bitsparse.ffn(**t, activation="relu2")
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(y.sum(), t["w_up"], create_graph=True)
        y = bitsparse.ffn(**t, activation="relu2")
        with torch.no_grad():
            t["w_up"].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_warm_ups_of_several_threads_end_with_the_last(device):
    first, second = bitsparse.graph_warmup(2), bitsparse.graph_warmup(3)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert capture.applies(torch.zeros(1, device=device))
    second.__exit__(None, None, None)
    assert not capture.applies(torch.zeros(1, device=device))


@pytest.mark.parametrize("slack", [float("inf"), float("nan"), 10**400, True, "2", None])
def test_slack_is_a_finite_number(slack):
    with pytest.raises(ValueError, match="slack: got"), bitsparse.graph_warmup(slack):
        pass


def test_overflows_are_counted_when_the_weights_are_gone(device):
    t = inputs("relu2", (70, 24), 72, torch.float32, device)
    warm_up(t, "relu2")
    shrink(t, nnz=64)
    with capture.rehearsal():
        bitsparse_run(t, "relu2")
    assert bitsparse.graph_overflows() == 1
    del t
    gc.collect()
    assert bitsparse.graph_overflows() == 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("kind", ["leaf", "view", "product"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_inputs_that_autocast_casts_once_or_for_every_use(device, activation, cache, kind, dtype):
    results = []
    for memory in ("dense", "compressed"):
        t = inputs(activation, (70, 24), 72, dtype, device)
        leaf = t["x"] = t["x"].detach()
        if kind == "view":
            leaf = t["x"] = t["x"].view(70, 24)
        leaf.requires_grad_()
        if kind == "product":
            t["x"] = t["x"] * 1
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=cache):
            if memory == "dense":
                y = plain(activation, **t)
            else:
                with bitsparse.graph_warmup():
                    y = bitsparse.ffn(**t, activation=activation)
        y.float().square().sum().backward()
        results.append(leaf.grad)
    assert_same_values(results[1], results[0], activation)
