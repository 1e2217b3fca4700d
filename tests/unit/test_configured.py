"""Test options from a file: which of command line, environment, file and default wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeedge.base.errors import RequestError
from pipeedge.cli.commands import COMMANDS
from pipeedge.cli.config import sources
from pipeedge.cli.schedule import with_configured
from pipeedge.nodes.options import parse_node
from pipeedge.request.configured import read_configured
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_doctor, parse_runtime, runtime_parser


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "pipeedge.toml"


def run(*words: str, **variables: str) -> Any:
    return parse_runtime(["0", "1", *words], Environment(variables=variables)).request


def test_the_file_wins_over_the_default_and_loses_to_the_command_line(file: Path) -> None:
    file.write_text('[run]\nubatch-size = 4\nmodel-name = "vit-digits"\n[node]\nport = 29999\n')
    assert (run().microbatch_size, run().model.name) == (4, "vit-digits")
    assert run("-u", "2").microbatch_size == run("-u2").microbatch_size == 2
    assert run("--ubatch-size=3").microbatch_size == 3
    assert parse_node([], Environment()).port == 29999


def test_the_environment_wins_over_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('[run]\nkey = "file.pem"\n')
    assert str(run().world.keys.key) == "file.pem"
    monkeypatch.setenv("PIPEEDGE_KEY", "variable.pem")
    assert str(run(PIPEEDGE_KEY="variable.pem").world.keys.key) == "variable.pem"
    assert str(run("--key", "given.pem", PIPEEDGE_KEY="variable.pem").world.keys.key) == "given.pem"


def test_flags_and_lists(file: Path) -> None:
    file.write_text(
        '[run]\nquiet = true\nresume = false\ninput = ["a b.png", "c.png"]\npartition = [1, 8, 9, 16]\n'
    )
    request = run()
    assert request.output.quiet
    assert request.input.paths == (Path("a b.png"), Path("c.png"))
    assert request.schedule.partition == (1, 8, 9, 16)
    assert run("--input", "d.png").input.paths == (Path("d.png"),)


def test_a_file_of_another_name_is_named(file: Path, tmp_path: Path) -> None:
    file.write_text("[run]\nubatch-size = 4\n")
    (tmp_path / "other.toml").write_text("[run]\nubatch-size = 5\n")
    assert run("--config", "other.toml").microbatch_size == 5
    assert run("--config=/dev/null").microbatch_size == 8
    with pytest.raises(RequestError, match=r"^--config none.toml: no such file"):
        run("--config", "none.toml")


def test_the_doctor_has_the_options_of_the_run(file: Path) -> None:
    file.write_text("[run]\nubatch-size = 4\ndry-run = true\n[doctor]\ntimeout = 9\n")
    request = parse_doctor(["0", "1"], Environment()).request
    assert (request.microbatch_size, request.world.timeout_s) == (4, 9)


def test_the_native_scheduler_gets_them_as_words(file: Path) -> None:
    file.write_text('[schedule]\nmodel-name = "m"\nexplain = true\n')
    assert with_configured(["-b", "8"]) == ["-b", "8", "--model-name=m", "--explain"]
    assert with_configured(["--model-name=n", "--config", "/dev/null"]) == ["--model-name=n"]
    assert with_configured(["--questions"]) == ["--questions"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[run]\nubatch-sice = 4",
            "pipeedge.toml: there is no option --ubatch-sice; did you mean ubatch-size?",
        ),
        ("[rum]\nx = 1", "pipeedge.toml: no program has the section rum; did you mean run?"),
        ("ubatch-size = 4", "pipeedge.toml: no program has the section ubatch-size"),
        ("[run]\nquiet = 1", "pipeedge.toml: --quiet takes true or false"),
        ("[run]\nubatch-size = true", "pipeedge.toml: --ubatch-size takes a value"),
        ('[run]\nubatch-size = "x"', "pipeedge.toml: argument -u/--ubatch-size: invalid int value"),
        ("[run", "pipeedge.toml: cannot be read as TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(file: Path, text: str, line: str) -> None:
    file.write_text(text)
    with pytest.raises(RequestError) as refused:
        run()
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_a_mistake_on_the_command_line_is_not_the_files(file: Path) -> None:
    file.write_text("[run]\nubatch-size = 4\n")
    with pytest.raises(RequestError, match=r"^unknown option --modle"):
        run("--modle", "x")


def test_config_says_where_each_value_comes_from(file: Path) -> None:
    file.write_text('[run]\nubatch-size = 4\nkey = "k.pem"\n')
    words = ["--addr", "pi1"]
    environment = Environment(variables={"PIPEEDGE_KEY": "v.pem"})
    configured = read_configured(words, "runtime.py")
    found = {
        name: (value, source)
        for name, value, source in sources(runtime_parser(), words, configured, environment)
    }
    assert found["--addr"] == ("pi1", "command line")
    assert found["--ubatch-size"] == ("4", "file: pipeedge.toml")
    assert found["--key"] == ("v.pem", "environment: PIPEEDGE_KEY")
    assert found["--port"] == ("29500", "default")


@given(st.sampled_from([command for command in COMMANDS if command.name not in ("schedule", "config")]))
def test_every_program_reads_the_file(command: Any) -> None:
    options = {name for action in command.build_parser()._actions for name in action.option_strings}
    assert "--config" in options
