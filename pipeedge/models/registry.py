"""Models by name or directory, and their properties, payloads and shards."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from pipeedge.base.errors import InputError, ModelError, ScheduleError, WeightsError
from pipeedge.base.payload import TensorSpec, specs_bytes
from pipeedge.base.schedule import DTYPES, LayerRange
from pipeedge.base.wording import count
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture, FamilyName, HeadKind, parse_hf_config
from pipeedge.models.dtypes import dtype_name, find_dtype, stream_dtype
from pipeedge.models.families.bert import BERT
from pipeedge.models.families.deit import DEIT
from pipeedge.models.families.vit import VIT
from pipeedge.models.kernels import choose
from pipeedge.models.shard import Family, Shard, payload_specs
from pipeedge.models.weights.fill import check_sizes, fill, hub_tensors, plan
from pipeedge.models.weights.hub import (
    UnknownRepositoryError,
    fetch_weights,
    find_snapshot,
    is_repository_name,
    missing_weights,
)
from pipeedge.models.weights.names import find_pooler
from pipeedge.models.weights.random_weights import RandomWeights
from pipeedge.models.weights.reading import (
    SINGLE_FILE,
    WeightsFile,
    find_in_directory,
    identity_digest,
    open_weights,
)

__all__ = ["DIGITS", "MODEL_NAMES", "Model", "find_model"]

_FAMILIES: Mapping[FamilyName, Family] = MappingProxyType({"vit": VIT, "deit": DEIT, "bert": BERT})

DIGITS = "vit-digits"
"""Name of the small model that ships with the package."""
_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_LIKE = 0.6
"""Least similarity, from 0 to 1, at which a known name is suggested for a wrong one."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A transformer that can be cut into shards. It holds no weights; ``load`` and ``random`` make shards."""

    name: str
    """Name as given by the user: one of ``MODEL_NAMES``, a directory, or a repository of the hub."""
    config: Architecture
    labels: tuple[str, ...] | None
    """Names of the classes, or None if the model does not define them."""
    directory: Path | None
    """Hugging Face directory of the model, which may also hold a tokenizer or image processor."""
    default_weights: Path
    """Path of its weights; relative to the working directory for the known names."""
    repository: str | None = None
    """Repository of the Hugging Face hub whose snapshot is ``directory``, or None."""

    @property
    def family(self) -> FamilyName:
        """Family of the model: ``vit``, ``deit`` or ``bert``."""
        return self.config.family

    @property
    def n_layers(self) -> int:
        """Number of layers, four per block."""
        return self.config.n_layers

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the arrays that the first layer takes, in payload order."""
        return _FAMILIES[self.family].inputs

    @property
    def output_kind(self) -> str:
        """Kind of output: ``logits``, or ``vector`` for a model without a classifier."""
        return "vector" if self.config.head == "vector" else "logits"

    @property
    def max_tokens(self) -> int:
        """Longest sentence in tokens for text, or the number of tokens of every image."""
        return self.config.max_positions if self.family == "bert" else self.config.image_tokens

    def weights_path(self) -> Path:
        """Return the path of the default weights."""
        return self.default_weights

    def converted_path(self, dtype: torch.dtype, weights: Path | None = None) -> Path:
        """Return where ``save_model_weights.py --dtype`` stores ``weights`` (or the default)."""
        original = self.default_weights if weights is None else weights
        if original.is_dir():
            original /= SINGLE_FILE
        return original.with_name(f"{original.stem}.{dtype_name(dtype)}.safetensors")

    def find_weights(self, dtype: torch.dtype | None = None) -> Path:
        """Return the default weights for ``dtype``: those stored in that type if any, else the original.

        With ``dtype`` None and no original, any converted weights will do, since they carry its fingerprint.
        """
        if dtype is not None:
            converted = self.converted_path(dtype)
            return converted if converted.exists() else self.default_weights
        if self.default_weights.exists():
            return self.default_weights
        others = (self.converted_path(find_dtype(name)) for name in DTYPES)
        return next((path for path in others if path.exists()), self.default_weights)

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on this machine, as far as they can be fetched when they are read."""
        return self.repository is None or self.directory is None or not missing_weights(self.directory)

    def fetch_weights(self) -> None:
        """Fetch the weights of a repository of the hub, unless they are on this machine.

        Raises:
            WeightsError: They cannot be fetched.
        """
        if self.repository is not None and self.directory is not None:
            fetch_weights(self.repository, self.directory)

    def payload_specs(
        self,
        after_layer: int,
        items: int,
        tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[TensorSpec, ...]:
        """Return the shapes and number types of the payload after ``after_layer`` layers.

        Args:
            after_layer: 0 for the model's input, ``n_layers`` for its output.
            items: Number of items in the microbatch.
            tokens: Sentence length in tokens (text only; by default the longest).
            dtype: Number type of the weights, which decides that of the hidden states.

        Raises:
            ScheduleError: The layer is beyond the model.
            InputError: There are more tokens than the model has positions.
        """
        if not 0 <= after_layer <= self.n_layers:
            raise ScheduleError(f"there is no cut after layer {after_layer}: layers are 1 to {self.n_layers}")
        if self.family != "bert":
            tokens = self.config.image_tokens
        elif tokens is None:
            tokens = self.max_tokens
        elif not 1 <= tokens <= self.max_tokens:
            raise InputError(
                f"{count(tokens, 'token')} in a sentence: {self.name} takes 1 to {self.max_tokens}"
            )
        family = _FAMILIES[self.family]
        return payload_specs(
            family, self.config, after_layer, items=items, tokens=tokens, dtype=stream_dtype(dtype)
        )

    def input_specs(
        self,
        items: int,
        tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        eight_bit: bool = True,
    ) -> tuple[TensorSpec, ...]:
        """Return the shapes and number types of the input that the data rank sends to the first stage.

        Args:
            items: Number of items in the microbatch.
            tokens: Sentence length in tokens, as for ``payload_specs``.
            dtype: Number type of the weights of the first stage.
            eight_bit: Whether images are sent as bytes (``payload.PixelTable``). They are, unless they were
                given as floating point arrays.
        """
        specs = self.payload_specs(0, items, tokens, dtype)
        if not eight_bit:
            return specs
        return tuple(
            dataclasses.replace(spec, dtype=torch.uint8) if spec.dtype.is_floating_point else spec
            for spec in specs
        )

    def input_bytes(
        self,
        tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        eight_bit: bool = True,
    ) -> int:
        """Return the bytes of one input item that the data rank sends to the first stage.

        Args:
            tokens: Sentence length in tokens (text only; by default the longest).
            dtype: Number type of the weights of the first stage.
            eight_bit: Whether images are sent as bytes, as for ``input_specs``.
        """
        return specs_bytes(self.input_specs(1, tokens, dtype, eight_bit=eight_bit))

    def parameter_count(self, layers: LayerRange | None = None) -> int:
        """Return the number of weights of ``layers`` (by default all)."""
        return self.build(layers).parameter_count

    def weight_bytes(self, layers: LayerRange | None = None, dtype: torch.dtype = torch.float32) -> int:
        """Return the size of the weights of ``layers`` (by default all) in bytes."""
        shard = self.build(layers, dtype)
        return sum(tensor.nbytes for tensor in (*shard.parameters(), *shard.buffers()))

    def build(self, layers: LayerRange | None = None, dtype: torch.dtype = torch.float32) -> Shard:
        """Build the shard of ``layers`` (by default all) on ``meta``: shapes without storage.

        Raises:
            ScheduleError: The layers go beyond the model.
        """
        return self._build(self.config, layers, dtype)

    def load(
        self,
        layers: LayerRange | None = None,
        weights: str | os.PathLike[str] | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        progress: Callable[[int], object] = lambda _: None,
        kernels: str = "auto",
    ) -> Shard:
        """Load the shard of ``layers`` (by default all) with weights from a file, ready to compute.

        Only the shard's own tensors are read, one at a time, after all their names and shapes have been
        compared with the model's. ``dtype`` is one of ``schedule.DTYPES``; see ``models.dtypes``.
        ``progress`` is called with the bytes of each tensor that is loaded. ``kernels`` is ``auto`` or a name
        from ``models.kernels``; only with ``torch`` are all weights parameters that can be looked at.

        Raises:
            RequestError: This machine does not have those kernels.
            ScheduleError: The layers go beyond the model.
            WeightsError: The file is missing, truncated, of an unknown kind, or does not fit the model.
        """
        chosen = choose(kernels, dtype, torch.device(device))
        with self._open(weights, dtype) as file:
            self._compare(file, layers)
            shard = self.shard_for(file, layers, dtype, chosen)
            return fill(shard, self.config, file, device=device, progress=progress)

    def check_weights(
        self, weights: str | os.PathLike[str] | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        """Compare the names and shapes in a file with those of the whole model, without reading data.

        Raises:
            WeightsError: The file is missing, truncated, of an unknown kind, or does not fit the model.
        """
        with self._open(weights, dtype) as file:
            self._compare(file)
            plan(self.shard_for(file, dtype=dtype), self.config, file)

    def check_sizes(self, weights: str | os.PathLike[str] | None = None) -> None:
        """Compare the model's sizes with those in the weights file, if it exists, before anything is built.

        The first and the last block show all sizes, and whether the number of blocks agrees.

        Raises:
            WeightsError: The file is truncated, of an unknown kind, or belongs to a model of another size.
        """
        path = self.find_weights() if weights is None else Path(weights)
        if path.is_file() or (weights is not None and path.is_dir()):
            with self._open(path) as file:
                self._compare(file)

    def _compare(self, file: WeightsFile, layers: LayerRange | None = None) -> None:
        layers = layers if layers is not None else LayerRange(0, self.n_layers)
        whole_block = min(len(layers), LAYERS_PER_BLOCK)
        ends = {layers.start, layers.stop - whole_block}
        for start in sorted(ends):
            part = LayerRange(start, start + whole_block)
            check_sizes(self.shard_for(file, part), self.config, file)

    def shard_for(
        self,
        file: WeightsFile,
        layers: LayerRange | None = None,
        dtype: torch.dtype = torch.float32,
        kernels: str = "torch",
    ) -> Shard:
        """Build the shard as ``build`` does, with a pooler if an open weights file has one.

        A model without a classifier outputs the result of the pooler if the file has one, else the first
        token. Google's image classifiers may have a pooler in front of the classifier.
        """
        return self._build(_with_pooler_of(self.config, file), layers, dtype, kernels)

    def random(
        self,
        layers: LayerRange | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        kernels: str = "auto",
    ) -> Shard:
        """Return the shard of ``layers`` (by default all) with random weights, the same for every cut.

        ``kernels`` is as for ``load``.
        """
        shard = self._build(self.config, layers, dtype, choose(kernels, dtype, torch.device(device)))
        source = RandomWeights(hub_tensors(shard, self.config), seed)
        return fill(shard, self.config, source, device=device)

    def fingerprint(self, weights: str | os.PathLike[str] | None = None) -> str:
        """Return a digest of configuration and weights, for comparing ranks at start-up.

        It covers the name, shape and position of every tensor. For an ``.npz`` file it uses the checksum of
        every array in the table of contents. For a ``.safetensors`` file two samples of each tensor are read,
        because reading gigabytes at every start is too slow for a small board. The path of the file plays no
        part. Converted weights have the fingerprint of their original, so that each rank may hold those of
        its own type.

        Raises:
            WeightsError: The file is missing, truncated, or of an unknown kind.
        """
        with self._open(weights) as file:
            if file.source is not None:
                return file.source
            config = json.dumps(self.config.as_dict(), sort_keys=True).encode()
            return identity_digest(iter([config, *file.identity()]))

    def _open(self, weights: str | os.PathLike[str] | None, dtype: torch.dtype | None = None) -> WeightsFile:
        if weights is not None:
            return open_weights(weights)
        path = self.find_weights(dtype)
        if path == self.default_weights:
            self.fetch_weights()
        return open_weights(path)

    def _build(
        self, config: Architecture, layers: LayerRange | None, dtype: torch.dtype, kernels: str = "torch"
    ) -> Shard:
        layers = layers if layers is not None else LayerRange(0, self.n_layers)
        if layers.stop > self.n_layers:
            raise ScheduleError(
                f"the range {layers} goes beyond {self.name}: its layers are 1 to {self.n_layers}"
            )
        return Shard(_FAMILIES[self.family], config, layers, dtype, kernels)


def _with_pooler_of(config: Architecture, file: WeightsFile) -> Architecture:
    """Return ``config`` with the pooler that ``file`` has, if the file decides."""
    if config.family == "bert" and config.head != "vector":
        return config
    found = find_pooler(file.names, config.family, config.head)
    if found is not None:
        return dataclasses.replace(config, pooler=True, pooler_size=file.entry(found).shape[0])
    if config.pooler and config.pooler_size == config.hidden:
        return dataclasses.replace(config, pooler=False, pooler_size=0)
    return config


# The known models -----------------------------------------------------------------------------------


def _image(
    family: FamilyName, hidden: int, blocks: int, heads: int, *, patch: int = 16, labels: int = 1000
) -> Architecture:
    head: HeadKind = "distilled" if family == "deit" else "classifier"
    return Architecture(
        family=family,
        hidden=hidden,
        blocks=blocks,
        heads=heads,
        intermediate=4 * hidden,
        eps=1e-12,
        head=head,
        num_labels=labels,
        image_size=(224, 224),
        patch_size=(patch, patch),
        channels=3,
    )


def _text(hidden: int, blocks: int, heads: int, *, labels: int = 0) -> Architecture:
    return Architecture(
        family="bert",
        hidden=hidden,
        blocks=blocks,
        heads=heads,
        intermediate=4 * hidden,
        eps=1e-12,
        head="classifier" if labels else "vector",
        num_labels=labels,
        pooler=True,
        pooler_size=hidden,
        vocab=30522,
        max_positions=512,
        type_vocab=2,
    )


_KNOWN: Mapping[str, Model] = MappingProxyType(
    {
        name: Model(name=name, config=config, labels=labels, directory=None, default_weights=Path(file))
        for name, config, file, labels in (
            ("google/vit-base-patch16-224", _image("vit", 768, 12, 12), "ViT-B_16-224.npz", None),
            ("google/vit-large-patch16-224", _image("vit", 1024, 24, 16), "ViT-L_16-224.npz", None),
            (
                "google/vit-huge-patch14-224-in21k",
                _image("vit", 1280, 32, 16, patch=14, labels=21843),
                "ViT-H_14.npz",
                None,
            ),
            (
                "facebook/deit-base-distilled-patch16-224",
                _image("deit", 768, 12, 12),
                "DeiT_B_distilled.npz",
                None,
            ),
            (
                "facebook/deit-small-distilled-patch16-224",
                _image("deit", 384, 12, 6),
                "DeiT_S_distilled.npz",
                None,
            ),
            (
                "facebook/deit-tiny-distilled-patch16-224",
                _image("deit", 192, 12, 3),
                "DeiT_T_distilled.npz",
                None,
            ),
            ("bert-base-uncased", _text(768, 12, 12), "BERT-B.npz", None),
            ("bert-large-uncased", _text(1024, 24, 16), "BERT-L.npz", None),
            (
                "textattack/bert-base-uncased-CoLA",
                _text(768, 12, 12, labels=2),
                "BERT-B-CoLA.npz",
                ("unacceptable", "acceptable"),
            ),
        )
    }
)

MODEL_NAMES: tuple[str, ...] = (*_KNOWN, DIGITS)
"""Every name that ``find_model`` knows; it also accepts directories and repositories of the hub."""


def find_model(name_or_dir: str | os.PathLike[str], *, fetch: bool = True) -> Model:
    """Return the model of a known name, in a local Hugging Face directory, or in a repository of the hub.

    A known name wins over a directory of that name, and a directory over a repository; write ``./name`` for
    the directory. The weights of a repository are fetched when they are first read.

    Args:
        name_or_dir: Known name, directory, or ``ORG/NAME`` of a repository.
        fetch: Whether the configuration of a repository may be fetched if the hub's local cache lacks it.

    Raises:
        ModelError: The name is unknown, or the ``config.json`` is missing or not supported.
    """
    name = os.fspath(name_or_dir)
    if name in _KNOWN:
        return _KNOWN[name]
    if name == DIGITS:
        return _from_directory(_ASSETS / DIGITS, name)
    if Path(name).is_dir():
        return _from_directory(Path(name), name)
    elsewhere = ""
    if is_repository_name(name):
        try:
            return _from_repository(name, fetch=fetch)
        except UnknownRepositoryError as error:
            elsewhere = f", and {error}"
    near = _nearest(name)
    hint = f"did you mean {near}? " if near else ""
    raise ModelError(
        f"{name} is neither a known model nor a directory{elsewhere}; {hint}known are "
        f"{', '.join(MODEL_NAMES)}, and any local Hugging Face directory, or repository ORG/NAME of the hub, "
        "of a ViT, DeiT or BERT"
    )


def _nearest(name: str) -> str | None:
    """Return the known model that ``name`` resembles: misspelt, or without its owner or its end."""

    def similarity(known: str) -> float:
        forms = (known, known.rpartition("/")[2])
        wanted = name.casefold()
        return max(
            difflib.SequenceMatcher(None, wanted, form.casefold()).ratio()
            for whole in forms
            for form in (whole, whole[: len(name)])
        )

    best = max(MODEL_NAMES, key=similarity)
    return best if similarity(best) >= _LIKE else None


def _from_repository(name: str, *, fetch: bool) -> Model:
    snapshot = find_snapshot(name, fetch=fetch)
    model = _from_directory(snapshot.directory, name, repository=name)
    if not snapshot.knows_modules and model.output_kind == "vector" and model.family == "bert":
        log.warning(
            "whether %s has a modules.json is not known without a network: its output is that of the plain "
            "model",
            name,
        )
    return model


def _from_directory(directory: Path, name: str, repository: str | None = None) -> Model:
    path = directory / "config.json"
    if path.exists() and not path.is_file():  # opening a pipe would block until somebody writes to it
        raise ModelError(f"{path} is not a regular file")
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{directory} has no config.json: a model directory holds config.json and model.safetensors"
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} is not a JSON object")
    if repository is not None and not document.get("architectures"):
        fetch_weights(repository, directory)  # their names reveal the head
    try:
        weights = find_in_directory(directory)
    except WeightsError:
        # The weights may be elsewhere (-M); if they are not, ``load`` reports them missing.
        weights = directory
        if any(directory.glob("model.*.safetensors")):
            # Only converted weights exist. This is the name of their original.
            weights = directory / SINGLE_FILE
    names: tuple[str, ...] = ()
    if not document.get("architectures") and weights.is_file():
        with open_weights(weights) as file:
            names = tuple(file.names)
    try:
        config, labels = parse_hf_config(document, tensor_names=names)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    return Model(name, config, labels, directory, weights, repository)
