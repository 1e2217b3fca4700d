"""The data rank's two ends over links in memory."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from pipeedge.config import InputRequest
from pipeedge.data import open_input
from pipeedge.data_rank import Collector, Feeder
from pipeedge.models import find_model
from pipeedge.results import ResultWriter
from pipeedge.transport.base import Packet
from pipeedge.transport.loopback import LocalLink
from pipeedge.worker import Activity, Crew, Outgoing


def test_outputs_that_are_no_numbers_are_counted(tmp_path: Path) -> None:
    """Two microbatches of three items come back; one item of the first is NaN, one of the second infinite."""
    model = find_model("vit-digits")
    source = open_input(InputRequest(batch_size=6), model)
    inwards, outwards, activity = LocalLink(), LocalLink(), Activity()
    outgoing = Outgoing(inwards, None, activity)
    feeder = Feeder(source, 3, outgoing, activity)
    crew = Crew()
    with ResultWriter(tmp_path / "o.npz", model, 6) as writer:
        collector = Collector(feeder, outwards, None, writer, activity, counts_accuracy=True)
        crew.start("feed", feeder.run)
        crew.start("collect", collector.run)
        for value in (math.nan, -math.inf):
            packet = inwards.receive()
            assert packet is not None
            outputs = torch.zeros(3, 10)
            outputs[1, 4] = value
            outwards.post(Packet(packet.number, packet.items, (outputs,)))
        assert inwards.receive() is None
        outwards.finish()
        crew.wait()
    assert collector.not_finite == 2
    assert writer.items == 6
    assert len(collector.latencies) == 2
