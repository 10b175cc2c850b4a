"""What one refresh has seen of both clusters; all planners decide from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kmirror_dagster.broker.admin_types import Configs, Partition, TopicDescription
from kmirror_dagster.errors import KmirrorError


@dataclass(frozen=True)
class ClusterSnapshot:
    """One cluster as seen by one refresh.

    Attributes:
        brokers: live brokers.
        names: every topic a full listing showed, internal ones included.
        topics: descriptions of the topics of interest.
        topic_errors: topics of interest that could not be described.
        configs: effective configurations of described topics.
        config_errors: topics whose configurations could not be read.
        starts: log starts.
        ends: log ends (high watermark).
        offset_errors: partitions whose start or end could not be read.
        config_keys: topic configuration keys the cluster knows, None when no topic could be looked at.
    """

    brokers: int = 1
    names: frozenset[str] = frozenset()
    topics: Mapping[str, TopicDescription] = field(default_factory=dict[str, TopicDescription])
    topic_errors: Mapping[str, KmirrorError] = field(default_factory=dict[str, KmirrorError])
    configs: Mapping[str, Configs] = field(default_factory=dict[str, Configs])
    config_errors: Mapping[str, KmirrorError] = field(default_factory=dict[str, KmirrorError])
    starts: Mapping[Partition, int] = field(default_factory=dict[Partition, int])
    ends: Mapping[Partition, int] = field(default_factory=dict[Partition, int])
    offset_errors: Mapping[Partition, KmirrorError] = field(default_factory=dict[Partition, KmirrorError])
    config_keys: frozenset[str] | None = None

    def partitions_of(self, topic: str) -> range:
        """Partition numbers of a described topic."""
        return range(self.topics[topic].partitions)


def head_missing(source: ClusterSnapshot, destination: ClusterSnapshot, topic: str) -> bool:
    """Tell whether a partition's log start at the destination is still below the source's.

    An unknown source log start counts as missing: holding the policy back once too often costs nothing,
    cutting under the wrong policy is refused. A partition without a log at the destination starts at 0.
    """
    for partition in source.partitions_of(topic):
        key = (topic, partition)
        start = source.starts.get(key)
        if start is None or destination.starts.get(key, 0) < start:
            return True
    return False
