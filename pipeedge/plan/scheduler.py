"""The one door to the scheduler, the program ``sched-pipeline``.

SchedulerRequest ──sched-pipeline --format=problem──> Problem      (it alone reads the user's YAML files)
Problem ──sched-pipeline --problem=-──> Solution

What the files say by themselves, without a request, is in ``plan.spec_files``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.base.schedule import Schedule
from pipeedge.plan.problem import Problem, SolverOptions
from pipeedge.plan.sched_pipeline import GRACE_S, PROGRAM, not_understood, run_program
from pipeedge.plan.schedule_files import schedule_on

__all__ = [
    "HostLoss",
    "PromisedStage",
    "SchedulerRequest",
    "Solution",
    "read_problem",
    "solve",
]


@dataclass(frozen=True)
class SchedulerRequest:
    """A scheduling request over the user's YAML files. Validated on creation.

    Raises:
        RequestError: A number or name is outside its range.
    """

    models_file: Path
    dev_types_file: Path
    dev_file: Path
    model_name: str
    microbatch_size: int = 8
    """Number of items in a microbatch, as the device types were profiled."""
    dtype: str = "torch.float32"
    """Number type of the stages."""
    dtype_of: Mapping[str, str] = field(default_factory=dict)
    """Number type of each device type; unless empty, device types that it does not name take no part."""
    buffers_in: int = 2
    """Number of microbatches that a stage holds before it computes."""
    buffers_out: int = 2
    """Number of microbatches that a stage holds until they are sent."""
    data_host: str | None = None
    """Host that reads the inputs and collects the outputs; its links and its own work count."""
    input_bytes: int | None = None
    """Bytes of one item of input, or None to count the models file's elements in the stages' number type."""
    hosts: tuple[str, ...] = ()
    """Hosts of the devices file to schedule on; empty for all."""
    dev_neighbors_file: Path | None = None
    """File with the bandwidths of pairs of hosts."""
    link_bits: str = "0"
    """Bits per value on links between stages, or ``auto``."""
    tokens: int | None = None
    """Tokens of the longest sentence, to which times and sizes are scaled; None: as profiled."""
    transport: str = "p2p"
    """Transport of the links, whose costs are counted where a profile has them."""
    objective: str = "throughput"
    """``throughput``, ``latency`` or, for a joint plan, ``energy``."""
    min_throughput: float | None = None
    """Least items per second where energy is the objective; None for any."""
    time_limit_s: float = 10.0
    survive_loss: bool = False
    """Whether only a schedule that survives the loss of any one host but the data host will do."""
    losses: bool = False
    """Whether to find out what the loss of each host would cost."""

    def __post_init__(self) -> None:
        if self.microbatch_size < 1:
            raise RequestError(
                f"the scheduler's microbatch size is {self.microbatch_size}; it must be at least 1"
            )
        for name in ("buffers_in", "buffers_out"):
            if getattr(self, name) < 0:
                raise RequestError(f"{name} is {getattr(self, name)}; it must not be negative")
        _ = self.solver_options

    @property
    def solver_options(self) -> SolverOptions:
        """Objective, link bits, limits, and what is asked besides the schedule."""
        return SolverOptions(
            self.objective,
            self.link_bits,
            self.time_limit_s,
            survive_loss=self.survive_loss,
            losses=self.losses,
        )

    def arguments(self) -> list[str]:
        """Return the command line that describes the problem, without the program."""
        options = {
            "--models-file": self.models_file,
            "--dev-types-file": self.dev_types_file,
            "--dev-file": self.dev_file,
            "--model-name": self.model_name,
            "--batch-size": self.microbatch_size,
            "--dtype": self.dtype,
            "--buffers-in": self.buffers_in,
            "--buffers-out": self.buffers_out,
            "--tokens": self.tokens,
            "--transport": None if self.transport == "p2p" else self.transport,
            "--data-host": self.data_host,
            "--input-bytes": self.input_bytes,
            "--hosts": ",".join(self.hosts) or None,
            "--dev-neighbors-file": self.dev_neighbors_file,
        }
        return [
            *(f"{name}={value}" for name, value in options.items() if value is not None),
            *(f"--dtype-of={kind}={dtype}" for kind, dtype in self.dtype_of.items()),
        ]


@dataclass(frozen=True)
class PromisedStage:
    """Predicted costs of one stage, per microbatch."""

    compute_s: float
    """Seconds for its layers, receiving and sending, on the data host also for the data rank's own work
    if the profile has it."""
    link_out_s: float
    """Seconds of its outgoing link; 0 where nothing is counted."""
    threads: int | None = None
    """Threads its device was profiled with, or None if the profile does not say."""
    tokens: tuple[int, ...] = ()
    """Sentence lengths its device was profiled with, shortest first; empty if unknown."""
    data_s: float = 0.0
    """Seconds of ``compute_s`` that are the data rank's own work."""
    kernels: str | None = None
    """Kernels its device was profiled with, where the profile says it."""


@dataclass(frozen=True)
class HostLoss:
    """Cost of losing one host."""

    host: str
    why: str | None = None
    """Why it would end the run, or None if the run would go on."""
    throughput_items_per_s: float | None = None
    """Items per second on the other hosts; None if the run would end, or if nothing takes time."""


@dataclass(frozen=True)
class Solution:
    """A schedule and its predicted costs."""

    schedule: Schedule
    bottleneck_s: float
    """Seconds of the slowest stage or link for one microbatch."""
    throughput_items_per_s: float | None
    """Items per second once the pipeline is full, or None if nothing takes time."""
    latency_s: float
    """Seconds of one microbatch through the idle pipeline."""
    gap: float
    """Largest possible distance from the optimum, as a fraction; 0 if proven optimal."""
    bottleneck: str
    """Description of the bottleneck: ``stage 3 on rcc-0 computes 1.549 s``."""
    warnings: tuple[str, ...]
    """Warnings, such as device types that cannot take part, one line each."""
    stages: tuple[PromisedStage, ...] = ()
    """Predicted costs of the stages, in the order of the schedule."""
    input_link_s: float = 0.0
    """Seconds of the link from the data host to the first stage; 0 where nothing is counted."""
    feed_s: float = 0.0
    """Seconds that the data rank takes to read and feed a microbatch, with sending it if the first stage is
    on another host; 0 if unknown."""
    collect_s: float = 0.0
    """Seconds that the data rank takes to collect the results of a microbatch, with receiving them if the
    last stage is on another host; 0 if unknown."""
    losses: tuple[HostLoss, ...] = ()
    """Losses of hosts with a stage and of the data host; empty if not asked for."""
    joules_per_item: float | None = None
    """Energy of all hosts that are on, or None if the watts of one are unknown, or nobody planned for it."""


def read_problem(request: SchedulerRequest, *, executable: Path | None = None) -> Problem:
    """Return the problem that the user's files make together.

    Args:
        request: The files and what is asked of them.
        executable: The program; by default ``find_executable()``.

    Raises:
        RequestError: The files or options are wrong, or the program is missing.
        PipeEdgeError: The program failed.
    """
    printed = run_program(["--format=problem", *request.arguments()], executable=executable)
    try:
        return Problem.from_json(printed, request.solver_options)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise not_understood(error) from error


def solve(
    problem: Problem, *, hosts: Sequence[str] | None = None, executable: Path | None = None
) -> Solution:
    """Find the best schedule.

    Args:
        problem: What to schedule, on what.
        hosts: The host of each rank; None where the hosts are called by their ranks.
        executable: The program; by default ``find_executable()``.

    Raises:
        ScheduleError: A host of the schedule has no rank.
        InfeasibleError: No schedule is feasible, or none was found in time (``UndecidedError``).
        RequestError: The program is missing.
        PipeEdgeError: The program failed.
    """
    answer = run_program(
        ["--problem=-", "--format=json", *problem.options.arguments()],
        problem.to_json(),
        timeout_s=problem.options.time_limit_s + GRACE_S,
        executable=executable,
    )
    return _read_answer(answer, hosts, problem)


def _read_answer(text: str, hosts: Sequence[str] | None, problem: Problem) -> Solution:
    try:
        answer: dict[str, Any] = json.loads(text)
        stages = [
            (str(stage["host"]), tuple(stage["layers"]), int(stage["quant_bits"]), "float32")
            for stage in answer["schedule"]
        ]
        schedule = schedule_on(stages, hosts, program_name(PROGRAM))
        kinds = [problem.kind_of(host) for host, *_ in stages]
        if all(kind.dtype for kind in kinds):
            schedule = schedule.with_dtypes([kind.dtype for kind in kinds])
        return Solution(
            schedule=schedule.check(n_layers=answer["layers"], world_size=max(schedule.ranks) + 1),
            bottleneck_s=answer["bottleneck_s"],
            throughput_items_per_s=answer["throughput_items_per_s"],
            latency_s=answer["latency_s"],
            gap=answer["gap"],
            bottleneck=answer["bottleneck"]["words"],
            warnings=tuple(answer["warnings"]),
            stages=tuple(
                PromisedStage(
                    compute_s=stage["compute_s"] + stage["data_s"],
                    link_out_s=stage["link_out_s"],
                    threads=kind.threads,
                    kernels=kind.kernels,
                    tokens=kind.tokens,
                    data_s=stage["data_s"],
                )
                for stage, kind in zip(answer["schedule"], kinds, strict=True)
            ),
            input_link_s=answer["schedule"][0]["link_in_s"],
            feed_s=answer["feed_s"],
            collect_s=answer["collect_s"],
            losses=tuple(
                HostLoss(loss["host"], loss.get("why"), loss.get("throughput_items_per_s"))
                for loss in answer.get("losses", ())
                if loss["effect"] != "none"
            ),
        )
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise not_understood(error) from error
