"""Judge observations: facts in, findings out. Pure: no function here looks at the machine itself."""

from __future__ import annotations

import difflib
import errno
import ipaddress
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeedge.base.errors import EXIT_PEER
from pipeedge.base.fields import text, whole_number
from pipeedge.base.program import program_name
from pipeedge.base.wording import count, figure
from pipeedge.doctor.findings import Finding, ok, problem, warning
from pipeedge.plan.link_speed import Estimate
from pipeedge.plan.specs import BYTES_PER_SECOND_PER_MBPS, DeviceType, ModelSpec, short_dtype

__all__ = [
    "Need",
    "SchedulerFiles",
    "check_addr",
    "check_agreement",
    "check_clocks",
    "check_facts",
    "check_files",
    "check_interface",
    "check_links",
    "check_memory",
    "check_promises",
    "check_weights",
    "diagnose_dial",
]

Facts = Mapping[int, Mapping[str, Any]]
"""Facts that each rank reports about itself."""

_CLOCK_WARNING_S = 0.5
"""Smallest clock offset to report; smaller ones may come from the network and the threads in between."""
_SLOWER = 0.5
"""Fraction of its promised bandwidth below which a link makes the schedule wrong."""
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


def _mb(size: float) -> str:
    return f"{size / 2**20:,.0f} MB"


# --- the network ------------------------------------------------------------------------------------


def check_addr(addr: str, resolved: str, *, rank: int, world_size: int, own: Sequence[str]) -> Finding:
    """Check that ``--addr`` names rank 0's machine.

    Args:
        addr: address as the user gave it.
        resolved: IP address to which this rank resolves it.
        rank: this rank.
        world_size: number of ranks.
        own: IP addresses of this machine.
    """
    is_loopback = ipaddress.ip_address(resolved).is_loopback
    said = addr if addr == resolved else f"{addr} is {resolved}"
    by_name = addr not in (resolved, "localhost")
    if is_loopback and world_size > 1 and by_name:
        return warning(
            "name",
            f"--addr {said} here, an address that other machines cannot reach: "
            "give rank 0's network address, or correct /etc/hosts",
        )
    if rank == 0 and resolved not in own and not is_loopback:
        return problem(
            "name",
            f"--addr {said}, which is not an address of this machine, where rank 0 must listen; "
            f"its addresses: {', '.join(address for address in own if _is_reachable(address)) or 'none'}",
        )
    return ok("name", f"--addr {said}")


def _is_reachable(address: str) -> bool:
    """Return whether other machines may reach ``address`` without naming an interface."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


def check_interface(chosen: str, routed: str | None, addr: str) -> Finding:
    """Check that the links use the interface that leads to ``--addr``.

    Args:
        chosen: interface of the links.
        routed: interface that routes to ``--addr``, or None if there is none.
        addr: address as the user gave it.
    """
    if routed is not None and routed != chosen:
        return warning(
            "interface",
            f"links go over {chosen}, but {routed} leads to --addr {addr}: leave out -s unless this is "
            "intended",
        )
    return ok("interface", f"links go over {chosen}, which leads to --addr {addr}")


def diagnose_dial(
    addr: str, port: int, cause: OSError | None, *, resolved: str, timeout_s: float, own: Sequence[str]
) -> Finding:
    """Explain why rank 0 could not be reached.

    Args:
        addr: address as the user gave it.
        port: port on which rank 0 should listen.
        cause: error of the last attempt to connect, or None if another program listens there.
        resolved: IP address of ``addr``.
        timeout_s: seconds for which connecting was retried.
        own: IP addresses of this machine.
    """
    where = f"{addr}:{port}" if addr == resolved else f"{addr}:{port} ({resolved})"
    if isinstance(cause, ConnectionRefusedError):
        if ipaddress.ip_address(resolved).is_loopback or resolved in own:
            hint = "start it; if it runs on another machine, give that machine's address as --addr"
        else:
            hint = "start it there, with the same --addr and --port; if it runs, read its output"
        return problem(
            "port",
            f"the machine at {where} is up, but rank 0 did not listen there for {figure(timeout_s)} "
            f"s: {hint}",
            EXIT_PEER,
        )
    if isinstance(cause, TimeoutError):
        return problem(
            "port",
            f"no answer from {where}: a firewall drops the packets (open TCP port {port} on rank 0's "
            "machine), or no machine has this address",
            EXIT_PEER,
        )
    if cause is not None and cause.errno in _UNREACHABLE:
        return problem(
            "port",
            f"{where} cannot be reached ({cause.strerror}): the machine is off, or there is no route to its "
            "network; try ping",
            EXIT_PEER,
        )
    why = "" if cause is None else f" ({cause.strerror or cause})"
    return problem("port", f"no connection to rank 0 at {where}{why}: check --addr and --port", EXIT_PEER)


# --- the ranks --------------------------------------------------------------------------------------


def check_agreement(mismatches: Iterable[str], world_size: int) -> list[Finding]:
    """Turn the mismatches that ``pipeedge.plan.planning.disagreements`` found into findings."""
    found = [problem("agreement", mismatch) for mismatch in mismatches]
    if found or world_size == 1:
        return found
    return [ok("agreement", f"all {world_size} ranks have the same versions, model, weights and sizes")]


def check_weights(facts: Facts, stages: Mapping[int, str]) -> list[Finding]:
    """Check that each rank with a stage has weights.

    Args:
        facts: facts of each rank, in which ``weights_error`` says why it has none.
        stages: layers of each rank with a stage, as text.
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


def check_facts(known: Mapping[str, Any]) -> None:
    """Check the facts that a rank reports about its machine and input. Raises one of ``fields.MALFORMED``."""
    for name in ("free_bytes", "process_bytes"):
        whole_number(known[name])
    for name in ("limit_free_bytes", "device_free_bytes", "items", "max_tokens"):
        if known.get(name) is not None:
            whole_number(known[name])
    for name in ("machine", "host"):
        text(known[name])


def check_memory(facts: Facts, needs: Mapping[int, Need]) -> list[Finding]:
    """Compare free memory with the plan's needs. Ranks on one machine share its memory.

    Args:
        facts: facts of each rank: ``machine`` (the same for ranks on one machine), ``process_bytes`` (current
            size of its process, libraries loaded), ``free_bytes`` of the machine, ``limit_free_bytes`` (free
            under the limit of its control group, or None), ``device`` and ``device_free_bytes`` (or None).
        needs: needs of the ranks that take part.
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
        clocks: clock of each rank at the same moment, in seconds.
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


# --- the scheduler's files --------------------------------------------------------------------------


@dataclass(frozen=True)
class SchedulerFiles:
    """Contents of models.yml, device_types.yml and devices.yml."""

    models: Mapping[str, ModelSpec]
    types: Mapping[str, DeviceType]
    devices: Mapping[str, tuple[str, ...]]

    def type_of(self, host: str) -> DeviceType | None:
        """Return the device type of ``host``, or None if it is unknown."""
        names = (name for name, hosts in self.devices.items() if host in hosts)
        return self.types.get(next(names, ""))


def check_files(
    files: SchedulerFiles,
    *,
    model_name: str,
    n_layers: int,
    batch_size: int,
    dtype: str,
    hosts: Sequence[str] | None,
    world_size: int,
) -> list[Finding]:
    """Compare names and numbers in the files with each other, the model and ``-H``."""
    found = [
        *_check_model(files.models, model_name, n_layers),
        *_check_types(files, model_name, n_layers, batch_size, dtype),
        *_check_hosts(files.devices, hosts, world_size),
    ]
    return found or [ok("files", "models, device types, devices and -H match")]


def _check_model(models: Mapping[str, ModelSpec], name: str, n_layers: int) -> Iterator[Finding]:
    if name not in models:
        yield problem(
            "files",
            f"the models file (-sm) has no {name}{_near(name, models)}; it has {_listed(models)}: "
            "profile the model, or correct the name",
        )
    elif models[name].layers != n_layers:
        yield problem(
            "files",
            f"the models file (-sm) gives {name} {models[name].layers} layers, but the model has {n_layers}: "
            "profile it again",
        )


def _check_types(
    files: SchedulerFiles, model_name: str, n_layers: int, batch_size: int, dtype: str
) -> Iterator[Finding]:
    usable = 0
    for type_name, hosts in files.devices.items():
        if not hosts:
            continue
        left_out = f"so {_listed(hosts)} will not be used"
        if type_name not in files.types:
            yield warning(
                "files",
                f"the devices file (-sd) has hosts of type {type_name}, which the device types file (-sdt) "
                f"lacks{_near(type_name, files.types)}, {left_out}: profile such a host, or correct the name",
            )
            continue
        profiles = files.types[type_name].profiles.get(model_name, ())
        fitting = [
            profile
            for profile in profiles
            if profile.batch_size == batch_size and short_dtype(profile.dtype) == short_dtype(dtype)
        ]
        if not fitting:
            others = ", ".join(f"-u {other.batch_size} {short_dtype(other.dtype)}" for other in profiles)
            yield warning(
                "files",
                f"device type {type_name} has no profile of {model_name} for -u {batch_size} and "
                f"{short_dtype(dtype)} (it has {others or 'none'}), {left_out}: profile it",
            )
        elif len(fitting[0].time_s) != n_layers:
            yield problem(
                "files",
                f"the profile of {model_name} on {type_name} has {len(fitting[0].time_s)} times for "
                f"{n_layers} layers: profile it again",
            )
        else:
            usable += 1
    if not usable:
        yield problem("files", f"no host of the devices file has a profile of {model_name}: profile one")


def _check_hosts(
    devices: Mapping[str, tuple[str, ...]], hosts: Sequence[str] | None, world_size: int
) -> Iterator[Finding]:
    listed = [host for names in devices.values() for host in names]
    if hosts is None:
        ranks = {str(rank) for rank in range(world_size)}
        wrong = [host for host in listed if host not in ranks]
        if wrong:
            yield problem(
                "files",
                f"the devices file (-sd) has the host {wrong[0]}, which is not a rank from 0 to "
                f"{world_size - 1}: name the host of each rank with -H",
            )
        return
    for rank, host in enumerate(hosts):
        if host not in listed:
            yield warning(
                "files",
                f"-H names {host}, which the devices file (-sd) lacks{_near(host, listed)}, so rank {rank} "
                "will have nothing to do: add it there, or correct the name",
            )
    without_rank = [host for host in listed if host not in hosts]
    if without_rank:
        yield ok("files", f"not used, because -H does not name them: {_listed(without_rank)}")


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def _listed(names: Iterable[str], most: int = 8) -> str:
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return (", ".join(every[:most]) or "none") + more


# --- the links --------------------------------------------------------------------------------------


def check_links(
    pairs: Sequence[tuple[int, int]], measured: Mapping[int, Estimate], error: str | None
) -> list[Finding]:
    """Report the bandwidth and latency of the links.

    Args:
        pairs: source and destination of each link between two ranks, in the order of measuring.
        measured: estimates of the links that were measured, by number of link.
        error: the first error, if it is known.
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
    files: SchedulerFiles,
    hosts: Sequence[str],
) -> list[Finding]:
    """Check that links are as fast as the device types promise, on which the schedule relies.

    Args:
        pairs: source and destination of each link.
        measured: estimates by number of link.
        files: the scheduler's files.
        hosts: the host of each rank.
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
                    f"correct bw_Mbps there, or give {program_name('sched-pipeline')} a --neighbors-file",
                )
            )
    return found


def _speed(bytes_per_s: float) -> str:
    return f"{_mbps(bytes_per_s)} Mbps"


def _mbps(bytes_per_s: float) -> str:
    mbps = bytes_per_s / BYTES_PER_SECOND_PER_MBPS
    return figure(round(mbps) if mbps >= 100 else mbps, 3)
