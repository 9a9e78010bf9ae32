# SPDX-License-Identifier: GPL-3.0-or-later
"""How a release of vLLM is installed: by pip and by uv, from an index with a key, and without any."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.controller import CHECKOUT, Controller

KEY = "s3cret-of-the-index"
INSTALLERS = ("pip", "uv")


def wheel(folder: Path, name: str, requires: str = "") -> Path:
    """Write the wheel of version 0.32.0 of a package with one module of the same name."""
    information = f"{name}-0.32.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n"
    files = {
        f"{name}.py": "",
        f"{information}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(content)}\n"
    files[f"{information}/RECORD"] = f"{record}{information}/RECORD,,\n"
    target = folder / f"{name}-0.32.0-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return target


def command_lines() -> str:
    """Those of all processes, as every user of a host can read them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(found)


class Index:
    """A package index that wants a key, and looks at all command lines each time it is asked for something."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, bool]] = []
        self.seen = ""
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                expected = "Basic " + base64.b64encode(f"user:{KEY}".encode()).decode()
                known = self.headers.get("Authorization") == expected
                index.asked.append((self.path, known))
                index.seen += command_lines()
                if not known:
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", 'Basic realm="index"')
                    self.end_headers()
                    return
                name = self.path.strip("/").rpartition("/")[2]
                file = index.folder / name
                found = sorted(index.folder.glob(f"{name}-*.whl"))
                if file.suffix == ".whl" and file.is_file():
                    body, kind = file.read_bytes(), "application/octet-stream"
                elif found:
                    links = "".join(f'<a href="/files/{each.name}">{each.name}</a>' for each in found)
                    body, kind = f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html"
                else:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def do_HEAD(self) -> None:  # uv looks at a wheel before it fetches it
                self.do_GET()

            def log_message(self, *_arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://user:{KEY}@127.0.0.1:{self.server.server_port}/simple/"

    def end(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    folder = tmp_path / "index"
    folder.mkdir()
    running = Index(folder)
    yield running
    running.end()


PLAY = """
- hosts: localhost
  gather_facts: false
  connection: local
  vars_files:
    - {role}/defaults/main.yml
    - {role}/vars/main.yml
    - {role}/vars/Debian.yml
  vars:
    vllm_engine: vllm
    vllm_suffix: -12345678
    vllm_wanted: 0.32.0
    vllm_releases: []
  tasks:
    - ansible.builtin.include_tasks: {role}/tasks/engines/vllm/release.yml
"""


class Installation:
    def __init__(self, controller: Controller, monkeypatch: pytest.MonkeyPatch, installer: str) -> None:
        self.controller = controller
        self.place = controller.root / "versions" / "0.32.0-12345678"
        role = CHECKOUT / "roles" / "vllm"
        # `engines/…` of the tasks is looked for beside the playbook as well.
        (controller.root / "engines").symlink_to(role / "tasks" / "engines")
        controller.write("inventory.yml", "all: {hosts: {localhost: }}\n")
        self.play = controller.write("play.yml", PLAY.format(role=role))
        programs = controller.root / "programs"
        programs.mkdir()
        if installer == "uv":
            (programs / "uv").symlink_to(CHECKOUT / ".venv" / "bin" / "uv")
        # What asks only the indexes that it is told of: neither those of this machine nor the public one.
        controller.environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "PIP_CONFIG_FILE": "/dev/null",
            "UV_NO_CONFIG": "1",
        }
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)

    def run(self, **variables: Any) -> tuple[int, str]:
        # Over what the role itself says, and from a file: the test's own command line is looked at as well.
        paths = {"vllm_versions_path": str(self.place.parent), "vllm_interpreter": sys.executable}
        given = self.controller.write("variables.json", json.dumps(paths | variables))
        result = self.controller.play(self.play, "-v", "-e", f"@{given}")
        return result.returncode, result.stdout

    def holds(self, package: str) -> bool:
        return bool(list(self.place.glob(f"lib/python*/site-packages/{package}.py")))


@pytest.fixture(params=INSTALLERS if os.geteuid() == 0 else ())  # the role gives its files to root
def installation(
    request: pytest.FixtureRequest, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> Installation:
    return Installation(controller, monkeypatch, request.param)


def test_an_index_s_key_is_used_and_can_be_read_by_nobody(installation: Installation, index: Index) -> None:
    wheel(index.folder, "vllm", requires="helper")
    wheel(index.folder, "helper")
    status, output = installation.run(vllm_python_index_url=index.url)
    assert status == 0, output
    assert installation.holds("vllm"), output
    assert installation.holds("helper")
    assert {path for path, known in index.asked if known} >= {"/simple/vllm/", "/files/vllm-0.32.0-py3-none-any.whl"}
    assert "0.32.0" in index.seen  # the installer's own command line is among what was looked at
    assert KEY not in index.seen
    assert KEY not in output
    left = [path for path in installation.place.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert left == []


def test_offline_asks_no_index(installation: Installation, index: Index) -> None:
    wheelhouse = installation.controller.root / "wheelhouse"
    wheelhouse.mkdir()
    wheel(wheelhouse, "vllm")
    wheel(index.folder, "vllm")
    arguments = {"vllm_python_find_links": str(wheelhouse), "vllm_python_index_url": index.url}
    status, output = installation.run(vllm_python_offline=True, **arguments)
    assert status == 0, output
    assert installation.holds("vllm")
    assert index.asked == []


def test_offline_without_all_wheels_fails_and_leaves_nothing(installation: Installation, index: Index) -> None:
    wheelhouse = installation.controller.root / "wheelhouse"
    wheelhouse.mkdir()
    wheel(wheelhouse, "vllm", requires="helper")
    wheel(index.folder, "helper")
    arguments = {"vllm_python_find_links": str(wheelhouse), "vllm_python_index_url": index.url}
    status, output = installation.run(vllm_python_offline=True, **arguments)
    assert status == 2
    assert "Expected vllm 0.32.0 to be installed on localhost" in output
    assert index.asked == []
    assert not installation.place.exists()
