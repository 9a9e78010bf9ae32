# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel files below a root: whatever is there, or isn't, has an answer and no traceback."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import file_tree
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import (
    FileTree,
    KeptFileTree,
    format_cpus,
    natural_order,
    parse_choice,
    parse_cpus,
    parse_integer,
)


def tree_with(root: Path, **files: bytes) -> FileTree:
    """A tree with one folder `/sys` that holds the files."""
    (root / "sys").mkdir()
    for name, content in files.items():
        (root / "sys" / name).write_bytes(content)
    return FileTree(str(root))


@pytest.mark.parametrize(
    ("content", "text", "integer"),
    [
        (b"12\n", "12", 12),
        (b"12", "12", 12),
        (b" 0x1F \n", "0x1F", 31),
        (b"-1\n", "-1", -1),
        (b"+7\n", "+7", 7),
        (b"", "", None),
        (b"\n", "", None),
        (b"N/A (no PMA)\n", "N/A (no PMA)", None),
        (b"1\xff2\n", "1\N{REPLACEMENT CHARACTER}2", None),
        (b"string\0", "string", None),
        (b"7\n\0\0", "7", 7),
        # No number comes into being by leaving out what is in between.
        (b"1\0002\n", "1\N{REPLACEMENT CHARACTER}2", None),
        (b"1 2\n", "1 2", None),
        (b"1_000\n", "1_000", None),
        ("٣\n".encode(), "٣", None),
        (b"0x\n", "0x", None),
        (b"9" * 41, "9" * 41, None),
    ],
)
def test_content_of_a_file(tmp_path: Path, content: bytes, text: str, integer: int | None) -> None:
    tree = tree_with(tmp_path, file=content)
    assert tree.text("/sys/file") == text
    assert tree.integer("/sys/file") == integer
    assert tree.data("/sys/file") == content
    assert tree.complaint("/sys/file") == ""


def test_line_ends_are_kept_in_raw(tmp_path: Path) -> None:
    assert tree_with(tmp_path, file=b" a\nb \n").raw("/sys/file") == " a\nb \n"


def test_what_can_not_be_read_is_none_and_says_why(tmp_path: Path) -> None:
    tree = tree_with(tmp_path, file=b"x")
    os.mkfifo(tmp_path / "sys" / "pipe")
    (tmp_path / "sys" / "circle").symlink_to("circle")
    (tmp_path / "sys" / "dangling").symlink_to("nowhere")
    complaints = {
        "/sys/missing": "no such file",
        "/sys/file/below": "no such file",
        "/sys": "not a regular file",
        "/sys/pipe": "not a regular file",
        "/sys/circle": os.strerror(errno.ELOOP),
        "/sys/dangling": "no such file",
        "/sys/nul\0": "a NUL byte in the path",
        "/sys/" + "x" * 300: os.strerror(errno.ENAMETOOLONG),
    }
    assert {path: tree.complaint(path) for path in complaints} == complaints
    for path in complaints:
        assert tree.text(path) is None
        assert tree.raw(path) is None
        assert tree.data(path) is None
        assert tree.integer(path) is None
        assert tree.names(path) == ([] if path != "/sys" else ["circle", "dangling", "file", "pipe"])


def test_the_kernels_refusal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty GID slot answers EINVAL when it is read, not when it is opened."""
    tree = tree_with(tmp_path, file=b"x")

    def refuse(_self: FileTree, _path: str) -> bytes:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(FileTree, "_read", refuse)
    assert tree.text("/sys/file") is None
    assert tree.complaint("/sys/file") == "Invalid argument"


def test_a_long_file_is_not_taken_for_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_tree, "LARGEST_FILE", 4)
    tree = tree_with(tmp_path, fits=b"1234", long=b"12345")
    assert tree.integer("/sys/fits") == 1234
    assert tree.integer("/sys/long") is None
    assert tree.complaint("/sys/long") == "longer than 4 bytes"


def test_links_are_followed_below_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sys/devices/pci0/0000:07:00.0").mkdir(parents=True)
    (root / "sys/devices/pci0/0000:07:00.0/class").write_text("0x030200\n")
    (root / "sys/bus").mkdir()
    (root / "sys/bus/relative").symlink_to("../devices/pci0/0000:07:00.0")
    (root / "sys/bus/absolute").symlink_to("/sys/devices/pci0/0000:07:00.0")
    (root / "sys/bus/chained").symlink_to("absolute")
    (root / "sys/bus/outside").symlink_to("../../../../../../../sys/bus/relative")
    (tmp_path / "secret").write_text("outside")
    (root / "sys/bus/escape").symlink_to("../../../secret")
    (root / "sys/bus/escape-absolute").symlink_to(str(tmp_path / "secret"))
    tree = FileTree(str(root))
    for name in ("relative", "absolute", "chained", "outside"):
        assert tree.integer(f"/sys/bus/{name}/class") == 0x030200, name
        assert tree.resolve(f"/sys/bus/{name}") == "/sys/devices/pci0/0000:07:00.0", name
        assert tree.exists(f"/sys/bus/{name}")
    for name in ("escape", "escape-absolute"):
        assert tree.text(f"/sys/bus/{name}") is None, name
        assert not tree.exists(f"/sys/bus/{name}")
        assert tree.resolve(f"/sys/bus/{name}") is None
    assert tree.text("/../../secret") is None


def test_the_machines_own_root_behaves_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("5\n")
    (tmp_path / "link").symlink_to("folder/file")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "dangling").symlink_to("nowhere")
    machine, below = FileTree(), FileTree(str(tmp_path))
    for name in ("folder/file", "link", "circle", "dangling", "missing", "folder", "folder/../link", "nul\0"):
        path = f"{tmp_path}/{name}"
        assert machine.text(path) == below.text(f"/{name}"), name
        assert machine.complaint(path) == below.complaint(f"/{name}"), name
        assert machine.exists(path) == below.exists(f"/{name}"), name
        assert machine.names(path) == below.names(f"/{name}"), name
    assert machine.resolve(f"{tmp_path}/link") == os.path.realpath(tmp_path / "folder/file")
    assert machine.resolve("/") == below.resolve("/") == "/"


def test_relative_paths_start_at_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("below the folder one is in\n")
    assert FileTree().text("file") is None
    assert FileTree(str(tmp_path)).text("file") == "below the folder one is in"


def test_names_are_in_natural_order_and_text(tmp_path: Path) -> None:
    for name in ("mlx5_10", "mlx5_2", "mlx5_02", "a", "mlx5", "10", "9"):
        (tmp_path / name).touch()
    with open(os.fsencode(tmp_path) + b"/mlx5_\xff", "wb"):
        pass
    tree = FileTree(str(tmp_path))
    assert tree.names("/") == ["9", "10", "a", "mlx5", "mlx5_02", "mlx5_2", "mlx5_10"]
    assert tree.names("/missing") == []


def test_writing_into_a_file_that_is_there(tmp_path: Path) -> None:
    tree = tree_with(tmp_path, policy=b"[default] performance\n", config=b"\xff" * 8)
    (tmp_path / "link").symlink_to("/sys/policy")
    tree.write("/link", "performance")
    assert tree.data("/sys/policy") == b"performance", "nothing of the longer former content is left"
    tree.write("/sys/config", b"\0\0", 4)
    assert tree.data("/sys/config") == b"\xff\xff\xff\xff\0\0\xff\xff"
    with pytest.raises(FileNotFoundError):
        tree.write("/sys/missing", "1")
    assert tree.names("/sys") == ["config", "policy"], "no file is made"


def test_whether_a_file_may_be_written(tmp_path: Path) -> None:
    tree = tree_with(tmp_path, file=b"x")
    (tmp_path / "circle").symlink_to("circle")
    assert tree.writable("/sys/file")
    for path in ("/sys/missing", "/circle", "/nul\0"):
        assert not tree.writable(path)


@pytest.mark.parametrize(
    ("text", "chosen", "choices"),
    [
        ("[none] mq-deadline kyber bfq", "none", ["none", "mq-deadline", "kyber", "bfq"]),
        ("default [performance] powersave", "performance", ["default", "performance", "powersave"]),
        ("none", "none", ["none"]),
        ("", None, []),
        (None, None, []),
        ("a b", None, ["a", "b"]),
        ("[a] [b]", None, ["a", "b"]),
        ("[]", None, []),
        ("[", None, []),
    ],
)
def test_choice(text: str | None, chosen: str | None, choices: list[str]) -> None:
    assert parse_choice(text) == (chosen, choices)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8", [0, 1, 2, 3, 8]),
        ("0\n", [0]),
        ("", []),
        (None, None),
        ("3-1", None),
        ("0-", None),
        ("-1", None),
        ("0-99999999", None),
        ("0-65535", list(range(65536))),
        ("0-65536", None),
        ("1,,2", None),
        ("0:1", None),
        ("x", None),
    ],
)
def test_list_of_cpus(text: str | None, cpus: list[int] | None) -> None:
    assert parse_cpus(text) == cpus


@given(st.sets(st.integers(0, 300)))
def test_a_list_of_cpus_is_read_as_it_was_written(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == sorted(cpus)


@given(st.text(), st.text(alphabet="0123456789-,[]x \0\n"), st.integers())
def test_no_text_makes_a_parser_fail(text: str, almost: str, number: int) -> None:
    for each in (text, almost):
        parse_integer(each)
        parse_choice(each)
        parse_cpus(each)
        natural_order(each)
    if len(str(abs(number))) <= 40:
        assert parse_integer(str(number)) == number
        assert parse_integer(f" {number}\n") == number


@given(st.lists(st.integers(0, 10**60), min_size=2, max_size=4))
def test_numbers_in_names_sort_as_numbers(numbers: list[int]) -> None:
    names = [f"cpu{number}" for number in numbers]
    assert sorted(names, key=natural_order) == [f"cpu{number}" for number in sorted(numbers)]


def test_numbers_too_long_for_python_to_convert_sort_as_numbers() -> None:
    long, longer = "cpu" + "9" * 5000, "cpu1" + "0" * 5000
    assert sorted([longer, long, "cpu2"], key=natural_order) == ["cpu2", long, longer]


@given(st.binary(max_size=200))
def test_no_content_makes_a_reader_fail(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.mktemp("tree")
    tree = tree_with(root, file=content)
    text = tree.text("/sys/file")
    assert text is not None
    text.encode("utf-8")
    assert "\0" not in text
    tree.integer("/sys/file")


@given(st.text(max_size=50))
def test_no_path_makes_a_reader_fail(path: str) -> None:
    for tree in (FileTree("/proc/self/fdinfo"), FileTree()):
        tree.text("/nowhere/" + path)
        tree.names("/nowhere/" + path)
        tree.exists(path)
        tree.resolve(path)
        tree.complaint("/nowhere/" + path)


def test_a_kept_file_is_read_anew_each_time(tmp_path: Path) -> None:
    tree_with(tmp_path, count=b"1\n")
    kept = KeptFileTree(str(tmp_path))
    assert kept.integer("/sys/count") == 1
    (tmp_path / "sys/count").write_bytes(b"22\n")  # in place, as an attribute changes
    assert kept.integer("/sys/count") == 22
    kept.close()
    assert kept.integer("/sys/count") == 22
    kept.close()


def test_a_kept_file_that_another_one_replaced_is_left(tmp_path: Path) -> None:
    tree_with(tmp_path, count=b"1\n")
    kept = KeptFileTree(str(tmp_path))
    assert kept.integer("/sys/count") == 1
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"2\n")
    fresh.replace(tmp_path / "sys/count")
    assert kept.integer("/sys/count") == 2
    (tmp_path / "sys/count").unlink()
    assert kept.integer("/sys/count") is None
    assert kept.complaint("/sys/count") == "no such file"
    (tmp_path / "sys/count").write_bytes(b"3\n")
    assert kept.integer("/sys/count") == 3
    kept.close()


def test_a_kept_file_of_a_device_that_went_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_with(tmp_path, count=b"1\n")
    kept = KeptFileTree(str(tmp_path))
    assert kept.integer("/sys/count") == 1
    refused = [errno.ENODEV]
    pread = os.pread

    def gone(descriptor: int, length: int, offset: int) -> bytes:
        if refused:
            raise OSError(refused.pop(), "gone")
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", gone)
    assert kept.integer("/sys/count") == 1
    assert refused == []
    kept.close()


def test_nothing_but_files_is_kept_and_none_that_is_no_attribute(tmp_path: Path) -> None:
    tree_with(tmp_path, long=b"x" * (1 << 16), fits=b"1" * ((1 << 16) - 1))
    kept = KeptFileTree(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    for path in ("/sys", "/sys/long", "/sys/pipe", "/sys/nothing", "/sys/\0"):
        assert kept.data(path) is None
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(kept.data("/sys/fits") or b"") == (1 << 16) - 1
    assert len(os.listdir("/proc/self/fd")) == before + 1
    kept.close()
    assert len(os.listdir("/proc/self/fd")) == before
