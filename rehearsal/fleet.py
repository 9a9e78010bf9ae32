# SPDX-License-Identifier: GPL-3.0-or-later
"""The fleet: one container with systemd for each host of the inventory, on a network of its own, reached over SSH."""

from __future__ import annotations

import ipaddress
import json
import platform
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rehearsal import images, inventory, preprocessor, standin_tokenizer
from rehearsal.checkout import MACHINE_LOCK, Checkout, RehearsalError, locked, read_json, say, warn, write_atomically
from rehearsal.hardware import installation, library, profiles
from rehearsal.podman import execute, podman, podman_json

LABEL = "ringmaster.rehearsal"
HOST_LABEL = "ringmaster.host"
IMAGE_LABEL = "ringmaster.image"
# A /22 holds a fleet of a thousand hosts; the first ten addresses stay free for the machine and for virtual addresses.
PREFIX_LENGTH = 22
SUBNETS = ipaddress.IPv4Network("10.128.0.0/9")
FIRST_HOST = 11
# On a real host systemd finds, or makes, a root that passes mounts on to services; a container's does not, and a
# service would not see the credentials that are mounted for it.
INIT = "mount --make-rshared / && exec /sbin/init"
START_SECONDS = 60
SECRETS = ("vllm_api_key", "edge_api_key", "scheduler_api_token")
# Ports of simulated adapters are interfaces on networks of their own, one a rail: what one host sends there arrives at
# the others, and frames up to this size pass.
RAIL_MTU = 9000
# Each systemd on a machine takes a few of these, and Linux allows 128 to all of root's processes: three fleets' worth.
INOTIFY_INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
ENOUGH_INOTIFY_INSTANCES = 1024
# The machine's process may be denied CAP_SYS_RESOURCE: a limit over its own could not be set then.
LIMITS = ("--ulimit", "nofile=10000:10000", "--ulimit", "nproc=4000:4000")
# A real host has half of its memory for it, and a real engine wants 160 MB; nothing is taken that is not used.
SHARED_MEMORY = ("--shm-size", "1g")


def up(checkout: Checkout) -> dict[str, str]:
    """Start the fleet, or repair it: after this each host of the inventory answers over SSH. Gives host → address."""
    site = inventory.read(checkout)
    wanted, machines = site.images(), _machines(site)
    _ensure_inotify()
    _ensure_key(checkout)
    _ensure_secrets(checkout)
    network = _ensure_network(checkout)
    rails = [_ensure_network(checkout, rail) for rail in _rails(machines)]
    addresses = _allocate(checkout, network, wanted)
    present = _containers(checkout)
    for host in sorted(set(present) - set(wanted)):
        say(f"removing {host}, which the inventory no longer lists")
        podman("rm", "--force", "--volumes", checkout.container(host))
    with images.ensured(wanted.values()) as references, ThreadPoolExecutor(max_workers=4) as pool:

        def start(host: str) -> None:
            machine = _Hardware(checkout, machines[host], host, addresses[host], rails) if host in machines else None
            mounts = _mounts(checkout, host, site.variables[host])
            _start(checkout, host, references[wanted[host]], addresses[host], present.get(host), machine, mounts)

        list(pool.map(start, wanted))
    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(lambda host: _wait_for_systemd(checkout, host), wanted))
        list(pool.map(lambda host: _authorize(checkout, host), wanted))
    _ensure_way_out(checkout, network, wanted)
    _write_known_hosts(checkout, addresses)
    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(lambda host: _wait_for_ssh(checkout, host, addresses[host]), wanted))
    # Last: its first build takes minutes, and is under way while images are made and hosts start.
    _ensure_preprocessor(checkout, site)
    return addresses


def down(checkout: Checkout, *, keep_images: bool = False) -> None:
    """Remove all that a rehearsal made: containers, network, keys, secrets, state, images that nothing else uses."""
    removed = 0
    for host in _containers(checkout):
        podman("rm", "--force", "--volumes", "--time", "0", checkout.container(host))
        removed += 1
    for network in _networks(checkout):
        podman("network", "rm", "--force", network["name"])
    gone = [] if keep_images else images.remove_unused()
    shutil.rmtree(checkout.state, ignore_errors=True)
    say(f"removed {removed} hosts, their network, keys and state, and {len(gone)} images that nothing else uses")


def ssh_command(checkout: Checkout, address: str) -> list[str]:
    """The ssh command line that reaches a host of the fleet."""
    options = [
        "BatchMode=yes",
        "ConnectTimeout=5",
        "IdentitiesOnly=yes",
        "StrictHostKeyChecking=yes",
        f"UserKnownHostsFile={checkout.known_hosts}",
    ]
    flags = [flag for option in options for flag in ("-o", option)]
    return ["ssh", *flags, "-i", str(checkout.private_key), f"deploy@{address}"]


def addresses(checkout: Checkout) -> dict[str, str]:
    """Host → address of a fleet that was started. Raises RehearsalError when none was."""
    state = read_json(checkout.state / "state.json")
    if not state:
        raise RehearsalError("expected a running fleet, found none; to do: make rehearse")
    hosts: dict[str, str] = state["hosts"]
    return hosts


def address_of(checkout: Checkout, host: str) -> str:
    """Address of one host of a fleet that was started. Raises RehearsalError when it has no such host."""
    known = addresses(checkout)
    if host not in known:
        raise RehearsalError(f"expected a host of the fleet ({', '.join(known)}), found {host!r}")
    return known[host]


def _ensure_inotify() -> None:
    """Allow enough inotify instances; without, units of the last hosts fail with "Too many open files"."""
    found = int(INOTIFY_INSTANCES.read_text())
    if found >= ENOUGH_INOTIFY_INSTANCES:
        return
    try:
        INOTIFY_INSTANCES.write_text(f"{ENOUGH_INOTIFY_INSTANCES}\n")
    except OSError as error:
        warn(f"{INOTIFY_INSTANCES} is {found} and can't be raised ({error}): more than two fleets at once may fail")
        return
    say(f"raised fs.inotify.max_user_instances from {found} to {ENOUGH_INOTIFY_INSTANCES}, until the next boot")


def _ensure_key(checkout: Checkout) -> None:
    if not checkout.private_key.exists():
        checkout.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", checkout.network, "-f", str(checkout.private_key)],
            check=True,
        )


def _ensure_secrets(checkout: Checkout) -> None:
    for name in SECRETS:
        path = checkout.state / "secrets" / name
        if not path.exists() or not path.read_text().strip():
            write_atomically(path, secrets.token_urlsafe(32))


def _ensure_preprocessor(checkout: Checkout, site: inventory.Inventory) -> None:
    """Where the inventory has preprocessors run: their program, and the tokenizer of the stand-in engines for them."""
    hosts = [site.variables[host] for host in site.groups.get("preprocessors", [])]
    if not any(values.get("preprocessor_binaries") for values in hosts):
        return
    architecture = platform.machine()
    program = checkout.state / "preprocessor" / architecture
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(preprocessor.ensured(architecture), program)
    standin_tokenizer.write(checkout.state / "tokenizer")


def _networks(checkout: Checkout) -> list[dict[str, Any]]:
    """The fleet's network and its rails, as far as they are there."""
    own = re.compile(rf"{checkout.network}(-rail[0-9]+)?")
    return [network for network in podman_json("network", "ls") if own.fullmatch(network["name"])]


def _ensure_network(checkout: Checkout, rail: int | None = None) -> ipaddress.IPv4Network:
    """The fleet's network, or one of its rails, which leads nowhere else."""
    name = checkout.network if rail is None else f"{checkout.network}-rail{rail}"
    # Two checkouts that choose at the same moment would choose the same free addresses.
    with locked(MACHINE_LOCK, "another checkout that creates its network"):
        for found in _networks(checkout):
            if found["name"] == name:
                return ipaddress.IPv4Network(found["subnets"][0]["subnet"])
        subnet = _free_subnet(checkout)
        say(f"creating the network {name} with {subnet}")
        options = [] if rail is None else ["--internal", "--opt", f"mtu={RAIL_MTU}"]
        # No resolver of podman's own: hosts use the machine's, and one process less can die.
        podman("network", "create", "--disable-dns", "--subnet", str(subnet), *options, name)
        return subnet


def _machines(site: inventory.Inventory) -> dict[str, str]:
    """Host → profile of its simulated hardware, for those that have some. Raises RehearsalError for an unknown one."""
    machines = {
        host: str(values["rehearsal_hardware"])
        for host, values in site.variables.items()
        if values.get("rehearsal_hardware")
    }
    for host, profile in machines.items():
        if profile not in profiles.PROFILES:
            raise RehearsalError(
                f"expected rehearsal_hardware of {host} to be one of {', '.join(profiles.PROFILES)}, "
                f"found {profile!r}; to do: correct the inventory"
            )
    return machines


def _mounts(checkout: Checkout, host: str, variables: Mapping[str, Any]) -> list[str]:
    """Options of `podman create` for the folders of the checkout that a host sees, read-only, at places of its own."""
    options = []
    for source, place in (variables.get("rehearsal_mounts") or {}).items():
        folder = checkout.root / source
        if not folder.is_dir():
            raise RehearsalError(
                f"expected the folder {folder} for {host}, found none; to do: make rehearse ENGINE=vllm, which makes it"
            )
        options += ["--volume", f"{folder}:{place}:ro"]
    return options


def _rails(machines: Mapping[str, str]) -> range:
    return range(max((len(profiles.PROFILES[name].of_kind("nic")) for name in machines.values()), default=0))


class _Hardware:
    """Simulated hardware of one host: what podman has to be told, and the archive that the host is given."""

    def __init__(
        self, checkout: Checkout, profile: str, host: str, address: str, rails: Sequence[ipaddress.IPv4Network]
    ) -> None:
        self.checkout, self.profile, self.host = checkout, profile, host
        # The last digits are those of the host's address, so that people see whose they are.
        place = int(ipaddress.IPv4Address(address)) % (1 << 32 - PREFIX_LENGTH)
        self.ports = profiles.ports(profile, host)
        self.addresses = {index: str(rails[index][place]) for index in range(len(self.ports))}
        self.made_of = f"{installation.digest(profile)} {' '.join(self.addresses.values())}"

    def networks(self) -> list[str]:
        """Options of `podman create` that give the host its ports."""
        options = []
        for index, port in enumerate(self.ports):
            details = f"ip={self.addresses[index]},mac={port['mac']},interface_name={port['netdev']}"
            options += ["--network", f"{self.checkout.network}-rail{index}:{details}"]
        return options

    def install(self, container: str) -> None:
        """Unpack the hardware in a container that was not started yet. Raises RehearsalError without a compiler."""
        try:
            built = self.checkout.root / ".cache" / "rehearsal-hardware"
            content = installation.archive(self.profile, self.host, self.addresses, built)
        except library.CompilerError as error:
            raise RehearsalError(str(error)) from None
        podman("cp", "-", f"{container}:/", stdin=content)


def _free_subnet(checkout: Checkout) -> ipaddress.IPv4Network:
    subnets = [subnet["subnet"] for network in podman_json("network", "ls") for subnet in network["subnets"]]
    routes = subprocess.run(["ip", "-json", "-4", "route"], capture_output=True, text=True, check=True).stdout
    subnets += [route["dst"] for route in json.loads(routes) if route["dst"] != "default"]
    taken = [ipaddress.IPv4Network(subnet) for subnet in subnets if ":" not in subnet]
    choices = list(SUBNETS.subnets(new_prefix=PREFIX_LENGTH))
    first = int(checkout.identity, 16) % len(choices)
    for choice in choices[first:] + choices[:first]:
        if not any(choice.overlaps(other) for other in taken):
            return choice
    raise RehearsalError(
        f"expected a free /{PREFIX_LENGTH} in {SUBNETS}, found none; to do: remove podman networks that nothing uses"
    )


def _allocate(checkout: Checkout, network: ipaddress.IPv4Network, hosts: Iterable[str]) -> dict[str, str]:
    """Give every host an address, and each host that had one keeps it, whatever was added to the list since."""
    former: dict[str, str] = (read_json(checkout.state / "state.json") or {}).get("hosts", {})
    kept = {host: former[host] for host in hosts if host in former and ipaddress.IPv4Address(former[host]) in network}
    used = set(kept.values())
    free = (str(network[index]) for index in range(FIRST_HOST, network.num_addresses - 1))
    allocated = {host: kept.get(host) or next(address for address in free if address not in used) for host in hosts}
    write_atomically(checkout.state / "state.json", json.dumps({"subnet": str(network), "hosts": allocated}, indent=1))
    return allocated


def _containers(checkout: Checkout) -> dict[str, dict[str, Any]]:
    """Host → podman's description, for every container of this checkout, whatever its state."""
    listed = podman_json("ps", "--all", "--filter", f"label={LABEL}={checkout.identity}")
    return {container["Labels"][HOST_LABEL]: container for container in listed}


def _start(
    checkout: Checkout,
    host: str,
    image: str,
    address: str,
    present: dict[str, Any] | None,
    machine: _Hardware | None,
    mounts: Sequence[str],
) -> None:
    name = checkout.container(host)
    init = INIT if machine is None else f"{installation.BOOT} && {INIT}"
    made_of = " ".join([image, address, init, *([machine.made_of] if machine else []), *mounts])
    if present is not None and present["Labels"].get(IMAGE_LABEL) != made_of:
        say(f"{host}: replacing it, its image, address or hardware changed")
        podman("rm", "--force", "--volumes", "--time", "0", name)
        present = None
    if present is not None and present["State"] == "running" and _answers(name):
        return
    if present is not None:
        say(f"{host}: repairing it, it was {present['State']} and did not answer")
        try:
            podman("stop", "--time", "0", name, check=False)
            podman("start", name)
            return
        except RehearsalError as error:
            warn(f"{host}: can't be started again, replacing it ({error})")
            podman("rm", "--force", "--volumes", "--time", "0", name)
    say(f"{host}: starting it at {address}")
    podman(
        *("create", "--name", name, "--hostname", host, "--network", f"{checkout.network}:ip={address}"),
        *(machine.networks() if machine else []),
        # Privileged: systemd and the roles set kernel parameters and mount file systems as on a real host.
        *("--privileged", "--systemd=always", "--restart=always", *LIMITS, *SHARED_MEMORY, *mounts),
        *("--label", f"{LABEL}={checkout.identity}", "--label", f"{HOST_LABEL}={host}"),
        *("--label", f"{IMAGE_LABEL}={made_of}", image, "/bin/sh", "-c", init),
    )
    if machine:
        machine.install(name)
    podman("start", name)
    # A host that was replaced has another link address: what the machine remembers would hold it back for long.
    subprocess.run(["ip", "neighbour", "flush", "to", address], check=False, capture_output=True)


def _authorize(checkout: Checkout, host: str) -> None:
    """Let the operator in: at every start, since a start may have been cut before, or the key made anew.

    The unit that ends systemd's "no logins yet" is started in case it failed, as it can on nested control groups.
    """
    key = checkout.private_key.with_suffix(".pub").read_bytes()
    command = (
        "umask 077 && cat >/home/deploy/.ssh/authorized_keys && chown deploy: /home/deploy/.ssh/authorized_keys"
        " && systemctl start systemd-user-sessions.service"
    )
    execute(checkout.container(host), ["sh", "-c", command], stdin=key)


def _answers(container: str) -> bool:
    try:
        execute(container, ["true"], timeout=10)
    except RehearsalError:
        return False
    return True


def _poll(seconds: float, probe: Callable[[], str]) -> str:
    """Ask `probe` until it gives an empty text (all well) or the time is over; gives its last complaint."""
    end = time.monotonic() + seconds
    while True:
        complaint = probe()
        if not complaint or time.monotonic() > end:
            return complaint
        time.sleep(0.5)


def _wait_for_systemd(checkout: Checkout, host: str) -> None:
    def probe() -> str:
        state = podman("exec", checkout.container(host), "systemctl", "is-system-running", check=False).strip()
        # "degraded" is a matter of the site (a unit that failed), not of the fleet.
        return "" if state in ("running", "degraded") else state or "no answer"

    complaint = _poll(START_SECONDS, probe)
    if complaint:
        raise RehearsalError(
            f"expected systemd of {host} to be up within {START_SECONDS} s, found {complaint!r}; "
            f"to do: podman logs {checkout.container(host)}, or make rehearse-down and start again"
        )


def _ensure_way_out(checkout: Checkout, network: ipaddress.IPv4Network, hosts: Iterable[str]) -> None:
    """Bring the address translation back where the machine lost it (a firewall that was flushed, a restart)."""
    rules = subprocess.run(["iptables", "-t", "nat", "-S"], capture_output=True, text=True, check=False).stdout
    if str(network) not in rules:
        say("the network's address translation is gone, setting it up again")
        for host in hosts:
            podman("network", "reload", checkout.container(host))


def _write_known_hosts(checkout: Checkout, addresses: dict[str, str]) -> None:
    lines = []
    for host, address in addresses.items():
        complaint = _poll(20, lambda host=host: _host_key(checkout, host)[1])  # type: ignore[misc]
        if complaint:
            raise RehearsalError(f"expected an SSH host key on {host}, found none: {complaint}")
        lines.append(f"{address} {_host_key(checkout, host)[0]}\n")
    write_atomically(checkout.known_hosts, "".join(lines))


def _host_key(checkout: Checkout, host: str) -> tuple[str, str]:
    """The host's public key, and a complaint when there is none yet."""
    try:
        text = execute(checkout.container(host), ["cat", "/etc/ssh/ssh_host_ed25519_key.pub"])
    except RehearsalError as error:
        return "", str(error)
    kind_and_key = " ".join(text.split()[:2])
    return kind_and_key, "" if kind_and_key else "the key file is empty"


def _wait_for_ssh(checkout: Checkout, host: str, address: str) -> None:
    def probe() -> str:
        finished = subprocess.run(
            [*ssh_command(checkout, address), "true"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return "" if finished.returncode == 0 else finished.stderr.strip() or "no answer"

    complaint = _poll(START_SECONDS, probe)
    if complaint:
        raise RehearsalError(
            f"expected {host} ({address}) to answer over SSH within {START_SECONDS} s, found: {complaint}; "
            f"to do: podman exec {checkout.container(host)} journalctl -u ssh, or make rehearse-down and start again"
        )
