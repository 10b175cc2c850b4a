"""What a sandbox broker is configured with: pure functions from a cluster's plan to the text of its files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

CLIENT = "CLIENT"
CONTROLLER = "CONTROLLER"
INTERNAL = "INTERNAL"
HOST = "127.0.0.1"


class Protocol(str, Enum):
    """Kafka's security protocols."""

    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"

    @property
    def is_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self in (Protocol.SSL, Protocol.SASL_SSL)

    @property
    def is_sasl(self) -> bool:
        """Whether clients log in by SASL."""
        return self in (Protocol.SASL_PLAINTEXT, Protocol.SASL_SSL)


@dataclass(frozen=True)
class BrokerPlan:
    """One broker of a cluster.

    Attributes:
        node_id: KRaft node id, from 1.
        ports: TCP port by listener name.
        home: directory of the broker's files.
    """

    node_id: int
    ports: Mapping[str, int]
    home: Path

    @property
    def data(self) -> Path:
        """Log directory."""
        return self.home / "data"

    @property
    def log(self) -> Path:
        """The broker's log file, for people."""
        return self.home / "server.log"

    @property
    def console(self) -> Path:
        """What the JVM itself wrote."""
        return self.home / "console.log"


def base_properties(brokers: int) -> dict[str, str]:
    """Settings that make a broker quick on a small machine; replication factors that fit the cluster.

    Args:
        brokers: number of brokers in the cluster.
    """
    replicas = str(min(3, brokers))
    return {
        # A forgotten topic name must be an error, and mirrors create their topics themselves.
        "auto.create.topics.enable": "false",
        "default.replication.factor": replicas,
        "num.partitions": "1",
        "offsets.topic.replication.factor": replicas,
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.num.partitions": "4",
        "transaction.state.log.min.isr": "1",
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.num.partitions": "2",
        "share.coordinator.state.topic.min.isr": "1",
        # Groups start working at once; the default waits 3 s for further members.
        "group.initial.rebalance.delay.ms": "0",
        # Tests shorten sessions to see members die.
        "group.min.session.timeout.ms": "1000",
        "log.initial.task.delay.ms": "1000",
        "log.retention.check.interval.ms": "5000",
        "log.cleaner.backoff.ms": "1000",
        # The default of 128 MiB is taken from the heap at start.
        "log.cleaner.dedupe.buffer.size": "8388608",
        "log.segment.delete.delay.ms": "1000",
        "controlled.shutdown.max.retries": "1",
        "num.network.threads": "2",
        "num.io.threads": "4",
        "background.threads": "2",
        "num.recovery.threads.per.data.dir": "1",
        # A killed broker is let in again only when its old session has ended, so the session is how long a
        # restart takes. Three brokers on two cores may be slow to answer each other.
        "broker.session.timeout.ms": "3000" if brokers == 1 else "6000",
        "broker.heartbeat.interval.ms": "500" if brokers == 1 else "1000",
    }


@dataclass(frozen=True)
class ListenerPlan:
    """One listener of every broker in a cluster.

    Attributes:
        name: Kafka listener name.
        protocol: security protocol.
        properties: further settings of this listener, without its ``listener.name.`` prefix.
        advertised_port: port that clients are sent to instead of the broker's own, of a proxy in front of it.
        advertised_host: address of that proxy; None: this machine.
    """

    name: str
    protocol: Protocol = Protocol.PLAINTEXT
    properties: Mapping[str, str] | None = None
    advertised_port: int | None = None
    advertised_host: str | None = None


def server_properties(
    broker: BrokerPlan,
    brokers: Sequence[BrokerPlan],
    listeners: Sequence[ListenerPlan],
    overrides: Mapping[str, str],
) -> dict[str, str]:
    """All settings of one broker in combined mode (controller and broker in one process).

    Args:
        broker: the broker to configure.
        brokers: all brokers of the cluster, for the controller quorum.
        listeners: for clients and for the brokers among themselves; the first one is the brokers' own.
        overrides: what the cluster's owner wants otherwise; wins over everything.
    """
    everybody = [*listeners, ListenerPlan(CONTROLLER)]
    properties = {
        "process.roles": "broker,controller",
        "node.id": str(broker.node_id),
        "controller.quorum.voters": ",".join(
            f"{each.node_id}@{HOST}:{each.ports[CONTROLLER]}" for each in brokers
        ),
        "controller.listener.names": CONTROLLER,
        "inter.broker.listener.name": listeners[0].name,
        "listeners": ",".join(f"{each.name}://{HOST}:{broker.ports[each.name]}" for each in everybody),
        "advertised.listeners": ",".join(
            f"{each.name}://{each.advertised_host or HOST}:{each.advertised_port or broker.ports[each.name]}"
            for each in listeners
        ),
        "listener.security.protocol.map": ",".join(
            f"{each.name}:{each.protocol.value}" for each in everybody
        ),
        "log.dirs": str(broker.data),
    }
    for each in listeners:
        prefix = f"listener.name.{each.name.lower()}."
        properties |= {f"{prefix}{key}": value for key, value in (each.properties or {}).items()}
    return properties | base_properties(len(brokers)) | dict(overrides)


def render(properties: Mapping[str, str]) -> str:
    """Text of a Java properties file; every character that the format gives a meaning to is escaped."""
    return "".join(f"{_escape(key)}={_escape(value)}\n" for key, value in properties.items())


def _escape(text: str) -> str:
    special = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}
    escaped = "".join(special.get(char, char) for char in text)
    for char in "=:#!":
        escaped = escaped.replace(char, f"\\{char}")
    if escaped.startswith(" "):
        escaped = "\\" + escaped
    # The format is Latin-1 by definition.
    return "".join(
        char if char.isascii() else "".join(f"\\u{unit:04x}" for unit in _utf16(char)) for char in escaped
    )


def _utf16(char: str) -> list[int]:
    data = char.encode("utf-16-be")
    return [int.from_bytes(data[index : index + 2], "big") for index in range(0, len(data), 2)]


def log4j2_properties(log: Path) -> str:
    """Logging set-up of a broker: one file for people, rolled at 20 MB, three kept."""
    return render(
        {
            "status": "warn",
            "appender.file.type": "RollingFile",
            "appender.file.name": "file",
            "appender.file.fileName": str(log),
            "appender.file.filePattern": f"{log}.%i",
            "appender.file.layout.type": "PatternLayout",
            "appender.file.layout.pattern": "%d{yyyy-MM-dd HH:mm:ss.SSS} %-5p %c{1} %m%n",
            "appender.file.policies.type": "SizeBasedTriggeringPolicy",
            "appender.file.policies.size": "20MB",
            "appender.file.strategy.type": "DefaultRolloverStrategy",
            "appender.file.strategy.max": "3",
            "rootLogger.level": "info",
            "rootLogger.appenderRef.file.ref": "file",
            # One line per partition and change otherwise.
            "logger.state.name": "state.change.logger",
            "logger.state.level": "warn",
        }
    )
