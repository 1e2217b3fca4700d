"""Test ``runtime.py`` as a program: real ranks, real signals, every failure within its deadline.

Ranks mostly wait: for torch to be imported, and for one another. So the worlds of these tests run three
at a time in a pool, and each test waits for its own (``scenario``). What needs only one rank runs inside
this process, further below.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from arrays import load_arrays
from networks import Network, make_network
from ports import free_port
from processes import DIES_WHEN_COMPLETE, NO_KEY, SIGNALS_ITSELF, Ended, World, run_world, torchrun
from runs import DIGITS, Inputs, nothing_is_left, outputs, write_cluster, write_pictures
from small_models import VOCABULARY
from waiting import LIMIT_S

if TYPE_CHECKING:
    import transformers

ENDLESS = (*DIGITS, "-b", 10_000_000, "--output", "rows.csv", "--report", "report.json")
EVEN = 8
"""Options of an uneven batch: 50 items in microbatches of 8 leave one of 2."""

Scenario = Callable[[Path, "Inputs"], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(run: Scenario) -> Scenario:
    """Register a test that takes a directory and the inputs, and mostly waits for ranks."""
    SCENARIOS[run.__name__] = run
    return run


def scenarios(**variants: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a scenario for each keyword, whose value is a further argument of the function."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        for name, value in variants.items():
            SCENARIOS[f"{run.__name__}_{name}"] = functools.partial(run, variant=value)
        return run

    return register


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, inputs: Inputs
) -> Iterator[dict[str, Future[None]]]:
    """Start the selected scenarios."""
    wanted = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_ranks"
    ]
    with ThreadPoolExecutor(max_workers=3) as pool:
        yield {name: pool.submit(SCENARIOS[name], tmp_path_factory.mktemp(name), inputs) for name in wanted}


def succeeded(ended: dict[int, Ended]) -> None:
    for rank, end in ended.items():
        assert end.status == 0, f"rank {rank}: {end.err}"
        assert end.err == ""


# --- what is computed -------------------------------------------------------------------------------

SPLIT = (*DIGITS, "-u", EVEN, "--output", "o.npz", "--report", "r.json")
SPLITS: dict[str, tuple[int, tuple[object, ...], list[tuple[int, list[int]]]]] = {
    "one_rank": (1, ("-D", 0), [(0, [1, 16])]),
    "two_ranks": (2, ("-pt", "1,6,7,16", "-D", 1), [(0, [1, 6]), (1, [7, 16])]),
    "three_ranks_in_any_order": (
        3,
        ("-pt", "1,1,2,11,12,16", "-r", "2,0,1", "-D", 1),
        [(2, [1, 1]), (0, [2, 11]), (1, [12, 16])],
    ),
    "four_ranks": (
        4,
        ("-pt", "1,3,4,5,6,14,15,16", "-D", 2),
        [(0, [1, 3]), (1, [4, 5]), (2, [6, 14]), (3, [15, 16])],
    ),
    "more_ranks_than_stages": (4, ("-pt", "1,7,8,16", "-r", "1,0", "-D", 3), [(1, [1, 7]), (0, [8, 16])]),
}


@scenarios(**SPLITS)
def the_split(
    directory: Path, inputs: Inputs, variant: tuple[int, tuple[object, ...], list[tuple[int, list[int]]]]
) -> None:
    size, options, stages = variant
    ended = run_world(directory, size, *SPLIT, "--input", inputs.digits, *options)
    succeeded(ended)
    for rank, end in ended.items():
        assert bool(end.out) == (rank == options[-1]), "the data rank alone prints the table"
    arrays, results = load_arrays(inputs.digits), load_arrays(directory / "o.npz")
    assert results["outputs"].shape == (50, 10)
    assert results["outputs"].dtype == np.float32
    assert results["labels"].tolist() == arrays["labels"].tolist()
    check_report(json.loads((directory / "r.json").read_text()), stages)
    inputs.collected[str(options)] = outputs(directory / "o.npz").tobytes()


@scenarios(two_ranks=())
def the_report_is_a_page(directory: Path, inputs: Inputs, variant: tuple[()]) -> None:
    options = (*DIGITS, "-b", 48, "-pt", "1,8,9,16", "-q", "8,0", "--report", "r.html")
    succeeded(run_world(directory, 2, *options))
    page = (directory / "r.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    for section in ("schedule", "gantt", "times", "charts", "stages", "origin"):
        assert f'<section id="{section}">' in page
    assert "layers 9–16" in page
    assert "Bottleneck" in page
    assert "--report r.html" in page


def check_report(report: dict[str, Any], stages: Sequence[tuple[int, list[int]]]) -> None:
    """Check that the report is complete and its numbers are plausible."""
    assert report["model"] == "vit-digits"
    assert [(stage["rank"], stage["layers"]) for stage in report["schedule"]] == list(stages)
    assert [stage["stage"] for stage in report["schedule"]] == list(range(len(stages)))
    assert {(stage["host"], stage["quant_bits"]) for stage in report["schedule"]} == {(None, 0)}
    assert (report["items"], report["microbatches"], report["ubatch_size"]) == (50, 7, EVEN)
    assert report["startup_s"] > 0.1
    assert report["throughput_items_per_s"] == pytest.approx(50 / report["elapsed_s"])
    latency = report["latency_s"]
    assert 0 < latency["p50"] <= latency["p95"] <= latency["max"] <= report["elapsed_s"] + 1e-6
    accuracy = report["accuracy"]
    assert accuracy["labelled"] == 50
    assert 48 <= accuracy["correct"] <= 50
    assert accuracy["top1"] == pytest.approx(accuracy["correct"] / 50)
    assert report["predicted"] == {"throughput_items_per_s": None}
    assert report["skipped"] == []
    assert [stage["rank"] for stage in report["stages"]] == [rank for rank, _ in stages]
    for stage in report["stages"]:
        assert stage["compute_s_mean"] > 0
        assert stage["send_s_mean"] >= 0
        assert stage["recv_wait_s_mean"] >= 0
        assert 0 < stage["busy_fraction"] <= 1
        assert 50 < stage["rss_peak_mb"] < 2000
    assert all(stage["bytes_out_mean"] > 8 * 65 * 4 for stage in report["stages"][:-1])


_loads_a_reference = threading.Lock()


def load_reference(cls: str, directory: Path) -> transformers.PreTrainedModel:
    """Load a model of transformers, which ties no weights meanwhile: a method of all models is replaced.

    When two threads load at once, the one that ends last may put the replacement back, for good: models that
    are created later in this process would not have the weights that they share.
    """
    import transformers

    with _loads_a_reference:
        loaded: transformers.PreTrainedModel = getattr(transformers, cls).from_pretrained(directory)
    return loaded.eval()


@scenarios(vit="vit", deit="deit")
def the_pipeline_is_the_model(directory: Path, inputs: Inputs, variant: str) -> None:
    options = ("-m", inputs.models[variant], "--input", inputs.images, "--output", "o.npz")
    succeeded(run_world(directory, 3, *options, "-u", 3, "-pt", "1,3,4,9,10,12", "-D", 2, "-r", "1,2,0"))
    classes = {"vit": "ViTForImageClassification", "deit": "DeiTForImageClassificationWithTeacher"}
    reference = load_reference(classes[variant], inputs.models[variant])
    with torch.inference_mode():
        expected = reference(torch.from_numpy(load_arrays(inputs.images)["pixel_values"])).logits
    np.testing.assert_allclose(outputs(directory / "o.npz"), expected, atol=1e-5, rtol=0)


@scenario
def sentences_of_any_length_are_padded_and_masked_at_every_stage(directory: Path, inputs: Inputs) -> None:
    model = inputs.models["bert"]
    options = ("-m", model, "--input", inputs.sentences, "--output", "o.npz", "-u", 3)
    succeeded(run_world(directory, 3, *options, "-pt", "1,1,2,6,7,12", "-D", 1))
    reference = load_reference("BertForSequenceClassification", model)
    expected = []
    for line in inputs.sentences.read_text().splitlines():  # each alone, so without padding
        ids = [VOCABULARY.index(token) for token in ("[CLS]", *line.split(), "[SEP]")]
        with torch.inference_mode():
            expected.append(reference(torch.tensor([ids])).logits[0])
    np.testing.assert_allclose(outputs(directory / "o.npz"), torch.stack(expected), atol=1e-5, rtol=0)


@scenarios(by_rank=("0", "1", "2"), by_name=("turtle", "hare", "greyhound"))
def the_scheduler_decides(directory: Path, inputs: Inputs, variant: Sequence[str]) -> None:
    files = write_cluster(directory, variant)
    named = variant[0] != "0"
    # The files are rank 0's alone: the others are given none.
    hosts = ("-H", ",".join(variant)) if named else ()
    options = (*DIGITS, "-b", 24, "--output", "o.npz", "--report", "r.json", *hosts)
    succeeded(run_world(directory, 3, *options, own={0: files}))
    report = json.loads((directory / "r.json").read_text())
    layers = {stage["rank"]: stage["layers"][1] - stage["layers"][0] + 1 for stage in report["schedule"]}
    assert sum(layers.values()) == 16
    assert layers[0] <= 4
    assert min(layers[1], layers[2]) >= 6
    assert report["predicted"]["throughput_items_per_s"] == pytest.approx(8 / 0.06, rel=0.2)
    assert {stage["host"] for stage in report["schedule"]} == (set(variant) if named else {None})


# --- what fails -------------------------------------------------------------------------------------

KILL_S = 50.0
"""How soon after a death the others must have ended; silence alone takes 60 s."""
SILENT_S = 10
"""Timeout of ranks of which one falls silent, within which all must come on a busy machine too."""


def others_name(ended: dict[int, Ended], culprit: int, *, says: str) -> None:
    """Every other rank has ended with code 4 and one line that names the culprit."""
    for rank, end in ended.items():
        if rank == culprit:
            continue
        assert end.status == 4, f"rank {rank} ended with {end.status}: {end.err}"
        # One that dies before its hello is told first, and may be what never appears.
        early = "left before it introduced itself; ranks still missing"
        lines = [line for line in end.err.splitlines() if line.strip()]
        (line,) = [line for line in lines if early not in line and NO_KEY not in line]
        assert re.search(rf"rank {culprit}\b.*{says}", line), f"rank {rank} said: {line}"


@scenarios(
    first=(0, "p2p"),
    middle=(1, "p2p"),
    last=(2, "p2p"),
    middle_over_tcp=(1, "tcp"),
    middle_over_tls=(1, "TLS"),
)
def a_rank_is_killed_in_full_swing(directory: Path, inputs: Inputs, variant: tuple[int, str]) -> None:
    culprit, comm = variant
    with World(directory, 3, *ENDLESS, "-D", (culprit + 1) % 3, *inputs.over(comm)) as world:
        world.start().until_rows()
        world.signal(culprit, signal.SIGKILL)
        ended = world.wait(within=KILL_S)
    assert ended[culprit].status == -signal.SIGKILL
    others_name(ended, culprit, says=rf"\(stage {culprit}, layers .* is gone")
    nothing_is_left(directory)


@scenario
def the_data_rank_is_killed(directory: Path, inputs: Inputs) -> None:
    """It has no stage, and its own half file is all that it leaves behind. Before that, a rank of another run
    comes to the same port: only that one ends."""
    (directory / "stray").mkdir()
    with World(directory, 3, *ENDLESS, "-pt", "1,8,9,16", "-D", 2) as world:
        world.start().until_rows()
        with World(directory / "stray", 2, *ENDLESS, port=world.port) as other:
            stray = other.start(1).wait()[1]
        assert stray.status == 2
        assert re.search(
            "rank 0 says 3: rank 1 has already joined, from .*: choose another --port", stray.line
        )
        # The rendezvous is over: rank 0 listens for control and, as everybody, for gloo's links alone.
        assert [len(world.listening(rank)) for rank in range(3)] == [2, 1, 1]
        assert world.port in world.listening(0)
        world.signal(2, signal.SIGKILL)
        ended = world.wait(within=KILL_S)
    others_name(ended, 2, says=r"\(data rank.*is gone")
    assert not (directory / "rows.csv").exists()
    # Its rows are left; the next run that writes there says so and replaces them.
    assert (directory / "rows.csv.part").is_file()
    again = run_world(directory, 1, *DIGITS, "-b", 8, "--output", "rows.csv")[0]
    assert re.search(r"rows.csv.part has the rows of .* items from a run that did not end well", again.line)
    assert (directory / "rows.csv").is_file()
    assert not list(directory.glob("*.part"))


@scenarios(the_data_rank=0, a_stage=1)
def a_killed_run_goes_on_with_resume(directory: Path, inputs: Inputs, variant: int) -> None:
    options = (*DIGITS, "-pt", "1,8,9,16", "-u", 1, "-b", 300, "--output")
    succeeded(run_world(directory, 2, *options, "whole.jsonl"))
    killed = {SIGNALS_ITSELF: f"{variant}:200:{signal.SIGKILL:d}"}
    with World(directory, 2, *options, "rows.jsonl", env=killed) as world:
        ended = world.start().wait(within=KILL_S)
    assert ended[variant].status == -signal.SIGKILL
    assert not (directory / "rows.jsonl").exists()
    ended = run_world(directory, 2, *options, "rows.jsonl", "--resume")
    assert [end.status for end in ended.values()] == [0, 0]
    assert re.search(r"--resume: the rows of [\d,]+ items are taken from rows.jsonl.part", ended[0].line)
    assert (directory / "rows.jsonl").read_bytes() == (directory / "whole.jsonl").read_bytes()
    assert not list(directory.glob("*.part"))


@scenarios(the_hub=(0, False), a_stage=(1, False), with_a_report=(1, True))
def a_rank_is_killed_after_the_results_are_complete(
    directory: Path, inputs: Inputs, variant: tuple[int, bool]
) -> None:
    culprit, reports = variant
    options = (*DIGITS, "-b", 64, "--output", "rows.csv", "-D", 2)
    asked = ("--report", "report.json") if reports else ()
    with World(directory, 3, *options, own={2: asked}, env={DIES_WHEN_COMPLETE: str(culprit)}) as world:
        ended = world.start().wait()
    assert ended.pop(culprit).status == -signal.SIGKILL
    assert {rank: end.status for rank, end in ended.items()} == {1 - culprit: 0, 2: 0}
    for rank, end in ended.items():
        told = end.err.splitlines()
        assert re.search(rf"rank {rank}: rank {culprit} \(.* is gone: .*; the results are complete$", told[0])
        assert len(told) == (2 if rank == 2 else 1), end.err
    assert ended[2].err.splitlines()[-1].endswith(" figures are missing from the table and the report")
    assert len((directory / "rows.csv").read_text().splitlines()) == 65
    if reports:
        report = json.loads((directory / "report.json").read_text())
        assert (report["items"], [stage["stage"] for stage in report["stages"]]) == (64, [0, 2])
        ranks = {lane["rank"] for lane in report["timeline"]["lanes"]}
        assert ranks in ({0, 2}, {0, 1, 2})  # it may have told what it recorded, and not its figures


@scenarios(hub=0, member=1)
def a_rank_is_killed_before_all_are_there(directory: Path, inputs: Inputs, variant: int) -> None:
    with World(directory, 3, *ENDLESS, "--timeout", 30) as world:
        world.start(0, 1).until_connected(2)
        world.signal(variant, signal.SIGKILL)
        ended = world.wait(within=KILL_S)
    nothing_is_left(directory)
    if variant == 1 and "ranks 1, 2 of 3 never appeared" in ended[0].err:
        return  # it was killed before it had said which rank it is
    others_name(ended, variant, says="is gone")


@scenarios(early=(0, 1.3, True), later=(1, 0.2, False), late=(0, 0.4, False))
def a_rank_is_killed_at_any_moment(directory: Path, inputs: Inputs, variant: tuple[int, float, bool]) -> None:
    """Arbitrary moments: while torch is imported, weights are read, links are opened."""
    culprit, delay_s, fresh = variant
    with World(directory, 2, *ENDLESS, "--timeout", 8, fresh=fresh) as world:
        world.start()
        time.sleep(delay_s)
        world.signal(culprit, signal.SIGKILL)
        ended = world.wait(within=KILL_S)
    # It may not have been there yet, and then it never appears.
    others_name(ended, culprit, says="(is gone|never appeared)")
    assert not (directory / "rows.csv").exists()


@scenarios(
    hub=(0, "p2p"), middle=(1, "p2p"), last=(2, "p2p"), last_over_tcp=(2, "tcp"), last_over_tls=(2, "TLS")
)
def a_rank_stops_answering(directory: Path, inputs: Inputs, variant: tuple[int, str]) -> None:
    culprit, comm = variant
    options = (*ENDLESS, "--timeout", SILENT_S, "-D", (culprit + 2) % 3, *inputs.over(comm))
    with World(directory, 3, *options) as world:
        world.start().until_rows()
        world.signal(culprit, signal.SIGSTOP)
        others = [rank for rank in range(3) if rank != culprit]
        ended = world.wait(*others, within=KILL_S)
    others_name(ended, culprit, says=rf"\(stage {culprit}, .*has been silent for")
    nothing_is_left(directory)


@scenario
def a_rank_stops_before_all_are_there(directory: Path, inputs: Inputs) -> None:
    with World(directory, 3, *ENDLESS, "--timeout", SILENT_S) as world:
        world.start(0, 1, 2).until_connected(3)
        world.signal(2, signal.SIGSTOP)
        ended = world.wait(0, 1, within=KILL_S)
    others_name(ended, 2, says="(has been silent for|never appeared)")
    nothing_is_left(directory)


@scenarios(the_hub=0, a_member=1)
def a_rank_never_appears(directory: Path, inputs: Inputs, variant: int) -> None:
    with World(directory, 2, *ENDLESS, "--timeout", 3) as world:
        present = 1 - variant
        ended = world.start(present).wait(within=KILL_S)
    assert ended[present].status == 4
    assert f"rank {variant}" in ended[present].line
    assert "never appeared" in ended[present].line
    nothing_is_left(directory)


@scenario
def bad_weights_on_one_rank_end_all(directory: Path, inputs: Inputs) -> None:
    options = ("-b", 64, "--output", "o.npz")
    own = {0: ("-m", inputs.models["vit"]), 1: ("-m", inputs.damaged)}
    ended = run_world(directory, 2, *options, own=own)
    assert ended[1].status == 2
    assert "model.safetensors" in ended[1].line
    assert ended[0].status == 4
    assert re.search(
        r"rank 1 \(stage 1, layers 5-12, on .*\) failed: .*model.safetensors", ended[0].line
    ) or (re.search(r"rank 1 \(.*\) failed: .*model.safetensors", ended[0].line))
    nothing_is_left(directory)


@scenarios(over_p2p="p2p", over_tls="TLS")
def an_input_that_breaks_half_way_ends_all(directory: Path, inputs: Inputs, variant: str) -> None:
    pictures = directory / "pictures"
    write_pictures(pictures, 200)
    (pictures / "150.png").write_bytes(b"no picture")
    options = ("-m", inputs.models["vit"], "--input", "pictures", "-u", 1, "--output", "o.npz")
    ended = run_world(directory, 2, *options, "-D", 1, *inputs.over(variant))
    assert ended[1].status == 2
    assert "150.png" in ended[1].line
    assert ended[0].status == 4
    assert re.search(r"rank 1 \(stage 1, .*\) failed: .*150\.png", ended[0].line)
    nothing_is_left(directory)


DISAGREEMENTS: dict[str, tuple[Callable[[Inputs], dict[int, Sequence[object]]], str]] = {
    "on_the_model": (
        lambda inputs: {0: DIGITS, 1: ("-m", inputs.models["vit"])},
        "disagree on the (model|configuration)",
    ),
    "on_the_weights": (
        lambda inputs: {0: ("-m", inputs.models["vit"]), 1: ("-m", inputs.other)},
        "disagree on the weights",
    ),
    "on_the_microbatch": (
        lambda inputs: {0: (*DIGITS, "-u", 4), 1: (*DIGITS, "-u", 8)},
        "disagree on the microbatch size.*4 and 8",
    ),
    "on_the_partition": (
        lambda inputs: {0: (*DIGITS, "-pt", "1,8,9,16"), 1: (*DIGITS, "-pt", "1,4,5,16")},
        "disagree on -pt/--partition: 1,8,9,16 and 1,4,5,16",
    ),
}


@scenarios(**DISAGREEMENTS)
def ranks_that_disagree_all_hear_it(
    directory: Path, inputs: Inputs, variant: tuple[Callable[[Inputs], dict[int, Sequence[object]]], str]
) -> None:
    own, says = variant
    ended = run_world(directory, 2, "--output", "o.npz", own=own(inputs))
    for end in ended.values():
        assert end.status == 2
        assert re.search(rf"ranks 0 and 1 {says}", end.line)
    nothing_is_left(directory)


@scenario
def ranks_that_disagree_on_the_world_all_hear_it(directory: Path, inputs: Inputs) -> None:
    port = free_port()
    (directory / "a").mkdir()
    (directory / "b").mkdir()
    two = World(directory / "a", 2, *ENDLESS, port=port)
    three = World(directory / "b", 3, *ENDLESS, port=port)
    with two, three:
        two.start(0)
        three.start(1)
        ended = {0: two.wait(within=KILL_S)[0], 1: three.wait(within=KILL_S)[1]}
    for end in ended.values():
        assert end.status == 2
        assert re.search("rank 1 on .* says the world has 3 ranks, rank 0 says 2: start", end.line)


@scenarios(ctrl_c=signal.SIGINT, terminated=signal.SIGTERM)
def it_is_interrupted(directory: Path, inputs: Inputs, variant: int) -> None:
    """Like Ctrl-C in a terminal, which sends the signal to every process."""
    with World(directory, 2, *ENDLESS) as world:
        world.start_together().until_rows()
        world.signal_together(variant)
        ended = world.wait(within=KILL_S)
    assert [(end.status, end.err) for end in ended.values()] == [(130, "")] * 2
    assert re.fullmatch(r"unfinished  .*; a run with --resume goes on from there\n", ended[0].out)
    assert ended[1].out == ""
    nothing_is_left(directory)


@scenario
def one_rank_is_interrupted(directory: Path, inputs: Inputs) -> None:
    with World(directory, 2, *ENDLESS) as world:
        world.start().until_rows()
        world.signal(1, signal.SIGINT)
        ended = world.wait(within=KILL_S)
    assert (ended[1].status, ended[1].err) == (130, "")
    others_name(ended, 1, says="was interrupted")
    nothing_is_left(directory)


@scenario
def it_is_interrupted_at_any_moment(directory: Path, inputs: Inputs) -> None:
    """It ends quietly, even while torch is imported or no other rank is there."""
    with World(directory, 2, *ENDLESS, "--timeout", 30, fresh=True) as world:
        for delay in (0.4, 0.9, 1.6):
            world.start(1)
            time.sleep(delay)
            world.signal(1, signal.SIGINT)
            end = world.wait(1, within=KILL_S)[1]
            assert end.err == "", f"after {delay} s"
            assert end.status in (130, -signal.SIGINT)  # -SIGINT: by the system, before it could answer


# A network of its own for each rank. ----------------------------------------------------------------


@contextlib.contextmanager
def ranks_apart(name: str, directory: Path, *options: object) -> Iterator[tuple[Network, World]]:
    """Three ranks, not yet started, each in a network of its own."""
    with contextlib.ExitStack() as stack:
        net = make_network(name, 3, stack)
        common = (*ENDLESS, "--timeout", SILENT_S, "--addr", net.address(0), *options)
        yield net, stack.enter_context(World(directory, 3, *common, space=net.space))


@scenarios(
    of_a_member=(2, "p2p"),
    of_the_hub=(0, "p2p"),
    of_a_member_over_tcp=(2, "tcp"),
    of_a_member_over_tls=(2, "TLS"),
)
def a_cable_is_cut(directory: Path, inputs: Inputs, variant: tuple[int, str]) -> None:
    lonely, comm = variant
    with ranks_apart(f"pc{lonely}{comm[0]}", directory, "-D", 1, *inputs.over(comm)) as (net, world):
        world.start().until_rows()
        net.cut(lonely)
        ended = world.wait(within=KILL_S)
    silent = rf"\(stage {lonely}, .*has been silent for"
    if lonely == 0:
        others_name(ended, 0, says=silent)
        assert ended[0].status == 4
    else:
        others = {rank: end for rank, end in ended.items() if rank != lonely}
        others_name(others, lonely, says=silent)
        # The one that is cut off knows only that it hears nothing.
        assert ended[lonely].status == 4
        assert "rank 0 (stage 0, " in ended[lonely].line
    nothing_is_left(directory)


@scenarios(over_p2p="p2p", over_tcp="tcp", over_tls="TLS")
def one_link_of_several_is_cut(directory: Path, inputs: Inputs, variant: str) -> None:
    """Both ends still reach the hub, so neither is silent, and the link is named."""
    with ranks_apart(f"pl{variant[0]}", directory, *inputs.over(variant)) as (net, world):
        world.start().until_rows()
        net.black_hole(1, 2)
        net.black_hole(2, 1)
        ended = world.wait(within=KILL_S)
    for end in ended.values():
        assert end.status == 4
        assert re.search(
            r"rank 2 \(stage 2, .*waited .* for microbatch \d+ from rank 1 \(stage 1, .*link", end.line
        )
    nothing_is_left(directory)


@scenarios(over_p2p="p2p", over_tls="TLS")
def links_that_never_open_are_named(directory: Path, inputs: Inputs, variant: str) -> None:
    """A firewall separates two ranks that both reach rank 0."""
    with ranks_apart(f"pf{variant[0]}", directory, *inputs.over(variant)) as (net, world):
        net.black_hole(1, 2)
        net.black_hole(2, 1)
        ended = world.start().wait(within=KILL_S)
    for end in ended.values():
        assert end.status == 4
        assert re.search(r"the links of rank \d to \d, \d over eth0 do not open", end.line)
    nothing_is_left(directory)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks(name: str, running: dict[str, Future[None]]) -> None:
    running[name].result(timeout=230)


def test_every_split_gives_the_same_bits(running: dict[str, Future[None]], inputs: Inputs) -> None:
    for name in SPLITS:
        future = running.get(f"the_split_{name}")
        if future is not None:
            future.result(timeout=LIMIT_S)
    assert len(set(inputs.collected.values())) <= 1
    if len(running) == len(SCENARIOS):
        assert len(inputs.collected) == len(SPLITS)


@pytest.mark.parametrize("port", ["its own", "ours"])
def test_torchrun_starts_it_as_it_is(port: str, tmp_path: Path, quick_python: Path) -> None:
    launcher = ("--standalone",) if port == "its own" else ("--master-port", str(free_port()))
    arguments = (*DIGITS, "-b", 16, "--output", "o.npz")
    torchrun(tmp_path, quick_python, "runtime.py", *arguments, launcher=launcher)
    assert outputs(tmp_path / "o.npz").shape == (16, 10)
