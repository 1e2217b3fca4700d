"""Test the table of how an epoch of a rank ends."""

from __future__ import annotations

import pytest

from pipeedge.control.epoch_member import EpochMember, MemberStep
from pipeedge.control.messages import Abort, Retire, Stopped
from pipeedge.run.rank_epochs import ENDINGS, Layers, Use


@pytest.mark.parametrize("use", Use)
def test_epoch_can_be_stopped_however_far_it_has_come(use: Use) -> None:
    ending = ENDINGS[MemberStep.STOPPING, use]
    assert ending.cuts_links
    assert ending.is_told
    assert (ending.layers is Layers.GIVE_BACK) == (use is Use.BESIDE)  # what runs goes on with its own


def test_endings_are_those_of_the_rules() -> None:
    """An epoch is closed in the steps into which the hub's words lead, and told if the rules want it told."""
    led_to = {step for (_, said), step in EpochMember.TABLE.items() if said in (Abort, Retire)}
    assert {step for step, _ in ENDINGS} == led_to
    for (step, _), ending in ENDINGS.items():
        assert ending.is_told == ((step, Stopped) in EpochMember.TABLE)
