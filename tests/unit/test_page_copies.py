"""Copies of pages: what is copied, and which copies are good."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from effort import cases

from pipeedge.decoding.page_copies import CopiesOfPages, PagesToCopy, WrittenRows

PAGE, PAGES = 4, 12


@dataclass
class Text:
    position: int
    pages: list[int]


@dataclass(frozen=True)
class Rows:
    position: int
    rows: int
    pages: npt.NDArray[np.int32]


class Stage:
    """A stage whose places hold the sequence and the step that wrote them, with copies of its pages."""

    def __init__(
        self,
        chance: random.Random,
        to_copy: type[PagesToCopy] = PagesToCopy,
        copies: type[CopiesOfPages] = CopiesOfPages,
    ) -> None:
        self.chance = chance
        self.places = [[(-1, -1)] * PAGE for _ in range(PAGES)]
        self.copied = [[(-1, -1)] * PAGE for _ in range(PAGES)]
        self.to_copy, self.copies = to_copy(PAGES, PAGE), copies(PAGES)
        self.filled: dict[int, int] = {}
        """Step that has filled each full page."""
        self.alive: dict[int, Text] = {}
        self.began = self.steps = 0

    def step(self) -> None:
        """Execute a step with rows of some sequences, the last of which may be refused."""
        free = set(range(PAGES)) - {page for one in self.alive.values() for page in one.pages}
        if len(self.alive) < 3 and len(free) > 3:
            self.alive[self.began] = Text(0, [])
            self.began += 1
        rows, ends = [], {}
        for number, one in self.alive.items():
            count = self.chance.choice((1, 1, 1, 2, 7))
            while len(one.pages) * PAGE < one.position + count and free:
                one.pages.append(free.pop())
            count = min(count, len(one.pages) * PAGE - one.position)
            if count < 1:
                continue
            rows.append(Rows(one.position, count, np.array(one.pages, np.int32)))
            for position in range(one.position, one.position + count):
                page = one.pages[position // PAGE]
                self.places[page][position % PAGE] = number, self.steps
                self.filled.pop(page, None)
            ends[number] = self.chance.randint(one.position + 1, one.position + count)
        self.to_copy.executed(rows, self.steps)
        for number, end in ends.items():
            one = self.alive[number]
            for page in one.pages[one.position // PAGE : end // PAGE]:
                self.filled[page] = self.steps
            one.position = end
        self.steps += 1

    def end_one(self) -> None:
        """End a sequence, whose pages are free then."""
        if self.alive:
            self.alive.pop(self.chance.choice(list(self.alive)))

    def copy(self) -> bool:
        """Copy a page, perhaps while steps go on; return whether there was one."""
        found = self.to_copy.next()
        if found is None:
            return False
        page, step = found
        first = self.places[page][: PAGE // 2]
        if self.chance.random() < 0.5:
            self.step()
        self.copies.replaces(page)
        self.copied[page] = [*first, *self.places[page][PAGE // 2 :]]
        self.copies.stored(page, step)
        return True

    def good(self) -> set[int]:
        """Return the full pages with good copies; check that they are equal."""
        good = {page for page, filled in self.filled.items() if self.copies.until[page] > filled}
        for page in good:
            assert self.copied[page] == self.places[page], f"the copy of page {page} is of something else"
        return good


def run(seed: int, **parts: Any) -> None:
    """Let a stage execute and copy for a while; check the copies at any moment, and all at the end."""
    stage = Stage(random.Random(seed), **parts)
    for _ in range(40):
        stage.chance.choices((stage.step, stage.copy, stage.end_one), (6, 4, 1))[0]()
        stage.good()
    rows = [  # which make what is in front of them past
        Rows(one.position, 1, np.array(one.pages, np.int32))
        for one in stage.alive.values()
        if one.position % PAGE
    ]
    stage.to_copy.executed(rows, stage.steps)
    stage.chance.random = lambda: 1.0  # type: ignore[method-assign]
    while stage.copy():
        pass
    past = {int(page) for one in rows for page in one.pages[: one.position // PAGE]}
    assert past & set(stage.filled) <= stage.good()


def test_good_copies_are_equal_and_all_pages_are_copied_in_time() -> None:
    for seed in range(cases(20_000, 100)):
        run(seed)


class TakesEachCopyForTheLatest(CopiesOfPages):
    def stored(self, page: int, step: int) -> None:
        super().stored(page, step + 1000)


class LooksOnceAtAPage(PagesToCopy):
    def executed(self, rows: Sequence[WrittenRows], step: int) -> bool:
        looked = dict(self._looked)
        found = super().executed(rows, step)
        self._looked = {**looked, **self._looked}
        return found


class DoesNotCopyAgain(PagesToCopy):
    def executed(self, rows: Sequence[WrittenRows], step: int) -> bool:
        copied = self._copied.copy()
        found = super().executed(rows, step)
        self._copied |= copied
        return found


@pytest.mark.parametrize(
    "bug",
    [{"copies": TakesEachCopyForTheLatest}, {"to_copy": LooksOnceAtAPage}, {"to_copy": DoesNotCopyAgain}],
    ids=lambda bug: next(iter(bug.values())).__name__,
)
def test_planted_bug_is_found(bug: dict[str, Any]) -> None:
    def any_run() -> None:
        for seed in range(1000):
            run(seed, **bug)

    with pytest.raises(AssertionError):
        any_run()


def test_a_page_waits_once_and_is_copied_again_once_it_is_written() -> None:
    pages = PagesToCopy(4, PAGE)
    numbers = np.array([2, 0, 1], np.int32)
    assert not pages.executed([Rows(0, 4, numbers)], 0)  # full, but not past
    assert pages.executed([Rows(4, 1, numbers)], 1)
    assert not pages.executed([Rows(5, 1, numbers)], 2)
    assert (pages.next(), pages.next()) == ((2, 1), None)
    assert pages.executed([Rows(8, 1, numbers)], 3)
    pages.executed([Rows(0, 1, np.array([0], np.int32))], 4)
    assert pages.next() is None
    assert pages.executed([Rows(4, 1, np.array([0, 3], np.int32))], 5)
    assert pages.next() == (0, 5)


def test_a_copy_that_is_being_replaced_is_none() -> None:
    copies = CopiesOfPages(2)
    copies.stored(1, 7)
    assert copies.until == (0, 8)
    copies.replaces(1)
    assert copies.until == (0, 0)
