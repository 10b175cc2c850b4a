"""Whether a cluster serves, asked through Kafka's own API; why a broker did not start, from its log."""

import logging
import re
import time
from collections.abc import Callable

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from kmirror_dagster.sandbox.properties import BrokerPlan

_REQUEST_S = 2.0
_POLL_S = 0.05
_EXCEPTION = re.compile(r"[\w.$]+(Exception|Error)\b")

# librdkafka reports every refused connection; while a broker starts these are expected.
_silent = logging.getLogger(f"{__name__}.librdkafka")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False


def await_ready(addresses: list[str], deadline: float, check: Callable[[], None], *, leaders: bool) -> None:
    """Wait until every broker answers by itself, knows the others, and partitions have leaders.

    Args:
        addresses: ``host:port`` of an unsecured listener of each broker.
        deadline: on the monotonic clock.
        check: called before every question; raises when waiting has become pointless.
        leaders: whether every partition must have a leader (not the case while brokers are down on purpose).

    Raises:
        TimeoutError: the deadline passed; the message says what was missing last.
    """
    for address in addresses:
        # A broker that was killed stays in the others' metadata until its session ends, so each is asked
        # itself: a client that knows one address only can have its first answer from nobody else.
        client = _client(address)
        while True:
            check()
            missing = _missing(client, len(addresses), leaders=leaders)
            if missing is None:
                break
            if time.monotonic() >= deadline:
                raise TimeoutError(missing)
            time.sleep(_POLL_S)


def _client(address: str) -> AdminClient:
    return AdminClient(
        {
            "bootstrap.servers": address,
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 200,
        },
        logger=_silent,
    )


def _missing(client: AdminClient, brokers: int, *, leaders: bool) -> str | None:
    try:
        cluster = client.list_topics(timeout=_REQUEST_S)
        controller = client.describe_cluster(request_timeout=_REQUEST_S).result(_REQUEST_S + 1).controller
    except (KafkaException, TimeoutError) as error:
        return f"last answer: {error}"
    if len(cluster.brokers) < brokers:
        return f"{len(cluster.brokers)} of {brokers} brokers are registered"
    if controller is None:
        return "no controller is elected"
    if leaders:
        for topic in cluster.topics.values():
            if any(partition.leader < 0 for partition in topic.partitions.values()):
                return f"a partition of {topic.topic} has no leader"
    return None


def first_error(broker: BrokerPlan) -> str:
    """What went wrong in a broker's latest launch, from its logs, for a one-line message."""
    for path, marks in ((broker.log, (" ERROR ", " FATAL ")), (broker.console, ("Error", "Exception"))):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            continue
        begin = max((number for number, line in enumerate(lines) if "KafkaConfig values" in line), default=0)
        reason = _reason(lines[begin:], marks)
        if reason is not None:
            return " ".join(reason.split())
    return "its logs name no reason"


def _reason(lines: list[str], marks: tuple[str, ...]) -> str | None:
    """The exception under the first line of trouble, as deep as its causes go; else that line."""
    first = next((number for number, line in enumerate(lines) if any(mark in line for mark in marks)), None)
    if first is None:
        return None
    found = lines[first]
    for line in lines[first + 1 :]:
        if line.startswith("Caused by: "):
            found = line.removeprefix("Caused by: ")
        elif _EXCEPTION.match(line):
            found = line
        elif not line.startswith(("\t", " ")):
            break
    return found
