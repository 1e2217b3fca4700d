"""The test bed: what a cluster file may contain, and hosts as fast and as large as it says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from clusters import inline, written
from places import ROOT
from waiting import LIMIT_S, until

from pipeedge.base.errors import RequestError
from pipeedge.testbed.bed import TestBed, TestBeds
from pipeedge.testbed.cluster import Cluster, EmulatedHost
from pipeedge.testbed.cluster_file import load_cluster
from pipeedge.testbed.groups import find_hierarchies
from pipeedge.testbed.journal import Owner

TESTBED = [sys.executable, str(ROOT / "tools" / "testbed.py")]


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


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(quick_python: Path) -> Run:
    """Return a function that runs ``testbed.py`` to its end, which must be with status ``check``."""

    def call(*arguments: str, check: int = 0) -> subprocess.CompletedProcess[str]:
        command = [quick_python, *TESTBED[1:], *arguments]
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        env = {**os.environ, "PATH": path}
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env)
        assert done.returncode == check, done.stderr
        return done

    return call


SHARE = """
import time
end, used = time.monotonic() + 1, time.process_time()
while time.monotonic() < end: pass
print(time.process_time() - used)
"""


def comes_within(low: float, high: float, measure: Callable[[], Iterable[float]]) -> bool:
    """Return whether all figures of one of a few measurements are in a range.

    Whatever holds up a process in between disturbs one measurement; a wrong limit is seen by all of them.
    """
    return any(all(low < figure < high for figure in measure()) for _ in range(5))


HOG = "block = bytearray(700 << 20); print('took it')"


def test_up_exec_status_down(tmp_path: Path, name: str, run: Run) -> None:
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
    assert share < 0.3, "a busy machine gives less, none gives more"
    assert run(*inside, sys.executable, "-c", HOG, check=-9).stdout == "", "beyond its memory"
    assert "hello" in run("ssh", "--name", name, "-o", "X=y", "me@pi1", "echo hello").stdout
    assert "has no host pi9" in run("exec", "--name", name, "pi9", "--", "true", check=2).stderr
    sleeper = subprocess.Popen([*TESTBED, *inside, "sleep", "60"])
    try:
        before = psutil.Process(sleeper.pid)
        until(lambda: before.name() == "sleep", "the command is under way")
        run("down", "--name", name)
        assert sleeper.wait(20) == -signal.SIGKILL
    finally:
        sleeper.kill()
        sleeper.wait()
    assert traces(name) == []
    assert f"no test bed {name} is up" in run("down", "--name", name).stdout


def limits(bed: TestBed, host: str) -> tuple[float, list[float]]:
    """Return the kernel's limits: processors, and the rate in bit/s of both ends of the cable."""
    group = bed.journal.group(host)
    (tree,) = (tree for tree in bed.hierarchies if "cpu" in tree.controllers)
    files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if tree.version == 1 else ("cpu.max",)
    quota, period = " ".join((tree.mount / group / file).read_text() for file in files).split()
    rates: list[float] = []
    for space, interface in ((bed.journal.namespace(host), "eth0"), (bed.journal.switch, host)):
        command = ["tc", "-n", space, "class", "show", "dev", interface]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        ((number, unit),) = re.findall(r"class htb 1:1 root .*ceil (\d+)([KMG]?)bit", shown)
        rates.append(int(number) * 1000.0 ** " KMG".index(unit or " "))
    return int(quota) / int(period), rates


def test_a_host_changes_while_a_program_runs(tmp_path: Path, name: str, run: Run) -> None:
    path = written(tmp_path, inline("{fast: [pi1], slow: [pi2]}", "cpu_fraction: {slow: 0.25}\n"))
    run("up", "--name", name, str(path))
    bed = TestBeds().find(name)
    before = limits(bed, "pi1"), limits(bed, "pi2")
    assert [share for share, _ in before] == [0.5, 0.25]
    program = subprocess.Popen([*TESTBED, "exec", "--name", name, "pi1", "--", "sleep", "60"])
    try:
        until(lambda: psutil.Process(program.pid).name() == "sleep", "the command is under way")
        shown = run("set", "--name", name, "pi1", "--cpu-fraction", "0.125", "--bw-mbps", "50").stdout
        assert "50 Mbps" in shown
        assert "0.125" in shown
        share, rates = limits(bed, "pi1")
        assert share == 0.125
        assert rates == pytest.approx([rate / 8 for rate in before[0][1]], rel=1e-3)
        assert limits(bed, "pi2") == before[1]
        assert "0.125" in run("status").stdout
        run("set", "--name", name, "pi1", "--bw-mbps", "400")
        assert limits(bed, "pi1") == (0.125, before[0][1])
        assert program.poll() is None
    finally:
        program.kill()
        program.wait()


def test_a_change_limits_a_flow_under_way(tmp_path: Path, name: str) -> None:
    cluster = load_cluster(written(tmp_path, inline("{slow: [a, b]}").replace("20,", "8,")))
    with TestBeds().lent(name, cluster) as bed:
        changed = TestBeds().change(name, "b", bw_bytes_per_s=4 * 2**20 / 8)
        assert changed.journal.host("b").bw_bytes_per_s == 4 * 2**20 / 8
        assert changed.journal.owner == bed.journal.owner
        assert comes_within(0, 1.2 * 4, lambda: rates(changed, [("a", "b")]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "set: give --cpu-fraction or --bw-mbps, or both"),
        (("--cpu-fraction", "0"), "--cpu-fraction 0.0: give a number of processors of at least 0.01"),
        (("--cpu-fraction", "nan"), "--cpu-fraction nan: give a number of processors of at least 0.01"),
        (("--cpu-fraction", "100000"), "lower cpu_fraction"),
        (("--bw-mbps", "-3"), "--bw-mbps -3.0: give a number of Mbit/s above 0"),
        (("--bw-mbps", "inf"), "--bw-mbps inf: give a number of Mbit/s above 0"),
    ],
)
def test_impossible_changes_are_refused(
    tmp_path: Path, name: str, run: Run, options: tuple[str, ...], message: str
) -> None:
    cluster = load_cluster(written(tmp_path, inline("{fast: [a]}")))
    with TestBeds().lent(name, cluster) as bed:
        before = limits(bed, "a")
        assert message in run("set", "--name", name, "a", *options, check=2).stderr
        assert "has no host b" in run("set", "--name", name, "b", "--bw-mbps", "9", check=2).stderr
        assert limits(bed, "a") == before
        assert TestBeds().find(name).journal == bed.journal


def test_hosts_get_their_quota_on_a_busy_machine(tmp_path: Path, name: str) -> None:
    cluster = load_cluster(written(tmp_path, inline("{fast: [a]}", "cpu_fraction: {a: 0.4}\n")))
    spinning = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spinning, start_new_session=True) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        with TestBeds().lent(name, cluster) as bed:

            def share() -> Iterator[float]:
                command = bed.command("a", [sys.executable, "-c", SHARE])
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
                yield float(done.stdout)

            assert comes_within(0.33, 0.46, share)
    finally:
        for other in others:
            other.kill()
            other.wait()


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
    return [float(server.communicate(timeout=LIMIT_S)[0]) * 8 / 2**20 for server in servers]


def test_a_link_has_the_bandwidth_of_its_slower_end_in_both_directions(tmp_path: Path, name: str) -> None:
    cluster = load_cluster(written(tmp_path, inline("{fast: [a], slow: [b]}")))
    with TestBeds().lent(name, cluster) as bed:
        for flow in (("a", "b"), ("b", "a")):
            assert comes_within(0.5 * 20, 1.2 * 20, lambda flow=flow: rates(bed, [flow]))
    assert traces(name) == []


def test_a_forwarding_host_receives_at_its_full_rate(tmp_path: Path, name: str) -> None:
    # In a single queue its acknowledgements would wait behind the data that it sends.
    cluster = load_cluster(written(tmp_path, inline("{slow: [a, b, c]}").replace("20,", "8,")))
    with TestBeds().lent(name, cluster) as bed:
        assert comes_within(0.85 * 8, 1.1 * 8, lambda: rates(bed, [("a", "b"), ("b", "c")]))


FRAME = """
import socket, sys, time
if sys.argv[1] == "serve":
    server = socket.create_server(("0.0.0.0", 5000))
    print("ready", flush=True)
    peer, _ = server.accept()
    with peer:
        for size in (1, 40000):
            while size:
                size -= len(peer.recv(size))
            peer.sendall(b"x")
else:
    with socket.create_connection((sys.argv[1], 5000)) as peer:
        for size in (1, 40000):
            time.sleep(0.2)
            began = time.monotonic()
            peer.sendall(bytes(size))
            peer.recv(1)
    print(time.monotonic() - began)
"""


def test_a_frame_after_a_pause_takes_its_time(tmp_path: Path, name: str) -> None:
    """It takes 0.3 s at 1 Mbit/s, less what a cable allows at once; a slow machine adds to it."""
    cluster = load_cluster(written(tmp_path, inline("{slow: [a, b]}").replace("20,", "1,")))
    with TestBeds().lent(name, cluster) as bed:
        serve = bed.command("b", [sys.executable, "-c", FRAME, "serve"])
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            send = bed.command("a", [sys.executable, "-c", FRAME, "b"])
            taken = subprocess.run(send, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
        assert float(taken) > 0.25


def test_the_longest_packet_of_a_host_follows_its_rate(tmp_path: Path, name: str) -> None:
    def longest(bed: TestBed) -> int:
        show = bed.command("b", ["ip", "-d", "link", "show", "dev", "eth0"])
        said = subprocess.run(
            show, capture_output=True, text=True, check=True, timeout=LIMIT_S
        ).stdout.split()
        return int(said[said.index("gso_max_size") + 1])

    cluster = load_cluster(written(tmp_path, inline("{slow: [a, b]}").replace("20,", "1,")))
    with TestBeds().lent(name, cluster) as bed:
        assert longest(bed) == 1514
        assert longest(TestBeds().change(name, "b", bw_bytes_per_s=1e9)) == 1 << 16
        assert longest(TestBeds().change(name, "b", bw_bytes_per_s=2e7)) == 20000


@pytest.mark.parametrize("delay", [0.05, 0.3, 0.6])
def test_the_next_up_removes_what_a_killed_one_left(
    tmp_path: Path, name: str, run: Run, delay: float
) -> None:
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


def test_sigterm_to_its_process_removes_a_lent_bed(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, inline("{slow: [a]}"))
    script = """
import sys, time
from pipeedge.testbed.bed import TestBeds
from pipeedge.testbed.cluster_file import load_cluster
with TestBeds().lent(sys.argv[1], load_cluster(sys.argv[2])):
    print("up", flush=True)
    time.sleep(60)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script, name, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    with child, child.stdout as out:
        assert out.readline() == b"up\n"
        assert traces(name) != []
        child.send_signal(signal.SIGTERM)
    assert traces(name) == []


def test_network_namespace_of_another_program_is_left_alone(tmp_path: Path, name: str) -> None:
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
        [*command, script], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False
    )
    if "PermissionError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip("this interpreter is root's alone")
    assert "needs root" in done.stderr or "cannot be read" in done.stderr
    assert done.returncode == 2
