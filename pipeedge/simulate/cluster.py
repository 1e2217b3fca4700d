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

from pipeedge.base.errors import ScheduleError, SpecError
from pipeedge.base.schedule import Schedule, StagePlan
from pipeedge.base.wording import count
from pipeedge.plan.simulation import PipelineModel, SimulatedLink, SimulatedStage
from pipeedge.plan.specs import (
    BYTES_PER_MB,
    DeviceType,
    Link,
    ModelProfile,
    ModelSpec,
    find_named,
    short_dtype,
)

__all__ = ["Cluster", "StageMemory", "Workload"]

STREAM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 2}
"""Of a value that leaves a stage of that type: with int8 weights, values are bfloat16 between the layers."""
BUFFERS = 2
"""Microbatches that a stage keeps before it, and as many behind it."""


@dataclass(frozen=True)
class Workload:
    """What is run."""

    model_name: str
    model: ModelSpec
    ubatch_size: int
    items: int
    tokens: int | None = None
    """Tokens of the longest sentence, for which ``model`` is; None: as profiled."""
    codec_bytes_per_s: float | None = None
    input_bytes: int | None = None
    """Bytes of one item of input; None: elements of the model in the number type of the first stage."""
    read_s: float = 0.0
    write_s: float = 0.0

    @property
    def microbatches(self) -> int:
        """All of them."""
        return -(-self.items // self.ubatch_size)

    def cut_bytes(self, layer: int, dtype: str, bits: int = 0) -> int:
        """Of a microbatch behind ``layer`` layers; the ranges of compressed values, a percent of them, are
        not counted.

        Args:
            layer: 0: the input.
            dtype: of the stage that sends it; of the input, that of the first stage.
            bits: of a value; 0: as it is.
        """
        if layer == 0 and self.input_bytes is not None:
            return self.input_bytes * self.ubatch_size
        elements = self.model.elements_out[layer - 1] if layer else self.model.elements_in
        values = elements * self.ubatch_size
        # Stages of any type give the outputs of the model as float32.
        size = STREAM_BYTES["float32" if layer == self.model.layers else dtype]
        return -(-values * bits // 8) if bits else values * size

    def sent_bytes(self, stage: StagePlan) -> int:
        """Of a microbatch that leaves ``stage``."""
        return self.cut_bytes(stage.layers.stop, stage.dtype, stage.quant_bits)

    def codec_s(self, sender: StagePlan) -> float:
        """Encoding, or decoding, what ``sender`` sends."""
        if not sender.quant_bits or self.codec_bytes_per_s is None:
            return 0.0
        return self.cut_bytes(sender.layers.stop, sender.dtype) / self.codec_bytes_per_s


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

    def profile(self, stage: StagePlan, load: Workload) -> ModelProfile:
        """Of the model on the host of ``stage``, under the conditions of the run.

        Raises:
            SpecError: it was not profiled so.
        """
        host = host_of(stage)
        name, device = self.type_of(host)
        known = find_named(device.profiles, load.model_name) or ()
        for profile in known:
            if _same_conditions(profile, stage.dtype, load):
                if len(profile.time_s) != load.model.layers:
                    raise SpecError(
                        f"the profile of {load.model_name} on {name} has "
                        f"{count(len(profile.time_s), 'layer')}, the "
                        f"model has {load.model.layers}"
                    )
                return profile if load.tokens is None else profile.at_tokens(load.tokens)
        has = ", ".join(f"{profile.batch_size} of {short_dtype(profile.dtype)}" for profile in known)
        raise SpecError(
            f"{name} (host {host}) has no profile of {load.model_name} for microbatches of "
            f"{load.ubatch_size} and {stage.dtype}; "
            + (f"it has them of {has}: change -u or --dtype, or profile it" if has else "profile it")
        )

    def data_work(self, data_host: str, dtype: str, load: Workload) -> tuple[float, float]:
        """Return the seconds in which the data rank feeds a microbatch and collects one; 0 where unknown.

        Args:
            data_host: host of the data rank.
            dtype: number type whose profile is asked.
            load: what is run.
        """
        _, device = self.type_of(data_host)
        for profile in find_named(device.profiles, load.model_name) or ():
            if _same_conditions(profile, dtype, load):
                return number(profile.extra.get("feed_s")), number(profile.extra.get("collect_s"))
        return 0.0, 0.0

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
        sent = [load.cut_bytes(0, schedule.stages[0].dtype), *map(load.sent_bytes, schedule.stages)]
        links = tuple(self._link_costs(*given) for given in zip(pairwise(hosts), sent, strict=True))
        # Nothing encodes what the data rank sends.
        codecs = [0.0, *map(load.codec_s, schedule.stages)]
        stages = []
        feed_s, collect_s = self.data_work(data_host, schedule.stages[0].dtype, load)
        for number, stage in enumerate(schedule.stages):
            profile, layers = self.profile(stage, load), stage.layers
            incoming, outgoing = links[number : number + 2]
            receive = 0.0 if incoming.in_memory else number_at(profile.extra.get("receive_s"), layers.first)
            stages.append(
                SimulatedStage(
                    # What the data rank does beside its stage takes the stage's processor.
                    compute_s=sum(profile.time_s[layers.start : layers.stop])
                    + (feed_s + collect_s if host_of(stage) == data_host else 0.0),
                    decode_s=receive + codecs[number],
                    encode_s=codecs[number + 1],
                    send_s=0.0 if outgoing.in_memory else number_at(profile.extra.get("send_s"), layers.last),
                )
            )
        last = load.items - (load.microbatches - 1) * load.ubatch_size
        return PipelineModel(
            tuple(stages),
            links,
            load.microbatches,
            max(load.read_s, feed_s),
            max(load.write_s, collect_s) + codecs[-1],
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
        extra = self.profile(stage, load).extra
        layers = stage.layers
        crossing = sum(load.cut_bytes(cut, stage.dtype) for cut in (layers.start, layers.stop))
        activations = max(number_at(extra.get("activations_MB"), layer + 1) for layer in _numbers(stage))
        return StageMemory(
            weights=sum(load.model.mem_bytes[layers.start : layers.stop]),
            buffers=float(BUFFERS * crossing),
            working=(activations + number(extra.get("process_MB"))) * BYTES_PER_MB,
            available=device.mem_bytes,
        )

    def threads(self, stage: StagePlan, load: Workload) -> int:
        """That the profile of the stage's host was made with; 1 where it does not say."""
        threads = self.profile(stage, load).extra.get("threads")
        return threads if isinstance(threads, int) else 1


def _same_conditions(profile: ModelProfile, dtype: str, load: Workload) -> bool:
    return profile.batch_size == load.ubatch_size and short_dtype(profile.dtype) == dtype


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
