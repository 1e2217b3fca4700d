"""Options of the programs for nodes. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeedge.base.errors import RequestError
from pipeedge.base.schedule import DTYPES
from pipeedge.profile.network import parse_place
from pipeedge.request.config import RunRequest
from pipeedge.request.declared import (
    PORT,
    Check,
    Section,
    add_sections,
    at_least,
    check_options,
    given,
    option,
    option_like,
    options_of,
    read_variables,
)
from pipeedge.request.environment import Environment
from pipeedge.request.generation import CacheRequest, GenerationRequest
from pipeedge.request.keys import KeyRequest
from pipeedge.request.parsing import OneLineParser, add_common, names, nonempty, path

__all__ = [
    "AskRequest",
    "DownRequest",
    "InviteRequest",
    "JoinRequest",
    "MembersRequest",
    "NodeRequest",
    "StatusRequest",
    "UpRequest",
    "parse_ask",
    "parse_down",
    "parse_invite",
    "parse_join",
    "parse_members",
    "parse_node",
    "parse_status",
    "parse_up",
]

NODE_PORT = 29600
"""Port at which nodes listen."""
_PLACES = Check(lambda places: all(parse_place(each) for each in places), "must be nodes like pi1,pi2:29600")


@dataclass(frozen=True)
class NodeRequest:
    """A node that waits for work."""

    key: Path | None = option_like(
        KeyRequest,
        "key",
        help="key of the cluster, or of this node (~/.config/pipeedge/cluster.pem)",
    )
    name: str | None = option(None, "--name", type=nonempty, help="name of this node (that of the machine)")
    port: int = option(
        NODE_PORT, "--port", type=int, metavar="PORT", check=PORT, help="port to listen at ({default})"
    )
    nodes: tuple[str, ...] = option(
        (),
        "--nodes",
        type=names,
        check=_PLACES,
        help="nodes to look for where announcements do not reach, e.g. pi1,pi2:29600",
    )
    announces: bool = option(
        True, "--no-mdns", help="neither announce this node in its network nor look for others there"
    )
    directory: Path = option(
        Path("~/.local/share/pipeedge"),
        "--directory",
        type=path,
        metavar="DIR",
        help="where profiles, files of models and the key of this node are kept ({default})",
    )
    invite: int = option(
        0,
        "--invite",
        type=int,
        check=at_least(0),
        help="print a code for each of N machines that join, one after the other; makes the key if there is "
        "none",
    )
    join: str | None = option(
        None,
        "--join",
        type=nonempty,
        metavar="CODE",
        help="join the cluster that has printed this code first",
    )
    at: str | None = option(
        None,
        "--at",
        metavar="HOST[:PORT]",
        help="with --join: machine that has printed the code (found in its network)",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.join is not None and self.invite:
            raise RequestError("--join and --invite exclude each other: one machine prints the codes of all")
        if self.at is not None and self.join is None:
            raise RequestError("--at has an effect only with --join; give that too")


@dataclass(frozen=True)
class ClientRequest:
    """A command that asks a node."""

    key: Path | None = option_like(NodeRequest, "key")
    node: str = option(
        "127.0.0.1",
        "--node",
        metavar="HOST[:PORT]",
        help="node to ask ({default}, port 29600)",
    )

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the node."""
        return parse_place(self.node)

    def __post_init__(self) -> None:
        check_options(self)
        parse_place(self.node)


@dataclass(frozen=True)
class UpRequest(ClientRequest):
    """A model to serve."""

    model: str = ""
    nodes: tuple[str, ...] = option(
        (),
        "--nodes",
        type=names,
        metavar="N|LIST",
        help="largest number of nodes, or their names (all that are here)",
    )
    objective: str = option(
        "throughput",
        "--objective",
        choices=("throughput", "latency"),
        help="what the plan makes as good as it can ({default})",
    )
    plan: str = option(
        "cut",
        "--plan",
        choices=("cut", "auto"),
        help="cut: only where to cut and the nodes; auto: also the microbatch size and the bits of links "
        "({default})",
    )
    dtype: str = option(
        "float32", "--dtype", choices=DTYPES, help="number type of weights and computation ({default})"
    )
    microbatch_size: int = option_like(RunRequest, "microbatch_size")
    context: int | None = option_like(CacheRequest, "context")
    serve: int = option(
        8000,
        "--serve",
        type=int,
        metavar="PORT",
        check=PORT,
        help="port of the service, on the loopback interface of the asked node ({default})",
    )
    opens: str = option(
        "auto",
        "--open",
        choices=("auto", "yes", "no"),
        help="open the page of the service in a browser once it answers; auto: where a person sits at a "
        "screen of the asked node ({default})",
    )
    thorough: bool = option(
        False,
        "--thorough",
        help="measure each layer as often as the profiler does by itself, rather than three times",
    )

    @property
    def count(self) -> int | None:
        """Largest number of nodes, if a number is given."""
        return int(self.nodes[0]) if len(self.nodes) == 1 and self.nodes[0].isdecimal() else None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count == 0:
            raise RequestError("--nodes 0: a run needs at least 1 node")


@dataclass(frozen=True)
class StatusRequest(ClientRequest):
    """The state of the cluster."""

    json: bool = option(False, "--json", help="print it as JSON")
    page: Path | None = option(None, "--page", type=path, metavar="FILE", help="write it as a page of HTML")


@dataclass(frozen=True)
class AskRequest(ClientRequest):
    """A question to a model."""

    model: str = ""
    question: str = ""
    json: bool = option(False, "--json", help="print the whole reply as JSON")
    max_tokens: int | None = option_like(GenerationRequest, "max_tokens")


@dataclass(frozen=True)
class DownRequest(ClientRequest):
    """The end of a run."""


@dataclass(frozen=True)
class MembersRequest(ClientRequest):
    """The members of the cluster: list them, or remove one."""

    remove: str | None = None


@dataclass(frozen=True)
class InviteRequest:
    """A key to make, or a code to print."""

    file: Path | None = None
    code: bool = option(False, "--code", help="print a code, with which another machine joins")
    count: int = option(
        1,
        "--count",
        type=int,
        check=at_least(1),
        help="print a code for each of N machines, one after another",
    )
    port: int = option(
        29601, "--port", type=int, metavar="PORT", check=PORT, help="port at which they join ({default})"
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class JoinRequest:
    """A cluster to join."""

    code: str = ""
    key: Path | None = option(
        None, "--key", type=path, help="new file for the key of this node (~/.config/pipeedge/cluster.pem)"
    )
    name: str | None = option_like(NodeRequest, "name")
    at: str | None = option_like(
        NodeRequest, "at", help="machine that has printed the code (found in its network)"
    )


# -- command lines -------------------------------------------------------------------------------------


def _parser(
    command: str, description: str, section: Section, examples: Sequence[str], *positional: tuple[str, str]
) -> OneLineParser:
    parser = OneLineParser(prog=f"pipeedge {command}", description=description, allow_abbrev=False)
    for name, text in positional:
        parser.add_argument(name, help=text)
    add_common(parser)
    add_sections(parser, [section])
    parser.examples = tuple(f"pipeedge {command} {example}".rstrip() for example in examples)
    return parser


def _read(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    request: type[Any],
    environment: Environment,
    **more: str,
) -> Any:
    """Return the request that a command line makes; ``more`` has the fields of its positional arguments."""
    arguments = parser.parse_args(argv)
    read_variables(arguments, [Section("", options_of(request))], environment.variables)
    positional = {field: getattr(arguments, name) for field, name in more.items()}
    return request(**positional, **given(arguments, request))


def node_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge node``."""
    return _parser(
        "node",
        "Wait for work: let any member of the cluster use this machine for a run. Members prove who they are "
        "by their key, and everything is encrypted.",
        Section("this node", options_of(NodeRequest)),
        (
            "--invite 2                # the first machine of a cluster: prints two codes",
            "--join k7mp-2xqa-9fhd     # another machine, with one of them",
            "--nodes pi1,pi2:29600     # where announcements do not reach",
        ),
    )


def parse_node(argv: Sequence[str], environment: Environment) -> NodeRequest:
    """Read the command line of ``pipeedge node``. Raises RequestError."""
    found: NodeRequest = _read(node_parser(), argv, NodeRequest, environment)
    return found


def up_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge up``."""
    return _parser(
        "up",
        "Serve a model with the nodes that are here: profile it where that was not done yet, plan, start and "
        "go on through losses, until 'pipeedge down'.",
        Section("service", options_of(UpRequest)),
        (
            "google/vit-base-patch16-224",
            "google/vit-base-patch16-224 --nodes 3 --objective latency --plan auto",
            "Qwen/Qwen2.5-0.5B-Instruct --dtype int8 --context 4096",
        ),
        ("MODEL", "known name, directory, or repository ORG/NAME of the Hugging Face hub"),
    )


def parse_up(argv: Sequence[str], environment: Environment) -> UpRequest:
    """Read the command line of ``pipeedge up``. Raises RequestError."""
    found: UpRequest = _read(up_parser(), argv, UpRequest, environment, model="MODEL")
    return found


def status_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge status``."""
    return _parser(
        "status",
        "Show the nodes, what runs where, and how the service is.",
        Section("state", options_of(StatusRequest)),
        ("", "--json", "--node pi2 --page status.html     # what pi2 knows, as a page"),
    )


def parse_status(argv: Sequence[str], environment: Environment) -> StatusRequest:
    """Read the command line of ``pipeedge status``. Raises RequestError."""
    found: StatusRequest = _read(status_parser(), argv, StatusRequest, environment)
    return found


def ask_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge ask``."""
    return _parser(
        "ask",
        "Ask a model: the one that is served, or one that runs for this question alone.",
        Section("question", options_of(AskRequest)),
        (
            "google/vit-base-patch16-224 photo.jpg",
            'llama-puzzles "Sort 5 2 9 1." --max-tokens 20',
            "llama-puzzles -     # a text from standard input",
        ),
        ("MODEL", "the model"),
        ("QUESTION", "a text, an image file, or - to read either from standard input"),
    )


def parse_ask(argv: Sequence[str], environment: Environment) -> AskRequest:
    """Read the command line of ``pipeedge ask``. Raises RequestError."""
    found: AskRequest = _read(ask_parser(), argv, AskRequest, environment, model="MODEL", question="QUESTION")
    return found


def down_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge down``."""
    return _parser(
        "down",
        "End what a node serves; what was accepted is answered first.",
        Section("service", options_of(DownRequest)),
        ("", "--node pi2                       # what pi2 serves", "--node pi2:29700 --key other.pem"),
    )


def parse_down(argv: Sequence[str], environment: Environment) -> DownRequest:
    """Read the command line of ``pipeedge down``. Raises RequestError."""
    found: DownRequest = _read(down_parser(), argv, DownRequest, environment)
    return found


def members_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge nodes``."""
    parser = OneLineParser(
        prog="pipeedge nodes",
        description="List the nodes of the cluster, or remove one: the others refuse it from then on.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "ACTION", nargs="?", choices=("list", "remove"), default="list", help="what to do (list)"
    )
    parser.add_argument("NAME", nargs="?", help="node to remove")
    add_common(parser)
    add_sections(parser, [Section("cluster", options_of(MembersRequest))])
    parser.examples = (
        "pipeedge nodes",
        "pipeedge nodes --node pi2     # those that pi2 sees",
        "pipeedge nodes remove pi3     # on the machine with the cluster's key",
    )
    return parser


def parse_members(argv: Sequence[str], environment: Environment) -> MembersRequest:
    """Read the command line of ``pipeedge nodes``. Raises RequestError."""
    arguments = members_parser().parse_args(argv)
    if (arguments.ACTION == "remove") != (arguments.NAME is not None):
        raise RequestError("use 'pipeedge nodes', or 'pipeedge nodes remove NAME'")
    read_variables(arguments, [Section("", options_of(MembersRequest))], environment.variables)
    return MembersRequest(remove=arguments.NAME, **given(arguments, MembersRequest))


def join_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge join``."""
    return _parser(
        "join",
        "Join the cluster of the machine that has printed a code: it signs a key for this one, over a "
        "connection on which both prove that they know the code.",
        Section("joining", options_of(JoinRequest)),
        (
            "k7mp-2xqa-9fhd",
            "k7mp-2xqa-9fhd --at pi1           # where pi1 is in another network",
            "k7mp-2xqa-9fhd --name kitchen     # under another name than the machine's",
        ),
        ("CODE", "what 'pipeedge key' prints there"),
    )


def parse_join(argv: Sequence[str], environment: Environment) -> JoinRequest:
    """Read the command line of ``pipeedge join``. Raises RequestError."""
    found: JoinRequest = _read(join_parser(), argv, JoinRequest, environment, code="CODE")
    return found


def invite_sections() -> tuple[Section, ...]:
    """Return the options of ``pipeedge key`` for codes."""
    return (Section("joining", options_of(InviteRequest)),)


def parse_invite(arguments: argparse.Namespace) -> InviteRequest:
    """Return the request in the parsed command line of ``pipeedge key``. Raises RequestError."""
    return InviteRequest(file=arguments.file, **given(arguments, InviteRequest))
