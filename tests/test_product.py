"""The product with the activation's gradient in its epilogue: when it is used, and its bits."""

from __future__ import annotations

import threading

import pytest
import torch

import bitsparse
from bitsparse import codings, layout
from bitsparse.activations import ACTIVATIONS, get_activation
from bitsparse.backends import get_backend, product
from bitsparse.backends.base import ROOT_LEAST, ROOT_LIMIT
from bitsparse.backends.optional import HAVE_TRITON
from bitsparse.backends.product import Outcome, Selector
from bitsparse.ops import block, library
from conftest import CUDA, needs_cuda
from helpers import assert_same_values, from_bits

SAME = Outcome(0, True, 1.0, 2.0)
BLANK = SAME._replace(telling=False)
HOPPER = CUDA and torch.version.hip is None and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
KERNEL_DEVICE = torch.device("cuda" if CUDA else "cpu")


def triton_product():
    if CUDA and not HOPPER:
        pytest.skip("the kernel is for Hopper GPUs")
    return pytest.importorskip("bitsparse.backends.triton_product", reason="needs Triton")


# ------------------------------------------------------------------------- which way is taken


class FakeTrial:
    def __init__(self, outcome=SAME, done=True):
        self.result, self.done = outcome, done

    def finished(self):
        return self.done

    def outcome(self):
        assert self.done
        return self.result


def answers(selector, outcomes, key="key", count=40):
    """What is answered, and trials that have these outcomes."""
    outcomes, said = iter(outcomes), []
    for _ in range(count):
        said.append(selector.ask(key))
        if said[-1] == "trial":
            selector.add(key, FakeTrial(next(outcomes)))
    return said


def test_selected_after_four_trials():
    selector = Selector()
    assert answers(selector, [SAME] * 4, count=7) == ["trial"] * 4 + ["fused"] * 3
    assert selector.used == 3
    assert selector.decisions()["key"].startswith("fused: 1.000 ms")


def test_times_of_the_first_trial_do_not_count():
    slow_first = [SAME._replace(fused=1e4), *[SAME] * 3]
    assert answers(Selector(), slow_first)[-1] == "fused"
    fast_first = [SAME, *[SAME._replace(fused=3.0)] * 3]
    assert answers(Selector(), fast_first)[-1] == "separate"
    one_outlier = [SAME, SAME, SAME._replace(fused=1e4), SAME]
    assert answers(Selector(), one_outlier)[-1] == "fused"


@pytest.mark.parametrize("position", range(4))
def test_one_other_bit_is_enough(position):
    outcomes = [SAME] * 4
    outcomes[position] = SAME._replace(differing=1)
    selector = Selector()
    said = answers(selector, outcomes)
    assert said == ["trial"] * (position + 1) + ["separate"] * (39 - position)
    assert "other bits" in selector.decisions()["key"]
    # Also where it was not certain that it would show.
    assert answers(Selector(), [BLANK._replace(differing=1)])[-1] == "separate"


def test_slower():
    selector = Selector()
    assert answers(selector, [SAME._replace(fused=2.0)] * 4)[4:] == ["separate"] * 36
    assert selector.used == 0
    assert selector.decisions()["key"].startswith("two passes: 2.000 ms")


def test_trials_that_show_nothing_become_rare_and_never_end():
    selector = Selector()
    said = answers(selector, [BLANK] * 30, count=4000)
    assert 10 <= said.count("trial") <= 14
    assert said.count("trial") + said.count("separate") == 4000
    assert selector.decisions()["key"] == "undecided: 0 of 4 trials"
    # Weights that are zero no longer.
    assert answers(selector, [SAME] * 4, count=9000)[-1] == "fused"


def test_nobody_waits_for_a_trial():
    selector = Selector()
    trials = [FakeTrial(done=False) for _ in range(4)]
    for trial in trials:
        assert selector.ask("key") == "trial"
        selector.add("key", trial)
    assert [selector.ask("key") for _ in range(10)] == ["separate"] * 10
    for trial in trials[1:]:
        trial.done = True
    assert selector.ask("key") == "separate"
    trials[0].done = True
    assert selector.ask("key") == "fused"


def test_failures():
    selector = Selector()
    assert selector.ask("a") == "trial"
    selector.fail("a", "no memory for a trial")
    assert selector.ask("a") == "separate"
    assert selector.decisions()["a"] == "two passes: no memory for a trial"
    assert selector.ask("b") == "trial"
    selector.fail("b", "broken", anywhere=True)
    assert [selector.ask(k) for k in "abc"] == ["separate"] * 3
    # A trial that was under way elsewhere.
    selector.add("b", FakeTrial())
    assert selector.ask("b") == "separate"


def test_each_key_by_itself_and_not_too_many():
    selector = Selector(most_keys=2)
    assert answers(selector, [SAME] * 4, "a")[-1] == "fused"
    assert answers(selector, [SAME._replace(differing=3)], "b")[-1] == "separate"
    assert answers(selector, [], "c") == ["separate"] * 40
    assert selector.ask("a") == "fused"


def test_threads():
    selector = Selector()
    said: list[str] = []

    def work():
        said.extend(answers(selector, [SAME] * 4, count=500))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert said.count("fused") == selector.used > 0
    # Those that were asked at the same time may each have begun one.
    assert 4 <= said.count("trial") <= 4 + 8
    assert len(said) == 4000


def test_the_choice_of_the_user(monkeypatch):
    monkeypatch.delenv("BITSPARSE_FUSED", raising=False)
    assert product._override_of_environment() is None
    monkeypatch.setenv("BITSPARSE_FUSED", "1")
    assert product._override_of_environment() is None
    monkeypatch.setenv("BITSPARSE_FUSED", "0")
    assert product._override_of_environment() == "never"
    monkeypatch.setenv("BITSPARSE_FUSED", "no")
    with pytest.raises(ValueError, match="BITSPARSE_FUSED: got 'no'; allowed: '0', '1'"):
        product._override_of_environment()
    with pytest.raises(ValueError, match="choice: got 'often'"), product.override("often"):
        pass


def test_overrides_end():
    before = product._override, product._selector
    with pytest.raises(KeyError), product.override("afresh"):
        assert product._selector is not before[1]
        raise KeyError
    assert (product._override, product._selector) == before


# --------------------------------------------------------------------------------- trials


class FakeEvent:
    def query(self):
        return True

    def elapsed_time(self, other):
        return 1.0


def product_in_order(a, b, out=None):
    """A product whose sums do not depend on the number of rows and columns: 32 terms at a time,
    these in double precision."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(0, a.shape[1], 32):
        total += torch.matmul(a[:, k : k + 32].double(), b[k : k + 32].double())
    result = total.to(a.dtype)
    return result if out is None else out.copy_(result)


class FakeKernels:
    """Like the module of the kernels, on the CPU; ``spoil`` changes what it stores."""

    def __init__(self, spoil=lambda gradient: None):
        self.spoil, self.calls = spoil, 0

    def product_gradient(self, squared, grad, w_down, hidden):
        self.calls += 1
        factor = 2 * hidden.sqrt() if squared else 1.0
        gradient = torch.where(hidden == 0, 0, product_in_order(grad, w_down) * factor)
        self.spoil(gradient)
        hidden.copy_(gradient)

    def count_differences(self, got, wanted, counts):
        assert got.shape == wanted.shape
        assert got.is_contiguous()
        assert wanted.is_contiguous()
        same = (got.view(torch.int16) == wanted.view(torch.int16)) | (got.isnan() & wanted.isnan())
        counts[0] += (~same).sum()
        counts[1] += ((wanted == 0) | wanted.isnan()).sum()


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Trials without a GPU."""
    empty = torch.empty

    def unpinned(*args, pin_memory=False, **kwargs):
        return empty(*args, **kwargs)

    monkeypatch.setattr(product, "_LEAST_TELLING", 1)  # smaller samples
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch, "mm", product_in_order)
    monkeypatch.setattr(product, "_record", lambda device: FakeEvent())
    monkeypatch.setattr(product, "_applies", lambda *args: True)


def trial_inputs(squared, tokens=1024, d_out=256, d_ff=1024):
    g = torch.Generator().manual_seed(0)
    grad = torch.randn(tokens, d_out, generator=g).bfloat16()
    w_down = torch.randn(d_out, d_ff, generator=g).bfloat16()
    r = torch.randn(tokens, d_ff, generator=g).relu().bfloat16()
    return grad, w_down, r * r if squared else r


def run(kernels, squared, grad, w_down, hidden):
    """The gradient, and the outcome of the trial."""
    trials = []
    selector = Selector()
    selector.add = lambda key, trial: trials.append(trial)
    rows = hidden.clone()
    wanted = product_in_order(grad, w_down) * (2 * hidden.sqrt() if squared else 1.0)
    wanted = torch.where(hidden == 0, 0, wanted)

    def two_passes():
        return rows.copy_(wanted).view(-1), None

    activation = get_activation("relu2" if squared else "relu")
    key = product._key(activation, grad, w_down, rows)
    assert selector.ask(key) == "trial"
    gate, up = product._try(selector, key, kernels, activation, grad, w_down, rows, two_passes)
    assert up is None
    assert_same_values(gate.view_as(wanted), wanted)
    (trial,) = trials
    assert trial.finished()
    held = [v for v in vars(trial).values() if isinstance(v, torch.Tensor)]
    assert sum(t.nbytes for t in held) < 100
    return trial.outcome()


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("tokens", [100, 128, 900])
def test_trial(on_the_cpu, squared, tokens):
    kernels = FakeKernels()
    state = torch.get_rng_state()
    outcome = run(kernels, squared, *trial_inputs(squared, tokens))
    assert outcome == Outcome(0, True, 1.0, 1.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert kernels.calls == layout.ceil_div(tokens, 128) + 2


@pytest.mark.parametrize("squared", [False, True])
def test_trial_that_tells_nothing(on_the_cpu, squared):
    grad, w_down, hidden = trial_inputs(squared)
    assert run(FakeKernels(), squared, grad, w_down, hidden).telling
    # Whole numbers: exact in any order.
    assert not run(FakeKernels(), squared, (4 * grad).round(), (4 * w_down).round(), hidden).telling
    assert not run(FakeKernels(), squared, torch.ones_like(grad), w_down, hidden).telling
    assert not run(FakeKernels(), squared, grad, torch.zeros_like(w_down), hidden).telling
    # Tokens without a gradient: what the library does for them is not seen.
    for value in (0.0, float("nan")):
        some = grad.clone()
        some[-10:] = value
        assert not run(FakeKernels(), squared, some, w_down, hidden).telling
        some[-10:-1] = grad[-10:-1]
        assert run(FakeKernels(), squared, some, w_down, hidden).telling


@pytest.mark.parametrize("squared", [False, True])
def test_trial_that_finds_other_bits(on_the_cpu, squared):
    inputs = trial_inputs(squared, d_out=16)

    def last(gradient):  # in the last row of each call
        gradient[-1, -1] = 1e-30

    # 8 parts of the whole product, and the gradient itself.
    assert run(FakeKernels(last), squared, *inputs).differing == 9

    def where_hidden_is_zero(gradient):
        gradient[gradient == 0] = -0.0

    assert run(FakeKernels(where_hidden_is_zero), squared, *inputs).differing > 0


@pytest.mark.parametrize("when", ["begins", "ends"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("no such thing")])
def test_trial_that_fails(on_the_cpu, when, error):
    grad, w_down, hidden = trial_inputs(True, d_out=16)
    last_call = layout.ceil_div(grad.shape[0], 128) + 2

    def spoil(gradient):
        if when == "begins" or kernels.calls == last_call:
            raise error

    kernels = FakeKernels(spoil)
    wanted, selector = torch.ones_like(hidden), Selector()

    def step(tokens):
        activation = get_activation("relu2")
        key = product._key(activation, grad[:tokens], w_down, hidden[:tokens])
        if selector.ask(key) == "separate":
            return "separate"
        args = (kernels, activation, grad[:tokens], w_down, hidden[:tokens].clone())
        gate, _ = product._try(selector, key, *args, lambda: (wanted.view(-1), None))
        assert gate.data_ptr() == wanted.data_ptr()
        return "trial"

    if isinstance(error, torch.OutOfMemoryError):
        assert step(1024) == "trial"
        assert step(1024) == "separate"
        assert selector.ask("other") == "trial"
    else:
        with pytest.warns(RuntimeWarning, match="no such thing"):
            assert step(1024) == "trial"
        assert step(1024) == step(500) == "separate"  # not tried again with other sizes


def test_not_without_hopper():
    """On CPUs nothing of it is used, whatever is asked for."""
    before = product.uses()
    for name in ACTIVATIONS:
        with product.override("always"):
            m = bitsparse.nn.FeedForward(16, 64, name, dtype=torch.bfloat16)
            m(torch.randn(8, 16, dtype=torch.bfloat16)).sum().backward()
    assert product.uses() == before


# ------------------------------------------------------------------------- what can be undone


EDGES = {
    "zero": (0.0, False),
    "minus zero": (-0.0, False),
    "negative": (-(2.0**70), False),
    "2**-60": (2.0**-60, False),
    "below 2**-60": (2.0**-60 * (1 - 2.0**-8), True),
    "below 2**60": (2.0**60 * (1 - 2.0**-8), False),
    "2**60": (2.0**60, True),
    "NaN": (float("nan"), True),
    "inf": (float("inf"), True),
    "-inf": (-float("inf"), False),
    "subnormal": (2.0**-133, True),
    "smallest normal": (2.0**-126, True),
    "one": (1.0, False),
}


def outside(name, gate, statistics=True, backend=None):
    backend = backend or block.backend_for(gate.device)
    activation = get_activation(name)
    up = torch.full_like(gate, -1.0) if activation.gated else None
    geometry = layout.geometry(gate.shape)
    _, survey = backend.activate(geometry, activation, gate.clone(), up, False, statistics)
    return survey.counts(survey.totals.tolist())


@pytest.mark.parametrize("edge", EDGES)
def test_every_backend_tells_what_cannot_be_undone(backend_device, edge):
    value, expected = EDGES[edge]
    for shape, at in (((70, 64), 69 * 64 + 63), ((2, 65), 0)):
        gate = torch.linspace(-1, 3, shape[0] * shape[1]).view(shape).bfloat16()
        gate.view(-1)[at] = value
        found = outside("relu2", gate.to(backend_device), statistics=at > 0)
        wanted = outside("relu2", gate, at > 0, get_backend("reference"))
        assert found.outside == wanted.outside == expected
        assert found.nnz == wanted.nnz


def test_only_squared_relu_of_bfloat16_tells(backend_device):
    gate = torch.full((2, 64), 2.0**-70)
    for name in ACTIVATIONS:
        for dtype in (torch.float32, torch.bfloat16):
            counts = outside(name, gate.to(backend_device, dtype))
            assert counts.outside == (name == "relu2" and dtype == torch.bfloat16)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_patterns_one_by_one(name):
    """Every pattern that is inside, in one tensor; many of the others, one at a time."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    inside = (patterns <= 0) | ((patterns >= 2.0**-60) & (patterns < 2.0**60))
    gate = patterns[inside].cuda()
    gate = gate[: gate.numel() // 64 * 64].view(-1, 64)
    assert not outside("relu2", gate, backend=get_backend(name)).outside
    for value in patterns[~inside][::7].cuda():
        assert outside("relu2", value.repeat(1, 64), backend=get_backend(name)).outside


@pytest.mark.parametrize("value", [1.0, 2.0**-61])
def test_kept_says_so(value):
    gate = torch.full((4, 16), value).bfloat16()
    w_down = torch.zeros(8, 16).bfloat16()
    for name in ("relu", "relu2"):
        activation = get_activation(name)
        _, kept = block.down_compressed(
            activation, gate.clone(), None, w_down, None, False, "fast", True
        )
        expected = name == "relu2" and value == 1.0
        assert kept.roots == expected
        tensors, restore = block.take_apart(kept)
        assert restore(tensors).roots == expected
        parts = library._take_apart(activation, kept)
        again = library._put_together(activation, kept.support.geometry, kept.dtype, parts)
        assert again.roots == expected


def undoable():
    return from_bits(torch.arange(ROOT_LEAST, ROOT_LIMIT), torch.bfloat16)


def test_squares_can_be_undone():
    """Every r of the range: sqrt(r * r rounded), rounded, is r, also by the kernel's operations,
    whose reciprocal root is off by less than 4 units in the last place."""
    r = undoable()
    assert r[0] == 2.0**-60
    assert r[-1] < 2.0**60
    assert r.numel() == 120 * 128
    square = r * r
    normal = torch.finfo(torch.bfloat16)
    assert bool(((square >= normal.tiny) & (square <= normal.max) & (2 * r <= normal.max)).all())
    assert torch.equal(square.float().sqrt().bfloat16(), r)
    exact = square.double().rsqrt().float().view(torch.int32)
    for off in range(-4, 5):
        root = square.float() * (exact + off).view(torch.float32)
        assert torch.equal(root.bfloat16(), r)
    # Where the unrounded root would not do.
    assert not torch.equal(square.float().sqrt(), r.float())


if HAVE_TRITON and (HOPPER or not CUDA):
    import triton
    import triton.language as tl

    from bitsparse.backends.triton_product import _derive

    @triton.jit
    def derive_kernel(grad_ptr, hidden_ptr, out_ptr, SQUARED: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        grad, hidden = tl.load(grad_ptr + at), tl.load(hidden_ptr + at)
        tl.store(out_ptr + at, _derive(grad, hidden, SQUARED))


GRADS = [1.0, -1.0, 0.0, -0.0, float("nan"), float("inf"), -float("inf"), 3e38, 1e-38, -(2.0**-133),
         1 + 2.0**-8, 1 + 2.0**-9, 1 + 2.0**-8 + 2.0**-20, 2.0**-134, 0.3, -7e-20]  # fmt: skip


@pytest.mark.parametrize("squared", [False, True])
def test_epilogue_of_every_value(squared):
    """``_derive`` against autograd, for every value of the range and every kind of gradient."""
    triton_product()
    if squared:
        r = torch.cat([torch.zeros(1), -torch.zeros(1), undoable().float()]).bfloat16()
    else:
        patterns = from_bits(torch.arange(1 << 16), torch.bfloat16)
        r = patterns[(patterns >= 0) | patterns.isnan()]  # -0.0 too
    grads = torch.tensor(GRADS)
    r = r.repeat_interleave(len(grads))
    grad = grads.repeat(r.numel() // len(grads))
    size = layout.ceil_div(r.numel(), 1024) * 1024
    r = torch.nn.functional.pad(r, (0, size - r.numel()))
    grad = torch.nn.functional.pad(grad, (0, size - grad.numel())).to(KERNEL_DEVICE)
    leaf = r.to(KERNEL_DEVICE).requires_grad_()
    result = torch.relu(leaf)
    hidden = result.square() if squared else result
    hidden.backward(grad.bfloat16())
    out = torch.empty_like(leaf, requires_grad=False)
    derive_kernel[(size // 1024,)](
        grad, hidden.detach().view(torch.int16), out.view(torch.int16), squared, BLOCK=1024
    )
    assert_same_values(out, leaf.grad)


# -------------------------------------------------------------------------------- the kernel


def exact(tokens, d_out, d_ff, squared, device, seed=0):
    """Gradient, weight, and pre-activations: sums are exact in any order, or NaN or infinite."""
    g = torch.Generator().manual_seed(seed)
    grad = torch.randint(-4, 5, (tokens, d_out), generator=g).bfloat16()
    w_down = torch.randint(-4, 5, (d_out, d_ff), generator=g).bfloat16()
    grad[0] = 0
    grad[tokens // 3] = -0.0
    grad[tokens // 2, 0] = float("nan")
    grad[tokens // 2 + 1, d_out - 1] = float("inf")
    grad[tokens - 1] *= 2.0**-120
    if squared:
        patterns = torch.randint(ROOT_LEAST, ROOT_LIMIT, (tokens, d_ff), generator=g)
    else:
        patterns = torch.randint(0, 1 << 15, (tokens, d_ff), generator=g)
    pre = from_bits(patterns, torch.bfloat16)
    pre[torch.rand(tokens, d_ff, generator=g) < 0.3] = 0.0
    pre[torch.rand(tokens, d_ff, generator=g) < 0.3] *= -1
    return grad.to(device), w_down.to(device), pre.to(device)


SHAPES = [(4, 8, 8), (130, 72, 264), (256, 64, 256), (300, 8, 520)]
if CUDA:
    SHAPES += [(20000, 264, 3080), (5001, 1024, 4096), (128, 4096, 256)]


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_the_kernel(shape, squared):
    kernels = triton_product()
    grad, w_down, pre = exact(*shape, squared, KERNEL_DEVICE)
    leaf = pre.clone().requires_grad_()
    r = torch.relu(leaf)
    hidden = r.square() if squared else r
    hidden.backward((grad.float() @ w_down.float()).bfloat16())
    rows = torch.where(leaf > 0, hidden, hidden * leaf.isnan()).detach().clone()
    kernels.product_gradient(squared, grad, w_down, rows)
    assert_same_values(rows, leaf.grad)


def test_differences_are_counted():
    kernels = triton_product()
    nan, inf = float("nan"), float("inf")
    got = torch.tensor([1.0, nan, 0.0, -0.0, inf, nan, 1.0, 0.0] * 1000).bfloat16()
    wanted = torch.tensor([1.0, -nan, -0.0, -0.0, -inf, 1.0, nan, 0.0] * 1000).bfloat16()
    counts = torch.ones(2, dtype=torch.int64, device=KERNEL_DEVICE)
    kernels.count_differences(got.to(KERNEL_DEVICE), wanted.to(KERNEL_DEVICE), counts)
    assert counts.tolist() == [1 + 4000, 1 + 5000]


@pytest.mark.skipif(CUDA, reason="on a GPU without the interpreter")
@pytest.mark.parametrize("name", ["relu", "relu2"])
def test_a_block_with_it(name, monkeypatch):
    """The whole way through a block, interpreted, with sums that are exact in any order."""
    triton_product()
    applied = product._applies

    def applies(activation, kept, grad, w_down, rows):
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        try:
            return applied(activation, kept, grad, w_down, rows)
        finally:
            monkeypatch.setattr(torch.Tensor, "is_cuda", torch._C.TensorBase.is_cuda)

    monkeypatch.setattr(product, "_applies", applies)
    monkeypatch.setattr(product, "_capability", lambda device: 9)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    if not hasattr(torch._C, "_cuda_tunableop_is_enabled"):
        monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    kernels, calls = triton_product(), []
    run_kernel = kernels.product_gradient
    monkeypatch.setattr(
        kernels, "product_gradient", lambda *args: (calls.append(args), run_kernel(*args))
    )
    g = torch.Generator().manual_seed(0)

    def whole(*shape):
        return torch.randint(-2, 3, shape, generator=g).bfloat16()

    x, w_up, w_down, grad = whole(40, 16), whole(72, 16), whole(16, 72), whole(40, 16)
    results = []
    for memory, choice in (("dense", "never"), ("compressed", "never"), ("compressed", "always")):
        leaves = [t.clone().requires_grad_() for t in (x, w_up, w_down)]
        with product.override(choice):
            bitsparse.ffn(*leaves, activation=name, memory=memory).backward(grad)
        results.append([t.grad for t in leaves])
    assert len(calls) == 1
    for result in results[1:]:
        for got, wanted in zip(result, results[0], strict=True):
            assert_same_values(got, wanted)


def test_first_pass_compiles(tmp_path, monkeypatch):
    """NVRTC: the first pass that tells what cannot be undone."""
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    from bitsparse.backends.cuda import compile_kernel

    monkeypatch.setenv("BITSPARSE_CACHE_DIR", str(tmp_path))
    for statistics in ("false", "true"):
        name = f"activate<7, false, true, false, false, {statistics}>"
        assert len(compile_kernel(name, (9, 0)).code) > 0


# ------------------------------------------------------------------------------------- on GPUs


def steps(name, memory, count, shape=(8192, 512, 2048), seed=0, **options):
    """Losses, and parameters after so many steps of SGD."""
    tokens, d_model, d_ff = shape
    torch.manual_seed(seed)
    blocks = [
        bitsparse.nn.FeedForward(
            d_model, d_ff, name, memory=memory, device="cuda", dtype=torch.bfloat16, **options
        )
        for _ in range(2)
    ]
    parameters = [p for b in blocks for p in b.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    x = torch.randn(tokens, d_model, device="cuda", dtype=torch.bfloat16)
    target = torch.randn_like(x)
    losses = []
    for _ in range(count):
        y = x
        for b in blocks:
            y = y + b(torch.nn.functional.rms_norm(y, (d_model,)))
        loss = torch.nn.functional.mse_loss(y.float(), target.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        torch.cuda.synchronize()  # trials have finished
    return [torch.stack(losses), *(p.detach() for p in parameters)]


@needs_cuda
@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["relu", "relu2"])
@pytest.mark.parametrize("fast", [True, False])
def test_training_with_it_has_the_same_bits(name, fast, monkeypatch):
    """Four trials, and then it is used where the bits are the same, if it is faster."""
    triton_product()
    outcome = product._DeviceTrial.outcome
    time = 0.0 if fast else 1e9
    monkeypatch.setattr(
        product._DeviceTrial, "outcome", lambda self: outcome(self)._replace(fused=time)
    )
    expected = steps(name, "dense", 8)
    with product.override("afresh"):
        results = steps(name, "compressed", 8)
        (decision,) = product.decisions().values()
        used = product.uses()
    for got, wanted in zip(results, expected, strict=True):
        assert_same_values(got, wanted)
    # 16 backward passes, of them 4 with trials.
    if "other bits" in decision:
        assert used == 0
    else:
        assert decision.startswith("fused" if fast else "two passes")
        assert used == (12 if fast else 0)


@needs_cuda
@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["relu", "relu2"])
def test_no_stall_no_random_numbers_and_little_memory(name):
    triton_product()
    m = bitsparse.nn.FeedForward(512, 4096, name, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16384, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)

    def peak():
        y = m(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y.backward(grad)
        return torch.cuda.max_memory_allocated() - before

    with product.override("afresh"):
        peak()  # compiles, and the page-locked memory
        torch.cuda.synchronize()
        state = torch.cuda.get_rng_state()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with_trial = peak()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(torch.cuda.get_rng_state(), state)
        assert product.decisions()
    with product.override("never"):
        without = peak()
    # A sixteenth of the hidden tensor, and what the allocator rounds.
    assert with_trial <= without + 16384 * 4096 * 2 // 16 + 2**22


@needs_cuda
@needs_hopper
@pytest.mark.gpu
def test_no_memory_for_a_trial(monkeypatch):
    triton_product()

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(product._DeviceTrial, "_sample", full)
    expected = steps("relu2", "dense", 2)
    with product.override("afresh"):
        results = steps("relu2", "compressed", 2)
        assert list(product.decisions().values()) == ["two passes: no memory for a trial"]
    for got, wanted in zip(results, expected, strict=True):
        assert_same_values(got, wanted)


@needs_cuda
@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("codec", codings.POLICIES)
def test_deterministic_algorithms_and_hooks(codec):
    """Another key, and the same bits; what is saved may be elsewhere in the meantime."""
    triton_product()
    expected = steps("relu2", "dense", 6)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with product.override("afresh"), torch.autograd.graph.save_on_cpu():
            results = steps("relu2", "compressed", 6, codec=codec)
    finally:
        torch.use_deterministic_algorithms(False)
    for got, wanted in zip(results, expected, strict=True):
        assert_same_values(got, wanted)
