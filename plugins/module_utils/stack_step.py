# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One step of the driver stack on a host: an operation's packages brought to a profile and held, or brought back.

The order is what keeps a host whole. First all that only reads: what a killed run left is finished, the indexes are
fetched and the transactions are simulated in a scratch folder, first of the whole set, then of the step. Then the
package files are fetched, those to go back with first. Then what was before is written down. Only then packages change.
What fails after that is put back. Nothing here imports Ansible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Callable

from ansible_collections.ringmaster.inference.plugins.module_utils import durable
from ansible_collections.ringmaster.inference.plugins.module_utils import stack_settings as settings
from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.driver_stack import DriverStackReader
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_generations import (
    APPLIED,
    CONFIRMED,
    DIRECTORY,
    Entry,
    Generation,
    Generations,
    GenerationsError,
    summary,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_managers import (
    Manager,
    ManagerError,
    manager,
    said,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_packages import OPERATIONS, owner, plain_name
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_plan import kernel_followers
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import for_kernel, packages
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_transactions import (
    Change,
    Transaction,
    along,
    check,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_versions import compare, fits

GRUB_MENU = "/boot/grub/grub.cfg"
GRUB_DEFAULT = "/etc/default/grub.d/ringmaster-kernel.cfg"
_DEFAULT_KERNEL = ("grubby", "--default-kernel")
GRUB_TIMEOUT = 300.0  # seconds; it looks for other systems on all disks
KEY_TIMEOUT = 60.0  # seconds
LARGEST_KEY = 1 << 20  # bytes
LOG_LINES = 20  # of a build that failed
LOCK = "/run/lock/ringmaster-driver-stack.lock"


class StepError(Exception):
    """What a step could not do: what was expected, what was found, what to do; and how the host was left."""

    def __init__(self, expected: str, found: str, to_do: str) -> None:
        super().__init__(f"Expected {expected}. Found {found.rstrip('.')}. To do: {to_do}.")


@dataclass(frozen=True)
class Options:
    """How a step is done. `mirror`: folder with a profile's packages; `keep`: whether a package whose file can't be had
    for the way back forbids the change; `check_mode`: say what would change, and change nothing."""

    operation: str
    offline: bool = False
    mirror: str = ""
    keep: str = "required"
    lock_timeout: int = 300
    check_mode: bool = False
    directory: str = DIRECTORY


@dataclass
class Outcome:
    """`packages`: changes in the form of the filter stack_transaction; `files`: paths that were or would be written."""

    changed: bool = False
    packages: list[dict[str, str | None]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)
    recovered: list[str] = field(default_factory=list)
    along: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    generation: Mapping[str, Any] | None = None


class Step:
    """A step of one operation. `profile` is a validated one; None where the step goes back only."""

    def __init__(
        self,
        profile: Mapping[str, Any] | None,
        options: Options,
        tree: FileTree,
        runner: CommandRunner,
        make_manager: Callable[..., Manager] | None = None,
    ) -> None:
        self.options, self.tree, self.runner = options, tree, runner
        self.reader = DriverStackReader(tree, runner)
        self.running = self.reader.kernel()["running"]
        self.family = profile["os"]["family"] if profile else self.reader.system()["family"]
        if self.family is None:
            raise StepError("a system of the Debian or the EL family", "something else in /etc/os-release", "use one")
        self.profile: dict[str, Any] = {}
        self.wanted: dict[str, str | None] = {}
        if profile:
            self.profile = for_kernel(profile, profile["kernel"]["release"] or self.running or "unknown")
            if self.profile["fabric_manager"] and self.reader.hardware()["nvswitches"] == 0:
                self.profile["fabric_manager"] = None
            self.wanted = packages(self.profile, options.operation)
        self.generations = Generations(options.operation, options.directory)
        self.outcome = Outcome()
        self._installed_before: Mapping[str, Collection[str]] = {}
        self._make_manager = make_manager or manager(self.family)

    # -- to the profile

    def present(self) -> Outcome:
        """Bring the packages to the profile and hold them.

        Raises:
            StepError: the host is as it was, or the message says how it was left.
        """
        with self._manager() as tool:
            self._recover(tool)
            installed, held = tool.installed()
            missing = {
                name: version
                for name, version in self.wanted.items()
                if not any(fits(self.family, version, each) for each in installed.get(name, ()))
            }
            if not missing:
                self._settle(tool, installed, held)
                self._boot()
                return self._finished()
            files = self._sources(tool)
            tool.stage({**files, **self._without_locks()}, self._own_paths())
            self._try(tool.refresh, "the repositories of the profile to answer, signed with their keys")
            self._simulate(tool, OPERATIONS, installed, "the whole stack")
            step = self._simulate(tool, (self.options.operation,), installed, f"the step {self.options.operation}")
            self.outcome.packages = [change.document() for change in step.changes]
            self.outcome.along = along(step, self.profile)
            self.outcome.changed = True
            pins = self._pins(installed, {plain_name(each.name): each.after for each in step.changes if each.after})
            self.outcome.holds = [name for name in pins if name not in held]
            if self.options.check_mode:
                self.outcome.files = [*self._differing(files), *self._differing(self._hold_files(pins))]
                return self._finished()
            self._fetch(tool, step.changes, installed)
            self._change(tool, step, files, pins, held)
            self._boot()
            return self._finished()

    def _change(
        self,
        tool: Manager,
        step: Transaction,
        files: Mapping[str, bytes],
        pins: Mapping[str, list[str]],
        held: Collection[str],
    ) -> None:
        try:
            self.generations.expect_keys(tool.trusted_keys())
        except OSError as error:
            raise StepError("a note of what is there now", f"{error}", "free some room. Nothing was changed") from error
        generation = self._note(step, held)
        installed: Mapping[str, Collection[str]] = {}
        try:
            stale = [path for path in self._source_paths() if path not in files]
            self._write({**files, **self._hold_files(pins), **dict.fromkeys(stale)})
            answer = tool.install(tool.words(self.wanted, {}), (), (), self.generations.files)
            self.generations.note_keys(tool.trusted_keys())
            if not answer.ok:
                raise ManagerError(self._why(answer))
            installed, _held = tool.installed()
            self._hold(tool, pins, installed)
            complaint = self._wrong(installed) or (self._unbuilt() if self.options.operation == "driver" else "")
            if complaint:
                raise ManagerError(complaint)
        except (ManagerError, OSError) as error:
            self._put_back(tool, error)
        generation.state = APPLIED if self.options.operation == "driver" else CONFIRMED
        self.generations.save()
        self.generations.prune(self._files_of(tool, installed))

    def confirm(self) -> Outcome:
        """Note that the host came back healthy from the last change."""
        with self._alone():
            last = self.generations.last
            if last and last.state == APPLIED:
                self.outcome.changed = True
                last.state = CONFIRMED
                if not self.options.check_mode:
                    self.generations.save()
            return self._finished()

    def mirrored(self) -> Outcome:
        """Fill the mirror directory with what a host that is like this one lacks for the whole profile.

        Raises:
            StepError: a package can't be had.
        """
        with self._manager() as tool:
            installed, _held = tool.installed()
            tool.stage({**self._sources(tool), **self._without_locks()}, self._own_paths())
            self._try(tool.refresh, "the repositories of the profile to answer, signed with their keys")
            simulated = self._simulate(tool, OPERATIONS, installed, "the whole stack")
            folder = self.options.mirror
            coming = [(plain_name(each.name), str(each.after)) for each in simulated.changes if each.after]
            # What is here already, other hosts may lack.
            coming += [
                (name, version)
                for operation in OPERATIONS
                for name, wanted in packages(self.profile, operation).items()
                for version in installed.get(name, ())
                if fits(self.family, wanted, version)
            ]
            missing = [each for each in coming if not tool.file_of(folder, *each)]
            self.outcome.packages = [Change(name, "fetch", None, version).document() for name, version in missing]
            index = os.path.join(folder, tool.index_file)
            self.outcome.changed = bool(missing) or not os.path.exists(index)
            if self.outcome.changed and not self.options.check_mode:
                os.makedirs(folder, mode=0o755, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(index)  # a run that is cut leaves none, and the next one makes it
                fetched = tool.fetch(missing, folder)
                lost = [f"{name} {version}" for name, version in missing if name not in fetched]
                if lost:
                    raise StepError(
                        f"the files of {', '.join(lost)} in {folder}",
                        "the package manager could not fetch them",
                        "look at the repositories and free some room",
                    )
                tool.index(folder)
            return self._finished()

    # -- back

    def restored(self, first: bool) -> Outcome:
        """Bring the packages back to what they were before the last change, or before the first; asks no repository.

        Raises:
            StepError: the way back can't be gone; a run after what it names goes on with it.
        """
        with self._manager() as tool:
            if not self.generations.generations:
                return self._finished()
            if not self.options.check_mode:
                self._recover(tool)
            tool.ask_nobody()
            self._restore(tool, first)
            return self._finished()

    def _restore(self, tool: Manager, first: bool) -> None:
        chosen = self.generations.generations[0 if first else -1]
        installed, held = tool.installed()
        back = self.generations.target(first)
        lost = [e for e in back if e.before and e.before not in installed.get(e.name, ()) and not self._kept(e)]
        if lost:
            raise StepError(
                f"the package files to go back with in {self.generations.files}",
                f"none of {', '.join(f'{each.name} {each.before}' for each in lost)}",
                "put the files there, under the names that the package manager gives them, and run again",
            )
        replaced = [entry for entry in back if entry.before and entry.before not in installed.get(entry.name, ())]
        # What came goes, also where another hand has changed its version since.
        brought = [
            entry
            for entry in back
            if not entry.before
            and (entry.after in installed.get(entry.name, ()) if self._beside() else entry.name in installed)
        ]
        self.outcome.packages = [
            Change(each.name, "remove" if each in brought else "put back", each.after, each.before).document()
            for each in [*replaced, *brought]
        ]
        self.outcome.changed = True
        if self.options.check_mode:
            return
        boots = self._default_kernel()
        names = self._removable(tool, replaced, brought)
        mine = {*self.wanted, *self._pinned(self.options.operation)}
        mine |= {entry.name for each in self.generations.generations for entry in each.entries}
        # The pins of what is left would hold it against the way back.
        self._write_settings(chosen.settings)
        tool.hold([name for name in held if name in {entry.name for entry in back}], wanted=False)
        if replaced or names:
            files = [os.path.join(self.generations.files, str(self._kept(entry))) for entry in replaced]
            tool.prepare_removal(names, self.running)
            answer = tool.install((), names, files, self.generations.files)
            if not answer.ok:
                now, _held = tool.installed()
                tool.hold([name for name in chosen.held if name in now])
                raise StepError(
                    f"{self.options.operation} to go back to what it was",
                    self._why(answer),
                    "do what the package manager asks for, and run the rollback again",
                )
        if GRUB_DEFAULT in self.outcome.files:
            self._update_grub()
        self._boot_former(chosen, boots)
        now, held_now = tool.installed()
        tool.hold([name for name in held_now if name in mine and name not in chosen.held], wanted=False)
        tool.hold([name for name in chosen.held if name in now])
        self.generations.drop(first)
        if self.generations.generations:
            self.generations.save()
        else:
            if not self.generations.others():
                self._distrust(tool)
                self._write(dict.fromkeys(self._source_paths()))
            self.generations.remove()

    def _distrust(self, tool: Manager) -> None:
        """Let the package manager trust only the keys that it would without the operations. What is in the way of that
        is no reason to keep the record: the packages are gone."""
        try:
            trusted = tool.trusted_keys()
            self.generations.note_keys(trusted)  # of a change that was cut
            brought = self.generations.brought_keys() & trusted
            if brought:
                tool.distrust(brought)
        except (ManagerError, GenerationsError, OSError) as error:
            self.outcome.warnings.append(f"keys of the repositories may still be trusted: {error}")

    def _removable(self, tool: Manager, replaced: list[Entry], brought: list[Entry]) -> list[str]:
        """Names to remove: all that came, or the step's own alone where something else needs what came along."""

        def spec(entry: Entry) -> str:
            return f"{entry.name}-{entry.after}" if self._beside() else entry.name

        if not brought:
            return []
        files = [os.path.join(self.generations.files, str(self._kept(entry))) for entry in replaced]
        known = {plain_name(entry.name) for entry in [*brought, *replaced]}
        own = [entry for entry in brought if self._is_own(entry.name)] or brought
        simulated = Transaction()
        strangers: set[str] = set()
        for chosen in (brought, own):
            simulated = tool.simulate(files, [spec(entry) for entry in chosen])
            strangers = {plain_name(change.name) for change in simulated.changes} - known
            if not simulated.errors and not strangers:
                return [spec(entry) for entry in chosen]
        raise StepError(
            f"to go back without touching other packages than {', '.join(sorted(known))}",
            "; ".join(simulated.errors) or f"that {', '.join(sorted(strangers))} would change too",
            "roll back first what needs them (operations in reverse order), then run again",
        )

    def _is_own(self, name: str) -> bool:
        return plain_name(name) in self.wanted or owner(name) == self.options.operation

    def _put_back(self, tool: Manager, error: Exception) -> None:
        """What failed half-way is taken back; raises StepError in any case."""
        expected = f"{self.options.operation} at profile {self.profile['name']}"
        found = str(error)
        try:
            tool.recover()
            self._restore(tool, first=False)
        except (StepError, ManagerError, GenerationsError, OSError) as another:
            raise StepError(
                expected,
                f"{found}. Putting the former packages back failed as well: {another}",
                "mend what the first message names, and run again: the run goes on from here",
            ) from error
        raise StepError(expected, f"{found}. The former packages are back", "mend it, and run again") from error

    # -- parts

    def _recover(self, tool: Manager) -> None:
        self.outcome.recovered = self._try(tool.interrupted, "the package manager to answer")
        if self.outcome.recovered and not self.options.check_mode:
            self.outcome.changed = True
            # What can't be finished (a build that fails) may be what this step replaces; its own result decides.
            self.outcome.warnings += tool.recover()

    def _simulate(
        self, tool: Manager, operations: Iterable[str], installed: Mapping[str, Collection[str]], what: str
    ) -> Transaction:
        operations = tuple(operations)
        wanted = {name: version for each in operations for name, version in packages(self.profile, each).items()}
        if self.profile["rdma"]["flavour"] == "none":
            wanted = {name: each for name, each in wanted.items() if name not in self.profile["rdma"]["packages"]}
        simulated: Transaction = tool.simulate(tool.words(wanted, installed))
        mine = self._held_by_roles()
        foreign = tuple(name for name in simulated.held if plain_name(name) not in mine)
        simulated = dataclasses.replace(simulated, held=foreign)
        problems = check(simulated, self.profile, operations, installed)
        if problems:
            raise StepError(
                f"a transaction for {what} of profile {self.profile['name']} that keeps to its packages",
                "; ".join(dict.fromkeys(each["reason"] for each in problems)),
                "; ".join(dict.fromkeys(each["to_do"] for each in problems)) + ". Nothing was changed",
            )
        return simulated

    def _fetch(self, tool: Manager, changes: Iterable[Change], installed: Mapping[str, Collection[str]]) -> None:
        folder = self.generations.files
        try:
            os.makedirs(os.path.join(folder, "partial"), mode=0o700, exist_ok=True)
            before = [(each.name, version) for each in changes if (version := _before(each, installed))]
            kept = tool.fetch(before, folder)
            lost = [f"{name} {version}" for name, version in before if name not in kept]
            coming = [(each.name, each.after) for each in changes if each.after]
            fetched = tool.fetch(coming, folder)
        except OSError as error:
            raise StepError(
                "room for the package files", f"{error}", f"free some on the disk with {folder}. Nothing was changed"
            ) from error
        absent = [f"{name} {version}" for name, version in coming if name not in fetched]
        if absent:
            reason = "the package manager could not fetch them"
            free = shutil.disk_usage(folder).free
            raise StepError(
                f"the files of {', '.join(absent)} in {folder}",
                f"{reason}; {free // (1 << 20)} MiB are free there",
                "look at the repositories and free some room. Nothing was changed",
            )
        if lost and self.options.keep == "required":
            raise StepError(
                "the files of the packages that are replaced, to go back with",
                f"no file of {', '.join(lost)} in the repositories or the cache",
                f"put them into {folder}, or set the variable keep_previous to if_available. Nothing was changed",
            )
        self.outcome.warnings += [f"there is no way back to {name}: its file can't be had" for name in lost]

    def _note(self, step: Transaction, held: Collection[str]) -> Generation:
        """Write down what is before the change; a cut run's own note is kept, and what is new is added."""
        generation = self.generations.begin(self.profile["name"])
        fresh = not generation.entries
        known = {(entry.name, entry.after if self._beside() else None): entry for entry in generation.entries}
        for change in step.changes:
            name = plain_name(change.name)
            key = (name, change.after if self._beside() else None)
            before = _before(change, self._installed_before)
            if key in known:
                known[key].after = change.after
            else:
                generation.entries.append(Entry(name, before, change.after))
        for entry in generation.entries:
            if entry.before:
                entry.file = self._kept(entry)
        if fresh:
            generation.held = sorted(name for name in held if name in self.wanted or name in self._names(step))
            generation.settings = {path: self.tree.raw(path) for path in self._setting_paths()}
            loaded, hardware = self.reader.driver(self.reader.kernel(), {})["loaded"], self.reader.hardware()
            cards = hardware["cards"]
            generation.facts = {
                "loaded": loaded["version"],
                "cards": None if cards is None else len(cards),
                "boot": self.tree.boot_id(),
                "default_kernel": self._default_kernel(),
            }
        if self.options.operation == "kernel" and self.family == "RedHat":
            generation.facts["wanted_kernel"] = f"/boot/vmlinuz-{self.profile['kernel']['release']}"
        try:
            self.generations.save()
        except OSError as error:
            raise StepError("a note of what is there now", f"{error}", "free some room. Nothing was changed") from error
        return generation

    def _settle(self, tool: Manager, installed: Mapping[str, Collection[str]], held: Collection[str]) -> None:
        """All packages are there; their pins and holds follow, and a change that was cut is done."""
        pins = self._pins(installed, {})
        files = self._hold_files(pins) if self.wanted else {}
        self.outcome.files = self._differing(files)
        self.outcome.holds = [name for name in pins if name not in held] if self.family == "Debian" else []
        complaint = self._unbuilt() if self.options.operation == "driver" else ""
        last = self.generations.last
        if complaint and last and last.state != CONFIRMED and not self.options.check_mode:
            self._put_back(tool, ManagerError(complaint))
        if complaint and not self.options.check_mode:
            raise StepError(
                f"the module of driver {self.profile['driver']['version']}", complaint, "mend it, and run again"
            )
        open_ = bool(last and last.state == "open")
        if not (self.outcome.files or self.outcome.holds or open_):
            return
        self.outcome.changed = True
        if self.options.check_mode:
            return
        if not last:
            generation = self.generations.begin(self.profile["name"])
            generation.held = sorted(name for name in held if name in self.wanted)
            generation.settings = {path: self.tree.raw(path) for path in self._setting_paths()}
            generation.facts = {"default_kernel": self._default_kernel()}
            generation.state = CONFIRMED
            last = generation
        if open_:
            last.state = APPLIED if self.options.operation == "driver" else CONFIRMED
        self.generations.save()
        self._write(files)
        self._hold(tool, pins, installed)

    def _hold(self, tool: Manager, pins: Mapping[str, list[str]], installed: Mapping[str, Collection[str]]) -> None:
        tool.hold([name for name in pins if name in installed])
        mine = {entry.name for each in self.generations.generations for entry in each.entries}
        _installed, held = tool.installed()
        before = {name for each in self.generations.generations[:1] for name in each.held}
        gone = [name for name in held if name in mine and name not in pins and name not in before]
        tool.hold([name for name in gone if name not in self._pinned_by_others()], wanted=False)

    def _pins(self, installed: Mapping[str, Collection[str]], coming: Mapping[str, str]) -> dict[str, list[str]]:
        """Names of what is to be held, with the versions."""
        names = list(self.wanted)
        if self.options.operation == "kernel":
            names += [name for name in kernel_followers(installed) if name not in names]
        pins = {}
        for name in names:
            version = self.wanted.get(name)
            there = [
                each for each in installed.get(name, ()) if name not in self.wanted or fits(self.family, version, each)
            ]
            found = [coming[name]] if name in coming else there[-1:]
            if found:
                pins[name] = found
        return pins

    def _hold_files(self, pins: Mapping[str, list[str]]) -> dict[str, bytes]:
        if self.family == "RedHat":
            text = self.tree.raw(settings.VERSION_LOCK) or ""
            return {settings.VERSION_LOCK: settings.version_locks(text, self.options.operation, pins).encode()}
        return {self._preferences: settings.preferences({name: each[0] for name, each in pins.items()}).encode()}

    def _without_locks(self) -> dict[str, bytes]:
        """The version lock without what the roles hold: dnf would not even see the whole set of a newer profile. That a
        step leaves the others' packages alone is checked in its transaction."""
        if self.family != "RedHat":
            return {}
        text = self.tree.raw(settings.VERSION_LOCK) or ""
        for operation in OPERATIONS:
            text = settings.version_locks(text, operation, {})
        return {settings.VERSION_LOCK: text.encode()}

    @property
    def _preferences(self) -> str:
        return f"{settings.APT_PREFERENCES}/{settings.PREFIX}{self.options.operation}"

    def _setting_paths(self) -> list[str]:
        if self.family == "RedHat":
            return [settings.VERSION_LOCK]
        return [self._preferences, *([GRUB_DEFAULT] if self.options.operation == "kernel" else [])]

    def _held_by_roles(self) -> set[str]:
        """Names that the roles hold; a hold of anybody else's is respected."""
        return {name for operation in OPERATIONS for name in self._pinned(operation)}

    def _pinned_by_others(self) -> set[str]:
        others = (each for each in OPERATIONS if each != self.options.operation)
        return {name for operation in others for name in self._pinned(operation)}

    def _pinned(self, operation: str) -> Collection[str]:
        if self.family == "RedHat":
            return settings.locked_by(self.tree.raw(settings.VERSION_LOCK) or "", operation)
        return settings.pinned(self.tree.raw(f"{settings.APT_PREFERENCES}/{settings.PREFIX}{operation}") or "")

    # -- repositories

    def _sources(self, tool: Manager) -> dict[str, bytes]:
        """Files of repositories and keys. Raises StepError."""
        if self.options.offline:
            if not os.path.isdir(self.options.mirror):
                raise StepError(
                    f"the mirror directory {self.options.mirror} (ringmaster_offline is true)",
                    "no such directory",
                    "fill it with the playbook mirror, and bring it to the host. Nothing was changed",
                )
            name = "mirror"
            if self.family == "RedHat":
                text = settings.dnf_repository(name, f"file://{self.options.mirror}", None)
            else:
                text = settings.apt_mirror(self.options.mirror)
            return {settings.source_path(name, self.family): text.encode()}
        files: dict[str, bytes] = {}
        for repository in self.profile["repositories"]:
            files.update(self._source(tool, repository))
        return files

    def _source(self, tool: Manager, repository: Mapping[str, Any]) -> dict[str, bytes]:
        name, path = repository["name"], settings.source_path(repository["name"], self.family)
        if repository["url"] is None:
            return self._archive(tool, repository)
        key, content = self._key(repository)
        files = {key: content} if content is not None else {}
        if self.family == "RedHat":
            return {**files, path: settings.dnf_repository(name, repository["url"], key).encode()}
        suites, components = repository["suites"], repository.get("components", [])
        return {**files, path: settings.apt_source([repository["url"]], suites, components, key).encode()}

    def _archive(self, tool: Manager, repository: Mapping[str, Any]) -> dict[str, bytes]:
        """The distribution's own archive: what of it the host's own sources lack, from the address that they have."""
        suites, components = repository["suites"], repository.get("components", [])
        own = {suite: tool.archive(suite) for suite in suites}
        known = next((each for each in own.values() if each), None)
        if known is None:
            raise StepError(
                f"suite {suites[0]} in the host's apt sources (repository {repository['name']})",
                "no source that has it",
                "add it to the host's sources, or name an address with overrides of the profile. Nothing was changed",
            )
        lacking: dict[str, list[str]] = {}
        for suite, found in own.items():
            there = found[1] if found else []
            lacking[suite] = [component for component in components if component not in there]
        texts = [
            settings.apt_source([(own[suite] or known)[0]], [suite], missing, (own[suite] or known)[2])
            for suite, missing in lacking.items()
            if missing
        ]
        return {settings.source_path(repository["name"], self.family): "\n".join(texts).encode()} if texts else {}

    def _key(self, repository: Mapping[str, Any]) -> tuple[str, bytes | None]:
        """Path of a repository's key, and its content where it is to be written."""
        key = repository["key"]
        wrong = ""
        if key.startswith("/"):
            content = self.tree.data(key)
            wrong = "" if content is not None else self.tree.complaint(key)
        else:
            try:
                with urllib.request.build_opener().open(key, timeout=KEY_TIMEOUT) as answer:
                    content = answer.read(LARGEST_KEY)
            except (OSError, urllib.error.URLError, ValueError) as error:
                content, wrong = None, str(error)
        if content is not None and not settings.is_key(content):
            wrong = "something that is no OpenPGP key"
        if content is None or wrong:
            raise StepError(
                f"the key of repository {repository['name']} at {key}",
                wrong,
                "correct the address, or name another one with overrides of the profile. Nothing was changed",
            )
        if key.startswith("/"):
            return key, None
        return settings.key_path(repository["name"], self.family, content), content

    def _own_paths(self) -> list[str]:
        """Files of the roles that a trial is done without: they are laid over it anew."""
        paths = self._source_paths()
        return paths if self.family == "RedHat" else [*paths, self._preferences]

    def _source_paths(self) -> list[str]:
        folders = (settings.APT_SOURCES, settings.APT_KEYRINGS, settings.DNF_REPOSITORIES, settings.RPM_KEYS)
        return [
            f"{folder}/{name}"
            for folder in folders
            for name in self.tree.names(folder)
            if name.startswith((settings.PREFIX, f"RPM-GPG-KEY-{settings.PREFIX}"))
        ]

    # -- which kernel boots

    def _boot(self) -> None:
        """Make the wanted kernel the one that boots: by itself GRUB takes the newest, which may have slipped in."""
        release = self.profile["kernel"]["release"]
        if self.options.operation != "kernel":
            return
        if self.family == "RedHat":
            self._boot_with_grubby(release)
            return
        releases = [each["release"] for each in self.reader.kernel()["installed"] or []]
        newer = [each for each in releases if compare("Debian", each, release) > 0]
        content = b""
        if newer:
            entry = settings.boot_entry(self.tree.raw(GRUB_MENU) or "", release)
            if entry is None:
                self.outcome.warnings.append(
                    f"{', '.join(newer)} is installed beside {release}, and {GRUB_MENU} has no entry for {release}: "
                    "see to it that this one boots"
                )
                return
            content = f'GRUB_DEFAULT="{entry}"\n'.encode()
        if (self.tree.data(GRUB_DEFAULT) or b"") == content:
            return
        self.outcome.changed = True
        if self.options.check_mode:
            self.outcome.files.append(GRUB_DEFAULT)
            return
        self._write({GRUB_DEFAULT: content})
        self._update_grub()

    def _update_grub(self) -> None:
        answer = self.runner.run(["update-grub"], GRUB_TIMEOUT)
        if not answer.ok:
            self.outcome.warnings.append(f"update-grub: {answer.complaint}")

    def _boot_with_grubby(self, release: str) -> None:
        image = f"/boot/vmlinuz-{release}"
        answer = self.runner.run(_DEFAULT_KERNEL)
        if not answer.ok or answer.output.strip() == image:
            self.outcome.warnings += [] if answer.ok else [f"which kernel boots is not known: {answer.complaint}"]
            return
        self.outcome.changed = True
        if not self.options.check_mode:
            if self.generations.last:
                self.generations.last.facts["wanted_kernel"] = image
                self.generations.save()
            self._set_default_kernel(image)

    def _set_default_kernel(self, image: str) -> None:
        answer = self.runner.run(["grubby", f"--set-default={image}"])
        self.outcome.warnings += [] if answer.ok else [f"grubby --set-default: {answer.complaint}"]

    def _default_kernel(self) -> str | None:
        """The kernel that the EL family boots, where this step may change that; Debian's is among the settings."""
        if self.family != "RedHat" or self.options.operation != "kernel":
            return None
        answer = self.runner.run(_DEFAULT_KERNEL)
        return answer.output.strip() or None if answer.ok else None

    def _boot_former(self, former: Generation, boots: str | None) -> None:
        """Let the kernel boot again that did, if it is still there. `boots`: what booted before the packages changed;
        if that is neither the step's choice nor gone, somebody has made another one since."""
        image, last = former.facts.get("default_kernel"), self.generations.last
        ours = last.facts.get("wanted_kernel") if last else None
        if not image or not self._is_there(image) or (boots and boots != ours and self._is_there(boots)):
            return
        if self._default_kernel() != image:
            self._set_default_kernel(image)

    def _is_there(self, path: str) -> bool:
        return os.path.exists(self.tree.locate(path))

    # -- what came of it

    def _wrong(self, installed: Mapping[str, Collection[str]]) -> str:
        wrong = [
            f"{name} is {', '.join(installed.get(name, ())) or 'absent'}, wanted is {version or 'any'}"
            for name, version in self.wanted.items()
            if not any(fits(self.family, version, each) for each in installed.get(name, ()))
        ]
        return "; ".join(wrong)

    def _unbuilt(self) -> str:
        """Why the kernel that is to run has no module of the wanted driver; empty if it has."""
        release, driver = self.profile["kernel"]["release"], self.profile["driver"]
        found = self.reader.driver({"installed": [{"release": release}], "running": release}, {})["on_disk"]
        module = next((each for each in found or [] if each["kernel"] == release), None)
        if module and module["version"] == driver["version"] and module["modules"] in (None, driver["modules"]):
            return ""
        seen = "no module"
        if module:
            seen = f"module {module['version'] or 'of unknown version'} ({module['modules'] or 'of unknown kind'})"
        log = self._build_log(driver["version"])
        said = f"; the build said: {log}" if log else ""
        return f"{seen} for kernel {release}, wanted is {driver['version']} ({driver['modules']}){said}"

    def _why(self, answer: Answer) -> str:
        """What the package manager said, after what a build said that made it fail."""
        log = self._build_log(self.profile["driver"]["version"]) if self.profile else ""
        return f"{said(answer)}; the build said: {log}" if log and "dkms" in answer.output else said(answer)

    def _build_log(self, version: str) -> str:
        """The last lines of the newest log of DKMS for a driver."""
        answer = self.runner.run(["find", "/var/lib/dkms", "-name", "make.log", "-path", f"*nvidia*/{version}/*"])
        paths = [path for path in answer.output.splitlines() if self.tree.raw(path)]
        return _tail(self.tree.raw(paths[-1]) or "", LOG_LINES) if paths else ""

    # -- files

    def _differing(self, files: Mapping[str, bytes]) -> list[str]:
        present = {path: self.tree.data(path) for path in files}
        # No pins is no file.
        return [path for path, content in files.items() if (present[path] or b"") != content]

    def _write(self, files: Mapping[str, bytes | None]) -> None:
        for path, content in files.items():
            place = self.tree.locate(path)
            if not content:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(place)
                    self.outcome.files.append(path)
            elif self.tree.data(path) != content:
                os.makedirs(os.path.dirname(place), mode=0o755, exist_ok=True)
                durable.replace(place, content, 0o644)
                if path not in self.outcome.files:
                    self.outcome.files.append(path)

    def _write_settings(self, before: Mapping[str, str | None]) -> None:
        """The operation's own pins or locks as they were; of a shared file only its own part."""
        for path, text in before.items():
            if path == settings.VERSION_LOCK:
                former = settings.locked_by(text or "", self.options.operation)
                now = self.tree.raw(path) or ""
                content = settings.version_locks(now, self.options.operation, former)
                if content == now:
                    continue
                if content or text is not None:
                    durable.replace(self.tree.locate(path), content, 0o644)
                    self.outcome.files.append(path)
                else:
                    self._write({path: None})
            else:
                self._write({path: None if text is None else text.encode()})

    def _kept(self, entry: Entry) -> str | None:
        if entry.file and os.path.exists(os.path.join(self.generations.files, entry.file)):
            return entry.file
        tool = self._tool
        return tool.file_of(self.generations.files, entry.name, entry.before) if entry.before else None

    def _files_of(self, tool: Manager, installed: Mapping[str, Collection[str]]) -> list[str]:
        """Package files of the profile's packages as they are now: the way back from the next change."""
        found = (
            tool.file_of(self.generations.files, name, version)
            for name in self.wanted
            for version in installed.get(name, ())
        )
        return [file for file in found if file]

    def _names(self, step: Transaction) -> set[str]:
        return {plain_name(change.name) for change in step.changes}

    def _beside(self) -> bool:
        """Whether several versions of one of the step's packages are there at a time."""
        return self.family == "RedHat" and self.options.operation == "kernel"

    def _try(self, call: Callable[[], Any], expected: str) -> Any:
        try:
            return call()
        except (ManagerError, OSError) as error:
            raise StepError(expected, str(error), "correct it, and run again. Nothing was changed") from error

    @contextlib.contextmanager
    def _manager(self) -> Iterator[Manager]:
        try:
            with self._alone(), _scratch() as scratch:
                self._tool = self._make_manager(self.runner, scratch, self.options.offline, self.options.lock_timeout)
                self._installed_before = self._tool.installed()[0]
                yield self._tool
        except ManagerError as error:
            raise StepError("the package manager to answer", str(error), "mend it, and run again") from error
        except (OSError, GenerationsError) as error:
            raise StepError("to read and write the host's files", str(error), "mend it, and run again") from error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for another step on this host: the rest of a run whose controller was killed goes on by itself."""
        if self.options.check_mode:
            yield
            return
        path = self.tree.locate(LOCK)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        end = time.monotonic() + self.options.lock_timeout
        with open(path, "ab") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > end:
                        raise StepError(
                            "no other step of the driver stack on this host",
                            f"one that has held {LOCK} for {self.options.lock_timeout} s",
                            "let it end (it may be the rest of a run whose controller was killed), and run again. "
                            "Nothing was changed",
                        ) from error
                    time.sleep(1)
            self.generations = Generations(self.options.operation, self.options.directory)
            yield

    def _finished(self) -> Outcome:
        self.outcome.generation = summary(self.generations.last)
        return self.outcome


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """A folder for a trial. Indexes are some hundred MB, which /tmp has no room for where it lies in memory."""
    folder = tempfile.mkdtemp(prefix="ringmaster-stack-", dir="/var/tmp" if os.path.isdir("/var/tmp") else None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _before(change: Change, installed: Mapping[str, Collection[str]]) -> str | None:
    """The version that a change replaces. dnf does not tell it; then what is installed is it, unless both stay."""
    if change.before is not None or change.action == "install":
        return change.before
    return next(iter(installed.get(plain_name(change.name), ())), None)


def _tail(text: str, lines: int) -> str:
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-lines:])
