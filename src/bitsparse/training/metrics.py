"""Metrics of a run, one JSON object a line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from bitsparse.training.errors import UserError, os_error
from bitsparse.training.files import write_atomically


class MetricsFile:
    """Appends to ``path``.

    Args:
        last_step: lines of later steps, and a last line that is not whole, are dropped: they are of
            steps that a resumed run repeats. 0 drops all.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        kept = _whole_lines(path, last_step)
        write_atomically(path, lambda file: file.write(kept))
        try:
            self._file = open(path, "ab", buffering=0)
        except OSError as error:
            raise os_error(path, error) from error

    def write(self, **values: Any) -> None:
        """Append one line; a number keeps all its bits, one that is not finite is null in JSON."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        line = json.dumps(finite, allow_nan=False).encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise UserError(f"{self.path}: no space left on the disk")
        except OSError as error:
            raise os_error(self.path, error) from error

    def sync(self) -> None:
        """Make what was written durable: a checkpoint never gets ahead of its metrics."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise os_error(self.path, error) from error

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path, last_step: int) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise os_error(path, error) from error
    kept = []
    for line in content.splitlines(keepends=True):
        try:
            values = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            values = None
        if isinstance(values, dict) and values.get("step", last_step + 1) <= last_step:
            kept.append(line)
    return b"".join(kept)
