"""Test reading of the description of a test bed's cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from clusters import TYPES, inline, written

from pipeedge.base.errors import SpecError
from pipeedge.testbed.cluster_file import load_cluster


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
