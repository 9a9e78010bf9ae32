# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings of a running kernel that decide latency, read, set, read back, and brought back to what they were.

Every setting is a set of items with a value each: a governor for each CPU, a switch for each sleep state of each CPU, a
register for each PCI Express port. They are handed in and out as documents that people can read and JSON can hold:

==================  ==================================================  ===============================================
setting             document                                            items
==================  ==================================================  ===============================================
``governor``        ``{"performance": "0-63"}``                         CPU → governor
``idle_states``     ``{"state0": "", "state2": "0-63"}``                CPUs on which each state is disabled
``aspm_policy``     ``"default"``                                       one
``acs``             ``{"0000:00:01.1": "0x001d"}``                      port → ACS control register
``swap``            ``{"/dev/sda3": -2}``                               area in use → priority
``sysctls.NAME``    ``"1"``                                             one
==================  ==================================================  ===============================================

Nothing here outlives a reboot; :class:`Boot` says what has to be written again then. Nothing here imports Ansible.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import (
    FileTree,
    format_cpus,
    parse_choice,
    parse_cpus,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.findings import why
from ansible_collections.ringmaster.inference.plugins.module_utils.host_tuning import (
    CPUS,
    LOCKDOWN,
    SWAPS,
    container,
    file_system,
    governor,
    idle_states,
    online_cpus,
    parse_swaps,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.pci_configuration import (
    ACCESS_CONTROL_SERVICES,
    ACS_CONTROL_OFFSET,
    ConfigurationSpace,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.pcie import ASPM_POLICY, DEVICES, PcieReader

SYSCTLS = "sysctls."
OFF = "off"  # an item that is not there
# Emptying swap reads all of it back into memory.
SWAP_TIMEOUT = 900.0  # seconds
ASPM_POLICIES = ("default", "performance", "powersave", "powersupersave")

Items = dict[str, str]


class UnavailableError(Exception):
    """A setting that this host does not have or does not let one change; the text says why."""


@dataclass
class Boot:
    """What has to be done again at each boot.

    ``writes`` are paths, with the wildcards of glob(7), and values; ``acs`` the addresses of ports whose ACS control
    register is to be zero; ``swap`` whether all swap is to be switched off.
    """

    writes: list[dict[str, str]] = field(default_factory=list)
    acs: list[str] = field(default_factory=list)
    swap: bool = False


@dataclass
class Outcome:
    """What was found, and what was done or in check mode would be. Keys of the dicts are settings."""

    changed: bool = False
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    boot: Boot = field(default_factory=Boot)


class Setting(ABC):
    """One setting. `read` fills `now`; `read` and `wanted` raise UnavailableError, `write` OSError."""

    pattern = ""  # path of the file that holds an item, with {} for the item
    machine_wide = True  # whether containers on one machine share it; each has a network of its own
    by_command = False  # set by a command rather than by writing the file
    comes_back = False  # whether an item that is wanted can be brought back though it is not there now

    def __init__(self, tree: FileTree, runner: CommandRunner) -> None:
        self.tree = tree
        self.runner = runner
        self.now: Items = {}
        self.goal: Items = {}

    def read(self) -> Items:
        """Items as they are now."""
        self.now = self.state()
        return self.now

    @abstractmethod
    def state(self) -> Items:
        """Items as they are now; at least one, or UnavailableError, except for what may be empty."""

    @abstractmethod
    def wanted(self, option: Any) -> Items:
        """Items as `option` asks for them; raises ValueError for an option of another form."""

    @abstractmethod
    def document(self, items: Items) -> Any:
        """Items for people."""

    @abstractmethod
    def items(self, document: Any) -> Items:
        """The way back; raises ValueError for a document of another form."""

    def path(self, item: str) -> str:
        """File that holds an item."""
        return self.pattern.format(item)

    def write(self, item: str, value: str) -> None:
        """Set one item."""
        # With a line's end, as echo writes it; the kernel takes it off.
        self.tree.write(self.path(item), f"{value}\n")

    def refusal(self, item: str) -> str:
        """Why an item can't be written; empty if nothing is known against it."""
        if self.by_command or self.tree.writable(self.path(item)):
            return ""
        return f"{self.path(item)}: may not be written here"

    def holds(self, found: str, wanted: str) -> bool:
        """Whether an item is as wanted."""
        return found == wanted

    def different(self) -> Items:
        """Items of `goal` that are not as wanted in `now`."""
        return {item: value for item, value in self.goal.items() if not self.holds(self.now.get(item, OFF), value)}

    def boot(self, boot: Boot) -> None:
        """Add what brings `goal` back after a reboot."""
        boot.writes += [{"path": self.path(item), "value": value} for item, value in self.goal.items()]


class SingleValue(Setting):
    """A setting with one item, whose document is the value itself."""

    def document(self, items: Items) -> Any:
        return items[""]

    def wanted(self, option: Any) -> Items:
        return {"": " ".join(str(option).split())}

    def items(self, document: Any) -> Items:
        return {"": _text(document)}


class Governor(Setting):
    """Frequency governor of each CPU."""

    pattern = CPUS + "/cpu{}/cpufreq/scaling_governor"

    def state(self) -> Items:
        found = {str(cpu): name for cpu in online_cpus(self.tree) if (name := governor(self.tree, cpu))}
        if not found:
            raise UnavailableError(
                f"{CPUS}/cpu*/cpufreq: not there; kernel or hypervisor gives no control of frequencies"
            )
        return found

    def wanted(self, option: Any) -> Items:
        for cpu in self.now:
            offered = (self.tree.text(f"{CPUS}/cpu{cpu}/cpufreq/scaling_available_governors") or "").split()
            if offered and option not in offered:
                raise UnavailableError(f"the driver of CPU {cpu} offers {', '.join(offered)}, and not {option}")
        return dict.fromkeys(self.now, _text(option))

    def document(self, items: Items) -> Any:
        names = sorted({*items.values()})
        return {name: format_cpus(int(cpu) for cpu, having in items.items() if having == name) for name in names}

    def items(self, document: Any) -> Items:
        return {str(cpu): name for name, cpus in _mapping(document).items() for cpu in _cpus(cpus)}

    def boot(self, boot: Boot) -> None:
        boot.writes += [{"path": self.path("[0-9]*"), "value": name} for name in sorted({*self.goal.values()})]


class IdleStates(Setting):
    """Switches of the CPUs' sleep states: ``1`` for disabled. An item is ``17/cpuidle/state2``."""

    pattern = CPUS + "/cpu{}/disable"

    def state(self) -> Items:
        found = {
            f"{cpu}/cpuidle/{idle.folder}": str(int(idle.disabled))
            for cpu in online_cpus(self.tree)
            for idle in idle_states(self.tree, cpu)
            if idle.disabled is not None
        }
        if not found:
            raise UnavailableError(f"{CPUS}/cpu*/cpuidle: no states; the kernel or the hypervisor manages none")
        return found

    def wanted(self, option: Any) -> Items:
        """As ``cpupower idle-set -D`` does; the shallowest state always stays, since a CPU has to be able to wait."""
        found = {}
        for cpu in online_cpus(self.tree):
            for index, idle in enumerate(idle_states(self.tree, cpu)):
                if idle.latency is not None:
                    disabled = index > 0 and idle.latency >= int(option)
                    found[f"{cpu}/cpuidle/{idle.folder}"] = str(int(disabled))
        return found

    def document(self, items: Items) -> Any:
        disabled: dict[str, list[int]] = {}
        for item, value in items.items():
            cpu, folder = _cpu_and_state(item)
            disabled.setdefault(folder, []).extend([cpu] if value == "1" else [])
        return {folder: format_cpus(cpus) for folder, cpus in sorted(disabled.items())}

    def items(self, document: Any) -> Items:
        disabled = {folder: _cpus(cpus) for folder, cpus in _mapping(document).items()}
        found = {}
        for item in self.now:
            cpu, folder = _cpu_and_state(item)
            if folder in disabled:
                found[item] = str(int(cpu in disabled[folder]))
        return found

    def boot(self, boot: Boot) -> None:
        for folder in sorted({_cpu_and_state(item)[1] for item in self.goal}):
            values = {item: value for item, value in self.goal.items() if _cpu_and_state(item)[1] == folder}
            disabled = [item for item, value in values.items() if value == "1"]
            # Only where CPUs are of several kinds some have to be named.
            paths = [f"[0-9]*/cpuidle/{folder}"] if len(disabled) == len(values) else disabled
            boot.writes += [{"path": self.path(item), "value": "1"} for item in paths]


class AspmPolicy(SingleValue):
    """The kernel's policy for PCI Express links."""

    pattern = ASPM_POLICY

    def state(self) -> Items:
        policy, _choices = parse_choice(self.tree.text(ASPM_POLICY))
        if policy is None:
            found = why(self.tree, ASPM_POLICY, "a word in brackets")
            raise UnavailableError(f"{found}; the kernel does not manage ASPM")
        return {"": policy}


class AccessControl(Setting):
    """ACS control registers of the ports above GPUs and network adapters."""

    pattern = DEVICES + "/{}/config"

    def state(self) -> Items:
        devices = PcieReader(self.tree).devices()
        ports = [device for device in devices if device["kind"] in ("root_port", "switch_port")]
        found = {port["pci_address"]: port["acs"]["control"] for port in ports if port["acs"]["control"] is not None}
        if not found:
            reasons = sorted({reason for port in ports for reason in port["acs"]["unknown"].values()})
            raise UnavailableError("; ".join(reasons) or "there is no port above a GPU or a network adapter")
        return found

    def wanted(self, option: Any) -> Items:
        _expect_disabled(option)
        return dict.fromkeys(self.now, "0x0000")

    def document(self, items: Items) -> Any:
        return dict(items)

    def items(self, document: Any) -> Items:
        controls = {address: _text(control) for address, control in _mapping(document).items()}
        if not all(re.match(r"0x[0-9a-f]{4}\Z", control) for control in controls.values()):
            raise ValueError(f"expected registers of 16 bits, found {controls!r}")
        return controls

    def write(self, item: str, value: str) -> None:
        space = ConfigurationSpace(self.tree.data(self.path(item)) or b"")
        capability = space.extended_capability(ACCESS_CONTROL_SERVICES)
        if capability is None:
            raise OSError(0, "the port has no access control services any more")
        self.tree.write(self.path(item), int(value, 16).to_bytes(2, "little"), capability + ACS_CONTROL_OFFSET)

    def boot(self, boot: Boot) -> None:
        boot.acs += sorted(self.goal)


class Swap(Setting):
    """Swap areas in use, with their priorities."""

    pattern = SWAPS
    by_command = True
    comes_back = True

    def state(self) -> Items:
        text = self.tree.text(SWAPS)
        areas = parse_swaps(text) if text else None
        if areas is None:
            raise UnavailableError(why(self.tree, SWAPS, "swap areas"))
        return {area["path"]: str(area["priority"]) for area in areas}

    def wanted(self, option: Any) -> Items:
        _expect_disabled(option)
        return dict.fromkeys(self.now, OFF)

    def document(self, items: Items) -> Any:
        return {path: int(priority) for path, priority in items.items() if priority != OFF}

    def items(self, document: Any) -> Items:
        priorities = _mapping(document)
        if not all(isinstance(priority, int) for priority in priorities.values()):
            raise ValueError(f"expected priorities, found {document!r}")
        return {path: str(priority) for path, priority in priorities.items()}

    def holds(self, found: str, wanted: str) -> bool:
        return (found == OFF) == (wanted == OFF)

    def write(self, item: str, value: str) -> None:
        if value == OFF:
            command = ["swapoff", item]
        else:
            # The kernel gives priorities below zero itself and takes none.
            command = ["swapon", *(["--priority", value] if int(value) >= 0 else []), item]
        answer = self.runner.run(command, SWAP_TIMEOUT)
        if not answer.ok:
            raise OSError(0, answer.complaint or f"{command[0]} ended with status {answer.status}")

    def boot(self, boot: Boot) -> None:
        boot.swap = True


class Sysctl(SingleValue):
    """One kernel parameter; raises ValueError for a name that can't be one."""

    def __init__(self, tree: FileTree, runner: CommandRunner, name: str) -> None:
        super().__init__(tree, runner)
        if not re.match(r"\w[\w./:-]*\Z", name, re.ASCII) or ".." in name or "//" in name:
            raise ValueError(f"expected the name of a kernel parameter, found {name!r}")
        self.name = name
        # As sysctl(8): dots part the name, unless a slash comes first; then dots belong to the name of an interface.
        slashes = re.sub(r"[^./]", "", name).startswith("/")
        self.machine_wide = not re.match(r"net[./]", name)
        self.pattern = "/proc/sys/" + (name if slashes else name.translate(str.maketrans("./", "/.")))

    def state(self) -> Items:
        value = self.tree.text(self.pattern)
        if value is None:
            raise UnavailableError(f"{self.pattern}: {self.tree.complaint(self.pattern)}")
        return {"": " ".join(value.split())}


KINDS: dict[str, type[Setting]] = {
    "governor": Governor,
    "idle_states": IdleStates,
    "aspm_policy": AspmPolicy,
    "acs": AccessControl,
    "swap": Swap,
}


class HostSettings:
    """Sets what is asked for on the host that `tree` and `runner` show."""

    def __init__(self, tree: FileTree, runner: CommandRunner) -> None:
        self.tree = tree
        self.runner = runner

    def apply(self, options: Mapping[str, Any], write: bool = True) -> Outcome:
        """Bring settings to what `options` asks for: see ``wanted`` of each; ``idle_states`` is a latency in µs.

        A setting that the host lacks or refuses is ``unavailable``; the others are set nevertheless. Those of KINDS
        that are not asked for are only read, so that ``before`` also brings back what a later call changes.
        """
        outcome = self._bring(options, restore=False, write=write)
        for name in KINDS:
            if name not in options:
                outcome.before[name] = outcome.after[name] = self._read(name)
        return outcome

    def restore(self, before: Mapping[str, Any], write: bool = True) -> Outcome:
        """Bring settings back to the documents of an earlier outcome's ``before``. None stays as it is.

        Raises ValueError for documents that no outcome gave.
        """
        return self._bring(
            {name: value for name, value in before.items() if value is not None}, restore=True, write=write
        )

    def _bring(self, options: Mapping[str, Any], restore: bool, write: bool) -> Outcome:
        outcome = Outcome()
        for name, option in options.items():
            setting = self._setting(name)
            try:
                state = setting.read()
                wanted = setting.items(option) if restore else setting.wanted(option)
            except UnavailableError as error:
                outcome.before[name] = outcome.after[name] = None
                outcome.unavailable[name] = str(error)
                continue
            # What went since (a CPU, a card) can't be brought back.
            setting.goal = {item: value for item, value in wanted.items() if item in state or setting.comes_back}
            if setting.machine_wide and self._is_the_machines(setting.path(next(iter(state), ""))):
                kind = container(self.tree)
                after, complaint = state, f"the kernel is the machine's, not this container's ({kind})"
            else:
                after, complaint = self._set(setting, write)
            outcome.before[name], outcome.after[name] = setting.document(state), setting.document(after)
            outcome.changed = outcome.changed or outcome.before[name] != outcome.after[name]
            if complaint and (setting.different() or not restore):
                outcome.unavailable[name] = complaint
            elif not restore:
                setting.boot(outcome.boot)
        return outcome

    def _read(self, name: str) -> Any:
        setting = self._setting(name)
        try:
            return setting.document(setting.read())
        except UnavailableError:
            return None

    def _set(self, setting: Setting, write: bool) -> tuple[Items, str]:
        """The items afterwards, and why some are not as wanted."""
        now, different = setting.now, setting.different()
        refusals = {item: refusal for item in different if (refusal := setting.refusal(item))}
        accepted = {item: value for item, value in different.items() if item not in refusals}
        if not write or not accepted:
            return {**now, **accepted}, next(iter(refusals.values()), "")
        for item, value in accepted.items():
            complaint = _attempt(setting, item, value)
            if complaint:
                refusals[item] = complaint
        try:
            after = setting.state()
        except UnavailableError as error:
            return {**now, **accepted}, f"written, but can't be read back: {error}"
        for item, value in accepted.items():
            found = after.get(item, OFF)
            if item not in refusals and not setting.holds(found, value):
                refusals[item] = f"{setting.path(item)}: {value} was written, {found} is read back{self._lockdown()}"
        return after, next(iter(refusals.values()), "")

    def _is_the_machines(self, path: str) -> bool:
        """Whether this is a container and the file one of the real kernel, which the machine's other users share."""
        return bool(container(self.tree)) and file_system(self.tree, path) in ("sysfs", "proc")

    def _lockdown(self) -> str:
        mode, _choices = parse_choice(self.tree.text(LOCKDOWN))
        return f" (kernel lockdown: {mode})" if mode not in (None, "none") else ""

    def _setting(self, name: str) -> Setting:
        if name.startswith(SYSCTLS):
            return Sysctl(self.tree, self.runner, name[len(SYSCTLS) :])
        if name not in KINDS:
            raise ValueError(f"no setting {name!r}")
        return KINDS[name](self.tree, self.runner)


def _attempt(setting: Setting, item: str, value: str) -> str:
    """Set one item; the complaint if it could not be set."""
    try:
        setting.write(item, value)
    except OSError as error:
        return f"{setting.path(item)}: {error.strerror}"
    return ""


def _cpu_and_state(item: str) -> tuple[int, str]:
    """Both parts of an item of the sleep states: ``17/cpuidle/state2``."""
    cpu, _folder, state = item.split("/")
    return int(cpu), state


def _expect_disabled(option: Any) -> None:
    if option != "disabled":
        raise ValueError(f"expected disabled, found {option!r}")


def _mapping(document: Any) -> Mapping[str, Any]:
    if not isinstance(document, Mapping) or not all(isinstance(name, str) for name in document):
        raise ValueError(f"expected an object, found {document!r}")
    return document


def _text(document: Any) -> str:
    if not isinstance(document, str):
        raise ValueError(f"expected a text, found {document!r}")
    return document


def _cpus(document: Any) -> list[int]:
    cpus = parse_cpus(_text(document))
    if cpus is None:
        raise ValueError(f"expected a list of CPUs, found {document!r}")
    return cpus
