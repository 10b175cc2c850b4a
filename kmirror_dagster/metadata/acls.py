"""ACLs: the destination gives what the source gives, except to write to copies. Pure.

Rules:

- *scope*: what `acls.include` selects and the source has. Of topics and groups that are named in full only
  those of the mirror; prefixes and "*" as they are.
- *never copied*: rights of the mirror's own principal (which it needs at the destination has been decided
  there), CLUSTER_ACTION (brokers' own), types this version does not know, a DENY that would hit the mirror
  itself, and a DENY to write for everybody (that is how a topic is frozen, here and by others).
- *held back while mirroring*: permissions to write to a copy. ALL is split into its other operations. Granted
  at stop: for a prefix or "*" one by one for the topics that stopped, as it is with the last of them.
- *removed*: what the source no longer has and the mirror, or somebody in agreement with the source, put here.
  A permission to write to a copy by its full name, which the source has too, is removed once it is stored as
  held back. Everything else at the destination is left alone, and so is what `acls.include` stops selecting.
- DENY comes before ALLOW, and goes after it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.records import HeldAcl
from kmirror_dagster.settings import FilterSettings

EVERYBODY = "User:*"
TOPIC = "TOPIC"
GROUP = "GROUP"
LITERAL = "LITERAL"
ANY_NAME = "*"
WRITE = "WRITE"
ALL = "ALL"
DENY = "DENY"
ALLOW = "ALLOW"

# Operations on a topic besides WRITE (Kafka documentation, "Operations and Resources").
OTHER_TOPIC_OPERATIONS = (
    "READ",
    "CREATE",
    "DELETE",
    "ALTER",
    "DESCRIBE",
    "DESCRIBE_CONFIGS",
    "ALTER_CONFIGS",
)
_SHOWN = 10


@dataclass(frozen=True)
class AclsWorld:
    """What the decision rests on.

    Attributes:
        principal: the mirror's at the destination.
        exempt: no DENY at the destination hits that principal (a super user).
        hold: permissions to write are held back.
        mirrored: topics whose copies are the mirror's and not stopped.
        synced: ACLs that were at the destination because of the mirror.
        recorded: write permissions that are stored as held back, by topic.
    """

    filters: FilterSettings
    principal: str
    source: frozenset[Acl]
    destination: frozenset[Acl]
    mirrored: frozenset[str]
    synced: frozenset[Acl] = frozenset()
    recorded: Mapping[str, tuple[HeldAcl, ...]] = field(default_factory=dict[str, tuple[HeldAcl, ...]])
    exempt: bool = False
    hold: bool = True


@dataclass(frozen=True)
class AclsPlan:
    """What to create and delete, in this order.

    Attributes:
        held: write permissions to store as held back, of every mirrored topic.
        synced: ACLs that are the mirror's once the plan is carried out.
    """

    creates: tuple[Acl, ...] = ()
    deletes: tuple[Acl, ...] = ()
    held: Mapping[str, tuple[HeldAcl, ...]] = field(default_factory=dict[str, tuple[HeldAcl, ...]])
    synced: frozenset[Acl] = frozenset()
    notes: tuple[str, ...] = ()


def covers(acl: Acl | HeldAcl, topic: str) -> bool:
    """Tell whether the resource pattern of a topic ACL includes a topic."""
    if acl.pattern_type == LITERAL:
        return acl.resource_name in (topic, ANY_NAME)
    return topic.startswith(acl.resource_name)


def permits_writing(acl: Acl) -> bool:
    """Tell whether an ACL allows somebody to write to topics."""
    return acl.resource_type == TOPIC and acl.permission == ALLOW and acl.operation in (WRITE, ALL)


def freeze_of(topic: str) -> Acl:
    """The ACL that keeps everybody but super users from writing to a copy."""
    return Acl(TOPIC, topic, LITERAL, EVERYBODY, "*", WRITE, DENY)


def acl_text(acl: Acl) -> str:
    """An ACL in one line, for messages."""
    kind = "" if acl.pattern_type == LITERAL else f" ({acl.pattern_type.lower()})"
    host = "" if acl.host == "*" else f" from {acl.host}"
    resource = f"{acl.resource_type.lower()} {acl.resource_name}{kind}"
    return f"{acl.permission} {acl.principal}{host} {acl.operation} on {resource}"


def plan_acls(world: AclsWorld) -> AclsPlan:
    """Difference between what the destination has and what it should have."""
    desired: set[Acl] = set()
    held: dict[str, list[HeldAcl]] = {topic: [] for topic in world.mirrored}
    notes: dict[str, list[Acl]] = {}
    for acl in sorted(world.source):
        if not _selects(world.filters, acl) or _is_elsewhere(world, acl):
            continue
        reason = _never_copied(world, acl)
        if reason is not None:
            notes.setdefault(reason, []).append(acl)
            continue
        topics = [topic for topic in sorted(world.mirrored) if covers(acl, topic)]
        if not world.hold or not permits_writing(acl) or not topics:
            desired.add(acl)
            continue
        item, rest = _hold(acl, world.source)
        for topic in topics:
            held[topic].append(item)
        # a pattern that is in force here may be needed for topics that are none of the mirror's
        desired |= {acl} if _is_pattern(acl) and acl in world.destination else rest
    creates = sorted(desired - world.destination, key=_deny_first)
    deletes = sorted(
        _outlived(world, desired) | _taken_back(world, held), key=lambda acl: (not _deny_first(acl)[0], acl)
    )
    return AclsPlan(
        tuple(creates),
        tuple(deletes),
        {topic: tuple(items) for topic, items in held.items()},
        frozenset(desired),
        tuple(f"{reason}: {_list(acls)}" for reason, acls in sorted(notes.items())),
    )


def _deny_first(acl: Acl) -> tuple[bool, Acl]:
    return acl.permission != DENY, acl


def _is_pattern(acl: Acl | HeldAcl) -> bool:
    return acl.pattern_type != LITERAL or acl.resource_name == ANY_NAME


def _selects(filters: FilterSettings, acl: Acl) -> bool:
    return filters.selects_acl(
        resource_type=acl.resource_type,
        resource_name=acl.resource_name,
        operation=acl.operation,
        permission=acl.permission,
        principal=acl.principal,
    )


def _is_elsewhere(world: AclsWorld, acl: Acl) -> bool:
    """Whether an ACL is about one topic or group that the mirror does not keep equal."""
    if acl.resource_type == TOPIC and not (acl.pattern_type == LITERAL and acl.resource_name == ANY_NAME):
        return not any(covers(acl, topic) for topic in world.mirrored)
    if acl.resource_type == GROUP and not _is_pattern(acl):
        return not world.filters.selects_group(acl.resource_name)
    return False


def _never_copied(world: AclsWorld, acl: Acl) -> str | None:
    if any(name.startswith("UNKNOWN") for name in (acl.resource_type, acl.pattern_type, acl.operation)):
        return "not copied, of a kind this version does not know"
    if acl.principal == world.principal:
        return "not copied, of the mirror itself"
    if acl.operation == "CLUSTER_ACTION":
        return "not copied, rights of brokers"
    if acl.permission != DENY:
        return None
    if acl.resource_type == TOPIC and acl.principal == EVERYBODY and acl.operation in (WRITE, ALL):
        return "not copied, a freeze of the source's topics"
    if acl.principal == EVERYBODY and not world.exempt:
        return "not copied, would stop the mirror itself"
    return None


def _hold(acl: Acl, source: frozenset[Acl]) -> tuple[HeldAcl, set[Acl]]:
    """The permission as it is stored, and what is given in the meantime."""
    rest: set[Acl] = set()
    if acl.operation == ALL:
        rest = {replace(acl, operation=operation) for operation in OTHER_TOPIC_OPERATIONS}
    instead = tuple(sorted(other.operation for other in rest - source))
    item = HeldAcl(
        resource_name=acl.resource_name,
        pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        instead=instead,
    )
    return item, rest


def _outlived(world: AclsWorld, desired: set[Acl]) -> set[Acl]:
    """The mirror's ACLs that the source no longer has."""
    gone: set[Acl] = set()
    for acl in (world.synced & world.destination) - desired - world.source:
        selected = _selects(world.filters, acl) or _selects(world.filters, replace(acl, operation=ALL))
        # what has left the scope stays as it is; a grant of everything implies what it was split into
        implied = acl.resource_type == TOPIC and replace(acl, operation=ALL) in world.source
        if selected and not implied and not _is_elsewhere(world, acl):
            gone.add(acl)
    return gone


def _taken_back(world: AclsWorld, held: Mapping[str, Sequence[HeldAcl]]) -> set[Acl]:
    """Permissions to write that are in force and known, in the mirror's state, to be given back at stop."""
    back: set[Acl] = set()
    for topic, items in held.items():
        known = {bare(item) for item in world.recorded.get(topic, ())}
        # what everybody may, the mirror may: it could be all that lets it write
        wanted = (
            bare(item)
            for item in items
            if not _is_pattern(item) and (world.exempt or item.principal != EVERYBODY)
        )
        back |= {acl for acl in wanted if acl in world.destination and acl in known}
    return back


def bare(item: HeldAcl) -> Acl:
    """The ACL that is held back."""
    return Acl(TOPIC, item.resource_name, item.pattern_type, item.principal, item.host, item.operation, ALLOW)


@dataclass(frozen=True)
class TopicAcls:
    """What ends with the mirroring of a topic.

    Attributes:
        held: write permissions held back.
        frozen: an ACL of the mirror denies everybody to write.
        shared: permissions that are held back for another topic as well, which is still mirrored.
    """

    held: tuple[HeldAcl, ...] = ()
    frozen: bool = False
    shared: frozenset[Acl] = frozenset()

    @property
    def left(self) -> tuple[HeldAcl, ...]:
        """What is still to be granted as it is, once no other topic needs it held back."""
        pending = (item for item in self.held if _is_pattern(item) and bare(item) in self.shared)
        return tuple(item.model_copy(update={"granted": True}) for item in pending)

    def __bool__(self) -> bool:
        return self.frozen or self.held != self.left


def patterns_of(held: Iterable[HeldAcl]) -> frozenset[Acl]:
    """Those of the permissions held back that may be held back for several topics."""
    return frozenset(bare(item) for item in held if _is_pattern(item))


def plan_release(topic: str, acls: TopicAcls, present: frozenset[Acl] | None) -> AclsPlan:
    """Grant what was held back for a topic; the second time changes nothing.

    Args:
        topic: a topic that is no longer mirrored.
        acls: what ends.
        present: ACLs at the destination, None when they cannot be listed.
    """
    creates: set[Acl] = set()
    deletes: set[Acl] = {freeze_of(topic)} if acls.frozen else set()
    for item in acls.held:
        acl = bare(item)
        if _is_pattern(item) and acl in acls.shared:
            if not item.granted and (present is None or acl not in present):
                creates.add(replace(acl, resource_name=topic, pattern_type=LITERAL))
            continue
        creates.add(acl)
        deletes |= {replace(acl, operation=operation) for operation in item.instead}
    if present is not None:
        creates -= present
        deletes &= present
    return AclsPlan(tuple(sorted(creates)), tuple(sorted(deletes)))


@dataclass(frozen=True)
class Writer:
    """Somebody who may write to a copy, and the ACL that allows it."""

    acl: Acl
    topics: tuple[str, ...]


def writers(acls: Iterable[Acl], topics: Iterable[str], *, principal: str) -> tuple[Writer, ...]:
    """Who may write to copies, besides the mirror and super users (who are not visible from outside)."""
    acls = tuple(acls)
    denies = [
        acl
        for acl in acls
        if acl.resource_type == TOPIC
        and acl.permission == DENY
        and acl.operation in (WRITE, ALL)
        and acl.host == "*"
    ]
    found: list[Writer] = []
    names = sorted(topics)
    for acl in sorted(acls):
        if not permits_writing(acl) or acl.principal == principal:
            continue
        against = [deny for deny in denies if deny.principal in (EVERYBODY, acl.principal)]
        open_to = tuple(
            name for name in names if covers(acl, name) and not any(covers(deny, name) for deny in against)
        )
        if open_to:
            found.append(Writer(acl, open_to))
    return tuple(found)


def writer_text(writer: Writer) -> str:
    """One line about somebody who may write to copies."""
    names = ", ".join(writer.topics[:_SHOWN])
    more = f" and {len(writer.topics) - _SHOWN} more" if len(writer.topics) > _SHOWN else ""
    return f"{writer.acl.principal} may write to {names}{more} ({acl_text(writer.acl)})"


def _list(acls: Sequence[Acl]) -> str:
    shown = "; ".join(acl_text(acl) for acl in acls[:_SHOWN])
    return shown if len(acls) <= _SHOWN else f"{shown}; and {len(acls) - _SHOWN} more"
