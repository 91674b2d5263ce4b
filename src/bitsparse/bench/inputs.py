"""What is compressed: activations from files, from a short training run, and synthetic ones."""

from __future__ import annotations

import statistics
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitsparse.training.data import load_corpus
from bitsparse.training.errors import UserError, check_finite, os_error
from bitsparse.training.model import build_model, fit_vocabulary, get_preset
from bitsparse.training.step import Trainee, learning_rate, make_trainee, train_step

FILES, TRAINING, SYNTHETIC = "files", "training", "synthetic"
SOURCES = (FILES, TRAINING, SYNTHETIC)

SYNTHETIC_SHAPE = (512, 3072)
_WARMUP = 10


@dataclass(frozen=True)
class Activations:
    """A named matrix ``[tokens, neurons]``, made or read when asked for."""

    name: str
    source: str
    """One of ``SOURCES``."""
    load: Callable[[], Tensor]
    file: str | None = None
    """Name of the file that it comes from."""


def from_files(paths: Sequence[Path]) -> list[Activations]:
    """The arrays of ``.npz`` files, and of those in folders.

    16-bit integers (and NumPy's 2-byte void, which bfloat16 is saved as) are bit patterns of
    bfloat16; float16 and float32 are what they are.

    Raises:
        UserError: nothing there, or not such a file. An array that cannot be used raises it when it
            is loaded.
    """
    found = []
    for path in _list_files(paths):
        for key in _keys(path):
            found.append(Activations(key, FILES, partial(_load, path, key), path.name))
    return found


def _list_files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("*.npz"))
            if not inside:
                raise UserError(f"--activations: no .npz files in {path}, allowed: at least one")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"--activations: {path} is not there, allowed: a .npz file or a folder")
    return files


def _open(path: Path) -> np.lib.npyio.NpzFile:
    try:
        opened = np.load(path)
    except OSError as error:
        raise UserError(f"--activations: {os_error(path, error)}") from error
    except (ValueError, EOFError, zipfile.BadZipFile):
        opened = None  # neither .npz nor .npy
    if not isinstance(opened, np.lib.npyio.NpzFile):
        raise UserError(f"--activations: {path} is not a .npz file of NumPy")
    return opened


def _keys(path: Path) -> list[str]:
    with _open(path) as arrays:
        if not arrays.files:
            raise UserError(f"--activations: {path} has no arrays, allowed: at least one")
        return sorted(arrays.files)


def _load(path: Path, key: str) -> Tensor:
    try:
        with _open(path) as arrays:
            array = arrays[key]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"--activations: {key} of {path} cannot be read: {error}") from error
    if array.ndim == 0 or array.size == 0:
        raise UserError(
            f"--activations: {key} of {path} has shape {array.shape}, "
            "allowed: [tokens, neurons] with at least one element"
        )
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
    if array.dtype in (np.float16, np.float32):
        return torch.from_numpy(array)
    if array.dtype in (np.int16, np.uint16) or array.dtype == np.dtype("V2"):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    raise UserError(
        f"--activations: {key} of {path} is {array.dtype}, allowed: uint16 or int16 (bit patterns "
        "of bfloat16), float16, float32"
    )


def from_training(
    steps: int,
    activation: str,
    device: torch.device,
    seed: int,
    on_step: Callable[[], None] | None = None,
) -> list[Activations]:
    """What ReLU leaves in each layer of the ``tiny`` preset after ``steps`` steps of training.

    Trained in float32 on the default data; the activations are those of one more batch under
    bfloat16 autocast. For gated activations they are relu(gate), for squared ones relu(up): what a
    compressed block keeps for backward.
    """
    preset = get_preset("tiny")
    corpus = load_corpus([])
    config = fit_vocabulary(replace(preset.model, activation=activation), corpus.vocab_size)
    config.check()
    model = build_model(config, "dense", seed, device)
    trainee = make_trainee(model, "float32", preset.lr, weight_decay=0.1, grad_clip=1.0)
    split, _ = corpus.split(0.0)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        tokens, targets = split.batch(seed, step, 0, preset.batch_size, config.seq_len)
        return tokens.to(device), targets.to(device)

    for step in range(steps):
        loss, _ = train_step(trainee, [batch(step)], learning_rate(step, steps, _WARMUP, preset.lr))
        check_finite(loss.item(), step, "dense")
        if on_step is not None:
            on_step()
    captured = _capture(trainee, batch(steps)[0])
    return [
        Activations(f"{activation}_trained_{i:02d}", TRAINING, partial(_as_is, x))
        for i, x in enumerate(captured)
    ]


@torch.no_grad()
def _capture(trainee: Trainee, tokens: Tensor) -> list[Tensor]:
    """``[tokens, d_ff]`` of each layer, on the CPU."""
    captured: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        captured.append(torch.relu(output).flatten(0, -2).cpu())

    # A block whose projection carries a hook calls it as a module.
    blocks = trainee.model.feed_forwards()
    projections = [block.gate if hasattr(block, "gate") else block.up for block in blocks]
    handles = [projection.register_forward_hook(keep) for projection in projections]
    try:
        with torch.autocast(trainee.device.type, dtype=torch.bfloat16):
            trainee.model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return captured


def synthetic(densities: Sequence[float], seed: int) -> list[Activations]:
    """Half-normal values at random places, and zeros; bfloat16."""
    shape, cpu = SYNTHETIC_SHAPE, torch.device("cpu")
    half = Activations("half-normal", SYNTHETIC, partial(half_normal, shape, cpu, seed))
    random = [
        Activations(f"bernoulli {d:g}", SYNTHETIC, partial(bernoulli, shape, d, cpu, seed))
        for d in densities
    ]
    zero = Activations("zero", SYNTHETIC, partial(torch.zeros, shape, dtype=torch.bfloat16))
    return [half, *random, zero]


def half_normal(shape: tuple[int, int], device: torch.device, seed: int) -> Tensor:
    """ReLU of standard normal numbers: density 0.5."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.relu(torch.randn(shape, generator=generator, device=device)).bfloat16()


def bernoulli(shape: tuple[int, int], density: float, device: torch.device, seed: int) -> Tensor:
    """Every element nonzero with probability ``density``, independently; half-normal values."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=device).bfloat16().abs_()
    values.clamp_(min=torch.finfo(torch.bfloat16).tiny)  # none of them is zero
    drop = torch.rand(shape, generator=generator, device=device) >= density
    return values.masked_fill_(drop, 0.0)


def _as_is(x: Tensor) -> Tensor:
    return x


TOKENS_ALIKE = 16
"""Consecutive tokens of :func:`correlated` that have something in common."""
_COMMON = 0.5  # share of the variance
_NEURON_SPREAD = 1.0


def neuron_shifts(neurons: int, density: float, device: torch.device, seed: int) -> Tensor:
    """What is added to a standard normal pre-activation, neuron by neuron, so that ``density`` of
    all elements are positive, and of some neurons many more than of others; float32.

    With the spread of 1 at density 0.1, a tenth of the neurons fires at fewer than 0.1 % of the
    tokens, a tenth at more than 30 %.
    """
    generator = torch.Generator(device).manual_seed(seed)
    spread = _NEURON_SPREAD * torch.randn(neurons, generator=generator, device=device)
    # Normal numbers of the standard deviation sqrt(1 + spread**2) then exceed -middle.
    middle = statistics.NormalDist().inv_cdf(density) * (1 + _NEURON_SPREAD**2) ** 0.5
    shifts: Tensor = spread + middle
    return shifts


def alike_tokens(rows: int, cols: int, device: torch.device, seed: int) -> Tensor:
    """Standard normal numbers, to a half common to ``TOKENS_ALIKE`` consecutive rows; float32."""
    generator = torch.Generator(device).manual_seed(seed)
    groups = -(-rows // TOKENS_ALIKE)
    common = torch.randn(groups, 1, cols, generator=generator, device=device) * _COMMON**0.5
    x = torch.randn(groups, TOKENS_ALIKE, cols, generator=generator, device=device)
    return x.mul_((1 - _COMMON) ** 0.5).add_(common).view(-1, cols)[:rows].contiguous()


def correlated(
    shape: tuple[int, int], density: float, device: torch.device, dtype: torch.dtype, seed: int
) -> Tensor:
    """Pre-activations that resemble trained ones: neurons differ in how often they fire, and
    neighbouring tokens tend to fire the same ones. ``density`` of the elements are positive."""
    shifts = neuron_shifts(shape[1], density, device, seed + 1)
    x = alike_tokens(*shape, device, seed)
    return x.add_(shifts).to(dtype)


def independent(
    shape: tuple[int, int], density: float, device: torch.device, dtype: torch.dtype, seed: int
) -> Tensor:
    """Pre-activations, each positive with probability ``density`` whatever the others are:
    :func:`bernoulli`, and negative numbers instead of its zeros."""
    generator = torch.Generator(device).manual_seed(seed + 1)
    positive = bernoulli(shape, density, device, seed).to(dtype)
    negative = torch.randn(shape, generator=generator, device=device).to(dtype).abs_().neg_()
    return torch.where(positive > 0, positive, negative)


PRE_ACTIVATIONS = {"independent": independent, "correlated": correlated}
"""How pre-activations are drawn, by name."""
