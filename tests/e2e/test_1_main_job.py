# SPDX-License-Identifier: GPL-3.0-or-later
"""The main job: it runs, says what it did, changes nothing the second time, and answers through the edge."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from rehearsal import chat, inventory, site
from tests.e2e.conftest import ENGINES, MODEL, PREPROCESSORS, Site, changed_tasks, wait_until, within

OPERATIONS = {
    "gateways": ["registry", "scheduler", "edge"],
    "engines": ["baseline", "kernel", "rdma", "driver", "cuda", "nccl", "fabric", "gpu", "model", "vllm", "agent"],
    "monitors": ["observability"],
    "preprocessors": ["preprocessor"],
}
GATEWAYS = ("gw1", "gw2")
KEY_FILES = {"gw1": "engine-key.map", "gpu-a1": "/etc/ringmaster/vllm/main/api-key"}


def get(url: str, key: str | None = None, body: dict[str, Any] | None = None) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (names in small letters) and body of an answer, whatever its status."""
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, {k.lower(): v for k, v in response.headers.items()}, response.read()
    except urllib.error.HTTPError as error:
        return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()


def test_evidence_of_the_first_run_names_every_host_and_operation(
    running_site: Site, site_inventory: inventory.Inventory
) -> None:
    hosts = running_site.first_run["hosts"]
    assert set(hosts) == set(site_inventory.variables)
    for group, operations in OPERATIONS.items():
        for host in site_inventory.groups[group]:
            assert [operation["name"] for operation in hosts[host]["operations"]] == operations, host
            for operation in hosts[host]["operations"]:
                assert operation["measured"], f"{host}/{operation['name']} measured nothing"
                assert operation["verified"], f"{host}/{operation['name']} verified nothing"
                assert operation["seconds"] > 0


def test_evidence_carries_no_secret(running_site: Site) -> None:
    text = json.dumps(running_site.first_run)
    assert running_site.edge_key not in text
    assert running_site.engine_key not in text


def test_second_run_changes_nothing(running_site: Site) -> None:
    finished, document = running_site.playbook("site.yml")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert document is not None
    assert changed_tasks(document) == {}


def test_check_and_diff_pass_without_a_change(running_site: Site) -> None:
    # All engine hosts at once: the batches of a site that serves are in the test before, and take longer.
    batch = ("-e", "ringmaster_engine_batch=100%")
    finished, document = running_site.playbook("site.yml", "--check", "--diff", *batch)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert document is not None
    assert changed_tasks(document) == {}
    assert running_site.edge_key not in finished.stdout
    assert running_site.engine_key not in finished.stdout


def test_one_host_and_one_operation_can_be_run_alone(running_site: Site) -> None:
    finished, document = running_site.playbook("site.yml", "--limit", "gw2", "--tags", "edge")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert document is not None
    ran = [
        (host, operation["name"]) for host, values in document["hosts"].items() for operation in values["operations"]
    ]
    assert ran == [("gw2", "edge")]


@pytest.mark.parametrize("gateway", GATEWAYS)
def test_a_chat_is_answered_whole_and_streaming(running_site: Site, gateway: str) -> None:
    address = f"{running_site.addresses[gateway]}:{site.PUBLIC_PORT}"
    whole = chat.ask(address, running_site.edge_key, MODEL, stream=False)
    streamed = chat.ask(address, running_site.edge_key, MODEL, stream=True)
    assert whole.text == streamed.text != ""
    assert whole.tokens == streamed.tokens > 1
    assert streamed.first_token is not None
    assert streamed.first_token < streamed.seconds


@pytest.mark.parametrize("gateway", GATEWAYS)
@pytest.mark.parametrize(
    ("key", "path", "body", "status"),
    [
        (None, "/v1/chat/completions", {"model": MODEL, "messages": []}, 401),
        ("wrong", "/v1/chat/completions", {"model": MODEL, "messages": []}, 401),
        ("right", "/v1/chat/completions", {"model": "no-such-model", "messages": []}, 404),
        ("right", "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 0}, 400),
        ("right", "/metrics", None, 404),
        ("right", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/"}, 404),
    ],
)
def test_refusals_are_in_the_form_of_openai(
    running_site: Site, gateway: str, key: str | None, path: str, body: dict[str, Any] | None, status: int
) -> None:
    key = running_site.edge_key if key == "right" else key
    found, headers, text = get(f"http://{running_site.addresses[gateway]}:{site.PUBLIC_PORT}{path}", key, body)
    assert found == status, text
    assert headers["content-type"].startswith("application/json")
    error = json.loads(text)["error"]
    assert error["message"]
    assert {"type", "param", "code"} <= set(error)


def test_models_and_adapters_are_listed_and_answer(running_site: Site) -> None:
    base = f"http://{running_site.addresses['gw1']}:{site.PUBLIC_PORT}"
    status, _headers, text = get(f"{base}/v1/models", running_site.edge_key)
    assert status == 200
    assert {model["id"] for model in json.loads(text)["data"]} == {MODEL, "sql", "translate"}
    status, _headers, text = get(
        f"{base}/v1/completions", running_site.edge_key, {"model": "sql", "prompt": "select", "max_tokens": 3}
    )
    assert status == 200, text
    assert json.loads(text)["model"] == "sql"


def test_request_id_is_returned(running_site: Site) -> None:
    url = f"http://{running_site.addresses['gw1']}:{site.PUBLIC_PORT}/v1/models"
    headers = get(url, running_site.edge_key)[1]
    assert headers["x-request-id"]


def test_prometheus_scrapes_every_member(running_site: Site) -> None:
    address = f"http://{running_site.addresses['cpu-c1']}:{site.PROMETHEUS_PORT}"

    def targets() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(get(f"{address}/api/v1/targets")[2])["data"]["activeTargets"]
        return found

    wait_until(lambda: {target["health"] for target in targets()} == {"up"}, "the scrape of every target succeeds")
    scraped = {target["scrapeUrl"] for target in targets()}
    for engine in ENGINES:
        assert f"http://{running_site.addresses[engine]}:8100/metrics" in scraped
    for gateway in GATEWAYS:
        assert f"http://{running_site.addresses[gateway]}:8405/metrics" in scraped
        assert f"http://{running_site.addresses[gateway]}:8406/metrics" in scraped
    for host in PREPROCESSORS:
        assert f"http://{running_site.addresses[host]}:8411/metrics" in scraped


def test_console_page_shows_every_engine(running_site: Site) -> None:
    status, headers, text = get(f"http://{running_site.addresses['gw1']}:{site.SCHEDULER_PORT}/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    for engine in ENGINES:
        assert f"{engine}.main" in text.decode()


def test_pis_carry_no_python(running_site: Site) -> None:
    for host in PREPROCESSORS:
        found = running_site.on(host, "ls /usr/bin/python* /usr/local/bin/python* 2>/dev/null || true")
        assert found == "", host


def test_engines_answer_only_with_the_key(running_site: Site) -> None:
    for engine in ENGINES:
        assert get(f"http://{running_site.addresses[engine]}:8100/v1/models")[0] == 401
        assert get(f"http://{running_site.addresses[engine]}:8100/v1/models", running_site.engine_key)[0] == 200


def test_no_secret_in_a_file_that_others_can_read(running_site: Site) -> None:
    for host in ("gw1", "gpu-a1", "cpu-c1", "pi1"):
        for secret in (running_site.edge_key, running_site.engine_key):
            places = "/etc /opt/ringmaster /var/lib/ringmaster /var/log /run/log /run/systemd/system"
            search = f'grep -rlsF -f - {places} | xargs -r stat -c "%a %n"'
            found = running_site.on(host, search, check=False, stdin=secret)
            readable = [line for line in found.splitlines() if int(line.split()[0][-1]) & 4]
            assert readable == [], host
            if secret == running_site.engine_key and host in KEY_FILES:
                assert KEY_FILES[host] in found, "the search must find the key where it belongs"
            assert secret not in running_site.on(host, "journalctl --no-pager -o cat; ps -eo args", check=False)


def test_client_that_leaves_frees_its_slot_within_a_second(running_site: Site) -> None:
    async def seconds_until_it_is_free() -> float:
        body = json.dumps(
            {"model": MODEL, "prompt": "x", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        ).encode()
        reader, writer = await asyncio.open_connection(running_site.addresses["gw1"], site.PUBLIC_PORT)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: edge\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {running_site.edge_key}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await asyncio.wait_for(reader.readuntil(b"data: "), 60)
        assert running_requests(running_site) == 1
        left = time.monotonic()
        writer.close()
        await writer.wait_closed()
        await asyncio.to_thread(wait_until, lambda: running_requests(running_site) == 0, "the slot is free")
        return time.monotonic() - left

    wait_until(lambda: running_requests(running_site) == 0, "nothing else is being answered")
    within(1.0, lambda: asyncio.run(seconds_until_it_is_free()))


def running_requests(running_site: Site) -> float:
    """Requests that the engines have running or waiting, all together."""
    total = 0.0
    for engine in ENGINES:
        text = get(f"http://{running_site.addresses[engine]}:8100/metrics")[2].decode()
        for line in text.splitlines():
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{")):
                total += float(line.rsplit(" ", 1)[1])
    return total
