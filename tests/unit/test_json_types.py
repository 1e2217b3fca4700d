"""Types of the values in files of a model directory: nothing is converted, whoever reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_models import bert
from small_models import VOCABULARY

from pipeedge.base.errors import InputError, ModelError
from pipeedge.base.json_types import ValueKind, is_kind
from pipeedge.data.text import Sentence, Tokenizer, find_tokenizer
from pipeedge.models import find_model

VALUES: tuple[object, ...] = (True, 3, 3.5, "3", "true", None, [3, 4], [3, True], [3], {"a": 3})
ACCEPTED = {
    ValueKind.WHOLE: [3],
    ValueKind.NUMBER: [3, 3.5],
    ValueKind.FLAG: [True],
    ValueKind.TEXT: ["3", "true"],
    ValueKind.SIDES: [3, [3, 4]],
}


@pytest.mark.parametrize("kind", ValueKind)
def test_no_value_is_converted(kind: ValueKind) -> None:
    found = [value for value in VALUES if is_kind(value, kind)]
    assert list(map(repr, found)) == list(map(repr, ACCEPTED[kind]))


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        # ModernBERT reads norm_eps, DistilBERT neither, and the vision tower is the one that is asked for.
        ("modernbert", {"layer_norm_eps": "3"}, "layer_norm_eps is '3'; a number is needed"),
        ("distilbert", {"layer_norm_eps": "3"}, "layer_norm_eps is '3'; a number is needed"),
        ("vit", {"hidden_dropout_prob": True}, "hidden_dropout_prob is True; a number is needed"),
        ("vit", {"encoder_stride": 16.0}, "encoder_stride is 16.0; a whole number is needed"),
        ("bert", {"pad_token_id": True}, "pad_token_id is True; a whole number is needed"),
        ("clip", {"text_config": {"vocab_size": "16"}}, "vocab_size is '16'; a whole number is needed"),
        (
            "bert",
            {"vision_config": {"image_size": [4, True]}},
            r"image_size is \[4, True\]; one whole number",
        ),
        ("bert", {"use_cache": "no"}, "use_cache is 'no'; true or false is needed"),
    ],
)
def test_configuration_is_checked_whether_a_value_is_read_or_not(
    family: str, changes: dict[str, Any], said: str, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    document = json.loads((model_dirs[family] / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(document | changes))
    with pytest.raises(ModelError, match=rf"config\.json: {said}"):
        find_model(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the files of a fast tokenizer."""
    from transformers import BertTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    BertTokenizer.from_pretrained(directory).save_pretrained(directory)
    (directory / "vocab.txt").unlink(missing_ok=True)
    return directory


def changed(saved: Path, directory: Path, file: str, place: tuple[str | int, ...], value: object) -> Path:
    """Return a copy of a directory with another value at one place of a file."""
    shutil.copytree(saved, directory, dirs_exist_ok=True)
    document = json.loads((directory / file).read_bytes())
    part: Any = document
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (directory / file).write_text(json.dumps(document))
    return directory


def opened(directory: Path, positions: int = 24) -> Tokenizer:
    found = find_tokenizer(bert(len(VOCABULARY), positions, directory=directory), (directory,))
    assert found is not None
    return found


@pytest.mark.parametrize("value", [True, "3", 3.0, -1])
@pytest.mark.parametrize(
    ("place", "named"),
    [(("added_tokens", 1, "id"), r"added_tokens\[1\]\.id"), (("model", "vocab", "cat"), "the id of cat")],
)
def test_token_ids_are_whole_numbers(
    place: tuple[str | int, ...], named: str, value: object, saved: Path, tmp_path: Path
) -> None:
    directory = changed(saved, tmp_path, "tokenizer.json", place, value)
    with pytest.raises(InputError, match=rf"tokenizer\.json: {named} is {value!r}; a whole number is needed"):
        opened(directory)


def test_scores_are_numbers(saved: Path, tmp_path: Path) -> None:
    directory = changed(saved, tmp_path, "tokenizer.json", ("model",), {"vocab": [["a", -1.5], ["b", "2"]]})
    with pytest.raises(InputError, match=r"model\.vocab\[1\]\[1\] is '2'; a number is needed"):
        opened(directory)


@pytest.mark.parametrize("value", [True, "16", 0, 16.5, [16]])
def test_longest_sentence_is_a_number_of_tokens(value: object, saved: Path, tmp_path: Path) -> None:
    directory = changed(saved, tmp_path, "tokenizer_config.json", ("model_max_length",), value)
    with pytest.raises(InputError, match=r"model_max_length is .*, not a number of tokens"):
        opened(directory)


LONG = "the cat sat on a mat and slept all day . " * 3
SHORT = "the cat sat on"


@pytest.mark.parametrize("most", [8, 8.0, 30, 10**30, 1e30])
def test_texts_are_cut_at_the_tokenizers_own_length(most: float, saved: Path, tmp_path: Path) -> None:
    """As transformers cuts them, unless the model has fewer positions."""
    directory = changed(saved, tmp_path, "tokenizer_config.json", ("model_max_length",), most)
    tokenizer = opened(directory)
    limit = int(min(most, 24))
    assert tokenizer.most_tokens == limit
    for texts in ((LONG,), (SHORT, LONG), (LONG, SHORT), (LONG, LONG)):
        (ids,) = tokenizer.items([Sentence(texts[0], "a", pair=texts[1] if len(texts) > 1 else None)]).ids
        options = {} if isinstance(most, int) and most < 24 else {"max_length": limit}
        assert list(ids) == tokenizer.backend(*texts, truncation=True, **options)["input_ids"]
        assert len(ids) == limit


def test_length_of_sentence_transformers_replaces_that_of_the_tokenizer(saved: Path, tmp_path: Path) -> None:
    directory = changed(saved, tmp_path, "tokenizer_config.json", ("model_max_length",), 8)
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    assert opened(directory).most_tokens == 12
