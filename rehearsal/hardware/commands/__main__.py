# SPDX-License-Identifier: GPL-3.0-or-later
"""`__main__.py NAME ARGUMENTS`: what the small scripts of a host's /usr/local/sbin start."""

from __future__ import annotations

import os
import sys

from rehearsal.hardware import Machine

# Command → module, where the command's name is none of Python's.
MODULES = {"nvidia-smi": "nvidia_smi", "update-grub": "update_grub"}


def main() -> int:
    """Run the command that the first argument names."""
    name = os.path.basename(sys.argv[1])
    module = __import__(f"rehearsal.hardware.commands.{MODULES.get(name, name)}", fromlist=["run"])
    status: int = module.run(sys.argv[2:], Machine.of_this_host())
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
