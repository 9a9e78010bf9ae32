# SPDX-License-Identifier: GPL-3.0-or-later
"""A step with a package manager that is made up: what it asks for first, what it keeps, and what it takes back."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_managers import ManagerError
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_step import (
    LOCK,
    Options,
    Outcome,
    Step,
    StepError,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_transactions import Change, Transaction
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_versions import compare
from tests.support.stack import profile

RELEASE = "6.1.0-57-amd64"
OLD, NEW = "535.261.03-1", "535.309.01-1"
KEY = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n"


class Machine(CommandRunner):
    """Commands of a host whose module on disk is `module`."""

    module = ""
    default_kernel = ""

    def run(self, command: Sequence[str], timeout: float = 20.0) -> Answer:
        if command[0] == "modinfo" and self.module:
            return Answer(0, f"version: {self.module}\nlicense: Dual MIT/GPL\n")
        if command[0] == "update-grub":
            return Answer(0)
        if command[0] == "grubby":
            name, _equals, image = command[1].partition("=")
            self.default_kernel = image if name == "--set-default" else self.default_kernel
            return Answer(0, f"{self.default_kernel}\n")
        return Answer(None, complaint=f"not found: {command[0]}")


class Packages:
    """A package manager over a dictionary; `fails` is what an installation says, `cut` ends one like a power cut."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.present: dict[str, str] = {}
        self.holds: set[str] = set()
        self.left: list[str] = []
        self.unreachable = ""
        self.lost: set[str] = set()
        self.fails = ""
        self.builds = True
        self.cut = False
        self.calls: list[str] = []
        self.foreign: tuple[str, ...] = ()
        self.keys: set[str] = set()
        self.stubborn = ""

    def __call__(self, _runner: Any, scratch: str, offline: bool, _lock: int) -> Packages:
        assert os.path.isdir(scratch)
        self.offline = offline
        return self

    def installed(self) -> tuple[dict[str, list[str]], list[str]]:
        return {name: [version] for name, version in self.present.items()}, sorted(self.holds & set(self.present))

    def interrupted(self) -> list[str]:
        return self.left

    def recover(self) -> list[str]:
        self.calls.append("recover")
        self.left = []
        return []

    def stage(self, files: dict[str, bytes], removed: Sequence[str]) -> None:
        self.staged = files

    def refresh(self) -> None:
        self.calls.append("refresh")
        if self.unreachable:
            raise ManagerError(self.unreachable)

    def ask_nobody(self) -> None:
        self.calls.append("ask_nobody")

    def archive(self, _suite: str) -> None:
        return None

    def words(self, wanted: dict[str, str | None], _installed: Any) -> list[str]:
        return [f"{name}={version}" for name, version in wanted.items()]

    def simulate(self, words: Sequence[str], removed: Sequence[str] = ()) -> Transaction:
        self.calls.append("simulate")
        changes = [Change(name, "remove", self.present[name], None) for name in removed]
        for word in words:
            if "=" not in word:
                continue  # a file, on the way back
            name, _equals, version = word.partition("=")
            before = self.present.get(name)
            if before != version:
                order = 1 if before is None else compare("Debian", version, before)
                action = "install" if before is None else "upgrade" if order > 0 else "downgrade"
                changes.append(Change(name, action, before, version))
        held = tuple(each.name for each in changes if each.name in self.holds) + self.foreign
        return Transaction(tuple(changes), (), held)

    def fetch(self, packages: Any, folder: str) -> dict[str, str]:
        got = {name: f"{name}_{version}.deb" for name, version in packages if f"{name}_{version}" not in self.lost}
        for file in got.values():
            Path(folder, file).write_text("package")
        return got

    def file_of(self, folder: str, name: str, version: str) -> str | None:
        return f"{name}_{version}.deb" if Path(folder, f"{name}_{version}.deb").exists() else None

    def install(self, words: Sequence[str], removed: Sequence[str], files: Sequence[str], _folder: str) -> Answer:
        self.calls.append("install")
        self.keys |= {Path(path).name for path in self.staged if "/keyrings/" in path} if words else set()
        if self.cut and words:
            self.cut = False
            name, _equals, version = words[0].partition("=")
            self.present[name] = version
            self.left = [f"dpkg left half done: {name}"]
            raise KeyboardInterrupt
        for word in words:
            name, _equals, version = word.partition("=")
            self.present[name] = version
        for file in files:
            name, _underscore, version = Path(file).name.removesuffix(".deb").rpartition("_")
            self.present[name] = version
        for name in removed:
            del self.present[name]
        version = self.present.get("nvidia-open-kernel-dkms", "").rpartition("-")[0]
        self.machine.module = version if self.builds or files or removed else ""
        if self.fails and words:
            return Answer(100, complaint=self.fails)
        return Answer(0)

    index_file = "Packages"

    def index(self, folder: str) -> None:
        Path(folder, "Packages").write_text("index")

    def prepare_removal(self, _names: Any, _release: str | None) -> None:
        return None

    def trusted_keys(self) -> set[str]:
        return set(self.keys)

    def distrust(self, keys: set[str]) -> None:
        if self.stubborn:
            raise ManagerError(self.stubborn)
        self.keys -= keys

    def hold(self, names: Sequence[str], wanted: bool = True) -> None:
        self.holds = self.holds | set(names) if wanted else self.holds - set(names)


class World:
    """A host with a kernel, and steps of the driver on it."""

    def __init__(self, root: Path) -> None:
        self.root = root / "host"
        self.machine = Machine()
        self.packages = Packages(self.machine)
        self.directory = root / "packages"
        self.write("/etc/os-release", 'ID=debian\nVERSION_ID="12"\n')
        self.write("/proc/sys/kernel/osrelease", RELEASE)
        self.write("/proc/sys/kernel/random/boot_id", "boot-1")
        self.write(f"/lib/modules/{RELEASE}/kernel/x", "")
        self.write(f"/lib/modules/{RELEASE}/updates/dkms/nvidia-current.ko", "")
        self.write("/etc/apt/preferences.d/other", "")
        self.key = root / "key.asc"
        self.key.write_bytes(KEY)

    def write(self, path: str, text: str) -> None:
        target = self.root / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def read(self, path: str) -> str | None:
        target = self.root / path[1:]
        return target.read_text() if target.exists() else None

    def step(self, version: str | None, operation: str = "driver", **options: Any) -> Step:
        document = None
        if version:
            document = profile(
                "debian12-r535",
                driver__version=version.rpartition("-")[0],
                driver__modules="open",
                driver__packages={"nvidia-open-kernel-dkms": version, "nvidia-smi": version},
                kernel__release=RELEASE,
                kernel__packages={f"linux-image-{RELEASE}": "1"},
                kernel__headers={"release": RELEASE, "packages": {}},
                rdma__packages={},
                cuda=None,
                repositories=[
                    {
                        "name": "test",
                        "type": "deb",
                        "url": "https://packages.example.org/",
                        "suites": ["./"],
                        "key": self.key.as_uri(),
                    }
                ],
            )
        given = Options(operation, directory=str(self.directory), **options)
        return Step(document, given, FileTree(str(self.root)), self.machine, self.packages)

    def present(self, version: str, **options: Any) -> Outcome:
        return self.step(version, **options).present()

    @property
    def drivers(self) -> dict[str, str]:
        return {name: version for name, version in self.packages.present.items() if name.startswith("nvidia")}


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.packages.present = {f"linux-image-{RELEASE}": "1"}
    return made


BOTH = ("nvidia-open-kernel-dkms", "nvidia-smi")


def test_new_host_gets_exact_packages_pins_holds_and_a_way_back(world: World) -> None:
    outcome = world.present(NEW)
    assert world.drivers == dict.fromkeys(BOTH, NEW)
    assert world.packages.holds == set(BOTH)
    assert f"Package: nvidia-smi\nPin: version {NEW}\nPin-Priority: 1001\n" in (
        world.read("/etc/apt/preferences.d/ringmaster-driver") or ""
    )
    assert world.read("/etc/apt/keyrings/ringmaster-test.asc") == KEY.decode()
    assert "Signed-By: /etc/apt/keyrings/ringmaster-test.asc" in (
        world.read("/etc/apt/sources.list.d/ringmaster-test.sources") or ""
    )
    assert outcome.generation is not None
    assert (outcome.generation["state"], outcome.generation["facts"]["boot"]) == ("applied", "boot-1")
    assert world.packages.calls == ["refresh", "simulate", "simulate", "install"]


def test_second_run_changes_nothing_and_asks_no_repository(world: World) -> None:
    world.present(NEW)
    world.packages.calls.clear()
    assert not world.present(NEW).changed
    assert world.packages.calls == []


def test_check_mode_says_all_and_changes_nothing(world: World) -> None:
    outcome = world.present(NEW, check_mode=True)
    assert outcome.changed
    assert {(each["name"], each["action"], each["after"]) for each in outcome.packages} == {
        (name, "install", NEW) for name in BOTH
    }
    assert sorted(outcome.holds) == sorted(BOTH)
    assert world.drivers == {}
    assert world.read("/etc/apt/keyrings/ringmaster-test.asc") is None
    assert not world.directory.exists()


def test_up_down_and_back_to_the_last_and_the_first(world: World) -> None:
    world.present(OLD)
    world.step(OLD).confirm()
    assert [each["action"] for each in world.present(NEW).packages] == ["upgrade", "upgrade"]
    assert [each["action"] for each in world.present(OLD).packages] == ["downgrade", "downgrade"]
    world.step(None).restored(first=False)
    assert world.drivers == dict.fromkeys(BOTH, NEW)
    assert f"Pin: version {NEW}" in (world.read("/etc/apt/preferences.d/ringmaster-driver") or "")
    world.packages.calls.clear()
    world.step(None).restored(first=True)
    assert world.drivers == {}
    assert world.packages.holds == set()
    assert world.read("/etc/apt/preferences.d/ringmaster-driver") is None
    assert world.read("/etc/apt/sources.list.d/ringmaster-test.sources") is None
    assert world.read("/etc/apt/keyrings/ringmaster-test.asc") is None
    assert not world.directory.exists()
    assert "refresh" not in world.packages.calls
    assert not world.step(None).restored(first=True).changed


def test_what_was_there_and_held_before_is_there_and_held_again(world: World) -> None:
    world.packages.present.update(dict.fromkeys(BOTH, NEW))
    world.packages.holds = {"nvidia-smi"}
    world.machine.module = "535.309.01"
    assert world.present(NEW).changed  # holds and pins
    assert world.packages.holds == set(BOTH)
    world.step(None).restored(first=True)
    assert world.packages.holds == {"nvidia-smi"}
    assert world.drivers == dict.fromkeys(BOTH, NEW)


def test_failure_is_taken_back_with_holds_and_pins(world: World) -> None:
    world.present(OLD)
    world.step(OLD).confirm()
    before = world.read("/etc/apt/preferences.d/ringmaster-driver")
    world.packages.fails = "E: Sub-process failed"
    with pytest.raises(StepError, match=r"E: Sub-process failed\. The former packages are back"):
        world.present(NEW)
    assert world.drivers == dict.fromkeys(BOTH, OLD)
    assert world.packages.holds == set(BOTH)
    assert world.read("/etc/apt/preferences.d/ringmaster-driver") == before
    assert world.step(OLD).present().generation["state"] == "confirmed"  # type: ignore[index]


def test_build_that_gives_no_module_is_taken_back_with_the_log(world: World) -> None:
    world.packages.builds = False
    with pytest.raises(StepError, match=r"for kernel 6\.1\.0-57-amd64, wanted is.*The former packages are back"):
        world.present(NEW)
    assert world.drivers == {}


def test_cut_run_goes_on_and_still_knows_what_was_before(world: World) -> None:
    world.present(OLD)
    world.step(OLD).confirm()
    world.packages.cut = True
    with pytest.raises(KeyboardInterrupt):
        world.present(NEW)
    outcome = world.present(NEW)
    assert outcome.recovered == ["dpkg left half done: nvidia-open-kernel-dkms"]
    assert world.drivers == dict.fromkeys(BOTH, NEW)
    world.step(None).restored(first=False)
    assert world.drivers == dict.fromkeys(BOTH, OLD)


def test_rest_of_a_killed_run_is_waited_for(world: World) -> None:
    lock = world.root / LOCK[1:]
    lock.parent.mkdir(parents=True)
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StepError, match="no other step of the driver stack on this host"):
            world.present(NEW, lock_timeout=0)
        assert world.present(NEW, lock_timeout=0, check_mode=True).packages
        assert world.drivers == {}
        assert "install" not in world.packages.calls
    assert world.present(NEW, lock_timeout=0).changed


def test_hold_of_another_hand_is_respected_and_ones_own_is_not_in_the_way(world: World) -> None:
    world.packages.present["nvidia-smi"] = OLD
    world.packages.holds = {"nvidia-smi"}
    with pytest.raises(StepError, match="nvidia-smi is held and would be changed"):
        world.present(NEW)
    world.packages.holds = set()
    world.present(NEW)
    world.present(OLD)
    assert world.drivers == dict.fromkeys(BOTH, OLD)


def test_repository_that_does_not_answer_leaves_the_host_alone(world: World) -> None:
    world.packages.unreachable = "E: could not connect"
    with pytest.raises(StepError, match=r"could not connect.*Nothing was changed"):
        world.present(NEW)
    assert world.drivers == {}
    assert world.read("/etc/apt/sources.list.d/ringmaster-test.sources") is None
    assert not world.directory.exists()


@pytest.mark.parametrize("key", [b"", b"<html>", None])
def test_key_that_is_none_is_refused(world: World, key: bytes | None) -> None:
    world.key.unlink()
    if key is not None:
        world.key.write_bytes(key)
    with pytest.raises(StepError, match="the key of repository test"):
        world.present(NEW)
    assert world.packages.calls == []


def test_package_that_could_not_be_put_back_forbids_the_change(world: World) -> None:
    world.packages.present.update(dict.fromkeys(BOTH, OLD))
    world.packages.lost = {f"nvidia-smi_{OLD}"}
    with pytest.raises(StepError, match=f"nvidia-smi {OLD}"):
        world.present(NEW)
    assert world.drivers == dict.fromkeys(BOTH, OLD)
    assert world.present(NEW, keep="if_available").warnings == [
        f"there is no way back to nvidia-smi {OLD}: its file can't be had"
    ]


def test_package_that_can_not_be_fetched_forbids_the_change(world: World) -> None:
    world.packages.lost = {f"nvidia-smi_{NEW}"}
    with pytest.raises(StepError, match=r"nvidia-smi 535\.309\.01-1.*free some room"):
        world.present(NEW)
    assert world.drivers == {}


def test_offline_takes_the_mirror_and_says_where_it_is_missing(world: World, tmp_path: Path) -> None:
    with pytest.raises(StepError, match="mirror"):
        world.present(NEW, offline=True, mirror=str(tmp_path / "none"))
    (tmp_path / "mirror").mkdir()
    world.key.unlink()
    world.present(NEW, offline=True, mirror=str(tmp_path / "mirror"))
    assert world.packages.offline
    assert f"URIs: file://{tmp_path}/mirror" in (world.read("/etc/apt/sources.list.d/ringmaster-mirror.sources") or "")


def test_mirror_is_filled_for_all_operations_and_nothing_is_installed(world: World, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    assert world.step(NEW, mirror=str(mirror)).mirrored().changed
    assert sorted(path.name for path in mirror.iterdir()) == [
        "Packages",
        f"linux-image-{RELEASE}_1.deb",  # it is there, and other hosts may lack it
        *(f"{name}_{NEW}.deb" for name in BOTH),
    ]
    assert world.drivers == {}
    assert world.read("/etc/apt/sources.list.d/ringmaster-test.sources") is None
    assert not world.step(NEW, mirror=str(mirror)).mirrored().changed
    (mirror / "Packages").unlink()  # as a cut run leaves it
    assert world.step(NEW, mirror=str(mirror)).mirrored().changed
    assert (mirror / "Packages").exists()
    world.packages.lost = {f"nvidia-smi_{OLD}"}
    with pytest.raises(StepError, match=f"nvidia-smi {OLD}"):
        world.step(OLD, mirror=str(mirror)).mirrored()


def test_newer_kernel_that_slipped_in_does_not_boot(world: World) -> None:
    world.packages.present = {f"linux-image-{RELEASE}": "1", "linux-image-amd64": "6.1.58-1"}
    world.write("/lib/modules/6.1.0-58-amd64/kernel/x", "")
    world.write(
        "/boot/grub/grub.cfg",
        f"menuentry 'x' $menuentry_id_option 'gnulinux-{RELEASE}-advanced-1' {{\n}}\n",
    )
    assert world.step(NEW, "kernel").present().changed
    path = "/etc/default/grub.d/ringmaster-kernel.cfg"
    assert world.read(path) == f'GRUB_DEFAULT="gnulinux-{RELEASE}-advanced-1"\n'
    assert world.packages.holds == {f"linux-image-{RELEASE}", "linux-image-amd64"}
    assert not world.step(NEW, "kernel").present().changed
    world.step(None, "kernel").restored(first=True)
    assert world.read(path) is None
    assert world.packages.holds == set()


def test_rollback_of_one_operation_leaves_the_repositories_to_the_others(world: World) -> None:
    world.present(NEW)
    world.step(NEW, "kernel").present()
    world.step(None).restored(first=True)
    assert world.read("/etc/apt/sources.list.d/ringmaster-test.sources") is not None
    world.step(None, "kernel").restored(first=True)
    assert world.read("/etc/apt/sources.list.d/ringmaster-test.sources") is None


@pytest.mark.parametrize("order", [("driver", "kernel"), ("kernel", "driver")])
def test_last_rollback_takes_the_keys_that_came_from_the_package_manager(world: World, order: tuple[str, str]) -> None:
    world.packages.keys = {"somebody's"}
    world.step(NEW, "kernel").present()
    world.present(NEW)
    world.packages.keys.add("added meanwhile")
    world.present(OLD)
    (world.root / "etc/apt/keyrings/ringmaster-test.asc").unlink()  # the key is another one by now, or has another name
    world.step(None, order[0]).restored(first=True)
    assert world.packages.keys == {"somebody's", "added meanwhile", "ringmaster-test.asc"}
    world.step(None, order[1]).restored(first=True)
    assert world.packages.keys == {"somebody's", "added meanwhile"}
    assert not world.directory.exists()


def test_key_that_was_trusted_before_stays_trusted(world: World) -> None:
    world.packages.keys = {"ringmaster-test.asc"}
    world.present(NEW)
    world.step(None).restored(first=True)
    assert world.packages.keys == {"ringmaster-test.asc"}


def test_key_of_a_cut_change_goes_with_the_rollback(world: World) -> None:
    world.packages.cut = True
    with pytest.raises(KeyboardInterrupt):
        world.present(NEW)
    assert world.packages.keys == {"ringmaster-test.asc"}
    world.step(None).restored(first=True)
    assert world.packages.keys == set()


def test_note_of_keys_without_a_record_is_none(world: World) -> None:
    """A run was killed between its two notes, and somebody trusts the key by hand before the next one."""
    world.directory.mkdir()
    (world.directory / "trusted_keys.json").write_text('{"brought": [], "before": []}')
    world.packages.keys = {"ringmaster-test.asc"}
    world.present(NEW)
    world.step(None).restored(first=True)
    assert world.packages.keys == {"ringmaster-test.asc"}


@pytest.mark.parametrize("content", [None, "{", '{"brought": [{}], "before": null}', "[]"])
def test_rollback_does_not_fail_for_a_note_of_keys(world: World, content: str | None) -> None:
    """None: an older release wrote none."""
    world.present(NEW)
    path = world.directory / "trusted_keys.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    outcome = world.step(None).restored(first=True)
    assert ("keys" in " ".join(outcome.warnings)) == (content is not None)
    assert world.packages.keys == {"ringmaster-test.asc"}
    assert world.drivers == {}
    assert not world.directory.exists()


def test_rollback_says_when_a_key_stays(world: World) -> None:
    world.present(NEW)
    world.packages.stubborn = "another one has the lock"
    assert "another one has the lock" in " ".join(world.step(None).restored(first=True).warnings)
    assert world.drivers == {}


@pytest.mark.parametrize("chosen_since", ["", "5.14.0-611.5.1.el9_7.x86_64"])
def test_kernel_that_booted_before_boots_again_on_the_el_family(world: World, chosen_since: str) -> None:
    """Both kernels were there before; only which one boots is changed, and changed back, unless somebody has changed it
    since."""
    release, newer = "5.14.0-503.11.1.el9_5.x86_64", "5.14.0-570.12.1.el9_6.x86_64"
    versions = {"kernel-core": "5.14.0-503.11.1.el9_5", "kernel-devel": "5.14.0-503.11.1.el9_5"}
    document = profile(
        "el9-r580",
        kernel__release=release,
        kernel__packages={"kernel-core": versions["kernel-core"]},
        kernel__headers={"release": release, "packages": {"kernel-devel": versions["kernel-devel"]}},
    )
    world.write("/etc/os-release", 'ID=rocky\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.5"\n')
    for each in filter(None, (release, newer, chosen_since)):
        world.write(f"/boot/vmlinuz-{each}", "")
    world.packages.present = versions
    world.machine.default_kernel = f"/boot/vmlinuz-{newer}"

    def step(wanted: dict[str, Any] | None, **options: Any) -> Step:
        given = Options("kernel", directory=str(world.directory), **options)
        return Step(wanted, given, FileTree(str(world.root)), world.machine, world.packages)

    assert step(document, check_mode=True).present().changed
    assert world.machine.default_kernel == f"/boot/vmlinuz-{newer}"
    assert step(document).present().changed
    assert world.machine.default_kernel == f"/boot/vmlinuz-{release}"
    assert not step(document).present().changed
    if chosen_since:
        world.machine.default_kernel = f"/boot/vmlinuz-{chosen_since}"
    step(None).restored(first=True)
    assert world.machine.default_kernel == f"/boot/vmlinuz-{chosen_since or newer}"
    assert not world.directory.exists()
