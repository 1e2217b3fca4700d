"""Generate random scheduling problems as plain arrays and as JSON.

Many consist of small whole numbers, so that several schedules have exactly the same bottleneck and ties must
be broken as documented; the others use arbitrary reals.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """One problem; ``T`` types, ``L`` layers, hosts given by the index of their type."""

    mem: np.ndarray
    """[L] bytes of each layer."""
    elements: np.ndarray
    """[L + 1] elements of an item at each cut, the input first."""
    type_mem: np.ndarray
    type_bw: np.ndarray
    time: np.ndarray
    """[T, L] seconds."""
    hosts: tuple[int, ...]
    batch: float = 2.0
    element_bytes: float = 4.0
    buffers_in: float = 2.0
    buffers_out: float = 1.0
    data_host: int | None = None
    links: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """(from, to) -> (bytes a second, seconds of latency)."""
    receive: np.ndarray | None = None
    """[T, L] seconds to receive, if a layer is the first of a stage."""
    send: np.ndarray | None = None
    """[T, L] seconds to send, if a layer is the last of a stage."""
    activations: np.ndarray | None = None
    """[T, L] bytes."""
    overhead: np.ndarray | None = None
    """[T] seconds of any stage besides its layers and links."""
    feed: np.ndarray | None = None
    """[T] seconds to read and feed a microbatch on the data host."""
    collect: np.ndarray | None = None
    """[T] seconds to collect its results there."""
    input_send: np.ndarray | None = None
    """[T] seconds to send the input from there, if the first stage is on another host."""
    output_receive: np.ndarray | None = None
    """[T] seconds to receive the outputs there, if the last stage is on another host."""
    input_bytes: float | None = None
    """Bytes of one item of input; None: ``elements[0] * element_bytes``."""
    link_bits: int = 0
    """Bits per value on links between stages; 0 for uncompressed."""

    @property
    def layers(self) -> int:
        return len(self.mem)

    def to_json(self) -> dict[str, Any]:
        """Return the problem as ``sched-pipeline --problem`` reads it; hosts are called by their numbers."""
        tables = {"receive_s": self.receive, "send_s": self.send, "activation_bytes": self.activations}
        seconds = {
            "overhead_s": self.overhead,
            "feed_s": self.feed,
            "collect_s": self.collect,
            "input_send_s": self.input_send,
            "output_receive_s": self.output_receive,
        }
        kinds = [
            {
                "name": f"type{kind}",
                "mem_bytes": float(self.type_mem[kind]),
                "bw_bytes_per_s": float(self.type_bw[kind]),
                "time_s": times.tolist(),
                **{name: table[kind].tolist() for name, table in tables.items() if table is not None},
                **{name: float(table[kind]) for name, table in seconds.items() if table is not None},
            }
            for kind, times in enumerate(self.time)
        ]
        return {
            "batch_size": self.batch,
            "element_bytes": self.element_bytes,
            "elements_in": float(self.elements[0]),
            "elements_out": self.elements[1:].tolist(),
            "weight_bytes": self.mem.tolist(),
            "input_bytes": self.input_bytes,
            "buffers_in": self.buffers_in,
            "buffers_out": self.buffers_out,
            "types": kinds,
            "hosts": [{"name": str(host), "type": f"type{kind}"} for host, kind in enumerate(self.hosts)],
            "links": [
                {"from": str(a), "to": str(b), "bw_bytes_per_s": bw, "latency_s": latency}
                for (a, b), (bw, latency) in sorted(self.links.items())
            ],
            "data_host": None if self.data_host is None else str(self.data_host),
        }

    def handling(self, host: int, first: int, last: int) -> float:
        """Return the seconds of a stage besides its layers; 0 at an end of the model without a link."""
        kind = self.hosts[host]
        free = self.data_host is None or self.data_host == host
        seconds = 0.0 if self.overhead is None else float(self.overhead[kind])
        if self.receive is not None and (first > 0 or not free):
            seconds += float(self.receive[kind, first])
        if self.send is not None and (last < self.layers or not free):
            seconds += float(self.send[kind, last - 1])
        return seconds

    def data_seconds(self) -> list[float]:
        """Return the seconds of the data host to feed, to collect, to send inputs and to receive outputs.

        They are 0 without a data host, or if unknown.
        """
        tables = (self.feed, self.collect, self.input_send, self.output_receive)
        if self.data_host is None:
            return [0.0] * len(tables)
        kind = self.hosts[self.data_host]
        return [0.0 if table is None else float(table[kind]) for table in tables]

    def cut_bytes(self) -> np.ndarray:
        """Return [L + 1] bytes of a microbatch in memory at each cut."""
        sizes = self.elements * self.batch * self.element_bytes
        if self.input_bytes is not None:
            sizes[0] = self.input_bytes * self.batch
        return sizes

    def held(self, kind: int, first: int, last: int) -> float:
        """Return the bytes of the largest activation of a stage."""
        return 0.0 if self.activations is None else float(self.activations[kind, first:last].max())

    def link_bytes(self) -> np.ndarray:
        """Return [L + 1] bytes that cross each cut; fewer inside the model if links are compressed."""
        crossing = self.cut_bytes()
        if 0 < self.link_bits < 8 * self.element_bytes:
            crossing[1:-1] = self.elements[1:-1] * self.batch * self.link_bits / 8
        return crossing


def random_case(
    rng: np.random.Generator,
    *,
    types: tuple[int, int] = (1, 4),
    hosts_per_type: tuple[int, int] = (0, 3),
    layers: tuple[int, int] = (2, 8),
    named_hosts: int = 5,
) -> Case:
    """Generate a problem with sizes in the given inclusive ranges.

    About a third have a data host, a links table, or both; these have at most ``named_hosts`` hosts, because
    each host then has to be tried individually.
    """
    n_types = int(rng.integers(types[0], types[1] + 1))
    n_layers = int(rng.integers(layers[0], layers[1] + 1))
    counts = rng.integers(hosts_per_type[0], hosts_per_type[1] + 1, n_types)
    if counts.sum() == 0:
        counts[rng.integers(n_types)] = 1
    named = rng.random() < 0.35
    hosts = np.repeat(np.arange(n_types), counts)
    rng.shuffle(hosts)
    if named:
        hosts = hosts[:named_hosts]

    whole = rng.random() < 0.5
    if whole:
        time = rng.integers(0, 5, (n_types, n_layers)).astype(float)
        sizes = rng.integers(0, 4, n_layers + 1).astype(float)
        mem = rng.integers(0, 40, n_layers).astype(float)
        bw = rng.choice([0.0, 2.0, 4.0, 8.0, 16.0], n_types, p=[0.1, 0.2, 0.3, 0.2, 0.2])
    else:
        time = rng.uniform(0.1, 2, (1, n_layers)) * rng.uniform(0.3, 3, (n_types, 1))
        time *= rng.uniform(0.8, 1.25, time.shape)
        sizes = rng.uniform(0, 4, n_layers + 1)
        mem = rng.uniform(0, 40, n_layers)
        bw = np.where(rng.random(n_types) < 0.08, 0.0, rng.uniform(2, 40, n_types))
    if rng.random() < 0.6:  # cuts repeat, as in a transformer
        pattern = sizes[1 : 1 + min(n_layers, int(rng.integers(1, 5)))]
        sizes[1:] = np.resize(pattern, n_layers)
    if rng.random() < 0.3:  # as do whole blocks
        period = int(rng.integers(1, 4))
        time = np.resize(time.T[:period], (n_layers, n_types)).T.copy()
    tightness = rng.choice([0.3, 0.6, 1.0, 10.0])
    type_mem = np.floor(rng.uniform(0.2, 1.2, n_types) * tightness * (mem.sum() + 24 * sizes.max()))

    data_host = None
    links: dict[tuple[int, int], tuple[float, float]] = {}
    if named:
        kind = rng.integers(3)
        if kind != 1:
            data_host = int(rng.integers(len(hosts)))
        if kind != 0:
            density = rng.choice([0.2, 0.6, 1.0])
            for a in range(len(hosts)):
                for b in range(len(hosts)):
                    if a != b and rng.random() < density:
                        speed = float(rng.choice([0.0, 2.0, 4.0, 8.0, 32.0], p=[0.15, 0.2, 0.25, 0.2, 0.2]))
                        latency = float(rng.choice([0.0, 0.0, 1.0, 0.25]))
                        links[a, b] = (speed, latency)
    beside: dict[str, Any] = {}
    if rng.random() < 0.5:  # what a profile may know beside the layers
        scale = (n_types, n_layers)
        if whole:
            beside["receive"], beside["send"] = (
                rng.integers(0, 4, scale) * 1.0,
                rng.integers(0, 4, scale) * 1.0,
            )
            beside["activations"] = rng.integers(0, 60, scale) * 1.0
        else:
            beside["receive"], beside["send"] = rng.uniform(0, 0.8, scale), rng.uniform(0, 0.8, scale)
            beside["activations"] = rng.uniform(0, 60, scale)
        for name in list(beside):
            if rng.random() < 0.3:
                del beside[name]
    if data_host is not None and rng.random() < 0.6:
        for name in ("feed", "collect", "input_send", "output_receive"):
            if rng.random() < 0.8:
                beside[name] = rng.integers(0, 5, n_types) * 1.0 if whole else rng.uniform(0, 2, n_types)
        if rng.random() < 0.5:
            beside["input_bytes"] = float(rng.integers(0, 16))
    own = rng.spawn(1)[0]  # leaves the other numbers of each seed as they were
    if own.random() < 0.3:
        beside["overhead"] = own.integers(0, 4, n_types) * 1.0 if whole else own.uniform(0, 0.8, n_types)
    return Case(
        mem=mem,
        elements=sizes,
        type_mem=type_mem,
        type_bw=bw,
        time=time,
        hosts=tuple(int(h) for h in hosts),
        batch=float(rng.choice([1.0, 2.0])),
        element_bytes=float(rng.choice([1.0, 2.0, 4.0])),
        buffers_in=float(rng.integers(0, 3)),
        buffers_out=float(rng.integers(0, 3)),
        data_host=data_host,
        links=links,
        link_bits=int(rng.choice([0, 0, 16, 8, 5, 2])),
        **beside,
    )
