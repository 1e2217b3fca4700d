"""The request to answer over HTTP: where to listen, who may ask, and how much."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipeedge.base.errors import RequestError
from pipeedge.request.declared import Check, ObeyedBy, at_least, check_options, option, options_of
from pipeedge.request.parsing import path

__all__ = ["ServeRequest"]

_PLACE = re.compile(r"(?:(?P<host>[^\[\]:]+|\[[0-9a-fA-F:.]+\]):)?(?P<port>\d{1,5})")
_LAST_PORT = 65535
_MB = 1 << 20


def _place(text: str) -> tuple[str, int] | None:
    """Return host, if any, and port of ``[ADDR:]PORT``, or None if it is neither."""
    match = _PLACE.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= _LAST_PORT:
        return None
    return (match["host"] or "").strip("[]"), int(match["port"])


@dataclass(frozen=True)
class ServeRequest:
    """Options of ``--serve``; without that, a run reads its input and ends."""

    OBEYED_BY: ClassVar[ObeyedBy] = ObeyedBy.DATA_RANK

    listen: str | None = option(
        None,
        "--serve",
        metavar="[ADDR:]PORT",
        check=Check(lambda text: _place(text) is not None, "give PORT, or ADDR:PORT"),
        help="answer requests over HTTP instead of running an input; give it to all ranks: the data rank "
        "listens, by default on the loopback",
    )
    api_key: Path | None = option(
        None,
        "--api-key",
        type=path,
        help="answer only requests with a key in this file, one a line (Authorization: Bearer KEY)",
    )
    max_waiting: int = option(
        512,
        "--max-waiting",
        type=int,
        check=at_least(1),
        help="refuse requests (429) while this many wait; of their items, as many are prepared at a time "
        "({default})",
    )
    max_body_mb: int = option(
        8,
        "--max-body",
        type=int,
        metavar="MB",
        check=at_least(1),
        help="refuse larger requests ({default} MB)",
    )
    request_timeout_s: float = option(
        30.0,
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        check=Check(lambda value: 0 < value <= 3600, "must be seconds above 0 and up to 3,600"),
        help="longest time to read, and then to answer, a request; where text is generated, the longest "
        "time without a token ({default})",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for one in options_of(ServeRequest) if self.listen is None else ():
            if getattr(self, one.field) != one.default:
                raise RequestError(f"{one.name} needs --serve: without it, a run answers no requests")

    @property
    def host(self) -> str:
        """Address to listen on."""
        return self._listened()[0] or "127.0.0.1"

    @property
    def names_address(self) -> bool:
        """Whether the user has given the address, rather than the port alone."""
        return bool(self._listened()[0])

    @property
    def port(self) -> int:
        """Port to listen on."""
        return self._listened()[1]

    @property
    def url(self) -> str:
        """Address for clients."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def max_body_bytes(self) -> int:
        """Largest request in bytes."""
        return self.max_body_mb * _MB

    def _listened(self) -> tuple[str, int]:
        place = _place(self.listen or "")
        if place is None:
            raise RequestError("--serve: this run does not listen")
        return place
