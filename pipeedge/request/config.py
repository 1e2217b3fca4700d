"""What a run is asked to do: frozen groups of options, validated on creation.

This module alone reads the environment (``torchrun`` sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT). It imports nothing heavy, so that a mistake on the command line is answered at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeedge.base.errors import InputError, RequestError, ScheduleError
from pipeedge.base.schedule import BIT_WIDTHS, check_bits, check_dtype
from pipeedge.base.wording import count, figure

__all__ = [
    "ADAPTIVE",
    "CLAMPS",
    "COMMS",
    "CSV_FILE_MODES",
    "CompressionRequest",
    "DATASET_NAMES",
    "AUTO_DTYPE",
    "DEFAULT_BATCH_SIZE",
    "DEFAULT_CLAMP",
    "DEFAULT_MAX_IMAGE_PIXELS",
    "DEFAULT_WINDOW_SIZE",
    "DEFAULT_WORKER_THREADS",
    "TRAIN_LAUNCHER",
    "Environment",
    "GivenOptions",
    "InputRequest",
    "MetricsRequest",
    "ModelRequest",
    "OutputRequest",
    "RunRequest",
    "STANDARD_INPUT",
    "ScheduleRequest",
    "WorldRequest",
    "check_report_name",
    "inherited_environment",
]

DEFAULT_BATCH_SIZE = 64
DEFAULT_WORKER_THREADS = 4
STANDARD_INPUT = Path("-")
DEFAULT_MAX_IMAGE_PIXELS = 89_478_485
"""A gigabyte of memory is enough to decode a picture of this size."""
DATASET_NAMES = ("CoLA", "ImageNet")
COMMS = ("p2p", "rpc")
AUTO_DTYPE = "auto"
"""Let the scheduler choose among the number types that were profiled."""
CSV_FILE_MODES = ("x", "w", "a")
CLAMPS = ("none", "laplace", "gelu", "ds-aciq", "mse")
"""Methods of ``pipeedge.compress.clamping``."""
DEFAULT_CLAMP = "mse"
"""The best on the shipped model and on transformers' activations: docs/quantization.md."""

REPORT_SUFFIXES = (".json", ".html")

ADAPTIVE = ("heuristic", "heuristic2", "controller", "auto")
"""Policies of ``pipeedge.compress.policies``; all but the last need a target."""
DEFAULT_WINDOW_SIZE = 10

_ROWS_OF_A_REPORT = 400
"""More than a screen can tell apart."""
_ROWS_OF_A_PAGE = 4000
"""Which can be zoomed into."""
_ROWS_OF_A_TRACE = 20_000

_MAX_TIMEOUT_S = 7 * 24 * 3600.0
_MAX_WORKER_THREADS = 1024


TRAIN_LAUNCHER = "PIPEEDGE_TRAIN_LAUNCHER"
"""By this variable ``train.py`` tells its workers which process started them."""


@dataclass(frozen=True)
class Environment:
    """What the environment says, where the command line does not."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    """Among the processes of this machine."""
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False
    """``torchrun``'s agent serves a store at the master's port, which is therefore taken."""
    agent_run: str = ""
    """Tells apart the runs that share one agent's store."""
    adaptive: str | None = None
    """ADAPTIVE_QUANT: a policy, in lower case."""
    window_size: int | None = None
    """WINDOW_SIZE: microbatches."""
    send_constraint: float | None = None
    """SEND_CONSTRAINT: items a second."""
    csv_file_mode: str | None = None
    """CSV_FILE_MODE: of the metrics' files."""
    train_launcher: int | None = None
    """The process that started this worker of ``train.py``, without which it shall not go on."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """From environment variables.

        Raises:
            RequestError: a variable that should be a number is none.
        """

        def number(name: str) -> int | None:
            text = environ.get(name)
            if text is None:
                return None
            try:
                return int(text)
            except ValueError:
                raise RequestError(f"the environment's {name}={text!r} is no whole number") from None

        def decimal(name: str) -> float | None:
            text = environ.get(name)
            if text is None:
                return None
            try:
                return float(text)
            except ValueError:
                raise RequestError(f"the environment's {name}={text!r} is no number") from None

        run_id, restarts = (
            environ.get("TORCHELASTIC_RUN_ID", ""),
            environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        return cls(
            rank=number("RANK"),
            world_size=number("WORLD_SIZE"),
            local_rank=number("LOCAL_RANK"),
            local_world_size=number("LOCAL_WORLD_SIZE"),
            master_addr=environ.get("MASTER_ADDR"),
            master_port=number("MASTER_PORT"),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            agent_run=f"{run_id}/{restarts}",
            adaptive=environ.get("ADAPTIVE_QUANT", "").lower() or None,
            window_size=number("WINDOW_SIZE"),
            send_constraint=decimal("SEND_CONSTRAINT"),
            csv_file_mode=environ.get("CSV_FILE_MODE"),
            train_launcher=number(TRAIN_LAUNCHER),
        )


def inherited_environment() -> dict[str, str]:
    """The environment of this process, for one that it starts."""
    return dict(os.environ)


MAX_WORLD = 1024
"""Ranks of a run. More connections than this are beyond one hub, and a WORLD beyond it is a slip."""


@dataclass(frozen=True)
class WorldRequest:
    """This process among its peers."""

    rank: int
    size: int
    addr: str = "127.0.0.1"
    """Where rank 0 is reached."""
    port: int = 29500
    """Where rank 0 listens."""
    socket_ifname: str | None = None
    """Network interface for the links; None: the one that routes to ``addr``."""
    timeout_s: float = 60.0
    """Nothing waits longer for a peer without saying for whom."""
    agent_store: bool = False
    """``port`` belongs to torchrun's agent, through which rank 0 announces its own."""
    agent_run: str = ""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise RequestError(f"a world of {count(self.size, 'rank')}: WORLD must be at least 1")
        if self.size > MAX_WORLD:
            raise RequestError(f"a world of {count(self.size, 'rank')}: WORLD is at most {MAX_WORLD}")
        if not 0 <= self.rank < self.size:
            raise RequestError(
                f"rank {self.rank} is outside the world: with WORLD {self.size}, RANK is 0 to {self.size - 1}"
            )
        if not self.addr:
            raise RequestError("--addr is empty: give the address or name of rank 0's machine")
        if not 1 <= self.port <= 65535:
            raise RequestError(f"--port {self.port}: a port is 1 to 65535")
        if not 0 < self.timeout_s <= _MAX_TIMEOUT_S:
            raise RequestError(
                f"--timeout {figure(self.timeout_s, 7)}: seconds above 0 and up to "
                f"{figure(_MAX_TIMEOUT_S, 7)}"
            )


@dataclass(frozen=True)
class TransportRequest:
    """How the links are made."""

    comm: str = "p2p"
    """``p2p`` (gloo) or ``rpc`` (TensorPipe)."""
    worker_threads: int | None = None
    """Threads that serve RPC; None: ``DEFAULT_WORKER_THREADS``. Only with ``rpc``."""

    def __post_init__(self) -> None:
        if self.comm not in COMMS:
            raise RequestError(f"-c/--comm {self.comm}: choose {' or '.join(COMMS)}")
        if self.worker_threads is None:
            return
        if self.comm != "rpc":
            raise RequestError("-w/--worker-threads goes with -c rpc; the links of p2p have no such threads")
        if not 1 <= self.worker_threads <= _MAX_WORKER_THREADS:
            raise RequestError(
                f"-w/--worker-threads {self.worker_threads}: 1 to {_MAX_WORKER_THREADS}; "
                f"{DEFAULT_WORKER_THREADS} are enough"
            )


@dataclass(frozen=True)
class ModelRequest:
    """Which model, with which weights, where."""

    name: str = "google/vit-base-patch16-224"
    """One of the known names, or a local Hugging Face directory."""
    weights: Path | None = None
    """Weights file or directory; None: the model's default."""
    device: str = "cpu"


@dataclass(frozen=True)
class InputRequest:
    """Which items to run. Without ``paths`` and ``dataset_name``, the default input that is shipped."""

    paths: tuple[Path, ...] = ()
    """Image files, folders of images, text files, ``.npz`` files, or patterns of them; all of one kind.
    ``STANDARD_INPUT`` alone: text, or one picture."""
    text_column: str | None = None
    """Column of ``.csv`` and ``.tsv`` files that holds the sentences; None: the usual one."""
    dataset_name: str | None = None
    """``CoLA`` or ``ImageNet``."""
    dataset_root: Path | None = None
    """Where the data set's files are (ImageNet: its archives or an image folder)."""
    dataset_split: str | None = None
    """``train``, ``val``/``validation`` or ``test``; None: ``train``, as in the original."""
    dataset_indices_file: Path | None = None
    """A text file with the index of one item of the data set a line."""
    dataset_shuffle: bool = False
    """Take the items of the data set in a random order that ``seed`` fixes."""
    seed: int = 0
    """Fixes the order of ``dataset_shuffle``."""
    batch_size: int | None = None
    """At most this many items; None: all of ``paths``, all of ``dataset_indices_file``, or 64."""
    skip_bad_input: bool = False
    """Leave out images that cannot be read, and report them, instead of failing at the first."""
    max_image_pixels: int | None = None
    """Largest picture to decode; None: ``DEFAULT_MAX_IMAGE_PIXELS``."""
    companion_directory: Path | None = None
    """One more directory that may hold a tokenizer or image processor: that of the weights file."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"-b/--batch-size {self.batch_size}: must be at least 1")
        if self.dataset_name is not None and self.dataset_name not in DATASET_NAMES:
            known = " or ".join(DATASET_NAMES)
            raise InputError(f"data set {self.dataset_name!r} is not known: choose {known}")
        if STANDARD_INPUT in self.paths and len(self.paths) > 1:
            raise InputError("--input - is standard input and goes alone, without files")
        if self.text_column is not None and not self.paths:
            raise InputError("--text-column goes with --input FILE.csv")
        if self.paths and self.dataset_name is not None:
            raise InputError("give either --input or --dataset-name, not both")
        if self.dataset_name is None:
            self._refuse_without_dataset()
        if self.seed < 0:
            raise InputError(f"seed {self.seed}: must not be negative")
        if self.max_image_pixels is not None and self.max_image_pixels < 1:
            raise InputError(f"--max-image-pixels {self.max_image_pixels}: must be at least 1")

    def _refuse_without_dataset(self) -> None:
        set_without_effect = {
            "--dataset-root": self.dataset_root is not None,
            "--dataset-split": self.dataset_split is not None,
            "--dataset-indices-file": self.dataset_indices_file is not None,
            "--dataset-shuffle": self.dataset_shuffle,
        }
        for option, is_set in set_without_effect.items():
            if is_set:
                raise InputError(f"{option} needs --dataset-name {{{','.join(DATASET_NAMES)}}}")


@dataclass(frozen=True)
class ScheduleRequest:
    """How the layers get to the ranks. In this order: a partition, a schedule file, the scheduler's
    files; without any of them the layers are split evenly."""

    partition: tuple[int, ...] | None = None
    """First and last layer of each stage, from 1."""
    rank_order: tuple[int, ...] | None = None
    """The rank of each stage; None: stage n on rank n."""
    schedule_file: Path | None = None
    """What ``sched-pipeline`` printed."""
    models_file: Path | None = None
    dev_types_file: Path | None = None
    dev_file: Path | None = None
    dev_neighbors_file: Path | None = None
    """What single links carry, as pipeedge-doctor measures it; None: what the device types say."""
    hosts: tuple[str, ...] | None = None
    """The host of each rank; None: hosts are called by their ranks."""
    data_rank: int = 0
    """Reads the inputs and collects the outputs."""
    quant_bits: tuple[int, ...] | None = None
    """Bits a value on the outgoing link of each stage, 0 for values as they are; None: as the schedule
    file says, else 0."""
    dtypes: tuple[str, ...] | None = None
    """Number type of each stage, or one for all, or ``AUTO_DTYPE``; None: as the schedule file says, else
    float32."""
    min_agreement: float | None = None
    """With ``AUTO_DTYPE``: the part of items, of 1, whose class must be float32's; None: any type will do."""
    link_bits: str | None = None
    """Bits a value that the scheduler counts with on links between stages, or ``auto``; None: values as they
    are."""

    def __post_init__(self) -> None:
        if self.link_bits is not None:
            self._check_link_bits(self.link_bits)
        self._check_dtypes()
        if self.dev_neighbors_file is not None and self.models_file is None:
            raise ScheduleError(
                "-sdn/--sched-dev-neighbors-file belongs to automatic scheduling: -sm, -sdt, -sd"
            )
        files = (self.models_file, self.dev_types_file, self.dev_file)
        if any(files) and not all(files):
            raise ScheduleError(
                "automatic scheduling needs all three of -sm/--sched-models-file, "
                "-sdt/--sched-dev-types-file and -sd/--sched-dev-file"
            )
        if self.partition is not None and self.schedule_file is not None:
            raise ScheduleError("give either -pt/--partition or --schedule-file, not both")
        for bits in self.quant_bits or ():
            check_bits(bits, "-q")
        if self.rank_order is not None and (self.schedule_file or self.automatic):
            raise ScheduleError("-r/--rank-order goes with -pt; a schedule from a file names its hosts (-H)")
        if self.hosts is not None and len(set(self.hosts)) < len(self.hosts):
            twice = next(host for host in self.hosts if self.hosts.count(host) > 1)
            raise ScheduleError(f"-H/--hosts names {twice} twice; each rank is one host")

    def _check_dtypes(self) -> None:
        if self.automatic_dtype:
            if self.partition is not None or self.schedule_file is not None or self.models_file is None:
                raise ScheduleError(
                    "--dtype auto belongs to automatic scheduling: -sm, -sdt, -sd, and neither -pt nor "
                    "--schedule-file"
                )
        else:
            for dtype in self.dtypes or ():
                check_dtype(dtype, "--dtype")
            if self.automatic and len(self.dtypes or ()) > 1:
                raise ScheduleError(
                    "--dtype: automatic scheduling finds out how many stages there are; give one number type "
                    "for all, or auto"
                )
        if self.min_agreement is None:
            return
        if not self.automatic_dtype:
            raise ScheduleError("--min-agreement goes with --dtype auto")
        if not 0 < self.min_agreement <= 1:
            raise ScheduleError(
                f"--min-agreement {figure(self.min_agreement, 6)}: the part of items whose class must "
                "be float32's, "
                "above 0 and up to 1"
            )

    @property
    def automatic_dtype(self) -> bool:
        """Whether the scheduler is to choose the number type."""
        return self.dtypes == (AUTO_DTYPE,)

    def _check_link_bits(self, link_bits: str) -> None:
        if link_bits not in ("auto", "0", *map(str, BIT_WIDTHS)):
            raise ScheduleError(f"--link-bits {link_bits}: choose auto, 0, 2 to 8 or 16")
        if not self.automatic:
            raise ScheduleError("--link-bits belongs to automatic scheduling: -sm, -sdt, -sd")
        if self.quant_bits is not None:
            raise ScheduleError("--link-bits and -q both say the bits of links; give one of them")

    @property
    def automatic(self) -> bool:
        """Whether the scheduler is to be asked (a partition takes precedence)."""
        return self.models_file is not None and self.partition is None and self.schedule_file is None


@dataclass(frozen=True)
class CompressionRequest:
    """How the values of compressed links are chosen."""

    clamp: str = DEFAULT_CLAMP
    """Which part of the values' range the codes cover: one of ``CLAMPS``."""
    adaptive: str | None = None
    """The policy by which the bits of links between stages follow the bandwidth: one of ``ADAPTIVE``; None:
    they stay as they are."""
    window_size: int = DEFAULT_WINDOW_SIZE
    """Microbatches from one decision of the policy, and one choice of what is clamped, to the next."""
    send_constraint: float | None = None
    """Items a second that the policy is to reach."""
    min_bits: int | None = None
    """The policy goes no lower; None: 2."""

    def __post_init__(self) -> None:
        if self.clamp not in CLAMPS:
            raise RequestError(f"--clamp {self.clamp}: choose one of {', '.join(CLAMPS)}")
        if self.window_size < 1:
            raise RequestError(
                f"--window-size (WINDOW_SIZE) {self.window_size}: a window has at least 1 microbatch"
            )
        if self.adaptive is not None and self.adaptive not in ADAPTIVE:
            raise RequestError(
                f"--adaptive (ADAPTIVE_QUANT) {self.adaptive}: choose one of {', '.join(ADAPTIVE)}"
            )
        self._check_target()
        if self.min_bits is not None:
            if self.adaptive is None:
                raise RequestError("--min-bits goes with --adaptive")
            if self.min_bits not in BIT_WIDTHS:
                raise RequestError(
                    f"--min-bits {self.min_bits}: choose one of {', '.join(map(str, BIT_WIDTHS))}"
                )

    def _check_target(self) -> None:
        target = self.send_constraint
        if self.adaptive in ADAPTIVE[:-1]:
            if target is None:
                raise RequestError(
                    f"--adaptive {self.adaptive} needs --send-constraint (SEND_CONSTRAINT), the items a "
                    "second to reach; --adaptive auto needs none"
                )
            if not 0 < target < math.inf:
                raise RequestError(
                    f"--send-constraint (SEND_CONSTRAINT) {figure(target, 6)}: items a second above 0"
                )
        elif target is not None:
            raise RequestError(
                "--send-constraint (SEND_CONSTRAINT) goes with --adaptive "
                f"{', '.join(ADAPTIVE[:-1])}; leave it out"
            )


def check_report_name(path: Path) -> None:
    """Refuse a report of an unknown format.

    Raises:
        RequestError: neither .json nor .html.
    """
    if path.suffix not in REPORT_SUFFIXES:
        raise RequestError(f"--report {path}: a report is FILE.json, for programs, or FILE.html, for people")


@dataclass(frozen=True)
class OutputRequest:
    """What a run leaves behind."""

    results: Path | None = None
    report: Path | None = None
    trace: Path | None = None
    """Of what every thread was at, for Perfetto."""
    quiet: bool = False
    """Print neither progress nor tables."""
    check_items: int = 0
    """Compute so many items in float32 too, on the data rank, and compare; 0: none."""

    @property
    def record_rows(self) -> int:
        """How much of what each thread was at is kept for it."""
        if self.trace is not None:
            return _ROWS_OF_A_TRACE
        is_page = self.report is not None and self.report.suffix == ".html"
        return _ROWS_OF_A_PAGE if is_page else _ROWS_OF_A_REPORT

    def __post_init__(self) -> None:
        if self.report is not None:
            check_report_name(self.report)
        if self.check_items < 0:
            raise RequestError(f"--check {self.check_items}: the number of items must not be negative")
        if self.trace is not None and self.trace.suffix != ".json":
            raise RequestError(f"--trace {self.trace}: a trace is JSON; name it FILE.json")


@dataclass(frozen=True)
class MetricsRequest:
    """What is measured for each microbatch, and where that goes."""

    directory: Path | None = None
    """A CSV file for each key of each rank."""
    csv_file_mode: str = "x"
    """What happens to files that are there: one of ``CSV_FILE_MODES``."""
    prometheus_port: int | None = None
    """Where this rank serves them."""
    window_size: int = DEFAULT_WINDOW_SIZE
    """Microbatches."""

    def __post_init__(self) -> None:
        if self.csv_file_mode not in CSV_FILE_MODES:
            raise RequestError(
                f"--csv-file-mode (CSV_FILE_MODE) {self.csv_file_mode}: x (files must not be there), "
                "w (replace them) or a (append)"
            )
        if self.prometheus_port is not None and not 1 <= self.prometheus_port <= 65535:
            raise RequestError(f"--prometheus-port {self.prometheus_port}: a port is 1 to 65535")


@dataclass(frozen=True)
class GivenOptions:
    """Options that this rank was given and that a single rank of the run obeys: name to value, as text."""

    schedule: Mapping[str, str] = field(default_factory=dict)
    """Options that rank 0 obeys."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Options that the data rank obeys."""


@dataclass(frozen=True)
class RunRequest:
    """All that one rank is asked to do."""

    world: WorldRequest
    model: ModelRequest = field(default_factory=ModelRequest)
    input: InputRequest = field(default_factory=InputRequest)
    schedule: ScheduleRequest = field(default_factory=ScheduleRequest)
    output: OutputRequest = field(default_factory=OutputRequest)
    metrics: MetricsRequest = field(default_factory=MetricsRequest)
    transport: TransportRequest = field(default_factory=TransportRequest)
    compression: CompressionRequest = field(default_factory=CompressionRequest)
    ubatch_size: int = 8
    """Items that travel together."""
    command: tuple[str, ...] = field(default=(), compare=False)
    """The command line that asks for it, program first; the same may be asked for in other words."""
    given: GivenOptions = field(default_factory=GivenOptions, compare=False)
    """Compared between the ranks, so that no option is lost on a rank that does not obey it."""

    def __post_init__(self) -> None:
        if self.ubatch_size < 1:
            raise RequestError(f"-u/--ubatch-size {self.ubatch_size}: must be at least 1")
        if not 0 <= self.schedule.data_rank < self.world.size:
            raise RequestError(
                f"-D/--data-rank {self.schedule.data_rank} is outside the world: "
                f"ranks are 0 to {self.world.size - 1}"
            )
        hosts = self.schedule.hosts
        if hosts is not None and len(hosts) != self.world.size:
            raise ScheduleError(
                f"-H/--hosts names {count(len(hosts), 'host')} for a world of "
                f"{count(self.world.size, 'rank')}"
            )
