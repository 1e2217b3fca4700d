"""Test that every field of a request is obeyed or refused, and what other servers' clients ask besides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import served_models
import torch
import transformers
from http_client import ServedModel, ask
from huggingface_hub import InferenceClient, constants
from huggingface_hub.errors import BadRequestError
from served_models import MOST_TOKENS, save_bert, token_ids, token_types
from test_serving import TEXTS, data_url, label, picture, tensor

from pipeedge.serve.description import openapi_document

Served = tuple[ServedModel, Any]
NLI = ("contradiction", "neutral", "entailment")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Any]]]:
    """Return a directory for each kind of model of sentences, with what transformers computes."""
    parent = tmp_path_factory.mktemp("fields")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_models, "CLASSES", NLI)
        kinds = {
            "nli": {},
            "embedder": {"head": False},
            "ranker": {"classes": 1},
        }
        yield {name: (parent / name, save_bert(parent / name, **options)) for name, options in kinds.items()}


@pytest.fixture(scope="module")
def digits() -> Iterator[ServedModel]:
    with ServedModel("-m", "vit-digits") as served:
        yield served


@pytest.fixture(scope="module")
def nli(directories: dict[str, tuple[Path, Any]]) -> Iterator[Served]:
    directory, reference = directories["nli"]
    with ServedModel("-m", directory) as served:
        yield served, reference


@pytest.fixture(scope="module")
def embedder(directories: dict[str, tuple[Path, Any]]) -> Iterator[Served]:
    directory, reference = directories["embedder"]
    with ServedModel("-m", directory, "--max-waiting", "64") as served:
        yield served, reference


@pytest.fixture(scope="module")
def ranker(directories: dict[str, tuple[Path, Any]]) -> Iterator[Served]:
    directory, reference = directories["ranker"]
    with ServedModel("-m", directory) as served:
        yield served, reference


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        constants, "HF_HUB_OFFLINE", False
    )  # clients of Hugging Face ask the test's own server


def hub(served: ServedModel) -> InferenceClient:
    return InferenceClient(f"http://127.0.0.1:{served.port}", provider="hf-inference")


def logits(reference: Any, *texts: str) -> np.ndarray:
    with torch.inference_mode():
        ids, types = token_ids(*texts), token_types(*texts)
        return reference(input_ids=ids, token_type_ids=types).logits[0].double().numpy()


def vector(reference: Any, text: str) -> np.ndarray:
    with torch.inference_mode():
        return reference(input_ids=token_ids(text)).pooler_output[0].numpy()


# --- what is not known ------------------------------------------------------------------------------

DOCUMENT = openapi_document("m", needs_key=False)
ROUTES = [(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods]


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[" ".join(route) for route in ROUTES])
def test_unknown_parameters_and_fields_are_refused_with_their_name(
    digits: ServedModel, method: str, path: str
) -> None:
    name = path.replace("{model}", "vit-digits")
    body = DOCUMENT["paths"][path][method].get("requestBody", {}).get("content", {}).get("application/json")
    refused = ask(digits.port, method.upper(), f"{name}?bogus=1", body and body["example"])
    assert (refused.status, "bogus" in refused.line) == (400, True)
    if body and path != "/":
        refused = ask(digits.port, "POST", name, {**body["example"], "bogus": 1})
        assert (refused.status, "`bogus`" in refused.line or "takes images" in refused.line) == (400, True)


@pytest.mark.parametrize(
    ("path", "more", "line"),
    [
        ("/", {"bogus": 1}, "unknown field `bogus`"),
        ("/", {"parameters": {"bogus": 1}}, "unknown field `bogus` - at `$.parameters`"),
        ("/", {"normalize": True}, "unknown field `normalize`"),
        ("/predict", {"parameters": {"top_k": 0}}, "`$.parameters.top_k`"),
        ("/predict", {"truncation_direction": "left"}, "`$.truncation_direction`"),
        ("/predict", {"parameters": {"multi_label": True}}, "multi_label needs candidate_labels"),
        (
            "/predict",
            {"parameters": {"hypothesis_template": "{}"}},
            "hypothesis_template needs candidate_labels",
        ),
        ("/predict?top=0", {}, "top must be a number of classes, at least 1"),
        ("/predict?top=" + "9" * 5000, {}, "top must be a number of classes, at least 1"),
        ("/predict?top=1&top=2", {}, "top is given twice"),
        ("/predict?top=1", {"parameters": {"top_k": 1}}, "top is given twice: give it once, or top_k alone"),
        (
            "/predict",
            {"raw_scores": True, "parameters": {"function_to_apply": "none"}},
            "raw_scores and function_to_apply do not go together",
        ),
        (
            "/predict",
            {"raw_scores": True, "parameters": {"candidate_labels": ["cat"]}},
            "raw_scores and candidate_labels do not go together",
        ),
        (
            "/predict",
            {"parameters": {"candidate_labels": ["cat"], "function_to_apply": "none"}},
            "function_to_apply and candidate_labels do not go together",
        ),
        (
            "/predict",
            {"parameters": {"candidate_labels": ["cat", " "]}},
            "candidate_labels: one of them is empty",
        ),
        (
            "/predict",
            {"parameters": {"candidate_labels": ["cat"], "hypothesis_template": "a"}},
            "hypothesis_template a: has no {} in place of the class",
        ),
        (
            "/predict",
            {"inputs": ["a", "b"], "parameters": {"candidate_labels": ["cat"]}},
            "inputs[0]: 2 texts; give one with candidate_labels",
        ),
    ],
)
def test_fields_of_classification_that_cannot_be_obeyed(
    nli: Served, path: str, more: dict[str, object], line: str
) -> None:
    reply = nli[0].post(path, {"inputs": "a cat", **more})
    assert reply.status == 400
    assert line in reply.line


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        (
            "/v1/embeddings",
            {"input": "a", "model": "ada"},
            "model ada is not served: ask for embedder, or for none",
        ),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions is not supported"),
        ("/v1/embeddings", {"input": "a", "bogus": 3}, "`bogus`"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, "prompt_name is not supported"),
        ("/embed", {"inputs": "a", "truncation_direction": "Left"}, "`$.truncation_direction`"),
        ("/?top=3", {"inputs": "a"}, "top: embedder gives vectors, which have no classes"),
        ("/", {"inputs": "a", "raw_scores": True}, "`raw_scores`"),
        ("/", {"inputs": "a", "parameters": {"candidate_labels": ["b"]}}, "`candidate_labels`"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "`$.inputs.sentences`"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": [""]}},
            "sentences[0]: the sentence is",
        ),
    ],
)
def test_fields_of_embeddings_that_cannot_be_obeyed(
    embedder: Served, path: str, body: dict[str, object], line: str
) -> None:
    reply = embedder[0].post(path, body)
    assert reply.status == 400
    assert line in reply.line


def test_forms_have_files_alone(digits: ServedModel) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="'
    form = head + b'a"; filename="a"\r\n\r\n' + picture(0) + b"\r\n" + head + b'top"\r\n\r\n3\r\n--x--\r\n'
    reply = digits.post("/classify", form, content_type="multipart/form-data; boundary=x")
    assert (reply.status, "has a field top, which is no file" in reply.line) == (400, True)


# --- what is obeyed ---------------------------------------------------------------------------------


def test_classes_are_as_many_and_scored_as_asked(nli: Served, digits: ServedModel) -> None:
    served, reference = nli
    expected = logits(reference, TEXTS[0])
    best = int(expected.argmax())
    for function, scores in {
        "softmax": np.exp(expected) / np.exp(expected).sum(),
        "sigmoid": 1 / (1 + np.exp(-expected)),
        "none": expected,
    }.items():
        (found,) = hub(served).text_classification(TEXTS[0], top_k=1, function_to_apply=function)
        assert (found.label, found.score) == (NLI[best], pytest.approx(scores[best], abs=1e-5))
    assert len(served.post("/predict?top=2", {"inputs": TEXTS[0]}).json) == 2
    assert len(served.post("/predict", {"inputs": TEXTS[0], "parameters": {"top_k": 9}}).json) == 3
    found = hub(digits).image_classification(picture(0), top_k=2)
    assert (found[0].label, len(found)) == (label(0), 2)
    assert (
        len(digits.post("/classify", {"inputs": [data_url(picture(0))], "parameters": {"top_k": 3}}).json[0])
        == 3
    )


def test_zero_shot_classification_is_that_of_transformers(
    nli: Served, directories: dict[str, tuple[Path, Any]], digits: ServedModel, embedder: Served
) -> None:
    served, reference = nli
    reference.config.label2id = {name: number for number, name in enumerate(NLI)}
    pipeline = transformers.ZeroShotClassificationPipeline(
        model=reference, tokenizer=transformers.BertTokenizer.from_pretrained(directories["nli"][0])
    )
    labels, template = ["cat", "mat", "day"], "a {}"
    for multi_label in (False, True):
        expected = pipeline(TEXTS[0], labels, hypothesis_template=template, multi_label=multi_label)
        found = hub(served).zero_shot_classification(
            TEXTS[0], labels, hypothesis_template=template, multi_label=multi_label
        )
        assert [one.label for one in found] == expected["labels"]
        assert [one.score for one in found] == pytest.approx(expected["scores"], abs=1e-5)
    several = served.post(
        "/", {"inputs": list(TEXTS), "parameters": {"candidate_labels": labels, "top_k": 1}}
    )
    assert [len(each) for each in several.json] == [1, 1, 1]
    with pytest.raises(BadRequestError, match="candidate_labels"):
        hub(digits).zero_shot_image_classification(picture(0), labels)
    with pytest.raises(BadRequestError, match="candidate_labels"):
        hub(embedder[0]).zero_shot_classification(TEXTS[0], labels)


def test_a_model_with_classes_of_its_own_takes_no_others(ranker: Served) -> None:
    with pytest.raises(BadRequestError, match="candidate_labels: ranker knows its own classes only"):
        hub(ranker[0]).zero_shot_classification("a cat", ["cat", "mat"])


def test_similarity_is_the_cosine_of_vectors(embedder: Served) -> None:
    served, reference = embedder
    first, *others = [vector(reference, text) for text in TEXTS]
    expected = [first @ one / np.linalg.norm(first) / np.linalg.norm(one) for one in others]
    assert hub(served).sentence_similarity(TEXTS[0], other_sentences=list(TEXTS[1:])) == pytest.approx(
        expected, abs=1e-5
    )
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": list(TEXTS[1:])}}
    assert served.post("/similarity", body).json == pytest.approx(expected, abs=1e-5)
    long = {"inputs": {"source_sentence": TEXTS[0], "sentences": ["cat " * 99]}}
    assert "set truncate" in served.post("/similarity", long).line
    assert served.post("/similarity", {**long, "parameters": {"truncate": True}}).status == 200


def test_documents_are_ranked_as_cohere_and_jina_have_it(ranker: Served) -> None:
    served, reference = ranker
    scores = [1 / (1 + np.exp(-logits(reference, "cat", text)[0])) for text in TEXTS]
    order = sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    body = {"query": "cat", "documents": documents, "model": "ranker"}
    found = served.post("/v1/rerank", body).json["results"]
    assert [each["index"] for each in found] == order
    assert [each["relevance_score"] for each in found] == pytest.approx(
        [scores[index] for index in order], abs=1e-5
    )
    (first,) = served.post("/v1/rerank", {**body, "top_n": 1, "return_documents": True}).json["results"]
    assert first["document"] == {"text": TEXTS[order[0]]}
    for wrong, line in (
        ({"top_n": 0}, "top_n"),
        ({"model": "other"}, "other is not served"),
        ({"a": 1}, "`a`"),
    ):
        assert line in served.post("/v1/rerank", {**body, **wrong}).json["error"]["message"]


def test_embeddings_of_2048_inputs_in_one_request(embedder: Served) -> None:
    """Many more than wait at a time: the request is split, and its answers come in order."""
    served, reference = embedder
    expected = [vector(reference, text) for text in TEXTS]
    inputs = [TEXTS[number % len(TEXTS)] for number in range(2048)]
    reply = served.post("/v1/embeddings", {"input": inputs, "user": "somebody"}).json
    found = np.array([each["embedding"] for each in reply["data"]])
    assert [each["index"] for each in reply["data"]] == list(range(2048))
    np.testing.assert_allclose(found, [expected[number % len(TEXTS)] for number in range(2048)], atol=1e-5)
    assert reply["usage"]["total_tokens"] == sum(token_ids(text).numel() for text in inputs)
    assert served.get("/status").json["queue"]["requests_waiting"] == 0


# --- the Open Inference Protocol --------------------------------------------------------------------


def infer(served: ServedModel, name: str, inputs: list[dict[str, object]], **more: object) -> Any:
    return served.post(f"/v2/models/{name}/infer", {"inputs": inputs, **more})


def ids(name: str = "input_ids", values: list[int] | None = None) -> dict[str, object]:
    values = values or [2, 3, 4]
    return tensor(name, "INT64", [1, len(values)], data=values)


TEXT = tensor("text", "BYTES", [1], data=["a cat"])


@pytest.mark.parametrize(
    ("inputs", "more", "line"),
    [
        (
            [ids(), ids("atention_mask", [1, 1, 0])],
            {},
            "no input is called atention_mask; nli takes input_ids",
        ),
        ([ids(), ids("labels", [1])], {}, "no input is called labels"),
        ([TEXT, ids()], {}, "input_ids: text is all that the model takes, if it is given"),
        ([TEXT], {"bogus": 1}, "`bogus`"),
        ([TEXT], {"parameters": {"priority": 1}}, "`priority` - at `$.parameters`"),
        ([{**TEXT, "bogus": 1}], {}, "`bogus` - at `$.inputs[0]`"),
        ([{**TEXT, "parameters": {"shared_memory_region": "a"}}], {}, "`shared_memory_region`"),
        ([TEXT], {"outputs": [{"name": "outputs", "parameters": {"classification": 2}}]}, "`classification`"),
        ([TEXT], {"outputs": [{"name": "outputs"}] * 2}, "`$.outputs`"),
        ([tensor("input_ids", "INT64", [1, 2], data=[2, 6.9])], {}, "6.9 is not a whole number"),
        ([tensor("text", "BYTES", [1] * 70, data=["a"])], {}, "`$.inputs[0].shape`"),
        ([tensor("text", "BYTES", [0, 2**31, 2**31], data=[])], {}, "`$.inputs[0].shape[0]`"),
        (
            [ids(), tensor("attention_mask", "INT64", [2, 3], data=[1] * 6)],
            {},
            "the arrays have different numbers of items",
        ),
    ],
)
def test_what_inference_cannot_obey_is_refused(
    nli: Served, inputs: list[dict[str, object]], more: dict[str, object], line: str
) -> None:
    reply = infer(nli[0], "nli", inputs, **more)
    assert reply.status == 400, reply.body
    assert line in reply.line


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "1e2", "\xb2", "999999"])
def test_a_wrong_length_of_the_json_is_refused(nli: Served, length: str) -> None:
    reply = nli[0].post("/v2/models/nli/infer", {"inputs": [TEXT]}, inference_header_content_length=length)
    assert (reply.status, reply.line) == (
        400,
        "the header inference-header-content-length must be the length of the JSON",
    )


def test_outputs_come_as_bytes_if_asked(nli: Served) -> None:
    served, reference = nli
    text = tensor("text", "BYTES", [1], data=[TEXTS[0]])
    for more in (
        {"parameters": {"binary_data_output": True}},
        {"outputs": [{"name": "outputs", "parameters": {"binary_data": True}}]},
    ):
        reply = infer(served, "nli", [text], **more)
        length = int(reply.headers["inference-header-content-length"])
        (output,) = json.loads(reply.body[:length])["outputs"]
        assert output["parameters"] == {"binary_data_size": len(reply.body) - length}
        found = np.frombuffer(reply.body[length:], "<f4")
        np.testing.assert_allclose(found, logits(reference, TEXTS[0]), atol=1e-5)
    both = {
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "outputs", "parameters": {"binary_data": False}}],
    }
    assert "data" in infer(served, "nli", [text], **both).json["outputs"][0]
    late = infer(served, "nli", [text], parameters={"timeout": 1})
    assert (late.status, late.line) == (504, "the request was not answered within 1e-06 s")


def test_configuration_statistics_and_index_as_triton_has_them(nli: Served) -> None:
    served, _ = nli
    before = served.get("/v2/models/stats").json["model_stats"][0]
    infer(served, "nli", [TEXT])
    assert infer(served, "nli", [tensor("text", "BYTES", [1], data=[""])]).status == 400
    for path in ("/v2/models/stats", "/v2/models/nli/stats", "/v2/models/nli/versions/1/stats"):
        (found,) = served.get(path).json["model_stats"]
        assert (found["name"], found["version"]) == ("nli", "1")
        for outcome in ("success", "fail"):
            counts = [each["inference_stats"][outcome] for each in (before, found)]
            assert counts[1]["count"] == counts[0]["count"] + 1
            assert counts[1]["ns"] > counts[0]["ns"]
        assert found["inference_count"] == before["inference_count"] + 1
        assert found["last_inference"] > 0
    config = served.get("/v2/models/nli/config").json
    assert config == served.get("/v2/models/nli/versions/1/config").json
    assert config["input"][0] == {"name": "text", "data_type": "TYPE_STRING", "dims": [1], "optional": True}
    assert config["output"] == [{"name": "outputs", "data_type": "TYPE_FP32", "dims": [-1]}]
    ready = {"name": "nli", "version": "1", "state": "READY"}
    for body in (b"", {}, {"ready": True}):
        assert served.post("/v2/repository/index", body).json == [ready]
    for path in ("/v2/models/other/config", "/v2/models/other/stats"):
        assert served.get(path).status == 404


# --- the model --------------------------------------------------------------------------------------


def test_the_model_and_its_limits_are_told(
    digits: ServedModel, nli: Served, embedder: Served, ranker: Served
) -> None:
    (model,) = digits.get("/v1/models").json["data"]
    assert (model["id"], model["object"]) == ("vit-digits", "model")
    assert digits.get("/v1/models/vit-digits").json == model
    other = digits.get("/v1/models/other")
    assert (other.status, other.json["error"]["type"]) == (404, "not_found_error")
    kinds = {
        "nli": {"classifier"},
        "embedder": {"embedding"},
        "ranker": {"reranker"},
    }
    for name, served in (("nli", nli), ("embedder", embedder), ("ranker", ranker)):
        info = hub(served[0]).get_endpoint_info()
        assert (info["model_id"], set(info["model_type"])) == (name, kinds[name])
        assert info["max_input_length"] == MOST_TOKENS
        assert info["model_dtype"] == "float32"
    assert hub(nli[0]).get_endpoint_info()["model_type"]["classifier"]["id2label"]["2"] == "entailment"
    info = hub(embedder[0]).get_endpoint_info()
    assert (info["max_concurrent_requests"], info["max_client_batch_size"]) == (64, 2048)
    assert hub(digits).health_check(f"http://127.0.0.1:{digits.port}")
