"""Judge the ranks of a run together: the facts that each reports in, findings out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from pipeedge.base.fields import Count, Name, convert
from pipeedge.doctor.findings import Finding, ok, problem, warning

__all__ = ["Need", "check_agreement", "check_clocks", "check_facts", "check_memory", "check_weights"]

Facts = Mapping[int, Mapping[str, Any]]
"""Facts that each rank reports about itself."""

_CLOCK_WARNING_S = 0.5
"""Smallest clock offset to report; smaller ones may come from the network and the threads in between."""


def check_agreement(mismatches: Iterable[str], unlike: str | None, world_size: int) -> list[Finding]:
    """Turn what ``pipeedge.plan.facts`` found into findings.

    Args:
        mismatches: What keeps the ranks from working together.
        unlike: How ranks that can work together differ, or None.
        world_size: Number of ranks.
    """
    found = [problem("agreement", mismatch) for mismatch in mismatches]
    if found or world_size == 1:
        return found
    return [
        ok(
            "agreement", f"all {world_size} ranks have the same version of PipeEdge, model, weights and sizes"
        ),
        *([] if unlike is None else [warning("agreement", unlike)]),
    ]


def check_weights(facts: Facts, stages: Mapping[int, str]) -> list[Finding]:
    """Check that each rank with a stage has weights.

    Args:
        facts: Facts of each rank, in which ``weights_error`` says why it has none.
        stages: Layers of each rank with a stage, as text.
    """
    found = []
    for rank, layers in stages.items():
        error = facts[rank].get("weights_error")
        if error:
            found.append(problem("weights", f"for layers {layers}: {error}").of(rank))
    return found


@dataclass(frozen=True)
class Need:
    """Memory that one rank's part of the plan needs."""

    weights_bytes: int
    """Bytes of the weights."""
    buffers_bytes: int
    """Bytes of frames in flight and of activations between layers."""

    @property
    def bytes(self) -> int:
        """Bytes of weights and buffers together."""
        return self.weights_bytes + self.buffers_bytes


class _KnownFacts(Struct):
    """The facts of a rank about its machine and input that the doctor uses."""

    free_bytes: Count
    process_bytes: Count
    machine: Name
    host: Name
    limit_free_bytes: Count | None = None
    device_free_bytes: Count | None = None
    items: Count | None = None
    max_tokens: Count | None = None
    draft_bytes: Count = 0


def check_facts(known: Mapping[str, Any]) -> None:
    """Check the facts that a rank reports about its machine and input. Raises one of ``fields.MALFORMED``."""
    convert(known, _KnownFacts)


def check_memory(facts: Facts, needs: Mapping[int, Need]) -> list[Finding]:
    """Compare free memory with the plan's needs. Ranks on one machine share its memory.

    Args:
        facts: Facts of each rank: ``machine`` (the same for ranks on one machine), ``process_bytes`` (current
            size of its process, libraries loaded), ``free_bytes`` of the machine, ``limit_free_bytes`` (free
            under the limit of its control group, or None), ``device`` and ``device_free_bytes`` (or None).
        needs: Needs of the ranks that take part.
    """
    found = []
    machines: dict[Any, list[int]] = {}
    for rank in needs:
        machines.setdefault(facts[rank]["machine"], []).append(rank)
    for ranks in machines.values():
        # The doctor's own processes will have exited before those of the run start.
        free = min(facts[rank]["free_bytes"] for rank in ranks)
        free += sum(facts[rank]["process_bytes"] for rank in ranks)
        found += _short_of(ranks, {rank: _host_bytes(facts[rank], needs[rank]) for rank in ranks}, free)
    for rank, need in needs.items():
        limit = facts[rank].get("limit_free_bytes")
        if limit is not None:
            free = limit + facts[rank]["process_bytes"]
            needed = _host_bytes(facts[rank], need)
            found += _short_of([rank], {rank: needed}, free, "its control group has")
        device_free = facts[rank].get("device_free_bytes")
        if device_free is not None and need.bytes > device_free:
            found.append(
                problem(
                    "memory",
                    f"its shard needs {_mb(need.bytes)} on {facts[rank].get('device')}, which has only "
                    f"{_mb(device_free)} free: give it fewer layers, or use a smaller -u",
                ).of(rank)
            )
    if found:
        return found
    most = max(needs, key=lambda rank: needs[rank].bytes)
    return [ok("memory", f"enough on every rank; rank {most} needs most, {_mb(needs[most].bytes)}")]


def _host_bytes(facts: Mapping[str, Any], need: Need) -> int:
    on_device = facts.get("device_free_bytes") is not None
    return int(facts["process_bytes"]) + (need.buffers_bytes if on_device else need.bytes)


def _short_of(
    ranks: Sequence[int], needed: Mapping[int, int], free: float, has: str = "the machine has"
) -> list[Finding]:
    total = sum(needed.values())
    if total <= free:
        return []
    who = "its part" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} on one machine"
    return [
        problem(
            "memory",
            f"{who} would need {_mb(total)}, but {has} only {_mb(free)} free: give it fewer layers (-pt), "
            "use a smaller -u, or stop other programs",
        ).of(ranks[0])
    ]


def check_clocks(clocks: Mapping[int, float]) -> list[Finding]:
    """Check that the clocks of the ranks agree.

    Args:
        clocks: Clock of each rank at the same moment, in seconds.
    """
    first = min(clocks)
    found = [
        warning(
            "clock",
            f"its clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} rank {first}'s: logs "
            "will not match and downloads may fail; set it (timedatectl set-ntp true)",
        ).of(rank)
        for rank, clock in sorted(clocks.items())
        if abs(offset := clock - clocks[first]) > _CLOCK_WARNING_S
    ]
    return found or ([ok("clock", "the clocks of all ranks agree")] if len(clocks) > 1 else [])


def _mb(size: float) -> str:
    return f"{size / 2**20:,.0f} MB"
