"""A store that lets other threads run while torch's RPC agent waits for it."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed

__all__ = ["UnlockingStore"]

# torch.distributed exports its stores at run time only, so type checkers do not see them.
_dist: Any = torch.distributed


class UnlockingStore(_dist.Store):  # type: ignore[misc]
    """A store that native code may call while it holds the interpreter lock.

    TensorPipe's agent is created with the lock held, and asks the store for the names of all other workers.
    If one of them, or the rank that serves the store, is stopped, no thread of this process could run: it
    would neither send heartbeats nor receive a verdict, and would never end. A Python method releases the
    lock while it waits.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Set ``key``."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for ``key`` and return its value."""
        return bytes(self._store.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``key`` if it has the value ``expected``. Return its value."""
        return bytes(self._store.compare_set(key, expected, desired))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its value."""
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` exist."""
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait for ``keys``."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Remove ``key``."""
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._store.num_keys())

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the timeout of ``get`` and ``wait``."""
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)
