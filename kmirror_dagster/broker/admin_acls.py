"""Admin calls about ACLs, over the wire client: librdkafka knows neither all resource types nor all operations."""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

from kafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest, DescribeAclsRequest
from kafka.protocol.metadata.metadata import MetadataRequest

from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.broker.missing_rights import Right, refusal
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.settings import ClusterSettings

_ANY = 1
# one request with more than this would make a broker's answer unwieldy
_CHUNK = 1_000


class ResourceType(IntEnum):
    """Codes of resource types (protocol guide)."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(IntEnum):
    """Codes of pattern types."""

    LITERAL = 3
    PREFIXED = 4


class Operation(IntEnum):
    """Codes of operations."""

    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class Permission(IntEnum):
    """Codes of permission types."""

    DENY = 2
    ALLOW = 3


E = TypeVar("E", bound=IntEnum)


async def list_acls(cluster: WireCluster) -> frozenset[Acl]:
    """All ACLs of a cluster.

    Raises:
        AuthorizationError: the principal lacks DESCRIBE on the cluster.
        BrokerError: SECURITY_DISABLED when the cluster has no authorizer.
    """

    request = DescribeAclsRequest(
        resource_type_filter=_ANY,
        resource_name_filter=None,
        pattern_type_filter=_ANY,
        principal_filter=None,
        host_filter=None,
        operation=_ANY,
        permission_type=_ANY,
    )
    answer = await cluster.any_call(request)
    _check(answer.error_code, "listing ACLs", "DESCRIBE", cluster.settings)
    return frozenset(
        _acl(resource, entry, resource.pattern_type)
        for resource in answer.resources
        for entry in resource.acls
    )


async def create_acls(cluster: WireCluster, acls: Sequence[Acl]) -> Mapping[Acl, KmirrorError | None]:
    """Create ACLs, in the given order; the answer has one entry for each, None: created or there already."""

    def request(chunk: Sequence[Acl]) -> Any:
        kind = CreateAclsRequest
        creations = [
            kind.AclCreation(
                resource_type=ResourceType[acl.resource_type],
                resource_name=acl.resource_name,
                resource_pattern_type=PatternType[acl.pattern_type],
                principal=acl.principal,
                host=acl.host,
                operation=Operation[acl.operation],
                permission_type=Permission[acl.permission],
            )
            for acl in chunk
        ]
        return kind(creations=creations)

    outcomes: dict[Acl, KmirrorError | None] = {}
    for chunk in _chunks(acls):
        answer = await ask_controller(cluster, request(chunk))
        outcomes.update(_outcomes(chunk, answer.results, "creating", cluster.settings))
    return outcomes


async def delete_acls(cluster: WireCluster, acls: Sequence[Acl]) -> Mapping[Acl, KmirrorError | None]:
    """Delete exactly these ACLs; the answer has one entry for each, None: gone."""

    def request(chunk: Sequence[Acl]) -> Any:
        kind = DeleteAclsRequest
        filters = [
            kind.DeleteAclsFilter(
                resource_type_filter=ResourceType[acl.resource_type],
                resource_name_filter=acl.resource_name,
                pattern_type_filter=PatternType[acl.pattern_type],
                principal_filter=acl.principal,
                host_filter=acl.host,
                operation=Operation[acl.operation],
                permission_type=Permission[acl.permission],
            )
            for acl in chunk
        ]
        return kind(filters=filters)

    outcomes: dict[Acl, KmirrorError | None] = {}
    for chunk in _chunks(acls):
        answer = await ask_controller(cluster, request(chunk))
        outcomes.update(_outcomes(chunk, answer.filter_results, "deleting", cluster.settings))
    return outcomes


def _chunks(acls: Sequence[Acl]) -> list[Sequence[Acl]]:
    return [acls[index : index + _CHUNK] for index in range(0, len(acls), _CHUNK)]


async def ask_controller(cluster: WireCluster, request: Any) -> Any:
    """Send a request to the broker that takes changes of the cluster."""
    # brokers of a KRaft cluster forward to the controller and name any broker here; older ones do not forward
    await cluster.refresh()
    metadata = await cluster.any_call(MetadataRequest(topics=[], allow_auto_topic_creation=False))
    connection = await cluster.connection(metadata.controller_id)
    return await connection.call(request)


def _outcomes(
    acls: Sequence[Acl], results: Sequence[Any], doing: str, settings: ClusterSettings
) -> dict[Acl, KmirrorError | None]:
    outcomes: dict[Acl, KmirrorError | None] = {}
    for acl, result in zip(acls, results, strict=True):
        try:
            _check(result.error_code, f"{doing} ACL {_text(acl)}", "ALTER", settings)
        except KmirrorError as error:
            outcomes[acl] = error
        else:
            outcomes[acl] = None
    return outcomes


def _check(code: int, doing: str, operation: str, settings: ClusterSettings) -> None:
    if code:
        raise refusal(code, doing, right=Right(operation, "cluster"), name="", settings=settings)


def _text(acl: Acl) -> str:
    return f"{acl.permission} {acl.operation} on {acl.resource_type} {acl.resource_name} for {acl.principal}"


def _acl(resource: Any, entry: Any, pattern_type: int) -> Acl:
    return Acl(
        resource_type=_name(ResourceType, resource.resource_type),
        resource_name=resource.resource_name,
        pattern_type=_name(PatternType, pattern_type),
        principal=entry.principal,
        host=entry.host,
        operation=_name(Operation, entry.operation),
        permission=_name(Permission, entry.permission_type),
    )


def _name(kind: type[E], code: int) -> str:
    try:
        return kind(code).name
    except ValueError:
        return f"UNKNOWN_{code}"  # newer than this list: shown, never copied
