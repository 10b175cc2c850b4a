"""Connection settings: addresses, which security settings belong together, what librdkafka gets."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kmirror_dagster.settings import ClusterSettings, parse_address

SECRET = "hunter2-not-to-be-seen"

SCRAM = {
    "bootstrap.servers": "a:1",
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-256",
    "sasl.username": "kmirror",
    "sasl.password": SECRET,
}
OAUTH = {
    "bootstrap.servers": "a:1",
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "OAUTHBEARER",
    "sasl.oauthbearer.token.endpoint.url": "https://id.example.org/token",
    "sasl.oauthbearer.client.id": "kmirror",
    "sasl.oauthbearer.client.secret": SECRET,
}
MUTUAL_TLS = {
    "bootstrap.servers": "a:1",
    "security.protocol": "SSL",
    "ssl.ca.location": "/ca.pem",
    "ssl.certificate.location": "/client.pem",
    "ssl.key.location": "/client.key",
    "ssl.key.password": SECRET,
}


def settings(document: dict[str, Any], **changes: Any) -> ClusterSettings:
    """Settings from a document with some of it changed; None removes."""
    changed = {**document, **{name.replace("_", "."): value for name, value in changes.items()}}
    return ClusterSettings.model_validate({k: v for k, v in changed.items() if v is not None})


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("kafka:9092", ("kafka", 9092)),
        (" kafka-1.example.org:65535 ", ("kafka-1.example.org", 65_535)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:9092", ("::1", 9092)),
        ("[fe80::1%eth0]:9092", ("fe80::1%eth0", 9092)),
        ("my_broker:9092", ("my_broker", 9092)),
    ],
)
def test_addresses_are_host_and_port(text: str, address: tuple[str, int]) -> None:
    """Names, IPv4 and bracketed IPv6 addresses with a port are addresses."""
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kafka",
        "kafka:",
        ":9092",
        "kafka:0",
        "kafka:65536",
        "::1:9092",
        "[::1]",
        "PLAINTEXT://kafka:9092",
        "kafka:9092/x",
        "user@kafka:9092",
        "kafka :9092",
        "kafka:-1",
        "kafka:\uff19\uff10\uff19\uff12",
        "a..:x",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """Whatever else is written is refused when the settings are read, not at the first connection."""
    with pytest.raises(ValueError, match="expected host:port"):
        parse_address(text)
    with pytest.raises(ValidationError):
        ClusterSettings(bootstrap_servers=(text,))


@given(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,20}[a-z0-9]:[1-9][0-9]{0,3}", fullmatch=True), min_size=1))
def test_a_list_and_a_text_of_servers_are_the_same(servers: list[str]) -> None:
    """`bootstrap.servers` means the same as a list and as one text with commas."""
    listed = ClusterSettings.model_validate({"bootstrap.servers": servers})
    assert listed == ClusterSettings.model_validate({"bootstrap.servers": ", ".join(servers)})
    assert [f"{host}:{port}" for host, port in listed.bootstrap()] == servers
    assert listed.as_librdkafka()["bootstrap.servers"] == ",".join(servers)


@pytest.mark.parametrize("document", [SCRAM, OAUTH, MUTUAL_TLS, {"bootstrap.servers": "a:1"}])
def test_settings_survive_being_written_and_read(document: dict[str, Any]) -> None:
    """Dumping by the documented names and reading back gives equal settings, secrets aside."""
    original = settings(document)
    dumped = original.model_dump(by_alias=True, exclude_none=True, exclude_unset=True)
    assert ClusterSettings.model_validate(dumped) == original
    assert hash(ClusterSettings.model_validate(dumped)) == hash(original)
    assert SECRET not in repr(original) + str(original) + original.model_dump_json()


@pytest.mark.parametrize(
    ("document", "changes", "setting", "message"),
    [
        (SCRAM, {"sasl_username": None}, "sasl.username", "is required with sasl.mechanism SCRAM-SHA-256"),
        (SCRAM, {"sasl_username": ""}, "sasl.username", "is required with sasl.mechanism SCRAM-SHA-256"),
        (SCRAM, {"sasl_password": None}, "sasl.password", "is required with sasl.mechanism SCRAM-SHA-256"),
        (SCRAM, {"sasl_password": ""}, "sasl.password", "is required with sasl.mechanism SCRAM-SHA-256"),
        (SCRAM, {"sasl_oauthbearer_scope": "x"}, "sasl.oauthbearer.scope", "has no use with sasl.mechanism"),
        (SCRAM, {"security_protocol": "SSL"}, "sasl.mechanism", "has no effect with security.protocol SSL"),
        (
            SCRAM,
            {"security_protocol": None},
            "sasl.mechanism",
            "has no effect with security.protocol PLAINTEXT",
        ),
        (OAUTH, {"sasl_oauthbearer_client_id": None}, "sasl.oauthbearer.client.id", "is required with"),
        (
            OAUTH,
            {"sasl_oauthbearer_client_secret": None},
            "sasl.oauthbearer.client.secret",
            "is required with",
        ),
        (
            OAUTH,
            {"sasl_oauthbearer_token_endpoint_url": None},
            "sasl.oauthbearer.token.endpoint.url",
            "is required",
        ),
        (OAUTH, {"sasl_password": SECRET}, "sasl.password", "has no use with sasl.mechanism OAUTHBEARER"),
        (MUTUAL_TLS, {"security_protocol": "PLAINTEXT"}, "ssl.ca.location", "has no effect with"),
        (
            MUTUAL_TLS,
            {"ssl_key_location": None},
            "ssl.key.location",
            "is required with ssl.certificate.location",
        ),
        (
            MUTUAL_TLS,
            {"ssl_certificate_location": None},
            "ssl.certificate.location",
            "is required with ssl.key",
        ),
        (
            {"bootstrap.servers": "a:1"},
            {"reconnect_backoff_ms": 20_000},
            "reconnect.backoff.max.ms",
            "at least",
        ),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(
    document: dict[str, Any], changes: dict[str, Any], setting: str, message: str
) -> None:
    """Missing partners and settings without effect are refused by name: protection must not be imagined."""
    with pytest.raises(ValidationError) as caught:
        settings(document, **changes)
    (error,) = caught.value.errors()
    assert error["ctx"]["setting"] == setting
    assert message in error["msg"]
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("id.example.org/token", "expected an https:// address"),
        ("ftp://id.example.org/token", "expected an https:// address"),
        ("https://", "expected an https:// address"),
        ("https://[::1/token", "expected an https:// address"),
        (f"https://me:{SECRET}@id.example.org/token", "must not carry credentials"),
    ],
)
def test_the_token_endpoint_is_a_plain_address(url: str, message: str) -> None:
    """The token endpoint is an http(s) address without credentials in it."""
    with pytest.raises(ValidationError, match=message) as caught:
        settings(OAUTH, sasl_oauthbearer_token_endpoint_url=url)
    assert SECRET not in str(caught.value)


def test_letter_case_of_protocol_and_mechanism_does_not_matter() -> None:
    """`sasl_ssl` and `scram-sha-256` are taken as Kafka's constants."""
    assert settings(SCRAM, security_protocol="sasl_ssl", sasl_mechanism="scram-sha-256") == settings(SCRAM)


def test_librdkafka_gets_plain_connection_settings() -> None:
    """Without security there is nothing about it in librdkafka's configuration."""
    assert settings({"bootstrap.servers": "[::1]:9092,b:2"}).as_librdkafka() == {
        "bootstrap.servers": "[::1]:9092,b:2",
        "client.id": "kmirror",
        "security.protocol": "PLAINTEXT",
        "socket.timeout.ms": 30_000,
        "socket.connection.setup.timeout.ms": 10_000,
        "connections.max.idle.ms": 540_000,
        "reconnect.backoff.ms": 100,
        "reconnect.backoff.max.ms": 10_000,
    }


def test_librdkafka_gets_the_security_settings_in_use() -> None:
    """Each protocol's settings are passed on with secrets revealed, and no others."""
    scram = settings(SCRAM).as_librdkafka()
    assert {k: v for k, v in scram.items() if k.startswith(("ssl", "sasl"))} == {
        "ssl.endpoint.identification.algorithm": "https",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "kmirror",
        "sasl.password": SECRET,
    }
    oauth = settings(OAUTH, sasl_oauthbearer_scope="kafka", https_ca_location="/idp.pem").as_librdkafka()
    assert {k: v for k, v in oauth.items() if k.startswith(("sasl", "https"))} == {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": "https://id.example.org/token",
        "sasl.oauthbearer.client.id": "kmirror",
        "sasl.oauthbearer.client.secret": SECRET,
        "sasl.oauthbearer.scope": "kafka",
        "https.ca.location": "/idp.pem",
    }
    tls = settings(MUTUAL_TLS).as_librdkafka()
    assert {k: v for k, v in tls.items() if k.startswith(("ssl", "sasl"))} == {
        "ssl.ca.location": "/ca.pem",
        "ssl.certificate.location": "/client.pem",
        "ssl.key.location": "/client.key",
        "ssl.key.password": SECRET,
        "ssl.endpoint.identification.algorithm": "https",
    }


def test_settings_do_not_change() -> None:
    """Settings are frozen: they are shared between threads and used as keys."""
    with pytest.raises(ValidationError):
        settings(SCRAM).client_id = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        ClusterSettings(bootstrap_servers=("a:1",), unknown=1)  # type: ignore[call-arg]
