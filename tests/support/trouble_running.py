"""Cases of test_troubleshooting.py: runs that stop or go on."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from msgspec import Raw
from ports import free_port
from rich.console import Console
from trouble import KEY, MIB, OTHER_KEY, Cases, Patch, Play, raising, refused
from wire_messages import connected

from pipeedge.base.errors import PipeEdgeError, one_line
from pipeedge.base.files import write_secret
from pipeedge.base.payload import Payload
from pipeedge.base.schedule import Schedule
from pipeedge.control.announcement import Announcement
from pipeedge.control.hub_address import explain_refusal
from pipeedge.control.hub_client import Callbacks, HubClient
from pipeedge.control.liveness import Loading, RankStatus, beat_interval_s
from pipeedge.control.messages import FROM_HUB, Decoder, Hello, Pace, Planned, Verdict, WorkByRank, frame
from pipeedge.control.plans import Wanted
from pipeedge.control.rules import HubState
from pipeedge.control.wire import ClearEnd, SealedEnd, WireEnd
from pipeedge.plan.after_loss import Survivor, smallest_change
from pipeedge.plan.change_detection import ChangeDetector
from pipeedge.plan.conditions import Conditions
from pipeedge.plan.live_choice import Proposal, moved_words
from pipeedge.plan.planning import Plan
from pipeedge.plan.schedule_choice import PlannedSchedule
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run import pipeline
from pipeedge.run.activity import Activity
from pipeedge.run.live_planning import describe_proposal
from pipeedge.run.outcome import explain_missing_figures
from pipeedge.run.replanning import describe
from pipeedge.run.stage import Encode
from pipeedge.run.worker import Incoming, Outgoing, SendingEnd, StageLoop, StageSteps
from pipeedge.train import session as training
from pipeedge.transport.base import Packet
from pipeedge.transport.loopback import LocalLink
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key
from pipeedge.transport.sealed import Sealing

CASES = Cases()
says = CASES.says


@says("rank 2 (stage 2, …) is gone: it was killed or lost its network")
def a_connection_closes(patch: Patch) -> str:
    play = Play().started()
    play.note(play.state.closed(2, 1.0))
    return play.said


class GoesOn(Play):
    """A run that goes on after failures, with rank 0 as the data rank."""

    def started(self) -> GoesOn:
        self.hello(*range(self.world))
        for rank in range(self.world):
            self.hear(rank, "facts", facts={})
        everyone = tuple(range(self.world))
        plan = Announcement(Raw(b"{}"), everyone, self.names, data_rank=0, goes_on=True)
        self.note(self.state.plan(plan, 0.0))
        return self.prepared(1, *range(self.world))

    @property
    def names(self) -> Mapping[int, str]:
        return {rank: f"stage {rank}" for rank in range(self.world)}

    def prepared(self, epoch: int, *ranks: int) -> GoesOn:
        for rank in ranks:
            self.hear(rank, "ready", epoch=epoch)
        return self

    def goes_on_with(self, epoch: int, *ranks: int, line: str = "") -> GoesOn:
        """Stop the epoch before ``epoch`` on all that are left, and prepare the next one."""
        for rank in ranks:
            self.hear(rank, "stopped", epoch=epoch - 1, **({"written": 0} if rank == 0 else {}))
        task = self.state.task()
        assert isinstance(task, Wanted)
        line = line or f"{task.cause}; the run goes on"
        self.note(
            self.state.plan_again(task.members, Announcement(Raw(b"{}"), ranks, self.names, line=line), 0.0)
        )
        return self.prepared(epoch, *ranks)


@says("rank 2 (stage 2, …) is gone: it was killed or lost its network; the run goes on with …")
def a_run_goes_on_without_a_rank(patch: Patch) -> str:
    now = Plan(
        Schedule.from_partition([1, 4, 5, 16]),
        data_rank=0,
        items=1,
        microbatch_size=1,
        max_tokens=None,
        prediction=None,
        cause="rank 2 (stage 2, layers 9-16) is gone: it was killed or lost its network",
    )
    before = dataclasses.replace(now, schedule=Schedule.from_partition([1, 4, 5, 8, 9, 16]))
    return describe(before, now)


@says("microbatch 7 cannot be computed, as it failed on rank 1 (…) and rank 2 (…): …")
def a_microbatch_fails_on_rank_after_rank(patch: Patch) -> str:
    play = GoesOn().started().hear(1, "failed", line="RuntimeError: boom", microbatch=7)
    play.goes_on_with(2, 0, 2)
    return play.hear(2, "failed", line="RuntimeError: boom", microbatch=7).said


@says("rank 1 (on pi2) has joined, and is there to take the place of another")
def a_rank_comes_back(patch: Patch) -> str:
    play = GoesOn().started()
    play.note(play.state.closed(1, 1.0))
    play.hear(7, "hello", rank=1, world=3, host="pi2").hear(7, "facts", facts={})
    play.note(play.state.judge_newcomer(7, None, 1.0))
    return play.said


@says(
    "pi2 takes 2 times as long as planned; with layers 1-12 on rank 0, layers 13-16 on rank 1, "
    "4.5 items/s instead of 3 are predicted (+50%)…"
)
def a_host_is_slower_than_planned(patch: Patch) -> str:
    moved: ChangeDetector[tuple[str, ...]] = ChangeDetector()
    for _ in range(3):
        moved.add({("pi2",): 2.0})
    proposal = Proposal((), 0.5, moved_words(moved.moved()), 3.0, Conditions())
    planned = PlannedSchedule(Schedule.from_partition([1, 12, 13, 16]))
    return f"{describe_proposal(proposal, planned)}; the run keeps its schedule"


@says("rank 2 (stage 2, …) has not stopped within … what it computes for a failed plan")
def a_rank_does_not_stop(patch: Patch) -> str:
    play = GoesOn().started().hear(1, "failed", line="RuntimeError: boom", microbatch=7)
    play.hear(0, "stopped", epoch=1, written=0)
    for now in range(1, 200):
        play.beat(now, {0: RankStatus(), 2: RankStatus(busy=("computing", now))})
    return play.said


@says("layer 2 needs 2 MB, and no rank that is left has more than 1 MB (rank 0)")
def a_layer_fits_on_no_rank_that_is_left(patch: Patch) -> str:
    schedule = Schedule.from_partition([1, 1, 2, 2])
    return str(smallest_change(schedule, [Survivor(0, MIB)], [MIB, 2 * MIB]))


@says("the layers need 3 MB, and the ranks that are left have 2 MB, which suffices up to layer 2")
def the_ranks_that_are_left_have_too_little_memory(patch: Patch) -> str:
    schedule = Schedule.from_partition([1, 1, 2, 3])
    return str(smallest_change(schedule, [Survivor(0, 2 * MIB)], [MIB] * 3))


@says("rank 1 (stage 1, …) is gone: it was killed or lost its network; the results are complete")
def a_connection_closes_at_the_end(patch: Patch) -> str:
    play = Play().started().hear(0, "complete")
    play.note(play.state.closed(1, 1.0))
    return play.said


@says(
    "rank 1 left without saying how the run went: the results are complete, but its figures are missing "
    "from the table and the report"
)
def a_rank_leaves_at_the_end(patch: Patch) -> str:
    return explain_missing_figures([1])


@says(
    "rank 2 (stage 2, …) has been silent for 57.0 s: its process is suspended or its network is disconnected"
)
def a_rank_is_silent(patch: Patch) -> str:
    return Play().started().beat(57.01, {0: RankStatus(), 1: RankStatus()}).said


@says(
    "rank 0 (stage 0, …) has not heard from any of the 2 other ranks for 57.0 s: its own network is "
    "disconnected, or that of all others"
)
def all_ranks_are_silent(patch: Patch) -> str:
    return Play().started().beat(57.01, {0: RankStatus()}).said


@says(
    "rank 2 (stage 2, …) has waited 58.0 s for microbatch 7 from rank 1 (stage 1, …): the link between them "
    "is dead, or so slow that it needs a longer --timeout"
)
def a_link_is_dead(patch: Patch) -> str:
    statuses = {
        0: RankStatus(sent={1: 9}),
        1: RankStatus(sent={2: 9}, received={0: 9}),
        2: RankStatus(received={1: 7}, awaiting=frozenset({1})),
    }
    return Play().started().beat(0.0, statuses).beat(58.01, statuses).said


@says("… computing microbatch 0 … for 58 s; still alive")
def a_stage_is_slow(patch: Patch) -> str:
    statuses = {rank: RankStatus(busy=("computing microbatch 0", 58.1)) for rank in range(3)}
    return Play().started().beat(0.0, statuses).beat(58.01, statuses).said


def load_on_rank_2(loaded_mb: Mapping[float, int]) -> str:
    """Return what is said while rank 2 has loaded some of its 330 MB by each of these times."""
    play = Play().planned()
    for now, done in loaded_mb.items():
        load = Loading("loading layers 9-16", done * 1_000_000, 330_000_000)
        play.beat(now, {0: RankStatus(), 1: RankStatus(), 2: RankStatus(loading=load)})
    return play.said


@says(
    "rank 2 (stage 2, …) has been loading layers 9-16 for 58 s (40 of 330 MB), the last 58 s without a byte: "
    "check its disk, or use a longer --timeout",
)
def a_disk_is_dead(patch: Patch) -> str:
    return load_on_rank_2({0.0: 40, 58.1: 40})


@says(
    "rank 2 (stage 2, …) has been loading layers 9-16 for 388 s (200 of 330 MB), which is too slow to wait "
    "for: copy its weights to a faster disk"
)
def a_disk_is_too_slow(patch: Patch) -> str:
    return load_on_rank_2({**{50.0 * part: 25 * part for part in range(8)}, 388.1: 200})


@says("… has been loading layers 9-16 for 29 s (40 of 330 MB); still alive")
def a_disk_is_slow(patch: Patch) -> str:
    return load_on_rank_2({0.0: 0, 29.1: 40})


@says("rank 1 (stage 1, …) failed: …")
def a_rank_fails(patch: Patch) -> str:
    return Play().started().hear(1, "failed", line="no memory").said


@says("rank 1 (stage 1, …) sent a malformed 'beat'; do all run the same version?")
def a_beat_is_malformed(patch: Patch) -> str:
    return Play().started().hear(1, "beat", status={"busy": 7}).said


@says("… internal error in its hub: …")
def the_hub_fails(patch: Patch) -> str:
    play = Play().started()
    play.note(play.state.failed("MemoryError: no more", 1.0))
    return play.said


@says("internal error in the control connection of rank 1: …")
def a_control_thread_dies(patch: Patch) -> str:
    ours, theirs = socket.socketpair()
    callbacks = Callbacks(status=raising(MemoryError("no more")))
    clock = itertools.count(step=0.9 * beat_interval_s(60.0))  # soon it is time for a heartbeat
    with (
        theirs,
        HubClient(
            connected(ours), rank=1, timeout_s=60.0, callbacks=callbacks, clock=lambda: next(clock)
        ) as member,
    ):
        return refused(lambda: member.wait(Planned))


@says(
    "a process at 10.0.0.9 connected and left before it introduced itself; ranks still missing: 1, 2",
)
def a_rank_dies_before_its_hello(patch: Patch) -> str:
    state = HubState(world_size=3, timeout_s=60.0, now=0.0)
    state.received(0, Hello(0, 3, "pi0"), 0.0)
    ((_, notice),) = state.closed(1, 1.0, left="10.0.0.9")
    return str(notice.line)


def refusal_by(hub: WireEnd, member: WireEnd) -> str:
    """Return what a member says of a hub, after each has received what the other one sends."""
    hub.receive(member.outgoing())
    member.receive(hub.outgoing())
    return str(explain_refusal("rank 0 at pi1:29500", member.failure))


def sealed(key: str, *, accepts: bool) -> SealedEnd:
    membership = Membership.from_text(key, "--key k.pem")
    context = membership.server_context() if accepts else membership.client_context()
    return SealedEnd(context if accepts else Sealing(context, accepts=False))


@says("rank 0 at … has another key: give every rank the same --key")
def rank_0_has_another_key(patch: Patch) -> str:
    return refusal_by(sealed(KEY, accepts=True), sealed(OTHER_KEY, accepts=False))


@says("rank 0 at … has no key: give every rank the same --key")
def rank_0_has_no_key(patch: Patch) -> str:
    return refusal_by(ClearEnd(accepts=True), sealed(KEY, accepts=False))


@says("rank 0 has a key, and this rank has none: give every rank the same --key")
def only_rank_0_has_a_key(patch: Patch) -> str:
    hub = sealed(KEY, accepts=True)
    hub.receive(frame(Hello(1, 2, "pi1")))
    (verdict,) = Decoder(FROM_HUB).feed(hub.outgoing())
    assert isinstance(verdict, Verdict)
    return verdict.failure.line


@says("rank 0 at … does not speak TLS 1.3: is it PipeEdge? Check --addr and --port")
def rank_0_is_a_foreign_service(patch: Patch) -> str:
    member = sealed(KEY, accepts=False)
    member.receive(b"SSH-2.0-OpenSSH_9.2\r\n")
    return str(explain_refusal("rank 0 at pi1:29500", member.failure))


@says("rank 0 at … is another program: is it PipeEdge? Check --addr and --port")
def rank_0_is_a_web_server(patch: Patch) -> str:
    context = Membership.from_text(OTHER_KEY, "a web server").server_context()
    context.set_alpn_protocols(["http/1.1"])
    return refusal_by(SealedEnd(context), sealed(KEY, accepts=False))


@says("a process at 10.0.0.9 has another key; ranks still missing: 1, 2")
def a_process_has_another_key(patch: Patch) -> str:
    state = HubState(world_size=3, timeout_s=60.0, now=0.0)
    state.received(0, Hello(0, 3, "pi0"), 0.0)
    ((_, notice),) = state.refused("10.0.0.9", "has another key", 1.0)
    return str(notice.line)


@says(
    "ranks 1, 2 of 3 never appeared within 60 s (a process at 10.0.0.9 has another key): give every rank the "
    "same --key"
)
def a_refused_rank_does_not_come_again(patch: Patch) -> str:
    play = Play().hello(0)
    play.state.refused("10.0.0.9", "has another key", 1.0)
    return play.beat(61, {0: RankStatus()}).said


@says("FILE open.pem: exists already, and is not replaced: name another")
def a_key_exists(patch: Patch) -> str:
    return refused(lambda: write_secret(Path("open.pem"), KEY, "FILE"))


@says("making a key needs the package cryptography: …")
def keys_cannot_be_made(patch: Patch) -> str:
    patch.setitem(sys.modules, "cryptography", None)
    return refused(make_key)


@says(
    "links and control are open: whoever is on this network can take part in the run, and read and change "
    "what is sent; …"
)
def the_run_has_no_key(patch: Patch) -> str:
    patch.setattr(pipeline, "is_loopback", lambda addr: False)
    said: list[str] = []
    line = f"0 2 -m vit-digits -pt 1,8,9,16 --port {free_port()} --timeout 0.1"
    with pytest.raises(PipeEdgeError):  # rank 1 does not come
        pipeline.run(parse_runtime(line.split(), Environment()).request, Console, said.append)
    return said[0]


@says("--key protects the control connection alone: …")
def a_training_has_a_key(patch: Patch) -> str:
    return training.describe_openness(Membership.from_text(KEY, "--key k.pem"))


@says("too many open files: raise the limit of open files, for example with: ulimit -n 1024")
def a_process_may_open_no_more_files(patch: Patch) -> str:
    return one_line(OSError(errno.EMFILE, "Too many open files"))


@says(
    "… was not let in, as rank 0 has too many open files: raise the limit of open files, for example with: "
    "ulimit -n 1024; ranks still missing: 1, 2"
)
def rank_0_may_open_no_more_files(patch: Patch) -> str:
    play = Play().hello(0)
    play.note(play.state.shut_out(1.0))
    return play.said


@says("the display of the run has failed: …")
def a_display_fails(patch: Patch) -> str:
    said: list[str] = []
    ours, theirs = socket.socketpair()
    show = raising(ValueError("no such column"))
    callbacks = Callbacks(notify=said.append, record_stage_work=show)
    with theirs, HubClient(connected(ours), rank=0, timeout_s=1.0, callbacks=callbacks) as member:
        member._handle(WorkByRank({}))
    return said[0]


@says("rank 0 is gone: it was killed or lost its network")
def the_hub_is_gone(patch: Patch) -> str:
    ours, theirs = socket.socketpair()
    theirs.sendall(frame(Pace()))
    theirs.close()
    with HubClient(connected(ours), rank=1, timeout_s=1.0) as member:
        return refused(lambda: member.wait(Planned))


@says("microbatch 3 could not be computed: …")
def computing_fails(patch: Patch) -> str:
    link = LocalLink()
    link.post(Packet(3, 1, (torch.zeros(1),)))
    activity = Activity()
    loop = StageLoop(
        StageSteps(raising(RuntimeError("no memory"))),
        Incoming(link, None, activity),
        Outgoing(SendingEnd(LocalLink()), activity),
        activity,
    )
    return refused(loop.run)


@says("microbatch 3: stage 1 on rank 1 computed values that 8 bits cannot represent")
def values_are_not_finite(patch: Patch) -> str:
    encode_packet = Encode(lambda number, items: 8, "none", 1, stage=1, rank=1)
    payload: Payload = (torch.full((1, 4), float("nan")),)
    return refused(lambda: encode_packet(Packet(3, 1, payload)))
