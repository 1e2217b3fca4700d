"""Protection of the files that a run reads from being replaced by its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeedge.base.files import InputPath, OutputFile, check_outputs, check_writable
from pipeedge.data.imagenet import is_data_file
from pipeedge.data.images import is_image
from pipeedge.data.opening import expanded
from pipeedge.data.results import check_output_path
from pipeedge.models.outline import Outline
from pipeedge.request.config import RunRequest
from pipeedge.request.files import STANDARD_INPUT, STANDARD_OUTPUT, InputRequest, OutputRequest
from pipeedge.request.scheduling import ScheduleRequest

__all__ = ["COMPANIONS", "check_run_outputs", "check_written_outputs", "input_paths", "model_paths"]

COMPANIONS = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
"""Names of files that belong to weights in the same directory."""


def check_run_outputs(
    request: RunRequest, model: Outline, others: Iterable[OutputFile] = ()
) -> frozenset[Path]:
    """Check that no output of the data rank overwrites another output or an input of the run.

    Args:
        request: The run.
        model: Model that runs.
        others: Further files that this rank writes.

    Returns:
        The outputs that exist already and will be replaced.

    Raises:
        RequestError: An output would overwrite another output or an input.
    """
    return check_outputs(
        [*_outputs(request.output), *others],
        [
            *model_paths(model, request.model.weights),
            *input_paths(request.input),
            *_schedule_paths(request.schedule),
        ],
    )


def check_written_outputs(
    request: RunRequest, model: Outline, others: Iterable[OutputFile] = ()
) -> frozenset[Path]:
    """Check that results, report and trace can be written, as ``check_run_outputs`` and beyond that."""
    replaced = check_run_outputs(request, model, others)
    for option, path in (("--report", request.output.report), ("--trace", request.output.trace)):
        if path is not None:
            check_writable(path, option)
    if request.results is not None:
        check_output_path(request.results, model)
    return replaced


def _outputs(request: OutputRequest) -> Iterator[OutputFile]:
    for option, path in (
        ("--output", request.results),
        ("--report", request.report),
        ("--trace", request.trace),
    ):
        if path is not None and not (option == "--output" and path == STANDARD_OUTPUT):
            yield OutputFile(option, path)


def model_paths(model: Outline, weights: Path | None) -> Iterator[InputPath]:
    """Yield the paths that a model and its weights are read from.

    Args:
        model: The model.
        weights: Path given with ``-M``, or None for the model's own weights.
    """
    if model.directory is not None:
        yield InputPath("-m/--model", model.directory)
    if weights is not None:
        yield InputPath("-M/--model-file", weights)
    file = model.default_weights if weights is None else weights
    yield InputPath(f"the model {model.name}", file)
    if not file.is_dir():
        yield InputPath("-M/--model-file", file.parent, _is_companion)


def _is_companion(name: str) -> bool:
    return name in COMPANIONS or name.endswith((".safetensors", ".safetensors.index.json"))


def input_paths(request: InputRequest) -> Iterator[InputPath]:
    """Yield the paths that items are read from."""
    for path in expanded(request.paths) if request.paths else ():
        # Standard input may be a file that the shell has opened.
        real = Path("/dev/stdin") if path == STANDARD_INPUT else path
        yield InputPath("--input", real, is_image, nested=True)
    if request.dataset_indices_file is not None:
        yield InputPath("--dataset-indices-file", request.dataset_indices_file)
    if request.dataset_root is not None:
        yield InputPath("--dataset-root", request.dataset_root, is_data_file, nested=True)


def _schedule_paths(request: ScheduleRequest) -> Iterator[InputPath]:
    for option, path in (
        ("--schedule-file", request.schedule_file),
        ("-sm/--sched-models-file", request.models_file),
        ("-sdt/--sched-dev-types-file", request.dev_types_file),
        ("-sd/--sched-dev-file", request.dev_file),
        ("-sdn/--sched-dev-neighbors-file", request.dev_neighbors_file),
    ):
        if path is not None:
            yield InputPath(option, path)
