"""Memory that the worst images take, and that they leave behind, measured in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from quick_python import run_text

MIB = 1 << 20
PIXELS = 89_000_000
DECODE = """
import sys
from pathlib import Path
from pipeedge.base.errors import InputError
from pipeedge.base.heap import keep_freed_memory, share_one_heap
from pipeedge.data.images import default_recipe, encode_picture
from pipeedge.data.pictures import open_image
from pipeedge.models import find_model

def figure(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

share_one_heap()
keep_freed_memory()  # as a rank does
recipe = default_recipe(find_model("google/vit-base-patch16-224"))
paths = [Path(name) for name in sys.argv[1:]]
encode_picture(recipe, "warm", lambda: open_image(paths[0]))
before, refused = figure("VmRSS"), 0
for path in paths[1:]:
    try:
        encode_picture(recipe, path.name, lambda: open_image(path))
    except InputError:
        refused += 1
print(before, figure("VmHWM"), figure("VmRSS"), refused)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
def test_worst_images_take_five_bytes_a_pixel_and_leave_nothing(tmp_path: Path, quick_python: Path) -> None:
    """One bit a pixel is quick to decode, and was converted whole: five bytes a pixel, and more if turned."""
    Image.new("1", (8, 8)).save(tmp_path / "small.png")
    paths = [tmp_path / "small.png"]
    for mode, size in (("1", (9400, 9400)), ("1", (1358, 65_535)), ("P", (65_535, 1358)), ("1", (1, PIXELS))):
        path = tmp_path / f"{mode}_{size[0]}.png"
        Image.new(mode, size).save(path, exif=_turned())
        paths += [path] * 3
    result = run_text(DECODE, tmp_path, quick_python, *map(str, paths))
    before, peak, after, refused = map(int, result.stdout.split())
    assert refused == 3
    assert after - before < 100 * MIB
    assert peak - before < 5 * PIXELS


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif
