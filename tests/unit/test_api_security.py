"""Who reaches a node's API: the loopback by default, TLS beyond it, certificates where they are asked for."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from pydantic import SecretStr

from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.coordination.http_guard import HttpGuard
from kmirror_dagster.coordination.server import ApiServer, bind
from kmirror_dagster.coordination.state_directory import StateDirectory
from kmirror_dagster.coordination.tls import ClientIdentity, identity_of
from kmirror_dagster.errors import ApiAuthenticationError, KmirrorError, SettingsError
from kmirror_dagster.settings import NodeSettings, node_from_document

DESTINATION = {"bootstrap.servers": "d:9092"}
TOKEN = SecretStr("the-token")


def settings(**more: object) -> NodeSettings:
    return node_from_document({"destination": DESTINATION, **more}, {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "node-1.example.org"])
def test_beyond_the_loopback_there_is_tls_or_a_word(host: str) -> None:
    """Another address is refused with what to set, and taken with TLS or `api_insecure`."""
    with pytest.raises(SettingsError, match=r"api_host: .* is not the loopback .*api_insecure: true"):
        settings(api_host=host)
    assert settings(api_host=host, api_insecure=True).api_host == host
    tls = {"api_tls_certificate": "/c.pem", "api_tls_key": "/k.pem"}
    assert settings(api_host=host, **tls).api_host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_the_loopback_needs_neither(host: str) -> None:
    """Whoever is on the machine itself needs the token only."""
    assert settings(api_host=host).api_host == host


def test_client_certificates_need_tls() -> None:
    """Without a certificate of its own a node can ask for none."""
    with pytest.raises(SettingsError, match="api_tls_certificate: is required with api_tls_client_ca"):
        settings(api_tls_client_ca="/ca.pem")


class Authority:
    """An authority and certificates of it, as files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._authority = trustme.CA()
        self.file = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str) -> ClientIdentity:
        """A certificate and its key."""
        issued = self._authority.issue_cert(name)
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return ClientIdentity(certificate, key)


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """An API that answers everything with an empty list."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"[]"})


@contextmanager
def served(node: NodeSettings) -> Iterator[str]:
    """A guarded API in a thread of its own; its endpoint."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> ApiServer:
        server = ApiServer(HttpGuard(answer, TOKEN), bind(node), settings=node)
        server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    try:
        yield server.endpoint
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_certificate_is_asked_for_besides_the_token(tmp_path: Path) -> None:
    """With `api_tls_client_ca` a client needs a certificate of that authority, and the token as well."""
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    node = ours.issue("127.0.0.1")
    tls = {
        "api_tls_certificate": str(node.certificate),
        "api_tls_key": str(node.key),
        "api_tls_client_ca": str(ours.file),
    }
    with served(settings(**tls)) as endpoint:

        def ask(identity: ClientIdentity | None, token: SecretStr = TOKEN) -> list[Any]:
            with NodeClient(
                endpoint, token, timeout_s=5, deadline_s=0.1, ca=ours.file, identity=identity
            ) as client:
                return list(client.mirrors())

        assert ask(ours.issue("dagster")) == []
        assert ask(node) == []  # as nodes ask each other
        for identity in (None, theirs.issue("dagster")):
            with pytest.raises(KmirrorError):
                ask(identity)
        with pytest.raises(ApiAuthenticationError):
            ask(ours.issue("dagster"), SecretStr("wrong"))


def test_clients_of_the_same_machine_find_a_certificate(tmp_path: Path) -> None:
    """The state directory names the node's own; the environment wins; a key with a password is not named."""
    identity = Authority(tmp_path / "ours").issue("127.0.0.1")
    directory = StateDirectory(tmp_path / "state")
    directory.write_endpoint(endpoint="https://127.0.0.1:1", node_id="n", identity=identity)
    found = directory.read_endpoint()
    assert found is not None
    assert found.identity == identity
    locked = ClientIdentity(identity.certificate, identity.key, SecretStr("secret"))
    directory.write_endpoint(endpoint="https://127.0.0.1:1", node_id="n", identity=locked)
    found = directory.read_endpoint()
    assert found is not None
    assert found.identity is None
    environ = {"KMIRROR_CERTIFICATE": str(identity.certificate), "KMIRROR_KEY": str(identity.key)}
    assert identity_of(environ) == identity
    assert identity_of({}) is None


@pytest.mark.parametrize("broken", ["ca", "certificate"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, broken: str) -> None:
    """A missing or unreadable file is one line with the variable that names it, and no traceback of a key."""
    authority = Authority(tmp_path / "ours")
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    identity = ClientIdentity(wrong, wrong) if broken == "certificate" else None
    ca = wrong if broken == "ca" else authority.file
    client = NodeClient("https://127.0.0.1:1", TOKEN, ca=ca, identity=identity)
    with pytest.raises(SettingsError, match=rf"KMIRROR_{broken.upper()}.*wrong\.pem"):
        client.mirrors()
