"""The hosts and links of a cluster as a run finds them, compared with their profiles. Pure.

    window of a run ──measured──> Conditions ──to_body──> sched-pipeline, which plans and evaluates under them

A host's *slowness* is the time that its layers take, and the data rank's own work, as a multiple of what its
profile says; a link's is the same for its time a byte. Layers that a host has not run yet scale with those
that it has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pipeedge.plan.costs import PlanCosts

__all__ = ["Conditions", "HostPair", "StageFigures", "StepMix", "measured"]

HostPair: TypeAlias = tuple[str, str]
"""Sending and receiving host of a link."""

_FELT = 0.2
"""Part of the period below which the time of a link does not matter, so that it is not measured."""


@dataclass(frozen=True)
class StageFigures:
    """Measurements of one stage during a window."""

    compute_s: float
    """Seconds spent computing an item; of a rank with a quota, as if it always had work."""
    link_s: float | None = None
    """Seconds of an item on the outgoing link, or None if that is not measured."""
    cpu_s: float = 0.0
    """Processor seconds of the thread that computes an item, stretched by the rank's quota if it has one: the
    least that its layers take.
    """


@dataclass(frozen=True)
class StepMix:
    """The steps of a decoder that have continued texts during a window, on average."""

    rows: float
    """Number of rows of a step."""
    positions: float
    """Number of tokens in front of a row."""
    texts: float
    """Number of texts that grew at a time."""


@dataclass(frozen=True)
class Conditions:
    """Slowness of hosts and links. Those that are missing are as slow as ``common`` says."""

    hosts: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[HostPair, float] = field(default_factory=dict)
    common: float = 1.0
    """Slowness of hosts that are not measured."""

    @property
    def as_profiled(self) -> bool:
        """Whether everything is as the profiles say."""
        return all(one == 1.0 for one in (*self.hosts.values(), *self.links.values(), self.common))

    def of_host(self, host: str) -> float:
        """Return the slowness of ``host``."""
        return self.hosts.get(host, self.common)

    def to_body(self, hosts: Collection[str]) -> dict[str, Any]:
        """Return the conditions of some hosts as ``sched-pipeline`` reads them."""
        return {
            "hosts": [
                {"host": host, "slowness": slowness}
                for host in hosts
                if (slowness := self.of_host(host)) != 1.0
            ],
            "links": [
                {"from": source, "to": target, "slowness": slowness}
                for (source, target), slowness in self.links.items()
                if source in hosts and target in hosts
            ],
        }


def measured(
    profiled: PlanCosts, figures: Sequence[StageFigures], data_host: str | None, *, varying: bool = False
) -> Conditions:
    """Return the conditions that explain what was measured.

    Args:
        profiled: Costs of the schedule that was measured, as profiled.
        figures: Measurements of its stages.
        data_host: Host that collects the results, or None if its links are not counted.
        varying: Whether items differ in size, like sentences. Then what all hosts have in common says
            something about the input, and holds for hosts without a stage as well.
    """
    size, stages = profiled.batch_size, profiled.schedule
    hosts = {}
    for stage, figure in zip(stages, figures, strict=True):
        if stage.layers_s > 0:
            whole_s = figure.compute_s * size
            slowness = _slowness(whole_s, stage.layers_s, stage.data_s)
            if stage.data_s > 0:
                # Its thread has the processor for itself as long as that counts.
                least_s = min(figure.cpu_s * size, whole_s) - stage.receive_s
                slowness = max(slowness, least_s / stage.layers_s)
            hosts[stage.host] = slowness
    common = sorted(hosts.values())[(len(hosts) - 1) // 2] if varying and len(hosts) > 1 else 1.0
    slowest_s = size * max(max(figure.compute_s, figure.link_s or 0.0) for figure in figures)
    links = {}
    targets = [*(stage.host for stage in stages[1:]), data_host]
    for stage, figure, target in zip(stages, figures, targets, strict=True):
        seconds = 0.0 if figure.link_s is None else figure.link_s * size
        if target is not None and stage.link_out_s > 0 and seconds >= _FELT * slowest_s:
            links[stage.host, target] = seconds / stage.link_out_s
    return Conditions(hosts, links, common)


def _slowness(seconds: float, layers_s: float, own_s: float) -> float:
    """Return the slowness of a host whose layers the data rank's own work may have delayed, or not.

    Args:
        seconds: Measured time of its layers.
        layers_s: Promised time of its layers, with what any stage takes besides.
        own_s: Promised time of the data rank's own work there, or 0.
    """
    return min(seconds / layers_s, max(1.0, seconds / (layers_s + own_s)))
