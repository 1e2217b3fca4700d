"""Plans of rank 0 that need the scheduler: text of some length, measured links, hosts with a rank."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from ports import free_port
from rich.console import Console
from runtime_request import request
from shipped_model import DIGITS

from pipeedge.base.errors import InfeasibleError, PipeEdgeError, RequestError, ScheduleError
from pipeedge.base.text_lengths import InputSizes
from pipeedge.control.session import Session
from pipeedge.data.defaults import shipped_sentences
from pipeedge.models import find_model
from pipeedge.plan.schedule_choice import Following, plan_schedule
from pipeedge.plan.spec_files import load_device_types
from pipeedge.plan.spec_writing import save_device_types, save_models
from pipeedge.plan.specs import (
    DeviceType,
    LengthProfile,
    ModelProfile,
    ModelSpec,
    TransportHandling,
)
from pipeedge.request.config import TRANSPORTS
from pipeedge.run import pipeline
from pipeedge.run.preview import show_schedule


def test_automatic_scheduling_uses_measured_links(tmp_path: Path) -> None:
    """Two hosts share a model that fits on neither; the cut moves to where a slow link carries least."""
    elements, times = [64, 64, 8, 64], [1.0, 1.0, 1.0, 1.0]
    write = {
        "models.yml": f"vit-tiny:\n  layers: 4\n  mem_MB: [1, 1, 1, 1]\n  parameters_in: 64\n"
        f"  parameters_out: {elements}\n",
        "types.yml": f"board:\n  bw_Mbps: 1000\n  mem_MB: 3.5\n  model_profiles:\n    vit-tiny:\n"
        f"    - batch_size: 8\n      dtype: torch.float32\n      time_s: {times}\n",
        "devices.yml": "board: [a, b]\n",
        "links.yml": "a:\n  b: {bw_Mbps: 0.001}\n",
    }
    for name, text in write.items():
        (tmp_path / name).write_text(text)
    model = dataclasses.replace(find_model("vit-digits"), name="vit-tiny")
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, blocks=1))
    files = f"-sm {tmp_path}/models.yml -sdt {tmp_path}/types.yml -sd {tmp_path}/devices.yml -H a,b"

    def cut(extra: str) -> str:
        return str(plan_schedule(request(f"0 2 {files} {extra}"), model).schedule.stages[0].layers)

    assert cut("") == "1-2"
    assert cut(f"-sdn {tmp_path}/links.yml") == "1-3"


def write_text_cluster(folder: Path, lengths: tuple[int, ...]) -> str:
    """Two hosts and BERT-Base, profiled at ``lengths``; the options that name the files.

    A product takes 1 ms a token, an attention 0.01 ms a token squared.
    """
    model = find_model("bert-base-uncased")

    def times(tokens: int) -> tuple[float, ...]:
        return tuple(1e-5 * tokens**2 if layer % 4 == 0 else 1e-3 * tokens for layer in range(48))

    def elements(tokens: int) -> list[int]:
        cuts = [model.payload_specs(cut, 1, tokens) for cut in range(49)]
        return [sum(math.prod(spec.shape) for spec in cut) for cut in cuts]

    first, *others = lengths
    now, more = elements(first), elements(first - 1)
    added = [a - b for a, b in zip(now, more, strict=True)]
    sizes = ModelSpec((1.0,) * 48, now[0], tuple(now[1:]), {}, first, added[0], tuple(added[1:]))
    measured = tuple(LengthProfile(each, times(each)) for each in others)
    profile = ModelProfile(8, "torch.float32", times(first), first, measured)
    board = DeviceType(1e12, 1e9, {model.name: (profile,)})
    save_models(folder / "m.yml", {model.name: sizes})
    save_device_types(folder / "t.yml", {"board": board})
    (folder / "d.yml").write_text("board: [a, b]\n")
    return f"-m {model.name} -sm {folder}/m.yml -sdt {folder}/t.yml -sd {folder}/d.yml -H a,b"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("-sm nope.yml -sdt t.yml -sd d.yml", "nope.yml: no such file"),
        ("-sm m.yml -sdt t.yml -sd nope.yml --plan auto", "nope.yml: no such file"),
        ("-sm m.yml -sdt t.yml -sd d.yml -sdn nope.yml --dtype auto", "nope.yml: no such file"),
        ("-sm m.yml -sdt t.yml -sd d.yml -m bert-large-uncased", "bert-large-uncased"),
        ("--schedule-file nope.yml", "nope.yml: no such file"),
        ("-q 9,9,9 -pt 1,24,25,48", "bit"),
        ("-q 4,4,4", "-q"),
    ],
)
def test_rank_0_checks_its_options_and_files_before_it_waits_for_others(
    options: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text_cluster(tmp_path, (512,))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Session, "open", lambda session: pytest.fail("it waits for others"))
    line = f"0 2 -m bert-base-uncased {options} --timeout 0.1 --port {free_port()}"
    with pytest.raises(RequestError, match=says):
        pipeline.run(request(line), Console, lambda line: None)


@pytest.mark.parametrize(
    ("options", "transport"),
    [("", "p2p"), ("-c rpc", "rpc"), ("-c tcp", "tcp"), ("--key member.pem", "tcp-tls")],
)
def test_the_costs_of_the_own_transport_are_predicted(tmp_path: Path, options: str, transport: str) -> None:
    line = f"0 2 {write_text_cluster(tmp_path, (512,))} {options}"
    model = find_model("bert-base-uncased")

    def planned() -> tuple[list[float], tuple[int, ...]]:
        found = plan_schedule(request(line), model)
        assert found.prediction is not None
        return [stage.busy_s for stage in found.prediction.stages], found.schedule.ranks

    before, _ = planned()
    seconds = dict(zip(TRANSPORTS, (0.001, 0.002, 0.003, 0.004), strict=True))
    types = load_device_types(tmp_path / "t.yml")
    (profile,) = types["board"].profiles[model.name]
    handling = {name: TransportHandling(each, 0.0, 10 * each, 0.0) for name, each in seconds.items()}
    known = {model.name: (dataclasses.replace(profile, handling=handling),)}
    save_device_types(tmp_path / "t.yml", {"board": dataclasses.replace(types["board"], profiles=known)})
    # Between the data rank, rank 0, and a stage on it nothing is handled.
    cost = seconds[transport]
    after, ranks = planned()
    received = [cost if number or rank else 0.0 for number, rank in enumerate(ranks)]
    sent = [10 * cost if number == 0 or rank else 0.0 for number, rank in enumerate(ranks)]
    more = [sum(each) for each in zip(before, received, sent, strict=True)]
    assert after == pytest.approx(more)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_text_is_scheduled_for_the_length_of_the_input(tmp_path: Path, dtype: str) -> None:
    line = f"0 2 {write_text_cluster(tmp_path, (512, 128))} --dtype {dtype}"
    model = find_model("bert-base-uncased")
    for tokens in (16, 128, 200):
        found = plan_schedule(request(line), model, InputSizes(tokens))
        assert found.prediction is not None
        assert sum(stage.busy_s for stage in found.prediction.stages) == pytest.approx(
            12 * 1e-5 * tokens**2 + 36 * 1e-3 * tokens
        )
        sent = model.payload_specs(found.schedule.stages[0].layers.stop, 8, tokens)
        values = sum(math.prod(spec.shape) for spec in sent)
        assert found.prediction.stages[0].link_s == pytest.approx(4 * values / 1e9)
        assert found.notes[-1] == (
            f"scheduled for sentences of {tokens} tokens, the longest of the input (profiled with 128, 512)"
        )


def test_text_of_several_lengths_is_scheduled_for_their_average(tmp_path: Path) -> None:
    line = f"0 2 {write_text_cluster(tmp_path, (512, 128))}"
    model = find_model("bert-base-uncased")
    asked = dataclasses.replace(request(line), microbatch_size=8)
    found = plan_schedule(asked, model, InputSizes(200, "16:3,200:1"))
    assert found.prediction is not None
    short = 0.75**8
    expected = sum(
        part * (12 * 1e-5 * tokens**2 + 36 * 1e-3 * tokens)
        for tokens, part in ((16, short), (200, 1 - short))
    )
    assert sum(stage.busy_s for stage in found.prediction.stages) == pytest.approx(expected)
    assert found.prediction.mixed
    assert found.notes[-1] == (
        "scheduled for sentences as long as those of the input, the longest 200 tokens "
        "(profiled with 128, 512)"
    )


def test_a_profile_of_one_length_is_not_scaled_and_both_are_named(tmp_path: Path) -> None:
    line = f"0 2 {write_text_cluster(tmp_path, (512,))}"
    model = find_model("bert-base-uncased")
    found = plan_schedule(request(line), model, InputSizes(128))
    assert "board was profiled with 512 tokens only; its times are not scaled to 128" in found.notes[0]
    assert found.prediction is not None
    assert (found.prediction.tokens, found.prediction.stages[0].tokens) == (128, (512,))
    assert plan_schedule(request(line), model, InputSizes(512)).notes == ()


def test_a_dry_run_uses_the_length_of_the_sentences(tmp_path: Path) -> None:
    line = f"0 2 {write_text_cluster(tmp_path, (512, 32))} --dry-run"
    shown: list[str] = []
    show_schedule(request(line), shown.append)
    longest = max(len(entry.bert_uncased_ids) for entry in shipped_sentences())
    assert f"as long as those of the input, the longest {longest} tokens" in "\n".join(shown)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    """Write the scheduler's files for a slow board with the data and three fast ones; return the options."""
    layers = DIGITS.n_layers
    kind = "{name}:\n  bw_Mbps: {bw}\n  mem_MB: 100\n  model_profiles:\n    vit-digits:\n" + (
        "    - {{batch_size: 8, dtype: float32, time_s: [{times}], feed_s: {feed}, collect_s: 0.001}}\n"
    )
    times = {"slow": 0.004, "fast": 0.001}
    (tmp_path / "types.yml").write_text(
        "".join(
            kind.format(name=name, bw=bw, times=", ".join([str(times[name])] * layers), feed=feed)
            for name, bw, feed in (("slow", 1, 0.003), ("fast", 1000, 0))
        )
    )
    (tmp_path / "models.yml").write_text(
        f"vit-digits:\n  layers: {layers}\n  mem_MB: {[1.0] * layers}\n  parameters_in: 64\n"
        f"  parameters_out: {[544] * (layers - 1) + [10]}\n"
    )
    (tmp_path / "devices.yml").write_text("slow: [data]\nfast: [f0, f1, f2]\n")
    return f"-sm {tmp_path}/models.yml -sdt {tmp_path}/types.yml -sd {tmp_path}/devices.yml"


def test_automatic_scheduling_counts_the_links_of_the_data_rank(cluster: str) -> None:
    """Over 1 Mbps, even the small input takes longer than a fast host needs for all layers."""
    found = plan_schedule(request(f"0 2 {cluster} -H data,f0"), DIGITS)
    assert found.prediction is not None
    link_s = 8 * DIGITS.input_bytes() / (2**20 / 8)
    assert [stage.host for stage in found.schedule.stages] == ["f0"]
    assert found.prediction.input_link_s == pytest.approx(link_s)
    assert found.prediction.period_s == pytest.approx(max(link_s, 16 * 0.001))
    (stage,) = found.prediction.stages
    assert found.prediction.latency_s == pytest.approx(0.003 + link_s + stage.busy_s + stage.link_s)
    if link_s > 16 * 0.001:
        assert found.prediction.bottleneck.startswith(
            "the link from the data host data to stage 0 on f0 takes "
        )
    # With the data on a fast host the slow link plays no part.
    found = plan_schedule(request(f"0 2 {cluster} -H data,f0 -D 1"), DIGITS)
    assert found.prediction is not None
    assert found.prediction.input_link_s == 0
    assert found.prediction.stages[0].busy_s == pytest.approx(16 * 0.001 + 0.001)


def test_only_hosts_with_a_rank_are_scheduled(cluster: str) -> None:
    stages = plan_schedule(request(f"0 2 {cluster} -H f1,f2"), DIGITS).schedule.stages
    assert {stage.host for stage in stages} <= {"f1", "f2"}
    assert stages[0].host is not None
    found = plan_schedule(request(f"0 3 {cluster} -H other,f1,f2"), DIGITS)
    assert {stage.host for stage in found.schedule.stages} <= {"f1", "f2"}
    assert "the data rank's host other is not in" in found.notes[0]
    with pytest.raises(PipeEdgeError, match="lists none of the hosts x, y"):
        plan_schedule(request(f"0 2 {cluster} -H x,y"), DIGITS)


def test_a_dry_run_says_what_the_loss_of_each_host_would_cost(cluster: str) -> None:
    line = f"0 4 -m vit-digits {cluster} -H data,f0,f1,f2 --dry-run -c tcp"
    shown: list[str] = []
    show_schedule(request(f"{line} --on-failure continue"), shown.append)
    losses = [line for line in shown if line.startswith("loss of ")]
    assert losses[0] == "loss of data: ends the run: it reads the inputs and collects the outputs"
    assert all(line.endswith("items/s on the others") for line in losses[1:])
    assert len(losses) > 1
    shown.clear()
    show_schedule(request(f"{line} --on-failure stop"), shown.append)
    assert not [line for line in shown if line.startswith("loss of ")]


def test_survival_of_any_loss_is_asked_for_the_first_plan_alone(cluster: str, tmp_path: Path) -> None:
    goes_on = "-c tcp --on-failure continue --survive-loss"
    model = find_model("vit-digits")
    enough = request(f"0 4 -m vit-digits {cluster} -H data,f0,f1,f2 {goes_on}")
    found = plan_schedule(enough, model)
    types = tmp_path / "types.yml"
    types.write_text(types.read_text().replace("mem_MB: 100", "mem_MB: 6.5"))
    with pytest.raises(InfeasibleError, match="no schedule survives the loss of any one host: without f0, "):
        plan_schedule(request(f"0 3 -m vit-digits {cluster} -H data,f0,f1 {goes_on}"), model)
    # With four such hosts, one may be lost; what is left is used, although no other one may be lost then.
    again = plan_schedule(enough, model, following=Following({0, 1, 2}))
    assert set(again.schedule.ranks) == {0, 1, 2}
    assert set(found.schedule.ranks) <= {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-pt 1,8,9,16 -c tcp --on-failure continue", "--survive-loss needs automatic scheduling"),
        (
            "{files} -H data,f0 -c tcp --on-failure stop",
            "--survive-loss needs -c tcp without",
        ),
    ],
)
def test_survival_needs_a_scheduler_and_a_run_that_goes_on(cluster: str, options: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        request(f"0 2 -m vit-digits --survive-loss {options.format(files=cluster)}")
