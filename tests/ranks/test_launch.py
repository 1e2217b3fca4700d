"""Test pipeedge-launch: commands, supervision of small programs, ssh by a stand-in and for real."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from ports import free_port
from waiting import LIMIT_S, until

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.base.interrupt import INTERRUPTED
from pipeedge.launch.commands import (
    Host,
    RankCommand,
    Remote,
    remote_commands,
)
from pipeedge.launch.supervisor import ExitLimits, Output, Supervisor
from pipeedge.request.environment import BEGINS

TIMEOUT = ("--timeout", "20")
"""Timeout of the ranks in seconds: a rank that is stuck must report it before the test gives up."""


@contextmanager
def ended_after(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    """Kill ``process`` on exit if it still runs."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- commands ---------------------------------------------------------------------------------------


@given(
    arguments=st.lists(
        st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12), max_size=3
    ),
    directory=st.text(st.sampled_from("ab '\"$`\\;&|*~"), min_size=1, max_size=8).filter(
        lambda text: text.strip("~ ") != ""
    ),
)
@settings(max_examples=25)
def test_both_shells_preserve_arguments(
    tmp_path_factory: pytest.TempPathFactory, arguments: list[str], directory: str
) -> None:
    place = tmp_path_factory.mktemp("there") / directory
    place.mkdir(parents=True)
    shower = "import os, sys; print(repr([os.getcwd(), *sys.argv[1:]]))"
    (place / "shower.py").write_text(shower)
    (command,) = remote_commands(
        [Host("a")],
        arguments,
        Remote(str(place), sys.executable),
        module="shower",
        name_addr=False,
        name_hosts=False,
    )
    done = subprocess.Popen(
        ["bash", "-c", command.argv[-1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    # Its input stays open, as ssh's does: where that ends, the command is ended.
    with done, ended_after(done, 20):
        assert done.stdout is not None
        shown = done.stdout.read()
        assert done.wait(timeout=LIMIT_S) == 0
    assert shown == repr([str(place), "0", "1", *arguments]) + "\n"


KEY_READER = """
import contextlib, pathlib, sys
key, seen = sys.stdin.read(), []
for process in pathlib.Path("/proc").glob("[0-9]*"):
    for path in (process / "cmdline", process / "environ"):
        with contextlib.suppress(OSError):  # it has ended
            seen += [str(path)] if b"S0ME+BASE/64=" in path.read_bytes() else []
print(repr((key, sys.argv[1:], seen)))
"""


@pytest.mark.parametrize("shell", [("bash", "-c"), ("sh", "-c"), ("busybox", "sh", "-c")], ids=" ".join)
def test_a_key_reaches_standard_input_and_is_seen_nowhere_else(
    shell: tuple[str, ...], tmp_path: Path
) -> None:
    if shutil.which(shell[0]) is None:
        pytest.skip(f"there is no {shell[0]}")
    (tmp_path / "reader.py").write_text(KEY_READER)
    key = "-----BEGIN PRIVATE KEY-----\nS0ME+BASE/64=\n-----END PRIVATE KEY-----\n"
    (command,) = remote_commands(
        [Host("a")],
        ["-u", "4"],
        Remote(str(tmp_path), sys.executable),
        module="reader",
        name_addr=False,
        name_hosts=False,
        key=key,
    )
    assert "S0ME" not in command.shown() + repr(command)
    remote_end = dataclasses.replace(command, argv=(*shell, command.argv[-1]))
    lines: list[str] = []

    def keep(text: str, *, error: bool) -> None:
        lines.append(text)

    supervisor = Supervisor([remote_end], environment(), Output(keep, print))
    assert supervisor.run() == 0
    assert "".join(lines) == f"[0] {(key, ['0', '1', '--key', '-', '-u', '4'], [])!r}\n"


# --- the command line -------------------------------------------------------------------------------


def test_print_shows_commands_that_a_shell_can_run() -> None:
    done = launch("--local", "2", "--print", "--", "-m", "vit-digits", "--input", "a b.png")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    options = ["-m", "vit-digits", "--input", "a b.png"]
    assert [shlex.split(line)[-4:] for line in lines] == [options, options]
    ports = {shlex.split(line)[shlex.split(line).index("--port") + 1] for line in lines}
    assert len(ports) == 1


def test_control_characters_in_a_shown_command_are_escaped() -> None:
    word = "a\x1b[2J'b\\é c"
    shown = RankCommand(0, ("printf", "%s", word)).shown()
    assert shown.isprintable()
    printed = subprocess.run(
        ["bash", "-c", shown], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert printed.stdout == word


# --- the supervisor ---------------------------------------------------------------------------------


def python(rank: int, program: str, *, remote: bool = False) -> RankCommand:
    return RankCommand(rank, (sys.executable, "-u", "-c", program), remote=remote)


class RecordedOutput:
    def __init__(self) -> None:
        self.lines: list[tuple[str, bool]] = []
        self.said: list[str] = []

    def __call__(self, text: str, *, error: bool) -> None:
        self.lines.append((text, error))

    def supervise(
        self,
        *commands: RankCommand,
        program: str | None = None,
        result_rank: int | None = None,
        **limits: float,
    ) -> int:
        output = Output(self, self.said.append, program=program, result_rank=result_rank)
        return Supervisor(commands, dict(os.environ), output, ExitLimits(**limits)).run()

    def supervise_going_on(self, commands: Sequence[RankCommand], **limits: float) -> int:
        """Supervise a run that needs only rank 0, once that says ``begins``."""
        output, needed = Output(self, self.said.append), frozenset({0})
        limit = ExitLimits(**limits)
        return Supervisor(commands, dict(os.environ), output, limit, needed, begins=": begins").run()


def test_a_run_that_goes_on_ends_with_the_ranks_that_it_needs(tmp_path: Path) -> None:
    """Rank 1 fails at once, rank 2 would run for ever, and rank 0 does not mind."""
    output = RecordedOutput()
    noticed = tmp_path / "noticed"
    waiting = f"import os, time\nwhile not os.path.exists({str(noticed)!r}): time.sleep(0.02)\nprint('done')"

    def say(line: str) -> None:
        output.said.append(line)
        noticed.touch()

    commands = [
        python(0, waiting),
        python(1, "raise SystemExit(4)"),
        python(2, "import time; time.sleep(600)"),
    ]
    supervised = Supervisor(
        commands,
        dict(os.environ),
        Output(output, say),
        ExitLimits(settle_s=0.1),
        needed=frozenset({0}),
    )
    assert supervised.run() == 0
    assert output.said == ["rank 1 exited with status 4"]
    assert output.lines == [("[0] done\n", False)]


@pytest.mark.parametrize(("code", "remote", "status"), [(1, False, 1), (255, True, 4)])
def test_a_run_that_goes_on_ends_if_a_rank_fails_before_it_begins(
    code: int, remote: bool, status: int
) -> None:
    output = RecordedOutput()
    commands = [
        python(0, "import time; time.sleep(600)"),
        python(1, f"raise SystemExit({code})", remote=remote),
    ]
    assert output.supervise_going_on(commands, settle_s=0.1) == status
    (line,) = output.said
    assert line.startswith("rank 1 ")


def test_word_that_the_run_begins_excuses_ranks_that_failed_before(tmp_path: Path) -> None:
    """Rank 1 may end before or after the launcher hears of the beginning, but not before rank 0 knows."""
    output, up = RecordedOutput(), tmp_path / "up"
    begin = "import pathlib, sys, time; print('rank 0: begins', file=sys.stderr)"
    gone = "while pathlib.Path('/proc', pid).exists(): time.sleep(0.01)"
    wait = f"while not pathlib.Path({str(up)!r}).exists(): time.sleep(0.01)"
    commands = [
        python(0, f"import pathlib, time\n{wait}\npid = open({str(up)!r}).read()\n{gone}\n{begin}"),
        python(
            1,
            f"import os\nopen('{up}.new', 'w').write(str(os.getpid()))\nos.rename('{up}.new', {str(up)!r})\n"
            "raise SystemExit(4)",
        ),
    ]
    assert output.supervise_going_on(commands, settle_s=30) == 0
    assert output.said == ["rank 1 exited with status 4"]
    assert output.lines == []


def test_output_is_forwarded_by_rank_and_stream() -> None:
    output = RecordedOutput()
    program = "import sys; print('out', {0}); print('err', {0}, file=sys.stderr); print('no end', end='')"
    assert output.supervise(*(python(rank, program.format(rank)) for rank in range(2))) == 0
    assert sorted(output.lines) == sorted(
        entry
        for rank in range(2)
        for entry in (
            (f"[{rank}] out {rank}\n", False),
            (f"[{rank}] err {rank}\n", True),
            (f"[{rank}] no end\n", False),
        )
    )
    assert output.said == []


def test_results_that_a_rank_prints_have_no_prefix(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    output = RecordedOutput()
    program = "import sys; print('{{}}', {0}); print('err', {0}, file=sys.stderr)"
    assert output.supervise(*(python(rank, program.format(rank)) for rank in range(2)), result_rank=1) == 0
    assert capfdbinary.readouterr().out == b"{} 1\n"
    assert sorted(output.lines) == [("[0] err 0\n", True), ("[0] {} 0\n", False), ("[1] err 1\n", True)]


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (BrokenPipeError(32, "Broken pipe"), nullcontext(INTERRUPTED)),
        (OSError(28, "No space"), pytest.raises(PipeEdgeError, match="cannot be written: no space")),
    ],
)
def test_results_that_cannot_be_printed_stop_the_ranks(
    error: OSError, ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(io.BytesIO):
        def write(self, data: object) -> int:
            raise error

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Lost()))
    ranks = [python(0, "import time; print('row', flush=True); time.sleep(60)")]
    with ends as status:
        assert RecordedOutput().supervise(*ranks, result_rank=0, grace_s=5) == status


def test_a_message_that_several_ranks_print_is_shown_once() -> None:
    output = RecordedOutput()
    words = ("prog: wrong", "prog: rank {0}", "other", "prog: wrong")
    program = "; ".join(["import sys", *(f"print({word!r}, file=sys.stderr)" for word in words)])
    assert output.supervise(*(python(rank, program.format(rank)) for rank in range(3)), program="prog") == 0
    shown = sorted(text.partition(" ")[2].rstrip() for text, _ in output.lines)
    # The rank that was first may say it again.
    assert shown == sorted(["prog: wrong"] * 2 + [f"prog: rank {rank}" for rank in range(3)] + ["other"] * 3)


def test_when_one_rank_fails_all_stop_with_its_status() -> None:
    output = RecordedOutput()
    status = output.supervise(
        python(0, "import time; print('waiting'); time.sleep(60)"),
        python(1, "import sys; sys.exit(3)"),
        settle_s=0.2,
        grace_s=5,
    )
    assert status == 3
    assert output.said == ["rank 1 exited with status 3"]


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    output = RecordedOutput()
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(60)"
    )
    status = output.supervise(
        python(0, stubborn),
        python(1, "import time; time.sleep(1); raise SystemExit(2)"),
        settle_s=0.1,
        grace_s=0.5,
    )
    assert status == 2


def test_other_ranks_have_time_to_report_before_they_are_stopped() -> None:
    output = RecordedOutput()
    output.supervise(
        python(0, "import time; time.sleep(0.7); print('rank 1 failed'); raise SystemExit(4)"),
        python(1, "raise SystemExit(2)"),
        settle_s=60,
    )
    assert ("[0] rank 1 failed\n", False) in output.lines


def test_a_program_that_cannot_start_stops_the_started_ones() -> None:
    output = RecordedOutput()
    with pytest.raises(RequestError, match="cannot start no-such-program"):
        output.supervise(python(0, "import time; time.sleep(60)"), RankCommand(1, ("no-such-program",)))


def test_all_ranks_stop_when_the_output_is_closed() -> None:
    def closed(text: str, *, error: bool) -> None:
        raise BrokenPipeError

    command = python(0, "import time; print('x'); time.sleep(60)")
    supervisor = Supervisor([command], dict(os.environ), Output(closed, print), ExitLimits(grace_s=3))
    assert supervisor.run() == 130


# --- for real ---------------------------------------------------------------------------------------


def environment(**changes: str) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **changes}


def launcher(*arguments: object, python: object = sys.executable) -> list[str]:
    return [str(python), "-m", "pipeedge.launch.main", *map(str, arguments)]


def launch(
    *arguments: object, python: object = sys.executable, **changes: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        launcher(*arguments, python=python),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment(**changes),
        cwd=ROOT,
    )


def test_two_local_ranks_run_the_shipped_model(quick_python: Path) -> None:
    done = launch("--local", 2, "--", "-m", "vit-digits", "-b", "360", *TIMEOUT, python=quick_python)
    assert done.returncode == 0, done.stderr
    assert "[0] accuracy    0.9889 (356/360)" in done.stdout


def test_an_invalid_partition_is_reported_once(quick_python: Path) -> None:
    done = launch("--local", 2, "--", "-m", "vit-digits", "-pt", "1,8", *TIMEOUT, python=quick_python)
    assert done.returncode == 2
    message, ending = done.stderr.splitlines()
    assert message[3:] == (
        " runtime.py: layers 9 to 16 are covered by no stage: the model's layers are 1 to 16"
    )
    assert ending.endswith("exited with status 2")


def test_the_root_cause_decides_and_no_process_is_left(tmp_path: Path, quick_python: Path) -> None:
    options = ("-m", "vit-digits", "-M", tmp_path / "none.npz")
    done = launch("--local", 2, "--", *options, python=quick_python)
    assert done.returncode == 2
    assert "none.npz" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def until_gone(pids: list[int]) -> None:
    until(lambda: not any(alive(pid) for pid in pids), "all processes have ended")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_ctrl_c_stops_all_ranks_quietly() -> None:
    process = subprocess.Popen(
        launcher("--local", 2, "--", "-m", "vit-digits", "-b", 10_000_000, "-u", 1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
    )
    try:
        until(lambda: len(children(process.pid)) == 2, "both ranks have started")
        ranks = children(process.pid)
        time.sleep(1.5)  # anywhere between the imports and the run
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert (out, err) == ("", "")
    until_gone(ranks)


@pytest.mark.parametrize("when", ["at once", "in the run"])
def test_ranks_end_with_a_launcher_that_is_killed(when: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    process = subprocess.Popen(
        launcher("--local", 2, "--", "-m", "vit-digits", "-b", 10_000_000, "-u", 1, "--output", rows),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
        cwd=ROOT,
    )
    try:
        until(lambda: len(children(process.pid)) == 2, "both ranks have started")
        ranks = children(process.pid)
        if when == "in the run":
            part = rows.with_suffix(".csv.part")
            until(lambda: part.exists() and part.stat().st_size > 0, "results come")
    finally:
        process.kill()
    process.wait()
    until_gone(ranks)


FAKE_SSH = """#!/bin/sh
# Runs the command here, as sshd would with the login shell there.
options=
while [ $# -gt 2 ]; do options="$options $1"; shift; done
echo "$options" >> "$FAKE_SSH_LOG"  # at once: another one may write beside it
[ "$1" = unequipped ] && { echo "python: No module named pipeedge" >&2; exit 1; }
[ "$1" = clumsy ] && { ${SHELL:-sh} -c "$2"; exit 3; }
exec ${SHELL:-sh} -c "$2"
"""


@pytest.fixture
def fake_ssh(tmp_path: Path) -> dict[str, str]:
    """Put an ssh on the PATH that runs commands on this machine."""
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "ssh").write_text(FAKE_SSH)
    (directory / "ssh").chmod(0o755)
    return {
        "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}",
        "FAKE_SSH_LOG": str(tmp_path / "log"),
        "SHELL": "/bin/bash",
    }


def test_hosts_over_a_stand_in_for_ssh(fake_ssh: dict[str, str], tmp_path: Path, quick_python: Path) -> None:
    """The second ssh fails after its rank, which does not matter once the run has begun."""
    done = launch(
        *("--hosts", "pi1,you@clumsy", "--user", "me"),
        *("--python", quick_python, "--directory", tmp_path, "--"),
        *("--addr", "127.0.0.1", "--port", free_port(), "-m", "vit-digits", "-b", 16, "--output", "out.csv"),
        *TIMEOUT,
        **fake_ssh,
    )
    assert done.returncode == 0, done.stderr
    assert "[0]" in done.stdout
    assert done.stderr.splitlines()[-1] == "pipeedge-launch: rank 1 exited with status 3"
    assert BEGINS not in done.stderr  # which the ranks say to the launcher alone
    assert "clumsy" in done.stdout  # -H names the hosts in the report
    assert (tmp_path / "out.csv").read_text().count("\n") == 17
    log = (tmp_path / "log").read_text().split()
    assert [log[index + 1] for index, word in enumerate(log) if word == "-l"] in (
        ["me", "you"],
        ["you", "me"],
    )
    assert log.count("BatchMode=yes") == 2


def test_a_rank_that_cannot_start_stops_all_ranks(fake_ssh: dict[str, str], quick_python: Path) -> None:
    done = launch(
        *("--hosts", "pi1,unequipped", "--python", quick_python, "--"),
        *("--addr", "127.0.0.1", "--port", free_port(), "-m", "vit-digits"),
        **fake_ssh,
    )
    assert done.returncode == 1
    assert "[1] python: No module named pipeedge" in done.stderr
    assert done.stderr.splitlines()[-1] == "pipeedge-launch: rank 1 exited with status 1"


def test_a_remote_rank_stops_when_its_connection_closes(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\nos.rename('pid', 'up')\ntime.sleep(60)\n"
    )
    (command,) = remote_commands(
        [Host("a")],
        [],
        Remote(str(tmp_path), sys.executable),
        module="sleeper",
        name_addr=False,
        name_hosts=False,
    )
    process = subprocess.Popen(["sh", "-c", command.argv[-1]], stdin=subprocess.PIPE)
    try:
        until((tmp_path / "up").exists, "the rank is up")
        sleeper = int((tmp_path / "up").read_text())
        assert alive(sleeper)
        process.communicate(timeout=LIMIT_S)  # closes its input, as the end of a connection does
    finally:
        process.kill()
    until_gone([sleeper])
    assert process.returncode == 128 + signal.SIGTERM


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[list[str]]:
    """Start a real sshd on the loopback interface and return the ssh command that reaches it."""
    server, keygen = shutil.which("sshd") or "/usr/sbin/sshd", shutil.which("ssh-keygen")
    if os.geteuid() != 0 or not Path(server).exists() or keygen is None or shutil.which("ssh") is None:
        pytest.skip("a real sshd needs root and OpenSSH")
    for key in ("host", "user"):
        subprocess.run(
            [keygen, "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / key], timeout=20, check=True
        )
    authorized = tmp_path / "authorized"
    shutil.copy(tmp_path / "user.pub", authorized)
    port = free_port()
    (tmp_path / "sshd.conf").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {tmp_path / 'host'}\nAuthorizedKeysFile {authorized}\n"
        f"PidFile {tmp_path / 'pid'}\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n"
        "PasswordAuthentication no\n"
    )
    (tmp_path / "ssh.conf").write_text(
        f"Host *\n HostName 127.0.0.1\n Port {port}\n User root\n IdentityFile {tmp_path / 'user'}\n"
        f" StrictHostKeyChecking no\n UserKnownHostsFile {tmp_path / 'known'}\n LogLevel ERROR\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([server, "-D", "-e", "-f", tmp_path / "sshd.conf"], stderr=subprocess.DEVNULL)
    try:
        command = ["ssh", "-F", str(tmp_path / "ssh.conf")]
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            tried = subprocess.run(
                [*command, "x", "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=LIMIT_S,
                check=False,
            )
            if tried.returncode == 0:
                break
            time.sleep(0.1)
        else:
            pytest.skip(f"sshd does not serve here: {tried.stderr.decode().strip()[:100]}")
        yield command
    finally:
        process.terminate()
        process.wait(timeout=LIMIT_S)


def test_over_a_real_sshd(sshd: list[str], quick_python: Path) -> None:
    done = launch(
        *("--hosts", "h1,h2", "--ssh", shlex.join(sshd)),
        *("--python", quick_python, "--directory", ROOT, "--"),
        *("--addr", "127.0.0.1", "--port", free_port(), "-m", "vit-digits", "-b", 64, *TIMEOUT),
    )
    assert done.returncode == 0, done.stderr
    assert "[0] accuracy    1.0000 (64/64)" in done.stdout


def test_killing_the_launcher_stops_ranks_behind_a_real_sshd(sshd: list[str], tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(
        "import os, sys, time\nopen(f'up{sys.argv[1]}', 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    commands = remote_commands(
        [Host("h1"), Host("h2")],
        [],
        Remote(str(tmp_path), sys.executable, ssh=tuple(sshd)),
        module="sleeper",
        name_addr=False,
        name_hosts=False,
    )
    starter = (
        "import json, os, sys\n"
        "from pipeedge.launch.commands import RankCommand\n"
        "from pipeedge.launch.supervisor import Output, Supervisor\n"
        "def lines(text, error): pass\n"
        "argvs = json.loads(sys.argv[1])\n"
        "ranks = [RankCommand(n, tuple(argv), remote=True) for n, argv in enumerate(argvs)]\n"
        "Supervisor(ranks, dict(os.environ), Output(lines, print)).run()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", starter, json.dumps([command.argv for command in commands])],
        env=environment(),
        cwd=ROOT,
    )
    try:
        marks = [tmp_path / "up0", tmp_path / "up1"]
        until(lambda: all(mark.exists() and mark.read_text() for mark in marks), "both ranks are up")
        pids = [int(mark.read_text()) for mark in marks]
        assert all(alive(pid) for pid in pids)
    finally:
        process.kill()
        process.wait(timeout=LIMIT_S)
    until_gone(pids)


def test_the_supervisor_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    RecordedOutput().supervise(python(0, "print(1)"))
    until(lambda: set(threading.enumerate()) <= before, "its threads have ended")
