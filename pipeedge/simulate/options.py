"""Parse the command line of ``pipeedge-simulate`` into a request. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeedge.base.errors import RequestError, ScheduleError
from pipeedge.base.program import program_name
from pipeedge.base.schedule import check_bits, check_dtype
from pipeedge.base.wording import count
from pipeedge.plan.specs import short_dtype
from pipeedge.request.config import DEFAULT_BATCH_SIZE, ModelRequest, check_report_name
from pipeedge.request.options import OneLineParser, add_common, integers, names

__all__ = ["SimulationRequest", "parse_simulate"]

MAX_MICROBATCHES = 1_000_000


@dataclass(frozen=True)
class SimulationRequest:
    """The simulation to run, validated on creation.

    Raises:
        RequestError: a number is out of range, or options contradict each other.
    """

    models_file: Path = Path("models.yml")
    dev_types_file: Path = Path("device_types.yml")
    dev_file: Path = Path("devices.yml")
    dev_neighbors_file: Path | None = None
    schedule_file: Path | None = None
    """Schedule that ``sched-pipeline`` printed, or None to compute the best one."""
    model_name: str = ModelRequest.name
    items: int = DEFAULT_BATCH_SIZE
    """Number of items in the whole run."""
    ubatch_size: int = 8
    """Number of items in a microbatch."""
    tokens: int | None = None
    """Tokens of the longest sentence, or None for the profiled length."""
    dtypes: tuple[str, ...] | None = None
    """One dtype for all stages or one for each, or None for those of the schedule file, else float32."""
    quant_bits: tuple[int, ...] | None = None
    """Bits per value on each stage's outgoing link, or None for those of the schedule file, else 0."""
    hosts: tuple[str, ...] | None = None
    """Host of each rank, or None for the order of the devices file (or hosts named by their ranks)."""
    data_host: str | None = None
    """Host that reads the input and collects the results, or None for the host of the first stage."""
    codec_bytes_per_s: float | None = None
    """Uncompressed bytes that a stage encodes, or decodes, per second, or None if that takes no time."""
    read_s: float = 0.0
    """Seconds to read a microbatch on the data rank."""
    write_s: float = 0.0
    """Seconds to write the results of a microbatch on the data rank."""
    report: Path | None = None
    """File to write the report to, or None for no report."""

    def __post_init__(self) -> None:
        if self.items < 1:
            raise RequestError(f"-b/--batch-size {self.items}: must be at least 1")
        if self.ubatch_size < 1:
            raise RequestError(f"-u/--ubatch-size {self.ubatch_size}: must be at least 1")
        if self.tokens is not None and self.tokens < 1:
            raise RequestError(f"--tokens {self.tokens}: a sentence has at least 1 token")
        if self.microbatches > MAX_MICROBATCHES:
            raise RequestError(
                f"-b/--batch-size {self.items}: that makes {count(self.microbatches, 'microbatch')}, and at "
                f"most {MAX_MICROBATCHES} can be simulated; give fewer, the throughput settles long before"
            )
        for dtype in self.dtypes or ():
            check_dtype(dtype, "--dtype")
        if self.schedule_file is None and len(self.dtypes or ()) > 1:
            raise RequestError("--dtype with a type for each stage needs --schedule-file")
        for bits in self.quant_bits or ():
            check_bits(bits, "-q")
        if self.hosts is not None and len(set(self.hosts)) < len(self.hosts):
            twice = next(host for host in self.hosts if self.hosts.count(host) > 1)
            raise ScheduleError(f"-H/--hosts names {twice} twice; give each rank a host of its own")
        if self.codec_bytes_per_s is not None and not 0 < self.codec_bytes_per_s < math.inf:
            raise RequestError("--codec-MBps: must be above 0")
        for name in ("read_s", "write_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RequestError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")
        if self.report is not None:
            check_report_name(self.report)

    @property
    def microbatches(self) -> int:
        """Number of microbatches that the items make."""
        return -(-self.items // self.ubatch_size)


def parse_simulate(argv: Sequence[str]) -> SimulationRequest:
    """Parse the command line of ``pipeedge-simulate``.

    Raises:
        RequestError: an option or a value is invalid.
        SystemExit: after ``--help`` or ``--version``.
    """
    arguments = simulate_parser().parse_args(argv)
    rate = arguments.codec_MBps
    return SimulationRequest(
        models_file=arguments.sched_models_file,
        dev_types_file=arguments.sched_dev_types_file,
        dev_file=arguments.sched_dev_file,
        dev_neighbors_file=arguments.sched_dev_neighbors_file,
        schedule_file=arguments.schedule_file,
        model_name=arguments.model_name,
        items=arguments.batch_size,
        ubatch_size=arguments.ubatch_size,
        tokens=arguments.tokens,
        dtypes=arguments.dtype,
        quant_bits=arguments.quant,
        hosts=arguments.hosts,
        data_host=arguments.data_host,
        codec_bytes_per_s=None if rate is None else rate * 1e6,
        read_s=arguments.read_s,
        write_s=arguments.write_s,
        report=arguments.report,
    )


def _dtypes(text: str) -> tuple[str, ...]:
    return tuple(short_dtype(name) for name in names(text))


def simulate_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge-simulate``."""
    parser = OneLineParser(
        prog=program_name("pipeedge-simulate"),
        description="Predict a run on hosts that need not exist, from the scheduler's files: throughput, "
        "latency, memory, and where each stage would wait. Without --schedule-file, "
        f"{program_name('sched-pipeline')} computes the best schedule first.",
        epilog=f"Example: '{program_name('pipeedge-simulate')} -sm models.yml -sdt device_types.yml "
        "-sd devices.yml --report what-if.html'. Exit status: 0 done, 2 the request is wrong, 3 no feasible "
        "schedule, 1 a "
        "fault of this program.",
        allow_abbrev=False,
    )
    add_common(parser)

    cluster = parser.add_argument_group("cluster")
    for option, name, default, what in (
        ("-sm", "models", SimulationRequest.models_file, "layers of the models, with their sizes"),
        ("-sdt", "dev-types", SimulationRequest.dev_types_file, "device types with their profiles"),
        ("-sd", "dev", SimulationRequest.dev_file, "hosts of each device type"),
        ("-sdn", "dev-neighbors", None, "bandwidth and latency of individual links"),
    ):
        shown = "" if default is None else f" ({default})"
        cluster.add_argument(
            option, f"--sched-{name}-file", type=Path, default=default, metavar="FILE", help=what + shown
        )
    cluster.add_argument(
        "--schedule-file",
        type=Path,
        metavar="FILE",
        help=f"a schedule that {program_name('sched-pipeline')} printed",
    )
    cluster.add_argument(
        "-H", "--hosts", type=names, metavar="LIST", help="host of each rank (in the order of -sd)"
    )
    cluster.add_argument(
        "--data-host",
        metavar="HOST",
        help="host that reads the input and collects the results (that of stage 0)",
    )

    run = parser.add_argument_group("run")
    run.add_argument(
        "-m",
        "--model-name",
        metavar="NAME",
        default=ModelRequest.name,
        help="name of the model in -sm (%(default)s)",
    )
    run.add_argument(
        "-b",
        "--batch-size",
        type=int,
        default=DEFAULT_BATCH_SIZE,
        metavar="N",
        help="items in the whole run (64)",
    )
    run.add_argument(
        "-u", "--ubatch-size", type=int, default=8, metavar="N", help="items that travel together (8)"
    )
    run.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="tokens of the longest sentence, for text models (as profiled)",
    )
    run.add_argument(
        "--dtype",
        type=_dtypes,
        metavar="TYPE[,TYPE...]",
        help="number type of all stages, or of each (that of the schedule file, else float32)",
    )
    run.add_argument(
        "-q",
        "--quant",
        type=integers,
        metavar="LIST",
        help="bits per value on each stage's outgoing link, 0 for no compression (those of the schedule "
        "file, else 0)",
    )
    run.add_argument(
        "--codec-MBps",
        type=float,
        metavar="N",
        help="MB of uncompressed values that a stage encodes, or decodes, per second (takes no time)",
    )
    run.add_argument(
        "--read-s", type=float, default=0.0, metavar="S", help="seconds to read a microbatch of input (0)"
    )
    run.add_argument(
        "--write-s",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds to write the results of a microbatch (0)",
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--report", type=Path, metavar="FILE", help="write a report as of a run: .json, or .html for a page"
    )
    return parser
