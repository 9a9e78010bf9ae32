# SPDX-License-Identifier: GPL-3.0-or-later
"""Directories and mirrors as sources: parts of files, redirects, tokens, and answers that can't be relied on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.model_manifest import ModelError, ModelFile
from ansible_collections.ringmaster.inference.plugins.module_utils.model_sources import (
    DirectorySource,
    HttpSource,
    HubSource,
    Source,
    SourceInterruptedError,
)
from tests.support.model_mirror import Mirror

CONTENT = os.urandom(100_000)
FILE = ModelFile("sub/weights ?#1%.safetensors", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / FILE.path).write_bytes(CONTENT)
    return tmp_path


@pytest.fixture
def mirror(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Mirror(directory) as started:
        yield started


def read(source: Source, offset: int = 0) -> tuple[int, int | None, bytes]:
    with source.open(FILE, offset) as stream:
        return stream.offset, stream.size, b"".join(stream.chunks)


def hub(mirror: Mirror, **options: str) -> HubSource:
    return HubSource(mirror.url, "owner/model", "refs/pr/1", **options)


@pytest.mark.parametrize("offset", [0, 1, 99_999])
def test_every_source_begins_where_it_is_told(mirror: Mirror, directory: Path, offset: int) -> None:
    for source in (DirectorySource(str(directory)), HttpSource(mirror.url + "/"), hub(mirror)):
        assert read(source, offset) == (offset, len(CONTENT), CONTENT[offset:])
        assert source.size(FILE) == len(CONTENT)
        assert "Traceback" not in source.description
    assert mirror.behaviour.requests[-1][1].startswith("/owner/model/resolve/refs%2Fpr%2F1/sub/weights%20%3F%231%25")


def test_source_that_is_no_directory_is_refused(directory: Path) -> None:
    for path in ("relative", str(directory / "gone"), str(directory / FILE.path)):
        with pytest.raises(ModelError, match="directory on the host"):
            DirectorySource(path)
    with pytest.raises(ModelError, match="No such file"):
        DirectorySource(str(directory)).size(ModelFile("gone", "0" * 64, 1))


def test_mirror_that_knows_no_ranges_begins_at_the_beginning(mirror: Mirror) -> None:
    mirror.behaviour.ranges = False
    assert read(HttpSource(mirror.url), 500) == (0, len(CONTENT), CONTENT)


def test_mirror_that_has_nothing_more_is_asked_for_all(mirror: Mirror) -> None:
    assert read(HttpSource(mirror.url), len(CONTENT)) == (0, len(CONTENT), CONTENT)


def test_mirror_that_sends_another_part_is_refused(mirror: Mirror) -> None:
    mirror.behaviour.odd_range = True
    with pytest.raises(ModelError, match="another part"):
        read(HttpSource(mirror.url), 500)


def test_connection_that_is_cut_is_told_and_what_came_is_right(mirror: Mirror) -> None:
    mirror.behaviour.cut_after = [70_000]
    got = b""
    with HttpSource(mirror.url).open(FILE, 0) as stream, contextlib.suppress(SourceInterruptedError):
        for chunk in stream.chunks:
            got += chunk
        pytest.fail("the cut was not told")
    assert got == CONTENT[: len(got)]
    assert read(HttpSource(mirror.url), len(got))[2] == CONTENT[len(got) :]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_status_that_may_pass(mirror: Mirror, status: int) -> None:
    mirror.behaviour.statuses = [status]
    with pytest.raises(SourceInterruptedError, match=str(status)):
        read(HttpSource(mirror.url))


@pytest.mark.parametrize(("status", "remedy"), [(401, "token"), (403, "token"), (404, "has this model"), (410, "has")])
def test_status_that_stays(mirror: Mirror, status: int, remedy: str) -> None:
    mirror.behaviour.statuses = [status]
    with pytest.raises(ModelError, match=f"status {status}.*To do: .*{remedy}"):
        read(HttpSource(mirror.url))


def test_mirror_that_is_not_there() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        with pytest.raises(SourceInterruptedError, match="refused"):
            read(HttpSource(f"http://127.0.0.1:{reserved.getsockname()[1]}"))


def test_mirror_that_hangs_has_an_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(SourceInterruptedError, match="timed out"):
            read(HttpSource(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=0.2))


@pytest.mark.parametrize("answer", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"])
def test_mirror_that_speaks_nonsense(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _address = server.accept()
            connection.recv(65536)
            connection.sendall(answer)
            connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        source = HttpSource(f"http://127.0.0.1:{server.getsockname()[1]}")
        try:
            assert read(source) == (0, None, b"")  # what was sent is for the checksum to judge
        except SourceInterruptedError:
            pass
        thread.join()


def test_token_goes_to_the_mirror_and_to_nobody_else(mirror: Mirror, directory: Path) -> None:
    mirror.behaviour.token = "hub-token"
    assert read(hub(mirror, token="hub-token"))[2] == CONTENT
    with Mirror(directory) as store:
        mirror.behaviour.redirect = store.url
        assert read(hub(mirror, token="hub-token"), 7)[2] == CONTENT[7:]
        _method, _path, headers = store.behaviour.requests[-1]
        assert "Authorization" not in headers
        assert headers["Range"] == "bytes=7-"
        assert hub(mirror, token="hub-token").size(FILE) == len(CONTENT)
        assert store.behaviour.requests[-1][0] == "HEAD"
    with pytest.raises(ModelError, match="status 401") as raised:
        read(hub(mirror, token="another-token"))
    assert "another-token" not in str(raised.value)


def test_redirects_have_an_end_and_lead_nowhere_else(mirror: Mirror) -> None:
    mirror.behaviour.redirect = mirror.url
    with pytest.raises(ModelError, match="status 302"):
        read(HttpSource(mirror.url))
    for target in ("file:///etc/passwd?", "ftp://127.0.0.1/"):
        mirror.behaviour.redirect = target
        with pytest.raises(ModelError):
            read(HttpSource(mirror.url))


def test_hub_that_names_another_checksum_is_refused_before_a_byte(mirror: Mirror, directory: Path) -> None:
    mirror.behaviour.linked_etag = "right"
    assert read(hub(mirror))[2] == CONTENT
    mirror.behaviour.linked_etag = "f" * 64
    with pytest.raises(ModelError, match="names another one, ffff") as raised:
        read(hub(mirror))
    assert FILE.path in str(raised.value)
    # The header comes with the answer that redirects to where the bytes lie.
    with Mirror(directory) as store:
        mirror.behaviour.redirect = store.url
        with pytest.raises(ModelError, match="names another one"):
            read(hub(mirror))
    # Of a file that is not in LFS it is a Git hash, which says nothing here.
    mirror.behaviour.redirect = ""
    mirror.behaviour.linked_etag = "e" * 40
    assert read(hub(mirror))[2] == CONTENT


def test_proxy_is_asked_instead(mirror: Mirror, directory: Path) -> None:
    source = HttpSource("http://mirror.invalid/models", proxy=mirror.url)
    with pytest.raises(ModelError, match="status 404"):
        read(source)
    assert mirror.behaviour.requests[-1][1].startswith("http://mirror.invalid/models/")


@pytest.mark.parametrize(
    "url",
    ["", "mirror", "ftp://mirror/", "file:///etc", "http://", "http://u:hidden@mirror/", "http://mirror/?token=hidden"]
    + ["http://mirror/ x", "http://mirror:99999/", "http://mirror/\n", "http://[::1", "http://mirror/#hidden"],
)
def test_addresses_that_are_none_or_hold_secrets_are_refused(url: str) -> None:
    with pytest.raises(ModelError, match="mirror's address") as raised:
        HttpSource(url)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("repository", "revision"),
    [("a/b/c", "main"), ("../x", "main"), ("a b/c", "main"), ("a/b", ""), ("a/b", "../../x"), ("a/b", "main?x")],
)
def test_names_that_are_none_of_a_hub(repository: str, revision: str) -> None:
    with pytest.raises(ModelError, match="of a model hub"):
        HubSource("https://hub.example", repository, revision)


def test_token_and_certificates_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="token") as raised:
        HttpSource("https://mirror", token="two\nlines")
    assert "lines" not in str(raised.value)
    with pytest.raises(ModelError, match="certificates"):
        HttpSource("https://mirror", ca_path=str(tmp_path / "gone.pem"))
    (tmp_path / "empty.pem").write_text("no certificate")
    with pytest.raises(ModelError, match="certificates"):
        HttpSource("https://mirror", ca_path=str(tmp_path / "empty.pem"))
