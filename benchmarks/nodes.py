#!/usr/bin/env python3
"""From a box of boards to a running model, on three emulated hosts: ``benchmarks/nodes.py``. Needs root.

    first       a code for each of two machines, up, ask: commands typed, and seconds to the first answer
    again       the same model once more
    plan        throughput of the plan from quick profiles, and of the next, against one from thorough ones
    text        the same as 'first' for a decoder with the shape of Qwen2.5-0.5B: up, ask
    losses      under load: a node killed, the same one back, the asked node killed and started again
    status      processor time of the asked node while 'pipeedge status' is asked every two seconds
    strangers   who is refused, with which line, and whether anything was run for them; the last row

The hosts are network namespaces on one bridge, in which nodes find each other by mDNS, each with a part of a
processor. Weights are random. ``--directory`` keeps what nodes have learnt, so that rows can be run apart.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import json
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from random_decoders import SHAPES, write_directory
from rich.console import Console
from rich.table import Table

from pipeedge.base.errors import PipeEdgeError
from pipeedge.nodes.node import NODE_PORT
from pipeedge.nodes.pairing import JOIN_PORT, TRIES, new_code
from pipeedge.nodes.peer import ask_about, call
from pipeedge.testbed.bed import TestBed, TestBeds
from pipeedge.testbed.cluster_file import load_cluster
from pipeedge.transport.authority import make_cluster_key
from pipeedge.transport.membership import Membership

ROOT = Path(__file__).resolve().parents[1]
HOSTS = ("pi1", "pi2", "pi3")
ROWS = ("first", "again", "plan", "text", "losses", "status", "strangers")
PORT = 8000
LIMIT_S = 200.0
REFINING_S = 60.0
"""Seconds under load in which a run finds out by how much its profiles are off."""
_APART_S = 0.1
"""Seconds without an answer that separate microbatches."""
_NETWORK = 0x40000000
"""Constant CLONE_NEWNET of Linux's sched.h."""
CLUSTER = """
device_types: {{board: {{mem_MB: 4096, bw_Mbps: {bw}, model_profiles: {{}}, cpu_fraction: {cpu}}}}}
devices: {{board: [pi1, pi2, pi3]}}
"""


class Boards:
    """Three hosts with a node on each."""

    def __init__(self, bed: TestBed, addresses: dict[str, str], directory: Path, model: str) -> None:
        self.bed = bed
        self.addresses = addresses
        self.directory = directory
        self.model = model
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.typed = 0
        self.rounds = 1
        """Number of times that the row about plans is repeated, its parts in turn."""

    def command(self, host: str, *words: str) -> list[str]:
        """Return the words that run a command of pipeedge on a host, as a user of that host."""
        place = self.directory / host
        place.mkdir(exist_ok=True)
        environment = {"HOME": str(place), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        variables = [f"{name}={value}" for name, value in environment.items()]
        return self.bed.command(
            host,
            ["env", "-C", str(self.directory), *variables, sys.executable, "-u", "-m", "pipeedge", *words],
        )

    def start(self, host: str, *words: str) -> None:
        """Start the node of a host."""
        log = (self.directory / f"{host}.log").open("ab")
        self.nodes[host] = subprocess.Popen(
            self.command(host, "node", *words), stdout=log, stderr=log, start_new_session=True
        )

    def said(self, host: str) -> str:
        """Return what a node has said."""
        return (self.directory / f"{host}.log").read_text(errors="replace")

    def type(self, host: str, *words: str) -> str:
        """Run a command, as a person types it; return what it prints."""
        self.typed += 1
        return self.run(host, *words)

    def run(self, host: str, *words: str) -> str:
        """Run a command on a host; return what it prints."""
        done = subprocess.run(self.command(host, *words), capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def state(self) -> dict[str, Any]:
        """Return the state of the cluster."""
        found: dict[str, Any] = json.loads(self.type("pi1", "status", "--json"))
        return found

    def process(self, host: str) -> psutil.Process:
        """Return the process of a node: all before it has become it by exec."""
        return psutil.Process(self.nodes[host].pid)

    def kill(self, host: str) -> None:
        """Kill a node, and the ranks that it runs."""
        self.nodes[host].kill()
        self.nodes[host].wait()


@contextlib.contextmanager
def boards(directory: Path, model: str, cpu: float, bw: float) -> Iterator[Boards]:
    """Yield the hosts; end their nodes at last."""
    (directory / "CLUSTER.yml").write_text(CLUSTER.format(cpu=cpu, bw=bw))
    cluster = load_cluster(directory / "CLUSTER.yml")
    with TestBeds().lent("nodes", cluster) as bed:
        found = Boards(bed, {host.name: host.address for host in cluster.hosts}, directory, model)
        try:
            yield found
        finally:
            for node in found.nodes.values():
                node.send_signal(signal.SIGTERM)
            for node in found.nodes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node.wait(60)


def until(happened: Any, what: str, pause_s: float = 0.05) -> float:
    """Wait until ``happened`` is true; return the seconds that took."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > LIMIT_S:
            raise SystemExit(f"not within {LIMIT_S:g} s: {what}")
        time.sleep(pause_s)
    return time.monotonic() - began


def first(found: Boards) -> dict[str, str]:
    """Join, serve and ask, from nothing."""
    for host in HOSTS:
        shutil.rmtree(found.directory / host, ignore_errors=True)
        (found.directory / f"{host}.log").unlink(missing_ok=True)
    began = time.monotonic()
    found.typed = 0
    found.start("pi1", "--invite", "2")
    found.typed += 1
    codes: list[str] = []
    for host in HOSTS[1:]:
        until(lambda: len(re.findall(r"join (\S+)", found.said("pi1"))) > len(codes), "a code")
        codes.append(re.findall(r"join (\S+)", found.said("pi1"))[-1])
        found.start(host, "--join", codes[-1])
        found.typed += 1
        until(lambda host=host: f"{host} waits for work" in found.said(host), f"{host} joins")
    ready_s = time.monotonic() - began
    up = found.type("pi1", "up", found.model)
    answer = found.type("pi1", "ask", found.model, str(ROOT / "pipeedge/assets/chelsea.jpg"))
    profiled = re.findall(r"profiling took ([\d.]+) s", up)[-1]
    return {
        "commands typed (5)": str(found.typed),
        "seconds to the first answer (90)": f"{time.monotonic() - began:.1f}",
        "of which joining": f"{ready_s:.1f}",
        "of which profiling (60)": profiled,
        "first line of the answer": answer.splitlines()[0],
    }


def again(found: Boards) -> dict[str, str]:
    """Serve once more what was served before."""
    with contextlib.suppress(SystemExit):
        found.type("pi1", "down")
    found.typed = 0
    began = time.monotonic()
    found.type("pi1", "up", found.model)
    return {"commands typed (1)": str(found.typed), "seconds (15)": f"{time.monotonic() - began:.1f}"}


def enter(found: Boards, host: str) -> None:
    """Move this thread into the network of a host."""
    with open(f"/run/netns/{found.bed.journal.namespace(host)}") as space:  # noqa: PTH123 - of the kernel
        ctypes.CDLL(None).setns(space.fileno(), _NETWORK)


class Load:
    """Clients on the asked host, which ask for the same image again and again."""

    def __init__(self, found: Boards, clients: int = 24) -> None:
        self.answered = 0
        self.failed = 0
        self._body = (ROOT / "pipeedge/assets/chelsea.jpg").read_bytes()
        self._over = threading.Event()
        self._found = found
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]
        for each in self._threads:
            each.start()

    def _ask(self) -> None:
        enter(self._found, "pi1")
        while not self._over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
            try:
                connection.request("POST", "/classify", self._body)
                if connection.getresponse().status == 200:
                    self.answered += 1
                    continue
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            self.failed += 1
            time.sleep(0.1)

    def rate(self, seconds: float) -> float:
        """Return the answers per second over some time, from the start of one microbatch to that of another.

        The answers of a microbatch come together. Counting from the middle of one to that of another would be
        off by most of a microbatch, a tenth of all that come in these seconds.
        """
        before, began = self.answered, time.monotonic()
        starts: list[tuple[float, int]] = []
        answered, since = before, began
        while time.monotonic() - began < seconds:
            time.sleep(0.005)
            if self.answered > answered:
                if time.monotonic() - since > _APART_S:
                    starts.append((time.monotonic(), answered))
                answered, since = self.answered, time.monotonic()
        if len(starts) < 3:
            return (self.answered - before) / (time.monotonic() - began)
        (first_s, first), (last_s, last) = starts[0], starts[-1]
        return (last - first) / (last_s - first_s)

    def close(self) -> None:
        """Stop asking."""
        self._over.set()
        for each in self._threads:
            each.join(60)


def plan(found: Boards) -> dict[str, str]:
    """Compare the plan from quick profiles, and the next one, with one from thorough profiles, in turn."""
    rates: dict[str, list[float]] = {"quick": [], "refined": [], "thorough": []}
    stages: dict[str, list[str]] = {name: [] for name in rates}

    def measure(name: str, *words: str) -> None:
        with contextlib.suppress(SystemExit):
            found.type("pi1", "down")
        if name != "refined":  # which is planned with what the run before has measured
            use_profiles(found, name, anew=name == "quick")
        found.type("pi1", "up", found.model, *words)
        load = Load(found)
        load.rate(4)
        rates[name].append(load.rate(30))
        stages[name].append(stages_of(found))
        if name == "quick":
            load.rate(REFINING_S - 30)
        load.close()

    def show(name: str) -> str:
        known = sorted(set(stages[name]), key=stages[name].index)
        return f"{', '.join(f'{rate:.2f}' for rate in rates[name])}; {' or '.join(known)}"

    def ratio(name: str) -> str:
        each = [rate / whole for rate, whole in zip(rates[name], rates["thorough"], strict=True)]
        cuts = {which: [re.sub(r"\w+: ", "", text) for text in stages[which]] for which in stages}
        same = sum(one == other for one, other in zip(cuts[name], cuts["thorough"], strict=True))
        every = ", ".join(f"{one:.3f}" for one in each)
        return f"{statistics.median(each):.3f} ({every}); {same} of {len(each)} times the same cut"

    for number in range(found.rounds):
        if number % 2:
            measure("thorough", "--thorough")
        measure("quick")
        measure("refined")
        if not number % 2:
            measure("thorough", "--thorough")
    return {
        "answers/s, quick profiles": show("quick"),
        "planned again with what it has measured": show("refined"),
        "answers/s, thorough profiles": show("thorough"),
        "quick against thorough, median (0.95)": ratio("quick"),
        "refined against thorough, median (1.0)": ratio("refined"),
    }


def stages_of(found: Boards) -> str:
    """Return which layers are where now."""
    run = found.state()["run"]
    return ", ".join(
        f"{run['ranks'][str(stage['rank'])]}: {stage['layers'].removeprefix('layers ')}"
        for stage in run["service"]["stages"]
    )


def text(found: Boards) -> dict[str, str]:
    """Serve a decoder, and ask it, after a start without anything but its files on the asked host."""
    directory = found.directory / "decoder"
    write_directory(SHAPES["qwen2.5-0.5b"], directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ROOT / "pipeedge/assets/llama-puzzles" / name, directory / name)
    with contextlib.suppress(SystemExit):
        found.type("pi1", "down")
    found.typed = 0
    began = time.monotonic()
    words = ("--dtype", "bfloat16")
    up = found.type("pi1", "up", str(directory), *words)
    up_s = time.monotonic() - began
    found.type("pi1", "ask", str(directory), "Sort 5 2 9 1.", "--max-tokens", "16", "--json")
    whole_s = time.monotonic() - began
    typed, stages = found.typed, stages_of(found)
    found.type("pi1", "down")
    again = time.monotonic()
    found.type("pi1", "up", str(directory), *words)
    again_s = time.monotonic() - again
    found.type("pi1", "down")
    return {
        "commands typed, after joining": str(typed),
        "seconds to the first answer of 16 tokens (90)": f"{whole_s:.1f}, of which up {up_s:.1f}",
        "of which measuring (60)": re.findall(r"profiling took ([\d.]+) s", up)[-1],
        "its stages": stages,
        "again (15)": f"{again_s:.1f}",
    }


def use_profiles(found: Boards, name: str, *, anew: bool) -> None:
    """Let each node have the profiles of one name alone, or none yet, and keep the others."""
    for host in HOSTS:
        home = found.directory / host / ".local/share/pipeedge"
        profiles, kept = home / "profiles", home / f"profiles-{name}"
        if profiles.is_symlink():
            profiles.unlink()
        else:
            shutil.rmtree(profiles)
        if anew:
            shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(exist_ok=True)
        profiles.symlink_to(kept)


def losses(found: Boards) -> dict[str, str]:
    """Kill a node and the asked one under load, and start them again."""

    def lost() -> bool:
        run = found.state()["run"]
        return run["service"] is not None and run["service"]["epoch"]["lost_ranks"] > before

    def here(name: str) -> bool:
        return any(node["name"] == name and node["here"] for node in found.state()["nodes"])

    load = Load(found, 8)
    load.rate(3)
    before = found.state()["run"]["service"]["epoch"]["lost_ranks"]
    failed = load.failed
    found.kill("pi3")
    gone_s = until(lambda: not here("pi3"), "status says that pi3 is gone")
    lost_s = gone_s + until(lost, "status says that a rank is lost")
    rate = load.rate(3)
    failures = load.failed - failed
    found.start("pi3")
    back_s = until(lambda: "has joined" in json.dumps(found.state()["run"]["events"][:8]), "pi3 is a spare")
    found.kill("pi1")
    began = time.monotonic()
    found.start("pi1")  # as systemd does
    answered = load.answered
    until(lambda: load.answered > answered + 8, "answers after a restart of the asked node")
    restarted_s = time.monotonic() - began
    load.close()
    return {
        "status true after the kill (2 s)": f"{gone_s:.1f} s; as a lost rank {lost_s:.1f} s",
        "requests that failed then (0)": str(failures),
        "answers/s without it": f"{rate:.2f}",
        "a spare again after": f"{back_s:.1f} s",
        "answers again after the asked node was killed": f"{restarted_s:.1f} s",
    }


def status(found: Boards) -> dict[str, str]:
    """Measure what status costs the asked node while it serves and nobody asks."""
    with contextlib.suppress(SystemExit):
        found.type("pi1", "up", found.model)

    def spent() -> float:
        node = found.process("pi1")
        return sum(sum(each.cpu_times()[:2]) for each in (node, *node.children(recursive=True)))

    def over(seconds: float, *, asking: bool) -> float:
        began, before = time.monotonic(), spent()
        while time.monotonic() - began < seconds:
            if asking:
                found.state()
            time.sleep(2.0)
        return (spent() - before) / (time.monotonic() - began)

    idle = over(16, asking=False)
    asked = over(16, asking=True)
    return {
        "of a core, nobody asks": f"{100 * idle:.2f} %",
        "status every 2 s": f"{100 * asked:.2f} %",
        "status costs (0.5 %)": f"{100 * (asked - idle):.2f} %",
    }


def strangers(found: Boards) -> dict[str, str]:
    """Let strangers, and members who ask for more than they may, talk to the asked node."""
    pi1 = found.addresses["pi1"]
    place = (pi1, NODE_PORT)
    key = Membership.from_file(found.directory / "pi2" / ".config/pipeedge/cluster.pem")
    before = {each.pid for each in found.process("pi1").children(recursive=True)}
    shown: dict[str, str] = {}

    def refused(case: str, *words: str) -> None:
        """Note how a command that pi3 types is refused."""
        done = subprocess.run(
            found.command("pi3", *words), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        shown[case] = f"status {done.returncode}; {done.stderr.strip()}"

    def from_afar(case: str, ask: Callable[[], object]) -> None:
        """Note what the asked node says of a connection from the network of pi3."""
        said = len(found.said("pi1"))
        with ThreadPoolExecutor(1, initializer=enter, initargs=(found, "pi3")) as pool:
            heard = pool.submit(lambda: _said_by(ask)).result()
        time.sleep(1)
        shown[case] = " | ".join(part for part in (found.said("pi1")[said:].strip(), heard) if part)

    def speak_http() -> None:
        with socket.create_connection(place, 10) as web:
            web.sendall(b"GET / HTTP/1.1\r\nHost: pi1\r\n\r\n")
            web.recv(100)

    def ask_for(text: bytes) -> None:
        with call(place, key) as talk:
            talk._stream.sendall(len(text).to_bytes(4, "big") + text)
            talk.receive(10.0)

    other = Membership.from_text(make_cluster_key(), "another cluster")
    from_afar("another protocol", speak_http)
    from_afar("another cluster's key", lambda: ask_about(place, other))
    execute = b'{"kind":"execute","argv":["touch","/tmp/stranger"]}'
    from_afar("a member, something else", lambda: ask_for(execute))
    option = b'{"kind":"up","model":"vit-digits","objective":"--trace"}'
    from_afar("a member, an option as a value", lambda: ask_for(option))
    with _Inviting(found) as inviting:
        wrong = new_code()
        for number in range(TRIES):
            words = ("join", wrong, "--at", pi1, "--key", f"wrong{number}.pem", "--name", "stranger")
            refused(f"wrong code, try {number + 1}", *words)
        refused("the code after three tries", "join", inviting.code, "--at", pi1, "--key", "void.pem")
        shown["the machine with the code"] = inviting.end()
    with _Inviting(found) as inviting, _Recorder(found, (pi1, JOIN_PORT)) as recorder:
        words = ("--at", f"{found.addresses['pi3']}:{recorder.port}", "--key", "fourth.pem", "--name", "pi4")
        found.run("pi3", "join", inviting.code, *words)
        refused("a code that was used", "join", inviting.code, "--at", pi1, "--key", "again.pem")
        inviting.end()
    with _Inviting(found) as inviting:
        with ThreadPoolExecutor(1, initializer=enter, initargs=(found, "pi3")) as pool:
            pool.submit(_replay, (pi1, JOIN_PORT), recorder.sent).result()
        inviting.process.terminate()
        shown["a replayed join"] = inviting.end()
    found.type("pi1", "nodes", "remove", "pi3")
    refused("a removed node", "status", "--node", pi1)
    after = {each.pid for each in found.process("pi1").children(recursive=True)}
    return {**shown, "programs that ran for them (0)": str(len(after - before))}


def _said_by(ask: Callable[[], object]) -> str:
    """Return what a request was answered with."""
    try:
        ask()
    except (OSError, PipeEdgeError) as error:
        return f"{type(error).__name__}: {error}"
    return "answered"


class _Inviting:
    """``pipeedge key`` on the asked host, which prints a code."""

    def __init__(self, found: Boards) -> None:
        self.process = subprocess.Popen(
            found.command("pi1", "key"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def __enter__(self) -> _Inviting:
        for line in self.process.stdout or ():
            if (match := re.search(r"join (\S+)", line)) is not None:
                self.code = match[1]
                return self
        raise SystemExit("'pipeedge key' has printed no code")

    def end(self) -> str:
        """Return what it has said since, once it has ended."""
        return " | ".join(self.process.communicate(timeout=60)[0].strip().splitlines())

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


class _Recorder:
    """Passes one connection on from pi3 to another place, and keeps what the caller sends."""

    def __init__(self, found: Boards, place: tuple[str, int]) -> None:
        self.sent = b""
        self._place = place
        self._pool = ThreadPoolExecutor(2, initializer=enter, initargs=(found, "pi3"))
        self._listener = self._pool.submit(socket.create_server, (found.addresses["pi3"], 0)).result()
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> _Recorder:
        self._pool.submit(self._pass)
        return self

    def _pass(self) -> None:
        caller, _ = self._listener.accept()
        with caller, socket.create_connection(self._place, 10) as host:
            self._pool.submit(self._back, host, caller)
            while part := caller.recv(4096):
                self.sent += part
                host.sendall(part)

    def _back(self, host: socket.socket, caller: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := host.recv(4096):
                caller.sendall(part)
            caller.shutdown(socket.SHUT_RDWR)

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._pool.shutdown(wait=False)


def _replay(place: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(place, 10) as sock, contextlib.suppress(OSError):
        sock.sendall(sent)
        while sock.recv(4096):
            pass


def main(argv: Sequence[str] | None = None) -> None:
    """Run the rows that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--directory", type=Path, help="keep keys, profiles and logs here")
    parser.add_argument("--model", default="google/vit-base-patch16-224")
    parser.add_argument("--cpu", type=float, default=0.6, help="processors of each host")
    parser.add_argument("--bw-mbps", type=float, default=900.0)
    parser.add_argument("--rounds", type=int, default=2, help="repetitions of the row about plans")
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        directory = args.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory = directory.resolve()
        directory.mkdir(parents=True, exist_ok=True)
        if args.model != "vit-digits":
            fetch = [
                sys.executable,
                "-m",
                "pipeedge",
                "fetch",
                "--random",
                "-m",
                args.model,
                "-o",
                str(directory),
            ]
            subprocess.run(fetch, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        found = stack.enter_context(boards(directory, args.model, args.cpu, args.bw_mbps))
        found.rounds = args.rounds
        if "first" not in args.rows:
            for host in HOSTS:
                found.start(host)
            for host in HOSTS:
                until(lambda host=host: "waits for work" in found.said(host), f"{host} waits")
            time.sleep(4)  # until they have found each other
        table = Table("row", "what (asked)", "measured")
        for row in args.rows:
            for what, value in globals()[row](found).items():
                table.add_row(row, what, value)
        Console().print(table)


if __name__ == "__main__":
    main()
