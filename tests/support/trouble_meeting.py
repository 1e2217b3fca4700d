"""Cases of test_troubleshooting.py: ranks that do not find each other, or disagree."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import psutil
from ports import free_port
from rich.console import Console
from trouble import DIGITS, Cases, Patch, Play, beside, raising, refused, start

from pipeedge.control import hub_address
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.hub_address import HubAddress
from pipeedge.control.liveness import Limits, RankStatus
from pipeedge.control.messages import TO_HUB, Decoder
from pipeedge.plan.facts import disagreements, rank_facts, unlikeness
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run import context
from pipeedge.run.decision import Decider
from pipeedge.transport import interfaces, p2p

CASES = Cases()
says = CASES.says


@says(
    "rank 0 never appeared at … (Connection refused): start rank 0 or read why it ended, and check "
    "--addr and --port"
)
def nobody_listens(patch: Patch) -> str:
    return refused(lambda: HubAddress("127.0.0.1", free_port()).dial(0.05))


@says(
    "rank 0 never appeared at … (timed out): start rank 0 or read why it ended, and check --addr and --port"
)
def nobody_answers(patch: Patch) -> str:
    patch.setattr(hub_address, "dial", raising(TimeoutError("timed out")))
    return refused(lambda: HubAddress("127.0.0.1", 29500).dial(0.05))


@says("ranks 1, 2 of 3 never appeared within 60 s: start each rank, with the same --addr and --port")
def ranks_are_absent(patch: Patch) -> str:
    return Play().hello(0).beat(61, {0: RankStatus()}).said


@says("waiting for ranks 1, 2 of 3 to start")
def ranks_are_awaited(patch: Patch) -> str:
    return Play().hello(0).beat(2.1, {0: RankStatus()}).said


@says("all 3 ranks are here")
def ranks_have_come(patch: Patch) -> str:
    return Play().hello(0).beat(2.1, {0: RankStatus()}).hello(1, 2).said


@says("waiting for rank 0 at … to start", "rank 0 is here")
def rank_0_comes_late(patch: Patch) -> str:
    patch.setattr(hub_address, "_PATIENCE_S", 0.0)
    port, said = free_port(), list[str]()
    with contextlib.ExitStack() as stack:

        def show(line: str, over: bool) -> None:
            said.append(line)
            if not over:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))

        HubAddress("127.0.0.1", port).dial(30.0, show).close()
    return "\n".join(said)


def begins_without_rank_1(left_out: Failure) -> str:
    """Return what rank 0 says when it has decided to begin with itself alone."""
    said: list[str] = []
    line = "0 2 -c tcp -m vit-digits -pt 1,8,9,16"
    asked = parse_runtime(line.split(), Environment()).request
    transports = cast(Any, SimpleNamespace())
    own = context.RankContext(asked, DIGITS, context.Program(Console, said.append), transports)
    told = rank_facts(asked, DIGITS, weights="w", items=3)
    Decider(own, left_out=lambda: {1: left_out}).decide({0: told})
    return said[0]


@says("rank 1 of 2 never appeared within 60 s; the run begins without it, with …")
def a_rank_does_not_come(patch: Patch) -> str:
    return begins_without_rank_1(Failure(FailureKind.ABSENT, "never appeared", 1, "rank 1"))


@says("rank 1 (on pi2) is gone: it was killed or lost its network; the run begins without it, with …")
def a_rank_is_lost_before_the_start(patch: Patch) -> str:
    cause = "it was killed or lost its network"
    return begins_without_rank_1(Failure(FailureKind.GONE, cause, 1, "rank 1 (on pi2)"))


@says("rank 1 has already joined, from pi2: start each rank once")
def a_rank_is_there_twice(patch: Patch) -> str:
    play = Play().hello(1)
    return play.hear(7, "hello", rank=1, world=3, host="pi9").said


@says("rank 1 on pi2 says the world has 2 ranks, rank 0 says 3: start all with the same WORLD")
def worlds_differ(patch: Patch) -> str:
    return Play().hello(1, world=2).said


@says(
    "rank 1 on pi9 says the world has 2 ranks, rank 0 says 3: rank 1 has already joined, from pi2: choose "
    "another --port for another run"
)
def another_run_is_there(patch: Patch) -> str:
    return Play().hello(1).hear(7, "hello", rank=1, world=2, host="pi9").said


@says("rank 5 is outside the world of 3")
def a_rank_too_many(patch: Patch) -> str:
    return Play().hello(5).said


@contextlib.contextmanager
def pi1_is(patch: Patch, port: int) -> Iterator[None]:
    """Redirect the name pi1, at any port, to ``port`` of the loopback interface."""

    def find(*_: object, **wanted: Any) -> list[Any]:
        return [(socket.AF_INET, wanted["type"], 0, "", ("127.0.0.1", port))]

    with patch.context() as within:
        within.setattr(socket, "getaddrinfo", find)
        yield


@says("--port 29500 is in use on pi1: another run may still be there; choose another --port")
def a_port_in_use(patch: Patch) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken, pi1_is(patch, taken.getsockname()[1]):
        return refused(lambda: interfaces.listen("pi1", 29500))


@says("--port 80: not permitted here; choose one above 1023")
def a_port_of_roots(patch: Patch) -> str:
    patch.setattr(socket.socket, "bind", raising(PermissionError(errno.EACCES, "Permission denied")))
    return refused(lambda: interfaces.listen("127.0.0.1", 80))


@says("--addr 10.1.1.1: no route leads there")
def no_route(patch: Patch) -> str:
    patch.setattr(socket.socket, "connect", raising(OSError(errno.ENETUNREACH, "Network is unreachable")))
    return refused(lambda: interfaces.choose_interface(None, "10.1.1.1", 29500))


@says("the interface wlan0, which leads to --addr pi1, is down or unplugged")
def an_interface_is_down(patch: Patch) -> str:
    patch.setattr(psutil, "net_if_addrs", lambda: {"wlan0": [SimpleNamespace(address="127.0.0.1", family=2)]})
    patch.setattr(psutil, "net_if_stats", lambda: {"wlan0": SimpleNamespace(isup=False)})
    with pi1_is(patch, 9):
        return refused(lambda: interfaces.choose_interface(None, "pi1", 29500))


@says("received data is not a message of this program: is another program on this port?")
def another_program(patch: Patch) -> str:
    return refused(lambda: Decoder(TO_HUB).feed(b"GET / HTTP/1.1\r\n\r\n"))


@says("the schedule gives it no stage, so it has nothing to do")
def a_rank_without_a_stage(patch: Patch) -> str:
    patch.setattr(sys.stderr, "isatty", lambda: True)
    with beside(f"0 2 -m vit-digits -b 8 -pt 1,16 --port {(port := free_port())}"):
        return start(f"1 2 -m vit-digits -b 8 -pt 1,16 --port {port}")


@says(
    "the links of rank 0 to 1 over … do not open: is there a firewall between them, or another interface to "
    "choose with -s?"
)
def links_do_not_open(patch: Patch) -> str:
    ended = threading.Event()
    within = {10.0: Limits(silence_s=10.0, stall_s=0.05)}
    patch.setattr(p2p, "connect_store", lambda *_, **__: ended.wait(30))
    patch.setattr(context, "Limits", SimpleNamespace(within=lambda s: within.get(s, Limits.within(s))))
    with beside(f"1 2 -m vit-digits --port {(port := free_port())}"):
        said = start(f"0 2 -m vit-digits --port {port} --timeout 10")
        ended.set()
    return said


@says("ranks 0 and 1 disagree on …", "… the weights (-M) … copy the same file to all")
def weights_differ(patch: Patch) -> str:
    return "\n".join(disagreements({0: {"weights": "1a2b"}, 1: {"weights": "3c4d"}}))


@says("rank 2 does not state the version of PipeEdge: install the same version of PipeEdge on all")
def facts_are_missing(patch: Patch) -> str:
    return "\n".join(disagreements({0: {"version": "1.0"}, 1: {"version": "1.0"}, 2: {}}))


@says(
    "the ranks are not alike (torch 2.13.0 on x86_64: rank 0; torch 2.10.0 on aarch64: rank 1): the last "
    "bits of results depend on which computes which layer"
)
def ranks_are_unlike(patch: Patch) -> str:
    facts = [("2.13.0", "x86_64"), ("2.10.0", "aarch64")]
    return (
        unlikeness({i: {"torch": version, "processor": kind} for i, (version, kind) in enumerate(facts)})
        or ""
    )


@says("rank 1 has torch 2.8.0: install 2.9 or newer")
def torch_is_too_old(patch: Patch) -> str:
    return "\n".join(disagreements({0: {"torch": "2.13.0"}, 1: {"torch": "2.8.0"}}))


@says("rank 1 was given --output out.csv, rank 0 was not; rank 0 is the data rank: give it to rank 0")
def an_option_on_the_wrong_rank(patch: Patch) -> str:
    facts = [
        rank_facts(
            parse_runtime(line.split(), Environment()).request,
            DIGITS,
            weights=None,
            items=None,
        )
        for line in ("0 2 -m vit-digits", "1 2 -m vit-digits --output out.csv")
    ]
    return "\n".join(disagreements(dict(enumerate(facts))))
