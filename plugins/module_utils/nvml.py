# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVML through ``pynvml`` (the module of ``nvidia-ml-py``), with an answer for people where a call has no value.

NVML says much by its errors: a T4 has no row remapper, an old driver lacks a function, a card is off its bus. Here each
call gives a :class:`Reading`: the value, or the reason why there is none. Only what stops every reading (no library, no
driver) is raised, as :class:`NvmlUnavailableError`.

A call into the driver of a card that fell off its bus may never return, and a process that the kernel holds in it
can't be killed. :class:`ReaderProcess` therefore runs a reader in a process of its own and gives up on it in time.
Nothing here imports Ansible.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import json
import os
import re
import select
import signal
import sys
import time
from typing import Any, NamedTuple

from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree

# Where the role `gpu` installs nvidia-ml-py, for hosts whose own Python has none.
VIRTUAL_ENVIRONMENT = "/opt/ringmaster/gpu/venv"

# Return codes of NVML (nvmlReturn_t in nvml.h; the numbers are part of its stable interface).
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_POWER = 8
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
CORRUPTED_INFOROM = 14
GPU_IS_LOST = 15
RESET_REQUIRED = 16
OPERATING_SYSTEM = 17
VERSION_MISMATCH = 18
IN_USE = 19
NO_DATA = 21
ARGUMENT_VERSION_MISMATCH = 25

# What a return code means for the person who reads it.
REASONS = {
    UNINITIALIZED: "NVML is not initialised",
    INVALID_ARGUMENT: "NVML does not know this of this card (invalid argument)",
    NOT_SUPPORTED: "this card has none, or its driver does not tell (not supported)",
    NO_PERMISSION: "NVML tells this to root only (no permission)",
    NOT_FOUND: "NVML found none",
    INSUFFICIENT_POWER: "the card's external power cables are not attached properly",
    TIMEOUT: "the driver got no answer from the card in time",
    FUNCTION_NOT_FOUND: "the installed driver's NVML has no such function; a newer driver does",
    CORRUPTED_INFOROM: "the card's infoROM is corrupted",
    GPU_IS_LOST: "the card has fallen off the bus (GPU is lost)",
    RESET_REQUIRED: "the card must be reset before it answers (reset required)",
    OPERATING_SYSTEM: "the operating system blocked the request",
    IN_USE: "the card is in use",
    NO_DATA: "NVML has no data",
    ARGUMENT_VERSION_MISMATCH: "the installed nvidia-ml-py and the driver disagree on this function's form",
    999: "the driver reports an unknown error",
}
# The card is right, but has no such thing; everything else that gives no value is a reading that failed.
NOT_APPLICABLE = frozenset({INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, NO_DATA})

# NVML_VALUE_NOT_AVAILABLE in nvml.h: all bits set, in 32 or 64 bits.
NO_VALUE = frozenset({(1 << 32) - 1, (1 << 64) - 1})

# What else an unknown version of the library does with what an unknown driver gave it.
_LIBRARY_ERRORS = (
    ctypes.ArgumentError,
    ArithmeticError,
    AttributeError,
    LookupError,
    NameError,
    OSError,
    TypeError,
    ValueError,
)

DEFAULT_SECONDS = 20.0
LONGEST_SECONDS = 3600
"""How long one card may take, and the most that may be asked for. Starting a card that no persistence daemon keeps
ready takes one to three seconds."""


class GpuError(Exception):
    """What was asked for can't be done; says what was expected, what was found and what to do."""

    def __init__(self, expected: str, found: str, to_do: str) -> None:
        super().__init__(f"Expected {expected}. Found {found}. To do: {to_do}.")
        self.expected, self.found, self.to_do = expected, found, to_do


class NvmlUnavailableError(GpuError):
    """Nothing can be read from NVML: there is no library, no driver, or none that fits the other."""


class NoAnswerError(Exception):
    """A reader's process gave no answer; the text says why, for people."""


class Reading(NamedTuple):
    """What one call gave: a value, or the reason why there is none and NVML's return code (None if not from NVML)."""

    value: Any = None
    reason: str = ""
    code: int | None = None

    @property
    def failed(self) -> bool:
        """Whether the card should have this, but it could not be read."""
        return bool(self.reason) and self.code not in NOT_APPLICABLE


def find_library(environment: str = VIRTUAL_ENVIRONMENT) -> Any:
    """The module ``pynvml``: of this Python, else of the virtual environment. Raises NvmlUnavailableError without one.

    This does not open NVIDIA's shared library yet; :meth:`Nvml.open` does.
    """
    for folder in ["", *sorted(glob.glob(f"{environment}/lib/python3*/site-packages"))]:
        if folder and folder not in sys.path:
            sys.path.append(folder)
        try:
            library = importlib.import_module("pynvml")
        except (ImportError, SyntaxError, *_LIBRARY_ERRORS):  # a broken one is as good as none
            continue
        if hasattr(library, "nvmlInit") and hasattr(library, "NVMLError"):
            return library
    raise NvmlUnavailableError(
        f"the Python library nvidia-ml-py (module pynvml) for {sys.executable} or in {environment}",
        "it in neither",
        f"run the role ringmaster.inference.gpu, which installs it in {environment}, or install it for that Python: "
        "`pip install nvidia-ml-py`, on Debian and Ubuntu also the package python3-pynvml",
    )


class Nvml:
    """NVML's functions by name. `library` is the module ``pynvml``, or what stands in for it in a test.

    `files` is only read to say more when the driver can't be reached.
    """

    def __init__(self, library: Any, files: FileTree) -> None:
        self.library = library
        self.files = files
        self._open = False

    def open(self) -> None:
        """Initialise NVML, once. Raises NvmlUnavailableError with what to do if that fails."""
        if self._open:
            return
        answer = self.call("nvmlInit")
        if answer.reason:
            raise self._unavailable(answer)
        self._open = True

    def call(self, function: str, *arguments: Any) -> Reading:
        """Call `function`; never raises for what NVML, the card or the library do."""
        implementation = getattr(self.library, function, None)
        if implementation is None:
            version = getattr(self.library, "__version__", "")
            return Reading(
                reason=f"the installed nvidia-ml-py{f' {version}' if version else ''} has no {function}; "
                "a newer nvidia-ml-py does",
                code=FUNCTION_NOT_FOUND,
            )
        try:
            value = implementation(*arguments)
        except self.library.NVMLError as error:
            code = getattr(error, "value", None)
            if not isinstance(code, int):
                return Reading(reason=f"NVML: {error}")
            return Reading(reason=REASONS.get(code) or f"NVML's error {code}: {error}", code=code)
        # What else an unknown version of the library does with what an unknown driver gave it.
        except (
            ctypes.ArgumentError,
            ArithmeticError,
            AttributeError,
            LookupError,
            OSError,
            TypeError,
            ValueError,
        ) as error:
            return Reading(reason=f"nvidia-ml-py can't read the driver's answer ({error.__class__.__name__}: {error})")
        if value is None:
            return Reading()
        if isinstance(value, int) and value in NO_VALUE:
            return Reading(reason="the driver says that it has no value", code=NO_DATA)
        return Reading(value)

    def first(self, functions: tuple[str, ...], *arguments: Any) -> Reading:
        """The answer of the first of `functions` that library and driver have."""
        reading = Reading(reason="NVML has no such function", code=FUNCTION_NOT_FOUND)
        for function in functions:
            reading = self.call(function, *arguments)
            if reading.code not in (FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH):
                break
        return reading

    def fields(self, handle: Any, identifiers: list[int | tuple[int, int]]) -> list[Reading]:
        """Field values (``NVML_FI_*``), each by its number or by number and scope, for example the link."""
        answer = self.call("nvmlDeviceGetFieldValues", handle, identifiers)
        if answer.reason:
            return [answer] * len(identifiers)
        try:
            readings = [_field(value) for value in list(answer.value)[: len(identifiers)]]
        except TypeError:
            readings = []
        return readings + [Reading(reason="NVML gave no value", code=NO_DATA)] * (len(identifiers) - len(readings))

    def _unavailable(self, answer: Reading) -> NvmlUnavailableError:
        if answer.code == LIBRARY_NOT_FOUND:
            return NvmlUnavailableError(
                "NVIDIA's library libnvidia-ml.so.1",
                "that the system has none",
                "install the NVIDIA driver (role ringmaster.inference.driver); on Debian the package libnvidia-ml1, "
                "on Ubuntu and EL it is part of the driver's compute packages",
            )
        module = _first_line(self.files.text("/proc/driver/nvidia/version"))
        if answer.code == DRIVER_NOT_LOADED:
            return NvmlUnavailableError(
                "NVIDIA's kernel module to be loaded and its cards to be there",
                f"the module ({module}), but that it does not answer" if module else "that it is not loaded",
                "run `modprobe nvidia` and read `dmesg | grep -i -e nvrm -e nvidia`; after a new kernel the module has "
                "to be built for it (`dkms status`), with Secure Boot its key has to be enrolled",
            )
        if answer.code == VERSION_MISMATCH:
            return NvmlUnavailableError(
                "NVIDIA's library and its loaded kernel module to be of one version",
                f"another library than the loaded module ({module or 'version unknown'})",
                "the driver was replaced while its former module stayed loaded: reboot, or stop everything that uses a "
                "card and load the module anew",
            )
        if answer.code == NO_PERMISSION:
            return NvmlUnavailableError(
                "to be allowed to use NVML",
                "that it is refused",
                "run as root (become), and look at the modes of /dev/nvidia*",
            )
        return NvmlUnavailableError(
            "NVML to start",
            f"{answer.reason}{f' (code {answer.code})' if answer.code is not None else ''}",
            "run `nvidia-smi` on the host and read `dmesg | grep -i nvrm`",
        )


def _field(value: Any) -> Reading:
    """One of ``nvmlDeviceGetFieldValues``'s structures: its own return code, else the member its type names."""
    try:
        code = int(value.nvmlReturn)
        if code != 0:
            return Reading(reason=REASONS.get(code) or f"NVML's error {code}", code=code)
        # nvmlValueType_t in nvml.h.
        members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
        number = getattr(value.value, members[int(value.valueType)])
    except (AttributeError, LookupError, TypeError, ValueError):
        return Reading(reason="nvidia-ml-py can't read the driver's answer")
    if number in NO_VALUE:
        return Reading(reason="the driver says that it has no value", code=NO_DATA)
    return Reading(number)


class Facts:
    """Values by field name. One that can't be known is None, and `unknown` has the reason.

    `failed` are those of `unknown` that the card should have: their reading failed.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        self.failed: list[str] = []

    def put(self, field: str, reading: Reading) -> Any:
        """Keep the value of `reading`, or why there is none; gives the value."""
        self.values[field] = reading.value
        if reading.reason or reading.value is None:
            self.values[field] = None
            self.unknown[field] = reading.reason or "NVML gave no value"
            if reading.failed:
                self.failed.append(field)
        return self.values[field]


def as_integer(reading: Reading, least: int = 0, most: int = (1 << 64) - 1) -> Reading:
    """A whole number from `least` to `most`; anything else is no value."""
    if reading.reason:
        return reading
    number = reading.value
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        return Reading(reason=f"NVML gave {number!r}, which can't be")
    return reading


def as_flag(reading: Reading) -> Reading:
    """NVML's 0 and 1 as False and True; anything else is no value."""
    answer = as_integer(reading, 0, 1)
    return answer if answer.reason else Reading(answer.value == 1)


def as_text(reading: Reading) -> Reading:
    """Text. Old versions of nvidia-ml-py give bytes; nothing in it may disturb a terminal or a log line."""
    if reading.reason:
        return reading
    value = reading.value
    if isinstance(value, bytes):
        value = value.split(b"\0", 1)[0].decode("utf-8", "replace")
    if not isinstance(value, str):
        return Reading(reason=f"NVML gave {value!r}, which can't be")
    text = value.split("\0", 1)[0].strip()
    if not text.isprintable():
        text = "".join(each if each.isprintable() else "\ufffd" for each in text)
    return Reading(text) if text else Reading(reason="NVML gave an empty text", code=NO_DATA)


def as_watts(reading: Reading) -> Reading:
    """NVML's milliwatts as watts. 100 kW is more than any card."""
    answer = as_integer(reading, 0, 100_000_000)
    return answer if answer.reason else Reading(answer.value / 1000)


def member(reading: Reading, name: str) -> Reading:
    """A member of the structure that a call gave."""
    if reading.reason:
        return reading
    try:
        return Reading(getattr(reading.value, name))
    except (AttributeError, ValueError):  # pynvml decodes text members when they are asked for
        return Reading(reason=f"NVML's answer has no {name}")


def element(reading: Reading, position: int) -> Reading:
    """An element of the list that a call gave."""
    if reading.reason:
        return reading
    try:
        return Reading(reading.value[position])
    except (LookupError, TypeError):
        return Reading(reason="NVML's answer is too short")


_PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?\Z")


def pci_address(text: str, function: str = "0") -> str | None:
    """``0000:07:00.0`` for any usual form of it (NVML's eight-digit domain, capitals, no domain); None for other text.

    A GPU is always `function` 0 of its device; forms that leave it out (the kernel log) get that.
    """
    found = _PCI_ADDRESS.match(text.strip().lower())
    if not found:
        return None
    domain, bus, device, found_function = found.groups()
    numbers = int(domain or "0", 16), int(bus, 16), int(device, 16)
    if numbers[2] > 0x1F:  # five bits
        return None
    return f"{numbers[0]:04x}:{numbers[1]:02x}:{numbers[2]:02x}.{found_function or function}"


def _first_line(text: str | None) -> str:
    lines = (text or "").splitlines()
    return " ".join(lines[0].split())[:120] if lines else ""


def time_limit(seconds: float) -> float:
    """`seconds`, if one card can be given that long. Raises GpuError."""
    if not 0 < seconds <= LONGEST_SECONDS:
        raise GpuError(
            f"a time limit of more than 0 and at most {LONGEST_SECONDS} seconds for one card",
            f"{seconds:g}",
            f"leave it at {DEFAULT_SECONDS:g}",
        )
    return seconds


class ReaderProcess:
    """A reader whose methods run in a child process, each with an end.

    ``call("card", 3)`` runs ``reader.card(3)`` there; arguments and result must be what JSON can carry. A call that
    takes longer than `seconds` is given up with :class:`NoAnswerError`, and so is the process, which a hung driver may
    hold for ever; the next call starts a new one. Nothing of this process is inherited that a hung child could hold on
    to: not its standard streams (Ansible waits for their end), not its locks.

    Use it as a context manager. Only for processes with a single thread, as a module is: it forks.
    """

    def __init__(self, reader: object, seconds: float = DEFAULT_SECONDS) -> None:
        self._seconds = time_limit(seconds)
        self._reader = reader
        self._child: int | None = None
        self._requests = self._answers = -1

    def __enter__(self) -> ReaderProcess:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of the reader's `method`. Raises NvmlUnavailableError as the reader does, and NoAnswerError."""
        if self._child is None:
            self._start()
        try:
            os.write(self._requests, json.dumps([method, arguments]).encode("ascii") + b"\n")
            line = self._line(time.monotonic() + self._seconds)
        except BrokenPipeError:
            line = b""
        if line is None:
            self.close()
            raise NoAnswerError(f"no answer within {self._seconds:g} s")
        try:
            answer = json.loads(line)
        except ValueError:
            status = self.close()
            raise NoAnswerError(f"the process that reads NVML ended without an answer{status}") from None
        if "unavailable" in answer:
            raise NvmlUnavailableError(*answer["unavailable"])
        if "error" in answer:
            raise NoAnswerError(answer["error"])
        return answer["value"]

    def close(self) -> str:
        """End the child. Gives how it ended, for people; one that the kernel holds is left behind."""
        if self._child is None:
            return ""
        child, self._child = self._child, None
        os.close(self._requests)
        os.close(self._answers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        for _attempt in range(100):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                return f" (signal {ended_by})" if ended_by and ended_by != signal.SIGKILL else ""
            time.sleep(0.01)
        return ""

    def _line(self, deadline: float) -> bytes | None:
        """One line of the child; None if it is not there at `deadline`, not a whole one if the child ended."""
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return None
            part = os.read(self._answers, 1 << 16)
            if not part:
                break
            parts.append(part)
        return b"".join(parts)

    def _start(self) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._child = os.fork()
        if self._child:
            os.close(requests)
            os.close(answers)
            return
        try:
            _leave_parent(keep={requests, answers})
            _serve(self._reader, requests, answers)
        finally:
            os._exit(0)


def _leave_parent(keep: set[int]) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor not in keep:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _serve(reader: object, requests: int, answers: int) -> None:
    with os.fdopen(requests, "rb") as lines, os.fdopen(answers, "wb") as output:
        for line in lines:
            method, arguments = json.loads(line)
            answer: dict[str, Any]
            try:
                answer = {"value": getattr(reader, method)(*arguments)}
            except NvmlUnavailableError as error:
                answer = {"unavailable": [error.expected, error.found, error.to_do]}
            except Exception as error:  # noqa: BLE001  the other process has to hear of whatever it was
                answer = {"error": f"reading failed ({error.__class__.__name__}: {error})"}
            output.write(json.dumps(answer).encode("ascii") + b"\n")
            output.flush()
