# SPDX-License-Identifier: GPL-3.0-or-later
"""Replaces a file in one step: whoever reads it, now or after a loss of power, finds the old content or the new."""

from __future__ import annotations

import os


def replace(path: str, content: bytes) -> None:
    """Write `content` beside the file at `path` and put it in its place. Raises OSError."""
    replacement = f"{path}.new"
    with open(replacement, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(replacement, path)
