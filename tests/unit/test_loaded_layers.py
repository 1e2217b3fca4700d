"""The layers that a rank has loaded: what is given out, and what is kept, while plans change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from waiting import LIMIT_S

from pipeedge.base.crew import Crew, Threads
from pipeedge.base.errors import RequestError, WeightsError
from pipeedge.base.schedule import LayerRange
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.layers.decoder import DecoderStage
from pipeedge.plan.cache_owners import Standby
from pipeedge.plan.planning import Plan
from pipeedge.run import loaded_layers as shelf_module
from pipeedge.run.context import RankContext
from pipeedge.run.loaded_layers import LoadedLayers


class Named(str):
    """Layers, as those of a stage are named."""

    dtype = "float32"

    @property
    def layers(self) -> LayerRange:
        first, last = map(int, self.split("-"))
        return LayerRange(first - 1, last)


@dataclass(eq=False)
class Layers:
    """A loaded stage."""

    named: str
    since: dict[int, int] = field(default_factory=dict)
    adopted: dict[str, set[int]] = field(default_factory=dict)
    """Layers that were not read from the disk, counted from 1, by the names of stages that had them."""
    outputs: ClassVar[dict[str, str]] = {}

    @property
    def plan(self) -> Named:
        return Named(self.named)

    def serves(self, stage: str) -> bool:
        return stage == self.named


class Interrupted(Crew):
    """A crew in which something happens each time that the loaded_layers asks whether it was stopped."""

    def __init__(self, happens: Callable[[int], None]) -> None:
        super().__init__()
        self._happens = happens
        self._asked = 0

    def wait(self, timeout_s: float | None = None) -> bool:
        self._happens(self._asked)
        self._asked += 1
        return super().wait(timeout_s)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the layers that are read from the disk, in order."""
    found: list[str] = []

    def load(context: object, plan: Any, device: object, held: Layers | None = None, **more: Any) -> Layers:
        since = dict(enumerate(plan.since))
        if held is not None:
            held.since = since
            return held
        found.append(plan.schedule.stages[0])
        adopted = {one.named: {layer + 1 for layer in layers} for one, layers in more["adopts"]}
        return Layers(found[-1], since, adopted)

    monkeypatch.setattr(shelf_module, "load_stage", load)
    return found


def take_stage(
    loaded_layers: LoadedLayers,
    named: str,
    *,
    beside: bool = False,
    crew: Crew | None = None,
    since: Sequence[int] = (),
) -> Layers:
    """Take a stage of an encoder; that of a decoder, if the name is ``Named``."""
    model = object.__new__(DecoderModel) if isinstance(named, Named) else None
    context = SimpleNamespace(rank=0, model=model, program=SimpleNamespace(threads=Threads()))
    plan = SimpleNamespace(schedule=SimpleNamespace(stage_of=lambda rank: 0, stages=[named]), since=since)
    taken: Any = loaded_layers.take(
        cast(RankContext, context), cast(Plan, plan), crew or Crew(), beside=beside
    )
    found: Layers = taken
    return found


def take(loaded_layers: LoadedLayers, named: str, **more: Any) -> str:
    return take_stage(loaded_layers, named, **more).named


def make() -> LoadedLayers:
    return LoadedLayers(torch.device("cpu"))


def test_a_change_that_is_given_up_leaves_what_computes(loaded: list[str]) -> None:
    loaded_layers = make()
    assert take(loaded_layers, "1-8") == "1-8"
    assert take(loaded_layers, "1-4", beside=True) == "1-4"
    loaded_layers.give_back()
    assert take(loaded_layers, "1-8") == "1-8"
    assert loaded == ["1-8", "1-4"]


def test_after_a_change_only_the_new_layers_are_kept(loaded: list[str]) -> None:
    loaded_layers = make()
    take(loaded_layers, "1-8")
    take(loaded_layers, "1-4", beside=True)
    loaded_layers.keep_last()
    assert take(loaded_layers, "1-4") == "1-4"
    assert take(loaded_layers, "1-8") == "1-8"
    assert loaded == ["1-8", "1-4", "1-8"]


def test_an_epoch_stops_while_ends_are_loaded_which_the_next_one_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, goes_on, times = threading.Event(), threading.Event(), list[int]()

    def load(context: object, plan: object) -> str:
        times.append(1)
        begun.set()
        goes_on.wait(LIMIT_S)
        return "ends"

    monkeypatch.setattr(shelf_module, "load_ends", load)
    loaded_layers, crew = make(), Crew()
    context: Any = SimpleNamespace(program=SimpleNamespace(threads=Threads()))
    plan: Any = None

    def stop() -> None:
        begun.wait(LIMIT_S)
        crew.stop(RequestError("lost"))

    threading.Thread(target=stop).start()
    with pytest.raises(RequestError, match="lost"):
        loaded_layers.take_ends(context, plan, crew)
    goes_on.set()
    assert loaded_layers.take_ends(context, plan, Crew()) == "ends"
    assert len(times) == 1


@pytest.mark.parametrize("when", [0, 1])
def test_an_epoch_that_retires_late_takes_nothing_from_the_one_that_loads(
    loaded: list[str], when: int
) -> None:
    loaded_layers = make()
    take(loaded_layers, "1-8")
    take(loaded_layers, "1-4", beside=True)

    def retire(asked: int) -> None:
        if asked == when:
            loaded_layers.keep_last()

    assert take(loaded_layers, "5-8", crew=Interrupted(retire)) == "5-8"
    assert take(loaded_layers, "5-8") == "5-8"
    assert loaded == ["1-8", "1-4", "5-8"]


class StandingBy(Layers):
    """Loaded layers of another rank."""

    @property
    def shard(self) -> DecoderStage:
        return object.__new__(DecoderStage)

    def stands_by(self, standby: str) -> bool:
        return standby == self.named


def stand_by(
    loaded_layers: LoadedLayers, named: str, ended: threading.Event | None = None
) -> DecoderStage | None:
    context = SimpleNamespace(rank=0, program=SimpleNamespace(threads=Threads()))
    plan = SimpleNamespace(schedule=SimpleNamespace(stage_of=lambda rank: 0))
    return loaded_layers.stand_by(
        cast(RankContext, context), cast(Plan, plan), cast(Standby, named), Crew(), ended
    )


@pytest.fixture
def standing(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the layers that are read from the disk for others, in order; 13-16 cannot be read."""
    found: list[str] = []

    def load(context: object, plan: object, standby: str, device: object, pause: object) -> StandingBy:
        if standby == "13-16":
            raise WeightsError("the file ends early")
        found.append(standby)
        return StandingBy(standby)

    monkeypatch.setattr(shelf_module, "load_standby", load)
    return found


def test_a_standby_takes_the_layers_that_it_has_copies_of(loaded: list[str], standing: list[str]) -> None:
    loaded_layers = make()
    take(loaded_layers, Named("1-8"), since=[1] * 12)
    # The same layers without copies, as for a plan that was not run.
    take(loaded_layers, Named("9-12"), beside=True, since=[2] * 12)
    stand_by(loaded_layers, "9-12")
    stand_by(loaded_layers, "9-12")
    assert standing == ["9-12"]
    assert take(loaded_layers, Named("9-12"), since=[3] * 12) == "9-12"
    assert loaded == ["1-8", "9-12"]
    stand_by(loaded_layers, "9-12")
    assert standing == ["9-12", "9-12"], "what was taken serves nobody else"


def test_copies_of_a_plan_that_has_not_run_do_not_replace_what_is_there(
    loaded: list[str], standing: list[str]
) -> None:
    loaded_layers = make()
    take(loaded_layers, Named("5-8"), since=[1] * 12)
    take(loaded_layers, Named("1-6"), beside=True, since=[2, 2, 2, 2, 1, 1, 2, 2, 2, 2, 2, 2])
    stand_by(loaded_layers, "7-8")
    found = take_stage(loaded_layers, Named("1-8"), since=[3, 3, 3, 3, 1, 1, 1, 1, 3, 3, 3, 3])
    assert found.adopted == {"1-6": {1, 2, 3, 4}, "5-8": {5, 6, 7, 8}}


def test_a_plan_that_was_never_loaded_leaves_the_copies_in_place(
    loaded: list[str], standing: list[str]
) -> None:
    loaded_layers = make()
    take(loaded_layers, Named("1-4"), since=[1] * 12)
    stand_by(loaded_layers, "5-8")
    found = take_stage(loaded_layers, Named("1-8"), since=[1] * 4 + [2] * 4 + [3] * 4)
    assert found.adopted == {"1-4": {1, 2, 3, 4}, "5-8": {5, 6, 7, 8}}


def test_a_standby_frees_what_it_does_not_stand_by_for(loaded: list[str], standing: list[str]) -> None:
    loaded_layers = make()
    take(loaded_layers, Named("1-8"))
    for free in (
        lambda: loaded_layers.keep_standbys([], alone=False),
        loaded_layers.keep_last,
        lambda: take(loaded_layers, Named("1-4")),
    ):
        stand_by(loaded_layers, "9-12")
        free()
    stand_by(loaded_layers, "9-12")
    assert standing == ["9-12"] * 4
    loaded_layers.keep_standbys([cast(Standby, "9-12")], alone=True)
    stand_by(loaded_layers, "9-12")
    assert standing == ["9-12"] * 4
    take(loaded_layers, Named("1-4"))
    assert loaded == ["1-8", "1-4", "1-4"], "a rank without layers of its own kept them"


def test_layers_of_others_that_cannot_be_read_end_nothing(loaded: list[str], standing: list[str]) -> None:
    loaded_layers = make()
    with pytest.raises(WeightsError, match="ends early"):
        stand_by(loaded_layers, "13-16")
    assert take(loaded_layers, Named("1-8")) == "1-8"
    assert (loaded, standing) == (["1-8"], [])


def test_layers_of_others_are_not_loaded_once_all_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended, stopped = threading.Event(), threading.Event(), threading.Event()

    def load(context: object, plan: object, standby: str, device: object, pause: Callable[[], None]) -> None:
        begun.set()
        try:
            while True:
                pause()
        finally:
            stopped.set()

    monkeypatch.setattr(shelf_module, "load_standby", load)
    loaded_layers = make()

    def end() -> None:
        begun.wait(LIMIT_S)
        ended.set()
        loaded_layers.wake()

    threading.Thread(target=end).start()
    assert stand_by(loaded_layers, "9-12", ended) is None
    assert stopped.wait(LIMIT_S)
