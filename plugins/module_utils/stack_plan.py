# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The way from what is installed to a stack profile: steps in strict order, with their packages and reboots.

Order (NVIDIA's Driver Installation Guide, DOCA-OFED transition guide): kernel and headers, reboot, RDMA, driver,
reboot, Fabric Manager, toolkit, NCCL. A step is only begun once the one before it is verified, and each says how. The
same function tells what comes next on a host where a run was cut. Nothing here imports Ansible.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_packages import plain_name
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import for_kernel, packages
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_versions import compare, fits

# Step -> operation (role) that does it. Fabric Manager belongs to the driver, but starts only with its module loaded.
STEPS = {
    "kernel": "kernel",
    "kernel_reboot": "kernel",
    "rdma": "rdma",
    "driver": "driver",
    "driver_reboot": "driver",
    "fabric_manager": "driver",
    "cuda": "cuda",
    "nccl": "nccl",
}
DONE, DUE, NOT_WANTED, UNKNOWN = "done", "due", "not_wanted", "unknown"


def plan(profile: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Steps to a validated profile from what the module ``driver_stack_info`` found.

    Each step has ``step``, ``operation``, ``state`` (done, due, not_wanted, unknown), ``why`` (sentences), ``packages``
    (``name``, ``installed``, ``wanted``, ``action``: install, upgrade, downgrade, keep), ``hold`` (names that are not
    held yet), ``reboot`` (whether the step is one), ``required`` (a reboot without which the profile can't be reached)
    and ``verify`` (what has to be true before the next one).

    Also ``kernel`` (the release that the profile comes to on this host), ``next`` (the first step that is not done, or
    None) and ``reboots`` (names of the reboots to come).
    """
    running = (found.get("kernel") or {}).get("running")
    release = profile["kernel"]["release"] or running
    resolved = for_kernel(profile, release) if release else profile
    steps = [
        _packages_step("kernel", resolved, packages(resolved, "kernel"), found, _kernel_whys(resolved, found)),
        _kernel_reboot(release, running),
        _packages_step("rdma", resolved, resolved["rdma"]["packages"], found, _rdma_whys(resolved, found)),
        _packages_step("driver", resolved, resolved["driver"]["packages"], found, _driver_whys(resolved, found)),
        _driver_reboot(resolved, found),
        _fabric_manager(resolved, found),
        _packages_step("cuda", resolved, _section_packages(resolved["cuda"]), found, []),
        _packages_step("nccl", resolved, _section_packages(resolved["nccl"]), found, []),
    ]
    _expect_reboots(steps, resolved["kernel"]["packages"])
    coming = next((step for step in steps if step["state"] in (DUE, UNKNOWN)), None)
    return {
        "kernel": release,
        "steps": steps,
        "next": None
        if coming is None
        else {"step": coming["step"], "operation": coming["operation"], "why": coming["why"]},
        "reboots": [step["step"] for step in steps if step["reboot"] and step["state"] == DUE],
    }


def flat(packages: Mapping[str, Mapping[str, Collection[str]]] | None) -> dict[str, Collection[str]] | None:
    """Versions of installed packages by name, from ``packages`` of the module, which has them by operation."""
    if packages is None:
        return None
    return {name: versions for operation in packages.values() for name, versions in operation.items()}


def lines(planned: Mapping[str, Any]) -> list[str]:
    """The plan for people, a line for each thing that would happen."""
    text = []
    for step in planned["steps"]:
        if step["state"] in (DONE, NOT_WANTED):
            continue
        if step["reboot"]:
            text.append(f"{step['step']}: reboot ({'; '.join(step['why'])})")
            continue
        changes = [package for package in step["packages"] if package["action"] != "keep"]
        text += [
            f"{step['step']}: {package['action']} {package['name']} "
            f"{' → '.join([*package['installed'], package['wanted'] or 'any version'])}"
            for package in changes
        ]
        text += [f"{step['step']}: hold {', '.join(step['hold'])}"] if step["hold"] else []
        if not changes and not step["hold"]:
            text += [f"{step['step']}: {why}" for why in step["why"]]
    return text


def _section_packages(section: Mapping[str, Any] | None) -> Mapping[str, str | None] | None:
    return section["packages"] if section else None


def _packages_step(
    step: str,
    profile: Mapping[str, Any],
    wanted: Mapping[str, str | None] | None,
    found: Mapping[str, Any],
    more: Iterable[str],
) -> dict[str, Any]:
    made = _step(step)
    if wanted is None or (step == "rdma" and profile["rdma"]["flavour"] == "none"):
        made["state"] = NOT_WANTED
        made["why"] = [f"the profile has no {step}"]
        return made
    made["verify"] = [*_VERIFY[step]]
    installed = flat(found.get("packages"))
    if installed is None:
        made["state"] = UNKNOWN
        made["why"] = [f"which packages are installed is not known: {_reason(found, 'packages')}"]
        return made
    family = profile["os"]["family"]
    made["packages"] = [_package(family, name, version, installed.get(name, [])) for name, version in wanted.items()]
    held = (found.get("held") or {}).get("packages")
    keep = [*wanted, *(kernel_followers(installed) if step == "kernel" else ())]
    made["hold"] = [name for name in keep if held is not None and name not in held]
    whys = [
        f"{package['name']} is {', '.join(package['installed']) or 'absent'}, wanted is {package['wanted'] or 'any'}"
        for package in made["packages"]
        if package["action"] != "keep"
    ]
    whys += [f"{name} is not held" for name in made["hold"]]
    whys += more
    if held is None:
        whys.append(f"what is held is not known: {_reason(found.get('held') or {}, 'packages')}")
    made["state"], made["why"] = (DUE, whys) if whys else (DONE, [])
    return made


def _package(family: str, name: str, wanted: str | None, installed: Collection[str]) -> dict[str, Any]:
    # Of a kernel's packages several versions are installed at a time; one of them has to be the wanted one.
    if any(fits(family, wanted, version) for version in installed):
        action = "keep"
    elif not installed:
        action = "install"
    else:
        target = (wanted or "").replace("-*", "")
        older = all(compare(family, target, version) < 0 for version in installed)
        action = "downgrade" if older else "upgrade"
    return {"name": name, "installed": list(installed), "wanted": wanted, "action": action}


def kernel_followers(installed: Iterable[str]) -> list[str]:
    """Installed packages that bring along the newest kernel whenever there is one, beside the one that is held."""
    names = [plain_name(name) for name in installed]
    return [
        name
        for name in names
        if name == "kernel" or re.match(r"linux-(image|headers|generic|virtual)(-[a-z]|\Z)", name)
    ]


def _kernel_whys(profile: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    release = profile["kernel"]["release"]
    if release is None:
        return ["which kernel runs is not known, and the profile names none"]
    kernels = (found.get("kernel") or {}).get("installed")
    match = next((kernel for kernel in kernels or [] if kernel["release"] == release), None)
    if kernels is not None and match is None:
        return [f"kernel {release} is not installed"]
    if match is not None and profile["kernel"]["headers"] and match.get("headers") is False:
        return [f"headers of kernel {release} are not installed"]
    return []


def _kernel_reboot(release: str | None, running: str | None) -> dict[str, Any]:
    made = _step("kernel_reboot", reboot=True)
    made["verify"] = [*_VERIFY["kernel_reboot"]]
    if running is None or release is None:
        made["state"], made["why"] = UNKNOWN, ["which kernel runs is not known"]
    elif running != release:
        made["state"], made["why"], made["required"] = DUE, [f"kernel {running} runs, wanted is {release}"], True
    return made


def _rdma_whys(profile: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    wanted, rdma = profile["rdma"], found.get("rdma") or {}
    flavour = rdma.get("flavour")
    if flavour not in (None, "none", wanted["flavour"]):
        return [f"RDMA is {flavour}, wanted is {wanted['flavour']}"]
    return []


def _driver_whys(profile: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    wanted, release = profile["driver"], profile["kernel"]["release"]
    modules = (found.get("driver") or {}).get("on_disk")
    if modules is None or release is None:
        return []
    module = next((each for each in modules if each["kernel"] == release and each.get("version")), None)
    if module is None:
        return [f"there is no module for kernel {release}"]
    whys = []
    if module["version"] != wanted["version"]:
        whys.append(f"the module for kernel {release} is {module['version']}, wanted is {wanted['version']}")
    if module.get("modules") not in (None, wanted["modules"]):
        whys.append(f"the module for kernel {release} is {module['modules']}, wanted is {wanted['modules']}")
    return whys


def _driver_reboot(profile: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    made = _step("driver_reboot", reboot=True)
    made["verify"] = [*_VERIFY["driver_reboot"]]
    wanted, driver = profile["driver"], found.get("driver") or {}
    loaded = driver.get("loaded")
    if not loaded or loaded.get("loaded") is None:
        made["state"], made["why"] = UNKNOWN, [f"what is loaded is not known: {_reason(loaded or driver, 'loaded')}"]
        return made
    if not loaded["loaded"]:
        nouveau = loaded.get("nouveau")
        reason = "nouveau is loaded in its place" if nouveau else "loading it can be enough"
        made["state"], made["required"] = DUE, bool(nouveau)
        made["why"] = [f"no module of the driver is loaded; {reason}"]
        return made
    whys = [
        f"the loaded module is {loaded[field]}, wanted is {wanted[field]}"
        for field in ("version", "modules")
        if loaded.get(field) not in (None, wanted[field])
    ]
    if whys:
        made["state"], made["why"], made["required"] = DUE, whys, True
    return made


def _fabric_manager(profile: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    hardware = found.get("hardware") or {}
    switches = hardware.get("nvswitches")
    if not profile["fabric_manager"] or switches == 0:
        made = _step("fabric_manager")
        made["state"] = NOT_WANTED
        made["why"] = ["the host has no NVSwitch" if switches == 0 else "the profile has no Fabric Manager"]
        return made
    if switches is None:
        made = _step("fabric_manager")
        made["state"] = UNKNOWN
        made["why"] = [f"whether the host has NVSwitches is not known: {_reason(hardware, 'nvswitches')}"]
        return made
    manager = found.get("fabric_manager") or {}
    more = ["its service does not run"] if manager.get("active") is False else []
    return _packages_step("fabric_manager", profile, profile["fabric_manager"]["packages"], found, more)


def _expect_reboots(steps: list[dict[str, Any]], images: Collection[str]) -> None:
    """Make a reboot due where the step before it changes what runs; `images` are the packages of the kernel itself."""
    for before, step in zip(steps, steps[1:]):
        changed = [package["name"] for package in before["packages"] if package["action"] != "keep"]
        if before["step"] == "kernel":
            changed = [name for name in changed if name in images]
        if step["reboot"] and step["state"] == DONE and changed:
            step["state"], step["required"] = DUE, True
            step["why"] = [f"{', '.join(changed)} change, and what is loaded stays until the host boots"]


def _step(name: str, reboot: bool = False) -> dict[str, Any]:
    return {
        "step": name,
        "operation": STEPS[name],
        "state": DONE,
        "why": [],
        "packages": [],
        "hold": [],
        "reboot": reboot,
        "required": False,
        "verify": [],
    }


_VERIFY = {
    "kernel": ("kernel, modules and headers of one release are installed and held",),
    "kernel_reboot": ("the boot id is another one, and the wanted kernel runs",),
    "rdma": ("the flavour is the wanted one, and no RDMA device is missing",),
    "driver": ("a module of the wanted version and kind is on disk for the wanted kernel, its packages are held",),
    "driver_reboot": ("the loaded module has the wanted version and kind, and no card is missing",),
    "fabric_manager": ("the service runs, at the driver's version",),
    "cuda": ("the toolkit is there at the wanted version",),
    "nccl": ("the library is there, built for the profile's CUDA",),
}


def _reason(document: Mapping[str, Any], field: str) -> str:
    return str((document.get("unknown") or {}).get(field, "no reason given"))
