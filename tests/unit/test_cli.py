"""Test the command ``pipeedge``, which has every program as a subcommand."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

from pipeedge.base.errors import RequestError
from pipeedge.base.program import COMMANDS as SCRIPTS
from pipeedge.base.program import module_words, program_name
from pipeedge.cli import key
from pipeedge.cli.commands import COMMANDS, Command
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.train.options import parse_train

WITHOUT_SCRIPT = {"ask", "chat", "completion", "config", "down", "join", "node", "nodes", "status", "up"}
"""Commands that the original has no script for."""


def test_the_commands_are_the_programs() -> None:
    assert {command.name for command in COMMANDS} == {*SCRIPTS.values(), *WITHOUT_SCRIPT}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_each_command_leads_to_a_program_whose_usage_names_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [command.full_name])
    assert callable(getattr(importlib.import_module(command.module), command.function))
    assert command.build_parser().prog == command.full_name


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_each_program_has_the_name_of_its_script_otherwise(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/runtime.py"])
    assert command.build_parser().prog in {*SCRIPTS, *(f"pipeedge {name}" for name in WITHOUT_SCRIPT)}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_names_no_script_to_a_user_of_the_command(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [command.full_name])
    monkeypatch.setenv("COLUMNS", "1000")
    parser = command.build_parser()
    printed = parser.format_help() + argparse.ArgumentParser.format_help(parser)
    assert [script for script in SCRIPTS if script in printed] == []


@pytest.mark.parametrize(
    ("started", "name", "module"),
    [
        ("pipeedge run", "pipeedge profile", ("pipeedge", "profile")),
        ("pipeedge", "profiler.py", ("pipeedge.profile.main",)),
        ("/usr/bin/pipeedge-doctor", "profiler.py", ("pipeedge.profile.main",)),
        ("", "profiler.py", ("pipeedge.profile.main",)),
    ],
)
def test_other_programs_are_named_as_this_one_was_started(
    monkeypatch: pytest.MonkeyPatch, started: str, name: str, module: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    assert program_name("profiler.py") == name
    assert module_words("profiler.py", "pipeedge.profile.main") == module


def test_reports_record_the_words_that_started_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeedge run"])
    run = parse_runtime(["0", "1", "-b", "8"], Environment())
    training = parse_train(["--workers", "1"], Environment(), cores=1)
    assert run.request.command == ("pipeedge", "run", "0", "1", "-b", "8")
    assert training.request.command == ("pipeedge", "train", "--workers", "1")


def test_a_key_is_not_written_to_a_file_called_minus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pipeedge-key", "-"])
    with pytest.raises(RequestError, match=r"^FILE -: a key is not printed; name a new file"):
        key._make()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rum"], "unknown command rum; did you mean run?"),
        (["--hlep"], "unknown option --hlep; did you mean --help?"),
        ([], "no command given: use one of node, join, "),
        (["serve"], "unknown command serve: use 'pipeedge run RANK WORLD --serve PORT'"),
    ],
)
def test_a_wrong_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    from pipeedge.cli import main as cli

    class EndedError(Exception):
        pass

    def end(program: str, status: int) -> None:
        raise EndedError(program, status)

    monkeypatch.setattr(cli, "end", end)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pipeedge", *words])
    with pytest.raises(EndedError) as ended:
        cli.main()
    assert ended.value.args == ("pipeedge", 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"pipeedge: {said}")
    assert printed.err.count("\n") == 1
