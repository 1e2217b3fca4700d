"""A command like ``python`` for programs of this project, whose processes are forked with torch imported.

Shells, launchers and torchrun start what they start by a command. The command here is a script that runs a
small client. It hands its words, directory, environment and standard streams to a server, which has imported
torch and forks a process for them; then it passes signals on, and ends as that process does. What it cannot
fork (``-c``, an option it does not know) runs in the real interpreter.

    shell ── python runtime.py ... ──> client ══ words, environment, streams ══> server ── fork ──> program
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from processes import environment, fork_server
from waiting import LIMIT_S

from pipeedge.request.environment import LAUNCHER

_CLIENT = """
import json, os, signal, socket, struct, sys
directory = os.getcwd()
os.chdir(sys.argv[1])  # as the path of a socket, that of a directory may be too long
server = socket.socket(socket.AF_UNIX)
server.connect("socket")
os.chdir(directory)
request = {"words": sys.argv[2:], "directory": directory, "environment": dict(os.environ)}
request = json.dumps(request).encode()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
socket.send_fds(server, [struct.pack("<I", len(request))], [0, 1, 2])
server.sendall(request)
(status,) = struct.unpack("<i", server.recv(4, socket.MSG_WAITALL))
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextlib.contextmanager
def command_in(directory: Path) -> Iterator[Path]:
    """Start a server, and yield the path of the command, which ``directory`` holds."""
    command, client, address = directory / "python", directory / "client.py", directory / "socket"
    client.write_text(_CLIENT)
    real = f'exec "{sys.executable}"'
    command.write_text(
        f"""#!/bin/sh
case "$1" in
-u) case "$2" in -m|*.py) ;; *) {real} "$@" ;; esac ;;
-m|*.py) ;;
*) {real} "$@" ;;
esac
{real} -I -S "{client}" "{directory}" "$@"
"""
    )
    command.chmod(0o755)
    server = fork_server().Process(target=_serve, args=(directory, command), daemon=True)
    listening = threading.Event()
    server.start()
    try:
        while not address.exists() and not listening.wait(0.02):
            assert server.is_alive(), "the server has ended"
        yield command
    finally:
        server.kill()
        server.join()


def run_text(text: str, directory: Path, python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program given as text, with the command ``python`` and ``words`` on its command line."""
    (directory / "program.py").write_text(text)
    command = [python, "program.py", *words]
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def _serve(directory: Path, command: Path) -> None:
    """Fork a process for each client, until killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(directory)
        listener.bind("socket.new")
        listener.listen(64)
        Path("socket.new").rename("socket")
        while True:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _attend(client, command)
            client.close()


def _attend(client: socket.socket, command: Path) -> None:
    """Run a client's program in a process of its own, and report its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(client, 4, 3)
    request = client.recv(*struct.unpack("<I", size), socket.MSG_WAITALL)
    program = os.fork()
    if program == 0:
        client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os._exit(_status(lambda: _become(json.loads(request), command)))

    def pass_signals_on() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            while number := client.recv(1):
                os.kill(program, number[0])
            os.kill(program, signal.SIGKILL)  # the client is gone

    threading.Thread(target=pass_signals_on, daemon=True).start()
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(OSError):
        client.sendall(struct.pack("<i", os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(request: dict[str, Any], command: Path) -> None:
    os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update({**environment(), **request["environment"]})
    if LAUNCHER in os.environ:  # it ends with its parent
        os.environ[LAUNCHER] = str(os.getppid())
    sys.executable = str(command)
    sys.stdin = open(0, closefd=False)  # a process of multiprocessing has none  # noqa: SIM115
    words: list[str] = request["words"]
    if words[0] == "-u":
        words = words[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, request["directory"])
        sys.modules.pop(words[1], None)  # else runpy warns that it is there already
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _status(run: Callable[[], None]) -> int:
    """Run a program as an interpreter does, and return its exit status."""
    try:
        run()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
    return 0
