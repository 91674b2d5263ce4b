"""Every Triton kernel compiles for every supported GPU, on a machine without one.

Run as a script (``python tests/test_triton_compile.py TARGET``) this file compiles; as a test it
starts that script, since the test process may have Triton's interpreter switched on, which takes
effect where kernels are defined.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)  # compile for real
    result = subprocess.run(
        [sys.executable, __file__, target], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


# ---------------------------------------------------------------------------- the script

Case = tuple[dict[str, str], dict[str, Any]]
"""Types of the arguments, values of the compile-time arguments."""

DTYPES = (("*i32", 0, 32), ("*i16", 1, 16), ("*i16", 2, 16))
"""Pointer to the patterns, ``KIND`` and bits of float32, float16 and bfloat16."""


def _cases() -> dict[str, Iterator[Case]]:
    """For each kernel of the backend, what it is compiled with.

    Not the full product of independent arguments: every value of each one, every activation with
    every dtype, and every value coding with every dtype.
    """
    import torch

    from bitsparse import codings
    from bitsparse.activations import ACTIVATIONS
    from bitsparse.backends import triton as backend
    from bitsparse.layout import TILE

    support = [codings.support_coding(name) for name in codings.SUPPORTS]
    values = [codings.value_coding(name) for name in codings.VALUES]
    torch_dtypes = {0: torch.float32, 1: torch.float16, 2: torch.bfloat16}
    # numel beyond 2**31 comes with 64-bit offsets.
    sizes = itertools.cycle([("i32", "*i32"), ("i64", "*i64")])

    def stream(coding: Any, dtype: Any, prefix: str = "") -> tuple[str, dict[str, Any]]:
        pointer = {torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32"}
        load = {
            f"LOAD_{prefix}" if prefix else "LOAD": coding.triton_load,
            f"{prefix}_WIDTH".lstrip("_"): coding.width(dtype),
            f"{prefix}_STRIDE".lstrip("_"): coding.stream_length(32, dtype),
        }
        return pointer[coding.stream_dtype(dtype)], load

    def find_support() -> Iterator[Case]:
        for s, (pointer, sign) in itertools.product(
            support, (("*u8", 7), ("*i16", 15), ("*i32", 31))
        ):
            numel, _ = next(sizes)
            types = {"patterns_ptr": pointer, "mask_ptr": "*i32", "counts_ptr": "*i32"}
            constants = {"INDEX": s.triton_index, "STORE": s.triton_store, "SIGN_BIT": sign}
            yield {**types, "numel": numel}, {**constants, "TILE": TILE}

    def activate() -> Iterator[Case]:
        for s, a, (pointer, kind, _) in itertools.product(support, ACTIVATIONS.values(), DTYPES):
            for late in {False, a.gated and a.squared and kind != 0}:
                numel, _ = next(sizes)
                types = dict.fromkeys(("gate_ptr", "up_ptr", "hidden_ptr"), pointer)
                types |= dict.fromkeys(("mask_ptr", "up_mask_ptr", "counts_ptr"), "*i32")
                constants = {"KIND": kind, "GATED": a.gated, "SQUARED": a.squared}
                constants |= {"RELU_UP": a.relu_up, "FP32_MATH": late, "TILE": TILE}
                constants |= {"INDEX": s.triton_index, "STORE": s.triton_store}
                yield {**types, "numel": numel}, constants

    def scan() -> Iterator[Case]:
        for offsets in ("*i32", "*i64"):
            types = {"counts_ptr": "*i32", "offsets_ptr": offsets, "totals_ptr": "*i64"}
            yield (
                {**types, "tiles": "i32"},
                {"BLOCK": backend._SCAN_BLOCK, "num_warps": backend._SCAN_WARPS},
            )

    def gather() -> Iterator[Case]:
        forms = [(pointer, kind, True) for pointer, kind, _ in DTYPES]
        forms += [(pointer, 0, False) for pointer in ("*u8", "*i16", "*i32")]
        for s, (pointer, kind, relu) in itertools.product(support, forms):
            numel, offsets = next(sizes)
            types = {"source_ptr": pointer, "mask_ptr": "*i32", "offsets_ptr": offsets}
            constants = {"KIND": kind, "RELU": relu, "LOCATE": s.triton_locate, "TILE": TILE}
            yield {**types, "out_ptr": pointer, "numel": numel}, constants

    def pack() -> Iterator[Case]:
        for pointer, width in (("*u8", 7), ("*i16", 15), ("*i32", 31)):
            for size in ("i32", "i64"):
                types = {"patterns_ptr": pointer, "stream_ptr": "*i32", "count": size}
                yield (
                    {**types, "words": size},
                    {"WIDTH": width, "BLOCK": backend._PACK_BLOCK},
                )

    def scatter() -> Iterator[Case]:
        outs = (
            ("*u8", torch.float8_e4m3fn),
            ("*i16", torch.bfloat16),
            ("*i32", torch.float32),
        )
        for s, value, (out, dtype) in itertools.product(support, values, outs):
            for numel, offsets in (("i32", "*i32"), ("i64", "*i64")):
                pointer, load = stream(value, dtype)
                types = {"stream_ptr": pointer, "mask_ptr": "*i32", "offsets_ptr": offsets}
                constants = {**load, "LOCATE": s.triton_locate, "TILE": TILE}
                yield {**types, "out_ptr": out, "numel": numel}, constants

    def decoding() -> Iterator[tuple[Any, Any, str, dict[str, str], dict[str, Any]]]:
        """What the two kernels that compute on coded values share."""
        pairs = itertools.cycle(itertools.product(values, values))
        for s, a, (pointer, kind, _) in itertools.product(support, ACTIVATIONS.values(), DTYPES):
            if not a.gated and not a.squared:
                continue
            # The cycle gives every pair of codings to several activations and dtypes.
            for late in (False, True) if kind != 0 else (False,):
                numel, offsets = next(sizes)
                gate, up = next(pairs)
                gate_pointer, gate_load = stream(gate, torch_dtypes[kind], "GATE")
                up_pointer, up_load = stream(up, torch_dtypes[kind], "UP")
                types = {"gate_ptr": gate_pointer, "up_ptr": up_pointer}
                types |= {"mask_ptr": "*i32", "offsets_ptr": offsets, "numel": numel}
                constants = {**gate_load, **up_load, "KIND": kind, "GATED": a.gated}
                constants |= {"SQUARED": a.squared, "FP32_MATH": late, "TILE": TILE}
                yield s, a, pointer, types, {**constants, "LOCATE": s.triton_locate}

    def hidden() -> Iterator[Case]:
        for _, _, pointer, types, constants in decoding():
            yield {**types, "out_ptr": pointer}, constants

    def mask_gradient() -> Iterator[Case]:
        for s, (pointer, _, _) in itertools.product(support, DTYPES[:2]):
            for numel in ("i32", "i64"):
                yield (
                    {"grad_ptr": pointer, "mask_ptr": "*i32", "numel": numel},
                    {"LOCATE": s.triton_locate, "TILE": TILE},
                )

    def gradient() -> Iterator[Case]:
        needs = itertools.cycle([(True, True), (True, False), (False, True)])
        for _, a, pointer, types, constants in decoding():
            grads = dict.fromkeys(("grad_ptr", "grad_gate_ptr", "grad_up_ptr"), pointer)
            masks = dict.fromkeys(("value_mask_ptr", "up_mask_ptr"), "*i32")
            need_gate, need_up = next(needs) if a.gated else (True, False)
            yield (
                {**types, **grads, **masks},
                {
                    **constants,
                    "RELU_UP": a.relu_up,
                    "NEED_GATE": need_gate,
                    "NEED_UP": need_up,
                },
            )

    return {
        "find_support_kernel": find_support(),
        "activate_kernel": activate(),
        "scan_kernel": scan(),
        "gather_kernel": gather(),
        "pack_kernel": pack(),
        "scatter_kernel": scatter(),
        "hidden_kernel": hidden(),
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
    target = GPUTarget(*TARGETS[target_name])
    for name, kernel in kernels.items():
        count = 0
        for types, constants in cases[name]:
            _compile(kernel, types, constants, target)
            count += 1
        assert count, f"{name}: no cases"
        # A launch turns a size of 1 into a constant.
        sizes = [n for n in ("numel", "tiles", "count", "words") if n in types]
        types = {n: t for n, t in types.items() if n not in sizes}
        _compile(kernel, types, constants | dict.fromkeys(sizes, 1), target)
        print(f"{name}: {count} compiled for {target_name}")


if __name__ == "__main__":
    main(sys.argv[1])
