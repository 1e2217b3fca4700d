"""Markdown as data: the blocks, commands, links and headings of a page; the pages of this project.

The language of a fenced block in README.md and docs/ determines how it is tested:

    ```sh         commands that are run, in a directory like a checkout, page by page
    ```console    the same, each after ``$ ``, with its output; ``...`` matches anything, and in
                  ```console varying any figure matches any other
    ```           commands that are not run: they need other hosts, a download, root, or minutes
    ```text       no commands, but drawings or output; likewise any other language, such as ```yaml

Commands that are not run are still checked: the program must accept the options.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from places import ROOT

_FENCE = re.compile(r"^( *)```(\w*)( varying)?\s*$")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$")
_LINK = re.compile(r"(!?)\[[^\]]*\]\(([^()\s]+)\)")
_SPAN = re.compile(r"(`+)(.+?)\1(?!`)", re.DOTALL)
_PROMPT = re.compile(r"^(?:(?P<host>[a-z][\w-]*)?\$ )")
_FIGURE = re.compile(
    r"(?<![\w.-])[-+]?\d[\d,]*(?:\.\d+)?(?: ?(?:[nuµm]?s|min|h|[kMGT]?B|[kMGT]|%))?(?![\w-]|\.\d)"
)
"""A figure with its unit, as on a page and in the output of a program."""
_SEPARATORS = {";", "&&", "||", "|", "&", "(", ")", ";;"}
_REDIRECTS = {">", ">>", "<", "2>", "&>", ">&"}


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    line: int
    """Number of its first line, from 1."""
    text: str
    varying: bool = False
    """Whether its numbers vary between runs."""


@dataclass(frozen=True)
class Step:
    """A command of a console block, with its output."""

    command: str
    output: str


@dataclass(frozen=True)
class Page:
    """A page of documentation."""

    path: Path
    blocks: tuple[Block, ...]
    prose: str
    """All other lines of the page."""

    @classmethod
    def read(cls, path: Path) -> Page:
        """Split a file into blocks and prose."""
        blocks, prose = [], []
        lines = iter(enumerate(path.read_text(encoding="utf-8").splitlines(), start=1))
        for number, line in lines:
            fence = _FENCE.match(line)
            if fence is None:
                prose.append(line)
                continue
            indent, inside = len(fence[1]), []
            for _, within in lines:
                if re.fullmatch(r" *```\s*", within):
                    break
                inside.append(within[indent:])
            else:
                raise ValueError(f"{path}:{number}: the block does not end")
            blocks.append(Block(fence[2], number + 1, "\n".join(inside), bool(fence[3])))
        return cls(path, tuple(blocks), "\n".join(prose))

    def links(self) -> Iterator[str]:
        """Yield the targets of links and pictures."""
        for match in _LINK.finditer(_SPAN.sub("", self.prose)):
            yield match[2]

    def pictures(self) -> Iterator[str]:
        """Yield the targets of pictures."""
        for match in _LINK.finditer(_SPAN.sub("", self.prose)):
            if match[1]:
                yield match[2]

    def anchors(self) -> set[str]:
        """Return the anchors of the headings, as GitHub makes them."""
        found: set[str] = set()
        for line in self.prose.splitlines():
            heading = _HEADING.match(line)
            if heading is None:
                continue
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "").lower()
            name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            count = 0
            while (unique := f"{name}-{count}" if count else name) in found:
                count += 1
            found.add(unique)
        return found

    def chapters(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the headings, each with the code spans below it; the first part has no heading."""
        heading, lines = "", []
        for line in [*self.prose.splitlines(), "# "]:
            match = _HEADING.match(line)
            if match is None:
                lines.append(line)
                continue
            yield heading, Page(self.path, (), "\n".join(lines)).code()
            heading, lines = match[1], []

    def code(self) -> list[str]:
        """Return the code spans, which may extend over the end of a line."""
        return [" ".join(match[2].split()) for match in _SPAN.finditer(self.prose)]


def console_steps(block: Block) -> Iterator[Step]:
    """Yield the commands of a console block, each with its output."""
    command, output = "", []
    for line in block.text.splitlines():
        prompt = _PROMPT.match(line)
        if command.endswith("\\"):
            command = command[:-1] + line.strip()
        elif prompt:
            if command:
                yield Step(command, "\n".join(output))
            command, output = line[prompt.end() :], []
        else:
            output.append(line)
    if command:
        yield Step(command, "\n".join(output))


def commands(block: Block) -> Iterator[list[str]]:
    """Yield every simple command of a block as words; in a console block, those after a prompt."""
    if block.language not in ("sh", "console", ""):
        return
    text = re.sub(r" *\\\n *", " ", block.text)
    for line in text.splitlines():
        prompt = _PROMPT.match(line)
        if block.language == "console" and not prompt:
            continue
        try:
            yield from _simple(line[prompt.end() :] if prompt else line)
        except ValueError:  # a quotation mark without its twin: no command
            continue


def _simple(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    skip = False
    for word in lexer:
        if word in _SEPARATORS:
            if words:
                yield words
            words = []
        elif word in _REDIRECTS:
            skip = True
        elif skip:
            skip = False
        elif words or not re.match(r"[A-Z_]+=", word):
            words.append(word)
    if words:
        yield words


def fits(shown: str, printed: str, *, varying: bool = False) -> bool:
    """Return whether a page shows what was printed; ``...`` matches anything, and spaces any spaces.

    Args:
        shown: Output on the page.
        printed: Output of the program.
        varying: Whether any figure matches any other: with another sign, with or without separators
            between thousands, with another unit of time or size. A number with an exponent is not a figure,
            because no program prints one.
    """

    def plain(text: str) -> str:
        lines = "\n".join(" ".join(line.split()) for line in text.strip().splitlines())
        if not varying:
            return lines
        return _FIGURE.sub("0", re.sub("─+", "─", lines))

    parts = [re.escape(part) for part in plain(shown).split("...")]
    return re.fullmatch(".*".join(parts), plain(printed), re.DOTALL) is not None


DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): Page.read(path) for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
}
