"""Fetch a file by HTTP, over as many connections as it takes."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path

from pipeedge.base.errors import WeightsError
from pipeedge.models.progress import ByteBar

__all__ = ["fetch_file"]

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 30.0
_FRUITLESS_ATTEMPTS = 3
"""Number of consecutive attempts without progress before a broken transfer is given up."""


def fetch_file(url: str, part: Path, target: Path) -> None:
    """Fetch a file completely into ``part``, of which an earlier attempt may have left the beginning.

    Args:
        url: Address of the file.
        part: File that its bytes are written to.
        target: Place where the user expects the file, for messages.

    Raises:
        WeightsError: The server does not have the file, or several attempts brought nothing.
    """
    fruitless = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _transfer(url, part, target.name):
                return
            problem = "the connection closed early"
        except urllib.error.HTTPError as error:
            advice = _by_hand(url, target)
            raise WeightsError(f"{url} answers {error.code} {error.reason}; {advice}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            problem = str(reason) or type(error).__name__
        after = part.stat().st_size if part.exists() else 0
        fruitless = 0 if after > before else fruitless + 1
        unreachable = after == 0 and fruitless > 0
        if unreachable or fruitless >= _FRUITLESS_ATTEMPTS:
            kept = f"; the {after} bytes that arrived are kept for the next attempt" if after else ""
            raise WeightsError(f"{url} cannot be fetched ({problem}){kept}; {_by_hand(url, target)}")


def _by_hand(url: str, target: Path) -> str:
    return f"without a network here, fetch it elsewhere and put it at {target.absolute()}, or use --random"


def _transfer(url: str, part: Path, label: str) -> bool:
    """Append missing data to ``part`` over one connection. Return True when it is complete."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})  # noqa: S310
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)  # noqa: S310
    except urllib.error.HTTPError as error:
        total = error.headers.get("Content-Range", "").rpartition("/")[2]
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            if total == str(have):
                return True
            part.unlink()  # longer than the file, so it belongs to another version
            return _transfer(url, part, label)
        raise
    with response:
        resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total_bytes = have + int(length) if length is not None else None
        with part.open("ab" if resumed else "wb") as file, ByteBar(label, total_bytes, have) as bar:
            while piece := response.read(_CHUNK_BYTES):
                file.write(piece)
                bar.advance(len(piece))
    return total_bytes is None or part.stat().st_size == total_bytes
