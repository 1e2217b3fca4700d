"""Text files and standard input as UTF-8 text."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from pipeedge.base.errors import InputError
from pipeedge.data.beginnings import wide_encoding
from pipeedge.request.files import STANDARD_INPUT

__all__ = ["input_name", "read_text"]


def input_name(path: Path) -> str:
    """Return what messages call an input."""
    return "standard input" if path == STANDARD_INPUT else str(path)


def read_text(path: Path) -> str:
    """Return the text of a file or, for ``STANDARD_INPUT``, of standard input, without a byte order mark.

    Raises:
        InputError: It cannot be read, or is not UTF-8 text.
    """
    name = input_name(path)
    try:
        content = sys.stdin.buffer.read() if path == STANDARD_INPUT else path.read_bytes()
        encoding = wide_encoding(content)
        if encoding is not None:
            converted = "-" if path == STANDARD_INPUT else f"{shlex.quote(name)} > utf-8{path.suffix}"
            raise InputError(
                f"{name}: is {encoding} text; convert it to UTF-8: iconv -f {encoding} -t UTF-8 {converted}"
            )
        return content.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"{name}: no such file") from error
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: cannot be read as UTF-8 text ({error})") from error
