"""What a profile has found out, and the file that holds it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitsparse.files import replacing

FORMAT, VERSION = "bitsparse-profile", 1

Row = dict[str, Any]

_TABLES = ("steps", "layers", "memory", "timeline", "exponents", "positions", "skipped")

# What readers rely on: the columns that every row of a table has, and their types.
_NUMBER = (int, float)
_COLUMNS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "steps": {"step": int, "saved_bytes": int, "dense_bytes": int, "compressed_bytes": int},
    "layers": {
        "step": int,
        "layer": str,
        "call": int,
        "tokens": int,
        "neurons": int,
        "density": _NUMBER,
        "neuron_density_p10": _NUMBER,
        "neuron_density_p90": _NUMBER,
        "silent_neurons": int,
        "dense_bytes": int,
        "compressed_bytes": int,
        "bits_fast": _NUMBER,
        "bits_balanced": _NUMBER,
        "bits_small": _NUMBER,
    },
    "memory": {"step": int, "name": str, "kind": str, "bytes": int},
    "timeline": {"step": int, "event": int, "measured": int, "dense": int, "compressed": int},
    "exponents": {"step": int, "layer": str, "exponent": int, "count": int},
    "positions": {"step": int, "layer": str, "tokens": int, "neurons": int, "bits": str},
    "skipped": {"layer": str, "reason": str},
}


@dataclass
class Profile:
    """Tables: lists of rows, each a dict of plain values, as ``pandas.DataFrame`` takes them.

    docs/profile.md describes the columns.
    """

    header: Row = field(default_factory=dict)
    """What was run, on what."""
    steps: list[Row] = field(default_factory=list)
    """One row for each step that was looked at."""
    layers: list[Row] = field(default_factory=list)
    """One for each forward pass of a feed-forward block in these steps."""
    memory: list[Row] = field(default_factory=list)
    """What is saved for backward when most is, by module and kind."""
    timeline: list[Row] = field(default_factory=list)
    """Bytes saved after each event, of the first and of the last such step."""
    exponents: list[Row] = field(default_factory=list)
    """How many values have which exponent, of these two."""
    positions: list[Row] = field(default_factory=list)
    """Where nonzeros are, of these two."""
    skipped: list[Row] = field(default_factory=list)
    """Modules that are nearly blocks, and were not watched."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON lines: a header, then the rows, each with its table's name as ``record``.

        Raises:
            OSError: the file cannot be written; a file that was there is as it was.
        """
        lines = [{"record": "header", "format": FORMAT, "version": VERSION, **self.header}]
        for table in _TABLES:
            lines += [{"record": table, **row} for row in getattr(self, table)]
        with replacing(Path(path)) as temporary, open(temporary, "w", encoding="utf-8") as file:
            for line in lines:
                # allow_nan: Python reads NaN back; other readers are promised plain JSON.
                file.write(json.dumps(_finite(line), allow_nan=False) + "\n")

    def last_step(self) -> int:
        """The last step that was looked at."""
        return int(self.steps[-1]["step"])

    def at(self, table: str, step: int) -> list[Row]:
        """The rows of a table that are of one step."""
        return [row for row in getattr(self, table) if row["step"] == step]


def load(path: str | os.PathLike[str]) -> Profile:
    """Read what :meth:`Profile.save` has written.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is something else, or damaged; the message says where.
    """
    wanted = "allowed: a file written by bitsparse profile"
    try:
        lines = Path(path).read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"path: got {path}, which is no text; {wanted}") from None
    if lines[-1]:
        _check_first(path, lines[0], wanted)
        raise ValueError(f"path: got {path}, which ends within line {len(lines)}; {wanted}")
    header = _check_first(path, lines[0], wanted)
    profile = Profile({k: v for k, v in header.items() if k not in ("record", "format", "version")})
    for number, line in enumerate(lines[1:-1], start=2):
        row = _parse(line)
        problem = _problem(row)
        if problem:
            raise ValueError(f"path: got {path}, line {number}: {problem}; {wanted}")
        assert row is not None
        getattr(profile, row.pop("record")).append(row)
    if not profile.steps or not profile.layers:
        raise ValueError(f"path: got {path}, which has no steps; {wanted}")
    for table in ("layers", "memory", "timeline", "exponents", "positions"):
        known = {row["step"] for row in profile.steps}
        strays = {row["step"] for row in getattr(profile, table)} - known
        if strays:
            raise ValueError(
                f"path: got {path}, whose {table} are of step {min(strays)}, which it does not "
                f"have; {wanted}"
            )
    return profile


def _check_first(path: object, line: str, wanted: str) -> Row:
    row = _parse(line)
    if row is None or row.get("format") != FORMAT or row.get("record") != "header":
        raise ValueError(f"path: got {path}, which does not begin as a profile does; {wanted}")
    if row.get("version") != VERSION:
        raise ValueError(
            f"path: got {path} of version {row.get('version')!r}, allowed: version {VERSION}"
        )
    return row


def _parse(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _problem(row: Row | None) -> str:
    """What is wrong with a row; empty: nothing."""
    if row is None:
        return "not a JSON object"
    if row.get("record") not in _COLUMNS:
        return f"record is {row.get('record')!r}"
    for name, kind in _COLUMNS[row["record"]].items():
        value = row.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"{name} is {value!r}"
        if isinstance(value, (int, float)) and not math.isfinite(value):
            return f"{name} is {value!r}"
    return ""


def _finite(row: Row) -> Row:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
