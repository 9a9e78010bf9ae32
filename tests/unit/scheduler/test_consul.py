# SPDX-License-Identifier: GPL-3.0-or-later
"""The members as Consul lists them: answers right and wrong, indexes, loss and return."""

from __future__ import annotations

import asyncio
import datetime
import gzip
import ipaddress
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from ringmaster_scheduler import consul
from ringmaster_scheduler.consul import ConsulMembers, ConsulSettings, merge, read_answer
from ringmaster_scheduler.members import MembersError, MembersFile
from tests.unit.scheduler.fake_consul import FakeConsul, instance
from tests.unit.scheduler.test_members import entry

PATIENCE = 20.0
MAINTENANCE = "_service_maintenance:ID"


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "did not come true"
        await asyncio.sleep(0.01)


def engines(*names: str, **replaced: Any) -> list[dict[str, Any]]:
    return [instance("engines", entry(name=name, host=name, adapters=[], **replaced)) for name in names]


def names(source: ConsulMembers) -> list[str]:
    return [engine.name for engine in source.engines or ()]


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consul, "_SHORTEST_PAUSE", 0.01)
    monkeypatch.setattr(consul, "_FIRST_WAIT", 0.02)
    monkeypatch.setattr(consul, "_LONGEST_WAIT", 0.05)
    monkeypatch.setattr(consul, "_MARGIN", 1.0)


@pytest_asyncio.fixture
async def fakes() -> AsyncIterator[list[FakeConsul]]:
    started = [FakeConsul(), FakeConsul()]
    for fake in started:
        await fake.start()
    yield started
    for fake in started:
        await fake.close()


class Followed:
    """A source that follows until the block ends."""

    def __init__(self, settings: ConsulSettings) -> None:
        self.source = ConsulMembers(settings)
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> ConsulMembers:
        self.tasks = self.source.start()
        return self.source

    async def __aexit__(self, *_unused: object) -> None:
        assert not any(task.done() for task in self.tasks)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.source.close()


def follow(*fakes: FakeConsul, kept: Path | None = None, wait: float = 0.2, token: str = "") -> Followed:
    addresses = tuple(fake.address for fake in fakes)
    return Followed(ConsulSettings(addresses, token=token, wait=wait, kept_file=str(kept or "")))


def test_answer_becomes_the_document_that_the_file_has() -> None:
    adapters = [f"adapter-{number}" for number in range(200)]
    listed = [
        instance("gateways", {"name": "gw1", "address": "10.0.0.9"}),
        instance("engines", entry(name="b", adapters=adapters)),
        instance("engines", entry(name="a"), MAINTENANCE),
        instance("agents", {"host": "gpu-a1", "address": "10.0.0.1", "port": 8409}),
        instance("monitors", {"name": "m1", "address": "10.0.0.8"}),
        instance("preprocessors", {"name": "pi1", "address": "10.0.0.7"}),
        instance("later", {"name": "x"}, schema="2"),
    ]
    lists, maintained = read_answer(json.dumps(listed).encode())
    assert lists == {
        "engines": [entry(name="a"), entry(name="b", adapters=adapters)],
        "agents": [{"host": "gpu-a1", "address": "10.0.0.1", "port": 8409}],
        "gateways": [{"name": "gw1", "address": "10.0.0.9"}],
        "monitors": [{"name": "m1", "address": "10.0.0.8"}],
        "preprocessors": [{"name": "pi1", "address": "10.0.0.7"}],
    }
    assert maintained == {"a"}


def test_maintenance_of_the_host_counts_and_that_of_another_service_does_not() -> None:
    listed = [
        instance("engines", entry(name="a"), "_node_maintenance"),
        instance("engines", entry(name="b"), "_service_maintenance:other", "engine:b:health"),
    ]
    assert read_answer(json.dumps(listed).encode())[1] == {"a"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "not a JSON document"),
        (b"\xff", "not a JSON document"),
        (b"[" * 100_000, "not a JSON document"),
        (b"{}", "expected a list of instances"),
        (b"[1]", "instance 0: expected an object"),
        (b'[{"Service": null}]', "instance 0.Service: expected an object"),
        (b'[{"Service": {"Meta": 1}}]', "instance 0.Service.Meta: expected an object"),
        (json.dumps([instance("engines", entry(), document_01=7)]).encode(), "expected texts"),
        (json.dumps([instance("engines", entry(), document_01="{")]).encode(), "its document is not JSON"),
        (json.dumps([instance("engines", {"host": "x"})]).encode(), "expected a document with name"),
        (json.dumps([{**instance("engines", entry()), "Checks": None}]).encode(), "expected a list of checks"),
        (json.dumps([{**instance("engines", entry()), "Checks": [7]}]).encode(), "a check: expected an object"),
        (json.dumps([instance("engines", entry(), schema="2")]).encode(), "expected schema 1, found '2'"),
        (json.dumps([instance("engines", entry(), schema=None)]).encode(), "expected schema 1, found None"),
    ],
)
def test_answer_that_is_refused(answer: bytes, message: str) -> None:
    with pytest.raises(MembersError, match=message):
        read_answer(answer)


def test_check_of_any_name_is_no_maintenance() -> None:
    for name in ([], {}, None, 7, "x" * 100_000):
        listed = {**instance("engines", entry()), "Checks": [{"CheckID": name}, {}]}
        assert read_answer(json.dumps([listed]).encode())[1] == frozenset()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["Service", "Checks", "Meta", "list", "document_00"]), JSON_VALUES)
def test_any_value_anywhere_is_used_or_refused(key: str, value: object) -> None:
    listed = instance("engines", entry())
    for place in (listed, listed["Service"], listed["Service"]["Meta"]):
        if key in place:
            place[key] = value
            break
    try:
        lists, _unused = read_answer(json.dumps([listed]).encode())
    except MembersError:
        return
    assert all(isinstance(each["name"], str) for each in lists["engines"])


@given(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")))
def test_merging_keeps_what_is_missing_and_takes_what_is_new(former: set[str], present: set[str]) -> None:
    def lists(chosen: set[str], port: int) -> consul.Lists:
        return {"engines": [entry(name=name, port=port) for name in sorted(chosen)]} | {
            name: [] for name in ("agents", "gateways", "monitors", "preprocessors")
        }

    merged = merge(lists(former, 1), lists(present, 2))["engines"]
    assert [each["name"] for each in merged] == sorted(former | present)
    assert all(each["port"] == (2 if each["name"] in present else 1) for each in merged)


async def test_changes_come_by_blocking_queries(fakes: list[FakeConsul]) -> None:
    fake = fakes[0]
    fake.set([*engines("a"), instance("gateways", {"name": "g1"}), instance("gateways", {"name": "g2"})])
    async with follow(fake, token="secret", wait=30) as source:
        await eventually(lambda: names(source) == ["a"])
        assert (source.error, source.gateways) == ("", 2)
        assert source.poll()
        assert not source.poll()
        await eventually(lambda: len(fake.questions) == 2)
        assert fake.questions == [{"stale": ""}, {"stale": "", "index": "11", "wait": "30000ms"}]
        fake.set(engines("a", "b"))
        await eventually(lambda: names(source) == ["a", "b"])
        assert source.poll()
        assert set(fake.tokens) == {"secret"}


async def test_waiting_without_a_change_is_no_failure(fakes: list[FakeConsul]) -> None:
    fakes[0].set(engines("a"))
    async with follow(fakes[0], wait=0.05) as source:
        await eventually(lambda: len(fakes[0].questions) >= 4)
        assert (source.error, source.failures) == ("", 0)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "500": ({"status": 500, "body": b"No cluster leader\n"}, "HTTP status 500: No cluster leader"),
    "403": ({"status": 403, "body": b"ACL not found"}, "HTTP status 403: ACL not found"),
    "no leader": ({"leader": "false"}, "no leader"),
    "nonsense": ({"body": b"<html>"}, "not used: not a JSON document"),
    "binary": ({"body": bytes(range(256))}, "not used: not a JSON document"),
    "empty": ({"body": b""}, "not used: not a JSON document"),
    "no engine": ({"body": b"[]"}, "not used: lists no engine"),
    "no index": ({"header": ""}, "expected a number as X-Consul-Index"),
    "wild index": ({"header": "-7"}, "expected a number as X-Consul-Index, found '-7'"),
    "cut": ({"cut": True}, ""),
    "hang": ({"hang": True}, "no answer within"),
    "slow": ({"drip": True}, "no answer within"),
    "other schema": (
        {"body": json.dumps(engines("a") + [instance("engines", entry(), schema="2")]).encode()},
        "schema",
    ),
    "compressed": ({"body": gzip.compress(json.dumps(engines("a")).encode())}, "not used: not a JSON document"),
    "endless number": ({"body": b"[" + b"9" * 100_000 + b"]"}, "not used: "),
    "long text": (
        {"body": json.dumps([instance("engines", {"name": "x" * 50_000})]).encode()},
        r"^.{300}$",
    ),
    "control characters": (
        {"status": 500, "body": b"\x1b[2J\nengine a is drained\x00"},
        "HTTP status 500: .2Jengine a is drained$",
    ),
    "elsewhere": ({"redirect": "http://127.0.0.1:1/"}, "HTTP status 307"),
    "bad entry": (
        {"body": json.dumps(engines("a") + engines("b", port=0)).encode()},
        r"not used: engines\[1\].port: expected an integer",
    ),
    "twice": ({"body": json.dumps(engines("a", "a")).encode()}, "not used: two engines are named a"),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
async def test_what_is_wrong_is_said_and_the_former_members_stay(fakes: list[FakeConsul], fault: str) -> None:
    fake = fakes[0]
    fake.set(engines("a", "b"))
    settings, message = FAULTS[fault]
    async with follow(fake) as source:
        await eventually(lambda: names(source) == ["a", "b"])
        for name, value in settings.items():
            setattr(fake, name, value)
        fake.set(fake.listed)
        await eventually(lambda: source.failures > 0)
        assert source.error.startswith(fake.address)
        assert re.search(message, source.error)
        assert names(source) == ["a", "b"]
        fake.status, fake.body, fake.header, fake.leader, fake.redirect = 200, None, None, "true", ""
        fake.hang = fake.cut = fake.drip = False
        fake.set(engines("a", "b", "c"))
        await eventually(lambda: source.error == "" and names(source) == ["a", "b", "c"])


async def test_answer_of_any_size_is_cut_off(fakes: list[FakeConsul], monkeypatch: pytest.MonkeyPatch) -> None:
    fakes[0].set(engines("a"))
    async with follow(fakes[0]) as source:
        await eventually(lambda: names(source) == ["a"])
        monkeypatch.setattr(consul, "_LARGEST_ANSWER", 10_000)
        fakes[0].set(engines("a", "b") + [instance("later", {"name": "x"}, document_50="x" * 20_000)])
        await eventually(lambda: "over 10000 bytes" in source.error)
        assert names(source) == ["a"]


@pytest.mark.parametrize("depth", [10, 900, 940, 960, 970, 980, 985, 990, 1000, 24_000])
async def test_document_of_any_depth_is_used_or_refused(fakes: list[FakeConsul], depth: int) -> None:
    fake = fakes[0]
    fake.set(engines("a"))
    async with follow(fake) as source:
        await eventually(lambda: names(source) == ["a"])
        # Cut in by hand: what writes JSON here has a limit as well.
        nested = json.dumps(entry(name="b", host="b", later=0)).replace(
            '"later": 0', f'"later": {"[" * depth}{"]" * depth}'
        )
        fake.set([*engines("a"), instance("engines", {"name": "b"}, document_00=nested)])
        await eventually(lambda: source.failures > 0 or names(source) == ["a", "b"])
        assert source.failures == 0 or names(source) == ["a"]
        fake.set(engines("a", "c"))
        await eventually(lambda: source.error == "" and "c" in names(source))


async def test_catalog_without_an_engine_is_no_knowledge_even_for_who_has_none(fakes: list[FakeConsul]) -> None:
    """A token that may see nothing gets the same answer as a catalog that is empty."""
    async with follow(fakes[0]) as source:
        await eventually(lambda: "lists no engine" in source.error)
        assert source.engines is None


Certify = Callable[..., ssl.SSLContext]


@pytest.fixture
def authority(tmp_path: Path) -> Certify:
    """Return what makes certificates, by default right ones, of the authority in `ca.pem`."""
    now = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)
    folder = tmp_path

    def make(name: str, issuer: Any = None, address: str = "127.0.0.1", begin: int = -1, end: int = 1) -> Any:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer[0].subject if issuer else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begin * day)
            .not_valid_after(now + end * day)
            .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        )
        certificate = builder.sign(issuer[1] if issuer else key, hashes.SHA256())
        text = certificate.public_bytes(serialization.Encoding.PEM)
        (folder / f"{name}.pem").write_bytes(
            text
            + key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate, key

    known = make("ca")

    def certify(other_authority: bool = False, **settings: Any) -> ssl.SSLContext:
        make("server", make("other") if other_authority else known, **settings)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem")
        return context

    return certify


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"begin": -2, "end": -1}, "certificate has expired"),
        ({"begin": 1, "end": 2}, "certificate is not yet valid"),
        ({"other_authority": True}, "unable to get local issuer certificate|self-signed certificate"),
        ({"address": "127.0.0.2"}, "IP address mismatch"),
        (None, "SSL|TLS|disconnected|reset"),
    ],
    ids=["expired", "clock", "authority", "address", "plain"],
)
async def test_who_cannot_prove_to_be_consul_is_not_told_the_token(
    authority: Certify, tmp_path: Path, wrong: dict[str, Any] | None, message: str
) -> None:
    fake = FakeConsul("https")
    fake.set(engines("a"))
    try:
        await fake.start(authority())
        settings = ConsulSettings((fake.address,), token="secret", ca_file=str(tmp_path / "ca.pem"), wait=0.2)
        async with Followed(settings) as source:
            await eventually(lambda: names(source) == ["a"] and source.error == "")
            await fake.stop()
            fake.tokens.clear()
            fake.set(engines("a", "b"))
            await fake.start(None if wrong is None else authority(**wrong))
            await eventually(lambda: re.search(message, source.error) is not None)
            assert names(source) == ["a"]
            assert fake.tokens == []
            await fake.stop()
            await fake.start(authority())
            await eventually(lambda: names(source) == ["a", "b"] and source.error == "")
    finally:
        await fake.close()


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nxx"])
async def test_authorities_that_cannot_be_read_are_not_gone_without(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OSError, match=r"\[SSL|\[X509|\[PEM|No such file"):
        ConsulMembers(ConsulSettings(("https://127.0.0.1:1",), ca_file=str(file)))


async def test_without_leader_and_without_knowledge_the_servers_word_is_taken(fakes: list[FakeConsul]) -> None:
    fakes[0].leader = "false"
    fakes[0].set(engines("a"))
    async with follow(fakes[0]) as source:
        await eventually(lambda: names(source) == ["a"] and "no leader" in source.error)
        assert source.confirmed_at is None


async def test_index_that_goes_backwards_begins_anew_and_nobody_is_lost_meanwhile(
    fakes: list[FakeConsul], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = fakes[0]
    fake.set(engines("a", "b"), index=1000)
    monkeypatch.setattr(consul, "_HOLD", 0.0)
    async with follow(fake) as source:
        await eventually(lambda: names(source) == ["a", "b"])
        monkeypatch.setattr(consul, "_HOLD", 1.0)
        # The catalog was lost and fills up again.
        fake.set(engines("b", "c"), index=3)
        await eventually(lambda: names(source) == ["a", "b", "c"])
        assert source.held == {"a"}
        await eventually(lambda: fake.questions[-1].get("index") == "3")
        assert {"stale": ""} in fake.questions[1:]
        # Who does not come back is gone in the end, though Consul's answer is the same as before.
        await eventually(lambda: names(source) == ["b", "c"])
        assert (source.error, source.held) == ("", frozenset())


async def test_member_that_leaves_is_gone_at_once(fakes: list[FakeConsul], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consul, "_HOLD", 0.0)
    fakes[0].set(engines("a", "b"))
    async with follow(fakes[0], wait=30) as source:
        await eventually(lambda: names(source) == ["a", "b"])
        monkeypatch.setattr(consul, "_HOLD", 3600.0)
        fakes[0].set(engines("a"))
        await eventually(lambda: names(source) == ["a"])


async def test_other_address_takes_over_and_the_first_comes_back(
    fakes: list[FakeConsul], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consul, "_RETURN_AFTER", 0.5)
    first, second = fakes
    first.set(engines("a"))
    second.set(engines("a", "b"), index=11)
    async with follow(first, second) as source:
        await eventually(lambda: names(source) == ["a"])
        await first.stop()
        await eventually(lambda: names(source) == ["a", "b"])
        assert source.path == f"Consul at {second.address}"
        assert (source.error, source.failures) == ("", 0)
        # Nothing was interrupted: who leaves is gone, however often the first address is tried in vain.
        source._hold_until = 0.0
        await asyncio.sleep(0.6)
        second.set(engines("b"))
        await eventually(lambda: names(source) == ["b"])
        first.set(engines("a", "b", "c"), index=20)
        await first.start()
        await eventually(lambda: names(source) == ["a", "b", "c"])
        assert source.path == f"Consul at {first.address}"


async def test_maintenance_begins_and_ends(fakes: list[FakeConsul]) -> None:
    fakes[0].set([instance("engines", entry(name="a"), MAINTENANCE), *engines("b")])
    async with follow(fakes[0]) as source:
        await eventually(lambda: source.maintained == {"a"})
        fakes[0].set(engines("a", "b"))
        await eventually(lambda: source.maintained == frozenset())


async def test_last_members_outlive_a_restart_without_consul(fakes: list[FakeConsul], tmp_path: Path) -> None:
    kept = tmp_path / "members.json"
    agent = {"host": "gpu-a1", "address": "10.0.0.1", "port": 8409}
    listed = [instance("engines", entry(name="a"), MAINTENANCE), *engines("b"), instance("agents", agent)]
    fakes[0].set([*listed, instance("gateways", {"name": "g1"}), instance("gateways", {"name": "g2"})])
    async with follow(fakes[0], kept=kept) as source:
        await eventually(lambda: source.error == "")
    await fakes[0].stop()
    # A scheduler that was killed while it wrote.
    kept.with_name("members.json.new").write_bytes(kept.read_bytes()[:100])
    async with follow(fakes[0], kept=kept) as again:
        assert (names(again), again.gateways, again.maintained) == (["a", "b"], 2, {"a"})
        assert again.agents == source.agents != ()
        assert again.error == "not asked yet, members as of the last run"
        assert again.confirmed_at is None
        await eventually(lambda: again.failures > 0)
        assert names(again) == ["a", "b"]
    file = MembersFile(str(kept))
    file.poll()
    assert (file.engines, file.maintained) == (source.engines, {"a"})


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[1]", b'{"schema": 1, "engines": 7}', b'{"schema": 1, "engines": []}', bytes(100)]
)
async def test_kept_file_that_is_no_use_does_no_harm(
    fakes: list[FakeConsul], tmp_path: Path, content: bytes | None
) -> None:
    kept = tmp_path / "members.json"
    if content is not None:
        kept.write_bytes(content)
    fakes[0].set(engines("a"))
    async with follow(fakes[0], kept=kept) as source:
        assert source.engines is None
        await eventually(lambda: names(source) == ["a"])


async def test_kept_file_that_is_wrong_beside_its_engines_serves_them(fakes: list[FakeConsul], tmp_path: Path) -> None:
    kept = tmp_path / "members.json"
    other: dict[str, Any] = {"gateways": 5, "monitors": {"name": "m"}, "preprocessors": [7], "maintained": None}
    kept.write_text(json.dumps({"schema": 1, "engines": [entry(name="a", host="a", adapters=[])], **other}))
    await fakes[0].stop()
    async with follow(fakes[0], kept=kept) as source:
        assert (names(source), source.gateways, source.maintained) == (["a"], 1, frozenset())
        fakes[0].set(engines("b"))
        await fakes[0].start()
        await eventually(lambda: names(source) == ["a", "b"])
        assert source.held == {"a"}


async def test_that_cannot_be_kept_is_used_all_the_same(fakes: list[FakeConsul], tmp_path: Path) -> None:
    fakes[0].set(engines("a"))
    async with follow(fakes[0], kept=tmp_path / "missing" / "members.json") as source:
        await eventually(lambda: names(source) == ["a"] and source.error == "")
