"""Files that are either the old ones or the new ones, whatever happens in between."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from bitsparse.training.errors import UserError, os_error


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace ``path`` by what ``write`` writes, on the disk when this returns.

    The temporary file has a fixed name in the same folder: what a killed run leaves behind is
    overwritten by the next.

    Raises:
        UserError: the file cannot be written (the disk is full, say); ``path`` is untouched then.
    """
    temp = path.with_name(path.name + ".tmp")
    try:
        with open(temp, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
        _sync_folder(path.parent)
    except BaseException as error:
        temp.unlink(missing_ok=True)
        # torch.save turns an OSError of the file into a RuntimeError.
        cause = _os_cause(error)
        if cause is not None:
            raise os_error(path, cause) from error
        raise


def _os_cause(error: BaseException | None) -> BaseException | None:
    """The OSError that ``error`` is or hides; a writer's RuntimeError where none is recorded."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, RuntimeError) and "StreamWriter" in str(error):
        return error
    return None


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_output_dir(path: Path) -> None:
    """Create ``path`` and check that files can be made in it, before any time is spent.

    Raises:
        UserError: it cannot be made or written to.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"--output-dir: got {path}, which is a file; allowed: a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable.tmp"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"--output-dir: no files can be made in {path} ({error.strerror}); "
            "allowed: a folder that can be written"
        ) from error
