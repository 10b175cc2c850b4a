"""Errors of admin calls as this package's classes: one line that names the thing and the remedy."""

from confluent_kafka import KafkaError, KafkaException

from kmirror_dagster.broker.client_errors import credentials_refused, short_reason, unreachable
from kmirror_dagster.broker.codes import broker_error, error_name
from kmirror_dagster.broker.missing_rights import Right, rights_error
from kmirror_dagster.errors import BrokerError, DeadlineError, KmirrorError
from kmirror_dagster.settings import ClusterSettings

_UNREACHABLE = frozenset(
    {
        KafkaError._TRANSPORT,  # noqa: SLF001 - librdkafka's names of local errors begin with an underscore
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError._RESOLVE,  # noqa: SLF001
    }
)
_TIMED_OUT = frozenset(
    {
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError._TIMED_OUT_QUEUE,  # noqa: SLF001
        KafkaError._WAIT_COORD,  # noqa: SLF001
    }
)
_AUTHENTICATION = frozenset(
    {
        KafkaError._AUTHENTICATION,  # noqa: SLF001
        KafkaError._SSL,  # noqa: SLF001
        KafkaError.SASL_AUTHENTICATION_FAILED,
    }
)
_AUTHORIZATION = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)

# Codes that say the client's view is old; librdkafka does not mark them retriable.
_STALE = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.NOT_CONTROLLER,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.REQUEST_TIMED_OUT,
    }
)


def admin_error(
    error: KafkaError | KafkaException, *, doing: str, right: Right, name: str, settings: ClusterSettings
) -> KmirrorError:
    """Translate one error of librdkafka.

    Args:
        error: what librdkafka reported.
        doing: what was being done, for the message ("creating topic orders").
        right: right the call needs.
        name: name of the resource, empty for the cluster.
        settings: cluster that was asked.
    """
    kafka_error = error.args[0] if isinstance(error, KafkaException) else error
    if not isinstance(kafka_error, KafkaError):
        return KmirrorError(f"{doing} at {settings.address}: {error}")
    code = kafka_error.code()
    detail = kafka_error.str()
    if code in _UNREACHABLE:
        return unreachable(settings, short_reason(detail))
    if code in _TIMED_OUT:
        return DeadlineError(f"{doing}: {settings.address} did not answer in time ({detail})")
    if code in _AUTHENTICATION:
        return credentials_refused(settings, short_reason(detail))
    if code in _AUTHORIZATION:
        return rights_error(right, name, settings)
    if code < 0:
        return KmirrorError(f"{doing} at {settings.address}: {detail}")
    return _broker_error(kafka_error, doing)


def _broker_error(error: KafkaError, doing: str) -> BrokerError:
    known = broker_error(error.code(), doing)
    detail = error.str().removeprefix("Broker: ")
    message = f"{doing}: {detail} ({known.name})" if detail else str(known)
    retriable = known.retriable or error.retriable() or error.code() in _STALE
    return BrokerError(error.code(), error_name(error.code()), message, retriable=retriable)
