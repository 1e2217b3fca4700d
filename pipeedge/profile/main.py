"""``profiler.py`` and the two converters as programs: arguments, one call, an exit status."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from pipeedge.base.guard import guard
from pipeedge.base.program import is_verbose, program_name
from pipeedge.base.streams import end, print_notice, print_result, say
from pipeedge.base.wording import printable
from pipeedge.profile.options import parse_device_types, parse_models, parse_profiler
from pipeedge.profile.request import LinkCommand, SensitivityCommand, ServeCommand, SyntheticCommand
from pipeedge.run.main import limit_threads, quiet_links

__all__ = ["main", "main_device_types", "main_models"]

PROGRAM = "profiler.py"
MODELS_PROGRAM = "profiler_results_to_models.py"
DEVICE_TYPES_PROGRAM = "profiler_results_to_device_types.py"


def main() -> NoReturn:
    """Run ``profiler.py``."""
    program = program_name(PROGRAM)
    end(program, guard(program, _profiler, verbose=is_verbose(sys.argv)))


def main_models() -> NoReturn:
    """Run ``profiler_results_to_models.py``."""

    def convert() -> None:
        command = parse_models(sys.argv[1:])
        from pipeedge.profile.converting import convert_to_model

        convert_to_model(command, _say)

    program = program_name(MODELS_PROGRAM)
    end(program, guard(program, convert, verbose=is_verbose(sys.argv)))


def main_device_types() -> NoReturn:
    """Run ``profiler_results_to_device_types.py``."""

    def convert() -> None:
        command = parse_device_types(sys.argv[1:])
        from pipeedge.profile.converting import convert_to_device_type

        convert_to_device_type(command, _say)

    program = program_name(DEVICE_TYPES_PROGRAM)
    end(program, guard(program, convert, verbose=is_verbose(sys.argv)))


def _say(line: str) -> None:
    print_notice("\n".join(map(printable, line.split("\n"))))


def _warn(line: str) -> None:
    say(program_name(PROGRAM), line)


def _profiler() -> None:
    command = parse_profiler(sys.argv[1:])
    if isinstance(command, ServeCommand | LinkCommand):
        from pipeedge.profile import network

        place = network.parse_place(command.place)
        if isinstance(command, ServeCommand):
            network.serve_link(*place, tell=_say)
        print_result(str(network.measure_link(*place)))
        return
    # torch's profiler, which records allocations, would print a line at each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    limit_threads()
    quiet_links()
    # torch takes seconds to import, so it waits until the command line has proved valid.
    if isinstance(command, SyntheticCommand):
        from pipeedge.profile.synthetic import synthesize

        synthesize(command, _say)
        return
    if isinstance(command, SensitivityCommand):
        from pipeedge.profile.sensitivity import add_sensitivity

        add_sensitivity(command, _say)
        return
    from pipeedge.profile import session

    if command.measure is None:
        session.use_results(command, _say, _warn)
    else:
        session.profile(command, _say, _warn)
