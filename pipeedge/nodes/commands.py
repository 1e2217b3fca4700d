"""``pipeedge up``, ``status``, ``ask``, ``down``, ``nodes`` and ``join``: each asks a node, or a cluster."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pipeedge.base.console import StandardOutput
from pipeedge.base.errors import InputError, PeerFailedError, PipeEdgeError, RequestError
from pipeedge.base.files import write_whole
from pipeedge.base.guard import guard
from pipeedge.base.program import is_verbose
from pipeedge.base.streams import end, print_notice, print_result
from pipeedge.base.wording import figure, printable
from pipeedge.models.registry import find_any
from pipeedge.nodes.identity import read_key
from pipeedge.nodes.inviting import join
from pipeedge.nodes.messages import (
    Answered,
    Ask,
    Blob,
    ClusterState,
    Down,
    Granted,
    News,
    Remove,
    Serving,
    StateOf,
    Up,
)
from pipeedge.nodes.options import (
    AskRequest,
    ClientRequest,
    UpRequest,
    parse_ask,
    parse_down,
    parse_join,
    parse_members,
    parse_status,
    parse_up,
)
from pipeedge.nodes.peer import call, follow
from pipeedge.nodes.shown import answer_lines, bar, show_state, state_page
from pipeedge.nodes.talk import Talk
from pipeedge.request.environment import Environment
from pipeedge.transport.authority import Authority, read_removals
from pipeedge.transport.dialling import NotAMemberError
from pipeedge.transport.membership import Membership

__all__ = ["ask_main", "down_main", "join_main", "members_main", "opens_page", "status_main", "up_main"]

_SUFFIXES = frozenset({".bmp", ".gif", ".heic", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
_LARGE_BYTES = 8e6
"""Smallest transfer that has a line where no bar is drawn: a rank may ask for single pieces first."""
_REPLY_S = 10.0
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
"""Variables that graphical sessions set."""
_STREAMED = object()
"""Reply that was printed as it came."""


def _program(command: str, run: Callable[[list[str], Environment], None]) -> NoReturn:
    name = f"pipeedge {command}"
    work = lambda: run(sys.argv[1:], Environment.read())  # noqa: E731
    end(name, guard(name, work, verbose=is_verbose(sys.argv)))


def up_main() -> NoReturn:
    """Run ``pipeedge up``."""
    _program("up", _up)


def status_main() -> NoReturn:
    """Run ``pipeedge status``."""
    _program("status", _status)


def ask_main() -> NoReturn:
    """Run ``pipeedge ask``."""
    _program("ask", _ask)


def down_main() -> NoReturn:
    """Run ``pipeedge down``."""
    _program("down", _down)


def members_main() -> NoReturn:
    """Run ``pipeedge nodes``."""
    _program("nodes", _members)


def join_main() -> NoReturn:
    """Run ``pipeedge join``."""
    _program("join", _join)


def _join(argv: list[str], environment: Environment) -> None:
    request = parse_join(argv, environment)
    join(request.code, request.key, request.name, request.at, print_notice)


def _called(request: ClientRequest, key: Membership) -> Talk:
    try:
        return call(request.place, key)
    except NotAMemberError as error:
        raise NotAMemberError(f"{error}: name the key of that cluster with --key, or join it") from error
    except PeerFailedError as error:
        host = request.place[0]
        where = "on this machine" if host in _THIS_MACHINE else f"on {host}"
        raise PeerFailedError(
            f"{error}: start 'pipeedge node' {where}, or name another with --node"
        ) from error


def _up(argv: list[str], environment: Environment) -> None:
    request = parse_up(argv, environment)
    model = Path(request.model)
    wanted = Up(
        model=str(model.resolve()) if model.is_dir() else request.model,
        count=request.count,
        only=() if request.count is not None else request.nodes,
        objective=request.objective,  # type: ignore[arg-type]
        plan=request.plan,  # type: ignore[arg-type]
        dtype=request.dtype,  # type: ignore[arg-type]
        batch_size=request.microbatch_size,
        context=request.context,
        serve_port=request.serve,
        thorough=request.thorough,
    )
    with _called(request, read_key(request.key)) as talk:
        serving = follow(talk, wanted, Serving, _Bars())
    asked = request.place[0]
    where = serving.url if asked in _THIS_MACHINE else f"{serving.url} on {asked}"
    print_result(
        f"{request.model} answers at {where} after {serving.seconds:.1f} s, of which profiling took "
        f"{serving.profiled_s:.1f} s"
    )
    opens = opens_page(request, environment.variables, is_terminal=sys.stdout.isatty())
    if opens and not webbrowser.open(serving.url):
        print_notice(f"no browser opens here: open {serving.url} yourself")


def opens_page(request: UpRequest, variables: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Return whether to open the page of a service, which only the asked node can show.

    Args:
        request: What the person has asked for.
        variables: Environment, in which graphical sessions set some variables.
        is_terminal: Whether a person reads what is printed.
    """
    if request.opens != "auto":
        return request.opens == "yes"
    has_screen = sys.platform in ("darwin", "win32") or any(map(variables.get, _DISPLAYS))
    return has_screen and is_terminal and request.place[0] in _THIS_MACHINE


class _Bars:
    """Shows the progress of nodes: lines, and a bar for each that fetches files where there is a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._done: dict[str, News] = {}
        self._drawn = 0

    def __call__(self, progress: News) -> None:
        """Show a step."""
        if not progress.total:
            self._erase()
            print_notice(printable(f"{progress.node}: {progress.line}" if progress.node else progress.line))
            return
        self._done[progress.node] = progress
        if self._is_terminal:
            self._erase()
            lines = [bar(each) for each in self._done.values() if each.done < each.total]
            sys.stderr.write("".join(f"{line}\n" for line in lines))
            sys.stderr.flush()
            self._drawn = len(lines)
        elif progress.done >= progress.total >= _LARGE_BYTES:
            print_notice(printable(f"{progress.node}: fetched {figure(progress.total / 1e6, 3)} MB"))

    def _erase(self) -> None:
        if self._drawn:
            sys.stderr.write(f"\x1b[{self._drawn}F\x1b[J")
            self._drawn = 0


def _state(request: ClientRequest, key: Membership) -> Mapping[str, Any]:
    with _called(request, key) as talk:
        found: ClusterState = talk.ask(StateOf(), ClusterState, _REPLY_S)
        return found.document


def _serving_place(document: Mapping[str, Any], asked: tuple[str, int]) -> tuple[str, int]:
    """Return the address of the node that serves: the one that was asked, or else the only other one."""
    runs = document["runs"]
    if document["run"] is not None or not runs:
        return asked
    name = next(iter(runs))
    (address,) = (node["address"] for node in document["nodes"] if node["name"] == name)
    host, _, port = address.rpartition(":")
    return host, int(port)


def _status(argv: list[str], environment: Environment) -> None:
    request = parse_status(argv, environment)
    document = _state(request, read_key(request.key))
    if request.page is not None:
        write_whole(request.page, state_page(document), "--page")
        print_notice(f"{request.page}: written")
    elif request.json:
        print_result(json.dumps(document, indent=2))
    else:
        show_state(document, StandardOutput(result=True))


def _down(argv: list[str], environment: Environment) -> None:
    request = parse_down(argv, environment)
    key = read_key(request.key)
    with call(_serving_place(_state(request, key), request.place), key) as talk:
        talk.ask(Down(), Granted, 90.0)
    print_notice("ended")


def _members(argv: list[str], environment: Environment) -> None:
    request = parse_members(argv, environment)
    key = read_key(request.key)
    if request.remove is None:
        show_state({**_state(request, key), "run": None}, StandardOutput(result=True))
        return
    authority = Authority.of(key)
    if authority is None:
        raise RequestError(
            f"{key.source} is the key of a node: remove others on the machine that has the cluster's key"
        )
    from pipeedge.nodes.messages import About, Here

    with _called(request, key) as talk:
        here: Here = talk.ask(About(), Here, _REPLY_S)
    document = _state(request, key)
    serials = {node["name"]: node.get("serial", "") for node in document["nodes"]}
    serial = serials.get(request.remove, "")
    if not serial:
        known = ", ".join(sorted(serials))
        raise RequestError(f"{request.remove} is no node that {here.name} has met; it knows {known}")
    before = read_removals(here.removed, key.trusted) if here.removed else None
    removals = authority.remove([int(serial, 16)], before)
    with _called(request, key) as talk:
        talk.ask(Remove(removals.text), Granted, _REPLY_S)
    _state(request, key)  # its look at the others hands the list on
    print_notice(
        f"{request.remove} is removed: every node that hears of it refuses {request.remove} from now on"
    )


# -- ask -----------------------------------------------------------------------------------------------


def _ask(argv: list[str], environment: Environment) -> None:
    request = parse_ask(argv, environment)
    question = read_question(request.question)
    reply = _from_service(request, question)
    if reply is None:
        if find_any(request.model).family.decodes:
            text = _as_text(request.model, question)
            words = ("run", "0", "1", "--model", request.model, "--prompt", text, "--quiet")
            whole = ("--output", "-") if request.json else ()
            longest = () if request.max_tokens is None else ("--max-tokens", str(request.max_tokens))
            sys.stdout.flush()
            os.execv(sys.executable, [sys.executable, "-m", "pipeedge", *words, *whole, *longest])  # noqa: S606
        _check_encoder(request)
        reply = ask_alone(request.model, question)
    if reply is _STREAMED:
        return
    if request.json:
        print_result(json.dumps(reply))
    else:
        for line in answer_lines(reply):
            print_result(printable(line))


def read_question(text: str) -> str | bytes:
    """Return a text, or the bytes of an image: what is not UTF-8 on standard input is an image.

    Raises:
        InputError: The file cannot be read.
    """
    if text == "-":
        read = sys.stdin.buffer.read()
        try:
            return read.decode().rstrip("\n")
        except UnicodeDecodeError:
            return read
    path = Path(text)
    if path.suffix.lower() in _SUFFIXES or (len(text) < 256 and path.is_file()):
        try:
            return path.read_bytes()
        except OSError as error:
            raise InputError(f"{printable(text)}: cannot be read ({error.strerror})") from error
    return text


def _from_service(request: AskRequest, question: str | bytes) -> Any:
    """Return the reply of the running service, or None if there is none for the model.

    The text of a decoder is printed as it comes, unless the whole reply is wanted; ``_STREAMED`` says so.
    """
    try:
        key = read_key(request.key)
        document = _state(request, key)
    except PipeEdgeError:
        if request.node != "127.0.0.1":
            raise
        return None  # no node here, so a run of its own answers
    run = document["run"]
    served = run["model"] if run is not None else next(iter(document["runs"].values()), "")
    if not _same_model(request.model, served):
        return None
    place = _serving_place(document, request.place)
    if run is None:
        with call(place, key) as talk:
            found: ClusterState = talk.ask(StateOf(), ClusterState, _REPLY_S)
        run = found.document["run"]
    if run is not None and run["generates"]:
        return _ask_for_text(place, key, request, served, _as_text(served, question))
    _check_encoder(request)
    is_image = isinstance(question, bytes)
    if run is not None and run["takes_text"] is not None:
        _check_kind(served, is_image=is_image, takes_text=run["takes_text"])
    body = question if isinstance(question, bytes) else json.dumps({"inputs": question}).encode()
    ask = Ask(
        served,
        "/classify" if is_image else "/",
        "application/octet-stream" if is_image else "application/json",
        len(body),
    )
    with call(place, key) as talk:
        status, parts = _asked(talk, ask, body)
        reply = json.loads(b"".join(parts))
    if status != 200:
        raise _unanswered(served, reply)
    return reply


def _asked(talk: Talk, ask: Ask, body: bytes) -> tuple[int, Iterator[bytes]]:
    """Ask the service, and return the status of its reply, and the parts of its body as they come."""
    talk.send(ask)
    talk.send_bytes([body])
    answered: Answered = talk.expect(Answered)

    def parts() -> Iterator[bytes]:
        while size := talk.expect(Blob).size:
            yield from map(bytes, talk.receive_bytes(size))

    return answered.status, parts()


def _unanswered(served: str, reply: Any) -> InputError:
    """Return what is raised for a reply that is an error."""
    what = reply.get("error", reply) if isinstance(reply, dict) else reply
    what = what.get("message", what) if isinstance(what, dict) else what
    return InputError(f"{served} has not answered: {what}")


def _check_encoder(request: AskRequest) -> None:
    """Refuse options of decoders.

    Raises:
        RequestError: There is one.
    """
    if request.max_tokens is not None:
        raise RequestError(f"--max-tokens: {printable(request.model)} does not generate text")


def _check_kind(model: str, *, is_image: bool, takes_text: bool) -> None:
    """Refuse a text for a model that takes images, and an image for one that takes texts.

    Raises:
        InputError: It is one of the two.
    """
    if is_image and takes_text:
        raise InputError(f"{printable(model)} takes texts: ask it with a text, not with an image")
    if not is_image and not takes_text:
        raise InputError(
            f"{printable(model)} takes images: ask it with the file of an image, such as photo.jpg"
        )


def _as_text(model: str, question: str | bytes) -> str:
    """Return a question to a decoder.

    Raises:
        InputError: It is an image.
    """
    if isinstance(question, bytes):
        raise InputError(f"{printable(model)} generates text: ask it with a text, not with an image")
    return question


def _ask_for_text(
    place: tuple[str, int], key: Membership, request: AskRequest, served: str, question: str
) -> Any:
    """Ask a decoder: a conversation if it knows them, else the beginning of a text."""
    options: dict[str, Any] = {"model": "", "stream": not request.json}
    if request.max_tokens is not None:
        options["max_tokens"] = request.max_tokens
    chat = {"messages": [{"role": "user", "content": question}], **options}
    plain = {"prompt": question, **options}
    for path, document in (("/v1/chat/completions", chat), ("/v1/completions", plain)):
        body = json.dumps(document).encode()
        with call(place, key) as talk:
            ask = Ask(served, path, "application/json", len(body))  # type: ignore[arg-type]
            status, parts = _asked(talk, ask, body)
            if status == 200 and not request.json:
                for piece in streamed_pieces(parts, served):
                    print_result(piece, end="")
                print_result("")
                return _STREAMED
            reply = json.loads(b"".join(parts))
        if status == 200:
            return reply
        error = _unanswered(served, reply)
        if "no chat template" not in str(error):
            break
    raise error


def streamed_pieces(parts: Iterable[bytes], served: str) -> Iterator[str]:
    """Yield the pieces of an answer, from the events of a stream.

    Args:
        parts: Parts of the stream, as they come.
        served: Name of the model.

    Raises:
        InputError: The service could not go on.
        PeerFailedError: The stream ends early.
    """
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b": ")
            if name != b"data":
                continue
            if value.strip() == b"[DONE]":
                return
            event = json.loads(value)
            if "error" in event:
                raise _unanswered(served, event)
            for choice in event.get("choices", ()):
                yield choice.get("text") or choice.get("delta", {}).get("content") or ""
    raise PeerFailedError(f"{served} has ended in the middle of its answer: ask again")


def _same_model(wanted: str, served: str) -> bool:
    return bool(served) and (wanted == served or str(Path(wanted).resolve()) == served)


def ask_alone(model: str, question: str | bytes) -> Any:
    """Return the answer of a run of its own, in this process, as the service would say it."""
    from pipeedge import Pipeline

    _check_kind(model, is_image=isinstance(question, bytes), takes_text=find_any(model).takes_text)
    with Pipeline(model) as pipeline:
        answer = pipeline(question)
        if answer.kind == "logits":
            return [{"label": one.label or str(one.number), "score": one.score} for one in answer.top(5)]
        return answer.outputs.tolist()
