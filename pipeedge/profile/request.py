"""Requests of the profiler: frozen and validated on creation. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TypeAlias

from pipeedge.base.errors import RequestError
from pipeedge.base.schedule import BIT_WIDTHS, DTYPES
from pipeedge.request.config import ModelRequest
from pipeedge.request.declared import Check, at_least, check_options, option, option_like
from pipeedge.request.files import DEFAULT_MAX_IMAGE_PIXELS, InputRequest
from pipeedge.request.parsing import dtype_names, integers, path
from pipeedge.request.scheduling import ScheduleRequest

__all__ = [
    "DEFAULT_DEVICE_TYPES",
    "DEFAULT_MODELS",
    "Command",
    "ProfileConditions",
    "DeviceTypeCommand",
    "EmitRequest",
    "LinkCommand",
    "MeasureRequest",
    "ModelsCommand",
    "ProfileCommand",
    "SensitivityCommand",
    "ServeCommand",
    "SyntheticCommand",
]

DEFAULT_RESULTS = Path("profiler_results.yml")
DEFAULT_MODELS = Path("models.yml")
DEFAULT_DEVICE_TYPES = Path("device_types.yml")
_POSITIVE = Check(lambda value: 0 < value < math.inf, "must be above 0")


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape like 197,768")
    return shape


@dataclass(frozen=True)
class ProfileConditions:
    """The microbatch size and the number type of one profile."""

    batch_size: int
    """Number of items in a microbatch."""
    dtype: str
    """Number type of weights and computation."""

    def __str__(self) -> str:
        return f"microbatches of {self.batch_size} in {self.dtype}"


@dataclass(frozen=True)
class MeasureRequest:
    """The layers to measure, and how."""

    model: ModelRequest = field(default_factory=ModelRequest)
    random_weights: bool = option(
        False, "--random-weights", help="use random weights; times do not depend on values"
    )
    first: int = option(
        1,
        "-l/--layer-start",
        type=int,
        check=Check(lambda first: first >= 1, "layers are counted from 1"),
        help="first layer, from 1 ({default})",
    )
    last: int | None = option(None, "-L/--layer-end", type=int, help="last layer, inclusive (the model's)")
    shapes: tuple[tuple[int, ...], ...] = option(
        (),
        "-s/--shape-input",
        type=_shape,
        action="append",
        metavar="SHAPE",
        help="shape of one item of the first layer's input, e.g. 197,768; repeat for each tensor (the "
        "model's; for text, '-s 128' means only sentences of 128 tokens)",
    )
    tokens: tuple[int, ...] = option(
        (),
        "--tokens",
        type=integers,
        check=Check(lambda tokens: min(tokens, default=1) >= 1, "a sentence has at least 1 token"),
        help="sentence lengths to measure, for text models; the times of other lengths follow from them "
        "(the longest, a quarter and a sixteenth of it: 512,128,32)",
    )
    batch_sizes: tuple[int, ...] = option(
        (8,),
        "-b/--batch-size",
        type=integers,
        check=Check(
            lambda sizes: min(sizes) >= 1 and len(set(sizes)) == len(sizes),
            "give each size once, and at least 1",
        ),
        help="items in a microbatch; several, such as 1,4,16, make a profile of each (8)",
    )
    warmup: bool = option(
        True, "-w/--warmup", action="store_true", help="run one pass first that does not count (the default)"
    )
    iterations: int | None = option(
        None,
        "-i/--iterations",
        type=int,
        check=at_least(1),
        help="passes that count; the median is kept (5, or up to 50 within 5 s)",
    )
    dtypes: tuple[str, ...] = option(
        ("float32",),
        "--dtype",
        type=dtype_names,
        check=Check(
            lambda found: set(found) <= set(DTYPES) and len(set(found)) == len(found),
            f"give each type once: {', '.join(DTYPES)}",
        ),
        help=f"number type of weights and computation: {', '.join(DTYPES)}; several, such as float32,int8, "
        "make a profile of each, with each size of -b (float32)",
    )
    agreement_items: int = option(
        0,
        "--agreement",
        type=int,
        check=Check(lambda items: items >= 0, "must not be negative"),
        help="compute N items in float32 and in each other type, a block at a time, for {runtime.py} "
        "--min-agreement",
    )
    input: tuple[Path, ...] = option_like(
        InputRequest, "paths", help="these items, as for {runtime.py} (the shipped input, each item once)"
    )
    max_image_pixels: int = option_like(InputRequest, "max_image_pixels")
    by_block: bool = option(
        False,
        "--by-block",
        help="load one block at a time, as happens automatically for a model that does not fit into memory",
    )

    like: Path | None = option(
        None,
        "--like",
        type=path,
        metavar="RESULTS",
        help="take the times from the results of another model with the same blocks, rather than measure",
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_agreement()
        self._check_tokens()
        if self.last is not None and self.last < self.first:
            raise RequestError(
                f"-L/--layer-end {self.last} is before -l/--layer-start {self.first}; swap them"
            )
        if self.random_weights and self.model.weights is not None:
            raise RequestError("give either -M/--model-file or --random-weights, not both")

    @property
    def conditions(self) -> tuple[ProfileConditions, ...]:
        """Microbatch size and number type of each profile, those of one type together."""
        return tuple(ProfileConditions(size, dtype) for dtype in self.dtypes for size in self.batch_sizes)

    def _check_tokens(self) -> None:
        if self.tokens and self.shapes:
            raise RequestError("give either -s/--shape-input or --tokens, not both")
        if len(set(self.tokens)) < len(self.tokens):
            raise RequestError(f"--tokens {','.join(map(str, self.tokens))}: give each length once")

    def _check_agreement(self) -> None:
        if self.input and not self.agreement_items:
            raise RequestError(
                "--input has an effect only with --agreement N or --sensitivity N; give one of them"
            )
        if self.max_image_pixels != DEFAULT_MAX_IMAGE_PIXELS and not self.input:
            raise RequestError("--max-image-pixels has an effect only with --input; give that too")
        if self.agreement_items and self.dtypes == ("float32",):
            raise RequestError("--agreement compares another number type with float32: give one with --dtype")
        if self.agreement_items and self.random_weights:
            raise RequestError(
                "--agreement needs the model's own weights, because random weights give random classes; "
                "leave out --random-weights"
            )


@dataclass(frozen=True)
class EmitRequest:
    """The files to make from results."""

    type_name: str | None = option(
        None,
        "-dt/--dev-type",
        metavar="NAME",
        check=Check(lambda name: bool(name.strip()), "is empty: give the name of a device type"),
        help="add the profile to this device type",
    )
    mem_mb: float | None = option(
        None,
        "--mem-MB",
        type=float,
        metavar="MB",
        check=_POSITIVE,
        help="its memory (the free memory of this machine, less a reserve that is reported)",
    )
    """Memory in MB of 2^20 bytes."""
    bw_mbps: float | None = option(
        None, "--bw-Mbps", type=float, metavar="MBPS", check=_POSITIVE, help="its bandwidth"
    )
    """Bandwidth in units of 2^20 bits per second."""
    measure_link: str | None = option(
        None,
        "--measure-link",
        metavar="HOST[:PORT]",
        help="measure its bandwidth to a host that runs '{profiler.py} --serve-link'",
    )
    models_file: Path = option_like(
        ScheduleRequest,
        "models_file",
        default=DEFAULT_MODELS,
        help="models file to write (models.yml, or my-models.yml if that is a worked example)",
    )
    dev_types_file: Path = option_like(
        ScheduleRequest,
        "dev_types_file",
        default=DEFAULT_DEVICE_TYPES,
        help="device types file to write (device_types.yml, or my-types.yml if that is an example)",
    )
    overwrite: bool = option(False, "--overwrite", help="replace entries of those files that differ")
    plot: Path | None = option(
        None, "--plot", type=path, help="plot time, memory and cuts: FILE.html or FILE.png"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.bw_mbps is not None and self.measure_link is not None:
            raise RequestError("give either --bw-Mbps or --measure-link, not both")
        if self.type_name is not None:
            return
        for flag, is_given in (
            ("--mem-MB", self.mem_mb is not None),
            ("--bw-Mbps", self.bw_mbps is not None),
            ("--measure-link", self.measure_link is not None),
            ("--overwrite", self.overwrite),
        ):
            if is_given:
                raise RequestError(f"{flag} describes a device type: name it with -dt/--dev-type")


@dataclass(frozen=True)
class ProfileCommand:
    """A request to measure layers, or to use earlier results, and to make files from them."""

    measure: MeasureRequest | None
    """The layers to measure, or None to use the results file."""
    emit: EmitRequest
    results: Path = option(
        DEFAULT_RESULTS,
        "-o/--results-yml",
        type=path,
        help="results file; new layers are added to those in it ({default}); several profiles have a file "
        "each, with size and type in its name",
    )

    def results_of(self, conditions: ProfileConditions) -> Path:
        """Return the results file of one profile: that of the request if there is only one."""
        if self.measure is None or len(self.measure.conditions) == 1:
            return self.results
        name = f"{self.results.stem}-{conditions.batch_size}-{conditions.dtype}{self.results.suffix}"
        return self.results.with_name(name)

    def __post_init__(self) -> None:
        if self.emit.plot is not None and self.measure is not None and len(self.measure.conditions) > 1:
            raise RequestError("--plot draws one profile: give one -b and one --dtype, or --from-results")


@dataclass(frozen=True)
class SyntheticCommand:
    """A request to scale a profile into a device type that need not exist."""

    emit: EmitRequest
    factor: float = option(
        MISSING,
        "--synthetic",
        type=float,
        metavar="FACTOR",
        check=Check(lambda factor: 0 < factor < math.inf, "the factor of all times must be above 0"),
        help="add a device type for planning, FACTOR times as slow as --from, or as the results file",
    )
    results: Path = DEFAULT_RESULTS
    """Results to scale, unless ``base`` is given."""
    base: str | None = option(None, "--from", metavar="TYPE", help="device type that --synthetic scales")
    model_name: str | None = None
    """Model of the base to scale, or None for all of them."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.emit.type_name is None:
            raise RequestError("--synthetic makes a new device type: name it with -dt/--dev-type")
        if self.base == self.emit.type_name:
            raise RequestError(f"--from {self.base} is also the new device type; give another name with -dt")


@dataclass(frozen=True)
class SensitivityCommand:
    """A request to measure what fewer bits at each cut change in the answers."""

    items: int = option(
        MISSING,
        "--sensitivity",
        type=int,
        metavar="N",
        check=at_least(1),
        help="add to the models file how many of N items keep their class if one link is compressed: each "
        "cut at each number of bits, for {sched-pipeline} --plan auto",
    )
    model: ModelRequest = field(default_factory=ModelRequest)
    widths: tuple[int, ...] = option(
        (16, 8, 6, 4),
        "--widths",
        type=integers,
        metavar="BITS",
        check=Check(
            lambda widths: set(widths) <= set(BIT_WIDTHS) and len(set(widths)) == len(widths),
            f"give each number once: {', '.join(map(str, BIT_WIDTHS))}",
        ),
        help="bits per value for --sensitivity (16,8,6,4)",
    )
    input: tuple[Path, ...] = option_like(MeasureRequest, "input")
    max_image_pixels: int = option_like(MeasureRequest, "max_image_pixels")
    models_file: Path = option_like(EmitRequest, "models_file")
    overwrite: bool = option_like(EmitRequest, "overwrite")

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_image_pixels != DEFAULT_MAX_IMAGE_PIXELS and not self.input:
            raise RequestError("--max-image-pixels has an effect only with --input; give that too")


@dataclass(frozen=True)
class ServeCommand:
    """A request to answer ``--measure-link`` of another host."""

    place: str = option(
        MISSING,
        "--serve-link",
        nargs="?",
        const="",
        metavar="ADDR[:PORT]",
        help="answer --measure-link of other hosts until Ctrl-C (all addresses)",
    )
    """Address and port to listen on; empty for all addresses and the default port."""


@dataclass(frozen=True)
class LinkCommand:
    """A request to measure a bandwidth and print it."""

    place: str
    """Host and port where ``--serve-link`` runs."""


Command: TypeAlias = ProfileCommand | SyntheticCommand | SensitivityCommand | ServeCommand | LinkCommand


@dataclass(frozen=True)
class ModelsCommand:
    """A request to ``profiler_results_to_models.py``."""

    results: Path = option(
        DEFAULT_RESULTS, "-i/--input", type=path, help="results file of the profiler ({default})"
    )
    overwrite: bool = option(False, "-f/--overwrite", help="replace an existing entry")
    models_file: Path = option(
        DEFAULT_MODELS,
        "-o/--output",
        type=path,
        help="models file to write (models.yml, or my-models.yml if that is a worked example)",
    )


@dataclass(frozen=True)
class DeviceTypeCommand:
    """A request to ``profiler_results_to_device_types.py``."""

    emit: EmitRequest
    results: Path = option_like(ModelsCommand, "results")
