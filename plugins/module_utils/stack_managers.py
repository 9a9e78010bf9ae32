# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""apt and dnf as the steps of the driver stack need them: tried in a scratch folder first, then for real.

A trial has the host's sources, keys, pins and indexes, with the wanted ones laid over them, in a folder of its own. So
a missing key, a mirror that does not answer or a set that can't be solved is known while the host is as it was.
Sources: apt.conf(5), apt-get(8), dpkg(1) of apt 2.6 and dpkg 1.21; dnf.conf(5) and dnf(8) of dnf 4.14; all tried.
Nothing here imports Ansible.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils import durable
from ansible_collections.ringmaster.inference.plugins.module_utils import stack_settings as settings
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.driver_stack_formats import parse_dpkg, parse_rpm
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_transactions import Transaction, parse

QUERY_TIMEOUT = 60.0  # seconds
SIMULATION_TIMEOUT = 300.0
REFRESH_TIMEOUT = 900.0
FETCH_TIMEOUT = 3600.0  # seconds; a toolkit is some GB
TRANSACTION_TIMEOUT = 7200.0  # seconds; DKMS builds take minutes for each kernel
# Nobody is there to answer, no service is to be restarted behind the role's back.
_QUIET = ("env", "DEBIAN_FRONTEND=noninteractive", "APT_LISTCHANGES_FRONTEND=none", "NEEDRESTART_SUSPEND=1")
# Files under /etc that somebody changed stay.
_KEEP = ("-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold")


class ManagerError(Exception):
    """The package manager did not do what it was asked to; the text says what it said."""


class _PackageFiles(ABC):
    """Files of packages in a folder. A file has its name there only when it is whole: it arrives in a folder beside."""

    def fetch(self, packages: Iterable[tuple[str, str]], folder: str) -> dict[str, str]:
        """Bring the files of packages into a folder: name → file. Those that can't be had whole are left out.

        Raises OSError for a folder that can't be written.
        """
        wanted = dict(packages)
        if self._missing(wanted, folder):
            arriving = os.path.join(folder, ".arriving")
            shutil.rmtree(arriving, ignore_errors=True)  # of a run that was killed
            os.mkdir(arriving, 0o700)
            try:
                # What the cache has damaged, the repositories may have.
                for bring in (self._copy_cached, self._download_all):
                    missing = self._missing(wanted, folder)
                    bring(missing, arriving)
                    self._take(missing, arriving, folder)
            finally:
                shutil.rmtree(arriving, ignore_errors=True)
        return {name: file for name, version in wanted.items() if (file := self.file_of(folder, name, version))}

    def _missing(self, wanted: Mapping[str, str], folder: str) -> dict[str, str]:
        return {name: version for name, version in wanted.items() if not self.file_of(folder, name, version)}

    def _take(self, packages: Mapping[str, str], arriving: str, folder: str) -> None:
        """Give the files that arrived whole their names in the folder, and remove the others."""
        for name, version in packages.items():
            file = self.file_of(arriving, name, version)
            if not file:
                continue
            path = os.path.join(arriving, file)
            # On a full disk apt leaves the beginning of a file, and says that all is well.
            if self._is_whole(path):
                durable.move(path, os.path.join(folder, file))
            else:
                os.unlink(path)

    def _copy_cached(self, packages: Mapping[str, str], arriving: str) -> None:
        for name, version in packages.items():
            cached = self._cached(name, version)
            if cached:
                shutil.copyfile(cached, os.path.join(arriving, os.path.basename(cached)))

    def _download_all(self, packages: Mapping[str, str], arriving: str) -> None:
        if packages and not self._download(packages, arriving).ok and len(packages) > 1:
            for name, version in packages.items():  # none is downloaded if one can't be had
                self._download({name: version}, arriving)

    @abstractmethod
    def file_of(self, folder: str, name: str, version: str) -> str | None:
        """The file of a package in a folder; None if it is not there."""

    @abstractmethod
    def _cached(self, name: str, version: str) -> str | None:
        """Path of the file of a package in the package manager's cache."""

    @abstractmethod
    def _download(self, packages: Mapping[str, str], folder: str) -> Answer:
        """Bring files of packages from the repositories."""

    @abstractmethod
    def _is_whole(self, path: str) -> bool:
        """Whether a file can be read to its end, and is what its own checksums say."""


class Apt(_PackageFiles):
    """apt and dpkg. `scratch` is an empty folder for the trial."""

    family = "Debian"
    index_file = "Packages"

    def __init__(self, runner: CommandRunner, scratch: str, offline: bool, lock_timeout: int = 300) -> None:
        self.runner, self.scratch, self.offline = runner, scratch, offline
        self.lock = ("-o", f"DPkg::Lock::Timeout={lock_timeout}")
        self.lock_timeout = lock_timeout
        self.options: list[str] = []

    # -- what is there

    def installed(self) -> tuple[dict[str, list[str]], list[str]]:
        """Versions of all installed packages by name, and names of those on hold."""
        answer = self.runner.run(
            ["dpkg-query", "--show", "--showformat", r"${Package}\t${Version}\t${db:Status-Abbrev}\n"], QUERY_TIMEOUT
        )
        found = parse_dpkg(answer.output) if answer.ok else None
        if found is None:
            raise ManagerError(said(answer))
        return found

    def interrupted(self) -> list[str]:
        """What a run that was killed left half done, in words; empty if nothing."""
        updates = "/var/lib/dpkg/updates"
        pending = [name for name in os.listdir(updates) if name.isdigit()] if os.path.isdir(updates) else []
        answer = self.runner.run(["dpkg", "--audit"], QUERY_TIMEOUT)
        names = re.findall(r"^ ([a-z0-9][a-z0-9+.:-]+)(?:\s|$)", answer.output, re.MULTILINE)
        words = [f"dpkg was interrupted ({len(pending)} notes in its journal)"] if pending else []
        return words + ([f"dpkg left half done: {', '.join(dict.fromkeys(names))}"] if names else [])

    def recover(self) -> list[str]:
        """Finish what a killed run left. Gives what could not be finished, in words."""
        complaints = []
        answer = self.runner.run([*_QUIET, "dpkg", "--force-confdef", "--force-confold", "--configure", "-a"], 3600.0)
        if not answer.ok:
            complaints.append(f"dpkg --configure -a: {said(answer)}")
        answer = self._get(["--yes", *_KEEP, "--no-remove", "--fix-broken", "install"], TRANSACTION_TIMEOUT)
        if not answer.ok:
            complaints.append(f"apt-get --fix-broken install: {said(answer)}")
        return complaints

    # -- the trial

    def stage(self, files: Mapping[str, bytes], removed: Collection[str]) -> None:
        """Lay files over a copy of the host's own, without those that are `removed`, and use that from now on."""
        for folder, option in ((settings.APT_SOURCES, "SourceParts"), (settings.APT_PREFERENCES, "PreferencesParts")):
            copy = os.path.join(self.scratch, os.path.basename(folder))
            os.makedirs(copy, exist_ok=True)
            present = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
            for name in present:
                path = os.path.join(folder, name)
                if path in removed or (self.offline and option == "SourceParts") or not os.path.isfile(path):
                    continue
                shutil.copyfile(path, os.path.join(copy, name))
            self.options += ["-o", f"Dir::Etc::{option}={copy}"]
        keys = {path: os.path.join(self.scratch, "keyrings", os.path.basename(path)) for path in files}
        for path, content in files.items():
            folder = os.path.basename(os.path.dirname(path))
            text = content
            if path.endswith(".sources"):
                for key, staged in keys.items():
                    text = text.replace(f"Signed-By: {key}\n".encode(), f"Signed-By: {staged}\n".encode())
            os.makedirs(os.path.join(self.scratch, folder), exist_ok=True)
            with open(os.path.join(self.scratch, folder, os.path.basename(path)), "wb") as file:
                file.write(text)
        if self.offline:
            self.options += ["-o", "Dir::Etc::SourceList=/dev/null"]

    def refresh(self) -> None:
        """Fetch the indexes into the scratch folder. Raises ManagerError; apt alone would go on with old ones."""
        lists = os.path.join(self.scratch, "lists")
        os.makedirs(os.path.join(lists, "partial"), exist_ok=True)
        for name in os.listdir("/var/lib/apt/lists"):
            path = os.path.join("/var/lib/apt/lists", name)
            if os.path.isfile(path) and name != "lock":
                shutil.copy2(path, os.path.join(lists, name))
        self.options += ["-o", f"Dir::State::Lists={lists}"]
        # apt's own caches of the indexes are made once for all that follows, and the host's are left alone.
        for cache in ("pkgcache", "srcpkgcache"):
            self.options += ["-o", f"Dir::Cache::{cache}={os.path.join(self.scratch, cache)}.bin"]
        # Keys and repositories lie where only root may look; apt's own user could not read them.
        answer = self._get(
            ["-o", "APT::Sandbox::User=root", "-o", "APT::Update::Error-Mode=any", "update"], REFRESH_TIMEOUT
        )
        warned = re.findall(
            r"^W: (.*(?:could|couldn't|not signed|not be verified|Failed|errors?).*)$", answer.complaint, re.MULTILINE
        )
        if not answer.ok or warned:
            raise ManagerError(said(answer) if not answer.ok else "; ".join(warned))

    def archive(self, suite: str) -> tuple[str, list[str], str | None] | None:
        """Where the host's own sources have a suite: address, components, keyring; None if they do not."""
        fields = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(SIGNED_BY)|$(SOURCESENTRY)"
        answer = self.runner.run(["apt-get", "indextargets", "--format", fields, "Created-By: Packages"], QUERY_TIMEOUT)
        rows = [line.split("|") for line in answer.output.splitlines() if line.count("|") == 4]
        rows = [row for row in rows if row[1] == suite and f"/{settings.PREFIX}" not in row[4]]
        if not rows:
            return None
        signed = rows[0][3]
        return rows[0][0], [row[2] for row in rows], None if signed.startswith("$(") or not signed else signed

    def ask_nobody(self) -> None:
        """Use what lies on the host only. apt asks nobody for files that it is given."""

    # -- transactions

    def words(self, wanted: Mapping[str, str | None], installed: Mapping[str, Collection[str]]) -> list[str]:
        """Arguments that ask for packages. One of any version is asked for only where it is not there."""
        return [
            name if version is None else f"{name}={version}"
            for name, version in wanted.items()
            if version is not None or name not in installed
        ]

    def simulate(self, words: Sequence[str], removed: Sequence[str] = ()) -> Transaction:
        """What would happen. Without --yes, for with it apt stops at holds and downgrades before it lists them."""
        asked = [*words, *(f"{name}-" for name in removed)]
        answer = self._get(["--simulate", "--no-install-recommends", "install", *asked], SIMULATION_TIMEOUT)
        return parse(self.family, f"{answer.output}\n{answer.complaint}")

    def _cached(self, name: str, version: str) -> str | None:
        cached = self.file_of("/var/cache/apt/archives", name, version)
        return os.path.join("/var/cache/apt/archives", cached) if cached else None

    def _is_whole(self, path: str) -> bool:
        return self.runner.run(["dpkg-deb", "--contents", path], FETCH_TIMEOUT).ok

    def _download(self, packages: Mapping[str, str], folder: str) -> Answer:
        words = [f"{name}={version}" for name, version in packages.items()]
        return self._get(["download", *words], FETCH_TIMEOUT, ("--chdir", folder))

    def file_of(self, folder: str, name: str, version: str) -> str | None:
        """The file of a package in a folder; None if it is not there."""
        begin = f"{name.partition(':')[0]}_{version.replace(':', '%3a')}_"
        found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        return next((each for each in found if each.startswith(begin) and each.endswith(".deb")), None)

    def index(self, folder: str) -> None:
        """Write the index that makes a folder of packages a repository. Raises ManagerError, OSError."""
        records = []
        for name in sorted(name for name in os.listdir(folder) if name.endswith(".deb")):
            path = os.path.join(folder, name)
            fields = self.runner.run(["dpkg-deb", "--field", path], QUERY_TIMEOUT)
            if not fields.ok:
                raise ManagerError(said(fields))
            digest = hashlib.sha256()
            with open(path, "rb") as file:
                for block in iter(lambda: file.read(1 << 20), b""):
                    digest.update(block)
            size = os.path.getsize(path)
            records.append(
                f"{fields.output.rstrip()}\nFilename: ./{name}\nSize: {size}\nSHA256: {digest.hexdigest()}\n"
            )
        durable.replace(os.path.join(folder, "Packages"), "\n".join(records), 0o644)

    def install(self, words: Sequence[str], removed: Sequence[str], files: Sequence[str], folder: str) -> Answer:
        """Do it: `words` from `folder`, else from the sources; local `files`; away with `removed`."""
        asked = [*words, *files, *(f"{name}-" for name in removed)]
        return self._get(
            [
                *("--yes", *_KEEP, *self.lock, "--no-install-recommends", "--allow-downgrades"),
                *("--allow-change-held-packages", "--purge", "-o", f"Dir::Cache::archives={folder}/"),
                *("-o", "APT::Keep-Downloaded-Packages=true", "-o", "APT::Sandbox::User=root", "install", *asked),
            ],
            TRANSACTION_TIMEOUT,
        )

    def prepare_removal(self, names: Iterable[str], release: str | None) -> None:
        """Let the kernel that runs be removed: Debian's linux-base asks, and takes no answer for no."""
        if release and any(release in name for name in names):
            path = os.path.join(self.scratch, "selections")
            with open(path, "w", encoding="utf-8") as file:
                file.write("linux-base linux-base/removing-running-kernel boolean false\n")
                file.write(
                    f"linux-image-{release} linux-image-{release}/prerm/removing-running-kernel-{release} "
                    "boolean false\n"
                )
            self.runner.run([*_QUIET, "debconf-set-selections", path], QUERY_TIMEOUT)

    # -- holds

    def hold(self, names: Sequence[str], wanted: bool = True) -> None:
        """Hold packages, or let them go. Raises ManagerError."""
        if names:
            answer = self.runner.run(["apt-mark", "hold" if wanted else "unhold", *names], QUERY_TIMEOUT)
            if not answer.ok:
                raise ManagerError(said(answer))

    def _get(self, arguments: Sequence[str], timeout: float, environment: Sequence[str] = ()) -> Answer:
        """apt-get, again and again while another one has the lock on the indexes (which has no timeout of its own)."""
        end = time.monotonic() + self.lock_timeout
        while True:
            answer = self.runner.run(
                [_QUIET[0], *environment, *_QUIET[1:], "apt-get", *self.options, *arguments], timeout
            )
            if answer.ok or "Could not get lock" not in answer.complaint or time.monotonic() > end:
                return answer
            time.sleep(2)

    def trusted_keys(self) -> set[str]:
        """None: a source names the file of its key, and there is no other place where a key stays."""
        return set()

    def distrust(self, keys: Collection[str]) -> None:
        """Nothing, see :meth:`trusted_keys`."""


class Dnf(_PackageFiles):
    """dnf 4 and rpm. `scratch` is an empty folder for the trial."""

    family = "RedHat"
    index_file = "repodata/repomd.xml"

    def __init__(self, runner: CommandRunner, scratch: str, offline: bool, lock_timeout: int = 300) -> None:
        del lock_timeout  # dnf waits for its lock by itself
        self.runner, self.scratch, self.offline = runner, scratch, offline
        self.options: list[str] = ["--setopt=install_weak_deps=False"]

    def installed(self) -> tuple[dict[str, list[str]], list[str]]:
        """Versions of all installed packages by name. What is held is in the version lock's file."""
        query = r"%{NAME}\t%|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\n"
        answer = self.runner.run(["rpm", "-qa", "--qf", query], QUERY_TIMEOUT)
        found = parse_rpm(answer.output) if answer.ok else None
        if found is None:
            raise ManagerError(said(answer))
        return found, []

    def interrupted(self) -> list[str]:
        """What a run that was killed left half done: packages that are there twice and must not be."""
        answer = self.runner.run(["dnf", "--quiet", "--cacheonly", "check", "--duplicates"], SIMULATION_TIMEOUT)
        twice = re.findall(r"^(\S+) is a duplicate with \S+$", answer.output, re.MULTILINE)
        return [f"rpm left two versions of: {', '.join(twice)}"] if twice else []

    def recover(self) -> list[str]:
        """Take away what is there twice. Gives what could not be finished, in words."""
        answer = self._dnf(["--assumeyes", "remove", "--duplicates"], TRANSACTION_TIMEOUT)
        return [] if answer.ok else [f"dnf remove --duplicates: {said(answer)}"]

    def stage(self, files: Mapping[str, bytes], removed: Collection[str]) -> None:
        """Lay files over a copy of the host's own, without those that are `removed`, and use that from now on."""
        repositories = os.path.join(self.scratch, "yum.repos.d")
        plugins = os.path.join(self.scratch, "plugins")
        for folder, copy in ((settings.DNF_REPOSITORIES, repositories), ("/etc/dnf/plugins", plugins)):
            os.makedirs(copy, exist_ok=True)
            for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
                path = os.path.join(folder, name)
                if path not in removed and os.path.isfile(path) and not (self.offline and copy == repositories):
                    shutil.copyfile(path, os.path.join(copy, name))
        keys = {
            path: os.path.join(self.scratch, os.path.basename(path))
            for path in files
            if path.startswith(settings.RPM_KEYS)
        }
        for path, content in files.items():
            if path in keys:
                target = keys[path]
            elif path == settings.VERSION_LOCK:
                target = os.path.join(plugins, os.path.basename(path))
            else:
                target = os.path.join(repositories, os.path.basename(path))
                for key, staged in keys.items():
                    content = content.replace(f"gpgkey=file://{key}\n".encode(), f"gpgkey=file://{staged}\n".encode())
            with open(target, "wb") as file:
                file.write(content)
        lock = os.path.join(plugins, os.path.basename(settings.VERSION_LOCK))
        if not os.path.exists(lock):
            open(lock, "wb").close()
        with open(os.path.join(plugins, "versionlock.conf"), "w", encoding="utf-8") as file:
            file.write(f"[main]\nenabled = 1\nlocklist = {lock}\n")
        self.options += [f"--setopt=reposdir={repositories}", f"--setopt=pluginconfpath={plugins}"]

    def refresh(self) -> None:
        """Fetch the indexes into the scratch folder, and look at the keys. Raises ManagerError."""
        self.options.append(f"--setopt=cachedir={os.path.join(self.scratch, 'cache')}")
        answer = self._dnf(["--assumeyes", "--setopt=skip_if_unavailable=False", "makecache"], REFRESH_TIMEOUT)
        if not answer.ok:
            raise ManagerError(said(answer))

    def ask_nobody(self) -> None:
        """Use what lies on the host only."""
        self.options.append("--disablerepo=*")

    def archive(self, suite: str) -> tuple[str, list[str], str | None] | None:
        """EL's repositories have addresses of their own; a profile names them."""
        del suite
        return None

    def words(self, wanted: Mapping[str, str | None], installed: Mapping[str, Collection[str]]) -> list[str]:
        """Arguments that ask for packages. One of any version is asked for only where it is not there."""
        lock = [] if self._has_version_lock() else ["python3-dnf-plugin-versionlock"]
        return lock + [
            name if version is None else f"{name}-{version}"
            for name, version in wanted.items()
            if version is not None or name not in installed
        ]

    def simulate(self, words: Sequence[str], removed: Sequence[str] = ()) -> Transaction:
        """What would happen."""
        if not words and not removed:
            return Transaction()
        answer = self._ask(words, removed, "--assumeno")
        # The shell calls it an error that nobody agreed.
        complaint = answer.complaint.replace("Error: Operation aborted.", "Operation aborted.")
        return parse(self.family, f"{answer.output}\n{complaint}")

    def _cached(self, name: str, version: str) -> str | None:
        pattern = f"{name}-{_without_epoch(version)}.*.rpm"
        found = self.runner.run(["find", "/var/cache/dnf", "-name", pattern], QUERY_TIMEOUT)
        return next(iter(found.output.splitlines()), None)

    def _is_whole(self, path: str) -> bool:
        return self.runner.run(["rpmkeys", "--checksig", "--nosignature", path], FETCH_TIMEOUT).ok

    def _download(self, packages: Mapping[str, str], folder: str) -> Answer:
        words = [f"{name}-{version}" for name, version in packages.items()]
        # The version lock would hide the version that is to be gone back to.
        return self._dnf(["--disableplugin=versionlock", "download", f"--destdir={folder}", *words], FETCH_TIMEOUT)

    def file_of(self, folder: str, name: str, version: str) -> str | None:
        """The file of a package in a folder; None if it is not there."""
        begin = f"{name}-{_without_epoch(version)}."
        found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        return next((each for each in found if each.startswith(begin) and each.endswith(".rpm")), None)

    def index(self, folder: str) -> None:
        """Write the index of a folder of packages with createrepo_c. Raises ManagerError."""
        answer = self.runner.run(["createrepo_c", "--quiet", "--update", folder], REFRESH_TIMEOUT)
        if not answer.ok:
            raise ManagerError(said(answer))

    def install(self, words: Sequence[str], removed: Sequence[str], files: Sequence[str], folder: str) -> Answer:
        """Do it: `words` from the repositories; local `files`; away with `removed`."""
        del folder  # dnf has no folder of files to look in first
        return self._ask([*words, *files], removed, "--assumeyes")

    def prepare_removal(self, names: Iterable[str], release: str | None) -> None:
        """Let the kernel that runs be removed."""
        del names, release
        self.options.append("--setopt=protect_running_kernel=False")

    def hold(self, names: Sequence[str], wanted: bool = True) -> None:
        """The version lock's file, which is one of the settings, is all there is to a hold."""

    def trusted_keys(self) -> set[str]:
        """Names of the keys that rpm trusts: dnf gives it a repository's with the first package from there. Raises
        ManagerError."""
        answer = self.runner.run(["rpm", "-qa", "gpg-pubkey"], QUERY_TIMEOUT)
        if not answer.ok:
            raise ManagerError(said(answer))
        return set(answer.output.split())

    def distrust(self, keys: Collection[str]) -> None:
        """Take keys from rpm, but those that have signed a package which is still there. Raises ManagerError."""
        signatures = self.runner.run(
            ["rpm", "-qa", "--qf", r"%{RSAHEADER:pgpsig} %{DSAHEADER:pgpsig}\n"], QUERY_TIMEOUT
        )
        if not signatures.ok:
            raise ManagerError(said(signatures))
        # rpm calls a key by the last half of its id, and the time when it was made.
        signers = {key[-8:].lower() for key in re.findall(r"Key ID ([0-9a-fA-F]{8,})", signatures.output)}
        unused = sorted(name for name in keys if name.split("-")[2:3] and name.split("-")[2] not in signers)
        if unused:
            answer = self.runner.run(["rpm", "--erase", *unused], TRANSACTION_TIMEOUT)
            if not answer.ok:
                raise ManagerError(said(answer))

    def _has_version_lock(self) -> bool:
        answer = self.runner.run(["dnf", "versionlock", "--help"], QUERY_TIMEOUT)
        return answer.ok

    def _ask(self, words: Sequence[str], removed: Sequence[str], consent: str) -> Answer:
        if not removed:
            return self._dnf([consent, "--best", "install", *words], TRANSACTION_TIMEOUT)
        path = os.path.join(self.scratch, "transaction")
        with open(path, "w", encoding="utf-8") as file:
            file.write("".join(f"remove {name}\n" for name in removed))
            file.write("".join(f"install {word}\n" for word in words) + "run\n")
        return self._dnf([consent, "shell", path], TRANSACTION_TIMEOUT)

    def _dnf(self, arguments: Sequence[str], timeout: float = SIMULATION_TIMEOUT) -> Answer:
        return self.runner.run(["dnf", *self.options, *arguments], timeout)


Manager = Any  # Apt or Dnf, or what stands in for one in a test; mypy --strict of 3.9 has no use of a protocol here


def manager(family: str) -> type[Apt] | type[Dnf]:
    """The package manager of a family."""
    return Dnf if family == "RedHat" else Apt


def _without_epoch(version: str) -> str:
    return re.sub(r"^[0-9]+:", "", version)


def said(answer: Answer) -> str:
    """The lines that tell what went wrong; the last ones where none is marked."""
    lines = [line.strip() for line in f"{answer.output}\n{answer.complaint}".splitlines() if line.strip()]
    marked = [
        line
        for line in lines
        if re.match(r"(E: |Err|W: |dpkg: (?!warning)|Error|Problem|\[Errno|(- )?(Curl error|Status code)|Failed)", line)
    ]
    with contextlib.suppress(ValueError):
        marked.remove("E: Sub-process /usr/bin/dpkg returned an error code (1)")
    return "; ".join(dict.fromkeys(marked or lines[-5:]))[:2000] or f"status {answer.status}"
