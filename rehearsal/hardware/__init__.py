# SPDX-License-Identifier: GPL-3.0-or-later
"""Simulated hardware: GPUs, NVLink, PCIe and RDMA ports of a machine that has none of them.

A profile (`profiles.py`) becomes a state (`state.py`, small files), the state becomes the kernel's files (`tree.py`).
The NVML library (`nvml.c`) and the stand-in commands (`commands/`) answer from the same state, and faults (`faults.py`)
change it. The package is copied to the hosts of the fleet that name a profile, so it uses nothing but Python's own
library, of Python 3.9 or later.

A unit test gets a machine of its own with::

    machine = build("a100-sxm4x4", tmp_path)
    reader = SomeReader(FileTree(str(machine.root)))
    machine.state.set("ports/0/hw_counters/out_of_sequence", 12)
    machine.tree.refresh()
"""

from __future__ import annotations

from rehearsal.hardware.state import TYPE_CHECKING, State

# A stand-in command is started dozens of times by one reading of a host. It seldom needs the tree, and never the
# profiles: what only they import is left until then.
if TYPE_CHECKING:
    from pathlib import Path

    from rehearsal.hardware.tree import Tree


class Machine:
    """A simulated machine in a folder: `state` behind it, and the kernel's files below `root`."""

    def __init__(self, state: State, tree: Tree | None = None) -> None:
        """Without a `tree` the files are those of this host."""
        self.state = state
        self._tree = tree

    @property
    def tree(self) -> Tree:
        """Writes the kernel's files from the state."""
        if self._tree is None:
            from rehearsal.hardware.tree import Tree

            self._tree = Tree("/", self.state)
        return self._tree

    @property
    def root(self) -> Path:
        """Where ``/sys``, ``/proc`` and ``/dev`` of the machine lie."""
        return self.tree.root

    @classmethod
    def of_this_host(cls) -> Machine:
        """The machine that a host of the fleet simulates: the state that the environment names, and the real root."""
        return cls(State.of_this_host())


def build(profile: str, folder: Path, host: str = "gpu-1", cpus: int = 4) -> Machine:
    """Build a factory-new machine below `folder`: its state in ``state/``, its files in ``root/``.

    Raises KeyError for a profile that `profiles.PROFILES` does not list.
    """
    from rehearsal.hardware import profiles
    from rehearsal.hardware.tree import Tree

    state = State(folder / "state")
    profiles.write(profile, state, host, cpus)
    for index in state.names("ports"):
        state.set(f"ports/{index}/address", f"192.168.{211 + int(index)}.11")
    tree = Tree(folder / "root", state)
    tree.build()
    tree.devices()
    return Machine(state, tree)
