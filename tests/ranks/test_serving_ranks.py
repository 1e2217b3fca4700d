"""Test ``--serve`` on two real ranks: signals, exit statuses, and standard streams."""

from __future__ import annotations

import io
import random
import re
import signal
import threading
from pathlib import Path

import pytest
from http_client import Reply, ask
from PIL import Image
from ports import free_port
from processes import World
from waiting import LIMIT_S, until

from pipeedge.data.defaults import default_digits

ITEM = default_digits().items[0]


def picture() -> bytes:
    stream = io.BytesIO()
    Image.fromarray((ITEM.tensors[0][0] * 15).numpy()).save(stream, "PNG")
    return stream.getvalue()


def damaged_images() -> list[bytes]:
    """Return images about which Pillow, libtiff, and libjpeg below it have something to say."""
    chance, found = random.Random(1), []
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "jpeg"):
        stream = io.BytesIO()
        Image.effect_noise((40, 30), 90).save(stream, "TIFF", compression=compression)
        data = stream.getvalue()
        found += [data[: chance.randrange(9, len(data) // 2)] for _ in range(10)]
    return found


def ready(world: World) -> bool:
    return "answers at" in world.text(0, "err")


@pytest.mark.parametrize("signalled", [(0,), (1, 0)], ids=["the data rank", "all"])
def test_ranks_that_serve_drain_and_end_well(tmp_path: Path, signalled: tuple[int, ...]) -> None:
    port = free_port()
    with World(tmp_path, 2, "-m", "vit-digits", "-c", "tcp", "--serve", port, "--quiet") as world:
        world.start()
        world.until(lambda: ready(world), "it answers")
        reply = ask(port, "POST", "/classify", picture())
        assert (reply.status, reply.json[0]["label"]) == (200, str(ITEM.label))
        for data in damaged_images():
            assert ask(port, "POST", "/classify", data).status == 400
        tensor = {"name": "pixel_values", "datatype": "FP64", "shape": [1, 1, 8, 8], "data": [1e300] * 64}
        ask(port, "POST", "/v2/models/vit-digits/infer", {"inputs": [tensor]})
        for rank in signalled:
            world.signal(rank, signal.SIGTERM)
        ended = world.wait()
    assert [(each.status, each.out) for each in ended.values()] == [(0, ""), (0, "")]
    assert ended[0].err == f"runtime.py: rank 0: answers at http://127.0.0.1:{port}\n"
    assert ended[1].err == ""


def test_a_stop_under_load_resets_no_connection(tmp_path: Path) -> None:
    port, statuses, broken = free_port(), list[int](), list[str]()
    with World(tmp_path, 1, "-m", "vit-digits", "--serve", port, "--quiet") as world:
        world.start()
        world.until(lambda: ready(world), "it answers")

        def load() -> None:
            while True:
                try:
                    statuses.append(ask(port, "POST", "/classify", picture()).status)
                except ConnectionRefusedError:  # the port is closed
                    return
                except OSError as error:
                    broken.append(repr(error))
                    return

        threads = [threading.Thread(target=load) for _ in range(24)]
        for thread in threads:
            thread.start()
        until(lambda: len(statuses) > 100, "the load")
        world.signal(0, signal.SIGTERM)
        for thread in threads:
            thread.join(LIMIT_S)
        ended = world.wait()
    assert broken == []
    assert set(statuses) <= {200, 503}
    assert ended[0].status == 0


def test_a_lost_stage_costs_no_answer_if_the_run_goes_on(tmp_path: Path) -> None:
    port, replies, enough = free_port(), list[Reply](), threading.Event()
    options = ("-m", "vit-digits", "-c", "tcp", "--on-failure", "continue", "--timeout", "20", "--quiet")
    with World(tmp_path, 3, *options, "--serve", port) as world:
        world.start()
        world.until(lambda: ready(world), "it answers")

        def load() -> None:
            while not enough.is_set():
                replies.append(ask(port, "POST", "/classify", picture()))

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        world.signal(2, signal.SIGKILL)
        until(lambda: "the run goes on after" in world.text(0, "err"), "the recovery")
        enough.set()
        for thread in threads:
            thread.join(LIMIT_S)
        status, metrics = ask(port, "GET", "/status").json, ask(port, "GET", "/metrics").body.decode()
        world.signal(0, signal.SIGTERM)
        ended = world.wait(0, 1)
    assert {"pipeedge_epoch 2", "pipeedge_lost_ranks_total 1", "pipeedge_recoveries_total 1"} < set(
        metrics.splitlines()
    )
    *latest, lost, before = (event["line"] for event in status["events"])
    went_on, now = sorted(latest)  # the first result may come before the plan is noted
    assert re.match(r"goes on after \S+ s without a result; \d+ microbatch(es)? computed again", went_on)
    assert lost.startswith("rank 2 (stage 2, ")
    assert (before.count("rank"), now.count("rank")) == (3, 2)
    assert {reply.status for reply in replies} == {200}
    assert {reply.json[0]["label"] for reply in replies} == {str(ITEM.label)}
    assert [each.status for each in ended.values()] == [0, 0]


def test_a_lost_stage_ends_the_service_with_its_status(tmp_path: Path) -> None:
    port = free_port()
    options = ("-m", "vit-digits", "-c", "tcp", "--request-timeout", "1", "--quiet")
    with World(tmp_path, 2, *options, "--serve", port) as world:
        world.start()
        world.until(lambda: ready(world), "it answers")
        assert ask(port, "GET", "/health").status == 200
        world.signal(1, signal.SIGTERM)  # it waits a second for the data rank, which has not been told to end
        ended = world.wait()
    assert {rank: each.status for rank, each in ended.items()} == {0: 4, 1: 130}
    assert "rank 1" in ended[0].err.splitlines()[-1]
