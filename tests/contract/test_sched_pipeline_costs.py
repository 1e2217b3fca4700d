"""Test the costs of sched-pipeline's schedules on random small clusters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_program import MIB, Cluster


@dataclass(frozen=True)
class World:
    """Contents of the four files, and the options."""

    model: dict[str, Any]
    types: dict[str, dict[str, Any]]
    devices: dict[str, list[str]]
    neighbors: dict[str, dict[str, dict[str, float]]]
    batch: int
    buffers_in: int
    buffers_out: int
    data_host: str | None

    def best_period(self) -> float:
        """Try all schedules and return the shortest period, infinite if none is feasible."""
        layers = self.model["layers"]
        out = self.model["parameters_out"]
        sizes = [self.model["parameters_in"], *(out * (layers // len(out)))]
        size = [elements * self.batch * 4 for elements in sizes]
        type_of = {host: self.types[name] for name, hosts in self.devices.items() for host in hosts}
        best = float("inf")

        def link(one: str, other: str, cut: int) -> float:
            if one == other:
                return 0.0
            pair = self.neighbors.get(one, {}).get(other) or self.neighbors.get(other, {}).get(one)
            if pair is None:
                pair = {"bw_Mbps": min(type_of[one]["bw_Mbps"], type_of[other]["bw_Mbps"])}
            if size[cut] and not pair["bw_Mbps"]:
                return float("inf")
            seconds = size[cut] / (pair["bw_Mbps"] * MIB / 8) if size[cut] else 0.0
            return seconds + pair.get("latency_s", 0.0)

        def extend(first: int, used: tuple[str, ...], period: float) -> None:
            nonlocal best
            if first == layers:
                best = min(
                    best, max(period, link(used[-1], self.data_host, layers) if self.data_host else 0.0)
                )
                return
            for host in type_of.keys() - set(used):
                before = used[-1] if used else self.data_host
                arrive = link(before, host, first) if before else 0.0
                for last in range(first + 1, layers + 1):
                    (profile,) = type_of[host]["model_profiles"]["m"]
                    need = sum(self.model["mem_MB"][first:last]) * MIB
                    need += self.buffers_in * size[first] + self.buffers_out * size[last]
                    if need <= type_of[host]["mem_MB"] * MIB:
                        extend(last, (*used, host), max(period, arrive, sum(profile["time_s"][first:last])))

        extend(0, (), 0.0)
        return best


@st.composite
def worlds(draw: st.DrawFn) -> World:
    layers = draw(st.sampled_from([2, 4, 5]))
    block = draw(st.sampled_from([1, layers]))
    times = st.lists(st.integers(0, 9).map(float), min_size=layers, max_size=layers)
    batch = draw(st.sampled_from([1, 8]))
    types, devices = {}, {}
    hosts: list[str] = []
    for name in draw(st.sampled_from(["a", "ab", "abc"])):
        types[name] = {
            "bw_Mbps": draw(st.sampled_from([0, 0.5, 1, 100])),
            "mem_MB": draw(st.sampled_from([1, 2.5, 4, 40])),
            "model_profiles": {"m": [{"batch_size": batch, "dtype": "torch.float32", "time_s": draw(times)}]},
        }
        devices[name] = [f"{name}{i}" for i in range(draw(st.integers(0, 2)))]
        hosts += devices[name]
    if not hosts:
        devices["a"] = hosts = ["a0"]
    link = st.fixed_dictionaries(
        {"bw_Mbps": st.sampled_from([0, 0.25, 10])}, optional={"latency_s": st.just(2.0)}
    )
    pairs = draw(st.dictionaries(st.tuples(st.sampled_from(hosts), st.sampled_from(hosts)), link, max_size=3))
    neighbors: dict[str, dict[str, dict[str, float]]] = {}
    for (one, other), speed in pairs.items():
        neighbors.setdefault(one, {})[other] = speed
    sizes = st.sampled_from([0, 1000, 20_000, 150_000])
    return World(
        model={
            "layers": layers,
            "mem_MB": draw(st.lists(st.sampled_from([0.5, 1, 2]), min_size=layers, max_size=layers)),
            "parameters_in": draw(sizes),
            "parameters_out": draw(st.lists(sizes, min_size=block, max_size=block)),
        },
        types=types,
        devices=devices,
        neighbors=neighbors,
        batch=batch,
        buffers_in=draw(st.integers(0, 2)),
        buffers_out=draw(st.integers(0, 2)),
        data_host=draw(st.none() | st.sampled_from(hosts)),
    )


@settings(max_examples=cases(150))
@given(world=worlds())
def test_any_small_cluster_is_scheduled_at_its_optimum(
    tmp_path_factory: pytest.TempPathFactory, world: World
) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("world"))
    cluster.write("models.yml", {"m": world.model})
    cluster.write("device_types.yml", world.types)
    cluster.write("devices.yml", world.devices)
    cluster.write("n.yml", world.neighbors)
    arguments = [f"-b{world.batch}", f"-i{world.buffers_in}", f"-o{world.buffers_out}", "--format=json"]
    arguments += [
        "--dev-neighbors-file=n.yml",
        *([f"--data-host={world.data_host}"] if world.data_host else []),
    ]
    done = cluster.run(*arguments)
    best = world.best_period()
    if best == float("inf"):
        assert done.code == 3
        assert done.error.startswith("no feasible schedule: ")
        return
    data = json.loads(done.out)
    assert data["status"] == "optimal"
    assert data["bottleneck_s"] == pytest.approx(best, rel=1e-9)
