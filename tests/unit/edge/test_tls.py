# SPDX-License-Identifier: GPL-3.0-or-later
"""What the public frontend speaks with a certificate, and how a renewed one comes into use."""

from __future__ import annotations

import http.client
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.edge.loopback_site import CLIENT_KEY, PATIENCE, Edge, Engine, running
from tests.unit.edge.rendering import engine, members

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def make_certificate(directory: Path, name: str, kind: str = "ec") -> Path:
    """Write a certificate for a name, signed by itself, and its key into one PEM file."""
    algorithm = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"] if kind == "ec" else ["-newkey", "rsa:2048"]
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["openssl", "req", "-x509", *algorithm, "-nodes", "-subj", f"/CN={name}", "-keyout", "key", "-out", "chain"],
        cwd=directory,
        capture_output=True,
        check=True,
    )
    certificate = directory / "edge.pem"
    certificate.write_text((directory / "chain").read_text() + (directory / "key").read_text())
    return certificate


def context(**limits: object) -> ssl.SSLContext:
    """A client that looks at no certificate, as this is about what is spoken."""
    made = ssl.create_default_context()
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    for name, value in limits.items():
        setattr(made, name, value)
    return made


def common_name(connection: ssl.SSLSocket) -> str:
    """The name in the certificate that a connection was given."""
    encoded = connection.getpeercert(binary_form=True)
    assert encoded is not None
    text = subprocess.run(
        ["openssl", "x509", "-inform", "DER", "-noout", "-subject", "-nameopt", "multiline"],
        input=encoded,
        capture_output=True,
        check=True,
    ).stdout.decode()
    return text.strip().rpartition("= ")[2]


class Site:
    """One engine and an edge with a certificate."""

    def __init__(self, directory: Path, version: str, **variables: object) -> None:
        self.engine = Engine()
        self.certificate = make_certificate(directory / "certificate", "edge")
        self.edge = Edge(
            directory / "edge",
            version,
            edge_members=members(engine("a.main", "alpha", self.engine.port)),
            edge_tls_certificate=str(self.certificate),
            **variables,
        )
        self.edge.wait_for_engines("pool_alpha", 1)

    def handshake(self, client: ssl.SSLContext) -> ssl.SSLSocket:
        plain = self.edge.connected()
        try:
            return client.wrap_socket(plain, server_hostname="edge")
        except BaseException:
            plain.close()
            raise

    def ask(self, path: str = "/v1/models") -> tuple[int, http.client.HTTPMessage]:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.edge.ports["public"], timeout=PATIENCE, context=context()
        )
        connection.request("GET", path, headers={"Authorization": f"Bearer {CLIENT_KEY}"})
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status, response.headers

    def stop(self) -> None:
        self.edge.stop()
        self.engine.stop()


@pytest.fixture
def site(tmp_path: Path, version: str) -> Iterator[Site]:
    site = Site(tmp_path, version)
    with running(site):
        yield site


def test_newest_version_of_tls_and_http_2_are_spoken(site: Site) -> None:
    client = context()
    client.set_alpn_protocols(["h2", "http/1.1"])
    with site.handshake(client) as connection:
        assert connection.version() == "TLSv1.3"
        assert connection.selected_alpn_protocol() == "h2"
    client.set_alpn_protocols(["http/1.1"])
    with site.handshake(client) as connection:
        assert connection.selected_alpn_protocol() == "http/1.1"
    status, headers = site.ask()
    assert status == 200
    assert headers["Strict-Transport-Security"] is None


def test_tls_1_2_is_spoken_with_forward_secrecy_only(site: Site) -> None:
    with site.handshake(context(maximum_version=ssl.TLSVersion.TLSv1_2)) as connection:
        assert connection.version() == "TLSv1.2"
        assert connection.cipher()[0].startswith("ECDHE-ECDSA-")  # type: ignore[index]  # it is connected
    weak = context(maximum_version=ssl.TLSVersion.TLSv1_2)
    weak.set_ciphers("ECDHE-ECDSA-AES128-SHA:ECDHE-ECDSA-AES256-SHA384:AES128-GCM-SHA256:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError):
        site.handshake(weak)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_old_versions_of_tls_are_refused(site: Site, newest: ssl.TLSVersion) -> None:
    old = context(minimum_version=ssl.TLSVersion.TLSv1, maximum_version=newest)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        site.handshake(old)


def test_only_tls_1_3_is_spoken_where_that_is_wanted(tmp_path: Path, version: str) -> None:
    site = Site(tmp_path, version, edge_tls_version_min="TLSv1.3", edge_tls_hsts_seconds=31536000)
    with running(site):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            site.handshake(context(maximum_version=ssl.TLSVersion.TLSv1_2))
        status, headers = site.ask("/nowhere")
        assert (status, headers["Strict-Transport-Security"]) == (404, "max-age=31536000")


def test_renewed_certificate_comes_into_use_by_a_reload_and_no_connection_is_lost(site: Site) -> None:
    with site.handshake(context()) as connection:
        assert common_name(connection) == "edge"
        make_certificate(site.certificate.parent, "renewed", kind="rsa")
        site.edge.reload("second")
        connection.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {CLIENT_KEY}\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    with site.handshake(context()) as connection:
        assert common_name(connection) == "renewed"


def test_plain_http_is_no_way_in(site: Site) -> None:
    with site.edge.connected() as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            received = client.recv(65536)
        except ConnectionError:
            received = b""
    assert b"HTTP/1.1 200" not in received
