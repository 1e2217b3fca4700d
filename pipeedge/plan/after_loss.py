"""The schedule for the ranks that are left when one is lost. Pure.

    -pt 1,8,9,16,17,24        rank 0 [1-8]    rank 1 [9-16]    rank 2 [17-24]    rank 3 spare
    without rank 1            rank 0 [1-8]    rank 3 [9-16]    rank 2 [17-24]
    and without rank 3        rank 0 [1-8]                     rank 2 [9-24]

``smallest_change`` serves schedules that the user gave: the fewest ranks with a stage get other layers, and
the fewest bytes are loaded. Where the scheduler plans for the hosts that are left, ``loaded_by`` tells it
what they have: of hosts that are interchangeable, it takes those that load the fewest bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count

from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.base.wording import figure
from pipeedge.plan.cache_owners import CopiedPages, KeptOutput, Standby
from pipeedge.plan.placing import PlacedStage, Placing

__all__ = ["Held", "Survivor", "loaded_by", "smallest_change"]

_MB = 1 << 20


@dataclass(frozen=True)
class Survivor:
    """A rank that is left."""

    rank: int
    room_bytes: float
    """Memory for weights in bytes; infinite if that is unknown."""
    host: str | None = None
    holds: LayerRange | None = None
    """Layers that it has loaded, or None."""
    dtype: str = "float32"
    """Number type of these layers."""

    @classmethod
    def holding(cls, rank: int, room_bytes: float, host: str | None, held: StagePlan | None) -> Survivor:
        """Return a rank that has loaded the layers of a stage, or none."""
        if held is None:
            return cls(rank, room_bytes, host)
        return cls(rank, room_bytes, host, held.layers, held.dtype)


class Held:
    """Layers that the ranks have loaded, as far as rank 0 knows."""

    def __init__(self) -> None:
        self._stages: dict[int, StagePlan] = {}
        self._since: dict[int, dict[int, int]] = {}
        """Plan since which each rank of the latest plan has had each of its layers in every plan."""
        self._standbys: dict[int, tuple[Standby, ...]] = {}
        """What each standby of the latest plan holds."""
        self._copies: dict[int, tuple[CopiedPages, ...]] = {}
        """Copies that each rank has, of layers that it may take or has taken."""
        self._outputs: tuple[KeptOutput, ...] = ()
        """Outputs that the ranks of the latest plan keep."""

    def since(self, schedule: Schedule, number: int) -> tuple[int, ...]:
        """Return, for each layer, since which plan its rank has had it in every plan.

        Args:
            schedule: The schedule.
            number: Number of its plan, larger than those before.
        """
        found = []
        for stage in schedule.stages:
            known, kept = self._since.get(stage.rank, {}), self._kept(stage)
            found += [known.get(layer, number) if layer in kept else number for layer in _layers(stage)]
        return tuple(found)

    def _kept(self, stage: StagePlan) -> range:
        """Return the layers of a stage that its rank keeps."""
        known = self._stages.get(stage.rank)
        return range(0) if known is None or known.dtype != stage.dtype else known.layers.shared(stage.layers)

    def outputs(self, schedule: Schedule, number: int) -> tuple[KeptOutput, ...]:
        """Return the outputs that ranks can keep: of their stages, and one each of those that they have.

        The latter are for what has not been computed again when the next rank is lost, and for pages that
        nobody has written since.

        Args:
            schedule: The schedule.
            number: Number of its plan, larger than those before.
        """
        found = []
        for stage in schedule.stages:
            layers = self._kept(stage)
            had = {one.cut: one for one in self._outputs if one.rank == stage.rank and one.cut - 1 in layers}
            if stage is not schedule.stages[-1]:
                found.append(had.pop(stage.layers.stop, KeptOutput(stage.rank, stage.layers.stop, number)))
            latest = sorted(had.values(), key=lambda one: (one.since, one.cut))
            found += latest[-1:]
        return tuple(found)

    def copied(self, rank: int, copies: Sequence[CopiedPages]) -> None:
        """Note what a rank that has stopped has copied of the state of others."""
        new = {one.layers for one in copies}
        known = (one for one in self._copies.get(rank, ()) if one.layers not in new)
        self._copies[rank] = (*known, *copies)

    def copies(self, schedule: Schedule) -> tuple[CopiedPages, ...]:
        """Return the copies with which the ranks of a schedule take its layers."""
        return tuple(one for stage in schedule.stages for one in self._taken(stage))

    def _taken(self, stage: StagePlan) -> Iterator[CopiedPages]:
        for one in self._copies.get(stage.rank, ()):
            used = one.layers.shared(stage.layers)
            if used and one.dtype == stage.dtype:
                yield replace(one, layers=LayerRange(used.start, used.stop))

    def loads(
        self,
        schedule: Schedule,
        number: int,
        standbys: Sequence[Standby] = (),
        outputs: Sequence[KeptOutput] = (),
    ) -> None:
        """Note that the ranks of a schedule load their layers, in place of what they had.

        Args:
            schedule: The schedule.
            number: Number of its plan.
            standbys: Its standbys.
            outputs: Outputs that its ranks keep.
        """
        self._outputs = tuple(outputs)
        ranks = {one.rank for one in standbys}
        self._standbys = {rank: tuple(one for one in standbys if one.rank == rank) for rank in ranks}
        self._copies = {stage.rank: tuple(self._taken(stage)) for stage in schedule.stages}
        since = self.since(schedule, number)
        self._since = {
            stage.rank: {layer: since[layer] for layer in _layers(stage)} for stage in schedule.stages
        }
        spares = set(self._standbys) - set(schedule.ranks)  # they free what they had
        self._stages = {rank: stage for rank, stage in self._stages.items() if rank not in spares}
        self._stages |= {stage.rank: stage for stage in schedule.stages}

    def forget(self, rank: int) -> None:
        """Note that another process has the number ``rank``, or none."""
        for known in (self._stages, self._since, self._standbys, self._copies):
            known.pop(rank, None)
        self._outputs = tuple(one for one in self._outputs if one.rank != rank)

    def survivor(self, rank: int, room_bytes: float, host: str | None) -> Survivor:
        """Return a rank that is left, with what it has loaded: of what it stands by for, what others lack."""
        survivor = Survivor.holding(rank, room_bytes, host, self._stages.get(rank))
        standbys = self._standbys.get(rank)
        if survivor.holds is not None or standbys is None:
            return survivor
        here = {layer for stage in self._stages.values() for layer in _layers(stage)}
        standby = max(standbys, key=lambda one: len(set(_layers(one)) - here))
        return replace(survivor, holds=standby.layers, dtype=standby.dtype)


def _layers(part: StagePlan | Standby) -> range:
    return range(part.layers.start, part.layers.stop)


def loaded_by(survivors: Sequence[Survivor], names: Sequence[str]) -> Placing:
    """Return the layers that survivors have loaded, on the hosts that ``names`` has for their ranks."""
    return tuple(
        PlacedStage(names[one.rank], one.holds, dtype=one.dtype) for one in survivors if one.holds is not None
    )


@dataclass(frozen=True)
class _Piece:
    """Layers of one rank in a new schedule."""

    rank: int
    layers: LayerRange


class _Weights:
    """Bytes of ranges of layers."""

    def __init__(self, layer_bytes: Sequence[float]) -> None:
        self._until = tuple(accumulate(layer_bytes, initial=0.0))
        self.layers = len(layer_bytes)

    def bytes(self, start: int, stop: int) -> float:
        """Return the bytes of the layers ``[start, stop)``; 0 for none."""
        return self._until[stop] - self._until[start] if start < stop else 0.0

    def to_load(self, layers: LayerRange, holds: LayerRange | None) -> float:
        """Return the bytes of ``layers`` that a rank with ``holds`` does not have."""
        whole = self.bytes(layers.start, layers.stop)
        if holds is None:
            return whole
        return whole - self.bytes(max(layers.start, holds.start), min(layers.stop, holds.stop))


def smallest_change(
    schedule: Schedule, survivors: Sequence[Survivor], layer_bytes: Sequence[float]
) -> Schedule | str:
    """Return the schedule that changes least when ranks are lost, or the reason why there is none.

    What counts is, in this order: ranks with a stage that get other layers, bytes to load, number of stages.
    The ranks that keep a stage keep their order, unless nothing fits in any other way.

    Args:
        schedule: Schedule before the loss.
        survivors: Ranks that are left, with and without a stage.
        layer_bytes: Bytes of the weights of each layer.
    """
    weights, here = _Weights(layer_bytes), {one.rank: one for one in survivors}
    stages = [stage for stage in schedule.stages if stage.rank in here]
    spares = [one for one in survivors if schedule.stage_of(one.rank) is None]
    found, reached = _search(weights, [(here[stage.rank], stage.layers) for stage in stages], spares)
    if found is None:
        found, further = _search(weights, [], survivors)
        reached = max(reached, further)
    if found is None:
        return _explain(weights, survivors, reached)
    return _on_ranks(schedule, found, here)


def _search(
    weights: _Weights, kept: Sequence[tuple[Survivor, LayerRange]], spares: Sequence[Survivor]
) -> tuple[list[_Piece] | None, int]:
    """Find the pieces with the least cost, best first.

    Args:
        weights: Bytes of the layers.
        kept: Ranks with a stage and its layers, in order.
        spares: Ranks that may come anywhere.

    Returns:
        The pieces, or None if nothing fits; the number of layers that could be placed.
    """
    # A state is the next layer to place, the next kept rank, and the spares that are left.
    order = count()
    everybody = frozenset(range(len(spares)))
    heap: list[tuple[tuple[int, float, int], int, tuple[int, int, frozenset[int]], tuple[_Piece, ...]]] = [
        ((0, 0.0, 0), next(order), (0, 0, everybody), ())
    ]
    done: set[tuple[int, int, frozenset[int]]] = set()
    reached = 0
    while heap:
        (changed, loaded, stages), _, state, pieces = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        position, index, left = state
        reached = max(reached, position)
        if position == weights.layers and index == len(kept):
            return list(pieces), reached
        choices: list[tuple[Survivor, LayerRange | None, int, frozenset[int]]] = []
        if index < len(kept):
            # A rank that has nothing to do any longer has changed too.
            skipped = ((changed + 1, loaded, stages), next(order), (position, index + 1, left), pieces)
            heapq.heappush(heap, skipped)
            choices.append((*kept[index], index + 1, left))
        choices += [(spares[number], None, index, left - {number}) for number in left]
        for survivor, before, after, others in choices:
            for layers in _ranges(weights, survivor, position):
                cost = (
                    changed + (before is not None and layers != before),
                    loaded + weights.to_load(layers, survivor.holds),
                    stages + 1,
                )
                piece = _Piece(survivor.rank, layers)
                heapq.heappush(heap, (cost, next(order), (layers.stop, after, others), (*pieces, piece)))
    return None, reached


def _ranges(weights: _Weights, survivor: Survivor, start: int) -> Iterator[LayerRange]:
    """Yield the ranges from ``start`` that a rank has room for."""
    for stop in range(start + 1, weights.layers + 1):
        if weights.bytes(start, stop) > survivor.room_bytes:
            return
        yield LayerRange(start, stop)


def _on_ranks(schedule: Schedule, pieces: Sequence[_Piece], here: Mapping[int, Survivor]) -> Schedule:
    """Return the pieces as stages, with the number type and bits of the stages that had their last layers."""
    stages = []
    for piece in pieces:
        before = next(stage for stage in schedule.stages if piece.layers.stop <= stage.layers.stop)
        stages.append(replace(before, layers=piece.layers, rank=piece.rank, host=here[piece.rank].host))
    return Schedule(tuple(stages))


def _explain(weights: _Weights, survivors: Sequence[Survivor], reached: int) -> str:
    """Return why the layers do not fit."""
    if not survivors:
        return "no rank is left"
    largest = max(survivors, key=lambda one: one.room_bytes)
    next_bytes = weights.bytes(reached, reached + 1)
    needs = f"layer {reached + 1} needs {figure(next_bytes / _MB)} MB"
    if next_bytes > largest.room_bytes:
        return (
            f"{needs}, and no rank that is left has more than {figure(largest.room_bytes / _MB)} MB "
            f"(rank {largest.rank})"
        )
    room = sum(one.room_bytes for one in survivors)
    return (
        f"the layers need {figure(weights.bytes(0, weights.layers) / _MB)} MB, and the ranks that are left "
        f"have {figure(room / _MB)} MB, which suffices up to layer {reached}"
    )
