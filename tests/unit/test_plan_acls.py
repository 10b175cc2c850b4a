"""Planning ACLs: what is copied, held back, removed, frozen and granted at stop."""

from dataclasses import replace

import pytest

from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.metadata.acls import (
    OTHER_TOPIC_OPERATIONS,
    AclsPlan,
    AclsWorld,
    TopicAcls,
    bare,
    freeze_of,
    patterns_of,
    plan_acls,
    plan_release,
    writer_text,
    writers,
)
from kmirror_dagster.records import HeldAcl
from kmirror_dagster.settings import FilterSettings

MIRROR = "User:mirror"


def acl(
    who: str,
    operation: str,
    name: str = "t1",
    *,
    kind: str = "TOPIC",
    pattern: str = "LITERAL",
    deny: bool = False,
) -> Acl:
    return Acl(kind, name, pattern, f"User:{who}", "*", operation, "DENY" if deny else "ALLOW")


def plan(
    source: set[Acl],
    destination: set[Acl] | None = None,
    *,
    mirrored: tuple[str, ...] = ("t1", "t2"),
    synced: set[Acl] | None = None,
    recorded: dict[str, tuple[HeldAcl, ...]] | None = None,
    filters: FilterSettings | None = None,
    exempt: bool = False,
    hold: bool = True,
) -> AclsPlan:
    return plan_acls(
        AclsWorld(
            filters=filters or FilterSettings(),
            principal=MIRROR,
            source=frozenset(source),
            destination=frozenset(destination or ()),
            mirrored=frozenset(mirrored),
            synced=frozenset(synced or ()),
            recorded=recorded or {},
            exempt=exempt,
            hold=hold,
        )
    )


@pytest.mark.case("C28")
def test_every_kind_of_acl_is_copied_deny_first() -> None:
    """Resource types, pattern types and hosts are kept; each DENY comes before any ALLOW."""
    source = {
        acl("eve", "READ", deny=True),
        replace(acl("alice", "READ"), host="10.0.0.1"),
        acl("alice", "READ", "t", pattern="PREFIXED"),
        acl("alice", "READ", "g", kind="GROUP"),
        acl("alice", "WRITE", "x", kind="TRANSACTIONAL_ID"),
        acl("alice", "DESCRIBE", "token", kind="DELEGATION_TOKEN"),
        acl("alice", "CREATE_TOKENS", "User:bob", kind="USER"),
        acl("alice", "IDEMPOTENT_WRITE", "kafka-cluster", kind="CLUSTER"),
    }

    planned = plan(source)

    assert set(planned.creates) == source
    assert planned.creates[0] == acl("eve", "READ", deny=True)
    assert planned.synced == source
    assert planned.deletes == ()


@pytest.mark.case("C28")
def test_permissions_to_write_are_held_back_and_known() -> None:
    """WRITE is not copied, ALL is split into its other operations; both are told, for the stop to grant."""
    planned = plan({acl("alice", "WRITE"), acl("bob", "ALL"), acl("bob", "READ")})

    assert set(planned.creates) == {acl("bob", operation) for operation in OTHER_TOPIC_OPERATIONS}
    held = {bare(item): item.instead for item in planned.held["t1"]}
    assert held[acl("alice", "WRITE")] == ()
    assert "READ" not in held[acl("bob", "ALL")]
    assert len(held[acl("bob", "ALL")]) == len(OTHER_TOPIC_OPERATIONS) - 1
    assert planned.held["t2"] == ()


def test_without_read_only_write_permissions_are_copied_at_once() -> None:
    """read_only: off copies ACLs as they are."""
    planned = plan({acl("alice", "WRITE"), acl("bob", "ALL")}, hold=False)

    assert set(planned.creates) == {acl("alice", "WRITE"), acl("bob", "ALL")}
    assert planned.held == {"t1": (), "t2": ()}


def test_patterns_that_include_a_copy_are_held_back_for_each_copy() -> None:
    """WRITE on a prefix or on every topic is held back for all mirrored topics it includes."""
    prefix, everything = acl("a", "WRITE", "t", pattern="PREFIXED"), acl("b", "WRITE", "*")

    planned = plan({prefix, everything, acl("c", "WRITE", "u", pattern="PREFIXED")})

    assert planned.creates == ()
    assert {bare(item) for item in planned.held["t1"]} == {prefix, everything}
    assert planned.held["t1"] == planned.held["t2"]


def test_nothing_changes_where_both_are_in_step() -> None:
    """No creation and no deletion at rest."""
    source = {acl("bob", "ALL"), acl("eve", "READ", deny=True), acl("g", "READ", "g", kind="GROUP")}
    first = plan(source)

    again = plan(source, set(first.creates), synced=set(first.synced), recorded=dict(first.held))

    assert (again.creates, again.deletes) == ((), ())
    assert again.held == first.held


def test_what_the_source_no_longer_has_is_removed_and_others_acls_stay() -> None:
    """Only what is there because of the mirror goes, ALLOW before DENY."""
    gone, denied = acl("alice", "READ"), acl("eve", "READ", deny=True)
    foreign = {acl("operator", "READ"), acl("operator", "WRITE", "other")}

    planned = plan(set(), {gone, denied, *foreign}, synced={gone, denied, acl("alice", "ALTER")})

    assert planned.deletes == (gone, denied)
    assert planned.synced == frozenset()


def test_operations_of_a_grant_of_everything_go_with_it() -> None:
    """When ALL is revoked at the source, what it was split into goes; when a single one is revoked, it stays."""
    first = plan({acl("bob", "ALL"), acl("bob", "READ")})
    there = set(first.creates)

    revoked = plan(set(), there, synced=set(first.synced))
    single = plan({acl("bob", "ALL")}, there, synced=set(first.synced))

    assert set(revoked.deletes) == there
    assert single.deletes == ()


def test_what_leaves_the_scope_stays_as_it_is() -> None:
    """Narrower acls.include, and a topic that is no longer mirrored, remove nothing."""
    there = {acl("alice", "READ"), acl("alice", "READ", "t2")}
    filters = FilterSettings(acls_include=("GROUP",))

    narrowed = plan(there, there, synced=there, filters=filters)
    stopped = plan(set(), there, synced=there, mirrored=("t1",))

    assert narrowed.deletes == ()
    assert stopped.deletes == (acl("alice", "READ"),)


def test_only_topics_and_groups_of_the_mirror_are_covered() -> None:
    """ACLs on other topics and groups, named in full or by a prefix without a mirrored topic, are not copied."""
    filters = FilterSettings(groups_include=("mine",))
    source = {
        acl("a", "READ", "other"),
        acl("a", "READ", "oth", pattern="PREFIXED"),
        acl("a", "READ", "*"),
        acl("a", "READ", "mine", kind="GROUP"),
        acl("a", "READ", "theirs", kind="GROUP"),
    }

    planned = plan(source, filters=filters)

    assert set(planned.creates) == {acl("a", "READ", "*"), acl("a", "READ", "mine", kind="GROUP")}


@pytest.mark.parametrize(
    "refused",
    [
        acl("*", "WRITE", deny=True),
        acl("*", "ALL", "*", deny=True),
        acl("*", "READ", deny=True),
        acl("mirror", "DESCRIBE", deny=True),
        acl("mirror", "ALL"),
        acl("a", "CLUSTER_ACTION", "kafka-cluster", kind="CLUSTER"),
        acl("a", "UNKNOWN_99"),
    ],
    ids=lambda item: f"{item.principal}-{item.operation}",
)
def test_what_would_stop_the_mirror_or_is_the_source_s_own_is_not_copied(refused: Acl) -> None:
    """Freezes, a DENY that hits the mirror, brokers' rights and unknown kinds are listed instead."""
    planned = plan({refused})

    assert planned.creates == ()
    assert len(planned.notes) == 1
    assert refused.principal in planned.notes[0]


def test_a_deny_for_everybody_is_copied_for_a_super_user() -> None:
    """Where no DENY hits the mirror, everybody may be denied to read; a freeze is not copied even so."""
    read, freeze = acl("*", "READ", deny=True), acl("*", "WRITE", deny=True)

    assert plan({read, freeze}, exempt=True).creates == (read,)


def test_a_write_permission_in_force_is_removed_only_when_it_is_stored_as_held_back() -> None:
    """What the stop has to give back is in the state first; a pattern in force is left alone."""
    write, prefix = acl("alice", "WRITE"), acl("alice", "WRITE", "t", pattern="PREFIXED")
    everybody, own = acl("*", "WRITE"), acl("mirror", "WRITE")  # what the mirror itself may need
    source = {write, prefix, everybody, own}
    there = source | {acl("operator", "WRITE")}

    first = plan(source, there)
    second = plan(source, there, recorded=dict(first.held), synced=set(first.synced))

    assert first.deletes == ()
    assert second.deletes == (write,)
    assert second.creates == ()


@pytest.mark.case("C28")
def test_a_stop_grants_what_was_held_back_and_takes_back_what_stood_for_it() -> None:
    """ALL takes the place of the operations it was split into; the freeze goes; the second time nothing changes."""
    held = plan({acl("alice", "WRITE"), acl("bob", "ALL"), acl("bob", "READ")}).held["t1"]
    split = {acl("bob", operation) for operation in OTHER_TOPIC_OPERATIONS}
    present = split | {freeze_of("t1")}

    released = plan_release("t1", TopicAcls(held, frozen=True), frozenset(present))
    after = (present - set(released.deletes)) | set(released.creates)
    again = plan_release("t1", TopicAcls(held, frozen=True), frozenset(after))
    blind = plan_release("t1", TopicAcls(held, frozen=True), None)

    assert set(released.creates) == {acl("alice", "WRITE"), acl("bob", "ALL")}
    assert after == {acl("alice", "WRITE"), acl("bob", "ALL"), acl("bob", "READ")}
    assert (again.creates, again.deletes) == ((), ())
    assert set(blind.creates) == set(released.creates)


def test_a_pattern_is_granted_by_name_until_the_last_topic_stops() -> None:
    """While another copy needs it held back, only the stopped topic is opened; then the pattern itself is."""
    prefix = acl("alice", "WRITE", "t", pattern="PREFIXED")
    held = plan({prefix}).held["t1"]

    first = TopicAcls(held, shared=patterns_of(held))
    early = plan_release("t1", first, frozenset())
    waiting = TopicAcls(first.left, shared=patterns_of(held))
    last = plan_release("t1", TopicAcls(first.left), frozenset(early.creates))

    assert early.creates == (acl("alice", "WRITE"),)
    assert first
    assert not waiting
    assert plan_release("t1", waiting, frozenset()).creates == ()
    assert last.creates == (prefix,)


def test_whoever_may_write_to_copies_is_found() -> None:
    """By name, prefix or "*", unless denied; the mirror itself is not meant."""
    acls = {
        acl("alice", "WRITE"),
        acl("bob", "ALL", "*"),
        acl("bob", "WRITE", "t2", deny=True),
        acl("carol", "WRITE", "t", pattern="PREFIXED"),
        acl("dave", "WRITE", "other"),
        acl("mirror", "WRITE", "*"),
    }

    found = {writer.acl.principal: writer.topics for writer in writers(acls, ("t1", "t2"), principal=MIRROR)}
    frozen = writers(acls | {freeze_of("t1"), freeze_of("t2")}, ("t1", "t2"), principal=MIRROR)

    assert found == {"User:alice": ("t1",), "User:bob": ("t1",), "User:carol": ("t1", "t2")}
    assert frozen == ()
    text = writer_text(writers({acl("alice", "WRITE")}, ("t1",), principal=MIRROR)[0])
    assert text == "User:alice may write to t1 (ALLOW User:alice WRITE on topic t1)"
