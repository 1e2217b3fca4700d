"""Test ranks that run a repository of a hub on this machine, with a cache of their own each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from file_server import Site, write_cache
from ports import free_port
from processes import Programs

NAME = "some-lab/small-model"
PAIRS = [("the cat sat", "on a mat"), ("all day", "the cat slept"), ("a cat", "and a mat and a day")]


def test_ranks_fetch_what_they_lack(
    serve: Callable[..., Site], model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Rank 0 finds everything in its cache without asking, rank 1 has an empty one."""
    files = {path.name: path.read_bytes() for path in model_dirs["bert"].iterdir()}
    site = serve(files={})
    site.add_repository(NAME, files)
    write_cache(tmp_path / "cache0", NAME, files, lacks=("modules.json",))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    line = ("--port", free_port(), "-m", NAME, "-pt", "1,6,7,12", "-u", "2")
    asked = []
    with Programs(tmp_path) as programs:
        for rank in (0, 1):
            env = {
                "HF_HUB_CACHE": str(tmp_path / f"cache{rank}"),
                "HF_ENDPOINT": site.url,
                "HF_HUB_OFFLINE": "0",
            }
            own = ("--input", "pairs.jsonl", "--output", "o.npz") if rank == 0 else ()
            programs.launch(rank, "runtime.py", rank, 2, *line, *own, env=env, fresh=True)
        ended = programs.wait()
        asked += site.fetched()
    assert {end.status for end in ended.values()} == {0}, ended
    assert f"fetching the weights of {NAME} from the Hugging Face hub" in ended[1].err
    assert NAME not in ended[0].err
    assert asked.count("model.safetensors") == 1
    with np.load(tmp_path / "o.npz") as arrays:
        assert arrays["outputs"].shape == (3, 3)
