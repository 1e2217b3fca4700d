"""The request for a run: frozen groups of options, validated on creation.

This module alone reads the environment (``torchrun`` sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT). It
imports nothing heavy, so that mistakes on the command line are reported at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeedge.base.errors import InputError, RequestError, ScheduleError
from pipeedge.base.fields import Count, Name, Number
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
"""Largest image to decode, in pixels; decoding one of this size takes up to a gigabyte of memory."""
DATASET_NAMES = ("CoLA", "ImageNet")
COMMS = ("p2p", "rpc")
AUTO_DTYPE = "auto"
"""Value of ``--dtype`` that lets the scheduler choose among the profiled number types."""
CSV_FILE_MODES = ("x", "w", "a")
CLAMPS = ("none", "laplace", "gelu", "ds-aciq", "mse")
"""Clamping methods of ``pipeedge.compress.clamping``."""
DEFAULT_CLAMP = "mse"
"""Best method on the shipped model and on transformers' activations (see docs/quantization.md)."""

REPORT_SUFFIXES = (".json", ".html")

ADAPTIVE = ("heuristic", "heuristic2", "controller", "auto")
"""Policies of ``pipeedge.compress.policies``; all but the last need a target."""
DEFAULT_WINDOW_SIZE = 10

_ROWS_OF_A_REPORT = 400
"""Rows of activities kept for a report: more than a screen can show."""
_ROWS_OF_A_PAGE = 4000
"""Rows of activities kept for a page, which can be zoomed."""
_ROWS_OF_A_TRACE = 20_000

_MAX_TIMEOUT_S = 7 * 24 * 3600.0
_MAX_WORKER_THREADS = 1024


TRAIN_LAUNCHER = "PIPEEDGE_TRAIN_LAUNCHER"
"""Environment variable in which ``train.py`` tells its workers which process started them."""


@dataclass(frozen=True)
class Environment:
    """Defaults from the environment, for options that the command line leaves out."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    """Rank among the processes of this machine."""
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False
    """Whether ``torchrun``'s agent serves a store at the master's port, which is therefore taken."""
    agent_run: str = ""
    """Identifier of this run among those that share one agent's store."""
    adaptive: str | None = None
    """ADAPTIVE_QUANT: policy in lower case."""
    window_size: int | None = None
    """WINDOW_SIZE: number of microbatches in a window."""
    send_constraint: float | None = None
    """SEND_CONSTRAINT: target in items a second."""
    csv_file_mode: str | None = None
    """CSV_FILE_MODE: mode in which metrics files are opened."""
    train_launcher: int | None = None
    """Process ID of the launcher of this ``train.py`` worker, which must not outlive it."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Read the environment variables.

        Raises:
            RequestError: A variable that should be a number is not.
        """

        def number(name: str) -> int | None:
            text = environ.get(name)
            if text is None:
                return None
            try:
                return int(text)
            except ValueError:
                raise RequestError(f"the environment's {name}={text!r} is not a whole number") from None

        def decimal(name: str) -> float | None:
            text = environ.get(name)
            if text is None:
                return None
            try:
                return float(text)
            except ValueError:
                raise RequestError(f"the environment's {name}={text!r} is not a number") from None

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
    """Return the environment of this process, for a process that it starts."""
    return dict(os.environ)


MAX_WORLD = 1024
"""Largest number of ranks. One hub cannot serve more connections, and a larger WORLD is a mistake."""


@dataclass(frozen=True)
class WorldRequest:
    """This process and its place among the ranks."""

    rank: int
    size: int
    addr: str = "127.0.0.1"
    """Address of rank 0's machine."""
    port: int = 29500
    """Port at which rank 0 listens."""
    socket_ifname: str | None = None
    """Network interface for the links, or None for the one that routes to ``addr``."""
    timeout_s: float = 60.0
    """Seconds that anything waits for a peer before the run fails and names it."""
    agent_store: bool = False
    """Whether ``port`` belongs to torchrun's agent, through which rank 0 announces its own."""
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
    """The transport of the links."""

    comm: str = "p2p"
    """Transport: ``p2p`` (gloo) or ``rpc`` (TensorPipe)."""
    worker_threads: int | None = None
    """Number of threads that serve RPC, or None for ``DEFAULT_WORKER_THREADS``; only with ``rpc``."""

    def __post_init__(self) -> None:
        if self.comm not in COMMS:
            raise RequestError(f"-c/--comm {self.comm}: choose {' or '.join(COMMS)}")
        if self.worker_threads is None:
            return
        if self.comm != "rpc":
            raise RequestError("-w/--worker-threads goes with -c rpc; p2p links have no such threads")
        if not 1 <= self.worker_threads <= _MAX_WORKER_THREADS:
            raise RequestError(
                f"-w/--worker-threads {self.worker_threads}: 1 to {_MAX_WORKER_THREADS}; "
                f"{DEFAULT_WORKER_THREADS} are enough"
            )


@dataclass(frozen=True)
class ModelRequest:
    """The model, its weights, and the device to compute on."""

    name: str = "google/vit-base-patch16-224"
    """One of the known names, or a local Hugging Face directory."""
    weights: Path | None = None
    """Weights file or directory, or None for the model's default."""
    device: str = "cpu"


@dataclass(frozen=True)
class InputRequest:
    """The items to run; without ``paths`` and ``dataset_name``, the input that ships with the package."""

    paths: tuple[Path, ...] = ()
    """Image files, folders of images, text files, ``.npz`` files, or patterns of these; all of one kind.
    ``STANDARD_INPUT`` alone means text, or one image.
    """
    text_column: str | None = None
    """Column of ``.csv`` and ``.tsv`` files that holds the sentences, or None for the usual one."""
    dataset_name: str | None = None
    """Data set to run: ``CoLA`` or ``ImageNet``."""
    dataset_root: Path | None = None
    """Directory of the data set's files (for ImageNet, its archives or an image folder)."""
    dataset_split: str | None = None
    """Split: ``train``, ``val``/``validation`` or ``test``; None means ``train``, as in the original."""
    dataset_indices_file: Path | None = None
    """Text file with the index of one item of the data set per line."""
    dataset_shuffle: bool = False
    """Whether to take the items of the data set in a random order given by ``seed``."""
    seed: int = 0
    """Seed for ``dataset_shuffle``."""
    batch_size: int | None = None
    """Largest number of items; None means all of ``paths``, all of ``dataset_indices_file``, or 64."""
    skip_bad_input: bool = False
    """Whether to skip and report images that cannot be read, instead of failing at the first."""
    max_image_pixels: int | None = None
    """Largest image to decode, in pixels, or None for ``DEFAULT_MAX_IMAGE_PIXELS``."""
    companion_directory: Path | None = None
    """Additional directory that may hold a tokenizer or image processor: that of the weights file."""

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
    """How layers are assigned to ranks.

    In order of precedence: a partition, a schedule file, the scheduler's files. Without any of them, layers
    are split evenly.
    """

    partition: tuple[int, ...] | None = None
    """First and last layer of each stage, from 1."""
    rank_order: tuple[int, ...] | None = None
    """Rank of each stage, or None to run stage n on rank n."""
    schedule_file: Path | None = None
    """File with the output of ``sched-pipeline``."""
    models_file: Path | None = None
    dev_types_file: Path | None = None
    dev_file: Path | None = None
    dev_neighbors_file: Path | None = None
    """File with bandwidths of single links, as pipeedge-doctor writes it; None: those of the device types."""
    hosts: tuple[str, ...] | None = None
    """Host of each rank, or None if hosts are named after their ranks."""
    data_rank: int = 0
    """Rank that reads the inputs and collects the outputs."""
    quant_bits: tuple[int, ...] | None = None
    """Bits a value on the outgoing link of each stage, 0 for uncompressed; None means those of the schedule
    file, else 0.
    """
    dtypes: tuple[str, ...] | None = None
    """Number type of each stage, or one for all, or ``AUTO_DTYPE``; None means those of the schedule file,
    else float32.
    """
    min_agreement: float | None = None
    """Least fraction of items with the same class as in float32, for ``AUTO_DTYPE``; None: any type."""
    link_bits: str | None = None
    """Bits a value that the scheduler assumes on links between stages, or ``auto``; None: uncompressed."""

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
            raise ScheduleError(f"-H/--hosts names {twice} twice; each rank needs its own host")

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
                    "--dtype: automatic scheduling chooses the number of stages; give one number type "
                    "for all, or auto"
                )
        if self.min_agreement is None:
            return
        if not self.automatic_dtype:
            raise ScheduleError("--min-agreement goes with --dtype auto")
        if not 0 < self.min_agreement <= 1:
            raise ScheduleError(
                f"--min-agreement {figure(self.min_agreement, 6)}: the fraction of items whose class must "
                "be float32's, "
                "above 0 and up to 1"
            )

    @property
    def automatic_dtype(self) -> bool:
        """Whether the scheduler chooses the number type."""
        return self.dtypes == (AUTO_DTYPE,)

    def _check_link_bits(self, link_bits: str) -> None:
        if link_bits not in ("auto", "0", *map(str, BIT_WIDTHS)):
            raise ScheduleError(f"--link-bits {link_bits}: choose auto, 0, 2 to 8 or 16")
        if not self.automatic:
            raise ScheduleError("--link-bits belongs to automatic scheduling: -sm, -sdt, -sd")
        if self.quant_bits is not None:
            raise ScheduleError("--link-bits and -q both set the bits of links; give one of them")

    @property
    def automatic(self) -> bool:
        """Whether to run the scheduler; a partition or a schedule file takes precedence."""
        return self.models_file is not None and self.partition is None and self.schedule_file is None


@dataclass(frozen=True)
class CompressionRequest:
    """Compression of the values on links."""

    clamp: Name = DEFAULT_CLAMP
    """Method that chooses the range that quantised values cover, one of ``CLAMPS``."""
    adaptive: Name | None = None
    """Policy by which the bits of links between stages follow the bandwidth, one of ``ADAPTIVE``; None keeps
    them fixed.
    """
    window_size: Count = DEFAULT_WINDOW_SIZE
    """Number of microbatches between decisions of the policy, and between choices of the clamp."""
    send_constraint: Number | None = None
    """Target of the policy in items a second."""
    min_bits: Count | None = None
    """Fewest bits that the policy may choose; None means 2."""

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
    """Check that a report has a supported format.

    Raises:
        RequestError: The suffix is neither .json nor .html.
    """
    if path.suffix not in REPORT_SUFFIXES:
        raise RequestError(f"--report {path}: a report is FILE.json, for programs, or FILE.html, for people")


@dataclass(frozen=True)
class OutputRequest:
    """Files that a run writes, and what it prints."""

    results: Path | None = None
    report: Path | None = None
    trace: Path | None = None
    """File for the trace of every thread's activities, for Perfetto."""
    quiet: bool = False
    """Whether to print neither progress nor tables."""
    check_items: int = 0
    """Number of items to compute in float32 too, on the data rank, and compare; 0 for none."""

    @property
    def record_rows(self) -> int:
        """Number of activities to keep on record for each thread."""
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
    """Measurements for each microbatch, and where they are written."""

    directory: Path | None = None
    """Directory for a CSV file for each key of each rank."""
    csv_file_mode: str = "x"
    """Mode in which existing files are opened, one of ``CSV_FILE_MODES``."""
    prometheus_port: int | None = None
    """Port at which this rank serves its metrics."""
    window_size: int = DEFAULT_WINDOW_SIZE
    """Number of microbatches in a window."""

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
    """Options given to this rank that only one rank of the run obeys, by name, with values as text."""

    schedule: Mapping[str, str] = field(default_factory=dict)
    """Options that rank 0 obeys."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Options that the data rank obeys."""


@dataclass(frozen=True)
class RunRequest:
    """The complete request for one rank."""

    world: WorldRequest
    model: ModelRequest = field(default_factory=ModelRequest)
    input: InputRequest = field(default_factory=InputRequest)
    schedule: ScheduleRequest = field(default_factory=ScheduleRequest)
    output: OutputRequest = field(default_factory=OutputRequest)
    metrics: MetricsRequest = field(default_factory=MetricsRequest)
    transport: TransportRequest = field(default_factory=TransportRequest)
    compression: CompressionRequest = field(default_factory=CompressionRequest)
    ubatch_size: int = 8
    """Number of items that travel together."""
    command: tuple[str, ...] = field(default=(), compare=False)
    """Command line of the request, program first; not compared, as a request can be worded differently."""
    given: GivenOptions = field(default_factory=GivenOptions, compare=False)
    """Options that one rank obeys; ranks compare them so that none is lost on a rank that ignores it."""

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
