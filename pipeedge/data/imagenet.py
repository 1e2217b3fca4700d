"""ImageNet (ILSVRC 2012), from its original archives or from folders of classes.

O. Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", IJCV 115, 2015.

    dataset_root/
      ILSVRC2012_devkit_t12.tar.gz    names of the classes; classes of the validation images
      ILSVRC2012_img_train.tar        1000 archives, n01440764.tar and so on
      ILSVRC2012_img_val.tar          50000 images
      train/n01440764/*.JPEG          folders extracted from the archives once, or already there
      val/n01440764/*.JPEG

The label of a class is its position among the sorted WordNet ids, as in the models' training.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from pipeedge.base.errors import InputError, RequestError
from pipeedge.data.companions import companion_directories
from pipeedge.data.images import DecodedImages, ImageTransform, image_transform, is_image
from pipeedge.data.items import Items, JoinedItems
from pipeedge.models.outline import Outline
from pipeedge.request.files import InputRequest

__all__ = ["DevelopmentKit", "imagenet_items", "is_data_file"]

DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
META = "data/meta.mat"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
ARCHIVES: Mapping[str, str] = MappingProxyType(
    {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
)
CLASS_ARCHIVE = re.compile(r"(n\d{8})\.tar")
TRAIN_IMAGE = re.compile(r"n\d{8}_\d+\.JPEG")
VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
PART = ".part"
"""Suffix of a folder that is not complete yet."""

log = logging.getLogger(__name__)


def is_data_file(name: str) -> bool:
    """Return whether a file of this name in the directory of a data set may belong to it."""
    return is_image(name) or name.lower().endswith((".arrow", ".gz", ".mat", ".parquet", ".tar", ".txt"))


@dataclass(frozen=True)
class ClassFolder(DecodedImages):
    """The images of one class."""

    folder: Path
    names: tuple[str, ...]
    """Names of the images below ``folder``: ImageNet has 1.3 million, too many for a ``Path`` each."""
    label: int | None
    transform: ImageTransform
    max_pixels: int | None = None

    @property
    def has_labels(self) -> bool:
        """Whether the label of this class is known."""
        return self.label is not None

    def __len__(self) -> int:
        return len(self.names)

    def file(self, index: int) -> tuple[Path, int | None]:
        """Return the path of image ``index``, and the class."""
        return self.folder / self.names[index], self.label


@dataclass(frozen=True)
class DevelopmentKit:
    """The contents of the development kit: the classes, and the classes of the validation images."""

    class_ids: Mapping[int, str]
    """Map from ILSVRC2012 id to WordNet id, for the classes that have images."""
    validation_ids: tuple[int, ...]
    """ILSVRC2012 id of each validation image, in the order of their numbers from 1."""

    @property
    def classes(self) -> list[str]:
        """Return the WordNet ids in the order of the labels."""
        return sorted(self.class_ids.values())

    @classmethod
    def read(cls, path: Path) -> DevelopmentKit:
        """Read the archive. Raises ``InputError`` if it is damaged or another file."""
        try:
            from scipy.io import loadmat
        except ImportError as error:
            raise RequestError("ImageNet needs the package scipy: pip install 'pipeedge[runtime]'") from error
        found: dict[str, bytes] = {}
        with reading_archive(path), tarfile.open(path) as archive:
            for member in archive:
                for wanted in (META, GROUND_TRUTH):
                    stream = archive.extractfile(member) if member.name.endswith(f"/{wanted}") else None
                    if stream is not None:
                        found[wanted] = stream.read()
        for wanted in (META, GROUND_TRUTH):
            if wanted not in found:
                raise InputError(f"{path}: no {wanted} in this archive, so it is not ImageNet's kit")
        try:
            synsets = loadmat(io.BytesIO(found[META]), squeeze_me=True)["synsets"]
            # The other synsets are groups of classes in the WordNet tree.
            leaves = [synset for synset in synsets if int(synset["num_children"]) == 0]
            class_ids = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in leaves}
            validation_ids = tuple(map(int, found[GROUND_TRUTH].split()))
        except Exception as error:  # scipy raises many kinds of exceptions for a damaged file
            raise InputError(f"{path}: {META} or {GROUND_TRUTH} cannot be read ({error})") from error
        unknown = set(validation_ids) - set(class_ids)
        if unknown:
            raise InputError(f"{path}: {GROUND_TRUTH} names class {min(unknown)}, which {META} lacks")
        return cls(MappingProxyType(class_ids), validation_ids)


def imagenet_items(request: InputRequest, model: Outline) -> Items:
    """Return the images of a split, with labels.

    Archives are extracted on first use. After an interruption, the next run continues where extraction
    stopped. Labels are left out, with a warning, if the classes cannot be those of the model.

    Raises:
        InputError: ``request.dataset_root`` has neither archives nor folders of classes, or they are damaged.
    """
    root = request.dataset_root
    if root is None:
        raise InputError("ImageNet needs --dataset-root: the folder of its archives or of its images")
    if not root.is_dir():
        raise InputError(f"--dataset-root {root}: no such folder")
    asked = request.dataset_split or "train"
    split = "val" if asked == "validation" else asked
    kit_path = root / DEVKIT
    kit = DevelopmentKit.read(kit_path) if kit_path.is_file() else None
    folder = find_split(root, asked, split, kit)
    images = class_images(folder)
    if not images:
        raise InputError(f"{folder}: no class folder with images in it")
    classes = sorted(images)
    if kit is not None and set(classes) <= set(kit.classes):
        classes = kit.classes
    labels: Mapping[str, int] = {name: label for label, name in enumerate(classes)}
    if len(classes) != model.config.num_labels:
        log.warning(
            "%s has %d classes, %s gives %d: the labels are left out",
            folder,
            len(classes),
            model.name,
            model.config.num_labels,
        )
        labels = {}
    transform = image_transform(model, companion_directories(request, model))
    return JoinedItems(
        tuple(
            ClassFolder(folder / name, names, labels.get(name), transform, request.max_image_pixels)
            for name, names in sorted(images.items())
        )
    )


def find_split(root: Path, asked: str, split: str, kit: DevelopmentKit | None) -> Path:
    """Return the folder with the classes of ``split``, extracted from its archive if necessary."""
    for name in dict.fromkeys((split, asked)):
        if (root / name).is_dir():
            return root / name
    archive = root / ARCHIVES[split] if split in ARCHIVES else None
    if archive is not None and archive.is_file():
        if split == "train":
            extract_train(archive, root / split, kit)
        elif kit is not None:
            extract_val(archive, root / split, kit)
        else:
            raise InputError(f"{archive} needs {DEVKIT} beside it, which names the classes of its images")
        return root / split
    if class_images(root):
        return root
    there = [name for name in (*ARCHIVES, "test") if (root / name).is_dir()]
    there += [name for name, file in ARCHIVES.items() if name not in there and (root / file).is_file()]
    hint = f"; it has {' and '.join(there)} (--dataset-split)" if there else ""
    expected = f"a folder {split}" + (f" or {ARCHIVES[split]}" if split in ARCHIVES else "")
    raise InputError(f"--dataset-root {root}: expected {expected} for the split {asked}{hint}")


def class_images(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the images of each class: those directly in each subfolder of ``folder``, sorted by name."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        found = {
            name: tuple(sorted(entry.name for entry in os.scandir(folder / name) if is_image(entry.name)))
            for name in names
            if not name.endswith(PART)
        }
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from error
    return {name: images for name, images in found.items() if images}


# Extraction -----------------------------------------------------------------------------------------


def extract_train(archive: Path, target: Path, kit: DevelopmentKit | None) -> None:
    """Extract the archive of archives to ``target``/class/image. Classes that exist are not read again."""
    classes = set()
    with extracting(archive, target) as part, tarfile.open(archive) as opened:
        for member in opened:
            found = expect(CLASS_ARCHIVE, archive, member)
            if found is None:
                continue
            classes.add(found[1])
            folder = part / found[1]
            if folder.is_dir():
                continue
            incomplete = part / (found[1] + PART)
            incomplete.mkdir(exist_ok=True)
            with tarfile.open(fileobj=opened.extractfile(member)) as inner:
                for image in inner:
                    if expect(TRAIN_IMAGE, archive / member.name, image) is not None:
                        write_member(inner, image, incomplete / base_name(image))
            incomplete.replace(folder)
        check_count(archive, "classes", len(classes), None if kit is None else len(kit.class_ids))


def extract_val(archive: Path, target: Path, kit: DevelopmentKit) -> None:
    """Extract to ``target``/class/image, with classes from the kit. Images that exist are kept."""
    numbers = set()
    with extracting(archive, target) as part, tarfile.open(archive) as opened:
        for member in opened:
            found = expect(VAL_IMAGE, archive, member)
            if found is None:
                continue
            number = int(found[1])
            if not 1 <= number <= len(kit.validation_ids):
                raise InputError(f"{archive}: {DEVKIT} has no class for {member.name}")
            numbers.add(number)
            folder = part / kit.class_ids[kit.validation_ids[number - 1]]
            folder.mkdir(exist_ok=True)
            write_member(opened, member, folder / base_name(member))
        check_count(archive, "images", len(numbers), len(kit.validation_ids))


@contextmanager
def extracting(archive: Path, target: Path) -> Iterator[Path]:
    """Yield a folder to extract into, which is renamed to ``target`` when it is complete."""
    part = target.with_name(target.name + PART)
    log.warning("extracting %s into %s; this happens once and may take a while", archive, target)
    with reading_archive(archive):
        part.mkdir(exist_ok=True)
        yield part
        part.replace(target)


@contextmanager
def reading_archive(path: Path) -> Iterator[None]:
    """Turn errors of damaged archives and full disks into one line."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: damaged or incomplete, fetch it again ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read or extracted beside it ({error})") from error


def expect(pattern: re.Pattern[str], archive: Path, member: tarfile.TarInfo) -> re.Match[str] | None:
    """Return the match of ``pattern`` with the member's own name, or None for a folder.

    Only names that match are ever written, below folders named here, so an archive cannot place a file
    elsewhere. Raises ``InputError`` if the member is something else, a link, or has a path.
    """
    if member.isdir():
        return None
    found = pattern.fullmatch(base_name(member))
    within = PurePosixPath(member.name)
    if found is None or not member.isreg() or within.is_absolute() or ".." in within.parts:
        raise InputError(f"{archive}: the member {member.name!r} is not one of ImageNet's")
    return found


def base_name(member: tarfile.TarInfo) -> str:
    """Return the last part of the member's path."""
    return PurePosixPath(member.name).name


def write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Write a regular file to ``path``, unless it exists in full."""
    if path.is_file() and path.stat().st_size == member.size:
        return
    source = archive.extractfile(member)
    if source is not None:
        with source, path.open("wb") as target:
            shutil.copyfileobj(source, target)


def check_count(archive: Path, what: str, count: int, expected: int | None) -> None:
    """Check for an archive that ends early between two members, which its reader does not notice."""
    if count == 0 or (expected is not None and count != expected):
        raise InputError(f"{archive}: holds {count} {what} of {expected or 'at least 1'}; fetch it again")
