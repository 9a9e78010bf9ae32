# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the parts of a stack profile go together, go with a host, and are still supported: one table of rules.

The rules look at a validated profile (:mod:`stack_profiles`), a day, and what is known of the host in the form that
the module ``driver_stack_info`` gives it. What is not known of the host is not held against the profile, except where a
wrong guess would leave the host without its cards. Nothing here imports Ansible.

Sources, by the name that a problem gives:

- DRV: docs.nvidia.com/datacenter/tesla (drivers, lifecycle and Driver Installation Guide)
- CUDA: CUDA Toolkit Release Notes, "CUDA Driver", tables 2 and 3; CUDA Compatibility, "Minor Version Compatibility"
- NCCL: NVIDIA's package repositories; OFED: MLNX_OFED 24.10 release notes, DOCA-OFED transition guide
- OPEN: "NVIDIA Transitions Fully Towards Open-Source GPU Kernel Modules", README of open-gpu-kernel-modules
- PEP600: manylinux_2_28 wheels, which PyTorch and vLLM are
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_packages import OWN_VERSION
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import (
    PACKAGE_VERSION,
    RELEASE,
    parse_date,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_versions import (
    ANY_REVISION,
    below,
    leading_numbers,
    numbers,
    upstream,
)

REFUSE, WARN = "refuse", "warn"

# Generations of cards, the oldest first; "before_turing" are Maxwell, Pascal and Volta.
ARCHITECTURES = ("before_turing", "turing", "ampere", "ada", "hopper", "blackwell")

# Lowest driver for any toolkit of a major version (CUDA, "Minor Version Compatibility").
MINIMUM_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
# Driver that a toolkit's first release came with (CUDA, table 3). Below it, what the driver has to compile itself (PTX)
# does not run.
TOOLKIT_DRIVERS = {
    "11.8": "520.61.05",
    "12.0": "525.60.13",
    "12.1": "530.30.02",
    "12.2": "535.54.03",
    "12.3": "545.23.06",
    "12.4": "550.54.14",
    "12.5": "555.42.02",
    "12.6": "560.28.03",
    "12.8": "570.26",
    "12.9": "575.51.03",
    "13.0": "580.65.06",
    "13.1": "590.44.01",
}
# Toolkits that a release of NCCL was built for, where all of them are known.
NCCL_BUILDS = {"2.14.3": ("10.2", "11.0", "11.6", "11.7")}
# Builds of MLNX_OFED's long term releases, where all of them are known.
MLNX_OFED_BUILDS = {"5.8": ("1.1.2.1", "2.0.3.0", "3.0.7.0", "4.1.5.0", "5.1.1.2", "7.0.6.1")}
LAST_MLNX_OFED = "24.10"
FIRST_OPEN_BRANCH = 515  # OPEN
FIRST_OPEN_ONLY_BRANCH = 620  # DRV, "Kernel Modules"
LAST_BRANCH_BEFORE_TURING = 580  # DRV: R580 is the last for Maxwell, Pascal and Volta
FIRST_BRANCHES = {"ada": 525}  # DRV; L40S
DMA_BUF_KERNEL = "5.12"  # GPUDirect RDMA without nvidia-peermem, with open modules only
OLDEST_GLIBC = "2.28"  # PEP600


@dataclass(frozen=True)
class Case:
    """What is judged: a profile, on a day, for a host (empty: none in particular)."""

    profile: Mapping[str, Any]
    today: datetime.date
    host: Mapping[str, Any]

    @property
    def architectures(self) -> list[str]:
        """Generations of the host's cards, as far as they are known, the oldest first."""
        cards = (self.host.get("hardware") or {}).get("cards") or []
        found = {card.get("architecture") for card in cards}
        return [architecture for architecture in ARCHITECTURES if architecture in found]


@dataclass(frozen=True)
class Rule:
    """A rule: `check` gives a sentence for each way in which a case breaks it. `severity` is refuse or warn."""

    name: str
    severity: str
    check: Callable[[Case], Iterable[str]]
    to_do: str
    source: str


def _os_support_ended(case: Case) -> Iterator[str]:
    ends = parse_date(case.profile["os"]["support_ends"])
    if ends and ends < case.today:
        yield f"support of {_system(case.profile)} ended on {ends}"


def _os_security_support_ended(case: Case) -> Iterator[str]:
    ends, last = (parse_date(case.profile["os"][name]) for name in ("security_support_ends", "support_ends"))
    if ends and ends < case.today and (last is None or last >= case.today):
        until = f"; long term support goes on until {last}" if last else ""
        yield f"regular security support of {_system(case.profile)} ended on {ends}{until}"


def _driver_branch_ended(case: Case) -> Iterator[str]:
    driver = case.profile["driver"]
    ends = parse_date(driver["support_ends"])
    if ends and ends < case.today:
        yield f"NVIDIA's support of driver branch R{driver['branch']} ended on {ends}"


def _glibc_too_old(case: Case) -> Iterator[str]:
    glibc = case.profile["os"]["glibc"]
    if below(glibc, OLDEST_GLIBC):
        yield f"{_system(case.profile)} has glibc {glibc}; the engines' wheels need {OLDEST_GLIBC}"


def _kernel_not_of_os(case: Case) -> Iterator[str]:
    series, release = case.profile["os"]["kernel_series"], case.profile["kernel"]["release"]
    if series and release and _series(release) not in series:
        yield f"kernel {release} is none of {_system(case.profile)}, whose kernels are {', '.join(series)}"


def _kernel_newer_than_driver(case: Case) -> Iterator[str]:
    newest, release = case.profile["driver"]["newest_kernel"], case.profile["kernel"]["release"]
    if newest and release and below(newest, _series(release)):
        driver = case.profile["driver"]["version"]
        yield f"driver {driver} was tested with kernels up to {newest}, and this is {release}"


def _headers_missing(case: Case) -> Iterator[str]:
    kernel, rdma, driver = (case.profile[name] for name in ("kernel", "rdma", "driver"))
    if not kernel["headers"]:
        if driver["build"] == "dkms":
            yield "the driver's module is built on the host, and the profile has no kernel headers"
        if rdma["flavour"] in ("doca_ofed", "mlnx_ofed"):
            yield f"{rdma['flavour']} builds modules for the kernel, and the profile has no kernel headers"


def _headers_other_kernel(case: Case) -> Iterator[str]:
    kernel = case.profile["kernel"]
    if not kernel["headers"]:
        return
    if kernel["headers"]["release"] != kernel["release"]:
        yield f"the headers are for kernel {kernel['headers']['release']}, the kernel is {kernel['release']}"
    prefix = "linux-headers-"
    for name in kernel["headers"]["packages"]:
        release = name[len(prefix) :] if name.startswith(prefix) else ""
        if release[:1].isdigit() and kernel["release"] and not kernel["release"].startswith(_without_flavour(release)):
            yield f"package {name} is for another kernel than {kernel['release']}"
    versions = {version for version in kernel["packages"].values() if version and PACKAGE_VERSION not in version}
    for name, version in kernel["headers"]["packages"].items():
        exact = version and RELEASE not in version and PACKAGE_VERSION not in version
        if versions and exact and version not in versions:
            yield f"package {name} has version {version}, the kernel's packages have {', '.join(sorted(versions))}"


def _rdma_incomplete(case: Case) -> Iterator[str]:
    rdma = case.profile["rdma"]
    if rdma["flavour"] != "none" and not rdma["packages"]:
        yield f"RDMA flavour {rdma['flavour']} without a package"
    if rdma["flavour"] in ("doca_ofed", "mlnx_ofed") and not rdma["version"]:
        yield f"RDMA flavour {rdma['flavour']} without a version"


def _rdma_no_such_build(case: Case) -> Iterator[str]:
    rdma = case.profile["rdma"]
    if rdma["flavour"] != "mlnx_ofed" or not rdma["version"]:
        return
    release, _dash, build = rdma["version"].partition("-")
    builds = MLNX_OFED_BUILDS.get(release)
    if builds and build not in builds:
        yield f"MLNX_OFED {rdma['version']} was never published; builds of {release} are {', '.join(builds)}"
    if below(LAST_MLNX_OFED, release):
        yield f"MLNX_OFED {rdma['version']} does not exist; {LAST_MLNX_OFED} was the last one"


def _rdma_mlnx_ofed_ended(case: Case) -> Iterator[str]:
    if case.profile["rdma"]["flavour"] == "mlnx_ofed":
        yield f"MLNX_OFED ended with {LAST_MLNX_OFED}; its successor is DOCA-OFED"


def _gpudirect_rdma(case: Case) -> Iterator[str]:
    driver, release = case.profile["driver"], case.profile["kernel"]["release"]
    if case.profile["rdma"]["flavour"] != "inbox":
        return
    if driver["modules"] == "proprietary":
        yield "proprietary modules and inbox RDMA: network cards can't reach the cards' memory (GPUDirect RDMA)"
    elif release and below(_series(release), DMA_BUF_KERNEL):
        yield f"kernel {release} and inbox RDMA: GPUDirect RDMA needs kernel {DMA_BUF_KERNEL} or later"


def _driver_below_cuda(case: Case) -> Iterator[str]:
    driver = case.profile["driver"]["version"]
    for part, version in _cuda_versions(case.profile):
        least = MINIMUM_DRIVERS.get(_major(version))
        if least and below(driver, least):
            yield f"{part} needs driver {least} or later, and the driver is {driver}"


def _driver_below_toolkit(case: Case) -> Iterator[str]:
    driver = case.profile["driver"]["version"]
    for part, version in _cuda_versions(case.profile):
        own = TOOLKIT_DRIVERS.get(version)
        if own and below(driver, own) and not below(driver, MINIMUM_DRIVERS.get(_major(version))):
            yield f"{part} came with driver {own}; with {driver} it runs, but not what the driver compiles itself (PTX)"


def _cuda_not_known(case: Case) -> Iterator[str]:
    for part, version in _cuda_versions(case.profile):
        if _major(version) not in MINIMUM_DRIVERS:
            yield f"the driver that {part} needs is not known here"


def _nccl_other_cuda(case: Case) -> Iterator[str]:
    nccl, cuda = case.profile["nccl"], case.profile["cuda"]
    if nccl and cuda and nccl["cuda"] != cuda["version"]:
        yield f"NCCL {nccl['version']} is built for CUDA {nccl['cuda']}, the toolkit is {cuda['version']}"


def _nccl_no_such_build(case: Case) -> Iterator[str]:
    nccl = case.profile["nccl"]
    builds = NCCL_BUILDS.get(nccl["version"]) if nccl else None
    if nccl and builds and nccl["cuda"] not in builds:
        yield f"NCCL {nccl['version']} was built for CUDA {', '.join(builds)}, never for {nccl['cuda']}"


def _fabric_manager_other_version(case: Case) -> Iterator[str]:
    manager, driver = case.profile["fabric_manager"], case.profile["driver"]
    if manager and manager["version"] != driver["version"]:
        yield f"Fabric Manager is {manager['version']}, the driver is {driver['version']}"


def _fabric_manager_missing(case: Case) -> Iterator[str]:
    switches = (case.host.get("hardware") or {}).get("nvswitches")
    if switches and not case.profile["fabric_manager"]:
        yield f"the host has {switches} NVSwitches, and the profile has no Fabric Manager"


def _package_other_version(case: Case) -> Iterator[str]:
    driver, manager, cuda, nccl = (case.profile[name] for name in ("driver", "fabric_manager", "cuda", "nccl"))
    for name, version in driver["packages"].items():
        found = _upstream_numbers(version)
        # A driver's version has three figures in front; other packages (dkms) have versions of their own.
        if found is None or found[0] < 100:
            continue
        if name not in OWN_VERSION and found != numbers(driver["version"]):
            yield f"package {name} {version} does not belong to driver {driver['version']}"
    for part, name_part, section in (("Fabric Manager", "fabricmanager", manager), ("NCCL", "nccl", nccl)):
        for name, version in section["packages"].items() if section else ():
            found = _upstream_numbers(version)
            if name_part in name and found is not None and found != numbers(section["version"]):
                yield f"package {name} {version} does not belong to {part} {section['version']}"
    for name, version in nccl["packages"].items() if nccl else ():
        _text, mark, built_for = (version or "").partition("+cuda")
        if mark and built_for != nccl["cuda"]:
            yield f"package {name} {version} is built for CUDA {built_for}, not {nccl['cuda']}"
    for name, version in cuda["packages"].items() if cuda else ():
        found = leading_numbers(version)
        if "cuda-toolkit" in name and found is not None and found[:2] != numbers(cuda["version"]):
            yield f"package {name} {version} does not belong to CUDA {cuda['version']}"


def _open_modules_old_branch(case: Case) -> Iterator[str]:
    driver = case.profile["driver"]
    if driver["modules"] == "open" and driver["branch"] < FIRST_OPEN_BRANCH:
        yield f"there are no open modules before R{FIRST_OPEN_BRANCH}, and the branch is R{driver['branch']}"


def _proprietary_modules_new_branch(case: Case) -> Iterator[str]:
    driver = case.profile["driver"]
    if driver["modules"] == "proprietary" and driver["branch"] >= FIRST_OPEN_ONLY_BRANCH:
        yield f"R{driver['branch']} has open modules only; proprietary ones ended before R{FIRST_OPEN_ONLY_BRANCH}"


def _modules_and_cards(case: Case) -> Iterator[str]:
    modules = case.profile["driver"]["modules"]
    if modules == "open" and "before_turing" in case.architectures:
        yield "the host has cards from before Turing, which open modules do not drive"
    if modules == "proprietary" and "blackwell" in case.architectures:
        yield "the host has Blackwell cards, which only open modules drive"


def _branch_and_cards(case: Case) -> Iterator[str]:
    branch = case.profile["driver"]["branch"]
    if branch > LAST_BRANCH_BEFORE_TURING and "before_turing" in case.architectures:
        yield f"the host has cards from before Turing, and R{LAST_BRANCH_BEFORE_TURING} is the last branch for them"
    for architecture, first in FIRST_BRANCHES.items():
        if branch < first and architecture in case.architectures:
            yield f"the host has {architecture.capitalize()} cards, which R{first} is the first branch for"


def _other_os(case: Case) -> Iterator[str]:
    wanted, found = case.profile["os"], case.host.get("os") or {}
    for field in ("family", "distribution"):
        if wanted[field] and found.get(field) and wanted[field] != found[field]:
            yield f"the profile is for {_system(case.profile)}, the host is {found[field]}"
            return
    version = found.get("version")
    if version and version != wanted["version"] and not version.startswith(f"{wanted['version']}."):
        yield f"the profile is for {_system(case.profile)}, the host has version {version}"


def _other_architecture(case: Case) -> Iterator[str]:
    wanted, found = case.profile["os"]["architectures"], (case.host.get("os") or {}).get("architecture")
    if found and found not in wanted:
        yield f"the profile is for {', '.join(wanted)}, the host is {found}"


def _secure_boot_unsigned(case: Case) -> Iterator[str]:
    boot, driver = case.host.get("secure_boot") or {}, case.profile["driver"]
    if boot.get("enabled") and not driver["signed"] and not boot.get("key_enrolled"):
        reason = (boot.get("unknown") or {}).get("key_enrolled")
        key = f"whether a key is enrolled is not known ({reason})" if reason else "no key for it is enrolled"
        yield f"Secure Boot is on, the driver's module is not signed by the vendor, and {key}"


def _secure_boot_unknown(case: Case) -> Iterator[str]:
    boot = case.host.get("secure_boot")
    if boot and boot.get("enabled") is None and not case.profile["driver"]["signed"]:
        yield f"whether Secure Boot is on is not known: {(boot.get('unknown') or {}).get('enabled', 'no reason given')}"


RULES: tuple[Rule, ...] = (
    Rule("os_support_ended", REFUSE, _os_support_ended, "install a system that is supported", "the distribution"),
    Rule(
        "os_security_support_ended",
        WARN,
        _os_security_support_ended,
        "plan the move to a newer release",
        "the distribution",
    ),
    Rule("glibc_too_old", REFUSE, _glibc_too_old, "install a newer system", "PEP600"),
    Rule("other_os", REFUSE, _other_os, "choose a profile for the host's system", "the profile"),
    Rule("other_architecture", REFUSE, _other_architecture, "choose a profile for the host's processor", "the profile"),
    Rule("kernel_not_of_os", REFUSE, _kernel_not_of_os, "take a kernel of the distribution", "the distribution"),
    Rule(
        "kernel_newer_than_driver",
        WARN,
        _kernel_newer_than_driver,
        "try the driver's build on one host first, or take an older kernel",
        "the package's description",
    ),
    Rule("headers_missing", REFUSE, _headers_missing, "add the headers of exactly the profile's kernel", "DRV"),
    Rule("headers_other_kernel", REFUSE, _headers_other_kernel, "take the headers of exactly the kernel", "DRV"),
    Rule("rdma_incomplete", REFUSE, _rdma_incomplete, "name version and packages, or choose inbox or none", "OFED"),
    Rule("rdma_no_such_build", REFUSE, _rdma_no_such_build, "choose inbox, or DOCA-OFED of an LTS release", "OFED"),
    Rule("rdma_mlnx_ofed_ended", WARN, _rdma_mlnx_ofed_ended, "choose inbox, or DOCA-OFED of an LTS release", "OFED"),
    Rule(
        "gpudirect_rdma_unavailable",
        WARN,
        _gpudirect_rdma,
        "choose open modules (Turing and later) with kernel 5.12 or later, or DOCA-OFED, where nodes share a model",
        "DRV",
    ),
    Rule("driver_branch_ended", WARN, _driver_branch_ended, "move to R580 LTS or a later LTS branch", "DRV"),
    Rule("driver_below_cuda_minimum", REFUSE, _driver_below_cuda, "take a newer driver or an older CUDA", "CUDA"),
    Rule(
        "driver_below_toolkit",
        WARN,
        _driver_below_toolkit,
        "take a newer driver, or an older toolkit, if kernels are compiled at run time",
        "CUDA",
    ),
    Rule("cuda_not_known", WARN, _cuda_not_known, "look it up in the CUDA release notes", "CUDA"),
    Rule("nccl_other_cuda", REFUSE, _nccl_other_cuda, "take the NCCL whose +cuda suffix is the toolkit's", "NCCL"),
    Rule("nccl_no_such_build", REFUSE, _nccl_no_such_build, "take a release that was built for the toolkit", "NCCL"),
    Rule(
        "fabric_manager_other_version",
        REFUSE,
        _fabric_manager_other_version,
        "take Fabric Manager of exactly the driver's version",
        "DRV",
    ),
    Rule("fabric_manager_missing", REFUSE, _fabric_manager_missing, "add Fabric Manager to the profile", "DRV"),
    Rule("package_other_version", REFUSE, _package_other_version, "take packages of one release", "the profile"),
    Rule("open_modules_old_branch", REFUSE, _open_modules_old_branch, "take a newer branch, or proprietary", "OPEN"),
    Rule("proprietary_modules_new_branch", REFUSE, _proprietary_modules_new_branch, "choose open modules", "DRV"),
    Rule("modules_and_cards", REFUSE, _modules_and_cards, "choose the other kind of modules", "OPEN"),
    Rule("branch_and_cards", REFUSE, _branch_and_cards, "choose a branch that has the card", "DRV"),
    Rule(
        "secure_boot_unsigned",
        REFUSE,
        _secure_boot_unsigned,
        "either enrol the key that DKMS signs with (mokutil --import, then confirm at the console in the next boot), or"
        " take modules that are signed (Ubuntu: linux-modules-nvidia-580-server-open-generic; build: prebuilt, signed:"
        " true in the profile)",
        "DRV",
    ),
    Rule("secure_boot_unknown", WARN, _secure_boot_unknown, "run as root, or look with mokutil --sb-state", "DRV"),
)


def problems(profile: Mapping[str, Any], today: datetime.date, host: Mapping[str, Any]) -> list[dict[str, str]]:
    """What is wrong, refusals first: ``rule``, ``severity``, ``reason``, ``to_do``, ``source``."""
    case = Case(profile, today, host)
    found = [
        {
            "rule": rule.name,
            "severity": rule.severity,
            "reason": reason,
            "to_do": rule.to_do,
            "source": rule.source,
        }
        for rule in RULES
        for reason in rule.check(case)
    ]
    return sorted(found, key=lambda problem: problem["severity"] != REFUSE)


def judge(
    profile: Mapping[str, Any],
    candidates: Iterable[Mapping[str, Any]],
    today: datetime.date,
    host: Mapping[str, Any],
) -> dict[str, Any]:
    """All problems of a profile, whether it is refused, and if so, which of the candidates is the nearest that is not.

    Keys: ``refused``, ``problems`` (see :func:`problems`), ``nearest`` (a name; None if none is needed, or there is
    none), ``message`` (for people; empty if there is nothing to say).
    """
    found = problems(profile, today, host)
    refused = any(problem["severity"] == REFUSE for problem in found)
    near = nearest(profile, candidates, today, host) if refused else None
    return {"refused": refused, "problems": found, "nearest": near, "message": _message(profile, found, refused, near)}


def nearest(
    profile: Mapping[str, Any],
    candidates: Iterable[Mapping[str, Any]],
    today: datetime.date,
    host: Mapping[str, Any],
) -> str | None:
    """Name of the candidate that is most like `profile` and is not refused; None if each of them is.

    Most like: the same family of systems, then the same distribution, then the nearest version of it that is not
    older, then the nearest driver branch.
    """

    def distance(candidate: Mapping[str, Any]) -> tuple[Any, ...]:
        mine, other = profile["os"], candidate["os"]
        version, other_version = numbers(mine["version"]) or (0,), numbers(other["version"]) or (0,)
        return (
            mine["family"] != other["family"],
            None not in (mine["distribution"], other["distribution"]) and mine["distribution"] != other["distribution"],
            other_version < version,
            abs(version[0] - other_version[0]),
            abs(profile["driver"]["branch"] - candidate["driver"]["branch"]),
            candidate["name"],
        )

    good = [
        candidate
        for candidate in candidates
        if candidate["name"] != profile["name"]
        and not any(problem["severity"] == REFUSE for problem in problems(candidate, today, host))
    ]
    return str(min(good, key=distance)["name"]) if good else None


def _message(profile: Mapping[str, Any], found: list[dict[str, str]], refused: bool, near: str | None) -> str:
    if not found:
        return ""
    head = f"Stack profile {profile['name']} is refused." if refused else f"Stack profile {profile['name']}:"
    lines = [
        f"- {'' if problem['severity'] == REFUSE else 'warning: '}{problem['reason']}. To do: {problem['to_do']}."
        for problem in found
    ]
    end = [f"Nearest supported profile: {near}."] if near else ["No profile at hand is supported."] if refused else []
    return "\n".join([head, *lines, *end])


def _system(profile: Mapping[str, Any]) -> str:
    wanted = profile["os"]
    return f"{wanted['distribution'] or {'RedHat': 'EL'}.get(wanted['family'], wanted['family'])} {wanted['version']}"


def _series(release: str) -> str:
    """The first two numbers of a kernel's release: ``6.12.118+deb13-amd64`` → ``6.12``."""
    return ".".join(str(number) for number in (leading_numbers(release) or ())[:2])


def _without_flavour(release: str) -> str:
    """``6.1.0-57-common`` is the part of ``6.1.0-57-amd64`` that all flavours share."""
    return release[: -len("common")] if release.endswith("-common") else release


def _cuda_versions(profile: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if profile["cuda"]:
        yield f"CUDA {profile['cuda']['version']}", profile["cuda"]["version"]
    nccl = profile["nccl"]
    if nccl and not (profile["cuda"] and profile["cuda"]["version"] == nccl["cuda"]):
        yield f"NCCL {nccl['version']} for CUDA {nccl['cuda']}", nccl["cuda"]


def _major(version: str) -> int:
    return (leading_numbers(version) or (0,))[0]


def _upstream_numbers(version: str | None) -> tuple[int, ...] | None:
    if version is None:
        return None
    return numbers(upstream(version if version.endswith(ANY_REVISION) or "-" in version else f"{version}-0"))
