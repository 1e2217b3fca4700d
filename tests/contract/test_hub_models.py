"""Test models given as ORG/NAME: from the hub's local cache, or from a hub on this machine."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from decoder_cases import CASES
from file_server import COMMIT, Site, use_hub, write_cache
from gguf_writing import save_gguf
from huggingface_hub import constants, file_download
from safetensors.torch import load_file, save

from pipeedge.base.errors import ModelError, PipeEdgeError, WeightsError, one_line
from pipeedge.base.schedule import LayerRange
from pipeedge.models import Model, find_model
from pipeedge.models.registry import find_any
from pipeedge.models.weights.download import save_weights
from pipeedge.models.weights.hub import is_repository_name

NAME = "some-lab/small-model"
INDEX = "model.safetensors.index.json"
USELESS = ("README.md", "pytorch_model.bin", "onnx/model.onnx", "flax_model.msgpack")


def repository(directory: Path) -> dict[str, bytes]:
    """Return the files of a repository with the model in ``directory``."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    return {**files, **dict.fromkeys(USELESS, b"useless")}


def split_repository(directory: Path) -> dict[str, bytes]:
    """Return the files of a repository with its weights in two files and an index."""
    files = repository(directory)
    del files["model.safetensors"]
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in parts.items():
        files[file] = save({name: tensors[name] for name in own})
    weight_map = {name: file for file, own in parts.items() for name in own}
    return {**files, INDEX: json.dumps({"weight_map": weight_map}).encode()}


def same_weights(model: Model, directory: Path) -> bool:
    here, there = (dict(one.load().named_parameters()) for one in (model, find_model(directory)))
    return all(torch.equal(here[name], tensor) for name, tensor in there.items())


def refusal(kind: type[PipeEdgeError], mistake: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        mistake()
    assert str(caught.value) == one_line(caught.value)
    return str(caught.value)


@pytest.fixture
def hub(serve: Callable[..., Site], hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Serve an empty hub, which the client asks."""
    site = serve(files={})
    use_hub(site.url, monkeypatch)
    return site


# From the cache -------------------------------------------------------------------------------------------


def test_cached_repository_needs_no_network(hub_cache: Path, model_dirs: dict[str, Path]) -> None:
    """The hub of this test does not answer, which only matters if it is asked."""
    snapshot = write_cache(hub_cache, NAME, repository(model_dirs["bert"]), lacks=("modules.json",))
    model = find_model(NAME)
    assert (model.name, model.repository, model.directory) == (NAME, NAME, snapshot)
    assert model.has_weights
    assert same_weights(model, model_dirs["bert"])
    assert model.fingerprint() == find_model(model_dirs["bert"]).fingerprint()


def test_offline_switch_confines_the_search_to_the_cache(
    hub: Site, hub_cache: Path, model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.add_repository(NAME, repository(model_dirs["vit"]))
    message = refusal(ModelError, lambda: find_model(NAME))
    assert message.startswith(f"{NAME} is neither a known model nor a directory, and the hub's local cache")
    assert "HF_HUB_OFFLINE is set" in message
    files = repository(model_dirs["vit"])
    del files["model.safetensors"]
    write_cache(hub_cache, NAME, files)
    model = find_model(NAME)
    assert not model.has_weights
    message = refusal(WeightsError, model.load)
    assert f"the weights of {NAME} are not in the hub's local cache, and HF_HUB_OFFLINE is set" in message
    assert hub.asked == []


def test_an_incomplete_cache_serves_while_the_hub_is_away(
    hub_cache: Path, model_dirs: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Another program may have cached a model without asking for a modules.json."""
    write_cache(hub_cache, NAME, repository(model_dirs["vit"]))
    assert same_weights(find_model(NAME), model_dirs["vit"])
    assert not caplog.records
    plain = repository(model_dirs["bert"])
    config = {**json.loads(plain["config.json"]), "architectures": ["BertModel"]}
    write_cache(hub_cache, "some-lab/plain", {**plain, "config.json": json.dumps(config).encode()})
    find_model("some-lab/plain")
    assert "whether some-lab/plain has a modules.json is not known" in caplog.text


# From the hub ---------------------------------------------------------------------------------------------


def test_small_files_come_first_and_weights_when_they_are_read(
    hub: Site, hub_cache: Path, model_dirs: dict[str, Path]
) -> None:
    hub.add_repository(NAME, repository(model_dirs["bert"]))
    model = find_model(NAME)
    assert set(hub.fetched()) == {"small-model", "config.json", "vocab.txt"}
    assert not model.has_weights
    assert same_weights(model, model_dirs["bert"])
    assert model.has_weights
    assert not {Path(name).name for name in USELESS} & set(hub.fetched())
    asked = len(hub.asked)
    assert same_weights(find_model(NAME), model_dirs["bert"])
    assert len(hub.asked) == asked, "a complete snapshot needs no further request"


def test_weights_in_several_files(hub: Site, hub_cache: Path, model_dirs: dict[str, Path]) -> None:
    hub.add_repository(NAME, split_repository(model_dirs["deit"]))
    model = find_model(NAME)
    assert INDEX in hub.fetched()
    assert "model-1.safetensors" not in hub.fetched()
    assert same_weights(model, model_dirs["deit"])


def test_part_of_a_snapshot_is_completed(hub: Site, hub_cache: Path, model_dirs: dict[str, Path]) -> None:
    files = split_repository(model_dirs["vit"])
    hub.add_repository(NAME, files)
    write_cache(
        hub_cache, NAME, {name: files[name] for name in ("config.json", INDEX, "model-2.safetensors")}
    )
    assert same_weights(find_model(NAME), model_dirs["vit"])
    assert "model-2.safetensors" not in hub.fetched()


def test_head_without_a_class_name_is_found_in_the_weights(
    hub: Site, hub_cache: Path, model_dirs: dict[str, Path]
) -> None:
    files = repository(model_dirs["bert"])
    config = json.loads(files["config.json"])
    del config["architectures"]
    hub.add_repository(NAME, {**files, "config.json": json.dumps(config).encode()})
    assert find_model(NAME).config.head == "classifier"


def test_modules_of_sentence_transformers_are_fetched(
    hub: Site, hub_cache: Path, model_dirs: dict[str, Path]
) -> None:
    files = repository(model_dirs["bert"])
    config = {**json.loads(files["config.json"]), "architectures": ["BertModel"]}
    kind = "sentence_transformers.models."
    modules = [
        {"type": f"{kind}Transformer", "path": ""},
        {"type": f"{kind}Pooling", "path": "1_Pooling"},
        {"type": f"{kind}Normalize", "path": "2_Normalize"},
    ]
    pooling = {"word_embedding_dimension": config["hidden_size"], "pooling_mode_mean_tokens": True}
    documents = {"config.json": config, "modules.json": modules, "1_Pooling/config.json": pooling}
    encoded = {name: json.dumps(document).encode() for name, document in documents.items()}
    hub.add_repository(NAME, {**files, **encoded})
    found = find_model(NAME).config.pooling
    assert found is not None
    assert (found.modes, found.normalize) == (("mean",), True)


def test_looking_does_not_fetch(hub: Site, hub_cache: Path, model_dirs: dict[str, Path]) -> None:
    hub.add_repository(NAME, repository(model_dirs["vit"]))
    refusal(ModelError, lambda: find_model(NAME, fetch=False))
    model = find_model(NAME)
    model.check_sizes()
    model.build(LayerRange(0, 4))
    assert "model.safetensors" not in hub.fetched()


# GGUF files -----------------------------------------------------------------------------------------------

GGUF = f"{NAME}/q8/model.gguf"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a small decoder as a GGUF file."""
    return save_gguf(CASES["llama2"].model(), tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def test_gguf_file_of_a_repository_is_fetched_once(hub: Site, hub_cache: Path, gguf: bytes) -> None:
    hub.add_repository(NAME, {"README.md": b"", "q8/model.gguf": gguf, "q4/model.gguf": b"useless"})
    model = find_any(GGUF)
    assert (model.name, model.default_weights.read_bytes()) == (GGUF, gguf)
    assert hub.fetched().count("model.gguf") == 1
    asked = len(hub.asked)
    assert find_any(GGUF).config == model.config
    assert len(hub.asked) == asked, "the cache has it"


def test_broken_download_goes_on_where_it_stopped(
    hub: Site,
    hub_cache: Path,
    gguf: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.add_repository(NAME, {"q8/model.gguf": gguf})
    monkeypatch.setattr(file_download.time, "sleep", lambda _seconds: None)  # between attempts
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)  # what arrives after the last one is lost
    hub.drop_after = [1 << 20, 1000, 2000]
    find_any(GGUF)
    assert [wanted for _, path, wanted in hub.asked if path.endswith(".gguf")][2:] == [
        "bytes=1000-",
        "bytes=3000-",
    ]
    said = [record.getMessage() for record in caplog.records if "the connection broke" in record.getMessage()]
    assert len(said) == 2
    assert not any("\n" in line for line in said)


def test_download_that_breaks_again_and_again_is_given_up(
    hub: Site, hub_cache: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_repository(NAME, {"q8/model.gguf": gguf})
    monkeypatch.setattr(file_download.time, "sleep", lambda _seconds: None)
    hub.drop_after = [1 << 20, *[10] * 20]
    message = refusal(WeightsError, lambda: find_any(GGUF))
    assert message.startswith(f"{GGUF} on the Hugging Face hub cannot be fetched (RemoteProtocolError: ")
    assert message.endswith("fetch q8/model.gguf elsewhere and give its path with -m")
    hub.drop_after = []
    assert find_any(GGUF).default_weights.read_bytes() == gguf


def test_gguf_file_that_is_not_there_is_named(hub: Site, hub_cache: Path, gguf: bytes) -> None:
    hub.add_repository(NAME, {"q8/model.gguf": gguf, "q4.gguf": b""})
    message = refusal(ModelError, lambda: find_any(f"{NAME}/q5.gguf"))
    assert message == f"{NAME} on the Hugging Face hub has no file q5.gguf; it has q4.gguf, q8/model.gguf"
    message = refusal(ModelError, lambda: find_any(NAME))
    assert message.endswith(f"has GGUF files; name one of them, such as {GGUF}")
    message = refusal(ModelError, lambda: find_any("some-lab/nothing/x.gguf"))
    assert message.startswith(
        "there is no file some-lab/nothing/x.gguf, and the Hugging Face hub has no such"
    )
    assert "model.gguf" not in hub.fetched()


# What goes wrong ------------------------------------------------------------------------------------------


def test_unknown_repository_is_named_with_the_nearest_known_model(hub: Site, hub_cache: Path) -> None:
    message = refusal(ModelError, lambda: find_model("google/vit-base"))
    assert "and the Hugging Face hub has no such repository, or keeps it private" in message
    assert "did you mean google/vit-base-patch16-224?" in message


def test_a_hub_that_does_not_answer_is_named(hub_cache: Path) -> None:
    message = refusal(ModelError, lambda: find_model(NAME))
    assert "and http://127.0.0.1:9 does not answer (ConnectError: " in message


def test_weights_without_a_network(hub: Site, hub_cache: Path, model_dirs: dict[str, Path]) -> None:
    hub.add_repository(NAME, repository(model_dirs["vit"]))
    model = find_model(NAME)
    hub.status, hub.error_code = 500, "InternalError"
    message = refusal(WeightsError, model.load)
    assert message.startswith(f"{NAME} on the Hugging Face hub cannot be fetched (HfHubHTTPError: ")
    assert "-M" in message


def test_gated_repository_says_where_to_accept(
    hub: Site, hub_cache: Path, model_dirs: dict[str, Path]
) -> None:
    hub.add_repository(NAME, repository(model_dirs["vit"]))
    hub.status, hub.error_code, hub.refused = 403, "GatedRepo", f"/{NAME}/resolve"
    message = refusal(ModelError, lambda: find_model(NAME))
    assert f"accept them at {hub.url}/{NAME}, then log in here with: hf auth login" in message


def test_pickles_are_not_fetched(hub: Site, hub_cache: Path, model_dirs: dict[str, Path]) -> None:
    files = repository(model_dirs["vit"])
    del files["model.safetensors"]
    hub.add_repository(NAME, files)
    message = refusal(WeightsError, find_model(NAME).load)
    assert f"{NAME} on the Hugging Face hub has no safetensors weights (only pytorch_model.bin" in message
    assert "pytorch_model.bin" not in hub.fetched()


def test_repository_without_a_configuration_is_no_model(hub: Site, hub_cache: Path) -> None:
    hub.add_repository(NAME, {"README.md": b""})
    assert "has no config.json" in refusal(ModelError, lambda: find_model(NAME))


def test_full_disk_is_named(
    hub: Site, hub_cache: Path, model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.add_repository(NAME, repository(model_dirs["vit"]))
    model = find_model(NAME)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_space)
    message = refusal(WeightsError, model.load)
    assert f"{NAME} cannot be stored in {hub_cache} (No space left on device); free some space" in message


def test_only_names_of_the_hubs_form_are_looked_up(hub: Site, hub_cache: Path) -> None:
    for name in (
        "a/b/c",
        "/a/b",
        "../b",
        "a/..",
        "a--b/c",
        "-single",
        "a b",
        "a/b c",
        "a/-b",
        f"a/{'b' * 99}",
    ):
        assert not is_repository_name(name), name
        refusal(ModelError, lambda: find_model(name))  # noqa: B023 (called at once)
    assert hub.asked == []
    assert all(
        map(
            is_repository_name,
            ("roberta-base", "BAAI/bge-small-en-v1.5", "sentence-transformers/all-MiniLM-L6-v2"),
        )
    )


def test_old_name_without_an_organisation_is_asked_of_the_hub(
    hub: Site, hub_cache: Path, model_dirs: dict[str, Path]
) -> None:
    hub.add_repository("FacebookAI/roberta-base", repository(model_dirs["roberta"]))
    hub.moved["roberta-base"] = "FacebookAI/roberta-base"
    model = find_model("roberta-base")
    assert (model.name, model.repository) == ("roberta-base", "roberta-base")
    assert same_weights(model, model_dirs["roberta"])
    asked = len(hub.asked)
    assert same_weights(find_model("roberta-base"), model_dirs["roberta"])
    assert len(hub.asked) == asked, "the cache has it"
    message = refusal(ModelError, lambda: find_model("roberta-bose"))
    assert "and the Hugging Face hub has no such repository" in message


# Fetching to keep -----------------------------------------------------------------------------------------


def test_fetched_repository_is_in_the_cache(hub: Site, hub_cache: Path, model_dirs: dict[str, Path]) -> None:
    hub.add_repository(NAME, repository(model_dirs["bert"]))
    said: list[str] = []
    save_weights([NAME], dtype=torch.bfloat16, say=said.append)
    snapshot = hub_cache / "models--some-lab--small-model" / "snapshots" / COMMIT
    assert said[0] == f"{snapshot}: {NAME}, in the hub's local cache"
    assert (snapshot / "model.bfloat16.safetensors").exists()
    assert find_model(NAME).find_weights(torch.bfloat16) == snapshot / "model.bfloat16.safetensors"


def test_fetched_repository_is_copied_to_a_directory(
    hub: Site, hub_cache: Path, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    hub.add_repository(NAME, split_repository(model_dirs["bert"]))
    save_weights([NAME], tmp_path)
    copy = tmp_path / "small-model"
    wanted = {"config.json", "vocab.txt", INDEX, "model-1.safetensors", "model-2.safetensors"}
    assert {path.name for path in copy.iterdir()} == wanted
    assert not any(path.is_symlink() for path in copy.iterdir())
    assert same_weights(find_model(copy), model_dirs["bert"])


def test_random_weights_of_a_repository(
    hub: Site, hub_cache: Path, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    hub.add_repository(NAME, repository(model_dirs["vit"]))
    save_weights([NAME], tmp_path, random_seed=3)
    model = find_model(NAME)
    read = dict(model.load(weights=tmp_path / "small-model.npz").named_parameters())
    assert all(torch.equal(t, read[n]) for n, t in model.random(seed=3).named_parameters())
    assert "model.safetensors" not in hub.fetched()
