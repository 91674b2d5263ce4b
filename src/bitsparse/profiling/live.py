"""Following a run while it goes on: one callback, ``on_step(metrics)``, and loggers for it.

Whatever calls it (training, :func:`bitsparse.profile`) hands over an object with the number of the
step and its numbers by name; a logger is a callable that takes one.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple, Protocol


class Metrics(Protocol):
    """What a callback is told after a step."""

    @property
    def step(self) -> int:
        """The number of the step."""

    def scalars(self) -> dict[str, float]:
        """Numbers by name, ``group/name`` where there are several of a kind."""


class OnStep(Protocol):
    """The callback."""

    def __call__(self, metrics: Any, /) -> object:
        """``metrics``: a :class:`Metrics`."""


class StepMetrics(NamedTuple):
    """Numbers of one step."""

    step: int
    values: dict[str, float]

    def scalars(self) -> dict[str, float]:
        return self.values


class TensorBoardLogger:
    """Writes the numbers of each step for TensorBoard.

    Args:
        folder: where event files are written.
        purge_step: later steps that the folder has are hidden: they are repeated.

    Raises:
        ImportError: the package is missing.
    """

    def __init__(self, folder: str | os.PathLike[str], purge_step: int | None = None) -> None:
        self._writer = summary_writer()(str(folder), purge_step=purge_step)

    def __call__(self, metrics: Metrics) -> None:
        for name, value in metrics.scalars().items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbLogger:
    """Logs the numbers of each step to Weights & Biases, or anything with its ``log``.

    Args:
        project: in which a run is started; None: ``run`` is given.
        run: a run that exists, whose owner finishes it.
        options: of ``wandb.init``.

    Raises:
        ImportError: the package is missing.
        TypeError: neither or both of ``project`` and ``run``.
    """

    def __init__(self, project: str | None = None, *, run: Any = None, **options: Any) -> None:
        if (project is None) == (run is None):
            got = "none" if run is None else "both"
            raise TypeError(f"project, run: got {got} of them, allowed: one")
        self._own = run is None
        self._run = import_wandb().init(project=project, **options) if run is None else run

    def __call__(self, metrics: Metrics) -> None:
        self._run.log(metrics.scalars(), step=metrics.step)

    def close(self) -> None:
        """Finish the run, if this has started it."""
        if self._own:
            self._run.finish()


def summary_writer() -> Any:
    """TensorBoard's writer; ImportError if the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError(
            "the package tensorboard is missing: pip install 'bitsparse[tensorboard]'"
        ) from None
    return SummaryWriter


def import_wandb() -> Any:
    """The package of that name; ImportError if it is missing."""
    try:
        import wandb
    except ImportError:
        raise ImportError("the package wandb is missing: pip install 'bitsparse[wandb]'") from None
    return wandb
