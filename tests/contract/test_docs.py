"""Test README.md and docs/: links resolve, commands work, options exist.

``documents.py`` explains which blocks of a page are run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import yaml
from documents import DOCS, PAGES, Page, commands, console_steps, fits
from places import ROOT
from waiting import LIMIT_S

import pipeedge
from pipeedge.auction.options import parse_auction
from pipeedge.base.errors import RequestError
from pipeedge.base.program import COMMANDS as SCRIPTS
from pipeedge.cli.chat import parse_chat
from pipeedge.cli.completion import completion_parser
from pipeedge.cli.config import config_parser
from pipeedge.cli.fetch import parse_fetch
from pipeedge.cli.key import key_parser
from pipeedge.launch.main import parse_launch, plan_launch
from pipeedge.nodes.options import (
    parse_ask,
    parse_down,
    parse_join,
    parse_members,
    parse_node,
    parse_status,
    parse_up,
)
from pipeedge.profile.options import parse_device_types, parse_models, parse_profiler
from pipeedge.report.main import parse_report
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_doctor, parse_runtime
from pipeedge.simulate.options import parse_simulate
from pipeedge.testbed.main import parse_testbed
from pipeedge.train.options import parse_train

Parse = Callable[[Sequence[str]], object]


def _sched_pipeline(argv: Sequence[str]) -> None:
    """Check options: the program parses them in order and stops at --version, before it reads files."""
    program = shutil.which("sched-pipeline", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    done = subprocess.run(
        [program or "sched-pipeline", *argv, "--version"], capture_output=True, text=True, timeout=LIMIT_S
    )
    print(done.stdout)
    if done.returncode:
        raise RequestError(done.stderr)


PARSERS: dict[str, Parse] = {
    "runtime.py": lambda argv: parse_runtime(argv, Environment()),
    "pipeedge-doctor": lambda argv: parse_doctor(argv, Environment()),
    "pipeedge-key": lambda argv: key_parser().parse_args(argv),
    "pipeedge-launch": lambda argv: plan_launch(parse_launch(argv)),
    "pipeedge-report": parse_report,
    "pipeedge-simulate": parse_simulate,
    "profiler.py": parse_profiler,
    "profiler_results_to_models.py": parse_models,
    "profiler_results_to_device_types.py": parse_device_types,
    "revauct.py": lambda argv: parse_auction(argv, Environment()),
    "save_model_weights.py": parse_fetch,
    "sched-pipeline": _sched_pipeline,
    "tools/testbed.py": parse_testbed,
    "train.py": lambda argv: parse_train(argv, Environment(), cores=2),
    "pipeedge chat": parse_chat,
    "pipeedge completion": lambda argv: completion_parser().parse_args(argv),
    "pipeedge config": lambda argv: config_parser().parse_args(argv),
    "pipeedge ask": lambda argv: parse_ask(argv, Environment()),
    "pipeedge down": lambda argv: parse_down(argv, Environment()),
    "pipeedge join": lambda argv: parse_join(argv, Environment()),
    "pipeedge node": lambda argv: parse_node(argv, Environment()),
    "pipeedge nodes": lambda argv: parse_members(argv, Environment()),
    "pipeedge status": lambda argv: parse_status(argv, Environment()),
    "pipeedge up": lambda argv: parse_up(argv, Environment()),
}
"""Parser of the command line of every program."""

OTHERS = {
    "apt",
    "cmake",
    "git",
    "ip",
    "mkdir",
    "nc",
    "pgrep",
    "pip",
    "scp",
    "ss",
    "ssh",
    "tc",
    "torchrun",
    "wg",
}
"""Other programs whose options the pages name."""


def called(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return program and arguments of a command, if it is one of PipeEdge."""
    words = list(words)
    if words and words[0] == "torchrun":
        place = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
        rest = words[place:]
        return (rest[0], ["0", "2", *rest[1:]]) if rest and rest[0] == "runtime.py" else called(rest)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    if not words:
        return None
    if words[0] == "pipeedge" and len(words) > 1:
        script = next((script for script, command in SCRIPTS.items() if command == words[1]), None)
        return (script or " ".join(words[:2]), words[2:])
    name = words[0].removeprefix("./")
    known = name in PARSERS or name == "make" or name.startswith(("benchmarks/", "tools/", "scripts/"))
    return (name, words[1:]) if known else None


def check(name: str, argv: list[str]) -> None:
    """Refuse a command line that the program would refuse."""
    if name == "make":
        goals = [word for word in argv if "=" not in word]
        rules = (ROOT / "Makefile").read_text("utf-8")
        assert all(re.search(rf"^{goal}:", rules, re.MULTILINE) for goal in goals), argv
    elif name in PARSERS:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            PARSERS[name](argv)
    else:
        source = (ROOT / name).read_text("utf-8")
        unknown = [word for word in argv if word.startswith("-") and f'"{word}"' not in source]
        assert not unknown, f"{name} has no {unknown}"


@pytest.mark.parametrize("program", PARSERS)
def test_every_program_says_its_version(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    if program == "sched-pipeline":
        PARSERS[program]([])  # asked for its version, it ends before it reads a file
    else:
        with pytest.raises(SystemExit) as ended:
            PARSERS[program](["--version"])
        assert ended.value.code == 0
    assert pipeedge.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("program", PARSERS)
def test_every_program_suggests_the_intended_option(program: str) -> None:
    own = {
        "revauct.py": ["0", "2"],
        "pipeedge-key": ["cluster.pem"],
        "pipeedge-launch": ["--local", "2", "--"],
        "pipeedge-report": ["a.json"],
        "pipeedge completion": ["bash"],
        "profiler_results_to_device_types.py": ["board"],
        "tools/testbed.py": ["up", "bed.yml"],
    }
    option = "--formt" if program == "sched-pipeline" else "--verbsoe"
    meant = "--format" if program == "sched-pipeline" else "--verbose"
    with pytest.raises(RequestError, match=rf"unknown option {option}; did you mean {meant}\?"):
        PARSERS[program]([*own.get(program, []), option])


@cache
def options(program: str) -> frozenset[str]:
    """Return every option of a program, from ``--help``; or of a tool or benchmark, from its source."""
    if program not in PARSERS and not (ROOT / program).is_file():  # `benchmarks/…`
        return frozenset()
    if program not in PARSERS:
        return frozenset(re.findall(r'"(--?[A-Za-z][\w-]*)"', (ROOT / program).read_text("utf-8")))
    actions = ["up", "down", "set", "exec"] if program == "tools/testbed.py" else []
    printed = io.StringIO()
    everything = ["--help"] if program == "tools/testbed.py" else ["--help-all"]
    for argv in [everything, *([action, "--help"] for action in actions)]:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(printed):
            PARSERS[program](argv)
    return frozenset(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", printed.getvalue()))


TOOLS = [
    f"{path.parent.name}/{path.name}"
    for room in ("benchmarks", "tools")
    for path in (ROOT / room).glob("*.py")
]


STARTS_RUNTIME = {"pipeedge-launch", "revauct.py"}
"""Programs that pass options on to the runtime."""


def programs_in(text: str) -> set[str]:
    """Programs that ``text`` names, by their script or as a command of ``pipeedge``."""
    found = {
        program
        for program in [*PARSERS, *TOOLS]
        for name in (program, program.rpartition("/")[2])  # benchmarks go by their names alone
        if re.search(rf"(?<![\w/]){re.escape(name)}(?![\w-])", text)
    }
    return found | {script for script, command in SCRIPTS.items() if f"pipeedge {command}" in text}


# --- links ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = PAGES[name]
    broken = []
    for link in page.links():
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        if not path.exists():
            broken.append(link)
        elif anchor:
            there = PAGES.get(str(path.relative_to(ROOT))) or Page.read(path)
            if anchor not in there.anchors():
                broken.append(f"{link}: it has {sorted(there.anchors())}")
    assert not broken


def test_every_page_can_be_reached() -> None:
    seen, open_ = set(), [DOCS / "README.md"]
    while open_:
        page = Page.read(open_.pop())
        seen.add(page.path)
        for link in page.links():
            path = (page.path.parent / link.partition("#")[0]).resolve()
            if path.suffix == ".md" and path.is_file() and path.is_relative_to(ROOT) and path not in seen:
                open_.append(path)
    assert set(DOCS.glob("*.md")) <= seen


def test_pictures_match_the_output_of_the_programs(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from draw_pictures import draw_all
    finally:
        sys.path.remove(str(ROOT / "tools"))
    drawn = draw_all(tmp_path)
    for path in drawn:
        kept = DOCS / "pictures" / path.name
        assert kept.read_text() == path.read_text(), f"tools/draw_pictures.py draws another {path.name}"
    shown = {Path(link).name for page in PAGES.values() for link in page.pictures()}
    assert {path.name for path in (DOCS / "pictures").iterdir()} == shown


# --- commands ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_programs_accept_the_commands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wrong = []
    for block in PAGES[name].blocks:
        for words in commands(block):
            command = called(words)
            if command is None:
                continue
            try:
                check(*command)
            except (RequestError, AssertionError, OSError) as error:
                wrong.append(f"{name}, block at line {block.line}: {' '.join(words)}: {error}")
    if name != "docs/README.md":  # what is meant to be refused says so
        refused = {step.command for block in PAGES[name].blocks for step in console_steps(block)}
        wrong = [line for line in wrong if not any(_is_refused(text, line) for text in refused)]
    assert not wrong


def _is_refused(command: str, line: str) -> bool:
    """Return whether a console block runs the command and shows its exit status, which is checked there."""
    return command.endswith("; echo $?") and " ".join(command[:-9].split()) in " ".join(line.split())


CHAPTERS = {"Training": {"train.py"}, "The schedule": {"sched-pipeline"}}
"""Programs of chapters whose headings do not name them."""
_OPTIONS_WORDS = 4
"""Largest number of words that do not begin with an option and are not a sentence."""


def unknown_options(page: Page) -> list[str]:
    """Options in the prose of ``page`` that the program which is meant does not have.

    A command names its program; an option alone belongs to a program that the chapter is about, which its
    heading names, or else to one that the page names, or to the runtime, which the whole book is about.
    """
    named = {"runtime.py"} | programs_in(page.prose + "\n".join(block.text for block in page.blocks))
    unknown = []
    for heading, code in page.chapters():
        about = programs_in(heading) or named | CHAPTERS.get(heading, set())
        for text in code:
            words = text.split()
            if words[0] in OTHERS or "://" in text or "pip install" in text:
                continue
            command = called(words)
            is_program = command is not None and command[0] != "make"
            meant = {command[0]} if command and is_program else programs_in(text) or about
            if command is None and not text.startswith("-") and len(words) > _OPTIONS_WORDS:
                meant = set(PARSERS)  # a message, which tests/contract/test_troubleshooting.py compares
            if meant & STARTS_RUNTIME:
                meant = meant | {"runtime.py"}
            known = FOREIGN.union(*map(options, meant))
            unknown += [
                f"{option} in `{text}`: {', '.join(sorted(meant))} has no such option"
                for word in words
                for option in re.findall(r"(?:^|(?<=/))--?[A-Za-z][\w-]*", word)
                if option not in known
            ]
    return unknown


@pytest.mark.parametrize("name", PAGES)
def test_options_that_are_named_exist(name: str) -> None:
    assert unknown_options(PAGES[name]) == []


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("`runtime.py --stages 4`", ["--stages"]),  # which train.py has
        ("`train.py --stages 4`", []),
        ("## train.py\n\n`--stages` and `--partition`", []),
        ("## train.py\n\n`-pt/--partition`", ["-pt"]),  # which runtime.py has
        ("`pipeedge run --rank-order 1,0` and `--stages`", ["--stages"]),
        ("`train.py` and `runtime.py` have `--stages` and `--rank-order`", []),
    ],
)
def test_an_option_of_another_program_is_found(tmp_path: Path, text: str, unknown: list[str]) -> None:
    (tmp_path / "page.md").write_text(text)
    assert [line.partition(" ")[0] for line in unknown_options(Page.read(tmp_path / "page.md"))] == unknown


FOREIGN = {"-DNDEBUG", "--master-port", "-n"}
"""Options of compilers, of torchrun, and of the shell's ulimit."""


@pytest.mark.parametrize(
    "printed",
    ["8168 items/s", "12,110 items/s", "1,204,000.5 items/s", "0.00021 items/s", "-3 items/s", "5 items/s"],
)
def test_a_page_accepts_a_machine_of_any_speed(printed: str) -> None:
    assert fits("throughput  8168 items/s", f"throughput   {printed}", varying=True)
    assert fits("took 2.065 ms, -78.7%, 257MB", "took 1,002.1 s, +3%, 1.2GB", varying=True)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("throughput  8168 items/s", "throughput  1.211e+04 items/s"),
        ("layers 1-16", "layers 1-12"),
        ("stage 0 on pi1", "stage 0 on pi2"),
        ("2.1 ms", "2.1 items"),
        ("took 2 ms", "took"),
    ],
)
def test_a_page_with_other_output_does_not_match(shown: str, printed: str) -> None:
    assert not fits(shown, printed, varying=True)


def test_every_option_of_the_runtime_has_a_chapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no name is broken at the end of a line
    printed = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(printed):
        PARSERS["runtime.py"](["--help-all"])
    named = set(re.findall(r"--[a-z][\w-]*", " ".join(PAGES["docs/commands.md"].code())))
    assert (
        set(re.findall(r"--[a-z][\w-]*", printed.getvalue())) - {"--help", "--help-all", "--version"} <= named
    )


@pytest.mark.parametrize("program", sorted(PARSERS.keys() - {"tools/testbed.py"}))
def test_help_shows_three_examples(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        PARSERS[program](["--help"])
    after = re.split(r"^examples:?\n", capsys.readouterr().out, flags=re.IGNORECASE | re.MULTILINE)[1]
    assert len(after.partition("\n\n")[0].strip().splitlines()) == 3


@pytest.mark.parametrize("name", PAGES)
def test_examples_of_files_can_be_read(name: str) -> None:
    for block in PAGES[name].blocks:
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict | list), f"{name}:{block.line}"
