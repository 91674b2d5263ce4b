"""The storage format: every bit of every dtype, any shape, any density, on every backend."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitsparse
from bitsparse import codings, dtypes, layout
from helpers import assert_same_bits, from_bits, random_sparse

CODINGS = [("auto", "auto"), ("flat", "raw"), ("flat", "auto"), ("auto", "dense")]
NARROW = [d for d in dtypes.SUPPORTED_DTYPES if d.itemsize <= 2]
HEADER = 64


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("support,values", CODINGS)
def test_every_pattern_survives(backend_device, dtype, support, values):
    generator = torch.Generator().manual_seed(1)
    every = torch.arange(1 << 8 * dtype.itemsize)
    for density in (1.0, 0.3):
        mixed = every[torch.randperm(every.numel(), generator=generator)]
        mixed = torch.where(torch.rand(mixed.shape, generator=generator) < density, mixed, 0)
        x = from_bits(mixed, dtype).to(backend_device)
        c = bitsparse.compress(x, support=support, values=values)
        assert_same_bits(c.to_dense(), x)
        assert c.nnz == int((mixed != 0).sum())


@pytest.mark.parametrize("dtype", dtypes.SUPPORTED_DTYPES, ids=str)
def test_unsigned_keeps_every_pattern_without_a_sign(backend_device, interpreted, dtype):
    bits = 8 * dtype.itemsize - 1
    count = min(1 << bits, 8192 if interpreted else 1 << 15)
    step = max((1 << bits) // count, 1)
    x = from_bits(torch.arange(0, 1 << bits, step), dtype).to(backend_device)
    for part in (x, x[1:], x[: 4096 + 33], x[:1], x[:2]):
        c = bitsparse.compress(part, values="unsigned")
        assert c.values == "unsigned"
        assert_same_bits(c.to_dense(), part)


@pytest.mark.parametrize("dtype", dtypes.SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(0,), (), (1,), (31,), (32,), (33,), (3, 0, 5), (4095,), (4096,), (4097,), (3, 7, 129)],
    ids=str,
)
def test_any_shape(backend_device, dtype, shape):
    for density, signed in ((0.0, False), (0.1, True), (0.5, False), (1.0, False)):
        x = random_sparse(shape, density, dtype, signed=signed).to(backend_device)
        for support, values in CODINGS:
            c = bitsparse.compress(x, support=support, values=values)
            assert (c.shape, c.dtype, c.device) == (x.shape, x.dtype, x.device)
            assert_same_bits(c.to_dense(), x)
            assert_same_bits(bitsparse.decompress(c), x)
        assert bitsparse.compress(x).nbytes <= x.numel() * x.element_size() + HEADER


def test_any_strides(backend_device):
    base = random_sparse((33, 70), 0.3, torch.float32, signed=True).to(backend_device)
    views = [base.t(), base[::2, ::3], base[5:20], base[:, 1], base[:1].expand(9, 70), base.flip(0)]
    views.append(torch._neg_view(base))
    for view in views:
        c = bitsparse.compress(view)
        assert_same_bits(c.to_dense(), view.resolve_neg().clone())
        assert c.to_dense().is_contiguous()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_patterns(data):
    """float32 has too many patterns to try all: random words, runs of zeros, every length."""
    word = st.one_of(
        st.just(0),
        st.integers(0, 2**32 - 1),
        st.sampled_from([0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 1]),
    )
    words = data.draw(st.lists(word, max_size=200))
    zeros = data.draw(st.integers(0, 5000))
    x = from_bits(torch.tensor(words + [0] * zeros + words[::-1], dtype=torch.int64), torch.float32)
    for support, values in CODINGS:
        assert_same_bits(bitsparse.compress(x, support=support, values=values).to_dense(), x)


@pytest.mark.parametrize("values", codings.VALUES)
def test_backends_store_the_same_bits(backend_device, values):
    """The stored buffers, not only the decoded tensor, equal the reference's."""
    from bitsparse.backends import force_backend

    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2):
        x = random_sparse((41, 333), 0.2, dtype)
        ours = bitsparse.compress(x.to(backend_device), support="flat", values=values)
        with force_backend("reference"):
            expected = bitsparse.compress(x, support="flat", values=values)
        assert ours.buffers.keys() == expected.buffers.keys()
        for name, buffer in expected.buffers.items():
            assert torch.equal(ours.buffers[name].cpu(), buffer), name


def test_reference_follows_the_layout():
    """Against the written format, worked out bit by bit in Python."""
    x = random_sparse((5000,), 0.3, torch.bfloat16)
    patterns = [p & 0xFFFF for p in dtypes.to_patterns(x).tolist()]
    from bitsparse.backends import force_backend

    with force_backend("reference"):
        c = bitsparse.compress(x, support="flat", values="unsigned")
    mask = [w & 0xFFFFFFFF for w in c.buffers["mask"].tolist()]
    stream = sum((w & 0xFFFFFFFF) << (32 * i) for i, w in enumerate(c.buffers["values"].tolist()))
    assert len(mask) == -(-5000 // 32)
    rank = 0
    for i, pattern in enumerate(patterns):
        if i % layout.TILE == 0:
            assert c.buffers["offsets"][i // layout.TILE] == rank
        assert (mask[i // 32] >> (i % 32)) & 1 == (pattern != 0)
        if pattern:
            assert (stream >> (15 * rank)) & 0x7FFF == pattern
            rank += 1
    assert stream >> (15 * rank) == 0
    assert rank == c.nnz


def test_auto_takes_the_smallest(backend_device):
    def kind(x):
        c = bitsparse.compress(x.to(backend_device))
        return c.support, c.values

    n = (64, 128)
    assert kind(random_sparse(n, 0.2, torch.bfloat16)) == ("flat", "unsigned")
    assert kind(random_sparse(n, 0.2, torch.bfloat16, signed=True)) == ("flat", "raw")
    assert kind(random_sparse(n, 1.0, torch.bfloat16)) == ("full", "dense")
    assert kind(random_sparse(n, 1.0, torch.float8_e4m3fn, signed=True)) == ("full", "dense")
    one_negative = random_sparse(n, 0.2, torch.bfloat16)
    one_negative[3, 5] = -0.0
    assert kind(one_negative) == ("flat", "raw")


def test_sizes_are_those_of_the_layout(device):
    x = random_sparse((100, 1000), 0.1, torch.bfloat16).to(device)
    c = bitsparse.compress(x, support="flat", values="unsigned")
    n = x.numel()
    expected = 4 * layout.num_mask_words(n) + 4 * layout.num_tiles(n)
    expected += 4 * layout.num_packed_words(c.nnz, 15)
    assert c.nbytes == expected == sum(b.untyped_storage().nbytes() for b in c.buffers.values())
    assert c.bits_per_element == 8 * expected / n
    assert c.density == c.nnz / n


def test_the_result_is_independent_of_the_input(device):
    for density in (0.2, 1.0):
        x = random_sparse((50, 100), density, torch.float32).to(device)
        before = x.clone()
        c = bitsparse.compress(x)
        x.fill_(7)
        assert_same_bits(c.to_dense(), before)
        c.to_dense().fill_(9)
        assert_same_bits(c.to_dense(), before)


def test_copy_pickle_and_move(device):
    x = random_sparse((50, 100), 0.2, torch.bfloat16).to(device)
    c = bitsparse.compress(x)
    for other in (copy.copy(c), copy.deepcopy(c), pickle.loads(pickle.dumps(c)), c.to("cpu")):
        assert_same_bits(other.to_dense().cpu(), x.cpu())
        assert (other.nnz, other.support, other.values) == (c.nnz, c.support, c.values)
    file = io.BytesIO()
    torch.save(c, file)
    file.seek(0)
    assert_same_bits(torch.load(file, weights_only=False).to_dense(), x)
    assert c.to(device) is c
    assert "flat" in repr(c)


@pytest.mark.parametrize("values", ["raw", "unsigned", "dense"])
def test_damaged_parts_are_refused(values):
    x = random_sparse((50, 101), 0.2, torch.bfloat16)
    c = bitsparse.compress(x, values=values)
    names = ("shape", "dtype", "nnz", "support", "values", "buffers")
    good = {name: getattr(c, name) for name in names}
    assert_same_bits(bitsparse.BitSparseTensor.from_buffers(**good).to_dense(), x)

    def refused(match, **changes):
        with pytest.raises(ValueError, match=match):
            bitsparse.BitSparseTensor.from_buffers(**{**good, **changes})

    refused("dtype", dtype=torch.int16)
    refused("nnz", nnz=-1)
    refused("nnz", nnz=10**9)
    refused("nnz|values", nnz=c.nnz - 1)
    refused("shape|nnz|mask|values", shape=torch.Size((50, 102)))
    refused("shape", shape=(-1, 5))
    refused("support", support="nonsense")
    refused("values|buffers", values="nonsense")
    for name, buffer in c.buffers.items():
        refused(name, buffers={**c.buffers, name: buffer[:-1]})
        refused(name, buffers={**c.buffers, name: buffer.to(torch.int64)})
        refused("buffers", buffers={k: v for k, v in c.buffers.items() if k != name})
        refused("buffers", buffers={**c.buffers, name: torch.stack([buffer, buffer], 1)[:, 0]})
    if values != "dense":
        offsets = c.buffers["offsets"].clone()
        offsets[1] += 1
        refused("offsets", buffers={**c.buffers, "offsets": offsets})
        mask = c.buffers["mask"].clone()
        mask[-1] |= -(1 << 31)  # a position after the last element
        refused("mask", buffers={**c.buffers, "mask": mask})
        mask = c.buffers["mask"].clone()
        mask[3] ^= 1
        refused("nnz", buffers={**c.buffers, "mask": mask})


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(3, 3).to_sparse(),
        torch.zeros(3, device="meta"),
        [1.0, 2.0],
        None,
    ],
    ids=["int", "complex", "bool", "float64", "sparse", "meta", "list", "none"],
)
def test_bad_tensors_are_refused(x):
    with pytest.raises(TypeError, match=r"x: got .*allowed"):
        bitsparse.compress(x)


def test_bad_codings_are_refused():
    x = torch.tensor([1.0, -2.0, 0.0])
    with pytest.raises(ValueError, match="support: got 'bogus', allowed"):
        bitsparse.compress(x, support="bogus")
    with pytest.raises(ValueError, match="values: got 'bogus', allowed"):
        bitsparse.compress(x, values="bogus")
    with pytest.raises(ValueError, match=r"values: got 'unsigned'.*sign bit"):
        bitsparse.compress(x, values="unsigned")
    with pytest.raises(ValueError, match="values: got 'dense'"):
        bitsparse.compress(x, support="flat", values="dense")
    with pytest.raises(TypeError, match="c: got Tensor"):
        bitsparse.decompress(x)


def test_live_storage_is_counted():
    before = bitsparse.memory_stats()
    x = random_sparse((100, 1000), 0.1, torch.float32)
    c = bitsparse.compress(x)
    during = bitsparse.memory_stats()
    assert during["live_tensors"] == before["live_tensors"] + 1
    assert during["live_compressed_bytes"] == before["live_compressed_bytes"] + c.nbytes
    assert during["live_dense_bytes"] == before["live_dense_bytes"] + 400_000
    del c
    assert bitsparse.memory_stats() == before
