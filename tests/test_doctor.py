"""The environment report, and that its self-tests find faults."""

import json
import sys

import pytest
import torch
import typer

from bitsparse import backends
from bitsparse.backends import get_backend
from bitsparse.cli import doctor

CPU = torch.device("cpu")


@pytest.fixture
def fast(monkeypatch):
    """One dtype, and the backend that needs no compiling."""
    monkeypatch.setattr(doctor, "_DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(doctor, "_RATE_SHAPE", {"cuda": (64, 64), "cpu": (64, 64)})
    monkeypatch.setattr(doctor, "testable", lambda found: [("reference", CPU)])


def run(capsys, *, rates=True):
    status = 0
    try:
        doctor.doctor(as_json=True, rates=rates)
    except typer.Exit as end:
        status = end.exit_code
    return status, json.loads(capsys.readouterr().out)


def test_a_healthy_machine(fast, capsys):
    with backends.force_backend("reference"):
        status, found = run(capsys)
    assert status == 0 and found["healthy"]
    assert found["packages"]["torch"]
    assert {c["what"] for c in found["checks"]} == {"codings, bfloat16", "blocks, bfloat16"}
    assert all(c["passed"] for c in found["checks"])
    kinds = {r["device"] for r in found["rates"]}
    assert "cpu" in kinds
    for rate in found["rates"]:
        assert rate["gbps"] > 0 and rate["share_of_copy"] > 0
    chosen = {b["device"]: b["name"] for b in found["backends"] if b["chosen"]}
    assert chosen["cpu"] == backends.backend_for(CPU).name


def test_wrong_bits_are_found(fast, capsys, monkeypatch):
    cls = type(get_backend("reference"))
    scatter = cls.scatter

    def wrong(self, *arguments):
        out = scatter(self, *arguments)
        out[-1] ^= 1
        return out

    monkeypatch.setattr(cls, "scatter", wrong)
    status, found = run(capsys)
    assert status == 1 and not found["healthy"]
    failed = {c["what"]: c["detail"] for c in found["checks"] if not c["passed"]}
    assert "NotLossless" in failed["codings, bfloat16"]
    assert found["rates"] == []


def test_wrong_gradients_are_found(fast, capsys, monkeypatch):
    cls = type(get_backend("reference"))
    gradient = cls.gradient

    def wrong(self, *arguments):
        first, second = gradient(self, *arguments)
        return None if first is None else first * 2, second

    monkeypatch.setattr(cls, "gradient", wrong)
    status, found = run(capsys, rates=False)
    assert status == 1
    (failed,) = (c for c in found["checks"] if not c["passed"])
    assert failed["what"] == "blocks, bfloat16" and "the bits differ" in failed["detail"]


def test_without_numba_the_report_says_so(monkeypatch):
    get = backends.get_backend

    def without(name):
        if name == "cpu":
            raise ImportError("No module named 'numba'")
        return get(name)

    monkeypatch.setattr(backends, "get_backend", without)
    states = {b.name: b for b in doctor._backends("cpu")}
    assert not states["cpu"].usable and "numba" in states["cpu"].detail
    assert states["reference"].chosen


def test_without_cuda_python_packages(monkeypatch):
    monkeypatch.delitem(sys.modules, "bitsparse.backends.cuda", raising=False)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    found = doctor._caches()
    assert "cuda" not in found and found["triton"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_its_backends_say_why():
    states = [b for b in doctor.diagnose().backends if b.device == "cuda"]
    assert [b.name for b in states] == ["cuda", "triton"]
    assert not any(b.usable or b.chosen for b in states) and all(b.detail for b in states)


def test_what_is_printed(fast, capsys):
    doctor.doctor(as_json=False, rates=False)
    out = capsys.readouterr().out
    assert "bitsparse" in out and "chosen" in out and out.rstrip().endswith("healthy")
