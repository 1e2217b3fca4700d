"""Compute the cost of each stage and link from profiles and a schedule. Pure.

    time_s of the layers, receive_s before the first, send_s after the last    -> a stage
    elements of a cut x bytes a value / bandwidth(a, b), latency(a, b)         -> a link

The bandwidth between two hosts is the one that the neighbours file gives for the pair, in either direction,
or else the smaller of their types' bandwidths, as in ``sched-pipeline``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeedge.base.errors import ScheduleError, SpecError
from pipeedge.base.schedule import Schedule, StagePlan
from pipeedge.base.wording import count
from pipeedge.plan.problem import ELEMENT_BYTES, DataRankWork
from pipeedge.plan.simulation import PipelineModel, SimulatedLink, SimulatedStage
from pipeedge.plan.specs import DeviceType, ModelProfile, ModelSpec, NeighborLink, short_dtype

__all__ = ["SimulatedCluster", "StageMemory", "Workload"]

BUFFERS = 2
"""Number of microbatches that a stage buffers at its input, and as many at its output."""


@dataclass(frozen=True)
class Workload:
    """The model and input of a run."""

    model_name: str
    model: ModelSpec
    microbatch_size: int
    """Number of items in a microbatch."""
    items: int
    """Number of items in the whole run."""
    transport: str = "p2p"
    """Transport of the links, as profiles name it, whose costs are counted where a profile has them."""
    tokens: int | None = None
    """Tokens of the longest sentence, to which ``model`` is scaled, or None for the profiled length."""
    codec_bytes_per_s: float | None = None
    """Uncompressed bytes encoded, or decoded, per second, or None if that takes no time."""
    input_bytes: int | None = None
    """Bytes of one item of input, or None to count the model's elements in the first stage's dtype."""
    read_s: float = 0.0
    """Seconds to read a microbatch of input."""
    write_s: float = 0.0
    """Seconds to write the results of a microbatch."""

    @property
    def microbatches(self) -> int:
        """Number of microbatches in the whole run."""
        return -(-self.items // self.microbatch_size)

    def cut_bytes(self, layer: int, dtype: str, bits: int = 0) -> int:
        """Return the bytes of a microbatch after ``layer`` layers.

        The ranges of compressed values, about one percent, are not counted.

        Args:
            layer: Number of layers before the cut, 0 for the input.
            dtype: Dtype of the stage that sends it; for the input, that of the first stage.
            bits: Bits per value, 0 for uncompressed values.
        """
        if layer == 0 and self.input_bytes is not None:
            return self.input_bytes * self.microbatch_size
        elements = self.model.elements_out[layer - 1] if layer else self.model.elements_in
        values = elements * self.microbatch_size
        # Stages of every dtype return the outputs of the model as float32.
        size = ELEMENT_BYTES["float32" if layer == self.model.layers else dtype]
        return -(-values * bits // 8) if bits else values * size

    def sent_bytes(self, stage: StagePlan) -> int:
        """Return the bytes of a microbatch that ``stage`` sends."""
        return self.cut_bytes(stage.layers.stop, stage.dtype, stage.quant_bits)

    def all_cut_bytes(self, dtype: str) -> tuple[int, ...]:
        """Return the bytes of an uncompressed microbatch before each layer, and after the last."""
        return tuple(self.cut_bytes(layer, dtype) for layer in range(self.model.layers + 1))

    def codec_s(self, sender: StagePlan) -> float:
        """Return the seconds to encode, or decode, a microbatch that ``sender`` sends."""
        if not sender.quant_bits or self.codec_bytes_per_s is None:
            return 0.0
        return self.cut_bytes(sender.layers.stop, sender.dtype) / self.codec_bytes_per_s


@dataclass(frozen=True)
class StageMemory:
    """Memory that a stage needs, in bytes."""

    weights: float
    """Bytes of the weights."""
    buffers: float
    """Bytes of the microbatches buffered at its input and output."""
    working: float
    """Bytes of the process itself and the activations of its largest layer, if the profile has them."""
    available: float
    """Bytes available for weights and buffers."""

    @property
    def peak(self) -> float:
        """Peak memory of the stage in bytes."""
        return self.weights + self.buffers + self.working

    @property
    def missing(self) -> float:
        """Bytes that the host lacks for weights and buffers, 0 if they fit."""
        return max(0.0, self.weights + self.buffers - self.available)


@dataclass(frozen=True)
class SimulatedCluster:
    """Hosts and links as the scheduler's files describe them."""

    types: Mapping[str, DeviceType]
    """Device types by name, with the profiles of the workload's model under its name."""
    devices: Mapping[str, Sequence[str]]
    """Hosts of each device type."""
    neighbors: Mapping[str, Mapping[str, NeighborLink]]
    """Links by source and destination host, where they are known."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, in the order of the file."""
        return tuple(host for hosts in self.devices.values() for host in hosts)

    def knows(self, host: str) -> bool:
        """Return whether the files give the device type of ``host``."""
        return any(host in hosts and name in self.types for name, hosts in self.devices.items())

    def type_of(self, host: str) -> tuple[str, DeviceType]:
        """Return the device type of ``host``, with its name.

        Raises:
            SpecError: The files do not give it.
        """
        for name, hosts in self.devices.items():
            if host in hosts:
                if name not in self.types:
                    raise SpecError(
                        f"host {host} has the device type {name}, which the device types file does not "
                        "describe; profile it or correct the devices file"
                    )
                return name, self.types[name]
        raise SpecError(f"host {host} is not in the devices file; list it there under its device type")

    def profile(self, stage: StagePlan, load: Workload) -> ModelProfile:
        """Return the profile of the model on the host of ``stage``, under the conditions of the run.

        Raises:
            SpecError: The model was not profiled under these conditions.
        """
        host = host_of(stage)
        name, device = self.type_of(host)
        known = device.profiles.get(load.model_name, ())
        for profile in known:
            if _same_conditions(profile, stage.dtype, load):
                if len(profile.time_s) != load.model.layers:
                    raise SpecError(
                        f"the profile of {load.model_name} on {name} has "
                        f"{count(len(profile.time_s), 'layer')}, but the model has {load.model.layers}; "
                        "profile it again"
                    )
                scaled = profile if load.tokens is None else profile.at_tokens(load.tokens)
                return scaled.over(load.transport, load.all_cut_bytes(stage.dtype))
        has = ", ".join(f"{profile.batch_size} of {short_dtype(profile.dtype)}" for profile in known)
        raise SpecError(
            f"{name} (host {host}) has no profile of {load.model_name} with microbatches of "
            f"{load.microbatch_size} and dtype {stage.dtype}; "
            + (f"it has {has}: change -u or --dtype, or profile it" if has else "profile it")
        )

    def data_work(self, data_host: str | None, dtype: str, load: Workload) -> DataRankWork:
        """Return the data rank's own work.

        Args:
            data_host: Host of the data rank, or None if it is unknown.
            dtype: Dtype of the profile to use.
            load: The model and input.
        """
        if data_host is None:
            return DataRankWork()
        _, device = self.type_of(data_host)
        for profile in device.profiles.get(load.model_name, ()):
            if _same_conditions(profile, dtype, load):
                return DataRankWork(
                    profile.feed_s or 0.0,
                    profile.collect_s or 0.0,
                    profile.input_send_s(load.transport, load.cut_bytes(0, dtype)),
                    profile.output_receive_s(load.transport, load.cut_bytes(load.model.layers, dtype)),
                )
        return DataRankWork()

    def link(self, source: str, destination: str) -> NeighborLink:
        """Return the link between two hosts.

        Raises:
            ScheduleError: There is none.
        """
        named = self.neighbors.get(source, {}).get(destination)
        named = named or self.neighbors.get(destination, {}).get(source)
        link = named or NeighborLink(
            min(self.type_of(host)[1].bw_bytes_per_s for host in (source, destination))
        )
        if link.bw_bytes_per_s <= 0:
            raise ScheduleError(
                f"{source} cannot reach {destination}, because the bandwidth between them is 0; raise "
                "bw_Mbps or choose another schedule"
            )
        return link

    def pipeline(self, schedule: Schedule, data_host: str | None, load: Workload) -> PipelineModel:
        """Return the stages and links of ``schedule`` with their costs.

        Args:
            schedule: Schedule that names a host for each stage.
            data_host: Host that reads the input and collects the results, or None if the files lack it, so
                that its links take no time.
            load: The model and input.

        Raises:
            SpecError: A host or profile is missing.
            ScheduleError: No link connects the hosts of two successive stages.
        """
        stage_hosts = [host_of(stage) for stage in schedule.stages]
        hosts = (data_host or stage_hosts[0], *stage_hosts, data_host or stage_hosts[-1])
        sent = [load.cut_bytes(0, schedule.stages[0].dtype), *map(load.sent_bytes, schedule.stages)]
        links = tuple(self._link_costs(*given) for given in zip(pairwise(hosts), sent, strict=True))
        # The data rank sends its input uncompressed.
        codecs = [0.0, *map(load.codec_s, schedule.stages)]
        stages = []
        work = self.data_work(data_host, schedule.stages[0].dtype, load)
        for number, stage in enumerate(schedule.stages):
            profile, layers = self.profile(stage, load), stage.layers
            incoming, outgoing = links[number : number + 2]
            receive = 0.0 if incoming.in_memory else _of_layer(profile.receive_s, layers.start)
            stages.append(
                SimulatedStage(
                    # Feeding and collecting use the processor of the data rank's own stage.
                    compute_s=(profile.overhead_s or 0.0)
                    + sum(profile.time_s[layers.start : layers.stop])
                    + (work.beside_s(layers, load.model.layers) if host_of(stage) == data_host else 0.0),
                    decode_s=receive + codecs[number],
                    encode_s=codecs[number + 1],
                    send_s=0.0 if outgoing.in_memory else _of_layer(profile.send_s, layers.stop - 1),
                )
            )
        last = load.items - (load.microbatches - 1) * load.microbatch_size
        return PipelineModel(
            tuple(stages),
            links,
            load.microbatches,
            max(load.read_s, work.feeding_s(away=not links[0].in_memory)),
            max(load.write_s, work.collecting_s(away=not links[-1].in_memory)) + codecs[-1],
            last / load.microbatch_size,
        )

    def _link_costs(self, ends: tuple[str, str], size_bytes: int) -> SimulatedLink:
        if ends[0] == ends[1]:
            return SimulatedLink(in_memory=True)
        link = self.link(*ends)
        return SimulatedLink(size_bytes / link.bw_bytes_per_s, link.latency_s)

    def layer_weights(self, stage: StagePlan, load: Workload) -> tuple[float, ...]:
        """Return the bytes of each layer's weights on the host of ``stage``."""
        return self.profile(stage, load).weights_of(load.model)

    def memory(self, stage: StagePlan, load: Workload) -> StageMemory:
        """Return the memory that ``stage`` needs, counting weights and buffers as ``sched-pipeline`` does."""
        _, device = self.type_of(host_of(stage))
        profile, layers = self.profile(stage, load), stage.layers
        crossing = sum(load.cut_bytes(cut, stage.dtype) for cut in (layers.start, layers.stop))
        activations = max(profile.activation_bytes[layers.start : layers.stop], default=0.0)
        return StageMemory(
            weights=sum(profile.weights_of(load.model)[layers.start : layers.stop]),
            buffers=float(BUFFERS * crossing),
            working=activations + (profile.process_bytes or 0.0),
            available=device.mem_bytes,
        )

    def threads(self, stage: StagePlan, load: Workload) -> int:
        """Return the number of threads that the stage's host was profiled with, 1 if unknown."""
        return self.profile(stage, load).threads or 1


def _same_conditions(profile: ModelProfile, dtype: str, load: Workload) -> bool:
    return profile.batch_size == load.microbatch_size and short_dtype(profile.dtype) == dtype


def _of_layer(values: Sequence[float], layer: int) -> float:
    """Return an optional figure of the layer with this index, 0 if the profile has none."""
    return values[layer] if values else 0.0


def host_of(stage: StagePlan) -> str:
    """Return the host of a stage, or its rank as text if the schedule names no host."""
    return str(stage.rank) if stage.host is None else stage.host
