# SPDX-License-Identifier: GPL-3.0-or-later
"""The preprocessor's binaries, built from its role's sources when those have changed, and kept by their checksum."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rehearsal import images
from rehearsal.checkout import RehearsalError, locked, say, warn

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "roles" / "preprocessor" / "files"
CACHE = ROOT / ".cache" / "preprocessor"
# As `uname -m` names them.
ARCHITECTURES = ("x86_64", "aarch64")


def checksum() -> str:
    """Sixteen hexadecimal digits that stand for all that decides what the binaries are, but the compiler's packages."""
    digest = hashlib.sha256()
    files = [SOURCES / "build", SOURCES / "Cargo.toml", SOURCES / "Cargo.lock", *SOURCES.glob("src/**/*.rs")]
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(SOURCES)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def path_of(architecture: str) -> Path:
    """Where the binary of these sources lies once it is built."""
    return CACHE / checksum() / architecture


def ensured(architecture: str) -> Path:
    """Build the binary for an architecture if it is not there yet; gives its path.

    The first build makes a Debian of its own for the compiler, and takes minutes. Raises RehearsalError when it fails.
    """
    binary = path_of(architecture)
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE, "another build of the preprocessor"):
        if not binary.is_file():
            _build(architecture, binary)
    return binary


def _build(architecture: str, binary: Path) -> None:
    say(f"building the preprocessor for {architecture} (minutes the first time)")
    started = time.monotonic()
    # Built beside its place: a run that is killed leaves nothing that looks like a binary.
    unfinished = CACHE / f"{architecture}.unfinished"
    environment = {
        **os.environ,
        "PREPROCESSOR_CHROOT": str(CACHE / "debian"),
        "PREPROCESSOR_SOURCES": "\n".join(images.sources("trixie")),
        "PREPROCESSOR_APT_SETTINGS": "\n".join(images.fetch_settings()),
    }
    finished = subprocess.run(
        [str(SOURCES / "build"), architecture, str(unfinished)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        check=False,
    )
    if finished.returncode != 0:
        raise RehearsalError(f"the preprocessor for {architecture} can't be built: {finished.stdout.strip()[-3000:]}")
    for former in CACHE.glob(f"*/{architecture}"):
        former.unlink()
    binary.parent.mkdir(exist_ok=True)
    unfinished.rename(binary)
    say(f"the preprocessor for {architecture}: {binary.stat().st_size} bytes, {time.monotonic() - started:.0f} s")


def main(arguments: list[str] | None = None) -> int:
    """Build for the architectures that are named, all if none is; copies the binaries to a folder if one is given."""
    parser = argparse.ArgumentParser(prog="preprocessor", description="Build the preprocessor's static binaries.")
    parser.add_argument("--architecture", action="append", choices=ARCHITECTURES, help="default: all")
    parser.add_argument("--into", type=Path, help="folder to copy them to, as preprocessor-ARCHITECTURE")
    options = parser.parse_args(arguments)
    try:
        for architecture in options.architecture or ARCHITECTURES:
            binary = ensured(architecture)
            if options.into:
                options.into.mkdir(parents=True, exist_ok=True)
                binary = Path(shutil.copy2(binary, options.into / f"preprocessor-{architecture}"))
            print(f"{hashlib.sha256(binary.read_bytes()).hexdigest()}  {binary}")
    except RehearsalError as error:
        warn(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
