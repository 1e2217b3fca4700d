"""The processors and threads of this machine, within a quota."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from control_groups import write_groups
from hypothesis import given
from hypothesis import strategies as st

from pipeedge.base.machine import ControlGroups, processors, quota_threads
from pipeedge.run.main import limit_threads


@dataclass(frozen=True)
class Quota(ControlGroups):
    """Control groups that allow so many processors, or all."""

    allowed: float | None = None

    def quota(self) -> float | None:
        return self.allowed


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("quota", "threads"),
    [(None, None), (8.0, None), (9.0, None), (7.9, 8), (1.0, 1), (0.05, 1), (1.4, 1), (1.5, 2), (2.0, 2)],
)
def test_threads_are_the_quota_to_the_nearest_whole_number(quota: float | None, threads: int | None) -> None:
    assert quota_threads(Quota(allowed=quota)) == threads
    assert processors(Quota(allowed=quota)) == (threads or 8)


@given(st.floats(0.001, 100))
def test_rounding_loses_at_most_half_a_processor(quota: float) -> None:
    used = processors(Quota(allowed=quota))
    assert 1 <= used <= 8
    assert used == 1 or abs(used - min(quota, 8)) <= 0.5


@pytest.mark.parametrize(
    ("membership", "files", "threads"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "100000 100000"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000", "cpu.max": "600000 100000"}, 3),
        ("0::/\n", {"cpu.max": "200000 100000"}, 2),  # a container sees its own group as the root
        ("0::/a\n", {"a/cpu.max": "max 100000"}, None),
        ("4:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "400000", "cpu/x/cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)
def test_the_tightest_quota_on_the_way_to_the_root_counts(
    membership: str, files: dict[str, str], threads: int | None, tmp_path: Path
) -> None:
    assert quota_threads(write_groups(tmp_path, membership, files)) == threads


def test_the_processors_of_the_process_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    assert [processors(Quota(allowed=quota)) for quota in (None, 1.2, 4.0)] == [2, 1, 2]


@pytest.mark.parametrize(("given_by_user", "expected"), [(None, "3"), ("5", "5")])
def test_torch_gets_the_threads_of_the_quota_unless_the_user_says_how_many(
    given_by_user: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {} if given_by_user is None else {"OMP_NUM_THREADS": given_by_user}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr("pipeedge.run.main.quota_threads", lambda: 3)
    limit_threads()
    assert environ == {"OMP_NUM_THREADS": expected}


def test_without_a_quota_torch_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr("pipeedge.run.main.quota_threads", lambda: None)
    limit_threads()
    assert environ == {}
