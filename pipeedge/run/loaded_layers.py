"""The layers that a rank has loaded, which the next epoch may need again.

Loading cannot be interrupted, and may take minutes from a slow disk. It therefore has a thread of its own,
so that a rank stops at once when its epoch fails while it loads. The next epoch waits for the thread first:
memory may not suffice for both, and what it loads may be what is needed then. Heartbeats tell of the thread
until it ends, whatever has become of its epoch, so rank 0 knows why the next one waits.

For a change of the plan, both have to fit: what is needed then is loaded beside what computes, by a thread
that works for a quarter of the time, as long as the change is wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pipeedge.base.crew import Crew
from pipeedge.base.errors import WeightsError
from pipeedge.base.pacing import SlowedWork
from pipeedge.base.schedule import StagePlan
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.layers.decoder import DecoderStage
from pipeedge.models.layers.kept_outputs import KeptOutputs
from pipeedge.plan.cache_owners import KeptOutput, Standby
from pipeedge.plan.planning import Plan
from pipeedge.run.context import RankContext
from pipeedge.run.loading import load_ends, load_stage, load_standby

if TYPE_CHECKING:
    from pipeedge.models.decoder_ends import DecoderEnds
    from pipeedge.run.linked_stage import LoadedStage

__all__ = ["LoadedLayers"]

_BESIDE = 0.25
"""Fraction of the time in which layers are loaded beside a stage that computes."""


class _NotNeededError(Exception):
    """What is loaded is of no use any longer."""


class LoadedLayers:
    """Stages that a rank has loaded.

    Args:
        device: Device to compute on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._held: tuple[LoadedStage, ...] = ()
        self._standbys: tuple[LoadedStage, ...] = ()
        """Layers of other ranks, with copies of their caches."""
        self._taken: LoadedStage | None = None
        self._taken_before: LoadedStage | None = None
        self._loaded: LoadedStage | None = None
        self._ends: DecoderEnds | None = None
        self._loading = False
        self._error: BaseException | None = None

    def take(
        self, context: RankContext, plan: Plan, crew: Crew, *, beside: bool = False
    ) -> LoadedStage | None:
        """Return the stage that a plan gives this rank, loaded; None if it gives none.

        Args:
            context: This rank, whatever its epoch.
            plan: The plan.
            crew: Crew of the epoch, which stops the wait.
            beside: Whether what was taken last computes, and goes on.

        Raises:
            WeightsError: The weights cannot be read, or do not fit the model.
        """
        number = plan.schedule.stage_of(context.rank)
        if number is None:
            return None
        stage = plan.schedule.stages[number]
        crew.on_stop(self.wake)
        self._wait(crew)
        with self._changed:
            standbys = () if beside else self._standbys  # copies that still grow serve nobody else
            present = self._taken if beside else None
            self._loaded = None  # for an epoch that was stopped meanwhile
            adopts: list[tuple[LoadedStage, frozenset[int]]] = []
            outputs: dict[KeptOutput, KeptOutputs] = {}
            if isinstance(context.model, DecoderModel):  # it keeps what it has, with its caches
                adopts = list(_sources(plan, stage, self._held, standbys))
                for one in (self._taken_before, *self._held):
                    outputs.update({} if one is None else one.outputs)
                found = adopts[0][0] if len(adopts) == 1 and adopts[0][0].serves(stage) else None
            else:
                found = next((held for held in self._held if held.serves(stage)), None)
            if found is None:
                self._held = () if present is None else (present,)
                self._taken = present  # what is not in use is freed
                self._standbys = self._standbys if beside else ()
            self._standbys = tuple(one for one in self._standbys if one is not found)
        if found is None:
            self._load(context, crew, "load", lambda: self._load_stage(context, plan, crew, present, adopts))
        with self._changed:
            if found is None:
                found, self._loaded = self._loaded, None
            if found is None:
                raise RuntimeError("nothing was loaded, and nothing has failed")
            taken = load_stage(context, plan, self._device, found, outputs=outputs)
            if taken is None:
                raise RuntimeError("a stage was loaded, and there is none")
            self._held = (taken,) if present is None or present is found else (present, taken)
            self._taken_before, self._taken = present, taken
        return taken

    def keep_standbys(self, standbys: Sequence[Standby], *, alone: bool) -> None:
        """Free the layers of other ranks that this one does not stand by for any longer.

        Args:
            standbys: What it stands by for.
            alone: Whether it has no layers of its own, so that those that it had are freed for that, too.
        """
        with self._changed:
            if alone and standbys:
                self._held, self._taken = (), None
            self._standbys = tuple(one for one in self._standbys if any(map(one.stands_by, standbys)))

    def stand_by(
        self,
        context: RankContext,
        plan: Plan,
        standby: Standby,
        crew: Crew,
        ended: threading.Event | None = None,
    ) -> DecoderStage | None:
        """Return layers of another rank, loaded beside what computes; None if nobody needs them any longer.

        Args:
            context: This rank, whatever its epoch.
            plan: The plan.
            standby: What this rank stands by for.
            crew: Crew of the epoch, which stops the wait.
            ended: Set when nobody needs them any longer, before a call of ``wake``.

        Raises:
            WeightsError: The weights cannot be read, or do not fit the model.
        """
        crew.on_stop(self.wake)
        failed: list[WeightsError] = []
        ended = threading.Event() if ended is None else ended

        def load() -> None:
            try:
                self._load_standby(context, plan, standby, crew, ended)
            except WeightsError as error:  # which no other epoch is to fail for
                failed.append(error)
            except _NotNeededError:
                pass

        while True:
            self._wait(crew, ended)
            if ended.is_set():
                return None
            if failed:
                raise failed[0]
            with self._changed:
                found = next((one for one in self._standbys if one.stands_by(standby)), None)
                if found is not None and isinstance(found.shard, DecoderStage):
                    return found.shard
                if self._loading:
                    continue
                self._loading = True
            self._start(context, "load standby", load)

    def _load_standby(
        self, context: RankContext, plan: Plan, standby: Standby, crew: Crew, ended: threading.Event
    ) -> None:
        fraction = 1.0 if plan.schedule.stage_of(context.rank) is None else _BESIDE
        pacing = SlowedWork(fraction, lambda seconds: self._pause(crew, seconds, ended))

        def pause() -> None:
            pacing.pause()
            if ended.is_set():
                raise _NotNeededError

        loaded = load_standby(context, plan, standby, self._device, pause)
        with self._changed:
            self._standbys = (*self._standbys, loaded)

    def take_ends(self, context: RankContext, plan: Plan, crew: Crew) -> DecoderEnds:
        """Return embedding and head of a decoder, loaded for the first plan.

        Args:
            context: This rank, whatever its epoch.
            plan: The plan.
            crew: Crew of the epoch, which stops the wait.

        Raises:
            WeightsError: The weights cannot be read, or do not fit the model.
        """
        crew.on_stop(self.wake)
        self._wait(crew)
        if self._ends is None:
            self._load(context, crew, "load ends", lambda: self._load_ends(context, plan))
        if self._ends is None:
            raise RuntimeError("nothing was loaded, and nothing has failed")
        return self._ends

    def _load_ends(self, context: RankContext, plan: Plan) -> None:
        self._ends = load_ends(context, plan)

    def keep_last(self) -> None:
        """Free all but what was taken last."""
        with self._changed:
            self._standbys = ()
            if self._taken is not None:
                self._held, self._taken_before = (self._taken,), None

    def clear(self) -> None:
        """Free all, as nothing is computed any longer."""
        with self._changed:
            self._held, self._taken, self._taken_before = (), None, None
            self._standbys = ()
            self._ends = None

    def give_back(self) -> None:
        """Free what was taken last beside something else, which is in use still."""
        with self._changed:
            if self._taken_before is not None:
                self._held, self._taken, self._taken_before = (self._taken_before,), self._taken_before, None

    def _load_stage(
        self,
        context: RankContext,
        plan: Plan,
        crew: Crew,
        beside: LoadedStage | None,
        adopts: list[tuple[LoadedStage, frozenset[int]]],
    ) -> None:
        fraction = 1.0 if beside is None else _BESIDE
        pacing = SlowedWork(fraction, lambda seconds: self._pause(crew, seconds))
        loaded = load_stage(
            context,
            plan,
            self._device,
            beside=beside,
            pause=pacing.pause,
            # One at a time, so that what is not adopted is freed before anything is loaded.
            adopts=(adopts.pop() for _ in range(len(adopts))),
        )
        if loaded is not None:
            with self._changed:
                self._loaded, self._held = loaded, (*self._held, loaded)

    def _load(self, context: RankContext, crew: Crew, name: str, work: Callable[[], None]) -> None:
        """Load something in a thread of its own, and wait until it is there, or ``crew`` is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: not self._loading or crew.stopped)  # layers for a loss
            if self._loading:
                crew.wait(0)
            self._loading = True
        self._start(context, name, work)
        self._wait(crew)

    def _start(self, context: RankContext, name: str, work: Callable[[], None]) -> None:
        """Load something in a thread of its own; the caller has noted that."""

        def load() -> None:
            error = None
            try:
                work()
            except BaseException as failure:  # kept whole, to be raised in the thread that waits
                error = failure
            with self._changed:
                self._error, self._loading = error, False
                self._changed.notify_all()

        context.program.threads.start(name, load)

    def _pause(self, crew: Crew, seconds: float, ended: threading.Event | None = None) -> None:
        """Wait for some time, or until nobody needs what is loaded any longer."""
        with self._changed:
            self._changed.wait_for(lambda: crew.stopped or _is_set(ended), seconds)

    def _wait(self, crew: Crew, ended: threading.Event | None = None) -> None:
        """Wait until nothing is being loaded, or has ``ended``; raise what stops the epoch, or went wrong."""
        with self._changed:
            self._changed.wait_for(lambda: not self._loading or crew.stopped or _is_set(ended))
            if _is_set(ended):
                return
            error, self._error = self._error, None
        crew.wait(0)
        if error is not None:
            raise error

    def wake(self) -> None:
        """Let whoever waits look whether it is needed still."""
        with self._changed:
            self._changed.notify_all()


def _is_set(event: threading.Event | None) -> bool:
    return event is not None and event.is_set()


def _sources(
    plan: Plan, stage: StagePlan, held: Sequence[LoadedStage], standbys: Sequence[LoadedStage]
) -> Iterator[tuple[LoadedStage, frozenset[int]]]:
    """Yield where the layers of a stage come from that are loaded: with the caches that the plan counts on.

    Those are of the stage that has had a layer since the plan that this one names. If none has, they are the
    copies of a standby: the rank is about to take the layer, or did not come to take it in the plan before.
    """
    same = [one for one in (*held, *standbys) if one.plan.dtype == stage.dtype]
    same.sort(key=lambda one: not one.serves(stage))
    found, since = dict[int, list[int]](), dict(enumerate(plan.since))
    for layer in range(stage.layers.start, stage.layers.stop):
        having = [one for one in same if one.plan.layers.start <= layer < one.plan.layers.stop]
        own = [one for one in having if one.since.get(layer) == since.get(layer)]
        copied = [one for one in having if one in standbys]
        for one in (*own, *copied, *having)[:1]:
            found.setdefault(same.index(one), []).append(layer)
    for number, layers in found.items():
        yield same[number], frozenset(layers)
