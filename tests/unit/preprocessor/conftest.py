# SPDX-License-Identifier: GPL-3.0-or-later
"""The preprocessor's binary, built before its tests where that was not done since its sources changed."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rehearsal import preprocessor
from tests.unit.preprocessor import made_tokenizers


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the binary: for this machine, or of PREPROCESSOR_ARCHITECTURE under qemu."""
    architecture = os.environ.get("PREPROCESSOR_ARCHITECTURE", platform.machine())
    program = preprocessor.ensured(architecture)
    if architecture == platform.machine():
        return program
    emulator = shutil.which(f"qemu-{architecture}-static")
    assert emulator, f"expected qemu-{architecture}-static, found none; to do: rehearsal/setup, which installs it"
    launcher = tmp_path_factory.mktemp("qemu") / architecture
    launcher.write_text(f'#!/bin/sh\nexec {emulator} {program} "$@"\n')
    launcher.chmod(0o755)
    return launcher


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a model with a tokenizer of a kind, made once."""
    made: dict[str, Path] = {}

    def directory_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("models") / kind
            made_tokenizers.write_model(made[kind], kind)
        return made[kind]

    return directory_of
