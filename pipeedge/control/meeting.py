"""How the ranks of a run come together, and how one that fails tells the others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from pipeedge.base.errors import EXIT_PEER, PeerError, PeerFailedError, PipeEdgeError, one_line
from pipeedge.control.hub import Hub
from pipeedge.control.member import Member
from pipeedge.request.config import WorldRequest
from pipeedge.transport.frame import FrameError
from pipeedge.transport.interfaces import listen
from pipeedge.transport.rendezvous import agent_store

__all__ = ["meet", "telling", "telling_absent"]


@contextmanager
def telling(member: Member) -> Iterator[None]:
    """Whatever fails here is told to the others; the loss of a peer is traced to its cause."""
    try:
        yield
    except BaseException as error:
        if error is member.error:
            raise  # they know: it is from them
        if isinstance(error, PeerError) and error.peer is not None and not isinstance(error, FrameError):
            raise member.explain(error.peer, error) from error
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        member.failed("it was interrupted" if interrupted else one_line(error))
        raise


@contextmanager
def telling_absent(world: WorldRequest) -> Iterator[None]:
    """Tell ranks that connect within a moment why rank 0 has failed, before it has met them."""
    try:
        yield
    except PipeEdgeError as error:
        if world.rank == 0 and world.size > 1 and not world.agent_store:
            with (
                suppress(PipeEdgeError),
                Hub(listen(world.addr, world.port), world_size=world.size, timeout_s=world.timeout_s) as hub,
            ):
                hub.refuse(f"rank 0 failed: {one_line(error)}", EXIT_PEER)
        raise


def meet(world: WorldRequest, stack: ExitStack) -> tuple[Hub | None, socket.socket]:
    """Open the hub on rank 0, and connect to it on every rank."""
    addr, port = world.addr, world.port
    agent: Any = None
    if world.agent_store:
        # torchrun's agent listens at --port already; rank 0 announces its own port through it.
        agent = agent_store(addr, port, world.agent_run, timeout_s=world.timeout_s)
        port = 0
    hub = None
    if world.size == 1:
        port = 0  # nobody else connects: any free port will do, so that several single ranks run at once
    if world.rank == 0:
        listener = listen(addr, port)
        hub = stack.enter_context(Hub(listener, world_size=world.size, timeout_s=world.timeout_s))
        port = listener.getsockname()[1]
        if agent is not None:
            agent.set("hub", str(port))
    elif agent is not None:
        try:
            port = int(agent.get("hub"))
        except RuntimeError as error:
            raise PeerFailedError(f"rank 0 did not announce itself through torchrun: {error}") from error
    return hub, Member.dial(addr, port, timeout_s=world.timeout_s)
