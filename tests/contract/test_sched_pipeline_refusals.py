"""Test that sched-pipeline refuses bad files and options, and impossible schedules, in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from sched_program import DEVICES, MIB, Cluster, with_types, written


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return written(tmp_path)


# --- bad requests -----------------------------------------------------------------------------------


def edit(name: str, old: str, new: str) -> Callable[[Cluster], None]:
    def apply(cluster: Cluster) -> None:
        text = (cluster.folder / name).read_text()
        assert old in text, f"{old!r} is not in {name}"
        cluster.write(name, text.replace(old, new, 1))

    return apply


def content(name: str, text: str) -> Callable[[Cluster], None]:
    return lambda cluster: cluster.write(name, text)


BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(12))

BAD_FILES = {
    "missing file": (lambda c: (c.folder / "models.yml").unlink(), "models.yml: no such file"),
    "folder": (
        lambda c: ((c.folder / "devices.yml").unlink(), (c.folder / "devices.yml").mkdir()),
        "is a directory",
    ),
    "pipe": (
        lambda c: ((c.folder / "devices.yml").unlink(), os.mkfifo(c.folder / "devices.yml")),
        "devices.yml: is not a regular file",
    ),
    "gigabyte": (
        lambda c: os.truncate(c.folder / "models.yml", 1 << 30),
        "models.yml: is larger than 64 MiB",
    ),
    "empty": (content("models.yml", ""), "models.yml: is empty"),
    "not YAML": (content("devices.yml", "fast: [a\nslow: b\n"), "devices.yml:2: is not valid YAML"),
    "tab": (content("devices.yml", "fast:\n\t- a\n"), "devices.yml:2: is not valid YAML"),
    "two documents": (
        content("devices.yml", "fast: [a]\n---\nfast: [b]\n"),
        "devices.yml:3: holds a second document",
    ),
    "binary": (content("devices.yml", "fast: [\x00]\n"), "devices.yml:1: holds a control character"),
    "list for map": (content("devices.yml", "- fast\n"), "devices.yml:1: is a list; a map is expected"),
    "deep": (content("devices.yml", "[" * 100_000), "devices.yml:1: nested deeper than 32 levels"),
    "deep blocks": (content("devices.yml", "- " * 100_000), "devices.yml:1: nested deeper than 32 levels"),
    "alias bomb": (content("models.yml", BOMB), "holds more than 4000000 values"),
    "alias loop": (content("models.yml", "a: &a [*a]\n"), "models.yml:1: "),
    "unknown alias": (content("models.yml", "a: *b\n"), "models.yml:1: is not valid YAML"),
    "key twice": (
        content("devices.yml", "fast: [a]\nfast: [b]\n"),
        "devices.yml:2: the key fast comes twice",
    ),
    "host twice": (
        content("devices.yml", "fast: [a, b, a]\n"),
        "devices.yml:1: fast: entry 3: the host a is listed twice",
    ),
    "host under two types": (
        content("devices.yml", "fast: [a]\nslow:\n- a\n"),
        "devices.yml:3: slow: entry 1: the host a is listed twice; it stands under fast already",
    ),
    "empty host": (
        content("devices.yml", "fast: ['']\n"),
        "devices.yml:1: fast: entry 1: is an empty host name",
    ),
    "host map": (
        content("devices.yml", "fast: [{a: 1}]\n"),
        "devices.yml:1: fast: entry 1: is a map; a name is expected",
    ),
    "host scalar": (content("devices.yml", "fast: a\n"), "devices.yml:1: fast: is 'a'; a list is expected"),
    "no host": (content("devices.yml", "fast: []\n"), "devices.yml: lists no host"),
    "missing key": (edit("models.yml", "mem_MB", "mem_GB"), "models.yml:2: m: the key mem_MB is missing"),
    "missing layers": (edit("models.yml", "layers", "layer"), "models.yml:2: m: the key layers is missing"),
    "missing time": (edit("device_types.yml", "time_s", "time"), "the key time_s is missing"),
    "missing bandwidth": (edit("device_types.yml", "bw_Mbps", "bw"), "fast: the key bw_Mbps is missing"),
    "missing profiles": (
        edit("device_types.yml", "model_profiles", "p"),
        "fast: the key model_profiles is missing",
    ),
    "text for number": (
        edit("models.yml", "layers: 4", "layers: four"),
        "models.yml:2: m: layers: is 'four'; a whole number",
    ),
    "quoted number": (
        edit("models.yml", "layers: 4", "layers: '4'"),
        "is '4' in quotes; a whole number is expected",
    ),
    "half a layer": (edit("models.yml", "layers: 4", "layers: 4.5"), "is '4.5'; a whole number is expected"),
    "octal": (edit("models.yml", "layers: 4", "layers: 04"), "is '04'; a whole number is expected"),
    "list for number": (
        edit("models.yml", "layers: 4", "layers: [4]"),
        "m: layers: is a list; a whole number is expected",
    ),
    "null for number": (
        edit("models.yml", "layers: 4", "layers:"),
        "m: layers: has no value; a whole number is expected",
    ),
    "no layers": (
        content("models.yml", "m: {layers: 0, mem_MB: [], parameters_in: 0, parameters_out: []}"),
        "no layers",
    ),
    "fewer memories": (
        edit("models.yml", "layers: 4", "layers: 5"),
        "models.yml:4: m: mem_MB: has 4 values for 5 layers",
    ),
    "block that does not divide": (
        edit("models.yml", "- 2000\n", "- 2000\n  - 3000\n"),
        "m: parameters_out: has 3 values for 4 layers",
    ),
    "negative memory": (
        edit("models.yml", "- 2\n", "- -2\n"),
        "mem_MB: entry 2: is -2; it must not be negative",
    ),
    "negative size": (
        edit("models.yml", "parameters_in: 1000", "parameters_in: -1"),
        "parameters_in: is -1; it must",
    ),
    "half an element": (
        edit("models.yml", "- 2000", "- 0.5"),
        "parameters_out: entry 2: is '0.5'; a whole number",
    ),
    "negative time": (
        edit("device_types.yml", "- 1\n", "- -1\n"),
        "time_s: entry 1: is -1; it must not be negative",
    ),
    "not a number": (
        edit("device_types.yml", "- 1\n", "- .nan\n"),
        "time_s: entry 1: is '.nan'; a number is expected",
    ),
    "infinite": (
        edit("device_types.yml", "- 1\n", "- .inf\n"),
        "time_s: entry 1: is '.inf'; a number is expected",
    ),
    "overflow": (
        edit("device_types.yml", "- 1\n", "- 1e999\n"),
        "entry 1: is 1e999; numbers may not exceed 1,000,000,000,000,000",
    ),
    "long number": (
        edit("device_types.yml", "mem_MB: 100", "mem_MB: " + "9" * 400),
        "numbers may not exceed 1,000,000,000,000,000",
    ),
    "negative bandwidth": (
        edit("device_types.yml", "bw_Mbps: 80", "bw_Mbps: -80"),
        "device_types.yml:2: fast: bw_Mbps: is -80",
    ),
    "batch 0": (
        edit("device_types.yml", "batch_size: 8", "batch_size: 0"),
        "batch_size: is 0; it must be at least 1",
    ),
    "fewer times": (
        edit("device_types.yml", "      - 1\n", ""),
        "time_s: has 3 values for 4 layers (models.yml)",
    ),
    "same profile twice": (
        content(
            "device_types.yml",
            "fast:\n  bw_Mbps: 1\n  mem_MB: 1\n  model_profiles:\n    m:\n"
            "    - {batch_size: 8, dtype: float32, time_s: [1, 1, 1, 1]}\n"
            "    - {batch_size: 8, dtype: torch.float32, time_s: [1, 1, 1, 1]}\n",
        ),
        "device_types.yml:7: fast: model_profiles: m: entry 2: is a second profile for batch size 8",
    ),
    "type nobody knows": (
        content("devices.yml", "quick: [a]\n"),
        "no host is left to schedule on; devices.yml: the type quick",
    ),
    "type without profile": (
        content("devices.yml", "unprofiled: [a]\n"),
        "no host is left to schedule on; device_types.yml: unprofiled has no profile for m, batch size 8",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_gets_one_line_with_file_line_and_key(cluster: Cluster, case: str) -> None:
    spoil, message = BAD_FILES[case]
    spoil(cluster)
    done = cluster.run()
    assert done.code == 2
    assert message in done.error
    assert len(done.error) < 700


def test_a_joint_plan_refuses_profiles_of_a_number_type_that_nobody_knows(cluster: Cluster) -> None:
    edit("device_types.yml", "torch.float32", "torch.fdoat32")(cluster)
    assert cluster.run("--plan", "auto", "--dtypes", "float32").code == 0  # that profile is not asked for
    done = cluster.run("--plan", "auto")
    assert done.code == 2
    assert done.error == (
        "device_types.yml: fast has a profile of m in dtype torch.fdoat32; known: float32, float16, "
        "bfloat16, int8, int4 (also as torch.float32 ...)"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-sm", "none.yml"], "none.yml: no such file; -sm FILE names another"),
        (["-sd", "/dev/zero"], "/dev/zero: is not a regular file"),
        (["-m", "mm"], "models.yml: no model mm; did you mean m? the file has: m"),
        (["-m", "google/bert"], "models.yml: no model google/bert; the file has: m"),
        (["-d", "float64"], "unknown dtype float64; known: float32, float16, bfloat16, int8"),
        (
            ["-d", "int8"],
            "fast has no profile for m, batch size 8, dtype int8; it has batch size 8 with dtype float32",
        ),
        (["-b", "4"], "fast has no profile for m, batch size 4, dtype float32; it has batch size 8"),
        (["-b", "0"], "-b: '0' is not a whole number from 1"),
        (["-b", "-8"], "-b: '-8' is not a whole number from 1"),
        (["-b", "8.5"], "-b: '8.5' is not a whole number from 1"),
        (["-b", "99999999999999999999"], "is not a whole number from 1"),
        (["-i", "x"], "-i: 'x' is not a whole number from 0"),
        (["--time-limit", "0"], "--time-limit: '0' is not a number above 0"),
        (["--time-limit", "nan"], "--time-limit: 'nan' is not a number above 0"),
        (["--objective", "cost"], "--objective: 'cost' is neither throughput, latency nor energy"),
        (["--format", "xml"], "--format: 'xml' is neither yaml, json, problem, files nor bids"),
        (["--cluster-file", "none.yml"], "none.yml: no such file"),
        (
            ["--cluster-file", "c.yml", "-sd", "devices.yml"],
            "-sd and --cluster-file name device types or hosts",
        ),
        (["--data-host", "zz"], "--data-host zz: no such host in devices.yml, which has: f0, f1, s0"),
        (["--link-bits", "9"], "--link-bits: '9' is neither 0, 2 to 8, 16 nor auto"),
        (["--link-bits", "-4"], "--link-bits: '-4' is neither"),
        (["--link-bits", "auto", "--objective", "latency"], "fewer bits are always better"),
        (["--add-host", "quick=1"], "--add-host quick=1: no such device type with a profile"),
        (["--add-host", "fast"], "--add-host: 'fast' is not of the form TYPE=N"),
        (["--add-host", "fast=0"], "--add-host: '0' is not a whole number from 1"),
        (["--remove-host", "zz"], "--remove-host zz: no such host to schedule on; there are: f0, f1, s0"),
        (["--remove-host", "f0", "--data-host", "f0"], "--remove-host f0: it is the data host"),
        (["--scale-bandwidth", "-1"], "--scale-bandwidth: '-1' is not a number above 0"),
        (["--modle-name", "m"], "unknown option --modle-name; did you mean --model-name?"),
        (["-z"], "unknown option -z; --help lists them"),
        (["--dev", "x"], "the option --dev is ambiguous: --dev-types-file, --dev-file, --dev-neighbors-file"),
        (["-b"], "the option -b needs a value: -b N"),
        (["-b", "-d", "float32"], "the option -b needs a value"),
        (["--explain=yes"], "the option --explain takes no value"),
        (["models.yml"], "unexpected argument 'models.yml'"),
        (["-m", ""], "-m: the value is empty"),
    ],
)
def test_a_bad_option_gets_one_line(cluster: Cluster, arguments: list[str], message: str) -> None:
    done = cluster.run(*arguments)
    assert done.code == 2
    assert message in done.error


def test_an_unusable_type_gives_a_warning_and_the_others_are_scheduled(cluster: Cluster) -> None:
    cluster.write("devices.yml", DEVICES | {"unprofiled": ["u0", "u1"], "quick": ["q"]})
    done = cluster.run("--data-host=f0")
    assert done.code == 0
    assert done.err.splitlines() == [
        "sched-pipeline: warning: device_types.yml: unprofiled has no profile for m, batch size 8, "
        "dtype float32; it has no profiles; left out: 2 hosts",
        "sched-pipeline: warning: devices.yml: the type quick is not in device_types.yml, which has: "
        "fast, slow, unprofiled; left out: 1 host",
    ]


# --- no feasible schedule ---------------------------------------------------------------------------


def test_a_layer_that_fits_nowhere_is_named(cluster: Cluster) -> None:
    with_types(cluster, mem_MB=2)
    done = cluster.run()
    assert done.code == 3
    assert done.error == (
        "no feasible schedule: layer 2 fits on no host: it needs 2.2 MB with its buffers, "
        "the largest host has 2.0 MB"
    )


def test_missing_memory_is_counted(cluster: Cluster) -> None:
    with_types(cluster, mem_MB=2.5)
    done = cluster.run()
    assert done.code == 3
    assert done.error == (
        "no feasible schedule: 1.0 MB of memory are missing: the layers need 6.0 MB without buffers, "
        "2 hosts together have 5.0 MB"
    )


def test_memory_that_buffers_and_cuts_take_is_counted(cluster: Cluster) -> None:
    with_types(cluster, mem_MB=3)  # the weights fit exactly, the buffers do not
    done = cluster.run()
    assert done.code == 3
    needed = 3 + (2 * 1000 + 2 * 2000) * 32 / MIB, 3 + (2 * 2000 + 2 * 2000) * 32 / MIB
    missing = float(done.error.split("about ")[1].split(" MB")[0])
    assert missing == pytest.approx(2 * (max(needed) - 3), abs=0.06)


def test_missing_links_are_reported(cluster: Cluster) -> None:
    with_types(cluster, mem_MB=4, bw_Mbps=0)
    done = cluster.run()
    assert done.code == 3
    assert done.error == (
        "no feasible schedule: the memory is enough, but no links with bandwidth join the hosts it takes"
    )


def test_what_if_can_make_an_infeasible_cluster_feasible(cluster: Cluster) -> None:
    with_types(cluster, mem_MB=2.5)
    done = cluster.run("--add-host", "fast=2")
    assert done.code == 3
    assert done.out == ""
    what_if, error = done.err.splitlines()
    assert what_if == "sched-pipeline: what if --add-host fast=2: 4 items/s, today none"
    assert "no feasible schedule" in error
