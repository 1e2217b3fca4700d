"""From profiles and a schedule to what each stage and link costs. Pure.

    time_s of the layers, receive_s before the first, send_s after the last    -> a stage
    elements of a cut x bytes a value / bandwidth(a, b), latency(a, b)         -> a link

The bandwidth between two hosts is what the neighbours file says of the pair, in either direction, else
the smaller of their types' bandwidths: as ``sched-pipeline`` counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pipeedge.errors import ScheduleError, SpecError
from pipeedge.schedule import Schedule, StagePlan
from pipeedge.simulation import PipelineModel, SimulatedLink, SimulatedStage
from pipeedge.specs import BYTES_PER_MB, DeviceType, Link, ModelProfile, ModelSpec, short_dtype

__all__ = ["Cluster", "StageMemory", "Workload"]

VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
BUFFERS = 2
"""Microbatches that a stage keeps before it, and as many behind it."""


@dataclass(frozen=True)
class Workload:
    """What is run. Validated on creation."""

    model_name: str
    model: ModelSpec
    ubatch_size: int
    dtype: str
    items: int
    codec_bytes_per_s: float | None = None
    read_s: float = 0.0
    write_s: float = 0.0

    def __post_init__(self) -> None:
        if short_dtype(self.dtype) not in VALUE_BYTES:
            raise SpecError(f"--dtype {self.dtype}: choose one of {', '.join(VALUE_BYTES)}")

    @property
    def value_bytes(self) -> int:
        """Of one value."""
        return VALUE_BYTES[short_dtype(self.dtype)]

    @property
    def microbatches(self) -> int:
        """All of them."""
        return -(-self.items // self.ubatch_size)

    def cut_bytes(self, layer: int, bits: int = 0) -> int:
        """Of a microbatch where ``layer`` layers lie behind it; the ranges of compressed values, a percent
        of them, are not counted."""
        elements = self.model.elements_out[layer - 1] if layer else self.model.elements_in
        values = elements * self.ubatch_size
        return -(-values * bits // 8) if bits else values * self.value_bytes

    def codec_s(self, layer: int, bits: int) -> float:
        """Encoding, or decoding, what crosses a cut."""
        if not bits or self.codec_bytes_per_s is None:
            return 0.0
        return self.cut_bytes(layer) / self.codec_bytes_per_s


@dataclass(frozen=True)
class StageMemory:
    """What a stage needs, bytes."""

    weights: float
    buffers: float
    """Microbatches that wait, before it and behind it."""
    working: float
    """Activations of its largest layer and the process itself, where the profile says it."""
    available: float
    """For weights and buffers."""

    @property
    def peak(self) -> float:
        """All of it."""
        return self.weights + self.buffers + self.working

    @property
    def missing(self) -> float:
        """More than there is; 0 where it fits."""
        return max(0.0, self.weights + self.buffers - self.available)


@dataclass(frozen=True)
class Cluster:
    """Hosts, by the scheduler's files."""

    types: Mapping[str, DeviceType]
    devices: Mapping[str, Sequence[str]]
    neighbors: Mapping[str, Mapping[str, Link]]

    @property
    def hosts(self) -> tuple[str, ...]:
        """All of them, in the order of the files."""
        return tuple(host for hosts in self.devices.values() for host in hosts)

    def type_of(self, host: str) -> tuple[str, DeviceType]:
        """The kind of device that ``host`` is, with its name.

        Raises:
            SpecError: the files do not say it.
        """
        for name, hosts in self.devices.items():
            if host in hosts:
                if name not in self.types:
                    raise SpecError(f"the host {host} is of the type {name}, which has no device type entry")
                return name, self.types[name]
        raise SpecError(f"the host {host} is under no type of the devices file; list it there")

    def profile(self, host: str, load: Workload) -> ModelProfile:
        """Of the model on ``host``, under the conditions of the run.

        Raises:
            SpecError: it was not profiled so.
        """
        name, device = self.type_of(host)
        known = device.profiles.get(load.model_name, ())
        for profile in known:
            if profile.batch_size == load.ubatch_size and short_dtype(profile.dtype) == short_dtype(
                load.dtype
            ):
                if len(profile.time_s) != load.model.layers:
                    raise SpecError(
                        f"the profile of {load.model_name} on {name} has {len(profile.time_s)} layers, the "
                        f"model has {load.model.layers}"
                    )
                return profile
        has = ", ".join(f"{profile.batch_size} of {short_dtype(profile.dtype)}" for profile in known)
        raise SpecError(
            f"{name} (host {host}) has no profile of {load.model_name} for microbatches of "
            f"{load.ubatch_size} and {short_dtype(load.dtype)}; "
            + (f"it has them of {has}: change -u or --dtype, or profile it" if has else "profile it")
        )

    def link(self, source: str, destination: str) -> Link:
        """What joins two hosts.

        Raises:
            ScheduleError: nothing does.
        """
        named = self.neighbors.get(source, {}).get(destination)
        named = named or self.neighbors.get(destination, {}).get(source)
        link = named or Link(min(self.type_of(host)[1].bw_bytes_per_s for host in (source, destination)))
        if link.bw_bytes_per_s <= 0:
            raise ScheduleError(
                f"there is no link between {source} and {destination}: their bandwidth is 0; raise bw_Mbps "
                "or choose another schedule"
            )
        return link

    def pipeline(self, schedule: Schedule, data_host: str, load: Workload) -> PipelineModel:
        """``schedule`` as stages and links with their costs.

        Args:
            schedule: with a host for each stage.
            data_host: reads the input and collects the results.
            load: what is run.

        Raises:
            SpecError: a host or profile is missing.
            ScheduleError: hosts that no link joins.
        """
        hosts = (data_host, *(host_of(stage) for stage in schedule.stages), data_host)
        cuts = [(0, 0), *((stage.layers.stop, stage.quant_bits) for stage in schedule.stages)]
        links = tuple(
            self._link_costs(pair, load.cut_bytes(*cut))
            for pair, cut in zip(pairwise(hosts), cuts, strict=True)
        )
        stages = []
        for stage, incoming, outgoing, (cut, bits) in zip(
            schedule.stages, links[:-1], links[1:], cuts[:-1], strict=True
        ):
            profile = self.profile(host_of(stage), load)
            layers = stage.layers
            receive = 0.0 if incoming.in_memory else number_at(profile.extra.get("receive_s"), layers.first)
            stages.append(
                SimulatedStage(
                    compute_s=sum(profile.time_s[layers.start : layers.stop]),
                    decode_s=receive + load.codec_s(cut, bits),
                    encode_s=load.codec_s(layers.stop, stage.quant_bits),
                    send_s=0.0 if outgoing.in_memory else number_at(profile.extra.get("send_s"), layers.last),
                )
            )
        last = load.items - (load.microbatches - 1) * load.ubatch_size
        return PipelineModel(
            tuple(stages),
            links,
            load.microbatches,
            load.read_s,
            load.write_s + load.codec_s(schedule.n_layers, schedule.stages[-1].quant_bits),
            last / load.ubatch_size,
        )

    def _link_costs(self, ends: tuple[str, str], amount: int) -> SimulatedLink:
        if ends[0] == ends[1]:
            return SimulatedLink(in_memory=True)
        link = self.link(*ends)
        return SimulatedLink(amount / link.bw_bytes_per_s, link.latency_s)

    def memory(self, stage: StagePlan, load: Workload) -> StageMemory:
        """What ``stage`` needs, as ``sched-pipeline`` counts weights and buffers."""
        _, device = self.type_of(host_of(stage))
        extra = self.profile(host_of(stage), load).extra
        layers = stage.layers
        crossing = load.cut_bytes(layers.start) + load.cut_bytes(layers.stop)
        activations = max(number_at(extra.get("activations_MB"), layer + 1) for layer in _numbers(stage))
        return StageMemory(
            weights=sum(load.model.mem_bytes[layers.start : layers.stop]),
            buffers=float(BUFFERS * crossing),
            working=(activations + number(extra.get("process_MB"))) * BYTES_PER_MB,
            available=device.mem_bytes,
        )

    def threads(self, stage: StagePlan, load: Workload) -> int:
        """That the profile of the stage's host was made with; 1 where it does not say."""
        threads = self.profile(host_of(stage), load).extra.get("threads")
        return threads if isinstance(threads, int) else 1


def _numbers(stage: StagePlan) -> range:
    return range(stage.layers.start, stage.layers.stop)


def host_of(stage: StagePlan) -> str:
    """The host of a stage; one that is called by its rank has no other name."""
    return str(stage.rank) if stage.host is None else stage.host


def number(value: Any) -> float:
    """A figure that a profile may have; 0 where another tool has put something else there."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    return float(value) if usable else 0.0


def number_at(values: Any, layer: int) -> float:
    """The figure of a layer, from 1."""
    return number(values[layer - 1]) if isinstance(values, list) and layer <= len(values) else 0.0
