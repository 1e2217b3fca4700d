"""Ranks over compressed links: both transports, scheduled bits, values without a code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml
from arrays import load_arrays
from places import ASSETS
from processes import run_world
from safetensors.torch import load_file, save_file
from shipped_model import DIGITS, heldout
from stages_in_memory import run
from waiting import LIMIT_S

from pipeedge.base.payload import specs_bytes
from pipeedge.base.schedule import Schedule

# --- real ranks -----------------------------------------------------------------------------------------

COMMON = ("-m", "vit-digits", "-b", 50, "--output", "o.npz", "--report", "r.json")
SPLIT = ("-pt", "1,5,6,8,9,16", "-D", 1, "-q", "8,4,16", "--link-transform", "hadamard")


def write_cluster(directory: Path) -> tuple[str, ...]:
    """Write the scheduler's files for two equal devices."""
    documents = {
        "m.yml": {
            "vit-digits": {
                "layers": 16,
                "parameters_in": 64,
                "parameters_out": [2080, 1040, 5200, 1040] * 4,
                "mem_MB": [1.0] * 16,
            }
        },
        "t.yml": {
            "board": {
                "bw_Mbps": 100,
                "mem_MB": 1024,
                "model_profiles": {
                    "vit-digits": [{"dtype": "torch.float32", "batch_size": 8, "time_s": [0.01] * 16}]
                },
            }
        },
        "d.yml": {"board": ["0", "1"]},
    }
    for name, document in documents.items():
        (directory / name).write_text(yaml.safe_dump(document))
    return ("-sm", "m.yml", "-sdt", "t.yml", "-sd", "d.yml")


def over_p2p(directory: Path) -> None:
    over("p2p", directory)


def over_rpc(directory: Path) -> None:
    over("rpc", directory)


def over_tcp(directory: Path) -> None:
    over("tcp", directory)


def over(comm: str, directory: Path) -> None:
    ended = run_world(directory, 3, *COMMON, *SPLIT, "-c", comm)
    assert {end.status for end in ended.values()} == {0}, ended
    report = json.loads((directory / "r.json").read_text())
    assert [stage["quant_bits"] for stage in report["schedule"]] == [8, 4, 16]
    first, middle, last = report["stages"]
    raw = specs_bytes(DIGITS.payload_specs(5, 8))
    assert raw == 8 * 4 * 2 * DIGITS.config.hidden * DIGITS.config.image.tokens
    assert first["bytes_out_mean"] < 0.35 * raw
    assert middle["bytes_out_mean"] < 0.65 * first["bytes_out_mean"]
    assert min(first["encode_s_mean"], middle["encode_s_mean"], last["encode_s_mean"]) > 0
    assert [stage["transformed_fraction"] for stage in report["stages"]] == [1, 1, 1]
    assert min(middle["decode_s_mean"], last["decode_s_mean"]) > 0 == first["decode_s_mean"]
    schedule = Schedule.from_partition([1, 5, 6, 8, 9, 16]).with_quant_bits([8, 4, 16])
    expected = run(DIGITS, schedule, (heldout()[0][:50],), transform="hadamard")
    np.testing.assert_allclose(load_arrays(directory / "o.npz")["outputs"], expected, atol=1e-5)


def automatic(directory: Path) -> None:
    files = write_cluster(directory)
    ended = run_world(directory, 2, *COMMON, own={0: (*files, "-q", "6,0", "--clamp", "laplace")})
    assert {end.status for end in ended.values()} == {0}, ended
    report = json.loads((directory / "r.json").read_text())
    assert [stage["quant_bits"] for stage in report["schedule"]] == [6, 0]
    assert report["stages"][0]["encode_s_mean"] > 0
    assert report["accuracy"]["top1"] > 0.9


def nan_in_the_middle(directory: Path) -> None:
    model = directory / "model"
    model.mkdir()
    weights = load_file(ASSETS / "vit-digits" / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("layer.1.output.dense.bias"))
    weights[name][3] = math.nan
    save_file(weights, model / "model.safetensors")
    ended = run_world(directory, 3, *COMMON[:-4], *SPLIT, "-M", model, "--output", "o.npz")
    assert ended[1].status == 1
    assert "microbatch 0: stage 1 on rank 1 computed values" in ended[1].line
    for rank in (0, 2):
        assert ended[rank].status == 4
        assert "rank 1" in ended[rank].line
        assert "microbatch 0" in ended[rank].line
    assert not (directory / "o.npz").exists()


def a_list_too_long_for_what_was_scheduled(directory: Path) -> None:
    files = write_cluster(directory)
    ended = run_world(directory, 2, *COMMON, own={0: (*files, "-q", "8,8,0")})
    assert ended[0].status == 2
    assert "3 bit widths (-q) for 2 stages" in ended[0].line
    assert ended[1].status in (2, 4)
    assert len(ended[1].err.strip().splitlines()) == 1


WORLDS = (over_p2p, over_rpc, over_tcp, automatic, nan_in_the_middle, a_list_too_long_for_what_was_scheduled)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Callable[[Path], None], Future[None]]]:
    """Run all worlds, three at a time, because ranks mostly wait for imports and for each other."""
    pool = ThreadPoolExecutor(3)
    yield {world: pool.submit(world, tmp_path_factory.mktemp(world.__name__)) for world in WORLDS}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.__name__)
def test_real_ranks(
    world: Callable[[Path], None], played: dict[Callable[[Path], None], Future[None]]
) -> None:
    played[world].result(timeout=2 * LIMIT_S)


def test_all_transports_give_the_same_bits(
    played: dict[Callable[[Path], None], Future[None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    for world in (over_p2p, over_rpc, over_tcp):
        played[world].result(timeout=2 * LIMIT_S)
    base = tmp_path_factory.getbasetemp()
    folders = [base / f"over_{comm}0" for comm in ("p2p", "rpc", "tcp")]
    assert len({load_arrays(folder / "o.npz")["outputs"].tobytes() for folder in folders}) == 1
