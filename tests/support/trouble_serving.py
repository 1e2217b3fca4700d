"""Cases of test_troubleshooting.py: a pipeline that answers, over HTTP and from Python."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from clock import Clock
from PIL import Image
from ports import free_port
from trouble import DIGITS, Cases, Patch, Provoke, refused, start

from pipeedge import Pipeline
from pipeedge.base.payload import TensorSpec
from pipeedge.observe.pipeline_state import PipelineState
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.serve import gate
from pipeedge.serve.application import make_application
from pipeedge.serve.asking import Asker
from pipeedge.serve.batching import BatchLimits
from pipeedge.serve.bodies import InferBody, PredictBody, decode_body
from pipeedge.serve.gate import GateLimits, read_keys
from pipeedge.serve.http_ends import HttpEnds
from pipeedge.serve.queued_model import QueuedModel
from pipeedge.serve.requests import RequestQueue
from pipeedge.serve.tensors import read_tensors
from pipeedge.serve.zero_shot import hypotheses

CASES = Cases()
says = CASES.says
PICTURE = np.zeros((8, 8), np.uint8)

OPTIONS = {
    "--serve …: give PORT, or ADDR:PORT": "0 1 -m vit-digits --serve pi1",
    "--api-key needs --serve: without it, a run answers no requests": "0 1 -m vit-digits --api-key keys",
}
for quote, line in OPTIONS.items():
    says(quote)(lambda patch, line=line: start(line))


def service(max_waiting: int = 2) -> QueuedModel:
    request = parse_runtime(["0", "1", "-m", "vit-digits", "--quiet"], Environment()).request
    return QueuedModel.open(request, DIGITS, max_waiting=max_waiting)


def asked(
    path: str,
    body: bytes = b"",
    *,
    limits: GateLimits | None = None,
    told: int | None = None,
    headers: dict[str, str] | None = None,
    served: QueuedModel | None = None,
    cancelled: bool = False,
) -> str:
    """Return the line that the application answers to a request, without a connection."""
    sent: list[Any] = []
    come = [{"type": "http.request", "body": body, "more_body": told is not None}]

    async def receive() -> Any:
        return come.pop() if come else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    path, _, query = path.partition("?")
    length = len(body) if told is None else told
    given = {"content-length": str(length), **(headers or {})}
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    asker = Asker(served or service(), timeout_s=0.05)
    app = make_application(asker, PipelineState(), limits or GateLimits(1 << 20, 0.05))

    async def ask() -> None:
        task = asyncio.ensure_future(app(scope, receive, send))
        if cancelled:
            while come:
                await asyncio.sleep(0)
            task.cancel()
        await task

    asyncio.run(ask())
    asker.close()
    return json.loads(sent[1]["body"])["error"]


def item(served: QueuedModel) -> Any:
    return served.preparation.item(PICTURE)


# --- starting ---------------------------------------------------------------------------------------


def opened(*options: str) -> str:
    request = parse_runtime(["0", "1", "-m", "vit-digits", "--quiet", *options], Environment()).request
    lines: list[str] = []
    HttpEnds(lines.append).open(request, DIGITS).sink.__exit__(None, None, None)
    return "\n".join(lines)


@says("…: cannot listen there (Address already in use); choose another port, or an address of this machine")
def _port_in_use(patch: Patch) -> str:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        return refused(lambda: opened("--serve", str(other.getsockname()[1])))


@says("answers anyone who can reach …: give --api-key FILE, or listen on the loopback")
def _open_to_all(patch: Patch) -> str:
    return opened("--serve", f"0.0.0.0:{free_port()}")


@says("--serve needs the package …: pip install 'pipeedge[serve]'")
def _no_package(patch: Patch) -> str:
    patch.setattr("importlib.util.find_spec", lambda name: None)
    return refused(lambda: opened("--serve", "8000"))


@says("--api-key keys: cannot be read (No such file or directory)")
def _no_keys(patch: Patch) -> str:
    return refused(lambda: read_keys(Path("keys")))


@says("--api-key no-keys: the file has no key; write one a line")
def _empty_keys(patch: Patch) -> str:
    Path("no-keys").write_text("\n")
    return refused(lambda: read_keys(Path("no-keys")))


# --- replies ----------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, bytes]] = {
    "vit-digits takes images: POST the picture itself to / or /classify": ("/predict", b"\x89PNG"),
    "the request does not fit: …": ("/classify", b'{"image": "a"}'),
    "the request is not JSON: …": ("/embed", b"a sentence"),
    "image 0: is neither a data URL nor base64": ("/classify", b'{"inputs": "a picture"}'),
    "2,049 items in one request: at most 2,048 are answered; send several requests": (
        "/classify",
        b'{"inputs": [' + b'"",' * 2048 + b'""]}',
    ),
    "dimensions is not supported: leave it out": ("/embed", b'{"inputs": "a", "dimensions": 3}'),
    "there is no parameter limit in this address; it takes top": ("/classify?limit=3", b"{}"),
    "there is no such route; GET /docs lists them": ("/generate", b"{}"),
    "there is no such model; GET / shows the one that is served": ("/v2/models/other/infer", b"{}"),
}


def decoded(inputs: list[dict[str, Any]]) -> object:
    return read_tensors(msgspec.convert({"inputs": inputs}, InferBody), b"")


@says("model other is not served: ask for vit-digits, or for none")
def _other_model(patch: Patch) -> str:
    asker = Asker(service(), timeout_s=0.05)
    return refused(lambda: asker.service.check_name("other"))


@says("candidate_labels: … knows its own classes only; …")
def _other_classes(patch: Patch) -> str:
    body = decode_body(b'{"inputs": "a", "parameters": {"candidate_labels": ["b"]}}', PredictBody)
    return refused(lambda: hypotheses(body, ("bad", "good"), "bert"))


@says("inputs: no input is called atention_mask; … takes …")
def _misspelt(patch: Patch) -> str:
    return refused(lambda: service().preparation.arrays({"atention_mask": np.ones((1, 2))}, "inputs"))


@says("input_ids: 262 does not fit UINT8")
def _does_not_fit(patch: Patch) -> str:
    return refused(lambda: decoded([{"name": "input_ids", "shape": [1], "datatype": "UINT8", "data": [262]}]))


@says("the host evil.example is not this machine: …")
def _other_host(patch: Patch) -> str:
    limits = GateLimits(1 << 20, 0.05, local_names_only=True)
    return asked("/classify", limits=limits, headers={"host": "evil.example"})


@says("content-encoding gzip: send the body as it is")
def _compressed(patch: Patch) -> str:
    return asked("/classify", headers={"content-encoding": "gzip"})


@says("too many large requests at a time")
def _large_ones(patch: Patch) -> str:
    patch.setattr(gate, "_BODIES", 0)
    return asked("/classify", bytes(100_000))


@says("2 requests wait already; try again later")
def _crowd(patch: Patch) -> str:
    queue = service().queue
    waiting = [queue.open(1) for _ in range(2)]
    assert len(waiting) == 2
    return refused(lambda: queue.open(1))


@says("the server has ended")
def _over(patch: Patch) -> str:
    return asked("/classify", b"a", told=2, limits=GateLimits(1 << 20, 60.0), cancelled=True)


def _wrong(path: str, body: bytes) -> Provoke:
    return lambda patch: asked(path, body, headers={"content-type": "application/json"})


for quote, (path, body) in WRONG.items():
    says(quote)(_wrong(path, body))


@says("the key is missing or wrong: send Authorization: Bearer KEY")
def _no_key(patch: Patch) -> str:
    return asked("/classify", limits=GateLimits(1, 1.0, (b"secret",)))


@says("the request is larger than 1,048,576 bytes (--max-body)")
def _large(patch: Patch) -> str:
    return asked("/classify", bytes((1 << 20) + 1))


@says("the request did not come within 0.05 s")
def _slow(patch: Patch) -> str:
    return asked("/classify", b"a", told=2)


@says("the headers are more than 100, or longer than 16,384 bytes")
def _headers(patch: Patch) -> str:
    return asked("/classify", headers={"cookie": "a" * 20_000})


@says("2 items wait already, and there is no room for 1 more; try again later")
def _full(patch: Patch) -> str:
    served = service()
    served.queue.submit([item(served)] * 2)
    return refused(lambda: served.queue.submit([item(served)]))


@says("the request was not answered within 0.05 s")
def _late(patch: Patch) -> str:
    stream = io.BytesIO()
    Image.fromarray(PICTURE).save(stream, "PNG")
    return asked("/classify", stream.getvalue())


@says("the deadline was over before the item was computed")
def _expired(patch: Patch) -> str:
    clock = Clock()
    queue = RequestQueue(BatchLimits(1, 1, 4), clock=clock)
    served = service()
    pending = queue.submit([item(served)], timeout_s=1)
    clock.now = 2
    queue.drain()
    queue.stream().next(1)
    return refused(lambda: pending[0])


@says("the pipeline is ending and takes no further items")
def _ending(patch: Patch) -> str:
    served = service()
    served.queue.drain()
    return refused(lambda: served.queue.submit([item(served)]))


@says("input: the model produced NaN or infinity: check its weights")
def _not_finite(patch: Patch) -> str:
    served = service()
    pending = served.queue.submit([item(served)])
    group = served.queue.stream().next(8)
    assert group is not None
    served.queue.write(
        0, torch.full((1, 10), torch.nan), group.collate(tuple(map(TensorSpec.empty, group.specs)))
    )
    return refused(lambda: pending[0])


# --- from Python ------------------------------------------------------------------------------------


@says("the pipeline is not running: use it in a with statement, or start it")
def _not_running(patch: Patch) -> str:
    return refused(lambda: Pipeline("vit-digits").submit(PICTURE))


@says("Pipeline answers requests and has no finished input: leave out -b/--batch-size")
def _finished_input(patch: Patch) -> str:
    return refused(lambda: Pipeline("vit-digits", options=["-b", "9"]))


@says("Pipeline runs the model, and asks it from rank 0: leave out --dry-run")
def _dry_run(patch: Patch) -> str:
    return refused(lambda: Pipeline("vit-digits", options=["--dry-run"]))


@says("Pipeline has the argument model for that: leave out -m/--model")
def _another_model(patch: Patch) -> str:
    return refused(lambda: Pipeline("vit-digits", options=["-m", "bert-base-uncased"]))


@says(
    "input: https://example.org/a.png is a URL, and nothing is fetched: download it, and give its path or …"
)
def _url(patch: Patch) -> str:
    with Pipeline("vit-digits") as pipeline:
        return refused(lambda: pipeline.submit("https://example.org/a.png"))


@says("cannot import name 'Pipeline' from 'pipeedge' (unknown location)")
def _shadowed(patch: Patch) -> str:
    Path("shadow/pipeedge").mkdir(parents=True)
    patch.setattr(sys, "path", [str(Path("shadow").resolve())])
    patch.delitem(sys.modules, "pipeedge")
    try:
        exec("from pipeedge import Pipeline", {})  # noqa: S102
    except ImportError as error:
        return str(error)
    finally:
        patch.undo()
    return ""


@says("max_waiting 0: must be at least 1")
def _no_room(patch: Patch) -> str:
    return refused(lambda: Pipeline("vit-digits", max_waiting=0))


@says("the pipeline has ended: make another one")
def _entered_again(patch: Patch) -> str:
    with Pipeline("vit-digits") as pipeline:
        pass
    return refused(pipeline.__enter__)


@says("the pipeline is running already: ask it, or make another one")
def _entered_twice(patch: Patch) -> str:
    with Pipeline("vit-digits") as pipeline:
        return refused(pipeline.__enter__)


@says("the pipeline runs in process 17, of which this one is a fork: ask it there, or make another one here")
def _forked(patch: Patch) -> str:
    with Pipeline("vit-digits") as pipeline:
        patch.setattr(pipeline, "_process", 17)
        line = refused(lambda: pipeline.submit(PICTURE))
        patch.undo()
    return line


@says("the pipeline was closed before the item was computed")
def _closed(patch: Patch) -> str:
    served = service()
    pending = served.queue.submit([item(served)])
    served.queue.abandon()
    return refused(lambda: pending[0])


@says("input: int; vit-digits takes images: give a path, the bytes of a file, a Pillow image or an array")
def _number(patch: Patch) -> str:
    return refused(lambda: service().preparation.item(7))


@says("input: uint8 [2, 8, 8, 3]; an image is [height, width], or that with channels")
def _stack(patch: Patch) -> str:
    return refused(lambda: service().preparation.item(np.zeros((2, 8, 8, 3), np.uint8)))


@says("input: uint8 [0, 8]; an image is [height, width], or that with channels")
def _no_pixels(patch: Patch) -> str:
    return refused(lambda: service().preparation.item(np.zeros((0, 8), np.uint8)))


@says("input: float64 [8, 8]; an image is uint8, with values from 0 to 255: convert the array")
def _floats(patch: Patch) -> str:
    return refused(lambda: service().preparation.item(np.zeros((8, 8))))


@says("inputs[0]: pixel_values has values that no image of 8 bits a value gives; …")
def _values(patch: Patch) -> str:
    values = np.full((1, 1, 8, 8), 0.1234, np.float32)
    return refused(lambda: service().preparation.arrays({"pixel_values": values}, "inputs"))
