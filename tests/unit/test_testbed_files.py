"""Control groups and the journal of a test bed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeedge.base.errors import RequestError
from pipeedge.testbed.cluster import EmulatedHost
from pipeedge.testbed.groups import GroupSettings, find_hierarchies
from pipeedge.testbed.journal import Journal, JournalFiles, Owner


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.1, 0.25, 1.0, 3.5])
def test_a_quota_is_a_fraction_of_its_period_within_the_kernels_limits(fraction: float) -> None:
    quota, period = GroupSettings(fraction, 1).quota_us()
    assert quota / period == pytest.approx(fraction, rel=1e-3)
    assert quota >= 1000
    assert period <= 100_000


# Control groups of both versions, in a directory. ---------------------------------------------------------


def mounted(*lines: str) -> str:
    return "".join(f"none {line} rw 0 0\n" for line in lines)


def test_each_controller_is_found_where_it_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    mounts = f"c /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\nc {tmp_path} cgroup2 rw 0 0\n"
    found = {tree.mount: (tree.version, tree.controllers) for tree in find_hierarchies(mounts)}
    assert found == {Path("/sys/fs/cgroup/cpu"): (1, ("cpu",)), tmp_path: (2, ("memory",))}


def test_a_missing_controller_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="controller memory, which is not mounted on this machine"):
        find_hierarchies("c /x cgroup rw,cpu 0 0\n")
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    with pytest.raises(
        RequestError, match=r"controller memory in .*; enable it with 'echo \+memory > .*subtree_control"
    ):
        find_hierarchies(f"c {tmp_path} cgroup2 rw 0 0\n")


def test_groups_of_version_2_pass_their_controllers_on(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory")
    (tree,) = find_hierarchies(f"c {tmp_path} cgroup2 rw 0 0\n")
    tree.create("a/b/c")
    tree.limit("a/b/c", GroupSettings(0.25, 12345))
    assert (tmp_path / "cgroup.subtree_control").read_text() == "cpu memory", "not ours"
    assert (tmp_path / "a" / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert (tmp_path / "a" / "b" / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert (tmp_path / "a" / "b" / "c" / "cpu.max").read_text() == "2500 10000"
    assert (tmp_path / "a" / "b" / "c" / "memory.max").read_text() == "12345"
    tree.limit_time("a/b/c", GroupSettings(0.5, 1))
    assert (tmp_path / "a" / "b" / "c" / "cpu.max").read_text() == "5000 10000"
    assert (tmp_path / "a" / "b" / "c" / "memory.max").read_text() == "12345"
    tree.limit("a/b/c", GroupSettings(None, 1))
    assert (tmp_path / "a" / "b" / "c" / "cpu.max").read_text() == "max 10000"


# The journal. ---------------------------------------------------------------------------------------------


def journal(owner: Owner | None, whole: bool) -> Journal:
    host = EmulatedHost("pi1", "fast", "10.213.0.1", 1e6, 0.5, 1 << 30)
    return Journal("bed", (host,), owner, whole)


def test_a_journal_is_left_over_if_its_owner_is_gone_or_it_is_unfinished(tmp_path: Path) -> None:
    here = Owner.of(os.getpid())
    later = Owner(os.getpid(), here.started + "1")  # another process with the same pid
    assert here.alive
    assert not later.alive
    assert not journal(here, whole=False).left_over
    assert not journal(here, whole=True).left_over
    assert not journal(None, whole=True).left_over
    assert journal(None, whole=False).left_over
    assert journal(later, whole=True).left_over
    shelf = JournalFiles(tmp_path / "shelf")
    with shelf.locked():
        shelf.write(journal(here, whole=True))
        assert shelf.find("bed") == journal(here, whole=True)
        assert shelf.names() == ["bed"]
        shelf.forget("bed")
        assert shelf.names() == []
        assert shelf.find("bed") is None
