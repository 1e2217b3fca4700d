"""``tools/testbed.py``: emulate a cluster on one machine.

testbed.py up CLUSTER.yml            build a test bed
testbed.py status                    show the test beds that are up, and what their hosts use
testbed.py set HOST --bw-mbps MBPS   change a host while programs run in it; also --cpu-fraction
testbed.py exec HOST -- COMMAND      run a command in a host
testbed.py ssh [OPTIONS] HOST LINE   the same for pipeedge-launch --ssh 'tools/testbed.py ssh'
testbed.py down                      remove a test bed with everything that runs in it
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pipeedge.base.errors import RequestError
from pipeedge.base.files import InputPath, OutputFile, check_outputs
from pipeedge.base.guard import guard
from pipeedge.base.program import is_verbose
from pipeedge.base.streams import end, print_notice, print_result
from pipeedge.base.wording import count, figure
from pipeedge.plan.specs import BYTES_PER_SECOND_PER_MBPS
from pipeedge.request.parsing import OneLineParser, add_common
from pipeedge.testbed.bed import DEFAULT_NAME, TestBed, TestBeds
from pipeedge.testbed.cluster_file import LEAST_FRACTION, load_cluster

__all__ = ["main", "parse_testbed"]

PROGRAM = "testbed.py"

_SSH_WITH_VALUE = frozenset("bcDeFiIlLmoOpPQRsSwW")
"""Options of ssh that take a value."""


def main() -> NoReturn:
    """Run the command line's action, and end the process."""
    end(PROGRAM, guard(PROGRAM, lambda: _run(sys.argv[1:]), verbose=is_verbose(sys.argv[1:2])))


def _run(argv: Sequence[str]) -> None:
    if argv[:1] == ["ssh"]:
        _ssh(argv[1:])
    arguments = parse_testbed(argv)
    beds = TestBeds()
    if arguments.action == "up":
        journals = (beds.shelf.place(arguments.name) / name for name in ("journal.json", "hosts"))
        check_outputs(
            [OutputFile("--name", path) for path in journals],
            [InputPath("testbed.py up", Path(arguments.cluster))],
        )
        _show(beds.up(arguments.name, load_cluster(arguments.cluster)))
    elif arguments.action == "down":
        if not beds.down(arguments.name):
            print_notice(f"no test bed {arguments.name} is up")
    elif arguments.action == "set":
        _show(_change(beds, arguments))
    elif arguments.action == "status":
        found = beds.all()
        for bed in found:
            _show(bed)
        if not found:
            print_result("no test bed is up")
    else:
        command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
        if not command:
            raise RequestError("exec: give a command, as in 'testbed.py exec pi1 -- hostname'")
        _become(beds.find(arguments.name), arguments.host, command)


def parse_testbed(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of ``tools/testbed.py``, for actions other than ``ssh``.

    Raises:
        RequestError: An option or a value is invalid.
        SystemExit: After ``--help`` or ``--version``.
    """
    return _parser().parse_args(argv)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=PROGRAM,
        description="Emulate a cluster on this machine: each host has a network namespace, a bandwidth, a "
        "share of the processors and a memory limit. Needs root, on Linux.",
        epilog="Exit status: 0 done, 2 the request is wrong or the machine lacks something, 1 a fault of "
        "this program; exec exits as the command does.",
        allow_abbrev=False,
    )
    add_common(parser)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    up = actions.add_parser("up", help="build the cluster of a file", allow_abbrev=False)
    up.add_argument(
        "cluster", metavar="CLUSTER.yml", help="device types, devices, cpu_fraction: docs/testbed.md"
    )
    down = actions.add_parser(
        "down", help="remove a test bed with everything that runs in it", allow_abbrev=False
    )
    actions.add_parser(
        "status", help="show the test beds that are up, and what their hosts use", allow_abbrev=False
    )
    change = actions.add_parser("set", help="change a host while programs run in it", allow_abbrev=False)
    execute = actions.add_parser("exec", help="run a command in a host", allow_abbrev=False)
    for action in (up, down, change, execute):
        action.add_argument("--name", default=DEFAULT_NAME, help="name of the test bed (%(default)s)")
    for action in (change, execute):
        action.add_argument("host", metavar="HOST", help="name of the host in devices.yml")
    change.add_argument(
        "--cpu-fraction", type=float, metavar="N", help="processors that the host may use from now on"
    )
    change.add_argument(
        "--bw-mbps", type=float, metavar="MBPS", help="bandwidth of its cable in each direction from now on"
    )
    execute.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command with its arguments"
    )
    actions.add_parser("ssh", help="stand in for ssh, for pipeedge-launch --ssh", add_help=False)
    return parser


def _change(beds: TestBeds, arguments: argparse.Namespace) -> TestBed:
    """Apply the options of ``set``.

    Raises:
        RequestError: None is given, or a number is impossible.
    """
    fraction, mbps = arguments.cpu_fraction, arguments.bw_mbps
    if fraction is None and mbps is None:
        raise RequestError("set: give --cpu-fraction or --bw-mbps, or both")
    if fraction is not None and not LEAST_FRACTION <= fraction < math.inf:
        raise RequestError(
            f"--cpu-fraction {fraction}: give a number of processors of at least {LEAST_FRACTION}"
        )
    if mbps is not None and not 0 < mbps < math.inf:
        raise RequestError(f"--bw-mbps {mbps}: give a number of Mbit/s above 0")
    return beds.change(
        arguments.name,
        arguments.host,
        cpu_fraction=fraction,
        bw_bytes_per_s=None if mbps is None else mbps * BYTES_PER_SECOND_PER_MBPS,
    )


def _ssh(argv: Sequence[str]) -> NoReturn:
    """Run ``[options of ssh] HOST LINE``: hand the line to a shell in the host, as ssh does."""
    rest = list(argv)
    name = DEFAULT_NAME
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--name" and rest:
            name = rest.pop(0)
        elif len(option) == 2 and option[1] in _SSH_WITH_VALUE and rest:
            rest.pop(0)
    if len(rest) < 2:
        raise RequestError("ssh: give a host and a command, as in 'testbed.py ssh pi1 hostname'")
    _become(TestBeds().find(name), rest[0].rpartition("@")[2], ["sh", "-c", " ".join(rest[1:])])


def _become(bed: TestBed, host: str, command: Sequence[str]) -> NoReturn:
    """Replace this process by the command, running in the host."""
    inside = bed.command(host, command)
    os.execvp(inside[0], inside)  # noqa: S606


def _show(bed: TestBed) -> None:
    from pipeedge.base.console import Column, StandardOutput, print_table

    hosts = bed.journal.hosts
    usages = [bed.usage(host.name) for host in hosts]
    parts = ["any" if host.cpu_fraction is None else f"{figure(host.cpu_fraction, 6)}" for host in hosts]
    bandwidths = [f"{figure(host.bw_bytes_per_s * 8 / 2**20, 6)} Mbps" for host in hosts]
    memory = [
        f"{one.mem_bytes >> 20}/{host.mem_bytes >> 20} MB" for one, host in zip(usages, hosts, strict=True)
    ]
    console = StandardOutput(result=True)
    console.print(f"test bed {bed.journal.name}: {count(len(hosts), 'host')}", highlight=False)
    columns = [
        Column("host", [host.name for host in hosts], left=True),
        Column("type", [host.type_name for host in hosts], left=True, rank=4),
        Column("address", [host.address for host in hosts], left=True),
        Column("bandwidth", bandwidths, left=True, rank=1),
        Column("processors", parts, left=True, rank=2),
        Column("memory", memory, left=True, rank=3),
        Column("processes", [str(one.processes) for one in usages], left=True, rank=5),
    ]
    print_table(console, columns)
