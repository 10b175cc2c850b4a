"""Single reads over the wire, outside of any fetch session: a look at one batch, or at one setting."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from kafka.protocol.admin import DescribeConfigsRequest

from kmirror_dagster.broker import batches, codes, fetch
from kmirror_dagster.broker.batches import BatchHeader, RawRecord
from kmirror_dagster.broker.fetch import FetchedPartition, FetchPosition, FetchSession
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.broker.wire import READ_UNCOMMITTED, Leader, TopicPartition, WireCluster
from kmirror_dagster.errors import ConnectionLostError, UnsupportedDataError

_SESSIONLESS = -1
_DEADLINE_S = 15.0
_TOPIC_RESOURCE = 2  # ConfigResource.Type.TOPIC


@dataclass(frozen=True)
class BatchLook:
    """The batch that holds an offset, or the next one behind it when nothing is there."""

    header: BatchHeader
    view: memoryview

    def record_at(self, offset: int) -> RawRecord | None:
        """The data record at an offset; None when it is a control record or was compacted away."""
        if self.header.is_control:
            return None
        return next((r for r in batches.decode_records(self.view, self.header) if r.offset == offset), None)


async def fetch_once(
    cluster: WireCluster, topic: str, partition: int, offset: int, *, isolation: int = READ_UNCOMMITTED
) -> FetchedPartition:
    """One Fetch of one partition that does not wait for data; at least one whole batch when there is any.

    Raises:
        BrokerError: OFFSET_OUT_OF_RANGE and whatever else the broker answers.
        AuthorizationError: without READ on the topic.
    """
    leader = await cluster.leader(topic, partition)
    (fetched,) = await fetch_many(
        cluster, {(topic, partition): (leader, offset)}, isolation=isolation, partition_bytes=1
    )
    if fetched.error_code:
        if fetched.error_code in codes.STALE_METADATA:
            cluster.forget(topic, partition)
        doing = f"reading {topic}/{partition} at offset {offset} of the {cluster.role}"
        raise cluster.refusal(fetched.error_code, doing, Right("READ", "topic"), topic)
    return fetched


async def fetch_many(
    cluster: WireCluster,
    targets: Mapping[TopicPartition, tuple[Leader, int]],
    *,
    partition_bytes: int,
    isolation: int = READ_UNCOMMITTED,
) -> list[FetchedPartition]:
    """One Fetch that does not wait for data.

    Args:
        cluster: what is read from.
        targets: where to read; all led by the same broker.
        partition_bytes: how much may be answered of one partition. The first that has any data answers at least one
            whole batch, however long; of the others one that is longer is left out.
        isolation: isolation level.

    Raises:
        BrokerError: what the whole request was answered with; what is of one partition is in its part.
    """
    node_id = next(iter(targets.values()))[0].node_id
    named = all(leader.topic_id for leader, _ in targets.values())
    connection = await cluster.connection(node_id)
    version = connection.version(fetch.API_KEY, fetch.HIGHEST_VERSION if named else 12)
    session = FetchSession(epoch=_SESSIONLESS, isolation=isolation)
    correlation_id = connection.next_id()
    positions = {
        tp: FetchPosition(
            leader.topic_id.bytes if leader.topic_id else bytes(16),
            offset,
            leader_epoch=leader.epoch,
            max_bytes=partition_bytes,
        )
        for tp, (leader, offset) in targets.items()
    }
    request = session.request(
        positions,
        [],
        version=version,
        correlation_id=correlation_id,
        client_id=cluster.settings.client_id,
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=partition_bytes * len(positions),
    )
    future = connection.send(correlation_id, [request])
    try:
        frame = await asyncio.wait_for(asyncio.shield(future), _DEADLINE_S)
    except asyncio.TimeoutError:
        connection.close()
        raise ConnectionLostError(f"{cluster.role} broker {node_id} left a fetch unanswered") from None
    view = memoryview(bytes(frame.view))  # rare and small: not worth keeping a receive buffer for
    cluster.pool.release(frame.lease)
    answer = session.answer(view, version)
    if answer.error_code:
        raise codes.broker_error(answer.error_code, f"reading from {cluster.role} broker {node_id}")
    return answer.partitions


async def look_at(cluster: WireCluster, topic: str, partition: int, offset: int) -> BatchLook | None:
    """The batch at an offset; None when there is none there or behind it."""
    fetched = await fetch_once(cluster, topic, partition, offset)
    return batch_at(fetched.records, offset, cluster.role)


def batch_at(records: memoryview, offset: int, role: str) -> BatchLook | None:
    """The batch at an offset, or the next one behind it, of what was read; None when none of it is whole.

    Raises:
        UnsupportedDataError: the batch is damaged, or of an old format.
    """
    for header in batches.headers(records):
        if header.next_offset > offset:
            if not batches.is_intact(records, header):
                raise UnsupportedDataError(f"{role}: batch at {header.base_offset} is damaged")
            return BatchLook(header, records)
    return None


async def topic_config(cluster: WireCluster, topic: str, name: str) -> str:
    """One setting of a topic, its own or inherited (DescribeConfigs).

    Raises:
        AuthorizationError: without DESCRIBE_CONFIGS on the topic.
        BrokerError: whatever else the broker answers.
    """
    kind = DescribeConfigsRequest
    asked = kind.DescribeConfigsResource(
        resource_type=_TOPIC_RESOURCE, resource_name=topic, configuration_keys=[name]
    )
    answer = await cluster.any_call(
        kind(resources=[asked], include_synonyms=False, include_documentation=False)
    )
    result = answer.results[0]
    if result.error_code:
        doing = f"reading {name} of topic {topic} at the {cluster.role} cluster"
        raise cluster.refusal(result.error_code, doing, Right("DESCRIBE_CONFIGS", "topic"), topic)
    return str(result.configs[0].value)
