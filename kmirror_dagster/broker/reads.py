"""Single reads over the wire, outside of any fetch session: a look at one batch, or at one setting."""

import asyncio
from dataclasses import dataclass

from kafka.protocol.admin import DescribeConfigsRequest

from kmirror_dagster.broker import batches, codes, fetch
from kmirror_dagster.broker.batches import BatchHeader, RawRecord
from kmirror_dagster.broker.fetch import FetchedPartition, FetchPosition, FetchSession
from kmirror_dagster.broker.wire import READ_UNCOMMITTED, WireCluster
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
    """
    leader = await cluster.leader(topic, partition)
    connection = await cluster.connection(leader.node_id)
    version = connection.version(fetch.API_KEY, fetch.HIGHEST_VERSION if leader.topic_id else 12)
    session = FetchSession(epoch=_SESSIONLESS, isolation=isolation)
    correlation_id = connection.next_id()
    position = FetchPosition(
        leader.topic_id.bytes if leader.topic_id else bytes(16),
        offset,
        leader_epoch=leader.epoch,
        max_bytes=1,
    )
    request = session.request(
        {(topic, partition): position},
        [],
        version=version,
        correlation_id=correlation_id,
        client_id=cluster.settings.client_id,
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=1,
    )
    future = connection.send(correlation_id, [request])
    try:
        frame = await asyncio.wait_for(asyncio.shield(future), _DEADLINE_S)
    except asyncio.TimeoutError:
        connection.close()
        raise ConnectionLostError(f"{cluster.role} left a fetch of {topic}/{partition} unanswered") from None
    view = memoryview(bytes(frame.view))  # rare and small: not worth keeping a receive buffer for
    cluster.pool.release(frame.lease)
    answer = session.answer(view, version)
    code = answer.error_code or answer.partitions[0].error_code
    if code:
        if code in codes.STALE_METADATA:
            cluster.forget(topic, partition)
        raise codes.broker_error(
            code, f"reading {topic}/{partition} at offset {offset} of the {cluster.role}"
        )
    return answer.partitions[0]


async def look_at(cluster: WireCluster, topic: str, partition: int, offset: int) -> BatchLook | None:
    """The batch at an offset; None when there is none there or behind it."""
    fetched = await fetch_once(cluster, topic, partition, offset)
    for header in batches.headers(fetched.records):
        if header.next_offset > offset:
            if not batches.is_intact(fetched.records, header):
                raise UnsupportedDataError(f"{cluster.role}: batch at {header.base_offset} is damaged")
            return BatchLook(header, fetched.records)
    return None


async def topic_config(cluster: WireCluster, topic: str, name: str) -> str:
    """One setting of a topic, its own or inherited (DescribeConfigs).

    Raises:
        BrokerError: without DESCRIBE_CONFIGS on the topic.
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
        raise codes.broker_error(
            result.error_code, f"reading {name} of topic {topic} at the {cluster.role} cluster"
        )
    return str(result.configs[0].value)
