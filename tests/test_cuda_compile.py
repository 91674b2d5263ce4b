"""Every kernel in CUDA C++ compiles for every supported GPU, on a machine without one."""

import itertools

import pytest

from bitsparse import codings, dtypes
from bitsparse.activations import ACTIVATIONS
from bitsparse.dtypes import COMPUTE_DTYPES

pytest.importorskip("cuda.core", reason="needs cuda-core")

from bitsparse.backends import cuda
from bitsparse.backends.cuda import compile_kernel

CAPABILITIES = [(8, 0), (9, 0), (10, 0), (12, 0)]


def names() -> list[str]:
    """Template instances: every value of every argument, every activation with every dtype."""
    sixteen = [d for d in COMPUTE_DTYPES if d.itemsize == 2]
    flags = ("false", "true")
    found = ["bucket", "scan"]
    supports = itertools.cycle(codings.SUPPORTS)
    values = [codings.value_coding(name) for name in codings.VALUES]
    pairs = itertools.cycle(itertools.product(values, reversed(values)))
    for dtype in sixteen:
        m = dtypes.mantissa_bits(dtype)
        found += [f"survey<{flag}, {m}>" for flag in flags]
        fitting = [v for v in values if v.field < dtypes.exponent_bits(dtype)]
        for v, flag in itertools.product(fitting, flags):
            found.append(f"encode<{v.width(dtype)}, {v.field}, {m}, {flag}>")
        found += [f"pack<{v.width(dtype)}, {v.field}, {m}>" for v in fitting]
        for v in fitting:
            one = f"{v.width(dtype)}, {v.field}"
            found.append(f"decode<{next(supports)}, {m}, {one}, {one}, false, false, false, false>")
        for a in ACTIVATIONS.values():
            gated, squared, two = (flags[f] for f in (a.gated, a.squared, a.relu_up))
            # Rounding late makes a difference for products of three factors.
            for late in flags if a.gated and a.squared else flags[:1]:
                statistics = flags[late == "false"]
                found.append(f"activate<{m}, {gated}, {squared}, {two}, {late}, {statistics}>")
                gate, up = next(pairs)
                coding = f"{next(supports)}, {m}, {gate.width(dtype)}, {gate.field}, "
                coding += f"{up.width(dtype)}, {up.field}, {gated}, {squared}, {two}, {late}"
                found.append(f"decode<{coding}>")
                need_up = flags[a.gated]
                found.append(f"gradient<{coding}, true, {need_up}>")
                if a.gated:
                    found.append(f"gradient<{coding}, false, true>")
    return found


def test_compiled_code_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("BITSPARSE_CACHE_DIR", str(tmp_path))
    assert cuda.cache_directory() == tmp_path
    first = compile_kernel("scan", (9, 0)).code
    assert first in [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()]
    monkeypatch.setattr(cuda, "Program", None)  # nothing is compiled from here on
    again = compile_kernel("scan", (9, 0))
    assert again.code == first
    assert again.symbol_mapping["scan"]
    with pytest.raises(TypeError):
        compile_kernel("scan", (8, 0))


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BITSPARSE_CACHE_DIR", str(tmp_path / "file"))
    assert compile_kernel("scan", (9, 0)).code


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: "sm_{}{}".format(*c))
def test_kernels_compile(capability, tmp_path, monkeypatch):
    monkeypatch.setenv("BITSPARSE_CACHE_DIR", str(tmp_path))
    every = names()
    # All of them for one, for the others some of each kernel: the source is the same.
    first = {n.split("<")[0]: n for n in reversed(every)}
    some = every if capability == (9, 0) else [*first.values(), *every[::6]]
    for name in some:
        assert len(compile_kernel(name, capability).code) > 0, name
