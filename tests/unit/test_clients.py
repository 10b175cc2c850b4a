"""Clients from settings, and why they cannot connect."""

import logging
import socket
import time

import pytest
from confluent_kafka import KafkaError

from kmirror_dagster.broker.client_errors import RECENT_S, ConnectionErrors, RepeatFilter, short_reason
from kmirror_dagster.broker.clients import (
    admin,
    check_reachable,
    connection_error,
    consumer,
    librdkafka_config,
    producer,
)
from kmirror_dagster.errors import AuthenticationError, ClusterUnreachableError, SettingsError
from kmirror_dagster.settings import ClusterSettings
from tests.helpers.waiting import wait_until

SECRET = "hunter2-not-to-be-seen"
NOBODY = ClusterSettings(bootstrap_servers=("127.0.0.1:1",))
SCRAM = ClusterSettings.model_validate(
    {
        "bootstrap.servers": "kafka:9092",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "alice",
        "sasl.password": SECRET,
    }
)


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_properties_may_be_written_with_dots_or_underscores() -> None:
    """Further properties win over the settings; callbacks keep their names."""
    config = librdkafka_config(
        NOBODY, client_id="me", **{"fetch.min.bytes": 5, "error_cb": print}, enable_auto_commit=True
    )
    assert config["client.id"] == "me"
    assert config["fetch.min.bytes"] == 5
    assert config["enable.auto.commit"] is True
    assert config["error_cb"] is print
    assert config["logger"] is logging.getLogger("kmirror_dagster.broker.librdkafka")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "127.0.0.1:1/bootstrap: Connect to ipv4#127.0.0.1:1 failed: "
            "Connection refused (after 0ms in state CONNECT)",
            "connection refused",
        ),
        (
            "sasl_ssl://kafka:9092/bootstrap: SASL authentication error: Authentication failed "
            "during authentication due to invalid credentials with SASL mechanism SCRAM-SHA-512 "
            "(after 312ms in state AUTH_REQ, 4 identical error(s) suppressed)",
            "SASL authentication error: Authentication failed during authentication "
            "due to invalid credentials with SASL mechanism SCRAM-SHA-512",
        ),
        (
            "kafka:9092/bootstrap: Failed to resolve 'kafka:9092': "
            "Name or service not known (after 3ms in state CONNECT)",
            "failed to resolve 'kafka:9092': Name or service not known",
        ),
        ("ssl://[::1]:9092/7: Disconnected\n", "disconnected"),
        (
            'Failed to acquire SASL OAUTHBEARER token: {"error":"invalid_client","error_description":"x"}',
            "failed to acquire SASL OAUTHBEARER token: invalid_client",
        ),
        (
            'Failed to acquire SASL OAUTHBEARER token: {"token":"x"}',
            "failed to acquire SASL OAUTHBEARER token",
        ),
        ("", ""),
    ],
)
def test_reasons_are_short(text: str, reason: str) -> None:
    """librdkafka's wording is cut to what a person needs."""
    assert short_reason(text) == reason


def test_refused_credentials_are_remembered_for_a_while() -> None:
    """A refusal is told with user and settings, outlives the noise after it, and is forgotten in the end."""
    clock = Clock()
    errors = ConnectionErrors(SCRAM, clock=clock)
    assert errors.error() is None
    errors.note(
        KafkaError(KafkaError._AUTHENTICATION, "kafka:9092/1: Authentication failed (after 1ms in state X)")
    )
    errors.note(KafkaError(KafkaError._TRANSPORT, "kafka:9092/1: Disconnected (after 1ms in state UP)"))
    errors.note(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    error = errors.error()
    assert isinstance(error, AuthenticationError)
    assert str(error) == (
        "SASL authentication failed for user 'alice' at kafka:9092 (authentication failed): "
        "check sasl.username and sasl.password"
    )
    assert errors.reason() == "disconnected"
    clock.now += RECENT_S + 1
    assert errors.error() is None
    assert errors.reason() == ""


@pytest.mark.parametrize(
    ("code", "text", "refused"),
    [
        (KafkaError._SSL, "SSL handshake failed: certificate verify failed: self-signed certificate", True),
        (
            KafkaError._SSL,
            "SSL handshake failed: Disconnected: connecting to a PLAINTEXT broker listener?",
            True,
        ),
        (KafkaError._SSL, "SSL handshake failed: wrong version number", True),
        (KafkaError._SSL, "SSL handshake failed: Disconnected", False),
        (KafkaError._SSL, "SSL transport error: Connection reset by peer", False),
        (
            KafkaError._AUTHENTICATION,
            "SaslAuthenticateRequest failed: Local: Broker transport failure",
            False,
        ),
        (KafkaError._AUTHENTICATION, "SASL mechanism PLAIN not supported by broker", True),
        (
            KafkaError._AUTHENTICATION,
            "Failed to acquire SASL OAUTHBEARER token: Failed to connect to x:1",
            False,
        ),
        (KafkaError._AUTHENTICATION, 'Failed to acquire SASL OAUTHBEARER token: {"error": "x"}', True),
        (KafkaError._TRANSPORT, "Disconnected", False),
        (KafkaError._RESOLVE, "Failed to resolve 'kafka:9092'", False),
    ],
)
def test_what_passes_by_itself_is_no_refusal(code: int, text: str, refused: bool) -> None:
    """A broker going down in mid-handshake may be tried again; distrust and wrong credentials may not."""
    errors = ConnectionErrors(SCRAM)
    errors.note(KafkaError(code, f"kafka:9092/1: {text} (after 1ms in state CONNECT)"))
    assert (errors.refusal() is not None) is refused
    expected = AuthenticationError if refused else ClusterUnreachableError
    assert isinstance(errors.error(), expected)


def test_other_errors_are_not_about_the_connection() -> None:
    """Errors of topics and partitions are none of this class's business."""
    errors = ConnectionErrors(SCRAM)
    errors.note(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, "unknown topic"))
    assert errors.error() is None


def test_an_unreachable_cluster_is_one_line_at_the_deadline() -> None:
    """Nobody listening is told with role, address, time and reason once the deadline is over, not before."""
    begin = time.monotonic()
    with pytest.raises(ClusterUnreachableError) as caught:
        check_reachable(NOBODY, 1.0, role="source")
    assert 0.9 <= time.monotonic() - begin < 5
    assert str(caught.value) == (
        "cannot reach source cluster at 127.0.0.1:1 within 1 s: connection refused; "
        "check bootstrap.servers and that a broker is running"
    )


def test_a_silent_listener_is_unreachable() -> None:
    """A port that takes connections and never answers ends at the deadline as well."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = ClusterSettings(bootstrap_servers=(f"127.0.0.1:{listener.getsockname()[1]}",))
        with pytest.raises(ClusterUnreachableError, match=r"within 1 s: no answer; check bootstrap\.servers"):
            check_reachable(settings, 1.0)


def test_admin_clients_know_why_they_cannot_connect() -> None:
    """The cause that librdkafka tells apart from the call is found by the client."""
    client = admin(NOBODY)
    assert connection_error(None) is None
    client.describe_cluster(request_timeout=1)
    error = wait_until(lambda: connection_error(client), 10)
    assert isinstance(error, ClusterUnreachableError)
    assert "connection refused" in str(error)


def test_consumers_and_producers_report_their_errors() -> None:
    """Given a collector, connection errors arrive in it while the client is polled."""
    errors = ConnectionErrors(NOBODY)
    made = consumer(NOBODY, group_id="g", errors=errors, auto_offset_reset="earliest")
    try:
        made.subscribe(["t"])
        wait_until(lambda: made.poll(0.05) or errors.reason(), 10)
    finally:
        made.close()
    errors = ConnectionErrors(NOBODY)
    writer = producer(NOBODY, errors=errors, message_timeout_ms=1_000)
    writer.produce("t", b"x")
    assert wait_until(lambda: (writer.poll(0.05), errors.reason())[1], 10) == "connection refused"
    writer.purge()
    writer.flush(5)


@pytest.mark.parametrize("make", [admin, producer])
def test_properties_that_librdkafka_does_not_know_are_one_line(make) -> None:  # type: ignore[no-untyped-def]
    """What librdkafka refuses is a settings error with the address, without secrets."""
    with pytest.raises(SettingsError, match="No such configuration property") as caught:
        make(SCRAM, nonsense=1)
    assert str(caught.value).startswith("settings of the cluster at kafka:9092 are refused: ")
    assert SECRET not in str(caught.value)


def test_equal_log_lines_come_once_in_a_while() -> None:
    """The many lines of one outage are one line per interval; other lines are not held back."""
    clock = Clock()
    held = RepeatFilter(30, clock=clock)

    def passes(text: str) -> bool:
        return held.filter(logging.LogRecord("x", logging.ERROR, "f", 1, text, None, None))

    assert passes("FAIL [kmirror#producer-1]: Connection refused (after 0ms in state CONNECT)")
    assert not passes("FAIL [kmirror#producer-2]: Connection refused (after 12ms in state CONNECT)")
    assert passes("FAIL [kmirror#producer-1]: Connection reset (after 0ms in state CONNECT)")
    clock.now += 31
    assert passes("FAIL [kmirror#producer-1]: Connection refused (after 1ms in state CONNECT)")
    for number in range(3_000):
        clock.now += 1
        passes(f"line {number} of many")
    assert len(held._seen) <= 1_001
