"""Real activations of trained language models, where they are at hand."""

import os
from pathlib import Path

import pytest
import torch

import bitsparse
from helpers import assert_same_bits

DATA = Path(
    os.environ.get(
        "BITSPARSE_ACTIVATIONS",
        Path(__file__).resolve().parents[2] / "shared" / "data" / "activations",
    )
)
FILES = sorted(DATA.glob("*.npz"))


@pytest.mark.skipif(not FILES, reason=f"no activations (*.npz) in {DATA}")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_round_trip_and_size(path, device):
    numpy = pytest.importorskip("numpy")
    with numpy.load(path) as arrays:
        for name in arrays.files:
            x = torch.from_numpy(arrays[name].view("int16").copy()).view(torch.bfloat16).to(device)
            c = bitsparse.compress(x)
            assert_same_bits(c.to_dense(), x)
            assert (c.support, c.values) == ("flat", "unsigned")
            # One bit an element, 15 a nonzero, 4 bytes of offset for each 4096 elements.
            assert c.bits_per_element == pytest.approx(1 + 15 * c.density + 32 / 4096, abs=1e-3)
            assert c.bits_per_element < 16 / 3
