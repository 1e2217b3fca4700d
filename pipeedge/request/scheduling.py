"""The request for a schedule: which layers go where, in which number type, and how their outputs travel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pipeedge.base.errors import RequestError, ScheduleError
from pipeedge.base.fields import Count, Name, Number
from pipeedge.base.schedule import BIT_WIDTHS, DTYPES, LINK_BITS, LINK_BITS_RULE, check_dtype
from pipeedge.request.declared import Check, ObeyedBy, Rule, at_least, check_options, check_rules, option
from pipeedge.request.parsing import dtype_names, integers, names, path

__all__ = [
    "ADAPTIVE",
    "AUTO",
    "CUT",
    "ENERGY",
    "OFF",
    "ONLY_REPORT",
    "CLAMPS",
    "DEFAULT_CLAMP",
    "DEFAULT_WINDOW_SIZE",
    "LINK_TRANSFORMS",
    "CompressionRequest",
    "LinkRequest",
    "ScheduleRequest",
]

AUTO = "auto"
"""Value of ``--dtype``, ``--link-bits``, ``--link-transform``, ``--plan`` and ``--replan``."""
CUT = "cut"
"""Value of ``--plan`` that lets the scheduler choose only the cut and the hosts."""
ENERGY = "energy"
"""Value of ``--objective``."""
OFF, ONLY_REPORT = "off", "only-report"
"""Further values of ``--replan``."""
CLAMPS = ("none", "laplace", "gelu", "ds-aciq", "mse")
"""Clamping methods of ``pipeedge.compress.clamping``."""
DEFAULT_CLAMP = "mse"
"""Best method on the shipped model and on transformers' activations (see docs/quantization.md)."""
LINK_TRANSFORMS = (AUTO, "off", "hadamard")
"""Transforms of rows before quantisation, see ``pipeedge.compress.link``."""
ADAPTIVE = ("heuristic", "heuristic2", "controller", "auto")
"""Policies of ``pipeedge.compress.policies``; all but the last need a target."""
DEFAULT_WINDOW_SIZE = 10
_AUTOMATIC = "automatic scheduling (-sm, -sdt and -sd)"


@dataclass(frozen=True)
class ScheduleRequest:
    """How layers are assigned to ranks.

    In order of precedence: a partition, a schedule file, the scheduler's files. Without any of them, layers
    are split evenly.
    """

    OBEYED_BY: ClassVar[ObeyedBy] = ObeyedBy.RANK_0

    partition: tuple[int, ...] | None = option(
        None,
        "-pt/--partition",
        type=integers,
        help="first and last layer of each stage, from 1, e.g. 1,24,25,48; takes precedence over automatic "
        "scheduling",
    )
    rank_order: tuple[int, ...] | None = option(
        None,
        "-r/--rank-order",
        type=integers,
        help="rank of each stage (0,1,2,...)",
    )
    data_rank: int = option(
        0,
        "-D/--data-rank",
        type=int,
        metavar="RANK",
        obeyed_by=ObeyedBy.ALL,
        subject="data rank",
        help="rank that reads the input and collects the results ({default})",
    )
    dtypes: tuple[str, ...] | None = option(
        None,
        "--dtype",
        type=dtype_names,
        help=f"number type of weights and computation: {', '.join(DTYPES)}; one for all stages or one for "
        "each; auto: the fastest one with profiles in device_types.yml (those of the schedule file, else "
        "float32)",
    )
    plan: str = option(
        CUT,
        "--plan",
        choices=(CUT, AUTO),
        help="what automatic scheduling chooses: cut, only where to cut and the hosts; auto, also the "
        "microbatch size (up to -u), and the number type of each stage and the bits of each link unless "
        "--dtype, --link-bits or -q gives them ({default})",
    )
    min_agreement: float | None = option(
        None,
        "--min-agreement",
        type=float,
        metavar="FRACTION",
        check=Check(
            lambda value: 0 <= value <= 1,
            "must be from 0 to 1, the fraction of items whose class must be float32's",
        ),
        help="with --dtype auto, --plan auto, or --link-bits auto for another objective: least fraction of "
        "items whose class must be that of float32, as profiled; 0 allows what was not measured, too (0 with "
        "--dtype auto, else 0.99; for text, any profiled number type over uncompressed links)",
    )
    objective: str = option(
        "throughput",
        "--objective",
        choices=("throughput", "latency", ENERGY),
        help="with automatic scheduling: what the plan makes as good as it can; energy: the joules an item, "
        "from the watts in device_types.yml ({default})",
    )
    min_throughput: float | None = option(
        None,
        "--min-throughput",
        type=float,
        metavar="RATE",
        check=Check(lambda rate: 0 < rate < math.inf, "must be a number of items per second above 0"),
        help="with --objective energy: least number of items per second (any)",
    )
    held_out: int = option(
        0,
        "--held-out",
        type=int,
        metavar="N",
        check=Check(lambda items: items >= 0, "the number of items must not be negative"),
        help="with --plan auto or --dtype auto: first compute the last N items of the input here as the plan "
        "would, and take the next best plan if fewer of them than --min-agreement have the class of float32",
    )
    hosts: tuple[str, ...] | None = option(
        None, "-H/--hosts", type=names, help="host of each rank, as in devices.yml"
    )
    models_file: Path | None = option(None, "-sm/--sched-models-file", type=path, help="models.yml")
    dev_types_file: Path | None = option(
        None, "-sdt/--sched-dev-types-file", type=path, help="device_types.yml"
    )
    dev_file: Path | None = option(None, "-sd/--sched-dev-file", type=path, help="devices.yml")
    dev_neighbors_file: Path | None = option(
        None,
        "-sdn/--sched-dev-neighbors-file",
        type=path,
        help="bandwidth and latency of individual links, as {pipeedge-doctor} measures them",
    )
    schedule_file: Path | None = option(
        None,
        "--schedule-file",
        type=path,
        help="schedule that {sched-pipeline} printed",
    )
    survive_loss: bool = option(
        False,
        "--survive-loss",
        help="with automatic scheduling and -c tcp: start only if the layers fit on the other "
        "hosts when any one but the data rank's is lost",
    )

    replan: str | None = option(
        None,
        "--replan",
        choices=(AUTO, OFF, ONLY_REPORT),
        help="with automatic scheduling: whether rank 0 compares what it hears of hosts and links with their "
        "profiles, and says when another schedule would pay; auto: and changes to it, which needs -c tcp "
        "(auto with -c tcp where the run goes on after failures, else only-report)",
    )

    def __post_init__(self) -> None:
        check_options(self, ScheduleError)
        check_rules(self, _SCHEDULE_RULES, ScheduleError)
        if not self.automatic_dtype:
            for dtype in self.dtypes or ():
                check_dtype(dtype, "--dtype")
        if self.hosts is not None and len(set(self.hosts)) < len(self.hosts):
            twice = next(host for host in self.hosts if self.hosts.count(host) > 1)
            raise ScheduleError(f"-H/--hosts names {twice} twice; each rank needs its own host")

    @property
    def automatic_dtype(self) -> bool:
        """Whether the scheduler chooses the number type."""
        return self.dtypes == (AUTO,)

    @property
    def joint(self) -> bool:
        """Whether the scheduler chooses microbatch size, number types and bits, too."""
        return self.plan == AUTO

    @property
    def limited(self) -> bool:
        """Whether an agreement may limit the bits of links: where fewer are always better."""
        return self.automatic and self.objective != "throughput"

    @property
    def watched(self) -> bool:
        """Whether the conditions of the run are watched for a better schedule.

        Without profiles, nobody knows what other layers would take, or another host.
        """
        return self.automatic and self.replan != OFF

    @property
    def follows_proposals(self) -> bool:
        """Whether a run whose links can open again changes to a better schedule by itself."""
        return self.watched and self.replan != ONLY_REPORT

    @property
    def automatic(self) -> bool:
        """Whether to run the scheduler; a partition or a schedule file takes precedence."""
        return self.models_file is not None and self.partition is None and self.schedule_file is None


_SCHEDULE_RULES: tuple[Rule[ScheduleRequest], ...] = (
    Rule(
        lambda one: one.min_agreement is not None and not (one.automatic_dtype or one.joint or one.limited),
        "--min-agreement needs --dtype auto or --plan auto",
    ),
    Rule(
        lambda one: bool(one.held_out) and not (one.automatic_dtype or one.joint),
        "--held-out needs --plan auto or --dtype auto, which have a next best plan",
    ),
    Rule(
        lambda one: one.objective != "throughput" and not one.automatic,
        f"--objective {{objective}} needs {_AUTOMATIC}, without -pt and --schedule-file",
    ),
    Rule(
        lambda one: one.min_throughput is not None and one.objective != ENERGY,
        "--min-throughput needs --objective energy, which may choose a slower plan",
    ),
    Rule(
        lambda one: one.joint and not one.automatic,
        f"--plan auto needs {_AUTOMATIC}, without -pt and --schedule-file",
    ),
    Rule(
        lambda one: one.automatic_dtype and not one.automatic,
        f"--dtype auto needs {_AUTOMATIC}, without -pt and --schedule-file",
    ),
    Rule(
        lambda one: one.automatic and len(one.dtypes or ()) > 1,
        "--dtype: automatic scheduling chooses the number of stages; give one number type for all, or auto",
    ),
    Rule(
        lambda one: one.dev_neighbors_file is not None and one.models_file is None,
        f"-sdn/--sched-dev-neighbors-file needs {_AUTOMATIC}",
    ),
    Rule(
        lambda one: one.survive_loss and not one.automatic,
        f"--survive-loss needs {_AUTOMATIC}, which knows the memory of each host",
    ),
    Rule(
        lambda one: one.replan == AUTO and not one.watched,
        f"--replan auto needs {_AUTOMATIC}, without -pt and --schedule-file",
    ),
    Rule(
        lambda one: len({one.models_file is None, one.dev_types_file is None, one.dev_file is None}) > 1,
        "automatic scheduling needs all three of -sm/--sched-models-file, -sdt/--sched-dev-types-file and "
        "-sd/--sched-dev-file",
    ),
    Rule(
        lambda one: one.partition is not None and one.schedule_file is not None,
        "give either -pt/--partition or --schedule-file, not both",
    ),
    Rule(
        lambda one: one.rank_order is not None and (one.schedule_file is not None or one.automatic),
        "-r/--rank-order cannot be combined with a schedule of hosts, whose ranks -H gives; use -pt",
    ),
)
"""What an option needs, and what it cannot be combined with; the first that is broken is reported."""


@dataclass(frozen=True)
class CompressionRequest:
    """How links compress values while the pipeline runs."""

    OBEYED_BY: ClassVar[ObeyedBy] = ObeyedBy.RANK_0

    clamp: Name = option(
        DEFAULT_CLAMP,
        "--clamp",
        choices=CLAMPS,
        help="method that chooses the range of compressed values ({default})",
    )
    link_transform: Name = option(
        AUTO,
        "--link-transform",
        choices=LINK_TRANSFORMS,
        help="transform that spreads large values over their row before it is compressed: hadamard, off, or "
        "auto (hadamard where a sample of the values shows less error) ({default})",
    )
    adaptive: Name | None = option(
        None,
        "--adaptive",
        type=str.lower,
        metavar="POLICY",
        variable="ADAPTIVE_QUANT",
        check=Check(ADAPTIVE.__contains__, f"choose one of {', '.join(ADAPTIVE)}"),
        help="adapt the bits of links between stages to the bandwidth, starting with those of -q: auto (no "
        "fewer than it takes to keep the slowest stage busy), or heuristic, heuristic2, controller (to reach "
        "--send-constraint)",
    )
    window_size: Count = option(
        DEFAULT_WINDOW_SIZE,
        "--window-size",
        type=int,
        variable="WINDOW_SIZE",
        check=at_least(1),
        help="microbatches between two decisions of --adaptive, between two choices of --clamp and "
        "--link-transform, and in a window of metrics ({default}, or WINDOW_SIZE)",
    )
    send_constraint: Number | None = option(
        None,
        "--send-constraint",
        type=float,
        metavar="RATE",
        variable="SEND_CONSTRAINT",
        check=Check(lambda rate: 0 < rate < math.inf, "must be a number of items per second above 0"),
        help="items per second for --adaptive to reach",
    )
    min_bits: Count | None = option(
        None,
        "--min-bits",
        type=int,
        check=Check(BIT_WIDTHS.__contains__, f"choose one of {', '.join(map(str, BIT_WIDTHS))}"),
        help="fewest bits that --adaptive may choose (2)",
    )

    def __post_init__(self) -> None:
        self._check_target()
        if self.min_bits is not None and self.adaptive is None:
            raise RequestError("--min-bits needs --adaptive")
        check_options(self)

    def _check_target(self) -> None:
        target, policies = self.send_constraint, ADAPTIVE[:-1]
        if self.adaptive in policies and target is None:
            raise RequestError(
                f"--adaptive {self.adaptive} needs --send-constraint (SEND_CONSTRAINT), the items per "
                "second to reach; --adaptive auto does not"
            )
        if target is not None and self.adaptive not in policies:
            raise RequestError(
                "--send-constraint (SEND_CONSTRAINT) has an effect only with --adaptive "
                f"{', '.join(policies)}; leave it out"
            )


@dataclass(frozen=True)
class LinkRequest:
    """Bits of the values on links, and how they are compressed to them.

    ``quant_bits`` fixes the bits, ``link_bits`` leaves them to the scheduler, and ``compression.adaptive``
    changes them while the pipeline runs.
    """

    OBEYED_BY: ClassVar[ObeyedBy] = ObeyedBy.RANK_0

    quant_bits: tuple[int, ...] | None = option(
        None,
        "-q/--quant",
        type=integers,
        check=Check(lambda found: set(found) <= set(LINK_BITS), LINK_BITS_RULE),
        help="bits per value on each stage's outgoing link: 2 to 8, 16, or 0 for no compression (those of "
        "the schedule file, else 0)",
    )
    link_bits: str | None = option(
        None,
        "--link-bits",
        metavar="N|auto",
        check=Check((AUTO, *map(str, LINK_BITS)).__contains__, f"choose {AUTO}, 0, 2 to 8 or 16"),
        help="with automatic scheduling: bits per value on links between stages, in the schedule and in the "
        "run; auto: as many as possible without a link becoming the bottleneck (0)",
    )
    compression: CompressionRequest = field(default_factory=CompressionRequest)

    def __post_init__(self) -> None:
        check_options(self, ScheduleError)
        if self.link_bits is not None and self.quant_bits is not None:
            raise ScheduleError("--link-bits and -q both set the bits of links; give one of them")
