"""The kernel of ``triton_product`` compiles for Hopper GPUs, without one, and uses what they have.

As a script this file compiles; see test_triton_compile.py, which does the same for the other
kernels. (A file of its own: importing conftest.py switches the interpreter on.)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import COMPILE_TARGETS, assert_compiles


@pytest.mark.timeout(600)
def test_kernel_compiles(tmp_path: Path) -> None:
    pytest.importorskip("triton.tools.tensor_descriptor", reason="needs Triton's descriptors")
    assert_compiles(__file__, "sm_90", tmp_path)


def main(target_name: str) -> None:
    """Compile as a launch on the device would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    from bitsparse.backends import triton_product as kernels

    target = GPUTarget(*COMPILE_TARGETS[target_name])

    class Driver(CudaDriver):
        """Of a GPU that is not there."""

        def __init__(self) -> None:
            pass

        def get_current_target(self) -> GPUTarget:
            return target

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
            return 9, 0

    class Compiled:
        """Called as a kernel is, it compiles for such a call."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: kernels.product_kernel.warmup(*args, grid=grid, **kwargs)

    triton.runtime.driver.set_active(Driver())
    for tokens, d_out, d_ff in ((256, 64, 256), (300, 72, 264)):
        for squared in (False, True):
            grad, w_down, hidden = (
                torch.empty(shape, dtype=torch.bfloat16)
                for shape in ((tokens, d_out), (d_out, d_ff), (tokens, d_ff))
            )
            compiled = kernels.launch(Compiled(), squared, grad, w_down, hidden)
            assert len(compiled.asm["cubin"]) > 0
            ptx = compiled.asm["ptx"]
            assert "wgmma" in ptx, "the product is not that of Hopper's tensor cores"
            assert "cp.async.bulk.tensor" in ptx, "operands are not loaded by TMA"
            assert ("rsqrt.approx" in ptx) == squared
            print(tokens, d_out, d_ff, squared, compiled.metadata.shared, spills(compiled))
    patterns = torch.empty(4096, dtype=torch.int16)
    counts = torch.zeros(2, dtype=torch.int64)
    compare = kernels.compare_kernel.warmup(patterns, patterns, counts, 4096, BLOCK=4096, grid=(1,))
    assert len(compare.asm["cubin"]) > 0


def spills(compiled: Any) -> str:
    """What ``cuobjdump`` says of registers, where Triton brings it."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return " ".join(w for w in done.stdout.split() if w.startswith(("REG:", "STACK:")))


if __name__ == "__main__":
    main(sys.argv[1])
