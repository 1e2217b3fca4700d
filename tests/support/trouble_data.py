"""Cases of test_troubleshooting.py: input and output."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import sys
from collections import Counter
from pathlib import Path

import fake_models
import numpy as np
import pytest
from PIL import Image
from small_models import VOCABULARY
from trouble import DIGITS, Cases, Patch, raising, refused, start

from pipeedge.base.streams import unprinted
from pipeedge.data import arrays, images, opening, pictures
from pipeedge.data.cola import read_split
from pipeedge.data.images import skipped_line
from pipeedge.data.opening import open_input, readable_rows
from pipeedge.data.results import ResultWriter, check_output_path
from pipeedge.data.sentence_rules import read_rules
from pipeedge.data.text import open_tokenizer, read_sentences
from pipeedge.data.tokenizer_files import check_tokenizer
from pipeedge.data.unfinished import Rows, UnfinishedOutput, find_unfinished
from pipeedge.launch.main import parse_launch, plan_launch
from pipeedge.observe.monitoring import Exporter
from pipeedge.request.environment import Environment
from pipeedge.request.files import InputRequest
from pipeedge.request.options import parse_runtime

CASES = Cases()
says = CASES.says


# --- input ----------------------------------------------------------------------------------------


@says("…: skipped 7 files of other types (4 .mov, 3 .txt)")
def files_are_skipped(patch: Patch) -> str:
    return skipped_line("photos", Counter({".mov": 4, ".txt": 3})) or ""


@says("…, and would fill the memory; --max-image-pixels allows more")
def a_picture_is_huge(patch: Patch) -> str:
    Image.new("1", (100, 100)).save("huge.png")
    return start("0 1 -m vit-digits --max-image-pixels 9999 --input huge.png")


@says(
    "photos/a.tif: its values are floating point numbers, whose range is not known; save it with 8 or 16 "
    "bits a value, or give .npz arrays"
)
def a_picture_of_floats(patch: Patch) -> str:
    path = Path("photos/a.tif")
    Image.new("F", (4, 4)).save(path)
    try:
        return refused(lambda: pictures.open_image(path))
    finally:
        path.unlink()


@says(
    "photos/a.png: 1 x 70000: a side of an image may have 65,535 pixels; cut the image into parts, or make "
    "it smaller"
)
def a_picture_has_a_long_side(patch: Patch) -> str:
    stream = io.BytesIO()
    Image.new("1", (1, 70_000)).save(stream, "PNG")
    return refused(lambda: pictures.decode_image(stream, "photos/a.png"))


@says("photos/a.png: 1 x 60000 is too narrow to be resized for this model; cut the image into parts")
def a_picture_is_narrow(patch: Patch) -> str:
    patch.setattr(images, "REDUCED_PIXELS", 60)
    recipe = images.default_recipe(fake_models.vit(8))
    return refused(lambda: images.encode_picture(recipe, "photos/a.png", lambda: Image.new("1", (1, 60_000))))


@says("photos/a.png: not enough memory for this image; make it smaller")
def a_picture_fills_the_memory(patch: Patch) -> str:
    recipe = images.default_recipe(fake_models.vit(8))
    return refused(lambda: images.encode_picture(recipe, "photos/a.png", raising(MemoryError())))


@says(
    "photos/a.heic: HEIF images need the package pillow-heif: pip install 'pipeedge[heif]'",
    "…: is a HEIF image, which needs the package pillow-heif: …",
)
def heif_is_not_installed(patch: Patch) -> str:
    patch.setattr(pictures, "needs_heif", lambda: True)
    patch.setattr(opening, "IMAGE_SUFFIXES", (".png",))
    path = Path("photos/a.heic")
    path.write_bytes(b"\0\0\0\x18ftypheic")
    try:
        named = refused(lambda: opening.kind_of(path, fake_models.vit(8)))
        return f"{named}\n{refused(lambda: pictures.open_image(path))}"
    finally:
        path.unlink()


@says("photos/a.png: is not a regular file")
def a_picture_is_a_pipe(patch: Patch) -> str:
    Path("pipes/photos").mkdir(parents=True)
    os.mkfifo("pipes/photos/a.png")
    patch.chdir("pipes")
    return refused(lambda: pictures.open_image(Path("photos/a.png")))


def read_table(*options: str) -> str:
    Path("words").mkdir(exist_ok=True)
    Path("words/vocab.txt").write_text("\n".join(VOCABULARY))
    line = ("0", "1", "-m", "bert-base-uncased", "--input", "a.csv", *options)
    request = parse_runtime(line, Environment()).request
    return refused(lambda: open_input(request.input, fake_models.bert(directory=Path("words"))))


@says("a.csv: which column has the sentences? --text-column NAME, of …")
def no_column_is_usual(patch: Patch) -> str:
    return read_table()


@says("a.csv: has no column …; its columns are …")
def no_column_of_that_name(patch: Patch) -> str:
    return read_table("--text-column", "words")


def read_pairs(content: str, name: str = "pairs.jsonl") -> str:
    Path(name).write_text(content)
    paths = (Path(name),)
    return refused(lambda: readable_rows(paths, InputRequest(paths), fake_models.bert()))


@says("a.txt: is UTF-16 text; convert it to UTF-8: iconv …")
def text_is_wide(patch: Patch) -> str:
    Path("a.txt").write_text("the cat", encoding="utf-16")
    return refused(lambda: read_sentences(Path("a.txt")))


@says(
    "words/tokenizer.json: the id of cat is True; a whole number is needed",
    'words/tokenizer_config.json: model_max_length is "16", not a number of tokens',
)
def a_number_of_a_tokenizer_is_none(patch: Patch) -> str:
    Path("words").mkdir(exist_ok=True)
    Path("words/tokenizer.json").write_text('{"model": {"vocab": {"cat": true}}}')
    Path("words/tokenizer_config.json").write_text('{"model_max_length": "16"}')
    try:
        wrong_id = refused(lambda: check_tokenizer(Path("words")))
        return f"{wrong_id}\n{refused(lambda: read_rules(Path('words')))}"
    finally:
        Path("words/tokenizer.json").unlink()
        Path("words/tokenizer_config.json").unlink()


@says("pairs.tsv:3: this row has no column 2")
def pair_is_cut_off(patch: Patch) -> str:
    return read_pairs("query\tpassage\na\tb\nc\n", "pairs.tsv")


@says("pairs.tsv:3: the second sentence of this pair is empty")
def pair_is_half_empty(patch: Patch) -> str:
    return read_pairs("query\tpassage\na\tb\nc\t\n", "pairs.tsv")


@says("pairs.jsonl:2: is not JSON …")
def line_is_not_json(patch: Patch) -> str:
    return read_pairs('["a", "b"]\n["c"\n')


@says("pairs.jsonl:2: a list of 3 values, not a pair of sentences")
def line_is_a_triple(patch: Patch) -> str:
    return read_pairs('["a", "b"]\n["c", "d", "e"]\n')


@says("pairs.jsonl:2: 7 is not a sentence")
def line_has_a_number(patch: Patch) -> str:
    return read_pairs('["a", "b"]\n["c", 7]\n')


@says("pairs.jsonl:2: which key has the sentence? --text-column NAME; its keys are …")
def line_has_unknown_keys(patch: Patch) -> str:
    return read_pairs('["a", "b"]\n{"left": "c"}\n')


@says("pairs.jsonl:1: one sentence, but pairs.jsonl:2 has a pair; give them in two runs")
def lines_of_both_kinds(patch: Patch) -> str:
    return read_pairs('{"text": "a"}\n["a", "b"]\n')


@says("a.csv:3: the sentence is empty; --skip-bad-input leaves such rows out")
def sentence_is_empty(patch: Patch) -> str:
    return read_pairs("id,text\n1,a\n2,\n", "a.csv")


@says('a.csv:2: label is "positve", not a class of …; its classes are 0 to 1 (…); …')
def label_is_no_class(patch: Patch) -> str:
    Path("a.csv").write_text("text,label\na,positve\n")
    model = dataclasses.replace(fake_models.bert(), labels=("negative", "positive"))
    paths = (Path("a.csv"),)
    return refused(lambda: readable_rows(paths, InputRequest(paths), model))


@says("a.csv: has 2 columns label; rename all but one")
def two_columns_of_labels(patch: Patch) -> str:
    return read_pairs("text,label,label\na,0,1\n", "a.csv")


@says("… has token types up to 2, but … has 2 types: it is the tokenizer of another model")
def types_of_another_model(patch: Patch) -> str:
    Path("words").mkdir(exist_ok=True)
    fake_models.write_tokenizer(Path("words"), VOCABULARY, second=2)
    Path("pairs.jsonl").write_text('["the cat", "sat"]\n')
    request = parse_runtime(
        ["0", "1", "-m", "bert-base-uncased", "--input", "pairs.jsonl"], Environment()
    ).request
    return refused(lambda: open_input(request.input, fake_models.bert(directory=Path("words"))))


@says("--input -: launched ranks have no standard input; give a file")
def ranks_without_standard_input(patch: Patch) -> str:
    return refused(
        lambda: plan_launch(parse_launch(["--local", "2", "--", "-m", "vit-digits", "--input", "-"]))
    )


@says(
    "no vocabulary for model, so sentences cannot become token ids: put its tokenizer.json or vocab.txt "
    "into …"
)
def no_vocabulary(patch: Patch) -> str:
    model = dataclasses.replace(fake_models.bert(), name="model", directory=Path("empty"))
    return refused(lambda: open_tokenizer(model, [Path("empty")]))


@says("… MB are free; run fewer (-b)")
def arrays_fill_the_memory(patch: Patch) -> str:
    patch.setattr(arrays, "available_bytes", lambda: 100)
    np.savez("many.npz", pixel_values=np.zeros((2, 1, 8, 8), np.float32))
    return start("0 1 -m vit-digits --input many.npz")


@says("CoLA needs the package datasets: pip install 'pipeedge[runtime]'")
def datasets_is_not_installed(patch: Patch) -> str:
    patch.setitem(sys.modules, "datasets", None)
    return refused(lambda: read_split(None, "validation"))


# --- output ---------------------------------------------------------------------------------------


@says("--prometheus-port 9000: cannot listen at …; choose another port, one for each rank of a machine")
def a_port_of_another_rank(patch: Patch) -> str:
    client = pytest.importorskip("prometheus_client")
    patch.setattr(client, "start_http_server", raising(OSError(errno.EADDRINUSE, "Address already in use")))
    return refused(lambda: Exporter("127.0.0.1", 9000, 0))


@says(
    "--resume: … was written with another value of the input (…, now …); leave out --resume to begin with "
    "the first item"
)
def the_input_has_changed(patch: Patch) -> str:
    output = Path("resumed.csv")
    writing = UnfinishedOutput.begin(output, {"the input": "3f0a"})
    writing.append(Rows((0,), (-1,)), b"a row")
    writing.close()
    return refused(lambda: ResultWriter(output, DIGITS, None, {"the input": "77b1"}, find_unfinished(output)))


@says("….part: another run is writing it; wait for it, or name another --output")
def two_runs_write_the_same_output(patch: Patch) -> str:
    writing = UnfinishedOutput.begin(Path("shared.csv"), {})
    said = refused(lambda: UnfinishedOutput.begin(Path("shared.csv"), {}))
    writing.close()
    return said


@says("….part: is not an unfinished output, which goes by this name; rename it")
def a_file_has_the_name_of_an_unfinished_output(patch: Patch) -> str:
    Path("mine.csv.part").write_text("mine")
    return start("0 1 -m vit-digits --output mine.csv")


@says("--output o.parquet: a .parquet needs the package pyarrow: pip install 'pipeedge[parquet]'")
def pyarrow_is_not_installed(patch: Patch) -> str:
    patch.setitem(sys.modules, "pyarrow.parquet", None)
    return refused(lambda: check_output_path(Path("o.parquet"), DIGITS))


@says("standard output cannot be written: no space left on device", "… it is closed")
def the_disk_is_full(patch: Patch) -> str:
    numbers = errno.ENOSPC, errno.EBADF
    return "\n".join(str(unprinted(OSError(number, os.strerror(number)))) for number in numbers)
