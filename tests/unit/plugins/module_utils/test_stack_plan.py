# SPDX-License-Identifier: GPL-3.0-or-later
"""The way to a profile: strict order, exact packages, reboots only where needed, and what comes next."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.stack_packages import OPERATIONS
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_plan import STEPS, lines, plan
from ansible_collections.ringmaster.inference.plugins.module_utils.stack_profiles import packages
from tests.support.stack import profile

KERNEL = "6.12.118+deb13-amd64"
WANTED = profile("debian13-r550")


def reached(**changes: Any) -> dict[str, Any]:
    """A host that is at the profile, with changes."""
    found = {
        "packages": {
            operation: {name: [version] for name, version in packages(WANTED, operation).items()}
            for operation in OPERATIONS
        },
        "held": {"packages": [name for operation in OPERATIONS for name in packages(WANTED, operation)]},
        "kernel": {"running": KERNEL, "installed": [{"release": KERNEL, "headers": True}]},
        "driver": {
            "loaded": {"loaded": True, "nouveau": False, "version": "550.163.01", "modules": "open"},
            "on_disk": [{"kernel": KERNEL, "version": "550.163.01", "modules": "open"}],
        },
        "rdma": {"flavour": "inbox"},
        "fabric_manager": {"version": None, "active": None},
        "hardware": {"cards": [], "nvswitches": 0},
    }
    return {**found, **changes}


def states(planned: dict[str, Any]) -> dict[str, str]:
    return {step["step"]: step["state"] for step in planned["steps"]}


def step(planned: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in planned["steps"] if each["step"] == name)


def test_host_at_the_profile_has_nothing_to_do() -> None:
    planned = plan(WANTED, reached())
    assert set(states(planned).values()) == {"done", "not_wanted"}
    assert planned["next"] is None
    assert planned["reboots"] == []
    assert lines(planned) == []


def test_steps_are_in_strict_order() -> None:
    planned = plan(WANTED, reached())
    assert (
        [each["step"] for each in planned["steps"]]
        == list(STEPS)
        == [*("kernel", "kernel_reboot", "rdma", "driver", "driver_reboot", "fabric_manager", "cuda", "nccl")]
    )
    assert [step["operation"] for step in planned["steps"] if not step["reboot"]][:3] == ["kernel", "rdma", "driver"]
    assert all(each["verify"] for each in planned["steps"] if each["state"] == "done")


def test_new_host_is_told_every_package_and_both_reboots() -> None:
    nothing = {operation: {} for operation in OPERATIONS}
    planned = plan(
        WANTED,
        reached(
            packages=nothing,
            held={"packages": []},
            kernel={"running": "6.12.90+deb13-amd64", "installed": []},
            driver={"loaded": {"loaded": False, "nouveau": True, "version": None}, "on_disk": []},
            rdma={"flavour": "none"},
        ),
    )  # fmt: skip
    assert planned["kernel"] == KERNEL
    assert planned["reboots"] == ["kernel_reboot", "driver_reboot"]
    assert planned["next"]["step"] == "kernel"
    text = lines(planned)
    assert text[0] == f"kernel: install linux-image-{KERNEL} 6.12.118-1"
    assert f"kernel_reboot: reboot (kernel 6.12.90+deb13-amd64 runs, wanted is {KERNEL})" in text
    assert "driver: install nvidia-open-kernel-dkms 550.163.01-2" in text
    for operation in OPERATIONS:
        for name, version in packages(WANTED, operation).items():
            assert f"{operation}: install {name} {version}" in text


@pytest.mark.parametrize(
    ("changes", "following", "reboots"),
    [
        ({"kernel": {"running": "6.12.1-amd64", "installed": [{"release": KERNEL, "headers": True}]}},
         "kernel_reboot", ["kernel_reboot"]),
        ({"kernel": {"running": KERNEL, "installed": [{"release": KERNEL, "headers": False}]}}, "kernel", []),
        ({"kernel": {"running": KERNEL, "installed": []}}, "kernel", []),
        ({"rdma": {"flavour": "mlnx_ofed"}}, "rdma", []),
        ({"driver": {"loaded": {"loaded": True, "version": "550.163.01", "modules": "open"}, "on_disk": []}},
         "driver", []),
    ],
)  # fmt: skip
def test_run_that_was_cut_goes_on_where_it_was(changes: dict[str, Any], following: str, reboots: list[str]) -> None:
    planned = plan(WANTED, reached(**changes))
    assert planned["next"]["step"] == following
    assert planned["reboots"] == reboots


@pytest.mark.parametrize(
    ("loaded", "state", "required"),
    [
        ({"loaded": True, "version": "550.163.01", "modules": "open"}, "done", False),
        ({"loaded": True, "version": "535.309.01", "modules": "open"}, "due", True),
        ({"loaded": True, "version": "550.163.01", "modules": "proprietary"}, "due", True),
        ({"loaded": False, "nouveau": False}, "due", False),
        ({"loaded": False, "nouveau": True}, "due", True),
        ({"loaded": None, "unknown": {"loaded": "no /sys"}}, "unknown", False),
    ],
)
def test_reboot_after_the_driver_only_if_needed(loaded: dict[str, Any], state: str, required: bool) -> None:
    on_disk = [{"kernel": KERNEL, "version": "550.163.01", "modules": "open"}]
    found = step(plan(WANTED, reached(driver={"loaded": loaded, "on_disk": on_disk})), "driver_reboot")
    assert (found["state"], found["required"]) == (state, required)


def test_changed_packages_make_the_reboot_due_beforehand() -> None:
    found = reached()
    found["packages"]["driver"]["nvidia-smi"] = ["550.54.15-1"]
    found["packages"]["kernel"][f"linux-image-{KERNEL}"] = ["6.12.118-0"]
    planned = plan(WANTED, found)
    assert planned["reboots"] == ["kernel_reboot", "driver_reboot"]
    assert step(planned, "driver")["packages"][5] == {
        "name": "nvidia-smi",
        "installed": ["550.54.15-1"],
        "wanted": "550.163.01-2",
        "action": "upgrade",
    }
    found = reached()
    found["packages"]["kernel"][f"linux-headers-{KERNEL}"] = []
    assert plan(WANTED, found)["reboots"] == []  # headers alone change nothing that runs


def test_newer_package_is_a_downgrade() -> None:
    found = reached()
    found["packages"]["nccl"]["libnccl2"] = ["2.28.9-1+cuda13.0"]
    assert "nccl: downgrade libnccl2 2.28.9-1+cuda13.0 → 2.22.3-1-1" in lines(plan(WANTED, found))


def test_what_is_not_held_is_not_done() -> None:
    found = reached()
    found["held"]["packages"].remove("libnccl2")
    planned = plan(WANTED, found)
    assert planned["next"] == {"step": "nccl", "operation": "nccl", "why": ["libnccl2 is not held"]}
    assert lines(planned) == ["nccl: hold libnccl2"]


def test_package_that_follows_the_newest_kernel_is_held_too() -> None:
    found = reached()
    found["packages"]["kernel"].update({"linux-image-amd64": ["6.12.118-1"], "linux-compiler-gcc-14-x86": ["1"]})
    assert step(plan(WANTED, found), "kernel")["hold"] == ["linux-image-amd64"]


def test_other_kernels_beside_the_wanted_one_do_not_matter() -> None:
    enterprise, release = profile("el9-r580"), "5.14.0-503.11.1.el9_5.x86_64"
    found = reached(
        kernel={"running": release, "installed": [{"release": release, "headers": True}]},
        packages={"kernel": {"kernel-core": ["5.14.0-427.1.1.el9_4", "0:5.14.0-503.11.1.el9_5"]}},
    )
    kernel = {each["name"]: each["action"] for each in step(plan(enterprise, found), "kernel")["packages"]}
    assert kernel["kernel-core"] == "keep"
    assert kernel["kernel-devel"] == "install"


@pytest.mark.parametrize(
    ("switches", "state"), [(0, "not_wanted"), (6, "due"), (None, "unknown")], ids=["none", "some", "unknown"]
)
def test_fabric_manager_only_with_switches(switches: int | None, state: str) -> None:
    found = reached(hardware={"nvswitches": switches})
    assert states(plan(profile("ubuntu2404-r580"), found))["fabric_manager"] == state
    assert states(plan(WANTED, found))["fabric_manager"] == "not_wanted"  # the profile has none


def test_fabric_manager_that_does_not_run_is_due() -> None:
    wanted = profile("ubuntu2404-r580")
    found = reached(hardware={"nvswitches": 6}, fabric_manager={"active": False})
    found["packages"]["driver"]["nvidia-fabricmanager-580"] = ["580.159.04-1"]
    found["held"]["packages"].append("nvidia-fabricmanager-580")
    assert step(plan(wanted, found), "fabric_manager")["why"] == ["its service does not run"]


def test_what_is_not_known_stops_the_order_with_its_reason() -> None:
    planned = plan(WANTED, reached(packages=None, unknown={"packages": "dpkg-query: not found"}))
    assert planned["next"]["step"] == "kernel"
    assert "dpkg-query: not found" in planned["next"]["why"][0]
    planned = plan(WANTED, {})
    assert planned["next"]["step"] == "kernel"
    assert states(planned)["kernel_reboot"] == "unknown"
    planned = plan(WANTED, reached(held={"packages": None, "unknown": {"packages": "no list"}}))
    assert planned["next"]["why"] == ["what is held is not known: no list"]


def test_profile_without_rdma() -> None:
    wanted = profile("debian13-r550", rdma__flavour="none", rdma__packages={})
    assert states(plan(wanted, reached()))["rdma"] == "not_wanted"
