"""Every example trains to the same losses, bit for bit, with its model converted and as it is."""

import contextlib
import gc
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch

import bitsparse
from bitsparse.backends import force_backend

CUDA = torch.cuda.is_available()
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NEEDS = {
    "hf_trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("accelerate",),
    "lightning_module": ("lightning",),
    "peft_lora": ("peft", "transformers"),
    "nanogpt": (),
}


def test_all_are_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)


@pytest.fixture
def quick():
    """Of tiny models, threads that wait for each other and compiling take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.nullcontext() if CUDA else force_backend("reference"):
        yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", NEEDS)
def test_example(name, monkeypatch, capsys):
    for package in NEEDS[name]:
        pytest.importorskip(package, reason=f"needs {package}: pip install 'bitsparse[examples]'")
    live: list[int] = []
    backward = torch.Tensor.backward

    def counting(self, *args, **kwargs):
        live.append(bitsparse.memory_stats()["live_tensors"])
        return backward(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", counting)
    with warnings.catch_warnings():
        # Libraries have warnings of their own; ours says that nothing was converted.
        warnings.filterwarnings("error", module="bitsparse")
        main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
        compressed = main(["--steps", "3"])
        assert live and min(live) > 0  # in each forward pass something was kept compressed
        live.clear()
        gc.collect()  # the converted model is a cycle
        dense = main(["--steps", "3", "--dense"])
    assert live and max(live) == 0
    assert compressed == dense
    assert len(set(dense)) == len(dense) >= 3  # something is trained
    if name == "peft_lora":
        found = re.search(r"hidden activations: ([\d.]+) bits each", capsys.readouterr().out)
        assert found and 1 <= float(found[1]) < 1.2
