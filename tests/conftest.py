"""Fixtures shared by all tests. With a GPU the same tests run there too."""

import importlib.util
import os

import torch

if not torch.cuda.is_available():
    # Read when kernels are defined: Triton then interprets them on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from bitsparse.backends import force_backend
from bitsparse.backends.optional import HAVE_TRITON

CUDA = torch.cuda.is_available()
DEVICES = ["cpu"] + (["cuda"] if CUDA else [])
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")

BACKENDS = ["reference-cpu", "cpu-cpu"]
if CUDA:
    BACKENDS += ["reference-cuda", "triton-cuda"]
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core"):
        BACKENDS += ["cuda-cuda"]
elif HAVE_TRITON:
    BACKENDS += ["triton-cpu"]  # interpreted


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device of this machine, with the backend that serves it."""
    return torch.device(request.param)


@pytest.fixture(params=BACKENDS)
def backend_device(request: pytest.FixtureRequest):
    """A device to put tensors on, while one backend is forced."""
    name, device = request.param.split("-")
    with force_backend(name):
        yield torch.device(device)


@pytest.fixture
def interpreted(backend_device: torch.device, request: pytest.FixtureRequest) -> bool:
    """Whether this backend is the slow Triton interpreter: use small inputs."""
    return request.node.callspec.params["backend_device"] == "triton-cpu"
