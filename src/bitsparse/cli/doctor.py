"""``bitsparse doctor``."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import bitsparse
from bitsparse import backends, codings, dtypes, layout
from bitsparse.backends.base import backend_names
from bitsparse.bench.inputs import bernoulli
from bitsparse.bench.lossless import compress_checked
from bitsparse.bench.timing import Task, alternate, reason, same_bits
from bitsparse.nn import FeedForward
from bitsparse.training.compare import environment

PACKAGES = (
    *("torch", "numpy", "numba", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"),
    *("transformers", "safetensors", "typer", "rich"),
)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SHAPE = (256, 128)
_RATE_SHAPE = {"cuda": (8192, 8192), "cpu": (1024, 1024)}
_DENSITY = 0.1
_REPETITIONS = 5


@dataclass
class Check:
    """One self-test."""

    backend: str
    device: str
    what: str
    passed: bool
    detail: str = ""


@dataclass
class BackendState:
    """One backend for one kind of device."""

    device: str
    name: str
    chosen: bool
    usable: bool
    detail: str = ""
    """Why it is not."""


@dataclass
class Rate:
    """How fast bytes of a dense bfloat16 tensor are worked on."""

    device: str
    what: str
    gbps: float
    """1e9 bytes of the dense tensor per second."""
    share_of_copy: float


@dataclass
class Diagnosis:
    """All that was found out."""

    environment: dict[str, Any]
    packages: dict[str, str | None]
    driver: str | None
    devices: list[dict[str, Any]]
    backends: list[BackendState]
    caches: dict[str, str]
    checks: list[Check] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether every self-test passed."""
        return all(check.passed for check in self.checks)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    rates: Annotated[bool, typer.Option(help="Measure bandwidth too.")] = True,
) -> None:
    """Report on this installation, for bug reports, and test it.

    Versions, devices, which backend is chosen and why others are not; then every coding on every
    backend that can be used, bit for bit, and how fast they are beside a copy. The exit status is 1
    if a test fails. The first run compiles kernels, which can take a minute.
    """
    console = Console(stderr=as_json)
    with console.status("looking at this machine"):
        found = diagnose()
    with console.status("testing") as status:
        for backend, device in testable(found):
            status.update(f"testing: {backend}")
            found.checks += self_test(backend, device)
        if rates and found.healthy:
            status.update("measuring bandwidth")
            for kind in dict.fromkeys(b.device for b in found.backends if b.chosen):
                found.rates += measure(torch.device(kind))
    if as_json:
        print(json.dumps({**asdict(found), "healthy": found.healthy}, indent=1))
    else:
        show(console, found)
    if not found.healthy:
        raise typer.Exit(1)


# --------------------------------------------------------------------------------- looking


def diagnose() -> Diagnosis:
    """What can be said without running a kernel."""
    kinds = (["cuda"] if torch.cuda.is_available() else []) + ["cpu"]
    return Diagnosis(
        environment(torch.device(kinds[0])),
        {name: _version(name) for name in PACKAGES},
        _driver(),
        _devices(),
        _without_gpu() + [state for kind in kinds for state in _backends(kind)],
        _caches(),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The version of the NVIDIA driver, if there is one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def _devices() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"device": "cpu", "name": platform.processor() or platform.machine(),
         "threads": torch.get_num_threads()}
    ]  # fmt: skip
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        found.append(
            {
                "device": f"cuda:{i}",
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": total,
                "free_bytes": free,
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found


def _backends(kind: str) -> list[BackendState]:
    """Those for devices of this kind, fastest first; the first that can be used is chosen."""
    found: list[BackendState] = []
    for name in backend_names(kind):
        problem = _problem(name, kind)
        chosen = not problem and not any(b.chosen for b in found)
        found.append(BackendState(kind, name, chosen, not problem, problem))
    return found


def _without_gpu() -> list[BackendState]:
    """The backends of GPUs where no GPU can be used."""
    if torch.cuda.is_available():
        return []
    why = "no GPU can be used"
    if torch.version.cuda is None and torch.version.hip is None:
        why = "this PyTorch was built without CUDA"
    names = [name for name in backend_names("cuda") if name != "reference"]
    return [BackendState("cuda", name, False, False, why) for name in names]


def _problem(name: str, kind: str) -> str:
    """Why a backend cannot be used; empty: it can."""
    try:
        backends.get_backend(name)
    except Exception as error:  # whatever a broken installation raises is what is asked for
        return reason(error)
    if name == "cuda" and kind == "cuda":
        # Imported here: it needs packages that may not be there.
        from bitsparse.backends import cuda

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not cuda._works(torch.cuda.current_device()):
                said = [str(w.message) for w in caught]
                return said[0] if said else "the GPU is older than compute capability 8.0"
    return ""


def _caches() -> dict[str, str]:
    """Folders that kernels are kept in, by what writes them."""
    home = Path.home()
    found = {"triton": os.environ.get("TRITON_CACHE_DIR") or str(home / ".triton" / "cache")}
    try:
        from bitsparse.backends.cuda import cache_directory
    except Exception:  # without it nothing is cached there
        return found
    return {"cuda": str(cache_directory()), **found}


# --------------------------------------------------------------------------------- testing


def testable(found: Diagnosis) -> Iterator[tuple[str, torch.device]]:
    """The backends that can be used here, each with a device that it serves."""
    seen = set()
    for state in found.backends:
        if state.usable and state.name not in seen:
            seen.add(state.name)
            yield state.name, torch.device(state.device)


def self_test(backend: str, device: torch.device) -> list[Check]:
    """Every coding, to the bit, and a block's gradients against plain PyTorch."""
    found = []
    with backends.force_backend(backend):
        for dtype in _DTYPES:
            name = str(dtype).removeprefix("torch.")
            tests = {f"codings, {name}": lambda dtype=dtype: _test_codings(dtype, device)}
            tests[f"blocks, {name}"] = lambda dtype=dtype: _test_blocks(dtype, device)
            for what, run in tests.items():
                try:
                    run()
                    found.append(Check(backend, str(device), what, True))
                except Exception as error:  # a kernel that does not compile, wrong bits
                    found.append(Check(backend, str(device), what, False, reason(error)))
    return found


def _test_codings(dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless every coding gives back the bits of random values and of special ones."""
    plain = bernoulli(_SHAPE, _DENSITY, torch.device("cpu"), 0).to(dtype)
    special = plain.clone()
    values = [float("nan"), float("inf"), -float("inf"), -0.0, -1.5, torch.finfo(dtype).tiny / 4]
    special.view(-1)[: len(values)] = torch.tensor(values, dtype=dtype)
    for x in (plain.to(device), special.to(device), torch.ones_like(plain, device=device)):
        for policy in codings.POLICIES:
            compress_checked(x, policy, codec=policy)
        signed = bool(torch.signbit(x).any())
        nonzeros = int(torch.count_nonzero(dtypes.to_patterns(x)))
        for support in codings.SUPPORTS:
            if not codings.support_coding(support).applies(layout.geometry(x.shape), nonzeros):
                continue
            for value in codings.VALUES:
                if codings.value_coding(value).applies(dtype, signed):
                    compress_checked(x, f"{support} + {value}", support, value)


def _test_blocks(dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless output and gradients are those of plain PyTorch."""
    for activation in ("relu", "relu2", "reglu"):
        torch_state = torch.get_rng_state()
        torch.manual_seed(0)
        block = FeedForward(64, 128, activation, dtype=dtype)
        x = torch.randn(_SHAPE[0], 64, dtype=dtype)
        torch.set_rng_state(torch_state)
        block.to(device)
        results = []
        for memory in ("dense", "compressed"):
            block.memory = memory
            leaf = x.to(device).requires_grad_()
            block.zero_grad()
            out = block(leaf)
            out.float().square().mean().backward()
            results.append([out.detach(), leaf.grad, *(p.grad for p in block.parameters())])
        if not all(same_bits(a, b) for a, b in zip(*results, strict=True)):
            raise ValueError(f"{activation}: the bits differ from those of plain PyTorch")


def measure(device: torch.device) -> list[Rate]:
    """A copy, and ``compress`` and ``to_dense`` of the backend that is chosen."""
    x = bernoulli(_RATE_SHAPE[device.type], _DENSITY, device, 0)
    target, c = torch.empty_like(x), bitsparse.compress(x)
    tasks = {
        "copy": Task(lambda _: target.copy_(x)),
        "compress": Task(lambda _: bitsparse.compress(x)),
        "to_dense": Task(lambda _: c.to_dense()),
    }
    seconds = {k: min(v) for k, v in alternate(tasks, device, _REPETITIONS, warmup=2).items()}
    return [
        Rate(device.type, name, x.nbytes / s / 1e9, seconds["copy"] / s)
        for name, s in seconds.items()
    ]


# --------------------------------------------------------------------------------- showing


def show(console: Console, found: Diagnosis) -> None:
    """Print everything."""

    def line(text: str, style: str | None = None) -> None:
        console.print(escape(text), highlight=False, style=style, soft_wrap=True)

    e = found.environment
    line(f"bitsparse {e['bitsparse']}, Python {e['python']}, {e['system']}")
    line(f"CUDA of PyTorch: {e['cuda'] or 'none'}; NVIDIA driver: {found.driver or 'none'}")
    line("packages: " + ", ".join(f"{n} {v or 'missing'}" for n, v in found.packages.items()))
    for device in found.devices:
        extra = ", ".join(f"{k} {v}" for k, v in device.items() if k not in ("device", "name"))
        line(f"{device['device']}: {device['name']}, {extra}")
    table = Table(title="backends", title_justify="left")
    for column in ("device", "backend", "", "why"):
        table.add_column(column, overflow="fold")
    for b in found.backends:
        state = "chosen" if b.chosen else "usable" if b.usable else "cannot be used"
        table.add_row(b.device, b.name, state, escape(b.detail))
    console.print(table)
    for name, folder in found.caches.items():
        line(f"compiled kernels of {name}: {folder}")
    for check in found.checks:
        passed = "passed" if check.passed else f"FAILED: {check.detail}"
        line(
            f"{check.backend} on {check.device}: {check.what}: {passed}",
            None if check.passed else "bold red",
        )
    for rate in found.rates:
        line(
            f"{rate.device}: {rate.what} {rate.gbps:,.1f} GB/s of dense bfloat16, "
            f"{rate.share_of_copy:.2f} of a copy"
        )
    line("healthy" if found.healthy else "a self-test failed: please report it with all of this")
