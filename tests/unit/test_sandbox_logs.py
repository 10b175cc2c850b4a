"""Reading from a broker's logs why it did not start."""

from pathlib import Path

import pytest

from kmirror_dagster.sandbox.probe import first_error
from kmirror_dagster.sandbox.properties import BrokerPlan
from kmirror_dagster.sandbox.storage import _reason

BOUND = """\
2026-01-01 00:00:00.000 INFO  KafkaConfig KafkaConfig values:
\tadvertised.listeners = x
2026-01-01 00:00:01.000 ERROR BrokerServer Fatal error during broker startup
org.apache.kafka.common.KafkaException: Socket server failed to bind: Address already in use.
\tat kafka.network.Acceptor.openServerSocket(SocketServer.scala:1)
Caused by: java.net.BindException: Address already in use
\tat java.base/sun.nio.ch.Net.bind0(Native Method)
\t... 9 more
2026-01-01 00:00:02.000 ERROR BrokerServer something later
"""


@pytest.fixture
def broker(tmp_path: Path) -> BrokerPlan:
    return BrokerPlan(1, {}, tmp_path)


def test_deepest_cause_is_told(broker: BrokerPlan) -> None:
    """Of the first trouble of the latest launch, the last cause; in one line."""
    broker.log.write_text("2025-01-01 ERROR of an earlier launch\n" + BOUND)
    assert first_error(broker) == "java.net.BindException: Address already in use"


def test_trouble_without_exception_is_told_itself(broker: BrokerPlan) -> None:
    """An error line with no exception under it is the reason."""
    broker.log.write_text("12:00 ERROR X disk is full\n12:01 INFO X bye\n")
    assert first_error(broker) == "12:00 ERROR X disk is full"


def test_console_is_read_when_the_log_is_silent(broker: BrokerPlan) -> None:
    """A JVM that fails before logging starts says why on its console."""
    broker.console.write_text("Error: Could not find or load main class kafka.Kafka\n")
    assert "main class" in first_error(broker)
    broker.console.write_text("")
    assert first_error(broker) == "its logs name no reason"


def test_refused_format_tells_the_exception() -> None:
    """Of the formatting tool's output, the exception, not the calls below it."""
    output = 'Exception in thread "main" ConfigException: Invalid value 0\n\tat a.b(C.java:1)\n'
    assert _reason(output) == 'Exception in thread "main" ConfigException: Invalid value 0'
    assert _reason("no such directory\n") == "no such directory"
    assert _reason("") == "no output"
