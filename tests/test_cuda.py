"""What only a GPU can show: no stalls, peak memory, streams, devices, very large tensors."""

import pytest
import torch

import bitsparse
from bitsparse.activations import ACTIVATIONS
from conftest import needs_cuda
from helpers import assert_same_values

pytestmark = [needs_cuda, pytest.mark.gpu]


def module(activation, d_model=256, d_ff=2048, dtype=torch.bfloat16, bias=False):
    torch.manual_seed(0)
    return bitsparse.nn.FeedForward(
        d_model, d_ff, activation, bias=bias, device="cuda", dtype=dtype
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_device_synchronisation(activation):
    m = module(activation)
    x = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    m(x).backward(grad)  # compiles the kernels
    m.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        m(x).backward(grad)
        with torch.autocast("cuda", torch.bfloat16):
            y = m(x)
        y.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_relu_of_every_pattern_is_that_of_torch():
    """Also for NaN payloads and -0.0: what the kernels compute is what torch.relu gives here."""
    from bitsparse import dtypes, layout
    from bitsparse.backends import get_backend

    act = ACTIVATIONS["relu"]
    backend = get_backend("triton")
    for dtype in (torch.bfloat16, torch.float16):
        z = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype)
        geometry = layout.geometry(z.shape)
        hidden, survey = backend.activate(geometry, act, z.clone(), None, False, True)
        expected = torch.relu(z)
        differ = dtypes.to_patterns(hidden) != dtypes.to_patterns(expected)
        assert not differ.any(), z[differ][:5]
        nnz = survey.counts(survey.totals.tolist()).nnz
        assert nnz == int(((z > 0) | z.isnan()).sum())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_stays_allocated_is_the_compressed_storage(activation):
    m = module(activation, 64, 4096)
    x = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16)
    m(x).sum().backward()
    for p in m.parameters():
        p.grad.zero_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = m(x)
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    # The allocator may leave up to 1 MiB unsplit at the end of each of the (up to 5) blocks.
    assert kept <= m.kept.nbytes + (5 << 20)
    assert kept < (0.6 if ACTIVATIONS[activation].gated else 0.75) * m.kept.dense_nbytes
    hidden = 8192 * 4096 * 2
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y.backward(torch.ones_like(y))
    peak = torch.cuda.max_memory_allocated() - before
    buffers = 1 if not ACTIVATIONS[activation].gated else 2
    assert peak < (buffers + 0.25) * hidden


def test_forward_peak_is_one_dense_tensor_for_relu():
    m = module("relu", 64, 4096)
    x = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16)
    m(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = m(x)
    hidden = 8192 * 4096 * 2
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.05 * hidden + 2 * m.kept.nbytes + y.nbytes + (16 << 20)


def test_side_streams():
    """Forward on one stream, backward from another: as PyTorch's own operations."""
    results = []
    for memory in ("dense", "compressed"):
        m = module("reglu")
        m.memory = memory
        x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(1))
        x = x.to("cuda", torch.bfloat16)
        streams = [torch.cuda.Stream() for _ in range(3)]
        outs = []
        for s in streams:
            s.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(s):
                outs.append(m(x).float().square().sum())
        for s in streams:
            torch.cuda.current_stream().wait_stream(s)
        sum(outs).backward()
        torch.cuda.synchronize()
        results.append([p.grad for p in m.parameters()])
    for a, b in zip(*results, strict=True):
        assert_same_values(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_launches_on_the_tensors_device():
    x = torch.randn(100, 200, device="cuda:1").relu()
    assert torch.cuda.current_device() == 0
    c = bitsparse.compress(x)
    assert c.device == x.device
    assert torch.equal(c.to_dense(), x)


def test_more_than_two_to_the_31_elements():
    n = 2**31 + 4096 * 3 + 5
    if torch.cuda.mem_get_info()[0] < 40 * n // 4:
        pytest.skip("needs about 22 GB of free device memory")
    x = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    spots = torch.tensor([0, 5, 2**31 - 1, 2**31, 2**31 + 1, n - 4100, n - 1], device="cuda")
    x[spots] = torch.arange(1, 8, device="cuda", dtype=torch.bfloat16)
    c = bitsparse.compress(x)
    assert c.nnz == 7
    assert torch.equal(c.to_dense().view(torch.int16), x.view(torch.int16))
    del c
    # Dense enough that ranks pass 2**31 / 15, where bit addresses need 64 bits.
    x.view(torch.int16).random_(0, 1 << 15)
    x.view(torch.int16)[::2] = 0
    c = bitsparse.compress(x, values="unsigned")
    assert torch.equal(c.to_dense().view(torch.int16), x.view(torch.int16))
    del c
    x.view(torch.int16).random_(1, 1 << 15)  # every element: ranks pass 2**31
    c = bitsparse.compress(x, support="flat", values="unsigned")
    assert c.nnz == n
    assert torch.equal(c.to_dense().view(torch.int16), x.view(torch.int16))


@pytest.mark.parametrize("activation", ["relu2", "reglu"])
def test_graph_capture_is_refused_before_anything_breaks(activation):
    m = module(activation)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    m(x).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(graph):
        m(x)
    torch.cuda.synchronize()
    m(x).sum().backward()
    torch.cuda.synchronize()


def test_buffers_at_odd_addresses():
    """Parts that someone else made may be views that start anywhere."""
    x = torch.where(torch.rand(256, 128, device="cuda") < 0.1, 1.5, 0).to(torch.bfloat16)
    for support in ("flat", "bucketed"):
        c = bitsparse.compress(x, support, "exponent")
        shifted = {}
        for name, buffer in c.buffers.items():
            wide = buffer.new_zeros(buffer.numel() + 1)
            wide[1:] = buffer
            shifted[name] = wide[1:]
        other = bitsparse.BitSparseTensor.from_buffers(
            c.shape, c.dtype, c.nnz, c.support, c.values, shifted
        )
        assert torch.equal(other.to_dense(), x)
