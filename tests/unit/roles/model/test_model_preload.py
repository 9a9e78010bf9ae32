# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading weights into memory: how much of them, what is told, and what can't be known."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import model_preload

GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A link to a version with a file in a folder, an empty one and a link, as an engine finds it."""
    version = tmp_path / "versions" / "4f0c1a7d9be25e38"
    (version / "sub").mkdir(parents=True)
    (version / "b.safetensors").write_bytes(os.urandom(3_000_000))
    (version / "sub" / "a").write_bytes(b"x" * 1000)
    (version / "empty").write_bytes(b"")
    (version / "link").symlink_to("/etc/passwd")
    (tmp_path / "current").symlink_to("versions/4f0c1a7d9be25e38")
    return tmp_path / "current"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def set_memory(available: int, total: int) -> None:
        monkeypatch.setattr(model_preload, "available_memory", lambda: (available, total))

    return set_memory


def run(model: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    assert model_preload.main(["qwen2", str(model), str(tmp_path / "report.json"), *options]) == 0
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    return report


def test_all_of_it_is_read_and_told(
    model: Path, tmp_path: Path, memory: Callable[[int, int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    memory(10 * GIB, 20 * GIB)
    report = run(model, tmp_path)
    assert report["version"] == "4f0c1a7d9be25e38"
    assert report["total_bytes"] == report["loaded_bytes"] == 3_001_000
    assert report["read_bytes"] + (report["cached_bytes"] or 0) == 3_001_000
    assert report["bytes_per_second"] is None
    assert "fewer than 64 MiB" in report["unknown"]["disk_bytes_per_second"]
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "qwen2: 2.9 MiB of 2.9 MiB into memory, 10.0 GiB of 20.0 GiB are available"
    assert output[-1] == f"qwen2: {report['summary']}"


def test_no_more_than_memory_allows(model: Path, tmp_path: Path, memory: Callable[[int, int], None]) -> None:
    memory(3_000_000, 20_000_000)
    report = run(model, tmp_path, "--reserve-percent", "10")
    assert report["loaded_bytes"] == 1_000_000
    assert "1.9 MiB left out for lack of memory" in report["summary"]
    memory(1_000_000, 20_000_000)
    assert run(model, tmp_path)["loaded_bytes"] == 0


def test_rates_are_told_where_enough_came_from_the_disk(
    model: Path, tmp_path: Path, memory: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(10 * GIB, 20 * GIB)
    monkeypatch.setattr(model_preload, "LEAST_FOR_RATE", 1)
    monkeypatch.setattr(model_preload, "_is_cached", lambda *_arguments: False)
    monkeypatch.setattr(model_preload, "disk_speed", lambda _files: 4 * GIB)
    report = run(model, tmp_path)
    assert report["read_bytes"] == 3_001_000
    assert report["bytes_per_second"] > 0
    assert report["percent_of_disk_speed"] == round(100 * report["bytes_per_second"] / (4 * GIB))
    assert "the disk's own speed is 4.0 GiB/s (" in report["summary"]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_file_system_that_does_not_tell_what_is_in_memory(
    model: Path, tmp_path: Path, memory: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    memory(10 * GIB, 20 * GIB)
    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(number, os.strerror(number))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    report = run(model, tmp_path)
    assert report["cached_bytes"] is None
    assert report["bytes_per_second"] is None
    assert report["unknown"].keys() >= {"cached_bytes", "bytes_per_second"}


def test_file_system_without_direct_reads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_preload, "LEAST_FOR_RATE", 1)
    files = model_preload.files_of(str(model.resolve()))

    def refuse(*_arguments: Any, **_options: Any) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match="takes no direct reads"):
        model_preload.disk_speed(files)


def test_disk_that_is_slow_is_not_read_for_long(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_preload, "LEAST_FOR_RATE", 1)
    moments = iter(float(second) for second in range(10_000))
    monkeypatch.setattr(model_preload, "CHUNK", 4096)
    monkeypatch.setattr(os, "preadv", lambda _descriptor, buffers, _offset: len(buffers[0]))
    monkeypatch.setattr(os, "O_DIRECT", 0)
    files = model_preload.files_of(str(model.resolve()))
    assert 0 < model_preload.disk_speed(files, clock=lambda: next(moments)) < 4096


@pytest.mark.parametrize("directory", ["gone", "current/b.safetensors"])
def test_what_is_no_model_loads_nothing(tmp_path: Path, model: Path, directory: str) -> None:
    report = run(tmp_path / directory, tmp_path)
    assert report["total_bytes"] == 0


def test_failure_is_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model_preload.main(["qwen2", str(model), str(tmp_path / "gone" / "report.json")]) == 1
    assert capsys.readouterr().err.startswith("qwen2: ")


@given(st.lists(st.integers(0, 30_000_000), max_size=5), st.integers(0, 100_000_000))
def test_spans_are_the_beginning_of_all_files(sizes: list[int], limit: int) -> None:
    files = [(str(number), size) for number, size in enumerate(sizes)]
    spans = list(model_preload.spans_of(files, limit))
    assert sum(length for _path, _offset, length in spans) == min(sum(sizes), limit)
    assert all(0 < length <= model_preload.CHUNK for _path, _offset, length in spans)
    for path, size in files:
        own = [(offset, length) for name, offset, length in spans if name == path]
        assert [offset for offset, _length in own] == list(range(0, size, model_preload.CHUNK))[: len(own)]


def tell(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_memory_that_is_available(tmp_path: Path) -> None:
    tell(tmp_path, "proc/meminfo", "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    600 kB\n")
    assert model_preload.available_memory(str(tmp_path)) == (600 << 10, 1000 << 10)
    tell(tmp_path, "proc/self/cgroup", "12:memory:/old\n0::/system.slice/a.service\n")
    tell(tmp_path, "sys/fs/cgroup/system.slice/a.service/memory.max", "max\n")
    tell(tmp_path, "sys/fs/cgroup/system.slice/a.service/memory.current", "4096\n")
    tell(tmp_path, "sys/fs/cgroup/system.slice/memory.max", "409600\n")
    tell(tmp_path, "sys/fs/cgroup/system.slice/memory.current", "9600\n")
    assert model_preload.available_memory(str(tmp_path)) == (400_000, 409_600)
    tell(tmp_path, "sys/fs/cgroup/system.slice/memory.current", "500000\n")
    assert model_preload.available_memory(str(tmp_path)) == (0, 409_600)
    tell(tmp_path, "proc/meminfo", "MemTotal:       1000 kB\n")
    with pytest.raises(ValueError, match="no MemAvailable"):
        model_preload.available_memory(str(tmp_path))


def test_bytes_for_people() -> None:
    assert [model_preload.shown(count) for count in (0, 1023, 1024, 1 << 20, 1 << 30, 1 << 42)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.0 MiB",
        "1.0 GiB",
        "4096.0 GiB",
    ]
