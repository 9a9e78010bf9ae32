# SPDX-License-Identifier: GPL-3.0-or-later
"""Upgrades played with a role that only writes what an engine is started with, and engines that do what is written."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="files of the playbook belong to root")

TOKEN = "token-of-the-schedulers"
KEY = "key-of-the-engines"
HOSTS = ("gpu1", "gpu2")
INVENTORY = """
all:
  vars:
    ansible_connection: local
    ansible_become: false
    ringmaster_models: {{qwen2-7b: {{max_model_len: 4096}}}}
    vllm_engine: standin
    vllm_api_key: {key}
    scheduler_api_token: {token}
    edge_api_keys: [{{id: team-a, key: key-of-team-a}}]
    root: {root}
    upgrade_directory: "{root}/{{{{ inventory_hostname }}}}/upgrade"
    upgrade_prompts: [one, two]
    upgrade_rounds: 1
    upgrade_max_tokens: 2
  children:
    gateways: {{hosts: {{gw1: {{ringmaster_address: 10.0.0.1}}}}}}
    monitors: {{hosts: {{cpu1: {{ringmaster_address: 10.0.0.3}}}}}}
    preprocessors: {{hosts: {{}}}}
    engines:
      vars:
        ringmaster_card: l40s
        vllm_engines: [{{name: main, model: qwen2-7b, port: 8100}}]
      hosts:
        gpu1: {{ringmaster_address: 10.0.1.1, vllm_url: "{gpu1}"}}
        gpu2: {{ringmaster_address: 10.0.1.2, vllm_url: "{gpu2}"}}
"""
VARIABLES = """
vllm_drain_timeout: 10
vllm_service: "{{ inventory_hostname }}.service"
vllm_service_path: "{{ root }}/{{ inventory_hostname }}/service"
vllm_link_path: "{{ root }}/{{ inventory_hostname }}/{{ vllm_item.name }}"
vllm_upgrade_notes_path: "{{ upgrade_directory }}"
vllm_listen_address: "{{ ringmaster_address }}"
vllm_release: "{{ wanted.release }}"
vllm_releases: ["1", "2"]
vllm_program: []
vllm_words: ["{{ wanted | to_json }}"]
vllm_whole_environment: {}
"""
LOADED = """
- ansible.builtin.set_fact:
    vllm_serves: [qwen2-7b, "{{ ringmaster_address }}", "8100"]
"""
MEASURE = """
- ansible.builtin.command: find {{ root }}/{{ inventory_hostname }} -mindepth 2 -maxdepth 2 -type l -printf "%P=%l\\n"
  register: links
  changed_when: false
- ansible.builtin.set_fact:
    vllm_links: "{{ dict(links.stdout_lines | map('split', '=') | map('first')
      | zip(links.stdout_lines | map('split', '=') | map('last') | map('basename'))) }}"
"""
# As the role does it: options, links, restart.
APPLY = """
- ansible.builtin.include_tasks: measure.yml
- ansible.builtin.fail: {msg: an option is refused}
  when: wanted.refused is defined
- ansible.builtin.copy:
    content: "{{ wanted | to_json }}"
    dest: "{{ vllm_service_path }}.d/engine.conf"
  register: conf
- ansible.builtin.shell: |
    cd {{ vllm_link_path }}
    test "$(readlink current)" = ../../versions/{{ wanted.release }} && exit
    ln -sfn $(readlink current) previous
    ln -sfn ../../versions/{{ wanted.release }} current
  changed_when: false
  vars: {vllm_item: "{{ vllm_engines[0] }}"}
- ansible.builtin.command: systemctl restart {{ vllm_service }}
  when: conf is changed
- ansible.builtin.shell: kill -KILL {{ lookup('ansible.builtin.pipe', 'ps -o ppid= -p $PPID') }} && sleep 5
  when: killed is defined
- ansible.builtin.include_tasks: verify_engine.yml
"""
VERIFY = """
- ansible.builtin.uri: {url: "{{ vllm_url }}/version"}
"""
SYSTEMCTL = """#!/bin/sh
case "$1 $2" in
  restart*) cp {root}/${{2%.service}}/service.d/engine.conf {root}/${{2%.service}}/running ;;
  is-enabled*) echo enabled ;;
  show*) case "$*" in *NeedDaemonReload*) test -e {root}/newer && echo yes || echo no; exit ;; esac ;;
esac
echo LoadState=loaded; echo ActiveState=active; echo UnitFileState=enabled
"""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, handler: Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: Any) -> None:
        """Says nothing."""


class World:
    """A scheduler, and engines that do what they were started with."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engines = {f"{host}.main": {"drained": False, "healthy": True} for host in HOSTS}
        self.posts: list[str] = []
        world = self

        class SchedulerHandler(Handler):
            def do_GET(self) -> None:
                engines = [
                    {"name": name, "host": name[:4], "model": "qwen2-7b", "health": "healthy", "waiting": 0}
                    | {"held": 0, "running": 0}
                    | values
                    for name, values in world.engines.items()
                ]
                self.send(json.dumps({"engines": engines, "haproxy": {"error": "", "absent": False}}).encode())

            def do_POST(self) -> None:
                _empty, _version, _engines, name, action = self.path.split("/")
                world.posts.append(f"{action} {name}")
                world.engines[name]["drained"] = action == "drain"
                self.send(b"{}")

        self.scheduler = Server(SchedulerHandler)
        self.servers = {host: Server(self.engine_handler(host)) for host in HOSTS}
        for release in ("1", "2"):
            (root / "versions" / release).mkdir(parents=True)
        for host in HOSTS:
            (root / host / "service.d").mkdir(parents=True)
            (root / host / "main").mkdir()
            (root / host / "main" / "current").symlink_to("../../versions/1")
            for name in ("service.d/engine.conf", "running"):
                (root / host / name).write_text('{"release": "1", "text": "yes"}')
        (root / "bin").mkdir()
        (root / "bin" / "systemctl").write_text(SYSTEMCTL.format(root=root))
        (root / "bin" / "systemctl").chmod(0o755)

    def engine_handler(self, host: str) -> Any:
        world = self

        class EngineHandler(Handler):
            def do_GET(self) -> None:
                self.send(b"{}", 503 if "broken" in world.running(host) else 200)

            def do_POST(self) -> None:
                # Nobody asks an engine the canary's prompts while it has other work.
                assert world.engines[f"{host}.main"]["drained"]
                running = world.running(host)
                event = {"choices": [{"text": running["text"]}], "usage": {"completion_tokens": 2}}
                self.send_response(200)
                self.end_headers()
                for _number in range(2):
                    time.sleep(running.get("seconds", 0))
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")

        return EngineHandler

    def running(self, host: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / host / "running").read_text())
        return found

    def links(self, host: str) -> dict[str, str]:
        folder = self.root / host / "main"
        return {path.name: os.path.basename(os.readlink(path)) for path in folder.iterdir() if path.is_symlink()}

    def left(self) -> list[str]:
        return [str(path.relative_to(self.root)) for path in self.root.glob("*/upgrade/*")]

    def stop(self) -> None:
        for server in (self.scheduler, *self.servers.values()):
            server.shutdown()
            server.server_close()


@pytest.fixture
def world(controller: Any) -> Iterator[World]:
    (controller.root / "world").mkdir()
    made = World(controller.root / "world")
    controller.write(
        "inventory.yml",
        INVENTORY.format(
            key=KEY,
            token=TOKEN,
            root=made.root,
            **{host: server.url for host, server in made.servers.items()},
        ),
    )
    controller.role("vllm", APPLY, vars=VARIABLES)
    for name, text in (
        *(("measure", MEASURE), ("verify_engine", VERIFY)),
        *(("loaded", LOADED), ("install_only", "[]")),
    ):
        controller.write(f"ansible_collections/ringmaster/inference/roles/vllm/tasks/{name}.yml", text)
    controller.environment["PATH"] = f"{made.root}/bin:{os.environ['PATH']}"
    yield made
    made.stop()


def upgrade(controller: Any, world: World, *arguments: str, **wanted: Any) -> Any:
    extra = {"wanted": {"text": "yes", **wanted}, "upgrade_schedulers": [world.scheduler.url]}
    return controller.play(controller.collection / "playbooks" / "upgrade.yml", "-e", json.dumps(extra), *arguments)


def test_one_engine_after_the_other(controller: Any, world: World) -> None:
    run = upgrade(controller, world, release="2")
    assert run.returncode == 0, run.stdout
    assert world.posts == ["drain gpu1.main", "undrain gpu1.main", "drain gpu2.main", "undrain gpu2.main"]
    for host in HOSTS:
        assert world.running(host)["release"] == "2"
        assert world.links(host) == {"current": "2", "previous": "1"}
    assert world.left() == []


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"release": "2", "seconds": 0.2}, "ms for each further token"),
        ({"release": "2", "text": "no"}, "of the former answers came again"),
        ({"release": "1", "text": "no"}, "of the former answers came again"),  # other options of the same release
        ({"release": "2", "broken": True}, "503"),
        ({"release": "2", "refused": True}, "an option is refused"),
    ],
)
def test_a_worse_engine_goes_back_and_the_rest_is_left_alone(
    controller: Any, world: World, wanted: dict[str, Any], says: str
) -> None:
    run = upgrade(controller, world, **wanted)
    assert run.returncode == 2, run.stdout
    assert says in run.stdout
    assert "Expected gpu1.main to be no worse than before" in run.stdout
    assert world.posts == ["drain gpu1.main", "undrain gpu1.main"]
    for host in HOSTS:
        assert world.running(host) == {"release": "1", "text": "yes"}
        assert world.links(host) == {"current": "1"}
    assert world.left() == []


def test_limits_can_be_others(controller: Any, world: World) -> None:
    run = upgrade(controller, world, "-e", "upgrade_agreement=0", release="2", text="no")
    assert run.returncode == 0, run.stdout


def test_a_run_that_was_killed_goes_on(controller: Any, world: World) -> None:
    run = upgrade(controller, world, "-e", "killed=true", release="2", text="no")
    assert run.returncode == -9, run.stdout
    # The other engine serves; this one is changed, drained, and not compared yet.
    assert {name: engine["drained"] for name, engine in world.engines.items()} == {
        "gpu1.main": True,
        "gpu2.main": False,
    }
    assert world.running("gpu1")["text"] == "no"
    assert world.running("gpu2") == {"release": "1", "text": "yes"}
    # The changed engine is never taken for the former one: it is still found to be worse.
    run = upgrade(controller, world, release="2", text="no")
    assert run.returncode == 2
    assert "of the former answers came again" in run.stdout
    assert world.running("gpu1") == {"release": "1", "text": "yes"}
    assert [engine["drained"] for engine in world.engines.values()] == [False, False]
    assert world.left() == []


def test_what_a_killed_run_noted_is_not_believed_by_another_upgrade(controller: Any, world: World) -> None:
    run = upgrade(controller, world, "-e", "killed=true", release="2", text="no")
    assert run.returncode == -9, run.stdout
    arguments = ("--limit", "gpu1,gw1")
    run = upgrade(controller, world, *arguments, release="2", text="maybe")
    assert run.returncode == 2
    assert "upgrade_forget=true" in run.stdout
    assert world.running("gpu1")["text"] == "no"
    # What runs is the state before now, so that the same answers are as good. Whose drain it was is not forgotten.
    run = upgrade(controller, world, *arguments, "-e", "upgrade_forget=true", release="2", text="no", seconds=0)
    assert run.returncode == 0, run.stdout
    assert not world.engines["gpu1.main"]["drained"]
    assert world.left() == []


def test_the_former_version_gives_a_killed_upgrade_up(controller: Any, world: World) -> None:
    run = upgrade(controller, world, "-e", "killed=true", release="2", text="no")
    assert run.returncode == -9, run.stdout
    run = upgrade(controller, world, "--limit", "gpu1,gw1", release="1")
    assert run.returncode == 0, run.stdout
    assert world.running("gpu1") == {"release": "1", "text": "yes"}
    assert not world.engines["gpu1.main"]["drained"]


@pytest.mark.parametrize("engine", [{"port": 8101}, {"model": "other"}])
def test_another_model_or_port_is_refused_before_any_engine_is_touched(
    controller: Any, world: World, engine: dict[str, Any]
) -> None:
    engines = [{"name": "main", "model": "qwen2-7b", "port": 8100} | engine]
    models = {name: {"max_model_len": 4096} for name in ("qwen2-7b", "other")}
    variables = json.dumps({"vllm_engines": engines, "ringmaster_models": models})
    run = upgrade(controller, world, "-e", variables, release="2")
    assert run.returncode == 2
    assert "gives no engine another model, address or port" in " ".join(run.stdout.split())
    assert world.posts == []


def test_an_engine_that_never_ran_its_files_is_left_alone(controller: Any, world: World) -> None:
    (world.root / "newer").touch()
    run = upgrade(controller, world, release="2")
    assert run.returncode == 2
    assert "as a run of site.yml leaves them that was cut" in " ".join(run.stdout.split())
    assert world.posts == []


def test_an_engine_that_a_cut_run_of_the_site_drained_serves_again(controller: Any, world: World) -> None:
    world.engines["gpu1.main"]["drained"] = True
    (world.root / "gpu1" / "main" / "drained").touch()
    run = upgrade(controller, world, "--limit", "gpu1,gw1", release="2")
    assert run.returncode == 0, run.stdout
    assert not world.engines["gpu1.main"]["drained"]
    assert not (world.root / "gpu1" / "main" / "drained").exists()


def test_an_engine_that_somebody_drained_stays_so(controller: Any, world: World) -> None:
    world.engines["gpu1.main"]["drained"] = True
    run = upgrade(controller, world, "--limit", "gpu1,gw1", release="2")
    assert run.returncode == 0, run.stdout
    assert world.posts == []
    assert world.running("gpu1")["release"] == "2"


@pytest.mark.parametrize("other", [{"healthy": False}, {"drained": True}])
def test_the_only_engine_of_a_model_is_left_alone(controller: Any, world: World, other: dict[str, bool]) -> None:
    world.engines["gpu2.main"].update(other)
    arguments = ("--limit", "gpu1,gw1", "-e", "upgrade_patience=1")
    run = upgrade(controller, world, *arguments, release="2")
    assert run.returncode == 2
    assert "Expected another engine of qwen2-7b" in run.stdout
    assert world.posts == []
    assert world.left() == []
    run = upgrade(controller, world, *arguments, "-e", "upgrade_outage_accepted=true", release="2")
    assert run.returncode == 0, run.stdout
    assert world.running("gpu1")["release"] == "2"
