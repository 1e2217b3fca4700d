"""pipeedge-doctor: pure findings in tables, injected faults in process, real links and firewalls."""

from __future__ import annotations

import dataclasses
import re
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from safetensors.torch import load_file, save_file

from pipeedge.base.files import write_secret
from pipeedge.base.schedule import LayerRange
from pipeedge.decoding.drafting import DraftMemory
from pipeedge.doctor.examine import examine
from pipeedge.doctor.probe import MachineFacts, Probe
from pipeedge.models import DIGITS, find_model
from pipeedge.models.decoder import find_decoder
from pipeedge.plan.spec_writing import save_device_types, save_devices, save_models
from pipeedge.plan.specs import BYTES_PER_MB, DeviceType, ModelProfile, ModelSpec
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_doctor
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key

WITHIN_S = 60.0
"""Deadline of each diagnosis, in seconds."""
ABSENT_S = 4.0
"""Seconds after which a rank counts as absent, within which the others must have come."""
WEIGHTS = find_model(DIGITS).default_weights


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
    *ranks: Sequence[object], probes: Mapping[int, Probe] | None = None, timeout: float = 30.0
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


def test_a_decoder_is_told_which_context_fits() -> None:
    options = ("-m", "llama-puzzles", "--prompt", "Spell a.", "--context", 64, "-pt", "1,7,8,16")
    first, second = examine_all((0, 2, *options), (1, 2, *options))
    assert (first.status, second.status) == (0, 0), (first.lines, second.lines)
    (cache,) = first.found("ok", "cache")
    assert "a context of 64 tokens" in cache
    assert cache.endswith("; a context of up to 256 tokens fits")
    assert first.found("ok", "memory")
    assert any(line.split()[1] == "link" for line in first.lines)


def test_drafts_and_standbys_of_decoders_need_memory() -> None:
    options = ("-m", "llama-puzzles", "-c", "tcp", "--on-failure", "continue", "-pt", "1,5,6,10,11,16")
    own = ("--prompt", "Spell a.", "--context", 64, "--replicate", "--draft", "llama-puzzles")

    def examined(*free: int) -> Examined:
        probes = {rank: FakeProbe(free_bytes=size) for rank, size in enumerate(free)}
        return examine_all((0, 3, *options, *own), (1, 3, *options), (2, 3, *options), probes=probes)[0]

    ample = examined(1 << 30, 1 << 30, 1 << 30)
    assert ample.status == 0, ample.lines
    (draft,) = ample.found("ok", "draft")
    assert "llama-puzzles needs " in draft
    losses = ample.found("ok", "losses")
    assert losses
    assert all(re.search(r"rank \d stands by for layers? \d", line) for line in losses)
    # Rank 1 has room for its own layers alone, and the others have none for those of rank 1 besides theirs.
    model = find_decoder("llama-puzzles")
    own_bytes = model.weight_bytes(LayerRange(5, 10), torch.float32)
    scarce = examined(1 << 30, 2 * own_bytes, 1 << 30)
    assert len(scarce.found("ok", "losses")) < len(losses), scarce.lines
    # The draft takes what the cache would have had.
    drafts = DraftMemory.of(model, 64)
    needed = model.weight_bytes(LayerRange(0, 5), torch.float32) + model.end_bytes(torch.float32)
    cache = examined(needed + drafts.weights_bytes + 1000, 1 << 30, 1 << 30)
    only_problem(cache, "cache", "the cache of rank 0 needs")


def test_a_draft_without_weights_or_with_damaged_ones_is_found(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(find_decoder("llama-puzzles").weights_path().parent, draft)
    weights = next(draft.glob("*.safetensors"))
    options = (0, 1, "-m", "llama-puzzles", "--prompt", "Spell a.", "--draft", draft)

    def examined() -> Examined:
        return examine_all(options)[0]

    assert examined().status == 0
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    damaged = examined()
    only_problem(damaged, "input", weights.name)
    weights.unlink()
    missing = examined()
    only_problem(missing, "input", "draft")
    assert (damaged.status, missing.status) == (2, 2)


@pytest.mark.parametrize(
    ("check", "options", "probe", "said"),
    [
        ("cache", ("--context", 512), None, ("--context 512", "has 256 positions", "up to 256 tokens fits")),
        ("cache", (), FakeProbe(free_bytes=1 << 20), ("the cache of rank 0 needs", "a shorter --context")),
        ("memory", ("--cache-mb", 1), FakeProbe(free_bytes=1 << 20), ("would need",)),
        ("input", ("--input", "none.txt"), None, ("none.txt",)),
        ("model", ("--kernels", "torch"), None, ("--kernels torch",)),
    ],
)
def test_faults_of_decoders(
    check: str, options: Sequence[object], probe: Probe | None, said: Sequence[str]
) -> None:
    prompt = () if "--input" in options else ("--prompt", "Spell a.")
    (alone,) = examine_all(
        (0, 1, "-m", "llama-puzzles", *prompt, *options), probes=None if probe is None else {0: probe}
    )
    only_problem(alone, check, *said)
    assert alone.status in (2, 3)


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


def test_keys_are_checked_and_shown(tmp_path: Path) -> None:
    for name in ("a.pem", "b.pem", "open.pem"):
        write_secret(tmp_path / name, make_key(), "FILE")
    (tmp_path / "open.pem").chmod(0o644)
    shown = Membership.from_file(tmp_path / "a.pem").fingerprint
    (alone,) = examine_all((0, 1, "--key", tmp_path / "a.pem"))
    assert alone.status == 0
    assert [line.split()[-1] for line in alone.found("ok", "key")] == [shown]
    for name, said in (("none.pem", "no such file"), ("open.pem", "other users may read it (mode 644)")):
        (alone,) = examine_all((0, 2, "--key", tmp_path / name))
        only_problem(alone, "key", said)
        assert alone.status == 2
    ranks = (0, 2, "--key", tmp_path / "a.pem"), (1, 2, "--key", tmp_path / "b.pem")
    first, second = examine_all(*ranks, timeout=ABSENT_S)
    only_problem(second, "key", "rank 0 at 127.0.0.1:", "has another key: give every rank the same --key")
    assert second.status == 2
    assert any("a process at 127.0.0.1 has another key" in line for line in first.lines)


def test_a_rank_without_the_key_of_the_others_is_told_so(tmp_path: Path) -> None:
    write_secret(tmp_path / "a.pem", make_key(), "FILE")
    first, second = examine_all((0, 2, "--key", tmp_path / "a.pem"), (1, 2), timeout=ABSENT_S)
    only_problem(second, "ranks", "rank 0 has a key, and this rank has none")
    assert second.status == 2
    assert any("a process at 127.0.0.1 has no key" in line for line in first.lines)


def test_links_are_measured_with_the_key(tmp_path: Path) -> None:
    write_secret(tmp_path / "a.pem", make_key(), "FILE")
    examined = examine_all(*((rank, 2, "--key", tmp_path / "a.pem") for rank in range(2)))
    assert [entry.status for entry in examined] == [0, 0], examined
    assert len([line for line in examined[0].lines if line.split()[1] == "link"]) == 2


def test_fault_rank_0_absent() -> None:
    (alone,) = examine_all((1, 2), timeout=0.6)
    only_problem(alone, "port", "rank 1", "rank 0 did not listen there", "start it")
    assert alone.status == 4


def test_fault_another_rank_absent_is_named() -> None:
    first, last = examine_all((0, 3), (2, 3), timeout=ABSENT_S)
    for examined in (first, last):
        only_problem(examined, "ranks", "rank 1 of 3 never appeared")
        assert examined.status == 4


def test_fault_two_processes_with_one_rank() -> None:
    examined = examine_all((0, 3), (1, 3), (1, 3), timeout=ABSENT_S)
    refused = [entry for entry in examined if any("already joined" in line for line in entry.lines)]
    assert len(refused) == 1
    only_problem(refused[0], "ranks", "rank 1 has already joined", "start each rank once")
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


def test_fault_a_data_rank_without_the_model(tmp_path: Path) -> None:
    """Rank 0 plans without what the data rank would have said of its input, and reports nothing beside."""
    first, second = examine_all((0, 2, "-D", 1), (1, 2, "-D", 1, "-m", tmp_path / "nowhere"))
    for examined in (first, second):
        only_problem(examined, "model", "nowhere")
        assert examined.status == 2
    # An old version may be why it does not know the model.
    old = FakeProbe(software={"version": "0.0.1"})
    first, _ = examine_all((0, 2), (1, 2, "-m", tmp_path / "nowhere"), probes={1: old})
    assert first.found("problem", "model")
    (mismatch,) = first.found("problem", "agreement")
    assert "0.0.1" in mismatch


def test_fault_different_version() -> None:
    first, second = examine_all((0, 2), (1, 2), probes={1: FakeProbe(software={"version": "9.9.9"})})
    for examined in (first, second):
        only_problem(examined, "agreement", "version of PipeEdge", "9.9.9", "install the same")
        assert examined.status == 2


def test_unlike_torch_is_a_warning() -> None:
    first, second = examine_all((0, 2), (1, 2), probes={1: FakeProbe(software={"torch": "2.9.1"})})
    for examined in (first, second):
        (line,) = examined.found("warning", "agreement")
        assert "torch 2.9.1 on" in line
        assert examined.status == 0


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
    board = DeviceType(1 << 30, 1e8, {model.name: (profile,)})
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
        only_problem(examined, "output", "rank 1", "send-rank1.csv exists already")
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


def test_only_options_of_the_runtime_are_accepted() -> None:
    command = parse_doctor(["1", "3", "-pt", "1,8,9,16", "--neighbors-file", "n.yml"], Environment())
    assert (command.request.world.rank, command.request.schedule.partition) == (1, (1, 8, 9, 16))
    assert command.neighbors_file == Path("n.yml")
    assert command.request.world.timeout_s <= 6
