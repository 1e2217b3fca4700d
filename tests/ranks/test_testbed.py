"""The test bed: what a cluster file may contain, and hosts as fast and as large as it says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from places import ROOT

from pipeedge.base.errors import RequestError, SpecError
from pipeedge.testbed.bed import TestBed, TestBeds
from pipeedge.testbed.cluster import Cluster, EmulatedHost, load_cluster
from pipeedge.testbed.groups import GroupSettings, find_hierarchies
from pipeedge.testbed.journal import Journal, Owner, Shelf

TESTBED = [sys.executable, str(ROOT / "tools" / "testbed.py")]

TYPES = """
fast: {bw_Mbps: 400, mem_MB: 512, cpu_fraction: 0.5, model_profiles: {}}
slow: {bw_Mbps: 20, mem_MB: 256, model_profiles: {}}
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "cluster.yml"
    path.write_text(text)
    return path


def inline(devices: str, more: str = "") -> str:
    types = "".join(f"  {line}\n" for line in TYPES.strip().splitlines())
    return f"device_types:\n{types}devices: {devices}\n{more}"


# The cluster file. ------------------------------------------------------------------------------------


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
    shelf = Shelf(tmp_path / "shelf")
    with shelf.locked():
        shelf.write(journal(here, whole=True))
        assert shelf.find("bed") == journal(here, whole=True)
        assert shelf.names() == ["bed"]
        shelf.forget("bed")
        assert shelf.names() == []
        assert shelf.find("bed") is None


# Real hosts. ----------------------------------------------------------------------------------------------


def traces(name: str) -> list[str]:
    """Return everything that a test bed of this name has left on the machine."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20)
    groups = [
        str(tree.mount / "pipeedge-testbed" / name)
        for tree in find_hierarchies(Path("/proc/mounts").read_text())
        if (tree.mount / "pipeedge-testbed" / name).exists()
    ]
    files = [str(path) for path in Path("/run/pipeedge-testbed").glob(f"{name}*")]
    return [line for line in spaces.stdout.split("\n") if line.startswith(f"{name}-")] + groups + files


@pytest.fixture
def name() -> Iterator[str]:
    """Return the name of a test bed, and check afterwards that nothing of it is left."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a test bed needs root and iproute2")
    chosen = f"pt{os.getpid()}"
    try:
        TestBeds().down(chosen)
    except RequestError as error:
        pytest.skip(str(error))
    yield chosen
    TestBeds().down(chosen)
    assert traces(chosen) == []


def run(*arguments: str, check: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*TESTBED, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == check, done.stderr
    return done


SHARE = """
import time
end, used = time.monotonic() + 1.5, time.process_time()
while time.monotonic() < end: pass
print((time.process_time() - used) / 1.5)
"""

HOG = "block = bytearray(700 << 20); print('took it')"


def test_up_exec_status_down(tmp_path: Path, name: str) -> None:
    path = written(
        tmp_path, inline("{fast: [pi1, pi2], slow: [pi3]}", "cpu_fraction: {slow: 0.25}\nprocess_MB: 200\n")
    )
    run("up", "--name", name, str(path))
    said = run("up", "--name", name, str(path), check=2).stderr
    assert said == f"testbed.py: test bed {name} is up already; take it down first, or use another --name\n"
    assert f"test bed {name}: 3 hosts" in run("status").stdout
    inside = ["exec", "--name", name, "pi3", "--"]
    seen = run(
        *inside, "sh", "-c", "hostname; getent hosts pi1; ls /sys/class/net > /dev/null; exit 0"
    ).stdout
    assert seen.splitlines()[0] == "pi3"
    assert seen.splitlines()[1].split() == ["10.213.0.1", "pi1"]
    assert os.uname().nodename != "pi3"
    run(*inside, "sh", "-c", "exit 7", check=7)
    share = float(run(*inside, sys.executable, "-c", SHARE).stdout)
    assert 0.15 < share < 0.3, "a busy machine gives less, none gives more"
    assert run(*inside, sys.executable, "-c", HOG, check=-9).stdout == "", "beyond its memory"
    assert "hello" in run("ssh", "--name", name, "-o", "X=y", "me@pi1", "echo hello").stdout
    assert "has no host pi9" in run("exec", "--name", name, "pi9", "--", "true", check=2).stderr
    sleeper = subprocess.Popen([*TESTBED, *inside, "sleep", "60"])
    try:
        before = psutil.Process(sleeper.pid)
        deadline = time.monotonic() + 20
        while before.name() != "sleep" and time.monotonic() < deadline:
            time.sleep(0.02)
        run("down", "--name", name)
        assert sleeper.wait(20) == -signal.SIGKILL
    finally:
        sleeper.kill()
        sleeper.wait()
    assert traces(name) == []
    assert f"no test bed {name} is up" in run("down", "--name", name).stdout


def test_hosts_get_their_quota_on_a_busy_machine(tmp_path: Path, name: str) -> None:
    cluster = load_cluster(written(tmp_path, inline("{fast: [a]}", "cpu_fraction: {a: 0.4}\n")))
    spinning = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spinning, start_new_session=True) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        with TestBeds().lent(name, cluster) as bed:
            share = subprocess.run(
                bed.command("a", [sys.executable, "-c", SHARE]),
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                timeout=60,
            ).stdout
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert 0.33 < float(share) < 0.45


RATE = """
import socket, sys, time
if sys.argv[1] == "serve":
    server = socket.create_server(("0.0.0.0", 5000))
    print("ready", flush=True)
    peer, _ = server.accept()
    peer.recv(1)
    began, count = time.monotonic(), 0
    while data := peer.recv(1 << 16):
        count += len(data)
    print(count / (time.monotonic() - began))
else:
    with socket.create_connection((sys.argv[1], 5000)) as peer:
        peer.sendall(b"x" * (1 << 21))
"""


def rates(bed: TestBed, flows: list[tuple[str, str]]) -> list[float]:
    """Return the rates of simultaneous flows in Mbit/s."""
    servers = []
    for _, target in flows:
        servers.append(
            subprocess.Popen(
                bed.command(target, [sys.executable, "-c", RATE, "serve"]), stdout=subprocess.PIPE, text=True
            )
        )
        assert servers[-1].stdout is not None
        assert servers[-1].stdout.readline() == "ready\n"
    clients = [
        subprocess.Popen(bed.command(source, [sys.executable, "-c", RATE, target]))
        for source, target in flows
    ]
    for client in clients:
        assert client.wait(60) == 0
    return [float(server.communicate(timeout=60)[0]) * 8 / 2**20 for server in servers]


def test_a_link_has_the_bandwidth_of_its_slower_end_in_both_directions(tmp_path: Path, name: str) -> None:
    cluster = load_cluster(written(tmp_path, inline("{fast: [a], slow: [b]}")))
    with TestBeds().lent(name, cluster) as bed:
        for flow in (("a", "b"), ("b", "a")):
            (rate,) = rates(bed, [flow])
            assert 0.5 * 20 < rate < 1.2 * 20
    assert traces(name) == []


def test_a_forwarding_host_receives_at_its_full_rate(tmp_path: Path, name: str) -> None:
    # In a single queue its acknowledgements would wait behind the data that it sends.
    cluster = load_cluster(written(tmp_path, inline("{slow: [a, b, c]}").replace("20,", "8,")))
    with TestBeds().lent(name, cluster) as bed:
        for rate in rates(bed, [("a", "b"), ("b", "c")]):
            assert 0.85 * 8 < rate < 1.1 * 8


@pytest.mark.parametrize("delay", [0.05, 0.3, 0.6])
def test_the_next_up_removes_what_a_killed_one_left(tmp_path: Path, name: str, delay: float) -> None:
    path = written(tmp_path, inline("{fast: [a, b], slow: [c]}"))
    process = subprocess.Popen([*TESTBED, "up", "--name", name, str(path)], stderr=subprocess.DEVNULL)
    journal_file = Path("/run/pipeedge-testbed") / name / "journal.json"
    deadline = time.monotonic() + 20
    while not journal_file.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(delay / 10)
    process.kill()
    process.wait()
    run("status")
    found = TestBeds().shelf.find(name)
    assert found is None or found.whole
    if found is None:
        assert traces(name) == []
        run("up", "--name", name, str(path))


def test_a_lent_bed_is_removed_with_its_process(tmp_path: Path, name: str) -> None:
    cluster = load_cluster(written(tmp_path, inline("{slow: [a]}")))
    child = subprocess.Popen(["sleep", "60"])
    try:
        TestBeds().up(name, cluster, owner=Owner.of(child.pid))
        assert name in [bed.journal.name for bed in TestBeds().all()]
    finally:
        child.kill()
        child.wait()
    assert name not in [bed.journal.name for bed in TestBeds().all()]
    assert traces(name) == []


def test_a_namespace_of_somebody_else_is_not_touched(tmp_path: Path, name: str) -> None:
    cluster = load_cluster(written(tmp_path, inline("{slow: [a, b]}")))
    theirs = f"{name}-b"
    subprocess.run(["ip", "netns", "add", theirs], check=True, timeout=20)
    try:
        with pytest.raises(RequestError, match=f"network namespace {theirs} exists"):
            TestBeds().up(name, cluster)
        assert traces(name) == [theirs]
        assert not TestBeds().down(name)
        assert traces(name) == [theirs]
    finally:
        subprocess.run(["ip", "netns", "delete", theirs], check=True, timeout=20)


def test_a_bed_that_cannot_be_built_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    host = EmulatedHost("a", "slow", "no address", 1e6, None, 1 << 30)
    with pytest.raises(Exception, match="no address"):
        TestBeds().up(name, Cluster((host,)))
    assert traces(name) == []


def test_missing_root_rights_are_reported(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to give it away, and setpriv")
    path = written(tmp_path, inline("{fast: [a]}"))
    command = ["setpriv", "--reuid", "65534", sys.executable, "-c"]
    script = f"import sys; sys.argv = ['testbed.py', 'up', {str(path)!r}]; "
    script += "from pipeedge.testbed.main import main; main()"
    done = subprocess.run(
        [*command, script], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    if "PermissionError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip("this interpreter is root's alone")
    assert "needs root" in done.stderr or "cannot be read" in done.stderr
    assert done.returncode == 2
