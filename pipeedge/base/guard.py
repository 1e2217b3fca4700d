"""Run a program so that a failure is one line on standard error and an exit status."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from pipeedge.base.errors import EXIT_FAULT, EXIT_OK, PipeEdgeError, exit_code, one_line
from pipeedge.base.streams import open_standard_streams, say

__all__ = ["INTERRUPTED", "guard"]

INTERRUPTED = 130
"""Exit status after Ctrl-C or SIGTERM, as shells have it."""


def guard(program: str, main: Callable[[], None], *, verbose: bool) -> int:
    """Run ``main`` and return the exit status; a failure is one line on standard error.

    Args:
        program: what the line begins with.
        main: raises to fail.
        verbose: print the traceback too.
    """
    open_standard_streams()
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if verbose:
            traceback.print_exc()
        line = one_line(error)
        is_ours = exit_code(error) == EXIT_FAULT and not isinstance(error, PipeEdgeError)
        if is_ours and not verbose:
            line = f"internal error: {line} (run again with --verbose to see where)"
        say(program, line)
        return exit_code(error)
    return 0
