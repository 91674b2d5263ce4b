"""``bitsparse bench``: a group of commands, one for each benchmark.

A command is a module with a function of its name, listed in ``BENCHMARKS``.
"""

from __future__ import annotations

import typer

from bitsparse.cli.bench.codec import codec
from bitsparse.cli.bench.ffn import ffn
from bitsparse.cli.bench.kernels import kernels
from bitsparse.cli.bench.model import model

BENCHMARKS = (codec, kernels, ffn, model)

bench = typer.Typer(help="Measure the parts of the library.")
for command in BENCHMARKS:
    bench.command()(command)
