"""Files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pipeedge.errors import RequestError

__all__ = ["check_writable", "write_whole"]


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that could not be written at the end of a run.

    Args:
        path: of the file.
        option: that named it, for the message.

    Raises:
        RequestError: the place does not exist or is not writable.
    """
    if not path.parent.is_dir():
        raise RequestError(f"{option} {path}: the directory {path.parent} does not exist; create it first")
    if path.is_dir():
        raise RequestError(f"{option} {path}: is a directory")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise RequestError(f"{option} {path}: cannot write to {path.parent} ({error.strerror})") from error


def write_whole(path: Path, text: str, option: str) -> None:
    """Write ``text`` through a temporary file beside ``path``, so that nobody ever sees half of it.

    Args:
        path: of the file.
        text: all of it.
        option: that named it, for the message.

    Raises:
        RequestError: the disk is full or no longer writable.
    """
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as stream:
            temporary = Path(stream.name)
            stream.write(text)
        # The temporary file is private; this one gets the permissions that a new file has.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise RequestError(f"{option} {path}: cannot be written ({error.strerror})") from error
