"""The place at which a rank listens for the others, which the hub tells them with each plan. Pure."""

from __future__ import annotations

from msgspec import Struct

from pipeedge.base.fields import Name, Port

__all__ = ["TOKEN_BYTES", "Place"]

TOKEN_BYTES = 16
"""Length of the random token by which the members of a group know one another."""


class Place(Struct, frozen=True):
    """Address and port of a listening socket."""

    address: Name
    """IP address."""
    port: Port
