"""Test what nodes decide without a network: which of them take part, with which files, and what is shown."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import write_results

from pipeedge.base.errors import InputError, PeerFailedError, RequestError
from pipeedge.nodes.commands import streamed_pieces
from pipeedge.nodes.composing import ProfiledNode, choose_nodes, compose, seconds_of
from pipeedge.nodes.deployment import Refinement, meeting_address
from pipeedge.nodes.discovery import cluster_label, code_label
from pipeedge.nodes.messages import Here, ModelFile, ModelPlace, News, Profile, Up
from pipeedge.nodes.node import profile_key
from pipeedge.nodes.options import parse_members, parse_node, parse_up
from pipeedge.nodes.shown import answer_lines, bar, state_page
from pipeedge.nodes.store import NodeStore, digest_of
from pipeedge.plan.spec_files import load_device_types, read_files
from pipeedge.plan.specs import NeighborLink
from pipeedge.profile.results import LayerResult, Measurement
from pipeedge.request.environment import Environment
from pipeedge.transport.authority import make_cluster_key
from pipeedge.transport.membership import Membership

NOTHING = Environment()
HERE = Here("pi1", "Cortex-A76", 4, 4 << 30, "Linux", "0.1.0", "2.13.0", ["eth0 1000 Mbit/s"], 29600)


@pytest.fixture
def results(tmp_path: Path) -> str:
    shapes = ((1, 8, 8),), ((17, 64), (17, 64))
    layers = tuple(
        LayerResult(number, 1e6, Measurement(shapes[0] if number == 1 else shapes[1], shapes[1], 0.5))
        for number in (1, 2)
    )
    write_results(tmp_path / "r.yml", layers=2, profile_data=layers)
    return (tmp_path / "r.yml").read_text()


def node(name: str, results: str, link: NeighborLink | None = None) -> ProfiledNode:
    return ProfiledNode(name, results, 4 << 30, link)


def test_the_files_describe_each_node_as_a_device_type_with_its_links(results: str, tmp_path: Path) -> None:
    slow, fast = NeighborLink(1e6, 0.002), NeighborLink(1e8, 0.001)
    nodes = [node("pi1", results), node("pi2", results, slow), node("pi3", results, fast)]
    paths = compose(nodes, "m", tmp_path, Up("m", objective="latency", context=512))
    found = read_files(
        models=paths.models, device_types=paths.device_types, devices=paths.devices, neighbors=paths.neighbors
    )
    assert found.devices == {"pi1": ("pi1",), "pi2": ("pi2",), "pi3": ("pi3",)}
    assert found.models["m"].layers == 2
    assert found.device_types["pi1"].bw_bytes_per_s == pytest.approx(1e8)
    assert found.neighbors["pi2"]["pi3"].bw_bytes_per_s == pytest.approx(1e6)  # over the asked node's side
    assert found.neighbors["pi3"]["pi1"].latency_s == pytest.approx(0.001)
    assert paths.words()[-2:] == ("--replan", "auto")
    assert "latency" in paths.words()
    assert paths.words()[paths.words().index("--context") + 1] == "512"


def test_a_node_that_runs_have_found_slower_is_planned_so(results: str, tmp_path: Path) -> None:
    nodes = [node("pi1", results), replace(node("pi2", results, NeighborLink(1e6)), slowness=1.5)]
    paths = compose(nodes, "m", tmp_path, Up("m"))
    found = load_device_types(paths.device_types)
    times = [found[name].profiles["m"][0].time_s for name in ("pi1", "pi2")]
    assert times == [(0.5, 0.5), (0.75, 0.75)]
    assert [seconds_of(each, tmp_path) for each in nodes] == [1.0, 1.5]


FACTORS = st.dictionaries(st.sampled_from(["pi1", "pi2", "stranger"]), st.floats(0.2, 5))


@given(FACTORS.map(lambda found: {"pi1": 1.0, **found}), st.lists(st.tuples(FACTORS, st.floats(0, 60))))
@settings(max_examples=cases(60))
def test_nodes_keep_what_was_measured_last_of_the_profiles_that_were_planned_with(
    planned: dict[str, float], seen: list[tuple[dict[str, float], float]]
) -> None:
    refinement, now, kept, times = Refinement(planned), 0.0, dict(planned), []
    for measured, pause_s in seen:
        now += pause_s
        found = refinement.due(measured, now)
        kept |= found
        times += [now] if found else []
    kept |= refinement.due({}, math.inf)
    assert all(later - sooner >= 30 for sooner, later in itertools.pairwise(times))
    latest: dict[str, float] = {}
    for measured, _ in seen:
        latest |= measured
    for name, factor in planned.items():
        wanted = min(10.0, max(0.1, factor * latest[name])) if name in latest else factor
        assert kept[name] == pytest.approx(wanted, rel=0.02)
    assert kept.keys() == planned.keys()


def test_what_runs_have_measured_is_kept_until_a_new_profile(tmp_path: Path) -> None:
    store = NodeStore(tmp_path / "a")
    profile = store.profile(["m"])
    assert store.slowness(profile) == 1.0
    store.keep_slowness(profile, 1.25)
    assert NodeStore(tmp_path / "a").slowness(profile) == 1.25
    store.keep_slowness(profile, None)
    assert store.slowness(profile) == 1.0


def test_profiles_of_different_models_are_not_mixed(results: str, tmp_path: Path) -> None:
    other = results.replace("- 17\n", "- 18\n").replace("[17, 64]", "[18, 64]")
    if other == results:
        other = results.replace("17", "18")
    with pytest.raises(RequestError, match="pi2 has profiled another model than pi1"):
        compose([node("pi1", results), node("pi2", other, NeighborLink(1e6))], "m", tmp_path, Up("m"))


@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=6, unique=True), st.integers(1, 8) | st.none())
def test_the_asked_node_and_the_fastest_others_are_chosen(times: list[float], most: int | None) -> None:
    nodes = [node(f"n{number}", "") for number in range(len(times))]
    seconds = {each.name: time for each, time in zip(nodes, times, strict=True)}
    chosen = choose_nodes(nodes, most, seconds)
    assert chosen[0] is nodes[0]
    assert len(chosen) == min(len(nodes), most or len(nodes))
    left = [each for each in nodes if each not in chosen]
    assert all(seconds[one.name] <= seconds[other.name] for one in chosen[1:] for other in left)
    assert [nodes.index(each) for each in chosen] == sorted(nodes.index(each) for each in chosen)


def test_rank_0_listens_where_most_nodes_reach_it() -> None:
    assert meeting_address(["10.0.0.1", "192.0.2.1", "10.0.0.1", ""]) == "10.0.0.1"
    assert meeting_address([]) == "127.0.0.1"


def test_announcements_tell_strangers_nothing_and_members_the_same() -> None:
    one, other = (Membership.from_text(make_cluster_key(), "k").trusted for _ in range(2))
    assert cluster_label(one) == cluster_label(one) != cluster_label(other)
    assert code_label("abcd-efgh-jklm") == code_label("abcd-2345-6789") != code_label("abce-efgh-jklm")


def test_a_profile_is_of_a_model_a_type_a_size_and_a_machine() -> None:
    request = Profile(ModelPlace("vit-digits"), 8, "float32")
    keys = {
        tuple(profile_key(*arguments))
        for arguments in (
            (request, HERE, ""),
            (request, HERE, "2"),
            (Profile(ModelPlace("vit-digits"), 4, "float32"), HERE, ""),
            (Profile(ModelPlace("vit-digits"), 8, "int8"), HERE, ""),
            (Profile(ModelPlace("vit-digits", "0" * 64), 8, "float32"), HERE, ""),
            (request, Here("pi1", "Cortex-A72", 4, 4 << 30, "Linux", "0.1.0", "2.13.0", [], 29600), ""),
        )
    }
    assert len(keys) == 6
    assert profile_key(request, replace_name(HERE, "pi2"), "") == profile_key(request, HERE, "")


def replace_name(here: Here, name: str) -> Here:
    values = {field: getattr(here, field) for field in here.__struct_fields__}
    return Here(**{**values, "name": name})


def test_damaged_documents_are_forgotten(tmp_path: Path) -> None:
    store = NodeStore(tmp_path / "a")
    for name in ("known.json", "wanted.json"):
        (store.directory / name).write_text("{")
    assert store.known() == {}
    assert store.wanted() is None


def test_the_digest_of_a_model_depends_on_names_and_contents_and_not_on_their_order() -> None:
    one, other = ModelFile("a", 1, "0" * 64), ModelFile("b", 1, "1" * 64)
    assert digest_of([one, other]) == digest_of([other, one])
    assert len({digest_of([one]), digest_of([other]), digest_of([ModelFile("a", 1, "1" * 64)])}) == 3


def test_options_of_nodes() -> None:
    assert parse_up(["m", "--nodes", "3"], NOTHING).count == 3
    assert parse_up(["m", "--nodes", "pi2,pi3"], NOTHING).nodes == ("pi2", "pi3")
    assert parse_node(["--nodes", "pi1,pi2:29601"], NOTHING).nodes == ("pi1", "pi2:29601")
    assert str(parse_node([], Environment(variables={"PIPEEDGE_KEY": "k.pem"})).key) == "k.pem"
    assert parse_members(["remove", "pi3"], NOTHING).remove == "pi3"
    for words, line in (
        (["m", "--nodes", "0"], "a run needs at least 1 node"),
        (["m", "--serve", "0"], "a port is 1 to 65535"),
    ):
        with pytest.raises(RequestError, match=line):
            parse_up(words, NOTHING)
    for words, line in (
        (["--nodes", "pi1:0"], "0 is not a port"),
        (["--join", "x", "--invite", "1"], "exclude each other"),
        (["--at", "pi1"], "only with --join"),
    ):
        with pytest.raises(RequestError, match=line):
            parse_node(words, NOTHING)
    with pytest.raises(RequestError, match="pipeedge nodes remove NAME"):
        parse_members(["remove"], NOTHING)


def test_answers_are_lines_of_classes_or_json() -> None:
    classes = [{"label": "cat", "score": 0.9}, {"label": "elephant", "score": 0.05}]
    assert list(answer_lines(classes)) == ["cat       0.9000", "elephant  0.0500"]
    assert list(answer_lines([classes])) == list(answer_lines(classes))
    assert list(answer_lines([0.5, 1.0])) == ["[0.5, 1.0]"]


def test_pieces_of_an_answer_come_from_events_however_they_are_cut() -> None:
    events = [{"choices": [{"delta": {"content": text}}]} for text in ("1 ", "2\n")]
    events += [{"choices": [{"text": " é"}]}, {"choices": [], "usage": {}}]
    stream = b"".join(b"id: x\ndata: " + json.dumps(each).encode() + b"\n\n" for each in events)
    for size in (1, 7, 1000):
        parts = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert "".join(streamed_pieces([*parts, b"data: [DONE]\n\n"], "m")) == "1 2\n é"
        with pytest.raises(PeerFailedError, match="m has ended in the middle of its answer"):
            list(streamed_pieces(parts, "m"))
    with pytest.raises(InputError, match="m has not answered: no"):
        list(streamed_pieces([b'data: {"error": {"message": "no"}}\n'], "m"))


def test_a_bar_is_as_long_as_what_was_fetched() -> None:
    lines = [bar(News("fetching", "pi2", done, 100.0)) for done in (0.0, 50.0, 100.0)]
    assert [line.count("█") for line in lines] == [0, 12, 24]
    assert lines[1].endswith("50 %  0.0 of 0.0 MB")


def test_the_page_escapes_what_nodes_say() -> None:
    evil: dict[str, Any] = {
        "asked": "pi1",
        "nodes": [{"name": "<script>", "here": True, "address": "", "works_for": "<b>"}],
        "run": None,
        "runs": {},
    }
    assert "<script>" not in state_page(evil)
    assert "&lt;script&gt;" in state_page(evil)
