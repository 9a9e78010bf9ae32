# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role writes for several sites, and what it refuses to write."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ringmaster_scheduler import haproxy
from tests.unit.edge.loopback_site import CLIENT_KEY, HAPROXIES
from tests.unit.edge.rendering import engine, evaluate, members, render

DIGEST = hashlib.sha256(b"another-key").hexdigest()
KEYS = [{"id": "team-a", "key": CLIENT_KEY}, {"id": "team-b", "sha256": DIGEST.upper()}]
TWO_MODELS = members(
    engine("gpu-a1.main", "Qwen/Qwen2-7B", adapters=["sql", "translate"], max_model_len=131072),
    engine("gpu-a2.main", "Qwen/Qwen2-7B", adapters=["sql", "translate"], max_model_len=65536, max_num_seqs=64),
    engine("gpu-b1.main", "llama", address="2001:db8::1", max_num_seqs=1),
)


def site(**changes: Any) -> dict[str, Any]:
    return {"edge_members": TWO_MODELS, "edge_api_keys": KEYS, "edge_engine_api_key": "engine-key", **changes}


def test_scheduler_is_asked_at_its_own_port() -> None:
    assert evaluate("edge_scheduler") == "127.0.0.1:8407"
    assert evaluate("edge_scheduler", scheduler_spoe_port=9407) == "127.0.0.1:9407"


SITES = {
    "two models": site(),
    "two models that differ in case": site(edge_members=members(engine("a.main", "m"), engine("b.main", "M"))),
    "one model": site(edge_members=members(engine("a.main", "alpha"))),
    "no engine": site(edge_members=members()),
    "preprocessors": site(
        edge_preprocessors=[{"name": "pi1", "address": "192.0.2.17"}, {"name": "pi2", "address": "2001:db8::17"}]
    ),
    "preprocessors and longer bodies than are held": site(
        edge_preprocessors=[{"name": "pi1", "address": "192.0.2.17"}],
        edge_body_bytes_held=16384,
        edge_body_bytes_max=10**8,
        edge_requests_per_minute=60,
    ),
    "no other member": site(edge_members={**members(engine("a.main", "alpha")), "gateways": [], "preprocessors": []}),
    "no keys": site(edge_api_keys=[], edge_engine_api_key=""),
    "IPv6": site(edge_address="::1", edge_public_address="[::]"),
    "limits": site(edge_threads=2, edge_connections_max=500, edge_body_bytes_max=16384),
    "limits of keys": site(
        edge_requests_per_minute=60, edge_prompt_tokens_per_minute=10**9, edge_concurrent_requests=7
    ),
    "no limits at all": site(edge_source_connections_max=0, edge_queue_max=10**6),
    "one class": site(edge_classes=[{"name": "all", "deadline_s": 0.5}]),
    "longer bodies than are held": site(edge_body_bytes_held=16384, edge_body_bytes_max=10**8),
    "numbers as text": site(
        edge_threads="2",
        edge_connections_max="500",
        edge_server_maxconn_factor="1.5",
        edge_requests_per_minute="60",
        edge_body_bytes_held="16384",
        edge_header_bytes_max="4096",
        edge_source_connections_max="9",
    ),
}


@pytest.mark.parametrize("name", SITES)
def test_haproxy_takes_the_configuration_without_a_warning(tmp_path: Path, version: str, name: str) -> None:
    # The scheduler of the gateway has written it; without the file, 2.6 warns.
    server_state = tmp_path / "haproxy-servers"
    server_state.write_text(haproxy.server_state([]))
    configuration = render(tmp_path, edge_server_state_path=str(server_state), **SITES[name])
    check = subprocess.run(
        [HAPROXIES[version], "-c", "-dW", "-f", str(configuration)], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr


def test_engine_whose_name_is_not_known_keeps_nobody_from_being_served(tmp_path: Path, version: str) -> None:
    served = members(engine("a.main", "alpha", address="nowhere.invalid"), engine("b.main", "alpha"))
    configuration = render(tmp_path, **site(edge_members=served))
    check = subprocess.run(
        [HAPROXIES[version], "-c", "-f", str(configuration)], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr


def test_models_that_differ_in_case_have_pools_of_their_own() -> None:
    pools = evaluate("edge_pools", edge_members=members(engine("a.main", "m"), engine("b.main", "M")))
    assert {pool["backend"]: [each["name"] for each in pool["engines"]] for pool in pools} == {
        "pool_M": ["b.main"],
        "pool_m": ["a.main"],
    }


@pytest.mark.parametrize("name", SITES)
def test_no_key_stands_in_a_file_that_others_can_read(tmp_path: Path, name: str) -> None:
    render(tmp_path, **SITES[name])
    for file in evaluate("edge_files"):
        text = (tmp_path / "generation" / file["name"]).read_text()
        assert CLIENT_KEY not in text
        if not file["secret"]:
            assert "engine-key" not in text
            assert DIGEST not in text
        else:
            assert file["mode"] == "0600"
    text = (tmp_path / "haproxy.cfg").read_text()
    assert CLIENT_KEY not in text
    assert not re.search(r"engine-key(?!\.map)", text)


def test_keys_are_known_by_their_digest(tmp_path: Path) -> None:
    render(tmp_path, **site())
    lines = (tmp_path / "generation" / "keys.map").read_text().splitlines()
    assert lines == [f"{hashlib.sha256(CLIENT_KEY.encode()).hexdigest()} team-a", f"{DIGEST} team-b"]


def test_models_and_adapters_lead_to_their_pool(tmp_path: Path) -> None:
    render(tmp_path, **site())
    assert (tmp_path / "generation" / "models.map").read_text().splitlines() == [
        "Qwen/Qwen2-7B pool_Qwen_Qwen2-7B",
        "sql pool_Qwen_Qwen2-7B",
        "translate pool_Qwen_Qwen2-7B",
        "llama pool_llama",
    ]


def test_listed_length_is_what_every_engine_of_the_pool_can_serve(tmp_path: Path) -> None:
    render(tmp_path, **site())
    text = (tmp_path / "generation" / "models.json").read_text().replace("%[date]", "0")
    assert {card["id"]: card["max_model_len"] for card in json.loads(text)["data"]} == {
        "Qwen/Qwen2-7B": 65536,
        "sql": None,
        "translate": None,
        "llama": 32768,
    }


@pytest.mark.parametrize(("factor", "expected"), [(1.0, [256, 64, 1]), (1.5, [384, 96, 1]), (0.1, [25, 6, 1])])
def test_engine_takes_what_it_can_hold_and_one_at_least(tmp_path: Path, factor: float, expected: list[int]) -> None:
    text = render(tmp_path, **site(edge_server_maxconn_factor=factor)).read_text()
    assert [int(number) for number in re.findall(r"server gpu-.* maxconn (\d+)", text)] == expected


@pytest.mark.parametrize(("length", "expected"), [(2048, 262_144), (32_768, 262_144), (131_072, 1_048_576)])
def test_buffer_has_room_for_the_longest_context(length: int, expected: int) -> None:
    served = members(engine("a.main", "alpha", max_model_len=length), engine("b.main", "beta", max_model_len=1024))
    assert evaluate("edge_body_bytes_max", edge_members=served) == expected


@pytest.mark.parametrize(
    ("engines", "held"),
    [
        ([], 49_152),
        ([engine("a.main", "alpha")], 49_152),
        ([engine("a.main", "alpha", adapters=["sql"])], 262_144),
        ([engine("a.main", "alpha"), engine("b.main", "beta", max_model_len=131_072)], 1_048_576),
    ],
)
def test_body_is_held_whole_only_where_the_name_of_the_model_has_to_be_found_in_it(
    engines: list[dict[str, Any]], held: int
) -> None:
    assert evaluate("edge_body_bytes_held | int", edge_members=members(*engines)) == held
    assert evaluate("edge_body_bytes_held | int", edge_members=members(*engines), edge_body_bytes_max=20_000) == 20_000


def test_classes_and_the_end_of_the_wait_are_the_schedulers() -> None:
    assert evaluate("edge_timeout_queue") == "60s"
    classes = [
        {"name": "short", "prompt_tokens_max": 10, "deadline_s": 1.5},
        {"name": "long", "prompt_tokens_max": None, "deadline_s": 90.5},
    ]
    assert evaluate("edge_classes", scheduler_policy={"classes": classes}) == classes
    assert evaluate("edge_timeout_queue", scheduler_policy={"classes": classes}) == "91s"
    assert [each["name"] for each in evaluate("edge_classes", scheduler_policy={})] == ["fast", "normal", "slow"]


@pytest.mark.parametrize(
    ("common", "clients", "limited"),
    [
        ({}, [], False),
        ({}, [{"id": "a", "requests_per_minute": 0}], False),
        ({}, [{"id": "a"}, {"id": "b", "concurrent_requests": 1}], True),
        ({"edge_prompt_tokens_per_minute": 1}, [], True),
    ],
)
def test_keys_are_counted_only_where_one_has_a_limit(
    common: dict[str, int], clients: list[dict[str, Any]], limited: bool
) -> None:
    assert evaluate("edge_limited", edge_api_keys=clients, **common) is limited


def test_generation_follows_the_certificates(tmp_path: Path) -> None:
    def rendered(checksum: str) -> str:
        state = {"stat": {"path": "/etc/ssl/edge.pem", "checksum": checksum}}
        return str(
            evaluate(
                "edge_rendered",
                **site(edge_tls_certificate="/etc/ssl/edge.pem", edge_certificate_states={"results": [state]}),
            )
        )

    assert rendered("a" * 64) != rendered("b" * 64)
    assert rendered("a" * 64) == rendered("a" * 64)


@pytest.mark.parametrize(
    ("clients", "wrong"),
    [
        (KEYS, []),
        ([], []),
        ([{"id": "a"}], ["a"]),
        ([{"id": "a", "key": ""}], ["a"]),
        ([{"id": "a", "key": "short"}], ["a"]),
        ([{"id": "a", "key": "with space in it"}], ["a"]),
        ([{"id": "a", "key": "line\nbreak-in-it"}], ["a"]),
        ([{"id": "a", "key": "trailing-line-break\n"}], ["a"]),
        ([{"id": "a", "key": "schlüssel-eins"}], ["a"]),
        ([{"id": "a", "key": "sufficient", "sha256": DIGEST}], ["a"]),
        ([{"id": "a", "sha256": DIGEST[:-1]}], ["a"]),
        ([{"id": "a", "sha256": "g" * 64}], ["a"]),
        ([{"id": "a b", "key": "sufficient"}], ["a b"]),
        ([{"id": "a\nb", "key": "sufficient"}], ["a\nb"]),
        ([{"key": "sufficient"}], ["(no id)"]),
        ([{"id": "a", "key": "sufficient"}, {"id": "a", "key": "different"}], ["a"]),
        ([{"id": "a", "key": "another-key"}, {"id": "b", "sha256": DIGEST}], ["b"]),
    ],
)
def test_clients_that_cannot_be_told_apart_or_checked_are_named(
    clients: list[dict[str, str]], wrong: list[str]
) -> None:
    assert evaluate("edge_wrong_clients", edge_api_keys=clients) == wrong
