"""Admin calls about topics and their configurations."""

import concurrent.futures
import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from confluent_kafka import TopicCollection
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource, ConfigSource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewPartitions
from confluent_kafka.cimpl import NewTopic as LibrdkafkaNewTopic

from kmirror_dagster.broker.admin_calls import AdminCalls
from kmirror_dagster.broker.admin_types import (
    Answers,
    ConfigChange,
    Configs,
    ConfigValue,
    NewTopic,
    TopicDescription,
)
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.errors import KmirrorError

# Id of a topic on a cluster without topic ids (before 2.8): sixteen zero bytes in Kafka's base64 form.
_NO_TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAA"
# An answer lists about 35 configurations a topic, and the client library converts it while nothing else in
# the process runs: small chunks keep that to some milliseconds.
_CONFIG_CHUNK = 50
# the client library gives the source as a number or as a member, depending on its version
_OVERRIDE = ConfigSource.DYNAMIC_TOPIC_CONFIG


# A controller takes at most 10,000 records for one request (KRaft): a topic, a partition and a setting are one each.
_MOST_RECORDS = 5_000
_LEAST_WAIT_S = 1.0


class TopicCalls(AdminCalls):
    """Topics and topic configurations."""

    def topic_names(self, *, timeout_s: float | None = None) -> frozenset[str]:
        """Names of all topics the principal may describe, internal ones included.

        A listing of everything: it names no topic, so it cannot make a broker create one.
        """
        wait = self.timeout(timeout_s)
        metadata = self.blocking(
            lambda: self.client.list_topics(timeout=wait),
            doing="listing topics",
            right=Right("DESCRIBE", "cluster"),
        )
        return frozenset(metadata.topics)

    def topics(
        self, names: Iterable[str], *, timeout_s: float | None = None
    ) -> Answers[str, TopicDescription]:
        """Describe topics; never creates one (the request forbids it)."""
        wanted = sorted(set(names))
        if not wanted:
            return Answers()
        wait = self.timeout(timeout_s)
        futures = self.client.describe_topics(TopicCollection(wanted), request_timeout=wait)
        return self.gather(
            futures,
            _topic_description,
            doing="describing topic",
            right=Right("DESCRIBE", "topic"),
            timeout_s=wait,
        )

    def topic_configs(self, names: Iterable[str], *, timeout_s: float | None = None) -> Answers[str, Configs]:
        """Effective configurations of topics."""
        wanted = sorted(set(names))
        wait = self.timeout(timeout_s)
        futures: dict[str, concurrent.futures.Future[Any]] = {}
        for index in range(0, len(wanted), _CONFIG_CHUNK):
            chunk = wanted[index : index + _CONFIG_CHUNK]
            resources = [ConfigResource(ResourceType.TOPIC, name) for name in chunk]
            asked = self.client.describe_configs(resources, request_timeout=wait)
            futures.update((resource.name, future) for resource, future in asked.items())
        return self.gather(
            futures,
            _configs,
            doing="reading configurations of topic",
            right=Right("DESCRIBE_CONFIGS", "topic"),
            timeout_s=wait,
        )

    def create_topics(
        self, topics: Sequence[NewTopic], *, validate_only: bool = False, timeout_s: float | None = None
    ) -> Mapping[str, KmirrorError | None]:
        """Create topics with their configurations; the answer has one entry for each, None: created."""
        wait = self.timeout(timeout_s)
        end = time.monotonic() + wait
        outcomes: dict[str, KmirrorError | None] = {}
        for part in creatable(topics):
            left = max(end - time.monotonic(), _LEAST_WAIT_S)
            new = [
                LibrdkafkaNewTopic(
                    topic.name,
                    num_partitions=topic.partitions,
                    replication_factor=topic.replication_factor,
                    config=dict(topic.configs),
                )
                for topic in part
            ]
            futures = self.client.create_topics(
                new, request_timeout=left, operation_timeout=left, validate_only=validate_only
            )
            outcomes |= self._outcomes(futures, "creating topic", Right("CREATE", "topic"), left)
        return outcomes

    def create_partitions(
        self, totals: Mapping[str, int], *, timeout_s: float | None = None
    ) -> Mapping[str, KmirrorError | None]:
        """Grow topics to a total number of partitions."""
        if not totals:
            return {}
        wait = self.timeout(timeout_s)
        new = [NewPartitions(topic, total) for topic, total in sorted(totals.items())]
        futures = self.client.create_partitions(new, request_timeout=wait, operation_timeout=wait)
        return self._outcomes(futures, "adding partitions to topic", Right("ALTER", "topic"), wait)

    def alter_configs(
        self, changes: Mapping[str, ConfigChange], *, timeout_s: float | None = None
    ) -> Mapping[str, KmirrorError | None]:
        """Set and unset single overrides (incremental, KIP-339); a topic's change is all or nothing."""
        resources = [_change(name, change) for name, change in sorted(changes.items()) if change]
        if not resources:
            return {}
        wait = self.timeout(timeout_s)
        futures = self.client.incremental_alter_configs(resources, request_timeout=wait)
        by_name = {resource.name: future for resource, future in futures.items()}
        return self._outcomes(
            by_name, "changing configurations of topic", Right("ALTER_CONFIGS", "topic"), wait
        )

    def delete_topics(
        self, names: Iterable[str], *, timeout_s: float | None = None
    ) -> Mapping[str, KmirrorError | None]:
        """Delete topics."""
        wanted = sorted(set(names))
        if not wanted:
            return {}
        wait = self.timeout(timeout_s)
        futures = self.client.delete_topics(wanted, request_timeout=wait, operation_timeout=wait)
        return self._outcomes(futures, "deleting topic", Right("DELETE", "topic"), wait)

    def _outcomes(
        self, futures: Mapping[str, Any], doing: str, right: Right, timeout_s: float
    ) -> dict[str, KmirrorError | None]:
        answers = self.gather(
            futures, lambda _name, _value: None, doing=doing, right=right, timeout_s=timeout_s
        )
        return dict(answers.values) | dict(answers.errors)


def _topic_description(name: str, answer: Any) -> TopicDescription:
    topic_id = str(answer.topic_id)
    return TopicDescription(
        name=name,
        topic_id=None if topic_id == _NO_TOPIC_ID else topic_id,
        partitions=len(answer.partitions),
        replication_factor=len(answer.partitions[0].replicas) if answer.partitions else 0,
        internal=bool(answer.is_internal),
    )


@functools.lru_cache(maxsize=10_000)
def _config_value(value: str | None, source: Any, sensitive: bool, read_only: bool) -> ConfigValue:
    """One object for all the topics that have the same value: nearly all of them are defaults."""
    return ConfigValue(value, source in (_OVERRIDE, _OVERRIDE.value), sensitive, read_only)


def _configs(_name: str, answer: Mapping[str, ConfigEntry]) -> Configs:
    return {
        key: _config_value(entry.value, entry.source, entry.is_sensitive, entry.is_read_only)
        for key, entry in answer.items()
    }


def _change(name: str, change: ConfigChange) -> ConfigResource:
    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, value in sorted(change.sets.items())
    ]
    entries += [
        ConfigEntry(key, None, incremental_operation=AlterConfigOpType.DELETE)
        for key in sorted(change.unsets)
    ]
    return ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)


def creatable(topics: Sequence[NewTopic]) -> Iterator[list[NewTopic]]:
    """Topics in parts that a controller takes in one request."""
    part: list[NewTopic] = []
    records = 0
    for topic in topics:
        size = 1 + topic.partitions + len(topic.configs)
        if part and records + size > _MOST_RECORDS:
            yield part
            part, records = [], 0
        part.append(topic)
        records += size
    if part:
        yield part
