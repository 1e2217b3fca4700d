"""Judge measured links: estimates in, findings out. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pipeedge.base.errors import EXIT_PEER
from pipeedge.base.program import program_name
from pipeedge.base.wording import count, figure
from pipeedge.doctor.findings import Finding, ok, problem, warning
from pipeedge.plan.link_speed import Estimate
from pipeedge.plan.specs import BYTES_PER_SECOND_PER_MBPS, SpecFiles

__all__ = ["check_links", "check_promises"]

_SLOWER = 0.5
"""Fraction of its promised bandwidth below which a link makes the schedule wrong."""


def check_links(
    pairs: Sequence[tuple[int, int]], measured: Mapping[int, Estimate], error: str | None
) -> list[Finding]:
    """Report the bandwidth and latency of the links.

    Args:
        pairs: Source and destination of each link between two ranks, in the order of measuring.
        measured: Estimates of the links that were measured, by number of link.
        error: The first error, if it is known.
    """
    found = []
    for number, (source, destination) in enumerate(pairs):
        if number not in measured:
            # The links are measured one after another, so the first without a figure is the one that failed.
            why = f" ({error})" if error else ""
            found.append(
                problem(
                    "link",
                    f"rank {source} -> rank {destination} carries no data{why}: links use any free TCP port, "
                    "so firewalls must allow all TCP ports between the machines",
                    EXIT_PEER,
                )
            )
            break
        found.append(_check_spread(f"rank {source} -> rank {destination}", measured[number]))
    return found


def _check_spread(name: str, estimate: Estimate) -> Finding:
    low, high = _mbps(estimate.low_bytes_per_s), _mbps(estimate.high_bytes_per_s)
    if not estimate.steady:
        return warning(
            "link",
            f"{name}: {low} to {high} Mbps in {count(estimate.rounds, 'round')}, too unsteady to plan with, "
            "so --neighbors-file gets no figure: measure again when the machines and the network are idle",
        )
    return ok(
        "link",
        f"{name}: {_speed(estimate.link.bw_bytes_per_s)} ({low} to {high} in "
        f"{count(estimate.rounds, 'round')}), latency {1e3 * estimate.link.latency_s:.2f} ms",
    )


def check_promises(
    pairs: Sequence[tuple[int, int]],
    measured: Mapping[int, Estimate],
    files: SpecFiles,
    hosts: Sequence[str],
) -> list[Finding]:
    """Check that links are as fast as the device types promise, on which the schedule relies.

    Args:
        pairs: Source and destination of each link.
        measured: Estimates by number of link.
        files: The scheduler's files.
        hosts: The host of each rank.
    """
    found = []
    for number, estimate in measured.items():
        link = estimate.link
        ends = [files.type_of(hosts[rank]) for rank in pairs[number]]
        promised = min((end.bw_bytes_per_s for end in ends if end is not None), default=math.inf)
        if estimate.steady and math.isfinite(promised) and link.bw_bytes_per_s < _SLOWER * promised:
            source, destination = pairs[number]
            found.append(
                warning(
                    "link",
                    f"rank {source} -> rank {destination} carries {_speed(link.bw_bytes_per_s)}, but the "
                    f"device types file promises {_speed(promised)}: the schedule may not be the best; "
                    "correct bw_Mbps there, or write the measured links with --neighbors-file and give that "
                    f"file to {program_name('sched-pipeline')} --dev-neighbors-file",
                )
            )
    return found


def _speed(bytes_per_s: float) -> str:
    return f"{_mbps(bytes_per_s)} Mbps"


def _mbps(bytes_per_s: float) -> str:
    mbps = bytes_per_s / BYTES_PER_SECOND_PER_MBPS
    return figure(round(mbps) if mbps >= 100 else mbps, 3)
