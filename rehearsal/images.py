# SPDX-License-Identifier: GPL-3.0-or-later
"""Host images: built by mmdebstrap from the package mirror that the machine itself uses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from rehearsal.checkout import MACHINE_LOCK, RehearsalError, locked, say, warn
from rehearsal.podman import podman, podman_json

REPOSITORY = "localhost/ringmaster-rehearsal"
DEFINITIONS = Path(__file__).parent / "images.yml"
# What hosts with Python carry beside their distribution's packages; says itself why.
COMPILED = sorted((Path(__file__).parent / "host").glob("rehearsal_compiled.*"))
PLACE_COMPILED = """
install -m 0644 "$files"/rehearsal_compiled.* "$1/usr/lib/python3/dist-packages"
mkdir "$1/var/cache/rehearsal-compiled"
"""
# Settings that decide how packages are fetched; everything else of the machine's apt stays with the machine.
FETCH_SETTINGS = ("Acquire::http::", "Acquire::https::", "Acquire::Check-", "Acquire::Retries", "Acquire::ForceIPv")
CERTIFICATES = Path("/usr/local/share/ca-certificates")
# The package lists stay: a host without them, yet with a fresh folder for them, is taken for one whose lists are fresh.
OPTIONS = ("--quiet", "--variant=minbase", "--skip=cleanup/apt/lists")
# Units without a meaning in a container: there are no modules to load, no consoles, and nothing may upgrade by itself.
MASKED_UNITS = (
    "systemd-modules-load.service",
    "systemd-udevd.service",
    "console-getty.service",
    "getty.target",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
)
# The operator logs in as on a real site: an ordinary user with sudo. SSH host keys are made at the first start, so
# that no two hosts share one.
CUSTOMIZE = """
set -eu
root="$1"
chroot "$root" useradd --create-home --shell /bin/sh deploy
install -d -m 0700 -o 1000 -g 1000 "$root/home/deploy/.ssh"
echo 'deploy ALL=(ALL:ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/deploy"
chmod 0440 "$root/etc/sudoers.d/deploy"
rm -f "$root"/etc/ssh/ssh_host_*
mkdir -p "$root/etc/systemd/system/ssh.service.d"
printf '[Service]\\nExecStartPre=\\nExecStartPre=/usr/bin/ssh-keygen -A\\nExecStartPre=/usr/sbin/sshd -t\\n' \\
  >"$root/etc/systemd/system/ssh.service.d/host-keys.conf"
chroot "$root" systemctl enable ssh.service
chroot "$root" systemctl disable ssh.socket 2>/dev/null || true
chroot "$root" update-ca-certificates >/dev/null
"""


def definitions() -> dict[str, Any]:
    """The images by name, as images.yml gives them."""
    document: dict[str, Any] = yaml.safe_load(DEFINITIONS.read_text())["images"]
    for image in document.values():
        image["packages"] = sorted(_flat(image["packages"]))
    return document


def _flat(items: Iterable[Any]) -> list[str]:
    flat: list[str] = []
    for item in items:
        flat += _flat(item) if isinstance(item, list) else [item]
    return flat


def reference(name: str) -> str:
    """Image reference whose tag is a hash of everything that decides the image's content but the mirror's state."""
    known = definitions()
    if name not in known:
        raise RehearsalError(
            f"expected rehearsal_image to be one of {', '.join(known)}, found {name!r}; to do: correct the inventory"
        )
    certificates = {path.name: path.read_text() for path in sorted(CERTIFICATES.glob("*.crt"))}
    content = json.dumps(
        [known[name], OPTIONS, CUSTOMIZE, MASKED_UNITS, fetch_settings(), certificates, *_compiled(known[name])],
        sort_keys=True,
    )
    return f"{REPOSITORY}-{name}:{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _compiled(definition: dict[str, Any]) -> tuple[dict[str, str], str]:
    """What lets a host with Python keep the compiled form of what Ansible sends: files, and the hook that places them
    once they lie in the folder ``$files``."""
    if "python3" not in definition["packages"]:
        return {}, ""
    return {path.name: path.read_text() for path in COMPILED}, PLACE_COMPILED


@contextlib.contextmanager
def ensured(names: Iterable[str]) -> Iterator[dict[str, str]]:
    """Build the images that are not there yet; gives name → reference.

    Until the block ends, no other checkout removes an image that has no container yet.
    """
    references = {name: reference(name) for name in sorted(set(names))}
    with locked(MACHINE_LOCK, "another checkout that builds images or starts hosts"):
        for name, image in references.items():
            if not podman_json("images", "--filter", f"reference={image}"):
                _build(name, image)
        yield references


def remove_unused() -> list[str]:
    """Remove the rehearsal's images that no container uses any more; gives what was removed."""
    removed: list[str] = []
    with locked(MACHINE_LOCK, "another checkout that builds images"):
        used = {container["ImageID"] for container in podman_json("ps", "--all")}
        for image in podman_json("images", "--filter", f"reference={REPOSITORY}-*"):
            if image["Id"] not in used:
                podman("rmi", image["Id"])
                removed += image.get("Names") or [image["Id"]]
    return removed


def _build(name: str, image: str) -> None:
    definition = definitions()[name]
    say(f"building image {name} (Debian {definition['suite']}, about half a minute)")
    with tempfile.TemporaryDirectory(prefix="ringmaster-image-") as folder:
        tarball = Path(folder) / "image.tar"
        settings = Path(folder) / "90machine"
        settings.write_text("".join(f"{line}\n" for line in fetch_settings()))
        hook = Path(folder) / "customize"
        hook.write_text(f"#!/bin/sh\n{CUSTOMIZE}")
        hook.chmod(0o755)
        files, place = _compiled(definition)
        for file, content in files.items():
            (Path(folder) / file).write_text(content)
        command = [
            "mmdebstrap",
            *OPTIONS,
            f"--include={','.join(definition['packages'])}",
            f'--setup-hook=mkdir -p "$1"{CERTIFICATES} "$1/etc/apt/apt.conf.d"',
            f"--setup-hook=copy-in {settings} /etc/apt/apt.conf.d",
            *[f"--setup-hook=copy-in {path} {CERTIFICATES}" for path in sorted(CERTIFICATES.glob("*.crt"))],
            f'--customize-hook={hook} "$1"',
            '--customize-hook=ln -sf /dev/null "$1/etc/systemd/system/{}"'.format(
                '"; ln -sf /dev/null "$1/etc/systemd/system/'.join(MASKED_UNITS)
            ),
            *([f"--customize-hook=files={folder}{place}"] if place else []),
            definition["suite"],
            str(tarball),
            *sources(definition["suite"]),
        ]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            raise RehearsalError(f"mmdebstrap could not build {name}: {finished.stderr.strip()[-2000:]}")
        # A build that is cut before this line leaves no image: the import is one step.
        podman("import", "--change", 'CMD ["/sbin/init"]', "--change", "STOPSIGNAL SIGRTMIN+3", str(tarball), image)


def fetch_settings() -> list[str]:
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    return sorted(line for line in dump.splitlines() if line.startswith(FETCH_SETTINGS) and not line.endswith('"";'))


def sources(suite: str) -> list[str]:
    """Lines of sources.list for a suite, from the mirrors of the machine's own apt; none: mmdebstrap's default."""
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    addresses = sorted({line.rstrip("/") for line in listing.splitlines()})
    lines = [f"deb {address} {suite} main" for address in addresses if address.endswith("/debian")][:1]
    if not lines:
        return []
    lines += [f"deb {address} {suite}-security main" for address in addresses if address.endswith("/debian-security")][
        :1
    ]
    return lines


def main() -> int:
    """Build all images that are not there yet."""
    try:
        with ensured(definitions()):
            return 0
    except RehearsalError as error:
        warn(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
