"""Test the search for other stages of a run, with a scheduler whose answers are given."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from live_cluster import problem_of

from pipeedge.base.errors import InfeasibleError
from pipeedge.base.schedule import LayerRange
from pipeedge.plan.conditions import Conditions, PlacedStage
from pipeedge.plan.live_search import LiveSearch
from pipeedge.plan.problem import Problem
from pipeedge.plan.switch_memory import best_beside

PRESENT = (PlacedStage("h0", LayerRange(0, 12)), PlacedStage("h1", LayerRange(12, 24)))


def no_schedule(problem: Problem, **_: Any) -> Any:
    raise InfeasibleError("no host has the memory")


@pytest.mark.parametrize("hosts", [{"h0", "h1", "h2"}, {"h0", "h2"}, {"h2"}])
def test_there_are_no_other_stages_where_nothing_fits(hosts: set[str]) -> None:
    search = LiveSearch(problem_of(3), ["h0", "h1", "h2"], solve=no_schedule)
    assert search(Conditions(), frozenset(hosts), PRESENT) is None


def test_a_schedule_of_a_missing_host_is_not_the_best() -> None:
    assert best_beside(problem_of(2), PRESENT, no_schedule) == PRESENT
    with pytest.raises(InfeasibleError, match="fits beside the present one"):
        best_beside(problem_of(1), PRESENT, no_schedule)


def test_other_hosts_replace_one_that_is_missing() -> None:
    other = (PRESENT[0], PlacedStage("h2", LayerRange(12, 24)))
    assert best_beside(problem_of(3), PRESENT, lambda _: other) == PRESENT  # no faster
    problem = problem_of(3)
    left = {host: kind for host, kind in problem.hosts.items() if host != "h1"}
    assert best_beside(dataclasses.replace(problem, hosts=left), PRESENT, lambda _: other) == other
