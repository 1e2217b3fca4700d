"""The one door to the scheduler, the program ``sched-pipeline``. Each question is one call of it.

SchedulerRequest ──sched-pipeline -sm ...──> Solution       (it alone reads the user's YAML files)
Problem ──sched-pipeline --problem=-──> Solution
SchedulerRequest + Schedule ──sched-pipeline --evaluate=-──> Solution       the costs of a given schedule

It also decides what everything costs: nothing in Python computes seconds from layers and bandwidths. What the
files say by themselves, without a request, is in ``plan.spec_files``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeedge.base.errors import RequestError, ScheduleError
from pipeedge.base.fields import MALFORMED, convert
from pipeedge.base.program import program_name
from pipeedge.base.schedule import Schedule
from pipeedge.plan.costs import HostLoss, PlanCosts
from pipeedge.plan.placing import Placing, placed, to_bodies
from pipeedge.plan.problem import Problem, SolverOptions
from pipeedge.plan.sched_pipeline import GRACE_S, PROGRAM, Calls, not_understood, run_program
from pipeedge.plan.schedule_files import schedule_on

__all__ = [
    "Choice",
    "SchedulerRequest",
    "Solution",
    "TextRequest",
    "ask",
    "evaluate",
    "plan",
    "read_answer",
    "read_problem",
    "solve",
]


@dataclass(frozen=True)
class Choice:
    """What a joint plan chooses besides the cut and the hosts, and within which limits.

    None leaves a limit to the scheduler.
    """

    batch_sizes: tuple[int, ...]
    """Numbers of items in a microbatch to choose from."""
    min_agreement: float | None = None
    """Least fraction of items classified as in float32 with uncompressed links; 0 allows what was not
    measured, too."""
    dtypes: tuple[str, ...] | None = None
    """Number types to choose from."""
    widths: tuple[int, ...] | None = None
    """Bits per value to choose from on links between stages."""

    def arguments(self) -> list[str]:
        """Return the command line of the choice."""
        options = {
            "--batch-sizes": self.batch_sizes,
            "--min-agreement": None if self.min_agreement is None else [self.min_agreement],
            "--dtypes": self.dtypes,
            "--widths": self.widths,
        }
        given = ((name, values) for name, values in options.items() if values is not None)
        return ["--plan=auto", *(f"{name}={','.join(map(str, values))}" for name, values in given)]


@dataclass(frozen=True)
class TextRequest:
    """The texts that a decoder is planned for. None leaves a length to the scheduler."""

    streams: int
    """Number of texts that grow at a time."""
    context: int | None = None
    """Longest text in tokens, which memory is for."""
    prompt: int | None = None
    """Tokens of a prompt."""
    answer: int | None = None
    """Tokens of an answer."""
    groups: float | None = None
    """Number of groups in which they step."""

    @classmethod
    def of_steps(cls, rows: float, positions: float, texts: float) -> TextRequest:
        """Return texts whose steps have ``rows`` rows with ``positions`` tokens in front of each, on average.

        Args:
            rows: Number of rows of a step.
            positions: Number of tokens in front of a row.
            texts: Number of texts that grow at a time.
        """
        streams, prompt = max(1, round(texts)), max(1, round(positions))
        return cls(streams, prompt + 1, prompt, 1, groups=streams / rows)

    def options(self) -> dict[str, float | None]:
        """Return the options of the program."""
        return {
            "--groups": self.groups,
            "--streams": self.streams,
            "--context": self.context,
            "--prompt-tokens": self.prompt,
            "--answer-tokens": self.answer,
        }


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
    choice: Choice | None = None
    """What is chosen in place of microbatch size, number type and bits of links; None for a cut alone."""
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
    lengths: str | None = None
    """Lengths of the sentences as ``5:1,9:2``, whose average times count; None if all are as the longest."""
    transport: str = "p2p"
    """Transport of the links, whose costs are counted where a profile has them."""
    objective: str = "throughput"
    """``throughput``, ``latency`` or ``energy``."""
    min_throughput: float | None = None
    """Least items per second where energy is the objective; None for any."""
    time_limit_s: float = 10.0
    survive_loss: bool = False
    """Whether only a schedule that survives the loss of any one host but the data host will do."""
    losses: bool = False
    """Whether to find out what the loss of each host would cost."""
    texts: TextRequest | None = None
    """Texts of a decoder; None for an encoder."""
    loaded: Placing = ()
    """Layers that hosts have loaded; among equal hosts, those that have to load the fewest bytes are used."""

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
            None if self.choice is not None else self.link_bits,
            self.time_limit_s,
            survive_loss=self.survive_loss,
            losses=self.losses,
            min_throughput=self.min_throughput,
        )

    def arguments(self) -> list[str]:
        """Return the command line that describes the problem, without the program."""
        options = {
            "--models-file": self.models_file,
            "--dev-types-file": self.dev_types_file,
            "--dev-file": self.dev_file,
            "--model-name": self.model_name,
            "--batch-size": None if self.choice is not None or self.texts else self.microbatch_size,
            **({} if self.texts is None else self.texts.options()),
            "--dtype": None if self.choice is not None else self.dtype,
            "--buffers-in": self.buffers_in,
            "--buffers-out": self.buffers_out,
            "--tokens": self.tokens,
            "--lengths": self.lengths,
            "--transport": None if self.transport == "p2p" else self.transport,
            "--data-host": self.data_host,
            "--input-bytes": self.input_bytes,
            "--hosts": ",".join(self.hosts) or None,
            "--dev-neighbors-file": self.dev_neighbors_file,
        }
        return [
            *(f"{name}={value}" for name, value in options.items() if value is not None),
            *([] if self.choice is None else self.choice.arguments()),
        ]


@dataclass(frozen=True)
class Solution:
    """A schedule and its costs."""

    schedule: Schedule
    costs: PlanCosts

    @property
    def losses(self) -> tuple[HostLoss, ...]:
        """Losses of hosts with a stage and of the data host; empty if not asked for."""
        return tuple(loss for loss in self.costs.losses if loss.effect != "none")


def plan(request: SchedulerRequest, *, hosts: Sequence[str] | None = None) -> Solution:
    """Find the best schedule for the user's files.

    Args:
        request: The files and what is asked of them.
        hosts: The host of each rank; None where the hosts are called by their ranks.

    Raises:
        RequestError: The files or options are wrong, or the program is missing.
        ScheduleError: A host of the schedule has no rank.
        InfeasibleError: No schedule is feasible, or none was found in time (``UndecidedError``).
        PipeEdgeError: The program failed.
    """
    conditions = {"loaded": to_bodies(request.loaded)} if request.loaded else {}
    arguments = [*request.arguments(), *request.solver_options.arguments()]
    return read_answer(ask(arguments, conditions, request.time_limit_s), hosts)


def solve(problem: Problem, *, hosts: Sequence[str] | None = None) -> Solution:
    """Find the best schedule for a problem. Raises as ``plan`` does.

    Args:
        problem: What to schedule, on what.
        hosts: The host of each rank; None where the hosts are called by their ranks.
    """
    options = problem.options
    arguments = ["--problem=-", *options.arguments()]
    return read_answer(_answer(arguments, problem.to_body(), options.time_limit_s, run_program), hosts)


def evaluate(
    request: SchedulerRequest,
    schedule: Schedule,
    *,
    hosts: Sequence[str] | None,
    moments: Sequence[Mapping[str, Any]] = (),
    call: Calls = run_program,
) -> Solution:
    """Return what a schedule would cost. Raises as ``plan`` does.

    Args:
        request: The files; what they are asked for does not count.
        schedule: The schedule.
        hosts: The host of each rank; None where the hosts are called by their ranks.
        moments: Conditions under which it would cost something else, as the program reads them.
        call: Calls the program.
    """
    names = hosts or tuple(map(str, range(max(schedule.ranks) + 1)))
    given: dict[str, Any] = {"plans": [to_bodies(placed(schedule, names))]}
    if moments:
        given["moments"] = moments
    answer = ask(request.arguments(), given, request.time_limit_s, call)
    return read_answer(answer["plans"][0], hosts, request.data_host)


def read_problem(request: SchedulerRequest, call: Calls = run_program) -> dict[str, Any]:
    """Return the problem that the user's files make together, as ``sched-pipeline --problem`` reads it.

    Args:
        request: The files and what is asked of them.
        call: Calls the program.

    Raises:
        RequestError: The files or options are wrong, or the program is missing.
        PipeEdgeError: The program failed.
    """
    try:
        # A problem of texts is another one where a lone text counts.
        about = [] if request.texts is None else [f"--objective={request.objective}"]
        body: dict[str, Any] = json.loads(call(["--format=problem", *request.arguments(), *about]))
        return body
    except ValueError as error:
        raise not_understood(error) from error


def read_answer(
    answer: Mapping[str, Any], hosts: Sequence[str] | None, data_host: str | None = None
) -> Solution:
    """Return the solution that an answer of the program describes.

    Args:
        answer: The answer.
        hosts: The host of each rank; None where the hosts are called by their ranks.
        data_host: Host of the data rank, for messages.

    Raises:
        ScheduleError: A host of the schedule has no rank, or no link to the next one.
        PipeEdgeError: The program is of another version.
    """
    try:
        _check_links(answer, data_host or "the data rank")
        costs: PlanCosts = convert(answer, PlanCosts)
    except MALFORMED as error:
        raise not_understood(error) from error
    stages = [(one.host, one.layers, one.quant_bits, one.dtype or "float32") for one in costs.schedule]
    schedule = schedule_on(stages, hosts, program_name(PROGRAM))
    return Solution(schedule.check(n_layers=costs.layers, world_size=max(schedule.ranks) + 1), costs)


def _check_links(answer: Mapping[str, Any], data_host: str) -> None:
    """Raise ScheduleError if a link of a plan has no bandwidth. JSON has null for infinite seconds."""
    stages = answer["schedule"]
    ends = [data_host, *(stage["host"] for stage in stages), data_host]
    seconds = [stages[0]["link_in_s"], *(stage["link_out_s"] for stage in stages)]
    for number, one in enumerate(seconds):
        if one is None:
            raise ScheduleError(
                f"{ends[number]} cannot reach {ends[number + 1]}, because the bandwidth between them is 0; "
                "raise bw_Mbps or choose another schedule"
            )


def ask(
    arguments: Sequence[str],
    conditions: Mapping[str, Any],
    time_limit_s: float = 0.0,
    call: Calls = run_program,
) -> Any:
    """Return what the program answers to a request.

    Args:
        arguments: The files and what is asked of them.
        conditions: Conditions, as ``sched-pipeline --conditions`` reads them; empty for none.
        time_limit_s: Time limit of the search.
        call: Calls the program.

    Raises:
        InfeasibleError: No schedule is feasible, or none was found in time (``UndecidedError``).
        PipeEdgeError: The program failed.
    """
    given = ["--conditions=-"] if conditions else []
    return _answer([*arguments, *given], conditions, time_limit_s, call)


def _answer(options: Sequence[str], given: Mapping[str, Any], time_limit_s: float, call: Calls) -> Any:
    text = json.dumps(given, ensure_ascii=False, allow_nan=False) if given else ""
    printed = call(["--format=json", *options], text, timeout_s=time_limit_s + GRACE_S)
    try:
        return json.loads(printed)
    except ValueError as error:
        raise not_understood(error) from error
