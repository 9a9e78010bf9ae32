# SPDX-License-Identifier: GPL-3.0-or-later
"""Where one checkout keeps its rehearsal, and what its containers and network are called."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class RehearsalError(Exception):
    """The rehearsal can't go on; the message says what was expected, what was found and what to do."""


# What all checkouts of a machine share (images, the choice of a network) is changed under a lock on this folder.
MACHINE_LOCK = Path("/run/lock")
STARTED = time.monotonic()


def say(message: str) -> None:
    """Print a line of progress with the seconds since the program started."""
    # One write a line: hosts are started side by side.
    sys.stdout.write(f"[{time.monotonic() - STARTED:6.1f} s] {message}\n")
    sys.stdout.flush()


def warn(message: str) -> None:
    """Print a line to standard error."""
    print(f"rehearsal: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Checkout:
    """One rehearsal: the checkout's folder, the inventory that lists its hosts, and the folder of its state.

    Everything that a rehearsal makes on the machine carries `identity`, a hash of the state folder's path: two
    checkouts, or two inventories of one checkout with state folders of their own, never touch each other.
    """

    root: Path
    inventory: Path
    state: Path

    @property
    def identity(self) -> str:
        """Eight hexadecimal digits, the same for each run of this rehearsal."""
        return hashlib.sha256(str(self.state.resolve()).encode()).hexdigest()[:8]

    @property
    def network(self) -> str:
        """Name of the fleet's podman network."""
        return f"ringmaster-{self.identity}"

    def container(self, host: str) -> str:
        """Name of a host's container."""
        return f"ringmaster-{self.identity}-{host}"

    @property
    def private_key(self) -> Path:
        """Private SSH key of the operator, made on the spot."""
        return self.state / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """SSH host keys of the fleet."""
        return self.state / "known_hosts"

    @property
    def evidence(self) -> Path:
        """Folder of the evidence documents, one a run."""
        return self.state / "evidence"

    @property
    def environment(self) -> dict[str, str]:
        """Environment for ansible-playbook and molecule on this rehearsal."""
        return {
            **os.environ,
            "PATH": f"{self.root / '.venv' / 'bin'}:{os.environ.get('PATH', '')}",
            "ANSIBLE_CONFIG": str(self.root / "ansible.cfg"),
            "RINGMASTER_REHEARSAL_STATE": str(self.state),
            "RINGMASTER_EVIDENCE_DIRECTORY": str(self.evidence),
        }

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the checkout for one command that changes something; a second one waits for its turn and says so."""
        with locked(self.root, "another rehearsal command of this checkout"):
            yield


@contextlib.contextmanager
def locked(path: Path, holder: str) -> Iterator[None]:
    """Hold an advisory lock on a file or folder that exists; waits while `holder` has it.

    The kernel frees it when the process ends, however it ends, and no lock file is left behind.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for {holder}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file's content whole: a reader, or a run killed half-way, never sees a part of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), mode)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def read_json(path: Path) -> Any:
    """Content of a JSON file, or None when it is missing or damaged: all state can be made again."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
