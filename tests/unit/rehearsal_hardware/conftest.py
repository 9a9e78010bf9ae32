# SPDX-License-Identifier: GPL-3.0-or-later
"""Simulated machines for the tests, and NVIDIA's own Python binding on top of the stand-in library."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rehearsal.hardware import Machine, build, library
from rehearsal.hardware.state import ENVIRONMENT

BUILT = Path(__file__).resolve().parents[3] / ".cache" / "rehearsal-hardware"
Start = Callable[[Machine], ModuleType]


@pytest.fixture
def a100(tmp_path: Path) -> Machine:
    """Four A100-SXM4-80GB, linked directly."""
    return build("a100-sxm4x4", tmp_path / "a100")


@pytest.fixture
def l40s(tmp_path: Path) -> Machine:
    """Four L40S."""
    return build("l40sx4", tmp_path / "l40s")


@pytest.fixture
def start_nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A function that starts nvidia-ml-py on a machine; it is shut down at the test's end."""
    started: list[ModuleType] = []

    def start(machine: Machine) -> ModuleType:
        monkeypatch.setenv(ENVIRONMENT, str(machine.state.folder))
        library.load(BUILT, machine.state)
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        started.append(nvml)
        return nvml

    yield start
    for nvml in started:
        nvml.nvmlShutdown()
