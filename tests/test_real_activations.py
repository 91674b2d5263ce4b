"""Real activations of trained language models, where they are at hand."""

import os
from pathlib import Path

import pytest
import torch

import bitsparse
from bitsparse import codings
from bitsparse.backends import force_backend
from helpers import assert_same_bits

DATA = Path(
    os.environ.get(
        "BITSPARSE_ACTIVATIONS",
        Path(__file__).resolve().parents[2] / "shared" / "data" / "activations",
    )
)
FILES = sorted(DATA.glob("*.npz"))

pytestmark = pytest.mark.skipif(not FILES, reason=f"no activations (*.npz) in {DATA}")


def arrays(path):
    """Name and bfloat16 ``[tokens, neurons]`` of each array of a file."""
    numpy = pytest.importorskip("numpy")
    with numpy.load(path) as file:
        for name in file.files:
            yield name, torch.from_numpy(file[name].view("int16").copy()).view(torch.bfloat16)


def entropy(p):
    return -(p * p.clamp(min=1e-300).log2())


def reference_line(x):
    """Bits an element if every neuron fires independently at its own rate, exponents take their
    entropy, and mantissas their 7 bits."""
    patterns = x.view(torch.int16)
    fires = patterns != 0
    rate = fires.double().mean(0)
    exponents = torch.bincount(patterns[fires].to(torch.int64) >> 7).double()
    bits = entropy(exponents / exponents.sum()).sum() + 7
    return float((entropy(rate) + entropy(1 - rate)).mean() + fires.double().mean() * bits)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_lossless_and_never_larger_than_dense(path, device):
    for name, x in arrays(path):
        x = x.to(device)
        for codec in codings.POLICIES:
            c = bitsparse.compress(x, codec=codec)
            assert_same_bits(c.to_dense(), x, f"{name}, {codec}")
            assert c.nbytes < 2 * x.numel()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_backends_store_the_same(path, device):
    name, x = next(arrays(path))
    c = bitsparse.compress(x.to(device))
    with force_backend("reference"):
        expected = bitsparse.compress(x)
        assert_same_bits(expected.to_dense(), x, name)
    assert (c.support, c.values) == (expected.support, expected.values)
    assert c.buffers.keys() == expected.buffers.keys()
    for buffer, stored in expected.buffers.items():
        assert torch.equal(c.buffers[buffer].cpu(), stored), f"{name}: {buffer}"


@pytest.mark.parametrize("codec,average,most", [("balanced", 1.20, None), ("small", 1.10, 1.15)])
def test_sizes_against_the_reference_line(codec, average, most, device):
    ratios = {
        name: bitsparse.compress(x.to(device), codec=codec).bits_per_element / reference_line(x)
        for path in FILES
        for name, x in arrays(path)
    }
    assert sum(ratios.values()) / len(ratios) <= average, ratios
    assert most is None or max(ratios.values()) <= most, ratios
