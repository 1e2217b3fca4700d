"""The one door to the scheduler, the program ``sched-pipeline``; and schedules in files.

    SchedulerRequest ──sched-pipeline --format=problem──> Problem      (it alone reads the user's YAML files)
    Problem ──sched-pipeline --problem=-──> Plan(schedule, what it promises)

A schedule names hosts, the runtime counts ranks. ``hosts`` (the runtime's ``-H``) joins the two: the
host at index r is rank r. Without it the hosts must be called by their ranks: ``0``, ``1``, ...

A schedule file is what ``sched-pipeline`` prints. A stage whose link is compressed, or which computes in
another number type than float32, says so in further keys of its entry; without them the file is the
original's, byte for byte:

    - mb-0: [1, 24]
      quant_bits: 8
      dtype: int8
    - rcc-0: [25, 48]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeedge.base.errors import InfeasibleError, PipeEdgeError, RequestError, ScheduleError
from pipeedge.base.schedule import BIT_WIDTHS, DTYPES, LayerRange, Schedule, StagePlan
from pipeedge.base.wording import count
from pipeedge.base.yamlfile import Field, read_document, write_text, yaml_name
from pipeedge.plan.problem import Problem, SolverOptions
from pipeedge.plan.specs import short_dtype

__all__ = [
    "Plan",
    "PromisedStage",
    "SchedulerRequest",
    "UndecidedError",
    "find_executable",
    "format_schedule",
    "load_schedule",
    "plan",
    "read_problem",
    "save_schedule",
]

PROGRAM = "sched-pipeline"
_GRACE_S = 60.0
"""Beyond its time limit, for reading the files and saying why nothing is feasible."""


@dataclass(frozen=True)
class SchedulerRequest:
    """A question about the user's YAML files. Validated on creation.

    Raises:
        RequestError: a number or name outside its range.
    """

    models_file: Path
    dev_types_file: Path
    dev_file: Path
    model_name: str
    batch_size: int = 8
    """Items of a microbatch, as the device types were profiled."""
    dtype: str = "torch.float32"
    dtype_of: Mapping[str, str] = field(default_factory=dict)
    """Number type of each device type; unless it is empty, types that it does not name take no part."""
    buffers_in: int = 2
    """Microbatches a stage holds before it computes."""
    buffers_out: int = 2
    """Microbatches a stage holds until they are sent."""
    data_host: str | None = None
    """Reads the inputs and collects the outputs; its links and its own work count."""
    input_bytes: int | None = None
    """Bytes of one item of input; None: elements of the models file in the number type of the stages."""
    hosts: tuple[str, ...] = ()
    """Hosts of the devices file to schedule on; empty: all."""
    dev_neighbors_file: Path | None = None
    link_bits: str = "0"
    """Bits a value on links between stages, or ``auto``."""
    tokens: int | None = None
    """Tokens of the longest sentence, to which times and sizes are scaled; None: as profiled."""
    objective: str = "throughput"
    time_limit_s: float = 10.0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise RequestError(f"the scheduler's batch size is {self.batch_size}; it must be at least 1")
        for name in ("buffers_in", "buffers_out"):
            if getattr(self, name) < 0:
                raise RequestError(f"{name} is {getattr(self, name)}; it must not be negative")
        _ = self.solver_options

    @property
    def solver_options(self) -> SolverOptions:
        """Solver options."""
        return SolverOptions(self.objective, self.link_bits, self.time_limit_s)

    def arguments(self) -> list[str]:
        """Return the command line that describes the problem, without the program."""
        options = {
            "--models-file": self.models_file,
            "--dev-types-file": self.dev_types_file,
            "--dev-file": self.dev_file,
            "--model-name": self.model_name,
            "--batch-size": self.batch_size,
            "--dtype": self.dtype,
            "--buffers-in": self.buffers_in,
            "--buffers-out": self.buffers_out,
            "--tokens": self.tokens,
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
    """What one stage of a schedule is to take, for one microbatch."""

    compute_s: float
    """Of its layers, of taking a microbatch from a link and passing it on, and on the data host of the data
    rank's own work, where the profile says it."""
    link_out_s: float
    """Of its outgoing link; 0 where nothing is counted."""
    threads: int | None = None
    """Threads its device was profiled with, where the profile says it."""
    tokens: tuple[int, ...] = ()
    """Sentence lengths its device was profiled with, shortest first, where the profile says it."""
    data_s: float = 0.0
    """Seconds of ``compute_s`` that are the data rank's own work."""


@dataclass(frozen=True)
class Plan:
    """A schedule and what it promises."""

    schedule: Schedule
    bottleneck_s: float
    """Time of the slowest stage or link, for one microbatch."""
    throughput_items_per_s: float | None
    """None where nothing takes time."""
    latency_s: float
    """Of one microbatch through the idle pipeline."""
    lower_bound_s: float
    """Of the objective: no schedule is better than that."""
    gap: float
    """Distance from the optimum at most, as a fraction; 0: proven optimal."""
    bottleneck: str
    """In words: ``stage 3 on rcc-0 computes 1.549 s``."""
    warnings: tuple[str, ...]
    """Device types that could not take part, one line each."""
    unused_hosts: tuple[tuple[str, str], ...]
    """Host and why it is not used."""
    stages: tuple[PromisedStage, ...] = ()
    """In the order of the schedule."""
    input_link_s: float = 0.0
    """Of the link from the data host to the first stage; 0 where nothing is counted."""
    feed_s: float = 0.0
    """Seconds in which the data rank reads and feeds a microbatch, where the profile says it."""
    collect_s: float = 0.0
    """Seconds in which it collects the results of one, where the profile says it."""


def find_executable() -> Path:
    """``sched-pipeline`` beside this interpreter, else on the ``PATH``.

    Raises:
        RequestError: it is in neither place.
    """
    beside = Path(sys.executable).parent
    found = shutil.which(PROGRAM, path=str(beside)) or shutil.which(PROGRAM)
    if found is None:
        raise RequestError(
            f"{PROGRAM} is neither in {beside} nor on the PATH; install the package (pip install -e .)"
        )
    return Path(found)


class UndecidedError(InfeasibleError):
    """The time limit passed before a schedule was found or excluded."""


def read_problem(request: SchedulerRequest, *, executable: Path | None = None) -> Problem:
    """Return the problem that the user's files make together.

    Args:
        request: the files and what is asked of them.
        executable: the program; by default ``find_executable()``.

    Raises:
        RequestError: the files or options are wrong, or the program is missing.
        PipeEdgeError: the program failed.
    """
    printed = _run(["--format=problem", *request.arguments()], "", _GRACE_S, executable)
    try:
        return Problem.from_json(printed, request.solver_options)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_understood(error) from error


def plan(problem: Problem, *, hosts: Sequence[str] | None = None, executable: Path | None = None) -> Plan:
    """Find the best schedule.

    Args:
        problem: what to schedule, on what.
        hosts: the host of each rank; None where the hosts are called by their ranks.
        executable: the program; by default ``find_executable()``.

    Raises:
        ScheduleError: a host of the schedule has no rank.
        InfeasibleError: no schedule is feasible, or none was found in time (``UndecidedError``).
        RequestError: the program is missing.
        PipeEdgeError: the program failed.
    """
    answer = _run(
        ["--problem=-", "--format=json", *problem.options.arguments()],
        problem.to_json(),
        problem.options.time_limit_s + _GRACE_S,
        executable,
    )
    return _read_answer(answer, hosts, problem)


def _run(arguments: Sequence[str], text: str, timeout_s: float, executable: Path | None) -> str:
    """Run the program on ``text`` and return what it prints."""
    program = executable or find_executable()
    try:
        done = subprocess.run(
            [str(program), *arguments],
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise RequestError(f"{program} does not start: {error.strerror}") from error
    except ValueError as error:  # a zero byte in a name
        raise RequestError(f"a name cannot be passed to {PROGRAM}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise PipeEdgeError(f"{PROGRAM} did not answer within {error.timeout:.0f} s") from error
    if done.returncode != 0:
        raise _failure(done.returncode, done.stdout, done.stderr)
    return done.stdout


def _failure(code: int, stdout: str, stderr: str) -> PipeEdgeError:
    lines = stderr.strip().splitlines()
    said = lines[-1].replace(f"{PROGRAM}: error: ", f"{PROGRAM}: ", 1) if lines else ""
    if code == RequestError.exit_code:
        return RequestError(said)
    if code == InfeasibleError.exit_code:
        return UndecidedError(said) if '"unknown"' in stdout else InfeasibleError(said)
    how = f"was ended by signal {-code}" if code < 0 else f"failed with exit status {code}"
    return PipeEdgeError(f"{PROGRAM} {how}" + (f": {said}" if said else ""))


def _not_understood(error: Exception) -> PipeEdgeError:
    return PipeEdgeError(
        f"{PROGRAM} is of another version: its answer is not understood ({error!r}); install the package anew"
    )


def _read_answer(text: str, hosts: Sequence[str] | None, problem: Problem) -> Plan:
    try:
        answer: dict[str, Any] = json.loads(text)
        stages = [
            (str(stage["host"]), tuple(stage["layers"]), int(stage["quant_bits"]), "float32")
            for stage in answer["schedule"]
        ]
        schedule = _schedule(stages, hosts, PROGRAM)
        kinds = [problem.kind_of(host) for host, *_ in stages]
        if all(kind.dtype for kind in kinds):
            schedule = schedule.with_dtypes([kind.dtype for kind in kinds])
        return Plan(
            schedule=schedule.check(n_layers=answer["layers"], world_size=max(schedule.ranks) + 1),
            bottleneck_s=answer["bottleneck_s"],
            throughput_items_per_s=answer["throughput_items_per_s"],
            latency_s=answer["latency_s"],
            lower_bound_s=answer["lower_bound_s"],
            gap=answer["gap"],
            bottleneck=answer["bottleneck"]["words"],
            warnings=tuple(answer["warnings"]),
            unused_hosts=tuple((host["host"], host["why"]) for host in answer["unused_hosts"]),
            stages=tuple(
                PromisedStage(
                    compute_s=stage["compute_s"] + stage["data_s"],
                    link_out_s=stage["link_out_s"],
                    threads=kind.threads,
                    tokens=kind.tokens,
                    data_s=stage["data_s"],
                )
                for stage, kind in zip(answer["schedule"], kinds, strict=True)
            ),
            input_link_s=answer["schedule"][0]["link_in_s"],
            feed_s=answer["feed_s"],
            collect_s=answer["collect_s"],
        )
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise _not_understood(error) from error


def _schedule(
    stages: Sequence[tuple[str, Sequence[int], int, str]], hosts: Sequence[str] | None, source: str
) -> Schedule:
    """Hosts become ranks: by their place in ``hosts``, or by their names, which are numbers then."""
    names = [host for host, *_ in stages]
    for name in names:
        if names.count(name) > 1:
            raise ScheduleError(f"{source}: the host {name} is given {names.count(name)} stages; it runs one")
    if hosts is not None:
        for host in hosts:
            if list(hosts).count(host) > 1:
                raise ScheduleError(f"the list of hosts names {host} twice; each rank needs its own")
    plans = []
    for name, layers, quant_bits, dtype in stages:
        if hosts is None:
            if not (name.isascii() and name.isdecimal()):
                raise ScheduleError(
                    f"{source}: the host {name} is no rank; name the host of each rank with -H, or call the "
                    "hosts by their ranks"
                )
            rank = int(name)
        elif name not in hosts:
            raise ScheduleError(
                f"{source}: the host {name} has no rank; the hosts that have one are {', '.join(hosts)}"
            )
        else:
            rank = list(hosts).index(name)
        plans.append(
            StagePlan(
                layers=LayerRange.inclusive(*layers),
                rank=rank,
                host=None if hosts is None else name,
                quant_bits=quant_bits,
                dtype=dtype,
            )
        )
    return Schedule(tuple(plans))


# --- schedule files ---------------------------------------------------------------------------------

_QUANT_BITS = "quant_bits"
_DTYPE = "dtype"


def load_schedule(path: str | os.PathLike[str], *, hosts: Sequence[str] | None = None) -> Schedule:
    """Read a saved schedule.

    Args:
        path: the file.
        hosts: the host of each rank; None where the hosts are called by their ranks.

    Raises:
        SpecError: the file is not a schedule; with file, line and key.
        ScheduleError: the schedule cannot be: layers uncovered, a host without a rank, a rank twice.
    """
    document = read_document(path)
    stages = [_read_stage(entry) for entry in document.items()]
    if not stages:
        document.fail("holds no stage")
    try:
        return _schedule(stages, hosts, document.file)
    except ScheduleError as error:
        where = "" if str(error).startswith(document.file) else f"{document.file}: "
        raise ScheduleError(f"{where}{error}") from error


def _read_stage(entry: Field) -> tuple[str, tuple[int, int], int, str]:
    fields = entry.entries()
    bits, dtype = fields.pop(_QUANT_BITS, None), fields.pop(_DTYPE, None)
    if len(fields) != 1:
        entry.fail("must have one host, as in '- host: [first, last]'")
    ((host, layers),) = fields.items()
    bounds = [bound.whole_number() for bound in layers.items()]
    if len(bounds) != 2:
        layers.fail(f"has {count(len(bounds), 'number')}; the first and the last layer are expected")
    if not 1 <= bounds[0] <= bounds[1]:
        layers.fail(f"[{bounds[0]}, {bounds[1]}] is not a range of layers: use 1 <= first <= last")
    quant_bits = 0 if bits is None else bits.whole_number()
    if bits is not None and quant_bits and quant_bits not in BIT_WIDTHS:
        bits.fail(f"is {quant_bits}; a link carries 2 to 8 or 16 bits a value, or 0 for values as they are")
    name = "float32" if dtype is None else short_dtype(dtype.text())
    if dtype is not None and name not in DTYPES:
        dtype.fail(f"is {name!r}; a stage computes in one of {', '.join(DTYPES)}")
    return host, (bounds[0], bounds[1]), quant_bits, name


def format_schedule(schedule: Schedule) -> str:
    """``schedule`` as ``load_schedule`` reads it; a stage without a host goes by its rank."""
    lines = []
    for stage in schedule.stages:
        name = str(stage.rank) if stage.host is None else yaml_name(stage.host)
        lines.append(f"- {name}: [{stage.layers.first}, {stage.layers.last}]\n")
        if stage.quant_bits:
            lines.append(f"  {_QUANT_BITS}: {stage.quant_bits}\n")
        if stage.dtype != "float32":
            lines.append(f"  {_DTYPE}: {stage.dtype}\n")
    return "".join(lines)


def save_schedule(path: str | os.PathLike[str], schedule: Schedule) -> None:
    """Write a schedule file, whole or not at all.

    Raises:
        SpecError: the file cannot be written.
        ScheduleError: a host is called as a key of the form is, which then cannot be said.
    """
    for stage in schedule.stages:
        if stage.host in (_QUANT_BITS, _DTYPE):
            raise ScheduleError(f"a host called {stage.host} cannot be written to a schedule file")
    write_text(path, format_schedule(schedule))
