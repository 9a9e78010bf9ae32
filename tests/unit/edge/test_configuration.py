# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role writes for several sites, and what it refuses to write."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.edge.loopback_site import CLIENT_KEY, HAPROXY, Edge, Engine, running
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
    "no other member": site(edge_members={**members(engine("a.main", "alpha")), "gateways": [], "preprocessors": []}),
    "no keys": site(edge_api_keys=[], edge_engine_api_key=""),
    "IPv6": site(edge_address="::1", edge_public_address="[::]"),
    "limits": site(edge_threads=2, edge_connections_max=500, edge_body_bytes_max=16384),
    "numbers as text": site(edge_threads="2", edge_connections_max="500", edge_server_maxconn_factor="1.5"),
}


@pytest.mark.skipif(HAPROXY is None, reason="HAProxy is not installed")
@pytest.mark.parametrize("name", SITES)
def test_haproxy_takes_the_configuration_without_a_warning(tmp_path: Path, name: str) -> None:
    configuration = render(tmp_path, **SITES[name])
    check = subprocess.run(
        [str(HAPROXY), "-c", "-dW", "-f", str(configuration)], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr


@pytest.mark.skipif(HAPROXY is None, reason="HAProxy is not installed")
def test_engine_whose_name_is_not_known_keeps_nobody_from_being_served(tmp_path: Path) -> None:
    served = members(engine("a.main", "alpha", address="nowhere.invalid"), engine("b.main", "alpha"))
    configuration = render(tmp_path, **site(edge_members=served))
    check = subprocess.run([str(HAPROXY), "-c", "-f", str(configuration)], capture_output=True, text=True, check=False)
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


@pytest.mark.skipif(HAPROXY is None or shutil.which("openssl") is None, reason="HAProxy or openssl is not installed")
def test_with_a_certificate_the_public_frontend_speaks_tls(tmp_path: Path) -> None:
    certificate = tmp_path / "edge.pem"
    request = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=edge -keyout key -out chain"
    )
    subprocess.run(request.split(" "), cwd=tmp_path, capture_output=True, check=True)
    certificate.write_text((tmp_path / "chain").read_text() + (tmp_path / "key").read_text())
    only = Engine()
    edge = Edge(
        tmp_path / "edge",
        edge_members=members(engine("a.main", "alpha", only.port)),
        edge_tls_certificate=str(certificate),
    )
    client = ssl.create_default_context(cafile=str(certificate))
    client.check_hostname = False
    client.set_alpn_protocols(["h2", "http/1.1"])
    with running(edge, only):
        edge.wait_for_engines("pool_alpha", 1)
        with client.wrap_socket(edge.connected(), server_hostname="edge") as connection:
            assert connection.version() == "TLSv1.3"
            assert connection.selected_alpn_protocol() == "h2"
