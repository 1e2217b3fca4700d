"""Write the scheduler's files of a run from the profiles of its nodes: each is a device type of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeedge.base.errors import RequestError
from pipeedge.base.machine import SYSTEM_RESERVE_BYTES
from pipeedge.nodes.messages import Up
from pipeedge.nodes.programs import SpecPaths
from pipeedge.plan.spec_writing import save_device_types, save_devices, save_models, save_neighbors
from pipeedge.plan.specs import DeviceType, NeighborLink
from pipeedge.profile.emitting import model_profile, model_spec, scaled
from pipeedge.profile.result_files import load_results

__all__ = ["ProfiledNode", "choose_nodes", "compose", "seconds_of"]

_PROCESS_BYTES = 256 << 20
"""Memory of a rank without a shard, where the profile does not say."""
_MB = 1 << 20


@dataclass(frozen=True)
class ProfiledNode:
    """A node with what is known of it for one model."""

    name: str
    results: str
    """Results file of the profiler."""
    free_bytes: int
    """Memory that a run can use there."""
    link: NeighborLink | None
    """Link between it and the asked node; None for the asked node itself."""
    slowness: float = 1.0
    """Time that its layers take in runs, as a multiple of what the profile says."""


def compose(nodes: Sequence[ProfiledNode], model: str, directory: Path, wanted: Up) -> SpecPaths:
    """Write the files, and return them with the options for rank 0.

    Args:
        nodes: The nodes in the order of their ranks, the asked one first.
        model: Name by which rank 0 knows the model.
        directory: Directory for the files.
        wanted: What was asked for.

    Raises:
        SpecError: A profile is incomplete.
        RequestError: The nodes have profiles of different models.
    """
    types, spec = {}, None
    for node in nodes:
        path = directory / f"profile-{node.name}.yml"
        path.write_text(node.results, "utf-8")
        results = replace(load_results(path), model_name=model)
        found = model_spec(results, str(path))
        if spec is not None and found.elements_out != spec.elements_out:
            raise RequestError(f"{node.name} has profiled another model than {nodes[0].name}")
        spec = found
        process = _PROCESS_BYTES if results.process_bytes is None else results.process_bytes
        memory = max(0, int(node.free_bytes - SYSTEM_RESERVE_BYTES - process)) // _MB * _MB
        types[node.name] = DeviceType(
            mem_bytes=memory,
            bw_bytes_per_s=_bandwidth(node, nodes),
            profiles={model: (scaled(model_profile(results, str(path)), node.slowness),)},
        )
    if spec is None:
        raise RequestError("a run needs at least one node")
    names = tuple(node.name for node in nodes)
    paths = SpecPaths(
        directory / "models.yml",
        directory / "device_types.yml",
        directory / "devices.yml",
        directory / "device_neighbors_world.yml",
        hosts=names,
        wanted=wanted,
    )
    save_models(paths.models, {model: spec})
    save_device_types(paths.device_types, types)
    save_devices(paths.devices, {name: [name] for name in names})
    save_neighbors(paths.neighbors, _links(nodes))
    return paths


def choose_nodes(
    nodes: Sequence[ProfiledNode], most: int | None, seconds: Mapping[str, float]
) -> list[ProfiledNode]:
    """Return the asked node, which is the first, and the fastest of the others.

    Args:
        nodes: The nodes.
        most: Largest number of nodes, or None for all.
        seconds: Seconds that each takes for the whole model.
    """
    first, *others = nodes
    kept = sorted(others, key=lambda node: seconds[node.name])[: None if most is None else most - 1]
    return [first, *(node for node in others if node in kept)]


def seconds_of(node: ProfiledNode, directory: Path) -> float:
    """Return the seconds that a node takes for the whole model."""
    path = directory / f"profile-{node.name}.yml"
    path.write_text(node.results, "utf-8")
    return node.slowness * sum(layer.measured.time_s for layer in load_results(path).profile_data)


def _bandwidth(node: ProfiledNode, nodes: Sequence[ProfiledNode]) -> float:
    """Return the bandwidth of a node in bytes per second: that of the asked one is the best of its links."""
    if node.link is not None:
        return node.link.bw_bytes_per_s
    links = [each.link.bw_bytes_per_s for each in nodes if each.link is not None]
    return max(links, default=1e9 / 8)


def _links(nodes: Sequence[ProfiledNode]) -> dict[str, dict[str, NeighborLink]]:
    """Return the links of all pairs: between two others, the slower of their links with the asked one."""
    found: dict[str, dict[str, NeighborLink]] = {}
    for one in nodes:
        for other in nodes:
            known = [each.link for each in (one, other) if each.link is not None]
            if one.name != other.name and known:
                found.setdefault(one.name, {})[other.name] = NeighborLink(
                    min(link.bw_bytes_per_s for link in known), max(link.latency_s for link in known)
                )
    return found
