# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files that a killed run or a full disk leaves whole: as they were, or as they were to be.

Nothing here imports Ansible.
"""

from __future__ import annotations

import contextlib
import os
import tempfile


def replace(path: str, content: str | bytes, mode: int) -> None:
    """Give the file at `path` this content (text as UTF-8) and mode in one step, once the content is on the disk.

    Raises OSError, and ValueError for text that is no UTF-8 or a path with a NUL byte; the file is then as it was, and
    nothing is left beside it.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    descriptor, temporary = tempfile.mkstemp(prefix=".ringmaster-", dir=os.path.dirname(path))
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def move(source: str, target: str) -> None:
    """Give a file of the same file system another name in one step, once its content is on the disk. Raises OSError."""
    descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(source, target)
    sync_directory(os.path.dirname(target))


def sync_directory(path: str) -> None:
    """Wait until the names in a directory are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
