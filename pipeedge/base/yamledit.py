"""Change entries of a YAML file and leave the rest of its text, with its comments, as it is.

    # boards in the attic        # boards in the attic
    old:                         old:
      mem_MB: 100        ──>       mem_MB: 100
    # on loan                    # on loan
    new: {mem_MB: 1}             new: {mem_MB: 2}

Only entries of the outermost map are changed, each as a whole. A text that cannot be edited that way (written
in braces, entries that share values by aliases, several documents) is written anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from pipeedge.base.errors import SpecError
from pipeedge.base.yamlfile import dump, parse_document, write_text

__all__ = ["update_document"]


def update_document(
    path: str | os.PathLike[str], changed: Mapping[str, Any], whole: Mapping[str, Any], *, outdated: str = ""
) -> None:
    """Replace or append entries of the outermost map of a file, which need not exist.

    Args:
        path: The file; valid, as ``read_document`` reads it.
        changed: New values by key.
        whole: The whole contents, to be written if the text cannot be edited.
        outdated: Beginning of a first line that is false once the file is changed, and is left out.

    Raises:
        SpecError: The file cannot be written. An existing file is then unchanged.
    """
    file = Path(path)
    text = file.read_text("utf-8-sig") if file.exists() else ""
    if outdated and text.startswith(outdated):
        text = text.partition("\n")[2]
    edited = _edited(text, changed) if text else None
    write_text(path, dump(whole) if edited is None else edited)


def _edited(text: str, changed: Mapping[str, Any]) -> str | None:
    """Return ``text`` with the entries changed, or None if that would change anything else."""
    root = parse_document(text.encode(), "").node
    if not isinstance(root, yaml.MappingNode) or root.flow_style or not root.value:
        return None
    starts = [key.start_mark.index for key, _ in root.value] + [len(text)]
    spans = {
        key.value: (start, _end_of_line(text, max(key.end_mark.index, _end(value))), limit)
        for (key, value), (start, limit) in zip(root.value, pairwise(starts), strict=True)
    }
    if any(not start < end <= limit for start, end, limit in spans.values()):
        return None
    edited = text
    for name, (start, end, _) in reversed(spans.items()):
        if name in changed:
            edited = edited[:start] + dump({name: changed[name]}) + edited[end:]
    added = {name: value for name, value in changed.items() if name not in spans}
    if added:
        edited += ("" if edited.endswith("\n") else "\n") + dump(added)
    return edited if _differs_only_in(changed, text, edited) else None


def _end(node: yaml.Node) -> int:
    """Return where the last value within ``node`` ends; the mark of a block is behind comments after it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _end(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _end(node.value[-1])
    return int(node.end_mark.index)


def _end_of_line(text: str, index: int) -> int:
    if text[index - 1] == "\n":  # a block of text ends behind its last line
        return index
    end = text.find("\n", index)
    return len(text) if end < 0 else end + 1


def _differs_only_in(changed: Mapping[str, Any], text: str, edited: str) -> bool:
    try:
        before, after = _plain(text), _plain(edited)
    except SpecError:
        return False
    expected = {**before, **_plain(dump(dict(changed)))}
    return bool(after == expected and list(after) == list(expected))


def _plain(text: str) -> dict[str, Any]:
    found: dict[str, Any] = parse_document(text.encode(), "").plain()
    return found
