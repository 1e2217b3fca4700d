"""Options are declared once: parser, request, checks and tables of the documentation follow from it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import ROOT

import pipeedge.profile.options
import pipeedge.simulate.options
import pipeedge.train.options
from pipeedge.base.errors import InputError, RequestError
from pipeedge.profile.request import EmitRequest, MeasureRequest
from pipeedge.request.config import ModelRequest, RunRequest, TransportRequest, WorldRequest
from pipeedge.request.declared import (
    Check,
    ObeyedBy,
    Option,
    Section,
    add_sections,
    at_least,
    check_options,
    given,
    given_options,
    option,
    option_like,
    option_of,
    options_of,
    read_variables,
)
from pipeedge.request.files import InputRequest, MetricsRequest, OutputRequest
from pipeedge.request.options import SECTIONS, RuntimeCommand
from pipeedge.request.parsing import OneLineParser, integers, path
from pipeedge.request.scheduling import CompressionRequest, LinkRequest, ScheduleRequest
from pipeedge.simulate.options import SimulationRequest
from pipeedge.train.options import TrainCommand
from pipeedge.train.request import PipelineRequest, TrainingRequest

RUN = (WorldRequest, TransportRequest, ModelRequest, InputRequest, OutputRequest, MetricsRequest, RunRequest)
RUN += (ScheduleRequest, LinkRequest, CompressionRequest, RuntimeCommand)
PROGRAMS = {
    "runtime.py": (SECTIONS, RUN),
    "profiler.py": (pipeedge.profile.options.SECTIONS, (MeasureRequest, EmitRequest)),
    "pipeedge-simulate": (pipeedge.simulate.options.SECTIONS, (SimulationRequest,)),
    "train.py": (
        pipeedge.train.options.SECTIONS,
        (PipelineRequest, TrainingRequest, TrainCommand),
    ),
}


def in_sections(sections: tuple[Section, ...]) -> Iterator[Option]:
    for section in sections:
        yield from section.options


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_declared_option_is_in_one_section(program: str) -> None:
    sections, requests = PROGRAMS[program]
    listed = Counter(one.dest for one in in_sections(sections))
    declared = {one.dest for request in requests for one in options_of(request)}
    apart = {"TrainCommand.dry_run"}  # above the groups of --help
    assert declared - apart <= set(listed)
    assert set(listed.values()) == {1}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_default_is_valid(program: str) -> None:
    for one in in_sections(PROGRAMS[program][0]):
        if one.default is not None and one.default is not dataclasses.MISSING:
            assert one.requirement(one.default) is None, one.name


def test_options_that_all_ranks_obey_have_a_name_for_messages() -> None:
    for one in in_sections(SECTIONS):
        assert bool(one.subject) == (one.obeyed_by is ObeyedBy.ALL), one.name


def test_the_tables_of_the_documentation_are_up_to_date() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from write_option_tables import TABLES, with_tables
    finally:
        sys.path.remove(str(ROOT / "tools"))
    pages = {path: path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md")}
    for page, text in pages.items():
        assert with_tables(text) == text, f"run tools/write_option_tables.py: {page} is not up to date"
    for name in TABLES:
        assert sum(f"<!-- options: {name} -->" in text for text in pages.values()) == 1
    old = "a\n<!-- options: by rank -->\nold\n<!-- end -->\nb"
    assert "old" not in with_tables(old)
    assert with_tables(old).startswith("a\n")
    assert with_tables(old).endswith("<!-- end -->\nb")


def test_every_variable_is_documented() -> None:
    page = (ROOT / "docs" / "commands.md").read_text("utf-8")
    variables = {one.variable for one in in_sections(SECTIONS) if one.variable}
    assert variables
    assert all(f"`{variable}`" in page for variable in variables)


# --- one small request --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trip:
    driver: str
    speed: int = option(
        50, "-s/--speed", type=int, variable="SPEED", check=at_least(1), help="kilometres an hour ({default})"
    )
    luggage: tuple[Path, ...] = option((), "--luggage", type=path, nargs="+", help="100 % of it")
    stops: tuple[int, ...] = option((), "--stops", type=integers, help="for {runtime.py}")
    radio: bool = option(False, "--radio", help="loud", obeyed_by=ObeyedBy.RANK_0)
    price: float = option(2.5, "--price", type=float, help="({default})", check=Check(bool, "must not be 0"))

    def __post_init__(self) -> None:
        check_options(self, InputError)


SECTION = Section("the trip", options_of(Trip))


def read(*argv: str, **variables: str) -> argparse.Namespace:
    parser = OneLineParser(prog="trip")
    add_sections(parser, [SECTION])
    arguments = parser.parse_args(argv)
    read_variables(arguments, [SECTION], variables)
    return arguments


def test_only_given_options_are_passed_on_and_the_others_have_the_default_of_the_field() -> None:
    assert given(read(), Trip) == {}
    fields = given(read("-s", "50", "--radio", "--luggage", "a", "b c", "--stops", "1,2"), Trip)
    assert fields == {"speed": 50, "radio": True, "luggage": (Path("a"), Path("b c")), "stops": (1, 2)}
    assert Trip("me", **fields).radio


def test_given_options_are_reported_as_on_the_command_line() -> None:
    arguments = read("--radio", "--luggage", "a", "b c", "--stops", "1,2", SPEED="7")
    told = {one.name: one.text(value) for one, value in given_options(arguments, [SECTION])}
    assert told == {"-s/--speed (SPEED)": "7", "--luggage": "a 'b c'", "--stops": "1,2", "--radio": ""}


def test_an_option_takes_precedence_over_its_variable() -> None:
    assert given(read(SPEED="7"), Trip) == {"speed": 7}
    assert given(read("--speed", "9", SPEED="7"), Trip) == {"speed": 9}
    assert given(read(SPEED=""), Trip) == {}
    with pytest.raises(RequestError, match="the environment's SPEED='fast' is not a whole number"):
        read(SPEED="fast")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"speed": 0}, "-s/--speed (SPEED) 0: must be at least 1"),
        ({"price": 0.0}, "--price 0: must not be 0"),
    ],
)
def test_an_invalid_value_is_refused_however_the_request_is_made(fields: dict[str, float], line: str) -> None:
    with pytest.raises(InputError) as caught:
        Trip("me", **fields)  # type: ignore[arg-type]
    assert str(caught.value) == line


def test_help_shows_defaults_and_names_programs_as_the_user_starts_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for started, name in (("runtime.py", "runtime.py"), ("pipeedge run", "pipeedge run")):
        monkeypatch.setattr(sys, "argv", [started])
        with pytest.raises(SystemExit):
            read("--help")
        said = " ".join(capsys.readouterr().out.split())
        assert "-s N, --speed N kilometres an hour (50)" in said or "-s, --speed N" in said
        assert f"for {name}" in said
        assert "100 % of it" in said
        assert "(2.5)" in said


def test_an_option_can_be_declared_like_another_one() -> None:
    @dataclass(frozen=True)
    class Walk:
        speed: int = option_like(Trip, "speed", default=5, help="on foot")

    assert Walk().speed == 5
    assert option_of(Walk, "speed").name == option_of(Trip, "speed").name
    with pytest.raises(RequestError, match="must be at least 1"):
        check_options(Walk(0))


def test_at_most_one_option_of_an_exclusive_section_may_be_given() -> None:
    parser = OneLineParser(prog="trip")
    add_sections(parser, [Section("x", options_of(Trip, "speed", "radio"), exclusive=True)])
    with pytest.raises(RequestError, match="not allowed with"):
        parser.parse_args(["--speed", "3", "--radio"])
