"""Command lines that pipeedge-launch makes, and its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeedge.base.errors import RequestError
from pipeedge.base.files import write_secret
from pipeedge.launch.commands import (
    DOCTOR_MODULE,
    RUNTIME_MODULE,
    Host,
    Remote,
    local_commands,
    parse_host,
    remote_commands,
    threads_each,
)
from pipeedge.launch.main import parse_launch, plan_launch
from pipeedge.launch.supervisor import RankExit, status_of
from pipeedge.transport.new_key import make_key

# --- commands ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "ranks", "each"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1)])
def test_cores_are_divided_among_the_ranks(cores: int, ranks: int, each: int) -> None:
    assert threads_each(cores, ranks) == each


def test_local_ranks_get_rank_world_port_and_threads() -> None:
    commands = local_commands(2, ["-u", "4"], python="py", module=RUNTIME_MODULE, port=4000, cores=8)
    assert [command.argv for command in commands] == [
        ("py", "-u", "-m", RUNTIME_MODULE, str(rank), "2", "--port", "4000", "-u", "4") for rank in range(2)
    ]
    assert commands[1].shown() == f"OMP_NUM_THREADS=4 py -u -m {RUNTIME_MODULE} 1 2 --port 4000 -u 4"


def test_each_local_rank_serves_prometheus_on_its_own_port() -> None:
    def made(port: int) -> list[list[str]]:
        arguments = ["--prometheus-port", str(port)]
        commands = local_commands(
            3, arguments, python="py", module=RUNTIME_MODULE, port=None, cores=2, prometheus_port=port
        )
        return [list(command.argv[5:]) for command in commands]

    # The runtime takes the last.
    assert [argv[-1] for argv in made(9100)] == ["9100", "9101", "9102"]
    with pytest.raises(RequestError, match="3 ranks on one machine need consecutive ports"):
        made(65534)


def test_remote_ranks_get_the_first_host_as_address_and_all_as_names() -> None:
    hosts = [parse_host("a"), parse_host("me@b")]
    remote = Remote("/srv", "python3", user="you", ssh=("ssh", "-p", "22"))
    first, second = remote_commands(
        hosts, ["-b", "9"], remote, module=RUNTIME_MODULE, name_addr=True, name_hosts=True
    )
    assert first.argv[:3] == ("ssh", "-p", "22")
    assert "BatchMode=yes" in first.argv
    assert first.argv[-4:-1] == ("-l", "you", "a")
    assert second.argv[-4:-1] == ("-l", "me", "b")
    assert f"python3 -u -m {RUNTIME_MODULE} 1 2 --addr a -H a,b -b 9" in second.argv[-1]
    (plain,) = remote_commands(hosts[:1], [], remote, module=DOCTOR_MODULE, name_addr=False, name_hosts=False)
    assert "--addr" not in plain.argv[-1]
    assert DOCTOR_MODULE in plain.argv[-1]


@pytest.mark.parametrize("text", ["", "-oProxyCommand=x", "a b", "@a", "me@", "-x@a", "a'b", "a\nb"])
def test_invalid_hosts_are_rejected(text: str) -> None:
    with pytest.raises(RequestError, match="is not a valid host"):
        parse_host(text)


def test_a_host_named_twice_is_rejected() -> None:
    with pytest.raises(RequestError, match="a is named twice"):
        remote_commands(
            [Host("a"), Host("a")], [], Remote(".", "py"), module="m", name_addr=True, name_hosts=True
        )


def test_a_tilde_is_the_remote_home(tmp_path: Path) -> None:
    (tmp_path / "it's").mkdir()
    (command,) = remote_commands(
        [Host("a")], [], Remote("~/it's", "pwd; #"), module="m", name_addr=False, name_hosts=False
    )
    line = command.argv[-1].replace("pwd; #", "pwd")
    assert '"$HOME"/' in line


# --- the command line -------------------------------------------------------------------------------


def test_options_of_the_runtime_follow_with_or_without_a_separator() -> None:
    for separator in (["--"], []):
        request = parse_launch(["--local", "2", *separator, "-s", "lo", "-m", "vit-digits"])
        assert request.local == 2
        assert request.arguments == ("-s", "lo", "-m", "vit-digits")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--", "-u", "4"], "nothing says where"),
        (["--local", "0", "--"], "at least 1"),
        (["--local", "2", "--hosts", "a,b", "--"], "exclude each other"),
        (["--local", "two", "--"], "invalid int"),
        (["--hosts", "a,,b", "--"], "is not a valid host"),
        (["--local", "2", "--", "-pt", "1,8,9"], "pairs"),
        (["--local", "2", "--", "--nonsense"], "--nonsense"),
        (["--lcoal", "2", "--", "-u", "4"], r"unknown option --lcoal; did you mean --local\?"),
        (["--local", "2", "--prnt", "--", "-u", "4"], r"did you mean --print\?"),
        (["--local", "2", "--", "--addr", "198.51.100.7"], "not an address of this machine"),
        (["--local", "2", "--", "--key", "-"], "launched ranks have no standard input; give a file"),
        (["--hosts", "a,b", "--", "--key", "k", "-c", "rpc"], "TensorPipe cannot encrypt its links"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(argv: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        plan_launch(parse_launch(argv))


def launched_key(*argv: str) -> set[str]:
    """Return the lines that the ranks get on standard input."""
    made = iter(["first\nkey\n", "second\nkey\n"])
    commands = plan_launch(parse_launch(argv), make_key=lambda: next(made))
    for command in commands:
        assert command.secret.strip() not in " ".join(command.argv) or not command.secret
        assert ("--key -" in command.argv[-1]) == bool(command.secret)
    return {command.secret for command in commands}


@pytest.mark.parametrize(
    ("argv", "secret"),
    [
        (["--hosts", "a,b", "--", "-m", "vit-digits"], "first,key\n"),
        (["--hosts", "a,b", "--doctor", "--"], "first,key\n"),
        (["--hosts", "a,b", "--", "-c", "tcp"], "first,key\n"),
        (["--hosts", "a,b", "--plain", "--", "-m", "vit-digits"], ""),
        (["--hosts", "a,b", "--", "-c", "rpc"], ""),
        (["--hosts", "a,b", "--", "-cp2p"], ""),
        (["--hosts", "a,b", "--", "--key", "there.pem"], ""),
        (["--hosts", "a", "--", "-m", "vit-digits"], ""),
        (["--local", "2", "--", "-m", "vit-digits"], ""),
    ],
)
def test_a_run_on_several_machines_gets_a_fresh_key_unless_it_cannot_use_it(
    argv: list[str], secret: str
) -> None:
    if "there.pem" in argv:
        assert {command.secret for command in plan_launch(parse_launch(argv), lambda: "x")} == {""}
    else:
        assert launched_key(*argv) == {secret}


def test_the_key_of_the_environment_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_key()
    write_secret(tmp_path / "k.pem", text, "FILE")
    monkeypatch.setenv("PIPEEDGE_KEY", str(tmp_path / "k.pem"))
    (secret,) = launched_key("--hosts", "a,b", "--", "-m", "vit-digits")
    assert secret.replace(",", "\n").split() == text.split()


def test_shown_commands_have_no_key() -> None:
    commands = plan_launch(parse_launch(["--hosts", "a,b", "--print", "--", "-m", "vit-digits"]))
    assert not any("--key" in command.shown() for command in commands)


def test_a_devices_file_gives_one_rank_per_host_in_order(tmp_path: Path) -> None:
    devices = tmp_path / "devices.yml"
    devices.write_text("B:\n- mb-1\n- mb-0\nA:\n- rcc-0\n")
    for argv in (
        ["-sd", str(devices), "--", "-sm", "m.yml", "-sdt", "t.yml"],
        ["-sm", "m.yml", "-sdt", "t.yml", "-sd", str(devices)],
        ["--", "-sm", "m.yml", "-sdt", "t.yml", f"--sched-dev-file={devices}"],
    ):
        request = parse_launch(argv)
        assert [host.name for host in request.hosts] == ["mb-1", "mb-0", "rcc-0"]
        commands = plan_launch(request)
        assert all("-H mb-1,mb-0,rcc-0" in command.argv[-1] for command in commands)
        assert all("--addr mb-1" in command.argv[-1] for command in commands)
        assert all(str(devices) in command.argv[-1] for command in commands)
    alone = parse_launch(["-sd", str(devices), "--", "-m", "vit-digits"])
    assert "-sd" not in alone.arguments
    assert alone.world_size == 3


# --- the supervisor ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "rank", "status"),
    [
        ([(0, 0), (1, 0)], None, 0),
        ([(1, 2), (0, 4)], 1, 2),
        ([(0, 4), (1, 2)], 1, 2),  # rank 0 only tells what rank 1 said
        ([(0, 4), (1, 4)], 0, 4),
        ([(2, -9), (0, 4)], 2, 137),
        ([(0, 130), (1, 1)], 1, 1),
        ([(0, 0), (1, 130)], 1, 130),
    ],
)
def test_the_root_failure_decides(codes: list[tuple[int, int]], rank: int | None, status: int) -> None:
    decisive = status_of([RankExit(number, code) for number, code in codes])
    assert (decisive.rank if decisive else None) == rank
    assert (decisive.status if decisive else 0) == status


def test_a_failed_ssh_counts_as_an_unreachable_peer() -> None:
    assert RankExit(1, 255, remote=True).status == 4
    assert RankExit(1, 255).status == 255
