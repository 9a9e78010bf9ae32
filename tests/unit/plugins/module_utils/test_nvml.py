# SPDX-License-Identifier: GPL-3.0-or-later
"""NVML's answers as values or reasons, and readers in a process of their own."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils import nvml as module
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.nvml import (
    Facts,
    GpuError,
    NoAnswerError,
    Nvml,
    NvmlUnavailableError,
    ReaderProcess,
    Reading,
    as_flag,
    as_integer,
    as_text,
    as_watts,
    find_library,
    pci_address,
)
from tests.support.nvml import Code, Library, NVMLError, a100, field


def opened(library: Any, tmp_path: Path) -> Nvml:
    nvml = Nvml(library, FileTree(str(tmp_path)))
    nvml.open()
    return nvml


# The library


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pynvml in this Python, and none of the test's own left behind."""
    real = sys.modules.pop("pynvml", None)
    monkeypatch.setattr(sys, "path", [])
    yield
    sys.modules.pop("pynvml", None)
    if real:
        sys.modules["pynvml"] = real


@pytest.mark.usefixtures("no_library")
def test_the_library_of_the_virtual_environment_is_found(tmp_path: Path) -> None:
    packages = tmp_path / "venv/lib/python3.9/site-packages"
    packages.mkdir(parents=True)
    (packages / "pynvml.py").write_text("class NVMLError(Exception): pass\ndef nvmlInit(): pass\nhere = True\n")
    assert find_library(str(tmp_path / "venv")).here


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("content", [None, "raise RuntimeError_\n", "def broken(:\n", "no_nvml_at_all = True\n"])
def test_no_usable_library_says_how_to_install_it(tmp_path: Path, content: str | None) -> None:
    packages = tmp_path / "venv/lib/python3.9/site-packages"
    packages.mkdir(parents=True)
    if content is not None:
        (packages / "pynvml.py").write_text(content)
    with pytest.raises(NvmlUnavailableError, match=r"nvidia-ml-py.*To do: .*role.*pip install nvidia-ml-py"):
        find_library(str(tmp_path / "venv"))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (9, "modprobe nvidia"),
        (12, "libnvidia-ml1"),
        (18, "reboot"),
        (4, "become"),
        (15, "nvidia-smi"),
        (999, "unknown error"),
        (123456, "123456"),
        ("odd", "NVML"),
    ],
)
def test_nvml_that_does_not_start_says_what_to_do(tmp_path: Path, code: Any, says: str) -> None:
    with pytest.raises(NvmlUnavailableError, match=says) as raised:
        Nvml(Library(init=Code(code)), FileTree(str(tmp_path))).open()
    assert str(raised.value).startswith("Expected ")
    assert ". To do: " in str(raised.value)


def test_a_mismatch_names_the_loaded_module(tmp_path: Path) -> None:
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version\n"
    )
    with pytest.raises(NvmlUnavailableError, match=r"580\.95\.05"):
        Nvml(Library(init=Code(18)), FileTree(str(tmp_path))).open()


def test_nvml_is_started_once(tmp_path: Path) -> None:
    starts = []
    library = Library()
    library.nvmlInit = lambda: starts.append(1)  # type: ignore[method-assign]
    nvml = opened(library, tmp_path)
    nvml.open()
    assert starts == [1]


# Calls


@pytest.mark.parametrize(
    ("answer", "reason", "failed"),
    [
        (Code(3), "not supported", False),
        (Code(2), "invalid argument", False),
        (Code(4), "root", True),
        (Code(13), "newer driver", True),
        (Code(15), "fallen off the bus", True),
        (Code(4242), "4242", True),
        (Code(None), "NVML", True),
        (TypeError("odd"), "TypeError: odd", True),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "UnicodeDecodeError", True),
        (ctypes.ArgumentError("odd"), "ArgumentError", True),
        ((1 << 32) - 1, "no value", False),
        ((1 << 64) - 1, "no value", False),
    ],
)
def test_a_call_without_a_value_has_a_reason(tmp_path: Path, answer: Any, reason: str, failed: bool) -> None:
    reading = opened(Library(a100(PowerUsage=answer)), tmp_path).call("nvmlDeviceGetPowerUsage", 0)
    assert reading.value is None
    assert reason in reading.reason
    assert reading.failed is failed


def test_a_function_that_the_installed_library_lacks_is_named(tmp_path: Path) -> None:
    library = Library(a100(), missing=["nvmlDeviceGetRemappedRows"])
    library.__version__ = "11.0"
    reading = opened(library, tmp_path).call("nvmlDeviceGetRemappedRows", 0)
    assert (
        reading.reason == "the installed nvidia-ml-py 11.0 has no nvmlDeviceGetRemappedRows; a newer nvidia-ml-py does"
    )
    assert reading.failed


def test_the_first_function_that_exists_answers(tmp_path: Path) -> None:
    nvml = opened(Library(a100(New=7, Lost=Code(15)), missing=["nvmlDeviceGetOld"]), tmp_path)
    assert nvml.first(("nvmlDeviceGetOld", "nvmlDeviceGetNew"), 0).value == 7
    assert nvml.first(("nvmlDeviceGetLost", "nvmlDeviceGetNew"), 0).code == 15
    assert nvml.first(("nvmlDeviceGetOld",), 0).code == 13


def test_field_values_have_codes_and_types_of_their_own(tmp_path: Path) -> None:
    fields = {1: field(5), 2: field(code=3), 3: field(-4, kind=5), 4: field((1 << 32) - 1, kind=1), 5: object()}
    nvml = opened(Library(a100(fields=fields)), tmp_path)
    values = nvml.fields(0, [1, 2, 3, 4, 5, 6])
    assert [value.value for value in values] == [5, None, -4, None, None, None]
    assert "not supported" in values[1].reason
    broken = opened(Library(a100(fields=[field(5)])), tmp_path).fields(0, [1, 2])
    assert [value.value for value in broken] == [5, None]
    lost = opened(Library(a100(fields=Code(15))), tmp_path).fields(0, [1, 2])
    assert [value.code for value in lost] == [15, 15]
    odd = opened(Library(a100(fields=[SimpleNamespace(nvmlReturn=0, valueType=9, value=None)])), tmp_path)
    assert odd.fields(0, [1])[0].reason == "nvidia-ml-py can't read the driver's answer"


def test_text_of_old_libraries_and_hostile_text() -> None:
    assert as_text(Reading(b"92.00.36\0\0")).value == "92.00.36"
    assert as_text(Reading(b"\xff\xfe")).value == "\ufffd\ufffd"
    assert as_text(Reading("\ta\x1b[31m\nb\n")).value == "a\ufffd[31m\ufffdb"
    assert as_text(Reading("  ")).reason
    assert as_text(Reading(7)).reason


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.integers(), max_size=3),
    st.builds(object),
)


@given(anything)
def test_whatever_nvml_gives_is_a_value_or_a_reason(value: Any) -> None:
    for convert in (as_integer, as_flag, as_text, as_watts):
        reading = convert(Reading(value))
        assert (reading.value is None) == bool(reading.reason)
    facts = Facts()
    facts.put("field", as_integer(Reading(value)))
    assert (facts.values["field"] is None) == ("field" in facts.unknown)


# PCI addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:07:00.0", "0000:07:00.0"),
        ("00000009:01:00.0", "0009:01:00.0"),
        ("0000:BD:00.0", "0000:bd:00.0"),
        ("0000:10:1c", "0000:10:1c.0"),
        ("07:00.0", "0000:07:00.0"),
        ("00010000:07:00.0", "10000:07:00.0"),
        (" 0000:07:00.1 ", "0000:07:00.1"),
        ("0000:07:20.0", None),
        ("0000:07:00.8", None),
        ("0000:07", None),
        ("GPU-5f1c", None),
        ("", None),
        ("0000:07:00.0\n0000:08:00.0", None),
    ],
)
def test_addresses_have_one_form(text: str, address: str | None) -> None:
    assert pci_address(text) == address


@given(st.text(alphabet="0123456789abcdefABCDEF:.x \n", max_size=24))
def test_addresses_stay_as_they_are(text: str) -> None:
    address = pci_address(text)
    assert address is None or pci_address(address) == address


# Readers in a process


class Reader:
    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.calls = 0

    def number(self, value: int) -> int:
        self.calls += 1
        return value + self.calls

    def who(self) -> int:
        return os.getpid()

    def hang(self) -> None:
        self.mark.write_text(str(os.getpid()))
        time.sleep(600)

    def end(self) -> None:
        os.kill(os.getpid(), 11)

    def unavailable(self) -> None:
        raise NvmlUnavailableError("a", "b", "c")

    def broken(self) -> None:
        raise KeyError("odd")

    def unspeakable(self) -> Any:
        return object()

    def descriptors(self) -> list[str]:
        paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return [os.readlink(path) for path in paths if os.path.lexists(path)]  # but for the listing's own

    def large(self) -> str:
        return "x" * 1_000_000


def test_calls_go_to_one_process_until_it_hangs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with ReaderProcess(Reader(mark), seconds=0.5) as process:
        first = process.call("who")
        assert first not in (os.getpid(), None)
        assert process.call("who") == first
        assert process.call("number", 5) == 6
        assert process.call("number", 5) == 7
        with pytest.raises(NoAnswerError, match=r"no answer within 0\.5 s"):
            process.call("hang")
        assert process.call("number", 5) == 6
        assert process.call("who") != first
    hung = int(mark.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)


def test_a_process_that_ends_and_what_it_raises_are_told(tmp_path: Path) -> None:
    with ReaderProcess(Reader(tmp_path / "mark")) as process:
        with pytest.raises(NoAnswerError, match=r"ended without an answer \(signal 11\)"):
            process.call("end")
        with pytest.raises(NvmlUnavailableError, match=r"Expected a\. Found b\. To do: c\."):
            process.call("unavailable")
        with pytest.raises(NoAnswerError, match="KeyError"):
            process.call("broken")
        with pytest.raises(NoAnswerError):
            process.call("unspeakable")
        assert process.call("number", 1) == 2
        assert len(process.call("large")) == 1_000_000
    assert process.close() == ""


def test_a_child_holds_nothing_of_its_parent(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w", encoding="ascii"), ReaderProcess(Reader(tmp_path / "mark")) as process:
        held = process.call("descriptors")
    assert held[:3] == ["/dev/null"] * 3
    assert str(tmp_path / "lock") not in held


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 3601])
def test_time_limits_that_are_none(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(GpuError, match="time limit"):
        ReaderProcess(Reader(tmp_path / "mark"), seconds)


def test_the_real_library_has_what_is_used_of_it() -> None:
    """nvidia-ml-py's own module raises errors with these codes, and reads a field as tuple of number and scope."""
    pynvml = pytest.importorskip("pynvml")
    codes = {name: value for name, value in vars(module).items() if isinstance(value, int) and name.isupper()}
    named = {
        name: value
        for name, value in codes.items()
        if hasattr(pynvml, f"NVML_ERROR_{name}") or name == "VERSION_MISMATCH"
    }
    assert len(named) > 12
    assert named.pop("VERSION_MISMATCH") == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    assert {name: getattr(pynvml, f"NVML_ERROR_{name}") for name in named} == named
    assert pynvml.NVMLError(15).value == 15
    assert NVMLError(15).value == 15
