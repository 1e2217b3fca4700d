"""Requests of many clients at a time, a part of them bad, with the answers that are due.

every good one    the answer that transformers gives
every bad one     its status, and a sentence
"""

from __future__ import annotations

import base64
import io
import json
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from served import WORDS, Client, Ranks, Reply

from pipeedge.data.defaults import asset, default_digits

__all__ = ["Outcome", "Question", "ask_all", "digit_questions", "sentence_questions"]

TOLERANCE = 1e-4
"""Largest distance of a score, or of a number of a vector."""
MAX_BODY = 8 << 20
"""Default of ``--max-body``."""
TOO_LONG = 600
"""Number of words that no BERT takes."""


@dataclass(frozen=True)
class Question:
    """A request, and what its answer must be."""

    name: str
    path: str
    body: bytes
    status: int = 200
    is_right: Callable[[bytes], bool] | None = None
    """Whether the body of a good answer is right."""
    kind: str = "application/json"
    slow: bool = False
    items: int = 1
    """Number of images or sentences in it."""

    def fault(self, reply: Reply) -> str | None:
        """Return what is wrong with an answer, or None."""
        if reply.status != self.status:
            return f"{self.name}: {reply.status}, not {self.status}: {reply.line}"
        if self.is_right is not None:
            return None if self.is_right(reply.body) else f"{self.name}: a wrong answer"
        return None if reply.line and "\n" not in reply.line else f"{self.name}: no sentence"


def bad_questions(path: str, *, empty: bytes, slow: bytes) -> list[Question]:
    """Return what is wrong for every route.

    Args:
        path: Path of a route.
        empty: A body without anything to compute.
        slow: A good body.
    """
    return [
        Question("empty", path, empty, 400),
        Question("no body", path, b"", 400),
        Question("wrong JSON", path, b'{"inputs": ["a", ', 400),
        Question("another form", path, b'{"inputs": {"a": 1}}', 400),
        Question("huge", path, bytes(MAX_BODY + 1), 413),
        Question("slow", path, slow, 408, slow=True),
        Question("no route", "/nothing", b"{}", 404),
    ]


def digit_questions() -> tuple[list[Question], list[Question]]:
    """Return good and bad questions for ``vit-digits``."""
    pictures = [(item.tensors[0][0] * 15).numpy() for item in default_digits().items]
    model = transformers.ViTForImageClassification.from_pretrained(asset("vit-digits")).eval()
    values = torch.from_numpy(np.stack(pictures)).float()[:, None] / 255 * 2 - 1
    with torch.inference_mode():
        scores = model(values).logits.softmax(dim=1).numpy()
    files = [_png(picture) for picture in pictures]

    def right(expected: np.ndarray) -> Callable[[bytes], bool]:
        def check(body: bytes) -> bool:
            found = {int(one["label"]): one["score"] for one in json.loads(body)}
            return len(found) == 5 and all(
                abs(expected[label] - score) < TOLERANCE for label, score in found.items()
            )

        return check

    def right_of_two(first: np.ndarray, second: np.ndarray) -> Callable[[bytes], bool]:
        checks = (right(first), right(second))
        return lambda body: all(
            check(json.dumps(one).encode()) for check, one in zip(checks, json.loads(body), strict=True)
        )

    good = []
    for number, (file, expected) in enumerate(zip(files, scores, strict=True)):
        other = (number * 7 + 1) % len(files)
        urls = [f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in (file, files[other])]
        good += [
            Question("file", "/classify", file, is_right=right(expected), kind="image/png"),
            Question(
                "data URLs",
                "/classify",
                json.dumps({"inputs": urls}).encode(),
                is_right=right_of_two(expected, scores[other]),
                items=2,
            ),
        ]
    broken = files[0][: len(files[0]) // 2]
    bad = bad_questions("/classify", empty=b'{"inputs": []}', slow=files[0])
    bad += [
        Question("broken image", "/classify", broken, 400, kind="image/png"),
        Question("no image", "/classify", b"GIF89a", 400, kind="image/gif"),
        Question("decompression bomb", "/classify", _png(np.zeros((1, 1), np.uint8), (20_000, 20_000)), 400),
    ]
    return good, bad


def _png(picture: np.ndarray, size: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    image = Image.fromarray(picture)
    (image if size is None else image.resize(size)).save(stream, "PNG")
    return stream.getvalue()


def sentence_questions(directory: Path, count: int) -> tuple[list[Question], list[Question]]:
    """Return good and bad questions for an embedder.

    Args:
        directory: What ``save_embedder`` has written.
        count: Number of sentences.
    """
    chance = random.Random(0)
    model = transformers.BertModel.from_pretrained(directory).eval()
    vocabulary = {word: number for number, word in enumerate((directory / "vocab.txt").read_text().split())}
    good = []
    for number in range(count):
        sentences = [" ".join(chance.choices(WORDS, k=chance.randint(1, 30))) for _ in range(1 + number % 3)]
        vectors = [_embedded(model, vocabulary, sentence) for sentence in sentences]
        if number % 2:
            path, body = "/embed", {"inputs": sentences}
        else:
            path, body = "/v1/embeddings", {"input": sentences, "model": "any"}
        good.append(
            Question(path, path, json.dumps(body).encode(), is_right=_right_vectors(np.stack(vectors)))
        )
    long = json.dumps({"inputs": " ".join(["cat"] * TOO_LONG)}).encode()
    bad = bad_questions("/embed", empty=b'{"inputs": [""]}', slow=good[0].body)
    bad.append(Question("too long", "/embed", long, 400))
    return good, bad


def _embedded(model: transformers.BertModel, vocabulary: dict[str, int], sentence: str) -> np.ndarray:
    ids = [vocabulary[word] for word in ("[CLS]", *sentence.split(), "[SEP]")]
    with torch.inference_mode():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(dim=0), dim=0).numpy()


def _right_vectors(expected: np.ndarray) -> Callable[[bytes], bool]:
    def check(body: bytes) -> bool:
        content = json.loads(body)
        found = [one["embedding"] for one in content["data"]] if isinstance(content, dict) else content
        return np.shape(found) == expected.shape and bool(np.abs(found - expected).max() < TOLERANCE)

    return check


@dataclass
class Outcome:
    """What became of all questions."""

    asked: Counter[str] = field(default_factory=Counter)
    """Number of questions by name."""
    faults: list[str] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    """Resident memory of the data rank, twice a second."""
    elapsed_s: float = 0.0

    @property
    def growth(self) -> float:
        """Median memory of the last third, relative to that of the second."""
        third = len(self.memory_mb) // 3
        last, second = self.memory_mb[2 * third :], self.memory_mb[third : 2 * third]
        return statistics.median(last) / statistics.median(second) if third else 1.0


def ask_all(
    ranks: Ranks, good: Sequence[Question], bad: Sequence[Question], *, count: int, clients: int
) -> Outcome:
    """Ask ``count`` questions, a tenth of them bad, in random order; each client asks one after the other."""
    chance = random.Random(1)
    questions = [chance.choice(bad if number % 10 == 0 else good) for number in range(count)]
    chance.shuffle(questions)
    outcome, left, lock = Outcome(), iter(questions), threading.Lock()
    outcome.asked.update(question.name for question in questions)

    def work() -> None:
        client = Client(ranks.port)
        while True:
            with lock:
                question = next(left, None)
            if question is None:
                return
            try:
                reply = client.ask(question.path, question.body, kind=question.kind, slow=question.slow)
                fault = question.fault(reply)
            except (OSError, HTTPException) as error:
                client.close()
                fault = f"{question.name}: {type(error).__name__}: {error}"
            if fault is not None:
                outcome.faults.append(fault)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        outcome.memory_mb.append(ranks.memory_mb()[0])
        time.sleep(0.5)
    outcome.elapsed_s = time.monotonic() - began
    return outcome
