"""Messages between nodes, and between a node and the commands that ask it. Pure.

    about        Here                                  what the node is, and what it does
    measure      Granted                                  as many bytes as it says follow the request
    hold         News ..., Granted                    fetches the files of a model from the node that asks,
                                                      and its weights once a rank reads them
    get          Blob, and its bytes                   one file of a model that this node has offered
    getranges    Blob and its bytes, for each          parts of such a file, as far as they are here
    findmodel    Offered                               the files of a model by its name, without contents
    profile      News ..., Profiled                measures the layers of a model
    refine       Granted                              keeps what a run has measured of that
    startrank    Said ..., Ended                       runs one rank; it lives as long as the connection
    remove       Granted                                  takes a newer list of removed nodes
    up           News ..., Serving                   plans, starts and serves a model on all nodes
    down         Granted                                  ends that
    state        ClusterState                                 the nodes, the run and its service as JSON
    ask          Answered, Blob and its bytes ...   passes a request on to the service; its body follows

Anything may be answered by ``Refused``. Each request has a type with limits, and there are no others: a
member can have a node run one of two programs of ours, with values for options from here, and nothing else.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from pipeedge.base.fields import Amount, Count, ExitCode, Line, Name, Port, Positive
from pipeedge.control.messages import Message

__all__ = [
    "FROM_NODE",
    "TO_NODE",
    "About",
    "Answered",
    "Ask",
    "Blob",
    "Granted",
    "Down",
    "Ended",
    "Get",
    "GetRanges",
    "Here",
    "Hold",
    "Measure",
    "ModelFile",
    "ModelPlace",
    "Profile",
    "Profiled",
    "News",
    "FindModel",
    "Offered",
    "Serving",
    "Refine",
    "Refused",
    "Remove",
    "Said",
    "StartRank",
    "ClusterState",
    "StateOf",
    "Up",
]

Digest: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
FileName: TypeAlias = Annotated[str, Meta(pattern=rf"^{_PART}(/{_PART})?$")]
"""Path of a file within a model directory: it never leads out of it."""
LongText: TypeAlias = Annotated[str, Meta(max_length=4 << 20)]
Key: TypeAlias = Annotated[str, Meta(max_length=64 << 10)]
Address: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9A-Za-z][0-9A-Za-z.:%_-]{0,127}$")]
_NAMED = rf"{_PART}(/{_PART})?(#[A-Za-z0-9]{{1,15}})?"
ModelName: TypeAlias = Annotated[str, Meta(pattern=rf"^{_NAMED}$")]
Slowness: TypeAlias = Annotated[float, Meta(ge=0.05, le=20)]
"""Time that layers take, as a multiple of what their profile says."""
DType: TypeAlias = Literal["float32", "bfloat16", "float16", "int8", "int4"]
_World: TypeAlias = Annotated[int, Meta(ge=1, le=1024)]
_Batch: TypeAlias = Annotated[int, Meta(ge=1, le=4096)]


class ModelFile(Struct, frozen=True):
    """One file of a model."""

    name: FileName
    size: Count
    """Size in bytes."""
    sha256: Digest
    """Digest of its contents, or of the digests of its pieces."""
    pieces: Annotated[tuple[Digest, ...], Meta(max_length=1 << 16)] = ()
    """Digests of the pieces of a large file of weights, of which each node fetches what it needs."""
    piece_bytes: Annotated[int, Meta(ge=0, le=1 << 30)] = 0


class ModelPlace(Struct, frozen=True):
    """Where the nodes have a model: shipped, or files under their digest."""

    name: ModelName
    """Known name, or the last part of the name of the directory in which the files are."""
    digest: Digest | None = None
    """Digest of all files, or None for a model that every node has."""
    weights: FileName | None = None
    """Weights file of a known model; None if the files are a directory that describes itself."""


# -- requests ----------------------------------------------------------------------------------------


class About(Message, frozen=True):
    """Ask what the node is."""

    removals: Count = 0
    """Number of the newest list of removed nodes that the asking end has."""


class Measure(Message, frozen=True):
    """Send bytes, to see how long they take."""

    size: Annotated[int, Meta(ge=0, le=256 << 20)]


class Hold(Message, frozen=True):
    """Fetch the files of a model."""

    model: ModelPlace
    files: Annotated[list[ModelFile], Meta(max_length=4096)]
    port: Port
    """Port of the node that has them, at the address from which this request came."""
    known_as: ModelName | None = None
    """Name by which people ask for it; None for a directory."""


class Get(Message, frozen=True):
    """Ask for the contents of a file of a model."""

    sha256: Digest
    offset: Count


class GetRanges(Message, frozen=True):
    """Ask for parts of a file of a model."""

    sha256: Digest
    ranges: Annotated[list[tuple[Count, Count]], Meta(max_length=4096)]
    """Numbers of the first byte of each part, and of the one behind its last."""


class FindModel(Message, frozen=True):
    """Ask whether the node has a model, and what its files are."""

    name: ModelName


class Profile(Message, frozen=True):
    """Measure the layers of a model, or return what was measured before."""

    model: ModelPlace
    batch_size: _Batch
    dtype: DType
    thorough: bool = False
    """Whether as many passes are measured as the profiler takes by itself, rather than a few."""


class Refine(Message, frozen=True):
    """Keep by how much a profile is off, as a run has found out."""

    profile: Profile
    slowness: Slowness


class StartRank(Message, frozen=True):
    """Run a rank of a run for as long as the connection lasts."""

    run: Name
    """Name of the run, so that a node works for one at a time."""
    rank: Annotated[int, Meta(ge=1, le=1023)]
    world: _World
    model: ModelPlace
    batch_size: _Batch
    addr: Address
    port: Positive
    serve: Positive
    """Port of the service, at which only rank 0 listens."""
    key: Key
    """Membership file of this run."""
    timeout_s: Annotated[float, Meta(gt=0, le=3600)]


class Remove(Message, frozen=True):
    """Take a list of removed nodes."""

    text: LongText


class Up(Message, frozen=True):
    """Plan a run of a model over the nodes, start it, and serve it."""

    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Known name, directory on the asked node, or repository of the hub."""
    count: _World | None = None
    """Largest number of nodes, or None for all."""
    only: Annotated[tuple[Name, ...], Meta(max_length=1024)] = ()
    """Names of the nodes to use besides the asked one; all if empty."""
    objective: Literal["throughput", "latency"] = "throughput"
    plan: Literal["cut", "auto"] = "cut"
    dtype: DType = "float32"
    batch_size: _Batch = 8
    context: Annotated[int, Meta(ge=1)] | None = None
    """Longest prompt and answer of a decoder together, in tokens; None for what the memory allows."""
    serve_port: Positive = 8000
    thorough: bool = False


class Down(Message, frozen=True):
    """End the run and its service."""


class StateOf(Message, frozen=True, tag="state"):
    """Ask for the state of everything that the node knows."""


class Ask(Message, frozen=True):
    """Pass a request on to the service on this node; its body follows."""

    model: Annotated[str, Meta(max_length=4096)]
    """Model that is meant, or an empty text for any."""
    path: Literal["/", "/classify", "/v1/completions", "/v1/chat/completions", "/embed", "/predict"]
    content_type: Literal["application/json", "application/octet-stream"]
    size: Annotated[int, Meta(ge=0, le=64 << 20)]


TO_NODE = (
    About
    | Measure
    | Hold
    | Get
    | GetRanges
    | FindModel
    | Profile
    | Refine
    | StartRank
    | Remove
    | Up
    | Down
    | StateOf
    | Ask
)

# -- replies -----------------------------------------------------------------------------------------


class Refused(Message, frozen=True):
    """The request cannot be granted, or has failed."""

    line: Line
    exit_code: ExitCode = 2


class Here(Message, frozen=True):
    """What a node is, and what it does."""

    name: Name
    processor: Name
    cores: Positive
    memory: Count
    """Bytes that a run can use now."""
    system: Name
    version: Name
    """Version of PipeEdge."""
    torch: Name
    links: Annotated[list[Name], Meta(max_length=64)]
    """Network interfaces with their speed."""
    port: Port
    serial: Annotated[str, Meta(pattern=r"^[0-9a-f]{0,64}$")] = ""
    """Serial number of its certificate, in hexadecimal."""
    works_for: Name = ""
    """Run for which it computes, or empty."""
    serves: Name = ""
    """Model that it serves, as the asked node of a run, or empty."""
    phase: Name = ""
    """What that run does now."""
    url: Name = ""
    """Address of the service on that node."""
    removals: Count = 0
    """Number of its newest list of removed nodes."""
    removed: LongText = ""
    """That list, if it is newer than that of the asking end."""


class Granted(Message, frozen=True):
    """The request is granted, and all is done."""


class News(Message, frozen=True):
    """A step of a long request."""

    line: Line
    node: Name = ""
    """Node that it is about, or empty for all."""
    done: Amount = 0.0
    """Bytes that were fetched, of ``total``."""
    total: Amount = 0.0


class Blob(Message, frozen=True):
    """Bytes that follow this message."""

    size: Count


class Offered(Message, frozen=True):
    """A model that the node has, or of which it knows the files."""

    model: ModelPlace
    files: Annotated[list[ModelFile], Meta(max_length=4096)]


class Profiled(Message, frozen=True):
    """The results file of a profile."""

    results: LongText
    seconds: Amount
    """Duration of the measurement; 0 if it was made before."""
    slowness: Slowness = 1.0
    """What runs have measured of it."""


class Said(Message, frozen=True):
    """A line of output of a rank."""

    text: Annotated[str, Meta(max_length=64 << 10)]
    error: bool


class Ended(Message, frozen=True):
    """A rank has ended."""

    code: Annotated[int, Meta(ge=-64, le=255)]
    """Return code as ``subprocess`` gives it: negative for a signal."""


class Serving(Message, frozen=True):
    """The service answers."""

    url: Name
    seconds: Amount
    """Time since the request."""
    profiled_s: Amount
    """Part of it that profiling took."""


class ClusterState(Message, frozen=True, tag="clusterstate"):
    """ClusterState of the node, of its run, and of the nodes that it knows."""

    document: dict[str, Any]


class Answered(Message, frozen=True):
    """Reply of the service; its body follows in parts, each a ``Blob``, as it comes. The last is empty."""

    status: Annotated[int, Meta(ge=100, le=599)]
    content_type: Name


FROM_NODE = (
    Refused
    | Here
    | Granted
    | News
    | Blob
    | Offered
    | Profiled
    | Said
    | Ended
    | Serving
    | ClusterState
    | Answered
)


def is_model_name(text: str) -> bool:
    """Return whether ``text`` can be the name of a known model or of a repository."""
    return re.fullmatch(_NAMED, text) is not None


def is_plain_name(text: str) -> bool:
    """Return whether ``text`` can be the name of a directory with a model."""
    return re.fullmatch(_PART, text) is not None
