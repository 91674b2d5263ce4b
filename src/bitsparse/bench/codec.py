"""The codec benchmark: sizes against the entropy line, and rates, of every policy and coding."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bitsparse.activations import ACTIVATIONS
from bitsparse.bench import inputs
from bitsparse.bench.general import (
    LARGEST_LEVEL,
    PACKAGES,
    ZSTD_LEVELS,
    general_codecs,
    package_version,
)
from bitsparse.bench.rates import CopyRate, Rate, measure_rates
from bitsparse.bench.result import Progress
from bitsparse.bench.sizes import Sizes, measure_sizes, methods
from bitsparse.training.compare import environment
from bitsparse.training.errors import UserError, check_at_least, check_choice
from bitsparse.training.step import get_device
from bitsparse.training.train import LARGEST_SEED

LARGEST_SHAPE = 2**32
"""Elements of the array that rates are measured on."""


@dataclass(frozen=True)
class CodecConfig:
    """What is measured, on what."""

    activations: tuple[Path, ...] = ()
    train_steps: int = 0
    """0: no training."""
    activation: str = "relu2"
    """Of the trained model."""
    synthetic: bool = True
    densities: tuple[float, ...] = (0.05, 0.2, 1.0)
    """Of synthetic arrays."""
    zstd_levels: tuple[int, ...] = ZSTD_LEVELS
    rates: bool = True
    shape: tuple[int, int] = (2048, 4096)
    """Of the arrays that rates are measured on."""
    rate_densities: tuple[float, ...] = (0.05, 0.2, 0.5)
    repetitions: int = 7
    device: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise UserError for a value that is not allowed."""
        check_at_least("--train-steps", self.train_steps, 0)
        check_choice("--activation", self.activation, ACTIVATIONS)
        for name, densities in (
            ("--densities", self.densities),
            ("--rate-densities", self.rate_densities),
        ):
            for density in densities:
                check_at_least(name, density, 0, 1)
        for level in self.zstd_levels:
            check_at_least("--zstd-levels", level, 1, LARGEST_LEVEL)
        rows, cols = self.shape
        if rows < 1 or cols < 1 or rows * cols > LARGEST_SHAPE:
            raise UserError(
                f"--shape: got {rows}x{cols}, allowed: ROWSxCOLS with 1 to 2**32 elements"
            )
        check_at_least("--repetitions", self.repetitions, 1)
        check_at_least("--seed", self.seed, 0, LARGEST_SEED)
        has_arrays = self.activations or self.train_steps or self.synthetic
        if not has_arrays and not (self.rates and self.rate_densities):
            raise UserError(
                "--no-synthetic: nothing is left to measure, allowed: with --activations, "
                "--train-steps or rates"
            )


@dataclass(frozen=True)
class Ratio:
    """Sizes of one method over the arrays of one source."""

    arrays: int
    """To which it applies."""
    bits: float
    """Mean bits per element."""
    mean: float | None
    """Mean of the arrays' own ratios to the entropy line; None: no array has a line above 0."""
    smallest: float | None
    largest: float | None


@dataclass
class CodecResult:
    """All that was measured."""

    config: CodecConfig
    environment: dict[str, Any]
    sizes: list[Sizes] = field(default_factory=list)
    copies: list[CopyRate] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)

    def summary(self, source: str) -> dict[str, Ratio]:
        """By method, sizes over the arrays of one source; without methods that never apply."""
        arrays = [s for s in self.sizes if s.source == source]
        ratios = {}
        for method in methods(self.config.zstd_levels):
            pairs = [(b, s.entropy_line) for s in arrays if (b := s.bits[method]) is not None]
            to_line = [bits / line for bits, line in pairs if line > 0]
            if pairs:
                ratios[method] = Ratio(
                    len(pairs),
                    statistics.fmean(bits for bits, _ in pairs),
                    statistics.fmean(to_line) if to_line else None,
                    min(to_line, default=None),
                    max(to_line, default=None),
                )
        return ratios

    def not_installed(self) -> list[str]:
        """General-purpose compressors whose package is missing."""
        return [
            c.name
            for c in general_codecs(self.config.zstd_levels)
            if self.environment[c.package] is None
        ]

    def sources(self) -> list[str]:
        """Sources that have arrays."""
        return [s for s in inputs.SOURCES if any(a.source == s for a in self.sizes)]

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values. Of paths, the names only."""
        config = asdict(self.config)
        config["activations"] = [path.name for path in self.config.activations]
        return {
            "benchmark": "codec",
            "environment": self.environment,
            "config": config,
            "methods": methods(self.config.zstd_levels),
            "arrays": [asdict(s) for s in self.sizes],
            "summary": {
                source: {method: asdict(r) for method, r in self.summary(source).items()}
                for source in self.sources()
            },
            "copies": [asdict(c) for c in self.copies],
            "rates": [asdict(r) for r in self.rates],
        }


def run_codec(
    config: CodecConfig, on_progress: Callable[[Progress], None] | None = None
) -> CodecResult:
    """Measure sizes and rates.

    Raises:
        UserError: a value or a file is not usable.
        NotLossless: a method did not give back the bits.
    """
    config.check()
    device = get_device(config.device)
    arrays = inputs.from_files(config.activations)
    tell = on_progress or (lambda progress: None)
    if config.train_steps:
        trained = 0

        def step() -> None:
            nonlocal trained
            trained += 1
            tell(Progress("training", trained, config.train_steps))

        arrays += inputs.from_training(
            config.train_steps, config.activation, device, config.seed, step
        )
    if config.synthetic:
        arrays += inputs.synthetic(config.densities, config.seed)

    versions = {name: package_version(name) for name in PACKAGES}
    result = CodecResult(config, {**environment(device), **versions})
    for i, array in enumerate(arrays):
        result.sizes.append(measure_sizes(array, device, config.zstd_levels))
        tell(Progress("sizes", i + 1, len(arrays)))
    densities = config.rate_densities if config.rates else ()
    for i, density in enumerate(densities):
        copy, rates = measure_rates(
            config.shape, density, device, config.repetitions, config.seed, config.zstd_levels
        )
        result.copies.append(copy)
        result.rates += rates
        tell(Progress("rates", i + 1, len(densities)))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return result
