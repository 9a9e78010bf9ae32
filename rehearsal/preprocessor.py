# SPDX-License-Identifier: GPL-3.0-or-later
"""The preprocessor's binaries, built from its role's sources when those have changed, and kept by their checksum.

Also what shows that the sources are sound: their own tests, with as many inputs as there is time for, and that they
give the same bytes again.
"""

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
# Inputs that each property is tried with in a round, which takes some twenty seconds of one core.
CASES = 10_000


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


def tried(seconds: float) -> int:
    """Run the tests of the sources, then those of properties with ever new inputs until the time is over.

    Gives the number of rounds. Raises RehearsalError when a test fails, or a round does not end.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE, "a build of the preprocessor"):
        say("running the tests of the preprocessor's sources (they are compiled first, minutes the first time)")
        print(_compiler("test"))
        end, rounds = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            rounds += 1
            _compiler("test", PROPTEST_CASES=str(CASES))
            say(f"round {rounds}: {CASES} inputs for each property")
    return rounds


def built_again(architecture: str) -> str:
    """Build once more from nothing, and compare. Gives the SHA-256. Raises RehearsalError when bytes differ."""
    first = hashlib.sha256(ensured(architecture).read_bytes()).hexdigest()
    again, made = CACHE / f"{architecture}.again", CACHE / "debian" / "target-again"
    with locked(CACHE, "another build of the preprocessor"):
        say(f"building the preprocessor for {architecture} once more, from nothing")
        shutil.rmtree(made, ignore_errors=True)
        try:
            _compiler(architecture, str(again), PREPROCESSOR_TARGET="/target-again")
            second = hashlib.sha256(again.read_bytes()).hexdigest()
        finally:
            shutil.rmtree(made, ignore_errors=True)
            again.unlink(missing_ok=True)
    if first != second:
        raise RehearsalError(
            f"expected the preprocessor for {architecture} to have the same bytes when it is built again ({first}), "
            f"found others ({second}); to do: compare the two, a path or a time may have come into it"
        )
    return first


def _build(architecture: str, binary: Path) -> None:
    say(f"building the preprocessor for {architecture} (minutes the first time)")
    started = time.monotonic()
    # Built beside its place: a run that is killed leaves nothing that looks like a binary.
    unfinished = CACHE / f"{architecture}.unfinished"
    _compiler(architecture, str(unfinished))
    for former in CACHE.glob(f"*/{architecture}"):
        former.unlink()
    binary.parent.mkdir(exist_ok=True)
    unfinished.rename(binary)
    say(f"the preprocessor for {architecture}: {binary.stat().st_size} bytes, {time.monotonic() - started:.0f} s")


def _compiler(*arguments: str, **variables: str) -> str:
    """Run the role's build script; gives its output. Raises RehearsalError when it fails, or takes over an hour."""
    environment = {
        **os.environ,
        "PREPROCESSOR_CHROOT": str(CACHE / "debian"),
        "PREPROCESSOR_SOURCES": "\n".join(images.sources("trixie")),
        "PREPROCESSOR_APT_SETTINGS": "\n".join(images.fetch_settings()),
        **variables,
    }
    try:
        finished = subprocess.run(
            [str(SOURCES / "build"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            timeout=3600,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RehearsalError(f"build {arguments[0]} of the preprocessor did not end within an hour") from None
    if finished.returncode != 0:
        raise RehearsalError(f"build {arguments[0]} of the preprocessor failed: {finished.stdout.strip()[-6000:]}")
    return finished.stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    """Build for the architectures that are named, all if none is; copies the binaries to a folder if one is given."""
    parser = argparse.ArgumentParser(prog="preprocessor", description="Build the preprocessor's static binaries.")
    parser.add_argument("--architecture", action="append", choices=ARCHITECTURES, help="default: all")
    parser.add_argument(
        "--try", dest="seconds", type=float, help="test the sources instead, with new inputs for so long"
    )
    parser.add_argument("--again", action="store_true", help="build once more from nothing, and demand the same bytes")
    parser.add_argument("--into", type=Path, help="folder to copy them to, as preprocessor-ARCHITECTURE")
    options = parser.parse_args(arguments)
    try:
        if options.seconds is not None:
            print(f"all tests passed, and {tried(options.seconds)} rounds of {CASES} inputs for each property")
            return 0
        for architecture in options.architecture or ARCHITECTURES:
            if options.again:
                print(f"{built_again(architecture)}  {architecture}, twice")
                continue
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
