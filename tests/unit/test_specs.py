"""Test the rules of models and profiles as data, and reading of YAML that only Python programs read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import SpecError
from pipeedge.base.yamlfile import parse_document, yaml_name
from pipeedge.plan.specs import DeviceType, LengthProfile, ModelProfile, ModelSpec, NeighborLink

MERGES = "m0: &m0 {a: 1}\n" + "".join(f"m{i}: &m{i} {{<<: *m{i - 1}}}\n" for i in range(1, 100))

names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=10)


# --- YAML -------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    name=names | st.sampled_from(["true", "~", "1.5", "010", "12:30", "=", "<<", "a: b", "x" * 400, "\x85"])
)
def test_a_name_reads_back_from_yaml(name: str) -> None:
    ((read, _),) = yaml.safe_load(f"- {yaml_name(name)}: [1, 2]")[0].items()
    assert str(read) == name


def test_bytes_that_are_not_text_are_refused() -> None:
    with pytest.raises(SpecError, match=r"f.yml:2: is not UTF-8 text"):
        parse_document(b"a: 1\nb: \xff\n", "f.yml")
    with pytest.raises(SpecError, match=r"f.yml.*is not valid YAML"):
        parse_document(b"a: \x04\n", "f.yml")


def test_merge_keys_aliases_and_byte_order_marks_are_read() -> None:
    text = "\ufeffbase: &b {x: 1, y: 2}\nnew: {<<: *b, y: 3}\nboth: {<<: [*b, {z: 9, x: 5}]}\n".encode()
    entries = parse_document(text, "f.yml").entries()
    read = {
        key: {name: one.number() for name, one in map_.entries().items()} for key, map_ in entries.items()
    }
    assert read == {"base": {"x": 1, "y": 2}, "new": {"y": 3, "x": 1}, "both": {"x": 1, "y": 2, "z": 9}}


@settings(max_examples=200)
@given(
    data=st.binary(max_size=60)
    | st.text(alphabet="ab:{}[],-&*<!|>'\"\n\t ?#%01.", max_size=60).map(str.encode)
)
def test_arbitrary_bytes_give_data_or_one_line(data: bytes) -> None:
    message = "f.yml: fine"
    try:
        for entry in parse_document(data, "f.yml").entries().values():
            entry.plain()
    except SpecError as error:
        message = str(error)
    assert message.startswith("f.yml")
    assert "\n" not in message


def test_a_chain_of_merge_keys_terminates() -> None:
    last = parse_document(MERGES.encode(), "f.yml").entries()["m99"]
    with pytest.raises(SpecError, match=r"f.yml:100: m99: merge keys nested deeper than 32 levels"):
        last.entries()


# --- sentence lengths -------------------------------------------------------------------------------


def test_a_profile_covers_its_length_or_any_if_it_has_several() -> None:
    one = ModelProfile(8, "float32", (1.0,), 512)
    assert (one.fits_tokens(512), one.fits_tokens(128)) == (True, False)
    assert not ModelProfile(8, "float32", (1.0,)).fits_tokens(128)
    assert ModelProfile(8, "float32", (1.0,), 512, (LengthProfile(64, (0.1,)),)).fits_tokens(128)


# --- invalid data ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelSpec((1.0,), 0, ()),
        lambda: ModelSpec((-1.0,), 0, (1,)),
        lambda: ModelSpec((float("nan"),), 0, (1,)),
        lambda: ModelProfile(0, "float32", ()),
        lambda: ModelProfile(1, "float32", (float("inf"),)),
        lambda: DeviceType(-1.0, 0.0),
        lambda: DeviceType(0.0, float("nan")),
        lambda: NeighborLink(0.0, -1.0),
    ],
)
def test_invalid_data_is_refused_on_creation(make: Callable[[], object]) -> None:
    with pytest.raises(SpecError):
        make()
