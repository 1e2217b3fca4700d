"""Test ``pipeedge.Pipeline`` with one rank, in the test's process."""

from __future__ import annotations

import asyncio
import doctest
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from served_models import CLASSES, save_bert, token_ids, token_types
from waiting import LIMIT_S

import pipeedge
from pipeedge.api import pipeline as module
from pipeedge.api.ranks import LocalRanks
from pipeedge.base.crew import Crew
from pipeedge.base.errors import InputError, ModelError, RequestError, ScheduleError
from pipeedge.data import DataEnds
from pipeedge.data.defaults import default_digits
from pipeedge.serve import answers
from pipeedge.serve.pending import EndedError

DIGITS = default_digits()
PICTURES = [(item.tensors[0][0] * 15).numpy() for item in DIGITS.items]


@pytest.fixture(scope="module")
def digits() -> Iterator[pipeedge.Pipeline]:
    with pipeedge.Pipeline("vit-digits", microbatch_size=5, max_waiting=30) as pipeline:
        yield pipeline


def test_examples() -> None:
    for each in (module, answers):
        found = doctest.testmod(each)
        assert found.attempted
        assert not found.failed


def test_many_answers_come_in_order(digits: pipeedge.Pipeline) -> None:
    found = list(digits(PICTURES))
    assert len(found) == len(PICTURES)
    right = [answer.best.number == item.label for answer, item in zip(found, DIGITS.items, strict=True)]
    assert np.mean(right) > 0.97
    for answer, picture in zip(found[:20], PICTURES, strict=False):
        np.testing.assert_allclose(digits(picture).outputs, answer.outputs, atol=1e-5)


def test_an_image_has_no_classes_of_tokens(digits: pipeedge.Pipeline) -> None:
    with pytest.raises(RequestError, match=r"^the model classifies an item as a whole: use top\(\) or best$"):
        digits(PICTURES[0]).tokens  # noqa: B018


def test_answers_come_while_the_input_goes_on(digits: pipeedge.Pipeline) -> None:
    """Each picture depends on the previous answer, so nothing may wait for a full microbatch."""
    come: list[int | None] = [None]
    more = threading.Semaphore(1)

    def pictures() -> Iterator[np.ndarray]:
        for number in range(4):
            assert more.acquire(timeout=LIMIT_S)
            assert come[-1] == (number - 1 if number else None)
            yield PICTURES[number]

    for number, answer in enumerate(digits(pictures())):
        assert answer.best.number == DIGITS.items[number].label
        come.append(number)
        more.release()
    assert come[-1] == 3


def test_inputs_of_every_form_have_the_same_answer(digits: pipeedge.Pipeline, tmp_path: Path) -> None:
    picture = PICTURES[0]
    Image.fromarray(picture).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    forms = [
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        data,
        Image.fromarray(picture),
        torch.from_numpy(picture),
    ]
    expected = digits(picture)
    for form in forms:
        assert digits(form).outputs.tolist() == expected.outputs.tolist()
    stacked = np.stack([np.stack([picture] * 3, 2)] * 3)
    assert [answer.best.number for answer in digits(stacked)] == [expected.best.number] * 3


def test_a_bad_input_fails_in_its_turn(digits: pipeedge.Pipeline) -> None:
    stream = digits([PICTURES[0], PICTURES[1], b"no image", PICTURES[2]])
    assert [next(stream).best.number for _ in range(2)] == [item.label for item in DIGITS.items[:2]]
    with pytest.raises(InputError, match=r"input\[2\]: cannot be read as an image"):
        next(stream)
    with pytest.raises(InputError, match=r"missing.png: no such file"):
        digits.submit("missing.png")
    assert digits(PICTURES[0]).best.number == DIGITS.items[0].label  # the pipeline goes on


def test_a_failure_of_the_iterable_is_raised(digits: pipeedge.Pipeline) -> None:
    def broken() -> Iterator[np.ndarray]:
        yield PICTURES[0]
        raise OSError("the camera is gone")

    answers_ = digits(broken())
    assert next(answers_).best.number == DIGITS.items[0].label
    with pytest.raises(OSError, match="camera"):
        next(answers_)


def test_a_stream_may_be_left_early(digits: pipeedge.Pipeline) -> None:
    def endless() -> Iterator[np.ndarray]:
        while True:
            yield PICTURES[0]

    stream = digits(endless())
    assert next(stream).best == next(stream).best
    stream.close()
    assert digits(PICTURES[0]).best.number == DIGITS.items[0].label


def test_futures_of_many_threads(digits: pipeedge.Pipeline) -> None:
    futures: dict[int, Future[answers.ModelAnswer]] = {}

    def ask(first: int) -> None:
        for number in range(first, 40, 4):
            futures[number] = digits.submit(PICTURES[number])

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    expected = [answer.outputs for answer in digits(PICTURES[:40])]
    for number, outputs in enumerate(expected):
        np.testing.assert_allclose(futures[number].result(LIMIT_S).outputs, outputs, atol=1e-5)


def test_sentences_and_pairs_equal_those_of_transformers(tmp_path: Path) -> None:
    reference = save_bert(tmp_path / "bert")
    texts = ["the cat sat", ("a cat", "slept all day"), "a mat and the cat", "day", ("the mat", "slept")]
    with torch.inference_mode():
        expected = [
            reference(input_ids=token_ids(*each), token_type_ids=token_types(*each)).logits[0]
            for text in texts
            for each in [(text,) if isinstance(text, str) else text]
        ]
    with pipeedge.Pipeline(tmp_path / "bert", options=["-pt", "1,8"]) as pipeline:
        found = list(pipeline(texts))
        alone = pipeline(texts[1])
    for answer, logits in zip(found, expected, strict=True):
        np.testing.assert_allclose(answer.outputs, logits, atol=1e-5)
        assert answer.best.label == CLASSES[int(logits.argmax())]
        assert sum(each.score for each in answer.top()) == pytest.approx(1)
    np.testing.assert_allclose(alone.outputs, expected[1], atol=1e-5)


def test_a_model_without_a_classifier_gives_vectors(tmp_path: Path) -> None:
    reference = save_bert(tmp_path / "bert", head=False)
    assert isinstance(reference, transformers.BertModel)
    with pipeedge.Pipeline(tmp_path / "bert") as pipeline:
        answer = pipeline("the cat sat")
        vector = answer.outputs
    with pytest.raises(RequestError, match=r"^the model gives a vector, and no classes: use outputs$"):
        answer.best  # noqa: B018
    with torch.inference_mode():
        expected = reference(input_ids=token_ids("the cat sat")).pooler_output[0]
    np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "options", "error", "line"),
    [
        ("nothing-like-it", [], ModelError, "nothing-like-it is neither"),
        ("vit-digits", ["-pt", "1,15"], ScheduleError, "layer 16 is covered by no stage"),
        ("vit-digits", ["-M", "missing.npz"], RequestError, "missing.npz"),
        ("vit-digits", ["--speed", "3"], RequestError, "--speed"),
    ],
)
def test_a_pipeline_that_cannot_run_says_why(
    model: str, options: list[str], error: type[Exception], line: str
) -> None:
    with pytest.raises(error, match=line), pipeedge.Pipeline(model, options=options):
        pass


@pytest.mark.parametrize(
    "options",
    [
        ["--input", "a.png"],
        ["--dataset-name", "ImageNet"],
        ["-b", "3"],
        ["--skip-bad-input"],
        ["--output", "a.csv"],
        ["--check", "3"],
        ["--plan", "auto", "-sm", "m", "-sdt", "t", "-sd", "d", "--held-out", "3"],
        ["--serve", "8000"],
        ["--dry-run"],
        ["-D", "1"],
    ],
)
def test_options_that_make_no_sense_from_python_are_refused(options: list[str]) -> None:
    name = options[-2] if len(options) > 1 else options[0]
    with pytest.raises(RequestError, match=f"^Pipeline .*: leave out ({name}$|{name}/)"):
        pipeedge.Pipeline("vit-digits", ranks=2, options=options)


@pytest.mark.parametrize(
    ("options", "argument", "name"),
    [
        (["-m", "other"], "model", "-m/--model"),
        (["-pt", "1,16", "-mother"], "model", "-m/--model"),
        (["--ubatch-size=4"], "microbatch_size", "-u/--ubatch-size"),
        (["--max-waiting", "4"], "max_waiting", "--max-waiting"),
    ],
)
def test_options_that_an_argument_stands_for_are_refused(
    options: list[str], argument: str, name: str
) -> None:
    with pytest.raises(
        RequestError, match=f"^Pipeline has the argument {argument} for that: leave out {name}$"
    ):
        pipeedge.Pipeline("vit-digits", options=options)


def test_a_pipeline_can_be_started_and_closed_without_a_with_statement() -> None:
    pipeline = pipeedge.Pipeline("vit-digits")
    pipeline.close()  # nothing yet
    assert pipeline.start() is pipeline
    asked = pipeline(PICTURES[:3])
    assert next(asked).best.number == DIGITS.items[0].label
    started = pipeline.submit(PICTURES[3])
    pipeline.close()
    assert started.result(0).best.number == DIGITS.items[3].label
    assert [answer.best.number for answer in asked] == [item.label for item in DIGITS.items[1:3]]
    pipeline.close()
    with pytest.raises(RequestError, match="has ended: make another one"):
        pipeline.start()


def test_a_sequence_that_goes_on_after_the_end_says_so() -> None:
    more = threading.Event()

    def pictures() -> Iterator[np.ndarray]:
        yield PICTURES[0]
        more.wait(LIMIT_S)
        yield PICTURES[1]

    pipeline = pipeedge.Pipeline("vit-digits").start()
    asked = pipeline(pictures())
    assert next(asked).best.number == DIGITS.items[0].label
    pipeline.close()
    with pytest.raises(EndedError, match=r"^the pipeline is ending and takes no further items$"):
        next(asked)
    more.set()


def test_tasks_ask_beside_each_other() -> None:
    async def ask() -> list[int]:
        async with pipeedge.Pipeline("vit-digits", max_waiting=2) as pipeline:
            given_up = asyncio.create_task(pipeline.ask(PICTURES[0]))
            await asyncio.sleep(0)
            given_up.cancel()
            found = await asyncio.gather(*map(pipeline.ask, PICTURES[:20]), given_up, return_exceptions=True)
            assert isinstance(found.pop(), asyncio.CancelledError)
            with pytest.raises(InputError, match="cannot be read as an image"):
                await pipeline.ask(b"no image")
        with pytest.raises(EndedError):
            await pipeline.ask(PICTURES[0])
        return [answer.best.number for answer in found if isinstance(answer, answers.ModelAnswer)]

    assert asyncio.run(ask()) == [item.label for item in DIGITS.items[:20]]


def test_a_start_that_a_task_gives_up_ends_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeedge.Pipeline("vit-digits")
    starting = threading.Event()
    start = pipeline.start

    def started() -> pipeedge.Pipeline:
        starting.set()
        return start()

    monkeypatch.setattr(pipeline, "start", started)

    async def give_up() -> None:
        entering = asyncio.create_task(pipeline.__aenter__())
        await asyncio.to_thread(starting.wait, LIMIT_S)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering

    asyncio.run(give_up())
    with pytest.raises(EndedError):
        pipeline(PICTURES[0])


def test_a_task_sees_the_failure_of_the_run(failing: threading.Event) -> None:
    async def ask() -> None:
        async with pipeedge.Pipeline("vit-digits"):
            failing.set()

    with pytest.raises(RequestError, match="the disk is full"):
        asyncio.run(ask())


def test_vectors_are_encoded_as_rows(tmp_path: Path) -> None:
    save_bert(tmp_path / "bert", head=False)
    texts = ["the cat sat", ("a cat", "slept all day"), "day"]
    with pipeedge.Pipeline(tmp_path / "bert") as pipeline:
        rows = pipeline.encode(texts)
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, np.stack([answer.outputs for answer in pipeline(texts)]))
        np.testing.assert_allclose(pipeline.encode("day"), rows[2], atol=1e-5)
        assert pipeline.encode([]).shape == (0, rows.shape[1])
        with pytest.raises(InputError, match=r"input\[1\]: the sentence is empty"):
            pipeline.encode(["a", ""])


def test_a_classifier_does_not_encode(digits: pipeedge.Pipeline) -> None:
    with pytest.raises(RequestError, match=r"^the model classifies an item as a whole: use top\(\) or best$"):
        digits.encode(PICTURES[:2])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("https://example.org/a.png", "https://example.org/a.png"),
        ("s3://bucket/a b.png?x=1", "s3://bucket/a b.png?x=1"),
        ("data:image/png;base64," + "A" * 1000, "data:image/png;base64,AAAAAAAAAAAAAAAAA…"),
    ],
)
def test_a_url_is_refused_with_the_reason(value: str, shown: str, digits: pipeedge.Pipeline) -> None:
    with pytest.raises(InputError) as refused:
        digits(value)
    assert str(refused.value) == (
        f"input: {shown} is a URL, and nothing is fetched: download it, and give its path or its bytes"
    )


def test_a_pipeline_is_started_once() -> None:
    with pipeedge.Pipeline("vit-digits") as pipeline:
        with pytest.raises(RequestError, match="is running already"), pipeline:
            pass
        assert pipeline(PICTURES[0]).best.number == DIGITS.items[0].label  # it goes on
    with pytest.raises(RequestError, match="has ended: make another one"), pipeline:
        pass


def test_a_fork_neither_asks_nor_ends_the_pipeline(
    digits: pipeedge.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        for ask in (digits, digits.submit):
            with pytest.raises(EndedError, match=r"runs in process \d+, of which this one is a fork"):
                ask(PICTURES[0])  # type: ignore[operator]
        digits.close()
        digits.__exit__(None, None, None)
    assert digits(PICTURES[0]).best.number == DIGITS.items[0].label


def test_buffers_are_one_thing_and_pairs_of_paths_are_many(digits: pipeedge.Pipeline, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    Image.fromarray(PICTURES[0]).save(file)
    data, label = file.read_bytes(), DIGITS.items[0].label
    for buffer in (bytearray(data), memoryview(data)):
        assert digits(buffer).best.number == label
    assert [answer.best.number for answer in digits((str(file), str(file)))] == [label] * 2  # type: ignore[union-attr]
    with file.open("rb") as stream:
        for wrong in (stream, 7, None):
            with pytest.raises(InputError, match=f"^input: {type(wrong).__name__}; vit-digits takes "):
                digits(wrong)  # type: ignore[call-overload]


def test_a_pipeline_answers_only_while_it_runs() -> None:
    pipeline = pipeedge.Pipeline("vit-digits")
    with pytest.raises(EndedError, match="use it in a with statement"):
        pipeline.submit(PICTURES[0])
    with pipeline:
        future = pipeline.submit(PICTURES[0])
    assert future.result(0).best.number == DIGITS.items[0].label  # leaving answers what was asked
    with pytest.raises(EndedError):
        pipeline.submit(PICTURES[0])


def test_a_pipeline_whose_ranks_cannot_be_started_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(ranks: LocalRanks) -> None:
        raise RequestError("cannot start python: no such file")

    monkeypatch.setattr(LocalRanks, "__enter__", fail)
    pipeline = pipeedge.Pipeline("vit-digits", ranks=2)
    with pytest.raises(RequestError, match="cannot start python"):
        pipeline.__enter__()
    closing = Crew()
    closing.start("close", pipeline.close)
    assert closing.wait(LIMIT_S)
    with pytest.raises(EndedError, match="not running"):
        pipeline.submit(PICTURES[0])


def test_an_exception_in_the_body_ends_the_pipeline() -> None:
    def fail() -> None:
        with pipeedge.Pipeline("vit-digits") as pipeline:
            pipeline.submit(PICTURES[0])
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the run of each pipeline fail once the event is set."""
    event = threading.Event()

    def fail(*arguments: object, threads: object) -> None:
        open_ends = arguments[3]
        ends = open_ends(None, None)  # type: ignore[operator]
        assert isinstance(ends, DataEnds)
        with ends.sink:
            event.wait(LIMIT_S)
            raise RequestError("the disk is full")

    monkeypatch.setattr(module, "run", fail)
    return event


def test_a_failure_that_no_question_has_told_is_raised_at_the_end(failing: threading.Event) -> None:
    with pytest.raises(RequestError, match="the disk is full"), pipeedge.Pipeline("vit-digits") as pipeline:  # noqa: PT012
        pipeline.submit(PICTURES[0])
        failing.set()


@pytest.mark.parametrize("kind", ["result", "exception", "one", "many", "submit", "task"])
def test_a_failure_that_a_question_has_told_is_not_raised_again(kind: str, failing: threading.Event) -> None:
    with pipeedge.Pipeline("vit-digits") as pipeline:
        future = pipeline.submit(PICTURES[0])
        many = pipeline([PICTURES[0]])
        failing.set()
        ask: dict[str, Callable[[], object]] = {
            "result": lambda: future.result(LIMIT_S),
            "one": lambda: pipeline(PICTURES[0]),
            "many": lambda: next(many),
            "task": lambda: asyncio.run(pipeline.ask(PICTURES[0])),
        }
        if kind == "exception":
            assert str(future.exception(LIMIT_S)) == "the disk is full"
        elif kind == "submit":
            wait([future], LIMIT_S)  # which does not look at the error
            with pytest.raises(RequestError, match="the disk is full"):
                pipeline.submit(PICTURES[0])
        else:
            with pytest.raises(RequestError, match="the disk is full"):
                ask[kind]()


def test_the_package_shows_its_names() -> None:
    assert {"Pipeline", "__version__"} <= set(dir(pipeedge))
    namespace: dict[str, object] = {}
    exec("from pipeedge import *", namespace)  # noqa: S102 - as in a notebook
    assert namespace["Pipeline"] is pipeedge.Pipeline


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pipelines'"):
        pipeedge.Pipelines  # noqa: B018
