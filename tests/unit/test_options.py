"""Test command lines of the runtime: valid ones, and one-line messages for invalid ones."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import PeerFailedError, PipeEdgeError, RequestError, ScheduleError
from pipeedge.base.guard import guard
from pipeedge.cli.commands import COMMANDS
from pipeedge.request.config import RunRequest
from pipeedge.request.environment import Environment, log_level
from pipeedge.request.options import parse_runtime

NOTHING = Environment()
TORCHRUN = Environment(
    rank=1, world_size=3, master_addr="10.0.0.1", master_port=29400, agent_store=True, agent_run="none/0"
)


def parse(line: str, environment: Environment = NOTHING) -> RunRequest:
    return parse_runtime(line.split(), environment).request


def test_the_defaults_are_the_originals() -> None:
    request = parse("0 2")
    assert (request.world.rank, request.world.size) == (0, 2)
    assert (request.world.addr, request.world.port) == ("127.0.0.1", 29500)
    assert request.world.socket_ifname is None
    assert request.model.name == "google/vit-base-patch16-224"
    assert (request.model.weights, request.model.device) == (None, "cpu")
    assert (request.input.max_items, request.microbatch_size) == (None, 8)
    assert request.schedule.data_rank == 0
    assert request.transport.comm == "p2p"
    assert (request.output.results, request.output.report) == (None, None)


def test_every_option_arrives() -> None:
    request = parse(
        "1 3 --addr pi1 --port 1234 -s eth0 --timeout 7.5 -m vit-digits -M w.npz -d cuda:1 "
        "--input a.png b -b 20 -u 4 --skip-bad-input -pt 1,8,9,16 -r 2,1 -D 2 -H a,b,c "
        "--output o.csv --report r.json"
    )
    assert (request.world.addr, request.world.port, request.world.socket_ifname) == ("pi1", 1234, "eth0")
    assert request.world.timeout_s == 7.5
    assert (request.model.name, request.model.weights) == ("vit-digits", Path("w.npz"))
    assert request.model.device == "cuda:1"
    assert request.input.paths == (Path("a.png"), Path("b"))
    assert (request.input.max_items, request.microbatch_size) == (20, 4)
    assert request.input.skip_bad_input
    assert (request.schedule.partition, request.schedule.rank_order) == ((1, 8, 9, 16), (2, 1))
    assert (request.schedule.data_rank, request.schedule.hosts) == (2, ("a", "b", "c"))
    assert (request.output.results, request.output.report) == (Path("o.csv"), Path("r.json"))


def test_the_long_names_are_the_same() -> None:
    short = parse("0 2 -s lo -c p2p -m x -M y -b 1 -u 2 -pt 1,2 -q 0 -r 0 -D 1 -H a,b -d cpu")
    long = parse(
        "0 2 --socket-ifname lo --comm p2p --model-name x --model-file y --batch-size 1 --ubatch-size 2 "
        "--partition 1,2 --quant 0 --rank-order 0 --data-rank 1 --hosts a,b --device cpu"
    )
    assert short == long
    assert parse("0 2 -sm a -sdt b -sd c") == parse(
        "0 2 --sched-models-file a --sched-dev-types-file b --sched-dev-file c"
    )
    assert parse("0 2 -sm a -sdt b -sd c -sdn d").schedule.dev_neighbors_file == Path("d")
    data = "0 1 --dataset-name CoLA --dataset-root d --dataset-split test --dataset-shuffle --seed 4"
    assert parse(data).input.dataset_split == "test"


def test_torchrun_provides_what_the_command_line_omits() -> None:
    request = parse("-m vit-digits", TORCHRUN)
    assert (request.world.rank, request.world.size) == (1, 3)
    assert (request.world.addr, request.world.port, request.world.agent_store) == ("10.0.0.1", 29400, True)
    own_port = parse("--port 5", TORCHRUN).world
    assert (own_port.port, own_port.agent_store) == (5, False)
    own_place = parse("0 2", TORCHRUN).world
    assert (own_place.rank, own_place.addr, own_place.agent_store) == (0, "127.0.0.1", False)


def test_the_environment_is_read_as_torchrun_writes_it() -> None:
    assert Environment.read({}) == Environment(agent_run="/0")
    found = Environment.read(
        {
            "RANK": "1",
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29400",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    )
    assert found == TORCHRUN
    with pytest.raises(RequestError, match="WORLD_SIZE='x' is not a whole number"):
        Environment.read({"WORLD_SIZE": "x"})


WRONG = [
    ("", "RANK and WORLD are missing"),
    ("0", "WORLD is missing: give RANK WORLD"),
    ("0 2 3", "unexpected argument '3'"),
    ("a 2", "RANK.*invalid int"),
    ("2 2", r"rank 2 is outside the world: with WORLD 2, RANK is 0 to 1"),
    ("-1 2", "rank -1 is outside the world"),
    ("0 1000000", "WORLD is at most 1024"),
    ("0 0", "a world of 0 ranks"),
    ("0 -3", "a world of -3 ranks"),
    ("0 2 --port 0", "--port 0: a port is 1 to 65535"),
    ("0 2 --port 65536", "--port 65536"),
    ("0 2 --port x", "invalid int value: 'x'"),
    ("0 2 --addr=", "--addr is empty"),
    ("0 2 --timeout 0", "--timeout 0: must be seconds above 0"),
    ("0 2 --timeout -1", "--timeout -1"),
    ("0 2 --timeout nan", "--timeout nan"),
    ("0 2 --timeout inf", "--timeout inf"),
    ("0 2 --timeout 1e9", r"--timeout 1,000,000,000"),
    ("0 1 -pt 1,48 --schedule-file s.yml", "give either -pt/--partition or --schedule-file, not both"),
    ("0 2 -b 0", "-b/--batch-size 0: must be at least 1"),
    ("0 2 -b -5", "-b/--batch-size -5"),
    ("0 2 -b 1.5", "invalid int"),
    ("0 2 -u 0", "-u/--ubatch-size 0: must be at least 1"),
    ("0 2 -D 2", r"-D/--data-rank 2 is outside the world: ranks are 0 to 1"),
    ("0 2 -D -1", "-D/--data-rank -1"),
    ("0 2 -pt 1,x", "'1,x' is not a list of integers"),
    ("0 2 -pt ,", "not a list of integers"),
    ("0 2 -pt 1,8,9,16 -r a,b", "not a list of integers"),
    ("0 2 -pt 1,8,9,16 -q 9,0", "-q/--quant 9,0: a link carries 2 to 8 or 16"),
    ("0 2 -pt 1,8,9,16 -q 8,-1", "-q/--quant 8,-1: a link carries"),
    ("0 2 -q 8,1", "-q/--quant 8,1: a link carries 2 to 8 or 16"),
    ("0 2 -q 8,x", "'8,x' is not a list of integers"),
    ("0 2 --clamp tanh", "--clamp: invalid choice: 'tanh'"),
    ("0 2 --link-transform fourier", "--link-transform: invalid choice: 'fourier'"),
    ("0 2 -r 0,1 --schedule-file s.yml", "-r/--rank-order cannot be combined with a schedule of hosts"),
    ("0 2 -H a", "names 1 host for a world of 2 ranks"),
    ("0 2 -H a,a", "names a twice"),
    ("0 2 -H a,", "not a list of names"),
    ("0 2 -sm m.yml", "all three of"),
    ("0 2 -sm m.yml -sd d.yml", "all three of"),
    ("0 2 -c udp", "invalid choice: 'udp'"),
    ("0 2 -w 4", "-w/--worker-threads needs -c rpc"),
    ("0 2 -c rpc -w 0", "-w/--worker-threads 0"),
    ("0 2 --dataset-name MNIST", "invalid choice"),
    ("0 2 --dataset-split val", "--dataset-split needs --dataset-name"),
    ("0 2 --dataset-shuffle", "--dataset-shuffle needs --dataset-name"),
    ("0 2 --input a --dataset-name CoLA", "either --input or --dataset-name"),
    ("0 2 --dataset-name CoLA --seed -1", "--seed -1: must not be negative"),
    ("0 2 --input", "expected at least one argument"),
    ("0 2 --report r.txt", "FILE.json"),
    ("0 2 --batch 3", r"unknown option --batch; did you mean --batch-size\?"),
    ("0 2 --outptu=o.csv 3", r"unknown option --outptu; did you mean --output\?"),
    ("0 2 --pt 1,16", r"unknown option --pt; did you mean -pt\?"),
    ("0 2 --xyzzy \x1b[2J", r"unknown option --xyzzy \(see --help\)"),
    ("0 2 -m", "expected one argument"),
]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--max-waiting 3", "--max-waiting needs --serve"),
        ("--max-body 3", "--max-body needs --serve"),
        ("--request-timeout 3", "--request-timeout needs --serve"),
        ("--api-key keys", "--api-key needs --serve"),
        ("--serve 8000 --skip-bad-input", "--serve answers requests .* leave out --skip-bad-input"),
        ("--serve 8000 --input a.png", "--serve answers requests .* leave out --input"),
    ],
)
def test_options_that_serving_does_not_obey_are_refused(options: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse(f"0 1 {options}")


@pytest.mark.parametrize(("line", "says"), WRONG)
def test_a_wrong_request_is_one_line_with_code_2(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError, match=says):
        parse(line)
    assert guard("runtime.py", lambda: parse(line) and None, verbose=False) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("runtime.py: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "option", ["--input", "-m", "-M", "-d", "--output", "--report", "-sm", "--schedule-file"]
)
def test_an_empty_value_is_refused(option: str) -> None:
    with pytest.raises(RequestError, match=f"{option}.*: it is empty"):
        parse_runtime(["0", "1", option, ""], Environment())


def test_schedules_that_cannot_be_are_schedule_errors() -> None:
    with pytest.raises(ScheduleError):
        parse("0 2 -sm models.yml")


WORDS = ("0", "1", "2", "-1", "-pt", "-r", "-D", "-H", "-q", "-u", "-b", "-c", "-w", "-m", "--port", "a")
WORDS += ("--timeout", "--addr", "--input", "--report", "rpc", "1,8", "1,8,9,16", ",", "nan", "9e9", "x.json")


@settings(max_examples=150)
@given(
    st.lists(
        st.sampled_from(WORDS) | st.text(max_size=5),
        max_size=7,
    )
)
def test_every_command_line_gives_a_request_or_one_line(words: list[str]) -> None:
    with contextlib.suppress(RequestError, SystemExit):  # the latter after --help, which is not asked for
        parse_runtime(words, NOTHING)


def test_help_names_every_option_and_takes_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--help-all")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    options = "-d -s --addr --port -c -w -m -M -b -u --dataset-name --dataset-root --dataset-split "
    options += "--dataset-indices-file --dataset-shuffle -pt -q -r -D -H -sm -sdt -sd --input --output "
    options += "--report --timeout --dry-run --skip-bad-input --schedule-file --verbose --version"
    for option in options.split():
        assert f"{option} " in said or f"{option}," in said or f"{option}\n" in said, option


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (None, 0, ""),
        (RequestError("no\nsuch   thing"), 2, "p: no such thing\n"),
        (PeerFailedError("rank 1 is gone"), 4, "p: rank 1 is gone\n"),
        (PipeEdgeError(""), 1, "p: PipeEdgeError\n"),
        (ValueError("x"), 1, "p: internal error: ValueError: x (run again with --verbose to see where)\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_the_guard_turns_any_end_into_a_status_and_at_most_a_line(
    error: BaseException | None, status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        if error is not None:
            raise error

    assert guard("p", main, verbose=False) == status
    assert capsys.readouterr() == ("", says)


def test_verbose_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise RequestError("wrong")

    assert guard("p", main, verbose=True) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("p: wrong\n")


def test_the_mode_of_csv_files_is_in_the_environment_or_an_option() -> None:
    environment = Environment.read({"CSV_FILE_MODE": "w"})
    assert parse_runtime(["0", "1"], environment).request.metrics.csv_file_mode == "w"
    appending = parse_runtime(["0", "1", "--csv-file-mode", "a"], environment).request
    assert appending.metrics.csv_file_mode == "a"
    assert parse("0 1").metrics.csv_file_mode == "x"
    with pytest.raises(RequestError, match=r"\(CSV_FILE_MODE\) r\+: choose one of x, w, a"):
        parse_runtime(["0", "1"], Environment.read({"CSV_FILE_MODE": "r+"}))


SCHEDULED = "-sm m -sdt t -sd d"


def test_scheduler_accounts_for_compressed_links() -> None:
    assert parse(f"0 1 {SCHEDULED} --link-bits auto").links.link_bits == "auto"
    assert parse(f"0 1 {SCHEDULED} --link-bits 4").links.link_bits == "4"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (f"0 1 {SCHEDULED} --link-bits 9", "--link-bits 9: choose auto, 0, 2 to 8 or 16"),
        ("0 1 --link-bits auto", "--link-bits needs automatic scheduling"),
        (f"0 1 {SCHEDULED} --link-bits 8 -q 4", "give one of them"),
    ],
)
def test_impossible_link_bits_are_refused(line: str, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parse(line)


def test_adaptive_links_are_asked_for_by_options_or_by_the_originals_variables() -> None:
    assert parse("0 1").links.compression.adaptive is None
    options = "0 1 --adaptive Heuristic2 --send-constraint 12.5 --window-size 4 --min-bits 3"
    asked = parse(options).links.compression
    assert (asked.adaptive, asked.send_constraint, asked.window_size, asked.min_bits) == (
        "heuristic2",
        12.5,
        4,
        3,
    )
    variables = {"ADAPTIVE_QUANT": "CONTROLLER", "SEND_CONSTRAINT": "7", "WINDOW_SIZE": "5"}
    asked = parse("0 1", Environment.read(variables)).links.compression
    assert (asked.adaptive, asked.send_constraint, asked.window_size) == ("controller", 7.0, 5)
    # The command line goes before the environment, piece by piece.
    asked = parse("0 1 --adaptive heuristic --window-size 9", Environment.read(variables)).links.compression
    assert (asked.adaptive, asked.send_constraint, asked.window_size) == ("heuristic", 7.0, 9)
    assert parse("0 1", Environment.read({"ADAPTIVE_QUANT": ""})).links.compression.adaptive is None


@pytest.mark.parametrize(
    ("line", "variables", "named"),
    [
        ("0 1 --adaptive pid", {}, r"--adaptive \(ADAPTIVE_QUANT\) pid: choose one of heuristic, heuristic2"),
        ("0 1", {"ADAPTIVE_QUANT": "FAST"}, "fast: choose one of"),
        ("0 1 --adaptive controller", {}, "needs --send-constraint"),
        ("0 1 --adaptive heuristic --send-constraint -3", {}, "-3: must be a number of items"),
        ("0 1 --adaptive heuristic", {"SEND_CONSTRAINT": "0"}, "0: must be a number of items"),
        ("0 1 --adaptive heuristic --send-constraint nan", {}, "nan: must be a number of items"),
        ("0 1 --adaptive heuristic2 --send-constraint inf", {}, "inf: must be a number of items"),
        ("0 1 --adaptive auto --send-constraint 5", {}, "leave it out"),
        ("0 1 --send-constraint 5", {}, "has an effect only with --adaptive heuristic"),
        ("0 1", {"SEND_CONSTRAINT": "-1"}, "leave it out"),
        ("0 1", {"SEND_CONSTRAINT": "fast"}, "SEND_CONSTRAINT='fast' is not a number"),
        ("0 1", {"WINDOW_SIZE": "2.5"}, "WINDOW_SIZE='2.5' is not a whole number"),
        ("0 1 --window-size 0", {}, "--window-size .* 0: must be at least 1"),
        ("0 1 --adaptive auto --min-bits 9", {}, "--min-bits 9: choose one of 2, 3, 4, 5, 6, 7, 8, 16"),
        ("0 1 --min-bits 4", {}, "--min-bits needs --adaptive"),
        ("0 1 -q 9", {}, "-q"),
    ],
)
def test_impossible_adaptive_links_are_refused_with_one_line(
    line: str, variables: dict[str, str], named: str
) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        parse(line, Environment.read(variables))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("--modle vit-digits 0 1", "unknown option --modle; did you mean --model? (see --help)"),
        ("0 1 --batch x y", "unknown option --batch; did you mean --batch-size? (see --help)"),
        ("-b 3 --speed=3 x 1", "unknown option --speed; did you mean --seed? (see --help)"),
        # These are known, and so the mistake is another one.
        ("x 1 -m vit-digits --quiet", "argument RANK: invalid int value: 'x' (see --help)"),
        ("0 1 -bx", "argument -b/--batch-size: invalid int value: 'x' (see --help)"),
    ],
)
def test_an_unknown_option_is_named_wherever_its_value_goes(line: str, error: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_runtime(line.split(), Environment())
    assert str(refused.value) == error


MANY = ("run", "doctor", "profile", "simulate", "train", "auction", "chat")
"""Commands with more options than fit a screen."""
FEW = sorted({command.name for command in COMMANDS} - {*MANY, "schedule", "completion"})
"""The others, besides those with a help of their own."""


@pytest.mark.parametrize("name", MANY)
def test_short_help_shows_a_dozen_options_with_three_examples_that_parse(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = next(command for command in COMMANDS if command.name == name).build_parser()
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"^  --?[a-zA-Z]", said, re.MULTILINE)) == 12
    examples = [
        shlex.split(line, comments=True) for line in said.partition("examples:\n")[2].splitlines()[:3]
    ]
    for words in examples:
        parser.parse_args(words[len(parser.prog.split()) :])
    assert "--help-all' shows all options" in said


@pytest.mark.parametrize("name", FEW)
def test_help_has_three_examples_that_parse_and_no_heading_twice(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = next(command for command in COMMANDS if command.name == name).build_parser()
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parser.parse_args([option])
        said = capsys.readouterr().out
        headings = re.findall(r"^(\S.*):$", said, re.MULTILINE)
        assert len(headings) == len(set(headings))
        if option == "--help":
            lines = said.partition("examples:\n")[2].splitlines()[:3]
            for words in [shlex.split(line, comments=True) for line in lines]:
                assert words[: len(parser.prog.split())] == parser.prog.split()
                own = words[len(parser.prog.split()) :]
                parser.parse_args(own[: own.index("--")] if "--" in own else own)
            assert len(lines) == 3


def test_the_older_name_of_an_option_is_understood_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("0 1 --model-name x").model.name == parse("0 1 --model x").model.name == "x"
    with pytest.raises(SystemExit):
        parse("--help-all")
    assert "--model-name" not in capsys.readouterr().out


def test_the_level_of_the_log_is_one_of_four() -> None:
    assert (log_level({}), log_level({"PIPEEDGE_LOG": "DEBUG"})) == ("warning", "debug")
    with pytest.raises(RequestError, match=r"PIPEEDGE_LOG='loud' is no level: use one of error, warning"):
        log_level({"PIPEEDGE_LOG": "loud"})


def test_a_directory_that_is_gone_is_a_wrong_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert guard("p", lambda: pytest.fail("it began"), verbose=False) == 2
    assert (
        capsys.readouterr().err == "p: the directory in which this was started is gone: cd to another one\n"
    )
