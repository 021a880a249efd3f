"""A hub on the loopback device: enough of the Hugging Face protocol for the real `huggingface_hub` to download from.

Owns the repositories, their faults and a log of the requests; tests set the first two and read the third.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class Asked:
    """One request, as the server saw it."""

    method: str
    path: str
    byte_range: str | None
    token: str | None


@dataclass
class Hub:
    """Files by (repository, revision, name), and what goes wrong."""

    files: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    token: str | None = None  # None: everybody may read
    gated: bool = False
    lies: bool = False  # announces hashes that its files do not have
    cut_next_at: int | None = None  # bytes after which the next download breaks off
    ignores_ranges: bool = False
    status: int | None = None  # answer everything with this
    delay_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    def add(self, repo: str, name: str, content: bytes, revision: str = "main") -> None:
        self.files[repo, revision, name] = content
        self.files[repo, COMMIT, name] = content

    def downloads(self) -> list[Asked]:
        return [each for each in self.asked if each.method == "GET" and "/resolve/" in each.path]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Run the hub on a free port until the block ends."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ") or None
        self.hub.asked.append(Asked(self.command, path, self.headers["Range"], token))
        if self.hub.status is not None:
            return self._refuse(self.hub.status, None)
        if self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if self.hub.token is not None and token != self.hub.token:
            return self._refuse(401, "RepoNotFound")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(.+?)/([^/]+\.gguf)", path):
            return self._send_file(*match.groups())
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path):
            return self._send_tree(*match.groups())
        return self._refuse(404, "RepoNotFound")

    def _send_tree(self, repo: str, revision: str) -> None:
        names = [name for (r, rev, name) in self.hub.files if (r, rev) == (repo, revision)]
        if not names:
            return self._refuse(404, self._missing(repo, revision))
        rows = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]
        return self._send(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})

    def _send_file(self, repo: str, revision: str, name: str) -> None:
        content = self.hub.files.get((repo, revision, name))
        if content is None:
            return self._refuse(404, self._missing(repo, revision))
        digest = hashlib.sha256(content + (b"?" if self.hub.lies else b"")).hexdigest()
        headers = {
            "X-Repo-Commit": COMMIT,
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(len(content)),
            "ETag": f'"{digest}"',
            "Accept-Ranges": "bytes",
        }
        byte_range = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        if byte_range is None or self.hub.ignores_ranges:
            return self._send(200, content, headers)
        start = int(byte_range[1])
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self._send(206, content[start:], headers)

    def _missing(self, repo: str, revision: str) -> str:
        if not any(r == repo for r, _, _ in self.hub.files):
            return "RepoNotFound"
        known = any((r, rev) == (repo, revision) for r, rev, _ in self.hub.files)
        return "EntryNotFound" if known else "RevisionNotFound"

    def _refuse(self, status: int, code: str | None) -> None:
        self._send(status, b"", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        time.sleep(self.hub.delay_s)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut, self.hub.cut_next_at = self.hub.cut_next_at, None
        self.wfile.write(body if cut is None else body[:cut])
        self.close_connection = cut is not None
