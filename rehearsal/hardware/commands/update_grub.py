# SPDX-License-Identifier: GPL-3.0-or-later
"""update-grub: what /etc/default/grub says becomes the kernel's command line at the next boot."""

from __future__ import annotations

import subprocess

from rehearsal.hardware import Machine

DEFAULTS = """
for file in etc/default/grub etc/default/grub.d/*.cfg; do
  if [ -e "$file" ]; then . "./$file"; fi
done
printf '%s %s' "$GRUB_CMDLINE_LINUX" "$GRUB_CMDLINE_LINUX_DEFAULT"
"""


def run(arguments: list[str], machine: Machine) -> int:
    """Run update-grub; prints, and gives the exit status."""
    del arguments
    finished = subprocess.run(["sh", "-c", DEFAULTS], cwd=machine.root, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        print(finished.stderr.strip())
        return finished.returncode
    words = " ".join(finished.stdout.split())
    machine.state.set("host/cmdline_next", f"{machine.state.text('host/cmdline_base')} {words}".strip())
    print("Generating grub configuration file ...\ndone")
    return 0
