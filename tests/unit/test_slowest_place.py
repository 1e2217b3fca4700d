"""Test what is learned of the slowest place, against results whose distances are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeedge.decoding.slowest_place import SlowestPlace


def told(
    moments: list[float], in_flight: int, alone_s: float = 1.0, place: SlowestPlace | None = None
) -> SlowestPlace:
    """Tell of results at these moments."""
    place = place or SlowestPlace()
    for moment in moments:
        place.note(alone_s, in_flight, moment)
    return place


@given(st.floats(0.3, 1.0), st.integers(4, 8), st.sampled_from([0.001, 1.0, 20.0]), st.integers(1, 4))
def test_a_place_that_is_always_busy_is_found(
    share: float, in_flight: int, alone_s: float, bunch: int
) -> None:
    """Also where results come in bunches: half of those in flight, at most, come at once."""
    bunch = min(bunch, in_flight // 2)
    moments = [share * alone_s * (number // bunch * bunch) for number in range(40)]
    found = told(moments, in_flight, alone_s).share
    assert found == pytest.approx(share, rel=0.01 if bunch == 1 else 0.4)


def test_too_few_steps_show_nothing() -> None:
    assert told([0.5 * number for number in range(40)], 2).share is None
    assert told([float(number) for number in range(40)], 1).share is None


def shown(place: SlowestPlace, results: int) -> int:
    """Tell of up to so many results that show nothing; return after how many what is known was forgotten."""
    for number in range(results):
        place.note(1.0, 1, 1000.0 + number)
        if place.share is None:
            return number
    return results


def test_what_is_known_stays_until_it_is_old() -> None:
    place = told([0.6 * number for number in range(20)], 4)
    told([100 + 0.5 * number for number in range(35)], 2, place=place)
    assert place.share == pytest.approx(0.6)
    told([117.5 + 0.5 * number for number in range(20)], 2, place=place)
    assert place.share is None


def test_what_is_found_anew_stays_for_longer() -> None:
    place, stays = SlowestPlace(), []
    for turn in range(8):
        told([10_000 * turn + 0.6 * number for number in range(20)], 4, place=place)
        stays.append(shown(place, 5000))
    assert stays == pytest.approx([40, 80, 160, 320, 640, 1280, 1280, 1280], abs=1)
    told([200_000 + 0.9 * number for number in range(20)], 4, place=place)  # it was wrong
    assert shown(place, 5000) == pytest.approx(40, abs=1)


def test_a_run_that_is_held_up_has_no_slow_place() -> None:
    place = told([0.3 * number for number in range(40)], 4)
    told([12 + 1.0 * number for number in range(16)], 4, place=place)  # and most samples with that
    assert place.share == pytest.approx(0.3)


def test_a_place_that_became_slow_is_found() -> None:
    place = told([0.3 * number for number in range(40)], 4)
    told([12 + 0.9 * number for number in range(40)], 4, place=place)
    assert place.share == pytest.approx(0.9)


def test_a_place_that_became_faster_is_found_with_few_steps() -> None:
    place = told([0.9 * number for number in range(20)], 2)
    told([100 + 0.5 * number for number in range(30)], 2, place=place)
    assert place.share == pytest.approx(0.5)


def test_a_pause_counts_for_nothing() -> None:
    place = told([0.5 * number for number in range(20)], 4)
    place.pause()
    told([1000 + 0.5 * number for number in range(20)], 4, place=place)
    assert place.share == pytest.approx(0.5)
