"""Test measurements of bandwidth, with both ends on this machine."""

from __future__ import annotations

import functools
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pipeedge.base.errors import DeadlineError, PeerFailedError, RequestError
from pipeedge.base.payload import TensorSpec
from pipeedge.decoding.pages import pages_of
from pipeedge.models import find_model
from pipeedge.models.decoder import find_decoder
from pipeedge.models.layers.decoder import PAGE
from pipeedge.models.step_rows import StepBounds
from pipeedge.plan.specs import TransportHandling
from pipeedge.profile import network, rehearsal, transport_costs
from pipeedge.profile.data_work import DataRankRequest, DataWork
from pipeedge.profile.handling import Handling, measure_handling
from pipeedge.profile.network import measure_link, parse_place
from pipeedge.profile.rehearsal import (
    Rehearsal,
    StepLinks,
    StepsAtWork,
    StepsRehearsal,
    rehearse_data_rank,
    rehearse_in_turn,
    rehearse_links,
    rehearse_steps,
    step_handling,
)
from pipeedge.profile.text_work import TextRank
from pipeedge.profile.transport_costs import measure_transports
from pipeedge.request.config import TRANSPORTS
from pipeedge.transport.base import Packet


@contextmanager
def serving(clients: int = 1) -> Iterator[tuple[int, list[str]]]:
    """Serve ``clients``; yield the port and the server's line for each of them."""
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(clients):
                connection, _ = listener.accept()
                with connection:
                    said.append(network._serve(connection))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], said
        thread.join(30)
        assert not thread.is_alive()


def test_both_directions_and_the_round_trip_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "ENOUGH_S", 0.02)
    with serving() as (port, said):
        found = measure_link("127.0.0.1", port)
    assert found.bw_bytes_per_s == min(found.out_bytes_per_s, found.in_bytes_per_s)
    assert found.bw_bytes_per_s > 0
    assert found.round_trip_s > 0
    assert "measured" in said[0]
    assert "Mbps" in str(found)


def test_a_slow_link_is_found_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances with every byte, and determines the measured bandwidth."""
    monkeypatch.setattr(network, "ENOUGH_S", 0.02)
    moved = 0
    send, receive = network._fill, network._discard

    def counted(original):  # type: ignore[no-untyped-def]
        def wrapped(connection, amount, *more, **options):  # type: ignore[no-untyped-def]
            nonlocal moved
            if threading.current_thread() is threading.main_thread():
                moved += amount
            return original(connection, amount, *more, **options)

        return wrapped

    monkeypatch.setattr(network, "_fill", counted(send))
    monkeypatch.setattr(network, "_discard", counted(receive))
    with serving() as (port, _):
        found = measure_link("127.0.0.1", port, clock=lambda: moved / 12.5e6)
    assert found.out_bytes_per_s == pytest.approx(12.5e6)
    assert found.in_bytes_per_s == pytest.approx(12.5e6)


def test_an_absent_server_gets_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerFailedError, match=r"profiler.py --serve-link"):
        measure_link("127.0.0.1", port)
    with pytest.raises(RequestError, match="cannot resolve"):
        measure_link("no-such-host.invalid", 1)


def test_a_silent_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "IDLE_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(DeadlineError, match=r"within 0\.2 s"),
    ):
        measure_link("127.0.0.1", listener.getsockname()[1])


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "is not a profiler of this version"),
        (network._REQUEST.pack(network._MAGIC, 1, 1 << 60), "is not a profiler of this version"),
        (network._REQUEST.pack(network._MAGIC, 9, 1), "is not a profiler of this version"),
        (network._MAGIC, "disconnected"),
        (network._REQUEST.pack(network._MAGIC, 1, 1000) + b"x", "disconnected"),
        (b"", "measured, 0 MB"),
    ],
)
def test_other_program_is_refused_and_next_profiler_is_served(
    request_: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "ENOUGH_S", 0.01)
    with serving(clients=2) as (port, heard):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(10)
            try:
                stranger.sendall(request_)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
            except OSError:  # it was shown the door
                pass
        measure_link("127.0.0.1", port)
    assert said in heard[0]
    assert "measured" in heard[1]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("pi1", ("pi1", network.DEFAULT_PORT)),
        ("10.0.0.7:99", ("10.0.0.7", 99)),
        ("[fe80::1]:99", ("fe80::1", 99)),
        ("fe80::1", ("fe80::1", network.DEFAULT_PORT)),
        ("", ("", network.DEFAULT_PORT)),
    ],
)
def test_places_are_read(text: str, place: tuple[str, int]) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize("text", ["pi1:", "pi1:0", "pi1:99999", "pi1:x", "[fe80::1]:x"])
def test_an_invalid_port_is_refused(text: str) -> None:
    if text == "pi1:":
        assert parse_place(text) == ("pi1", network.DEFAULT_PORT)
    else:
        with pytest.raises(RequestError, match="is not a port; use 1 to 65535"):
            parse_place(text)


def test_handling_a_payload_takes_its_own_time() -> None:
    ticks = itertools.count()  # a clock by which everything takes one second
    specs = (TensorSpec((8, 16), torch.float32), TensorSpec((8,), torch.float32))
    found = measure_handling(specs, torch.device("cpu"), clock=lambda: next(ticks), stretch=3.0)
    assert found == Handling(receive_s=3, send_s=3)


@pytest.mark.parametrize("whole_process", [False, True])
def test_a_stage_at_work_shows_what_its_parts_do_not(
    whole_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stage takes no time by itself, so all that its threads take is overhead, handling or data work.
    monkeypatch.setattr(rehearsal, "ROUNDS", 1)
    model = find_model("vit-digits")
    rank = DataRankRequest(model, 2)
    outputs = tuple(torch.rand(spec.shape) for spec in rank.output_specs)
    payload = tuple(torch.ones(spec.shape, dtype=spec.dtype) for spec in rank.input_specs)
    numbers = []

    def compute(packet: Packet) -> Packet:
        numbers.append(packet.number)
        assert all(torch.equal(came, sent) for came, sent in zip(packet.payload, payload, strict=True))
        packet.lease.release()
        return Packet(packet.number, packet.items, outputs)

    stage = Rehearsal(compute, payload, 0.0, whole_process, stretch=0.005)
    least = DataWork(feed_s=1.0, collect_s=0.0)
    work = rehearse_data_rank(stage, outputs, rank.open, least)
    assert numbers == list(range(stage.microbatches))
    assert work.overhead_s > 0
    assert work.data_work.feed_s == 1.0
    assert work.data_work.collect_s > 0

    costs = TransportHandling(1.0, 0.0, 3.0, 0.0)
    found = rehearse_links(stage, 0.0, Handling(0.0, 0.0), {"tcp": costs, "rpc": costs})
    assert found["rpc"] is costs  # a process has one end only
    assert 0 < found["tcp"].receive_s < 1
    assert found["tcp"].send_s == pytest.approx(3 * found["tcp"].receive_s)
    # What is known already is not counted again.
    known = rehearse_links(stage, 1.0, Handling(0.0, 0.0), {"tcp": costs})
    assert (known["tcp"].receive_s, known["tcp"].send_s) == (0, 0)


def test_what_a_data_rank_does_between_two_steps_is_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the head and the stage move: the head takes 2 s, and 1 s for each row."""
    model, now = find_decoder("llama-puzzles"), [0.0]
    ends, bounds = model.ends(), StepBounds(64, 16, 8, 8 * pages_of(64, PAGE), 0)
    rank, rows = TextRank(model, ends, torch.float32, bounds), []
    score = ends.score

    def slow(hidden: torch.Tensor) -> torch.Tensor:
        now[0] += 2 + len(hidden)
        return score(hidden)

    def compute(packet: Packet) -> tuple[Packet, float]:
        rows.append(packet.items)
        now[0] += 100
        return Packet(packet.number, packet.items, packet.payload[:1], packet.lease), 0.25

    monkeypatch.setattr(ends, "score", slow)
    found = {}
    for texts in (1, 8):
        rows.clear()
        work = rehearse_steps(compute, functools.partial(rank.open, texts, 5), lambda: now[0])
        assert rows == 5 * [texts]
        assert work == StepsAtWork(0.25, 2 + texts)
        found[texts] = work.data_s
    # Of what is known of the whole, the head's own part is not counted twice.
    besides = {texts: seconds + 0.5 + 0.125 * texts for texts, seconds in found.items()}
    costs = rank.costs(besides, lambda: now[0], stretch=2.0)
    head = [max(costs.fixed_s, costs.start_s + rows * costs.row_s) for rows in (1, 8)]
    assert head == pytest.approx([6, 20])
    assert (costs.feed_s, costs.feed_row_s) == pytest.approx((1.0, 0.25))


def test_what_steps_take_over_links_is_what_links_cost() -> None:
    """By a clock that only the layers move."""
    model, now = find_decoder("llama-puzzles"), [0.0]
    ends, bounds = model.ends(), StepBounds(64, 16, 8, 8 * pages_of(64, PAGE), 0)
    rank = TextRank(model, ends, torch.float32, bounds)
    there, back = (model.most_specs(cut, bounds, torch.float32) for cut in (0, model.n_layers))
    steps: list[int] = []

    def compute(packet: Packet) -> tuple[Packet, float]:
        steps.append(packet.items)
        hidden = packet.payload[0].clone()
        packet.lease.release()
        now[0] += 1
        return Packet(packet.number, packet.items, (hidden,)), 0.25

    def rehearse(transport: str | None) -> StepsAtWork:
        links = None if transport is None else StepLinks(transport, there, back)
        return rehearse_steps(compute, functools.partial(rank.open, 2, 5), lambda: now[0], links)

    assert rehearse("tcp") == rehearse(None) == StepsAtWork(0.25, 0.0)
    assert steps == 10 * [2]


def test_what_links_cost_is_found_in_turns() -> None:
    """A machine that becomes slower, as most do, and forbids one of the transports."""
    known = {name: TransportHandling(0.1, 1e-9, 0.3, 2e-9) for name in ("tcp", "p2p", "rpc")}
    local, over = [StepsRehearsal(1), StepsRehearsal(8)], StepsRehearsal.over(1, known)
    turns: list[StepsRehearsal] = []

    def rehearse(kind: StepsRehearsal) -> StepsAtWork:
        turns.append(kind)
        if kind.transport == "p2p":
            raise PeerFailedError("no loopback interface")
        slow = 100.0 * turns.count(local[0])
        return StepsAtWork(
            slow + (0.25 if kind.transport is None else 0.5), slow + 1 + len(kind.transport or "")
        )

    rounds = rehearse_in_turn(rehearse, local, over)
    assert turns == [*local, *over, *2 * [*local, StepsRehearsal(1, "tcp")]]
    found = step_handling(rounds, Handling(0.125, 0.125), known, stretch=2.0)
    assert (found["p2p"], found["rpc"]) == (known["p2p"], known["rpc"])
    # Two links take three seconds by the clock, six of elapsed time. What frames take is known already,
    # and the stage has waited.
    assert (found["tcp"].receive_s, found["tcp"].send_s) == pytest.approx((2.75 / 4 + 0.5, 3 * 2.75 / 4))
    assert (found["tcp"].receive_s_per_byte, found["tcp"].send_s_per_byte) == (1e-9, 2e-9)


def test_texts_of_the_model_are_made_where_its_tokenizer_is(tmp_path: Path) -> None:
    model = find_decoder("llama-puzzles")
    assert model.directory is not None
    bounds = StepBounds(64, 16, 8, 8 * pages_of(64, PAGE), 0)
    rank = TextRank(model, model.ends(), torch.float32, bounds)
    assert rank.texts.decode([5, 6, 7])
    (tmp_path / "config.json").write_text((model.directory / "config.json").read_text())
    bare = TextRank(find_decoder(str(tmp_path)), model.ends(), torch.float32, bounds)
    assert not bare.texts.decode([5, 6, 7])


@pytest.mark.parametrize("texts", [1, 8])
def test_a_model_that_produces_no_numbers_is_not_rehearsed(texts: int) -> None:
    model = find_decoder("llama-puzzles")
    bounds = StepBounds(64, 16, 8, 8 * pages_of(64, PAGE), 0)
    rank = TextRank(model, model.ends(), torch.float32, bounds)

    def compute(packet: Packet) -> tuple[Packet, float]:
        return Packet(packet.number, packet.items, (packet.payload[0] * torch.nan,), packet.lease), 0.0

    with pytest.raises(RequestError, match="the model produced NaN or infinity"):
        rehearse_steps(compute, functools.partial(rank.open, texts, 5), time.perf_counter)


def test_a_transport_that_cannot_be_opened_keeps_its_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PeerFailedError("no loopback interface")

    monkeypatch.setattr(transport_costs, "make_endpoint", fail)
    stage = Rehearsal(lambda packet: packet, (torch.ones(1, 2),), 0.0, whole_process=False)
    costs = {"tcp": TransportHandling(1.0, 0.0, 3.0, 0.0)}
    assert rehearse_links(stage, 0.0, Handling(0.0, 0.0), costs) == costs


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_costs_of_every_transport_are_measured(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_costs, "_SIZES", {1 << 10: 3, 1 << 16: 3})
    alone, whole = (
        measure_transports([transport], whole_process=every, stretch=2.0)[transport]
        for every in (False, True)
    )
    for costs in (alone, whole):
        receiving_s = costs.receive_s + (1 << 16) * costs.receive_s_per_byte
        sending_s = costs.send_s + (1 << 16) * costs.send_s_per_byte
        assert min(receiving_s, sending_s) >= 0
        assert sending_s + receiving_s > 0
