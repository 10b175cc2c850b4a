"""Both clients against a real broker with every security protocol and mechanism."""

import asyncio
import ssl
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from confluent_kafka.admin import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion
from kafka.protocol.metadata.api_versions import ApiVersionsRequest

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import NewTopic
from kmirror_dagster.broker.clients import admin, check_reachable, consumer
from kmirror_dagster.broker.connection import Connection
from kmirror_dagster.broker.missing_rights import principal_of
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.errors import (
    AuthenticationError,
    AuthorizationError,
    ClusterUnreachableError,
    KmirrorError,
)
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.sandbox.properties import ListenerPlan, Protocol
from kmirror_dagster.settings import ClusterSettings
from tests.helpers.identity import IdentityProvider, identity_provider
from tests.helpers.secured import acls_of, advised, give
from tests.helpers.waiting import unique_name, wait_until

pytestmark = pytest.mark.integration

SECRET = "hunter2-not-to-be-seen"
WAIT_S = 15.0
MECHANISMS = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]

_MODULES = {
    "plain": 'org.apache.kafka.common.security.plain.PlainLoginModule required user_alice="%s";',
    "scram-sha-256": "org.apache.kafka.common.security.scram.ScramLoginModule required;",
    "scram-sha-512": "org.apache.kafka.common.security.scram.ScramLoginModule required;",
    "oauthbearer": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
    'unsecuredLoginStringClaim_sub="broker";',
}


_AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",  # the broker itself; and who shows no certificate and does not log in
}


class SecureCluster:
    """A broker with one listener per protocol, and settings that get in."""

    def __init__(
        self, cluster: SandboxCluster, home: Path, provider: IdentityProvider, authority: trustme.CA
    ) -> None:
        self.cluster = cluster
        self.authority = authority
        self.home = home
        self.provider = provider

    def settings(self, listener: str, **more: Any) -> ClusterSettings:
        """Settings for a listener ("PLAIN", "TLS", "MUTUAL", "LOGIN", "SECURE"), some of them changed."""
        known: dict[str, Any] = {"bootstrap_servers": self.cluster.bootstrap_of(listener)}
        known["security_protocol"] = {
            "OPEN": "PLAINTEXT",
            "TLS": "SSL",
            "MUTUAL": "SSL",
            "LOGIN": "SASL_PLAINTEXT",
            "SECURE": "SASL_SSL",
        }[listener]
        if listener in ("TLS", "MUTUAL", "SECURE"):
            known["ssl_ca_location"] = str(self.home / "ca.pem")
        if listener == "MUTUAL":
            known |= {
                "ssl_certificate_location": str(self.home / "client.pem"),
                "ssl_key_location": str(self.home / "client.key"),
            }
        return ClusterSettings.model_validate({**known, **more})

    def login(self, listener: str, mechanism: str, **more: Any) -> ClusterSettings:
        """Settings that log in by a mechanism."""
        if mechanism == "OAUTHBEARER":
            known = {
                "sasl_oauthbearer_token_endpoint_url": self.provider.url,
                "sasl_oauthbearer_client_id": self.provider.client_id,
                "sasl_oauthbearer_client_secret": self.provider.secret,
            }
        else:
            known = {"sasl_username": "alice", "sasl_password": SECRET}
        return self.settings(listener, sasl_mechanism=mechanism, **{**known, **more})


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    """One broker with all protocols, a user in its SCRAM store, and an identity provider."""
    home = tmp_path_factory.mktemp("secure")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(home / "ca.pem"))
    for name, host in (("broker", "127.0.0.1"), ("client", "client.example.org")):
        cert = authority.issue_cert(host, common_name=host, organization_name="Clients, Ltd.")
        chain = "".join(pem.bytes().decode() for pem in cert.cert_chain_pems)
        key = _pkcs8(cert.private_key_pem.bytes())
        (home / f"{name}.pem").write_text(chain)
        (home / f"{name}.key").write_text(key)
        (home / f"{name}.store.pem").write_text(key + chain)
    tls = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(home / "broker.store.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(home / "ca.pem"),
    }
    sasl = {"sasl.enabled.mechanisms": ",".join(_MODULES).upper()}
    sasl |= {f"{name}.sasl.jaas.config": module.replace("%s", SECRET) for name, module in _MODULES.items()}
    # whoever logged in with a token is asked for a new one when it expires (KIP-368)
    sasl["oauthbearer.connections.max.reauth.ms"] = "3600000"
    # the handler of tokens without signature has to be asked for by name
    sasl["oauthbearer.sasl.server.callback.handler.class"] = (
        "org.apache.kafka.common.security.oauthbearer.internals.unsecured."
        "OAuthBearerUnsecuredValidatorCallbackHandler"
    )
    listeners = (
        ListenerPlan("OPEN"),
        ListenerPlan("TLS", Protocol.SSL, {**tls, "ssl.client.auth": "none"}),
        ListenerPlan("MUTUAL", Protocol.SSL, {**tls, "ssl.client.auth": "required"}),
        ListenerPlan("LOGIN", Protocol.SASL_PLAINTEXT, sasl),
        ListenerPlan("SECURE", Protocol.SASL_SSL, {**tls, **sasl}),
    )
    with (
        identity_provider(secret=SECRET) as provider,
        SandboxCluster("secure", home, overrides=_AUTHORIZER, listeners=listeners) as cluster,
    ):
        made = SecureCluster(cluster, home, provider, authority)
        client = admin(made.settings("OPEN"))
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            change = UserScramCredentialUpsertion(
                "alice", ScramCredentialInfo(mechanism, 4096), SECRET.encode()
            )
            done = client.alter_user_scram_credentials([change], request_timeout=WAIT_S)
            done["alice"].result(WAIT_S)
        yield made


def _pkcs8(key: bytes) -> str:
    """The key in the form that Java reads."""
    from cryptography.hazmat.primitives import serialization

    return (
        serialization.load_pem_private_key(key, None)
        .private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        .decode()
    )


def open_wire(settings: ClusterSettings) -> None:
    """Connect and authenticate with the wire client."""

    async def go() -> None:
        ((host, port),) = settings.bootstrap()
        connection = await Connection(settings, host, port).open(WAIT_S)
        assert connection.alive
        connection.close()

    asyncio.run(go())


def both_clients_connect(secure: SecureCluster, settings: ClusterSettings) -> None:
    """Check that librdkafka and the wire client get in."""
    assert check_reachable(settings, WAIT_S) == secure.cluster.cluster_id
    open_wire(settings)


def refusals(settings: ClusterSettings, wait_s: float = WAIT_S) -> list[KmirrorError]:
    """The errors of both clients; each one line, none with a secret."""
    errors: list[KmirrorError] = []
    for attempt in (lambda: check_reachable(settings, wait_s), lambda: open_wire(settings)):
        with pytest.raises(KmirrorError) as caught:
            attempt()
        text = "".join(traceback.format_exception(caught.value))
        assert SECRET not in text
        assert "\n" not in str(caught.value)
        errors.append(caught.value)
    return errors


@pytest.mark.parametrize("listener", ["OPEN", "TLS", "MUTUAL"])
def test_clients_connect_without_sasl(secure: SecureCluster, listener: str) -> None:
    """PLAINTEXT, TLS and mutual TLS: one settings object gets both clients in."""
    both_clients_connect(secure, secure.settings(listener))


@pytest.mark.parametrize("listener", ["LOGIN", "SECURE"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_clients_connect_with_sasl(secure: SecureCluster, listener: str, mechanism: str) -> None:
    """Every mechanism, with and without TLS: one settings object gets both clients in."""
    both_clients_connect(secure, secure.login(listener, mechanism))


def test_tokens_come_from_a_verified_endpoint(secure: SecureCluster) -> None:
    """Both clients verify the certificate of the token endpoint, by `https.ca.location`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.authority.issue_cert("127.0.0.1").configure_cert(context)
    with identity_provider(context, secret=SECRET) as provider:
        url = {"sasl_oauthbearer_token_endpoint_url": provider.url}
        trusting = {**url, "https_ca_location": str(secure.home / "ca.pem")}
        both_clients_connect(secure, secure.login("LOGIN", "OAUTHBEARER", **trusting))
        seen = len(provider.requests)
        refusals(secure.login("LOGIN", "OAUTHBEARER", **url), 2.0)
        assert len(provider.requests) == seen


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_wrong_password_is_told_at_once(secure: SecureCluster, mechanism: str) -> None:
    """A wrong password is a one-line refusal that names the user and the settings, from both clients."""
    settings = secure.login("SECURE", mechanism, sasl_password="wrong-" + SECRET)
    for error in refusals(settings):
        assert isinstance(error, AuthenticationError)
        assert "'alice'" in str(error)
        assert settings.address in str(error)
        assert "sasl.username and sasl.password" in str(error)


def test_a_wrong_client_secret_is_told_at_once(secure: SecureCluster) -> None:
    """A client that the identity provider refuses is named with its settings, from both clients."""
    settings = secure.login("SECURE", "OAUTHBEARER", sasl_oauthbearer_client_secret="wrong-" + SECRET)
    for error in refusals(settings):
        assert isinstance(error, AuthenticationError)
        assert "'kmirror'" in str(error)
        assert "sasl.oauthbearer.client.id" in str(error)


def test_a_mechanism_that_is_not_offered_is_told(secure: SecureCluster) -> None:
    """A listener without SASL, or a mechanism it does not know, does not end in silence."""
    settings = secure.login("SECURE", "PLAIN")
    wrong = settings.model_copy(update={"bootstrap_servers": secure.settings("TLS").bootstrap_servers})
    for error in refusals(wrong, 2.0):
        assert isinstance(error, (AuthenticationError, ClusterUnreachableError)), error


@pytest.mark.parametrize("listener", ["TLS", "MUTUAL", "SECURE"])
def test_a_broker_nobody_vouches_for_is_refused(secure: SecureCluster, listener: str) -> None:
    """A certificate of an authority that is not trusted ends the connection before any secret is sent."""
    if listener == "SECURE":
        settings = secure.login(listener, "PLAIN", ssl_ca_location=None)
    else:
        settings = secure.settings(listener, ssl_ca_location=None)
    for error in refusals(settings):
        assert isinstance(error, AuthenticationError)
        assert "ssl.ca.location" in str(error)


def test_a_missing_client_certificate_is_refused(secure: SecureCluster) -> None:
    """A listener that demands a client certificate lets nobody in without one."""
    settings = secure.settings("MUTUAL", ssl_certificate_location=None, ssl_key_location=None)
    for error in refusals(settings):
        assert isinstance(error, AuthenticationError)
        assert "certificate required" in str(error)


def test_a_protocol_that_does_not_fit_is_refused(secure: SecureCluster) -> None:
    """PLAINTEXT to a TLS listener, and TLS to a plain one, end with a message and not in silence."""
    plain = secure.settings("OPEN")
    tls = secure.settings("TLS")
    for wrong in (
        plain.model_copy(update={"bootstrap_servers": tls.bootstrap_servers}),
        tls.model_copy(update={"bootstrap_servers": plain.bootstrap_servers}),
    ):
        for error in refusals(wrong, 2.0):
            assert isinstance(error, (AuthenticationError, ClusterUnreachableError)), error


def test_an_identity_provider_out_of_order_is_no_refusal(secure: SecureCluster) -> None:
    """A token endpoint that is down may be up again: unreachable, not refused."""
    settings = secure.login(
        "LOGIN", "OAUTHBEARER", sasl_oauthbearer_token_endpoint_url="http://127.0.0.1:1/token"
    )
    with pytest.raises(ClusterUnreachableError, match=r"127\.0\.0\.1"):
        check_reachable(settings, 2.0)
    with pytest.raises(ClusterUnreachableError, match="token endpoint"):
        open_wire(settings)


@pytest.mark.parametrize("way", ["MUTUAL", *MECHANISMS])
def test_the_broker_sees_the_principal_that_the_check_names(secure: SecureCluster, way: str) -> None:
    """Both clients are refused by that name, with the command that lets them in; granted, both are served."""
    settings = secure.settings(way) if way == "MUTUAL" else secure.login("SECURE", way)
    root = ClusterAdmin(secure.settings("OPEN"))
    topic = unique_name("principal")
    assert root.create_topics([NewTopic(topic, 1, 1)]) == {topic: None}
    own = ClusterAdmin(settings)
    try:
        wait_until(lambda: not root.topics([topic]).errors)
        refused = str(own.topics([topic]).errors[topic])
        with pytest.raises(AuthorizationError) as caught:
            asyncio.run(find_leader(settings, topic))
        expected = {"MUTUAL": "User:CN=client.example.org,", "OAUTHBEARER": "User:kmirror"}.get(
            way, "User:alice"
        )
        assert principal_of(settings).startswith(expected)
        assert refused.startswith(f"{principal_of(settings)} lacks DESCRIBE on topic {topic} at ")
        assert str(caught.value) == refused
        (line,) = advised(refused)
        give(root, acls_of(line))
        wait_until(lambda: not own.topics([topic]).errors)
        assert asyncio.run(find_leader(settings, topic)) == 1
    finally:
        own.close()
        root.close()


async def find_leader(settings: ClusterSettings, topic: str) -> int:
    """Node id of a partition's leader, by the wire client."""
    cluster = WireCluster(settings, role="source")
    try:
        return (await cluster.leader(topic, 0)).node_id
    finally:
        await cluster.close()


def test_connections_outlive_their_tokens(secure: SecureCluster) -> None:
    """Tokens of 3 s on a broker that asks for new ones: an idle and a busy wire client lose no request."""
    with identity_provider(secret=SECRET, life_s=3.0) as provider:
        settings = secure.login("LOGIN", "OAUTHBEARER", sasl_oauthbearer_token_endpoint_url=provider.url)

        async def busy(cluster: WireCluster, until: float) -> set[Connection]:
            seen: set[Connection] = set()
            while time.monotonic() < until:
                connection = await cluster.connection(1)
                await connection.call(ApiVersionsRequest(), version=0)
                seen.add(connection)
                await asyncio.sleep(0.01)
            return seen

        async def go() -> int:
            idle, working = (WireCluster(settings, role="source") for _ in range(2))
            try:
                await idle.refresh()
                await working.refresh()
                end = time.monotonic() + 7.0
                connections = await busy(working, end)
                await idle.refresh(force=True)  # two lives later, over a connection of its own
                return len(connections)
            finally:
                await idle.close()
                await working.close()

        assert asyncio.run(go()) >= 3
        assert len(provider.requests) >= 3


@pytest.mark.case("E3")
def test_an_idle_client_gets_new_tokens(secure: SecureCluster) -> None:
    """A client that nobody polls renews its token all the same."""
    with identity_provider(secret=SECRET, life_s=3.0) as provider:
        settings = secure.login("LOGIN", "OAUTHBEARER", sasl_oauthbearer_token_endpoint_url=provider.url)
        made = consumer(settings, group_id="idle")
        try:
            wait_until(lambda: len(provider.requests) >= 3, WAIT_S, what="third token")
        finally:
            made.close()
