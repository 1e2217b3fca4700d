"""pipeedge-doctor: pure findings in tables, injected faults in process, real links and firewalls."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import make_network
from processes import free_port
from safetensors.torch import load_file, save_file

from pipeedge.base import fields
from pipeedge.base.schedule import Schedule
from pipeedge.doctor import checks
from pipeedge.doctor.checks import Need, SchedulerFiles
from pipeedge.doctor.examine import examine
from pipeedge.doctor.findings import Finding, Level, exit_status, ok, problem, warning
from pipeedge.doctor.links import LinkMeter, answer_link
from pipeedge.doctor.probe import MachineFacts, Probe
from pipeedge.doctor.review import planned_needs, review
from pipeedge.models import DIGITS, find_model
from pipeedge.plan.link_speed import Estimate, Round, Trip, estimate_link
from pipeedge.plan.planning import Plan
from pipeedge.plan.specs import (
    BYTES_PER_MB,
    BYTES_PER_SECOND_PER_MBPS,
    DeviceType,
    Link,
    ModelProfile,
    ModelSpec,
    load_neighbors,
    save_device_types,
    save_devices,
    save_models,
    save_neighbors,
)
from pipeedge.request.config import Environment
from pipeedge.request.options import parse_doctor
from pipeedge.transport.loopback import LoopbackTransport

WITHIN_S = 60.0
"""Deadline of each diagnosis, in seconds."""
WEIGHTS = find_model(DIGITS).default_weights


# --- findings ---------------------------------------------------------------------------------------


def test_a_finding_is_one_line_with_level_check_and_rank() -> None:
    assert problem("port", "is taken").line() == "problem  port      is taken"
    assert warning("clock", "is late").of(3).line() == "warning  clock     rank 3: is late"


@given(st.text(max_size=50), st.integers(0, 4), st.none() | st.integers(0, 9), st.sampled_from(Level))
@settings(max_examples=50, deadline=None)
def test_findings_survive_encoding(what: str, code: int, rank: int | None, level: Level) -> None:
    finding = Finding(level, "check", what, code, rank)
    shown = dataclasses.replace(finding, what=fields.text(what))
    assert Finding.from_text(finding.to_text()) == shown


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ([], 0),
        ([ok("a", ""), warning("b", "")], 0),
        ([problem("a", "", 4)], 4),
        ([problem("a", "", 4), problem("b", "", 2)], 2),
        ([problem("a", "", 4), problem("b", "", 3)], 3),
        ([problem("a", "", 1), problem("b", "", 4), warning("c", "")], 4),
        ([problem("a", "", 1)], 1),
    ],
)
def test_the_status_is_that_of_the_problem_to_solve_first(findings: list[Finding], status: int) -> None:
    assert exit_status(findings) == status


# --- the network ------------------------------------------------------------------------------------

OWN = ["10.0.0.1", "127.0.0.1", "fe80::1"]


@pytest.mark.parametrize(
    ("addr", "resolved", "rank", "world", "level", "said"),
    [
        ("10.0.0.1", "10.0.0.1", 0, 2, Level.OK, "--addr 10.0.0.1"),
        ("pi1", "10.0.0.1", 0, 2, Level.OK, "--addr pi1 is 10.0.0.1"),
        ("10.0.0.9", "10.0.0.9", 0, 2, Level.PROBLEM, "not an address of this machine"),
        ("10.0.0.9", "10.0.0.9", 1, 2, Level.OK, ""),
        ("127.0.0.1", "127.0.0.1", 0, 2, Level.OK, ""),
        ("localhost", "127.0.0.1", 1, 2, Level.OK, ""),
        ("pi1", "127.0.1.1", 0, 2, Level.WARNING, "/etc/hosts"),  # Debian's own name
        ("pi1", "127.0.1.1", 0, 1, Level.OK, ""),
    ],
)
def test_addr_is_resolved_and_judged(
    addr: str, resolved: str, rank: int, world: int, level: Level, said: str
) -> None:
    finding = checks.check_addr(addr, resolved, rank=rank, world_size=world, own=OWN)
    assert finding.level is level
    assert said in finding.what
    assert "fe80" not in finding.what


@pytest.mark.parametrize(
    ("cause", "resolved", "said"),
    [
        (ConnectionRefusedError(), "10.0.0.2", "start it there"),
        (ConnectionRefusedError(), "127.0.0.1", "give that machine's address as --addr"),
        (ConnectionRefusedError(), "10.0.0.1", "give that machine's address as --addr"),
        (TimeoutError("timed out"), "10.0.0.2", "firewall"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "10.0.0.2", "machine is off"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "10.0.0.2", "machine is off"),
        (OSError(errno.ECONNRESET, "Connection reset by peer"), "10.0.0.2", "Connection reset by peer"),
        (None, "10.0.0.2", "check --addr"),
    ],
)
def test_a_failed_dial_is_diagnosed(cause: OSError | None, resolved: str, said: str) -> None:
    finding = checks.diagnose_dial("pi1", 29500, cause, resolved=resolved, timeout_s=6, own=OWN)
    assert said in finding.what
    assert (finding.level, finding.code) == (Level.PROBLEM, 4)
    assert ("firewall" in finding.what) == isinstance(cause, TimeoutError)


def test_links_off_the_route_are_a_warning() -> None:
    assert checks.check_interface("eth0", "eth0", "pi1").level is Level.OK
    finding = checks.check_interface("wlan0", "eth0", "pi1")
    assert finding.level is Level.WARNING
    assert "wlan0" in finding.what
    assert "eth0" in finding.what


# --- the ranks --------------------------------------------------------------------------------------

GB = 1 << 30


def rank_facts(**changes: Any) -> dict[str, Any]:
    return {
        "machine": "one",
        "free_bytes": 4 * GB,
        "limit_free_bytes": None,
        "process_bytes": GB // 4,
        "device": "cpu",
        "device_free_bytes": None,
        **changes,
    }


@pytest.mark.parametrize(
    ("facts", "needs", "who"),
    [
        ({0: rank_facts()}, {0: Need(4 * GB, 0)}, None),  # the doctor's own memory comes free
        ({0: rank_facts()}, {0: Need(4 * GB, 1)}, 0),
        ({0: rank_facts(), 1: rank_facts()}, {0: Need(3 * GB, 0), 1: Need(3 * GB, 0)}, 0),
        ({0: rank_facts(), 1: rank_facts(machine="two")}, {0: Need(3 * GB, 0), 1: Need(3 * GB, 0)}, None),
        ({0: rank_facts(), 1: rank_facts(limit_free_bytes=GB)}, {0: Need(0, 0), 1: Need(GB, 1)}, 1),
        ({0: rank_facts(limit_free_bytes=GB)}, {0: Need(GB, 0)}, None),
        ({0: rank_facts(device="cuda:0", device_free_bytes=2 * GB)}, {0: Need(2 * GB, 1)}, 0),
        ({0: rank_facts(device="cuda:0", device_free_bytes=9 * GB)}, {0: Need(8 * GB, 0)}, None),
    ],
)
def test_memory_is_compared_with_the_plan(
    facts: Mapping[int, dict[str, Any]], needs: Mapping[int, Need], who: int | None
) -> None:
    found = checks.check_memory(facts, needs)
    problems = [finding.rank for finding in found if finding.level is Level.PROBLEM]
    assert problems == ([] if who is None else [who])
    assert len(found) == 1


def test_planned_memory_counts_weights_and_frames_of_the_shard() -> None:
    model = find_model(DIGITS)
    plan = Plan(Schedule.from_partition([1, 8, 9, 16]), 0, 64, 8, None, None, None)
    needs = planned_needs(plan, model)
    total = sum(parameter.numel() for parameter in model.load().parameters()) * 4
    assert total <= sum(need.weights_bytes for need in needs.values()) <= 1.05 * total
    tokens = 17  # 4x4 patches and the class token, 64 values each
    frame = 8 * tokens * 64 * 4
    assert all(need.buffers_bytes >= 3 * frame for need in needs.values())
    assert all(need.buffers_bytes <= 40 * frame for need in needs.values())


def test_a_missing_weights_file_matters_only_to_ranks_with_a_stage() -> None:
    facts = {0: {"weights_error": "no weights at x"}, 1: {"weights_error": None}}
    assert checks.check_weights(facts, {1: "1-16"}) == []
    (finding,) = checks.check_weights(facts, {0: "1-16"})
    assert finding.rank == 0
    assert "no weights at x" in finding.what


@pytest.mark.parametrize(
    ("clocks", "late"), [({0: 5.0}, []), ({0: 5.0, 1: 5.2}, []), ({0: 5.0, 1: 9.0, 2: 4.0}, [1, 2])]
)
def test_clock_offsets_are_reported(clocks: dict[int, float], late: list[int]) -> None:
    found = checks.check_clocks(clocks)
    assert [finding.rank for finding in found if finding.level is Level.WARNING] == late
    assert exit_status(found) == 0


# --- the scheduler's files --------------------------------------------------------------------------


def files(
    devices: Mapping[str, Sequence[str]], *, layers: int = 16, batch: int = 8, times: int = 16
) -> SchedulerFiles:
    profile = ModelProfile(batch, "torch.float32", (0.1,) * times)
    return SchedulerFiles(
        {"m": ModelSpec((1.0,) * layers, 1, (1,) * layers)},
        {"board": DeviceType(2 * GB, 1000 * BYTES_PER_SECOND_PER_MBPS, {"m": (profile,)})},
        {name: tuple(hosts) for name, hosts in devices.items()},
    )


@pytest.mark.parametrize(
    ("given_files", "hosts", "model", "levels", "said"),
    [
        (files({"board": ["a", "b"]}), ["a", "b"], "m", [], "and -H match"),
        (files({"board": ["0", "1"]}), None, "m", [], "and -H match"),
        (files({"board": ["a", "b"]}), None, "m", [2], "with -H"),
        (files({"board": ["a", "b"], "bord": ["c"]}), ["a", "b", "c"], "m", [1], "did you mean board?"),
        (files({"bord": ["a"]}), ["a"], "m", [1, 2], "no host of the devices file has a profile"),
        (files({"board": ["a"]}), ["a", "bee"], "m", [1], "rank 1 will have nothing to do"),
        (files({"board": ["a", "b"]}), ["a"], "m", [], "-H does not name them: b"),
        (files({"board": ["a"]}, batch=4), ["a"], "m", [1, 2], "it has -u 4 float32"),
        (files({"board": ["a"]}, times=12), ["a"], "m", [2, 2], "12 times for 16 layers"),
        (files({"board": ["a"]}, layers=12), ["a"], "m", [2], "gives m 12 layers, but the model has 16"),
        (files({"board": ["a"]}), ["a"], "n", [2, 1, 2], "has no n"),
        (files({"board": ["a"], "unused": []}), ["a"], "m", [], "and -H match"),
    ],
)
def test_names_and_numbers_of_the_files_are_compared(
    given_files: SchedulerFiles, hosts: list[str] | None, model: str, levels: list[int], said: str
) -> None:
    found = checks.check_files(
        given_files,
        model_name=model,
        n_layers=16,
        batch_size=8,
        dtype="float32",
        hosts=hosts,
        world_size=2,
    )
    assert [int(finding.level) for finding in found if finding.level is not Level.OK] == levels
    assert said in " | ".join(finding.what for finding in found)


# --- links ------------------------------------------------------------------------------------------


def rounds_of(*bytes_per_s: float, latency_s: float = 0.0005) -> list[Round]:
    """Return successive rounds on a link with these bandwidths."""

    def trip(size: int, bandwidth: float) -> Trip:
        return Trip(size, 2 * latency_s + size / bandwidth)

    return [Round(trip(1600, one), trip(1 << 18, one), trip(1 << 20, one)) for one in bytes_per_s]


@given(bandwidth=st.floats(1e4, 1e10), latency=st.floats(0, 0.2), burst=st.integers(0, 1 << 17))
@settings(max_examples=60, deadline=None)
def test_a_burst_at_full_speed_does_not_raise_the_estimate(
    bandwidth: float, latency: float, burst: int
) -> None:
    part, whole = (Trip(size, 2 * latency + (size - burst) / bandwidth) for size in (1 << 18, 1 << 20))
    rounds = [Round(Trip(1600, 2 * latency), part, whole)] * 3
    link = estimate_link(rounds).link
    assert link.bw_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
    assert link.latency_s == pytest.approx(latency)


@pytest.mark.parametrize(
    ("mbps", "median", "steady"),
    [
        ([105] * 3, 105, True),
        ([105, 338, 104, 105, 106, 105, 30], 105, True),  # single outliers in both directions
        ([105, 106, 107], 106, True),
        ([105, 338, 104, 338, 106, 338, 105], 106, False),  # alternating between two values
        ([105, 105], 105, False),  # two rounds do not show whether they agree
        ([105, 400, 30], 105, False),
    ],
)
def test_only_rounds_that_agree_are_steady(mbps: list[float], median: float, steady: bool) -> None:
    estimate = estimate_link(rounds_of(*(1e6 * one for one in mbps)))
    assert estimate.link.bw_bytes_per_s == pytest.approx(1e6 * median)
    assert estimate.steady == steady
    assert estimate.low_bytes_per_s <= estimate.link.bw_bytes_per_s <= estimate.high_bytes_per_s
    (finding,) = checks.check_links([(0, 1)], {0: estimate}, None)
    assert finding.level is (Level.OK if steady else Level.WARNING)
    assert f"in {len(mbps)} rounds" in finding.what


def test_a_delayed_part_still_gives_a_bandwidth() -> None:
    held_up = Round(Trip(1600, 0.001), Trip(1 << 18, 0.5), Trip(1 << 20, 0.1))
    assert held_up.bw_bytes_per_s == pytest.approx((1 << 20) / 0.1)
    with pytest.raises(ValueError, match="at least one round"):
        estimate_link([])


def test_each_pass_measures_a_link_at_least_once() -> None:
    transport = LoopbackTransport()
    meter = LinkMeter(0, 1)
    for number, budget_s in enumerate((0.0, 60.0)):
        answering = threading.Thread(target=answer_link, args=(transport, 0, 1))
        answering.start()
        meter.measure(transport, budget_s)
        answering.join(5)
        assert not answering.is_alive()
        assert len(meter.rounds) == (1, 6)[number]
        transport = LoopbackTransport()  # a link in memory ends with its last packet
    assert all(one.small.seconds >= 0 and one.whole.seconds > 0 for one in meter.rounds)


def estimated(bytes_per_s: float) -> Estimate:
    return estimate_link(rounds_of(*[bytes_per_s] * 3))


def test_the_first_unmeasured_link_is_named() -> None:
    pairs = [(0, 1), (1, 2), (2, 0)]
    found = checks.check_links(pairs, {0: estimated(1e6)}, "it broke")
    assert [finding.level for finding in found] == [Level.OK, Level.PROBLEM]
    assert "rank 1 -> rank 2" in found[1].what
    assert "it broke" in found[1].what
    assert exit_status(found) == 4


def test_a_link_far_below_its_promised_bandwidth_is_a_warning() -> None:
    promised = files({"board": ["a", "b"]})
    pairs = [(0, 1), (1, 0)]
    measured = {number: estimated(mbps * BYTES_PER_SECOND_PER_MBPS) for number, mbps in ((0, 100), (1, 900))}
    (finding,) = checks.check_promises(pairs, measured, promised, ["a", "b"])
    assert finding.level is Level.WARNING
    assert "rank 0 -> rank 1 carries 100 Mbps" in finding.what
    assert "1,000 Mbps" in finding.what


# --- the probe --------------------------------------------------------------------------------------


def test_control_groups_limit_the_memory(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert Probe(tmp_path).machine().limit_free_bytes is None
    write("proc/self/cgroup", "0::/outer/inner\n")
    write("sys/fs/cgroup/outer/inner/memory.max", "max\n")
    write("sys/fs/cgroup/outer/inner/memory.current", "100\n")
    assert Probe(tmp_path).machine().limit_free_bytes is None
    write("sys/fs/cgroup/outer/memory.max", "1000\n")
    write("sys/fs/cgroup/outer/memory.current", "700\n")
    assert Probe(tmp_path).machine().limit_free_bytes == 300
    write("sys/fs/cgroup/outer/memory.stat", "anon 600\ninactive_file 50\n")
    assert Probe(tmp_path).machine().limit_free_bytes == 350
    write("proc/self/cgroup", "4:memory:/old\n")
    write("sys/fs/cgroup/memory/old/memory.limit_in_bytes", "5000\n")
    write("sys/fs/cgroup/memory/old/memory.usage_in_bytes", "6000\n")
    assert Probe(tmp_path).machine().limit_free_bytes == 0


def test_this_machine_has_memory_and_a_name() -> None:
    here = Probe().machine()
    assert 1 << 20 < here.process_bytes < here.free_bytes
    assert here.host == socket.gethostname()


# --- injected faults, in process --------------------------------------------------------------------


class FakeProbe(Probe):
    """A machine with injected faults."""

    def __init__(
        self, *, offset_s: float = 0.0, free_bytes: int | None = None, software: Mapping[str, Any] = {}
    ) -> None:
        super().__init__()
        self._offset_s = offset_s
        self._free_bytes = free_bytes
        self._software = software

    def clock(self) -> float:
        return super().clock() + self._offset_s

    def software(self) -> Mapping[str, Any]:
        return self._software

    def machine(self) -> MachineFacts:
        real = super().machine()
        if self._free_bytes is None:
            return real
        return dataclasses.replace(
            real, machine=f"small {id(self)}", free_bytes=self._free_bytes, process_bytes=0
        )


@dataclasses.dataclass
class Examined:
    """Findings of one rank's doctor."""

    lines: list[str]
    status: int = -1

    def found(self, level: str, check: str) -> list[str]:
        return [line for line in self.lines if line.split()[:2] == [level, check]]


def examine_all(
    *ranks: Sequence[object], probes: Mapping[int, Probe] | None = None, timeout: float = 3.0
) -> list[Examined]:
    """Examine each rank in a thread, and check that all finish within the limit."""
    port = free_port()
    examined = [Examined([]) for _ in ranks]

    def run(number: int) -> None:
        own = [str(argument) for argument in ranks[number]]
        extra = [] if "--port" in own else ["--port", str(port)]
        model = [] if "-m" in own else ["-m", DIGITS]
        argv = [*own, *extra, *model, "--timeout", str(timeout)]
        command = parse_doctor(argv, Environment())
        probe = (probes or {}).get(number)
        examined[number].status = examine(command, examined[number].lines.append, probe)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(ranks))]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, began + WITHIN_S - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), [entry.lines for entry in examined]
    return examined


def only_problem(examined: Examined, check: str, *said: str) -> None:
    problems = [line for line in examined.lines if line.startswith("problem")]
    assert len(problems) == 1, examined.lines
    assert problems[0].split()[1] == check
    for words in said:
        assert words in problems[0]
    assert "\n" not in problems[0]


def test_a_single_healthy_rank_is_fit() -> None:
    (alone,) = examine_all((0, 1))
    assert alone.status == 0
    assert alone.lines[-1] == "fit to run"
    assert not [line for line in alone.lines if line.startswith(("problem", "warning"))]


def test_fault_wrong_interface() -> None:
    (alone,) = examine_all((0, 1, "-s", "nosuch0"))
    only_problem(alone, "interface", "nosuch0", "does not exist", "lo")
    assert alone.status == 2


def test_fault_a_name_that_does_not_resolve() -> None:
    (alone,) = examine_all((1, 2, "--addr", "no-such-host.invalid"))
    only_problem(alone, "name", "no-such-host.invalid", "cannot be resolved", "/etc/hosts")
    assert alone.status == 2


def test_fault_addr_of_another_machine() -> None:
    (alone,) = examine_all((0, 2, "--addr", "198.51.100.7"))
    only_problem(alone, "name", "198.51.100.7", "not an address of this machine")
    assert alone.status == 2


def test_fault_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (alone,) = examine_all((0, 2, "--port", port))
        (single,) = examine_all((0, 1, "--port", port))
    only_problem(alone, "port", f"{port} is in use", "choose another --port")
    assert alone.status == 2
    assert not single.found("problem", "port")
    assert single.status == 0


def test_fault_rank_0_absent() -> None:
    (alone,) = examine_all((1, 2), timeout=0.6)
    only_problem(alone, "port", "rank 1", "rank 0 did not listen there", "start it")
    assert alone.status == 4


def test_fault_another_rank_absent_is_named() -> None:
    first, last = examine_all((0, 3), (2, 3), timeout=1)
    for examined in (first, last):
        only_problem(examined, "ranks", "rank 1 of 3 never appeared")
        assert examined.status == 4


def test_fault_two_processes_with_one_rank() -> None:
    examined = examine_all((0, 3), (1, 3), (1, 3), timeout=1.5)
    refused = [entry for entry in examined if any("already there" in line for line in entry.lines)]
    assert len(refused) == 1
    only_problem(refused[0], "ranks", "rank 1 is already there", "start each rank once")
    assert refused[0].status == 2
    assert sum(any("rank 2 of 3 never appeared" in line for line in entry.lines) for entry in examined) == 2


def test_fault_worlds_differ() -> None:
    first, second = examine_all((0, 2), (1, 3))
    assert (first.status, second.status) == (2, 2)
    for examined in (first, second):
        only_problem(examined, "ranks", "rank 1", "the world has 3 ranks, rank 0 says 2")


def test_fault_wrong_weights(tmp_path: Path) -> None:
    tensors = load_file(WEIGHTS)
    name = next(iter(sorted(tensors)))
    tensors[name] = tensors[name] + 1
    save_file(tensors, tmp_path / "other.safetensors")
    first, second = examine_all((0, 2), (1, 2, "-M", tmp_path / "other.safetensors"))
    for examined in (first, second):
        only_problem(examined, "agreement", "ranks 0 and 1 disagree on the weights", "copy the same file")
        assert examined.status == 2


def test_fault_weights_of_another_model(tmp_path: Path) -> None:
    tensors = load_file(WEIGHTS)
    name = next(iter(sorted(tensors)))
    tensors[name] = tensors[name][..., :-1].contiguous()
    save_file(tensors, tmp_path / "other.safetensors")
    (alone,) = examine_all((0, 1, "-M", tmp_path / "other.safetensors"))
    only_problem(alone, "weights", name, "has shape", "is it of another model?")
    assert alone.status == 2


def test_fault_different_model(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(WEIGHTS.parent, other)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"num_attention_heads": 4', '"num_attention_heads": 2'))
    assert (other / "config.json").read_text() != config
    first, second = examine_all((0, 2), (1, 2, "-m", other))
    for examined in (first, second):
        problems = examined.found("problem", "agreement")
        assert any("disagree on the configuration of the model" in line for line in problems)
        assert examined.status == 2


def test_fault_different_version() -> None:
    first, second = examine_all((0, 2), (1, 2), probes={1: FakeProbe(software={"version": "9.9.9"})})
    for examined in (first, second):
        only_problem(examined, "agreement", "version of PipeEdge", "9.9.9", "install the same")
        assert examined.status == 2


def test_fault_too_little_memory() -> None:
    first, second = examine_all((0, 2), (1, 2), probes={1: FakeProbe(free_bytes=100_000)})
    for examined in (first, second):
        only_problem(examined, "memory", "rank 1", "fewer layers")
        assert examined.status == 2


def test_fault_missing_weights(tmp_path: Path) -> None:
    first, second = examine_all((0, 2), (1, 2, "-M", tmp_path / "nowhere.npz"))
    for examined in (first, second):
        only_problem(examined, "weights", "rank 1", "9-16", "nowhere.npz")
        assert examined.status == 2


def test_fault_clock_offset_is_a_warning() -> None:
    # Two stages on one rank need no link, and so no gloo, of which a process can have only one.
    first, second = examine_all(
        (0, 2, "-pt", "1,16"), (1, 2, "-pt", "1,16"), probes={1: FakeProbe(offset_s=30)}
    )
    for examined in (first, second):
        (line,) = examined.found("warning", "clock")
        assert "rank 1: its clock is 30.0 s ahead of rank 0's" in line
        assert examined.status == 0


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--output", "missing/out.csv", "does not exist; create it first"),
        ("--output", "out.txt", "unknown suffix"),
        ("--neighbors-file", "missing/links.yml", "does not exist; create it first"),
        ("--trace", "missing/trace.json", "--trace"),
        ("--metrics-dir", "missing/metrics", "--metrics-dir"),
    ],
)
def test_fault_unwritable_output(tmp_path: Path, option: str, name: str, said: str) -> None:
    (alone,) = examine_all((0, 1, option, tmp_path / name))
    only_problem(alone, "output", said)
    assert alone.status == 2


@pytest.mark.parametrize(("device", "said"), [("tpu", "use cpu, cuda"), ("cuda:99", "CUDA device")])
def test_fault_unsupported_device(device: str, said: str) -> None:
    (alone,) = examine_all((0, 1, "-d", device))
    only_problem(alone, "device", device, said)
    assert alone.status == 2


def test_fault_unreadable_input(tmp_path: Path) -> None:
    (alone,) = examine_all((0, 1, "--input", tmp_path / "nothing.png"))
    only_problem(alone, "input", "nothing.png")
    assert alone.status == 2


@pytest.fixture
def scheduler_files(tmp_path: Path) -> list[object]:
    model = find_model(DIGITS)
    profile = ModelProfile(8, "torch.float32", (0.01,) * 16)
    spec = ModelSpec((0.05 * BYTES_PER_MB,) * 16, 64, (1088,) * 15 + (10,))
    save_models(tmp_path / "m.yml", {model.name: spec})
    board = DeviceType(GB, 1e8, {model.name: (profile,)})
    save_device_types(tmp_path / "t.yml", {"board": board})
    save_devices(tmp_path / "d.yml", {"board": ["a"], "oddity": ["b"]})
    return ["-sm", tmp_path / "m.yml", "-sdt", tmp_path / "t.yml", "-sd", tmp_path / "d.yml"]


def test_fault_a_host_of_unknown_type(scheduler_files: list[object]) -> None:
    (alone,) = examine_all((0, 1, "-H", "a", *scheduler_files))
    assert any("oddity" in line and "will not be used" in line for line in alone.found("warning", "files"))
    assert alone.status == 0
    assert alone.found("ok", "schedule")


def test_fault_a_host_missing_from_the_devices_file(scheduler_files: list[object]) -> None:
    (alone,) = examine_all((0, 1, "-H", "elsewhere", *scheduler_files))
    assert any("-H names elsewhere" in line for line in alone.found("warning", "files"))
    assert alone.found("problem", "schedule")
    assert alone.status == 2


def test_fault_a_broken_devices_file(scheduler_files: list[object]) -> None:
    Path(str(scheduler_files[-1])).write_text("board: {a: 1}\n")
    (alone,) = examine_all((0, 1, *scheduler_files))
    assert any("d.yml:1: board: is a map" in line for line in alone.found("problem", "files"))
    assert alone.status == 2


def test_no_feasible_schedule_has_its_own_status(scheduler_files: list[object], tmp_path: Path) -> None:
    profile = ModelProfile(8, "torch.float32", (0.01,) * 16)
    save_device_types(tmp_path / "t.yml", {"board": DeviceType(1.0, 1e8, {DIGITS: (profile,)})})
    (alone,) = examine_all((0, 1, "-H", "a", *scheduler_files))
    assert alone.found("problem", "schedule")
    assert alone.status == 3


def test_metrics_that_would_be_replaced_are_found_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "send-rank1.csv").write_text("kept")
    first, second = examine_all(*((rank, 2, "--metrics-dir", tmp_path) for rank in (0, 1)))
    for examined in (first, second):
        only_problem(examined, "output", "rank 1", "send-rank1.csv is there already")
        assert examined.status == 2
    assert [path.name for path in tmp_path.iterdir()] == ["send-rank1.csv"]


def test_metrics_directory_is_not_made_by_the_doctor(tmp_path: Path) -> None:
    (alone,) = examine_all((0, 1, "--metrics-dir", tmp_path / "metrics"))
    assert alone.status == 0, alone.lines
    assert not list(tmp_path.iterdir())


def test_tokenizer_beside_the_weights_is_found(model_dirs: Mapping[str, Path], tmp_path: Path) -> None:
    model = shutil.copytree(model_dirs["bert"], tmp_path / "model")
    (model / "vocab.txt").unlink()
    (tmp_path / "input.txt").write_text("the cat sat\n")
    run = (0, 1, "-m", model, "--input", tmp_path / "input.txt")
    (without,) = examine_all(run)
    only_problem(without, "input", "no vocabulary")
    (beside,) = examine_all((*run, "-M", model_dirs["bert"]))
    assert beside.status == 0, beside.lines
    assert any("1 item" in line for line in beside.found("ok", "input"))


def test_adaptive_links_are_sized_for_their_compressed_form() -> None:
    """Links that adapt carry the wire form and receipts; memory is counted for what a run would allocate."""
    arguments = ["0", "2", "-m", DIGITS, "-pt", "1,9,10,16", "--adaptive", "auto"]
    request = parse_doctor(arguments, Environment()).request
    model = find_model(DIGITS)
    facts = {rank: rank_facts(items=64, max_tokens=None, pixel_table=None) for rank in range(2)}
    reviewed = review(request, model, facts).plan
    assert reviewed is not None
    schedule = reviewed.schedule
    assert reviewed.compression.adaptive == "auto"
    adapted = Plan(schedule, 0, 64, 8, None, None, None, compression=request.compression)
    plain = Plan(schedule, 0, 64, 8, None, None, None)
    assert reviewed.links(model) == adapted.links(model)
    assert reviewed.links(model) != plain.links(model)


def test_only_options_of_the_runtime_are_accepted() -> None:
    command = parse_doctor(["1", "3", "-pt", "1,8,9,16", "--neighbors-file", "n.yml"], Environment())
    assert (command.request.world.rank, command.request.schedule.partition) == (1, (1, 8, 9, 16))
    assert command.neighbors_file == Path("n.yml")
    assert command.request.world.timeout_s <= 6


# --- for real ---------------------------------------------------------------------------------------


def doctor(*arguments: object, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "pipeedge.doctor", *map(str, arguments), "-m", DIGITS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def outcome(process: subprocess.Popen[str], limit_s: float = 100.0) -> tuple[str, int]:
    try:
        out, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate(timeout=20)
        raise
    return out, process.returncode


def test_three_ranks_measure_their_links_and_write_them(tmp_path: Path) -> None:
    target = tmp_path / "links.yml"
    save_neighbors(target, {"x": {"y": Link(1e6)}, "a": {"b": Link(1.0)}})
    arguments = ("--port", free_port(), "-H", "a,b,c", "--neighbors-file", target, "--timeout", "15")
    ranks = [doctor(rank, 3, *arguments) for rank in range(3)]
    answers = [outcome(rank) for rank in ranks]
    assert [status for _, status in answers] == [0, 0, 0], answers
    # On a busy machine the rounds may be too unsteady to be kept, but every link is measured.
    lines = [line for line in answers[0][0].splitlines() if line.split()[1:2] == ["link"]]
    assert len(lines) == 3, answers[0][0]
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
        # At least 100 Mbit/s, because the link is this machine's memory.
        assert links[host][name].bw_bytes_per_s > 1e7
        assert 0 <= links[host][name].latency_s < 0.1
    assert links["x"]["y"] == Link(1e6)


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
        timeout=60,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no firewall here: {done.stderr.decode().strip()[:80]}")


def test_fault_firewalled_port(cable: tuple[str, str]) -> None:
    drop(cable[0], "-p", "tcp", "--dport", "29500")
    began = time.monotonic()
    out, status = outcome(doctor(1, 2, "--addr", "10.213.7.1", "--timeout", 3, prefix=inside(cable[1])))
    assert time.monotonic() - began < WITHIN_S
    assert "problem  port      rank 1: nothing answers at 10.213.7.1:29500" in out
    assert "firewall" in out
    assert status == 4


def test_fault_no_machine_there(cable: tuple[str, str]) -> None:
    began = time.monotonic()
    out, status = outcome(doctor(1, 2, "--addr", "10.213.7.99", "--timeout", 3, prefix=inside(cable[1])))
    assert time.monotonic() - began < WITHIN_S
    assert "problem  port      rank 1:" in out
    assert "no machine has this address" in out or "machine is off" in out
    assert status == 4


def test_fault_interface_down(cable: tuple[str, str]) -> None:
    subprocess.run(["ip", "-n", cable[0], "link", "set", "eth0", "down"], timeout=60, check=True)
    out, status = outcome(doctor(0, 1, "-s", "eth0", prefix=inside(cable[0])))
    assert "problem  interface rank 0: -s/--socket-ifname eth0: the interface is down" in out
    assert status == 2


def test_fault_firewalled_links(cable: tuple[str, str]) -> None:
    # Only rank 0's port is open; the ports of the links are not.
    drop(cable[0], "-p", "tcp", "!", "--dport", "29500", "--syn")
    drop(cable[1], "-p", "tcp", "--syn")
    began = time.monotonic()
    arguments = (2, "--addr", "10.213.7.1")
    ranks = [doctor(rank, *arguments, prefix=inside(cable[rank])) for rank in range(2)]
    answers = [outcome(rank) for rank in ranks]
    assert time.monotonic() - began < WITHIN_S
    for out, status in answers:
        assert "problem  link      rank 0 -> rank 1 carries no data" in out, answers
        assert "firewall" in out
        assert status == 4


def slow_down(name: str, rate: str) -> bool:
    """Limit the rate at which the namespace ``name`` sends; return False if the kernel cannot."""
    if shutil.which("tc") is None:
        return False
    for arguments in (
        "qdisc add dev eth0 root handle 1: htb default 1 r2q 100",
        f"class add dev eth0 parent 1: classid 1:1 htb rate {rate} burst 16k",
    ):
        done = subprocess.run(
            [*inside(name), "tc", *arguments.split()], capture_output=True, timeout=60, check=False
        )
        if done.returncode:
            return False
    return True


def test_links_over_a_cable_use_its_interface_and_show_its_rate(
    cable: tuple[str, str], tmp_path: Path
) -> None:
    limited = slow_down(cable[0], "100mbit")
    arguments = (2, "--addr", "10.213.7.1", "--timeout", "15", "--neighbors-file", tmp_path / "n.yml")
    ranks = [doctor(rank, *arguments, prefix=inside(cable[rank])) for rank in range(2)]
    answers = [outcome(rank) for rank in ranks]
    assert [status for _, status in answers] == [0, 0], answers
    assert all("links go over eth0" in out for out, _ in answers)
    links = load_neighbors(tmp_path / "n.yml") if (tmp_path / "n.yml").exists() else {}
    if limited:  # within 2 % on an idle machine, and not far off on a busy one
        forward, back = (links.get(source, {}).get(target) for source, target in (("0", "1"), ("1", "0")))
        assert forward is None or 0.6e8 < 8 * forward.bw_bytes_per_s < 1.5e8, answers[0][0]
        assert back is None or 8 * back.bw_bytes_per_s > 5e8
