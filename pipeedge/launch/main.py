"""The console script ``pipeedge-launch``."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from pipeedge.base.errors import RequestError
from pipeedge.base.guard import guard
from pipeedge.base.interrupt import interrupt
from pipeedge.base.machine import processors
from pipeedge.base.ports import free_port
from pipeedge.base.program import is_verbose, module_words, program_name
from pipeedge.base.schedule import Schedule
from pipeedge.base.streams import end, pass_on, print_result, say
from pipeedge.launch.commands import (
    DOCTOR_MODULE,
    RUNTIME_MODULE,
    Host,
    RankCommand,
    Remote,
    local_commands,
    parse_host,
    remote_commands,
)
from pipeedge.launch.supervisor import Output, Supervisor
from pipeedge.plan.spec_files import load_devices
from pipeedge.request.config import RunRequest
from pipeedge.request.environment import BEGINS, LAUNCHED, LAUNCHER, Environment, inherited_environment
from pipeedge.request.files import STANDARD_INPUT
from pipeedge.request.options import parse_doctor, parse_runtime
from pipeedge.request.parsing import OneLineParser, add_common
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key

__all__ = ["LaunchRequest", "launch_parser", "main", "parse_launch", "plan_launch"]

PROGRAM = "pipeedge-launch"
_ASKING = MappingProxyType({LAUNCHED: "1"})
"""Environment variables of the ranks."""
_SCRIPTS = {RUNTIME_MODULE: "runtime.py", DOCTOR_MODULE: "pipeedge-doctor"}


@dataclass(frozen=True)
class LaunchRequest:
    """Options of ``pipeedge-launch``, validated on creation."""

    arguments: tuple[str, ...]
    """Options of the runtime, without RANK and WORLD."""
    local: int | None = None
    """Number of ranks to start on this machine, or None to start them on ``hosts``."""
    hosts: tuple[Host, ...] = ()
    """Host of each rank, empty if all run on this machine."""
    remote: Remote | None = None
    """Settings for starting ranks on ``hosts``."""
    module: str = RUNTIME_MODULE
    """Module that each rank runs."""
    show: bool = False
    """Whether to print the commands instead of running them."""
    plain: bool = False
    """Whether to start a run on several machines without a key."""

    def __post_init__(self) -> None:
        if (self.local is None) == (not self.hosts):
            raise RequestError(
                "nothing says where to start the ranks: give one of --local N, --hosts a,b,c or "
                "-sd devices.yml"
            )
        if self.local is not None and self.local < 1:
            raise RequestError(f"--local {self.local}: give at least 1 rank")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.local if self.local is not None else len(self.hosts)


def main() -> NoReturn:
    """Start the ranks, wait for them, and exit with their status."""
    signal.signal(signal.SIGHUP, interrupt)
    code = 0

    def launch() -> None:
        nonlocal code
        code = _launch(sys.argv[1:])

    program = program_name(PROGRAM)
    status = guard(program, launch, verbose=is_verbose(_split_options(launch_parser(), sys.argv[1:])[0]))
    end(program, status or code)


def _launch(argv: Sequence[str]) -> int:
    request = parse_launch(argv)
    if request.show:
        for command in plan_launch(request):
            print_result(command.shown())
        return 0
    commands = plan_launch(request, make_key=make_key)

    environment = inherited_environment()
    if sys.stdout.isatty():
        # The ranks write to a pipe, so tell them the width of the terminal that is left after the prefix.
        width = shutil.get_terminal_size().columns - len("[00] ")
        environment.setdefault("COLUMNS", str(max(40, width)))
    output = Output(
        lines=pass_on,
        say=lambda line: say(program_name(PROGRAM), line),
        program=program_name(_SCRIPTS[request.module]),
        result_rank=_result_rank(request),
    )
    environment |= _ASKING
    if request.remote is None:  # else the script at the other end of ssh sees to that
        environment[LAUNCHER] = str(os.getpid())
    needed = _needed(request, commands)
    return Supervisor(commands, environment, output, needed=needed, begins=f": {BEGINS}").run()


def plan_launch(request: LaunchRequest, make_key: Callable[[], str] | None = None) -> list[RankCommand]:
    """Return the command of each rank.

    Args:
        request: What to start.
        make_key: Makes the key of a run on several machines, if it was not given one. Without it there is
            none, and no variable that asks the ranks for anything, as for commands that are shown, which
            anybody can run.

    Raises:
        RequestError: The runtime would reject the arguments on every rank.
    """
    asked = _check(request)
    module = " ".join(module_words(_SCRIPTS[request.module], request.module))
    if request.remote is None:
        return local_commands(
            request.world_size,
            request.arguments,
            python=sys.executable,
            module=module,
            port=free_port(asked.world.addr) if _lacks(request, "--port") else None,
            cores=processors(),
            prometheus_port=asked.metrics.prometheus_port,
        )
    return remote_commands(
        request.hosts,
        request.arguments,
        request.remote if make_key is None else replace(request.remote, environment=_ASKING),
        module=module,
        name_addr=_lacks(request, "--addr"),
        name_hosts=asked.schedule.hosts is None,
        key=None if make_key is None or request.plain else _key(request, make_key),
    )


def _key(request: LaunchRequest, make_key: Callable[[], str]) -> str | None:
    """Return the key to hand over to the ranks, or None if they have one or cannot use it."""
    if _parse(request, Environment()).world.keys.given:
        return None  # its files are on the machines already
    named = _parse(request, Environment.read()).world.keys.key
    if named is not None:  # by the environment, which ssh does not pass on
        return Membership.from_file(named, "PIPEEDGE_KEY").to_text()
    if request.world_size == 1:
        return None
    try:
        _parse(request, Environment(), "--key", str(STANDARD_INPUT))
    except RequestError:
        return None  # its links cannot be encrypted (-c)
    return make_key()


def _needed(request: LaunchRequest, commands: Sequence[RankCommand]) -> frozenset[int] | None:
    """Return the ranks without which the run fails once it has begun; None for all."""
    if request.module == DOCTOR_MODULE:
        return None
    key = ("--key", str(STANDARD_INPUT)) if any(command.secret for command in commands) else ()
    asked = _parse(request, Environment.read(), *key)
    return frozenset({0, asked.schedule.data_rank}) if asked.transport.goes_on else None


def _result_rank(request: LaunchRequest) -> int | None:
    """Return the rank that prints the results of the run, or None if they go to a file."""
    asked = _parse(request, Environment.read())
    is_printed = request.module == RUNTIME_MODULE and asked.prints_results
    return asked.schedule.data_rank if is_printed else None


def _parse(request: LaunchRequest, environment: Environment, *more: str) -> RunRequest:
    """Parse the arguments as rank 0 will, and ``more``."""
    parse = parse_doctor if request.module == DOCTOR_MODULE else parse_runtime
    return parse(["0", str(request.world_size), *request.arguments, *more], environment).request


def _check(request: LaunchRequest) -> RunRequest:
    """Parse the arguments as every rank will, to report mistakes once, before anything starts."""
    asked = _parse(request, Environment.read())
    if STANDARD_INPUT in asked.input.paths:
        raise RequestError("--input -: launched ranks have no standard input; give a file")
    if asked.world.keys.key == STANDARD_INPUT:
        raise RequestError("--key -: launched ranks have no standard input; give a file")
    if asked.schedule.partition is not None:
        schedule = Schedule.from_partition(asked.schedule.partition)
        if asked.schedule.rank_order is not None:
            schedule.with_rank_order(asked.schedule.rank_order, world_size=request.world_size)
    return asked


def _lacks(request: LaunchRequest, option: str) -> bool:
    return not any(argument == option or argument.startswith(f"{option}=") for argument in request.arguments)


# --- the command line -------------------------------------------------------------------------------

_DEVICES = ("-sd", "--sched-dev-file")
_ENDED = "--"


def parse_launch(argv: Sequence[str]) -> LaunchRequest:
    """Parse the command line of ``pipeedge-launch``.

    Raises:
        RequestError: An option or a value is invalid.
        SystemExit: After ``--help``.
    """
    parser = launch_parser()
    own, arguments = _split_options(parser, argv)
    if argv[len(own) : len(own) + 1] != [_ENDED] and _ENDED in arguments:
        own = list(argv[: argv.index(_ENDED)])  # everything before it is the launcher's, known or not
    parsed = parser.parse_args(own)
    devices: Path | None = parsed.sched_dev_file
    if devices is not None and not _names_devices(arguments) and _schedules(arguments):
        arguments = [*arguments, "-sd", str(devices)]
    if parsed.local is None and parsed.hosts is None and devices is None:
        devices = _devices_of(arguments)
    hosts: tuple[Host, ...] = ()
    if parsed.hosts is not None:
        hosts = tuple(parse_host(text) for text in parsed.hosts.split(","))
    elif devices is not None and parsed.local is None:
        hosts = tuple(Host(name) for names in load_devices(devices).values() for name in names)
        if not hosts:
            raise RequestError(f"{devices}: the file lists no hosts to start ranks on")
        hosts = tuple(parse_host(host.name) for host in hosts)
    if parsed.local is not None and parsed.hosts is not None:
        raise RequestError("--local and --hosts exclude each other; give one of them")
    remote = None
    if hosts:
        remote = Remote(
            directory=parsed.directory or str(Path.cwd()),
            python=parsed.python or _remote_python(),
            user=parsed.user,
            ssh=tuple(shlex.split(parsed.ssh)) or ("ssh",),
        )
    return LaunchRequest(
        arguments=tuple(arguments),
        local=parsed.local,
        hosts=hosts,
        remote=remote,
        module=DOCTOR_MODULE if parsed.doctor else RUNTIME_MODULE,
        show=parsed.print,
        plain=parsed.plain,
    )


def _split_options(parser: OneLineParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the launcher's options, which come first, from the runtime's; ``--`` between them is optional."""
    own = parser.leading_words(argv)
    rest = list(argv[own:])
    return list(argv[:own]), rest[1:] if rest[:1] == [_ENDED] else rest


def _names_devices(arguments: Sequence[str]) -> bool:
    return any(argument.partition("=")[0] in _DEVICES for argument in arguments)


def _schedules(arguments: Sequence[str]) -> bool:
    wanted = ("-sm", "--sched-models-file", "-sdt", "--sched-dev-types-file")
    return any(argument.partition("=")[0] in wanted for argument in arguments)


def _devices_of(arguments: Sequence[str]) -> Path | None:
    """Return the devices file that the runtime's arguments name, or None."""
    for index, argument in enumerate(arguments):
        name, is_assigned, value = argument.partition("=")
        if name in _DEVICES:
            if is_assigned:
                return Path(value)
            return Path(arguments[index + 1]) if index + 1 < len(arguments) else None
    return None


def _remote_python() -> str:
    """Return the path of this interpreter, relative if it lies below this directory (``.venv/bin/python``).

    The remote directory may have another path, but its contents are the same.
    """
    executable = Path(sys.executable)
    here = Path.cwd()
    return str(executable.relative_to(here)) if executable.is_relative_to(here) else str(executable)


def launch_parser() -> OneLineParser:
    """Return the parser of ``pipeedge-launch``."""
    program, runtime = program_name(PROGRAM), program_name("runtime.py")
    parser = OneLineParser(
        prog=program,
        usage=f"{program} (--local N | --hosts LIST | -sd FILE) [options] -- RUNTIME OPTIONS",
        description="Start every rank of a run with the same options, label their output by rank, and stop "
        f"all when one fails. Options of {runtime} (see '{runtime} --help') follow, without RANK and WORLD.",
        epilog="The exit status is that of the first rank that failed; 130 after Ctrl-C.",
        allow_abbrev=False,
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--local", type=int, metavar="N", help="start N ranks on this machine, which share its cores"
    )
    where.add_argument(
        "--hosts", metavar="LIST", help="[user@]host of each rank, e.g. pi1,pi2; started over ssh"
    )
    where.add_argument(
        *_DEVICES, type=Path, metavar="FILE", help="devices.yml: start a rank on each of its hosts, in order"
    )
    remote = parser.add_argument_group("on other machines")
    remote.add_argument("--directory", metavar="DIR", help="remote working directory (the path of this one)")
    remote.add_argument("--python", metavar="PATH", help="remote interpreter (the path of this one)")
    remote.add_argument("--user", metavar="NAME", help="user to log in as")
    remote.add_argument(
        "--ssh", metavar="COMMAND", default="ssh", help="ssh program with options, e.g. 'ssh -p 2222'"
    )
    parser.add_argument(
        "--doctor", action="store_true", help=f"run {program_name('pipeedge-doctor')} on each rank instead"
    )
    remote.add_argument(
        "--plain",
        action="store_true",
        help="leave out the key that is made for each run on several machines, with which its ranks encrypt "
        "what they send and accept nobody else",
    )
    parser.add_argument("--print", action="store_true", help="print the commands without running them")
    add_common(parser)
    parser.examples = (
        f"{program} --local 2 -- -m vit-digits",
        f"{program} --hosts pi1,pi2,pi3 --directory pipeedge -- -m MODEL -pt 1,16,17,32,33,48",
        f"{program} --hosts pi1,pi2 --doctor -- -m MODEL",
    )
    return parser


if __name__ == "__main__":
    main()
