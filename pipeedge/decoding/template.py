"""Render a chat template, which is a program that came with a model, within limits of time and memory.

render ──line──> template_program, a process that can only compute ──line──> text
   └── no line in time: the process is killed, and the next one begins with the next conversation
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeedge.base.errors import InputError
from pipeedge.base.wording import excerpt

__all__ = ["TemplateRenderer"]

_PROGRAM = Path(__file__).with_name("template_program.py")
_SECONDS = 10.0
"""Longest time of one conversation, most of it for a board that is busy."""
_SHOWN = 200


class TemplateRenderer:
    """Renders conversations. Several threads may use it.

    Args:
        seconds: Longest time of one conversation.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Return the text that a template, in Jinja, makes of its variables.

        Raises:
            InputError: It refuses them, takes too long, or needs too much memory. The message says which.
        """
        line = json.dumps({"template": template, "variables": variables}).encode() + b"\n"
        with self._lock:
            answer = self._ask(line)
        if "error" in answer:
            raise InputError(
                f"the chat template refuses this conversation: {excerpt(answer['error'], _SHOWN)}"
            )
        return answer["text"]

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _ask(self, line: bytes) -> dict[str, str]:
        process = self._process
        if process is None:
            # Without a terminal's signals: Ctrl-C ends an answer, not this.
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        late = threading.Event()

        def stop(process: subprocess.Popen[bytes]) -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._seconds, stop, (process,))
        timer.daemon = True
        timer.start()
        answer = b""
        try:
            if process.stdin is not None and process.stdout is not None:
                with suppress(BrokenPipeError):
                    process.stdin.write(line)
                    process.stdin.flush()
                    answer = process.stdout.readline()
        finally:
            timer.cancel()
        if answer.endswith(b"\n"):
            found: dict[str, str] = json.loads(answer)
            return found
        self._end()
        if late.is_set():
            return {"error": f"it has not finished after {self._seconds:g} seconds"}
        return {"error": "it ended the process in which it ran"}

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __del__(self) -> None:
        # The process ends by itself when its standard input does; this leaves no zombie.
        self._end()
