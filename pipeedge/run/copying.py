"""Copy the pages of a stage to a standby, and take such copies, in the background.

    stage ──rows of each step──> CopySender ──link of the epoch──> CopyReceiver ──> pages of a standby
                                 [copy pages]                      [take copies]

Each [ ] is a thread. The sender pauses after each page, for most of the time, so that the network and the
processor have room for steps. A standby loads the weights first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pipeedge.base.crew import Crew
from pipeedge.base.errors import PeerFailedError, WeightsError, one_line
from pipeedge.base.pacing import SlowedWork
from pipeedge.base.payload import TensorSpec
from pipeedge.decoding.page_copies import CopiesOfPages, PagesToCopy
from pipeedge.models.layers.decoder import PAGE, DecoderStage, StepRows
from pipeedge.plan.cache_owners import CopiedPages, Standby
from pipeedge.transport.base import Packet, Receiver, Sender

__all__ = ["CopyReceiver", "CopySender"]

_FRACTION = 0.1
"""Fraction of the time in which pages are copied."""


class CopySender:
    """Copies pages of a stage to a standby.

    Args:
        stage: The stage.
        standby: The standby, which holds some of its layers.
        sender: Sending end of the link to the standby.
        pages: Number of pages.
        specs: Payload of the link, with a page of these layers.
    """

    def __init__(
        self,
        stage: DecoderStage,
        standby: Standby,
        sender: Sender,
        pages: int,
        specs: Sequence[TensorSpec],
    ) -> None:
        self._stage: DecoderStage | None = stage
        self._standby = standby
        self._sender = sender
        self._specs = specs
        self._changed = threading.Condition()
        self._pages = PagesToCopy(pages, PAGE)
        self._ended = False
        self._stopped = False

    def executed(self, rows: Sequence[StepRows], step: int) -> None:
        """Note that the stage has executed a step; called by its thread."""
        with self._changed:
            if self._pages.executed(rows, step):
                self._changed.notify()

    def start(self, crew: Crew) -> None:
        """Begin to copy."""
        crew.on_stop(self._stop)
        crew.start("copy pages", self._run)

    def end(self) -> None:
        """Copy nothing further, as no steps follow."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _stop(self) -> None:
        with self._changed:
            self._ended = self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            self._copy()
        finally:
            self._stage = None  # its weights are not kept for this
        if not self._stopped:
            self._sender.finish()

    def _copy(self) -> None:
        pacing = SlowedWork(_FRACTION, self._pause)
        number = 0
        while (found := self._next()) is not None and self._stage is not None:
            reserved = self._sender.reserve(self._specs)
            head, values = reserved.payload
            head[0], head[1] = found
            self._stage.read_page(found[0], self._standby.layers, values.numpy())
            self._sender.post(Packet(number, 1, reserved.payload, reserved.lease))
            number += 1
            pacing.pause()

    def _next(self) -> tuple[int, int] | None:
        """Wait for the next page to copy; return it and its step, or None once the stage has ended."""
        with self._changed:
            while not self._ended:
                found = self._pages.next()
                if found is not None:
                    return found
                self._changed.wait()
            return None

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended, seconds)


class CopyReceiver:
    """Holds layers of another rank, with copies of their pages.

    Args:
        standby: What this rank stands by for.
        plan: Number of the plan.
        receiver: Receiving end of the link from the rank that has the layers.
        pages: Number of pages.
        warn: Takes a line for the user.
    """

    def __init__(
        self, standby: Standby, plan: int, receiver: Receiver, pages: int, warn: Callable[[str], None]
    ) -> None:
        self._standby = standby
        self._plan = plan
        self._receiver = receiver
        self._pages = pages
        self._copies = CopiesOfPages(pages)
        self._warn = warn
        self._ended = threading.Event()
        self._wake: Callable[[], object] = lambda: None

    def start(
        self,
        crew: Crew,
        load: Callable[[Standby, threading.Event], DecoderStage | None],
        wake: Callable[[], object],
    ) -> None:
        """Begin to take copies.

        Args:
            crew: Crew of the epoch.
            load: Loads the layers; returns None if the event is set before.
            wake: Lets what loads look at the event.
        """
        self._wake = wake
        crew.start("take copies", lambda: self._run(load))

    def end(self) -> None:
        """Load no longer, if that still goes on: all is computed."""
        self._ended.set()
        self._wake()

    def _run(self, load: Callable[[Standby, threading.Event], DecoderStage | None]) -> None:
        stage: DecoderStage | None = None
        try:
            stage = load(self._standby, self._ended)
        except WeightsError as error:  # it is no reason to end what runs
            self._warn(f"--replicate: copies of {self._standby.layers.named} are not kept: {one_line(error)}")
        while (packet := self._receiver.receive()) is not None:
            head, values = packet.payload
            page, step = head.tolist()
            if stage is not None:
                self._store(stage, page, step, values.numpy())
            packet.lease.release()

    def _store(self, stage: DecoderStage, page: int, step: int, values: npt.NDArray[np.uint8]) -> None:
        if not 0 <= page < self._pages or step < 0:
            raise PeerFailedError(f"a copy of page {page} of {self._pages}, as of step {step}")
        self._copies.replaces(page)
        stage.write_page(page, values)
        self._copies.stored(page, step)

    @property
    def copied(self) -> CopiedPages:
        """What was copied."""
        return CopiedPages(self._standby.layers, self._standby.dtype, self._plan, self._copies.until)
