"""Test compressed links in whole pipelines: in memory against the unsplit model, and on real ranks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from places import ASSETS
from shipped_model import CPU, DIGITS, heldout
from small_models import VOCABULARY
from stages_in_memory import run

from pipeedge.base.errors import PeerFailedError, PipeEdgeError, RequestError
from pipeedge.base.payload import Payload
from pipeedge.base.schedule import BIT_WIDTHS, LayerRange, Schedule
from pipeedge.compress import LinkEncoder, NonFiniteError, Sample, choose_levels
from pipeedge.compress.adaptation import FixedBits
from pipeedge.models import Model, find_model
from pipeedge.plan.schedule_choice import plan_schedule
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.request.scheduling import CLAMPS, DEFAULT_CLAMP, LINK_TRANSFORMS, CompressionRequest
from pipeedge.run.stage import Decode, Encode
from pipeedge.transport.base import Packet

# --- in memory ------------------------------------------------------------------------------------------


def whole(model: Model, inputs: Payload) -> torch.Tensor:
    with torch.inference_mode():
        return model.load(LayerRange(0, model.n_layers), None, CPU)(inputs)[0]


@pytest.mark.parametrize("cut", [1, 6, 7, 12])
def test_error_falls_with_bits_and_zero_bits_is_exact(cut: int) -> None:
    images = heldout()[0][:20]  # in the end a microbatch of 4
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
    """All held-out images, with a compressed link after every layer; see also benchmarks/accuracy.py."""
    images = heldout()[0][:10_000]
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
def test_all_links_including_the_last_may_be_compressed(clamp: str) -> None:
    images = heldout()[0][:16]
    expected = whole(DIGITS, (images,))
    schedule = Schedule.from_partition([1, 3, 4, 7, 8, 16]).with_quant_bits([8, 7, 16])
    outputs = run(DIGITS, schedule, (images,), clamp=clamp)
    assert torch.equal(outputs.argmax(1), expected.argmax(1))
    assert not torch.equal(outputs, expected)


def test_the_mask_of_bert_crosses_every_compressed_link(model_dirs: dict[str, Path]) -> None:
    """Masked tokens do not affect the result, even if replaced by large values."""
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


def test_transforms_are_those_of_the_codec() -> None:
    for transform in LINK_TRANSFORMS:
        LinkEncoder("mse", transform=transform)
    with pytest.raises(RequestError, match="--link-transform half: choose one of auto, off, hadamard"):
        CompressionRequest(link_transform="half")


def test_non_finite_error_is_an_internal_error() -> None:
    assert issubclass(NonFiniteError, PipeEdgeError)
    assert NonFiniteError.exit_code == 1


def test_bits_without_a_link_give_a_notice() -> None:
    for options, told in (("0 1 -q 8", True), ("0 1 -q 0", False), ("0 2 -q 8,0", False)):
        request = parse_runtime(["-m", "vit-digits", *options.split()], Environment()).request
        notes = plan_schedule(request, DIGITS).notes
        assert any("-q changes nothing" in note for note in notes) == told
