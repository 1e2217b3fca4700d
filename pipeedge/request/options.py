"""Command lines: text in, requests out. Imports nothing heavy, so that ``--help`` is there at once."""

from __future__ import annotations

import argparse
import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.base.schedule import DTYPES
from pipeedge.base.streams import print_result
from pipeedge.base.wording import hint, printable
from pipeedge.request.config import (
    CLAMPS,
    COMMS,
    CSV_FILE_MODES,
    DATASET_NAMES,
    DEFAULT_CLAMP,
    DEFAULT_MAX_IMAGE_PIXELS,
    DEFAULT_WINDOW_SIZE,
    CompressionRequest,
    Environment,
    GivenOptions,
    InputRequest,
    MetricsRequest,
    ModelRequest,
    OutputRequest,
    RunRequest,
    ScheduleRequest,
    TransportRequest,
    WorldRequest,
)

__all__ = [
    "DoctorCommand",
    "OneLineParser",
    "RuntimeCommand",
    "Group",
    "add_common",
    "add_model",
    "add_scheduler_files",
    "doctor_parser",
    "integers",
    "name",
    "names",
    "parse_doctor",
    "parse_runtime",
    "path",
    "runtime_parser",
]


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose mistakes are ``RequestError``, one line each."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise RequestError(f"{printable(message)} (see --help)")

    def _print_message(self, message: str, file: object = None) -> None:
        # argparse would pass over a message that cannot be printed.
        if message:
            print_result(message, end="")

    # argparse declares overloads for the type of the namespace, of which no program here has its own.
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse the command line; an unknown option is named with the known one that is closest to it."""
        parsed, unknown = self.parse_known_args(args, namespace)
        option = next((one.partition("=")[0] for one in unknown if one.startswith("-") and one != "--"), None)
        if option is not None:
            self.error(f"unknown option {option}{self.explain_unknown(option)}")
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return parsed

    def explain_unknown(self, option: str) -> str:
        """Return what to say of an unknown option, as the end of a sentence."""
        known = [name for action in self._option_actions() for name in action.option_strings]
        return hint(option, known)

    def _option_actions(self) -> Iterator[argparse.Action]:
        for action in self._actions:
            yield action
            if isinstance(action.choices, Mapping):
                for parser in action.choices.values():
                    yield from parser._actions


class RuntimeCommand:
    """Parsed command line of ``runtime.py``."""

    def __init__(self, request: RunRequest, *, dry_run: bool) -> None:
        self.request = request
        self.dry_run = dry_run


class DoctorCommand:
    """Parsed command line of ``pipeedge-doctor``."""

    def __init__(self, request: RunRequest, *, neighbors_file: Path | None) -> None:
        self.request = request
        self.neighbors_file = neighbors_file


def parse_runtime(argv: Sequence[str], environment: Environment) -> RuntimeCommand:
    """Parse the command line of ``runtime.py``.

    Raises:
        RequestError: an option or a value that cannot be.
        SystemExit: after ``--help`` or ``--version``.
    """
    parser = runtime_parser()
    arguments = parser.parse_args(argv)
    request = _run_request(
        arguments,
        environment,
        (*program_name("runtime.py").split(), *argv),
        _given(parser, argv, environment),
    )
    return RuntimeCommand(request, dry_run=arguments.dry_run)


_DOCTOR_TIMEOUT_S = 6.0
"""Enough for ranks that are started together, and soon over where one is missing."""


def doctor_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge-doctor``: that of ``runtime.py`` and an option of its own."""
    parser = runtime_parser()
    parser.prog = program_name("pipeedge-doctor")
    parser.description = (
        "Say whether a run would work, before it: start it on each device with the arguments of "
        f"{program_name('runtime.py')}. "
        "Each finding is a line that says what to do; the links that the run would use are measured."
    )
    parser.epilog = (
        "Exit status: 0 fit to run (warnings apart), 2 the request is wrong, 3 no feasible schedule, "
        "4 a rank or link is missing, 1 a fault of this program."
    )
    parser.set_defaults(timeout=_DOCTOR_TIMEOUT_S)
    doctor = parser.add_argument_group("doctor")
    doctor.add_argument(
        "--neighbors-file",
        type=path,
        metavar="FILE",
        help="write the measured links to this file (on rank 0), for "
        f"{program_name('sched-pipeline')} --dev-neighbors-file; "
        "links that it has and that were not measured stay",
    )
    return parser


def parse_doctor(argv: Sequence[str], environment: Environment) -> DoctorCommand:
    """Read the command line of ``pipeedge-doctor``.

    Raises:
        RequestError: an option or a value is wrong.
        SystemExit: after ``--help`` or ``--version``.
    """
    parser = doctor_parser()
    arguments = parser.parse_args(argv)
    request = _run_request(arguments, environment, (), _given(parser, argv, environment))
    return DoctorCommand(request, neighbors_file=arguments.neighbors_file)


def _run_request(
    arguments: argparse.Namespace, environment: Environment, command: tuple[str, ...], given: GivenOptions
) -> RunRequest:
    rank, size = _place(arguments, environment)
    from_torchrun = arguments.RANK is None
    addr, port = arguments.addr, arguments.port
    own_port = port is not None
    if from_torchrun:
        addr = environment.master_addr if addr is None else addr
        port = environment.master_port if port is None else port
    compression = _compression_request(arguments, environment)
    return RunRequest(
        world=WorldRequest(
            rank=rank,
            size=size,
            addr="127.0.0.1" if addr is None else addr,
            port=29500 if port is None else port,
            socket_ifname=arguments.socket_ifname,
            timeout_s=arguments.timeout,
            agent_store=from_torchrun and environment.agent_store and not own_port,
            agent_run=environment.agent_run,
        ),
        model=ModelRequest(
            arguments.model_name or ModelRequest.name,
            arguments.model_file,
            arguments.device or ModelRequest.device,
        ),
        input=InputRequest(
            paths=tuple(arguments.input or ()),
            text_column=arguments.text_column,
            dataset_name=arguments.dataset_name,
            dataset_root=arguments.dataset_root,
            dataset_split=arguments.dataset_split,
            dataset_indices_file=arguments.dataset_indices_file,
            dataset_shuffle=arguments.dataset_shuffle,
            seed=arguments.seed,
            batch_size=arguments.batch_size,
            skip_bad_input=arguments.skip_bad_input,
            max_image_pixels=image_limit(arguments),
        ),
        schedule=ScheduleRequest(
            partition=arguments.partition,
            rank_order=arguments.rank_order,
            schedule_file=arguments.schedule_file,
            models_file=arguments.sched_models_file,
            dev_types_file=arguments.sched_dev_types_file,
            dev_file=arguments.sched_dev_file,
            dev_neighbors_file=arguments.sched_dev_neighbors_file,
            hosts=arguments.hosts,
            data_rank=arguments.data_rank,
            quant_bits=arguments.quant,
            link_bits=arguments.link_bits,
            dtypes=arguments.dtype,
            min_agreement=arguments.min_agreement,
        ),
        output=OutputRequest(
            arguments.output, arguments.report, arguments.trace, arguments.quiet, arguments.check
        ),
        metrics=MetricsRequest(
            arguments.metrics_dir,
            arguments.csv_file_mode or environment.csv_file_mode or CSV_FILE_MODES[0],
            arguments.prometheus_port,
            compression.window_size,
        ),
        transport=TransportRequest(arguments.comm, arguments.worker_threads),
        compression=compression,
        ubatch_size=arguments.ubatch_size,
        command=command,
        given=given,
    )


_COMPARED_ELSEWHERE = {"ubatch_size", "data_rank"}
"""Options that every rank obeys: their values are compared even if they are defaults."""
_OBEYED_ANYWHERE = {"quiet", "dry_run"}
"""Options that every rank obeys for itself."""
_MAX_SHOWN = 200
"""Length of the longest value that ranks tell each other in full."""


def _given(parser: argparse.ArgumentParser, argv: Sequence[str], environment: Environment) -> GivenOptions:
    """Return the options that ``argv`` or ``environment`` sets and that only one rank obeys."""
    actions = {group.title: group._group_actions for group in parser._action_groups}
    for action in parser._actions:
        if action.option_strings:
            action.default = argparse.SUPPRESS
    values = vars(parser.parse_args(argv))
    from_environment = {
        "adaptive": ("ADAPTIVE_QUANT", environment.adaptive),
        "send_constraint": ("SEND_CONSTRAINT", environment.send_constraint),
        "window_size": ("WINDOW_SIZE", environment.window_size),
    }
    ignored = _COMPARED_ELSEWHERE | _OBEYED_ANYWHERE
    if {"metrics_dir", "prometheus_port"} & set(values):
        ignored = ignored | {"window_size"}  # this rank's metrics obey it too

    def given(title: str) -> dict[str, str]:
        found = {}
        for action in actions[title]:
            variable, value = from_environment.get(action.dest, (None, None))
            value = values.get(action.dest, value)
            if value is not None and action.dest not in ignored:
                name = "/".join(action.option_strings) + (f" ({variable})" if variable else "")
                found[name] = _value_text(value)
        return found

    return GivenOptions(schedule=given(_SCHEDULE_GROUP), data=given(_INPUT_GROUP) | given(_OUTPUT_GROUP))


def _value_text(value: object) -> str:
    """Return an option's value as other ranks compare and show it; a flag has none."""
    if value is True:
        return ""
    text = str(value)
    if isinstance(value, tuple):
        text = ",".join(map(str, value))
    elif isinstance(value, list):
        text = shlex.join(map(str, value))
    if len(text) <= _MAX_SHOWN:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{text[: _MAX_SHOWN // 2]}… ({len(text)} characters, {digest})"


def _compression_request(arguments: argparse.Namespace, environment: Environment) -> CompressionRequest:
    """Combine the command line with the environment; the command line takes precedence."""

    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    return CompressionRequest(
        clamp=arguments.clamp,
        adaptive=first(arguments.adaptive, environment.adaptive),
        window_size=first(arguments.window_size, environment.window_size, DEFAULT_WINDOW_SIZE),
        send_constraint=first(arguments.send_constraint, environment.send_constraint),
        min_bits=arguments.min_bits,
    )


def _place(arguments: argparse.Namespace, environment: Environment) -> tuple[int, int]:
    if arguments.RANK is not None and arguments.WORLD is not None:
        return arguments.RANK, arguments.WORLD
    if arguments.RANK is not None:
        raise RequestError("RANK is given without WORLD: give RANK WORLD, e.g. '0 2' for the first of two")
    if environment.rank is None or environment.world_size is None:
        raise RequestError(
            "which rank of how many? give RANK WORLD, e.g. '0 2' for the first of two, or use torchrun"
        )
    return environment.rank, environment.world_size


Group: TypeAlias = "argparse._ActionsContainer"
"""A parser, or a group of its options."""


def name(text: str) -> str:
    """Parse an option that is a name. An empty one usually comes from an unset shell variable."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text


def path(text: str) -> Path:
    """Parse an option that is a path. An empty one would mean the current directory."""
    return Path(name(text))


def integers(text: str) -> tuple[int, ...]:
    """Parse an option that is a list of integers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers like 1,24,25,48") from None


def names(text: str) -> tuple[str, ...]:
    """Parse an option that is a list of names."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found) or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names like pi1,pi2")
    return found


def _dtypes(text: str) -> tuple[str, ...]:
    """Parse a list of number types, with or without the ``torch.`` prefix."""
    return tuple(name.removeprefix("torch.") for name in names(text))


_INPUT_GROUP = "input (on the data rank)"
_SCHEDULE_GROUP = "schedule (on rank 0; without any of these, an even split)"
_OUTPUT_GROUP = "output (on the data rank)"


def runtime_parser() -> argparse.ArgumentParser:
    """Return the parser of ``runtime.py``."""
    program = program_name("runtime.py")
    parser = OneLineParser(
        prog=program,
        description="Run one rank of a pipeline. Start one on each device, all with the same options; "
        "rank 0 decides the schedule, the data rank reads the input and prints the result.",
        epilog=f"Example, two ranks of one model: '{program} 0 2 -pt 1,24,25,48' on the first device and "
        f"'{program} 1 2 -pt 1,24,25,48 --addr FIRST' on the second. Exit status: 0 done, 2 the request is "
        "wrong, 3 no feasible schedule, 4 another rank failed, 1 a fault of this program.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "RANK", nargs="?", type=int, help="this process, from 0 (may be left out under torchrun)"
    )
    parser.add_argument("WORLD", nargs="?", type=int, help="how many processes there are")
    add_common(parser)
    _add_network(parser)
    _add_model(parser)
    _add_input(parser)
    _add_schedule(parser)
    _add_output(parser)
    _add_metrics(parser)
    return parser


def add_image_limit(group: Group) -> None:
    """Add the limit on image size, for every program that reads images."""
    group.add_argument(
        "--max-image-pixels",
        type=int,
        metavar="N",
        help=f"refuse larger pictures, which would fill the memory ({DEFAULT_MAX_IMAGE_PIXELS})",
    )


def image_limit(arguments: argparse.Namespace) -> int:
    """Return the largest image to decode, in pixels."""
    given: int | None = arguments.max_image_pixels
    return DEFAULT_MAX_IMAGE_PIXELS if given is None else given


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options of every program: ``--version`` and ``--verbose``."""
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("--verbose", action="store_true", help="print the traceback of a failure")


def add_model(group: Group, *, weights_help: str) -> None:
    """Which model, which weights, where; what is not said is None.

    Args:
        group: of the parser.
        weights_help: what may be given as weights.
    """
    group.add_argument(
        "-m",
        "--model-name",
        type=name,
        metavar="NAME|DIR",
        help=f"a known model or a local Hugging Face directory ({ModelRequest.name})",
    )
    group.add_argument("-M", "--model-file", type=path, metavar="PATH", help=weights_help)
    group.add_argument("-d", "--device", type=name, help=f"cpu, cuda or cuda:N ({ModelRequest.device})")


def add_scheduler_files(group: Group, *, models: str, dev_types: str) -> None:
    """``models.yml`` and ``device_types.yml``, with what they are for."""
    group.add_argument("-sm", "--sched-models-file", type=path, metavar="FILE", help=models)
    group.add_argument("-sdt", "--sched-dev-types-file", type=path, metavar="FILE", help=dev_types)


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument("--addr", help="where rank 0 is reached (127.0.0.1)")
    group.add_argument("--port", type=int, help="where rank 0 listens (29500)")
    group.add_argument(
        "-s",
        "--socket-ifname",
        metavar="NAME",
        help="interface for the links (the one that routes to --addr)",
    )
    group.add_argument("-c", "--comm", default="p2p", choices=COMMS, help="how the links are made (p2p)")
    group.add_argument(
        "-w", "--worker-threads", type=int, metavar="N", help="threads that serve RPC (4); goes with -c rpc"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="no rank waits longer for one that is absent, silent or stuck (%(default)g)",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    add_model(
        parser.add_argument_group("model"),
        weights_help="weights: .npz, .safetensors or a directory (the model's default file, here)",
    )


def _add_input(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(_INPUT_GROUP)
    group.add_argument(
        "--input",
        type=path,
        nargs="+",
        metavar="PATH",
        help="image files or folders, a .txt with a sentence a line, a .csv or .tsv, a .npz of the model's "
        "inputs, or - for standard input; all of it is run (an input that is shipped, repeated)",
    )
    group.add_argument(
        "--text-column",
        type=name,
        metavar="NAME|N",
        help="column of a .csv or .tsv that has the sentences, by name, or by number in a file without names "
        "(text or sentence, or the only one)",
    )
    group.add_argument(
        "-b", "--batch-size", type=int, metavar="N", help="items to run in all (64, or all of --input)"
    )
    group.add_argument(
        "-u", "--ubatch-size", type=int, default=8, metavar="N", help="items that travel together (8)"
    )
    group.add_argument(
        "--skip-bad-input", action="store_true", help="leave out and report images that cannot be read"
    )
    add_image_limit(group)
    group.add_argument("--dataset-name", choices=DATASET_NAMES, help="run items of a data set")
    group.add_argument("--dataset-root", type=path, metavar="DIR", help="where its files are")
    group.add_argument("--dataset-split", metavar="NAME", help="which part of it (train)")
    group.add_argument(
        "--dataset-indices-file", type=path, metavar="FILE", help="the items to run, an index a line"
    )
    group.add_argument("--dataset-shuffle", action="store_true", help="take the items in random order")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="fixes the random order (0)")


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(_SCHEDULE_GROUP)
    _add_stages(group)
    _add_dtypes(group)
    _add_links(group)
    _add_schedule_files(group)


def _add_stages(group: Group) -> None:
    group.add_argument(
        "-pt",
        "--partition",
        type=integers,
        metavar="LIST",
        help="first and last layer of each stage, from 1, e.g. 1,24,25,48; goes before automatic scheduling",
    )
    group.add_argument(
        "-r", "--rank-order", type=integers, metavar="LIST", help="the rank of each stage (0,1,2,...)"
    )
    group.add_argument(
        "-D",
        "--data-rank",
        type=int,
        default=0,
        metavar="RANK",
        help="reads the input, collects the results (0)",
    )


def _add_dtypes(group: Group) -> None:
    group.add_argument(
        "--dtype",
        type=_dtypes,
        metavar="LIST",
        help=f"number type of weights and computation: {', '.join(DTYPES)}; one for all stages or one for "
        "each; auto: the fastest that device_types.yml has profiles of (what the schedule file says, else "
        "float32)",
    )
    group.add_argument(
        "--min-agreement",
        type=float,
        metavar="PART",
        help="with --dtype auto: part of the items, of 1, whose class must be float32's, as profiled",
    )


def _add_links(group: Group) -> None:
    group.add_argument(
        "-q",
        "--quant",
        type=integers,
        metavar="LIST",
        help="bits a value on each stage's outgoing link: 2 to 8, 16, or 0 for values as they are "
        "(what the schedule file says, else 0)",
    )
    group.add_argument(
        "--link-bits",
        metavar="N|auto",
        help="with automatic scheduling: bits a value to schedule links between stages with, and to run "
        "them; auto: as many as it takes for no link to be the bottleneck (0)",
    )
    group.add_argument(
        "--clamp",
        choices=CLAMPS,
        default=DEFAULT_CLAMP,
        help="which part of their range the compressed values keep (%(default)s)",
    )
    group.add_argument(
        "--adaptive",
        type=str.lower,
        metavar="POLICY",
        help="let the bits of the links between stages follow the bandwidth, from those of -q on: auto (just "
        "as few as it takes to keep the slowest stage busy), or heuristic, heuristic2, controller (to reach "
        "--send-constraint)",
    )
    group.add_argument(
        "--send-constraint", type=float, metavar="RATE", help="items a second for --adaptive to reach"
    )
    group.add_argument("--min-bits", type=int, metavar="N", help="the fewest bits for --adaptive to take (2)")
    group.add_argument(
        "--window-size",
        type=int,
        metavar="N",
        help=f"microbatches from one decision of --adaptive, and one choice of --clamp, to the next, "
        f"and in a window of metrics ({DEFAULT_WINDOW_SIZE}; else WINDOW_SIZE says)",
    )


def _add_schedule_files(group: Group) -> None:
    group.add_argument(
        "-H", "--hosts", type=names, metavar="LIST", help="the host of each rank, as in devices.yml"
    )
    add_scheduler_files(group, models="models.yml", dev_types="device_types.yml")
    group.add_argument("-sd", "--sched-dev-file", type=path, metavar="FILE", help="devices.yml")
    group.add_argument(
        "-sdn",
        "--sched-dev-neighbors-file",
        type=path,
        metavar="FILE",
        help=f"what single links carry, as {program_name('pipeedge-doctor')} measured it",
    )
    group.add_argument(
        "--schedule-file",
        type=path,
        metavar="FILE",
        help=f"a schedule that {program_name('sched-pipeline')} printed",
    )
    group.add_argument("--dry-run", action="store_true", help="print the schedule that would run, and stop")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(_OUTPUT_GROUP)
    group.add_argument(
        "--output", type=path, metavar="FILE", help="predictions: .csv, .jsonl or .npz, a row an item"
    )
    group.add_argument(
        "--report",
        type=path,
        metavar="FILE",
        help="what ran, how fast, where the time went: .json, or .html for a page",
    )
    group.add_argument(
        "--trace",
        type=path,
        metavar="FILE.json",
        help="what each thread of each rank was at, to look at in ui.perfetto.dev or chrome://tracing",
    )
    group.add_argument(
        "--check",
        type=int,
        default=0,
        metavar="N",
        help="afterwards, compute the first N items in float32 on the data rank, a block at a time, and say "
        "how often the class is the same and how far the values are apart",
    )
    group.add_argument("--quiet", action="store_true", help="print neither progress nor tables")


def _add_metrics(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("metrics (on each rank that is to have them)")
    group.add_argument(
        "--metrics-dir",
        type=path,
        metavar="DIR",
        help="a CSV file for each of shard, recv, send, quant_encode, quant_decode, output: a line for each "
        "microbatch, with time, work, energy and accuracy of it, of the last ones, of all",
    )
    group.add_argument(
        "--csv-file-mode",
        choices=CSV_FILE_MODES,
        help="for files that are there already: x refuse, w replace, a append (x; else CSV_FILE_MODE says)",
    )
    group.add_argument(
        "--prometheus-port",
        type=int,
        metavar="PORT",
        help="serve the same to Prometheus, at the address of the interface for the links",
    )


def _version() -> str:
    import pipeedge

    return f"pipeedge {pipeedge.__version__}"
