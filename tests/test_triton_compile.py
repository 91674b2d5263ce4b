"""Every Triton kernel compiles for every supported GPU, on a machine without one.

Run as a script (``python tests/test_triton_compile.py TARGET``) this file compiles; as a test it
starts that script, since the test process may have Triton's interpreter switched on, which takes
effect where kernels are defined.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import COMPILE_TARGETS, assert_compiles

FIRST = "sm_90"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", COMPILE_TARGETS)
def test_kernels_compile(target: str, tmp_path: Path) -> None:
    assert_compiles(__file__, target, tmp_path)


# ---------------------------------------------------------------------------- the script

Case = tuple[dict[str, str], dict[str, Any]]
"""Types of the arguments, values of the compile-time arguments."""

COMPUTE = {"float32": 0, "float16": 1, "bfloat16": 2}
"""``KIND`` of the dtypes that kernels compute in."""

POINTERS = {1: "*u8", 2: "*i16", 4: "*i32"}

GEOMETRIES = (
    {"HEIGHT": 1, "ALIGNED": False},
    {"HEIGHT": 64, "ALIGNED": True},
    {"HEIGHT": 64, "ALIGNED": False},
)


def _cases() -> dict[str, Iterator[Case]]:
    """For each kernel of the backend, what it is compiled with.

    Not the full product of independent arguments: every value of each one, every activation with
    every dtype, and every form of value coding with every dtype that it applies to.
    """
    import torch

    from bitsparse import codings, dtypes
    from bitsparse.activations import ACTIVATIONS
    from bitsparse.backends import triton as backend

    supports = itertools.cycle(codings.support_coding(name) for name in codings.SUPPORTS)
    geometries = itertools.cycle(GEOMETRIES)
    statistics = itertools.cycle((True, False))
    # Of codings that differ in a width only, and of dtypes that differ in nothing, one.
    values = [
        codings.value_coding(name) for name in ("raw", "unsigned", "exponent4", "signed_exponent3")
    ]
    formats = {(d.itemsize, dtypes.mantissa_bits(d)): d for d in dtypes.SUPPORTED_DTYPES}
    stored = list(formats.values())
    compute = [(getattr(torch, name), kind) for name, kind in COMPUTE.items()]
    sizes = {"rows": "i32", "cols": "i32", "mask_words": "i32"}
    # 64-bit sizes: more than 2**31 rows, columns or words.
    long = dict.fromkeys(sizes, "i64")
    size_types = itertools.cycle([sizes, sizes, long])

    def pointer(dtype: Any) -> str:
        return POINTERS[dtype.itemsize]

    def fields(dtype: Any) -> dict[str, int]:
        return {"MANTISSA": dtypes.mantissa_bits(dtype), "EXPONENT": dtypes.exponent_bits(dtype)}

    def mask(prefix: str = "") -> dict[str, str]:
        types = {"mask_ptr": "*i32", "buckets_ptr": "*u8", "bucket_offsets_ptr": "*i32"}
        return {prefix + name: t for name, t in types.items()}

    def stream(prefix: str, coding: Any, dtype: Any) -> tuple[dict[str, str], dict[str, Any]]:
        width = coding.width(dtype)
        packed = width < dtypes.bit_width(dtype)
        types = {
            "ptr": "*i32" if packed else pointer(dtype),
            "exponents_ptr": "*u8",
            "escapes_ptr": "*u8",
            "escape_offsets_ptr": "*i32",
        }
        constants = {"WIDTH": width, "PACKED": packed, "FIELD": coding.field}
        return (
            {f"{prefix}_{name}": t for name, t in types.items()},
            {f"{prefix.upper()}_{name}": c for name, c in constants.items()},
        )

    def survey() -> Iterator[Case]:
        for dtype, statistics in itertools.product(stored, (False, True)):
            types = {"patterns_ptr": pointer(dtype), "words_ptr": "*i32", "counts_ptr": "*i32"}
            types |= {"exponents_ptr": "*u8", **next(size_types), "tiles": "i32"}
            yield types, {**next(geometries), **fields(dtype), "STATISTICS": statistics}

    def activate() -> Iterator[Case]:
        for a, (dtype, kind) in itertools.product(ACTIVATIONS.values(), compute):
            for late in {False, a.gated and a.squared and kind != 0}:
                types = dict.fromkeys(("gate_ptr", "up_ptr", "hidden_ptr"), pointer(dtype))
                types |= dict.fromkeys(("words_ptr", "up_words_ptr", "counts_ptr"), "*i32")
                types |= {"exponents_ptr": "*u8", **next(size_types), "tiles": "i32"}
                constants = {"KIND": kind, "GATED": a.gated, "SQUARED": a.squared}
                constants |= {"RELU_UP": a.relu_up, "FP32_MATH": late, **fields(dtype)}
                yield types, {**constants, **next(geometries), "STATISTICS": next(statistics)}

    def scan() -> Iterator[Case]:
        types = {"counts_ptr": "*i32", "tables_ptr": "*i16", "totals_ptr": "*i64"}
        yield (
            {**types, "tiles": "i32", "table_words": "i32"},
            {"BLOCK": backend._SCAN_BLOCK, "num_warps": backend._SCAN_WARPS},
        )

    def bucket() -> Iterator[Case]:
        for size in ("i32", "i64"):
            yield {"words_ptr": "*i32", **mask(), "mask_words": size}, {}

    def gather() -> Iterator[Case]:
        forms = [(dtype, kind, True) for dtype, kind in compute]
        forms += [(dtype, 0, False) for dtype in stored]
        flat = codings.support_coding("flat").triton_words
        for (dtype, kind, relu), coding in itertools.product(forms, values):
            if not coding.applies(dtype, False):
                continue
            types = {"source_ptr": pointer(dtype), "words_ptr": "*i32", "up_words_ptr": "*i32"}
            types |= {"offsets_ptr": "*i32", "out_ptr": pointer(dtype), "exponents_ptr": "*u8"}
            types |= {"escapes_ptr": "*u8", "escape_offsets_ptr": "*i32", **next(size_types)}
            constants = {"KIND": kind, "RELU": relu, "TWO_MASKS": relu and coding.field == 0}
            constants |= {"FIELD": coding.field, "WORDS": flat, **fields(dtype)}
            yield types, {**constants, **next(geometries)}

    def pack() -> Iterator[Case]:
        for dtype, coding in itertools.product(stored, values):
            width = coding.width(dtype)
            if coding.applies(dtype, False) and width < dtypes.bit_width(dtype):
                size = next(size_types)["rows"]
                types = {"patterns_ptr": pointer(dtype), "stream_ptr": "*i32", "count": size}
                yield {**types, "words": size}, {"WIDTH": width, "BLOCK": backend._PACK_BLOCK}

    def decoding(dtype: Any, gate: Any, up: Any) -> tuple[dict[str, str], dict[str, Any]]:
        """What the two kernels that read coded values share."""
        gate_types, gate_constants = stream("gate", gate, dtype)
        up_types, up_constants = stream("up", up, dtype)
        types = {**mask(), **mask("up_"), "offsets_ptr": "*i32", **gate_types, **up_types}
        constants = {**gate_constants, **up_constants, **fields(dtype), **next(geometries)}
        constants |= {"WORDS": next(supports).triton_words}
        return {**types, **next(size_types)}, constants

    def computing() -> Iterator[tuple[Any, Any, Case]]:
        pairs = itertools.cycle(itertools.product(values, values))
        # Pair after pair of codings, for every activation, dtype and way to round.
        for a, (dtype, kind) in itertools.product(ACTIVATIONS.values(), compute):
            if a.plain:
                continue
            for late in (False, True) if kind != 0 else (False,):
                types, constants = decoding(dtype, *next(pairs))
                constants |= {"KIND": kind, "GATED": a.gated, "SQUARED": a.squared}
                constants |= {"FP32_MATH": late, "TWO_MASKS": a.relu_up}
                yield a, dtype, (types, constants)

    def scatter() -> Iterator[Case]:
        for dtype, coding in itertools.product(stored, values):
            if coding.applies(dtype, False):
                types, constants = decoding(dtype, coding, coding)
                constants |= {"KIND": 0, "GATED": False, "SQUARED": False}
                constants |= {"FP32_MATH": False, "TWO_MASKS": False}
                yield {**types, "out_ptr": pointer(dtype)}, constants
        for _, dtype, (types, constants) in computing():
            yield {**types, "out_ptr": pointer(dtype)}, constants

    def mask_gradient() -> Iterator[Case]:
        for (dtype, _), _, _ in itertools.product(compute[:2], GEOMETRIES, codings.SUPPORTS):
            types = {"grad_ptr": pointer(dtype), **mask(), **next(size_types)}
            yield types, {**next(geometries), "WORDS": next(supports).triton_words}
        next(supports)  # another pairing with the geometries from here on

    def gradient() -> Iterator[Case]:
        needs = itertools.cycle([(True, True), (True, False), (False, True)])
        for a, dtype, (types, constants) in computing():
            grads = ("grad_ptr", "grad_gate_ptr", "grad_up_ptr")
            need_gate, need_up = next(needs) if a.gated else (True, False)
            yield (
                {**types, **dict.fromkeys(grads, pointer(dtype))},
                {**constants, "NEED_GATE": need_gate, "NEED_UP": need_up},
            )

    return {
        "survey_kernel": survey(),
        "activate_kernel": activate(),
        "scan_kernel": scan(),
        "bucket_kernel": bucket(),
        "gather_kernel": gather(),
        "pack_kernel": pack(),
        "scatter_kernel": scatter(),
        "mask_gradient_kernel": mask_gradient(),
        "gradient_kernel": gradient(),
    }


def _compile(kernel: Any, types: dict[str, str], constants: dict[str, Any], target: Any) -> None:
    """Compile as a launch would: pointers and sizes divisible by 16, the usual case."""
    import triton
    from triton.compiler import ASTSource

    options = {"num_warps": constants.get("num_warps", 4), "enable_fp_fusion": False}
    constants = {k: v for k, v in constants.items() if k != "num_warps"}
    names = kernel.arg_names
    unknown = set(names) ^ (set(types) | set(constants))
    assert not unknown, f"{kernel.__name__}: arguments differ from the case's: {unknown}"
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in types}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned), target=target, options=options
    )
    binary = "cubin" if target.backend == "cuda" else "hsaco"
    assert len(compiled.asm[binary]) > 0


def main(target_name: str) -> None:
    from triton import JITFunction
    from triton.backends.compiler import GPUTarget

    from bitsparse.backends import triton as backend

    # Kernels are the public jit functions; the helpers that they call start with "_".
    kernels = {
        name: value
        for name, value in vars(backend).items()
        if isinstance(value, JITFunction) and not name.startswith("_")
    }
    cases = _cases()
    assert kernels, "no kernels found: is TRITON_INTERPRET set?"
    assert kernels.keys() == cases.keys(), f"without a case: {kernels.keys() ^ cases.keys()}"
    target = GPUTarget(*COMPILE_TARGETS[target_name])
    for name, kernel in kernels.items():
        count = 0
        # All of them for one target, for the others every third: most differ in ways that the
        # compiler's front end sees, which is the same for all.
        some = cases[name] if target_name == FIRST else list(cases[name])[::3]
        for types, constants in some:
            _compile(kernel, types, constants, target)
            count += 1
        assert count, f"{name}: no cases"
        # A launch turns a size of 1 into a constant.
        sizes = [n for n in ("rows", "cols", "mask_words", "tiles", "count", "words") if n in types]
        types = {n: t for n, t in types.items() if n not in sizes}
        _compile(kernel, types, constants | dict.fromkeys(sizes, 1), target)
        print(f"{name}: {count} compiled for {target_name}")


if __name__ == "__main__":
    main(sys.argv[1])
