# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings: set, read back, brought back to what they were, and honest where the host has none or refuses."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer, CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.host_settings import HostSettings

CPU = "/sys/devices/system/cpu"
POLICY = "/sys/module/pcie_aspm/parameters/policy"
PORT, GPU = "0000:00:01.1", "0000:07:00.0"
HEADER = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
ALL = {
    "governor": "performance",
    "idle_states": 10,
    "aspm_policy": "performance",
    "acs": "disabled",
    "swap": "disabled",
    "sysctls.kernel.numa_balancing": 0,
}


def space(acs: int | None) -> bytes:
    """Configuration space of a root port."""
    content = bytearray(4096)
    struct.pack_into("<HHHH", content, 0, 0x1022, 0x1483, 0x0406, 0x0010)
    content[0x34] = 0x60
    struct.pack_into("<BBH", content, 0x60, 0x10, 0, 2 | 4 << 4)
    if acs is not None:
        struct.pack_into("<I", content, 0x100, 0x000D | 1 << 16)
        struct.pack_into("<HH", content, 0x104, 0x005F, acs)
    return bytes(content)


class Host(CommandRunner):
    """A tree, and swap commands that change it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commands: list[list[str]] = []
        self.swap_refused = ""
        for cpu in range(4):
            for index, latency in enumerate((0, 2, 10, 133)):
                self.write(f"{CPU}/cpu{cpu}/cpuidle/state{index}/latency", str(latency))
                self.write(f"{CPU}/cpu{cpu}/cpuidle/state{index}/disable", "0")
            self.write(f"{CPU}/cpu{cpu}/cpufreq/scaling_governor", "powersave")
            self.write(f"{CPU}/cpu{cpu}/cpufreq/scaling_available_governors", "performance powersave")
        self.write(POLICY, "[default] performance powersave")
        self.write("/proc/sys/kernel/numa_balancing", "1")
        self.write("/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456")
        self.write("/proc/swaps", HEADER + "/dev/sda3 partition 8388604 0 -2\n/dev/zram0 partition 100 0 100\n")
        for place, class_code, config in ((PORT, "0x060400", space(0x1D)), (f"{PORT}/{GPU}", "0x030200", space(None))):
            folder = f"/sys/devices/pci0000:00/{place}"
            self.write(f"{folder}/class", class_code)
            self.write(f"{folder}/current_link_width", "16")
            (root / folder.lstrip("/") / "config").write_bytes(config)
            link = root / "sys/bus/pci/devices" / Path(place).name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(f"/{folder}")

    @property
    def settings(self) -> HostSettings:
        """What is tested."""
        return HostSettings(FileTree(str(self.root)), self)

    def write(self, path: str, content: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n", encoding="utf-8")

    def text(self, path: str) -> str:
        return (self.root / path.lstrip("/")).read_text(encoding="utf-8").strip()

    def port(self) -> bytes:
        return (self.root / f"sys/devices/pci0000:00/{PORT}/config").read_bytes()

    def snapshot(self) -> dict[str, bytes]:
        return {str(file): file.read_bytes().strip() for file in sorted(self.root.rglob("*")) if file.is_file()}

    def run(self, command: Sequence[str], timeout: float = 1.0) -> Answer:
        self.commands.append(list(command))
        if self.swap_refused:
            return Answer(255, complaint=self.swap_refused)
        lines = self.text("/proc/swaps").splitlines()[1:]
        if command[0] == "swapoff":
            lines = [line for line in lines if line.split()[0] != command[1]]
        else:
            priority = command[2] if command[1] == "--priority" else "-3"
            lines.append(f"{command[-1]} partition 8388604 0 {priority}")
        self.write("/proc/swaps", HEADER + "\n".join(lines))
        return Answer(0)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_everything_is_set_once_and_brought_back(host: Host) -> None:
    before = host.snapshot()
    first = host.settings.apply(ALL)
    assert first.changed
    assert first.unavailable == {}
    assert first.before == {
        "governor": {"powersave": "0-3"},
        "idle_states": {"state0": "", "state1": "", "state2": "", "state3": ""},
        "aspm_policy": "default",
        "acs": {PORT: "0x001d"},
        "swap": {"/dev/sda3": -2, "/dev/zram0": 100},
        "sysctls.kernel.numa_balancing": "1",
    }
    assert first.after == {
        "governor": {"performance": "0-3"},
        "idle_states": {"state0": "", "state1": "", "state2": "0-3", "state3": "0-3"},
        "aspm_policy": "performance",
        "acs": {PORT: "0x0000"},
        "swap": {},
        "sysctls.kernel.numa_balancing": "0",
    }
    assert host.text(f"{CPU}/cpu3/cpufreq/scaling_governor") == "performance"
    written = (host.root / f"{CPU}/cpu3/cpufreq/scaling_governor".lstrip("/")).read_text(encoding="utf-8")
    assert written == "performance\n", "with a line's end, as echo writes it"
    assert host.text(f"{CPU}/cpu3/cpuidle/state3/disable") == "1"
    assert host.text(f"{CPU}/cpu3/cpuidle/state1/disable") == "0"
    assert host.port() == space(0)
    assert host.commands == [["swapoff", "/dev/sda3"], ["swapoff", "/dev/zram0"]]

    second = host.settings.apply(ALL)
    assert not second.changed
    assert second.before == second.after == first.after
    assert second.boot == first.boot

    # As it is kept meanwhile, and as Ansible hands it back.
    kept = json.loads(json.dumps(first.before))
    restored = host.settings.restore(kept)
    assert restored.changed
    assert restored.unavailable == {}
    assert host.commands[2:] == [["swapon", "/dev/sda3"], ["swapon", "--priority", "100", "/dev/zram0"]]
    assert not host.settings.restore(kept).changed
    host.write(POLICY, "[default] performance powersave")
    host.write("/proc/swaps", HEADER + "/dev/sda3 partition 8388604 0 -2\n/dev/zram0 partition 100 0 100\n")
    assert host.snapshot() == before


def test_check_mode_says_the_same_and_changes_nothing(host: Host) -> None:
    before = host.snapshot()
    would = host.settings.apply(ALL, write=False)
    assert host.snapshot() == before
    assert host.commands == []
    done = host.settings.apply(ALL)
    assert (would.changed, would.before, would.after, would.boot) == (done.changed, done.before, done.after, done.boot)
    would = host.settings.restore(done.before, write=False)
    assert would.changed
    assert would.after == done.before


def test_what_is_written_again_at_a_boot(host: Host) -> None:
    boot = host.settings.apply(ALL).boot
    assert boot.writes == [
        {"path": f"{CPU}/cpu[0-9]*/cpufreq/scaling_governor", "value": "performance"},
        {"path": f"{CPU}/cpu[0-9]*/cpuidle/state2/disable", "value": "1"},
        {"path": f"{CPU}/cpu[0-9]*/cpuidle/state3/disable", "value": "1"},
        {"path": POLICY, "value": "performance"},
        {"path": "/proc/sys/kernel/numa_balancing", "value": "0"},
    ]
    assert boot.acs == [PORT]
    assert boot.swap is True


def test_cpus_of_two_kinds(host: Host) -> None:
    """On hybrid processors the same number is another state on another CPU."""
    for cpu in (2, 3):
        host.write(f"{CPU}/cpu{cpu}/cpuidle/state2/latency", "5")
    outcome = host.settings.apply({"idle_states": 10})
    assert outcome.after["idle_states"] == {"state0": "", "state1": "", "state2": "0-1", "state3": "0-3"}
    assert [write["path"] for write in outcome.boot.writes] == [
        f"{CPU}/cpu0/cpuidle/state2/disable",
        f"{CPU}/cpu1/cpuidle/state2/disable",
        f"{CPU}/cpu[0-9]*/cpuidle/state3/disable",
    ]


@pytest.mark.parametrize(("limit", "disabled"), [(1, "123"), (2, "123"), (3, "23"), (133, "3"), (134, "")])
def test_sleep_states_by_their_latency(host: Host, limit: int, disabled: str) -> None:
    host.write(f"{CPU}/cpu0/cpuidle/state0/latency", "1000")
    host.settings.apply({"idle_states": limit})
    found = "".join(str(index) for index in range(4) if host.text(f"{CPU}/cpu0/cpuidle/state{index}/disable") == "1")
    assert found == disabled


def test_a_state_whose_latency_is_not_known_is_left_alone(host: Host) -> None:
    host.write(f"{CPU}/cpu0/cpuidle/state3/latency", "N/A")
    assert host.settings.apply({"idle_states": 10}).after["idle_states"]["state3"] == "1-3"


def test_a_host_that_has_none_of_it(tmp_path: Path) -> None:
    settings = HostSettings(FileTree(str(tmp_path)), CommandRunner())
    outcome = settings.apply(ALL)
    assert not outcome.changed
    assert outcome.before == outcome.after == dict.fromkeys(ALL)
    assert outcome.unavailable.keys() == ALL.keys()
    assert all(outcome.unavailable.values())
    assert outcome.boot.writes == []
    assert not settings.restore(outcome.before).changed


MOUNTS = """21 1 0:5 / / rw - overlay overlay rw
22 21 0:20 / /proc rw,nosuid - proc proc rw
23 21 0:21 / /sys ro,nosuid master:2 - sysfs sysfs rw
"""


def test_a_container_changes_nothing_of_the_machine(host: Host) -> None:
    host.write("/run/systemd/container", "podman")
    host.write("/proc/self/mountinfo", MOUNTS)
    before = host.snapshot()
    outcome = host.settings.apply(ALL)
    assert host.snapshot() == before
    assert host.commands == []
    assert not outcome.changed
    assert outcome.before["governor"] == {"powersave": "0-3"}, "it can be read nevertheless"
    assert outcome.unavailable.keys() == ALL.keys()
    assert set(outcome.unavailable.values()) == {"the kernel is the machine's, not this container's (podman)"}
    assert (outcome.boot.writes, outcome.boot.acs, outcome.boot.swap) == ([], [], False)
    assert host.settings.restore(outcome.before).unavailable == {}, "it is as it was"
    assert set(host.settings.restore({"aspm_policy": "powersave"}).unavailable) == {"aspm_policy"}


def test_a_container_has_a_network_of_its_own(host: Host) -> None:
    host.write("/run/systemd/container", "podman")
    host.write("/proc/self/mountinfo", MOUNTS)
    assert host.settings.apply({"sysctls.net.ipv4.tcp_rmem": "4096 131072 16777216"}).unavailable == {}
    assert host.text("/proc/sys/net/ipv4/tcp_rmem") == "4096 131072 16777216"


def test_a_container_may_have_files_of_its_own_in_place_of_the_machines(host: Host) -> None:
    host.write("/run/systemd/container", "podman")
    host.write("/proc/self/mountinfo", MOUNTS + "24 21 0:30 / /sys rw - tmpfs own rw")
    outcome = host.settings.apply({"governor": "performance", "swap": "disabled"})
    assert outcome.after["governor"] == {"performance": "0-3"}
    assert set(outcome.unavailable) == {"swap"}


def test_a_governor_that_the_driver_does_not_offer(host: Host) -> None:
    outcome = host.settings.apply({"governor": "schedutil"})
    assert not outcome.changed
    assert "offers performance, powersave, and not schedutil" in outcome.unavailable["governor"]


def refuse(monkeypatch: pytest.MonkeyPatch, fragment: str, error: OSError | None) -> None:
    """The kernel refuses to write files whose path holds `fragment`; without an error it only seems to write."""
    written = FileTree.write

    def write(self: FileTree, path: str, content: str | bytes, offset: int | None = None) -> None:
        if fragment not in path:
            written(self, path, content, offset)
        elif error:
            raise error

    monkeypatch.setattr(FileTree, "write", write)


def test_what_the_kernel_refuses_is_told_and_the_rest_is_set(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "pcie_aspm", OSError(errno.EPERM, os.strerror(errno.EPERM)))
    outcome = host.settings.apply(ALL)
    assert outcome.unavailable == {"aspm_policy": f"{POLICY}: Operation not permitted"}
    assert outcome.after["aspm_policy"] == "default"
    assert outcome.after["governor"] == {"performance": "0-3"}
    assert POLICY not in [write["path"] for write in outcome.boot.writes]


def test_a_write_that_only_seems_to_work_is_noticed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under kernel lockdown a write to a configuration space can report success."""
    host.write("/sys/kernel/security/lockdown", "none [integrity] confidentiality")
    refuse(monkeypatch, "config", None)
    outcome = host.settings.apply({"acs": "disabled"})
    assert not outcome.changed
    assert outcome.after["acs"] == {PORT: "0x001d"}
    assert "0x0000 was written, 0x001d is read back (kernel lockdown: integrity)" in outcome.unavailable["acs"]
    assert outcome.boot.acs == []


def test_a_cpu_that_refuses_does_not_hide_what_was_changed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "cpu2/cpufreq", OSError(errno.EBUSY, os.strerror(errno.EBUSY)))
    outcome = host.settings.apply({"governor": "performance"})
    assert outcome.changed
    assert outcome.after["governor"] == {"performance": "0-1,3", "powersave": "2"}
    assert "cpu2" in outcome.unavailable["governor"]


def test_read_only_files_are_told_before_anything_is_written(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileTree, "writable", lambda _self, path: "cpufreq" not in path)
    for write in (False, True):
        outcome = host.settings.apply({"governor": "performance"}, write)
        assert not outcome.changed
        assert "may not be written here" in outcome.unavailable["governor"]
    host.write(f"{CPU}/cpu0/cpufreq/scaling_governor", "powersave")
    assert host.settings.apply({"governor": "powersave"}).unavailable == {}, "what is right already needs no write"


def test_swap_that_does_not_fit_into_memory(host: Host) -> None:
    host.swap_refused = "swapoff: /dev/sda3: swapoff failed: Cannot allocate memory"
    outcome = host.settings.apply({"swap": "disabled"})
    assert not outcome.changed
    assert "Cannot allocate memory" in outcome.unavailable["swap"]


def test_what_went_since_is_not_brought_back(host: Host) -> None:
    outcome = host.settings.restore(
        {
            "governor": {"performance": "0-7"},
            "idle_states": {"state2": "0,7", "state9": "0"},
            "acs": {PORT: "0x001d", "0000:99:00.0": "0x001d"},
            "aspm_policy": None,
        }
    )
    assert outcome.unavailable == {}
    assert outcome.after == {
        "governor": {"performance": "0-3"},
        "idle_states": {"state0": "", "state1": "", "state2": "0", "state3": ""},
        "acs": {PORT: "0x001d"},
    }


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("kernel.numa_balancing", "/proc/sys/kernel/numa_balancing"),
        ("net/ipv4/conf/eth0.1/rp_filter", "/proc/sys/net/ipv4/conf/eth0.1/rp_filter"),
        ("net.ipv4.conf.eth0/1.rp_filter", "/proc/sys/net/ipv4/conf/eth0.1/rp_filter"),
    ],
)
def test_names_of_kernel_parameters(host: Host, name: str, path: str) -> None:
    host.write(path, "1")
    host.settings.apply({f"sysctls.{name}": 0})
    assert host.text(path) == "0"


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", "net/../../../etc/passwd", "/etc/passwd", "kernel..x", "a b", "a\n"]
)
def test_names_that_lead_elsewhere_are_refused(host: Host, name: str) -> None:
    with pytest.raises(ValueError, match="kernel parameter"):
        host.settings.apply({f"sysctls.{name}": "x"})


@pytest.mark.parametrize(
    "before",
    [
        {"governor": "performance"},
        {"governor": {"performance": 3}},
        {"governor": {"performance": "x"}},
        {"idle_states": {"state2": None}},
        {"aspm_policy": 1},
        {"acs": {PORT: "0xfffff"}},
        {"acs": {PORT: 29}},
        {"swap": {"/dev/sda3": "high"}},
        {"swap": ["/dev/sda3"]},
        {"sysctls.kernel.numa_balancing": 1},
        {"nothing": 1},
    ],
)
def test_documents_that_no_run_gave_are_refused(host: Host, before: dict[str, Any]) -> None:
    snapshot = host.snapshot()
    with pytest.raises(ValueError, match=r"."):
        host.settings.restore(before)
    assert host.snapshot() == snapshot


@pytest.fixture(scope="module")
def shared_host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """For tests that write all that they read."""
    return Host(tmp_path_factory.mktemp("host"))


cpus = st.integers(0, 3)


@settings(max_examples=30)  # each reads and writes some hundred files
@given(
    st.dictionaries(cpus, st.sampled_from(["performance", "powersave"])),
    st.dictionaries(st.tuples(cpus, cpus), st.sampled_from(["0", "1"])),
    st.integers(1, 200),
)
def test_any_state_comes_back_exactly(
    shared_host: Host, governors: dict[int, str], switches: dict[tuple[int, int], str], limit: int
) -> None:
    for cpu, name in governors.items():
        shared_host.write(f"{CPU}/cpu{cpu}/cpufreq/scaling_governor", name)
    for (cpu, state), value in switches.items():
        shared_host.write(f"{CPU}/cpu{cpu}/cpuidle/state{state}/disable", value)
    before = shared_host.snapshot()
    outcome = shared_host.settings.apply({"governor": "performance", "idle_states": limit})
    assert not shared_host.settings.apply({"governor": "performance", "idle_states": limit}).changed
    shared_host.settings.restore(json.loads(json.dumps(outcome.before)))
    assert shared_host.snapshot() == before
