"""Represent pipeline schedules as data: the actions of each worker, in order. Pure.

An action is written ``2F0``: stage 2, forward, microbatch 0. ``B`` is the backward pass; zero-bubble
schedules split it into ``I`` (gradients of the inputs, for which the previous stage waits) and ``W``
(gradients of the weights, for which nothing waits).

With two workers, four microbatches, and a backward pass twice as long as a forward pass (time runs right):

    gpipe         F0 F1 F2 F3 ·· ·· ·· B0 B0 B1 B1 B2 B2 B3 B3
                  ·· F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
    1f1b          F0 F1 ·· ·· B0 B0 F2 B1 B1 F3 B2 B2 ·· B3 B3
                  ·· F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
    staggered     F0 F1 F2 ·· B0 B0 F3 B1 B1 ·· B2 B2 ·· B3 B3
                  ·· F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
    zero-bubble   F0 F1 ·· I0 W0 I1 F2 W1 F3 I2 W2 I3 W3
                  ·· F0 I0 F1 I1 W0 W1 F2 I2 F3 I3 W2 W3

gpipe        all forward, then all backward (Huang et al. 2019, arXiv:1811.06965)
1f1b         a backward pass as soon as possible; a worker holds at most as many microbatches as there are
             workers from it on (Narayanan et al. 2019, PipeDream; with a flush, as in arXiv:2104.04473)
staggered    in step t worker w takes microbatch t - w forward and t - (2W - 2 - w) backward: like 1f1b, but
             a step ahead, so that the results of one step are sent during the next
interleaved  several rounds of workers: stage s is on worker s mod W, which fills the pipeline sooner
             (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)
zero-bubble  weight gradients fill the waits; a worker holds as many microbatches as there are workers
             (Qi et al. 2023, arXiv:2401.10241, ZB-H1; here by simulating a greedy worker)
sequential   one worker, the batch in one piece

In all schedules but ``interleaved`` a worker has neighbouring stages, which it computes one after the other,
so the depth of the pipeline is the number of workers, not of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from pipeedge.base.errors import ScheduleError
from pipeedge.base.wording import count

__all__ = ["SCHEDULES", "Action", "Operation", "Order", "Timed", "bubble", "make_order", "simulate"]


class Operation(StrEnum):
    """An operation on a microbatch, with the letter that ``torch.distributed.pipelining`` uses for it."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENTS = "I"
    WEIGHT_GRADIENTS = "W"


@dataclass(frozen=True)
class Action:
    """An operation on one microbatch in one stage."""

    stage: int
    kind: Operation
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True)
class Order:
    """A schedule for a number of stages, workers and microbatches."""

    placement: tuple[int, ...]
    """Worker of each stage."""
    actions: tuple[tuple[Action, ...], ...]
    """Actions of each worker, in order."""

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Return the stages on ``worker``, in order."""
        return tuple(stage for stage, place in enumerate(self.placement) if place == worker)

    def held(self, worker: int) -> int:
        """Return the largest number of microbatches whose activations a stage on ``worker`` holds at once."""
        most = 0
        for stage in self.stages_of(worker):
            now = 0
            for action in self.actions[worker]:
                if action.stage != stage:
                    continue
                now += {Operation.FORWARD: 1, Operation.BACKWARD: -1, Operation.WEIGHT_GRADIENTS: -1}.get(
                    action.kind, 0
                )
                most = max(most, now)
        return most


def make_order(schedule: str, *, stages: int, workers: int, microbatches: int) -> Order:
    """Make the order of ``schedule``.

    Raises:
        ScheduleError: There is no such schedule, or it does not allow these numbers.
    """
    maker = _MAKERS.get(schedule)
    if maker is None:
        raise ScheduleError(f"there is no schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}")
    if not 1 <= workers <= stages:
        raise ScheduleError(
            f"{count(workers, 'worker')} for {count(stages, 'stage')}: each worker needs at least one stage"
        )
    if schedule == "sequential" and workers > 1:
        raise ScheduleError(f"schedule sequential runs on 1 worker, not on {workers}")
    if schedule not in ("sequential", "gpipe") and microbatches < workers:
        raise ScheduleError(
            f"schedule {schedule} needs at least as many microbatches as workers, but there are "
            f"{microbatches} for {count(workers, 'worker')}; make the microbatches smaller"
        )
    if schedule == "interleaved":
        return _interleaved(stages, workers, microbatches)
    placement = tuple(stage * workers // stages for stage in range(stages))
    blocks = tuple(
        _Block(tuple(s for s, place in enumerate(placement) if place == worker)) for worker in range(workers)
    )
    return Order(placement, tuple(tuple(steps) for steps in maker(blocks, microbatches)))


@dataclass(frozen=True)
class _Block:
    """Neighbouring stages on one worker, which are scheduled together."""

    stages: tuple[int, ...]

    def forward(self, microbatch: int) -> Iterator[Action]:
        return (Action(stage, Operation.FORWARD, microbatch) for stage in self.stages)

    def back(self, microbatch: int, kind: Operation = Operation.BACKWARD) -> Iterator[Action]:
        return (Action(stage, kind, microbatch) for stage in reversed(self.stages))


_Steps = list[list[Action]]


def _gpipe(blocks: Sequence[_Block], microbatches: int) -> _Steps:
    return [
        [action for m in range(microbatches) for action in block.forward(m)]
        + [action for m in range(microbatches) for action in block.back(m)]
        for block in blocks
    ]


def _with_lead(blocks: Sequence[_Block], microbatches: int, lead: Callable[[int], int]) -> _Steps:
    """Order the passes so that forward runs ``lead(worker)`` microbatches ahead of backward."""
    order = []
    for worker, block in enumerate(blocks):
        actions: list[Action] = []
        for step in range(microbatches + lead(worker)):
            if step < microbatches:
                actions += block.forward(step)
            if step >= lead(worker):
                actions += block.back(step - lead(worker))
        order.append(actions)
    return order


def _one_forward_one_backward(blocks: Sequence[_Block], microbatches: int) -> _Steps:
    return _with_lead(blocks, microbatches, lambda worker: len(blocks) - 1 - worker)


def _staggered(blocks: Sequence[_Block], microbatches: int) -> _Steps:
    return _with_lead(blocks, microbatches, lambda worker: 2 * (len(blocks) - 1 - worker))


def _zero_bubble(blocks: Sequence[_Block], microbatches: int) -> _Steps:
    """Simulate greedy workers, one unit of time after another.

    Input gradients come first, because another worker waits for them; else forward, as long as the worker may
    hold one more microbatch; else weight gradients.
    """
    workers = len(blocks)
    order: _Steps = [[] for _ in blocks]
    forward, inputs, weights = [0] * workers, [0] * workers, [0] * workers
    while min(weights) < microbatches:
        chosen: list[str | None] = []
        for worker in range(workers):
            last = worker == workers - 1
            came = microbatches if worker == 0 else forward[worker - 1]
            returned = forward[worker] if last else inputs[worker + 1]
            if inputs[worker] < min(returned, forward[worker]):
                chosen.append("I")
            elif forward[worker] < came and forward[worker] - weights[worker] < workers:
                chosen.append("F")
            else:
                chosen.append("W" if weights[worker] < inputs[worker] else None)
        for worker, choice in enumerate(chosen):
            if choice == "F":
                order[worker] += blocks[worker].forward(forward[worker])
                forward[worker] += 1
            elif choice == "I":
                order[worker] += blocks[worker].back(inputs[worker], Operation.INPUT_GRADIENTS)
                inputs[worker] += 1
            elif choice == "W":
                order[worker] += blocks[worker].back(weights[worker], Operation.WEIGHT_GRADIENTS)
                weights[worker] += 1
    return order


def _interleaved(stages: int, workers: int, microbatches: int) -> Order:
    """Give worker w the stages w, w + W, w + 2W, ...; microbatches go round in groups of W."""
    if stages % workers or stages == workers:
        raise ScheduleError(
            f"schedule interleaved gives each worker the same number of stages, at least 2, which {stages} "
            f"stages on {workers} workers do not allow; change --stages or --workers"
        )
    if microbatches % workers:
        raise ScheduleError(
            f"schedule interleaved needs a multiple of {workers} microbatches for "
            f"{count(workers, 'worker')}, not {microbatches}"
        )
    rounds = stages // workers
    total = microbatches * rounds

    def unit(number: int) -> tuple[int, int]:
        """Round and microbatch of the forward pass with this number on any worker."""
        group, place = divmod(number, workers * rounds)
        return place // workers, group * workers + place % workers

    actions = []
    for worker in range(workers):
        ahead = min(total, (workers - worker - 1) * 2 + (rounds - 1) * workers)
        steps: list[Action] = []
        for number in range(total + ahead):
            if number < total:
                which, microbatch = unit(number)
                steps.append(Action(which * workers + worker, Operation.FORWARD, microbatch))
            if number >= ahead:
                which, microbatch = unit(number - ahead)
                steps.append(Action((rounds - 1 - which) * workers + worker, Operation.BACKWARD, microbatch))
        actions.append(tuple(steps))
    return Order(tuple(stage % workers for stage in range(stages)), tuple(actions))


_MAKERS: Mapping[str, Callable[[Sequence[_Block], int], _Steps]] = MappingProxyType(
    {
        "sequential": _gpipe,
        "gpipe": _gpipe,
        "staggered": _staggered,
        "1f1b": _one_forward_one_backward,
        "interleaved": _gpipe,
        "zero-bubble": _zero_bubble,
    }
)
SCHEDULES = tuple(_MAKERS)


# --- timing an order --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """An action with its start and end."""

    action: Action
    start_s: float
    """Start in seconds."""
    end_s: float
    """End in seconds."""


def simulate(order: Order, seconds: Callable[[Action], float]) -> tuple[tuple[Timed, ...], ...]:
    """Return when each worker does each action, if actions take ``seconds`` and nothing else takes time.

    Raises:
        ValueError: The workers deadlock, or an action depends on one that never happens.
    """
    ended: dict[Action, float] = {}
    done: list[list[Timed]] = [[] for _ in order.actions]
    moved = True
    while moved:
        moved = False
        for worker, actions in enumerate(order.actions):
            for action in actions[len(done[worker]) :]:
                before = _needs(action, order.stages)
                if any(need not in ended for need in before):
                    break
                free = done[worker][-1].end_s if done[worker] else 0.0
                start = max([free, *(ended[need] for need in before)])
                ended[action] = start + seconds(action)
                done[worker].append(Timed(action, start, ended[action]))
                moved = True
    for worker, actions in enumerate(order.actions):
        if len(done[worker]) < len(actions):
            raise ValueError(f"worker {worker} never gets to {actions[len(done[worker])]}")
    return tuple(tuple(timed) for timed in done)


def _needs(action: Action, stages: int) -> list[Action]:
    """Return the actions that must be done before ``action``."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Operation.FORWARD:
        return [Action(stage - 1, Operation.FORWARD, microbatch)] if stage else []
    if action.kind is Operation.WEIGHT_GRADIENTS:
        return [Action(stage, Operation.INPUT_GRADIENTS, microbatch)]
    own = Action(stage, Operation.FORWARD, microbatch)
    return [own] if stage == stages - 1 else [own, Action(stage + 1, action.kind, microbatch)]


def bubble(order: Order) -> float:
    """Return the fraction of all workers' time that they wait, in theory.

    All workers have the same work, a backward pass is twice as long as a forward pass, and links take no
    time.
    """

    def seconds(action: Action) -> float:
        share = 1.0 / len(order.stages_of(order.placement[action.stage]))
        return share * (2.0 if action.kind is Operation.BACKWARD else 1.0)

    timed = simulate(order, seconds)
    length = max(worker[-1].end_s for worker in timed)
    work = sum(one.end_s - one.start_s for worker in timed for one in worker)
    return max(0.0, 1.0 - work / (length * order.workers))
