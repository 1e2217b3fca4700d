"""Parse the command line of ``pipeedge-simulate`` into a request. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.base.text_lengths import TextLengths, check_lengths, longest_of
from pipeedge.base.wording import count
from pipeedge.request.config import (
    ENCRYPTED,
    TRANSPORTS,
    ModelRequest,
    RunRequest,
    TransportRequest,
    WorldRequest,
)
from pipeedge.request.declared import (
    Check,
    Section,
    add_sections,
    at_least,
    check_options,
    given,
    option,
    option_like,
    options_of,
)
from pipeedge.request.files import DEFAULT_ITEMS, OutputRequest
from pipeedge.request.generation import CacheRequest
from pipeedge.request.keys import KeyRequest
from pipeedge.request.parsing import OneLineParser, add_common, dtype_names
from pipeedge.request.profiled import ProfiledRequest
from pipeedge.request.scheduling import LinkRequest, ScheduleRequest

__all__ = ["Loss", "RecoveryRequest", "SimulationRequest", "parse_simulate"]

MAX_MICROBATCHES = 1_000_000
_USUAL_CONTEXT = 2048
_NOT_NEGATIVE = Check(lambda seconds: 0 <= seconds < math.inf, "must not be negative")


@dataclass(frozen=True)
class Loss:
    """The loss of a rank."""

    rank: int
    at_s: float
    """Seconds from the beginning of the run."""

    def __str__(self) -> str:
        return f"{self.rank}@{self.at_s:g}"


def _loss(text: str) -> Loss:
    """Parse ``RANK@SECONDS``."""
    rank, _, seconds = text.partition("@")
    try:
        found = Loss(int(rank), float(seconds))
    except ValueError:
        found = Loss(-1, math.nan)
    if not (found.rank >= 0 and 0 < found.at_s < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not a loss: use RANK@SECONDS, for example 1@20")
    return found


def _lengths(text: str) -> str:
    """Check a histogram of lengths, as an argument."""
    try:
        check_lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: use N:COUNT,..., for example 12:300,40:80") from None
    return text


@dataclass(frozen=True)
class RecoveryRequest:
    """Seconds of the steps of a recovery after a loss."""

    detect_s: float = option(
        0.0,
        "--detect-s",
        type=float,
        metavar="S",
        check=_NOT_NEGATIVE,
        help="with --lose: seconds until a loss is noticed: 0 for a process that ends; for a host that falls "
        "silent, the --timeout of the run less 3 ({default})",
    )
    plan_s: float = option(
        0.1,
        "--plan-s",
        type=float,
        metavar="S",
        check=_NOT_NEGATIVE,
        help="with --lose: seconds until the others have stopped and the new plan is known ({default})",
    )
    load_mb_per_s: float = option(
        100.0,
        "--load-MBps",
        type=float,
        metavar="N",
        check=Check(lambda rate: 0 < rate < math.inf, "must be above 0"),
        help="with --lose: MB of weights that a rank loads per second ({default})",
    )
    keep_outputs: bool = option_like(
        CacheRequest, "keep_outputs", help="with --lose, for a decoder: let ranks keep what they have sent on"
    )
    replicate: bool = option_like(
        CacheRequest,
        "replicate",
        help="with --lose, for a decoder: let others have weights and full pages of the rank that is lost",
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def load_bytes_per_s(self) -> float:
        """Bytes of weights that a rank loads per second."""
        return self.load_mb_per_s * 1e6


@dataclass(frozen=True)
class SimulationRequest(ProfiledRequest):
    """The simulation to run, validated on creation.

    Raises:
        RequestError: A number is out of range, or options contradict each other.
    """

    dev_file: Path = option_like(
        ScheduleRequest, "dev_file", default=Path("devices.yml"), help="hosts of each device type ({default})"
    )
    dev_neighbors_file: Path | None = option_like(
        ScheduleRequest, "dev_neighbors_file", help="bandwidth and latency of individual links"
    )
    schedule_file: Path | None = option_like(ScheduleRequest, "schedule_file")
    items: int = option(
        DEFAULT_ITEMS,
        "-b/--batch-size",
        type=int,
        check=at_least(1),
        help="items in the whole run ({default})",
    )
    lengths: str | None = option(
        None,
        "--lengths",
        metavar="N:COUNT,...",
        type=_lengths,
        help="how many sentences there are of each length, for text models (all as long as the longest)",
    )
    context: int | None = option_like(
        CacheRequest,
        "context",
        help="longest text of a decoder in tokens, which its cache is for (that of -m, at most 2048)",
    )
    prompt_tokens: int | None = option(
        None,
        "--prompt-tokens",
        type=int,
        check=at_least(1),
        help="tokens of each prompt of a decoder (a quarter of --context)",
    )
    answer_tokens: int | None = option(
        None,
        "--answer-tokens",
        type=int,
        check=at_least(1),
        help="tokens of each answer (the rest of --context)",
    )
    partition: tuple[int, ...] | None = option_like(
        ScheduleRequest,
        "partition",
        help="first and last layer of each stage, from 1, e.g. 1,24,25,48, in place of the best schedule",
    )
    rank_order: tuple[int, ...] | None = option_like(ScheduleRequest, "rank_order")
    plan: str = option_like(ScheduleRequest, "plan")
    min_agreement: float | None = option_like(ScheduleRequest, "min_agreement")
    objective: str = option_like(ScheduleRequest, "objective")
    min_throughput: float | None = option_like(ScheduleRequest, "min_throughput")
    dtypes: tuple[str, ...] | None = option_like(
        ScheduleRequest,
        "dtypes",
        arguments={"type": dtype_names, "metavar": "TYPE[,TYPE...]"},
        help="number type of all stages, or of each; auto: the fastest one with profiles (that of the "
        "schedule file, else float32)",
    )
    transport: str = option(
        TRANSPORTS[0],
        "--transport",
        choices=TRANSPORTS,
        help="transport of the links, whose costs count if profiles have them: p2p, rpc, tcp, or tcp-tls for "
        "tcp with a key ({default})",
    )
    link_bits: str | None = option_like(LinkRequest, "link_bits")
    quant_bits: tuple[int, ...] | None = option_like(
        LinkRequest,
        "quant_bits",
        help="bits per value on each stage's outgoing link, 0 for no compression (those of the schedule "
        "file, else 0)",
    )
    hosts: tuple[str, ...] | None = option_like(
        ScheduleRequest, "hosts", help="host of each rank (in the order of -sd)"
    )
    """Host of each rank, or None for the order of the devices file (or hosts named by their ranks)."""
    data_host: str | None = option(
        None,
        "--data-host",
        metavar="HOST",
        help="host that reads the input and collects the results (that of rank 0)",
    )
    codec_mb_per_s: float | None = option(
        None,
        "--codec-MBps",
        type=float,
        metavar="N",
        check=Check(lambda rate: 0 < rate < math.inf, "must be above 0"),
        help="MB of uncompressed values that a stage encodes, or decodes, per second (takes no time)",
    )
    read_s: float = option(
        0.0,
        "--read-s",
        type=float,
        metavar="S",
        check=_NOT_NEGATIVE,
        help="seconds to read a microbatch of input ({default})",
    )
    write_s: float = option(
        0.0,
        "--write-s",
        type=float,
        metavar="S",
        check=_NOT_NEGATIVE,
        help="seconds to write the results of a microbatch ({default})",
    )
    losses: tuple[Loss, ...] = option(
        (),
        "--lose",
        type=_loss,
        action="append",
        metavar="RANK@SECONDS",
        help="let the run lose a rank after so many seconds, and go on without it; may be repeated (none)",
    )
    recovery: RecoveryRequest = field(default_factory=RecoveryRequest)
    report: Path | None = option_like(
        OutputRequest, "report", help="write a report as of a run: .json, or .html for a page"
    )

    def __post_init__(self) -> None:
        check_options(self)
        self.microbatches(self.microbatch_size)
        if self.losses and not self.transport.startswith(ENCRYPTED):
            raise RequestError(
                f"--lose needs --transport {ENCRYPTED} or {ENCRYPTED}-tls: over {self.transport}, a run ends "
                "with the first rank that it loses"
            )
        if self.recovery != RecoveryRequest() and not self.losses:
            raise RequestError(
                "--detect-s, --plan-s, --load-MBps, --keep-outputs and --replicate have an effect only with "
                "--lose"
            )

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sentence; None for images, and for lengths as profiled."""
        known = None if self.lengths is None else longest_of(self.lengths)
        return max((length for length in (self.tokens, known) if length is not None), default=None)

    def text_lengths(self, longest: int) -> TextLengths:
        """Return the texts of a decoder, whose context is ``longest``.

        Raises:
            RequestError: They do not fit, are too many, or an option is for encoders.
        """
        useless = (
            ("--tokens", self.tokens),
            ("--lengths", self.lengths),
            ("-q/--quant", self.quant_bits),
            ("--link-bits", self.link_bits),
            ("--read-s", self.read_s),
            ("--write-s", self.write_s),
        )
        for name, value in useless:
            if value:
                raise RequestError(f"{self.model_name} generates text: leave out {name}")
        context = min(longest, _USUAL_CONTEXT) if self.context is None else self.context
        prompt = max(1, context // 4) if self.prompt_tokens is None else self.prompt_tokens
        answer = max(1, context - prompt) if self.answer_tokens is None else self.answer_tokens
        if context > longest or prompt + answer > context:
            raise RequestError(
                f"{self.model_name} has a context of {count(longest, 'token')}: a prompt of {prompt} and an "
                f"answer of {answer} have to fit into --context {context}"
            )
        if self.items * answer > MAX_MICROBATCHES:
            raise RequestError(
                f"-b/--batch-size {self.items}: that makes {count(self.items * answer, 'token')}, and at "
                f"most {MAX_MICROBATCHES} can be simulated"
            )
        return TextLengths(prompt, answer, context, self.items)

    @property
    def codec_bytes_per_s(self) -> float | None:
        """Uncompressed bytes that a stage encodes, or decodes, per second, or None if that takes no time."""
        return None if self.codec_mb_per_s is None else self.codec_mb_per_s * 1e6

    def microbatches(self, size: int) -> int:
        """Return the number of microbatches of ``size`` that the items make.

        Raises:
            RequestError: There are too many to simulate.
        """
        number = -(-self.items // size)
        if number > MAX_MICROBATCHES:
            raise RequestError(
                f"-b/--batch-size {self.items}: that makes {count(number, 'microbatch')}, and at "
                f"most {MAX_MICROBATCHES} can be simulated; give fewer, the throughput settles long before"
            )
        return number

    def of_run(self, ranks: int, hosts: Sequence[str] | None, data_rank: int) -> RunRequest:
        """Return the request of rank 0 in the run to simulate.

        Args:
            ranks: Number of ranks.
            hosts: Host of each rank, or None where hosts are called by their ranks.
            data_rank: Rank that reads the input and collects the results.

        Raises:
            RequestError: Options contradict each other.
        """
        schedule = ScheduleRequest(
            partition=self.partition,
            rank_order=self.rank_order,
            data_rank=data_rank,
            dtypes=self.dtypes,
            plan=self.plan,
            min_agreement=self.min_agreement,
            objective=self.objective,
            min_throughput=self.min_throughput,
            hosts=None if hosts is None else tuple(hosts),
            models_file=self.models_file,
            dev_types_file=self.dev_types_file,
            dev_file=self.dev_file,
            dev_neighbors_file=self.dev_neighbors_file,
            schedule_file=self.schedule_file,
        )
        comm, _, encrypted = self.transport.partition("-")
        # Whether there is a key is all that matters of it; no file is read.
        keys = KeyRequest(key=Path(os.devnull)) if encrypted else KeyRequest()
        return RunRequest(
            WorldRequest(0, ranks, keys=keys),
            ModelRequest(self.model_name),
            schedule=schedule,
            links=LinkRequest(self.quant_bits, self.link_bits),
            transport=TransportRequest(comm),
            microbatch_size=self.microbatch_size,
            cache=CacheRequest(self.context),
        )


SECTIONS = (
    Section(
        "cluster",
        (
            *options_of(SimulationRequest, "models_file", "dev_types_file", "dev_file"),
            *options_of(SimulationRequest, "dev_neighbors_file", "hosts", "data_host", "transport"),
        ),
    ),
    Section(
        "schedule (without any of these, the best one in float32)",
        (
            *options_of(SimulationRequest, "partition", "rank_order", "schedule_file", "plan", "dtypes"),
            *options_of(SimulationRequest, "min_agreement", "objective", "min_throughput"),
            *options_of(SimulationRequest, "quant_bits", "link_bits"),
        ),
    ),
    Section(
        "run",
        (
            *options_of(SimulationRequest, "model_name", "items", "microbatch_size", "tokens", "lengths"),
            *options_of(SimulationRequest, "context", "prompt_tokens", "answer_tokens"),
            *options_of(SimulationRequest, "codec_mb_per_s", "read_s", "write_s"),
        ),
    ),
    Section("losses", (*options_of(SimulationRequest, "losses"), *options_of(RecoveryRequest))),
    Section("output", options_of(SimulationRequest, "report")),
)
"""Options of ``pipeedge-simulate`` in the order of ``--help``."""


def parse_simulate(argv: Sequence[str]) -> SimulationRequest:
    """Parse the command line of ``pipeedge-simulate``.

    Raises:
        RequestError: An option or a value is invalid.
        SystemExit: After ``--help`` or ``--version``.
    """
    arguments = simulate_parser().parse_args(argv)
    recovery = RecoveryRequest(**given(arguments, RecoveryRequest))
    return SimulationRequest(**given(arguments, SimulationRequest), recovery=recovery)


def simulate_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge-simulate``."""
    parser = OneLineParser(
        prog=program_name("pipeedge-simulate"),
        description="Predict a run on hosts that need not exist, from the scheduler's files: throughput, "
        "latency, memory, and where each stage would wait. The schedule is the one that "
        f"{program_name('runtime.py')} would choose with the same options.",
        epilog=f"Example: '{program_name('pipeedge-simulate')} -sm models.yml -sdt device_types.yml "
        "-sd devices.yml --report what-if.html'. Exit status: 0 done, 2 the request is wrong, 3 no feasible "
        "schedule, 1 a fault of this program.",
        allow_abbrev=False,
    )
    add_common(parser)
    add_sections(parser, SECTIONS)
    parser.common = (
        *(
            "--model",
            "--sched-models-file",
            "--sched-dev-types-file",
            "--sched-dev-file",
            "--batch-size",
            "--ubatch-size",
        ),
        *(
            "--partition",
            "--objective",
            "--plan",
            "--dtype",
            "--lose",
            "--report",
        ),
    )
    program = program_name("pipeedge-simulate")
    parser.examples = (
        f"{program} -sm models.yml -sdt device_types.yml -sd devices.yml",
        f"{program} -sm models.yml -sdt device_types.yml -sd devices.yml --report what-if.html",
        f"{program} -sm models.yml -sdt device_types.yml -sd devices.yml --lose 1@10",
    )
    return parser
