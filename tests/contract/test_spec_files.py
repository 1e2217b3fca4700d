"""Test that sched-pipeline reads the scheduler's files, and reads back what is written to them."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutate_text, refused, rounds
from places import ROOT

from pipeedge.base.errors import PipeEdgeError, SpecError
from pipeedge.plan import spec_files, spec_writing
from pipeedge.plan.specs import (
    DeviceType,
    EndCosts,
    LengthProfile,
    ModelProfile,
    ModelSpec,
    NeighborLink,
    StepCosts,
    TransportHandling,
)

MIB = 2**20

names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=10)
amounts = st.floats(0, 1e6).map(lambda value: value * MIB)
extras = st.dictionaries(
    names.map(lambda name: "x-" + name), st.none() | st.booleans() | st.integers(-99, 99) | names, max_size=2
)


@st.composite
def model_specs(draw: st.DrawFn) -> ModelSpec:
    layers = draw(st.integers(0, 5))
    counts = st.integers(0, 10**9)
    tokens = draw(st.none() | st.integers(1, 512))
    # Layers of one group have the same weights; each names the one before it.
    groups = draw(st.none() | st.lists(st.integers(0, 2), min_size=layers, max_size=layers))
    shared = [
        max((other + 1 for other in range(layer) if groups[other] == group), default=0)
        for layer, group in enumerate(groups or ())
    ]
    per_layer = st.lists(counts, min_size=layers, max_size=layers)
    return ModelSpec(
        tokens=tokens,
        elements_in_per_token=0 if tokens is None else draw(counts),
        elements_out_per_token=() if tokens is None else tuple(draw(per_layer)),
        mem_bytes=tuple(draw(st.lists(amounts, min_size=layers, max_size=layers))),
        elements_in=draw(counts),
        elements_out=tuple(draw(st.lists(counts, min_size=layers, max_size=layers))),
        shared_with=tuple(shared),
        agreement_at_bits=draw(agreements(layers)),
        **draw(contexts(layers)),
        extra=draw(extras),
    )


@st.composite
def contexts(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    """Return what a model has that generates text, or nothing."""
    if not draw(st.booleans()):
        return {}
    windows = st.lists(st.integers(0, 4096), min_size=layers, max_size=layers).map(tuple)
    return {"context": draw(st.integers(1, 10**6)), "windows": draw(windows | st.just(()))}


def steps(layers: int) -> st.SearchStrategy[StepCosts]:
    ends = st.builds(EndCosts, *(st.floats(0, 1e6) for _ in range(5)), memory_bytes=amounts)
    return st.builds(
        StepCosts,
        *(lists(layers) for _ in range(6)),
        ends=ends,
        residual=st.none() | st.floats(0, 1),
        variation=st.none() | st.floats(0, 1),
    )


def agreements(layers: int) -> st.SearchStrategy[dict[int, tuple[float, ...]]]:
    if layers == 0:
        return st.just({})
    return st.dictionaries(st.sampled_from([2, 3, 4, 5, 6, 7, 8, 16]), lists(layers - 1, 1), max_size=3)


def lists(layers: int, most: float = 1e6) -> st.SearchStrategy[tuple[float, ...]]:
    return st.lists(st.floats(0, most), min_size=layers, max_size=layers).map(tuple)


def in_megabytes(values: st.SearchStrategy[tuple[float, ...]]) -> st.SearchStrategy[tuple[float, ...]]:
    return values.map(lambda each: tuple(value * MIB for value in each))


def measured(layers: int) -> dict[str, Any]:
    times = lists(layers)
    optional = times | st.just(())
    return {
        "time_s": times,
        "spread_s": optional,
        "receive_s": optional,
        "send_s": optional,
        "activation_bytes": in_megabytes(optional),
        "extra": extras,
    }


@st.composite
def device_types(draw: st.DrawFn) -> DeviceType:
    layers = draw(st.integers(0, 4))
    seconds = st.none() | st.floats(0, 1e6)
    other = st.builds(LengthProfile, tokens=st.integers(1, 99), **measured(layers))
    lengths = st.lists(other, max_size=2, unique_by=lambda one: one.tokens).map(tuple)
    tokens = st.tuples(st.none(), st.just(())) | st.tuples(st.integers(100, 512), lengths)
    costs = (st.floats(0, 1e6) for _ in range(4))
    handling = st.builds(TransportHandling, *costs, extra=extras)
    profiles = tokens.flatmap(
        lambda known: st.builds(
            ModelProfile,
            **measured(layers),
            batch_size=st.integers(1, 99),
            dtype=st.sampled_from(["torch.float32", "int8"]),
            tokens=st.just(known[0]),
            lengths=st.just(known[1]),
            weight_bytes=in_megabytes(lists(layers) | st.just(())),
            feed_s=seconds,
            collect_s=seconds,
            overhead_s=seconds,
            agreement=st.none() | st.floats(0, 1),
            process_bytes=st.none() | amounts,
            busy_w=seconds,
            threads=st.none() | st.integers(1, 64),
            kernels=st.sampled_from([None, "onednn", "torch", "emulated"]),
            handling=st.dictionaries(names, handling, max_size=2),
            steps=st.none() | steps(layers),
        )
    )
    listed = st.lists(profiles, max_size=2, unique_by=lambda p: (p.batch_size, p.dtype)).map(tuple)
    return DeviceType(
        mem_bytes=draw(amounts),
        bw_bytes_per_s=draw(amounts) / 8,
        profiles=draw(st.dictionaries(names, listed, max_size=2)),
        busy_w=draw(seconds),
        idle_w=draw(seconds),
        extra=draw(extras),
    )


# --- round trips ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(models=st.dictionaries(names, model_specs(), min_size=1, max_size=3))
def test_models_read_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("specs") / "models.yml"
    spec_writing.save_models(path, models)
    assert spec_files.load_models(path) == models


@settings(max_examples=25)
@given(types=st.dictionaries(names, device_types(), min_size=1, max_size=2))
def test_device_types_read_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, types: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("specs") / "device_types.yml"
    spec_writing.save_device_types(path, types)
    assert spec_files.load_device_types(path) == types


@settings(max_examples=60)
@given(hosts=st.lists(names, min_size=1, max_size=6, unique=True), cut=st.integers(0, 6))
def test_devices_read_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, hosts: list[str], cut: int
) -> None:
    path = tmp_path_factory.mktemp("specs") / "devices.yml"
    devices = {"one": tuple(hosts[:cut]), "other": tuple(hosts[cut:])}
    spec_writing.save_devices(path, devices)
    assert spec_files.load_devices(path) == devices


def test_neighbors_read_back_as_written(tmp_path: Path) -> None:
    neighbors = {"a": {"b": NeighborLink(12.5 * MIB, 0.25), "10.0.0.1": NeighborLink(0.0)}, "b": {}}
    spec_writing.save_neighbors(tmp_path / "n.yml", neighbors)
    assert spec_files.load_neighbors(tmp_path / "n.yml") == neighbors
    assert yaml.safe_load((tmp_path / "n.yml").read_text())["a"]["b"] == {"bw_Mbps": 100, "latency_s": 0.25}


# --- the files of the repository --------------------------------------------------------------------


def test_repository_examples_have_the_expected_units() -> None:
    models = spec_files.load_models(ROOT / "models.yml")
    base = models["google/vit-base-patch16-224"]
    assert (base.layers, models["DummyModel"].layers) == (48, 0)
    assert base.mem_bytes[0] == 26.808319999999995 * MIB
    assert base.elements_out[:3] == (302592, 151296, 756480)

    types = spec_files.load_device_types(ROOT / "device_types.yml")
    assert types["DummyDeviceType"] == DeviceType(0.0, 0.0)
    board = types["Minnowboard-E3845"]
    assert board.mem_bytes == 2 * 2**30
    assert board.bw_bytes_per_s == 1000 * MIB / 8
    (profile,) = board.profiles["google/vit-large-patch16-224"]
    assert (profile.batch_size, profile.dtype, len(profile.time_s)) == (8, "torch.float32", 96)

    devices = spec_files.load_devices(ROOT / "devices.yml")
    assert devices["RCC-VE-C2000"] == ("rcc-0", "rcc-1", "rcc-2", "rcc-3")
    assert devices["DummyDeviceType"] == ()


def test_repository_examples_include_a_profile_of_this_profiler() -> None:
    types = spec_files.load_device_types(ROOT / "device_types.yml")
    made = {
        name: profile
        for name, kind in types.items()
        for profile in kind.profiles.get("google/vit-base-patch16-224", ())
        if profile.receive_s
    }
    assert len(made) == 1
    (profile,) = made.values()
    assert len(profile.time_s) == len(profile.send_s) == 48
    hosts = spec_files.load_devices(ROOT / "devices.yml")
    assert not set(made) & set(hosts)


def test_older_program_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sched-pipeline"
    line = "sched-pipeline: error: --format: 'files' is neither yaml, json nor problem"
    program.write_text(f'#!/bin/sh\necho "{line}" >&2\nexit 2\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(
        PipeEdgeError, match=r"sched-pipeline is of another version.*install the package anew"
    ):
        spec_files.load_devices(ROOT / "devices.yml")


def test_block_of_output_sizes_repeats(tmp_path: Path) -> None:
    path = tmp_path / "models.yml"
    path.write_text("m: {layers: 4, mem_MB: [1, 1, 1, 1], parameters_in: 1, parameters_out: [2, 3]}\n")
    assert spec_files.load_models(path)["m"].elements_out == (2, 3, 2, 3)


# --- adding -----------------------------------------------------------------------------------------

NEW_MODEL = ModelSpec(mem_bytes=(1.5 * MIB,), elements_in=3, elements_out=(4,))
PROFILE: dict[str, Any] = {"batch_size": 8, "dtype": "torch.float32", "time_s": [1, 2]}
NEW_PROFILE = ModelProfile(batch_size=4, dtype="torch.float32", time_s=(0.5,))


def test_a_model_is_added_beside_the_others(tmp_path: Path) -> None:
    path = tmp_path / "models.yml"
    path.write_text(
        (ROOT / "models.yml").read_text() + "mine:\n  layers: 0\n  mem_MB: []\n  parameters_in: 1\n"
        "  parameters_out: []\n  note: keep me\n"
    )
    before = spec_files.load_models(path)
    spec_writing.add_model(path, "new", NEW_MODEL)
    assert spec_files.load_models(path) == {**before, "new": NEW_MODEL}
    assert yaml.safe_load(path.read_text())["mine"]["note"] == "keep me"


def test_a_model_is_only_replaced_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "models.yml"
    spec_writing.add_model(path, "m", NEW_MODEL)  # the file need not exist
    other = ModelSpec(mem_bytes=(), elements_in=0, elements_out=())
    with pytest.raises(SpecError, match="the model m is there already"):
        spec_writing.add_model(path, "m", other)
    assert spec_files.load_models(path) == {"m": NEW_MODEL}
    spec_writing.add_model(path, "m", other, overwrite=True)
    assert spec_files.load_models(path) == {"m": other}


def test_a_profile_is_added_to_its_type(tmp_path: Path) -> None:
    path = tmp_path / "device_types.yml"
    path.write_text((ROOT / "device_types.yml").read_text())
    before = spec_files.load_device_types(path)
    spec_writing.add_profiles(path, "Minnowboard-E3845", [("new", NEW_PROFILE)])
    after = spec_files.load_device_types(path)
    assert after["RCC-VE-C2000"] == before["RCC-VE-C2000"]
    assert after["Minnowboard-E3845"].profiles["new"] == (NEW_PROFILE,)
    assert {**after["Minnowboard-E3845"].profiles, "new": ()} == {
        **before["Minnowboard-E3845"].profiles,
        "new": (),
    }
    faster = ModelProfile(batch_size=4, dtype="float32", time_s=(0.25,))
    spec_writing.add_profiles(path, "Minnowboard-E3845", [("new", faster)])
    assert spec_files.load_device_types(path)["Minnowboard-E3845"].profiles["new"] == (faster,)


def test_a_new_device_type_needs_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "device_types.yml"
    with pytest.raises(SpecError, match="the device type d is new; give its memory"):
        spec_writing.add_profiles(path, "d", [("m", NEW_PROFILE)], mem_bytes=MIB)
    assert not path.exists()
    spec_writing.add_profiles(path, "d", [("m", NEW_PROFILE)], mem_bytes=MIB, bw_bytes_per_s=MIB / 8)
    assert yaml.safe_load(path.read_text())["d"]["bw_Mbps"] == 1
    spec_writing.add_profiles(path, "d", [("n", NEW_PROFILE)], mem_bytes=2 * MIB)
    read = spec_files.load_device_types(path)["d"]
    assert (read.mem_bytes, read.bw_bytes_per_s, set(read.profiles)) == (2 * MIB, MIB / 8, {"m", "n"})


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "models.yml"
    spec_writing.save_models(path, {"m": NEW_MODEL})
    path.chmod(0o600)
    with pytest.raises(yaml.YAMLError):
        spec_writing.save_models(path, {"m": ModelSpec((), 0, (), extra={"bad": object()})})
    with pytest.raises(SpecError, match="cannot be written"):
        spec_writing.save_models(tmp_path / "none" / "models.yml", {})
    assert spec_files.load_models(path) == {"m": NEW_MODEL}
    spec_writing.save_models(path, {})
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["models.yml"]  # noqa: PTH208  (no temporary file is left)


# --- bad files --------------------------------------------------------------------------------------

MODEL = "m:\n  layers: 2\n  mem_MB: [1, 2]\n  parameters_in: 1\n  parameters_out: [1, 2]\n"
TYPE = (
    "t:\n  bw_Mbps: 1\n  mem_MB: 2\n  model_profiles:\n    m:\n"
    "    - batch_size: 8\n      dtype: torch.float32\n      time_s: [1, 2]\n"
)
BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(12))

Load = Callable[[Path], object]


@pytest.mark.parametrize(
    ("load", "text", "message"),
    [
        (spec_files.load_models, "", "f.yml: is empty"),
        (spec_files.load_models, "m: [1\n", "f.yml:2: is not valid YAML"),
        (
            spec_files.load_models,
            "m: {}\n---\nn: {}\n",
            "f.yml:3: holds a second document; one is expected",
        ),
        (spec_files.load_models, "- m\n", "f.yml:1: is a list; a map is expected"),
        (spec_files.load_models, "m: 3\n", "f.yml:1: m: is '3'; a map is expected"),
        (spec_files.load_models, MODEL + MODEL, "f.yml:6: the key m comes twice"),
        (spec_files.load_models, "m: [" + "[" * 50, "nested deeper than 32 levels"),
        (spec_files.load_models, "[" * 100_000, "nested deeper than 32 levels"),
        (spec_files.load_models, BOMB, "holds more than 4000000 values"),
        (spec_files.load_models, "a: &a [*a]\n", "f.yml:1: an alias inside its own anchor"),
        (spec_files.load_models, "? {a: 1}\n: 2\n", "f.yml:1: a key of a map must be a name"),
        (spec_files.load_models, MODEL.replace("mem_MB", "mem"), "f.yml:2: m: the key mem_MB is missing"),
        (
            spec_files.load_models,
            MODEL.replace("s: 2", "s: 3"),
            "f.yml:3: m: mem_MB: has 2 values for 3 layers",
        ),
        (
            spec_files.load_models,
            MODEL.replace("[1, 2]\n  p", "[1, -2]\n  p"),
            "mem_MB: entry 2: is -2; it must not",
        ),
        (
            spec_files.load_models,
            MODEL.replace("[1, 2]\n  p", "[1, .nan]\n  p"),
            "is '.nan'; a number is expected",
        ),
        (spec_files.load_models, MODEL.replace("s: 2", "s: 2.5"), "is '2.5'; a whole number is expected"),
        (
            spec_files.load_models,
            MODEL.replace("s: 2", "s: '2'"),
            "is '2' in quotes; a whole number is expected",
        ),
        (spec_files.load_models, MODEL.replace("s: 2", "s: 02"), "is '02'; a whole number is expected"),
        (
            spec_files.load_models,
            MODEL.replace("in: 1", "in: 1e999"),
            "is 1e999; numbers may not exceed 1,000,000,000,000,000",
        ),
        (
            spec_files.load_models,
            MODEL.replace("in: 1", "in:"),
            "parameters_in: has no value; a whole number is expected",
        ),
        (
            spec_files.load_models,
            MODEL.replace("out: [1, 2]", "out: []"),
            "parameters_out: has 0 values for 2 layers",
        ),
        (spec_files.load_models, MODEL.replace("out: [1, 2]", "out: [1, 2, 3]"), "has 3 values for 2 layers"),
        (spec_files.load_device_types, TYPE.replace("8", "0"), "batch_size: is 0; it must be at least 1"),
        (spec_files.load_device_types, TYPE.replace("time_s", "times"), "entry 1: the key time_s is missing"),
        (
            spec_files.load_device_types,
            TYPE.replace("[1, 2]", "3"),
            "time_s: is '3'; a list of numbers is expected",
        ),
        (
            spec_files.load_device_types,
            TYPE.replace("s: 1", "s: fast"),
            "f.yml:2: t: bw_Mbps: is 'fast'; a number",
        ),
        (
            spec_files.load_device_types,
            TYPE + TYPE.split("m:\n")[1],
            "f.yml:9: t: model_profiles: m: entry 2: is a second",
        ),
        (
            spec_files.load_devices,
            "a: [x]\nb: [x]\n",
            "f.yml:2: b: entry 1: the host x is listed twice; it stands under a",
        ),
        (spec_files.load_devices, "a: [x, x]\n", "f.yml:1: a: entry 2: the host x is listed twice"),
        (spec_files.load_devices, "a: ['']\n", "is an empty host name"),
        (spec_files.load_devices, "a: [[x]]\n", "entry 1: is a list; a name is expected"),
        (spec_files.load_neighbors, "a: {b: {latency_s: 1}}\n", "f.yml:1: a: b: the key bw_Mbps is missing"),
        (spec_files.load_neighbors, "a: {b: 100}\n", "f.yml:1: a: b: is '100'; a map is expected"),
        (
            spec_files.load_neighbors,
            "a: {b: {bw_Mbps: 1, latency_s: -1}}\n",
            "latency_s: is -1; it must not be negative",
        ),
    ],
)
def test_a_bad_file_is_refused_with_file_line_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Load, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.yml").write_text(text)
    with pytest.raises(SpecError) as caught:
        load(Path("f.yml"))
    assert message in str(caught.value)
    assert str(caught.value).startswith("f.yml")
    assert "\n" not in str(caught.value)


def test_anything_but_a_file_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 30)
    for name, message in {
        "none": "no such file",
        ".": "is a directory",
        "pipe": "not a regular file",
        "/dev/zero": "not a regular file",
        "huge": "larger than 64 MiB",
    }.items():
        with pytest.raises(SpecError, match=message):
            spec_files.load_models(tmp_path / name)


# --- comments ---------------------------------------------------------------------------------------

COMMENTED = """\
# boards in the attic
old:              # the first one
  bw_Mbps: 10
  mem_MB: 100     # soldered on
  model_profiles: {}
# on loan
new: {bw_Mbps: 1, mem_MB: 1, model_profiles: {}}   # may change
# the end
"""


def test_adding_a_profile_keeps_the_text_of_other_types(tmp_path: Path) -> None:
    path = tmp_path / "types.yml"
    path.write_text(COMMENTED)
    profile = ModelProfile(8, "torch.float32", (1.0, 2.0))
    spec_writing.add_profiles(path, "new", [("m", profile)])
    written = path.read_text()
    before, _, after = COMMENTED.partition("new: {")
    assert written.startswith(before)
    assert written.endswith(after.splitlines(keepends=True)[-1])
    assert spec_files.load_device_types(path)["new"].profiles == {"m": (profile,)}

    spec_writing.add_profiles(path, "third", [("m", profile)], mem_bytes=1.0, bw_bytes_per_s=1.0)
    assert path.read_text().startswith(written)
    assert list(spec_files.load_device_types(path)) == ["old", "new", "third"]


@pytest.mark.parametrize(
    "text",
    [
        "{old: {bw_Mbps: 10, mem_MB: 100, model_profiles: {}}}",
        "old: &same {bw_Mbps: 10, mem_MB: 100, model_profiles: {}}\nother: *same\n",
        "base: &same {bw_Mbps: 10, mem_MB: 100, model_profiles: {}}\nold:\n  <<: *same\n",
        "---\nold: {bw_Mbps: 10, mem_MB: 100, model_profiles: {}}\n...\n",
        '"old":\n  bw_Mbps: 10\n  mem_MB: 100\n  model_profiles:\n  note: |\n    two\n    lines',
    ],
)
@pytest.mark.parametrize("name", ["old", "other"])
def test_files_in_any_form_can_be_added_to(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / "types.yml"
    path.write_text(text)
    before = spec_files.load_device_types(path)
    profile = ModelProfile(8, "torch.float32", (1.0, 2.0))
    spec_writing.add_profiles(path, name, [("m", profile)], mem_bytes=5.0 * MIB, bw_bytes_per_s=5.0)
    after = dict(spec_files.load_device_types(path))
    assert after.pop(name).profiles == {"m": (profile,)}
    assert after == {other: kind for other, kind in before.items() if other != name}


@settings(max_examples=60)
@given(data=st.data())
def test_editing_a_file_is_like_writing_it_anew(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("edit") / "types.yml"
    amount = st.integers(0, 9)
    types = data.draw(
        st.dictionaries(names, st.builds(DeviceType, amount, amount, extra=extras), min_size=1, max_size=4)
    )
    spec_writing.save_device_types(path, types)
    lines = path.read_text().splitlines(keepends=True)
    commented = "".join(f"# about {line}{line}" if line[0] not in " #" else line for line in lines)
    path.write_text(commented)
    name = data.draw(st.sampled_from([*types, "another"]))
    profile = ModelProfile(8, "torch.float32", (1.0,))
    figures = {"mem_bytes": 2.0 * MIB, "bw_bytes_per_s": 3.0}
    spec_writing.add_profiles(path, name, [("m", profile)], **figures)
    after = spec_files.load_device_types(path)
    assert after[name].profiles["m"] == (profile,)
    assert {**after, name: None} == {**types, name: None}
    assert path.read_text().count("# about") >= len(types) - 1


def test_keys_that_are_not_known_survive_an_edit(tmp_path: Path) -> None:
    note = {
        "serial": 12345678901234567890,
        "bought": "2024-01-01",
        "spare": True,
        "notes": [None, 0.5, {"a": "1e5"}],
    }
    kind = {"bw_Mbps": 1, "mem_MB": 1, "model_profiles": {"m": [PROFILE | note | {"threads": "all"}]}, **note}
    path = tmp_path / "types.yml"
    path.write_text(json.dumps({"board": kind}))  # which is YAML, with all texts in quotes
    spec_writing.add_profiles(path, "board", [("n", NEW_PROFILE)])
    written = yaml.safe_load(path.read_text())["board"]
    assert {key: written[key] for key in note} == note
    assert written["model_profiles"]["m"][0].items() >= {**note, "threads": "all"}.items()

    path = tmp_path / "links.yml"
    path.write_text("a: {b: {bw_Mbps: 1, cable: red}, c: {bw_Mbps: 2}}\n")
    spec_writing.add_links(path, {("a", "b"): NeighborLink(2.0**17, 0.5)})
    assert yaml.safe_load(path.read_text())["a"] == {
        "b": {"bw_Mbps": 1, "latency_s": 0.5, "cable": "red"},
        "c": {"bw_Mbps": 2},
    }


# --- damaged files ----------------------------------------------------------------------------------

ROUNDS = 20
MODELS = """\
# Sizes of a model of text
m: &base
  layers: 4
  mem_MB: [1, 2.5, 1e0, 2]
  parameters_in: 1000
  parameters_out: [1000, 2000]
  tokens: 64
  parameters_in_per_token: 2
  parameters_out_per_token: [3, 4, 3, 4]
"other one":
  <<: *base
  layers: 4
"""
TYPES = """\
fast:
  bw_Mbps: 80
  mem_MB: 100
  model_profiles:
    m:
    - batch_size: 8
      dtype: torch.float32
      time_s: &times [1, 2, 1, 2]
      receive_s: [0.1, 0.1, 0.1, 0.1]
      send_s: [0.1, 0.1, 0.1, 0.1]
      activations_MB: [0.5, 1, 0.5, 1]
      weights_MB: [0.5, 1, 0.5, 1]
      feed_s: 0.25
      collect_s: 0.125
      overhead_s: 0.0625
      tokens: 64
      lengths:
      - tokens: 32
        time_s: [0.5, 1, 0.5, 1]
      - {tokens: 16, time_s: [0.25, 0.5, 0.25, 0.5]}
slow:
  bw_Mbps: 8
  mem_MB: 50
  model_profiles: {m: [{batch_size: 8, dtype: 'torch.float32', time_s: *times}]}
unused:
  bw_Mbps: 8
  mem_MB: 50
  model_profiles:
"""
DEVICES = """\
# hosts
fast: [f0]
slow:
- s0
- s1   # the old one
unused: []
"""
NEIGHBORS = """\
f0:
  s0: {bw_Mbps: 40, latency_s: 0.001}
  s1:
    bw_Mbps: 1
s0: {}
"""
FILES: dict[str, tuple[str, Callable[[Path], Any], Callable[[Path, Any], None]]] = {
    "models.yml": (MODELS, spec_files.load_models, spec_writing.save_models),
    "device_types.yml": (TYPES, spec_files.load_device_types, spec_writing.save_device_types),
    "devices.yml": (DEVICES, spec_files.load_devices, spec_writing.save_devices),
    "neighbors.yml": (NEIGHBORS, spec_files.load_neighbors, spec_writing.save_neighbors),
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, text) for name, (text, _, _) in FILES.items()),
        *((name, (ROOT / name).read_text()) for name in FILES if (ROOT / name).exists()),
    ],
    ids=lambda value: value if value.endswith(".yml") else "",
)
def test_damaged_file_is_refused_in_one_line_or_read_back_as_written(
    tmp_path: Path, name: str, text: str
) -> None:
    path = tmp_path / name
    _, load, save = FILES[name]
    chance = random.Random(name + text)
    for _ in range(rounds(ROUNDS)):
        damaged = mutate_text(text, chance)
        path.write_bytes(damaged.encode())
        found: list[Any] = []
        if not refused(lambda found=found: found.append(load(path))):  # type: ignore[misc]
            save(path, found[0])
            assert load(path) == found[0], damaged


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        pytest.param("fast: [f0]\nslow", None, id="key without colon at the end"),
        pytest.param("fast: [f0]\nslow\n", None, id="key without colon in the last line"),
        pytest.param("fast: [f0]\n'slow'\n", None, id="quoted key without colon"),
        pytest.param("fast: [f0]\n? slow\n", ["f0"], id="explicit key"),
        pytest.param("fast: [f0]\nslow:", ["f0"], id="key without value"),
        pytest.param("fast: [f0]\n?", None, id="explicit key without a name"),
        pytest.param('fast: [f0]\nslow: "s0\n', None, id="unended quotes"),
        pytest.param('fast: [f0]\nslow:\n- "s0\n  ', None, id="unended quotes before blanks"),
        pytest.param("fast: [f0]\rslow:\r- s0\r", ["f0", "s0"], id="lone carriage returns"),
        pytest.param("fast: [f0]\nslow:\n- s0\u2028", None, id="break of YAML 1.1"),
        pytest.param("fast: [f0]\nslow: [s\ufeff0]", None, id="late byte order mark"),
        pytest.param("# head\n\n%YAML 1.1\n---\nfast: [f0]\n", ["f0"], id="directive"),
        pytest.param("fast: [f0]\n%TAG\n", None, id="late directive"),
        pytest.param("fast:\n-\tf0\n", None, id="tab behind a dash"),
        pytest.param("fast:\n- \tf0\n", None, id="tab behind a dash and a blank"),
        pytest.param("fast: [f0,\tf1]\n", ["f0", "f1"], id="tab between values"),
        pytest.param('fast: ["\\_f\\N", "\\xe9"]\n', ["\xa0f\x85", "\xe9"], id="escapes"),
        pytest.param('fast: ["f\\t0"]\n', None, id="escaped control character"),
        pytest.param("fast: [f0, f?]\n", None, id="question mark between brackets"),
        pytest.param("fast: [f0]\n~: [s0]\n", None, id="key that is nothing"),
    ],
)
def test_text_that_parsers_read_differently_follows_the_standard(
    tmp_path: Path, text: str, hosts: list[str] | None
) -> None:
    path = tmp_path / "devices.yml"
    path.write_bytes(text.encode())
    if hosts is None:
        assert refused(lambda: spec_files.load_devices(path))
    else:
        assert [host for listed in spec_files.load_devices(path).values() for host in listed] == hosts
