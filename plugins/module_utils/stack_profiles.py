# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stack profiles: which kernel, RDMA, driver, CUDA and NCCL belong together on a system, as a document.

Profiles are files in ``meta/stack_profiles/`` of the collection, or of the site's own; the lookup ``stack_profile``
reads them on the controller. This module says what a profile looks like and what is wrong with one that does not.
Whether the parts go together is another question: :mod:`stack_fit`. Nothing here imports Ansible.
"""

from __future__ import annotations

import copy
import datetime
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_packages import OPERATIONS

SCHEMA = 1
RDMA_FLAVOURS = ("inbox", "doca_ofed", "mlnx_ofed", "none")
MODULE_FLAVOURS = ("open", "proprietary")
BUILDS = ("dkms", "prebuilt")
# What stands in names and versions of kernel packages for the kernel that a host has: its release (``uname -r``), and
# for EL the same without the architecture, which is the packages' version.
RELEASE, PACKAGE_VERSION = "{release}", "{package_version}"

# A check looks at a value and says what was expected; empty if it is right.
Check = Callable[[Any], str]
Shape = Union[Check, "Section", "Items"]


class ProfileError(Exception):
    """A profile is not one. `problems` are sentences: where, what was expected, what was found."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


def _text(pattern: str, what: str) -> Check:
    expression = re.compile(rf"(?:{pattern})\Z")
    return lambda value: "" if isinstance(value, str) and expression.match(value) else what


def _choice(*choices: str) -> Check:
    return lambda value: "" if isinstance(value, str) and value in choices else f"one of {', '.join(choices)}"


def _or_none(check: Check) -> Check:
    def checked(value: Any) -> str:
        complaint = "" if value is None else check(value)
        return f"{complaint}, or null" if complaint else ""

    return checked


def _date(value: Any) -> str:
    return "" if parse_date(value) else 'a date in quotes, "2028-06-30"'


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _branch(value: Any) -> str:
    return (
        "" if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 9999 else "a number like 580"
    )


def _packages(value: Any) -> str:
    expected = "a mapping of package name to version, null for any version"
    if not isinstance(value, Mapping):
        return expected
    for name, version in value.items():
        if not isinstance(name, str) or not re.match(r"[A-Za-z0-9][A-Za-z0-9+._{}-]*\Z", name):
            return f"{expected}; {name!r} is no package's name"
        # YAML makes a number of 580.10, and 580.1 of that.
        if version is not None and not (isinstance(version, str) and re.match(r"[A-Za-z0-9{][^\s=]*\Z", version)):
            return f"{expected}; the version of {name} must be text (in quotes), not {version!r}"
    return ""


class Items:
    """A list whose items all have one shape."""

    def __init__(self, shape: Shape, least: int = 0, nullable: bool = False) -> None:
        self.shape, self.least, self.nullable = shape, least, nullable


class Section:
    """A mapping with fields. All are required but those in `optional`; others are not allowed."""

    def __init__(self, nullable: bool = False, optional: Iterable[str] = (), **fields: Shape) -> None:
        self.nullable, self.optional, self.fields = nullable, frozenset(optional), fields


_NAME = _text(r"[a-z0-9][a-z0-9.-]{0,62}", "a name of small letters, digits, dots and hyphens")
_WORDS = _text(r"\S.*", "text")
_VERSION = _text(r"[0-9]+(\.[0-9]+)*", "a version of numbers and dots in quotes")
_RELEASE = _text(r"[0-9]\S*", "a kernel release like 6.1.0-57-amd64")

_PROFILE = Section(
    schema=lambda value: "" if value == SCHEMA and not isinstance(value, bool) else str(SCHEMA),
    name=_NAME,
    summary=_WORDS,
    os=Section(
        family=_choice("Debian", "RedHat"),
        distribution=_or_none(_WORDS),
        version=_VERSION,
        architectures=Items(_text(r"[a-z0-9_]+", "an architecture like x86_64"), least=1),
        glibc=_or_none(_VERSION),
        kernel_series=Items(_VERSION, least=1, nullable=True),
        security_support_ends=_or_none(_date),
        support_ends=_or_none(_date),
    ),
    repositories=Items(
        Section(
            optional=("suites", "components", "module_stream"),
            name=_NAME,
            type=_choice("deb", "rpm"),
            # Null: the distribution's own archive, wherever the host's apt finds it.
            url=_or_none(_text(r"(https?|file)://\S+", "an address that begins with https://, http:// or file://")),
            suites=Items(_text(r"\S+", "a suite"), least=1),
            components=Items(_text(r"\S+", "a component")),
            key=_text(r"(https?|file)://\S+|/\S+", "an address or a path"),
            module_stream=_text(r"[a-z0-9-]+:[a-z0-9.-]+", "a module and its stream like nvidia-driver:580-open"),
        )
    ),
    kernel=Section(
        release=_or_none(_RELEASE),
        packages=_packages,
        headers=Section(nullable=True, release=_or_none(_RELEASE), packages=_packages),
    ),
    rdma=Section(
        flavour=_choice(*RDMA_FLAVOURS), version=_or_none(_text(r"[0-9][0-9.-]*", "a version")), packages=_packages
    ),
    driver=Section(
        branch=_branch,
        version=_VERSION,
        modules=_choice(*MODULE_FLAVOURS),
        build=_choice(*BUILDS),
        signed=_flag,
        support_ends=_or_none(_date),
        newest_kernel=_or_none(_VERSION),
        packages=_packages,
    ),
    fabric_manager=Section(nullable=True, version=_VERSION, packages=_packages),
    cuda=Section(
        nullable=True, version=_text(r"[0-9]+\.[0-9]+", "major and minor version in quotes"), packages=_packages
    ),
    nccl=Section(
        nullable=True,
        version=_VERSION,
        cuda=_text(r"[0-9]+\.[0-9]+", "major and minor version in quotes"),
        packages=_packages,
    ),
    unknown=lambda value: (
        ""
        if isinstance(value, Mapping) and all(isinstance(each, str) and each for pair in value.items() for each in pair)
        else "a mapping of field to the reason why it is null"
    ),
)

# Values that are null only where they can't be known; ``unknown`` then says why. (Other nulls mean "not wanted".)
_FACTS = (
    *("os.glibc", "os.kernel_series", "os.security_support_ends", "os.support_ends"),
    *("kernel.release", "kernel.headers.release", "rdma.version", "driver.support_ends", "driver.newest_kernel"),
)


def parse_date(text: Any) -> datetime.date | None:
    """The day that ``2028-06-30`` names; None for anything else."""
    if not isinstance(text, str) or not re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2}\Z", text):
        return None
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        return None


def validate(document: Any) -> dict[str, Any]:
    """A copy of a profile that is one.

    Raises:
        ProfileError: with every problem at once.
    """
    problems: list[str] = []
    _check(document, _PROFILE, "", problems)
    if problems:
        raise ProfileError(problems)
    profile: dict[str, Any] = copy.deepcopy(_plain(document))
    problems = [*_meanings(profile), *_reasons(profile)]
    if problems:
        raise ProfileError(problems)
    return profile


def _check(value: Any, shape: Shape, path: str, problems: list[str]) -> None:
    where = path or "the profile"
    if isinstance(shape, Section):
        if value is None and shape.nullable:
            return
        if not isinstance(value, Mapping):
            problems.append(f"{where}: expected a mapping, found {_shown(value)}")
            return
        problems += [
            f"{where}: {_shown(name)} is no field{_nearest_name(name, shape.fields)}"
            for name in value
            if name not in shape.fields
        ]
        for name, each in shape.fields.items():
            inner = f"{path}.{name}" if path else name
            if name in value:
                _check(value[name], each, inner, problems)
            elif name not in shape.optional:
                problems.append(f"{inner}: is missing")
    elif isinstance(shape, Items):
        if value is None and shape.nullable:
            return
        if not isinstance(value, list) or len(value) < shape.least:
            amount = "a list" if not shape.least else f"a list of {shape.least} or more"
            problems.append(f"{where}: expected {amount}, found {_shown(value)}")
            return
        for index, each in enumerate(value):
            _check(each, shape.shape, f"{path}[{index}]", problems)
    else:
        expected = shape(value)
        if expected:
            problems.append(f"{where}: expected {expected}, found {_shown(value)}")


def _meanings(profile: Mapping[str, Any]) -> list[str]:
    """What a shape can't tell."""
    problems = []
    driver = profile["driver"]
    if not driver["version"].startswith(f"{driver['branch']}."):
        problems.append(f"driver.version: expected a version of branch {driver['branch']}, found {driver['version']}")
    kind = "rpm" if profile["os"]["family"] == "RedHat" else "deb"
    names = [repository["name"] for repository in profile["repositories"]]
    for index, repository in enumerate(profile["repositories"]):
        if repository["type"] != kind:
            problems.append(f"repositories[{index}].type: expected {kind} for {profile['os']['family']}")
        if repository["type"] == "rpm" and repository["url"] is None:
            problems.append(
                f"repositories[{index}].url: expected an address; null stands for suites of apt's sources only"
            )
        if repository["type"] == "deb" and "suites" not in repository:
            problems.append(f"repositories[{index}].suites: is missing")
        if names.count(repository["name"]) > 1:
            problems.append(f"repositories[{index}].name: {repository['name']} is there twice")
    owners: dict[str, str] = {}
    for operation in OPERATIONS:
        for name in packages(profile, operation):
            if name in owners:
                problems.append(f"{operation}: package {name} is already in {owners[name]}")
            owners[name] = operation
    return problems


def _reasons(profile: Mapping[str, Any]) -> list[str]:
    problems = []
    for path in _FACTS:
        section: Any = profile
        *folders, name = path.split(".")
        for folder in folders:
            section = section.get(folder) if section else None
        if section and section.get(name) is None and path not in profile["unknown"]:
            problems.append(f"{path}: is null, and unknown does not say why")
    return problems


def packages(profile: Mapping[str, Any], operation: str) -> dict[str, str | None]:
    """Packages of an operation and their versions; those of Fabric Manager are the driver's. None: any version."""
    sections = {
        "kernel": (profile["kernel"], profile["kernel"]["headers"]),
        "driver": (profile["driver"], profile["fabric_manager"]),
    }.get(operation, (profile[operation],))
    return {name: version for section in sections if section for name, version in section["packages"].items()}


def operations_of(profile: Mapping[str, Any]) -> dict[str, str]:
    """The operation of each package that a profile names."""
    return {name: operation for operation in OPERATIONS for name in packages(profile, operation)}


def for_kernel(profile: Mapping[str, Any], release: str) -> dict[str, Any]:
    """The profile with `release` (``uname -r``) wherever it leaves the kernel to the host; others stay as they are."""
    resolved: dict[str, Any] = copy.deepcopy(dict(profile))
    kernel = resolved["kernel"]
    if kernel["release"] is None:
        kernel["release"] = release
    for section in (kernel, kernel["headers"]):
        if not section:
            continue
        if section["release"] is None:
            section["release"] = kernel["release"]
        section["packages"] = {
            _filled(name, section["release"]): None if version is None else _filled(version, section["release"])
            for name, version in section["packages"].items()
        }
    return resolved


def overridden(profile: Any, overrides: Any) -> Any:
    """A profile with a site's changes: mappings are joined field by field, everything else is replaced.

    A package that is mapped to ``absent`` is left out.
    """
    if not isinstance(profile, Mapping) or not isinstance(overrides, Mapping):
        return copy.deepcopy(overrides)
    joined = {
        name: overridden(profile[name], overrides[name])
        if name in profile and name in overrides
        else copy.deepcopy(overrides[name] if name in overrides else profile[name])
        for name in {**profile, **overrides}
    }
    return {name: value for name, value in joined.items() if value != "absent"}


def _filled(text: str, release: str) -> str:
    return text.replace(RELEASE, release).replace(PACKAGE_VERSION, release.rpartition(".")[0] or release)


def _plain(value: Any) -> Any:
    """The same without kinds of Ansible's own, whose tags have no place in a document."""
    if isinstance(value, Mapping):
        return {_plain(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return str(value)
    return value


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"


def _nearest_name(name: Any, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
