"""What the doctor concludes from facts: findings in tables, estimates of links."""

from __future__ import annotations

import dataclasses
import errno
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base import fields
from pipeedge.base.schedule import LayerRange, Schedule
from pipeedge.base.wording import printable
from pipeedge.doctor.file_checks import check_files
from pipeedge.doctor.findings import Finding, Level, exit_status, ok, problem, warning
from pipeedge.doctor.link_checks import check_links, check_promises
from pipeedge.doctor.links import LinkMeter, answer_link
from pipeedge.doctor.network_checks import check_addr, check_interface, diagnose_dial
from pipeedge.doctor.probe import Probe
from pipeedge.doctor.rank_checks import Need, check_clocks, check_memory, check_weights
from pipeedge.doctor.review import planned_needs, review
from pipeedge.models import DIGITS, find_model
from pipeedge.models.decoder import find_decoder
from pipeedge.models.step_rows import StepBounds
from pipeedge.plan.cache_owners import KeptOutput, Standby
from pipeedge.plan.link_speed import Estimate, Round, Trip, estimate_link
from pipeedge.plan.planning import Plan
from pipeedge.plan.specs import BYTES_PER_SECOND_PER_MBPS, DeviceType, ModelProfile, ModelSpec, SpecFiles
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_doctor
from pipeedge.transport.base import Rendezvous
from pipeedge.transport.loopback import LoopbackTransport

# --- findings ---------------------------------------------------------------------------------------


def test_a_finding_is_one_line_with_level_check_and_rank() -> None:
    assert problem("port", "is taken").line() == "problem  port      is taken"
    assert warning("clock", "is late").of(3).line() == "warning  clock     rank 3: is late"


@given(st.text(max_size=50), st.integers(0, 4), st.none() | st.integers(0, 9), st.sampled_from(Level))
@settings(max_examples=50)
def test_findings_survive_encoding(what: str, code: int, rank: int | None, level: Level) -> None:
    finding = Finding(level, "check", what, code, rank)
    sent = finding.as_sent()
    assert fields.decode(fields.encode(sent), Finding) == sent == sent.as_sent()
    assert sent == dataclasses.replace(finding, what=printable(what))


def test_long_finding_is_truncated_when_it_is_sent() -> None:
    assert len(problem("memory", "x" * 5000).as_sent().what) == 800


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
def test_the_exit_status_is_that_of_the_first_problem(findings: list[Finding], status: int) -> None:
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
def test_addr_is_resolved_and_checked(
    addr: str, resolved: str, rank: int, world: int, level: Level, said: str
) -> None:
    finding = check_addr(addr, resolved, rank=rank, world_size=world, own=OWN)
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
    finding = diagnose_dial("pi1", 29500, cause, resolved=resolved, timeout_s=6, own=OWN)
    assert said in finding.what
    assert (finding.level, finding.code) == (Level.PROBLEM, 4)
    assert ("firewall" in finding.what) == isinstance(cause, TimeoutError)


def test_links_off_the_route_are_a_warning() -> None:
    assert check_interface("eth0", "eth0", "pi1").level is Level.OK
    finding = check_interface("wlan0", "eth0", "pi1")
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
    found = check_memory(facts, needs)
    problems = [finding.rank for finding in found if finding.level is Level.PROBLEM]
    assert problems == ([] if who is None else [who])
    assert len(found) == 1


def test_planned_memory_counts_weights_and_frames_of_the_shard() -> None:
    model = find_model(DIGITS)
    plan = Plan(Schedule.from_partition([1, 8, 9, 16]), 0, 64, 8, None, None)
    needs = planned_needs(plan, model, None)
    total = sum(parameter.numel() for parameter in model.load(kernels="torch").parameters()) * 4
    assert total <= sum(need.weights_bytes for need in needs.values()) <= 1.05 * total
    tokens = 17  # 4x4 patches and the class token, 64 values each
    frame = 8 * tokens * 64 * 4
    assert all(need.buffers_bytes >= 3 * frame for need in needs.values())
    assert all(need.buffers_bytes <= 40 * frame for need in needs.values())


def test_planned_memory_counts_all_words_of_a_file_that_cannot_be_mapped() -> None:
    model = find_model("bert-base-uncased")
    plan = Plan(Schedule.from_partition([1, 24, 25, 48]), 0, 64, 2, 16, None)
    mapped, copied = (planned_needs(plan, model, Path(f"weights.{kind}")) for kind in ("safetensors", "npz"))
    words = 4 * 30_522 * 768
    assert copied[0].weights_bytes - mapped[0].weights_bytes >= 0.99 * words
    assert copied[1] == mapped[1]


def test_planned_memory_counts_kept_outputs() -> None:
    model = find_decoder("llama-puzzles")
    bounds = StepBounds(context=64, rows=8, sequences=4, pages=10, window_pages=0)
    plan = Plan(Schedule.from_partition([1, 6, 7, 16]), 0, 64, 8, None, None, steps=bounds)
    keeping = dataclasses.replace(plan, outputs=(KeptOutput(0, 6, 1),))
    without, kept = (planned_needs(one, model, None) for one in (plan, keeping))
    rows = 10 * 32
    assert kept[0].buffers_bytes - without[0].buffers_bytes == rows * model.config.hidden * 4
    assert kept[1] == without[1]


def test_planned_memory_counts_standbys_and_drafts() -> None:
    model = find_decoder("llama-puzzles")
    bounds = StepBounds(context=64, rows=8, sequences=4, pages=10, window_pages=0)
    plan = Plan(Schedule.from_partition([1, 6, 7, 16]), 0, 64, 8, None, None, steps=bounds)
    standby = Standby(0, LayerRange(6, 16), "float32")
    standing = dataclasses.replace(plan, standbys=(standby,))
    without, kept = (planned_needs(one, model, None) for one in (plan, standing))
    copies = model.weight_bytes(standby.layers, torch.float32)
    copies += 10 * model.page_bytes(standby.layers, torch.float32)[0]
    frames = kept[1].buffers_bytes - without[1].buffers_bytes
    assert frames > 0  # of the link that the copies cross
    assert kept[0].buffers_bytes - without[0].buffers_bytes == copies + frames
    drafting = planned_needs(plan, model, None, {0: 1000})
    assert drafting[0].weights_bytes - without[0].weights_bytes == 1000
    assert drafting[1] == without[1]


def test_a_missing_weights_file_matters_only_to_ranks_with_a_stage() -> None:
    facts = {0: {"weights_error": "no weights at x"}, 1: {"weights_error": None}}
    assert check_weights(facts, {1: "1-16"}) == []
    (finding,) = check_weights(facts, {0: "1-16"})
    assert finding.rank == 0
    assert "no weights at x" in finding.what


@pytest.mark.parametrize(
    ("clocks", "late"), [({0: 5.0}, []), ({0: 5.0, 1: 5.2}, []), ({0: 5.0, 1: 9.0, 2: 4.0}, [1, 2])]
)
def test_clock_offsets_are_reported(clocks: dict[int, float], late: list[int]) -> None:
    found = check_clocks(clocks)
    assert [finding.rank for finding in found if finding.level is Level.WARNING] == late
    assert exit_status(found) == 0


# --- the scheduler's files --------------------------------------------------------------------------


def files(
    devices: Mapping[str, Sequence[str]], *, layers: int = 16, batch: int = 8, times: int = 16
) -> SpecFiles:
    profile = ModelProfile(batch, "torch.float32", (0.1,) * times)
    return SpecFiles(
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
    given_files: SpecFiles, hosts: list[str] | None, model: str, levels: list[int], said: str
) -> None:
    found = check_files(
        given_files,
        model_name=model,
        n_layers=16,
        microbatch_size=8,
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
@settings(max_examples=60)
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
    (finding,) = check_links([(0, 1)], {0: estimate}, None)
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
        transport.open(Rendezvous("", (0, 1), {}, 0.0))
        answering = threading.Thread(target=answer_link, args=(transport, 0, 1))
        answering.start()
        meter.measure(transport, budget_s)
        answering.join(60)
        assert not answering.is_alive()
        assert len(meter.rounds) == (1, 6)[number]
        transport.close()  # a link in memory ends with its last packet
    assert all(one.small.seconds >= 0 and one.whole.seconds > 0 for one in meter.rounds)


def estimated(bytes_per_s: float) -> Estimate:
    return estimate_link(rounds_of(*[bytes_per_s] * 3))


def test_the_first_unmeasured_link_is_named() -> None:
    pairs = [(0, 1), (1, 2), (2, 0)]
    found = check_links(pairs, {0: estimated(1e6)}, "it broke")
    assert [finding.level for finding in found] == [Level.OK, Level.PROBLEM]
    assert "rank 1 -> rank 2" in found[1].what
    assert "it broke" in found[1].what
    assert exit_status(found) == 4


def test_a_link_far_below_its_promised_bandwidth_is_a_warning() -> None:
    promised = files({"board": ["a", "b"]})
    pairs = [(0, 1), (1, 0)]
    measured = {number: estimated(mbps * BYTES_PER_SECOND_PER_MBPS) for number, mbps in ((0, 100), (1, 900))}
    (finding,) = check_promises(pairs, measured, promised, ["a", "b"])
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


def test_adaptive_links_are_sized_for_their_compressed_form() -> None:
    """Links that adapt carry the wire form and receipts; memory is counted for what a run would allocate."""
    arguments = ["0", "2", "-m", DIGITS, "-pt", "1,9,10,16", "--adaptive", "auto"]
    request = parse_doctor(arguments, Environment()).request
    model = find_model(DIGITS)
    facts = {
        rank: rank_facts(items=64, record_rows=0, max_tokens=None, pixel_table=None) for rank in range(2)
    }
    reviewed = review(request, model, facts).plan
    assert reviewed is not None
    schedule = reviewed.schedule
    assert reviewed.compression.adaptive == "auto"
    adapted = Plan(schedule, 0, 64, 8, None, None, compression=request.links.compression)
    plain = Plan(schedule, 0, 64, 8, None, None)
    assert reviewed.links(model) == adapted.links(model)
    assert reviewed.links(model) != plain.links(model)
