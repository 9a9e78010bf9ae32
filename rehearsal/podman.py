# SPDX-License-Identifier: GPL-3.0-or-later
"""Podman as the rehearsal uses it: one thin wrapper, so that the flags this needs stand in one place."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from rehearsal.checkout import RehearsalError

# runc and cgroupfs run on hybrid cgroup hierarchies and without systemd as the machine's PID 1, where crun and the
# systemd manager refuse; both also run on an ordinary machine. The file logger needs no journald.
COMMAND = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "file")


def podman(*arguments: str, check: bool = True, stdin: bytes | None = None, timeout: float = 300) -> str:
    """Run podman and give its standard output.

    Raises RehearsalError when it fails (and `check` is set), is missing, or takes longer than `timeout` seconds.
    """
    try:
        finished = subprocess.run(
            [*COMMAND, *arguments], capture_output=True, input=stdin, timeout=timeout, check=False
        )
    except FileNotFoundError:
        raise RehearsalError("expected podman, found none; to do: run rehearsal/setup") from None
    except subprocess.TimeoutExpired:
        raise RehearsalError(f"podman {arguments[0]} did not end within {timeout:.0f} s") from None
    if check and finished.returncode != 0:
        complaint = finished.stderr.decode(errors="replace").strip()
        raise RehearsalError(f"podman {' '.join(arguments[:3])} failed ({finished.returncode}): {complaint}")
    return finished.stdout.decode(errors="replace")


def podman_json(*arguments: str) -> Any:
    """Run podman with a JSON format and give the document (an empty answer is an empty list)."""
    return json.loads(podman(*arguments, "--format", "json") or "[]") or []


def execute(container: str, command: Sequence[str], stdin: bytes | None = None, timeout: float = 60) -> str:
    """Run a command in a container as root and give its standard output."""
    options = ["--interactive"] if stdin is not None else []
    return podman("exec", *options, container, *command, stdin=stdin, timeout=timeout)
