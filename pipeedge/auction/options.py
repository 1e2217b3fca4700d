"""Parse the command line of ``revauct.py`` into a request."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeedge.auction.ordered import Order
from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.base.schedule import DTYPES
from pipeedge.base.wording import figure
from pipeedge.request.config import ModelRequest, WorldRequest
from pipeedge.request.options import OneLineParser, add_common

__all__ = ["SCHEDULERS", "AuctionRequest", "auction_parser", "parse_auction"]

SCHEDULERS = ("latency_ordered", "throughput_ordered", "greedy_host_count", "optimal")
_MAX_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Selling:
    """How the auctioneer collects bids and schedules from them."""

    scheduler: str = "throughput_ordered"
    """One of ``SCHEDULERS``."""
    order: Order = field(default_factory=Order)
    """How strictly to keep the order of devices."""
    dev_count: int | None = None
    """Number of devices to use, the first in the order, or None for all."""
    seed: int | None = None
    """Seed to shuffle the order of devices with, or None for the order of ranks."""
    deadline_s: float = 60.0
    """Seconds to wait for bids."""
    time_limit_s: float = 5.0
    """Seconds that the native solver may take."""
    data_host: str | None = None
    """Host that reads the input and collects the output, or None to ignore both."""
    chunk: int = 1
    """Number of layers whose multiples stages begin and end at."""
    largest: bool = False
    """Whether to ask, for each first layer, only for the largest stage."""

    def __post_init__(self) -> None:
        if self.dev_count is not None and self.dev_count < 1:
            raise RequestError(f"-d/--dev-count {self.dev_count}: must be at least 1")
        for name, value in (("--deadline", self.deadline_s), ("--time-limit", self.time_limit_s)):
            if not 0 < value <= _MAX_SECONDS:
                raise RequestError(
                    f"{name} {figure(value, 7)}: must be seconds above 0 and up to {figure(_MAX_SECONDS, 7)}"
                )
        if self.seed is not None and self.seed < 0:
            raise RequestError(f"--seed {self.seed}: must not be negative")


@dataclass(frozen=True)
class AuctionRequest:
    """The request of one rank of an auction."""

    world: WorldRequest
    host: str
    """Name of this device."""
    model_name: str
    ubatch_size: int
    """Number of items in a microbatch."""
    dtype: str
    """Number type of the run."""
    tokens: int | None
    """Tokens of the longest sentence, or None for the profiled length."""
    models_file: Path
    dev_types_file: Path
    dev_type: str | None
    """Device type of this device, or None for the only one in the file."""
    neighbors_file: Path | None
    """File with bandwidth and latency of individual links, or None."""
    selling: Selling
    output: Path | None
    """Schedule file to write, or None."""
    run: tuple[str, ...] | None
    """Further options of the run that follows, or None for no run."""

    def __post_init__(self) -> None:
        if not 0 < len(self.host) <= 200 or not self.host.isprintable():
            raise RequestError("-H/--host: give a name of 1 to 200 printable characters")


def parse_auction(argv: Sequence[str]) -> AuctionRequest:
    """Parse the command line; options after ``--run`` belong to the run.

    Raises:
        RequestError: an option or a value is invalid.
        SystemExit: after ``--help`` or ``--version``.
    """
    own, run = list(argv), None
    if "--run" in own:
        at = own.index("--run")
        own, run = own[:at], tuple(option for option in own[at + 1 :] if option != "--")
    arguments = auction_parser().parse_args(own)
    return AuctionRequest(
        world=WorldRequest(
            rank=arguments.RANK,
            size=arguments.WORLD,
            addr=arguments.addr,
            port=arguments.port,
            socket_ifname=arguments.socket_ifname,
            timeout_s=arguments.deadline,
        ),
        host=arguments.host or socket.gethostname(),
        model_name=arguments.model_name,
        ubatch_size=arguments.ubatch_size,
        dtype=arguments.dtype.removeprefix("torch."),
        tokens=arguments.tokens,
        models_file=arguments.sched_models_file,
        dev_types_file=arguments.sched_dev_types_file,
        dev_type=arguments.dev_type,
        neighbors_file=arguments.sched_dev_neighbors_world,
        selling=Selling(
            scheduler=arguments.scheduler,
            order=Order(arguments.strict_order, arguments.strict_first, arguments.strict_last),
            dev_count=arguments.dev_count,
            seed=arguments.seed,
            deadline_s=arguments.deadline,
            time_limit_s=arguments.time_limit,
            data_host=arguments.data_host,
            chunk=arguments.filter_bids_chunk,
            largest=arguments.filter_bids_largest,
        ),
        output=arguments.output,
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

    network = parser.add_argument_group("network")
    network.add_argument(
        "-s", "--socket-ifname", metavar="NAME", help="interface for the links of the run that follows"
    )
    network.add_argument("--addr", default="127.0.0.1", help="address of rank 0 (%(default)s)")
    network.add_argument("--port", type=int, default=29500, help="port of rank 0 (%(default)s)")

    device = parser.add_argument_group("this device")
    device.add_argument("-H", "--host", metavar="NAME", help="its name (its host name)")
    device.add_argument("-dt", "--dev-type", metavar="NAME", help="its type (the only one in the file)")
    device.add_argument(
        "-sm", "--sched-models-file", type=Path, default=Path("models.yml"), metavar="FILE", help="models.yml"
    )
    device.add_argument(
        "-sdt",
        "--sched-dev-types-file",
        type=Path,
        default=Path("device_types.yml"),
        metavar="FILE",
        help="device_types.yml; this device's own profile is enough",
    )
    device.add_argument(
        "-sdnw",
        "--sched-dev-neighbors-world",
        type=Path,
        metavar="FILE",
        help=f"bandwidth and latency of its links, as {program_name('pipeedge-doctor')} measured them "
        "(those of the types)",
    )

    auction = parser.add_argument_group("the auction (rank 0 decides)")
    auction.add_argument(
        "-m",
        "--model-name",
        default=ModelRequest.name,
        metavar="NAME",
        help="name of the model (%(default)s)",
    )
    auction.add_argument(
        "-u", "--ubatch-size", type=int, default=8, metavar="N", help="items in a microbatch (%(default)s)"
    )
    auction.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="tokens of the longest sentence, for text models (as profiled)",
    )
    auction.add_argument(
        "--dtype", default="float32", metavar="TYPE", help=f"one of {', '.join(DTYPES)} (%(default)s)"
    )
    auction.add_argument(
        "-D",
        "--data-host",
        metavar="HOST",
        help="host that reads the input and collects the output, whose links then count",
    )
    auction.add_argument(
        "--filter-bids-chunk",
        type=int,
        default=1,
        metavar="N",
        help="ask only for stages that begin and end at multiples of N layers; a block has 4 (%(default)s)",
    )
    auction.add_argument(
        "--filter-bids-largest",
        action="store_true",
        help="ask only for the largest stage from each first layer",
    )
    auction.add_argument(
        "-sch",
        "--scheduler",
        choices=SCHEDULERS,
        default=Selling.scheduler,
        help="lowest latency or highest throughput in the order of devices; few devices; or highest "
        "throughput in any order (%(default)s)",
    )
    auction.add_argument(
        "-d", "--dev-count", type=int, metavar="N", help="use only the first N devices of the order (all)"
    )
    auction.add_argument(
        "--no-strict-order",
        dest="strict_order",
        action="store_false",
        help="allow skipping devices; otherwise each gets a stage",
    )
    auction.add_argument(
        "--strict-first", action="store_true", help="give the first stage to the first device"
    )
    auction.add_argument("--strict-last", action="store_true", help="give the last stage to the last device")
    auction.add_argument("--seed", type=int, metavar="N", help="shuffle the order of devices (that of ranks)")
    auction.add_argument(
        "--deadline",
        type=float,
        default=Selling.deadline_s,
        metavar="SECONDS",
        help="time to wait for bids; a device that made none is named and left out (%(default)g)",
    )
    auction.add_argument(
        "--time-limit",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="time limit of -sch optimal (%(default)g)",
    )
    auction.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"write the schedule for {program_name('runtime.py')} --schedule-file",
    )
    auction.add_argument(
        "--run",
        action="store_true",
        help="continue with the pipeline on all ranks; further options of "
        f"{program_name('runtime.py')} follow (must be last)",
    )
    return parser
