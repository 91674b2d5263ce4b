"""Output files, whose failures are shown as a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from bitsparse.files import replacing
from bitsparse.training.errors import UserError, os_error


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace ``path`` by what ``write`` writes, on the disk when this returns.

    The temporary file has a fixed name in the same folder: what a killed run leaves behind is
    overwritten by the next.

    Raises:
        UserError: the file cannot be written (the disk is full, say); ``path`` is untouched then.
    """
    try:
        with replacing(path, path.name + ".tmp") as temp, open(temp, "wb") as file:
            write(file)
    except BaseException as error:
        # torch.save turns an OSError of the file into a RuntimeError.
        cause = os_cause(error)
        if cause is not None:
            raise os_error(path, cause) from error
        raise


def os_cause(error: BaseException | None) -> BaseException | None:
    """The OSError that ``error`` is or hides; a writer's RuntimeError where none is recorded."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, RuntimeError) and "StreamWriter" in str(error):
        return error
    return None


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
