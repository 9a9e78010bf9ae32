# SPDX-License-Identifier: GPL-3.0-or-later
"""An HTTP mirror of models with the paths and headers of a model hub, which can be told to misbehave.

    python3 model_mirror.py DIRECTORY PORT TOKEN

serves ``/FILE`` and ``/OWNER/NAME/resolve/REVISION/FILE`` from a directory, with Range.
"""

from __future__ import annotations

import hashlib
import http.server
import re
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote


@dataclass
class Behaviour:
    """What the mirror does. ``requests`` notes each one as method, path and headers."""

    cut_after: list[int] = field(default_factory=list)  # bytes after which the next answers are cut
    statuses: list[int] = field(default_factory=list)  # of the next answers, before it behaves
    ranges: bool = True
    odd_range: bool = False
    token: str = ""
    redirect: str = ""
    linked_etag: str = ""  # "right", or any other text
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Mirror

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_arguments: Any) -> None:
        """Says nothing: tests read `requests`."""

    def _answer(self, with_body: bool) -> None:
        behaviour = self.server.behaviour
        behaviour.requests.append((self.command, self.path, dict(self.headers)))
        path = re.sub(r"^/[^/]+/[^/]+/resolve/[^/]+/", "/", self.path)
        file = self.server.directory / unquote(path).lstrip("/")
        if behaviour.token and self.headers.get("Authorization") != f"Bearer {behaviour.token}":
            self._end(401)
        elif behaviour.statuses:
            self._end(behaviour.statuses.pop(0))
        elif not file.is_file():
            self._end(404)
        else:
            self._send(file, with_body, self._linked_etag(file))

    def _linked_etag(self, file: Path) -> dict[str, str]:
        etag = self.server.behaviour.linked_etag
        if etag == "right":
            etag = hashlib.sha256(file.read_bytes()).hexdigest()
        return {"X-Linked-Etag": f'"{etag}"'} if etag else {}

    def _send(self, file: Path, with_body: bool, headers: dict[str, str]) -> None:
        behaviour = self.server.behaviour
        if behaviour.redirect:
            self._end(302, {**headers, "Location": behaviour.redirect + self.path})
            return
        size = file.stat().st_size
        begin, status = 0, 200
        asked = re.match(r"bytes=([0-9]+)-$", self.headers.get("Range", ""))
        if asked and behaviour.ranges:
            begin, status = int(asked.group(1)), 206
            if begin >= size:
                self._end(416, {"Content-Range": f"bytes */{size}"})
                return
            told = begin + 1 if behaviour.odd_range else begin
            headers = {**headers, "Content-Range": f"bytes {told}-{size - 1}/{size}"}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(size - begin)}.items():
            self.send_header(name, value)
        self.end_headers()
        if not with_body:
            return
        left = behaviour.cut_after.pop(0) if behaviour.cut_after else size
        with file.open("rb") as opened:
            opened.seek(begin)
            while left > 0:
                chunk = opened.read(min(left, 1 << 20))
                if not chunk:
                    return
                self.wfile.write(chunk)
                left -= len(chunk)
        self.close_connection = True

    def _end(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()


class Mirror(http.server.ThreadingHTTPServer):
    """Serves a directory; `behaviour` can be changed while it does."""

    daemon_threads = True

    def __init__(self, directory: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((address, port), _Handler)
        self.directory = directory
        self.behaviour = Behaviour()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Mirror:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.shutdown()
        self.server_close()


if __name__ == "__main__":
    mirror = Mirror(Path(sys.argv[1]), "", int(sys.argv[2]))
    mirror.behaviour.token = sys.argv[3]
    mirror.serve_forever()
