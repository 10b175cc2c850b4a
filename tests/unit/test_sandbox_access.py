"""Settings of secured sandbox clusters."""

import ssl
from pathlib import Path

import pytest

from kmirror_dagster.errors import SandboxError
from kmirror_dagster.sandbox.certificates import CertificateFolder
from kmirror_dagster.sandbox.properties import CLIENT, INTERNAL, Protocol
from kmirror_dagster.sandbox.security import ClusterSecurity, User
from kmirror_dagster.settings import ClusterSettings

USERS = (User("mirror", "s3cret", is_super=True), User("alice", 'a"b\\c'))


def test_passwords_are_not_shown() -> None:
    """Neither a user nor a cluster's security shows passwords when printed."""
    assert "s3cret" not in repr(ClusterSecurity(users=USERS))


def test_brokers_have_a_listener_of_their_own(tmp_path: Path) -> None:
    """The first listener is the brokers', the one for clients carries the security."""
    internal, client = ClusterSecurity(users=USERS).listeners(CertificateFolder(tmp_path))
    assert (internal.name, internal.protocol) == (INTERNAL, Protocol.PLAINTEXT)
    assert (client.name, client.protocol) == (CLIENT, Protocol.SASL_SSL)


def test_plain_passwords_are_quoted(tmp_path: Path) -> None:
    """Quotes and backslashes in a password survive the JAAS configuration."""
    security = ClusterSecurity(Protocol.SASL_PLAINTEXT, "PLAIN", USERS)
    _, client = security.listeners(CertificateFolder(tmp_path))
    assert client.properties is not None
    assert client.properties["plain.sasl.jaas.config"].endswith(
        ' required user_mirror="s3cret" user_alice="a\\"b\\\\c";'
    )


def test_super_users_are_named_as_the_listener_sees_them() -> None:
    """By user name for SASL, by certificate subject for mutual TLS."""
    sasl = ClusterSecurity(users=USERS, authorizer=True).broker_properties()
    assert sasl["super.users"] == "User:ANONYMOUS;User:mirror"
    tls = ClusterSecurity(Protocol.SSL, users=USERS, authorizer=True, client_certificates=True)
    assert tls.broker_properties()["super.users"] == "User:ANONYMOUS;User:CN=mirror"
    assert ClusterSecurity(users=USERS).broker_properties() == {}


def test_client_properties_are_settings(tmp_path: Path) -> None:
    """What clients get is a valid settings object, with files that exist."""
    security = ClusterSecurity(users=USERS, client_certificates=True)
    properties = security.client_properties(security.user("alice"), CertificateFolder(tmp_path))
    settings = ClusterSettings.model_validate({"bootstrap.servers": "127.0.0.1:1", **properties})
    assert settings.sasl_username == "alice"
    context = ssl.create_default_context(cafile=settings.ssl_ca_location)
    context.load_cert_chain(str(settings.ssl_certificate_location), settings.ssl_key_location)


def test_certificates_are_kept(tmp_path: Path) -> None:
    """A second look finds the certificates of the first, and keys are readable by their owner only."""
    first = CertificateFolder(tmp_path).server()
    text = first.certificate.read_text()
    assert CertificateFolder(tmp_path).server().certificate.read_text() == text
    assert first.key.stat().st_mode & 0o077 == 0


def test_unknown_user_is_named() -> None:
    """Asking for a user that does not exist says so."""
    with pytest.raises(SandboxError, match="no user 'bob'"):
        ClusterSecurity(users=USERS).user("bob")
