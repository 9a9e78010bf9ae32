# SPDX-License-Identifier: GPL-3.0-or-later
"""Make a wheelhouse that role vllm installs vLLM from, without vLLM: wheels named `vllm` that hold the stand-in engine.

Usage: wheels.py FOLDER VERSION…. What is tried with them is all that the role does: virtual environments, metadata, the
engine's own parser, the unit, releases and links. Their program takes vLLM's options, and answers as the stand-in does.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

STANDIN = Path(__file__).resolve().parents[2] / "roles" / "vllm" / "files" / "standin_engine"
# What `vllm` on the command line is: the parser is built as vLLM builds it, so that it can be asked what it takes.
PROGRAM = """
import argparse
import sys

from standin_engine import flags
from standin_engine.__main__ import main


def run():
    parser = argparse.ArgumentParser(prog="vllm")
    commands = parser.add_subparsers()
    commands.add_parser("serve", parents=[flags.build_parser()], add_help=False)
    parser.parse_args()
    sys.exit(main(sys.argv[1:]))
"""


def wheel(folder: Path, version: str, requirements: list[str]) -> None:
    """Write the wheel of one version."""
    information = f"vllm-{version}.dist-info"
    required = "".join(f"Requires-Dist: {each}\n" for each in requirements)
    files = {
        f"standin_engine/{path.name}": path.read_bytes()
        for path in sorted((STANDIN / "standin_engine").iterdir())
        if path.suffix in (".py", ".json")
    }
    files["vllm_program.py"] = PROGRAM.encode()
    files["VERSION"] = f"{version}\n".encode()  # the stand-in says this version of itself
    files[f"{information}/METADATA"] = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n{required}".encode()
    files[f"{information}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: molecule\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{information}/entry_points.txt"] = b"[console_scripts]\nvllm = vllm_program:run\n"
    record = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    files[f"{information}/RECORD"] = f"{record}{information}/RECORD,,\n".encode()
    with zipfile.ZipFile(folder / f"vllm-{version}-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def main(folder: Path, versions: list[str]) -> None:
    """Fill the wheelhouse: the wheels of all versions, and the libraries that they need, from the package index."""
    folder.mkdir(parents=True, exist_ok=True)
    pinned = STANDIN / "requirements.txt"
    lines = [line for line in pinned.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    subprocess.run([*command, "--requirement", str(pinned)], check=True)
    for version in versions:
        wheel(folder, version, lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
