"""Test tables of pixel values."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch

from pipeedge.base.payload import PixelTable
from pipeedge.data import InputRequest, open_input
from pipeedge.models import find_model
from pipeedge.run import stage
from pipeedge.run.stage import Stage
from pipeedge.transport.base import Packet


def table(channels: int = 3) -> PixelTable:
    return PixelTable(torch.randn(channels, 256, generator=torch.Generator().manual_seed(channels)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_byte_is_looked_up_in_row_of_its_channel(dtype: torch.dtype) -> None:
    known = table()
    pixels = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    found = known.look_up(pixels, dtype)
    assert found.shape == pixels.shape
    for at in np.ndindex(*pixels.shape):
        assert found[at] == known.values[at[1], int(pixels[at])].to(dtype)


def test_pixel_table_survives_conversion_to_text() -> None:
    known = table(1)
    assert PixelTable.from_text(known.to_text()).values.equal(known.values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "channels", id="empty"),
        pytest.param("not base64", "base64|alphabet", id="no base64"),
        pytest.param("AAAA", "buffer size", id="no numbers"),
        pytest.param(base64.b64encode(b"\0" * 4 * 255).decode(), "reshape", id="too few"),
        pytest.param(base64.b64encode(b"\xff" * 1024).decode(), "not finite", id="not finite"),
    ],
)
def test_malformed_table_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PixelTable.from_text(text)


def test_images_with_other_channel_count_are_refused() -> None:
    with pytest.raises(ValueError, match="table of 3 channels"):
        table().look_up(torch.zeros(1, 1, 2, 2, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_stage_gives_same_bits_for_bytes_and_values(dtype: torch.dtype) -> None:
    model = find_model("vit-digits")
    source = open_input(InputRequest(max_items=8), model)
    (group,) = source.groups(8)
    encoded = group.collate(tuple(spec.empty() for spec in group.specs)).payload
    (values,) = source.microbatches(8)
    assert [tensor.dtype for tensor in encoded] == [torch.uint8]
    assert [tensor.dtype for tensor in values.payload] == [torch.float32]
    shard, cpu = model.load(dtype=dtype), torch.device("cpu")
    by_table = Stage(shard, cpu, source.pixels)(Packet(0, 8, encoded)).payload
    before = Stage(shard, cpu)(Packet(0, 8, values.payload)).payload
    assert torch.equal(by_table[0], before[0])


def test_memory_is_returned_between_the_layers_of_the_first_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What kernels keep would else lie between activations, whose memory then cannot be used again."""
    returned: list[None] = []
    monkeypatch.setattr(stage, "return_freed_memory", lambda: returned.append(None))
    model = find_model("vit-digits")
    compute = Stage(model.load(), torch.device("cpu"))
    packets = [Packet(number, 2, (torch.zeros(2, 1, 8, 8),)) for number in range(2)]
    for packet in packets:
        compute(packet)
        assert len(returned) == model.n_layers
