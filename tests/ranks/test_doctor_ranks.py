"""pipeedge-doctor as several processes: measured links, firewalls, a cable."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from networks import make_network
from ports import free_port
from processes import Ended, Programs
from waiting import LIMIT_S

from pipeedge.models import DIGITS
from pipeedge.plan.spec_files import load_neighbors
from pipeedge.plan.spec_writing import save_neighbors
from pipeedge.plan.specs import NeighborLink

DOCTOR = "pipeedge/doctor/__main__.py"


def examined(directory: Path, spaces: Mapping[int, str | None], *arguments: object) -> dict[int, Ended]:
    """Run the doctor as several ranks, each in a network namespace or in none."""
    with Programs(directory) as programs:
        for rank, space in spaces.items():
            programs.launch(rank, DOCTOR, rank, *arguments, "-m", DIGITS, space=space)
        return programs.wait(within=100)


def test_three_ranks_measure_their_links_and_write_them(tmp_path: Path) -> None:
    target = tmp_path / "links.yml"
    save_neighbors(target, {"x": {"y": NeighborLink(1e6)}, "a": {"b": NeighborLink(1.0)}})
    arguments = ("--port", free_port(), "-H", "a,b,c", "--neighbors-file", target, "--timeout", "15")
    ended = examined(tmp_path, dict.fromkeys(range(3)), 3, *arguments)
    assert [end.status for end in ended.values()] == [0, 0, 0], ended
    # On a busy machine the rounds may be too unsteady to be kept, but every link is measured.
    lines = [line for line in ended[0].out.splitlines() if line.split()[1:2] == ["link"]]
    assert len(lines) == 3, ended[0].out
    steady = [
        ("abc"[first], "abc"[second])
        for line, (first, second) in zip(lines, ((0, 1), (1, 2), (2, 0)), strict=True)
        if line.startswith("ok") and f"rank {first} -> rank {second}: " in line
    ]
    assert len(steady) == sum(line.startswith("ok") for line in lines)
    links = load_neighbors(target)
    measured = {("x", "y"), *steady}
    assert {(host, name) for host, near in links.items() for name in near} == measured | {("a", "b")}
    for host, name in steady:
        assert links[host][name].bw_bytes_per_s > 0
        assert links[host][name].latency_s >= 0
    assert links["x"]["y"] == NeighborLink(1e6)


@pytest.fixture
def cable() -> Iterator[tuple[str, str]]:
    """Create two network namespaces that reach each other: 10.213.7.1 and 10.213.7.2."""
    with contextlib.ExitStack() as stack:
        network = make_network("pedoc", 2, stack)
        yield network.space(0), network.space(1)


def inside(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def drop(name: str, *rule: str) -> None:
    """Make the namespace ``name`` drop packets that ``rule`` matches."""
    if shutil.which("iptables") is None:
        pytest.skip("a firewall needs the program iptables")
    done = subprocess.run(
        [*inside(name), "iptables", "-A", "INPUT", "-i", "eth0", *rule, "-j", "DROP"],
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no firewall here: {done.stderr.decode().strip()[:80]}")


def test_fault_firewalled_port(cable: tuple[str, str], tmp_path: Path) -> None:
    drop(cable[0], "-p", "tcp", "--dport", "29500")
    end = examined(tmp_path, {1: cable[1]}, 2, "--addr", "10.213.7.1", "--timeout", 3)[1]
    assert "problem  port      rank 1: no answer from 10.213.7.1:29500" in end.out
    assert "firewall" in end.out
    assert end.status == 4


def test_fault_no_machine_there(cable: tuple[str, str], tmp_path: Path) -> None:
    end = examined(tmp_path, {1: cable[1]}, 2, "--addr", "10.213.7.99", "--timeout", 3)[1]
    assert "problem  port      rank 1:" in end.out
    assert "no machine has this address" in end.out or "machine is off" in end.out
    assert end.status == 4


def test_fault_interface_down(cable: tuple[str, str], tmp_path: Path) -> None:
    subprocess.run(["ip", "-n", cable[0], "link", "set", "eth0", "down"], timeout=LIMIT_S, check=True)
    end = examined(tmp_path, {0: cable[0]}, 1, "-s", "eth0")[0]
    assert "problem  interface rank 0: -s/--socket-ifname eth0: the interface is down" in end.out
    assert end.status == 2


def test_fault_firewalled_links(cable: tuple[str, str], tmp_path: Path) -> None:
    # Only rank 0's port is open; the ports of the links are not.
    drop(cable[0], "-p", "tcp", "!", "--dport", "29500", "--syn")
    drop(cable[1], "-p", "tcp", "--syn")
    arguments = (2, "--addr", "10.213.7.1")
    ended = examined(tmp_path, dict(enumerate(cable)), *arguments)
    for end in ended.values():
        assert "problem  link      rank 0 -> rank 1 carries no data" in end.out, ended
        assert "firewall" in end.out
        assert end.status == 4


def slow_down(name: str, rate: str) -> bool:
    """Limit the rate at which the namespace ``name`` sends; return False if the kernel cannot."""
    if shutil.which("tc") is None:
        return False
    for arguments in (
        "qdisc add dev eth0 root handle 1: htb default 1 r2q 100",
        f"class add dev eth0 parent 1: classid 1:1 htb rate {rate} burst 16k",
    ):
        done = subprocess.run(
            [*inside(name), "tc", *arguments.split()], capture_output=True, timeout=LIMIT_S, check=False
        )
        if done.returncode:
            return False
    return True


def test_links_over_a_cable_use_its_interface_and_show_its_rate(
    cable: tuple[str, str], tmp_path: Path
) -> None:
    limited = slow_down(cable[0], "100mbit")
    arguments = (2, "--addr", "10.213.7.1", "--timeout", "15", "--neighbors-file", tmp_path / "n.yml")
    ended = examined(tmp_path, dict(enumerate(cable)), *arguments)
    assert [end.status for end in ended.values()] == [0, 0], ended
    assert all("links go over eth0" in end.out for end in ended.values())
    links = load_neighbors(tmp_path / "n.yml") if (tmp_path / "n.yml").exists() else {}
    forward = links.get("0", {}).get("1")  # a busy machine may be too unsteady to write it
    if limited and forward is not None:
        assert 8 * forward.bw_bytes_per_s < 1.5e8, ended[0].out
