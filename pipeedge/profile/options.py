"""Parse the command lines of the profiler into requests. Imports nothing heavy, so ``--help`` is quick."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.base.schedule import DTYPES
from pipeedge.request.config import DEFAULT_MAX_IMAGE_PIXELS, ModelRequest
from pipeedge.request.options import (
    Group,
    OneLineParser,
    add_common,
    add_image_limit,
    add_model,
    add_scheduler_files,
    image_limit,
    integers,
    path,
)

__all__ = [
    "Command",
    "DeviceTypeCommand",
    "EmitRequest",
    "LinkCommand",
    "MeasureRequest",
    "ModelsCommand",
    "ProfileCommand",
    "ServeCommand",
    "SyntheticCommand",
    "device_types_parser",
    "models_parser",
    "parse_device_types",
    "parse_models",
    "parse_profiler",
    "profiler_parser",
]

DEFAULT_RESULTS = Path("profiler_results.yml")
DEFAULT_MODELS = Path("models.yml")
DEFAULT_DEVICE_TYPES = Path("device_types.yml")
OWN_FILES = {DEFAULT_MODELS: Path("my-models.yml"), DEFAULT_DEVICE_TYPES: Path("my-types.yml")}
"""Files to write by default, if the file in this directory is a worked example."""


@dataclass(frozen=True)
class MeasureRequest:
    """The layers to measure, and how."""

    model: ModelRequest
    random_weights: bool = False
    """Whether to use random weights, because times do not depend on their values."""
    first: int = 1
    """First layer, from 1."""
    last: int | None = None
    """Last layer, inclusive, or None for the model's last."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of one item of the input of layer ``first``; empty for the model's own."""
    tokens: tuple[int, ...] = ()
    """Sentence lengths to measure (text only); empty for the longest, a quarter and a sixteenth of it."""
    batch_size: int = 8
    """Number of items in a microbatch."""
    warmup: bool = True
    """Whether to run one pass first that does not count."""
    iterations: int | None = None
    """Number of passes that count, or None for 5, and more if those take less than 5 s."""
    dtype: str = "float32"
    """Number type of weights and computation, one of ``schedule.DTYPES``."""
    agreement_items: int = 0
    """Number of items whose classes to compare in ``dtype`` and in float32."""
    input: tuple[Path, ...] = ()
    """Files with these items; empty for the shipped input."""
    max_image_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
    """Number of pixels of the largest image to decode."""
    by_block: bool = False
    """Whether to load one block at a time even if all of them fit into memory."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise RequestError(f"-b/--batch-size {self.batch_size}: must be at least 1")
        if self.iterations is not None and self.iterations < 1:
            raise RequestError(f"-i/--iterations {self.iterations}: must be at least 1")
        self._check_agreement()
        self._check_tokens()
        if self.first < 1:
            raise RequestError(f"-l/--layer-start {self.first}: layers are counted from 1")
        if self.last is not None and self.last < self.first:
            raise RequestError(
                f"-L/--layer-end {self.last} is before -l/--layer-start {self.first}; swap them"
            )
        if self.random_weights and self.model.weights is not None:
            raise RequestError("give either -M/--model-file or --random-weights, not both")

    def _check_tokens(self) -> None:
        if self.tokens and self.shapes:
            raise RequestError("give either -s/--shape-input or --tokens, not both")
        if any(tokens < 1 for tokens in self.tokens):
            raise RequestError(f"--tokens {min(self.tokens)}: a sentence has at least 1 token")
        if len(set(self.tokens)) < len(self.tokens):
            raise RequestError(f"--tokens {','.join(map(str, self.tokens))}: give each length once")

    def _check_agreement(self) -> None:
        if self.agreement_items < 0:
            raise RequestError(f"--agreement {self.agreement_items}: must not be negative")
        if self.input and not self.agreement_items:
            raise RequestError("--input has an effect only with --agreement N; give that too")
        if self.max_image_pixels < 1:
            raise RequestError(f"--max-image-pixels {self.max_image_pixels}: must be at least 1")
        if self.max_image_pixels != DEFAULT_MAX_IMAGE_PIXELS and not self.input:
            raise RequestError("--max-image-pixels has an effect only with --input; give that too")
        if self.agreement_items and self.dtype == "float32":
            raise RequestError("--agreement compares another number type with float32: give one with --dtype")
        if self.agreement_items and self.random_weights:
            raise RequestError(
                "--agreement needs the model's own weights, because random weights give random classes; "
                "leave out --random-weights"
            )


@dataclass(frozen=True)
class EmitRequest:
    """The files to make from results."""

    type_name: str | None = None
    """Device type to add, or None."""
    mem_mb: float | None = None
    """Memory of the device type in MB of 2^20 bytes, or None to determine it."""
    bw_mbps: float | None = None
    """Bandwidth of the device type in units of 2^20 bits per second, or None."""
    measure_link: str | None = None
    """Host and port of a ``--serve-link`` to measure the bandwidth to, or None."""
    models_file: Path = DEFAULT_MODELS
    dev_types_file: Path = DEFAULT_DEVICE_TYPES
    overwrite: bool = False
    """Whether to replace entries that differ."""
    plot: Path | None = None
    """File to plot the results into, or None."""

    def __post_init__(self) -> None:
        for option, value in (("--mem-MB", self.mem_mb), ("--bw-Mbps", self.bw_mbps)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise RequestError(f"{option} {value}: must be above 0")
        if self.bw_mbps is not None and self.measure_link is not None:
            raise RequestError("give either --bw-Mbps or --measure-link, not both")
        if self.type_name is not None:
            if not self.type_name.strip():
                raise RequestError("-dt/--dev-type is empty: give the name of a device type")
            return
        for option, given in (
            ("--mem-MB", self.mem_mb is not None),
            ("--bw-Mbps", self.bw_mbps is not None),
            ("--measure-link", self.measure_link is not None),
            ("--overwrite", self.overwrite),
        ):
            if given:
                raise RequestError(f"{option} describes a device type: name it with -dt/--dev-type")


@dataclass(frozen=True)
class ProfileCommand:
    """A request to measure layers, or to use earlier results, and to make files from them."""

    measure: MeasureRequest | None
    """The layers to measure, or None to use the results file."""
    emit: EmitRequest
    results: Path = DEFAULT_RESULTS


@dataclass(frozen=True)
class SyntheticCommand:
    """A request to scale a profile into a device type that need not exist."""

    factor: float
    """Factor by which times are multiplied."""
    emit: EmitRequest
    results: Path = DEFAULT_RESULTS
    """Results to scale, unless ``base`` is given."""
    base: str | None = None
    """Device type of ``emit.dev_types_file`` to scale, or None for the results."""
    model_name: str | None = None
    """Model of the base to scale, or None for all of them."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise RequestError(f"--synthetic {self.factor}: the factor of all times must be above 0")
        if self.emit.type_name is None:
            raise RequestError("--synthetic makes a new device type: name it with -dt/--dev-type")
        if self.base == self.emit.type_name:
            raise RequestError(f"--from {self.base} is also the new device type; give another name with -dt")


@dataclass(frozen=True)
class ServeCommand:
    """A request to answer ``--measure-link`` of another host."""

    place: str
    """Address and port to listen on; empty for all addresses and the default port."""


@dataclass(frozen=True)
class LinkCommand:
    """A request to measure a bandwidth and print it."""

    place: str
    """Host and port where ``--serve-link`` runs."""


Command: TypeAlias = ProfileCommand | SyntheticCommand | ServeCommand | LinkCommand


@dataclass(frozen=True)
class ModelsCommand:
    """A request to ``profiler_results_to_models.py``."""

    results: Path
    models_file: Path
    overwrite: bool


@dataclass(frozen=True)
class DeviceTypeCommand:
    """A request to ``profiler_results_to_device_types.py``."""

    results: Path
    emit: EmitRequest


def parse_profiler(argv: Sequence[str]) -> Command:
    """Parse the command line of ``profiler.py``.

    Raises:
        RequestError: an option or a value is invalid.
        SystemExit: after ``--help`` or ``--version``.
    """
    given = profiler_parser().parse_args(argv)
    if given.serve_link is not None:
        _alone("--serve-link", given, allowed={"serve_link"})
        return ServeCommand(given.serve_link)
    if given.measure_link is not None and not _given(given) - {"measure_link", "verbose"}:
        return LinkCommand(given.measure_link)
    emit = EmitRequest(
        type_name=given.dev_type,
        mem_mb=given.mem_MB,
        bw_mbps=given.bw_Mbps,
        measure_link=given.measure_link,
        models_file=given.sched_models_file or _own_file(DEFAULT_MODELS),
        dev_types_file=given.sched_dev_types_file or _own_file(DEFAULT_DEVICE_TYPES),
        overwrite=given.overwrite,
        plot=given.plot,
    )
    results = given.results_yml or DEFAULT_RESULTS
    emitting = {"dev_type", "mem_MB", "bw_Mbps", "measure_link", "sched_dev_types_file", "overwrite"}
    if given.synthetic is not None:
        allowed = {"synthetic", "base", "model_name", "results_yml", "sched_models_file", *emitting}
        _alone("--synthetic", given, allowed=allowed)
        return SyntheticCommand(given.synthetic, emit, results, given.base, given.model_name)
    if given.base is not None:
        raise RequestError("--from has an effect only with --synthetic FACTOR; give that too")
    if given.from_results:
        allowed = {"from_results", "results_yml", "sched_models_file", "plot", *emitting}
        _alone("--from-results", given, allowed=allowed)
        return ProfileCommand(None, emit, results)
    measure = MeasureRequest(
        model=ModelRequest(
            given.model_name or ModelRequest.name, given.model_file, given.device or ModelRequest.device
        ),
        random_weights=given.random_weights,
        first=1 if given.layer_start is None else given.layer_start,
        last=given.layer_end,
        shapes=tuple(given.shape_input or ()),
        tokens=given.tokens or (),
        batch_size=8 if given.batch_size is None else given.batch_size,
        warmup=given.warmup is not False,
        iterations=given.iterations,
        dtype=given.dtype or "float32",
        agreement_items=given.agreement or 0,
        input=tuple(given.input or ()),
        max_image_pixels=image_limit(given),
        by_block=given.by_block,
    )
    return ProfileCommand(measure, emit, results)


def parse_models(argv: Sequence[str]) -> ModelsCommand:
    """Parse the command line of ``profiler_results_to_models.py``.

    Raises:
        RequestError: an option or a value is invalid.
        SystemExit: after ``--help``.
    """
    given = models_parser().parse_args(argv)
    return ModelsCommand(given.input, given.output or _own_file(DEFAULT_MODELS), given.overwrite)


def parse_device_types(argv: Sequence[str]) -> DeviceTypeCommand:
    """Parse the command line of ``profiler_results_to_device_types.py``.

    Raises:
        RequestError: an option or a value is invalid.
        SystemExit: after ``--help``.
    """
    given = device_types_parser().parse_args(argv)
    emit = EmitRequest(
        type_name=given.dev_type,
        mem_mb=given.dev_type_mem,
        bw_mbps=given.dev_type_bw,
        dev_types_file=given.output or _own_file(DEFAULT_DEVICE_TYPES),
        overwrite=given.overwrite,
    )
    return DeviceTypeCommand(given.input, emit)


def models_parser() -> argparse.ArgumentParser:
    """Return the parser of ``profiler_results_to_models.py``."""
    parser = _converter("profiler_results_to_models.py", "Add the profiled model to models.yml.")
    parser.add_argument(
        "-o",
        "--output",
        type=path,
        metavar="FILE",
        help="models file to write (models.yml, or my-models.yml if that is a worked example)",
    )
    return parser


def device_types_parser() -> argparse.ArgumentParser:
    """Return the parser of ``profiler_results_to_device_types.py``."""
    parser = _converter(
        "profiler_results_to_device_types.py", "Add the profile to a device type of device_types.yml."
    )
    parser.add_argument("dev_type", metavar="DEV_TYPE", help="name of the device type that was profiled")
    parser.add_argument(
        "-o",
        "--output",
        type=path,
        metavar="FILE",
        help="device types file to write (device_types.yml, or my-types.yml if that is a worked example)",
    )
    parser.add_argument(
        "-dtm", "--dev-type-mem", type=float, metavar="MB", help="its memory; required if the type is new"
    )
    parser.add_argument(
        "-dtb",
        "--dev-type-bw",
        type=float,
        metavar="MBPS",
        help="its bandwidth; required if the type is new",
    )
    return parser


def _converter(program: str, description: str) -> argparse.ArgumentParser:
    parser = OneLineParser(prog=program_name(program), description=description, allow_abbrev=False)
    parser.add_argument(
        "-i",
        "--input",
        type=path,
        default=DEFAULT_RESULTS,
        metavar="FILE",
        help="results file of the profiler (profiler_results.yml)",
    )
    parser.add_argument("-f", "--overwrite", action="store_true", help="replace an existing entry")
    add_common(parser)
    return parser


def _own_file(default: Path) -> Path:
    """Return ``default``, or a file of the user's own if that is a worked example in this directory."""
    from pipeedge.plan.spec_writing import EXAMPLE  # takes a while, and --help does without

    try:
        with default.open(encoding="utf-8", errors="replace") as file:
            example = file.readline(len(EXAMPLE)) == EXAMPLE
    except OSError:
        example = False
    return OWN_FILES[default] if example else default


def _given(arguments: argparse.Namespace) -> set[str]:
    """Return the names of the given options; every default is None or False."""
    return {name for name, value in vars(arguments).items() if value is not None and value is not False}


def _alone(mode: str, arguments: argparse.Namespace, *, allowed: set[str]) -> None:
    stray = sorted(_given(arguments) - allowed - {"verbose"})
    # --no-warmup stores False, which is not the default here.
    if arguments.warmup is False:
        stray.append("no_warmup")
    if stray:
        names = ", ".join("--" + name.replace("_", "-").replace("base", "from") for name in stray)
        raise RequestError(f"{mode} measures no layers, so it excludes {names}; leave that out")


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape like 197,768")
    return shape


def profiler_parser() -> argparse.ArgumentParser:
    """Return the parser of ``profiler.py``."""
    program = program_name("profiler.py")
    parser = OneLineParser(
        prog=program,
        description="Measure the layers of a model on this kind of device, for the scheduler.",
        epilog=f"Example: '{program} -m google/vit-base-patch16-224 -dt my-board --bw-Mbps 940' measures "
        "all layers and adds the device type my-board. Exit status: 0 done, 2 the request is wrong, 4 the "
        "other host did not answer, 1 a fault of this program.",
        allow_abbrev=False,
    )
    add_common(parser)
    _add_measuring(parser.add_argument_group("what to measure"))
    _add_pacing(parser.add_argument_group("how"))
    _add_agreement(parser.add_argument_group("agreement of another number type with float32"))
    _add_emitting(parser.add_argument_group("output"))
    _add_other(parser.add_argument_group("instead of measuring layers"))
    return parser


def _add_measuring(measure: Group) -> None:
    add_model(measure, weights_help="weights (the model's default file in this directory)")
    measure.add_argument(
        "--random-weights", action="store_true", help="use random weights; times do not depend on values"
    )
    measure.add_argument("-l", "--layer-start", type=int, metavar="N", help="first layer, from 1 (1)")
    measure.add_argument(
        "-L", "--layer-end", type=int, metavar="N", help="last layer, inclusive (the model's)"
    )
    measure.add_argument(
        "-s",
        "--shape-input",
        type=_shape,
        action="append",
        metavar="SHAPE",
        help="shape of one item of the first layer's input, e.g. 197,768; repeat for each tensor (the "
        "model's; for text, '-s 128' means only sentences of 128 tokens)",
    )
    measure.add_argument(
        "--tokens",
        type=integers,
        metavar="LIST",
        help="sentence lengths to measure, for text models; the times of other lengths follow from them "
        "(the longest, a quarter and a sixteenth of it: 512,128,32)",
    )
    measure.add_argument("--dtype", choices=DTYPES, help="number type of weights and computation (float32)")
    measure.add_argument("-b", "--batch-size", type=int, metavar="N", help="items in a microbatch (8)")


def _add_pacing(how: Group) -> None:
    warm = how.add_mutually_exclusive_group()
    warm.add_argument(
        "-w",
        "--warmup",
        action="store_true",
        default=None,
        help="run one pass first that does not count (the default)",
    )
    warm.add_argument(
        "--no-warmup", dest="warmup", action="store_false", default=None, help="run no warm-up pass"
    )
    how.add_argument(
        "-i",
        "--iterations",
        type=int,
        metavar="N",
        help="passes that count; the median is kept (5, or up to 50 within 5 s)",
    )
    how.add_argument(
        "--by-block",
        action="store_true",
        help="load one block at a time, as happens automatically for a model that does not fit into memory",
    )


def _add_agreement(agreement: Group) -> None:
    agreement.add_argument(
        "--agreement",
        type=int,
        metavar="N",
        help="compute N items in both types, a block at a time, for "
        f"{program_name('runtime.py')} --dtype auto --min-agreement",
    )
    agreement.add_argument(
        "--input",
        type=path,
        nargs="+",
        metavar="PATH",
        help=f"these items, as for {program_name('runtime.py')} (the shipped input, each item once)",
    )
    add_image_limit(agreement)


def _add_emitting(output: Group) -> None:
    output.add_argument(
        "-o",
        "--results-yml",
        type=path,
        metavar="FILE",
        help="results file; new layers are added to those in it (profiler_results.yml)",
    )
    output.add_argument("-dt", "--dev-type", metavar="NAME", help="add the profile to this device type")
    output.add_argument(
        "--mem-MB",
        type=float,
        metavar="MB",
        help="its memory (the free memory of this machine, less a reserve that is reported)",
    )
    output.add_argument("--bw-Mbps", type=float, metavar="MBPS", help="its bandwidth")
    output.add_argument(
        "--measure-link",
        metavar="HOST[:PORT]",
        help=f"measure its bandwidth to a host that runs '{program_name('profiler.py')} --serve-link'",
    )
    add_scheduler_files(
        output,
        models="models file to write (models.yml, or my-models.yml if that is a worked example)",
        dev_types="device types file to write (device_types.yml, or my-types.yml if that is an example)",
    )
    output.add_argument("--overwrite", action="store_true", help="replace entries of those files that differ")
    output.add_argument(
        "--plot", type=path, metavar="FILE", help="plot time, memory and cuts: FILE.html or FILE.png"
    )


def _add_other(other: Group) -> None:
    other.add_argument("--from-results", action="store_true", help="use the existing results file")
    other.add_argument(
        "--synthetic",
        type=float,
        metavar="FACTOR",
        help="add a device type for planning, FACTOR times as slow as --from, or as the results file",
    )
    other.add_argument("--from", dest="base", metavar="TYPE", help="device type that --synthetic scales")
    other.add_argument(
        "--serve-link",
        nargs="?",
        const="",
        metavar="ADDR[:PORT]",
        help="answer --measure-link of other hosts until Ctrl-C (all addresses)",
    )
