"""Test which network interfaces count as usable."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import psutil
import pytest

from pipeedge.transport import interfaces


def test_an_interface_of_unknown_state_counts_as_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulators and sandboxes may refuse the system call that tells."""

    def refuse() -> object:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    known = interfaces.interface_addresses()
    monkeypatch.setattr(psutil, "net_if_stats", refuse)
    assert known.items() <= interfaces.interface_addresses().items()
    assert interfaces.choose_interface(None, "127.0.0.1", 9)


def test_an_interface_that_is_down_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = interfaces.choose_interface(None, "127.0.0.1", 9)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {loopback: SimpleNamespace(isup=False)})
    assert loopback not in interfaces.interface_addresses()
