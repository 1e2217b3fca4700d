"""Size of the images that a model directory's own image processor makes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pipeedge.base.errors import ModelError
from pipeedge.base.json_file import find_json
from pipeedge.base.wording import excerpt

__all__ = ["preprocessed_size"]

_FILE = "preprocessor_config.json"


def preprocessed_size(directory: Path) -> tuple[int, int] | None:
    """Return the height and width of the images that ``preprocessor_config.json`` describes.

    Return None if there is no such file, or if the size of an image depends on the picture.

    Raises:
        ModelError: The file is not a JSON object, or its size is not a height and a width.
    """
    path = directory / _FILE
    document = find_json(path, dict, ModelError)
    if document is None:
        return None
    cropped = document.get("do_center_crop") is True
    size = document.get("crop_size" if cropped else "size")
    if isinstance(size, Mapping) and {"height", "width"} <= size.keys():
        sides = size["height"], size["width"]
    elif isinstance(size, int) and cropped:
        sides = size, size
    else:
        return None
    if not all(isinstance(side, int) and not isinstance(side, bool) for side in sides):
        raise ModelError(f"{path}: {excerpt(json.dumps(size))} is not a height and a width")
    return sides
