"""Three nodes on this machine, as a person starts them: up, ask, a loss, status, down."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ports import free_port
from processes import Ended, Programs

from pipeedge.models.decoder import find_decoder
from pipeedge.nodes.facts import state_facts
from pipeedge.nodes.messages import ModelPlace, Profile
from pipeedge.nodes.node import profile_key
from pipeedge.nodes.store import NodeStore
from pipeedge.profile.decoder_job import DecoderJob
from pipeedge.profile.job import Job
from pipeedge.profile.request import MeasureRequest
from pipeedge.profile.result_files import save_results
from pipeedge.profile.results import LayerResult
from pipeedge.request.config import ModelRequest
from pipeedge.transport.authority import make_cluster_key

PIPEEDGE = "pipeedge/__main__.py"
NAMES = ("pi1", "pi2", "pi3")
THREADS = "1"


def keep_profiles(store: NodeStore) -> None:
    """Write profiles of the small models, as if they had been measured: that takes half a minute."""

    def timed(layer: LayerResult) -> LayerResult:
        steps = None if layer.steps is None else replace(layer.steps, row_s=0.001, many_row_s=0.001)
        return replace(layer, measured=replace(layer.measured, time_s=0.001), steps=steps)

    (encoder,) = Job.each(MeasureRequest(model=ModelRequest("vit-digits")))
    decoder = find_decoder("llama-puzzles")
    (text,) = DecoderJob.each(MeasureRequest(model=ModelRequest("llama-puzzles")), decoder)
    for name, size, job in (("vit-digits", 8, encoder), ("llama-puzzles", 1, text)):
        found = job.expected()
        key = profile_key(Profile(ModelPlace(name), size, "float32"), state_facts("x", 1, ""), THREADS)
        save_results(
            store.profile(key),
            replace(found, threads=1, profile_data=tuple(map(timed, found.profile_data))),
        )


class Cluster(Programs):
    """Nodes, and commands that ask them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, {"OMP_NUM_THREADS": THREADS, "HOME": str(directory)})
        key = directory / "cluster.pem"
        key.touch(0o600)
        key.write_text(make_cluster_key())
        self.ports = {name: free_port() for name in NAMES}
        self._commands = 100

    def start(self, name: str) -> None:
        keep_profiles(NodeStore(self.directory / name))
        others = ",".join(f"127.0.0.1:{port}" for port in self.ports.values())
        words = ("node", "--key", "cluster.pem", "--name", name, "--port", self.ports[name])
        self.launch(NAMES.index(name), PIPEEDGE, *words, "--no-mdns", "--directory", name, "--nodes", others)

    def ask(self, *words: object, node: str = "pi1") -> Ended:
        self._commands += 1
        place = f"127.0.0.1:{self.ports[node]}"
        self.launch(self._commands, PIPEEDGE, *words, "--key", "cluster.pem", "--node", place)
        return self.wait(self._commands)[self._commands]

    def state(self) -> dict[str, Any]:
        return json.loads(self.ask("status", "--json").out)

    def until_state(self, happened: Callable[[dict[str, Any]], bool], what: str) -> None:
        for _ in range(600):
            if happened(self.state()):
                return
        raise AssertionError(f"{what}: {self.state()}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as found:
        yield found


def is_here(state: dict[str, Any], name: str) -> bool:
    return any(node["name"] == name and node["here"] for node in state["nodes"])


def test_three_nodes_serve_a_model_and_survive_the_loss_of_one(cluster: Cluster, tmp_path: Path) -> None:
    picture = Image.new("L", (8, 8))
    picture.paste(255, (3, 1, 5, 7))
    picture.save(tmp_path / "digit.png")
    for name in NAMES:
        cluster.start(name)
    cluster.until(lambda: all("waits for work" in cluster.text(n, "out") for n in range(3)), "nodes wait")
    up = cluster.ask("up", "vit-digits", "--serve", free_port())
    assert up.status == 0, up
    assert "3 nodes: pi1, pi2, pi3" in up.out
    assert "vit-digits answers at http://127.0.0.1:" in up.out
    for node in ("pi1", "pi2"):  # pi2 hands the question on
        asked = cluster.ask("ask", "vit-digits", "digit.png", node=node)
        assert asked.out.startswith("1 "), asked
    refused = cluster.ask("ask", "vit-digits", "text", node="pi2")
    assert refused.err == (
        "pipeedge ask: vit-digits takes images: ask it with the file of an image, such as photo.jpg\n"
    )
    second = cluster.ask("up", "vit-digits", node="pi2")
    assert second.status == 2
    assert second.err.startswith("pipeedge up: this node works for vit-digits on pi1 already")

    state = cluster.state()
    assert state["run"]["phase"] == "serving"
    assert set(state["run"]["ranks"].values()) == set(NAMES)
    has_layers = any(
        state["run"]["ranks"][str(stage["rank"])] == "pi3" for stage in state["run"]["service"]["stages"]
    )
    cluster.signal(2, signal.SIGKILL)
    cluster.wait(2)
    cluster.until_state(
        lambda state: (
            not is_here(state, "pi3")
            and any("exited with status" in event["line"] for event in state["run"]["events"])
            and state["run"]["service"]["epoch"]["lost_ranks"] == has_layers
        ),
        "the loss of pi3",
    )
    assert cluster.ask("ask", "vit-digits", "digit.png").out.startswith("1 ")
    cluster.start("pi3")
    cluster.until_state(
        lambda state: any("has joined" in event["line"] for event in state["run"]["events"]), "pi3 is a spare"
    )
    assert cluster.ask("down").status == 0
    state = cluster.state()
    assert state["run"] is None
    up = cluster.ask("up", "llama-puzzles", "--context", "64", "--serve", free_port())
    assert "a context of 64 tokens, up to " in up.out, up
    layers = {stage["rank"]: stage["layers"] for stage in cluster.state()["run"]["service"]["stages"]}
    assert len(layers) > 1  # as the scheduler has planned, for several texts at a time
    asked = cluster.ask("ask", "llama-puzzles", "Sort 5 2 9 1.", node="pi2")
    assert (asked.out, asked.status) == ("1 2 5 9\n", 0), asked
    refused = cluster.ask("ask", "llama-puzzles", "digit.png")
    assert refused.status == 2
    assert refused.err.startswith("pipeedge ask: llama-puzzles generates text: ask it with a text")
    assert cluster.ask("down").status == 0
    cluster.until_state(lambda state: not any(node["works_for"] for node in state["nodes"]), "nobody works")
    removed = cluster.ask("nodes", "remove", "pi3")
    assert removed.status == 0, removed
    assert [node["name"] for node in cluster.state()["nodes"]] == ["pi1", "pi2"]
    for number in range(3):
        os.kill(cluster.pid(number), signal.SIGTERM)
    assert {ended.status for ended in cluster.wait(*range(3)).values()} == {0}
