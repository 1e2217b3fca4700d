"""Parse the command line of ``revauct.py`` into a request."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path

from pipeedge.auction.ordered import DeviceOrder
from pipeedge.base.program import program_name
from pipeedge.base.schedule import DTYPES
from pipeedge.base.wording import figure
from pipeedge.request.config import WorldRequest
from pipeedge.request.declared import (
    Check,
    Option,
    Section,
    add_sections,
    at_least,
    check_options,
    given,
    option,
    option_of,
    options_of,
    read_variables,
)
from pipeedge.request.environment import Environment
from pipeedge.request.keys import KeyRequest
from pipeedge.request.parsing import OneLineParser, add_common, dtype_name, path
from pipeedge.request.profiled import ProfiledRequest

__all__ = ["SCHEDULERS", "AuctionRequest", "auction_parser", "parse_auction"]

SCHEDULERS = ("latency_ordered", "throughput_ordered", "greedy_host_count", "optimal")
_MAX_SECONDS = 7 * 24 * 3600.0
_SECONDS = Check(
    lambda value: 0 < value <= _MAX_SECONDS, f"must be seconds above 0 and up to {figure(_MAX_SECONDS, 7)}"
)


@dataclass(frozen=True)
class Selling:
    """How the auctioneer collects bids and schedules from them."""

    scheduler: str = option(
        "throughput_ordered",
        "-sch/--scheduler",
        choices=SCHEDULERS,
        help="lowest latency or highest throughput in the order of devices; few devices; or highest "
        "throughput in any order ({default})",
    )
    dev_count: int | None = option(
        None,
        "-d/--dev-count",
        type=int,
        check=at_least(1),
        help="use only the first N devices of the order (all)",
    )
    strict_order: bool = option(
        True, "--no-strict-order", help="allow skipping devices; otherwise each gets a stage"
    )
    strict_first: bool = option(False, "--strict-first", help="give the first stage to the first device")
    strict_last: bool = option(False, "--strict-last", help="give the last stage to the last device")
    seed: int | None = option(
        None,
        "--seed",
        type=int,
        check=Check(lambda seed: seed >= 0, "must not be negative"),
        help="shuffle the order of devices (that of ranks)",
    )
    deadline_s: float = option(
        60.0,
        "--deadline",
        type=float,
        metavar="SECONDS",
        check=_SECONDS,
        help="time to wait for bids; a device that made none is named and left out ({default})",
    )
    time_limit_s: float = option(
        5.0,
        "--time-limit",
        type=float,
        metavar="SECONDS",
        check=_SECONDS,
        help="time limit of -sch optimal ({default})",
    )
    data_host: str | None = option(
        None,
        "-D/--data-host",
        metavar="HOST",
        help="host that reads the input and collects the output, whose links then count",
    )
    """Host that reads the input and collects the output, or None to ignore both."""
    chunk: int = option(
        1,
        "--filter-bids-chunk",
        type=int,
        help="ask only for stages that begin and end at multiples of N layers; a block has 4 ({default})",
    )
    largest: bool = option(
        False, "--filter-bids-largest", help="ask only for the largest stage from each first layer"
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def order(self) -> DeviceOrder:
        """How strictly to keep the order of devices."""
        return DeviceOrder(self.strict_order, self.strict_first, self.strict_last)


@dataclass(frozen=True, kw_only=True)
class AuctionRequest(ProfiledRequest):
    """The request of one rank of an auction."""

    world: WorldRequest
    host: str = option(
        MISSING,
        "-H/--host",
        metavar="NAME",
        check=Check(
            lambda host: 0 < len(host) <= 200 and host.isprintable(),
            "must be a name of 1 to 200 printable characters",
        ),
        help="its name (its host name)",
    )
    dtype: str = option(
        "float32",
        "--dtype",
        type=dtype_name,
        metavar="TYPE",
        help=f"one of {', '.join(DTYPES)} ({{default}})",
    )
    dev_type: str | None = option(
        None, "-dt/--dev-type", metavar="NAME", help="its type (the only one in the file)"
    )
    neighbors_file: Path | None = option(
        None,
        "-sdnw/--sched-dev-neighbors-world",
        type=path,
        help="bandwidth and latency of its links, as {pipeedge-doctor} measured them (those of the types)",
    )
    selling: Selling = field(default_factory=Selling)
    output: Path | None = option(
        None, "--output", type=path, help="write the schedule for {runtime.py} --schedule-file"
    )
    run: tuple[str, ...] | None = None
    """Further options of the run that follows, or None for no run."""

    def __post_init__(self) -> None:
        check_options(self)


_RUN = Option(
    ("--run",),
    "continue with the pipeline on all ranks; further options of {runtime.py} follow (must be last)",
    dest="run",
    default=False,
)

SECTIONS = (
    Section(
        "network",
        (
            replace(
                option_of(WorldRequest, "socket_ifname"),
                help="interface for the links of the run that follows",
            ),
            replace(option_of(WorldRequest, "addr"), help="address of rank 0 ({default})"),
            replace(option_of(WorldRequest, "port"), help="port of rank 0 ({default})"),
        ),
    ),
    Section("key (of the same kind on every rank)", options_of(KeyRequest)),
    Section(
        "this device",
        (
            *options_of(AuctionRequest, "host", "dev_type", "models_file"),
            replace(
                option_of(AuctionRequest, "dev_types_file"),
                help="device types; the profile of this device is enough ({default})",
            ),
            option_of(AuctionRequest, "neighbors_file"),
        ),
    ),
    Section(
        "the auction (rank 0 decides)",
        (
            *options_of(AuctionRequest, "model_name", "microbatch_size", "tokens", "dtype"),
            *options_of(Selling, "data_host", "chunk", "largest", "scheduler", "dev_count", "strict_order"),
            *options_of(Selling, "strict_first", "strict_last", "seed", "deadline_s", "time_limit_s"),
            option_of(AuctionRequest, "output"),
            _RUN,
        ),
    ),
)
"""Options of ``revauct.py`` in the order of ``--help``."""


def parse_auction(argv: Sequence[str], environment: Environment) -> AuctionRequest:
    """Parse the command line; options after ``--run`` belong to the run.

    Args:
        argv: Arguments, without the program.
        environment: Environment, whose variables stand for options.

    Raises:
        RequestError: An option or a value is invalid.
        SystemExit: After ``--help`` or ``--version``.
    """
    own, run = list(argv), None
    if "--run" in own:
        at = own.index("--run")
        own, run = own[:at], tuple(option for option in own[at + 1 :] if option != "--")
    arguments = auction_parser().parse_args(own)
    read_variables(arguments, SECTIONS, environment.variables)
    selling = Selling(**given(arguments, Selling))
    fields = {"host": socket.gethostname()} | given(arguments, AuctionRequest)
    return AuctionRequest(
        **fields,
        world=WorldRequest(
            arguments.RANK,
            arguments.WORLD,
            **given(arguments, WorldRequest),
            timeout_s=selling.deadline_s,
            keys=KeyRequest(**given(arguments, KeyRequest)),
        ),
        selling=selling,
        run=run,
    )


class _Parser(OneLineParser):
    """A parser that tells where options of the run belong."""

    def explain_unknown(self, option: str) -> str:
        """Return what to say about an unknown option, as the end of a sentence."""
        if option in ("-b", "--batch-size"):
            return ": -u gives the items of a microbatch; -b, the items of the run, goes after --run"
        return super().explain_unknown(option)


def auction_parser() -> argparse.ArgumentParser:
    """Return the parser of ``revauct.py``."""
    parser = _Parser(
        prog=program_name("revauct.py"),
        description="Schedule by a reverse auction: each device bids for the shards that it can hold with "
        "its own times, and rank 0 schedules from the bids alone. Start one on each device. The schedule "
        "goes to rank 0's standard output.",
        epilog="Exit status: 0 done, 2 the request is wrong, 3 no feasible schedule, 4 another rank failed "
        "or did not answer, 1 a fault of this program; with --run, that of the run.",
        allow_abbrev=False,
    )
    parser.add_argument("RANK", type=int, help="this process, from 0; rank 0 is the auctioneer, and bids too")
    parser.add_argument("WORLD", type=int, help="number of processes")
    add_common(parser)
    add_sections(parser, SECTIONS)
    parser.common = (
        *(
            "--addr",
            "--host",
            "--dev-type",
            "--model",
            "--ubatch-size",
            "--key",
        ),
        *(
            "--sched-models-file",
            "--sched-dev-types-file",
            "--scheduler",
            "--dev-count",
            "--deadline",
            "--run",
        ),
    )
    program = program_name("revauct.py")
    parser.examples = (
        f"{program} 0 2 -H pi1 -dt my-board --addr pi1        # on pi1",
        f"{program} 1 2 -H pi2 -dt my-board --addr pi1        # on pi2",
        f"{program} 0 2 -H pi1 -dt my-board --addr pi1 --run  # and run what was scheduled",
    )
    return parser
