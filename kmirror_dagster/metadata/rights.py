"""Rights a mirror needs, on which side and what for; which of them are missing. Pure.

docs/security.md lists the same for people; the tests run a mirror with exactly these.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.broker.missing_rights import kafka_acls_line
from kmirror_dagster.metadata.acls import ALL, ALLOW, ANY_NAME, DENY, EVERYBODY, LITERAL
from kmirror_dagster.records import STATE_TOPIC

SOURCE = "source"
DESTINATION = "destination"

# Operations that imply DESCRIBE, and the one that implies DESCRIBE_CONFIGS (Kafka's authorizers).
_IMPLIES = {
    "DESCRIBE": ("READ", "WRITE", "DELETE", "ALTER"),
    "DESCRIBE_CONFIGS": ("ALTER_CONFIGS",),
}

SOURCE_TOPIC = {
    "READ": "fetch records",
    "DESCRIBE_CONFIGS": "keep configurations equal",
}
DESTINATION_TOPIC = {
    "READ": "look at producer states",
    "WRITE": "append records",
    "ALTER": "add partitions",
    "DELETE": "follow log starts",
    "ALTER_CONFIGS": "keep configurations equal",
}
STATE_OPERATIONS = {
    "CREATE": "make the state topic",
    "READ": "follow the mirrors' state",
    "WRITE": "store the mirrors' state",
    "DESCRIBE_CONFIGS": "look at its configuration",
}


@dataclass(frozen=True, order=True)
class Need:
    """One right.

    Attributes:
        side: "source" or "destination".
        resource_type: in Kafka's names ("TOPIC", "CLUSTER", ...).
        why: what it is for.
    """

    side: str
    resource_type: str
    resource_name: str
    operation: str
    why: str = field(compare=False)
    pattern_type: str = LITERAL


@dataclass(frozen=True)
class Scope:
    """What the rights are for.

    Attributes:
        topics: source topics that are mirrored.
        groups: groups whose positions are kept equal.
        existing: those of the topics that are at the destination already.
        acls: ACLs are kept equal.
        node_group: group id of the nodes, prefix of their transactional ids.
        quotas: there are client quotas to be kept equal.
    """

    topics: frozenset[str]
    groups: frozenset[str] = frozenset()
    existing: frozenset[str] = frozenset()
    acls: bool = True
    node_group: str = "kmirror"
    quotas: bool = False


def needs(scope: Scope) -> tuple[Need, ...]:
    """All rights that a mirror needs, on both sides."""
    return tuple(sorted({*_source_needs(scope), *_destination_needs(scope)}))


def _source_needs(scope: Scope) -> Iterable[Need]:
    for topic in scope.topics:
        for operation, why in SOURCE_TOPIC.items():
            yield Need(SOURCE, "TOPIC", topic, operation, why)
    for group in scope.groups:
        yield Need(SOURCE, "GROUP", group, "DESCRIBE", "read positions")
    if scope.acls:
        yield Need(SOURCE, "CLUSTER", "kafka-cluster", "DESCRIBE", "list ACLs")
    if scope.quotas:
        yield Need(SOURCE, "CLUSTER", "kafka-cluster", "DESCRIBE_CONFIGS", "list client quotas")


def _destination_needs(scope: Scope) -> Iterable[Need]:
    for topic in scope.topics:
        for operation, why in DESTINATION_TOPIC.items():
            yield Need(DESTINATION, "TOPIC", topic, operation, why)
        if topic not in scope.existing:
            yield Need(DESTINATION, "TOPIC", topic, "CREATE", "make the copy")
    for operation, why in STATE_OPERATIONS.items():
        yield Need(DESTINATION, "TOPIC", STATE_TOPIC, operation, why)
    for group in scope.groups:
        yield Need(DESTINATION, "GROUP", group, "READ", "commit positions")
    yield Need(DESTINATION, "GROUP", scope.node_group, "READ", "share the work among nodes")
    for operation, why in (
        ("WRITE", "fence former owners, write markers"),
        ("DESCRIBE", "find coordinators"),
    ):
        yield Need(DESTINATION, "TRANSACTIONAL_ID", scope.node_group, operation, why, pattern_type="PREFIXED")
    if scope.acls:
        yield Need(DESTINATION, "CLUSTER", "kafka-cluster", "DESCRIBE", "list ACLs")
        yield Need(DESTINATION, "CLUSTER", "kafka-cluster", "ALTER", "change ACLs, write markers in bulk")
    if scope.quotas:
        yield Need(DESTINATION, "CLUSTER", "kafka-cluster", "ALTER_CONFIGS", "keep client quotas equal")


@dataclass(frozen=True)
class Known:
    """What brokers say a principal may do on one side.

    Attributes:
        principal: as the mirror is most likely seen.
        cluster: operations on the cluster, None when brokers do not tell.
        topics, groups: operations by name, as far as they were told.
        acls: all ACLs, None when they cannot be listed.
        is_open: there is no authorizer.
    """

    principal: str
    cluster: frozenset[str] | None = None
    topics: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    groups: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    acls: frozenset[Acl] | None = None
    is_open: bool = False

    @property
    def is_super(self) -> bool:
        """Whether it may do everything though no ACL says so: a super user, as far as can be seen."""
        if self.is_open or self.cluster is None or self.acls is None:
            return False
        everything = {"CREATE", "ALTER", "DESCRIBE", "CLUSTER_ACTION", "ALTER_CONFIGS", "IDEMPOTENT_WRITE"}
        granted = any(
            acl.resource_type == "CLUSTER" and acl.principal in (self.principal, EVERYBODY)
            for acl in self.acls
        )
        return self.cluster >= everything and not granted

    def may(self, need: Need) -> bool | None:
        """Whether a right is there; None when that cannot be told."""
        if self.is_open or self.is_super:
            return True
        told = self._told(need)
        if need.operation == "CREATE" and self.cluster is not None and "CREATE" in self.cluster:
            return True
        if told is not None:
            return bool(told & {need.operation, *_IMPLIES.get(need.operation, ())})
        return None if self.acls is None else self._allowed(need, self.acls)

    def _told(self, need: Need) -> frozenset[str] | None:
        if need.resource_type == "CLUSTER":
            return self.cluster
        if need.resource_type == "TOPIC":
            return self.topics.get(need.resource_name)
        return self.groups.get(need.resource_name) if need.resource_type == "GROUP" else None

    def _allowed(self, need: Need, acls: frozenset[Acl]) -> bool:
        about = [
            acl
            for acl in acls
            if acl.resource_type == need.resource_type
            and acl.principal in (self.principal, EVERYBODY)
            and _includes(acl, need)
        ]
        if any(a.permission == DENY and a.operation in (need.operation, ALL) for a in about):
            return False
        enough = {need.operation, ALL, *_IMPLIES.get(need.operation, ())}
        return any(acl.permission == ALLOW and acl.operation in enough for acl in about)


def _includes(acl: Acl, need: Need) -> bool:
    if acl.pattern_type == LITERAL:
        same = acl.resource_name == need.resource_name and need.pattern_type == LITERAL
        return same or acl.resource_name == ANY_NAME
    return need.resource_name.startswith(acl.resource_name)


def kafka_acls_lines(missing: Iterable[Need], *, principal: str, bootstrap: str) -> tuple[str, ...]:
    """Commands that grant rights, one per resource, all of one cluster."""
    by_resource: dict[tuple[str, str, str], list[str]] = {}
    for need in sorted(missing):
        key = (need.resource_type, need.resource_name, need.pattern_type)
        by_resource.setdefault(key, []).append(need.operation)
    return tuple(
        kafka_acls_line(
            principal=principal,
            bootstrap=bootstrap,
            resource_type=kind,
            resource_name=name,
            operations=wanted,
            prefixed=pattern != LITERAL,
        )
        for (kind, name, pattern), wanted in by_resource.items()
    )
