"""Clients of both libraries from one settings object, and the errors that say why one cannot connect."""

import logging
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kmirror_dagster.broker.client_errors import (
    ConnectionErrors,
    RepeatFilter,
    credentials_refused,
    setup_failed,
    short_reason,
    tls_refused,
    unreachable,
)
from kmirror_dagster.broker.security import SaslExchange, check_files, sasl_mechanism, ssl_context
from kmirror_dagster.errors import KmirrorError, SettingsError
from kmirror_dagster.settings import ClusterSettings

__all__ = [
    "ConnectionErrors",
    "ObservedAdminClient",
    "SaslExchange",
    "admin",
    "check_reachable",
    "connection_error",
    "consumer",
    "credentials_refused",
    "librdkafka_config",
    "producer",
    "sasl_mechanism",
    "setup_failed",
    "ssl_context",
    "tls_refused",
    "topic_partitions",
    "unreachable",
]

ConfigValue: TypeAlias = str | int | bool | float | Callable[..., Any] | logging.Logger
C = TypeVar("C")

_POLL_S = 0.1
# Refused credentials are heard of between two looks; a cluster with very many topics needs more than the first.
_FIRST_LOOK_S = 0.5
_LONGEST_LOOK_S = 8.0

_librdkafka_log = logging.getLogger("kmirror_dagster.broker.librdkafka")
_librdkafka_log.addFilter(RepeatFilter())
_librdkafka_log.addHandler(logging.NullHandler())  # nothing on stderr where nobody has set logging up


def librdkafka_config(settings: ClusterSettings, **extra: ConfigValue) -> dict[str, Any]:
    """Configuration of a librdkafka client: connection, security, log lines into `logging`. Holds secrets.

    Args:
        settings: cluster to connect to.
        extra: further properties, with dots or underscores (`enable_auto_commit`), and callbacks by their own
            names. They win over the settings.

    Raises:
        SettingsError: when a certificate file is missing or unusable.
    """
    check_files(settings)
    config: dict[str, Any] = {**settings.as_librdkafka(), "logger": _librdkafka_log}
    if settings.sasl_mechanism == "OAUTHBEARER" and settings.https_ca_location is None:
        # librdkafka's wheels look for it where Red Hat keeps it, and "probe" does not help (2.16)
        system = ssl.get_default_verify_paths()
        if system.cafile or system.capath:
            config["https.ca.location"] = system.cafile or system.capath
    return config | _named(extra)


def _named(extra: dict[str, ConfigValue]) -> dict[str, ConfigValue]:
    """Spell property names with dots; callbacks keep the underscore."""
    callbacks = ("_cb", "on_delivery", "on_commit")
    return {n if n.endswith(callbacks) else n.replace("_", "."): value for n, value in extra.items()}


class ObservedAdminClient(AdminClient):
    """AdminClient that remembers why it has no connection.

    Attributes:
        errors: what its error callback heard of; called while the client is polled.
    """

    def __init__(self, settings: ClusterSettings, **extra: ConfigValue) -> None:
        self.errors = ConnectionErrors(settings)
        super().__init__(librdkafka_config(settings, error_cb=self.errors.note, **extra))


def admin(settings: ClusterSettings, **extra: ConfigValue) -> ObservedAdminClient:
    """Make an admin client. It connects at its first call.

    Raises:
        SettingsError: when librdkafka refuses the settings.
    """
    return _made(lambda: ObservedAdminClient(settings, **extra), settings)


def consumer(
    settings: ClusterSettings,
    *,
    group_id: str,
    errors: ConnectionErrors | None = None,
    **extra: ConfigValue,
) -> Consumer:
    """Make a consumer that commits nothing on its own.

    Args:
        settings: cluster to read from.
        group_id: consumer group.
        errors: collects connection errors while the consumer is polled.
        extra: further librdkafka properties.

    Raises:
        SettingsError: when librdkafka refuses the settings.
    """
    known: dict[str, ConfigValue] = {
        "group.id": group_id,
        "enable.auto.commit": False,
        "error_cb": (errors or ConnectionErrors(settings)).note,
    }
    return _made(lambda: Consumer(librdkafka_config(settings, **{**known, **_named(extra)})), settings)


def producer(
    settings: ClusterSettings, *, errors: ConnectionErrors | None = None, **extra: ConfigValue
) -> Producer:
    """Make an idempotent producer.

    Args:
        settings: cluster to write to.
        errors: collects connection errors while the producer is polled.
        extra: further librdkafka properties.

    Raises:
        SettingsError: when librdkafka refuses the settings.
    """
    known: dict[str, ConfigValue] = {
        "enable.idempotence": True,
        "request.timeout.ms": settings.request_timeout_ms,
        "error_cb": (errors or ConnectionErrors(settings)).note,
    }
    return _made(lambda: Producer(librdkafka_config(settings, **{**known, **_named(extra)})), settings)


def topic_partitions(offsets: Mapping[tuple[str, int], int]) -> list[TopicPartition]:
    """Partitions as a consumer is assigned to them, each with the offset to read from."""
    return [TopicPartition(topic, number, offset) for (topic, number), offset in offsets.items()]


def _made(make: Callable[[], C], settings: ClusterSettings) -> C:
    try:
        return make()
    except KafkaException as error:
        reason = error.args[0].str() if error.args and hasattr(error.args[0], "str") else str(error)
        raise SettingsError(f"settings of the cluster at {settings.address} are refused: {reason}") from None


def connection_error(client: AdminClient | None) -> KmirrorError | None:
    """What keeps an admin client from connecting; None when nothing was heard of lately.

    librdkafka's calls themselves only say that they timed out; the cause arrives apart from them.
    """
    if not isinstance(client, ObservedAdminClient):
        return None
    client.poll(0)
    return client.errors.error()


def check_reachable(settings: ClusterSettings, deadline_s: float, *, role: str = "") -> str:
    """Wait until a cluster answers, and tell its id.

    Refused credentials and certificates end the wait at once, all else when the deadline has passed: a broker
    that is being started refuses connections for a while.

    Args:
        settings: cluster to ask.
        deadline_s: seconds to wait at most.
        role: "source" or "destination", for messages.

    Raises:
        ClusterUnreachableError: when no broker answers in time, with the newest reason.
        AuthenticationError: when credentials or certificates are refused.
        SettingsError: when the settings cannot be used at all.
    """
    deadline = time.monotonic() + deadline_s
    client = admin(settings)
    look_s, reason = _FIRST_LOOK_S, ""
    while True:
        left = deadline - time.monotonic()
        try:
            # not DescribeCluster: librdkafka ends the process when a broker answers it with an error (2.16)
            cluster_id = client.list_topics(timeout=max(min(look_s, left), _POLL_S)).cluster_id
        except KafkaException as error:
            # that nobody answered is said anyway; why, the client has heard apart from the call
            silent = error.args[0].code() in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT)  # noqa: SLF001
            reason = "" if silent else short_reason(error.args[0].str())
        else:
            if cluster_id:
                return str(cluster_id)
            raise KmirrorError(
                f"the cluster at {settings.address} does not tell its cluster id: it runs a Kafka before 0.10.1"
            )
        client.poll(min(_POLL_S, max(left, 0.0)))
        refusal = client.errors.refusal()
        if refusal is not None:
            raise refusal
        if time.monotonic() >= deadline:
            raise unreachable(settings, client.errors.reason() or reason, role=role, deadline_s=deadline_s)
        look_s = min(look_s * 2, _LONGEST_LOOK_S)
