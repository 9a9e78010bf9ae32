# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a model's files come from: a directory of the host, an HTTP mirror, or a mirror of a model hub.

A source hands out bytes from an offset on and is not trusted with anything: whoever writes them checks them against the
manifest. Nothing here imports Ansible.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, NoReturn, Protocol

from ansible_collections.ringmaster.inference.plugins.module_utils.model_manifest import (
    CHUNK,
    ModelError,
    ModelFile,
    open_file,
)

# A server that says nothing for so long has hung; a storage tier that fetches a file from tape is not served by HTTP.
TIMEOUT = 60.0  # seconds
MOST_REDIRECTS = 5
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]+)-[0-9]+/([0-9]+|\*)\Z")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?\Z")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*\Z")


class _RangeRefusedError(Exception):
    """The mirror has nothing from that byte on."""


class SourceInterruptedError(Exception):
    """The source failed in a way that may pass: what came is good, and the rest can be asked for again."""


@dataclass
class Stream:
    """Bytes of one file. `offset` is where they begin, which may be 0 although a later one was asked for; `size` the
    length of the whole file in bytes if the source tells it."""

    offset: int
    size: int | None
    chunks: Iterator[bytes]


class Source(Protocol):
    """What every source can do."""

    description: str

    def size(self, file: ModelFile) -> int | None:
        """Bytes of a file whose size the manifest does not give; None if the source does not tell."""

    def open(self, file: ModelFile, offset: int) -> contextlib.AbstractContextManager[Stream]:
        """The file from `offset` on. Raises ModelError, or SourceInterruptedError where another try may help."""


class DirectorySource:
    """A directory of the host, for instance a network file system."""

    def __init__(self, path: str, follow_links: bool = False) -> None:
        self.path = path
        self.follow_links = follow_links
        self.description = path
        if not os.path.isabs(path) or not os.path.isdir(path):
            raise ModelError(
                "an absolute path of a directory on the host as source", repr(path), "mount it, or give the right path"
            )

    def size(self, file: ModelFile) -> int | None:
        with open_file(self.path, file.path, self.follow_links) as opened:
            return os.fstat(opened.fileno()).st_size

    @contextlib.contextmanager
    def open(self, file: ModelFile, offset: int) -> Iterator[Stream]:
        with open_file(self.path, file.path, self.follow_links) as opened:
            size = os.fstat(opened.fileno()).st_size
            # Once through: the copy is what stays in memory, not the source.
            os.posix_fadvise(opened.fileno(), offset, 0, os.POSIX_FADV_SEQUENTIAL)
            opened.seek(offset)
            yield Stream(offset, size, self._chunks(opened, file))

    @staticmethod
    def _chunks(opened: IO[bytes], file: ModelFile) -> Iterator[bytes]:
        while True:
            try:
                chunk = opened.read(CHUNK)
            except OSError as error:  # a network file system that is away (EIO, ESTALE, ETIMEDOUT)
                raise SourceInterruptedError(f"{file.path}: {error.strerror or error}") from error
            if not chunk:
                return
            yield chunk


class HttpSource:
    """Files below a URL. ``https`` is checked against `ca_path` (a file of the host) or the system's authorities.

    `token` goes out as ``Authorization: Bearer`` to the mirror itself and, after a redirect, to nobody else. `proxy` is
    a URL; without one the environment's ``http_proxy``, ``https_proxy`` and ``no_proxy`` count.
    """

    def __init__(self, url: str, token: str = "", ca_path: str = "", proxy: str = "", timeout: float = TIMEOUT) -> None:
        self.url = _checked_url(url).rstrip("/")
        self.description = self.url
        self._timeout = timeout
        self._headers = {"User-Agent": "ringmaster", "Accept-Encoding": "identity"}
        if token:
            if not re.match(r"[!-~]+\Z", token):
                raise ModelError(
                    "a token of printable characters without spaces", "something else", "set another token"
                )
            self._headers["Authorization"] = f"Bearer {token}"
        try:
            context = ssl.create_default_context(cafile=ca_path or None)
        except OSError as error:
            raise ModelError(
                f"certificates of the mirror's authority in {ca_path} on the host",
                str(error.strerror or error),
                "give the path of a PEM file",
            ) from error
        self._redirects = _Redirects()
        handlers: list[urllib.request.BaseHandler] = [
            urllib.request.HTTPSHandler(context=context),
            self._redirects,
        ]
        if proxy:
            handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
        self._opener = urllib.request.build_opener(*handlers)

    def address(self, file: ModelFile) -> str:
        """URL of a file; whatever is in its name stays a name."""
        return f"{self.url}/{urllib.parse.quote(file.path, safe='/')}"

    def size(self, file: ModelFile) -> int | None:
        with self._ask(file, "HEAD", {}) as answer:
            return _length(answer.headers)

    @contextlib.contextmanager
    def open(self, file: ModelFile, offset: int) -> Iterator[Stream]:
        with contextlib.ExitStack() as stack:
            try:
                answer = stack.enter_context(self._ask(file, "GET", {"Range": f"bytes={offset}-"} if offset else {}))
            except _RangeRefusedError:
                answer = stack.enter_context(self._ask(file, "GET", {}))
            length = _length(answer.headers)
            begin, size = 0, length
            if answer.status == 206:
                found = _CONTENT_RANGE.match(answer.headers.get("Content-Range", ""))
                if not found or int(found.group(1)) != offset:
                    raise ModelError(
                        f"the bytes of {self.address(file)} from {offset} on",
                        f"another part: {answer.headers.get('Content-Range')!r}",
                        "mend the mirror's answers to Range, or switch them off there",
                    )
                begin, size = offset, None if found.group(2) == "*" else int(found.group(2))
            elif answer.status != 200:
                self._refused(file, answer.status, "")
            yield Stream(begin, size, self._chunks(answer, file, length))

    def check(self, file: ModelFile, headers: Mapping[str, str]) -> None:
        """Raises ModelError if the source's own word on a file's checksum is another one than the manifest's."""

    def _chunks(self, answer: Any, file: ModelFile, length: int | None) -> Iterator[bytes]:
        count = 0
        while True:
            try:
                chunk = answer.read(CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise SourceInterruptedError(f"{file.path}: {error}") from error
            if not chunk:
                break
            count += len(chunk)
            yield chunk
        # read(n) of http.client ends short without a word when the connection was cut.
        if length is not None and count < length:
            raise SourceInterruptedError(f"{file.path}: the connection was cut after {count} of {length} bytes")

    @contextlib.contextmanager
    def _ask(self, file: ModelFile, method: str, headers: dict[str, str]) -> Iterator[Any]:
        request = urllib.request.Request(self.address(file), method=method)
        for name, value in {**self._headers, **headers}.items():
            request.add_header(name, value)
        self._redirects.passed = []
        try:
            answer = self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 416 and "Range" in headers:
                    raise _RangeRefusedError from error
                self._refused(file, error.code, error.headers.get("WWW-Authenticate", ""))
        except (OSError, http.client.HTTPException, ValueError) as error:  # the last of a redirect to no address
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise ModelError(
                    f"a certificate for {self.url} that the host trusts",
                    reason.verify_message,
                    "give the authority's certificates as ca_path",
                ) from error
            raise SourceInterruptedError(f"{self.address(file)}: {reason}") from error
        with answer:
            for passed in [*self._redirects.passed, answer.headers]:
                self.check(file, passed)
            yield answer

    def _refused(self, file: ModelFile, status: int, challenge: str) -> NoReturn:
        if status in (408, 425, 429) or status >= 500:
            raise SourceInterruptedError(f"{self.address(file)}: status {status}")
        raise ModelError(
            f"{self.address(file)} from the mirror",
            f"status {status}" + (f" ({challenge[:80]})" if challenge else ""),
            "give a token that may read the model"
            if status in (401, 403, 407)
            else "see that the mirror has this model in this revision, and that the manifest belongs to it",
        )


class HubSource(HttpSource):
    """A mirror that has the paths of a model hub: ``ENDPOINT/REPOSITORY/resolve/REVISION/FILE``.

    For files in Git LFS such a hub tells their SHA-256 in ``X-Linked-Etag``; where it does, a file that differs from
    the manifest is refused before it is fetched. (Header and path: huggingface_hub, ``file_download.py``.)
    """

    def __init__(self, endpoint: str, repository: str, revision: str, **options: Any) -> None:
        for name, value, form in (("repository", repository, _REPOSITORY), ("revision", revision, _REVISION)):
            if not form.match(value) or ".." in value:
                raise ModelError(
                    f"a {name} of a model hub, such as {'Qwen/Qwen2-7B-Instruct' if name == 'repository' else 'main'}",
                    repr(value),
                    "write it as in the hub's address",
                )
        quoted = urllib.parse.quote(revision, safe="")
        super().__init__(f"{_checked_url(endpoint).rstrip('/')}/{repository}/resolve/{quoted}", **options)

    def check(self, file: ModelFile, headers: Mapping[str, str]) -> None:
        linked = (headers.get("X-Linked-Etag") or "").removeprefix("W/").strip('"').lower()
        if _SHA256.match(linked) and linked != file.sha256:
            raise ModelError(
                f"{file.path} with SHA-256 {file.sha256} at {self.url}",
                f"that the hub itself names another one, {linked}",
                "see that the revision is the one of which the manifest was made",
            )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects as far as is safe: no other scheme than http and https, nothing from https to http, and the
    token stays with the origin that it was given for. Keeps the headers of answers that redirect."""

    max_redirections = MOST_REDIRECTS

    def __init__(self) -> None:
        self.passed: list[Any] = []

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        self.passed.append(headers)
        before, after = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if after.scheme not in ("http", "https") or (before.scheme == "https" and after.scheme == "http"):
            raise ModelError(
                f"{req.full_url} to lead to another https address",
                f"a redirect to {after.scheme}://{after.hostname}",
                "give the mirror's own address",
            )
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None:
            if (before.scheme, before.hostname, before.port) != (after.scheme, after.hostname, after.port):
                request.remove_header("Authorization")
            request.method = req.get_method()  # before Python 3.13 a HEAD becomes a GET
        return request


def _checked_url(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        well = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # A secret in a URL gets into logs and messages.
        well = well and parts.username is None and not parts.query and not parts.fragment
    except ValueError:
        well = False
    if not well or not re.match(r"[!-~]+\Z", url):
        raise ModelError(
            "a mirror's address such as https://mirror.example/models, without user, password or query",
            "another text",  # it may hold a password
            "give the address so, and secrets as token or in the environment",
        )
    return url


def _length(headers: Mapping[str, str]) -> int | None:
    value = headers.get("Content-Length") or ""
    return int(value) if re.match(r"[0-9]{1,16}\Z", value) else None
