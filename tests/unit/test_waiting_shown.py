"""What a user hears of ranks that are awaited."""

from __future__ import annotations

import pytest

from pipeedge.run.context import WaitingShown

RANK_0 = ("waiting for rank 0 at pi1:29500 to start", False)
TWO = ("waiting for ranks 1, 2 of 3 to start", False)
ONE = ("waiting for rank 1 of 3 to start", False)
ALL = ("all 3 ranks are here", True)


@pytest.mark.parametrize(
    ("lines", "every_change", "shown"),
    [
        ([TWO, ONE, ALL], True, [TWO, ONE, ALL]),
        ([TWO, ONE, ALL], False, [TWO, ALL]),
        ([RANK_0, ("rank 0 is here", True), ONE, ALL], False, [RANK_0, ("rank 0 is here", True), ONE, ALL]),
        ([ALL], True, []),  # it came last, and waited for nobody
        ([], False, []),
    ],
)
def test_wait_is_shown_once_and_its_end_too(
    lines: list[tuple[str, bool]], every_change: bool, shown: list[tuple[str, bool]]
) -> None:
    said: list[str] = []
    show = WaitingShown(said.append, every_change=every_change)
    for line, over in lines:
        show(line, over)
    assert said == [line for line, _ in shown]
