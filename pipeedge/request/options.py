"""Command lines of ``runtime.py`` and ``pipeedge-doctor``: text in, a request out. Imports nothing heavy."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.request.config import (
    ENCRYPTED,
    GivenOptions,
    ModelRequest,
    RunRequest,
    TransportRequest,
    WorldRequest,
)
from pipeedge.request.declared import (
    ObeyedBy,
    Section,
    add_sections,
    given,
    given_options,
    option,
    option_of,
    options_of,
    read_variables,
)
from pipeedge.request.environment import Environment
from pipeedge.request.files import InputRequest, MetricsRequest, OutputRequest
from pipeedge.request.generation import CacheRequest, GenerationRequest
from pipeedge.request.http_options import ServeRequest
from pipeedge.request.keys import KeyRequest
from pipeedge.request.parsing import OneLineParser, add_common, path
from pipeedge.request.scheduling import CompressionRequest, LinkRequest, ScheduleRequest

__all__ = [
    "SECTIONS",
    "DoctorCommand",
    "RuntimeCommand",
    "doctor_parser",
    "options_given",
    "parse_doctor",
    "parse_runtime",
    "runtime_parser",
]


@dataclass(frozen=True)
class RuntimeCommand:
    """Parsed command line of ``runtime.py``."""

    request: RunRequest
    dry_run: bool = option(False, "--dry-run", help="print the schedule that would run, and stop")


@dataclass(frozen=True)
class DoctorCommand:
    """Parsed command line of ``pipeedge-doctor``."""

    request: RunRequest
    neighbors_file: Path | None = option(
        None,
        "--neighbors-file",
        type=path,
        help="write the measured links to this file (on rank 0), for {sched-pipeline} --dev-neighbors-file; "
        "links in it that were not measured are kept",
    )


_SCHEDULE = "schedule (on rank 0; without any of these, an even split)"

SECTIONS = (
    Section(
        "network",
        (
            *options_of(WorldRequest, "addr", "port", "socket_ifname"),
            *options_of(TransportRequest),
            option_of(WorldRequest, "timeout_s"),
        ),
        chapter="[running.md](running.md), [rpc.md](rpc.md)",
    ),
    Section("key (on every rank)", options_of(KeyRequest), chapter="[security.md](security.md)"),
    Section("model", options_of(ModelRequest), chapter="[models.md](models.md), [kernels.md](kernels.md)"),
    Section(
        "input (on the data rank)",
        (
            *options_of(InputRequest, "paths", "text_column", "text_pair_column", "max_items"),
            option_of(RunRequest, "microbatch_size"),
            *options_of(InputRequest, "skip_bad_input", "max_image_pixels", "dataset_name", "dataset_root"),
            *options_of(InputRequest, "dataset_split", "dataset_indices_file", "dataset_shuffle", "seed"),
        ),
        chapter="[data.md](data.md)",
    ),
    Section(
        "text generation (on the data rank; --context, --cache-mb, --replicate and --keep-outputs on rank 0)",
        (*options_of(GenerationRequest), *options_of(CacheRequest)),
        topic="text generation",
        chapter="[decoders.md](decoders.md)",
    ),
    Section(
        _SCHEDULE,
        options_of(ScheduleRequest, "partition", "rank_order", "data_rank"),
        topic="stages",
        chapter="[concepts.md](concepts.md)",
    ),
    Section(
        _SCHEDULE,
        options_of(
            ScheduleRequest, "plan", "dtypes", "min_agreement", "objective", "min_throughput", "held_out"
        ),
        topic="number types",
        chapter="[dtypes.md](dtypes.md)",
    ),
    Section(
        _SCHEDULE,
        (
            *options_of(LinkRequest),
            *options_of(
                CompressionRequest, "clamp", "link_transform", "adaptive", "send_constraint", "min_bits"
            ),
            option_of(CompressionRequest, "window_size"),
        ),
        topic="links",
        chapter="[quantization.md](quantization.md)",
    ),
    Section(
        _SCHEDULE,
        (
            *options_of(ScheduleRequest, "hosts", "models_file", "dev_types_file", "dev_file"),
            *options_of(ScheduleRequest, "dev_neighbors_file", "schedule_file", "survive_loss", "replan"),
            option_of(RuntimeCommand, "dry_run"),
        ),
        topic="scheduler",
        chapter="[scheduler.md](scheduler.md)",
    ),
    Section(
        "output (on the data rank)",
        (
            *options_of(OutputRequest, "results", "resume", "report", "trace", "check_items"),
            option_of(OutputRequest, "quiet"),
        ),
        chapter="[data.md](data.md#results), [reports.md](reports.md), [observing.md](observing.md)",
    ),
    Section(
        "serving (--serve on all ranks, the others on the data rank)",
        options_of(ServeRequest),
        chapter="[serving.md](serving.md)",
    ),
    Section(
        "metrics (on each rank for itself)",
        options_of(MetricsRequest),
        chapter="[observing.md](observing.md#metrics)",
    ),
)
"""Options of ``runtime.py`` in the order of ``--help``."""

_DOCTOR_TIMEOUT = replace(option_of(WorldRequest, "timeout_s"), default=6.0)
"""Enough for ranks that are started together, and soon over where one is missing."""
_DOCTOR_SECTIONS = (
    Section("network", (*SECTIONS[0].options[:-1], _DOCTOR_TIMEOUT)),
    *SECTIONS[1:],
    Section("doctor", options_of(DoctorCommand)),
)


def parse_runtime(argv: Sequence[str], environment: Environment) -> RuntimeCommand:
    """Parse the command line of ``runtime.py``.

    Raises:
        RequestError: An option or a value is invalid.
        SystemExit: After ``--help`` or ``--version``.
    """
    arguments = runtime_parser().parse_args(argv)
    command = (*program_name("runtime.py").split(), *argv)
    request = _run_request(arguments, environment, command)
    return RuntimeCommand(request, **given(arguments, RuntimeCommand))


def options_given(argv: Sequence[str]) -> frozenset[str]:
    """Return the names of the options on a command line of ``runtime.py``.

    Raises:
        RequestError: An option or a value is invalid.
    """
    return frozenset(one.name for one, _ in given_options(runtime_parser().parse_args(argv), SECTIONS))


def parse_doctor(argv: Sequence[str], environment: Environment) -> DoctorCommand:
    """Parse the command line of ``pipeedge-doctor``.

    Raises:
        RequestError: An option or a value is invalid.
        SystemExit: After ``--help`` or ``--version``.
    """
    arguments = doctor_parser().parse_args(argv)
    vars(arguments).setdefault(_DOCTOR_TIMEOUT.dest, _DOCTOR_TIMEOUT.default)
    return DoctorCommand(_run_request(arguments, environment), **given(arguments, DoctorCommand))


def runtime_parser() -> argparse.ArgumentParser:
    """Return the parser of ``runtime.py``."""
    program = program_name("runtime.py")
    parser = _rank_parser(
        SECTIONS,
        prog=program,
        description="Run one rank of a pipeline. Start one on each device, all with the same options; "
        "rank 0 decides the schedule, and the data rank reads the input and writes the results.",
        epilog=f"Example, two ranks of one model: '{program} 0 2 -pt 1,24,25,48' on the first device and "
        f"'{program} 1 2 -pt 1,24,25,48 --addr FIRST' on the second. Exit status: 0 done, 2 the request is "
        "wrong, 3 no feasible schedule, 4 another rank failed, 1 a fault of this program.",
    )
    parser.common = _COMMON
    parser.examples = (
        f"{program} 0 1 -m vit-digits --output predictions.csv    # the included model, in one process",
        f"{program} 0 2 -m MODEL --input photos/ --addr pi1       # the first of two, on pi1",
        f"{program} 1 2 -m MODEL --input photos/ --addr pi1       # the second, on another machine",
    )
    return parser


_COMMON = (
    *("--model", "--input", "--prompt", "--output", "--ubatch-size", "--addr", "--key", "--partition"),
    *("--dtype", "--serve", "--report", "--dry-run"),
)
"""Long names of the options that ``--help`` shows."""


def doctor_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge-doctor``: that of ``runtime.py`` and an option of its own."""
    parser = _rank_parser(
        _DOCTOR_SECTIONS,
        prog=program_name("pipeedge-doctor"),
        description="Check whether a run would work. Start it on each device with the arguments of "
        f"{program_name('runtime.py')}. "
        "Each finding is one line, which says what to do. The links that the run would use are measured.",
        epilog="Exit status: 0 fit to run (warnings apart), 2 the request is wrong, 3 no feasible schedule, "
        "4 a rank or link is missing, 1 a fault of this program.",
    )
    parser.shares_options = True
    parser.common = (*_COMMON[:-2], "--comm", "--neighbors-file")
    program = program_name("pipeedge-doctor")
    parser.examples = (
        f"{program} 0 1 -m vit-digits                     # this machine alone",
        f"{program} 0 2 -m MODEL --addr pi1               # on pi1",
        f"{program} 1 2 -m MODEL --addr pi1               # on another machine",
    )
    return parser


def _rank_parser(sections: Iterable[Section], **texts: Any) -> OneLineParser:
    parser = OneLineParser(**texts, allow_abbrev=False)
    parser.add_argument(
        "RANK", nargs="?", type=int, help="number of this process, from 0 (left out under torchrun)"
    )
    parser.add_argument("WORLD", nargs="?", type=int, help="number of processes")
    add_common(parser)
    add_sections(parser, sections)
    return parser


def _run_request(
    arguments: argparse.Namespace, environment: Environment, command: tuple[str, ...] = ()
) -> RunRequest:
    """Return the request; an option takes precedence over its variable in the environment."""
    read_variables(arguments, SECTIONS, environment.variables)
    world = _world_request(arguments, environment)
    transport = given(arguments, TransportRequest)
    if world.keys.given:
        transport.setdefault("comm", ENCRYPTED)
    compression = CompressionRequest(**given(arguments, CompressionRequest))
    return RunRequest(
        world=world,
        model=ModelRequest(**given(arguments, ModelRequest)),
        input=InputRequest(**given(arguments, InputRequest)),
        schedule=ScheduleRequest(**given(arguments, ScheduleRequest)),
        links=LinkRequest(**given(arguments, LinkRequest), compression=compression),
        output=OutputRequest(**given(arguments, OutputRequest)),
        serve=ServeRequest(**given(arguments, ServeRequest)),
        generation=GenerationRequest(**given(arguments, GenerationRequest)),
        cache=CacheRequest(**given(arguments, CacheRequest)),
        metrics=MetricsRequest(**given(arguments, MetricsRequest), window_size=compression.window_size),
        transport=TransportRequest(**transport),
        **given(arguments, RunRequest),
        command=command,
        given=_one_ranks_options(arguments),
    )


def _world_request(arguments: argparse.Namespace, environment: Environment) -> WorldRequest:
    rank, size = _place(arguments, environment)
    fields = given(arguments, WorldRequest)
    has_agent = arguments.RANK is None and environment.agent_store and "port" not in fields
    if arguments.RANK is None:
        from_torchrun = {"addr": environment.master_addr, "port": environment.master_port}
        fields = {name: value for name, value in from_torchrun.items() if value is not None} | fields
    keys = KeyRequest(**given(arguments, KeyRequest))
    return WorldRequest(
        rank, size, **fields, agent_store=has_agent, agent_run=environment.agent_run, keys=keys
    )


def _place(arguments: argparse.Namespace, environment: Environment) -> tuple[int, int]:
    if arguments.RANK is not None and arguments.WORLD is not None:
        return arguments.RANK, arguments.WORLD
    if arguments.RANK is not None:
        raise RequestError("WORLD is missing: give RANK WORLD, e.g. '0 2' for the first of two")
    if environment.rank is None or environment.world_size is None:
        raise RequestError(
            "RANK and WORLD are missing: give RANK WORLD, e.g. '0 2' for the first of two, or use torchrun"
        )
    return environment.rank, environment.world_size


_MAX_SHOWN = 200
"""Length of the longest value that ranks tell each other in full."""


def _one_ranks_options(arguments: argparse.Namespace) -> GivenOptions:
    """Return the options that this rank was given and that only one rank obeys."""
    found: dict[ObeyedBy, dict[str, str]] = {who: {} for who in ObeyedBy}
    own_metrics = given(arguments, MetricsRequest).keys() & {"directory", "prometheus_port"}
    for one, value in given_options(arguments, SECTIONS):
        if not (one.field == "window_size" and own_metrics):  # the metrics of this rank obey it too
            found[one.obeyed_by][one.name] = _shortened(one.text(value))
    return GivenOptions(schedule=found[ObeyedBy.RANK_0], data=found[ObeyedBy.DATA_RANK])


def _shortened(text: str) -> str:
    """Return a value as ranks tell it each other: a digest stands for the end of a long one."""
    if len(text) <= _MAX_SHOWN:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{text[: _MAX_SHOWN // 2]}… ({len(text)} characters, {digest})"
