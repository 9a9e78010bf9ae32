# SPDX-License-Identifier: GPL-3.0-or-later
"""The order of the site, its batches, and rollback, played with roles that only note that they ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parents[3]
STACK = ("kernel", "rdma", "driver", "cuda", "nccl")
OPERATIONS = (
    "baseline",
    *STACK,
    "fabric",
    "gpu",
    "model",
    "registry",
    "vllm",
    "agent",
    "scheduler",
    "edge",
    "preprocessor",
    "observability",
)
INVENTORY = """
all:
  vars:
    ansible_connection: local
    ansible_become: false
    ringmaster_models: {qwen2-7b: {max_model_len: 4096}}
    vllm_engine: standin
    vllm_api_key: key-of-the-engines
    edge_api_keys: [{id: team-a, key: key-of-team-a}]
  children:
    gateways: {hosts: {gw1: {ringmaster_address: 10.0.0.1}, gw2: {ringmaster_address: 10.0.0.2}}}
    monitors: {hosts: {cpu1: {ringmaster_address: 10.0.0.3}}}
    preprocessors: {hosts: {pi1: {ringmaster_address: 10.0.0.9, ansible_python_interpreter: /nonexistent}}}
    engines:
      vars:
        ringmaster_card: l40s
        vllm_engines: [{name: main, model: qwen2-7b, port: 8100}]
      hosts:
        gpu[1:3]: {ringmaster_address: "10.0.1.{{ inventory_hostname[3:] }}"}
"""
ENGINE_HOSTS = [f"gpu{number}" for number in range(1, 4)]
# Raw, for hosts that carry no Python; it runs in check mode, too.
NOTE = """
- name: What is done is noted
  ansible.builtin.raw: echo "NAME {{ inventory_hostname }}" >> "{{ inventory_dir }}/journal"
  when: not ansible_check_mode
- name: Host that is told to fails
  ansible.builtin.fail: {msg: told to}
  when: inventory_hostname in (failing | default([]))
"""


@pytest.fixture
def site(controller: Any) -> Any:
    controller.write("inventory.yml", INVENTORY)
    for operation in OPERATIONS:
        controller.role(operation, NOTE.replace("NAME", operation))
        controller.write(
            f"ansible_collections/ringmaster/inference/roles/{operation}/tasks/rollback.yml",
            NOTE.replace("NAME", f"rollback-{operation}"),
        )
    return controller


def journal(controller: Any) -> list[tuple[str, str]]:
    path = controller.root / "journal"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    path.unlink()
    return [tuple(line.split()) for line in lines]


def site_yml(controller: Any, *arguments: str) -> Any:
    return controller.play(controller.collection / "playbooks" / "site.yml", *arguments)


def rollback_yml(controller: Any, *arguments: str) -> Any:
    return controller.play(controller.collection / "playbooks" / "rollback.yml", *arguments)


def test_operations_run_in_their_order_on_their_hosts(site: Any) -> None:
    run = site_yml(site)
    assert run.returncode == 0, run.stdout
    done = journal(site)
    assert list(dict.fromkeys(operation for operation, _host in done)) == list(OPERATIONS)
    hosts = {operation: [host for name, host in done if name == operation] for operation in OPERATIONS}
    assert sorted(hosts["registry"]) == sorted(hosts["scheduler"]) == hosts["edge"] == ["gw1", "gw2"]
    assert sorted(hosts["vllm"]) == ENGINE_HOSTS
    assert hosts["preprocessor"] == ["pi1"]
    assert hosts["observability"] == ["cpu1"]


WITH_CONSUL = INVENTORY.replace("  vars:\n", "  vars:\n    registry_backend: consul\n", 1).replace(
    "  children:\n", "  children:\n    registry: {hosts: {cpu1: , cpu2: {ringmaster_address: 10.0.0.4}, gw2: }}\n", 1
)


def test_registry_on_consul_runs_on_servers_gateways_and_engine_hosts(site: Any) -> None:
    site.write("inventory.yml", WITH_CONSUL)
    run = site_yml(site, "--tags", "registry,scheduler")
    assert run.returncode == 0, run.stdout
    done = journal(site)
    assert sorted(host for operation, host in done if operation == "registry") == sorted(
        ["cpu1", "cpu2", "gw1", "gw2", *ENGINE_HOSTS]
    )
    assert sorted(host for operation, host in done if operation == "scheduler") == ["gw1", "gw2"]
    run = site_yml(site, "--tags", "registry", "--limit", "gpu3")
    assert run.returncode == 0, run.stdout
    assert journal(site) == [("registry", "gpu3")]
    run = rollback_yml(site, "-e", "operation=registry")
    assert run.returncode == 0, run.stdout
    hosts = ["cpu1", "cpu2", "gw1", "gw2", *ENGINE_HOSTS]
    assert sorted(journal(site)) == sorted(("rollback-registry", host) for host in hosts)


def test_limit_and_tags_leave_out_the_rest(site: Any) -> None:
    run = site_yml(site, "--limit", "gw2", "--tags", "edge")
    assert run.returncode == 0, run.stdout
    assert journal(site) == [("edge", "gw2")]
    assert "[gw1]" not in run.stdout


def test_check_mode_passes(site: Any) -> None:
    run = site_yml(site, "--check", "--diff")
    assert run.returncode == 0, run.stdout


def test_one_gateway_keeps_serving_when_the_other_fails(site: Any) -> None:
    run = site_yml(site, "-e", '{"failing": ["gw1"]}', "--tags", "edge")
    assert run.returncode == 2
    assert journal(site) == [("edge", "gw1")]


def batches(run: Any) -> int:
    """Batches of each of the two plays that change engine hosts."""
    counts = [run.stdout.count(f"PLAY [{play}]") for play in ("Hardware", "Engines")]
    assert counts[0] == counts[1]
    return int(counts[0])


def test_first_install_takes_all_engines_at_once_and_goes_on_without_one(site: Any) -> None:
    run = site_yml(site, "-e", '{"failing": ["gpu1"]}')
    assert batches(run) == 1
    done = journal(site)
    assert ("observability", "cpu1") in done
    assert sorted(host for operation, host in done if operation == "baseline") == ENGINE_HOSTS
    # A host whose hardware is not right gets no engine.
    assert sorted(host for operation, host in done if operation == "vllm") == ENGINE_HOSTS[1:]


def test_engines_in_service_change_in_batches_and_the_first_failure_ends_it(site: Any) -> None:
    # What the play before found; a variable of the command line has the last word.
    serves = ["-e", '{"ringmaster_engine_record": {"recorded": true}}']
    run = site_yml(site, *serves, "--tags", "vllm")
    assert run.returncode == 0, run.stdout
    assert batches(run) == 3
    journal(site)
    run = site_yml(site, *serves, "--tags", "vllm", "-e", '{"failing": ["gpu2"]}')
    assert run.returncode == 2
    assert journal(site) == [("vllm", "gpu1"), ("vllm", "gpu2")]
    run = site_yml(site, *serves, "-e", '{"failing": ["gpu2"]}')
    assert run.returncode == 2
    first = [(operation, "gpu1") for operation in ("baseline", *STACK, "fabric", "gpu")]
    assert journal(site) == [*first, ("baseline", "gpu2")]


@pytest.mark.parametrize(("batch", "count"), [("2", 2), ("100%", 1)])
def test_size_of_batch_can_be_set_in_the_inventory(site: Any, batch: str, count: int) -> None:
    site.write("inventory.yml", INVENTORY.replace("  vars:\n", f'  vars:\n    ringmaster_engine_batch: "{batch}"\n', 1))
    assert batches(site_yml(site, "--tags", "vllm")) == count


@pytest.mark.parametrize("operation", ["gpu", "vllm", "preprocessor", "observability"])
def test_rollback_runs_on_the_hosts_of_its_operation(site: Any, operation: str) -> None:
    run = rollback_yml(site, "-e", f"operation={operation}")
    assert run.returncode == 0, run.stdout
    of_group = {"gateways": ["gw1", "gw2"], "engines": ENGINE_HOSTS, "preprocessors": ["pi1"], "monitors": ["cpu1"]}
    hosts = of_group[operations()[operation]]
    assert journal(site) == [(f"rollback-{operation}", host) for host in hosts]


def test_rollback_goes_one_host_at_a_time_and_stops_at_a_failure(site: Any) -> None:
    run = rollback_yml(site, "-e", "operation=edge", "-e", '{"failing": ["gw1"]}')
    assert run.returncode == 2
    assert journal(site) == [("rollback-edge", "gw1")]


@pytest.mark.parametrize("arguments", [[], ["-e", "operation=edeg"], ["-e", "operation="]])
def test_rollback_of_an_unknown_operation_is_refused(site: Any, arguments: list[str]) -> None:
    run = rollback_yml(site, *arguments)
    assert run.returncode == 2
    assert f"Expected operation to be one of {', '.join(OPERATIONS)}." in run.stdout
    assert journal(site) == []


def operations() -> dict[str, str]:
    plays = yaml.safe_load((CHECKOUT / "playbooks" / "rollback.yml").read_text(encoding="utf-8"))
    groups: dict[str, str] = plays[0]["vars"]["ringmaster_operations"]
    return groups


def test_operations_of_rollback_are_those_of_the_site() -> None:
    plays = yaml.safe_load((CHECKOUT / "playbooks" / "site.yml").read_text(encoding="utf-8"))
    roles = [(role["tags"], role["role"], play["hosts"]) for play in plays for role in play.get("roles", [])]
    assert [(tags, role) for tags, role, _hosts in roles] == [
        ([operation], f"ringmaster.inference.{operation}") for operation in operations()
    ]
    assert {tags[0]: hosts for tags, _role, hosts in roles} == operations()


def test_example_inventory_only_lacks_addresses_and_secrets(controller: Any) -> None:
    for role in OPERATIONS:
        controller.role(role, "[]")
    (controller.root / "inventory.yml").symlink_to(CHECKOUT / "inventories" / "example")
    run = site_yml(controller)
    assert run.returncode == 2
    assert "Preflight found 4 problems" in run.stdout
    for text in (
        "1. ansible_host of cpu-c1",
        "2. edge_api_keys[0].key of gw1, gw2",
        "3. scheduler_api_token of gw1, gw2",
        "4. vllm_api_key of gpu-a1",
    ):
        assert text in run.stdout
