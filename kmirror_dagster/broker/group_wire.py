"""Consumer groups over the wire client: one request per coordinator for any number of groups.

librdkafka is not used for these: its OffsetFetch handler dereferences a consumer that an admin client has
not, and takes the process down when a broker answers NOT_COORDINATOR (2.16); it also leaves share and streams
groups out.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kafka.protocol.admin import ListGroupsRequest
from kafka.protocol.consumer.group import OffsetCommitRequest, OffsetDeleteRequest, OffsetFetchRequest
from kafka.protocol.metadata.find_coordinator import FindCoordinatorRequest
from kafka.protocol.metadata.metadata import MetadataRequest

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.admin_types import (
    Answers,
    CommittedOffset,
    GroupListing,
    GroupListings,
    GroupType,
    Partition,
)
from kmirror_dagster.broker.codes import broker_error
from kmirror_dagster.broker.connection import Connection
from kmirror_dagster.broker.missing_rights import Right, refusal
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.errors import BrokerError, KmirrorError

V = TypeVar("V")

# The coordinator moved or is being made: ask again, a little later. A cluster creates its offsets topic at
# the first look-up of a coordinator.
_RETRIED = frozenset(
    {codes.COORDINATOR_LOAD_IN_PROGRESS, codes.COORDINATOR_NOT_AVAILABLE, codes.NOT_COORDINATOR}
)
_PATIENCE_S = 5.0
_BACKOFF_S = (0.05, 1.0)
# Versions that name topics; later ones take topic ids.
_FETCH_VERSION = 9
_COMMIT_VERSION = 9
_BATCHED_FETCH_VERSION = 8
_BATCHED_FIND_VERSION = 4
_GROUPS_PER_REQUEST = 100
# Protocol types on brokers that do not tell group types yet (ListGroups before v5).
_TYPE_OF_PROTOCOL = {"share": GroupType.SHARE, "streams": GroupType.STREAMS}

READ_POSITIONS = Right("DESCRIBE", "group")
COMMIT_POSITIONS = Right("READ", "group")
DELETE_POSITIONS = Right("DELETE", "group")

# asks one broker about some groups; the value or error of each
Ask = Callable[[Connection, Sequence[str]], Awaitable[Mapping[str, "V | KmirrorError"]]]


async def list_groups(cluster: WireCluster) -> GroupListings:
    """Groups of all types and brokers (KIP-848, KIP-932, KIP-1071)."""
    await cluster.refresh()
    answer = await cluster.any_call(MetadataRequest(topics=[], allow_auto_topic_creation=False))
    asked = [_groups_of(cluster, broker.node_id) for broker in answer.brokers]
    groups: dict[str, GroupListing] = {}
    errors: list[KmirrorError] = []
    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(outcome, KmirrorError):
            errors.append(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            groups.update((listing.group, listing) for listing in outcome)
    return GroupListings(tuple(groups[name] for name in sorted(groups)), tuple(errors))


async def _groups_of(cluster: WireCluster, node_id: int) -> list[GroupListing]:
    connection = await cluster.connection(node_id)
    answer = await connection.call(ListGroupsRequest(states_filter=[], types_filter=[]))
    if answer.error_code:
        raise broker_error(answer.error_code, f"listing groups of broker {node_id}")
    return [
        GroupListing(group.group_id, _group_type(group), getattr(group, "group_state", None) or "Unknown")
        for group in answer.groups
    ]


def _group_type(group: Any) -> GroupType:
    name = str(getattr(group, "group_type", None) or "").lower()
    if name in {member.value for member in GroupType}:
        return GroupType(name)
    return _TYPE_OF_PROTOCOL.get(str(group.protocol_type), GroupType.UNKNOWN)


async def fetch_offsets(
    cluster: WireCluster, groups: Iterable[str]
) -> Answers[str, Mapping[Partition, CommittedOffset]]:
    """All committed positions of groups; partitions without a commit are absent."""

    async def ask(
        connection: Connection, names: Sequence[str]
    ) -> Mapping[str, Mapping[Partition, CommittedOffset] | KmirrorError]:
        version = connection.version(OffsetFetchRequest.API_KEY, _FETCH_VERSION)
        if version < _BATCHED_FETCH_VERSION:
            requests = [OffsetFetchRequest(group_id=name, topics=None) for name in names]
            answers = await _pipelined(connection, requests, version)
            return {
                name: _positions(name, answer, cluster) for name, answer in zip(names, answers, strict=True)
            }
        kind = OffsetFetchRequest
        request = kind(groups=[kind.OffsetFetchRequestGroup(group_id=name, topics=None) for name in names])
        answer = await connection.call(request, version=version)
        return {group.group_id: _positions(group.group_id, group, cluster) for group in answer.groups}

    return await ask_coordinators(cluster, groups, ask, READ_POSITIONS, "reading positions of group")


def _positions(
    group: str, answer: Any, cluster: WireCluster
) -> Mapping[Partition, CommittedOffset] | KmirrorError:
    if answer.error_code:
        return _group_error(answer.error_code, group, cluster, READ_POSITIONS, "reading positions of group")
    return {
        (topic.name, entry.partition_index): CommittedOffset(
            offset=entry.committed_offset,
            metadata=entry.metadata,
            leader_epoch=_epoch(getattr(entry, "committed_leader_epoch", None)),
        )
        for topic in answer.topics
        for entry in topic.partitions
        if entry.committed_offset >= 0 and not entry.error_code
    }


def _epoch(value: int | None) -> int | None:
    return value if value is not None and value >= 0 else None


async def commit_offsets(
    cluster: WireCluster, offsets: Mapping[str, Mapping[Partition, CommittedOffset]]
) -> Answers[str, Mapping[Partition, KmirrorError | None]]:
    """Commit positions for groups without live members, as an administrator does (generation -1)."""

    async def ask(
        connection: Connection, names: Sequence[str]
    ) -> Mapping[str, Mapping[Partition, KmirrorError | None] | KmirrorError]:
        version = connection.version(OffsetCommitRequest.API_KEY, _COMMIT_VERSION)
        answers = await _pipelined(connection, [_commit(name, offsets[name]) for name in names], version)
        return {name: _committed(name, answer, cluster) for name, answer in zip(names, answers, strict=True)}

    wanted = [group for group, positions in offsets.items() if positions]
    return await ask_coordinators(cluster, wanted, ask, COMMIT_POSITIONS, "committing positions of group")


def _commit(group: str, positions: Mapping[Partition, CommittedOffset]) -> Any:
    kind = OffsetCommitRequest
    topics = [
        kind.OffsetCommitRequestTopic(
            name=topic,
            partitions=[
                kind.OffsetCommitRequestTopic.OffsetCommitRequestPartition(
                    partition_index=partition,
                    committed_offset=committed.offset,
                    committed_leader_epoch=-1 if committed.leader_epoch is None else committed.leader_epoch,
                    committed_metadata=committed.metadata or "",
                )
                for (name, partition), committed in sorted(positions.items())
                if name == topic
            ],
        )
        for topic in sorted({topic for topic, _ in positions})
    ]
    return kind(
        group_id=group,
        generation_id_or_member_epoch=-1,
        member_id="",
        group_instance_id=None,
        retention_time_ms=-1,
        topics=topics,
    )


def _committed(
    group: str, answer: Any, cluster: WireCluster
) -> Mapping[Partition, KmirrorError | None] | KmirrorError:
    outcomes: dict[Partition, KmirrorError | None] = {}
    for topic in answer.topics:
        for entry in topic.partitions:
            code = entry.error_code
            if code in _RETRIED or code == codes.GROUP_AUTHORIZATION_FAILED:
                return _group_error(code, group, cluster, COMMIT_POSITIONS, "committing positions of group")
            key = (topic.name, entry.partition_index)
            doing = f"committing {topic.name}/{entry.partition_index} of group {group}"
            outcomes[key] = _partition_error(code, topic.name, doing, cluster)
    return outcomes


async def delete_offsets(
    cluster: WireCluster, group: str, partitions: Iterable[Partition]
) -> Mapping[Partition, KmirrorError | None]:
    """Delete committed positions (KIP-496); refused for topics a live member subscribes to.

    Raises:
        AuthorizationError: the principal lacks DELETE on the group.
        BrokerError: the group as a whole is refused.
    """
    wanted = sorted(set(partitions))

    async def ask(
        connection: Connection, names: Sequence[str]
    ) -> Mapping[str, Mapping[Partition, KmirrorError | None] | KmirrorError]:
        answer = await connection.call(_deletion(names[0], wanted))
        if answer.error_code:
            doing = "deleting positions of group"
            return {group: _group_error(answer.error_code, group, cluster, DELETE_POSITIONS, doing)}
        return {
            group: {
                (topic.name, entry.partition_index): _partition_error(
                    entry.error_code,
                    topic.name,
                    f"deleting {topic.name}/{entry.partition_index} of group {group}",
                    cluster,
                )
                for topic in answer.topics
                for entry in topic.partitions
            }
        }

    answers = await ask_coordinators(cluster, [group], ask, DELETE_POSITIONS, "deleting positions of group")
    if group in answers.errors:
        raise answers.errors[group]
    return answers.values[group]


def _deletion(group: str, partitions: Sequence[Partition]) -> Any:
    kind = OffsetDeleteRequest.OffsetDeleteRequestTopic
    topics = [
        kind(
            name=topic,
            partitions=[
                kind.OffsetDeleteRequestPartition(partition_index=index)
                for name, index in partitions
                if name == topic
            ],
        )
        for topic in sorted({name for name, _ in partitions})
    ]
    return OffsetDeleteRequest(group_id=group, topics=topics)


# coordinators


async def ask_coordinators(
    cluster: WireCluster, groups: Iterable[str], ask: "Ask[V]", right: Right, doing: str
) -> Answers[str, V]:
    """Ask each group's coordinator; what has moved is asked again for a few seconds."""
    values: dict[str, V] = {}
    errors: dict[str, KmirrorError] = {}
    pending = sorted(set(groups))
    loop = asyncio.get_running_loop()
    give_up = loop.time() + _PATIENCE_S
    pause = _BACKOFF_S[0]
    while pending:
        answers = await _ask_once(cluster, pending, ask, right, doing)
        values.update((name, each) for name, each in answers.items() if not isinstance(each, KmirrorError))
        errors.update((name, each) for name, each in answers.items() if isinstance(each, KmirrorError))
        pending = [name for name in pending if _is_moved(answers.get(name))]
        if not pending or loop.time() + pause > give_up:
            break
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
        pause = min(2 * pause, _BACKOFF_S[1])
    return Answers(values, {name: error for name, error in errors.items() if name not in values})


def _is_moved(answer: object) -> bool:
    return isinstance(answer, BrokerError) and answer.code in _RETRIED


async def _ask_once(
    cluster: WireCluster, groups: Sequence[str], ask: "Ask[V]", right: Right, doing: str
) -> dict[str, V | KmirrorError]:
    answers: dict[str, V | KmirrorError] = {}
    by_node: dict[int, list[str]] = {}
    for name, found in (await _find(cluster, groups, right, doing)).items():
        if isinstance(found, KmirrorError):
            answers[name] = found
        else:
            by_node.setdefault(found, []).append(name)

    async def ask_node(node_id: int, names: list[str]) -> None:
        try:
            connection = await cluster.connection(node_id)
            for index in range(0, len(names), _GROUPS_PER_REQUEST):
                answers.update(await ask(connection, names[index : index + _GROUPS_PER_REQUEST]))
        except KmirrorError as error:  # one broker that does not answer leaves the others' groups alone
            answers.update((name, error) for name in names if name not in answers)

    await asyncio.gather(*(ask_node(node_id, names) for node_id, names in by_node.items()))
    return answers


async def _find(
    cluster: WireCluster, groups: Sequence[str], right: Right, doing: str
) -> dict[str, int | KmirrorError]:
    """Node id of each group's coordinator."""
    await cluster.refresh()
    connection = await cluster.any_connection()
    version = connection.version(FindCoordinatorRequest.API_KEY, 5)
    found: dict[str, int | KmirrorError] = {}
    if version >= _BATCHED_FIND_VERSION:
        request = FindCoordinatorRequest(key_type=0, coordinator_keys=list(groups))
        answer = await connection.call(request, version=version)
        entries = [(entry.key, entry) for entry in answer.coordinators]
    else:
        requests = [FindCoordinatorRequest(key=name, key_type=0) for name in groups]
        entries = list(zip(groups, await _pipelined(connection, requests, version), strict=True))
    for name, entry in entries:
        if entry.error_code:
            found[name] = _group_error(entry.error_code, name, cluster, right, doing)
        else:
            found[name] = entry.node_id
    return found


async def _pipelined(connection: Connection, requests: Sequence[Any], version: int) -> list[Any]:
    return list(await asyncio.gather(*(connection.call(request, version=version) for request in requests)))


def _group_error(code: int, group: str, cluster: WireCluster, right: Right, doing: str) -> KmirrorError:
    return refusal(code, f"{doing} {group}", right=right, name=group, settings=cluster.settings)


def _partition_error(code: int, topic: str, doing: str, cluster: WireCluster) -> KmirrorError | None:
    if code == codes.NONE:
        return None
    return refusal(code, doing, right=Right("READ", "topic"), name=topic, settings=cluster.settings)
