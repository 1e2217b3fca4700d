"""Test downloads of weights, which are resumed and checked, against servers on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from file_server import Site
from safetensors.torch import save

from pipeedge.base.errors import ModelError, WeightsError, one_line
from pipeedge.models import find_model
from pipeedge.models.weights.download import HttpSource, HubSource, download, save_weights
from pipeedge.models.weights.writing import write_random

TINY = "facebook/deit-tiny-distilled-patch16-224"


@pytest.fixture(scope="module")
def npz(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the weights of DeiT-Tiny, as a server has them."""
    model = find_model(TINY)
    path = tmp_path_factory.mktemp("npz") / "w.npz"
    write_random(path, model.build(), model.config, seed=1)
    return path.read_bytes()


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def fetch(site: Site, directory: Path) -> Path:
    target = directory / "DeiT_T_distilled.npz"
    download(find_model(TINY), HttpSource(f"{site.url}/w.npz"), target)
    return target


def refusal(site: Site, directory: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        fetch(site, directory)
    assert str(caught.value) == one_line(caught.value)
    assert "DeiT_T_distilled.npz" not in files_in(directory)
    return str(caught.value)


# Plain HTTP -----------------------------------------------------------------------------------------------


def test_complete_file_gets_its_name(serve: Callable[..., Site], npz: bytes, tmp_path: Path) -> None:
    assert fetch(serve(files={"/w.npz": npz}), tmp_path).read_bytes() == npz
    assert files_in(tmp_path) == ["DeiT_T_distilled.npz"]


def test_broken_transfer_is_resumed(serve: Callable[..., Site], npz: bytes, tmp_path: Path) -> None:
    site = serve(files={"/w.npz": npz}, drop_after=[1_000_000, 3_000_000, 17, 5_000_000])
    assert fetch(site, tmp_path).read_bytes() == npz
    asked = [wanted for _, _, wanted in site.asked]
    assert asked == [None, "bytes=1000000-", "bytes=4000000-", "bytes=4000017-", "bytes=9000017-"]


def test_a_later_call_continues_an_earlier_one(
    serve: Callable[..., Site], npz: bytes, tmp_path: Path
) -> None:
    site = serve(files={"/w.npz": npz}, drop_after=[1_000_000, 0, 0, 0, 0])
    message = refusal(site, tmp_path)
    assert "1000000 bytes that arrived are kept" in message
    assert files_in(tmp_path) == ["DeiT_T_distilled.npz.part"]
    site.drop_after.clear()
    assert fetch(site, tmp_path).read_bytes() == npz
    assert site.asked[-1] == ("GET", "/w.npz", "bytes=1000000-")


def test_a_server_that_cannot_resume_starts_over(
    serve: Callable[..., Site], npz: bytes, tmp_path: Path
) -> None:
    (tmp_path / "DeiT_T_distilled.npz.part").write_bytes(npz[:1000])
    assert fetch(serve(files={"/w.npz": npz}, ranges=False), tmp_path).read_bytes() == npz


def test_complete_part_is_only_checked(serve: Callable[..., Site], npz: bytes, tmp_path: Path) -> None:
    (tmp_path / "DeiT_T_distilled.npz.part").write_bytes(npz)
    site = serve(files={"/w.npz": npz})
    assert fetch(site, tmp_path).read_bytes() == npz
    assert len(site.asked) == 1


@pytest.mark.parametrize("old", [b"of another version", b"x" * 30_000_000])
def test_part_of_another_version_is_discarded(
    old: bytes, serve: Callable[..., Site], npz: bytes, tmp_path: Path
) -> None:
    (tmp_path / "DeiT_T_distilled.npz.part").write_bytes(old)
    assert fetch(serve(files={"/w.npz": npz}), tmp_path).read_bytes() == npz


def test_a_file_of_the_wrong_content_is_refused(
    serve: Callable[..., Site], npz: bytes, tmp_path: Path
) -> None:
    damaged = bytearray(npz)
    damaged[len(npz) // 2] ^= 1
    site = serve(files={"/w.npz": bytes(damaged)})
    assert "checksum" in refusal(site, tmp_path)
    assert files_in(tmp_path) == []
    for content in (npz[: len(npz) // 2], b"<html>sign in to the hotel's network</html>"):
        site.files["/w.npz"] = content
        assert "not usable" in refusal(site, tmp_path)
        assert files_in(tmp_path) == []


@pytest.mark.parametrize("status", [403, 404, 500])
def test_http_error_names_the_address(status: int, serve: Callable[..., Site], tmp_path: Path) -> None:
    site = serve(files={}, status=status)
    message = refusal(site, tmp_path)
    assert f"{site.url}/w.npz answers {status}" in message
    assert len(site.asked) == 1


def test_offline_error_says_what_to_do(tmp_path: Path) -> None:
    message = refusal(Site({}, port=9), tmp_path)
    assert "http://127.0.0.1:9/w.npz cannot be fetched" in message
    assert f"put it at {tmp_path / 'DeiT_T_distilled.npz'}" in message
    assert "--random" in message


# Hugging Face hub -----------------------------------------------------------------------------------------


def hub_files(npz: bytes, tmp_path: Path) -> dict[str, torch.Tensor]:
    (tmp_path / "source.npz").write_bytes(npz)
    with np.load(tmp_path / "source.npz") as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    (tmp_path / "source.npz").unlink()
    return tensors


@pytest.mark.usefixtures("hub_cache")
def test_hub_files_are_converted_to_the_default_name(
    serve: Callable[..., Site], npz: bytes, tmp_path: Path
) -> None:
    tensors = hub_files(npz, tmp_path)
    tensors["embeddings.position_ids"] = torch.arange(4)  # what old files carry and no model needs
    site = serve(files={f"/{TINY}/resolve/main/model.safetensors": save(tensors)})
    target = tmp_path / "DeiT_T_distilled.npz"
    model = find_model(TINY)
    download(model, HubSource(TINY, endpoint=site.url), target)
    assert files_in(tmp_path) == ["DeiT_T_distilled.npz"]
    read = dict(model.load(weights=target).named_parameters())
    assert all(torch.equal(t, read[n]) for n, t in model.random(seed=1).named_parameters())


@pytest.mark.usefixtures("hub_cache")
def test_an_old_repository_without_safetensors_is_read_too(
    serve: Callable[..., Site], npz: bytes, tmp_path: Path
) -> None:
    torch.save(hub_files(npz, tmp_path), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    content = (tmp_path / "old.bin").read_bytes()
    (tmp_path / "old.bin").unlink()
    site = serve(files={f"/{TINY}/resolve/main/pytorch_model.bin": content})
    target = tmp_path / "DeiT_T_distilled.npz"
    model = find_model(TINY)
    download(model, HubSource(TINY, endpoint=site.url), target)
    read = dict(model.load(weights=target).named_parameters())
    assert all(torch.equal(t, read[n]) for n, t in model.random(seed=1).named_parameters())


@pytest.mark.usefixtures("hub_cache")
def test_a_hub_file_of_another_model_is_refused(
    serve: Callable[..., Site], npz: bytes, tmp_path: Path
) -> None:
    site = serve(files={f"/{TINY}/resolve/main/model.safetensors": save(hub_files(npz, tmp_path))})
    model = find_model("facebook/deit-small-distilled-patch16-224")
    with pytest.raises(WeightsError, match=r"\[1, 1, 192\].*\[1, 1, 384\]"):
        download(model, HubSource(TINY, endpoint=site.url), tmp_path / "DeiT_S_distilled.npz")
    assert "DeiT_S_distilled.npz" not in files_in(tmp_path)


@pytest.mark.usefixtures("hub_cache")
def test_an_empty_repository_and_an_absent_hub_are_named(serve: Callable[..., Site], tmp_path: Path) -> None:
    target = tmp_path / "DeiT_T_distilled.npz"
    with pytest.raises(WeightsError, match=r"has none of model\.safetensors, pytorch_model\.bin"):
        download(find_model(TINY), HubSource(TINY, endpoint=serve(files={}).url), target)
    with pytest.raises(WeightsError) as caught:
        download(find_model(TINY), HubSource(TINY, endpoint="http://127.0.0.1:9"), target)
    assert str(caught.value) == one_line(caught.value)
    assert all(part in str(caught.value) for part in (TINY, "model.safetensors", "-M", "--random"))


# The whole ------------------------------------------------------------------------------------------------


def test_complete_files_are_kept_and_damaged_ones_replaced(
    serve: Callable[..., Site], npz: bytes, tmp_path: Path
) -> None:
    site = serve(files={"/w.npz": npz})
    origins = {TINY: HttpSource(f"{site.url}/w.npz")}
    said: list[str] = []
    for _ in range(2):
        save_weights([], tmp_path, origins=origins, say=said.append)
    assert len(site.asked) == 1
    assert "kept" in said[-1]
    target = tmp_path / "DeiT_T_distilled.npz"
    target.write_bytes(npz[:-100])
    save_weights([TINY], tmp_path, origins=origins, say=said.append)
    assert "it will be replaced" in said[-2]
    assert target.read_bytes() == npz


def test_random_files_need_no_network(tmp_path: Path) -> None:
    save_weights([TINY], tmp_path / "new", random_seed=4, origins={TINY: HttpSource("http://127.0.0.1:9/")})
    model = find_model(TINY)
    read = dict(model.load(weights=tmp_path / "new" / "DeiT_T_distilled.npz").named_parameters())
    assert all(torch.equal(t, read[n]) for n, t in model.random(seed=4).named_parameters())
    assert files_in(tmp_path / "new") == ["DeiT_T_distilled.npz"]


def test_only_models_with_a_source_can_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="comes with the package"):
        save_weights(["vit-digits"], tmp_path)
    with pytest.raises(ModelError, match="did you mean bert-base-uncased"):
        save_weights(["bert-base-uncasd"], tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    with pytest.raises(ModelError, match="is a directory"):
        save_weights([str(tmp_path)], tmp_path)


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"file/DeiT_T_distilled\.npz cannot be written"):
        save_weights([TINY], tmp_path / "file", random_seed=0)
