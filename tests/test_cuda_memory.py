"""What only a GPU can show about memory and waiting: nothing grows, nothing stalls."""

import threading

import pytest
import torch

import bitsparse
from bitsparse.activations import ACTIVATIONS
from conftest import needs_cuda
from helpers import assert_same_values

pytestmark = [needs_cuda, pytest.mark.gpu]


def block(activation, memory="compressed", d_model=256, d_ff=1024, **options):
    torch.manual_seed(0)
    return bitsparse.nn.FeedForward(
        d_model, d_ff, activation, bias=True, memory=memory, device="cuda",
        dtype=torch.bfloat16, **options,
    )  # fmt: skip


def tokens(count, d_model=256, seed=0):
    x = torch.randn(count, d_model, generator=torch.Generator().manual_seed(seed))
    return x.to("cuda", torch.bfloat16).requires_grad_()


def gradients(m, x, grad):
    y = m(x)
    wanted = [x, *m.parameters()]
    return [y.detach(), *torch.autograd.grad(y, wanted, grad)]


@pytest.mark.parametrize("options", [{"codec": c} for c in ("fast", "balanced", "small")]
                         + [{"tokens_per_chunk": 256}], ids=str)  # fmt: skip
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_synchronisation(activation, options):
    """Every call that waits for the device is an error here, but for events."""
    m, x = block(activation, **options), tokens(1024)
    grad = torch.randn_like(x)
    gradients(m, x, grad)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(m, x, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_event_is_waited_for(monkeypatch):
    """In forward, once; in backward never."""
    waits = []
    wait = torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda e: (waits.append(1), wait(e))[1])
    m, x = block("reglu"), tokens(1024)
    y = m(x)
    assert len(waits) == 1
    y.backward(torch.randn_like(y))
    assert len(waits) == 1


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("activation", ["relu", "reglu"])
def test_streams_side_by_side(activation, threads):
    """Two streams at once, from one thread or from two: the bits of plain PyTorch."""
    m, dense = block(activation), block(activation, "dense")
    xs = [tokens(3000 + 64 * i, seed=i) for i in range(2)]
    grads = [torch.randn_like(x) for x in xs]
    expected = [gradients(dense, x, g) for x, g in zip(xs, grads, strict=True)]
    for x, g in zip(xs, grads, strict=True):
        gradients(m, x, g)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    results = [[] for _ in xs]

    def work(i):
        with torch.cuda.stream(streams[i]):
            results[i].append(gradients(m, xs[i], grads[i]))

    def loop(i):
        for _ in range(20):
            work(i)

    if threads:
        workers = [threading.Thread(target=loop, args=(i,)) for i in range(2)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
    else:
        for _ in range(20):
            work(0)
            work(1)
    torch.cuda.synchronize()
    for e, several in zip(expected, results, strict=True):
        assert len(several) == 20
        for result in several:
            for a, b in zip(result, e, strict=True):
                assert_same_values(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tokens_per_chunk": 512}], ids=str)
def test_reserved_memory_stays_flat(options):
    """A thousand steps of changing density and sequence length, eight layers: what the allocator
    has reserved after the first hundred does not grow by more than a twentieth."""
    layers = [block("relu2", d_ff=2048, **options) for _ in range(8)]
    grads = torch.Generator().manual_seed(0)
    base = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16)

    def step(i):
        n = int(torch.randint(1024, 4097, (), generator=grads))
        shift = -2.5 * float(torch.rand((), generator=grads))
        with torch.no_grad():
            for m in layers:
                m.up.bias.fill_(shift)
        x = base[:n].requires_grad_()
        for m in layers:
            x = x + m(x)
        x.float().square().mean().backward()
        for m in layers:
            m.zero_grad(set_to_none=True)

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for i in range(100):
        step(i)
    after = torch.cuda.memory_reserved()
    for i in range(900):
        step(i)
    grown = torch.cuda.memory_reserved()
    live = bitsparse.memory_stats()
    print(f"reserved {after >> 20} MiB after 100 steps, {grown >> 20} MiB after 1,000")
    assert grown <= 1.05 * after
    assert live["live_compressed_bytes"] == 0


@pytest.mark.parametrize("activation", ["relu", "relu2", "reglu"])
def test_more_than_two_to_the_31_hidden_elements(activation):
    n, d_ff = 270_000, 8192  # 2.2e9
    if torch.cuda.mem_get_info()[0] < 100 << 30:
        pytest.skip("needs 100 GiB of free device memory")
    m, dense = (block(activation, memory, 64, d_ff) for memory in ("compressed", "dense"))
    x = torch.randn(n, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)
    expected = gradients(dense, x, grad)
    torch.cuda.empty_cache()
    actual = gradients(m, x, grad)
    assert m.kept.numel == n * d_ff > 2**31
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_same_values(a, e, f"result {i}")


def test_scratch_is_bounded_counted_and_freed():
    bitsparse.release_workspace()
    m = block("reglu")
    stream = torch.cuda.Stream()
    for i in range(50):
        x = tokens(256 + 64 * i)
        m(x).sum().backward()
        with torch.cuda.stream(stream):
            m(x).sum().backward()
    torch.cuda.synchronize()
    # Counts on their way to the host: their size does not depend on the tensors'.
    assert 0 < bitsparse.memory_stats()["scratch_bytes"] <= 1 << 20
    bitsparse.release_workspace()
    assert bitsparse.memory_stats()["scratch_bytes"] == 0
    m(tokens(256)).sum().backward()
