"""YAML files, read with line numbers and with limits on their size; written atomically.

    file --read_document--> Field --at("bw_Mbps")--> Field --number()--> 1000.0

A ``Field`` is one value together with its path in the document, so that every message names file, line and
key: ``CLUSTER.yml:12: cpu_fraction: board: is -1; it must not be negative``. Schedules, test beds and results
of the profiler are read in this way. The files of the scheduler are read by ``sched-pipeline`` alone
(``plan.spec_files``); here they are only edited.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from pipeedge.base.errors import SpecError
from pipeedge.base.files import replace_file
from pipeedge.base.wording import excerpt, figure

__all__ = ["Field", "dump", "parse_document", "read_document", "write_document", "write_text", "yaml_name"]

MAX_FILE_BYTES = 64 << 20
MAX_VALUES = 4_000_000
"""Largest number of values in a file, counted with every alias expanded."""
MAX_DEPTH = 32
LARGEST_NUMBER = 1e15
_SHOWN = 80
"""Characters of a value that a message shows at most."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

# [sign] digits [. digits] [e [sign] digits], without a leading zero, which YAML 1.1 reads as octal.
_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z")


class _Dumper(_CDumper):  # type: ignore[misc]
    """A dumper that also quotes texts that only newer versions of YAML read as numbers, such as 1e5."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("+-.0123456789"))


@dataclass(frozen=True)
class Field:
    """One value of a document (a map, a list or a scalar) with its file, line and path."""

    file: str
    node: yaml.Node
    path: tuple[str, ...] = ()

    def fail(self, what: str) -> NoReturn:
        """Raise ``SpecError`` with the file, line and key, followed by ``what``."""
        where = f"{self.file}:{self.node.start_mark.line + 1}: "
        raise SpecError(where + "".join(f"{excerpt(step, _SHOWN)}: " for step in self.path) + what)

    def _wrong_kind(self, wanted: str) -> NoReturn:
        if self.is_null:
            self.fail(f"has no value; {wanted} is expected")
        if isinstance(self.node, yaml.ScalarNode):
            quotes = "" if self._plain else " in quotes"
            self.fail(f"is '{excerpt(self.node.value, _SHOWN)}'{quotes}; {wanted} is expected")
        self.fail(
            f"is a {'list' if isinstance(self.node, yaml.SequenceNode) else 'map'}; {wanted} is expected"
        )

    def _child(self, node: yaml.Node, step: str) -> Field:
        return Field(self.file, node, (*self.path, step))

    @property
    def _plain(self) -> bool:
        return isinstance(self.node, yaml.ScalarNode) and not self.node.style

    @property
    def is_null(self) -> bool:
        """Whether the value is missing (``key:``, ``~``, ``null``)."""
        return self.node.tag == "tag:yaml.org,2002:null"

    @property
    def is_name(self) -> bool:
        """Whether the value is a scalar other than null."""
        return isinstance(self.node, yaml.ScalarNode) and not self.is_null

    def entries(self) -> dict[str, Field]:
        """Return the entries of a map in file order; null has none. Raises SpecError for duplicate keys."""
        if self.is_null:
            return {}
        if not isinstance(self.node, yaml.MappingNode):
            self._wrong_kind("a map")
        return dict(self._read_entries(self.node, depth=0))

    def _read_entries(self, node: yaml.MappingNode, depth: int) -> Iterator[tuple[str, Field]]:
        if depth > MAX_DEPTH:
            self.fail(f"merge keys nested deeper than {MAX_DEPTH} levels")
        own: set[str] = set()
        merged: list[yaml.Node] = []
        for key, value in node.value:
            if not Field(self.file, key).is_name:
                self.fail("a key of a map must be a name")
            if key.value == "<<" and not key.style:
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
                continue
            if key.value in own:
                Field(self.file, key).fail(f"the key {excerpt(key.value, _SHOWN)} comes twice")
            own.add(key.value)
            yield key.value, self._child(value, key.value)
        for source in merged:
            if not isinstance(source, yaml.MappingNode):
                self.fail("<< must name a map or a list of maps")
            for name, entry in self._read_entries(source, depth + 1):
                if name not in own:
                    own.add(name)
                    yield name, entry

    def find(self, key: str) -> Field | None:
        """Return the entry ``key`` of a map, or None if it is missing."""
        if not isinstance(self.node, yaml.MappingNode):
            self._wrong_kind("a map")
        return self.entries().get(key)

    def at(self, key: str) -> Field:
        """Return the entry ``key`` of a map; a missing one raises ``SpecError``."""
        found = self.find(key)
        if found is None:
            self.fail(f"the key {key} is missing")
        return found

    def items(self) -> list[Field]:
        """Return the entries of a list; null has none."""
        if self.is_null:
            return []
        if not isinstance(self.node, yaml.SequenceNode):
            self._wrong_kind("a list")
        return [self._child(node, f"entry {index}") for index, node in enumerate(self.node.value, start=1)]

    def text(self) -> str:
        """Return any scalar but null, as written in the file."""
        if not isinstance(self.node, yaml.ScalarNode) or self.is_null:
            self._wrong_kind("a name")
        return str(self.node.value)

    def number(self, least: float = 0) -> float:
        """Return a finite decimal number from ``least`` to ``LARGEST_NUMBER``."""
        if (
            not isinstance(self.node, yaml.ScalarNode)
            or not self._plain
            or not _NUMBER.match(self.node.value)
        ):
            self._wrong_kind("a number")
        value = float(self.node.value)
        if not abs(value) <= LARGEST_NUMBER:
            self.fail(
                f"is {excerpt(self.node.value, _SHOWN)}; numbers may not exceed {figure(LARGEST_NUMBER)}"
            )
        if value < least:
            limit = "it must not be negative" if least == 0 else f"it must be at least {figure(least)}"
            self.fail(f"is {excerpt(self.node.value, _SHOWN)}; {limit}")
        return value

    def whole_number(self, least: int = 0) -> int:
        """Return a whole number of at least ``least``."""
        value = self.number(least)
        if not value.is_integer():
            self._wrong_kind("a whole number")
        return int(value)

    def plain(self) -> Any:
        """Return the value as Python data by YAML's own rules, for keys that are passed on unread."""
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_document(self.node)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            self.fail(f"is not plain data: {_problem(error)}")
        finally:
            loader.dispose()


def read_document(path: str | os.PathLike[str]) -> Field:
    """Read the only document of a regular file.

    Raises:
        SpecError: The file is missing, unreadable, not regular, larger than ``MAX_FILE_BYTES``, not UTF-8,
            not YAML, empty, nested too deeply or inflated by aliases.
    """
    file = Path(path)
    name = excerpt(path, 400)
    try:
        if not file.exists():
            raise SpecError(f"{name}: no such file")
        if not file.is_file():
            raise SpecError(f"{name}: is {'a directory' if file.is_dir() else 'not a regular file'}")
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{name}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise SpecError(f"{name}: is larger than {MAX_FILE_BYTES >> 20} MiB, the most that is read")
    return parse_document(data, name)


def parse_document(data: bytes, name: str) -> Field:
    """Parse the contents of a file, which messages call ``name``, as ``read_document`` does."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{name}:{line}: is not UTF-8 text") from error
    try:
        _check_size(text, name)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line_of = f":{mark.line + 1}" if mark is not None else ""
        raise SpecError(f"{name}{line_of}: is not valid YAML: {_problem(error)}") from error
    if node is None:
        raise SpecError(f"{name}: is empty")
    return Field(name, node)


class _OpenNode(NamedTuple):
    """A list or map whose end the parser has not reached yet."""

    anchor: str | None
    before: int
    """Number of values counted when it began, including itself."""


def _check_size(text: str, name: str) -> None:
    """Check the limits on the parser's events, which need no recursion, before the text is composed."""
    weights: dict[str, int] = {}
    open_nodes: list[_OpenNode] = []
    count = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark is not None else 1
        if isinstance(event, yaml.AliasEvent):
            count += weights.get(str(event.anchor), 0)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor:
                weights[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            count += 1
            open_nodes.append(_OpenNode(event.anchor, count))
            if len(open_nodes) > MAX_DEPTH:
                raise SpecError(f"{name}:{line}: nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = open_nodes.pop()
            if ended.anchor:
                weights[ended.anchor] = count - ended.before + 1
        if count > MAX_VALUES:
            raise SpecError(
                f"{name}:{line}: holds more than {MAX_VALUES} values (counted with aliases written out)"
            )


def write_document(path: str | os.PathLike[str], data: Any) -> None:
    """Write ``data`` (maps, lists, numbers, names) as YAML, with lists of scalars on one line.

    Raises:
        SpecError: The file cannot be written. An existing file is then unchanged.
    """
    write_text(path, dump(data))


def dump(data: Any) -> str:
    """Return ``data`` as YAML, with lists of scalars on one line."""
    # In PyYAML, default_flow_style=None means "write collections of scalars inline".
    text: str = yaml.dump(data, Dumper=_Dumper, default_flow_style=None, sort_keys=False, width=100)
    return text


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically, so that no reader ever sees half of it.

    Raises:
        SpecError: The file cannot be written.
    """
    try:
        replace_file(Path(path), text.encode())
    except OSError as error:
        raise SpecError(f"{excerpt(path, 400)}: cannot be written: {error.strerror}") from error


def yaml_name(name: str) -> str:
    """Return ``name`` as YAML that reads back as this name, in double quotes only if it needs them.

    Whole numbers stay plain, for hosts that are named after their rank.
    """
    if re.fullmatch("0|[1-9][0-9]{0,17}", name, re.ASCII):
        return name
    # Starting with a letter excludes everything that YAML 1.1 or 1.2 reads as a number, date or time.
    usual = re.fullmatch("[A-Za-z][A-Za-z0-9._-]*", name, re.ASCII)
    words = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
    if usual and name.lower() not in words:
        return name
    quoted: str = yaml.dump(name, Dumper=_Dumper, default_style='"', allow_unicode=True, width=2**31 - 1)
    return quoted.strip()


def _problem(error: Exception) -> str:
    parts = [getattr(error, name, None) for name in ("context", "problem", "reason")]
    text = ", ".join(str(part) for part in parts if part) or str(error)
    return excerpt(" ".join(text.split()), 200)
