"""Test CoLA from local files, ImageNet from tiny archives, and the selection of items."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from fake_models import bert, vit
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import pipeedge.data.cola
import pipeedge.data.imagenet
from pipeedge.base.errors import InputError
from pipeedge.data import InputRequest, InputSource, open_input
from pipeedge.data.selection import select
from pipeedge.models.outline import Outline

# In the order of ILSVRC2012 ids, which is not the order of labels.
CLASSES = ("n03000000", "n01000000", "n02000000")
LABELS = {"n01000000": 0, "n02000000": 1, "n03000000": 2}
TRUTH = (2, 1, 3, 3, 2)
"""The ILSVRC2012 id of each validation image."""


def model(classes: int = 3) -> Outline:
    return vit(8, classes=classes)


def jpeg(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (12, 10), (value, value, value)).save(stream, "JPEG")
    return stream.getvalue()


def tar(path: Path, members: Mapping[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def tar_bytes(members: Mapping[str, bytes], folder: Path) -> bytes:
    path = tar(folder / "inner.tar", members)
    content = path.read_bytes()
    path.unlink()
    return content


def write_devkit(root: Path, truth: tuple[int, ...] = TRUTH) -> None:
    from scipy.io import savemat

    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = [(number, wnid, f"thing {number}", 0) for number, wnid in enumerate(CLASSES, start=1)]
    rows.append((4, "n00000001", "a group of things", 3))
    synsets = np.array(rows, dtype=fields).reshape(-1, 1)
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets})
    tar(
        root / "ILSVRC2012_devkit_t12.tar.gz",
        {
            "ILSVRC2012_devkit_t12/readme.txt": b"x",
            "ILSVRC2012_devkit_t12/data/meta.mat": meta.getvalue(),
            "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": "\n".join(
                map(str, truth)
            ).encode()
            + b"\n",
        },
        "w:gz",
    )


def val_members() -> dict[str, bytes]:
    return {f"ILSVRC2012_val_{number:08d}.JPEG": jpeg(40 * number) for number in range(1, len(TRUTH) + 1)}


def train_members(folder: Path) -> dict[str, bytes]:
    return {
        f"{wnid}.tar": tar_bytes({f"{wnid}_{place}.JPEG": jpeg(9 * place) for place in (1, 2)}, folder)
        for wnid in CLASSES
    }


def open_imagenet(root: Path, split: str | None = "val", classes: int = 3, **options: object) -> InputSource:
    request = InputRequest(
        dataset_name="ImageNet",
        dataset_root=root,
        dataset_split=split,
        **options,  # type: ignore[arg-type]
    )
    return open_input(request, model(classes))


def listing(source: InputSource) -> list[tuple[str, int | None]]:
    """Return file name and label of every item."""
    return [
        (Path(path).name, label)
        for one in source.microbatches(2)
        for path, label in zip(one.sources, one.labels, strict=True)
    ]


@pytest.fixture
def validation(tmp_path: Path) -> Path:
    write_devkit(tmp_path)
    tar(tmp_path / "ILSVRC2012_img_val.tar", val_members())
    return tmp_path


VALIDATION_LISTING = sorted(
    (
        (f"ILSVRC2012_val_{number:08d}.JPEG", LABELS[CLASSES[truth - 1]])
        for number, truth in enumerate(TRUTH, 1)
    ),
    key=lambda entry: (entry[1], entry[0]),
)


class TestImageNetArchives:
    def test_validation_images_get_their_class_from_the_kit(self, validation: Path) -> None:
        source = open_imagenet(validation)
        assert source.has_labels
        assert len(source) == len(TRUTH)
        assert listing(source) == VALIDATION_LISTING
        assert (validation / "val" / CLASSES[1] / "ILSVRC2012_val_00000001.JPEG").read_bytes() == jpeg(40)
        assert sorted(path.name for path in validation.iterdir()) == [
            "ILSVRC2012_devkit_t12.tar.gz",
            "ILSVRC2012_img_val.tar",
            "val",
        ]

    def test_training_images(self, tmp_path: Path) -> None:
        write_devkit(tmp_path)
        tar(tmp_path / "ILSVRC2012_img_train.tar", train_members(tmp_path))
        expected = [(f"{wnid}_{place}.JPEG", label) for wnid, label in LABELS.items() for place in (1, 2)]
        assert listing(open_imagenet(tmp_path, None)) == expected

    def test_extraction_happens_once(self, validation: Path) -> None:
        open_imagenet(validation)
        for archive in validation.glob("*.tar*"):
            archive.unlink()
        assert listing(open_imagenet(validation, "validation")) == VALIDATION_LISTING

    @pytest.mark.parametrize("split", ["train", "val"])
    def test_interrupted_extraction_is_completed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
    ) -> None:
        write_devkit(tmp_path)
        members = val_members() if split == "val" else train_members(tmp_path)
        tar(tmp_path / f"ILSVRC2012_img_{split}.tar", members)
        write_member = pipeedge.data.imagenet.write_member
        written: list[str] = []

        def interrupted(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
            if len(written) == 3:
                path.write_bytes(b"half a pict")
                raise KeyboardInterrupt
            written.append(path.name)
            write_member(archive, member, path)

        monkeypatch.setattr(pipeedge.data.imagenet, "write_member", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_imagenet(tmp_path, split)
        assert not (tmp_path / split).exists()
        kept = {path: path.stat().st_mtime_ns for path in (tmp_path / f"{split}.part").rglob("*.JPEG")}
        monkeypatch.setattr(pipeedge.data.imagenet, "write_member", write_member)
        entries = listing(open_imagenet(tmp_path, split))
        assert len(entries) == (len(TRUTH) if split == "val" else 2 * len(CLASSES))
        assert not (tmp_path / f"{split}.part").exists()
        # What was complete was not written again.
        complete = [path for path in kept if path.name in written]
        again = [tmp_path / split / path.parent.name.removesuffix(".part") / path.name for path in complete]
        assert len(complete) == 3
        assert [path.stat().st_mtime_ns for path in again] == [kept[path] for path in complete]

    @pytest.mark.parametrize(
        "name",
        [
            "../evil.JPEG",
            "/tmp/evil.JPEG",
            "../ILSVRC2012_val_00000001.JPEG",
            "/ILSVRC2012_val_00000001.JPEG",
            "x",
        ],
    )
    def test_an_archive_cannot_write_elsewhere(self, validation: Path, name: str) -> None:
        root = validation / "root"
        root.mkdir()
        write_devkit(root)
        tar(root / "ILSVRC2012_img_val.tar", {**val_members(), name: b"evil"})
        with pytest.raises(InputError, match="is not one of ImageNet's"):
            open_imagenet(root)
        assert not list(validation.glob("*.JPEG"))
        assert not (root / "val").exists()

    def test_links_are_refused(self, validation: Path) -> None:
        with tarfile.open(validation / "ILSVRC2012_img_val.tar", "w") as archive:
            link = tarfile.TarInfo("ILSVRC2012_val_00000001.JPEG")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
            archive.addfile(link)
        with pytest.raises(InputError, match="is not one of ImageNet's"):
            open_imagenet(validation)

    @pytest.mark.parametrize("cut", [0.5, 0.999])
    def test_truncated_archive_is_refused(self, validation: Path, cut: float) -> None:
        path = validation / "ILSVRC2012_img_val.tar"
        with tarfile.open(path) as archive:
            *_, last = archive
            end = last.offset_data + last.size
        content = path.read_bytes()
        path.write_bytes(content[: int(end * cut)])
        with pytest.raises(InputError, match=r"ILSVRC2012_img_val.tar: .*again"):
            open_imagenet(validation)
        assert not (validation / "val").exists()

    def test_an_archive_that_ends_between_two_images(self, validation: Path) -> None:
        some = dict(list(val_members().items())[:3])
        tar(validation / "ILSVRC2012_img_val.tar", some)
        with pytest.raises(InputError, match="holds 3 images of 5"):
            open_imagenet(validation)

    def test_missing_files_are_named(self, validation: Path) -> None:
        with pytest.raises(
            InputError, match=r"expected a folder train or ILSVRC2012_img_train.tar .*it has val"
        ):
            open_imagenet(validation, None)
        (validation / "ILSVRC2012_devkit_t12.tar.gz").unlink()
        with pytest.raises(InputError, match=r"needs ILSVRC2012_devkit_t12.tar.gz"):
            open_imagenet(validation)
        with pytest.raises(InputError, match="no such folder"):
            open_imagenet(validation / "nowhere")
        with pytest.raises(InputError, match="needs --dataset-root"):
            open_input(InputRequest(dataset_name="ImageNet"), model())

    def test_damaged_kit_is_refused(self, validation: Path) -> None:
        path = validation / "ILSVRC2012_devkit_t12.tar.gz"
        content = path.read_bytes()
        for damaged in (content[: len(content) // 2], b"no archive", b""):
            path.write_bytes(damaged)
            with pytest.raises(InputError, match=r"devkit_t12.tar.gz: "):
                open_imagenet(validation)
        tar(path, {"ILSVRC2012_devkit_t12/data/other": b""}, "w:gz")
        with pytest.raises(InputError, match=r"no data/meta.mat"):
            open_imagenet(validation)
        write_devkit(validation, (9,) * 5)
        with pytest.raises(InputError, match="names class 9"):
            open_imagenet(validation)


class TestImageNetFolders:
    def classes(self, folder: Path, names: tuple[str, ...] = CLASSES) -> Path:
        for name in names:
            (folder / name).mkdir(parents=True)
            (folder / name / f"{name}_1.JPEG").write_bytes(jpeg(9))
        return folder

    @pytest.mark.parametrize("inside", ["val", "validation", "."])
    def test_folders_of_classes(self, tmp_path: Path, inside: str) -> None:
        self.classes(tmp_path / inside)
        (tmp_path / "empty").mkdir()
        asked = inside if inside == "validation" else "val"
        expected = [(f"{name}_1.JPEG", label) for name, label in LABELS.items()]
        assert listing(open_imagenet(tmp_path, asked)) == expected

    def test_a_subset_of_the_classes_needs_the_kit_for_its_labels(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.classes(tmp_path, CLASSES[:1])
        source = open_imagenet(tmp_path)
        assert not source.has_labels
        assert "has 1 classes, local/vit gives 3: the labels are left out" in caplog.text
        write_devkit(tmp_path)
        assert listing(open_imagenet(tmp_path)) == [(f"{CLASSES[0]}_1.JPEG", 2)]

    def test_no_classes(self, tmp_path: Path) -> None:
        (tmp_path / "val").mkdir()
        with pytest.raises(InputError, match="no class folder with images"):
            open_imagenet(tmp_path)

    def test_unreadable_images(self, tmp_path: Path) -> None:
        self.classes(tmp_path)
        bad = tmp_path / CLASSES[0] / f"{CLASSES[0]}_1.JPEG"
        bad.write_bytes(b"")
        with pytest.raises(InputError, match=str(bad)):
            listing(open_imagenet(tmp_path))
        source = open_imagenet(tmp_path, skip_bad_input=True)
        assert len(listing(source)) == 2
        assert [one.source for one in source.skipped] == [str(bad)]


class TestCoLA:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n")
        return tmp_path

    def test_a_local_copy(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        datasets.disable_progress_bars()
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", directory / "cache")
        (directory / "cola").mkdir()
        content = {"sentence": ["the cat", "cat", "the the cat"], "label": [1, 0, -1]}
        datasets.Dataset.from_dict(content).to_parquet(
            directory / "cola" / "validation-00000-of-00001.parquet"
        )
        request = InputRequest(dataset_name="CoLA", dataset_root=directory, dataset_split="val")
        source = open_input(request, bert(7, directory=directory))
        assert source.has_labels
        assert source.max_tokens == 5
        (microbatch,) = source.microbatches(8)
        assert microbatch.labels == (1, 0, None)
        assert microbatch.payload[0].tolist() == [[2, 5, 6, 3, 0], [2, 6, 3, 0, 0], [2, 5, 5, 6, 3]]
        assert microbatch.sources[1] == "CoLA/validation[1]"

    def test_without_a_network(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        asked: list[bool] = []

        def load_dataset(*_: object, **__: object) -> None:
            asked.append(datasets.config.HF_HUB_OFFLINE)
            raise ConnectionError("no route")

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(pipeedge.data.cola, "hub_reachable", lambda: False)
        before = datasets.config.HF_HUB_OFFLINE
        request = InputRequest(dataset_name="CoLA")
        with pytest.raises(InputError, match=r"CoLA cannot be read \(ConnectionError\): .*--dataset-root"):
            open_input(request, bert(7, directory=directory))
        assert asked == [True]
        assert before == datasets.config.HF_HUB_OFFLINE

    def test_invalid_requests_are_refused(self, directory: Path) -> None:
        model = bert(7, directory=directory)
        with pytest.raises(InputError, match="no split 'best'"):
            open_input(InputRequest(dataset_name="CoLA", dataset_split="best"), model)
        with pytest.raises(InputError, match="no such folder"):
            open_input(InputRequest(dataset_name="CoLA", dataset_root=directory / "x"), model)


class TestSelection:
    @given(available=st.integers(1, 200), batch=st.none() | st.integers(1, 250), seed=st.integers(0, 5))
    @settings(max_examples=60)
    def test_shuffling_is_a_sample_without_repetition(
        self, available: int, batch: int | None, seed: int
    ) -> None:
        options = {"dataset_name": "ImageNet", "max_items": batch, "seed": seed}
        plain = select(InputRequest(**options), available)  # type: ignore[arg-type]
        shuffled = select(InputRequest(**options, dataset_shuffle=True), available)  # type: ignore[arg-type]
        count = min(available, 64 if batch is None else batch)
        assert plain == list(range(count))
        assert len(shuffled) == len(set(shuffled)) == count
        assert set(shuffled) <= set(range(available))
        assert shuffled == select(InputRequest(**options, dataset_shuffle=True), available)  # type: ignore[arg-type]

    def test_the_seed_decides(self) -> None:
        orders = {
            tuple(select(InputRequest(dataset_name="CoLA", dataset_shuffle=True, seed=seed), 50))
            for seed in range(4)
        }
        assert len(orders) == 4

    def test_a_list_of_indices(self, tmp_path: Path) -> None:
        path = tmp_path / "indices.txt"
        indices = list(range(99, 0, -1))
        path.write_text("\n".join(map(str, indices)) + "\n\n")
        request = InputRequest(dataset_name="CoLA", dataset_indices_file=path)
        assert select(request, 100) == indices
        limited = InputRequest(dataset_name="CoLA", dataset_indices_file=path, max_items=3)
        assert select(limited, 100) == [99, 98, 97]
        shuffled = InputRequest(dataset_name="CoLA", dataset_indices_file=path, dataset_shuffle=True)
        assert sorted(select(shuffled, 100)) == sorted(indices)
        assert select(shuffled, 100) != indices

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("1\ntwo\n", r"indices.txt:2: 'two' is not an index"),
            ("1\n\n5\n", r"indices.txt:3: index 5 is outside the data set \(0 to 4\)"),
            ("-1\n", r"index -1 is outside"),
            ("\n", "no index"),
        ],
    )
    def test_invalid_index_list_is_refused(self, tmp_path: Path, content: str, message: str) -> None:
        path = tmp_path / "indices.txt"
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            select(InputRequest(dataset_name="CoLA", dataset_indices_file=path), 5)

    def test_missing_index_list_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="cannot be read"):
            select(InputRequest(dataset_name="CoLA", dataset_indices_file=tmp_path / "x"), 5)
