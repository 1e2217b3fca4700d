"""A web server on this machine with the files that a test gives it, also as the Hugging Face hub."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
"""Commit of every repository of a server."""


@dataclass
class Site:
    """Files of a server, its faults, and the requests it has received."""

    files: dict[str, bytes]
    drop_after: list[int] = field(default_factory=list)
    """Bytes after which the connection is closed, for each coming request with a body."""
    ranges: bool = True
    status: int | None = None
    error_code: str = "EntryNotFound"
    """Code by which the hub names the reason of a refusal."""
    refused: str | None = None
    """Beginning of the addresses that are refused with ``status``; None: all."""
    moved: dict[str, str] = field(default_factory=dict)
    """New name of each repository that the hub redirects."""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add_repository(self, name: str, files: Mapping[str, bytes]) -> None:
        """Serve ``files`` as a repository of the hub."""
        listing = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
        for path in (f"/api/models/{name}", f"/api/models/{name}/revision/{COMMIT}"):
            self.files[path] = json.dumps(listing).encode()
        for file, content in files.items():
            for revision in ("main", COMMIT):
                self.files[f"/{name}/resolve/{revision}/{file}"] = content

    def fetched(self) -> list[str]:
        """Return the names of the files whose content was sent."""
        return [path.rpartition("/")[2] for command, path, _ in self.asked if command == "GET"]

    def refuses(self, path: str) -> bool:
        """Return whether a request is answered with ``status``."""
        return self.status is not None and (self.refused is None or path.startswith(self.refused))


def handler(site: Site) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            wanted = self.headers.get("Range")
            site.asked.append((self.command, self.path, wanted))
            for old, new in site.moved.items():
                for begin in ("/api/models/", "/"):
                    if self.path == f"{begin}{old}" or self.path.startswith(f"{begin}{old}/"):
                        self.send_response(307)
                        self.send_header("Location", self.path.replace(old, new, 1))
                        self.send_header("Content-Length", "0")
                        self.end_headers()
                        return
            content = site.files.get(self.path)
            if site.refuses(self.path) or content is None:
                self.send_response(site.status if site.refuses(self.path) else 404)
                code = site.error_code if site.refuses(self.path) else self.absence()
                self.send_header("X-Error-Code", code)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            start = int(re.fullmatch(r"bytes=(\d+)-\d*", wanted)[1]) if wanted and site.ranges else 0
            if start >= len(content) and wanted:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                end = start + site.drop_after.pop(0) if site.drop_after else len(content)
                self.wfile.write(content[start:end])
                self.close_connection = True

        def absence(self) -> str:
            """Return whether a file or its whole repository is missing, as the hub tells them apart."""
            repository = self.path.removeprefix("/api/models").split("/resolve/")[0]
            known = any(path.startswith(f"{repository}/") for path in site.files)
            return "EntryNotFound" if known or not self.path.startswith("/api/") else "RepoNotFound"

    return Handler


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    """Serve ``site`` at a free port of the loopback."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(site))
    site.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()


def use_hub(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the hub's client of this process ask the server at ``url``, as HF_ENDPOINT does at its start."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def write_cache(cache: Path, name: str, files: Mapping[str, bytes], *, lacks: tuple[str, ...] = ()) -> Path:
    """Write a repository as the hub's client caches it; return its snapshot.

    Args:
        cache: Directory of the cache.
        name: Name of the repository.
        files: Files of the repository that are cached.
        lacks: Files that the repository is known not to have.
    """
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for directory in (repository / "refs", repository / "blobs", snapshot, repository / ".no_exist" / COMMIT):
        directory.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file, content in files.items():
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).unlink(missing_ok=True)
        (snapshot / file).symlink_to(blob)
    for file in lacks:
        (repository / ".no_exist" / COMMIT / file).touch()
    return snapshot
