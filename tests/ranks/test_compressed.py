"""Compressed links in whole pipelines: in memory against the unsplit model, and among real ranks."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from places import ASSETS
from processes import DEADLINE_S, run_world
from safetensors.torch import load_file, save_file
from small_models import VOCABULARY

from pipeedge.base.errors import PeerFailedError, PipeEdgeError, RequestError
from pipeedge.base.payload import Payload, specs_bytes
from pipeedge.base.schedule import BIT_WIDTHS, LayerRange, Schedule
from pipeedge.compress import LinkEncoder, NonFiniteError, Sample, choose_levels
from pipeedge.compress.adaptation import FixedBits
from pipeedge.models import Model, find_model
from pipeedge.plan.planning import Plan, plan_schedule
from pipeedge.request.config import CLAMPS, DEFAULT_CLAMP, CompressionRequest, Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run.stage import Decode, Encode, Stage
from pipeedge.transport.base import Packet
from pipeedge.transport.frame import FrameBuffer, Kind, frame_capacity

CPU = torch.device("cpu")
DIGITS = find_model("vit-digits")


def digits(count: int) -> torch.Tensor:
    with np.load(ASSETS / "digits.npz") as arrays:
        return torch.from_numpy((arrays["images_heldout"][:count, None].astype(np.float32) / 16 - 0.5) / 0.5)


# --- in memory ------------------------------------------------------------------------------------------


def run(
    model: Model, schedule: Schedule, inputs: Payload, *, clamp: str = "mse", size: int = 8
) -> torch.Tensor:
    """The pipeline in one thread; every link goes through a frame of the capacity that the plan says."""
    items = inputs[0].shape[0]
    plan = Plan(schedule, 0, items, size, inputs[0].shape[1], None, None, CompressionRequest(clamp))
    steps: list[Callable[[Packet], Packet]] = []
    for number, (stage, link) in enumerate(zip(schedule.stages, plan.links(model)[1:], strict=True)):
        steps.append(Stage(model.load(stage.layers, None, CPU), CPU))
        if stage.quant_bits:
            steps.append(Encode(FixedBits(stage.quant_bits), clamp, 10, stage=number, rank=stage.rank))
        steps.append(functools.partial(through_frame, FrameBuffer(frame_capacity(link.specs))))
        if stage.quant_bits:
            steps.append(Decode(stage.rank))
    outputs = []
    for number, start in enumerate(range(0, items, size)):
        packet = Packet(number, size, tuple(tensor[start : start + size] for tensor in inputs))
        for step in steps:
            packet = step(packet)
        outputs.append(packet.payload[0].clone())
    return torch.cat(outputs)


def through_frame(buffer: FrameBuffer, packet: Packet) -> Packet:
    buffer.write(kind=Kind.MICROBATCH, number=packet.number, items=packet.items, payload=packet.payload)
    frame = buffer.read()
    return Packet(frame.number, frame.items, frame.payload)


def whole(model: Model, inputs: Payload) -> torch.Tensor:
    with torch.inference_mode():
        return model.load(LayerRange(0, model.n_layers), None, CPU)(inputs)[0]


@pytest.mark.parametrize("cut", [1, 6, 7, 12])
def test_error_falls_with_bits_and_zero_bits_is_exact(cut: int) -> None:
    images = digits(20)  # in the end a microbatch of 4
    expected = whole(DIGITS, (images,))
    errors = []
    for bits in (0, 16, 8, 4, 2):
        schedule = Schedule.from_partition([1, cut, cut + 1, 16]).with_quant_bits([bits, 0])
        outputs = run(DIGITS, schedule, (images,))
        errors.append(float((outputs - expected).norm() / expected.norm()))
    assert errors[0] < 1e-6  # not the codec's: other sizes of microbatches
    assert errors == sorted(errors)
    assert errors[1] < 1e-3
    assert errors[2] < 0.02
    assert errors[3] < 0.25


def accuracy(outputs: torch.Tensor) -> float:
    with np.load(ASSETS / "digits.npz") as arrays:
        labels = torch.from_numpy(arrays["labels_heldout"].astype(np.int64))
    return 100 * float((outputs.argmax(1) == labels).float().mean())


EVERY_CUT = [bound for layer in range(1, 17) for bound in (layer, layer)]


def test_the_default_clamp_keeps_the_classes() -> None:
    """Of all held-out images, with a compressed link after every layer: benchmarks/accuracy.py has more."""
    images = digits(10_000)
    expected = whole(DIGITS, (images,))
    found = {
        (bits, clamp): run(
            DIGITS,
            Schedule.from_partition(EVERY_CUT).with_quant_bits([bits] * 15 + [0]),
            (images,),
            clamp=clamp,
        )
        for bits, clamp in [(8, DEFAULT_CLAMP), (4, DEFAULT_CLAMP), (2, DEFAULT_CLAMP), (2, "none")]
    }
    assert int((found[8, DEFAULT_CLAMP].argmax(1) != expected.argmax(1)).sum()) <= 1
    assert accuracy(found[4, DEFAULT_CLAMP]) >= accuracy(expected) - 0.5
    assert accuracy(found[2, "none"]) < accuracy(expected) - 5
    assert accuracy(found[2, DEFAULT_CLAMP]) > accuracy(found[2, "none"]) + 5


@pytest.mark.parametrize("clamp", CLAMPS)
def test_all_links_may_be_compressed_also_the_last(clamp: str) -> None:
    images = digits(16)
    expected = whole(DIGITS, (images,))
    schedule = Schedule.from_partition([1, 3, 4, 7, 8, 16]).with_quant_bits([8, 7, 16])
    outputs = run(DIGITS, schedule, (images,), clamp=clamp)
    assert torch.equal(outputs.argmax(1), expected.argmax(1))
    assert not torch.equal(outputs, expected)


def test_the_mask_of_bert_crosses_every_compressed_link(model_dirs: dict[str, Path]) -> None:
    """With what is masked replaced by large values, the result is the same: the mask was heeded."""
    model = find_model(str(model_dirs["bert"]))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, len(VOCABULARY), (4, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, 5:] = 0
    inputs = (ids, mask, torch.zeros_like(ids))
    expected = whole(model, inputs)
    schedule = Schedule.from_partition([1, 1, 2, 3, 4, 12]).with_quant_bits([8, 8, 0])
    outputs = run(model, schedule, inputs, size=4)
    assert float((outputs - expected).norm() / expected.norm()) < 0.05
    elsewhere = torch.where(mask.bool(), ids, 3)
    again = run(model, schedule, (elsewhere, *inputs[1:]), size=4)
    assert float((again - expected).norm() / expected.norm()) < 0.05


class CountingLease:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_received_buffer_is_free_after_decoding_unless_passed_through() -> None:
    values, mask = torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.bool)
    for payload, released in [((values,), 1), ((values, mask), 0)]:
        lease = CountingLease()
        wire = LinkEncoder("mse").encode(payload, 8)
        decoded = Decode(0)(Packet(0, 2, wire, lease))
        assert lease.released == released
        Encode(FixedBits(4), "mse", 10, stage=0, rank=0)(decoded)
        assert lease.released == released


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_value_without_code_is_an_error_that_says_where(bits: int, bad: float) -> None:
    values = torch.zeros(2, 3, 8)
    values[1, 2, 0] = bad
    encode = Encode(FixedBits(bits), "mse", 10, stage=3, rank=5)
    with pytest.raises(NonFiniteError, match=r"^microbatch 17: stage 3 on rank 5 .*row 5 of 6.*-q 0\)$"):
        encode(Packet(17, 2, (values,)))


def test_malformed_compressed_payload_names_its_sender() -> None:
    with pytest.raises(PeerFailedError, match=r"microbatch 4 from rank 2: .*table"):
        Decode(2)(Packet(4, 1, (torch.ones(3),)))


# --- what is asked for ----------------------------------------------------------------------------------


def planned(line: str) -> list[int]:
    request = parse_runtime(line.split(), Environment()).request
    return [stage.quant_bits for stage in plan_schedule(request, DIGITS).schedule.stages]


def test_bits_come_from_the_command_line_or_the_schedule_file(tmp_path: Path) -> None:
    file = tmp_path / "s.yml"
    file.write_text("- 0: [1, 6]\n  quant_bits: 5\n- 1: [7, 16]\n")
    assert planned("0 2 -pt 1,8,9,16 -q 8,4") == [8, 4]
    assert planned("0 2 -pt 1,8,9,16") == [0, 0]
    assert planned("0 3 -q 2,3,0") == [2, 3, 0]
    assert planned(f"0 2 --schedule-file {file}") == [5, 0]
    assert planned(f"0 2 --schedule-file {file} -q 0,16") == [0, 16]


@pytest.mark.parametrize("line", ["0 3 -q 8,0", "0 2 --schedule-file {file} -q 8"])
def test_a_list_of_another_length_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "s.yml").write_text("- 0: [1, 6]\n- 1: [7, 16]\n")
    with pytest.raises(RequestError, match=r"bit widths? \(-q\) for . stages"):
        planned(line.format(file=tmp_path / "s.yml"))


def test_clamps_are_those_of_the_codec() -> None:
    sample = Sample.of(np.random.default_rng(1).normal(size=(4, 50)).astype(np.float32))
    for clamp in CLAMPS:
        choose_levels(clamp, sample, 4)
    with pytest.raises(RequestError, match="--clamp half: choose one of none, laplace"):
        CompressionRequest("half")


# --- real ranks -----------------------------------------------------------------------------------------

COMMON = ("-m", "vit-digits", "-b", 50, "--output", "o.npz", "--report", "r.json")
SPLIT = ("-pt", "1,5,6,8,9,16", "-D", 1, "-q", "8,4,16")


def write_cluster(directory: Path) -> tuple[str, ...]:
    """The scheduler's files for two alike devices."""
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


def over(comm: str, directory: Path) -> None:
    ended = run_world(directory, 3, *COMMON, *SPLIT, "-c", comm)
    assert {end.status for end in ended.values()} == {0}, ended
    report = json.loads((directory / "r.json").read_text())
    assert [stage["quant_bits"] for stage in report["schedule"]] == [8, 4, 16]
    first, middle, last = report["stages"]
    raw = specs_bytes(DIGITS.payload_specs(5, 8))
    assert raw == 8 * 4 * 2 * DIGITS.config.hidden * DIGITS.config.image_tokens
    assert first["bytes_out_mean"] < 0.35 * raw
    assert middle["bytes_out_mean"] < 0.65 * first["bytes_out_mean"]
    assert min(first["encode_s_mean"], middle["encode_s_mean"], last["encode_s_mean"]) > 0
    assert min(middle["decode_s_mean"], last["decode_s_mean"]) > 0 == first["decode_s_mean"]
    schedule = Schedule.from_partition([1, 5, 6, 8, 9, 16]).with_quant_bits([8, 4, 16])
    with np.load(directory / "o.npz") as arrays:
        np.testing.assert_allclose(arrays["outputs"], run(DIGITS, schedule, (digits(50),)), atol=1e-5)


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


WORLDS = (over_p2p, over_rpc, automatic, nan_in_the_middle, a_list_too_long_for_what_was_scheduled)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Callable[[Path], None], Future[None]]]:
    """All worlds, three at a time: ranks mostly wait for torch to be imported and for one another."""
    pool = ThreadPoolExecutor(3)
    yield {world: pool.submit(world, tmp_path_factory.mktemp(world.__name__)) for world in WORLDS}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.__name__)
def test_real_ranks(
    world: Callable[[Path], None], played: dict[Callable[[Path], None], Future[None]]
) -> None:
    played[world].result(timeout=2 * DEADLINE_S)


def test_both_transports_give_the_same_bits(
    played: dict[Callable[[Path], None], Future[None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    for world in (over_p2p, over_rpc):
        played[world].result(timeout=2 * DEADLINE_S)
    base = tmp_path_factory.getbasetemp()
    results = [np.load(base / f"over_{comm}0" / "o.npz")["outputs"].tobytes() for comm in ("p2p", "rpc")]
    assert results[0] == results[1]


def test_the_error_tree_has_a_place_for_it() -> None:
    assert issubclass(NonFiniteError, PipeEdgeError)
    assert NonFiniteError.exit_code == 1


def test_bits_without_a_link_give_a_notice() -> None:
    for options, told in (("0 1 -q 8", True), ("0 1 -q 0", False), ("0 2 -q 8,0", False)):
        request = parse_runtime(["-m", "vit-digits", *options.split()], Environment()).request
        notes = plan_schedule(request, DIGITS).notes
        assert any("-q changes nothing" in note for note in notes) == told
