"""How long a rank may take to load what it needs."""

from __future__ import annotations

import pytest
from hub_play import Play

from pipeedge.control.liveness import Loading, RankStatus
from pipeedge.control.load_deadline import HungLoad, LoadDeadlines, LoadFinding, SlowLoad

PATIENCE_S = 8.0
MB = 1_000_000


def loading(loaded: int, total: int | None = 330 * MB, what: str = "loading layers 9-12") -> Loading:
    return Loading(what, loaded, total)


def look(deadlines: LoadDeadlines, now: float, load: Loading) -> LoadFinding | None:
    found = deadlines.look({(3, 13): load}, now)
    return found[0] if found else None


def test_load_without_a_byte_is_noticed_and_then_given_up() -> None:
    deadlines = LoadDeadlines(PATIENCE_S)
    found = {now: look(deadlines, now, loading(40 * MB)) for now in range(10)}
    assert {now: kind for now, one in found.items() if (kind := type(one)) is not type(None)} == {
        5: SlowLoad,
        9: HungLoad,
    }
    assert found[9] == HungLoad(3, loading(40 * MB), 9, 9)


def test_load_that_gets_on_has_the_time_that_its_bytes_take_on_a_slow_disk() -> None:
    deadlines = LoadDeadlines(PATIENCE_S)
    # A megabyte in 1.5 s, which is below the slowest rate.
    found = [look(deadlines, now, loading(int(now / 1.5) * MB, 100 * MB)) for now in range(110)]
    assert [type(one) for one in found if isinstance(one, SlowLoad)] == [SlowLoad] * 21
    assert [one for one in found if isinstance(one, HungLoad)] == [
        HungLoad(3, loading(72 * MB, 100 * MB), 109, None)
    ]
    deadlines = LoadDeadlines(PATIENCE_S)
    found = [look(deadlines, now, loading(now * MB, 100 * MB)) for now in range(101)]
    assert not any(isinstance(one, HungLoad) for one in found)


@pytest.mark.parametrize(
    "later",
    [loading(0, what="loading layers 1-4"), loading(39 * MB), loading(40 * MB, 331 * MB)],
    ids=["other layers", "less than before", "another size"],
)
def test_another_load_begins_anew(later: Loading) -> None:
    deadlines = LoadDeadlines(PATIENCE_S)
    for now in range(8):
        look(deadlines, now, loading(40 * MB))
    assert [look(deadlines, now, later) for now in (9, 12)] == [None, None]
    assert isinstance(look(deadlines, 18, later), HungLoad)


def test_process_that_takes_the_place_of_another_has_all_the_time() -> None:
    deadlines = LoadDeadlines(PATIENCE_S)
    deadlines.look({(3, 13): loading(0)}, 0)
    assert deadlines.look({(3, 23): loading(0)}, 9) == []
    assert deadlines.look({}, 10) == []
    assert deadlines.look({(3, 23): loading(0)}, 30) == []


def test_load_of_an_unknown_size_is_only_noticed() -> None:
    deadlines = LoadDeadlines(PATIENCE_S)
    found = [look(deadlines, now, loading(0, None)) for now in range(100)]
    assert {type(one) for one in found} == {type(None), SlowLoad}


def test_first_byte_at_the_last_moment_counts() -> None:
    deadlines = LoadDeadlines(PATIENCE_S)
    for now, loaded in ((0, 0), (8, 0), (8.1, 1), (16, 1)):
        assert not isinstance(look(deadlines, now, loading(loaded)), HungLoad)
    assert isinstance(look(deadlines, 16.2, loading(1)), HungLoad)


# --- at the hub -------------------------------------------------------------------------------------


def beats(load: Loading) -> dict[int, RankStatus]:
    return {0: RankStatus(), 1: RankStatus(loading=load)}


@pytest.mark.parametrize("stage", ["hello", "planned"])
def test_rank_that_hangs_before_the_start_ends_a_run_with_one_plan(stage: str) -> None:
    play = Play(timeout=10).at(stage)
    play.pass_time(8.5, beats=beats(loading(40 * MB)))
    name = "rank 1 (on pi1)" if stage == "hello" else "rank 1 (stage 1, on pi1)"
    (notice,) = play.heard(0, "notice")
    assert notice.line == f"{name} has been loading layers 9-12 for 4 s (40 of 330 MB); still alive"
    assert play.line() == (
        f"{name} has been loading layers 9-12 for 8 s (40 of 330 MB), the last 8 s without a byte: "
        "check its disk, or use a longer --timeout"
    )
    assert play.verdict is not None
    assert play.verdict.exit_code == 4


def test_rank_that_loads_slowly_is_waited_for() -> None:
    play = Play(timeout=10).at("planned")
    for second in range(60):
        play.pass_time(1, beats=beats(loading(second * MB, 60 * MB)))
    assert play.verdict is None
    assert [message.line.split(" for ")[1] for message in play.heard(0, "notice")][:2] == [
        "4 s (4 of 60 MB); still alive",
        "8 s (8 of 60 MB); still alive",
    ]


def test_loads_of_a_run_that_has_started_do_not_count() -> None:
    play = Play(timeout=10).started()
    for second in range(30):
        play.pass_time(1, beats={0: RankStatus(finished=second), 1: RankStatus(loading=loading(1))})
    assert play.verdict is None
    assert not play.heard(0, "notice")
