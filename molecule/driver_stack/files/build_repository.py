# SPDX-License-Identifier: GPL-3.0-or-later
"""Repositories of apt and dnf with small packages that have the names, versions and dependencies of a driver stack.

Run on a host: ``python3 build_repository.py apt /srv/repository``, or with dnf. The packages do what the real ones do
as far as the host can tell: a kernel is in /boot and /lib/modules, the driver's package builds a module for each kernel
with headers, and the next boot loads it. The build of a version fails while /etc/molecule/broken-build names it, and
its installation is cut while /etc/molecule/power-cut does. Driver 535.998.01 wants a newer dkms, and builds, but is
never loaded. Repositories are signed with a key of their own, whose public half is beside them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import struct
import subprocess
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

NEWEST = "535.998.01"
DRIVERS = ("535.261.03", "535.309.01", NEWEST)
KERNELS = {
    "apt": ("6.1.0-56-amd64", "6.1.0-57-amd64", "6.1.0-58-amd64"),
    "dnf": (
        "5.14.0-362.8.1.el9_3.x86_64",
        "5.14.0-427.13.1.el9_4.x86_64",
        "5.14.0-503.11.1.el9_5.x86_64",
        "5.14.0-570.12.1.el9_6.x86_64",
    ),
}
DKMS = {"apt": ("9.0.10-8", "10.0.1-1"), "dnf": ("3.1.4-1.el9", "3.2.1-1.el9")}
KEY_NAME = "Molecule <molecule@example.org>"

# What depmod and modinfo need of a module is its section .modinfo.
BUILD = """
build_modules() {{
  for headers in /lib/modules/*/build; do
    test -e "$headers/Makefile" || continue
    release=$(basename "$(dirname "$headers")")
    log=/var/lib/dkms/nvidia-current/{version}/build
    mkdir -p "$log" "/lib/modules/$release/{folder}"
    if grep -qsx {version} /etc/molecule/broken-build; then
      printf 'DKMS make.log for nvidia-{version}\\nconftest.c:1: error: implicit declaration of function drm_x\\n' \\
        >"$log/make.log"
      return 10
    fi
    cp /usr/share/molecule/nvidia-{version}.ko "/lib/modules/$release/{folder}/{module}.ko"
    depmod "$release" 2>/dev/null
  done
}}
remove_modules() {{
  for folder in /lib/modules/*/{folder}; do
    test -d "$folder" || continue
    rm -f "$folder/{module}.ko"
    rmdir -p --ignore-fail-on-non-empty "$folder"
    depmod "$(echo "$folder" | cut -d/ -f4)" 2>/dev/null || true
  done
  rm -rf /var/lib/dkms/nvidia-current/{version}
  rmdir /var/lib/dkms/nvidia-current /var/lib/dkms 2>/dev/null || true
}}
"""
# All that led here is gone at once, but for sudo, which tells Ansible: package manager, and module that called it.
POWER_CUT = """
if grep -qsx {version} /etc/molecule/power-cut; then
  rm /etc/molecule/power-cut
  pid=$PPID
  while test "$pid" -gt 1 && test "$(cat "/proc/$pid/comm")" != sudo; do
    victims="$victims $pid"
    pid=$(sed -n 's/^PPid:[^0-9]*//p' "/proc/$pid/status")
  done
  kill -9 $victims
fi
"""
LOADED = "/var/lib/ringmaster-rehearsal/hardware/driver/version"


@dataclass
class Package:
    """One package; scripts are shell, `needs` and `conflicts` are in the words of its format."""

    name: str
    version: str
    needs: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    after_install: str = ""
    before_remove: str = ""
    provides: list[str] = field(default_factory=list)


def stack(kind: str) -> list[Package]:
    """All packages of a kind of repository."""
    packages = kernels(kind)
    for version in DRIVERS:
        packages += driver_apt(version) if kind == "apt" else driver_dnf(version)
    packages += [Package("dkms", version) for version in DKMS[kind]]
    if kind == "apt":
        packages += [Package("rdma-core", version) for version in ("44.0-1", "44.0-2")]
        packages += [Package("nvidia-cuda-toolkit", f"11.8.89~11.8.0-{number}~deb12u1") for number in (4, 5)]
        packages += [Package("libnccl2", f"{version}-1+cuda11.8") for version in ("2.15.5", "2.16.5")]
        # What would take parts of another driver along if the set were not named as a whole.
        packages += [Package("nvidia-tesla-470-alternative", "470.256.02-1", provides=["nvidia-alternative"])]
    else:
        # The host's shell is Debian's, of which rpm knows nothing.
        packages += [Package("bash", "5.1.8-9.el9", provides=["/bin/sh"]), Package("rdma-core", "51.0-1.el9")]
        packages += [Package("cuda-toolkit-12-2", version) for version in ("12.2.1-1", "12.2.2-1")]
        packages += [Package("libnccl", version) for version in ("2.19.3-1+cuda12.2", "2.18.5-1+cuda12.2")]
    return packages


def kernels(kind: str) -> list[Package]:
    """Kernels with headers, as they come in several at a time."""
    packages = []
    for release in KERNELS[kind]:
        tree = {
            f"/boot/vmlinuz-{release}": "kernel\n",
            f"/lib/modules/{release}/kernel/none": "\n",
            f"/lib/modules/{release}/modules.order": "",
            f"/lib/modules/{release}/modules.builtin": "",
        }
        headers = {f"/lib/modules/{release}/build/Makefile": "all:\n"}
        gone = f"rm -f /lib/modules/{release}/modules.*"
        if kind == "apt":
            version = f"6.1.{release.split('-')[1]}-1"
            # As Debian's do by /etc/kernel/postinst.d.
            menu = "if command -v update-grub >/dev/null; then update-grub; fi"
            packages.append(
                Package(f"linux-image-{release}", version, files=tree, after_install=menu, before_remove=gone)
            )
            packages.append(Package(f"linux-headers-{release}", version, files=headers))
            packages.append(Package("linux-image-amd64", version, needs=[f"linux-image-{release} (= {version})"]))
        else:
            version = release.rpartition(".")[0]
            # As EL's do by kernel-install, with its UPDATEDEFAULT=yes. The oldest, which the host has to begin with,
            # has no script: rpm knows of no shell then.
            grubby = "/usr/local/sbin/grubby"  # a path that rpm's scripts do not have
            default = f"if test -x {grubby}; then {grubby} --set-default=/boot/vmlinuz-{release}; fi"
            oldest = release == KERNELS[kind][0]
            packages.append(Package("kernel-core", version, files=tree, after_install="" if oldest else default))
            packages.append(Package("kernel-devel", version, files=headers))
    return packages


def module(version: str) -> dict[str, str]:
    """The file that stands for a module's source, and becomes it."""
    return {f"/usr/share/molecule/nvidia-{version}.ko": f"MODULE {version}"}


def driver_apt(version: str) -> list[Package]:
    """Debian's set, as far as it depends on one version."""
    full = f"{version}-1~deb12u1"
    same = f"(= {full})"
    scripts = BUILD.format(version=version, folder="updates/dkms", module="nvidia-current")
    loads = f"echo {version} >{LOADED}" if version != NEWEST else ":"
    names = ("nvidia-smi", "libnvidia-ml1", "libcuda1", "nvidia-kernel-support", "nvidia-alternative")
    needs = {
        "nvidia-smi": [f"libnvidia-ml1 {same}"],
        "nvidia-kernel-support": ["nvidia-alternative"],
        "libnvidia-ml1": ["nvidia-alternative"],
        "libcuda1": [f"nvidia-alternative {same}"],
    }
    files = {
        "libnvidia-ml1": {f"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{version}": ""},
        "nvidia-smi": {"/usr/lib/nvidia/current/nvidia-smi": version},
    }
    return [
        Package(
            "nvidia-open-kernel-dkms",
            full,
            needs=["dkms" if version != NEWEST else "dkms (>= 10)", "kmod", f"nvidia-kernel-support {same}"],
            files=module(version),
            after_install=f"{scripts}\nbuild_modules\n{loads}",
            before_remove=f"{scripts}\nremove_modules",
        ),
        *(
            Package(
                name,
                full,
                needs=needs.get(name, []),
                files=files.get(name, {}),
                after_install=POWER_CUT.format(version=version) if name == "libnvidia-ml1" else "",
            )
            for name in names
        ),
    ]


def driver_dnf(version: str) -> list[Package]:
    """NVIDIA's compute-only set for EL 9."""
    full = f"3:{version}-1.el9"
    scripts = BUILD.format(version=version, folder="extra", module="nvidia")
    loads = f"echo {version} >{LOADED}" if version != NEWEST else ":"
    return [
        Package(
            "kmod-nvidia-open-dkms",
            full,
            needs=["dkms" if version != NEWEST else "dkms >= 3.2"],
            files=module(version),
            after_install=f"{scripts}\nbuild_modules\n{loads}",
            # 0: none of it is left. An upgrade runs this after the new one's script, and takes its own build.
            before_remove=f"{scripts}\nrm -rf /var/lib/dkms/nvidia-current/{version}\n"
            'if test "$1" = 0; then remove_modules; fi',
        ),
        Package("nvidia-driver-cuda", full, needs=[f"nvidia-persistenced = {full}", f"kmod-nvidia-open-dkms = {full}"]),
        Package("nvidia-persistenced", full, after_install=POWER_CUT.format(version=version)),
    ]


def write_tree(package: Package, root: Path) -> None:
    """The files of a package below a root."""
    for path, content in package.files.items():
        place = root / path[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith("MODULE "):
            write_module(place, content.split()[1])
        else:
            place.write_text(content)


def write_module(place: Path, version: str) -> None:
    """An object file for x86-64 with nothing but what modinfo tells (System V ABI, chapter 4)."""
    words = f"license=Dual MIT/GPL\0version={version}\0name=nvidia\0vermagic=any\0".encode()
    names = b"\0.modinfo\0.shstrtab\0"
    body = words + names
    table = 64 + len(body)
    # Relocatable, x86-64; three headers of sections of 64 bytes, the names in the last.
    header = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2)
    )
    sections = [
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (1, 1, 2, 0, 64, len(words), 0, 0, 1, 0),
        (10, 3, 0, 0, 64 + len(words), len(names), 0, 0, 1, 0),
    ]
    place.write_bytes(header + body + b"".join(struct.pack("<IIQQQQIIQQ", *section) for section in sections))


def build_deb(package: Package, scratch: Path, out: Path) -> None:
    """One .deb."""
    root = scratch / f"{package.name}_{package.version}"
    control = root / "DEBIAN"
    control.mkdir(parents=True)
    write_tree(package, root)
    lines = [
        f"Package: {package.name}",
        f"Version: {package.version}",
        "Architecture: amd64",
        "Maintainer: Molecule <m@example.org>",
    ]
    lines += [f"Depends: {', '.join(package.needs)}"] if package.needs else []
    lines += [f"Provides: {', '.join(package.provides)}"] if package.provides else []
    lines += ["Description: stand-in"]
    (control / "control").write_text("\n".join(lines) + "\n")
    for name, text, condition in (
        ("postinst", package.after_install, "configure"),
        ("prerm", package.before_remove, "*"),
    ):
        if text:
            script = control / name
            script.write_text(f'#!/bin/sh\nset -e\ncase "$1" in {condition})\n{text}\n;; esac\n')
            script.chmod(0o755)
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Znone", "--build", root, out], check=True, stdout=subprocess.DEVNULL
    )


def build_rpm(package: Package, scratch: Path, out: Path) -> None:
    """One .rpm."""
    epoch, _colon, rest = package.version.rpartition(":")
    version, _dash, release = rest.rpartition("-")
    root = scratch / f"{package.name}-{rest}"
    write_tree(package, root)
    nothing = "\n"
    spec = scratch / f"{package.name}-{rest}.spec"
    spec.write_text(
        f"Name: {package.name}\nVersion: {version}\nRelease: {release}\n"
        + (f"Epoch: {epoch}\n" if epoch else "")
        + "Summary: stand-in\nLicense: GPL\nBuildArch: x86_64\nAutoReqProv: no\n"
        + "".join(f"Requires: {need}\n" for need in package.needs)
        + "".join(f"Provides: {name}\n" for name in package.provides)
        + ("Provides: installonlypkg(kernel)\n" if package.name in ("kernel-core", "kernel-devel") else "")
        + f"%description\nStand-in.\n%install\nmkdir -p %{{buildroot}}\ncp -a {root}/. %{{buildroot}}/\n"
        + (f"%post\n{package.after_install}\n" if package.after_install else nothing)
        + (f"%preun\n{package.before_remove}\n" if package.before_remove else nothing)
        + "%files\n"
        + "".join(f"{path}\n" for path in package.files)
    )
    root.mkdir(exist_ok=True)
    defines = {
        "_topdir": scratch / "rpmbuild",
        "_rpmdir": out,
        "_build_name_fmt": "%{NAME}-%{VERSION}-%{RELEASE}.%{ARCH}.rpm",
    }
    defines |= {
        "debug_package": "%{nil}",
        "__brp_strip": "%{nil}",
        "__os_install_post": "%{nil}",
        "_build_id_links": "none",
    }
    words = [word for name, value in defines.items() for word in ("--define", f"{name} {value}")]
    subprocess.run(
        ["rpmbuild", "-bb", "--quiet", "--nodeps", "--target", "x86_64", *words, spec], check=True, capture_output=True
    )


def index_apt(out: Path, home: Path) -> None:
    """Packages, Release and InRelease of a flat repository, as NVIDIA's are."""
    blocks = []
    for path in sorted(out.glob("*.deb")):
        fields = subprocess.run(["dpkg-deb", "--field", path], check=True, capture_output=True, text=True).stdout
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        blocks.append(f"{fields.rstrip()}\nFilename: ./{path.name}\nSize: {len(data)}\nSHA256: {digest}\n")
    index = "\n".join(blocks).encode()
    (out / "Packages").write_bytes(index)
    date = subprocess.run(["date", "-u", "-R"], check=True, capture_output=True, text=True).stdout.replace(
        "+0000", "UTC"
    )
    (out / "Release").write_text(
        f"Origin: Molecule\nLabel: Molecule\nDate: {date.strip()}\nSHA256:\n"
        f" {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n"
    )
    (out / "InRelease").unlink(missing_ok=True)
    gpg(home, "--clearsign", "--output", str(out / "InRelease"), str(out / "Release"))


def gpg(home: Path, *arguments: str) -> bytes:
    """GnuPG without anybody to ask; gives what it printed."""
    words = ["gpg", "--homedir", str(home), "--batch", "--yes", "--pinentry-mode", "loopback", "--passphrase", ""]
    return subprocess.run([*words, *arguments], check=True, capture_output=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or ""))
    parser.add_argument("kind", choices=("apt", "dnf"))
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    scratch = Path("/var/tmp/molecule-build")
    home = scratch / "gnupg"
    home.mkdir(parents=True, mode=0o700)
    os.umask(0o022)
    gpg(home, "--quick-generate-key", KEY_NAME, "rsa2048", "sign", "never")
    (given.out / "key.asc").write_bytes(gpg(home, "--armor", "--export", KEY_NAME))
    for package in stack(given.kind):
        (build_deb if given.kind == "apt" else build_rpm)(package, scratch, given.out)
    if given.kind == "apt":
        index_apt(given.out, home)
    else:
        define = [
            "__gpg /usr/bin/gpg",
            f"_gpg_name {KEY_NAME}",
            f"_gpg_path {home}",
            "_gpg_sign_cmd_extra_args --pinentry-mode loopback --passphrase ''",
        ]
        words = [word for each in define for word in ("--define", each)]
        rpms = sorted(str(path) for path in given.out.glob("*.rpm"))
        subprocess.run(["rpmsign", "--addsign", *words, *rpms], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["createrepo_c", "--quiet", given.out], check=True)
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)
    subprocess.run(["rm", "-rf", str(scratch)], check=True)


if __name__ == "__main__":
    main()
