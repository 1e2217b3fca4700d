"""Test the routes over HTTP: answers compared with transformers, and a sentence for each wrong request."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import re
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import prometheus_client.parser
import pytest
import torch
import transformers
from http_client import ServedModel, ask
from PIL import Image
from ports import free_port
from served_models import CLASSES, MOST_TOKENS, save_bert, token_ids, token_types
from waiting import LIMIT_S, until

from pipeedge.base.errors import RequestError
from pipeedge.data.defaults import default_digits
from pipeedge.observe.pipeline_state import PipelineState
from pipeedge.run.stage import Stage
from pipeedge.serve import gate, http_server, preparing
from pipeedge.serve.description import openapi_document
from pipeedge.serve.http_ends import HttpEnds
from pipeedge.transport.base import Packet

DIGITS = default_digits()
TEXTS = ("the cat sat", "a mat", "day and day and day")


def picture(number: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray((DIGITS.items[number].tensors[0][0] * 15).numpy()).save(stream, "PNG")
    return stream.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def label(number: int) -> str:
    return str(DIGITS.items[number].label)


@pytest.fixture(scope="module")
def digits() -> Iterator[ServedModel]:
    with ServedModel("-m", "vit-digits", "--max-body", "1", "--max-image-pixels", "10000") as served:
        yield served


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedModel, Any]]:
    directory = tmp_path_factory.mktemp("served") / "bert"
    reference = save_bert(directory)
    with ServedModel("-m", directory, "--max-waiting", "40") as served:
        yield served, reference


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedModel, Any]]:
    directory = tmp_path_factory.mktemp("served") / "embedder"
    reference = save_bert(directory, head=False)
    with ServedModel("-m", directory) as served:
        yield served, reference


@pytest.fixture
def going(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event without which no stage computes anything."""
    event, compute = threading.Event(), Stage.__call__

    def wait(self: Stage, packet: Packet) -> Packet:
        assert event.wait(LIMIT_S)
        return compute(self, packet)

    monkeypatch.setattr(Stage, "__call__", wait)
    return event


def vector(reference: transformers.BertModel, text: str) -> np.ndarray:
    with torch.inference_mode():
        return reference(input_ids=token_ids(text)).pooler_output[0].numpy()


def scores(reference: transformers.PreTrainedModel, *texts: str) -> np.ndarray:
    with torch.inference_mode():
        ids, types = token_ids(*texts), token_types(*texts)
        return reference(input_ids=ids, token_type_ids=types).logits[0].double().softmax(0).numpy()


# --- images -----------------------------------------------------------------------------------------


def test_an_image_in_every_form(digits: ServedModel) -> None:
    data = picture(0)
    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + data + b"\r\n--x--\r\n"
    )
    for reply in (
        digits.post("/classify", data, content_type="image/png"),
        digits.post("/classify", data),
        digits.post("/", data),
        digits.post("/classify", {"inputs": data_url(data)}),
        digits.post("/classify", {"inputs": base64.b64encode(data).decode()}),
        digits.post("/classify", form, content_type="multipart/form-data; boundary=x"),
    ):
        assert reply.status == 200, reply.body
        assert reply.json[0]["label"] == label(0)
        assert len(reply.json) == 5
    every = digits.post("/classify?top=10", data).json
    assert sum(one["score"] for one in every) == pytest.approx(1)


def test_of_several_images_a_bad_one_fails_alone(digits: ServedModel) -> None:
    images = [data_url(picture(0)), "no base64!", data_url(b"no image"), data_url(picture(3))]
    reply = digits.post("/classify", {"inputs": images})
    assert reply.status == 200
    first, second, third, fourth = reply.json
    assert (first[0]["label"], fourth[0]["label"]) == (label(0), label(3))
    assert second == {"error": "image 1: is neither a data URL nor base64"}
    assert third == {"error": "image 2: cannot be read as an image (its format is not known)"}


def test_an_image_that_does_not_fit_the_memory_fails_alone(
    digits: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = preparing.decode_image

    def lacking(stream: io.BytesIO, name: str, max_pixels: int | None) -> Image.Image:
        if name.endswith("1"):
            raise MemoryError
        return decode(stream, name, max_pixels)

    monkeypatch.setattr(preparing, "decode_image", lacking)
    reply = digits.post("/classify", {"inputs": [data_url(picture(0)), data_url(picture(1))]})
    assert reply.status == 200
    good, bad = reply.json
    assert good[0]["label"] == label(0)
    assert bad == {"error": "image 1: not enough memory for this image; make it smaller"}
    alone = digits.post("/classify", {"inputs": ["x", data_url(picture(1))]}).json
    assert alone[1] == bad


def large_picture() -> bytes:
    stream = io.BytesIO()
    Image.new("L", (4000, 4000)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("path", "body", "status", "line"),
    [
        ("/classify", b"", 400, "image 0: cannot be read as an image"),
        ("/classify", b"GIF89a", 400, "image 0: cannot be read as an image"),
        ("/classify", large_picture(), 400, "image 0: 4000 x 4000 are 16,000,000 pixels, more than 10,000"),
        ("/classify", bytes(1_100_000), 413, "the request is larger than 1,048,576 bytes"),
        ("/classify", {"inputs": []}, 400, "the request does not fit: Expected `array` of length >= 1"),
        ("/classify", {}, 400, "the request does not fit: Object missing required field `inputs`"),
        ("/classify?top=0", picture(0), 400, "top must be a number of classes"),
        ("/predict", {"inputs": "a"}, 400, "vit-digits takes images: POST the picture itself to / or /"),
        ("/predict", picture(0), 400, "vit-digits takes images: POST the picture itself to / or /classify"),
        ("/embed", {"inputs": "a"}, 400, "vit-digits classifies: ask /classify"),
        ("/v1/embeddings", {"input": "a"}, 400, "vit-digits classifies: ask /classify"),
        ("/nothing", {}, 404, "there is no such route"),
        (
            "/v2/models/vit-digits/infer",
            {
                "inputs": [
                    {
                        "name": "pixel_values",
                        "shape": [1, 1, 8, 8],
                        "datatype": "FP32",
                        "data": [0.1234] * 64,
                    }
                ]
            },
            400,
            "pixel_values has values that no image of 8 bits a value gives; send the image$",
        ),
        (
            "/classify",
            {"inputs": ["a"] * 2049},
            400,
            "2,049 items in one request: at most 2,048 are answered",
        ),
        (
            "/classify",
            {"inputs": "data:text/html,<b>"},
            400,
            "^image 0: a data URL must be data:image/...;base64,...",
        ),
        ("/classify", {"inputs": "data:text/html;base64,PGI+"}, 400, "image 0: cannot be read as an image"),
        (
            "/v2/models/vit-digits/infer",
            {"inputs": [{"name": "image", "shape": [], "datatype": "BYTES", "data": "a"}]},
            400,
            "image must be BYTES",
        ),
        (
            "/v2/models/vit-digits/infer",
            b'{"inputs": [{"name": "image", "shape": [1], "datatype": "FP32", "data": '
            + b"[" * 99_999
            + b"]" * 99_999
            + b"}]}",
            400,
            "the request is not JSON: maximum recursion depth exceeded",
        ),
        ("/v2/models/..%2f..%2fetc%2fpasswd/infer", {}, 404, "there is no such model"),
    ],
)
def test_a_wrong_request_gets_a_sentence(
    digits: ServedModel, path: str, body: object, status: int, line: str
) -> None:
    reply = digits.post(path, body)
    assert reply.status == status, reply.body
    assert re.search(line, reply.line), reply.line


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/classify", {"POST"}),
        ("DELETE", "/", {"GET", "HEAD", "POST"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("GET", "/v2/models/vit-digits/infer", {"POST"}),
        ("GET", "/v2/models/vit-digits/versions/1/infer", {"POST"}),
        ("POST", "/v2/models/vit-digits/ready", {"GET", "HEAD"}),
    ],
)
def test_another_method_is_refused_with_those_that_the_path_has(
    digits: ServedModel, method: str, path: str, allowed: set[str]
) -> None:
    reply = ask(digits.port, method, path, b"")
    assert (reply.status, reply.line) == (405, "not with this method")
    assert set(reply.headers["allow"].split(", ")) == allowed


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged, but not what asyncio says of connections that other tests have left."""
    return [each.getMessage() for each in caplog.records if each.name != "asyncio"]


def test_a_broken_form_gets_a_sentence(digits: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    kind = "multipart/form-data; boundary=x"
    for body in (
        b"no form",
        b"--x\r\n\r\n",
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n--x--\r\n',
    ):
        reply = digits.post("/classify", body, content_type=kind)
        assert reply.status == 400, reply.body
        assert "form" in reply.line
    part = b'--x\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\n' + picture(0) + b"\r\n"
    whole = part + part + b"--x--\r\n"
    assert len(digits.post("/classify", whole, content_type=kind).json) == 2
    for cut in (len(whole) - len(b"--\r\n"), len(whole) - len(b"--x--\r\n"), len(part) + 90, len(part) + 9):
        reply = digits.post("/classify", whole[:cut], content_type=kind)
        assert reply.status == 400
        assert reply.line == "the form cannot be read: it is cut off before its closing boundary"
    assert logged(caplog) == []  # or strangers would fill the log


# --- sentences --------------------------------------------------------------------------------------


def test_predict_as_text_embeddings_inference_has_it(classifier: tuple[ServedModel, Any]) -> None:
    served, reference = classifier
    one = served.post("/predict", {"inputs": TEXTS[0]}).json
    assert {each["label"]: each["score"] for each in one} == pytest.approx(
        dict(zip(CLASSES, scores(reference, TEXTS[0]), strict=True)), abs=1e-5
    )
    assert [each["score"] for each in one] == sorted((each["score"] for each in one), reverse=True)
    assert served.post("/", {"inputs": TEXTS[0]}).json == [one]  # a list for each text
    pair = served.post("/predict", {"inputs": [TEXTS[0], TEXTS[1]]}).json
    assert pair[0]["score"] == pytest.approx(scores(reference, *TEXTS[:2]).max(), abs=1e-5)
    batch = served.post("/predict", {"inputs": [[TEXTS[1]], [TEXTS[0], TEXTS[1]], TEXTS[2]]}).json
    for each, texts in zip(batch, ([TEXTS[1]], TEXTS[:2], [TEXTS[2]]), strict=True):
        assert each[0]["score"] == pytest.approx(scores(reference, *texts).max(), abs=1e-5)
    raw = served.post("/predict", {"inputs": TEXTS[0], "raw_scores": True}).json
    with torch.inference_mode():
        logits = reference(input_ids=token_ids(TEXTS[0])).logits[0]
    assert raw[0]["score"] == pytest.approx(float(logits.max()), abs=1e-5)


def test_embeddings(embedder: tuple[ServedModel, Any]) -> None:
    served, reference = embedder
    expected = [vector(reference, text) for text in TEXTS]
    reply = served.post("/v1/embeddings", {"input": list(TEXTS), "model": "embedder"}).json
    assert [each["index"] for each in reply["data"]] == [0, 1, 2]
    np.testing.assert_allclose([each["embedding"] for each in reply["data"]], expected, atol=1e-5)
    assert reply["usage"]["total_tokens"] == sum(token_ids(text).numel() for text in TEXTS)
    encoded = served.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json
    found = np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(found, expected[0], atol=1e-5)
    for ids in (token_ids(TEXTS[0])[0].tolist(), token_ids(TEXTS[0]).tolist()):
        reply = served.post("/v1/embeddings", {"input": ids}).json
        np.testing.assert_allclose(reply["data"][0]["embedding"], expected[0], atol=1e-5)
    plain = served.post("/embed", {"inputs": list(TEXTS), "normalize": False}).json
    np.testing.assert_allclose(plain, expected, atol=1e-5)
    unit = served.post("/embed", {"inputs": TEXTS[0]}).json
    np.testing.assert_allclose(unit, [expected[0] / np.linalg.norm(expected[0])], atol=1e-5)
    assert served.post("/", {"inputs": TEXTS[0]}).json == unit


def test_rerank(tmp_path: Path) -> None:
    reference = save_bert(tmp_path / "ranker", classes=1)
    with torch.inference_mode():
        logits = [
            float(reference(input_ids=token_ids("cat", text), token_type_ids=token_types("cat", text)).logits)
            for text in TEXTS
        ]
    order = sorted(range(len(TEXTS)), key=lambda index: -logits[index])
    with ServedModel("-m", tmp_path / "ranker") as served:
        found = served.post("/rerank", {"query": "cat", "texts": list(TEXTS), "return_text": True}).json
        raw = served.post("/rerank", {"query": "cat", "texts": list(TEXTS), "raw_scores": True}).json
    assert [each["index"] for each in found] == [each["index"] for each in raw] == order
    assert [each["text"] for each in found] == [TEXTS[index] for index in order]
    assert [each["score"] for each in raw] == pytest.approx([logits[index] for index in order], abs=1e-5)
    assert found[0]["score"] == pytest.approx(1 / (1 + np.exp(-max(logits))), abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        ("/predict", {"inputs": ""}, r"inputs\[0\]: the sentence is empty"),
        ("/predict", {"inputs": [["a", "b"], ["", "b"]]}, r"inputs\[1\]: the first sentence of this pair is"),
        (
            "/predict",
            {"inputs": "cat " * 99},
            rf"inputs\[0\]: more than the {MOST_TOKENS} tokens .*; shorten it, or set truncate$",
        ),
        ("/", {"inputs": []}, "Expected `array` of length >= 1"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, r"inputs\[0\]: 3 texts; give one, or a pair"),
        ("/predict", {"inputs": []}, "Expected `array` of length >= 1"),
        ("/predict", {"inputs": 3}, "the request does not fit"),
        ("/predict", b'{"inputs": ', "the request is not JSON"),
        ("/predict", b"[" * 100_000, "the request (is not JSON|does not fit)"),
        ("/predict", b'{"inputs": "\xff"}', "the request is not JSON"),
        ("/predict", b'{"inputs": "a \\udc80 cat"}', "the request is not JSON"),
        ("/rerank", {"query": "a", "texts": ["b"]}, "does not rank"),
        ("/embed", {"inputs": "a"}, "classifies: ask /predict"),
        ("/classify", b"x", "takes sentences: ask /predict"),
    ],
)
def test_a_wrong_sentence_gets_one(
    classifier: tuple[ServedModel, Any], path: str, body: object, line: str
) -> None:
    reply = classifier[0].post(path, body)
    assert reply.status == 400
    assert re.search(line, reply.line), reply.line


def test_a_long_sentence_is_truncated_on_request(
    classifier: tuple[ServedModel, Any], caplog: pytest.LogCaptureFixture
) -> None:
    served, reference = classifier
    reply = served.post("/predict", {"inputs": "cat " * 99, "truncate": True})
    expected = scores(reference, " ".join(["cat"] * (MOST_TOKENS - 2)))
    assert reply.json[0]["score"] == pytest.approx(expected.max(), abs=1e-5)
    assert logged(caplog) == []


def test_too_many_texts_are_refused_before_any_is_looked_at(classifier: tuple[ServedModel, Any]) -> None:
    reply = classifier[0].post("/predict", {"inputs": [[""]] * 2049})
    assert reply.status == 400
    assert "2,049 items in one request: at most 2,048 are answered" in reply.line


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"input": "a", "encoding_format": "hex"}, "encoding_format hex"),
        ({"input": "a", "dimensions": 3}, "dimensions is not supported"),
        ({"input": []}, "the request has no inputs"),
        ({"input": "cat " * 99}, "tokens that embedder takes; shorten it$"),
        ({"input": [3, "a"]}, r"input\[0\]: is a single number"),
        ({"input": [[9999]]}, "input_ids has 9999"),
        ({"input": [2**70]}, r"input\[0\]: a token id is not a number of 64 bits"),
    ],
)
def test_errors_of_embeddings_have_the_form_of_openai(
    embedder: tuple[ServedModel, Any], body: object, line: str
) -> None:
    reply = embedder[0].post("/v1/embeddings", body)
    assert reply.status == 400
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert re.search(line, reply.json["error"]["message"])


# --- the Open Inference Protocol ----------------------------------------------------------------------


def tensor(name: str, datatype: str, shape: list[int], **more: object) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


def infer(served: ServedModel, name: object, inputs: list[dict[str, object]], rest: bytes = b"") -> Any:
    head = json.dumps({"inputs": inputs, "id": "7"}).encode()
    headers = {"inference_header_content_length": str(len(head))} if rest else {}
    return served.post(f"/v2/models/{name}/infer", head + rest, **headers)


def test_inference_of_tensors(classifier: tuple[ServedModel, Any]) -> None:
    served, reference = classifier
    name = served.get("/status").json["model"]
    described = served.get(f"/v2/models/{name}").json
    assert {each["name"] for each in described["inputs"]} >= {"text", "input_ids"}
    with torch.inference_mode():
        expected = [reference(input_ids=token_ids(text)).logits[0].numpy() for text in TEXTS]
    packed = b"".join(len(text).to_bytes(4, "little") + text.encode() for text in TEXTS)
    ids = token_ids(TEXTS[0])
    for inputs, rest, count in (
        ([tensor("text", "BYTES", [3], data=list(TEXTS))], b"", 3),
        ([tensor("text", "BYTES", [3, 1], data=[[text] for text in TEXTS])], b"", 3),
        ([tensor("text", "BYTES", [3], parameters={"binary_data_size": len(packed)})], packed, 3),
        ([tensor("input_ids", "INT64", list(ids.shape), data=ids.tolist())], b"", 1),
        (
            [tensor("input_ids", "INT64", list(ids.shape), parameters={"binary_data_size": ids.nbytes})],
            ids.numpy().tobytes(),
            1,
        ),
    ):
        reply = infer(served, name, inputs, rest)
        assert reply.status == 200, reply.body
        assert (reply.json["id"], reply.json["model_name"]) == ("7", name)
        (output,) = reply.json["outputs"]
        found = np.array(output["data"]).reshape(output["shape"])
        np.testing.assert_allclose(found, expected[:count], atol=1e-5)
    for path in ("/v2/health/live", "/v2/health/ready", f"/v2/models/{name}/ready", "/v2"):
        assert served.get(path).status == 200
    for version in described["versions"]:
        assert served.get(f"/v2/models/{name}/versions/{version}").json == described
        assert served.get(f"/v2/models/{name}/versions/{version}/ready").status == 200
    assert served.get(f"/v2/models/{name}/versions/2").status == 404
    assert served.get("/v2/models/other").status == 404


def test_inference_of_images(digits: ServedModel) -> None:
    data = picture(0)
    packed = len(data).to_bytes(4, "little") + data
    reply = infer(
        digits,
        "vit-digits",
        [tensor("image", "BYTES", [1], parameters={"binary_data_size": len(packed)})],
        packed,
    )
    assert str(np.argmax(reply.json["outputs"][0]["data"])) == label(0)
    pixels = DIGITS.items[0].tensors[0].float() * 15 / 127.5 - 1
    reply = infer(
        digits, "vit-digits", [tensor("pixel_values", "FP32", [1, 1, 8, 8], data=pixels.flatten().tolist())]
    )
    assert str(np.argmax(reply.json["outputs"][0]["data"])) == label(0)


@pytest.mark.parametrize(
    ("inputs", "rest", "line"),
    [
        ([], b"", "Expected `array` of length >= 1"),
        ([tensor("text", "BYTES", [2], data=["a"])], b"", r"text: 1 values do not fit the shape \[2\]"),
        ([tensor("text", "BYTES", [1])], b"", "text: has neither data nor binary_data_size"),
        (
            [tensor("text", "BYTES", [1], parameters={"binary_data_size": 5})],
            b"\xff\0\0\0a",
            "a string is longer",
        ),
        ([tensor("text", "BYTES", [1], parameters={"binary_data_size": 5})], b"\1\0\0\0\xff", "is not UTF-8"),
        (
            [tensor("text", "BYTES", [1], parameters={"binary_data_size": 7})],
            b"\3\0\0\0\xed\xa0\x80",  # half of a surrogate pair
            "is not UTF-8",
        ),
        ([tensor("text", "BYTES", [1], data=["a"])], b"x", "1 bytes follow that belong to no input"),
        ([tensor("text", "FP8", [1], data=[1])], b"", "datatype FP8 is not supported"),
        ([tensor("text", "INT64", [1], data=[1])], b"", "text must be BYTES"),
        ([tensor("input_ids", "INT64", [1, 1], data=["a"])], b"", "'a' is not a whole number, as INT64"),
        ([tensor("input_ids", "INT64", [1, 1], data=[[[1, 2], [3]]])], b"", "input_ids"),
        ([tensor("words", "BYTES", [1], data=["a"])], b"", "no input is called text"),
        ([tensor("text", "BYTES", [1], data=["a"])] * 2, b"", "two inputs have this name"),
    ],
)
def test_a_wrong_tensor_gets_a_sentence(
    classifier: tuple[ServedModel, Any], inputs: list[dict[str, object]], rest: bytes, line: str
) -> None:
    served = classifier[0]
    reply = infer(served, served.get("/status").json["model"], inputs, rest)
    assert reply.status == 400, reply.body
    assert re.search(line, reply.line), reply.line


# --- the service ---------------------------------------------------------------------------------------


def test_health_metrics_and_descriptions(digits: ServedModel) -> None:
    digits.post("/classify", picture(0))
    digits.post("/nothing-like-it/<script>", {})
    assert digits.get("/health").json == {"status": "ok"}
    families = list(
        prometheus_client.parser.text_string_to_metric_families(digits.get("/metrics").body.decode())
    )
    samples = {
        (one.name, one.labels.get("route")): one.value for family in families for one in family.samples
    }
    assert samples["pipeedge_requests_total", "/classify"] >= 1
    assert samples["pipeedge_items_answered_total", None] >= 1
    assert samples["pipeedge_request_seconds_count", None] >= 1
    assert not any("script" in str(key) for key in samples)
    paths = digits.get("/openapi.json").json["paths"]
    assert "post" in paths["/v1/embeddings"]
    assert "requestBody" in paths["/rerank"]["post"]
    stages = digits.get("/status").json["stages"]
    assert [stage["layers"] for stage in stages] == ["layers 1-16"]
    page = digits.get("/")
    assert "vit-digits" in page.body.decode()
    assert "nonce-" in page.headers["content-security-policy"]


def test_routes_are_described_for_people_without_loading_anything(digits: ServedModel) -> None:
    page = digits.get("/docs", host="a<script>'.localhost")
    text = page.body.decode()
    assert page.status == 200
    for path, methods in openapi_document("vit-digits", needs_key=False)["paths"].items():
        for method in methods:
            assert f">{method.upper()}</span> <code>{path}</code>" in text
    assert "<script" not in text
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:|//)|@import|url\(""", text)
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_the_name_of_a_model_is_escaped_and_has_no_path(tmp_path: Path) -> None:
    model = tmp_path / "<b>bert"
    save_bert(model)
    with ServedModel("-m", model) as served:
        page = served.get("/").body.decode()
        long = {"inputs": " ".join(["cat"] * 2 * MOST_TOKENS)}
        replies = [page, served.get("/status").body.decode(), served.post("/predict", long).line]
        replies += [
            served.get(f"/v2/models/{quote(name)}").body.decode() for name in (model.name, str(model))
        ]
        assert served.get(f"/v2/models/{quote(str(model.parent))}").status == 404
    assert "&lt;b&gt;bert" in page
    assert "<b>bert" not in page
    assert all("bert" in reply and str(tmp_path) not in reply for reply in replies)


def test_only_those_with_a_key_are_answered(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\n\nsecond\n")
    with ServedModel("-m", "vit-digits", "--api-key", tmp_path / "keys") as served:
        assert served.get("/health").status == 200
        for path in ("/", "/docs", "/openapi.json"):
            assert served.get(path).status == 200
        for header in ({}, {"authorization": "Bearer third"}, {"authorization": "Basic first"}):
            refused = served.post("/classify", picture(0), **header)
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert "send Authorization: Bearer KEY" in refused.line
            assert served.post("/", picture(0), **header).status == 401
            assert served.get("/metrics", **header).status == 401
        for key in ("first", "second"):
            assert served.post("/classify", picture(0), authorization=f"Bearer {key}").status == 200


def counts(served: ServedModel) -> tuple[int, int]:
    """Return how many items wait, and how many are under way."""
    queue = served.get("/status").json["queue"]
    return queue["waiting"], queue["under_way"]


def test_a_full_queue_says_when_to_try_again(going: threading.Event) -> None:
    with ServedModel("-m", "vit-digits", "-u", "1", "--max-waiting", "2") as served:
        replies: list[Any] = []
        threads = [
            threading.Thread(target=lambda: replies.append(served.post("/classify", picture(0))))
            for _ in range(3)
        ]
        for expected, thread in zip([(0, 1), (1, 1), (2, 1)], threads, strict=True):
            thread.start()
            until(lambda expected=expected: counts(served) == expected, f"{expected} wait and are under way")
        full = served.post("/classify", picture(0))
        assert full.status == 429
        assert 1 <= int(full.headers["retry-after"]) <= 60
        assert "2 requests wait already" in full.line
        going.set()
        for thread in threads:
            thread.join(LIMIT_S)
        assert [reply.status for reply in replies] == [200] * 3


def test_a_deadline_and_a_client_that_leaves(going: threading.Event) -> None:
    with ServedModel("-m", "vit-digits", "-u", "1") as served:
        late = served.post("/classify", picture(0), x_request_timeout="0.2")
        assert late.status == 504
        assert late.line == "the request was not answered within 0.2 s"
        assert served.post("/classify", picture(0), x_request_timeout="soon").status == 400
        data = picture(0)
        with socket.create_connection(("127.0.0.1", served.port), LIMIT_S) as client:
            head = b"POST /classify HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(data)
            client.sendall(head + data)
            until(lambda: counts(served) == (1, 1), "the request waits, and the late one is under way")
        until(lambda: served.get("/status").json["queue"]["failed"] == 2, "the client's leaving is noticed")
        going.set()
        assert served.post("/classify", data).status == 200


@pytest.mark.parametrize("parser", ["httptools", "h11"])
def test_slow_clients_and_floods_are_cut_off(monkeypatch: pytest.MonkeyPatch, parser: str) -> None:
    if parser == "httptools":
        pytest.importorskip("httptools")
    connection = http_server.connection_class(parser)
    monkeypatch.setattr(http_server, "connection_class", lambda: connection)
    monkeypatch.setattr(http_server, "_MAX_CONNECTIONS", 20)
    with ServedModel("-m", "vit-digits", "--request-timeout", "1") as served:

        def answer(sent: bytes) -> bytes:
            with socket.create_connection(("127.0.0.1", served.port), LIMIT_S) as client:
                received = b""
                with contextlib.suppress(ConnectionError):
                    client.sendall(sent)
                    while part := client.recv(1 << 16):
                        received += part
                return received

        with monkeypatch.context() as patch:
            patch.setattr(http_server, "_HEADERS_S", 0.1)
            assert answer(b"") == b""  # says nothing
            assert answer(b"POST /classify HT") == b""
        slow = answer(b"POST /classify HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nabc")
        assert b" 408 " in slow
        assert b"did not come within 1 s" in slow
        with monkeypatch.context() as patch:
            patch.setattr(gate, "_SLOW_START_S", 0.1)
            slow = answer(b"POST /classify HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nabc")
        assert b" 408 " in slow
        assert b"came more slowly than 4,096 bytes a second" in slow
        for flood in (b"x: y\r\n" * 200, b"x: " + b"y" * 20_000 + b"\r\n"):
            assert b" 431 " in answer(b"GET / HTTP/1.1\r\nhost: localhost\r\n" + flood + b"\r\n")
        assert b" 200 " not in answer(b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 100_000)
        assert b" 400 " in answer(b"\x16\x03\x01 no HTTP\r\n\r\n")
        crowd = [socket.create_connection(("127.0.0.1", served.port), LIMIT_S) for _ in range(40)]
        for client in crowd:
            client.close()

        def answers() -> bool:
            # Some of the crowd may still be there.
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                return served.post("/classify", picture(0)).status == 200
            return False

        until(answers, "an answer after the crowd")


def test_a_client_that_reads_no_replies_is_dropped(
    digits: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_UNREAD_S", 0.1)
    request = b"GET /docs HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", digits.port))
        client.setblocking(False)
        poll = select.poll()
        poll.register(client, select.POLLIN)

        def dropped() -> bool:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                client.send(request * 100)
            return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))

        until(dropped, "the end of the connection")
    assert digits.post("/classify", picture(0)).status == 200


@pytest.mark.parametrize(
    "sent", [b"", b"POST /classify HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999\r\n\r\nabc"]
)
def test_connections_without_a_request_keep_nobody_out(
    digits: ServedModel, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_server, "_MAX_CONNECTIONS", 20)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", digits.port), LIMIT_S))
            with contextlib.suppress(ConnectionError):
                client.sendall(sent)
        assert digits.post("/classify", picture(0)).status == 200


def test_what_is_accepted_is_answered_before_the_end(going: threading.Event) -> None:
    with ServedModel("-m", "vit-digits", "-u", "1") as served:
        replies: list[Any] = []
        thread = threading.Thread(target=lambda: replies.append(served.post("/classify", picture(0))))
        thread.start()
        until(lambda: served.get("/status").json["queue"]["under_way"] == 1, "the request")
        ending = threading.Thread(target=served.drain)
        ending.start()
        # What is asked before the draining begins would wait like the first.
        late = {"x_request_timeout": "0.1"}
        until(lambda: served.post("/classify", picture(0), **late).status == 503, "the end of acceptance")
        going.set()
        thread.join(LIMIT_S)
        ending.join(LIMIT_S)
    assert [reply.status for reply in replies] == [200]
    assert served.failure is None


def test_the_stages_are_known_before_anybody_can_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def note(kind: type, name: str) -> None:
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *given: (heard.append(name), method(*given)))

    note(PipelineState, "planned")
    note(http_server.HttpServer, "start")
    with ServedModel("-m", "vit-digits") as served:
        assert [stage["rank"] for stage in served.get("/status").json["stages"]] == [0]
    assert heard == ["planned", "start"]


def test_connections_are_known_to_be_tcp() -> None:
    """Or asyncio leaves them with Nagle's algorithm, which holds back the end of a reply for 40 ms."""
    with http_server.open_listener("127.0.0.1", free_port()) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with client, accepted:
            assert accepted.proto == socket.IPPROTO_TCP


def test_a_port_that_is_taken_is_refused_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        served = ServedModel("-m", "vit-digits")
        served.port = other.getsockname()[1]
        with pytest.raises(RequestError, match=r"--serve 127.0.0.1:\d+: cannot listen there"):
            http_server.open_listener("127.0.0.1", served.port)


def test_a_service_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    served = ServedModel("-m", "vit-digits")
    with pytest.raises(RequestError, match=r"needs the package starlette: pip install 'pipeedge\[serve\]'"):
        HttpEnds(print).open(served._requests[0], None)  # type: ignore[arg-type]
