# SPDX-License-Identifier: GPL-3.0-or-later
"""`python3 -m rehearsal.hardware.settle`: does at once what a kernel does with words written into its files.

One watch of the kernel for all files, in a process that sleeps until one is written: systemd's path units would take
one for each file, and a machine has few (`fs.inotify.max_user_instances`, 128) for all hosts of its fleets together.
"""

from __future__ import annotations

import ctypes
import os
import sys

from rehearsal.hardware import Machine
from rehearsal.hardware.tree import Tree

CLOSE_WRITE = 0x8  # inotify(7); files that the simulation itself writes are renamed into place, which is another event
ENOUGH = 1 << 16


def watch(tree: Tree) -> int:
    """Watch the folders of all files of which an operator writes a word; gives inotify's descriptor. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    for path in tree.written_files():
        folder = os.path.dirname(os.path.realpath(tree.root / path))
        if libc.inotify_add_watch(descriptor, os.fsencode(folder), CLOSE_WRITE) < 0:
            raise OSError(ctypes.get_errno(), folder)
    return descriptor


def main() -> int:
    """Settle what was written before, then whatever is written, for ever."""
    tree = Machine.of_this_host().tree
    descriptor = watch(tree)
    while True:
        tree.settle()
        os.read(descriptor, ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
