"""What a process does with the processors it is given: limits on instructions, and a quota of their time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import environment
from waiting import LIMIT_S

from pipeedge.base.errors import PipeEdgeError
from pipeedge.testbed.groups import GroupSettings, Hierarchy, find_hierarchies

MEMORY = 1 << 40
COMPUTE = """
import json, sys
import numpy as np
import torch
from pipeedge.models import find_model
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.kernels import available, choose
cpu, model, chosen, outputs = torch.device("cpu"), find_model("vit-digits"), {}, {}
images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(3))
images[1, 0, 2, 5], images[3, 0, 7, 1] = torch.nan, torch.inf
for name in ("float32", "bfloat16", "int8"):
    dtype = find_dtype(name)
    chosen[name] = choose("auto", dtype, cpu)
    for kernels in available(dtype, cpu):
        with torch.inference_mode():
            (outputs[f"{name} {kernels}"],) = model.load(dtype=dtype, kernels=kernels)((images,))
np.savez(sys.argv[1], **{key: value.numpy() for key, value in outputs.items()})
print(json.dumps(chosen))
"""
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.05, "int8": 0.05}


def compute(file: Path, **limits: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return the kernels that a process chooses by number type, and its outputs with all that it has."""
    found = subprocess.run(
        [sys.executable, "-c", COMPUTE, str(file)],
        env={**environment(), "OMP_NUM_THREADS": "1", **limits},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout), dict(np.load(file))


def test_fewer_instructions_give_the_same_results_and_the_same_nan(tmp_path: Path) -> None:
    """No kernel may hide that its input was not finite, whatever instructions it uses."""
    _, outputs = compute(tmp_path / "all.npz")
    chosen, limited = compute(tmp_path / "avx2.npz", ONEDNN_MAX_CPU_ISA="AVX2")
    assert chosen["float32"] == "torch"
    assert limited.keys() <= outputs.keys()
    whole = outputs["float32 torch"]
    for key, found in {**limited, **{f"{key} ": value for key, value in outputs.items()}}.items():
        tolerance = TOLERANCES[key.split()[0]]
        assert np.isnan(found).all(1).tolist() == [False, True, False, True], key
        np.testing.assert_allclose(found[::2], whole[::2], rtol=tolerance, atol=tolerance * 20, err_msg=key)


@pytest.fixture
def small_quota() -> Iterator[list[tuple[Hierarchy, str]]]:
    """Make a control group with a quota of 0.6 processors; skip the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("control groups need root")
    group = f"pipeedge-test-{uuid.uuid4().hex[:8]}"
    try:
        trees = [
            tree for tree in find_hierarchies(Path("/proc/mounts").read_text()) if "cpu" in tree.controllers
        ]
        for tree in trees:
            tree.create(group)
            tree.limit(group, GroupSettings(0.6, MEMORY))
    except (PipeEdgeError, OSError) as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        yield [(tree, group) for tree in trees]
    finally:
        for tree in trees:
            tree.remove(group)


def test_a_process_under_a_quota_counts_it(small_quota: list[tuple[Hierarchy, str]]) -> None:
    files = [tree.mount / group / "cgroup.procs" for tree, group in small_quota]
    code = f"""
import os
for file in {[str(file) for file in files]!r}:
    with open(file, "w") as procs:
        procs.write(str(os.getpid()))
from pipeedge.base.machine import quota_threads
from pipeedge.run.main import limit_threads
limit_threads()
print(quota_threads(), os.environ["OMP_NUM_THREADS"])
"""
    own = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=own, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (found.returncode, found.stdout.split()) == (0, ["1", "1"]), found.stderr
