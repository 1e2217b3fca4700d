"""A process that may open no more files says how to raise the limit."""

from __future__ import annotations

import errno
import socket

import pytest
from hub_play import Play

from pipeedge.base.errors import (
    EXIT_FAULT,
    EXIT_REQUEST,
    PipeEdgeError,
    RequestError,
    exit_code,
    has_too_many_files,
    one_line,
)
from pipeedge.base.guard import guard
from pipeedge.control.hub import Hub

REMEDY = "raise the limit of open files, for example with: ulimit -n 1024"


def caused(by: BaseException, line: str) -> PipeEdgeError:
    """Return an error with one line that another one has led to."""
    try:
        raise RequestError(line) from by
    except RequestError as error:
        return error


def exhausted() -> OSError:
    return OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (exhausted(), f"too many open files: {REMEDY}"),
        (RuntimeError("rv != -1. -1 vs -1. pipe: Too many open files"), f"too many open files: {REMEDY}"),
        (
            caused(exhausted(), "x.npz cannot be read: Too many open files"),
            f"x.npz cannot be read: Too many open files: {REMEDY}",
        ),
        (caused(caused(exhausted(), "the file"), "the model"), f"the model: {REMEDY}"),
        (caused(exhausted(), f"no; {REMEDY}"), f"no; {REMEDY}"),
    ],
)
def test_line_names_the_limit(error: BaseException, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    assert one_line(error) == line
    assert guard("runtime.py", fail, verbose=False) == EXIT_REQUEST
    assert capsys.readouterr().err == f"runtime.py: {line}\n"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no"), RuntimeError("no"), PipeEdgeError("no")])
def test_other_errors_do_not(error: Exception) -> None:
    assert not has_too_many_files(error)
    assert exit_code(error) == EXIT_FAULT
    assert REMEDY not in one_line(error)


def test_rank_that_could_not_be_let_in_is_explained() -> None:
    play = Play(timeout=10).hello(0)
    play._note(play.state.shut_out(play.now))
    (notice,) = play.heard(0, "notice")
    assert notice.line == (
        f"a process at an unknown address was not let in, as rank 0 has too many open files: {REMEDY}; "
        "ranks still missing: 1"
    )


class Exhausted(socket.socket):
    """A listening socket of a process that may open no more files for a while."""

    refusals = 3

    def accept(self) -> tuple[socket.socket, object]:
        if self.refusals:
            self.refusals -= 1
            raise exhausted()
        return super().accept()


def test_hub_listens_again_after_a_pause() -> None:
    with Exhausted(socket.AF_INET) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        with Hub(listener, world_size=2, timeout_s=2.0) as hub, socket.create_connection(address) as caller:
            caller.settimeout(30)
            caller.sendall(b"\xff" * 8)  # no message of this program, so the hub closes the connection
            assert caller.recv(1) == b""
            assert listener.refusals == 0
            hub.refuse("enough", 2)
