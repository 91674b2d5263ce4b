"""The kernel that computes activations again compiles for every supported GPU, without one.

As a script this file compiles; see test_triton_compile.py, which does the same for the other
kernels.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from helpers import COMPILE_TARGETS, assert_compiles

KINDS = {"fp32": (0, "*i32"), "fp16": (1, "*i16"), "bf16": (2, "*i16")}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", COMPILE_TARGETS)
def test_kernel_compiles(target: str, tmp_path: Path) -> None:
    assert_compiles(__file__, target, tmp_path)


def main(target_name: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bitsparse.activations import ACTIVATIONS
    from bitsparse.backends.triton_recompute import recompute_kernel as kernel

    target = GPUTarget(*COMPILE_TARGETS[target_name])
    modes = itertools.cycle([(False, False, False), (True, True, True), (True, False, True)])
    flags = itertools.cycle([(False, False, False), (True, True, True)])
    for a, (name, (kind, pattern)) in itertools.product(ACTIVATIONS.values(), KINDS.items()):
        for _ in range(3 if target_name == "sm_90" else 1):
            gradient, need_gate, need_up = next(modes)
            late, gate_bias, up_bias = next(flags)
            wide = kind == 0
            constants = {
                "KIND": kind,
                "GATED": a.gated,
                "SQUARED": a.squared,
                "RELU_UP": a.relu_up,
                "FP32_MATH": late,
                "GATE_BIAS": gate_bias,
                "UP_BIAS": up_bias and a.gated,
                "GRADIENT": gradient,
                "NEED_GATE": need_gate or (gradient and not a.gated),
                "NEED_UP": need_up and a.gated,
                "BLOCK_ROWS": 64 if wide else 128,
                "BLOCK_COLS": 64 if wide or a.gated else 128,
                "BLOCK_DEPTH": 32 if wide else 64,
            }
            types = {}
            for argument in kernel.arg_names:
                if argument.endswith("_ptr"):
                    types[argument] = f"*{name}"
                elif argument not in constants:
                    types[argument] = "i32"
                if argument in ("gate_ptr", "up_ptr"):
                    types[argument] = pattern
            types["fits_ptr"] = "*u8"
            # A launch turns a stride of 1 into a constant.
            constants |= dict.fromkeys(("x_col", "w_gate_col", "w_up_col", "grad_out_col"), 1)
            signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
            aligned = {
                (i,): [["tt.divisibility", 16]]
                for i, n in enumerate(kernel.arg_names)
                if n not in constants
            }
            compiled = triton.compile(
                ASTSource(kernel, signature, constants, aligned),
                target=target,
                options={
                    "num_warps": 4 if wide else 8,
                    "num_stages": 2,
                    "enable_fp_fusion": False,
                },
            )
            binary = "cubin" if target.backend == "cuda" else "hsaco"
            assert len(compiled.asm[binary]) > 0
            print(a.name, name, gradient, compiled.metadata.shared)


if __name__ == "__main__":
    main(sys.argv[1])
