"""Test reading of archives of arrays."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pipeedge.base.archive import NpzArchive
from pipeedge.base.errors import InputError


class _Cycle:
    """Garbage that another thread can run in the middle of, while it is collected."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sum(range(50))


@pytest.fixture
def impatient() -> Iterator[None]:
    """Let threads take turns, and garbage be collected, as often as possible."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(3)
    yield
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("impatient")
def test_threads_read_archives_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, rows=np.zeros((3, 2), np.float32))

    def read(depth: int) -> None:
        if depth:  # what is mixed up is how deep the threads are
            read(depth - 1)
            return
        with NpzArchive(path, InputError) as archive:
            for _ in range(4000):
                garbage = [_Cycle() for _ in range(3)]
                del garbage
                assert archive.header("rows").shape == (3, 2)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(read, 5 * k) for k in range(4)]:
            future.result()
