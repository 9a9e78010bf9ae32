# SPDX-License-Identifier: GPL-3.0-or-later
"""What keeps a port's settings over reboots: one unit, and for the MTU whatever manages the interface."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import Answer
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma import Port, RdmaReader
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_persistence import (
    Managed,
    Persistence,
    device_unit,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.rdma_qos import Command, RdmaQosError, Write
from tests.support.rdma_host import RdmaHost

NETDEV = "ens1np0"
UNIT = f"ringmaster-rdma-qos@{NETDEV}.service"
UNITS = "/etc/systemd/system"
FOLDER = "/sys/kernel/config/rdma_cm/mlx5_0"
ACTIONS = [
    Command(["dcb", "pfc", "set", "dev", NETDEV, "prio-pfc", "all:off", "3:on"]),
    Write(f"{FOLDER}/ports/1/default_roce_tos", "106", FOLDER),
]


@pytest.fixture
def host(tmp_path: Path) -> RdmaHost:
    return RdmaHost(tmp_path)


def keeper(host: RdmaHost) -> Persistence:
    """What keeps the first port's settings."""
    return Persistence(host.tree, host, NETDEV)


def port(host: RdmaHost) -> Port:
    """The first port."""
    return RdmaReader(host.tree, host).all_ports()[0]


def wanted(host: RdmaHost, mtu: Managed | None = None) -> dict[str, str]:
    """Files that keep some settings."""
    return keeper(host).wanted(port(host), ACTIONS, mtu)


def systemctl(host: RdmaHost) -> list[str]:
    """Verbs that were asked of systemd."""
    return [command[1] for command in host.commands if command[0] == "systemctl"]


def parsed(text: str) -> configparser.RawConfigParser:
    """A unit's sections; of keys that come more than once the last."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign] # keys of units have capitals
    parser.read_string(text)
    return parser


def test_unit_is_a_list_of_the_commands(host: RdmaHost) -> None:
    text = wanted(host)[f"{UNITS}/{UNIT}"]
    assert [line for line in text.splitlines() if line.startswith("ExecStart=")] == [
        "ExecStart=/usr/sbin/dcb pfc set dev ens1np0 prio-pfc all:off 3:on",
        f'ExecStart=/bin/sh -c "mkdir -p {FOLDER} && echo 106 > {FOLDER}/ports/1/default_roce_tos"',
    ]
    assert "/sys/class/net/ens1np0 ] && [ -e /sys/class/infiniband/mlx5_0 ]" in text


def test_unit_comes_again_with_the_interface_but_needs_no_udev(host: RdmaHost) -> None:
    text = wanted(host)[f"{UNITS}/{UNIT}"]
    sections = parsed(text)
    assert sections["Service"]["Type"] == "oneshot"
    assert "RemainAfterExit" not in sections["Service"], "or the interface that comes back would not start it"
    assert not {"BindsTo", "Requires", "Requisite"} & set(sections["Unit"])
    assert [line for line in text.splitlines() if line.startswith("WantedBy=")] == [
        "WantedBy=multi-user.target",
        "WantedBy=sys-subsystem-net-devices-ens1np0.device",
    ]
    assert sections["Service"]["NoNewPrivileges"] == "yes"
    assert sections["Service"]["CapabilityBoundingSet"] == "CAP_NET_ADMIN"


def test_name_of_the_device_unit_is_escaped_as_systemd_does() -> None:
    assert device_unit("ens1f0np0.100") == "sys-subsystem-net-devices-ens1f0np0.100.device"
    assert device_unit("eth-a_b") == r"sys-subsystem-net-devices-eth\x2da_b.device"


def test_kept_once_and_then_complete(host: RdmaHost) -> None:
    files = wanted(host)
    assert not keeper(host).complete(files)
    keeper(host).keep(files)
    assert host.read(f"{UNITS}/{UNIT}") == files[f"{UNITS}/{UNIT}"]
    assert systemctl(host) == ["daemon-reload", "reenable", "start"]
    assert keeper(host).complete(files)
    assert not list(Path(host.root).rglob(".ringmaster-*"))


def test_unit_that_somebody_changed_or_disabled_is_not_complete(host: RdmaHost) -> None:
    files = wanted(host)
    keeper(host).keep(files)
    host.run(["systemctl", "disable", UNIT])
    assert not keeper(host).complete(files)
    keeper(host).keep(files)
    host.write(f"{UNITS}/{UNIT}", "[Unit]\n")
    assert not keeper(host).complete(files)


def test_nothing_to_keep_removes_what_there_was(host: RdmaHost, tmp_path: Path) -> None:
    files = wanted(
        host, Managed("networkd", f"/etc/systemd/network/10-a.network.d/90-ringmaster-mtu-{NETDEV}.conf", "x")
    )
    keeper(host).keep(files)
    assert keeper(host).present() == files
    keeper(host).keep({})
    assert keeper(host).complete({})
    assert [path for path in (tmp_path / "etc").rglob("*") if path.is_file() or path.is_symlink()] == []
    assert not (tmp_path / "etc/systemd/network/10-a.network.d").exists()
    assert systemctl(host)[-2:] == ["disable", "daemon-reload"]


def test_drop_ins_of_others_stay(host: RdmaHost) -> None:
    others = "/etc/systemd/network/10-a.network.d/50-other.conf"
    host.write(others, "[Link]\n")
    keeper(host).keep({f"/etc/systemd/network/10-a.network.d/90-ringmaster-mtu-{NETDEV}.conf": "x"})
    keeper(host).keep({})
    assert host.read(others) == "[Link]\n"


def test_other_interfaces_are_left_alone(tmp_path: Path) -> None:
    host = RdmaHost(tmp_path, ports=2)
    keeper(host).keep(wanted(host))
    other = Persistence(host.tree, host, "ens2np0")
    assert other.present() == {}
    assert other.complete({})


def test_systemd_that_refuses_is_told_with_its_words(host: RdmaHost) -> None:
    host.broken = lambda command: Answer(1, complaint="Job failed.\nSee journal") if "start" in command else None
    with pytest.raises(RdmaQosError, match=r"systemctl start .*Found Job failed\. To do: .*journalctl --unit"):
        keeper(host).keep(wanted(host))


def test_host_without_systemd(host: RdmaHost) -> None:
    host.tools.discard("systemctl")
    with pytest.raises(RdmaQosError, match="persistent=false"):
        keeper(host).keep(wanted(host))


def test_folder_that_can_not_be_written(host: RdmaHost) -> None:
    host.write("/etc/systemd", "a file")
    with pytest.raises(RdmaQosError, match="to write /etc/systemd/system"):
        keeper(host).keep(wanted(host))


# Who keeps the MTU


def test_nobody_manages_the_interface(host: RdmaHost) -> None:
    assert keeper(host).mtu_keeper(9000) == Managed("unit")


def networkd(host: RdmaHost, network_file: str, content: str) -> None:
    """systemd-networkd manages the interface by that file."""
    host.write("/run/systemd/netif/links/4", "# This is private data. Do not parse.\n")
    host.write(network_file, content)
    text = (
        f"\u25cf 4: {NETDEV}\n                   Link File: n/a\n                Network File: {network_file}\n"
        "                       State: routable (configured)\n"
    )
    host.broken = lambda command: Answer(0, text) if command[0] == "networkctl" else None


def test_networkd_with_a_file_for_this_interface(host: RdmaHost) -> None:
    networkd(host, "/run/systemd/network/10-netplan-a.network", "# x\n[Match]\nName=ens1np0\n\n[Network]\nName=other\n")
    managed = keeper(host).mtu_keeper(9000)
    assert managed.manager == "networkd"
    assert managed.path == "/etc/systemd/network/10-netplan-a.network.d/90-ringmaster-mtu-ens1np0.conf"
    assert parsed(managed.content)["Link"]["MTUBytes"] == "9000"


@pytest.mark.parametrize("match", ["Name=en*", "Name=ens1np0 ens2np0", "Name=ens1np0\nName=ens2np0", "Type=ether", ""])
def test_networkd_with_a_file_for_many_leaves_it_to_the_unit(host: RdmaHost, match: str) -> None:
    networkd(host, "/etc/systemd/network/all.network", f"[Match]\n{match}\n[Network]\nDHCP=yes\n")
    assert keeper(host).mtu_keeper(9000) == Managed("unit")


def test_networkd_that_leaves_the_interface_alone(host: RdmaHost) -> None:
    networkd(host, "n/a", "")
    assert keeper(host).mtu_keeper(9000) == Managed("unit")


def network_manager(host: RdmaHost, mtu: str, managed: str = "yes") -> None:
    """NetworkManager knows the interface, with a profile of that MTU."""
    host.write("/run/NetworkManager/devices/4", "[device]\n")
    answers = {"device": f"{managed}\n0815\n", "connection": f"{mtu}\n", "general": ""}
    host.broken = lambda command: (
        Answer(0, next(text for word, text in answers.items() if word in command)) if command[0] == "nmcli" else None
    )


@pytest.mark.parametrize("mtu", ["auto", "0", "9000", ""])
def test_network_manager_gets_a_section_of_its_own(host: RdmaHost, mtu: str) -> None:
    network_manager(host, mtu)
    managed = keeper(host).mtu_keeper(9000)
    assert managed.manager == "NetworkManager"
    assert managed.path == "/etc/NetworkManager/conf.d/90-ringmaster-mtu-ens1np0.conf"
    section = parsed(managed.content)["connection-ringmaster-ens1np0"]
    assert dict(section) == {"match-device": "interface-name:ens1np0", "ethernet.mtu": "9000"}
    keeper(host).keep({managed.path: managed.content})
    assert ["nmcli", "general", "reload", "conf"] in host.commands
    assert systemctl(host) == [], "there is no unit to speak of"


def test_profile_with_another_mtu_would_win_and_is_refused(host: RdmaHost) -> None:
    network_manager(host, "1500")
    with pytest.raises(RdmaQosError, match=r"nmcli connection modify 0815 802-3-ethernet\.mtu 9000"):
        keeper(host).mtu_keeper(9000)


def test_interface_that_network_manager_leaves_alone(host: RdmaHost) -> None:
    network_manager(host, "1500", managed="no")
    assert keeper(host).mtu_keeper(9000) == Managed("unit")


def test_managers_that_do_not_run_are_not_asked(host: RdmaHost) -> None:
    keeper(host).mtu_keeper(9000)
    assert host.commands == []


def test_stanza_of_ifupdown_with_another_mtu_is_refused(host: RdmaHost) -> None:
    stanzas = "auto lo\niface lo inet loopback\n\niface ens1np0 inet static\n    address 10.0.0.1/24\n    mtu {}\n"
    host.write("/etc/network/interfaces.d/ports", stanzas.format(1500) + "iface ens2np0 inet static\n mtu 4\n")
    with pytest.raises(RdmaQosError, match=r"interfaces\.d/ports .*Found mtu 1500"):
        keeper(host).mtu_keeper(9000)
    host.write("/etc/network/interfaces.d/ports", stanzas.format(9000))
    assert keeper(host).mtu_keeper(9000) == Managed("unit")


@pytest.mark.parametrize("output", ["", "yes", "\xff\n=\n[Match", "Network File: \n", "Network File: /nowhere\n"])
def test_junk_of_a_manager_leaves_the_mtu_to_the_unit(host: RdmaHost, output: str) -> None:
    for path in ("/run/systemd/netif/links/4", "/run/NetworkManager/devices/4"):
        host.write(path, "")
    host.write("/etc/network/interfaces", b"\xff\x00\niface\nmtu")
    host.broken = lambda _command: Answer(0, output)
    assert keeper(host).mtu_keeper(9000) == Managed("unit")
