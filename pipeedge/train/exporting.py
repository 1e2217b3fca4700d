"""Export a checkpoint to a Hugging Face directory, which ``runtime.py -m DIR`` and transformers read."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.base.wording import excerpt
from pipeedge.models import Model, find_model
from pipeedge.models.families.catalogue import hf_config
from pipeedge.models.weights.locating import hub_filling
from pipeedge.train.checkpoint import latest
from pipeedge.train.networks import Transformer
from pipeedge.train.request import VGG19

__all__ = ["export"]

_CONFIG = "config.json"
_COMPANIONS = ("preprocessor_config.json",)


def export(checkpoints: Path, target: Path) -> str:
    """Write the model of the last complete checkpoint to the new directory ``target``.

    Args:
        checkpoints: The ``--checkpoint-dir`` of the training.
        target: Directory to create; it appears when it is complete.

    Returns:
        A line for the user.

    Raises:
        RequestError: There is no checkpoint, it is damaged or of a model that cannot be exported, or the
            directory exists or cannot be written.
    """
    found = latest(checkpoints)
    name = str(found.description.get("model"))
    if name == VGG19:
        raise RequestError(
            f"--export {target}: {VGG19} has no form that "
            f"{program_name('runtime.py')} reads; ViT and DeiT have"
        )
    model = Transformer(find_model(name)).model
    if target.exists():
        raise RequestError(f"--export {target}: exists already; give a new directory")
    shard = model.build().to_empty(device="cpu")
    stored = {f"shard.{key}": parameter for key, parameter in shard.named_parameters()}
    unknown = sorted(found.names() - stored.keys())
    if unknown:
        raise RequestError(
            f"--export {target}: the trained model has {excerpt(unknown[0])}, which Hugging Face's format "
            "cannot represent (such as the pre_logits layer before a classifier)"
        )
    found.restore(stored, torch.optim.SGD(stored.values()))
    tensors = {
        tensor_name: view.contiguous()
        for key, parameter in shard.named_parameters()
        for tensor_name, view in hub_filling(key, model.config).views(parameter.detach(), model.config.heads)
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as place:
            made = Path(place) / target.name
            made.mkdir()
            _write_companions(model, made)
            save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
            made.rename(target)
    except OSError as error:
        raise RequestError(f"--export {target}: cannot be written ({error.strerror})") from error
    return f"{target}: {name} after batch {found.step}; run it with {program_name('runtime.py')} -m {target}"


def _write_companions(model: Model, made: Path) -> None:
    """Write the configuration and the other files of a model's directory."""
    if model.directory is None:
        text = json.dumps(hf_config(model.config, model.labels), indent=2)
        (made / _CONFIG).write_text(text + "\n", encoding="utf-8")
        return
    for companion in (_CONFIG, *_COMPANIONS):
        if (model.directory / companion).is_file():
            shutil.copyfile(model.directory / companion, made / companion)
