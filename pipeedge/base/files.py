"""Output files: written atomically, and never over a file that is still needed."""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeedge.base.errors import RequestError
from pipeedge.base.wording import printable

__all__ = [
    "InputPath",
    "OutputFile",
    "check_outputs",
    "check_writable",
    "check_writable_directory",
    "make_writable_directory",
    "named_output",
    "replace_file",
    "temporary_beside",
    "write_secret",
    "write_whole",
]


@dataclass(frozen=True)
class OutputFile:
    """A file that a program will write."""

    option: str
    """Option that names the path, for messages."""
    path: Path


@dataclass(frozen=True)
class InputPath:
    """A file or directory that a program reads."""

    option: str
    """Option that names the path, for messages."""
    path: Path
    holds: Callable[[str], bool] = lambda name: True
    """Predicate on a file name: whether such a file in the directory ``path`` may be read."""
    nested: bool = False
    """Whether files in subdirectories of ``path`` are read too."""


def check_outputs(outputs: Iterable[OutputFile], inputs: Iterable[InputPath]) -> frozenset[Path]:
    """Check that no output overwrites an input or another output.

    Files are compared by identity, through symbolic and hard links.

    Args:
        outputs: Files that the program will write.
        inputs: Files and directories that it reads. A file that it updates counts as an output only.

    Returns:
        The outputs that exist already and will be replaced.

    Raises:
        RequestError: An output is an input, lies in an input directory, or is named twice.
    """
    outputs = list(outputs)
    for number, output in enumerate(outputs):
        for other in outputs[:number]:
            if _is_same(output.path, other.path):
                raise RequestError(
                    f"{output.option} {printable(output.path)}: is the same file as {other.option} "
                    f"{printable(other.path)}; name another one"
                )
    existing = [output for output in outputs if output.path.is_file()]
    for source in inputs if existing else ():
        for output in existing:
            if _is_same(output.path, source.path):
                raise RequestError(
                    f"{output.option} {printable(output.path)}: would replace what {source.option} reads; "
                    "name another file"
                )
        if source.path.is_dir():
            _check_directory(existing, source)
    return frozenset(output.path for output in existing)


def named_output(path: Path, replaced: Collection[Path]) -> str:
    """Return the name of an output for the line that announces it."""
    return f"{printable(path)} (replaced)" if path in replaced else printable(path)


def _check_directory(existing: Collection[OutputFile], source: InputPath) -> None:
    numbers = {output.path.stat().st_ino for output in existing}
    for entry in _entries(source.path, nested=source.nested):
        # Reading an entry's inode number needs no disk access; a directory may have a million entries.
        if not source.holds(entry.name) or not (entry.inode() in numbers or entry.is_symlink()):
            continue
        for output in existing:
            if _is_same(output.path, Path(entry.path)):
                raise RequestError(
                    f"{output.option} {printable(output.path)}: would replace {printable(entry.name)}, which "
                    f"{source.option} {printable(source.path)} reads; name another file"
                )


def _entries(directory: Path, *, nested: bool) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of ``directory`` that are not directories; links to directories are not followed."""
    waiting: list[str | Path] = [directory]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:  # the reader will report the error
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    yield entry
                elif nested:
                    waiting.append(entry.path)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def temporary_beside(path: Path) -> Path:
    """Return a name for a temporary file that will become ``path``; remove those of dead processes.

    The name identifies machine and process, so that on a shared file system no machine removes a file that
    another one is still writing.
    """
    place = f"{_place():08x}"
    pattern = re.compile(rf"\.{re.escape(path.name)}\.{place}-(\d+)-[0-9a-f]{{8}}\.part")
    with suppress(OSError), os.scandir(path.parent) as entries:  # the writer will report the error
        for entry in entries:
            found = pattern.fullmatch(entry.name)
            if found is not None and not _is_alive(int(found[1])):
                Path(entry.path).unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{place}-{os.getpid()}-{secrets.token_hex(4)}.part")


def _place() -> int:
    """Return a number that identifies the process ID namespace: this machine, or a container on it."""
    try:
        numbers = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # not Linux
        numbers = 0
    return zlib.crc32(f"{socket.gethostname()} {numbers}".encode())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # the process belongs to another user
        return True
    return True


def check_writable(path: Path, option: str) -> None:
    """Check before a run that a file can be written at its end.

    Args:
        path: Path of the file.
        option: Option that names it, for the message.

    Raises:
        RequestError: The directory does not exist or is not writable, or the path is a directory.
    """
    if not path.parent.is_dir():
        raise RequestError(f"{option} {path}: the directory {path.parent} does not exist; create it first")
    if path.is_dir():
        raise RequestError(f"{option} {path}: is a directory")
    try:
        _try_writing(path.parent)
    except OSError as error:
        raise RequestError(f"{option} {path}: cannot write to {path.parent} ({error.strerror})") from error


def make_writable_directory(directory: Path, option: str, *, parents: bool = False) -> None:
    """Make ``directory`` unless it exists, and refuse one that takes no files.

    Args:
        directory: The directory.
        option: The option that named it, for the message.
        parents: Whether to make the directories above it too.

    Raises:
        RequestError: It cannot be made or is not writable.
    """
    try:
        directory.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{option} {directory}: cannot be created ({error.strerror})") from error
    check_writable_directory(directory, option)


def check_writable_directory(directory: Path, option: str) -> None:
    """Refuse a directory that takes no files, or that does not exist and could not be made.

    Nothing is left behind.

    Args:
        directory: The directory.
        option: The option that named it, for the message.

    Raises:
        RequestError: Files cannot be written there.
    """
    if not directory.exists():
        check_writable(directory, option)
        return
    try:
        _try_writing(directory)
    except OSError as error:
        raise RequestError(f"{option} {directory}: cannot be written ({error.strerror})") from error


def _try_writing(directory: Path) -> None:
    """Write to ``directory``: permission bits do not show what root may do, nor a mount that is read-only."""
    with tempfile.TemporaryFile(dir=directory):
        pass


def write_whole(path: Path, text: str, option: str) -> None:
    """Write ``text`` to ``path`` atomically, so that no reader ever sees half of it.

    Args:
        path: Path of the file.
        text: Complete contents.
        option: Option that names the file, for the message.

    Raises:
        RequestError: The disk is full or no longer writable.
    """
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise RequestError(f"{option} {path}: cannot be written ({error.strerror})") from error


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to a temporary file beside ``path`` and rename it; an existing file keeps its mode.

    Raises:
        OSError: The file cannot be written.
    """
    temporary = temporary_beside(path)
    try:
        with temporary.open("xb") as stream:
            stream.write(content)
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o777)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_secret(path: Path, text: str, option: str) -> None:
    """Create a file that only its owner can read, whole or not at all; never replace another file.

    Args:
        path: Path of the new file.
        text: Complete contents.
        option: Option that names the file, for the message.

    Raises:
        RequestError: The file exists already, or cannot be written with these permissions.
    """
    check_writable(path, option)
    temporary = temporary_beside(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as stream:  # noqa: PTH123 - of a descriptor
                if os.fstat(descriptor).st_mode & 0o077:
                    raise RequestError(f"{option} {path}: this file system lets other users read every file")
                stream.write(text)
                stream.flush()
                os.fsync(descriptor)
            path.hardlink_to(temporary)  # unlike a rename, this fails if the file exists
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as error:
        raise RequestError(f"{option} {path}: exists already, and is not replaced: name another") from error
    except OSError as error:
        raise RequestError(f"{option} {path}: cannot be written ({error.strerror})") from error
