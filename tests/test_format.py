"""The storage format: every bit of every dtype, any shape, any density, on every backend."""

import contextlib
import copy
import functools
import io
import itertools
import math
import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitsparse
import format_reader
from bitsparse import codings, dtypes, layout
from bitsparse.backends import backend_for, force_backend
from bitsparse.codings import tables
from conftest import BACKENDS
from helpers import assert_same_bits, from_bits, random_sparse

DTYPES = dtypes.SUPPORTED_DTYPES
PART_NAMES = ("shape", "dtype", "nnz", "support", "values", "buffers")
# For tests with many small inputs: GPU kernels take long for each kind, interpreted or compiled.
QUICK = [b for b in BACKENDS if b.split("-")[0] in ("reference", "cpu")]
DOCS = Path(__file__).resolve().parents[1] / "docs"
BITS = {  # of exponent and mantissa
    torch.float32: (8, 23),
    torch.bfloat16: (8, 7),
    torch.float16: (5, 10),
    **{d: (4, 3) if "e4m3" in str(d) else (5, 2) for d in DTYPES if d.itemsize == 1},
}


@contextlib.contextmanager
def reference():
    """The reference backend, on one thread: for small tensors more threads only cost time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with force_backend("reference"):
            yield
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _one_thread_for_the_reference(request):
    name = getattr(request.node, "callspec", None)
    if name is not None and name.params.get("backend_device") == "reference-cpu":
        with reference():
            yield
    else:
        yield


# ---------------------------------------------------------------------------------- inputs


def value_codings(dtype, any_sign):
    """Names of the value codings that apply, by the format's description."""
    names = ["raw", "signed_exponent3"]
    names += ["signed_exponent4"] * (BITS[dtype][0] > 4)
    if not any_sign:
        names += ["unsigned", "exponent3"] + ["exponent4"] * (BITS[dtype][0] > 4)
    return sorted(names)


def combinations(x):
    """Names of all pairs of codings that can hold ``x`` (with elements)."""
    bits = dtypes.to_patterns(x).to(torch.int64)
    any_sign = bool((bits >> 8 * x.element_size() - 1 & 1).any())
    supports = [s for s in codings.SUPPORTS if s != "full" or bool((bits != 0).all())]
    return list(itertools.product(supports, value_codings(x.dtype, any_sign)))


def mixture(shape, dtype, density, exponents="any", signed=False, seed=0):
    """Random patterns. By ``exponents`` these escape from their tile's largest:

    "same" and "near": none; "few": one in twenty; "far": nearly all; "any": as it happens.
    """
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    exponent_bits, mantissa_bits = BITS[dtype]
    top = (1 << exponent_bits) - 1

    def draw(below):
        return torch.randint(below, (count,), generator=generator)

    exponent = {
        "same": lambda: torch.full((count,), top // 2),
        "near": lambda: top // 2 - draw(7),
        "few": lambda: torch.where(draw(20) == 0, 0, top - draw(3)),
        "far": lambda: torch.where(draw(300) == 0, top, 0),
        "any": lambda: draw(top + 1),
    }[exponents]()
    bits = exponent << mantissa_bits | draw(1 << mantissa_bits)
    if signed:
        bits |= draw(2) << exponent_bits + mantissa_bits
    bits = torch.where(bits == 0, 1, bits)
    kept = torch.rand(count, generator=generator) < density
    return from_bits(torch.where(kept, bits, 0), dtype).view(shape)


def every_pattern(dtype, signed):
    """Every pattern but zero; of float32 every exponent with many mantissas."""
    exponent_bits, mantissa_bits = BITS[dtype]
    if dtype == torch.float32:
        ones = (1 << mantissa_bits) - 1
        single = [1 << i for i in range(mantissa_bits)]
        mantissas = torch.tensor(
            [0, *single, *(ones ^ s for s in single), ones, 0x2AAAAA, 0x555555]
        )
        exponents = torch.arange(1 << exponent_bits)[:, None]
        bits = (exponents << mantissa_bits | mantissas).view(-1)
        if signed:
            bits = torch.cat([bits, bits | 1 << 31])
    else:
        bits = torch.arange(1 << exponent_bits + mantissa_bits + signed)
    return bits[bits != 0]


def parts_of(c):
    return {name: getattr(c, name) for name in PART_NAMES}


def read(parts):
    """What the independent reader makes of these parts: patterns as a list."""
    buffers = {name: b.cpu().numpy().tobytes() for name, b in parts["buffers"].items()}
    dtype = str(parts["dtype"]).removeprefix("torch.")
    return format_reader.decode(
        tuple(parts["shape"]), dtype, parts["nnz"], parts["support"], parts["values"], buffers
    )


def unsigned_patterns(x):
    mask = (1 << 8 * x.element_size()) - 1
    return [p & mask for p in dtypes.to_patterns(x.cpu()).tolist()]


def assert_same_parts(actual, expected):
    for name in PART_NAMES[:-1]:
        assert getattr(actual, name) == getattr(expected, name), name
    assert actual.buffers.keys() == expected.buffers.keys()
    for name, buffer in expected.buffers.items():
        got = actual.buffers[name].cpu()
        assert got.dtype == buffer.dtype and torch.equal(got, buffer.cpu()), name


def predicted(x, codec, support="auto", values="auto"):
    """The choice that follows from the counts of the first pass."""
    survey = backend_for(x.device).survey(
        layout.geometry(x.shape),
        dtypes.to_patterns(x),
        x.dtype,
        codings.needs_statistics(codec, support, values),
    )
    return codings.choose(survey.counts(survey.totals.tolist()), codec, support, values)


@st.composite
def tensors(draw, max_elements=6000):
    """Tensors of every kind: dtype, shape, density, exponents and signs."""
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.integers(0, 4))
    if kind <= 1:  # any number of dimensions
        shape = draw(st.lists(st.integers(0 if kind else 1, 12), max_size=4))
    elif kind == 2:  # row-major
        shape = [draw(st.integers(1, max_elements))]
    else:  # blocks of rows
        rows = draw(st.sampled_from([52, 63, 64, 103, 128, 154, 205, 257]))
        shape = [rows, draw(st.integers(1, max_elements // rows))]
    return mixture(
        tuple(shape),
        dtype,
        draw(st.sampled_from([0.0, 0.002, 0.05, 0.3, 0.7, 1.0])),
        draw(st.sampled_from(["same", "near", "few", "far", "any"])),
        draw(st.booleans()),
        draw(st.integers(0, 2**32 - 1)),
    )


# ----------------------------------------------------------------------------- every bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pattern_through_every_coding(backend_device, interpreted, dtype):
    """In random order, with and without signs, without zeros and with few or many in between."""
    generator = torch.Generator().manual_seed(1)

    def shuffled(count):
        return torch.randperm(count, generator=generator)

    for signed, density in itertools.product((False, True), (1.0, 0.5, 0.15)):
        bits = every_pattern(dtype, signed)
        bits = bits[shuffled(bits.numel())]
        if interpreted:
            if density != 0.5:
                continue
            bits = bits[:500]
        cols = 64 if density == 0.5 else 61 if bits.numel() > 4096 else 3
        rows = math.ceil(bits.numel() / density / cols) | 1
        dense = torch.zeros(rows * cols, dtype=torch.int64)
        if density == 1:  # the last row is filled up with patterns from before
            dense = bits[torch.arange(dense.numel()) % bits.numel()]
        else:
            dense[shuffled(dense.numel())[: bits.numel()]] = bits
        x = from_bits(dense, dtype).view(rows, cols).to(backend_device)
        pairs = combinations(x)
        if signed:
            assert {v for _, v in pairs} == set(value_codings(dtype, True))
        if interpreted:
            pairs = pairs[signed::4]
        for support, values in pairs:
            c = bitsparse.compress(x, support, values)
            assert (c.support, c.values) == (support, values)
            assert c.nnz == int((dense != 0).sum())
            assert_same_bits(c.to_dense(), x, f"{support}, {values}, signed={signed}, {density}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(0,), (), (1,), (31,), (33,), (3, 0, 5), (4096,), (4097,), (3, 7, 129), (64, 65), (257, 17)],
    ids=str,
)
def test_any_shape(backend_device, interpreted, dtype, shape):
    if interpreted and (math.prod(shape) > 1000 or dtype != torch.bfloat16):
        pytest.skip("slow")
    for density, signed in ((0.0, False), (0.1, True), (0.5, False), (1.0, False)):
        x = random_sparse(shape, density, dtype, signed=signed).to(backend_device)
        for codec in codings.POLICIES if density == 0.5 else ["balanced"]:
            c = bitsparse.compress(x, codec=codec)
            assert (c.shape, c.dtype, c.device) == (x.shape, x.dtype, x.device)
            assert_same_bits(c.to_dense(), x)
            assert_same_bits(bitsparse.decompress(c), x)
            assert c.nbytes <= x.numel() * x.element_size()
        c = bitsparse.compress(x, values="dense")
        assert_same_bits(c.to_dense(), x)
        assert (c.support, c.nbytes) == ("full", x.numel() * x.element_size())


def test_any_strides(backend_device):
    base = random_sparse((33, 70), 0.3, torch.float32, signed=True).to(backend_device)
    views = [base.t(), base[::2, ::3], base[5:20], base[:, 1], base[:1].expand(9, 70), base.flip(0)]
    views.append(torch._neg_view(base))
    for view in views:
        c = bitsparse.compress(view)
        expected = view.resolve_neg().clone(memory_format=torch.contiguous_format)
        assert_same_bits(c.to_dense(), expected)
        assert c.to_dense().is_contiguous()
        assert_same_parts(c, bitsparse.compress(expected))


@settings(max_examples=100, deadline=None)
@given(x=tensors(), codec=st.sampled_from(codings.POLICIES), named=st.data())
def test_any_tensor(x, codec, named):
    """Round trip, predicted size, and the same buffers on every backend."""
    support = values = "auto"
    if x.numel():
        choices = combinations(x)
        support = named.draw(st.sampled_from(["auto", *sorted({s for s, _ in choices})]))
        allowed = sorted({v for _, v in choices})
        values = named.draw(st.sampled_from(["auto", "exponent", *allowed]))
    with reference():
        expected = bitsparse.compress(x, support, values, codec=codec)
        assert read(parts_of(expected)) == unsigned_patterns(x)
        if expected.values != "dense" and expected.support != "empty":
            choice = predicted(x, codec, support, values)
            assert expected.nbytes == choice.nbytes
            assert (expected.support, expected.values) == (
                choice.support.name,
                choice.values[0].name,
            )
    dense_bytes = x.numel() * x.element_size()
    if support == values == "auto":
        assert expected.nbytes <= dense_bytes
    elif x.numel():
        assert support in ("auto", expected.support)
        assert expected.values == values or values in ("auto", "exponent")
    for name in QUICK:
        backend, device = name.split("-")
        with force_backend(backend):
            c = bitsparse.compress(x.to(device), support, values, codec=codec)
            assert_same_parts(c, expected)
            assert_same_bits(c.to_dense().cpu(), x, name)


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(
        st.one_of(
            st.integers(0, 2**32 - 1),
            st.sampled_from([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 1]),
        ),
        max_size=60,
    ),
    zeros=st.integers(0, 5000),
    cols=st.integers(1, 70),
)
def test_runs_of_zeros(words, zeros, cols):
    bits = words + [0] * zeros + words[::-1]
    bits += [0] * (-len(bits) % cols)
    x = from_bits(torch.tensor(bits, dtype=torch.int64), torch.float32).view(-1, cols)
    for support, values in (("auto", "auto"), ("bucketed", "raw"), ("flat", "signed_exponent4")):
        assert_same_bits(bitsparse.compress(x, support, values).to_dense(), x)


# ------------------------------------------------------- the description, read independently

READER_SHAPES = [
    (),  # one element
    (1,),
    (45,),
    (7, 9, 11),  # 63 rows of a block of 64
    (60, 3),
    (51, 5),  # too few rows for a block
    (64, 64),  # a whole tile
    (5000,),
    (2, 103, 45),  # three tiles, the last one partial, with rows outside
    (66, 150),  # row-major
]


@pytest.mark.parametrize("shape", READER_SHAPES, ids=str)
def test_an_independent_reader_agrees(shape):
    large = math.prod(shape) >= 4096
    kinds = [("near", 0.3), ("few", 0.1), ("far", 0.03), ("any", 1.0), ("any", 0.6)]
    cases = itertools.product(DTYPES, (False, True))
    with reference():
        for i, (dtype, signed) in enumerate(cases):
            exponents, density = kinds[i % len(kinds)]
            x = mixture(shape, dtype, density, exponents, signed, seed=i)
            expected = unsigned_patterns(x)
            pairs = combinations(x)
            for support, values in [*pairs[:: 1 + large], ("auto", "dense")]:
                c = bitsparse.compress(x, support, values)
                assert read(parts_of(c)) == expected, (dtype, support, values)
        empty = bitsparse.compress(torch.zeros(shape))
        assert empty.support == "empty"
        assert read(parts_of(empty)) == [0] * math.prod(shape)


def test_the_reader_has_the_dtypes_of_the_package():
    assert {str(d).removeprefix("torch.") for d in DTYPES} <= set(format_reader.DTYPES)
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        fields = (dtypes.exponent_bits(dtype), dtypes.mantissa_bits(dtype))
        assert format_reader.DTYPES[name] == fields


def test_blocks_of_rows():
    with_blocks = [r for r in range(1, 1000) if layout.geometry((r, 5)).height == 64]
    ranges = [range(52, 65), range(103, 129), range(154, 193), range(205, 1000)]
    assert with_blocks == list(itertools.chain(*ranges))
    assert layout.geometry((8, 8, 5)) == (64, 5, 64)
    assert layout.geometry((64, 2**24)).height == 64
    assert layout.geometry((64, 2**24 + 1)).height == 1
    assert layout.geometry((64, 0)).tiles == layout.geometry((0, 64)).tiles == 0
    assert layout.geometry(()) == layout.geometry((1,)) == (1, 1, 1)
    assert layout.geometry((2**31, 3)).slots == 3 * 2**31


@pytest.mark.parametrize("tiles", [0, 1, 15, 16, 17, 31, 32, 100])
def test_offset_tables(tiles):
    generator = torch.Generator().manual_seed(tiles)
    counts = torch.randint(layout.TILE + 1, (tiles,), generator=generator)
    counts[::3] = layout.TILE
    table = tables.build(counts)
    assert table.numpy().tobytes() == format_reader.table(counts.tolist())
    assert table.numel() == layout.table_words(tiles)
    assert tables.read(table, tiles).tolist() == [0, *counts.cumsum(0).tolist()]


def test_offsets_beyond_32_bits():
    """An entry of 2**33 + 7, as a tensor of that many nonzeros has."""
    entry = (2**33 + 7).to_bytes(8, "little") + b"".join(i.to_bytes(2, "little") for i in range(16))
    table = torch.frombuffer(bytearray(entry), dtype=torch.int32)
    assert tables.read(table, 3).tolist() == [2**33 + 7 + i for i in range(4)]


def hex_blocks(language):
    text = (DOCS / "format.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def test_the_table_of_the_description():
    (block,) = hex_blocks("table")
    counts = [100 if tile == 16 else 3000 for tile in range(18)]
    assert bytes.fromhex(block) == format_reader.table(counts)
    assert bytes.fromhex(block) == tables.build(torch.tensor(counts)).numpy().tobytes()


@pytest.mark.parametrize(
    "block", hex_blocks("bytes"), ids=lambda b: b.split("values ")[1].split()[0]
)
def test_the_examples_of_the_description(backend_device, block):
    head, *lines = block.splitlines()
    facts = dict(item.strip().split(" ", 1) for item in head.split(";"))
    shape = tuple(int(n) for n in facts["shape"].split())
    stored = {}
    for line in lines:
        if not line.startswith(" "):
            name, line = line.split(" ", 1)
        stored[name] = stored.get(name, "") + line
    bits = [0] * math.prod(shape)
    for item in stored.pop("nonzero").split():
        index, pattern = item.split(":")
        bits[int(index)] = int(pattern, 16)
    buffers = {name: bytes.fromhex(line) for name, line in stored.items()}

    nnz, names = int(facts["nnz"]), (facts["support"], facts["values"])
    assert format_reader.decode(shape, facts["dtype"], nnz, *names, buffers) == bits
    x = from_bits(torch.tensor(bits), getattr(torch, facts["dtype"])).view(shape)
    c = bitsparse.compress(x.to(backend_device), *names)
    assert c.nnz == nnz
    assert {name: b.cpu().numpy().tobytes() for name, b in c.buffers.items()} == buffers
    assert_same_bits(c.to_dense().cpu(), x)


# ------------------------------------------------------------------------------ backends


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_store_the_same_buffers(backend_device, interpreted, dtype):
    """The stored buffers, not only the decoded tensor, equal the reference's."""
    backend = backend_for(backend_device).name
    if (backend, backend_device.type) == ("reference", "cpu"):
        pytest.skip("is the reference")
    shapes = [(77,), (41, 333), (250, 70), (120, 128), (66, 64)]
    if interpreted:
        shapes = [(77,), (41, 155), (60, 64)] if dtype == torch.bfloat16 else [(77,)]
    stride = 1 if backend == "cpu" else 4
    cases = ((False, "few", 0.2), (True, "any", 1.0))
    for shape, (signed, exponents, density) in itertools.product(shapes, cases):
        x = mixture(shape, dtype, density, exponents, signed)
        for support, values in combinations(x)[signed::stride]:
            ours = bitsparse.compress(x.to(backend_device), support, values)
            with reference():
                expected = bitsparse.compress(x, support, values)
            assert_same_parts(ours, expected)
            assert_same_bits(ours.to_dense().cpu(), x)


def test_backends_choose_the_same(backend_device, interpreted):
    for density in (0.01, 0.2, 1.0):
        x = mixture((64, 30 if interpreted else 150), torch.bfloat16, density, "few")
        for codec in codings.POLICIES:
            with reference():
                expected = bitsparse.compress(x, codec=codec)
            assert_same_parts(bitsparse.compress(x.to(backend_device), codec=codec), expected)


# --------------------------------------------------------------------- sizes and choice


def test_sizes_are_those_of_the_description(device):
    for shape in ((100, 1000), (250, 70), (5000,), (7,)):
        for exponents in ("few", "any"):
            x = mixture(shape, torch.bfloat16, 0.1, exponents).to(device)
            for support, values in combinations(x):
                c = bitsparse.compress(x, support, values)
                buffers, n = c.buffers, x.numel()
                height = 64 if shape == (250, 70) else 1
                rows, cols = layout.geometry(shape)[:2]
                slots = math.ceil(rows / height) * height * cols
                tiles = math.ceil(slots / 4096)
                table = 40 * math.ceil((tiles + 1) / 16)
                size = table
                if support == "flat":
                    size += 4 * math.ceil(slots / 32)
                else:
                    ordered = torch.zeros(tiles * 4096, dtype=torch.bool)
                    padded = torch.zeros(slots // cols, cols, dtype=torch.bool)
                    padded[:rows] = (dtypes.to_patterns(x) != 0).view(rows, cols)
                    ordered[:slots] = padded.view(-1, height, cols).transpose(1, 2).reshape(-1)
                    nonempty = [int(ordered.view(-1, k).any(1).sum()) for k in (64, 8)]
                    size += 8 * tiles + table + sum(nonempty)
                if values == "raw":
                    size += 2 * c.nnz
                elif values == "unsigned":
                    size += 4 * math.ceil(c.nnz * 15 / 32)
                else:
                    width = 7 + int(values[-1]) + values.startswith("signed")
                    size += 4 * math.ceil(c.nnz * width / 32) + tiles + table
                    size += buffers["escapes"].numel()
                assert (
                    c.nbytes == size == sum(b.untyped_storage().nbytes() for b in buffers.values())
                )
                assert c.bits_per_element == 8 * size / n
                assert c.density == c.nnz / n


@settings(max_examples=40, deadline=None)
@given(x=tensors(max_elements=4000))
def test_policies(x):
    with reference():
        chosen = {codec: bitsparse.compress(x, codec=codec) for codec in codings.POLICIES}
        dense = x.numel() * x.element_size()
        if not x.numel():
            assert {(c.support, c.values) for c in chosen.values()} == {("full", "dense")}
            return
        if not dtypes.to_patterns(x).any():
            assert {(c.support, c.nbytes) for c in chosen.values()} == {("empty", 0)}
            return
        sizes = {pair: bitsparse.compress(x, *pair).nbytes for pair in combinations(x)}
        fast = {
            pair: size
            for pair, size in sizes.items()
            if pair[0] != "bucketed" and pair[1] in ("raw", "unsigned")
        }
        smallest = min(sizes.values())
        assert chosen["small"].nbytes == min(smallest, dense)
        assert chosen["fast"].nbytes == min(*fast.values(), dense)
        assert chosen["balanced"].nbytes <= min(1.05 * smallest, dense)
        rank = {"full": 0, "flat": 1, "bucketed": 2, "raw": 0, "unsigned": 1, "4": 2, "3": 3}

        def time(pair):
            return rank[pair[0]] + rank[pair[1] if pair[1] in rank else pair[1][-1]]

        near = [pair for pair, size in sizes.items() if size <= 1.05 * smallest]
        best = min(near, key=lambda pair: (time(pair), sizes[pair]))
        got = chosen["balanced"]
        if sizes[best] < dense:
            assert (time((got.support, got.values)), got.nbytes) == (time(best), sizes[best])
        else:
            assert got.values == "dense"


def test_what_the_policies_take(backend_device):
    def kinds(x):
        chosen = [bitsparse.compress(x.to(backend_device), codec=c) for c in codings.POLICIES]
        return [(c.support, c.values) for c in chosen]

    n = (64, 128)
    sparse = random_sparse(n, 0.02, torch.bfloat16)
    assert kinds(sparse) == [
        ("flat", "unsigned"),
        ("bucketed", "exponent4"),
        ("bucketed", "exponent3"),
    ]
    half = random_sparse(n, 0.5, torch.bfloat16)
    assert kinds(half) == [("flat", "unsigned"), *[("flat", "exponent3")] * 2]
    signed = random_sparse(n, 0.5, torch.bfloat16, signed=True)
    assert kinds(signed) == [("flat", "raw"), *[("flat", "signed_exponent3")] * 2]
    one_negative = half.clone()
    one_negative[3, 5] = -0.0
    assert kinds(one_negative) == kinds(signed)
    all_signed = random_sparse(n, 1.0, torch.bfloat16, signed=True)
    assert kinds(all_signed)[0] == ("full", "dense")
    noise = mixture(n, torch.float8_e4m3fn, 1.0, signed=True)
    assert kinds(noise) == [("full", "dense")] * 3
    assert kinds(torch.zeros(n)) == [("empty", "raw")] * 3


def test_density_one(device):
    """16.05 bits at most for normal bfloat16 values, whatever the policy; 16 with any bits."""
    x = random_sparse((256, 256), 1.0, torch.bfloat16, signed=True).to(device)
    for codec in codings.POLICIES:
        assert bitsparse.compress(x, codec=codec).bits_per_element <= 16.05
        noise = mixture((256, 256), torch.bfloat16, 1.0, signed=True).to(device)
        assert bitsparse.compress(noise, codec=codec).bits_per_element <= 16


@pytest.mark.parametrize("codec", ["balanced", "small"])
def test_half_of_the_normal_values(device, codec):
    x = torch.randn((1024, 512), generator=torch.Generator().manual_seed(0)).relu().bfloat16()
    assert bitsparse.compress(x.to(device), codec=codec).bits_per_element <= 6.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_take_no_memory(device, dtype):
    for shape in ((1,), (100, 70), (4097,)):
        c = bitsparse.compress(torch.zeros(shape, dtype=dtype, device=device))
        assert (c.nbytes, c.nnz, c.support, c.density) == (0, 0, "empty", 0)
        assert_same_bits(c.to_dense(), torch.zeros(shape, dtype=dtype, device=device))


def test_zeros_in_codings_asked_for(backend_device):
    x = torch.zeros((70, 60), dtype=torch.float16, device=backend_device)
    for support, values in combinations(x):
        c = bitsparse.compress(x, support, values)
        assert (c.support, c.values, c.nnz) == (support, values, 0)
        assert_same_bits(c.to_dense(), x)


# ---------------------------------------------------------------------------- the object


def test_the_result_is_independent_of_the_input(device):
    for density, shape in itertools.product((0.0, 0.2, 1.0), ((50, 100), (64, 100))):
        x = random_sparse(shape, density, torch.float32).to(device)
        before = x.clone()
        pairs = [("auto", "auto"), ("auto", "dense"), ("auto", "raw"), ("bucketed", "auto")]
        compressed = [bitsparse.compress(x, *pair) for pair in pairs]
        x.fill_(7)
        for c in compressed:
            assert_same_bits(c.to_dense(), before)
            c.to_dense().fill_(9)
            assert_same_bits(c.to_dense(), before)


@pytest.mark.parametrize("codec", [*codings.POLICIES, "dense"])
def test_copy_pickle_and_move(device, codec):
    x = random_sparse((64, 100), 0.2, torch.bfloat16).to(device)
    c = (
        bitsparse.compress(x, values="dense")
        if codec == "dense"
        else bitsparse.compress(x, codec=codec)
    )
    for other in (copy.copy(c), copy.deepcopy(c), pickle.loads(pickle.dumps(c)), c.to("cpu")):
        assert_same_bits(other.to_dense().cpu(), x.cpu())
        assert_same_parts(other, c)
    file = io.BytesIO()
    torch.save(c, file)
    file.seek(0)
    assert_same_bits(torch.load(file, weights_only=False).to_dense(), x)
    assert c.to(device) is c
    assert c.support in repr(c) and c.values in repr(c)
    for name, buffer in copy.deepcopy(c).buffers.items():
        assert not buffer.numel() or buffer.data_ptr() != c.buffers[name].data_ptr()


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

    def refused(match, x=x, **arguments):
        with pytest.raises(ValueError, match=match):
            bitsparse.compress(x, **arguments)

    refused("support: got 'bogus', allowed", support="bogus")
    refused("values: got 'bogus', allowed", values="bogus")
    refused("codec: got 'bogus', allowed", codec="bogus")
    refused("codec: got 'auto', allowed", codec="auto")
    refused("support: got 'empty', allowed", support="empty")
    refused("support: got 'full'.*zero", support="full")
    refused(r"values: got 'unsigned'.*sign bit", values="unsigned")
    refused(r"values: got 'exponent4'.*sign bit.*'signed_exponent4'", values="exponent4")
    refused("values: got 'dense'", support="flat", values="dense")
    narrow = x.to(torch.float8_e4m3fn)
    refused("values: got 'signed_exponent4'.*e4m3", x=narrow, values="signed_exponent4")
    for codec in codings.POLICIES:  # a name counts whatever the policy
        c = bitsparse.compress(x, "bucketed", "signed_exponent4", codec=codec)
        assert (c.support, c.values) == ("bucketed", "signed_exponent4")
    with pytest.raises(TypeError, match="positional"):
        bitsparse.compress(x, "auto", "auto", "small")
    with pytest.raises(TypeError, match="c: got Tensor"):
        bitsparse.decompress(x)


# --------------------------------------------------------------------------- damaged parts


@functools.cache
def sample(support="flat", values="raw", dtype=torch.bfloat16, shape=(120, 40)):
    """Two tiles, with rows outside the tensor, empty groups and escapes."""
    large = math.prod(shape) > 1000
    density = 1.0 if support == "full" else 0.1 if large else 0.4
    x = mixture(shape, dtype, density, "few", seed=5)
    if support != "full" and large:
        x[:64, 3:9] = 0
    with reference():
        return bitsparse.compress(x, support, values)


def changed(c, name, edit):
    """The buffers with one of them replaced: ``edit`` changes a copy or returns another tensor."""
    buffer = c.buffers[name].clone()
    edited = edit(buffer)
    return {**c.buffers, name: buffer if edited is None else edited}


def set_item(index, value):
    def edit(buffer):
        buffer[index] = value

    return edit


def add(index, value):
    def edit(buffer):
        buffer[index] += value

    return edit


def toggle(bit):
    """A bit of the buffer, counted from its first byte."""

    def edit(buffer):
        buffer.view(torch.uint8)[bit // 8] ^= 1 << bit % 8

    return edit


def assert_refused(c, match, **changes):
    """Both the package and the independent reader refuse the parts of ``c`` with these changes."""
    parts = {**parts_of(c), **changes}
    with pytest.raises(ValueError, match=match):
        bitsparse.BitSparseTensor.from_buffers(**parts)
    return parts


def assert_refused_by_both(c, match, **changes):
    parts = assert_refused(c, match, **changes)
    with pytest.raises(ValueError):
        read(parts)


EVERY_PAIR = list(itertools.product(codings.SUPPORTS, codings.VALUES))


@pytest.mark.parametrize("support,values", [("full", "dense"), ("empty", "raw"), *EVERY_PAIR])
def test_wrong_buffers_are_refused(support, values):
    if values == "dense":
        c = bitsparse.compress(random_sparse((50, 100), 0.3, torch.bfloat16), values="dense")
    elif support == "empty":
        c = bitsparse.compress(torch.zeros((50, 100), dtype=torch.bfloat16))
    else:
        c = sample(support, values)
    good = bitsparse.BitSparseTensor.from_buffers(**parts_of(c))
    assert_same_bits(good.to_dense(), c.to_dense())
    assert_same_parts(good, c)
    for name, buffer in c.buffers.items():
        about = name.removesuffix("s")  # the message may be about the table of its offsets
        longer = torch.cat([buffer, buffer.new_ones(1)])
        assert_refused_by_both(c, about, buffers={**c.buffers, name: longer})
        if buffer.numel():
            assert_refused_by_both(c, about, buffers={**c.buffers, name: buffer[:-1]})
            strided = torch.stack([buffer, buffer], 1)[:, 0]
            assert_refused(c, "contiguous", buffers={**c.buffers, name: strided})
        for other in (torch.int64, torch.float32):
            assert_refused(c, name, buffers={**c.buffers, name: buffer.to(other)})
        assert_refused(c, name, buffers={**c.buffers, name: buffer[None]})
        assert_refused(c, "strided", buffers={**c.buffers, name: buffer.tolist()})
        assert_refused(c, "strided", buffers={**c.buffers, name: buffer.to_sparse()})
        rest = {k: v for k, v in c.buffers.items() if k != name}
        assert_refused_by_both(c, "buffers: got", buffers=rest)
        if len(c.buffers) > 1:
            elsewhere = {**c.buffers, name: buffer.to("meta")}
            assert_refused(c, "more than one device", buffers=elsewhere)
    assert_refused_by_both(c, "buffers: got", buffers={**c.buffers, "more": torch.zeros(1)})


@pytest.mark.parametrize("support,values", [("full", "dense"), *EVERY_PAIR])
def test_wrong_descriptions_are_refused(support, values):
    c = sample(support, values) if values != "dense" else bitsparse.compress(torch.ones(50, 100))
    assert_refused(c, "dtype", dtype=torch.int16)
    assert_refused(c, "dtype", dtype="bfloat16")
    for nnz in (-1, 10**9, c.nnz - 1, c.nnz + 1):
        assert_refused_by_both(c, "nnz|values|offsets", nnz=nnz)
    assert_refused(c, "nnz", nnz=float(c.nnz))
    for shape in ((120, 400), (60,), (), (0, 4), (10**6, 10**6), (120, 40, 2)):
        assert_refused_by_both(c, "shape|nnz|mask|values|offsets|support", shape=shape)
    for shape in ((-1, 5), (1.0, 2), (2**61, 1), (2**31, 2**31), (1,) * 65, (2**61, 0)):
        assert_refused(c, "shape", shape=shape)
    for name in ("nonsense", "auto", None):
        assert_refused(c, "support", support=name)
        assert_refused(c, "values|support", values=name)
    for pair in [("empty", "raw"), ("empty", values), ("flat", "dense"), ("full", "dense")]:
        if pair != (support, values):
            changes = dict(zip(("support", "values"), pair, strict=True))
            assert_refused_by_both(c, "support|values|buffers", **changes)


def test_all_zero_descriptions():
    c = bitsparse.compress(torch.zeros(50, 100))
    for nnz in (1, -1, 5000):
        assert_refused_by_both(c, "nnz", nnz=nnz)
    assert_refused_by_both(c, "values", values="unsigned")
    none = bitsparse.compress(torch.zeros(3, 0))
    assert (none.support, none.values) == ("full", "dense")
    assert_refused_by_both(none, "flat|buffers", support="flat", values="raw")
    buffers = {"offsets": torch.zeros(10, dtype=torch.int32), **none.buffers}
    assert_refused_by_both(none, "without elements", values="raw", buffers=buffers)


@pytest.mark.parametrize("values", codings.VALUES)
def test_wrong_masks_are_refused(values):
    c = sample("flat", values)

    def refused(match, edit, c=c):
        assert_refused_by_both(c, match, buffers=changed(c, "mask", edit))

    set_bits = [
        32 * w + b
        for w, word in enumerate(c.buffers["mask"].tolist())
        for b in range(32)
        if word >> b & 1
    ]
    clear = next(s for s in range(64) if s not in set_bits)
    refused("nnz|offsets", toggle(set_bits[0]))
    refused("nnz|offsets", toggle(clear))

    def move(to):
        def edit(mask):
            toggle(set_bits[0])(mask)
            toggle(to)(mask)

        return edit

    # 120 rows: rows 56 to 63 of each column's second block are outside.
    refused("outside", move(64 * 40 + 56))
    refused("outside", move(64 * 80 - 1))
    other_tile = next(s for s in range(4096, 4096 + 56) if s not in set_bits)
    refused("offsets", move(other_tile))
    # 77 slots in three words.
    tail = sample("flat", values, shape=(7, 11))
    refused("mask", toggle(77), tail)
    refused("mask", toggle(95), tail)


@pytest.mark.parametrize("support,values", EVERY_PAIR)
def test_wrong_offset_tables_are_refused(support, values):
    c = sample(support, values)
    for name in (n for n in c.buffers if n.endswith("offsets")):
        about = name.removesuffix("_offsets")
        for index in range(10):  # base, entries, and what follows the total
            for value in (1, 1 << 16, -1):
                edited = changed(c, name, add(index, value))
                assert_refused_by_both(c, about, buffers=edited)
        high = changed(c, name, set_item(1, -(1 << 31)))
        assert_refused_by_both(c, name, buffers=high)
        assert_refused_by_both(c, name, buffers=changed(c, name, torch.zeros_like))


@pytest.mark.parametrize("values", ["raw", "exponent4"])
def test_wrong_buckets_are_refused(values):
    c = sample("bucketed", values)
    groups = (c.buffers["groups"].view(torch.uint8)[:, None] >> torch.arange(8) & 1).view(-1)
    nonempty = int(groups[:64].sum())
    assert 0 < nonempty < 64
    buckets = c.buffers["buckets"]

    def refused(match, name, edit, c=c):
        assert_refused_by_both(c, match, buffers=changed(c, name, edit))

    refused("buckets", "buckets", set_item(0, 0))
    refused("buckets", "buckets", set_item(nonempty, 0))
    refused("buckets", "buckets", set_item(-1, 0))
    for g in (0, 63, 64):  # one group more or less
        refused("groups", "groups", toggle(g))
    refused("groups", "groups", set_item(slice(None), -1))
    refused("groups", "groups", set_item(slice(None), 0))
    absent = next(b for b in range(8) if not int(buckets[0]) >> b & 1)
    refused("buckets", "buckets", toggle(absent))  # a bucket more in group 0
    slot = next(b for b in range(8) if not int(buckets[nonempty]) >> b & 1)
    refused("nnz|offsets", "buckets", toggle(8 * nonempty + slot))

    def outside(buffer):
        """A bucket of outside rows in place of another one, in the last group."""
        last = int(groups[64:].sum()) + int(tables.read(c.buffers["bucket_offsets"], 2)[1]) - 1
        marked = int(buffer[last])
        highest = marked.bit_length() - 1
        buffer[last] = marked ^ 1 << highest ^ 1 << 7

    assert int(groups[-64:].nonzero().max()) < 64
    refused("outside", "buckets", outside)

    def after(buffer):  # bucket 9 of 77 slots has five slots
        buffer[-1] = int(buffer[-1]) ^ (int(buffer[-1]) & -int(buffer[-1])) ^ 0x80

    tail = sample("bucketed", values, shape=(7, 11))
    assert int((tail.to_dense().view(-1)[72:] != 0).sum())
    refused("outside", "buckets", after, tail)


@pytest.mark.parametrize("support", codings.SUPPORTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_values_are_refused(support, dtype):
    exponent_bits, mantissa_bits = BITS[dtype]
    for values in value_codings(dtype, False):
        # 63 rows: an odd number of values if there are no zeros.
        c = sample(support, values, dtype, (63, 7))
        buffers, field = c.buffers, 0
        width = 8 * dtype.itemsize - (values == "unsigned")
        if "exponent" in values:
            field = int(values[-1])
            width = mantissa_bits + field + values.startswith("signed")

        def refused(match, name, edit, c=c):
            assert_refused_by_both(c, match, buffers=changed(c, name, edit))

        used = c.nnz * width
        for bit in {used, 32 * -(-used // 32) - 1}:
            if used % 32 and values != "raw":
                refused("values: bits after the last", "values", toggle(bit))

        def zero(buffer, used=width):
            for bit in range(used):
                if int(buffer.view(torch.uint8)[bit // 8]) >> bit % 8 & 1:
                    toggle(bit)(buffer)

        if not field:
            refused("values: got a zero", "values", zero)
            continue
        escapes, largest = buffers["escapes"], int(buffers["exponents"][0])
        assert 0 < escapes.numel() < c.nnz
        shorter = {**buffers, "escapes": escapes[:-1]}
        assert_refused_by_both(c, "escape", buffers=shorter)
        # The field of the first code becomes all ones, or no longer is.
        first = int.from_bytes(buffers["values"].numpy().tobytes()[:8], "little") >> mantissa_bits
        ones = (1 << field) - 1
        for bit in range(field):
            if first & ones == ones or first & ones | 1 << bit == ones:
                refused("escape", "values", toggle(mantissa_bits + bit))
        if exponent_bits < 8:
            refused("does not have", "exponents", set_item(0, 1 << exponent_bits))
            refused("does not have", "escapes", set_item(0, 1 << exponent_bits))
        refused("below exponent 0|got a zero", "exponents", set_item(0, 0))
        assert largest > ones


@pytest.mark.parametrize("values", ["exponent4", "signed_exponent3"])
def test_a_coded_zero_is_refused(values):
    """A pattern of zero that the codes would decode to: as an escape and as a distance."""
    x = torch.full((70,), 2.0**-126)  # exponent 1, mantissa 0
    with reference():
        c = bitsparse.compress(x, "full", values)
    zero = changed(c, "exponents", set_item(0, 0))
    assert_refused_by_both(c, "got a zero", buffers=zero)
    x[0] = 2.0
    with reference():
        c = bitsparse.compress(x, "full", values)
    assert c.buffers["escapes"].numel() == 69
    zero = changed(c, "escapes", set_item(5, 0))
    assert_refused_by_both(c, "got a zero", buffers=zero)


def typed(name, stored, dtype, values):
    """Bytes as a tensor of the type that the description gives; uint8 if they do not divide."""
    if name in ("buckets", "exponents", "escapes"):
        kind = torch.uint8
    elif name == "values" and values in ("raw", "dense"):
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    else:
        kind = torch.int32
    if len(stored) % kind.itemsize:
        return torch.tensor(list(stored), dtype=torch.float32)
    return torch.frombuffer(bytearray(stored), dtype=kind) if stored else torch.empty(0, dtype=kind)


SAMPLES = [
    (support, values, dtype, shape)
    for dtype, shape in (
        (torch.bfloat16, (120, 40)),
        (torch.float16, (7, 11)),
        (torch.float8_e5m2, (64, 2)),
    )
    for support, values in EVERY_PAIR
]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_harmless(data):
    """After any damage both readers refuse the parts, or both decode them to the same tensor."""
    c = sample(*data.draw(st.sampled_from(SAMPLES)))
    parts = parts_of(c)
    stored = {name: bytearray(b.numpy().tobytes()) for name, b in parts["buffers"].items()}
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(stored)))
        buffer = stored[name]
        kind = data.draw(st.sampled_from(["bit", "bit", "byte", "move", "cut", "grow", "facts"]))
        if kind == "cut":
            del buffer[-data.draw(st.sampled_from([1, 2, 4])) :]
        elif kind == "grow":
            buffer += bytes(data.draw(st.sampled_from([1, 2, 4])))
        elif kind == "facts":
            fact, options = data.draw(
                st.sampled_from(
                    [
                        ("nnz", [c.nnz - 1, c.nnz + 1, 0, c.shape.numel()]),
                        ("dtype", list(DTYPES)),
                        ("support", ["empty", *codings.SUPPORTS]),
                        ("values", ["dense", *codings.VALUES]),
                        ("shape", [c.shape[::-1], (*c.shape, 1), (1, *c.shape), (0,), ()]),
                    ]
                )
            )
            parts[fact] = data.draw(st.sampled_from(options))
        elif buffer:
            at = data.draw(st.integers(0, len(buffer) - 1))
            if kind == "bit":
                buffer[at] ^= 1 << data.draw(st.integers(0, 7))
            elif kind == "byte":
                buffer[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
            else:
                other = data.draw(st.integers(0, len(buffer) - 1))
                buffer[at], buffer[other] = buffer[other], buffer[at]
    parts["buffers"] = {
        name: typed(name, bytes(b), parts["dtype"], parts["values"]) for name, b in stored.items()
    }
    try:
        expected = read({**parts, "shape": tuple(parts["shape"])})
    except ValueError:
        expected = None
    with reference():
        try:
            damaged = bitsparse.BitSparseTensor.from_buffers(**parts)
        except ValueError:
            assert expected is None
            return
        assert expected is not None
        assert unsigned_patterns(damaged.to_dense()) == expected
    assert damaged.nnz == sum(p != 0 for p in expected)
    for name in QUICK:
        backend, device = name.split("-")
        with force_backend(backend):
            assert unsigned_patterns(damaged.to(device).to_dense()) == expected, name
