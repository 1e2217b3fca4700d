"""The hosts of a simulated run, and its stages and links with what the scheduler says they cost. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeedge.base.errors import SpecError
from pipeedge.base.schedule import Schedule, StagePlan
from pipeedge.base.wording import count
from pipeedge.plan.costs import PlanCosts, StageCosts
from pipeedge.plan.specs import DeviceType, ModelProfile, ModelSpec, short_dtype
from pipeedge.simulate.simulation import PipelineModel, SimulatedLink, SimulatedStage

__all__ = ["SimulatedCluster", "StageMemory", "Workload", "host_of"]


@dataclass(frozen=True)
class Workload:
    """The model and input of a run."""

    model_name: str
    model: ModelSpec
    microbatch_size: int
    """Number of items in a microbatch."""
    items: int
    """Number of items in the whole run."""
    codec_bytes_per_s: float | None = None
    """Uncompressed bytes encoded, or decoded, per second, or None if that takes no time."""
    read_s: float = 0.0
    """Seconds to read a microbatch of input."""
    write_s: float = 0.0
    """Seconds to write the results of a microbatch."""

    @property
    def microbatches(self) -> int:
        """Number of microbatches in the whole run."""
        return -(-self.items // self.microbatch_size)

    def codec_s(self, sender: StageCosts) -> float:
        """Return the seconds to encode, or decode, a microbatch that ``sender`` sends."""
        if not sender.quant_bits or self.codec_bytes_per_s is None:
            return 0.0
        return sender.output_bytes / self.codec_bytes_per_s

    def pipeline(self, costs: PlanCosts, data_host: str | None) -> PipelineModel:
        """Return the stages and links of a plan.

        Args:
            costs: What the scheduler says of the plan.
            data_host: Host that reads the input and collects the results, or None if the files lack it, so
                that its links take no time.
        """
        stages = costs.schedule
        links = (_incoming(stages[0], data_host), *_outgoing(stages, data_host))
        codecs = [0.0, *map(self.codec_s, stages)]  # the data rank sends its input uncompressed
        last = self.items - (self.microbatches - 1) * self.microbatch_size
        return PipelineModel(
            tuple(
                SimulatedStage(
                    # Feeding and collecting use the processor of the data rank's own stage.
                    compute_s=stage.layers_s + stage.data_s,
                    decode_s=stage.receive_s + decode_s,
                    encode_s=encode_s,
                    send_s=stage.send_s,
                )
                for stage, (decode_s, encode_s) in zip(stages, pairwise(codecs), strict=True)
            ),
            links,
            self.microbatches,
            max(self.read_s, costs.feed_s),
            max(self.write_s, costs.collect_s) + codecs[-1],
            last / self.microbatch_size,
        )


def _incoming(first: StageCosts, data_host: str | None) -> SimulatedLink:
    """Return the link from the data rank to the first stage."""
    return _link(first.link_in_s, first.link_in_latency_s, in_memory=data_host in (None, first.host))


def _outgoing(stages: Sequence[StageCosts], data_host: str | None) -> Iterator[SimulatedLink]:
    """Yield the link that leaves each stage."""
    targets = [*(stage.host for stage in stages[1:]), data_host]
    for stage, target in zip(stages, targets, strict=True):
        yield _link(stage.link_out_s, stage.link_out_latency_s, in_memory=target in (None, stage.host))


def _link(seconds: float, latency_s: float, *, in_memory: bool) -> SimulatedLink:
    if in_memory:
        return SimulatedLink(in_memory=True)
    return SimulatedLink(max(0.0, seconds - latency_s), latency_s)


@dataclass(frozen=True)
class StageMemory:
    """Memory that a stage needs, in bytes."""

    weights: float
    """Bytes of the weights."""
    buffers: float
    """Bytes of the microbatches buffered at its input and output."""
    activations: float
    """Bytes of the activations of its largest layer, if the profile has them."""
    process: float
    """Bytes of the process itself, if the profile has them."""
    available: float
    """Bytes available to the stage."""

    @property
    def working(self) -> float:
        """Bytes of the process and the activations."""
        return self.process + self.activations

    @property
    def needed(self) -> float:
        """Bytes that have to be available."""
        return self.weights + self.buffers + self.activations

    @property
    def peak(self) -> float:
        """Peak memory of the stage in bytes."""
        return self.needed + self.process

    @property
    def is_missing(self) -> bool:
        """Whether the host lacks memory for the stage."""
        return self.needed > self.available * (1 + 1e-9)


@dataclass(frozen=True)
class SimulatedCluster:
    """Hosts as the scheduler's files describe them."""

    types: Mapping[str, DeviceType]
    """Device types by name, with the profiles of the workload's model under its name."""
    devices: Mapping[str, Sequence[str]]
    """Hosts of each device type."""

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
            if profile.batch_size == load.microbatch_size and short_dtype(profile.dtype) == stage.dtype:
                if len(profile.time_s) != load.model.layers:
                    raise SpecError(
                        f"the profile of {load.model_name} on {name} has "
                        f"{count(len(profile.time_s), 'layer')}, but the model has {load.model.layers}; "
                        "profile it again"
                    )
                return profile
        has = ", ".join(f"{profile.batch_size} of {short_dtype(profile.dtype)}" for profile in known)
        raise SpecError(
            f"{name} (host {host}) has no profile of {load.model_name} with microbatches of "
            f"{load.microbatch_size} and dtype {stage.dtype}; "
            + (f"it has {has}: change -u or --dtype, or profile it" if has else "profile it")
        )

    def layer_weights(self, schedule: Schedule, load: Workload) -> list[float]:
        """Return the bytes of each layer's weights in the number type of its stage."""
        return [
            weights
            for stage in schedule.stages
            for weights in self.profile(stage, load).weights_of(load.model)[
                stage.layers.start : stage.layers.stop
            ]
        ]

    def memory(self, stage: StagePlan, costs: StageCosts, load: Workload) -> StageMemory:
        """Return the memory that ``stage`` needs."""
        return StageMemory(
            weights=costs.mem_bytes - costs.activation_bytes - costs.buffer_bytes,
            buffers=costs.buffer_bytes,
            activations=costs.activation_bytes,
            process=self.profile(stage, load).process_bytes or 0.0,
            available=costs.mem_available_bytes,
        )


def host_of(stage: StagePlan) -> str:
    """Return the host of a stage, or its rank as text if the schedule names no host."""
    return str(stage.rank) if stage.host is None else stage.host
