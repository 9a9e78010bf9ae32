# SPDX-License-Identifier: GPL-3.0-or-later
"""Build of what stands in for NVIDIA's library and the kernel's ethtool interface: a C file each, about a second."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

from rehearsal.hardware.state import ENVIRONMENT, State

SOURCE = Path(__file__).with_name("nvml.c")
NAME = "libnvidia-ml.so.1"
ETHTOOL_SOURCE = Path(__file__).with_name("ethtool.c")
ETHTOOL_NAME = "libringmaster-rehearsal-ethtool.so"
# No more symbols than those that are asked for. A unit test builds it with every warning as an error; here a newer
# compiler's new warning must not stop a rehearsal.
FLAGS = ("-O2", "-shared", "-fPIC", "-fvisibility=hidden")
WARNINGS = ("-Wall", "-Wextra", "-Werror")


class CompilerError(Exception):
    """The library could not be built; the message holds gcc's complaint."""


def compile_library(folder: Path) -> Path:
    """Build NVML's stand-in in `folder`, unless one is there that is newer than what it is made of; gives its path."""
    return _compile(SOURCE, folder / NAME)


def compile_ethtool(folder: Path) -> Path:
    """Build what is to be preloaded so that programs find counters of simulated ports; gives its path."""
    return _compile(ETHTOOL_SOURCE, folder / ETHTOOL_NAME)


def _compile(source: Path, library: Path) -> Path:
    folder = library.parent
    made_of = max(source.stat().st_mtime, Path(__file__).stat().st_mtime)
    if library.exists() and library.stat().st_mtime >= made_of:
        return library
    folder.mkdir(parents=True, exist_ok=True)
    handle, fresh = tempfile.mkstemp(prefix=".", dir=folder)
    os.close(handle)
    command = ["gcc", *FLAGS, f"-Wl,-soname,{library.name}", "-o", fresh, str(source)]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        Path(fresh).unlink()
        raise CompilerError("expected gcc, found none; to do: run rehearsal/setup") from None
    if finished.returncode != 0:
        Path(fresh).unlink()
        raise CompilerError(f"gcc could not build {source.name}: {finished.stderr.strip()}")
    Path(fresh).chmod(0o755)
    Path(fresh).replace(library)
    return library


def load(folder: Path, state: State) -> None:
    """Build the library in `folder` and load it into this process, bound to `state` from the next nvmlInit on.

    nvidia-ml-py then finds it by its usual name: the loader takes a library that is already there under that name.
    """
    os.environ[ENVIRONMENT] = str(state.folder)
    ctypes.CDLL(str(compile_library(folder)), mode=ctypes.RTLD_GLOBAL)
