"""The answers of a run as lines of a ``.jsonl``, in input order, however they come.

Answers to one prompt become one record of the unfinished output, in the order in which they are finished, so
a run that ends early loses none of them. The complete file, and standard output, have them in input order.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import BinaryIO

from pipeedge.base.errors import PipeEdgeError
from pipeedge.base.streams import print_data
from pipeedge.base.wording import count
from pipeedge.data.output_rows import OutputRows
from pipeedge.data.unfinished import Found, Rows, UnfinishedOutput
from pipeedge.decoding.answer_documents import answer_document
from pipeedge.decoding.generation import WrittenAnswer
from pipeedge.decoding.prompt import Prompt
from pipeedge.decoding.vocabulary import Vocabulary
from pipeedge.request.files import STANDARD_OUTPUT

__all__ = ["AnswerWriter"]


class AnswerWriter(OutputRows):
    """Writer of the answers to prompts; a context manager.

    Args:
        path: Path of the file, ``STANDARD_OUTPUT``, or None.
        prompts: Prompts that are answered, in input order, without those that ``found`` has answers to.
        texts: The bytes of tokens.
        depends_on: Fingerprints of what the answers depend on, by what a message calls them.
        found: What an earlier run has left and this one goes on from, or None to begin with the first prompt.
        made_with: What else the unfinished output says of the run, which another run may differ in.
    """

    def __init__(
        self,
        path: Path | None,
        prompts: Collection[Prompt],
        texts: Vocabulary,
        depends_on: Mapping[str, str] | None = None,
        found: Found | None = None,
        made_with: Mapping[str, str] | None = None,
    ) -> None:
        self._prints = path == STANDARD_OUTPUT
        super().__init__(None if self._prints else path, depends_on, found, made_with)
        self._texts = texts
        self._sources = {prompt.item: prompt.source for prompt in prompts}
        self._turns = iter([prompt.item for prompt in prompts])
        self._turn = next(self._turns, None)
        self._partial: dict[int, dict[int, WrittenAnswer]] = {}
        self._waiting: dict[int, bytes] = {}
        """Lines for standard output whose turn has not come."""
        self._items = 0

    @property
    def items(self) -> int:
        """Number of prompts answered so far by this run."""
        return self._items

    def write(self, answer: WrittenAnswer) -> None:
        """Take an answer; those to one prompt are written together.

        Raises:
            RequestError: They cannot be written.
            PipeEdgeError: Nobody asked for it, or it was there already.
        """
        source = self._sources.get(answer.item)
        partial = self._partial.setdefault(answer.item, {})
        if source is None or answer.choice in partial:
            raise PipeEdgeError(
                f"received answer {answer.choice} to prompt {answer.item}, which is not expected"
            )
        partial[answer.choice] = answer
        if len(partial) < answer.choices:
            return
        del self._partial[answer.item], self._sources[answer.item]
        lines = [answer_document(one, source, self._texts) for _, one in sorted(partial.items())]
        encoded = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        self._put(answer.item, encoded.encode(errors="backslashreplace"))
        self._items += 1

    def leave_out(self, item: int) -> None:
        """Expect no answer to a prompt any longer; those that are there already are dropped."""
        self._sources.pop(item, None)
        self._partial.pop(item, None)
        self._put(item, b"")

    def _put(self, item: int, lines: bytes) -> None:
        if not self._prints and not lines:
            return
        if not self._prints:
            self._append(Rows((item,), (-1,)), lines)
            return
        self._waiting[item] = lines
        while self._turn is not None and self._turn in self._waiting:
            print_data(self._waiting.pop(self._turn))
            self._turn = next(self._turns, None)

    def _complete(self) -> None:
        if self._sources:
            raise PipeEdgeError(
                f"{count(len(self._sources), 'prompt')} without an answer; the first is {min(self._sources)}"
            )
        super()._complete()

    def _assemble(self, unfinished: UnfinishedOutput, target: BinaryIO) -> None:
        for lines in unfinished.payloads_in_order():
            target.write(lines)
