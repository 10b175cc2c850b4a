"""What a principal may do at a cluster, asked of the brokers: authorized operations (KIP-430), exemption."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from kafka.protocol.admin import DescribeAclsRequest, DescribeGroupsRequest
from kafka.protocol.admin.cluster import DescribeClusterRequest
from kafka.protocol.metadata.metadata import MetadataRequest

from kmirror_dagster.broker import codes, group_wire
from kmirror_dagster.broker.admin_acls import Operation, PatternType, create_acls, delete_acls
from kmirror_dagster.broker.admin_types import Acl, Answers
from kmirror_dagster.broker.codes import broker_error
from kmirror_dagster.broker.connection import Connection
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.errors import AuthorizationError, DeadlineError, KmirrorError

# A group nobody uses: the ACL that is tried on it for a moment hits nobody.
_PROBE = Acl("GROUP", "kmirror-read-only-probe", "LITERAL", "User:*", "*", "ALL", "DENY")
_GROUP_RESOURCE = 3
_ANY = 1
_SEEN_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Rights:
    """What a principal may do.

    Attributes:
        cluster: operations on the cluster; None when the brokers do not tell.
        topics: operations by topic; of a topic it may not even describe: none.
        missing: topics that do not exist.
    """

    cluster: frozenset[str] | None = None
    topics: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    missing: frozenset[str] = frozenset()


def operations(codes_told: Collection[int] | None) -> frozenset[str] | None:
    """Names of operations, None when the broker did not tell (kafka-python reads KIP-430's bit field)."""
    if codes_told is None:
        return None
    return frozenset(operation.name for operation in Operation if operation in codes_told)


async def read_rights(cluster: WireCluster, topics: Iterable[str]) -> Rights:
    """Operations the principal may perform on the cluster and on topics; creates no topic."""
    connection = await cluster.any_connection()
    kind = MetadataRequest
    names = sorted(set(topics))
    request = kind(
        topics=[kind.MetadataRequestTopic(name=name, topic_id=UUID(int=0)) for name in names],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
    )
    answer = await connection.call(request, version=connection.version(kind.API_KEY, 12))
    found: dict[str, frozenset[str]] = {}
    missing: set[str] = set()
    for topic in answer.topics:
        if topic.error_code == codes.TOPIC_AUTHORIZATION_FAILED:
            found[topic.name] = frozenset()
        elif topic.error_code == codes.UNKNOWN_TOPIC_OR_PARTITION:
            missing.add(topic.name)
        elif topic.error_code:
            raise broker_error(topic.error_code, f"asking for rights on topic {topic.name}")
        else:
            found[topic.name] = operations(topic.authorized_operations) or frozenset()
    return Rights(await _cluster_rights(connection), found, frozenset(missing))


async def _cluster_rights(connection: Connection) -> frozenset[str] | None:
    request = DescribeClusterRequest(include_cluster_authorized_operations=True)
    answer = await connection.call(request)
    if answer.error_code:
        raise broker_error(answer.error_code, "asking for rights on the cluster")
    return operations(answer.authorized_operations)


async def read_group_rights(cluster: WireCluster, groups: Iterable[str]) -> Answers[str, frozenset[str]]:
    """Operations the principal may perform on groups; a group it may not describe: none."""

    async def ask(
        connection: Connection, names: Sequence[str]
    ) -> Mapping[str, frozenset[str] | KmirrorError]:
        found: dict[str, frozenset[str] | KmirrorError] = {}
        for name in names:
            answer = await _describe_group(connection, name)
            if answer.error_code == codes.GROUP_AUTHORIZATION_FAILED:
                found[name] = frozenset()
            elif answer.error_code:
                found[name] = broker_error(answer.error_code, f"asking for rights on group {name}")
            else:
                found[name] = operations(answer.authorized_operations) or frozenset()
        return found

    right = Right("DESCRIBE", "group")
    answers = await group_wire.ask_coordinators(cluster, groups, ask, right, "asking for rights on group")
    # a group that may not even be described has no coordinator to be told
    denied = {name for name, error in answers.errors.items() if isinstance(error, AuthorizationError)}
    return Answers(
        {**answers.values, **dict.fromkeys(denied, frozenset[str]())},
        {name: error for name, error in answers.errors.items() if name not in denied},
    )


async def _describe_group(connection: Connection, group: str) -> Any:
    request = DescribeGroupsRequest(groups=[group], include_authorized_operations=True)
    version = connection.version(DescribeGroupsRequest.API_KEY, 5)
    return (await connection.call(request, version=version)).groups[0]


async def is_exempt(cluster: WireCluster) -> bool:
    """Whether no DENY hits the principal: it is a super user.

    Brokers tell super users to nobody, so it is tried: everybody is denied everything on a group that nobody
    uses, and the group is asked for. The ACL is removed again.

    Raises:
        AuthorizationError: the principal may not alter ACLs.
        BrokerError: SECURITY_DISABLED when the cluster has no authorizer.
    """
    outcome = (await create_acls(cluster, [_PROBE]))[_PROBE]
    if outcome is not None:
        raise outcome
    try:
        connection = await cluster.any_connection()
        await _until_known(connection)
        answer = await _describe_group(connection, _PROBE.resource_name)
        return answer.error_code != codes.GROUP_AUTHORIZATION_FAILED
    finally:
        await delete_acls(cluster, [_PROBE])


async def _until_known(connection: Connection) -> None:
    """Wait until the broker that is going to be asked has learned of the ACL."""
    request = DescribeAclsRequest(
        resource_type_filter=_GROUP_RESOURCE,
        resource_name_filter=_PROBE.resource_name,
        pattern_type_filter=PatternType.LITERAL,
        principal_filter=None,
        host_filter=None,
        operation=_ANY,
        permission_type=_ANY,
    )
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _SEEN_S
    while loop.time() < deadline:
        answer = await connection.call(request)
        if answer.error_code:
            raise broker_error(answer.error_code, "listing ACLs")
        if answer.resources:
            return
        await asyncio.sleep(_POLL_S)
    raise DeadlineError(f"a new ACL did not reach the broker within {_SEEN_S:g} s")


async def highest_versions(cluster: WireCluster) -> Mapping[int, int]:
    """Highest version of each API, by its key, that a broker serves."""
    connection = await cluster.any_connection()
    return {key: highest for key, (_, highest) in connection.versions.items()}
