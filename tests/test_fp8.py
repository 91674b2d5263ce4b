"""FP8 products and FP8 storage: the same bits in every memory mode, and how large errors are."""

import gc
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bitsparse
from bitsparse import codings
from bitsparse.activations import ACTIVATIONS
from bitsparse.dtypes import to_patterns
from bitsparse.ops import fp8
from conftest import needs_cuda
from helpers import assert_same_bits, assert_same_values

NAMES = ("x", "w_up", "w_down", "w_gate", "b_up", "b_down", "b_gate")
SCALINGS = ("tensor", "row")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
MODES = [*(("compressed", codec) for codec in codings.POLICIES), ("checkpoint", "fast")]


def inputs(activation, shape, d_ff, device, bias=True, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    d = shape[-1]
    t = {
        "x": torch.randn(shape, generator=g),
        "w_up": torch.randn(d_ff, d, generator=g) / max(d, 1) ** 0.5,
        "w_down": torch.randn(d, d_ff, generator=g) / max(d_ff, 1) ** 0.5,
    }
    if ACTIVATIONS[activation].gated:
        t["w_gate"] = torch.randn(d_ff, d, generator=g) / max(d, 1) ** 0.5
    if bias:
        t["b_up"] = torch.randn(d_ff, generator=g) / 4
        t["b_down"] = torch.randn(d, generator=g) / 4
        if ACTIVATIONS[activation].gated:
            t["b_gate"] = torch.randn(d_ff, generator=g) / 4
    return {k: v.to(device=device, dtype=dtype).requires_grad_() for k, v in t.items()}


def run(tensors, activation, grad=None, **kwargs):
    leaves = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in tensors.items()}
    y = bitsparse.ffn(**leaves, activation=activation, **kwargs)
    if grad is None:
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    wanted = {k: v for k, v in leaves.items() if v.requires_grad}
    found = torch.autograd.grad(y, list(wanted.values()), grad.to(y), allow_unused=True)
    return {"y": y.detach(), **dict(zip(wanted, found, strict=True))}


def assert_all_same(actual, expected, what):
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        assert_same_values(actual[name], e, f"{what} {name}")


def error(actual, expected):
    """Of a tensor, relative to its norm."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


# What is computed, spelled out once more.


def rounded(t, dtype, scaling):
    """``t`` in FP8 and back, in float32."""
    t = t.float()
    largest = t.abs().amax(1, keepdim=True) if scaling == "row" else t.abs().amax()
    exponent = [
        math.ceil(math.log2(v / LARGEST[dtype])) if v else 0 for v in largest.flatten().tolist()
    ]
    scale = torch.tensor([2.0**e for e in exponent], device=t.device).view(largest.shape)
    return (t / scale).to(dtype).float() * scale


def keep_positive(r, source, scaling):
    """``r`` is ``source`` rounded; where that is positive, ``r`` is not zero."""
    largest = source.float().amax(1, keepdim=True) if scaling == "row" else source.float().amax()
    smallest = 2.0 ** (torch.log2(largest.clamp(min=1e-30) / 448).ceil() - 9)
    return torch.where((source > 0) & (r == 0), smallest, r)


def by_hand(t, activation, grad, grad_dtype, scaling):
    """The block and its gradients in plain PyTorch: every product of rounded matrices."""
    act = ACTIVATIONS[activation]
    bf16 = torch.bfloat16
    x, w_up, w_down = (t[n].detach() for n in ("x", "w_up", "w_down"))
    w_gate = t["w_gate"].detach() if act.gated else None

    def q(m, dtype=E4M3):
        return rounded(m, dtype, scaling)

    def mm(a, b):
        return (a @ b.t()).to(bf16)

    def linear(r, w, b):
        out = mm(r, q(w))
        return out + t[b].detach() if b in t else out

    x8 = q(x)
    up = linear(x8, w_up, "b_up")
    gate = linear(x8, w_gate, "b_gate") if act.gated else up
    power = torch.relu(gate).square() if act.squared else torch.relu(gate)
    other = torch.relu(up) if act.relu_up else up
    on = power > 0
    if act.relu_up:
        on = on & (other > 0)
    kept_power = torch.where(on, power, 0) if act.relu_up else power
    p8 = q(kept_power)
    if not act.squared:
        p8 = keep_positive(p8, kept_power, scaling)
    on = p8 > 0
    u8 = None
    if act.gated:
        kept_up = torch.where(on, other, 0)
        u8 = q(kept_up)
        if act.relu_up:
            u8 = keep_positive(u8, kept_up, scaling)
    h = power * other if act.gated else power
    y = linear(p8 if act.plain else q(h), w_down, "b_down")

    def across(m, dtype=E4M3):
        return q(m.t(), dtype)

    grads = {"b_down": grad.float().sum(0).to(bf16)}
    h8 = p8 * u8 if act.gated else p8
    grads["w_down"] = mm(across(grad, grad_dtype), across(h8.to(bf16)))
    dh = mm(q(grad, grad_dtype), across(w_down))
    p8, u8 = p8.to(bf16), None if u8 is None else u8.to(bf16)
    d_gate = dh if u8 is None else dh * u8
    if act.squared:
        d_gate = d_gate * (2 * p8.sqrt())
    zero = torch.zeros((), dtype=bf16, device=x.device)
    outs = {"gate" if act.gated else "up": torch.where(on, d_gate, zero)}
    if act.gated:
        outs = {"up": torch.where(on, dh * p8, zero), **outs}
    for name, d in outs.items():
        grads[f"b_{name}"] = d.float().sum(0).to(bf16)
        grads[f"w_{name}"] = mm(across(d, grad_dtype), across(x8.to(bf16)))
        dx = mm(q(d, grad_dtype), across(t[f"w_{name}"].detach()))
        grads["x"] = grads["x"] + dx if "x" in grads else dx
    return {"y": y, **{n: grads[n] for n in t}}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("precision", fp8.PRECISIONS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dense_is_what_the_description_says(device, activation, precision, scaling):
    for shape, d_ff in (((64, 32), 96), ((37, 10), 21)):
        t = inputs(activation, shape, d_ff, device)
        with torch.no_grad():
            t["x"][::7] *= 1e-4
            t["x"][5] = 0
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(t["x"])
        actual = run(t, activation, grad, memory="dense", precision=precision, scaling=scaling)
        expected = by_hand(t, activation, grad, fp8.PRECISIONS[precision], scaling)
        for name, e in expected.items():
            if device.type == "cpu":  # elsewhere the hardware adds in another order
                assert torch.equal(actual[name], e), name
            else:
                assert error(actual[name], e) < 0.02, name


# Quantization.


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantize(device, source, dtype):
    g = torch.Generator().manual_seed(1)
    t = torch.randn(40, 50, generator=g) * torch.exp2(torch.arange(-20, 20.0))[:, None] * 0.01
    t = t.to(source).to(device)
    t[3] = 0
    t[4, 0] = LARGEST[dtype]
    for scaling in SCALINGS:
        q = fp8.quantize(t, dtype, scaling)
        assert q.data.dtype == dtype and q.data.is_contiguous()
        assert q.scale.shape == ((40, 1) if scaling == "row" else ())
        assert torch.equal(torch.frexp(q.scale).mantissa, torch.full_like(q.scale, 0.5))
        assert torch.equal(q.data.float() * q.scale, rounded(t, dtype, scaling))
        nonzero = t.float().abs().amax(1) > 0
        largest = q.data.float().abs().amax(1)[nonzero]
        if scaling == "row":  # no binade is wasted
            assert (largest > LARGEST[dtype] / 2 * 0.9).all() and (largest <= LARGEST[dtype]).all()
        # A view that is not contiguous, and what has no elements.
        assert_same_bits(fp8.quantize(t.t().contiguous().t(), dtype, scaling).data, q.data)
        for shape in ((0, 5), (5, 0)):
            assert fp8.quantize(t.new_empty(shape), dtype, scaling).data.shape == shape


def test_quantizing_again_is_exact_above_the_subnormals(device):
    t = torch.randn(64, 48, generator=torch.Generator().manual_seed(2)).to(device)
    t = torch.where(t.abs() < 0.05, 0.05, t) * torch.exp2(torch.arange(48.0, device=device) % 5)
    q = fp8.quantize(t, E4M3, "row")
    again = fp8.transposed(q, "row")
    there, back = (fp8.dequantize(a, torch.float32) for a in (q, again))
    assert torch.equal(there.t(), back)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_scale_nan(device, special):
    t = torch.ones(4, 16, device=device)
    t[2, 3] = special
    w = fp8.quantize(torch.ones(16, 16, device=device), E4M3, "row")
    rows = fp8.product(fp8.quantize(t, E4M3, "row"), w).isnan().all(1)
    assert rows.tolist() == [False, False, True, False]
    w = fp8.quantize(torch.ones(16, 16, device=device), E4M3, "tensor")
    assert fp8.product(fp8.quantize(t, E4M3, "tensor"), w).isnan().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_streams_have_the_support_that_the_gradient_needs(device, activation):
    """Positive values never round to zero where ReLU is not squared; ``up`` follows ``power``."""
    act = ACTIVATIONS[activation]
    g = torch.Generator().manual_seed(3)
    gate, up = torch.randn(2, 60, 64, generator=g).to(device).bfloat16()
    tiny = torch.rand(60, 64, generator=g).to(device) < 0.3
    gate, up = torch.where(tiny, gate * 1e-12, gate), torch.where(tiny.flip(0), up * 1e-12, up)
    gate[0, :4] = up[1, :4] = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    for scaling in SCALINGS:
        found = fp8.streams(act, gate, up if act.gated else None, scaling)
        on = gate > 0
        if act.relu_up:
            on = on & (up > 0)
        if act.squared:
            on = on & (fp8.dequantize(found[0], torch.float32) > 0)
        for q in found:
            assert torch.equal(q.patterns != 0, on)
        assert (found[0].patterns < 0x80).all()


# Memory modes.


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bits(backend_device, interpreted, activation, scaling):
    shapes = (((64, 32), 96), ((3, 87, 16), 80), ((2, 3, 5, 8), 40), ((7, 11), 13))
    if interpreted:
        shapes = shapes[3:]
    for i, (shape, d_ff) in enumerate(shapes):
        bias = i % 2 == 1
        t = inputs(activation, shape, d_ff, backend_device, bias)
        for precision in ("fp8",) if interpreted else fp8.PRECISIONS:
            kwargs = {"precision": precision, "scaling": scaling}
            expected = run(t, activation, memory="dense", **kwargs)
            assert expected["y"].dtype == torch.bfloat16
            for memory, codec in MODES[1:] if interpreted or d_ff < 80 else MODES:
                actual = run(t, activation, memory=memory, codec=codec, **kwargs)
                assert_all_same(actual, expected, f"{shape} {precision} {memory} {codec}")


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_few_tokens_and_no_elements(device, activation, scaling):
    for shape, d_ff in (((1, 16), 32), ((16,), 32), ((0, 16), 32), ((2, 0, 16), 32), ((4, 16), 0)):
        t = inputs(activation, shape, d_ff, device)
        kwargs = {"precision": "fp8", "scaling": scaling}
        expected = run(t, activation, memory="dense", **kwargs)
        assert expected["y"].shape == shape
        for memory, codec in MODES:
            actual = run(t, activation, memory=memory, codec=codec, **kwargs)
            assert_all_same(actual, expected, f"{shape} {memory} {codec}")


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_only_what_a_gradient_needs(device, activation, scaling):
    """Frozen tensors: the other gradients are those of a run in which all are wanted."""
    if scaling == "tensor" and activation != "relu":
        pytest.skip("the needs of the other scaling, which keeps and rounds more, are the same")
    t = inputs(activation, (48, 16), 32, device)
    everything = run(t, activation, memory="dense", precision="fp8", scaling=scaling)
    subsets = [{n} for n in t] + [set(t) - {n} for n in t] + [{"w_down", "b_down"}]
    for wanted in subsets:
        for name, tensor in t.items():
            tensor.requires_grad_(name in wanted)
        expected = {n: v for n, v in everything.items() if n == "y" or n in wanted}
        for memory in ("dense", "checkpoint", "compressed"):
            actual = run(t, activation, memory=memory, precision="fp8", scaling=scaling)
            assert_all_same(actual, expected, f"{wanted} {memory}")


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_that_are_not_finite(device, activation, scaling, special):
    t = inputs(activation, (40, 16), 32, device)
    with torch.no_grad():
        t["x"][7, 3] = special
    kwargs = {"precision": "fp8", "scaling": scaling}
    expected = run(t, activation, memory="dense", **kwargs)
    rows = expected["y"].isnan().any(1)
    assert rows[7] and (rows.all() if scaling == "tensor" else rows.sum() == 1)
    assert expected["w_up"].isnan().any() and expected["w_down"].isnan().any()
    for memory, codec in MODES:
        actual = run(t, activation, memory=memory, codec=codec, **kwargs)
        assert_all_same(actual, expected, f"{memory} {codec}")
    with torch.no_grad():
        t["x"][7, 3] = 1.0
    grad = torch.ones(40, 16)
    grad[9, 2] = special
    expected = run(t, activation, grad, memory="dense", **kwargs)
    assert expected["y"].isfinite().all() and expected["w_down"].isnan().any()
    for memory, codec in MODES:
        actual = run(t, activation, grad, memory=memory, codec=codec, **kwargs)
        assert_all_same(actual, expected, f"gradient {memory} {codec}")


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_autocast(device, activation, scaling):
    """float32 parameters: rounded to FP8 at once, and their gradients are float32."""
    t = inputs(activation, (40, 32), 96, device, dtype=torch.float32)
    results = []
    for memory in ("dense", "compressed", "checkpoint"):
        with torch.autocast(device.type, torch.bfloat16):
            results.append(run(t, activation, memory=memory, precision="fp8", scaling=scaling))
    assert results[0]["y"].dtype == torch.bfloat16
    assert all(results[0][name].dtype == torch.float32 for name in t)
    for r in results[1:]:
        assert_all_same(r, results[0], "autocast")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_kept(device, activation):
    """FP8 input, coded FP8 streams, scales; no tensor of the hidden size in 16 bits."""
    t = inputs(activation, (256, 64), 192, device, bias=False)
    act = ACTIVATIONS[activation]
    parameters = {v.data_ptr() for k, v in t.items() if k != "x"}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            kept[memory] = kept.get(memory, 0) + tensor.untyped_storage().nbytes()
        return tensor

    gc.collect()
    before = bitsparse.memory_stats()["live_compressed_bytes"]
    reports = []
    for memory in ("dense", "compressed", "checkpoint"):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = bitsparse.ops.feed_forward.feed_forward(
                t["x"], t["w_up"], t["w_down"], act, t.get("w_gate"), None, None, None, memory,
                "balanced", reports.append, precision="fp8",
            )  # fmt: skip
        if memory == "compressed":
            live = bitsparse.memory_stats()["live_compressed_bytes"] - before
        del y
    hidden, scales = 256 * 192, 4 * (2 + act.gated)
    assert kept["checkpoint"] == 256 * 64 + 4
    assert kept["dense"] == 256 * 64 + hidden * (1 + act.gated) + scales
    (report,) = reports
    assert kept["compressed"] == 256 * 64 + report.nbytes + scales
    assert report.nbytes == live
    assert report.dense_nbytes == hidden * (1 + act.gated)
    bits = 8 * report.nbytes / report.numel
    # Positions take about a bit, a value without its sign at most seven bits, one with it eight.
    assert bits < 1.1 + report.density * (7 + (8 - act.relu_up) * act.gated)
    if act.plain:
        for name, tensor in t.items():
            tensor.requires_grad_(name == "x")
        bitsparse.ops.feed_forward.feed_forward(
            t["x"], t["w_up"], t["w_down"], act, None, None, None, None, "compressed",
            "fast", reports.append, precision="fp8",
        )  # fmt: skip
        assert reports[1].nbytes < hidden / 8 * 1.1  # positions only


def test_nothing_is_kept_without_gradients(device):
    t = inputs("relu2", (64, 16), 80, device)
    before = bitsparse.memory_stats()
    expected = bitsparse.ffn(**t, activation="relu2", memory="dense", precision="fp8")
    with torch.no_grad():
        y = bitsparse.ffn(**t, activation="relu2", precision="fp8")
        assert bitsparse.memory_stats() == before
    assert_same_bits(y, expected.detach())


# Errors.


def exact(t, activation, grad):
    """In float64, of the same bfloat16 tensors."""
    double = {k: v.detach().double().requires_grad_() for k, v in t.items()}
    return run(double, activation, grad, memory="dense")


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_errors_of_fp8(device, activation, scaling):
    """Bounds about one and a half times of what is measured (docs/fp8.md), beside bfloat16's."""
    t = inputs(activation, (256, 128), 512, device, bias=False)
    grad = torch.randn(256, 128, generator=torch.Generator().manual_seed(5))
    reference = exact(t, activation, grad)
    plain = run(t, activation, grad, memory="dense")
    for precision in fp8.PRECISIONS:
        actual = run(t, activation, grad, precision=precision, scaling=scaling)
        errors = {n: error(actual[n], reference[n]) for n in actual}
        # What a flipped sign of a pre-activation does to the derivative is the largest part.
        assert all(v < 0.25 for v in errors.values()), errors
        assert errors["y"] < 0.1 and errors["w_down"] < 0.12, errors
        assert all(error(plain[n], reference[n]) < min(0.01, v) for n, v in errors.items())


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_stored_in_fp8(backend_device, interpreted, activation, dtype, scaling):
    """The output has every bit; so has each gradient that no stored value enters."""
    act = ACTIVATIONS[activation]
    shape, d_ff = ((16, 16), 48) if interpreted else ((4, 64, 32), 160)
    if interpreted and (dtype != torch.bfloat16 or scaling == "row"):
        pytest.skip("slow in the interpreter")
    t = inputs(activation, shape, d_ff, backend_device, dtype=dtype)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    reference = exact(t, activation, grad)
    plain = run(t, activation, grad, memory="dense")
    actual = run(t, activation, grad, storage="fp8", scaling=scaling)
    same = {"y", "b_down"} | (set(t) - {"w_down"} if act.plain else set())
    for name, e in plain.items():
        if name in same:
            assert_same_values(actual[name], e, name)
        else:
            worst = 0.06 if act.gated else 0.04
            assert error(actual[name], reference[name]) < worst, name


def test_small_values_are_not_lost_in_storage(device):
    """Neither those of a tensor that is small as a whole, nor the derivative of tiny ones."""
    t = inputs("relu", (64, 16), 64, device, bias=False)
    reference = run(t, "relu", memory="dense")
    for power in (-40, 40):
        scaled = {**t, "x": (t["x"].detach() * 2.0**power).requires_grad_()}
        actual = run(scaled, "relu", storage="fp8")
        assert error(actual["w_down"].double() * 2.0**-power, reference["w_down"]) < 0.04
    with torch.no_grad():
        t["x"][:32] *= 1e-8
    plain, actual = (run(t, "relu", memory=m, storage=s) for m, s in (
        ("dense", None), ("compressed", "fp8")))  # fmt: skip
    assert_same_bits(actual["x"], plain["x"])


def test_values_in_storage_are_rounded_to_the_nearest(device):
    """Element by element, against float64: half a unit in the last place of three bits."""
    eye = torch.eye(64, device=device)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).to(device)
    w = torch.eye(64, device=device, requires_grad=True)
    # Row i of the gradient picks token i: the weight gradient is the hidden tensor.
    hidden = []
    for start in range(0, 256, 64):
        y = bitsparse.ffn(x[start : start + 64], eye, w, storage="fp8")
        hidden.append(torch.autograd.grad(y, w, eye)[0])
    r = torch.relu(x).double()
    found = torch.cat(hidden).double()
    normal = r > r.amax() * 2.0**-14
    assert ((found - r).abs() <= r * 2.0**-4)[normal].all()
    assert torch.equal(found > 0, r > 0)
    assert ((found - r).abs() <= r.amax() * 2.0**-16)[~normal].all()


def test_storage_of_special_values(device):
    """The output is as plain PyTorch's, and what is not finite shows in the gradients."""
    for activation in ACTIVATIONS:
        t = inputs(activation, (40, 16), 32, device)
        with torch.no_grad():
            t["x"][7, 3] = float("inf")
        plain = run(t, activation, memory="dense")
        actual = run(t, activation, storage="fp8")
        assert_same_values(actual["y"], plain["y"])
        assert actual["w_down"].isnan().any()


def test_storage_keeps_less(device):
    t = inputs("reglu", (512, 64), 256, device)
    sizes = {}
    for storage in (None, "fp8"):
        module = bitsparse.nn.FeedForward(64, 256, "reglu", storage=storage, dtype=torch.bfloat16)
        module.to(device)(t["x"].detach())
        sizes[storage] = module.kept.nbytes
    assert sizes["fp8"] < 0.7 * sizes[None]


@pytest.mark.parametrize("kind", [{"storage": "fp8"}, {"precision": "fp8"}], ids=str)
def test_training_with_fp8(kind):
    """A small model learns the same; the memory modes of FP8 products do not differ at all."""
    from bitsparse.training.model import ModelConfig, build_model

    config = ModelConfig(vocab_size=16, layers=1, d_model=32, heads=2, seq_len=16)
    tokens = torch.arange(8 * 17).view(8, 17) * 7 % 11
    losses = {}
    for name, memory, extra in (
        ("plain", "dense", {}),
        ("dense", "dense", kind),
        ("compressed", "compressed", kind),
    ):
        model = build_model(
            ModelConfig(**{**vars(config), **extra}), memory, 0, torch.device("cpu")
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[name] = []
        for _ in range(12):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["compressed"][-1] < 0.7 * losses["plain"][0]
    assert abs(losses["compressed"][-1] - losses["plain"][-1]) < 0.1
    if "precision" in kind:
        assert losses["compressed"] == losses["dense"] != losses["plain"]
    else:
        assert losses["compressed"] != losses["dense"] == losses["plain"]


# Autograd and modules.

KINDS = [{"precision": "fp8"}, {"precision": "fp8_e4m3", "scaling": "row"}, {"storage": "fp8"}]


def module_pair(device, activation="reglu", **kind):
    made = []
    for memory in ("dense", "compressed"):
        torch.manual_seed(0)
        extra = kind if memory == "compressed" or "precision" in kind else {}
        made.append(
            bitsparse.nn.FeedForward(
                32, 64, activation, True, memory, device=device, dtype=torch.bfloat16, **extra
            )
        )
    return made


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_module_habits(device, kind):
    """Accumulation, used twice, two backwards, hooks, checkpointing around it."""
    pair = module_pair(device, **kind)
    outs = []
    for m in pair:
        x = torch.randn(10, 7, 32, generator=torch.Generator().manual_seed(1))
        x = x.to(device).bfloat16().requires_grad_()
        y = m(m(x) + x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(device)):
            m(x).float().square().sum().backward()
        z = torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False)
        z.sum().backward()
        outs.append([y.detach(), x.grad, *(p.grad for p in m.parameters())])
    for a, b in zip(*outs, strict=True):
        if "precision" in kind:
            assert_same_values(a, b)
        else:
            assert error(b, a) < 0.05
    assert 0 < pair[1].kept.nnz < pair[1].kept.numel == 70 * 64
    assert "fp8" in repr(pair[1])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_misuse_is_noticed(device, kind):
    _, m = module_pair(device, **kind)
    x = torch.randn(9, 32, device=device).bfloat16()
    y = m(x)
    with torch.no_grad():
        m.down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = m(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*precision=None"):
        torch.autograd.grad(m(x).sum(), m.up.weight, create_graph=True)
    m.up.register_forward_hook(lambda *a: None)
    with pytest.raises(ValueError, match=r"got 'fp8.*' for a block with a child that has hooks"):
        m(x)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_torch_compile_runs_around_it(device, kind):
    _, m = module_pair(device, **kind)
    torch._dynamo.reset()
    compiled = torch.compile(nn.Sequential(m, nn.ReLU()), backend="aot_eager")
    x = torch.randn(50, 32, device=device).bfloat16()
    assert_same_values(compiled(x).detach(), F.relu(m(x)).detach())
    compiled(x).sum().backward()
    assert m.up.weight.grad is not None


@pytest.mark.parametrize(
    "arguments,match,kind",
    [
        ({"precision": "fp16"}, "precision: got 'fp16', allowed: None, 'fp8', 'fp8_e4m3'", 0),
        ({"storage": "fp4"}, "storage: got 'fp4', allowed: None, 'fp8'", 0),
        ({"scaling": "block"}, "scaling: got 'block', allowed: 'tensor', 'row'", 0),
        ({"precision": "fp8", "storage": "fp8"}, "storage: got 'fp8' with precision='fp8'", 0),
        ({"storage": "fp8", "memory": "dense"}, "storage: got 'fp8' with memory='dense'", 0),
        ({"precision": "fp8"}, "x: got dtype torch.float32 with precision='fp8'; allowed: bf", 1),
    ],
)
def test_bad_arguments(arguments, match, kind):
    x, w_up, w_down = torch.randn(5, 16), torch.randn(32, 16), torch.randn(16, 32)
    with pytest.raises((ValueError, TypeError)[kind], match=re.escape(match)):
        bitsparse.ffn(x, w_up, w_down, **arguments)
    if kind == 0:
        with pytest.raises(ValueError, match=re.escape(match)):
            bitsparse.nn.FeedForward(16, 32, **arguments)
    else:
        with (
            torch.autocast("cpu", torch.float16),
            pytest.raises(TypeError, match=r"under autocast to torch\.float16; allowed: bfl"),
        ):
            bitsparse.ffn(x, w_up, w_down, **arguments)


# On a GPU.


@needs_cuda
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_hardware_products_are_those_of_the_emulation(dtype, scaling):
    """Also where dimensions are not multiples of 16, which are padded."""
    for m, n, k in ((64, 96, 128), (17, 33, 50), (1, 16, 16), (300, 8, 1000)):
        g = torch.Generator().manual_seed(m)
        a = fp8.quantize(torch.randn(m, k, generator=g), dtype, scaling)
        b = fp8.quantize(torch.randn(n, k, generator=g), E4M3, scaling)
        expected = fp8.product(a, b)
        on_gpu = [fp8.Quantized(q.data.cuda(), q.scale.cuda()) for q in (a, b)]
        actual = fp8.product(*on_gpu)
        assert actual.is_contiguous() and actual.shape == (m, n)
        assert error(actual.cpu(), expected) < 5e-3


@needs_cuda
def test_quantizing_gives_the_same_bits_on_a_gpu():
    t = torch.randn(100, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    for scaling in SCALINGS:
        for dtype in (E4M3, E5M2):
            a, b = fp8.quantize(t, dtype, scaling), fp8.quantize(t.cuda(), dtype, scaling)
            assert torch.equal(to_patterns(a.data), to_patterns(b.data.cpu()))
            assert torch.equal(a.scale, b.scale.cpu())


@needs_cuda
def test_older_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    t = inputs("relu", (16, 16), 32, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"compute capability 8.0.*allowed: 8.9 or more"):
        bitsparse.ffn(**t, precision="fp8")
