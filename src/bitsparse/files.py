"""Files that are either the old ones or the new ones, whatever happens in between."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, temporary_name: str | None = None) -> Iterator[Path]:
    """Yield the path of an empty file that takes the place of ``path`` when the block ends.

    The new content is on the disk then. If the block raises, ``path`` is as it was. Either way no
    temporary file is left, except by a process that is killed.

    Args:
        path: what to replace; need not exist. What a symbolic link points at is replaced.
        temporary_name: name of the temporary file, which lies in the same folder. By default one
            that no other writer uses; with a fixed name the next writer overwrites what a killed
            one has left.

    Raises:
        OSError: the file cannot be made, written or renamed, or ``path`` is something other than a
            regular file.
    """
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))  # a device stays one
    temporary = path.with_name(temporary_name or f".{secrets.token_hex(8)}.tmp")
    try:
        try:
            open(temporary, "wb").close()
        except OSError as error:
            error.filename = str(path)
            raise
        yield temporary
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable, where the system can."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):  # the new file is in place already
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
