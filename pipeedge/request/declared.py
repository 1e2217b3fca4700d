"""Declare each option once, at the field of the request that it fills.

    comm: str = option("p2p", "-c/--comm", choices=COMMS, obeyed_by=ALL, help="... ({default})")

A request whose options are all obeyed by the same ranks says so once: ``OBEYED_BY = ObeyedBy.RANK_0``.

              ┌── add_options ───────> argument of the parser
              ├── given ─────────────> value of the field, from the command line or the environment
    option ───┼── check_options ─────> one line about an invalid value
              ├── agreed_values ─────> comparison between the ranks
              └── sections of a parser > table in docs/commands.md (tools/write_option_tables.py)

The default is that of the field alone, so a request that is made without a command line has it too.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.base.wording import figure
from pipeedge.request.parsing import dtype_names, integers, names, path

__all__ = [
    "PORT",
    "Check",
    "ObeyedBy",
    "Option",
    "Rule",
    "Section",
    "add_sections",
    "agreed_values",
    "at_least",
    "between",
    "check_options",
    "check_rules",
    "given",
    "given_options",
    "option",
    "option_like",
    "option_of",
    "options_of",
    "read_variables",
]

RequestT = TypeVar("RequestT")

_KEY = "option"
_OBEYED_BY = "obeyed_by"
"""Keys of the metadata of a dataclass's field."""
_METAVARS = MappingProxyType({path: "FILE", int: "N", integers: "LIST", names: "LIST", dtype_names: "LIST"})
"""Placeholder of a value in ``--help`` by its type, for options that do not name one."""


class ObeyedBy(enum.Enum):
    """The ranks that obey an option, which decides how ranks compare its values."""

    ALL = "all ranks"
    """Every rank must have the same value."""
    RANK_0 = "rank 0"
    """Another rank may have the same value, or none."""
    DATA_RANK = "the data rank"
    """Another rank may have the same value, or none."""
    EACH = "each rank for itself"
    """Ranks may differ."""


@dataclass(frozen=True)
class Check:
    """A condition on the value of an option."""

    holds: Callable[[Any], bool]
    requirement: str
    """Description of valid values, for the message about another one."""


def at_least(least: int) -> Check:
    """Return the check for a smallest value."""
    return Check(lambda value: value >= least, f"must be at least {least}")


def between(least: float, most: float, requirement: str) -> Check:
    """Return the check for a range that includes its ends."""
    return Check(lambda value: least <= value <= most, requirement)


PORT = between(1, 65535, "a port is 1 to 65535")


@dataclass(frozen=True)
class Rule(Generic[RequestT]):
    """A condition on several options together: what one needs, or cannot be combined with."""

    broken: Callable[[RequestT], bool]
    line: str
    """Message if the rule is broken; ``{field}`` stands for the value of a field of the request."""


def check_rules(request: RequestT, rules: Iterable[Rule[RequestT]], error: type[RequestError]) -> None:
    """Check rules in their order.

    Raises:
        RequestError: One is broken; an ``error`` with its line.
    """
    for rule in rules:
        if rule.broken(request):
            raise error(rule.line.format_map(vars(request)))


@dataclass(frozen=True)
class Option:
    """One option of a program."""

    flags: tuple[str, ...]
    help: str
    """Line for ``--help``; ``{default}`` stands for the default, ``{runtime.py}`` for how that is started."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of ``add_argument``, as argparse names them."""
    check: Check | None = None
    variable: str | None = None
    """Environment variable that applies if the option is not given, and not empty."""
    older: tuple[str, ...] = ()
    """Further names, which earlier versions had and which are still understood."""
    obeyed_by: ObeyedBy = ObeyedBy.EACH
    subject: str = ""
    """Name of the value in a message about ranks that disagree, for ``ObeyedBy.ALL``."""
    field: str = ""
    """Name of the request's field; set when the option is read from there, as the following ones are."""
    dest: str = ""
    """Name in the parser's namespace."""
    default: Any = None

    @property
    def name(self) -> str:
        """Name for messages: all flags, and the variable."""
        return "/".join(self.flags) + (f" ({self.variable})" if self.variable else "")

    @property
    def takes_list(self) -> bool:
        """Whether argparse collects values in a list."""
        return "nargs" in self.arguments or self.arguments.get("action") == "append"

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Add the option to a parser or a group. The namespace has it only if it is given."""
        arguments = dict(self.arguments)
        if isinstance(self.default, bool):
            arguments.setdefault("action", "store_false" if self.default else "store_true")
        elif "choices" not in arguments:
            metavar = _METAVARS.get(arguments.get("type"), self.flags[-1].lstrip("-").upper())
            arguments.setdefault("metavar", metavar)
        action: Any = group.add_argument(
            *self.flags,
            *self.older,
            dest=self.dest,
            default=argparse.SUPPRESS,
            help=self._help(),
            **arguments,
        )
        action.variable, action.declared, action.older = self.variable, self.default, self.older

    def _help(self) -> str:
        shown = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

        def expand(match: re.Match[str]) -> str:
            return shown if match[1] == "default" else program_name(match[1])

        return re.sub(r"\{([\w.-]+)\}", expand, self.help).replace("%", "%%")

    def parse(self, text: str) -> Any:
        """Parse the value of the variable.

        Raises:
            RequestError: It is not a value of this option.
        """
        kind: Callable[[str], Any] = self.arguments.get("type", str)
        try:
            return kind(text)
        except (ValueError, argparse.ArgumentTypeError):
            what = {int: "a whole number", float: "a number"}.get(kind, "a valid value")  # type: ignore[call-overload]
            raise RequestError(f"the environment's {self.variable}={text!r} is not {what}") from None

    def text(self, value: Any) -> str:
        """Return a value as it is written on the command line; a flag has none."""
        if value is True:
            return ""
        if self.takes_list and isinstance(value, tuple):
            return shlex.join(map(str, value))
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    def requirement(self, value: Any) -> str | None:
        """Return what ``value`` must be and is not, or None if it is valid."""
        if self.check is not None:
            return None if self.check.holds(value) else self.check.requirement
        choices: Sequence[str] = self.arguments.get("choices", (value,))
        return None if value in choices else f"choose one of {', '.join(choices)}"


@dataclass(frozen=True)
class Section:
    """Options that belong together in ``--help`` and in the documentation."""

    title: str
    """Heading in ``--help``; sections in a row may share one."""
    options: tuple[Option, ...]
    exclusive: bool = False
    """Whether at most one of the options may be given."""
    topic: str = ""
    """Name in the table of options, if not the title."""
    chapter: str = ""
    """Markdown link to the documentation."""


def option(default: Any, flags: str, help: str, **declared: Any) -> Any:  # noqa: A002 - as in argparse
    """Return the field of a request that an option fills.

    Args:
        default: The field's default.
        flags: Names of the option, ``-b/--batch-size``.
        help: See ``Option``.
        declared: Further attributes of ``Option``; the others are arguments of ``add_argument``. Without
            ``obeyed_by``, it is ``OBEYED_BY`` of the request's class, or each rank.
    """
    obeyed_by = declared.pop("obeyed_by", None)
    own = {name: declared.pop(name) for name in ("check", "variable", "subject", "older") & declared.keys()}
    made = Option(tuple(flags.split("/")), help, arguments=declared, **own)
    return dataclasses.field(default=default, metadata={_KEY: made, _OBEYED_BY: obeyed_by})


def option_like(request: type, name: str, **changed: Any) -> Any:
    """Return a field with the option of another request's field.

    Args:
        request: The other request.
        name: Name of its field.
        changed: Attributes of ``Option`` that differ.
    """
    declared = dataclasses.replace(option_of(request, name), **changed)
    return dataclasses.field(
        default=declared.default, metadata={_KEY: declared, _OBEYED_BY: declared.obeyed_by}
    )


def options_of(request: type, *names: str) -> tuple[Option, ...]:
    """Return the options of a request's fields, or of those that are named, in that order."""
    by_default = getattr(request, "OBEYED_BY", ObeyedBy.EACH)
    found = {
        one.name: dataclasses.replace(
            one.metadata[_KEY],
            field=one.name,
            dest=f"{request.__name__}.{one.name}",
            default=one.default,
            obeyed_by=one.metadata[_OBEYED_BY] or by_default,
        )
        for one in dataclasses.fields(request)
        if _KEY in one.metadata
    }
    return tuple(found[name] for name in names or found)


def option_of(request: type, name: str) -> Option:
    """Return the option of one field of a request."""
    return options_of(request, name)[0]


def add_sections(parser: argparse.ArgumentParser, sections: Iterable[Section]) -> None:
    """Add the options of ``sections`` to ``parser``."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for section in sections:
        if section.title not in groups:
            groups[section.title] = parser.add_argument_group(section.title)
        group: argparse._ActionsContainer = groups[section.title]
        if section.exclusive:
            group = group.add_mutually_exclusive_group()
        for one in section.options:
            one.add_to(group)


def read_variables(
    arguments: argparse.Namespace, sections: Iterable[Section], variables: Mapping[str, str]
) -> None:
    """Add the values that the environment has for options that the command line leaves out.

    Raises:
        RequestError: A variable has an invalid value.
    """
    for one in (one for section in sections for one in section.options):
        if one.variable and one.dest not in arguments and variables.get(one.variable):
            setattr(arguments, one.dest, one.parse(variables[one.variable]))


def given(arguments: argparse.Namespace, request: type) -> dict[str, Any]:
    """Return the fields of ``request`` that the user gave, with their values."""
    return {one.field: value for one, value in _given(arguments, options_of(request))}


def given_options(
    arguments: argparse.Namespace, sections: Iterable[Section]
) -> tuple[tuple[Option, Any], ...]:
    """Return the options in ``sections`` that the user gave, with their values."""
    return tuple(_given(arguments, (one for section in sections for one in section.options)))


def agreed_values(request: Any) -> Iterator[tuple[Option, Any]]:
    """Yield the options of a request, and of its parts, whose values all ranks must have in common."""
    for one in options_of(type(request)):
        if one.obeyed_by is ObeyedBy.ALL:
            yield one, getattr(request, one.field)
    for part in dataclasses.fields(request):
        value = getattr(request, part.name)
        if dataclasses.is_dataclass(value):
            yield from agreed_values(value)


def _given(arguments: argparse.Namespace, options: Iterable[Option]) -> Iterator[tuple[Option, Any]]:
    values = vars(arguments)
    for one in options:
        if one.dest in values:
            value = values[one.dest]
            yield one, tuple(value) if isinstance(value, list) else value


def check_options(request: Any, error: type[RequestError] = RequestError) -> None:
    """Check each value of a request against its option, unless it is None.

    Raises:
        error: A value is invalid.
    """
    for one in options_of(type(request)):
        value = getattr(request, one.field)
        requirement = None if value is None else one.requirement(value)
        if requirement is not None:
            shown = figure(value, 7) if isinstance(value, float) else one.text(value)
            raise error(f"{one.name} {shown}: {requirement}" if shown else f"{one.name} {requirement}")
