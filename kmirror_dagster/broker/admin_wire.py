"""Rare admin calls that librdkafka lacks, over the wire client: group types, deleting committed positions."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from kafka.protocol.admin import ListGroupsRequest
from kafka.protocol.consumer.group import OffsetDeleteRequest
from kafka.protocol.metadata.find_coordinator import FindCoordinatorRequest
from kafka.protocol.metadata.metadata import MetadataRequest

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.admin_errors import Right, rights_error
from kmirror_dagster.broker.admin_types import GroupListing, GroupListings, GroupType, Partition
from kmirror_dagster.broker.codes import broker_error
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.errors import DeadlineError, KmirrorError
from kmirror_dagster.settings import ClusterSettings

T = TypeVar("T")

_GROUP_AUTHORIZATION_FAILED = 30
# Groups of these protocol types exist on brokers that do not tell group types yet (ListGroups before v5).
_TYPE_OF_PROTOCOL = {"share": GroupType.SHARE, "streams": GroupType.STREAMS}


def list_all_groups(settings: ClusterSettings, *, timeout_s: float) -> GroupListings:
    """List the groups of all types (KIP-848, KIP-932, KIP-1071); librdkafka leaves share and streams groups
    out.

    Blocking; opens connections of its own, so it is not for every few seconds.

    Raises:
        ClusterUnreachableError: no broker answers.
    """

    async def work(cluster: WireCluster) -> GroupListings:
        await cluster.refresh()
        answer = await cluster.any_call(MetadataRequest(topics=[], allow_auto_topic_creation=False))
        groups: dict[str, GroupListing] = {}
        errors: list[KmirrorError] = []
        node_ids = [broker.node_id for broker in answer.brokers]
        asked = [_groups_of(cluster, node_id) for node_id in node_ids]
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, KmirrorError):
                errors.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                groups.update((listing.group, listing) for listing in outcome)
        return GroupListings(tuple(groups[name] for name in sorted(groups)), tuple(errors))

    return run_on(settings, work, timeout_s, "listing groups")


async def _groups_of(cluster: WireCluster, node_id: int) -> list[GroupListing]:
    connection = await cluster.connection(node_id)
    answer = await connection.call(ListGroupsRequest(states_filter=[], types_filter=[]))
    if answer.error_code:
        raise broker_error(answer.error_code, f"listing groups of broker {node_id}")
    return [
        GroupListing(group.group_id, _group_type(group), getattr(group, "group_state", None) or "Unknown")
        for group in answer.groups
    ]


def _group_type(group: object) -> GroupType:
    name = str(getattr(group, "group_type", None) or "").lower()
    if name in {member.value for member in GroupType}:
        return GroupType(name)
    return _TYPE_OF_PROTOCOL.get(str(getattr(group, "protocol_type", "")), GroupType.UNKNOWN)


def delete_group_offsets(
    settings: ClusterSettings, group: str, partitions: Iterable[Partition], *, timeout_s: float
) -> Mapping[Partition, KmirrorError | None]:
    """Delete committed positions of a group (KIP-496); brokers refuse it for topics a live member subscribes
    to.

    Raises:
        AuthorizationError: the principal lacks DELETE on the group.
        BrokerError: the group as a whole is refused.
    """
    wanted = sorted(set(partitions))

    async def work(cluster: WireCluster) -> Mapping[Partition, KmirrorError | None]:
        await cluster.refresh()
        find = await cluster.any_call(FindCoordinatorRequest(key_type=0, coordinator_keys=[group]))
        coordinator = find.coordinators[0]
        if coordinator.error_code:
            raise broker_error(coordinator.error_code, f"looking up the coordinator of group {group}")
        kind = OffsetDeleteRequest.OffsetDeleteRequestTopic
        topics = [
            kind(
                name=topic,
                partitions=[
                    kind.OffsetDeleteRequestPartition(partition_index=index)
                    for name, index in wanted
                    if name == topic
                ],
            )
            for topic in sorted({name for name, _ in wanted})
        ]
        connection = await cluster.connection(coordinator.node_id)
        answer = await connection.call(OffsetDeleteRequest(group_id=group, topics=topics))
        if answer.error_code == _GROUP_AUTHORIZATION_FAILED:
            raise rights_error(Right("DELETE", "group"), group, settings)
        if answer.error_code:
            raise broker_error(answer.error_code, f"deleting positions of group {group}")
        return {
            (topic.name, entry.partition_index): (
                broker_error(entry.error_code, f"deleting {topic.name}/{entry.partition_index} of {group}")
                if entry.error_code != codes.NONE
                else None
            )
            for topic in answer.topics
            for entry in topic.partitions
        }

    return run_on(settings, work, timeout_s, f"deleting positions of group {group}")


def run_on(
    settings: ClusterSettings,
    work: Callable[[WireCluster], Awaitable[T]],
    timeout_s: float,
    doing: str,
) -> T:
    """Run a few calls on a wire client of their own, blocking, within `timeout_s` seconds.

    Raises:
        DeadlineError: the time is over.
    """

    async def whole() -> T:
        cluster = WireCluster(settings, role="Kafka")
        try:
            return await asyncio.wait_for(work(cluster), timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineError(
                f"{doing}: {settings.address} did not answer within {timeout_s:g} s"
            ) from None
        finally:
            await cluster.close()

    return asyncio.run(whole())
