"""Positions of share groups (KIP-932): the start offset of each share-partition, read and set by their coordinators."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kafka.protocol.api_message import ApiMessage

from kmirror_dagster.broker.admin_types import Answers, CommittedOffset, Partition
from kmirror_dagster.broker.connection import Connection
from kmirror_dagster.broker.group_wire import ask_coordinators
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.errors import KmirrorError

# keys of both calls (protocol guide, "Api Keys")
READ_API = 90
SET_API = 91

_MESSAGES = "kmirror_dagster.broker.messages"
_READ_RIGHT = Right("DESCRIBE", "group")
_ALTER_RIGHT = Right("READ", "group")
_READING = "reading positions of share group"
_SETTING = "setting positions of share group"
# a share-partition's position carries no sign of who put it there: it counts as a consumer's
_EPOCH = 0
_GROUP_ID_NOT_FOUND = 69


class DescribeShareGroupOffsetsRequest(ApiMessage, load_json=_MESSAGES):
    """Ask for share-partition start offsets."""


class DescribeShareGroupOffsetsResponse(ApiMessage, load_json=_MESSAGES):
    """Share-partition start offsets."""


class AlterShareGroupOffsetsRequest(ApiMessage, load_json=_MESSAGES):
    """Set share-partition start offsets of a group without members."""


class AlterShareGroupOffsetsResponse(ApiMessage, load_json=_MESSAGES):
    """Outcome for each share-partition."""


async def fetch_share_offsets(
    cluster: WireCluster, groups: Iterable[str]
) -> Answers[str, Mapping[Partition, CommittedOffset]]:
    """Start offsets of share groups; partitions that none was made for yet are absent."""
    kind: Any = DescribeShareGroupOffsetsRequest

    async def ask(
        connection: Connection, names: Sequence[str]
    ) -> Mapping[str, Mapping[Partition, CommittedOffset] | KmirrorError]:
        wanted = [kind.DescribeShareGroupOffsetsRequestGroup(group_id=name, topics=None) for name in names]
        answer = await connection.call(kind(groups=wanted))
        return {group.group_id: _positions(group, cluster) for group in answer.groups}

    return await ask_coordinators(cluster, groups, ask, _READ_RIGHT, _READING)


def _positions(group: Any, cluster: WireCluster) -> Mapping[Partition, CommittedOffset] | KmirrorError:
    if group.error_code == _GROUP_ID_NOT_FOUND:
        return {}
    if group.error_code:
        doing = f"{_READING} {group.group_id}"
        return cluster.refusal(group.error_code, doing, _READ_RIGHT, group.group_id)
    return {
        (topic.topic_name, entry.partition_index): CommittedOffset(entry.start_offset, leader_epoch=_EPOCH)
        for topic in group.topics
        for entry in topic.partitions
        if entry.start_offset >= 0 and not entry.error_code
    }


async def alter_share_offsets(
    cluster: WireCluster, offsets: Mapping[str, Mapping[Partition, CommittedOffset]]
) -> Answers[str, Mapping[Partition, KmirrorError | None]]:
    """Set start offsets of share groups without members; a group that does not exist is made."""

    async def ask(
        connection: Connection, names: Sequence[str]
    ) -> Mapping[str, Mapping[Partition, KmirrorError | None] | KmirrorError]:
        return {
            name: _outcomes(name, await connection.call(_alteration(name, offsets[name])), cluster)
            for name in names
        }

    wanted = [group for group, positions in offsets.items() if positions]
    return await ask_coordinators(cluster, wanted, ask, _ALTER_RIGHT, _SETTING)


def _alteration(group: str, positions: Mapping[Partition, CommittedOffset]) -> Any:
    kind: Any = AlterShareGroupOffsetsRequest
    part: Any = kind.AlterShareGroupOffsetsRequestTopic
    topics = [
        part(
            topic_name=topic,
            partitions=[
                part.AlterShareGroupOffsetsRequestPartition(
                    partition_index=partition, start_offset=committed.offset
                )
                for (name, partition), committed in sorted(positions.items())
                if name == topic
            ],
        )
        for topic in sorted({topic for topic, _ in positions})
    ]
    return kind(group_id=group, topics=topics)


def _outcomes(
    group: str, answer: Any, cluster: WireCluster
) -> Mapping[Partition, KmirrorError | None] | KmirrorError:
    if answer.error_code:
        return cluster.refusal(answer.error_code, f"{_SETTING} {group}", _ALTER_RIGHT, group)
    outcomes: dict[Partition, KmirrorError | None] = {}
    for topic in answer.responses:
        for entry in topic.partitions:
            doing = f"setting {topic.topic_name}/{entry.partition_index} of share group {group}"
            right = Right("READ", "topic")
            outcomes[topic.topic_name, entry.partition_index] = (
                cluster.refusal(entry.error_code, doing, right, topic.topic_name)
                if entry.error_code
                else None
            )
    return outcomes
