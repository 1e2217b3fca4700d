"""Cluster files, control groups and the journal of a test bed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from clusters import TYPES, inline, written

from pipeedge.base.errors import RequestError, SpecError
from pipeedge.testbed.cluster import EmulatedHost
from pipeedge.testbed.cluster_file import load_cluster
from pipeedge.testbed.groups import GroupSettings, find_hierarchies
from pipeedge.testbed.journal import Journal, JournalFiles, Owner

# The cluster file ------


def test_a_cluster_is_read_from_the_schedulers_files(tmp_path: Path) -> None:
    (tmp_path / "types.yml").write_text(TYPES)
    (tmp_path / "devices.yml").write_text("fast: [a, b]\nslow: [c]\n")
    path = written(
        tmp_path,
        "device_types: types.yml\ndevices: devices.yml\nprocess_MB: 100\ncpu_fraction: {slow: 0.25, b: 0.1}",
    )
    hosts = load_cluster(path).hosts
    assert [(host.name, host.type_name, host.cpu_fraction) for host in hosts] == [
        ("a", "fast", 0.5),
        ("b", "fast", 0.1),
        ("c", "slow", 0.25),
    ]
    assert [host.mem_bytes >> 20 for host in hosts] == [612, 612, 356]
    assert hosts[2].bw_bytes_per_s == 20 * 2**20 / 8
    assert len({host.address for host in hosts}) == 3
    assert load_cluster(written(tmp_path, inline("{fast: [a, b]}"))).hosts[0].cpu_fraction == 0.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (inline("{fast: [a], slow: [a]}"), "the host a is listed twice; it stands under fast already"),
        (inline("{quick: [a]}"), "quick is not a device type; the known types are fast, slow"),
        (inline("{fast: [a]}", "cpu_fraction: {b: 0.5}\n"), "b: no host or device type of this cluster"),
        (inline("{fast: [a]}", "cpu_fraction: {a: 0}\n"), "it must be at least 0.01"),
        (inline("{fast: [a]}", "cpu_fraction: {a: -1}\n"), "it must be at least 0.01"),
        (inline("{fast: [a]}", "cpu_fraction: {a: .inf}\n"), "a number is expected"),
        (inline("{fast: [abcdefghijklmnop]}"), "16 characters; interface names have at most 15"),
        (inline("{fast: ['a/b']}"), "has an invalid name"),
        (inline("{fast: [lo]}"), "a name that the system uses itself"),
        (inline("{fast: []}"), "lists no hosts"),
        (inline("{fast: [a]}", "speed: 3\n"), "speed: unknown key; a cluster file has"),
        ("devices: {}\n", "the key device_types is missing"),
        (inline("{fast: [a]}").replace("400", "0"), "fast has a bandwidth of 0"),
        (inline("{fast: [a]}").replace("400", "-4"), "bw_Mbps: is -4; it must not be negative"),
        (inline("{fast: [a]}").replace("0.5", "'x'"), "fast: cpu_fraction is x; give a number of processors"),
        ("device_types: missing.yml\ndevices: {}\n", "missing.yml: no such file"),
    ],
)
def test_an_invalid_cluster_file_gets_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        load_cluster(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cluster_too_large_for_this_machine_is_rejected(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, inline("{fast: [a, b, c]}")))
    cluster.check(processors=2, mem_bytes=1 << 30)
    with pytest.raises(SpecError, match=r"the hosts need 1\.5 processors together, but this machine has 1"):
        cluster.check(processors=1, mem_bytes=1 << 30)
    with pytest.raises(SpecError, match="host a needs 1024 MB of memory, but this machine has 1023 MB"):
        cluster.check(processors=2, mem_bytes=(1 << 30) - 1)


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
