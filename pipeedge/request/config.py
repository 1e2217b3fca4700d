"""The request for a run: frozen groups of options, validated on creation.

Each field that an option fills declares it (``request.declared``). This module imports nothing heavy, so that
mistakes on the command line are reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeedge.base.errors import RequestError, ScheduleError
from pipeedge.base.schedule import KERNELS
from pipeedge.base.wording import count, figure
from pipeedge.request.declared import (
    PORT,
    Check,
    ObeyedBy,
    agreed_values,
    at_least,
    between,
    check_options,
    option,
)
from pipeedge.request.files import (
    STANDARD_INPUT,
    STANDARD_OUTPUT,
    InputRequest,
    MetricsRequest,
    OutputRequest,
)
from pipeedge.request.generation import CacheRequest, GenerationRequest
from pipeedge.request.http_options import ServeRequest
from pipeedge.request.keys import KeyRequest
from pipeedge.request.parsing import nonempty, path
from pipeedge.request.scheduling import AUTO, LinkRequest, ScheduleRequest

__all__ = [
    "COMMS",
    "DEFAULT_WORKER_THREADS",
    "ENCRYPTED",
    "MAX_WORLD",
    "TRANSPORTS",
    "GivenOptions",
    "ModelRequest",
    "RunRequest",
    "TransportRequest",
    "WorldRequest",
]

COMMS = ("p2p", "rpc", "tcp")
ENCRYPTED = "tcp"
"""The transport that can encrypt its links, which it does with a key."""
TRANSPORTS = (*COMMS, f"{ENCRYPTED}-tls")
"""Transports as profiles name them, the last one with a key."""
DEFAULT_WORKER_THREADS = 4
_MAX_TIMEOUT_S = 7 * 24 * 3600.0
_MAX_WORKER_THREADS = 1024
MAX_WORLD = 1024
"""Largest number of ranks. One hub cannot serve more connections, and a larger WORLD is a mistake."""


@dataclass(frozen=True)
class WorldRequest:
    """This process and its place among the ranks."""

    rank: int
    size: int
    addr: str = option(
        "127.0.0.1",
        "--addr",
        check=Check(bool, "is empty: give the address or name of rank 0's machine"),
        help="address or name of rank 0's machine ({default})",
    )
    port: int = option(
        29500, "--port", type=int, metavar="PORT", check=PORT, help="port on which rank 0 listens ({default})"
    )
    socket_ifname: str | None = option(
        None,
        "-s/--socket-ifname",
        metavar="NAME",
        help="network interface of the links (the one that routes to --addr)",
    )
    timeout_s: float = option(
        60.0,
        "--timeout",
        type=float,
        metavar="SECONDS",
        check=Check(
            lambda value: 0 < value <= _MAX_TIMEOUT_S,
            f"must be seconds above 0 and up to {figure(_MAX_TIMEOUT_S, 7)}",
        ),
        help="longest wait for a rank that is absent, silent or stuck ({default})",
    )
    agent_store: bool = False
    """Whether ``port`` belongs to torchrun's agent, through which rank 0 announces its own."""
    agent_run: str = ""
    keys: KeyRequest = field(default_factory=KeyRequest)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise RequestError(f"a world of {count(self.size, 'rank')}: WORLD must be at least 1")
        if self.size > MAX_WORLD:
            raise RequestError(f"a world of {count(self.size, 'rank')}: WORLD is at most {MAX_WORLD}")
        if not 0 <= self.rank < self.size:
            raise RequestError(
                f"rank {self.rank} is outside the world: with WORLD {self.size}, RANK is 0 to {self.size - 1}"
            )
        check_options(self)


@dataclass(frozen=True)
class TransportRequest:
    """The transport of the links."""

    comm: str = option(
        "p2p",
        "-c/--comm",
        choices=COMMS,
        obeyed_by=ObeyedBy.ALL,
        subject="transport",
        help="transport of the links ({default})",
    )
    worker_threads: int | None = option(
        None,
        "-w/--worker-threads",
        type=int,
        check=between(
            1, _MAX_WORKER_THREADS, f"must be 1 to {_MAX_WORKER_THREADS}; {DEFAULT_WORKER_THREADS} are enough"
        ),
        help=f"number of threads that serve RPC, with -c rpc ({DEFAULT_WORKER_THREADS})",
    )
    on_failure: str | None = option(
        None,
        "--on-failure",
        choices=("stop", "continue"),
        obeyed_by=ObeyedBy.RANK_0,
        help="whether the run ends when a rank is lost, or goes on with those that are left; continue needs "
        "-c tcp, whose default it is where the input has an end",
    )

    @property
    def goes_on(self) -> bool:
        """Whether a run of a finished input goes on when a rank but 0 and the data rank is lost."""
        return self.comm == ENCRYPTED and self.on_failure != "stop"

    def __post_init__(self) -> None:
        if self.on_failure == "continue" and self.comm != ENCRYPTED:
            engine = "gloo" if self.comm == "p2p" else "TensorPipe"
            raise RequestError(
                f"--on-failure continue needs -c {ENCRYPTED}, because {engine} cannot open its links again "
                "without a lost rank"
            )
        if self.worker_threads is not None and self.comm != "rpc":
            raise RequestError(
                f"-w/--worker-threads needs -c rpc, because {self.comm} links have no such threads"
            )
        check_options(self)


@dataclass(frozen=True)
class ModelRequest:
    """The model, its weights, and the device to compute on."""

    name: str = option(
        "google/vit-base-patch16-224",
        "-m/--model",
        older=("--model-name",),
        type=nonempty,
        metavar="NAME|DIR",
        obeyed_by=ObeyedBy.ALL,
        subject="model",
        help="a known model, a local Hugging Face directory, a repository ORG/NAME of its hub, or a GGUF "
        "file of a decoder, also as ORG/NAME/FILE.gguf ({default})",
    )
    weights: Path | None = option(
        None,
        "-M/--model-file",
        type=path,
        metavar="PATH",
        help="weights: .npz, .safetensors or a directory (the model's default file, here)",
    )
    device: str = option("cpu", "-d/--device", type=nonempty, help="cpu, cuda or cuda:N ({default})")
    kernels: str = option(
        "auto",
        "--kernels",
        choices=KERNELS,
        help="what computes the linear layers; auto: what suits the processor ({default})",
    )


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
    links: LinkRequest = field(default_factory=LinkRequest)
    output: OutputRequest = field(default_factory=OutputRequest)
    metrics: MetricsRequest = field(default_factory=MetricsRequest)
    transport: TransportRequest = field(default_factory=TransportRequest)
    serve: ServeRequest = field(default_factory=ServeRequest)
    generation: GenerationRequest = field(default_factory=GenerationRequest)
    cache: CacheRequest = field(default_factory=CacheRequest)
    microbatch_size: int = option(
        8,
        "-u/--ubatch-size",
        type=int,
        check=at_least(1),
        obeyed_by=ObeyedBy.ALL,
        subject="microbatch size",
        help="items in a microbatch ({default}); for text, how many sequences of the longest context the "
        "cache should have room for",
    )
    command: tuple[str, ...] = field(default=(), compare=False)
    """Command line of the request, program first; not compared, as a request can be worded differently."""
    given: GivenOptions = field(default_factory=GivenOptions, compare=False)
    """Options that one rank obeys; ranks compare them so that none is lost on a rank that ignores it."""

    @property
    def results(self) -> Path | None:
        """Where results go: ``--output``, else standard output if the items come from standard input."""
        if self.output.results is None and self.input.paths == (STANDARD_INPUT,):
            return STANDARD_OUTPUT
        return self.output.results

    @property
    def prints_results(self) -> bool:
        """Whether results go to standard output, which then has nothing else."""
        return self.results == STANDARD_OUTPUT or self.generation.prompt is not None

    def agreed(self, model: str | None) -> dict[str, str | int | None]:
        """Return the values that all ranks must have in common, by what a message calls them.

        Args:
            model: The model's own name; None for that of a directory, which may differ between hosts.
        """
        # Of these options, only the model's fills a field called name.
        return {
            f"the {one.subject} ({one.flags[0]})": model if one.field == "name" else value
            for one, value in agreed_values(self)
        }

    def __post_init__(self) -> None:
        check_options(self)
        if self.world.keys.given and self.transport.comm != ENCRYPTED:
            engine = "gloo" if self.transport.comm == "p2p" else "TensorPipe"
            raise RequestError(
                f"-c {self.transport.comm} with a key: {engine} cannot encrypt its links; leave out -c, for "
                f"links over {ENCRYPTED}, or the key"
            )
        if self.serve.listen is not None:
            self.check_endless("--serve")
        if self.generation.prompt is not None and (self.input.paths or self.input.dataset_name):
            raise RequestError("give either --prompt or --input, not both")
        if self.generation.prompt is not None and self.input.max_items is not None:
            raise RequestError("-b/--batch-size limits the prompts of --input: leave it out with --prompt")
        if self.links.link_bits is not None and not self.schedule.automatic:
            raise ScheduleError("--link-bits needs automatic scheduling (-sm, -sdt and -sd)")
        if self.schedule.survive_loss and not self.transport.goes_on:
            raise ScheduleError(
                "--survive-loss needs -c tcp without --on-failure stop; otherwise the first loss ends the run"
            )
        if self.schedule.replan == AUTO and not self.transport.goes_on:
            raise ScheduleError(
                "--replan auto needs -c tcp without --on-failure stop: only then can links open again"
            )
        if self.schedule.held_out and self.schedule.data_rank != 0:
            raise ScheduleError("--held-out needs the input on rank 0, which plans: leave out -D/--data-rank")
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

    def check_endless(self, name: str) -> None:
        """Refuse options for a finished input, in a run that answers requests for as long as it is asked.

        Args:
            name: What asks for such a run, for messages.

        Raises:
            RequestError: One was given.
        """
        useless = {
            "--input": self.input.paths,
            "--prompt": self.generation.prompt,
            "--dataset-name": self.input.dataset_name,
            "-b/--batch-size": self.input.max_items,
            "--skip-bad-input": self.input.skip_bad_input,
            "--output": self.output.results,
            "--check": self.output.check_items,
            "--held-out": self.schedule.held_out,
        }
        if self.schedule.replan == AUTO and self.transport.on_failure is None:
            raise RequestError(f"{name} with --replan auto needs --on-failure continue")
        for option_name, value in useless.items():
            if value:
                raise RequestError(
                    f"{name} answers requests and has no finished input: leave out {option_name}"
                )
