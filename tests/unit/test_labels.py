"""Test labels of files: numbers and names of classes, and what is no class of the model."""

from __future__ import annotations

import dataclasses
import math

import pytest
from fake_models import bert, with_head

from pipeedge.data.labels import NO_CLASSES, Classes

MOODS = Classes("moods", 3, ("negative", "neutral", "positive"))
STARS = Classes("stars", 3, ("1", "2", "3"))
PLAIN = Classes("plain", 3)


@pytest.mark.parametrize(
    ("classes", "label", "number"),
    [
        (MOODS, 2, 2),
        (MOODS, 2.0, 2),
        (MOODS, "2", 2),
        (MOODS, "2.0", 2),
        (MOODS, " positive ", 2),
        (MOODS, None, None),
        (MOODS, "", None),
        (MOODS, -1, None),
        (MOODS, "-1", None),
        (MOODS, math.nan, None),
        (PLAIN, "LABEL_1", 1),
        (STARS, 1, 1),
        (STARS, "1", 0),
        (STARS, "3", 2),
        (NO_CLASSES, 7, 7),
        (NO_CLASSES, "7", 7),
        (NO_CLASSES, 3.8, None),
        (NO_CLASSES, "contradiction", None),
        (NO_CLASSES, 2**40, None),
        (NO_CLASSES, {}, None),
    ],
)
def test_numbers_and_names(classes: Classes, label: object, number: int | None) -> None:
    assert classes.read(label) == number


@pytest.mark.parametrize(
    ("classes", "label", "message"),
    [
        (
            MOODS,
            3,
            r"label is 3, not a class of moods; its classes are 0 to 2 \(negative, neutral, positive\)",
        ),
        (MOODS, "positve", r'label is "positve", not a class of moods; did you mean positive\?'),
        (MOODS, "LABEL_1", 'label is "LABEL_1", not a class'),
        (MOODS, True, "label is true, not a class"),
        (MOODS, 0.5, "label is 0.5, not a class"),
        (MOODS, 10**400, "label is 1000+…, not a class"),
        (MOODS, ["positive"], r'label is \["positive"\], not a class'),
        (PLAIN, "LABEL_3", "its classes are 0 to 2$"),
        (Classes("twice", 2, ("a", "a")), "a", "the name of several classes"),
    ],
)
def test_labels_of_no_class(classes: Classes, label: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classes.read(label)


@pytest.mark.parametrize(("label", "number"), [("3", 2), ("0", 0), ("1", None), ("2", None)])
def test_names_of_digits_in_a_table_may_be_another_classs_number(label: str, number: int | None) -> None:
    if number is None:
        with pytest.raises(ValueError, match="the number of one class and the name of another"):
            STARS.read(label, is_text=True)
    else:
        assert STARS.read(label, is_text=True) == number


def test_models_that_do_not_choose_have_no_classes() -> None:
    model = dataclasses.replace(bert(), labels=("no", "yes"))
    assert (Classes.of(model).count, Classes.of(model).names) == (2, ("no", "yes"))
    single, vector = bert(classes=1), with_head(head="vector")
    assert [Classes.of(each).count for each in (single, vector)] == [0, 0]
