"""Judge the scheduler's files: their contents and what would be run in, findings out. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipeedge.doctor.findings import Finding, ok, problem, warning
from pipeedge.plan.specs import ModelSpec, SpecFiles, short_dtype

__all__ = ["check_files"]


def check_files(
    files: SpecFiles,
    *,
    model_name: str,
    n_layers: int,
    microbatch_size: int,
    dtype: str,
    hosts: Sequence[str] | None,
    world_size: int,
) -> list[Finding]:
    """Compare names and numbers in the files with each other, the model and ``-H``."""
    found = [
        *_check_model(files.models, model_name, n_layers),
        *_check_types(files, model_name, n_layers, microbatch_size, dtype),
        *_check_hosts(files.devices, hosts, world_size),
    ]
    return found or [ok("files", "models, device types, devices and -H match")]


def _check_model(models: Mapping[str, ModelSpec], name: str, n_layers: int) -> Iterator[Finding]:
    if name not in models:
        yield problem(
            "files",
            f"the models file (-sm) has no {name}{_near(name, models)}; it has {_listed(models)}: "
            "profile the model, or correct the name",
        )
    elif models[name].layers != n_layers:
        yield problem(
            "files",
            f"the models file (-sm) gives {name} {models[name].layers} layers, but the model has {n_layers}: "
            "profile it again",
        )


def _check_types(
    files: SpecFiles, model_name: str, n_layers: int, microbatch_size: int, dtype: str
) -> Iterator[Finding]:
    usable = 0
    for type_name, hosts in files.devices.items():
        if not hosts:
            continue
        left_out = f"so {_listed(hosts)} will not be used"
        if type_name not in files.device_types:
            yield warning(
                "files",
                f"the devices file (-sd) has hosts of type {type_name}, which the device types file (-sdt) "
                f"lacks{_near(type_name, files.device_types)}, {left_out}: profile such a host, or correct "
                "the name",
            )
            continue
        profiles = files.device_types[type_name].profiles.get(model_name, ())
        fitting = [
            profile
            for profile in profiles
            if profile.batch_size == microbatch_size and short_dtype(profile.dtype) == short_dtype(dtype)
        ]
        if not fitting:
            others = ", ".join(f"-u {other.batch_size} {short_dtype(other.dtype)}" for other in profiles)
            yield warning(
                "files",
                f"device type {type_name} has no profile of {model_name} for -u {microbatch_size} and "
                f"{short_dtype(dtype)} (it has {others or 'none'}), {left_out}: profile it",
            )
        elif len(fitting[0].time_s) != n_layers:
            yield problem(
                "files",
                f"the profile of {model_name} on {type_name} has {len(fitting[0].time_s)} times for "
                f"{n_layers} layers: profile it again",
            )
        else:
            usable += 1
    if not usable:
        yield problem("files", f"no host of the devices file has a profile of {model_name}: profile one")


def _check_hosts(
    devices: Mapping[str, tuple[str, ...]], hosts: Sequence[str] | None, world_size: int
) -> Iterator[Finding]:
    listed = [host for names in devices.values() for host in names]
    if hosts is None:
        ranks = {str(rank) for rank in range(world_size)}
        wrong = [host for host in listed if host not in ranks]
        if wrong:
            yield problem(
                "files",
                f"the devices file (-sd) has the host {wrong[0]}, which is not a rank from 0 to "
                f"{world_size - 1}: name the host of each rank with -H",
            )
        return
    for rank, host in enumerate(hosts):
        if host not in listed:
            yield warning(
                "files",
                f"-H names {host}, which the devices file (-sd) lacks{_near(host, listed)}, so rank {rank} "
                "will have nothing to do: add it there, or correct the name",
            )
    without_rank = [host for host in listed if host not in hosts]
    if without_rank:
        yield ok("files", f"not used, because -H does not name them: {_listed(without_rank)}")


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def _listed(names: Iterable[str], most: int = 8) -> str:
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return (", ".join(every[:most]) or "none") + more
