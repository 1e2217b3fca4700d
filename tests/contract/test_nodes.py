"""Nodes in this process, on the loopback: who is heard, what they do, and what they refuse.

No process may be started here (``support/tiers.py``), so a request that a node refuses has started nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from boxes import AUTHORITY, CLUSTER, Box, boxes, joined
from PIL import Image
from places import ASSETS
from profiles import write_results
from waiting import LIMIT_S, until

from pipeedge.base.errors import DeadlineError, InputError, PeerFailedError, RequestError
from pipeedge.base.fields import encode
from pipeedge.control.messages import Message
from pipeedge.nodes.commands import ask_alone, opens_page, read_question
from pipeedge.nodes.identity import own_membership
from pipeedge.nodes.messages import (
    About,
    Ask,
    Blob,
    ClusterState,
    Down,
    Get,
    Granted,
    Here,
    Hold,
    ModelPlace,
    Profile,
    Profiled,
    Refine,
    Remove,
    Serving,
    StartRank,
    StateOf,
    Up,
)
from pipeedge.nodes.node import profile_key
from pipeedge.nodes.options import parse_up
from pipeedge.nodes.pairing import TRIES, host_one, join_at, new_code
from pipeedge.nodes.peer import ask_about, call, follow, have_hold, measure_link
from pipeedge.nodes.programs import located, rank_words
from pipeedge.nodes.shown import answer_lines
from pipeedge.nodes.store import NodeStore
from pipeedge.nodes.talk import NodeRefusedError
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.transport.authority import Authority, make_cluster_key, make_node_key, name_in
from pipeedge.transport.dialling import NotAMemberError
from pipeedge.transport.membership import Membership


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Box]]:
    with boxes(tmp_path) as made:
        yield made


def start_rank(**changed: Any) -> StartRank:
    values: dict[str, Any] = {
        "run": "m on pi1",
        "rank": 1,
        "world": 2,
        "model": ModelPlace("vit-digits"),
        "batch_size": 8,
        "addr": "127.0.0.1",
        "port": 29500,
        "serve": 8000,
        "key": "the key of the run",
        "timeout_s": 30.0,
    }
    return StartRank(**{**values, **changed})


# -- members --------------------------------------------------------------------------------------------


def test_nodes_tell_what_they_are_and_find_each_other(make: Callable[[str], Box]) -> None:
    pi1, pi2 = make("pi1"), make("pi2")
    peer, own_end = ask_about(pi2.address, pi1.membership)
    assert (peer.name, own_end) == ("pi2", "127.0.0.1")
    assert peer.here.cores > 0
    assert [peer.name for peer, _ in pi1.node.look()] == ["pi2"]
    with call(pi1.address, CLUSTER) as talk:
        document = talk.ask(StateOf(), ClusterState).document
    assert [(node["name"], node["here"]) for node in document["nodes"]] == [("pi1", True), ("pi2", True)]
    assert document["run"] is None


def test_a_node_that_has_gone_is_known_and_not_here(make: Callable[[str], Box]) -> None:
    pi1, pi2 = make("pi1"), make("pi2")
    pi1.node.look()
    pi2.node.close()
    with call(pi1.address, CLUSTER) as talk:
        document = talk.ask(StateOf(), ClusterState).document
    assert {node["name"]: node["here"] for node in document["nodes"]} == {"pi1": True, "pi2": False}


def test_a_link_is_measured(make: Callable[[str], Box]) -> None:
    pi1, pi2 = make("pi1"), make("pi2")
    peer, _ = ask_about(pi2.address, pi1.membership)
    link = measure_link(peer, pi1.membership)
    assert link.bw_bytes_per_s > 0
    assert link.latency_s > 0


def test_the_files_of_a_model_travel_by_digest(make: Callable[[str], Box], tmp_path: Path) -> None:
    pi1, pi2 = make("pi1"), make("pi2")
    directory = tmp_path / "my-model"
    directory.mkdir()
    for file in (ASSETS / "vit-digits").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "secret.key").write_text("not a file of the model")
    offered = pi1.store.offer(str(directory), print)
    peer, _ = ask_about(pi2.address, pi1.membership)
    news = []
    request = Hold(offered.place, list(offered.files), pi1.node.port)
    have_hold(peer, pi1.membership, request, news.append)
    (name, there) = located(offered.place, pi2.store.models)
    assert name == "--model"
    assert Path(there).name == "my-model"
    assert {file.name for file in Path(there).iterdir()} == {file.name for file in offered.files}
    assert "secret.key" not in {file.name for file in offered.files}
    assert (Path(there) / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert news[-1].done == news[-1].total > 0
    news.clear()
    have_hold(peer, pi1.membership, request, news.append)
    assert not news  # all is there


def test_only_files_of_offered_models_are_given(make: Callable[[str], Box]) -> None:
    pi1 = make("pi1")
    with call(pi1.address, joined("pi2")) as talk, pytest.raises(NodeRefusedError, match="no such file"):
        talk.ask(Get("0" * 64, 0), Blob)


def test_a_file_that_is_not_what_was_announced_is_not_kept(
    make: Callable[[str], Box], tmp_path: Path
) -> None:
    pi1 = make("pi1")
    offered = pi1.store.offer("vit-digits", print)
    assert offered.files == ()
    place = ModelPlace("m", "1" * 64)
    with (
        call(pi1.address, joined("pi2")) as talk,
        pytest.raises(NodeRefusedError, match="not those of its digest"),
    ):
        talk.ask(Hold(place, [], 1), Granted)


# -- profiles -------------------------------------------------------------------------------------------


def test_a_node_keeps_how_slow_runs_have_found_it_with_its_profile(make: Callable[[str], Box]) -> None:
    pi1 = make("pi1")
    profile = Profile(ModelPlace("vit-digits"), 8, "float32")
    with call(pi1.address, joined("pi2")) as talk, pytest.raises(NodeRefusedError, match="has no profile of"):
        talk.ask(Refine(profile, 1.5), Granted)
    key = profile_key(profile, pi1.node.facts(), os.environ.get("OMP_NUM_THREADS", ""))
    write_results(pi1.store.profile(key))
    for slowness in (1.5, 0.8):
        with call(pi1.address, joined("pi2")) as talk:
            talk.ask(Refine(profile, slowness), Granted)
        with call(pi1.address, joined("pi2")) as talk:
            assert follow(talk, profile, Profiled, lambda news: None).slowness == slowness


# -- strangers ------------------------------------------------------------------------------------------


def test_strangers_are_refused_in_one_line_each(make: Callable[[str], Box]) -> None:
    pi1 = make("pi1")
    other = Membership.from_text(make_cluster_key(), "another cluster")
    with pytest.raises(NotAMemberError, match="has another key"), call(pi1.address, other) as talk:
        talk.ask(About(), Here, LIMIT_S)
    with socket.create_connection(pi1.address, LIMIT_S) as web:
        web.sendall(b"GET / HTTP/1.1\r\nHost: pi1\r\n\r\n")
        web.settimeout(LIMIT_S)
        web.recv(100)
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(pi1.address, LIMIT_S) as sock,
        anonymous.wrap_socket(sock) as tls,
        pytest.raises(ssl.SSLError, match="CERTIFICATE"),
    ):
        tls.recv(1)
    until(lambda: len(pi1.lines) >= 3, "a line for each stranger")
    assert pi1.said("refused 127.0.0.1: it has another key")
    assert pi1.said("refused 127.0.0.1: it has no key")
    assert len(pi1.lines) == 3
    assert ask_about(pi1.address, joined("pi2"))[0].name == "pi1"


def test_a_removed_node_is_refused_by_all_that_hear_of_it(make: Callable[[str], Box]) -> None:
    pi1, pi2 = make("pi1"), make("pi2")
    gone = joined("pi3")
    assert ask_about(pi1.address, gone)[0].name == "pi1"
    removals = AUTHORITY.remove([name_in(gone.certificate)[1]])
    with call(pi1.address, CLUSTER) as talk:
        talk.ask(Remove(removals.text), Granted)
    pi1.node.look()  # hands the list on
    for box in (pi1, pi2):
        with pytest.raises(NotAMemberError, match="has removed this node"), call(box.address, gone) as talk:
            talk.ask(About(), Here, LIMIT_S)
        until(lambda box=box: box.said("was removed from the cluster"), "the refusal")  # type: ignore[misc]
    assert pi2.store.removed() == removals.text
    assert ask_about(pi2.address, joined("pi4"))[0].name == "pi2"


def test_a_member_cannot_remove_others(make: Callable[[str], Box]) -> None:
    pi1 = make("pi1")
    other = Authority.of(Membership.from_text(make_cluster_key(), "another cluster"))
    assert other is not None
    with call(pi1.address, joined("pi2")) as talk, pytest.raises(NodeRefusedError, match="not signed"):
        talk.ask(Remove(other.remove([1]).text), Granted)


# -- requests that are not in the fixed set -------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        {"kind": "execute", "argv": ["rm", "-rf", "/"]},
        {"kind": "startrank"},
        {**msgspec.to_builtins(start_rank()), "model": {"name": "--help"}},
        {**msgspec.to_builtins(start_rank()), "model": {"name": "../../etc"}},
        {**msgspec.to_builtins(start_rank()), "model": {"name": "m", "digest": "../" * 21 + "x"}},
        {
            **msgspec.to_builtins(start_rank()),
            "model": {"name": "m", "digest": "0" * 64, "weights": "/etc/x"},
        },
        {**msgspec.to_builtins(start_rank()), "addr": "--output=/etc/passwd"},
        {**msgspec.to_builtins(start_rank()), "rank": 0},
        {**msgspec.to_builtins(start_rank()), "batch_size": "8 --output x"},
        {"kind": "profile", "model": {"name": "m"}, "batch_size": 8, "dtype": "float32 -o x"},
        {
            "kind": "refine",
            "profile": {"model": {"name": "m"}, "batch_size": 8, "dtype": "int8"},
            "slowness": 1e9,
        },
        {"kind": "up", "model": "vit-digits", "objective": "--trace"},
        {"kind": "ask", "model": "", "path": "/metrics", "content_type": "application/json", "size": 1},
        {
            "kind": "hold",
            "model": {"name": "m", "digest": "0" * 64},
            "files": [{"name": "../x", "size": 1, "sha256": "0" * 64}],
            "port": 1,
        },
        {"kind": "findmodel", "name": "../../etc"},
        {"kind": "getranges", "sha256": "0" * 64, "ranges": [[-1, 5]]},
    ],
    ids=range(16),
)
def test_what_is_not_in_the_fixed_set_is_refused_and_runs_nothing(
    make: Callable[[str], Box], request_: dict[str, Any]
) -> None:
    pi1 = make("pi1")

    class Raw(Message):
        pass

    with call(pi1.address, joined("pi2")) as talk:
        text = encode(request_)
        talk._stream.sendall(len(text).to_bytes(4, "big") + text)
        with pytest.raises(NodeRefusedError, match="does not know"):
            talk.receive(LIMIT_S)
    until(lambda: pi1.said("refused pi2 (127.0.0.1)"), "the line")
    assert len(pi1.lines) == 1


def test_every_rank_that_can_be_asked_for_is_a_rank_of_a_run() -> None:
    """The words of the fixed set are a request that the runtime takes, with the values of the message."""
    words = rank_words(start_rank(rank=3, world=5, batch_size=2), 3, ("--model", "vit-digits"))
    command = parse_runtime(
        ["--key=k" if word == "-" else word for word in words[1:] if word != "--key"], Environment()
    )
    request = command.request
    assert words[0] == "run"
    assert (request.world.rank, request.world.size, request.microbatch_size) == (3, 5, 2)
    assert request.transport.goes_on


def test_an_unknown_model_is_refused_and_nothing_is_served(
    make: Callable[[str], Box], tmp_path: Path
) -> None:
    with (
        call(make("pi1").address, CLUSTER) as talk,
        pytest.raises(PeerFailedError, match="neither a known model"),
    ):
        follow(talk, Up(str(tmp_path / "none")), Serving, print)


def test_a_service_that_is_not_there_is_said_in_one_line(make: Callable[[str], Box]) -> None:
    pi1 = make("pi1")
    with call(pi1.address, CLUSTER) as talk, pytest.raises(NodeRefusedError, match="serves nothing"):
        talk.ask(Down(), Granted)
    with call(pi1.address, CLUSTER) as talk:
        talk.send(Ask("", "/", "application/json", 2))
        talk.send_bytes([b"{}"])
        with pytest.raises(NodeRefusedError, match="'pipeedge up MODEL'"):
            talk.receive(LIMIT_S)


def test_a_second_run_is_refused_with_the_name_of_the_first(make: Callable[[str], Box]) -> None:
    pi1 = make("pi1")
    with (
        pi1.node._slot.taken("bert on pi7", "pi7"),
        call(pi1.address, joined("pi2")) as talk,
        pytest.raises(NodeRefusedError, match="works for bert on pi7 already, as pi7 has asked"),
    ):
        talk.ask(Profile(ModelPlace("vit-digits"), 8, "float32"), Granted)
    assert len(pi1.lines) == 1


# -- joining --------------------------------------------------------------------------------------------


class Inviting:
    """A holder of a code, in a thread."""

    def __init__(self, within_s: float = LIMIT_S) -> None:
        self.code = new_code()
        self.lines: list[str] = []
        self.joined: list[str] = []
        self.failure: Exception | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", int(self._listener.getsockname()[1]))
        self._thread = threading.Thread(target=self._run, args=(within_s,))
        self._thread.start()

    def _run(self, within_s: float) -> None:
        with self._listener:
            try:
                self.joined.append(
                    host_one(self._listener, self.code, AUTHORITY, self.lines.append, within_s=within_s)
                )
            except (DeadlineError, PeerFailedError) as error:
                self.failure = error

    def end(self) -> None:
        self._thread.join(LIMIT_S)


def test_a_machine_joins_once_with_a_code_and_is_a_member(make: Callable[[str], Box]) -> None:
    pi1, inviting = make("pi1"), Inviting()
    member = join_at(inviting.address, inviting.code, "pi5", make_node_key())
    inviting.end()
    assert inviting.joined == ["pi5"]
    assert ask_about(pi1.address, member)[0].name == "pi1"
    with pytest.raises(PeerFailedError, match="no cluster to join"):  # the code is used up
        join_at(inviting.address, inviting.code, "pi6", make_node_key())


def test_three_wrong_codes_void_a_code() -> None:
    inviting = Inviting()
    for _ in range(TRIES):
        with pytest.raises(PeerFailedError, match="has another code"):
            join_at(inviting.address, new_code(), "pi5", make_node_key())
    inviting.end()
    assert "is void" in str(inviting.failure)
    assert [line.partition(" (")[0] for line in inviting.lines] == ["127.0.0.1: wrong code"] * TRIES
    with pytest.raises(PeerFailedError, match="no cluster to join"):
        join_at(inviting.address, inviting.code, "pi5", make_node_key())


def test_other_programs_use_up_no_try(make: Callable[[str], Box]) -> None:
    inviting = Inviting()
    for _ in range(TRIES + 1):
        with socket.create_connection(inviting.address, LIMIT_S) as web:
            web.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                web.recv(1)
    join_at(inviting.address, inviting.code, "pi5", make_node_key())
    inviting.end()
    assert inviting.joined == ["pi5"]


def test_a_code_that_nobody_uses_is_void_after_its_time() -> None:
    inviting = Inviting(within_s=0.05)
    inviting.end()
    assert isinstance(inviting.failure, DeadlineError)


# -- keys -----------------------------------------------------------------------------------------------


def test_a_node_keeps_its_key_and_its_file_wins_over_a_name(tmp_path: Path) -> None:
    store = NodeStore(tmp_path / "a")
    first = own_membership(CLUSTER, store, "pi1")
    assert own_membership(CLUSTER, store, "pi1").certificate == first.certificate
    assert store.own_key.stat().st_mode & 0o077 == 0
    assert own_membership(CLUSTER, store, "pi2").certificate != first.certificate
    with pytest.raises(RequestError, match="is the key of pi5"):
        own_membership(joined("pi5"), store, "pi6")


def test_a_question_without_a_service_is_answered_by_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = Image.new("L", (8, 8))
    picture.paste(255, (3, 1, 5, 7))
    picture.save(tmp_path / "digit.png")
    question = read_question(str(tmp_path / "digit.png"))
    assert isinstance(question, bytes)
    lines = list(answer_lines(ask_alone("vit-digits", question)))
    assert len(lines) == 5
    assert lines[0].startswith("1  ")
    assert read_question("a text") == "a text"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(question)))
    assert read_question("-") == question
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é\n".encode())))
    assert read_question("-") == "é"
    with pytest.raises(InputError, match=r"^vit-digits takes images: ask it with the file of an image"):
        ask_alone("vit-digits", "a text")


@pytest.mark.parametrize(
    ("words", "variables", "is_terminal", "opens"),
    [
        ([], {"DISPLAY": ":0"}, True, True),
        ([], {"WAYLAND_DISPLAY": "wayland-0"}, True, True),
        ([], {"DISPLAY": ""}, True, False),
        ([], {}, True, False),
        ([], {"DISPLAY": ":0"}, False, False),
        (["--node", "localhost:29700"], {"DISPLAY": ":0"}, True, True),
        (["--node", "pi1"], {"DISPLAY": ":0"}, True, False),
        (["--open", "no"], {"DISPLAY": ":0"}, True, False),
        (["--open", "yes"], {}, False, True),
    ],
)
def test_the_page_opens_where_a_person_sits_at_a_screen(
    words: list[str],
    variables: dict[str, str],
    is_terminal: bool,
    opens: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    request = parse_up(["vit-digits", *words], Environment())
    assert opens_page(request, variables, is_terminal=is_terminal) is opens
