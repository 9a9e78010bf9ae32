# SPDX-License-Identifier: GPL-3.0-or-later
"""The main job: the site's playbook on the fleet, a real answer through the edge, and the summary."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils.evidence import render
from rehearsal import chat, fleet, inventory
from rehearsal.checkout import Checkout, RehearsalError, say

PUBLIC_PORT = 8080
SCHEDULER_PORT = 8406
PROMETHEUS_PORT = 9090


def run(checkout: Checkout, playbook_arguments: Sequence[str]) -> int:
    """Start or repair the fleet, run site.yml on it, chat through every gateway, and print the summary.

    Gives the playbook's exit status when it failed (the summary of what was done is printed all the same).
    """
    addresses = fleet.up(checkout)
    site = inventory.read(checkout)
    say(f"the fleet is up: {len(addresses)} hosts; running playbooks/site.yml")
    started = time.time()
    status = playbook(checkout, "site.yml", playbook_arguments)
    document = newest_evidence(checkout, started)
    ways: list[str] = []
    if status == 0 and "--check" not in playbook_arguments:
        ways = _chat(checkout, site, addresses)
    gateways, monitors = site.groups.get("gateways", []), site.groups.get("monitors", [])
    places = [f"console     {host:8} http://{addresses[host]}:{SCHEDULER_PORT}/" for host in gateways]
    places += [f"Prometheus  {host:8} http://{addresses[host]}:{PROMETHEUS_PORT}/" for host in monitors]
    places += [f"chat        {way}" for way in ways]
    if document is not None:
        print(f"\n{render(document, places, shutil.get_terminal_size((120, 40)).columns)}")
    if status != 0:
        say(f"site.yml failed with status {status}: the first failed task above says what was expected and what to do")
        return status
    say("the rehearsal is done")
    return 0


def playbook(checkout: Checkout, name: str, arguments: Sequence[str]) -> int:
    """Run a playbook of the collection on the fleet, its output passed on as it comes; gives its exit status."""
    command = ["ansible-playbook", "--inventory", str(checkout.inventory), *arguments, f"playbooks/{name}"]
    # The summary is printed once, at the end of the main job.
    environment = {**checkout.environment, "RINGMASTER_EVIDENCE_SUMMARY": "false"}
    return subprocess.run(command, env=environment, cwd=checkout.root, check=False).returncode


def newest_evidence(checkout: Checkout, since: float) -> dict[str, Any] | None:
    """The evidence document that the last run wrote, if it wrote one after `since` (Unix time)."""
    documents = [path for path in checkout.evidence.glob("*.json") if path.stat().st_mtime >= since - 1]
    if not documents:
        return None
    document: dict[str, Any] = json.loads(max(documents, key=lambda path: path.stat().st_mtime).read_text())
    return document


def access_log(checkout: Checkout, gateway: str, request_id: str) -> list[dict[str, Any]]:
    """Lines of a gateway's access log about a request, one for each time that it came by, the first pass last."""
    since = ["--since", "-10min"]
    command = ["sudo", "journalctl", "--unit", "haproxy", *since, "--no-pager", "--output", "cat", "--grep", request_id]
    finished = subprocess.run(
        [*fleet.ssh_command(checkout, fleet.address_of(checkout, gateway)), shlex.join(command)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line[line.find("{") :] for line in finished.stdout.splitlines() if request_id in line]
    return [json.loads(line) for line in lines]


def way_of(checkout: Checkout, gateway: str, request_id: str) -> str:
    """The hosts that a request passed on its way from the client through a gateway to an engine, by the access log."""
    deadline = time.monotonic() + 10  # HAProxy writes its line when the answer has ended
    while True:
        lines = {line["frontend"]: line for line in access_log(checkout, gateway, request_id)}
        last = lines.get("dispatch") or lines.get("public")
        if "public" in lines and last and last["pool"] != "preprocessors":
            break
        if time.monotonic() > deadline:
            raise RehearsalError(
                f"expected request {request_id} and its engine in the access log of {gateway}, found "
                f"{', '.join(lines) or 'nothing'}; to do: journalctl --unit haproxy on {gateway} and its neighbours"
            )
        time.sleep(0.2)
    hosts = ["client", gateway]
    if lines["public"]["pool"] == "preprocessors":
        hosts += [lines["public"]["engine"], gateway]
    how = "counted" if last["prompt_tokens_from"] == "header" else "estimated"
    return f"{' → '.join([*hosts, last['engine']])}, {last['prompt_tokens']} tokens of the prompt {how}"


def _chat(checkout: Checkout, site: inventory.Inventory, addresses: dict[str, str]) -> list[str]:
    """Ask every model through every gateway, whole and streaming; gives the ways that the chats went."""
    key = (checkout.state / "secrets" / "edge_api_key").read_text().strip()
    gateways = site.groups.get("gateways", [])
    if not gateways:
        raise RehearsalError("expected a host in the group gateways, found none; to do: list one in the inventory")
    models = site.variables[gateways[0]]["ringmaster_models"]
    ways = []
    for host in gateways:
        for model in models:
            for stream in (False, True):
                answer = chat.ask(f"{addresses[host]}:{PUBLIC_PORT}", key, model, stream=stream)
                first = f", first token after {answer.first_token * 1000:.0f} ms" if answer.first_token else ""
                how = "streaming" if stream else "whole"
                say(f"{model} through {host}, {how}: {answer.tokens} tokens{first}, {answer.rate:.1f} tokens/s")
                print(f"           {answer.text!r}")
                ways.append(way_of(checkout, host, answer.request_id))
    return ways
