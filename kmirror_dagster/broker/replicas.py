"""How well partitions are replicated, as a cluster's metadata says it now."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from uuid import UUID

from kafka.protocol.metadata.metadata import MetadataRequest

from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.broker.wire_thread import WireThread
from kmirror_dagster.settings import ClusterSettings


@dataclass(frozen=True)
class ReplicaHealth:
    """Partitions, as topic/number, that a cluster does not keep as it should.

    Attributes:
        partitions: looked at in all.
        leaderless: nobody can read or write them now.
        under_replicated: fewer replicas in sync than there are.
    """

    partitions: int
    leaderless: tuple[str, ...] = ()
    under_replicated: tuple[str, ...] = ()


def replica_health(settings: ClusterSettings, topics: Iterable[str], *, timeout_s: float) -> ReplicaHealth:
    """Look at topics; one that does not exist has no partitions.

    Raises:
        KmirrorError: when the cluster does not answer in time.
    """
    names = sorted(set(topics))
    with closing(WireThread(settings)) as wire:
        return wire.run(
            lambda cluster: _look(cluster, names), timeout_s=timeout_s, doing="looking at replicas"
        )


async def _look(cluster: WireCluster, names: list[str]) -> ReplicaHealth:
    topics = [MetadataRequest.MetadataRequestTopic(name=name, topic_id=UUID(int=0)) for name in names]
    answer = await cluster.any_call(MetadataRequest(topics=topics, allow_auto_topic_creation=False))
    count = 0
    leaderless: list[str] = []
    under_replicated: list[str] = []
    for topic in answer.topics:
        for partition in topic.partitions:
            count += 1
            name = f"{topic.name}/{partition.partition_index}"
            if partition.leader_id < 0:
                leaderless.append(name)
            elif len(partition.isr_nodes) < len(partition.replica_nodes):
                under_replicated.append(name)
    return ReplicaHealth(count, tuple(sorted(leaderless)), tuple(sorted(under_replicated)))
