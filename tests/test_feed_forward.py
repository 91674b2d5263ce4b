"""Compressed training equals plain PyTorch bit for bit: outputs and every gradient."""

import copy
import gc
import itertools
import os
import pickle
import signal
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bitsparse
from bitsparse import codings
from bitsparse.activations import ACTIVATIONS
from bitsparse.dtypes import COMPUTE_DTYPES
from bitsparse.layout import table_words
from helpers import assert_same_values

NAMES = ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate")
MODES = [*(("compressed", codec) for codec in codings.POLICIES), ("dense", "fast")]
MODES += [("checkpoint", "fast")]
SPECIALS = [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-45, -1e-45, 1e-40, 3e38, -3e38]


def plain(activation, x, w_up, w_down, w_gate=None, b_up=None, b_down=None, b_gate=None):
    """What people write by hand, independent of the package."""
    up = F.linear(x, w_up, b_up)
    if activation == "relu":
        hidden = F.relu(up)
    elif activation == "relu2":
        hidden = F.relu(up).square()
    else:
        gate = F.linear(x, w_gate, b_gate)
        hidden = {
            "reglu": lambda: F.relu(gate) * up,
            "reglu2": lambda: F.relu(gate).square() * up,
            "drelu": lambda: F.relu(gate) * F.relu(up),
        }[activation]()
    return F.linear(hidden, w_down, b_down)


def inputs(activation, shape, d_ff, dtype, device, bias=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    d = shape[-1]
    t = {
        "x": torch.randn(shape, generator=g),
        "w_up": torch.randn(d_ff, d, generator=g) / d**0.5,
        "w_down": torch.randn(d, d_ff, generator=g) / d_ff**0.5,
    }
    if ACTIVATIONS[activation].gated:
        t["w_gate"] = torch.randn(d_ff, d, generator=g) / d**0.5
    if bias:
        t["b_up"] = torch.randn(d_ff, generator=g)
        t["b_down"] = torch.randn(d, generator=g)
        if ACTIVATIONS[activation].gated:
            t["b_gate"] = torch.randn(d_ff, generator=g)
    return {k: v.to(device=device, dtype=dtype).requires_grad_() for k, v in t.items()}


def run(fn, tensors, grad=None, transform=lambda x: x):
    leaves = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in tensors.items()}
    args = {**leaves, "x": transform(leaves["x"])}
    y = fn(**args)
    if grad is None:
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
    wanted = {k: v for k, v in leaves.items() if v.requires_grad}
    grads = torch.autograd.grad(y, list(wanted.values()), grad, allow_unused=True)
    return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}


def assert_identical(activation, tensors, **kwargs):
    expected = run(lambda **t: plain(activation, **t), tensors, **kwargs)
    for memory, codec in MODES:
        actual = run(
            lambda **t: bitsparse.ffn(**t, activation=activation, memory=memory, codec=codec),  # noqa: B023
            tensors,
            **kwargs,
        )
        assert actual.keys() == expected.keys()
        for name, e in expected.items():
            assert_same_values(actual[name], e, f"{activation} {memory} {codec} {name}")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bits(backend_device, interpreted, activation, dtype, bias):
    shapes = (((64, 32), 96), ((3, 37, 16), 129), ((2, 3, 5, 8), 40), ((2, 8), 8), ((120, 8), 128))
    if interpreted:
        if not bias:
            pytest.skip("slow in the interpreter, and what differs is not in the kernels")
        shapes = shapes[1:3]
    for shape, d_ff in shapes:
        assert_identical(activation, inputs(activation, shape, d_ff, dtype, backend_device, bias))


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values_in_the_pre_activations(backend_device, interpreted, activation, dtype):
    """NaN, infinities, signed zeros and subnormals in gate, up and the gradient, all pairs.

    Identity weights carry each special value into one pre-activation and no other.
    """
    pairs = list(itertools.product(SPECIALS, [*SPECIALS, 1.5, -2.5]))
    # Whole tiles of 64 by 64, for which there may be kernels of their own.
    pairs = torch.tensor([*pairs, *pairs[: -len(pairs) % 64]])
    n = len(pairs)
    size = n if not ACTIVATIONS[activation].gated else 2 * n
    for value in (-1.0, float("nan")) if interpreted else (1.0, -1.0, float("nan"), float("inf")):
        x = torch.zeros(64, size)
        x[1, :n] = pairs[:, 0]
        x[2, :n] = 1.0
        x[:, n:] = pairs[:, 1][: size - n]
        x = x.to(dtype).to(backend_device)
        grads = {}
        for codec in ("plain", *codings.POLICIES):
            # The pre-activations themselves are the leaves; the projection is the identity.
            gate = x[:, :n].clone().requires_grad_()
            up = x[:, n:].clone().requires_grad_()
            w_down = torch.eye(n, device=backend_device, dtype=dtype).requires_grad_()
            act = ACTIVATIONS[activation]
            if codec == "plain":
                hidden = act.dense(gate, up if act.gated else None)
                y = F.linear(hidden, w_down)
            else:
                from bitsparse.ops.feed_forward import _ActivationDown

                leaf_up = up.clone() if act.gated else None
                y = _ActivationDown.apply(
                    gate.clone(), leaf_up, w_down, None, act, False, codec, None
                )
            dy = torch.full_like(y, value)
            dy[0] = -1.0
            leaves = [gate, w_down] + ([up] if act.gated else [])
            grads[codec] = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        for codec in codings.POLICIES:
            for i, (a, e) in enumerate(zip(grads[codec], grads["plain"], strict=True)):
                what = f"{activation} {dtype} {codec} result {i} for gradient {value}"
                assert_same_values(a, e, what)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_16_bit_pattern_as_pre_activation(backend_device, interpreted, activation):
    act = ACTIVATIONS[activation]
    from bitsparse.ops.feed_forward import _ActivationDown

    for dtype in (torch.bfloat16, torch.float16):
        step = 7 if interpreted else 1
        patterns = torch.arange(0, 1 << 16, step, dtype=torch.int32).to(torch.int16).view(dtype)
        order = torch.randperm(len(patterns), generator=torch.Generator().manual_seed(1))
        shuffled = patterns[order]
        rows = len(patterns) // 64
        gate0 = patterns[: rows * 64].view(rows, 64).to(backend_device)
        up0 = shuffled[: rows * 64].view(rows, 64).to(backend_device)
        w = torch.eye(64, dtype=dtype, device=backend_device)
        grad = torch.randn(rows, 64, generator=torch.Generator().manual_seed(2))
        grad = grad.to(dtype).to(backend_device)
        results = []
        for codec in ("plain", *codings.POLICIES):
            gate, up = gate0.clone().requires_grad_(), up0.clone().requires_grad_()
            if codec != "plain":
                leaf_up = up.clone() if act.gated else None
                y = _ActivationDown.apply(gate.clone(), leaf_up, w, None, act, False, codec, None)
            else:
                y = F.linear(act.dense(gate, up if act.gated else None), w)
            leaves = [gate, up] if act.gated else [gate]
            results.append([y.detach(), *torch.autograd.grad(y, leaves, grad)])
        for codec, result in zip(codings.POLICIES, results[1:], strict=True):
            for a, e in zip(result, results[0], strict=True):
                assert_same_values(a, e, f"{activation} {dtype} {codec}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("amp_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_autocast(device, activation, amp_dtype, bias):
    """Also with a module used twice: autocast's cached casts make gradients add up in 16 bits."""
    t = inputs(activation, (3, 40, 32), 96, torch.float32, device, bias)
    t["x"] = (t["x"] * 3).detach().requires_grad_()

    def twice(fn):
        def forward(x, **weights):
            with torch.autocast(device.type, amp_dtype):
                return fn(x=fn(x=x, **weights), **weights)

        return forward

    expected = run(twice(lambda **a: plain(activation, **a)), t)
    for memory in ("compressed", "dense"):
        actual = run(
            twice(lambda **a: bitsparse.ffn(**a, activation=activation, memory=memory)),  # noqa: B023
            t,
        )
        for name, e in expected.items():
            assert_same_values(actual[name], e, f"{memory} {name}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float32_math_inside_16_bit(backend_device, activation):
    """What CUDA's autocast does around `square`, spelled out: float32 between 16-bit tensors."""
    act = ACTIVATIONS[activation]
    if not act.squared:
        pytest.skip("only squared activations have intermediate results there")
    from bitsparse.ops.feed_forward import _ActivationDown

    for dtype in (torch.bfloat16, torch.float16):
        g = torch.Generator().manual_seed(3)
        gate0 = (torch.randn(60, 64, generator=g) * 30).to(dtype).to(backend_device)
        up0 = (torch.randn(60, 64, generator=g) * 30).to(dtype).to(backend_device)
        w = torch.eye(64, dtype=dtype, device=backend_device).requires_grad_()
        results = []
        for codec in ("plain", *codings.POLICIES):
            gate, up = gate0.clone().requires_grad_(), up0.clone().requires_grad_()
            if codec != "plain":
                leaf_up = up.clone() if act.gated else None
                y = _ActivationDown.apply(gate.clone(), leaf_up, w, None, act, True, codec, None)
            else:
                hidden = torch.relu(gate).float().square()
                if act.gated:
                    hidden = hidden * up
                y = F.linear(hidden.to(dtype), w)
            leaves = [gate, w, up] if act.gated else [gate, w]
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y)
            results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
        for codec, result in zip(codings.POLICIES, results[1:], strict=True):
            for a, e in zip(result, results[0], strict=True):
                assert_same_values(a, e, f"{activation} {dtype} {codec}")


@pytest.mark.parametrize("support", ["flat", "bucketed"])
@pytest.mark.parametrize("values", [*codings.VALUES, "mixed"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_coding(backend_device, interpreted, monkeypatch, activation, support, values):
    """Whatever a policy would choose. Values that a coding cannot hold take its signed sibling."""
    signed = {"unsigned": "raw", "exponent3": "signed_exponent3", "exponent4": "signed_exponent4"}
    used = set()

    def choose(counts, policy):
        pair = (values, values) if values != "mixed" else ("exponent3", "signed_exponent4")
        wanted = [
            signed.get(name, name) if stream.any_sign else name
            for name, stream in zip(pair, counts.streams, strict=False)
        ]
        used.update(wanted)
        found = tuple(codings.value_coding(name) for name in wanted)
        return codings.Choice(codings.support_coding(support), found, 0)

    if interpreted and values in ("unsigned", "exponent4", "signed_exponent4"):
        pytest.skip("slow in the interpreter, and as their siblings but for the width")
    shape, d_ff = ((64, 24), 80) if interpreted else ((250, 24), 192)
    for dtype in COMPUTE_DTYPES[1:] if interpreted else COMPUTE_DTYPES:
        t = inputs(activation, shape, d_ff, dtype, backend_device)
        with torch.no_grad():
            t["x"][3] = float("nan")  # a tile with the largest exponent, and escapes
            t["x"][5] *= 2.0**-9
        expected = run(lambda **t: plain(activation, **t), t)
        with monkeypatch.context() as patch:
            patch.setattr(codings, "choose", choose)
            actual = run(lambda **t: bitsparse.ffn(**t, activation=activation), t)
        for name, e in expected.items():
            assert_same_values(actual[name], e, f"{dtype} {name}")
    assert used


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_strides_batches_and_single_tokens(device, activation):
    for dtype in (torch.float32, torch.bfloat16):
        t = inputs(activation, (24, 40), 72, dtype, device, bias=True)
        wide = inputs(activation, (40, 24), 72, dtype, device)
        t["x"], square = wide["x"], t["x"]
        assert_identical(activation, t, transform=lambda x: x.t())
        t["x"] = square
        assert_identical(activation, t, transform=lambda x: x.view(4, 6, 40).transpose(0, 1))
        assert_identical(activation, t, transform=lambda x: x[:, None].expand(24, 3, 40))
        assert_identical(activation, t, transform=lambda x: x[:1])
        assert_identical(activation, t, transform=lambda x: x[0])
        assert_identical(activation, t, transform=lambda x: x[:0])
        assert_identical(activation, t, transform=lambda x: x[None, :0])
        # A gradient that is one number expanded, as `.sum()` gives.
        one = torch.ones((), device=device, dtype=dtype)
        assert_identical(activation, t, grad=one.expand(24, 40))
        assert_identical(
            activation, t, grad=one.expand(4, 6, 40), transform=lambda x: x.view(4, 6, 40)
        )
        t = inputs(activation, (30, 1), 1, dtype, device)
        assert_identical(activation, t)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_only_what_a_gradient_needs(device, activation):
    """Every subset of frozen tensors: same gradients, and nothing kept that none of them needs."""
    t = inputs(activation, (64, 16), 80, torch.float32, device, bias=True)
    for wanted in itertools.product([False, True], repeat=len(t)):
        for tensor, flag in zip(t.values(), wanted, strict=True):
            tensor.requires_grad_(flag)
        if not any(wanted):
            continue
        assert_identical(activation, t)

    def kept_bytes(*names):
        for name, tensor in t.items():
            tensor.requires_grad_(name in names)
        before = bitsparse.memory_stats()["live_compressed_bytes"]
        y = bitsparse.ffn(**t, activation=activation, codec="fast")
        return bitsparse.memory_stats()["live_compressed_bytes"] - before + 0 * y.numel()

    assert kept_bytes("b_down") == 0
    assert kept_bytes("w_down") > 0
    if activation == "relu":
        mask_only = 64 * 80 // 8 + 4 * table_words(2)
        assert kept_bytes("x") == mask_only
        assert kept_bytes("x", "w_down") > mask_only


def test_nothing_is_kept_without_gradients(device):
    t = inputs("relu2", (64, 16), 80, torch.float32, device)
    before = bitsparse.memory_stats()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = bitsparse.ffn(**t, activation="relu2")
            assert bitsparse.memory_stats() == before
            assert_same_values(y, plain("relu2", **t))


@pytest.mark.parametrize("options", [{}, {"tokens_per_chunk": 16}, {"storage": "fp8"}], ids=str)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_autocast_without_gradients(device, context, options):
    t = inputs("reglu", (64, 16), 80, torch.float32, device, bias=True)
    with context(), torch.autocast(device.type, torch.bfloat16):
        y = bitsparse.ffn(**t, activation="reglu", **options)
        assert_same_values(y, plain("reglu", **t))


@pytest.mark.parametrize("options", [{}, {"tokens_per_chunk": 16}, {"storage": "fp8"}], ids=str)
@pytest.mark.parametrize("leading", [(64,), (2, 32), ()])
def test_no_output_features(device, leading, options):
    t = inputs("relu2", (*leading, 16), 80, torch.float32, device)
    t["w_down"] = torch.empty(0, 80, device=device, requires_grad=True)
    y = bitsparse.ffn(**t, activation="relu2", **options)
    assert y.shape == (*leading, 0)
    y.sum().backward()
    assert not t["x"].grad.any() and t["w_down"].grad.shape == (0, 80)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_storage_is_freed_after_backward(device, activation):
    before = bitsparse.memory_stats()
    t = inputs(activation, (64, 16), 80, torch.float32, device)
    y = bitsparse.ffn(**t, activation=activation)
    during = bitsparse.memory_stats()
    assert during["live_tensors"] == before["live_tensors"] + 1
    assert during["live_compressed_bytes"] > before["live_compressed_bytes"]
    y.sum().backward()
    after = bitsparse.memory_stats()
    assert after["live_compressed_bytes"] == before["live_compressed_bytes"]
    bitsparse.release_workspace()
    assert bitsparse.memory_stats()["scratch_bytes"] == 0


def modules(activation, device, bias=True):
    torch.manual_seed(0)
    m = bitsparse.nn.FeedForward(24, 72, activation, bias=bias, device=device)
    dense = copy.deepcopy(m)
    dense.memory = "dense"
    return m, dense


def assert_same_parameters_grads(a, b):
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert_same_values(p.grad, q.grad, name)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_module_habits(device, activation):
    """Accumulation, several forwards first, used twice, two backwards, copies, pickles."""
    pair = modules(activation, device)
    for m in pair:
        g = torch.Generator().manual_seed(1)
        x = [torch.randn(10, 7, 24, generator=g).to(device).requires_grad_() for _ in range(3)]
        (m(x[0]) + m(x[1])).square().sum().backward()
        outs = [m(t) for t in x]
        for y in reversed(outs):
            y.sin().sum().backward()
        y = m(m(x[2]) + x[2])
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        m.x_grads = [t.grad for t in x]
    assert_same_parameters_grads(*pair)
    for a, b in zip(pair[0].x_grads, pair[1].x_grads, strict=True):
        assert_same_values(a, b)
    m = pair[0]
    del m.x_grads
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        x = torch.randn(5, 24, device=device)
        assert_same_values(other(x), m(x))
    m(torch.randn(10, 7, 24, device=device))
    kept = m.kept
    assert 0 < kept.nnz < kept.numel == 70 * 72
    assert 0 < kept.nbytes < kept.dense_nbytes


def test_state_dict_is_that_of_plain_linears():
    m = bitsparse.nn.FeedForward(8, 16, "reglu", bias=True)
    assert sorted(m.state_dict()) == [
        f"{child}.{kind}" for child in ("down", "gate", "up") for kind in ("bias", "weight")
    ]
    assert all(type(c) is nn.Linear for c in m.children())
    assert sorted(bitsparse.nn.FeedForward(8, 16).state_dict()) == ["down.weight", "up.weight"]


def test_children_with_hooks_or_replaced_children_are_called():
    m, dense = modules("reglu", torch.device("cpu"))
    seen = []
    m.up.register_forward_hook(lambda *a: seen.append("up"))
    m.down = nn.Sequential(m.down, nn.Identity())
    x = torch.randn(9, 24)
    assert_same_values(m(x), dense(x))
    assert seen == ["up"]


def test_a_changed_weight_is_noticed(device):
    """As in plain PyTorch: a weight changed in place between forward and backward is an error."""
    m, _ = modules("relu2", device)
    y = m(torch.randn(9, 24, device=device))
    with torch.no_grad():
        m.down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_twice_without_retaining_is_an_error(device):
    m, _ = modules("relu2", device)
    y = m(torch.randn(9, 24, device=device))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def second_derivatives():
    def penalty(f, x):
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        g.square().sum().backward()

    def of_the_input_alone(f, x):
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        torch.autograd.grad(g.square().sum(), x)

    def hessian(f, x):
        torch.autograd.functional.hessian(lambda x: f(x).square().sum(), x)

    return {"penalty": penalty, "input": of_the_input_alone, "hessian": hessian}


@pytest.mark.parametrize("options", [{}, {"tokens_per_chunk": 4}, {"storage": "fp8"}], ids=str)
@pytest.mark.parametrize("how", second_derivatives())
@pytest.mark.parametrize("activation", ["relu", "relu2", "reglu"])
def test_second_derivatives_are_clear_errors(device, activation, how, options):
    t = inputs(activation, (9, 24), 72, torch.float32, device)
    x = t.pop("x")

    def f(x):
        return bitsparse.ffn(x, **t, activation=activation, **options)

    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*memory='dense'"):
        second_derivatives()[how](f, x)
    f(x).sum().backward()


@pytest.mark.parametrize("options", [{}, {"tokens_per_chunk": 16}, {"storage": "fp8"}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 16), (4, 16, 16)], ids=str)
@pytest.mark.parametrize("memory", ["compressed", "checkpoint", "dense"])
def test_outputs_can_be_changed_in_place(device, memory, shape, bias, options):
    if options and memory != "compressed":
        pytest.skip("goes with compressed only")
    results = []
    for mode, more in ((memory, options), ("dense", {})):
        t = inputs("relu2", shape, 80, torch.float32, device, bias=bias)
        y = bitsparse.ffn(**t, activation="relu2", memory=mode, **more)
        y += 1
        y[..., :3] = 0
        y.mul_(2).relu_()
        y.sum().backward()
        results.append((y.detach(), t["x"].grad))
    if "tokens_per_chunk" in options and device.type == "cuda":
        # Products of other sizes have other bits there.
        torch.testing.assert_close(*(r[0] for r in results))
        return
    assert_same_values(*(r[0] for r in results))
    if not options:
        assert_same_values(*(r[1] for r in results))


def test_saved_tensor_hooks_see_the_compressed_storage(device):
    """save_on_cpu, and with it anything else built on hooks, works and moves the small tensors."""
    pair = modules("reglu", device)
    saved = []
    for m in pair:
        x = torch.randn(50, 24, generator=torch.Generator().manual_seed(1)).to(device)

        def pack(t):
            saved.append((t.dtype, t.numel()))
            return t.cpu()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(device)):
            y = m(x)
        y.sum().backward()
    assert_same_parameters_grads(*pair)
    assert any(dtype == torch.int32 for dtype, _ in saved)


def test_saved_tensor_hooks_under_autocast(device):
    pair = modules("relu2", device)
    for m in pair:
        x = torch.randn(50, 24, generator=torch.Generator().manual_seed(1)).to(device)
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(device)),
            torch.autocast(device.type, torch.bfloat16),
        ):
            y = m(m(x))
        y.float().sum().backward()
    assert_same_parameters_grads(*pair)


def test_inside_activation_checkpointing(device):
    pair = modules("drelu", device)
    for m in pair:
        x = torch.randn(50, 24, generator=torch.Generator().manual_seed(1)).to(device)
        y = torch.utils.checkpoint.checkpoint(m, x.requires_grad_(), use_reentrant=False)
        y.sum().backward()
    assert_same_parameters_grads(*pair)


def test_many_threads_at_once(device):
    """Data-parallel style: forwards and backwards from several Python threads."""
    results = {}

    def work(i):
        m, dense = modules("reglu2", device)
        g = torch.Generator().manual_seed(i)
        for _ in range(3):
            x = torch.randn(300, 24, generator=g).to(device)
            for module in (m, dense):
                module(x).square().sum().backward()
        results[i] = (m, dense)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 4
    for m, dense in results.values():
        assert_same_parameters_grads(m, dense)


def bad(match, error=ValueError, **changes):
    good = {
        "x": torch.randn(5, 8),
        "w_up": torch.randn(16, 8),
        "w_down": torch.randn(8, 16),
        "activation": "relu",
    }
    return pytest.param({**good, **changes}, match, error, id=match.replace(" ", "_"))


@pytest.mark.parametrize(
    "arguments,match,error",
    [
        bad("activation: got 'gelu', allowed", activation="gelu"),
        bad("activation: got None, allowed", activation=None),
        bad("memory: got 'offload', allowed", memory="offload"),
        bad("codec: got 'zstd', allowed", codec="zstd"),
        bad("w_gate: got None", activation="reglu"),
        bad("w_gate: got a tensor", w_gate=torch.randn(16, 8)),
        bad("b_gate: got a tensor", b_gate=torch.randn(16)),
        bad("w_up: got shape", w_up=torch.randn(8, 16)),
        bad("w_up: got shape .16,.", w_up=torch.randn(16)),
        bad("w_down: got shape", w_down=torch.randn(16, 8)),
        bad("b_up: got shape", b_up=torch.randn(8)),
        bad("b_down: got shape", b_down=torch.randn(16)),
        bad("w_gate: got shape", activation="drelu", w_gate=torch.randn(16, 9)),
        bad("x: got shape", x=torch.tensor(1.0)),
        bad("x: got list", TypeError, x=[1.0]),
        bad("w_up: got NoneType", TypeError, w_up=None),
        bad("x: got dtype torch.int64", TypeError, x=torch.ones(5, 8, dtype=torch.int64)),
        bad("w_up: got dtype torch.complex64", TypeError, w_up=torch.ones(16, 8) * 1j),
        bad("w_up: got dtype torch.float16", TypeError, w_up=torch.ones(16, 8).half()),
        bad("x: got layout", TypeError, x=torch.randn(5, 8).to_sparse()),
        bad("w_down: got device meta", w_down=torch.randn(8, 16, device="meta")),
        bad("x: got dtype torch.float64", TypeError, **{
            k: torch.randn(s, dtype=torch.float64)
            for k, s in {"x": (5, 8), "w_up": (16, 8), "w_down": (8, 16)}.items()
        }),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, match, error):
    with pytest.raises(error, match=match):
        bitsparse.ffn(**arguments)


def test_bad_module_arguments():
    with pytest.raises(ValueError, match="activation: got 'gelu'"):
        bitsparse.nn.FeedForward(8, 16, "gelu")
    with pytest.raises(ValueError, match="memory: got 'none'"):
        bitsparse.nn.FeedForward(8, 16, memory="none")
    with pytest.raises(ValueError, match="codec: got 'tiny'"):
        bitsparse.nn.FeedForward(8, 16, codec="tiny")
    with pytest.raises(ValueError, match="d_ff: got 0"):
        bitsparse.nn.FeedForward(8, 0)


def test_tied_and_strided_weights(device):
    """One tensor in two roles, and weights that are views: the same sums in the same order."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(50, 16, generator=g).to(device).requires_grad_()
    w = torch.randn(40, 16, generator=g).to(device).requires_grad_()
    wide = torch.randn(32, 80, generator=g).to(device).requires_grad_()
    cases = [
        lambda memory: bitsparse.ffn(x, w, w.t(), activation="relu2", memory=memory),
        lambda memory: bitsparse.ffn(
            x, w, wide[::2, ::2], activation="reglu", w_gate=w, memory=memory
        ),
        lambda memory: bitsparse.ffn(x, wide[:16, :40].t(), w.t(), memory=memory),
    ]
    for case in cases:
        grads = [
            torch.autograd.grad(case(memory).square().sum(), [x, w, wide], allow_unused=True)
            for memory in ("dense", "compressed")
        ]
        for expected, actual in zip(*grads, strict=True):
            assert (expected is None) == (actual is None)
            if expected is not None:
                assert_same_values(actual, expected)


def test_autocast_without_cache_and_nested(device):
    pair = modules("reglu", device)
    x = torch.randn(30, 24, generator=torch.Generator().manual_seed(1)).to(device)
    for m in pair:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            y = m(m(x))
        with torch.autocast(device.type, torch.bfloat16):
            z = m(x)
            with torch.autocast(device.type, enabled=False):
                z = z.float() + m(z.float())
        (y.float().sum() + z.sum()).backward()
    assert_same_parameters_grads(*pair)


def test_nothing_leaks_when_a_graph_is_dropped_or_backward_fails(device):
    gc.collect()
    before = bitsparse.memory_stats()["live_compressed_bytes"]
    m, _ = modules("relu2", device)
    x = torch.randn(99, 24, device=device)
    y = m(x)
    del y
    y = m(x)
    y.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    del y
    gc.collect()
    assert bitsparse.memory_stats()["live_compressed_bytes"] == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_can_go_on():
    """Threads do not survive a fork: a child must not wait for those of its parent."""
    x = torch.relu(torch.randn(512, 512))
    expected = x.numpy().tobytes()
    assert bitsparse.compress(x).to_dense().numpy().tobytes() == expected  # starts the threads
    child = os.fork()
    if child == 0:  # not with torch.equal: PyTorch's own OpenMP threads do not survive either
        os._exit(bitsparse.compress(x).to_dense().numpy().tobytes() != expected)
    deadline = time.monotonic() + 60
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("bias", [False, True])
def test_weights_of_any_strides_at_small_sizes(device, bias):
    """PyTorch chooses the product for the weight's gradient by the weight's strides."""
    g = torch.Generator().manual_seed(0)
    for d_ff, d_out, tokens in ((65, 5, 50), (65, 5, 256), (33, 7, 99)):
        x = torch.randn(tokens, d_out, generator=g).to(device)
        base = torch.randn(2 * d_ff, 2 * d_ff, generator=g).to(device).requires_grad_()
        b = torch.randn(d_out, generator=g).to(device) if bias else None
        views = [
            lambda w: w[:d_ff, :d_out].t(),  # noqa: B023
            lambda w: w[:d_out, : 2 * d_ff : 2],  # noqa: B023
            lambda w: w[: 2 * d_out : 2, :d_ff],  # noqa: B023
            lambda w: w[:d_out, :d_ff].contiguous(),  # noqa: B023
        ]
        for view in views:
            grads = []
            for memory in ("dense", "compressed"):
                y = bitsparse.ffn(x, base[:d_ff, :d_out], view(base), b_down=b, memory=memory)
                grads.append(torch.autograd.grad(y.square().sum(), base)[0])
            assert_same_values(grads[1], grads[0])


def test_bias_gradient_from_a_strided_gradient(device):
    for shape in ((64, 16), (8, 8, 16), (8, 4, 4, 16), (2, 2, 4, 8, 16)):
        grads = []
        for memory in ("dense", "compressed"):
            t = inputs("relu", shape, 32, torch.float32, device, bias=True, seed=1)
            y = bitsparse.ffn(**t, memory=memory)
            grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(device)
            y.backward(grad.transpose(0, -1).contiguous().transpose(0, -1))
            grads.append({name: tensor.grad for name, tensor in t.items()})
        for name, e in grads[0].items():
            assert_same_values(grads[1][name], e, f"{shape} {name}")


def test_default_device_does_not_matter():
    m, dense = modules("reglu", torch.device("cpu"))
    x = torch.randn(200, 24)
    hidden = torch.relu(x)
    with torch.device("meta"):
        m(x).sum().backward()
        for codec in codings.POLICIES:
            assert torch.equal(bitsparse.compress(hidden, codec=codec).to_dense(), hidden)
        full = bitsparse.compress(x, "full", "exponent")
        assert torch.equal(full.to_dense(), x)
        assert torch.equal(pickle.loads(pickle.dumps(full)).to_dense(), x)
    dense(x).sum().backward()
    assert_same_parameters_grads(m, dense)


def test_patched_and_globally_hooked_children_are_called():
    m, _ = modules("relu2", torch.device("cpu"), bias=False)
    x = torch.randn(50, 24)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 0 if module is m.up else None
    )
    try:
        assert not m(x).any()
    finally:
        handle.remove()
    assert m(x).any()
    forward = m.up.forward
    m.up.forward = lambda z: forward(z) * 0
    assert not m(x).any()


def test_only_devices_are_moved_to():
    c = bitsparse.compress(torch.relu(torch.randn(64, 64)))
    for wrong in (torch.float16, None, 3):
        with pytest.raises(TypeError, match="device: got"):
            c.to(wrong)
