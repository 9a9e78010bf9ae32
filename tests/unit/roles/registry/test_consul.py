# SPDX-License-Identifier: GPL-3.0-or-later
"""The backend consul of the role ``registry``: what it writes for Consul, judged by Consul, and its certificates."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from ringmaster_scheduler.consul import read_answer
from tests.support.templates import trusted

ROLE = Path(__file__).resolve().parents[4] / "roles" / "registry"
ADAPTERS = [f"adapter-{number}-ä" for number in range(300)]
ENGINE = {
    "name": "gpu1.main",
    "host": "gpu1",
    "address": "2001:db8::15",
    "port": 8100,
    "kind": "standin",
    "model": 'o"d {{ d }}',
    "adapters": ADAPTERS,
    "card": "l40s",
    "max_num_seqs": 256,
    "max_model_len": 32768,
}
MEMBERS = {
    "schema": 1,
    "engines": [ENGINE, {**ENGINE, "name": "gpu2.main", "host": "gpu2"}],
    "agents": [{"host": "gpu1", "address": "2001:db8::15", "port": 8409}],
    "gateways": [{"name": "gw1", "address": "10.0.0.1"}],
    "monitors": [{"name": "cpu1", "address": "10.0.0.7"}, {"name": "srv3", "address": "10.0.0.3"}],
    "preprocessors": [{"name": "pi1", "address": "10.0.0.8"}, {"name": "pi2", "address": "10.0.0.9"}],
}
HOSTS = {f"srv{number}": {"ringmaster_address": f"10.0.0.{number}"} for number in (1, 2, 3)}
HOSTS["srv3"] = {"ansible_host": "10.0.0.3"}


def evaluate(expression: str, role: Path = ROLE, **variables: Any) -> Any:
    known: dict[str, Any] = {}
    for file in ("defaults/main.yml", "vars/main.yml"):
        known.update(trusted(yaml.safe_load((role / file).read_text(encoding="utf-8"))))
    known.update(
        registry_members=MEMBERS,
        registry_consul_gossip_key="c2l4dGVlbiBieXRlcyBhcmUgZW5vdWdoIGZvciBhIDE=",
        registry_consul_management_token="11111111-1111-1111-1111-111111111111",
        registry_consul_member_token="22222222-2222-2222-2222-222222222222",
        registry_consul_scheduler_token="33333333-3333-3333-3333-333333333333",
        registry_consul_version_found={"stdout": "Consul v1.8.7\nProtocol 2 spoken"},
        registry_consul_authority="/authority",
        inventory_hostname="gpu1",
        groups={"registry": list(HOSTS), "gateways": ["gw1"], "engines": ["gpu1", "gpu2"]},
        hostvars=HOSTS,
        ringmaster_address="10.0.0.9",
        ansible_search_path=[str(ROLE)],
    )
    known.update(variables)
    return Templar(loader=DataLoader(), variables=known).template(trust_as_template("{{ " + expression + " }}"))


def rendered(template: str, **variables: Any) -> dict[str, Any]:
    text = str(evaluate(f"lookup('template', '{ROLE}/templates/{template}')", **variables))
    document: dict[str, Any] = json.loads(text)
    return document


def judge(folder: Path, *documents: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    program = shutil.which("consul")
    assert program is not None, "expected Consul on the path, found none; to do: run the tests with tests/run/unit"
    paths = []
    for number, document in enumerate(documents):
        paths.append(folder / f"{number}.json")
        paths[-1].write_text(json.dumps(document))
    return subprocess.run(
        [program, "validate", "-config-format=json", *map(str, paths)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("host", ["gpu1", "srv1", "gw1"])
def test_consul_takes_what_is_written_for_it(host: str, tmp_path: Path) -> None:
    services = rendered("consul_services.json.j2", inventory_hostname=host)
    configuration = rendered("consul.json.j2", inventory_hostname=host)
    result = judge(tmp_path, configuration, services)
    assert result.returncode == 0, result.stdout + result.stderr
    broken = judge(tmp_path, {**configuration, "bootstrap_expct": 3})
    assert broken.returncode != 0


def test_host_lists_its_own_members_and_the_scheduler_reads_the_same_documents() -> None:
    services = rendered("consul_services.json.j2")["services"]
    assert [service["id"] for service in services] == ["engine:gpu1.main", "agent:gpu1"]
    assert all(len(value.encode()) <= 512 for service in services for value in service["meta"].values())
    answer = [{"Service": {"ID": service["id"], "Meta": service["meta"]}, "Checks": []} for service in services]
    lists, _unused = read_answer(json.dumps(answer).encode())
    assert lists == {
        "engines": [ENGINE],
        "agents": MEMBERS["agents"],
        "gateways": [],
        "monitors": [],
        "preprocessors": [],
    }
    check = services[0]["checks"][0]
    assert check["http"] == "http://[2001:db8::15]:8100/health"
    assert rendered("consul_services.json.j2", inventory_hostname="gw1")["services"][0]["id"] == "gateway:gw1"
    assert rendered("consul_services.json.j2", inventory_hostname="srv2") == {"services": []}


def test_all_hosts_together_list_the_whole_document_and_each_member_once() -> None:
    """Preprocessors and monitors without Consul are the first server's; a monitor that is a server lists itself."""
    hosts = [*HOSTS, "gw1", "gpu1", "gpu2"]
    services = [
        service
        for host in hosts
        for service in rendered("consul_services.json.j2", inventory_hostname=host)["services"]
    ]
    identifiers = [service["id"] for service in services]
    assert len(set(identifiers)) == len(identifiers)
    answer = [{"Service": {"ID": service["id"], "Meta": service["meta"]}, "Checks": []} for service in services]
    lists, _unused = read_answer(json.dumps(answer).encode())
    assert {"schema": 1, **lists} == MEMBERS
    listed_by_first = [
        service["id"] for service in rendered("consul_services.json.j2", inventory_hostname="srv1")["services"]
    ]
    assert listed_by_first == ["monitor:cpu1", "preprocessor:pi1", "preprocessor:pi2"]
    assert [
        service["id"] for service in rendered("consul_services.json.j2", inventory_hostname="srv3")["services"]
    ] == ["monitor:srv3"]


def test_servers_and_clients_know_the_servers_and_only_servers_hold_the_first_token() -> None:
    server, client = rendered("consul.json.j2", inventory_hostname="srv1"), rendered("consul.json.j2")
    assert (server["server"], server["bootstrap_expect"], server["retry_join"]) == (True, 3, ["10.0.0.2", "10.0.0.3"])
    assert (client["server"], client["retry_join"]) == (False, ["10.0.0.1", "10.0.0.2", "10.0.0.3"])
    assert "bootstrap_expect" not in client
    assert server["acl"]["tokens"]["master"].startswith("1111")
    assert list(client["acl"]["tokens"]) == ["agent"]
    assert client["client_addr"] == "127.0.0.1"
    for document in (server, client):
        assert document["ports"]["http"] == -1
        assert document["verify_incoming_rpc"] is document["verify_outgoing"] is True
        assert document["acl"]["default_policy"] == "deny"
        assert document["leave_on_terminate"] is False


def test_schedulers_ask_their_own_host_and_then_each_other_server() -> None:
    def addresses(**variables: Any) -> Any:
        return evaluate("scheduler_consul_addresses", ROLE.parent / "scheduler", **variables)

    own = "https://127.0.0.1:8501"
    assert addresses() == [own, "https://10.0.0.1:8501", "https://10.0.0.2:8501", "https://10.0.0.3:8501"]
    assert addresses(inventory_hostname="srv2") == [own, "https://10.0.0.1:8501", "https://10.0.0.3:8501"]
    other = {"srv1": {"ringmaster_address": "2001:db8::1", "ansible_host": "10.0.0.1"}, "srv2": {}}
    assert addresses(groups={"registry": list(other)}, hostvars=other) == [
        own,
        "https://[2001:db8::1]:8501",
        "https://srv2:8501",
    ]
    assert addresses(groups={}) == [own]


@pytest.mark.parametrize(
    ("said", "name"),
    [("Consul v1.8.7", "master"), ("Consul v1.20.1\nRevision", "initial_management"), ("", "master")],
)
def test_first_token_is_named_as_the_version_knows_it(said: str, name: str) -> None:
    assert evaluate("registry_consul_first_token", registry_consul_version_found={"stdout": said}) == name


@pytest.mark.parametrize(
    "wrong",
    [
        {"registry_consul_gossip_key": ""},
        {"registry_consul_gossip_key": "c2hvcnQ="},
        {"registry_consul_member_token": "11111111-1111-1111-1111-111111111111"},
        {"registry_consul_scheduler_token": "secret"},
        {"registry_consul_management_token": ""},
        {"registry_consul_certificate": "PEM"},
    ],
)
def test_secrets_that_are_missing_or_weak_are_refused(wrong: dict[str, str]) -> None:
    assert evaluate("registry_consul_secrets_given")
    assert not evaluate("registry_consul_secrets_given", **wrong)


class Authority:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # As the role makes it.
        tasks = yaml.safe_load((ROLE / "tasks/backends/consul/certificate.yml").read_text(encoding="utf-8"))
        command = next(task for task in tasks if task["name"] == "The authority exists")["ansible.builtin.command"]
        arguments = [word.replace("{{ registry_consul_authority }}", str(folder)) for word in command["argv"]]
        subprocess.run(arguments, input=command["stdin"], capture_output=True, text=True, check=True)

    def openssl(self, *arguments: str) -> str:
        return subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=True).stdout

    def certify(self, name: str = "client.dc.consul", address: str = "10.0.0.9") -> bool:
        """Return whether a certificate was made."""
        command = [str(ROLE / "files" / "consul_certificate.sh"), str(self.folder), "gpu1", name, address]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said in ("", "made\n")
        return said != ""

    def text(self) -> str:
        return self.openssl("x509", "-in", str(self.folder / "gpu1.pem"), "-noout", "-text")


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[Authority]:
    yield Authority(tmp_path)
    assert not list(tmp_path.glob(".new.*"))


def test_certificate_is_made_once_for_what_the_host_is(authority: Authority) -> None:
    assert authority.certify("server.dc.consul")
    assert not authority.certify("server.dc.consul")
    text = authority.text()
    for expected in ("DNS:server.dc.consul", "IP Address:127.0.0.1", "IP Address:10.0.0.9", "CA:FALSE"):
        assert expected in text
    assert (authority.folder / "gpu1.key").stat().st_mode & 0o077 == 0
    assert authority.certify("client.dc.consul")
    assert "server.dc.consul" not in authority.text()
    assert authority.certify(address="2001:db8::1")


def test_certificate_stands_before_a_strict_reader(authority: Authority) -> None:
    """Python from 3.13 on is one (ssl.VERIFY_X509_STRICT), and so are the hosts that ask Consul with it."""
    authority.certify("server.dc.consul")
    files = [str(authority.folder / name) for name in ("ca.pem", "gpu1.pem")]
    for purpose in ("sslserver", "sslclient"):
        authority.openssl("verify", "-x509_strict", "-purpose", purpose, "-CAfile", *files)


@pytest.mark.parametrize("spoilt", ["gpu1.pem", "gpu1.key", "gpu1.names", "ca"])
def test_what_is_lost_broken_or_of_another_authority_is_made_anew(authority: Authority, spoilt: str) -> None:
    assert authority.certify()
    if spoilt == "ca":
        Authority(authority.folder)
    else:
        (authority.folder / spoilt).write_bytes(b"")
    assert authority.certify()
    assert not authority.certify()


def test_certificate_that_ends_soon_is_made_anew(authority: Authority) -> None:
    assert authority.certify()
    folder = authority.folder
    authority.openssl(
        *("req", "-x509", "-key", str(folder / "gpu1.key"), "-CA", str(folder / "ca.pem"), "-CAkey"),
        *(str(folder / "ca.key"), "-days", "30", "-subj", "/CN=x", "-out", str(folder / "gpu1.pem")),
    )
    assert authority.certify()
