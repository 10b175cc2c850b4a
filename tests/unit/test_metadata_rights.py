"""Rights a mirror needs, and which of them are missing."""

import pytest

from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.metadata.rights import DESTINATION, SOURCE, Known, Need, Scope, kafka_acls_lines, needs

MIRROR = "User:mirror"


def need(operation: str, name: str = "t", *, kind: str = "TOPIC", pattern: str = "LITERAL") -> Need:
    return Need(DESTINATION, kind, name, operation, "test", pattern)


def acl(operation: str, name: str = "t", *, pattern: str = "LITERAL", deny: bool = False) -> Acl:
    return Acl("TOPIC", name, pattern, MIRROR, "*", operation, "DENY" if deny else "ALLOW")


def test_rights_that_brokers_tell_are_believed() -> None:
    """READ implies DESCRIBE, ALTER_CONFIGS implies DESCRIBE_CONFIGS, CREATE may be the cluster's."""
    known = Known(MIRROR, frozenset({"CREATE"}), {"t": frozenset({"READ", "ALTER_CONFIGS"})})

    assert known.may(need("READ"))
    assert known.may(need("DESCRIBE"))
    assert known.may(need("DESCRIBE_CONFIGS"))
    assert known.may(need("CREATE", "new"))
    assert known.may(need("WRITE")) is False


@pytest.mark.parametrize(
    ("acls", "expected"),
    [
        ({acl("WRITE")}, True),
        ({acl("ALL", "*")}, True),
        ({acl("WRITE", "", pattern="PREFIXED")}, True),
        ({acl("WRITE", "other")}, False),
        ({acl("WRITE"), acl("WRITE", "*", deny=True)}, False),
        ({acl("READ")}, False),
    ],
    ids=["named", "everything", "prefix", "other", "denied", "other-operation"],
)
def test_rights_nobody_tells_are_read_from_the_acls(acls: set[Acl], expected: bool) -> None:
    """Of a topic that does not exist yet, brokers tell nothing; the ACLs do."""
    assert Known(MIRROR, frozenset(), acls=frozenset(acls)).may(need("WRITE")) is expected


def test_what_cannot_be_told_is_neither_there_nor_missing() -> None:
    """Without the right to list ACLs the answer is: not known."""
    assert Known(MIRROR, frozenset()).may(need("WRITE")) is None


def test_no_authorizer_and_super_users_lack_nothing() -> None:
    """Everything on the cluster without an ACL that says so: a super user."""
    everything = frozenset(
        {"CREATE", "ALTER", "DESCRIBE", "CLUSTER_ACTION", "ALTER_CONFIGS", "IDEMPOTENT_WRITE"}
    )
    super_user = Known(MIRROR, everything, acls=frozenset())
    granted = Acl("CLUSTER", "kafka-cluster", "LITERAL", MIRROR, "*", "ALL", "ALLOW")

    assert Known(MIRROR, is_open=True).may(need("WRITE"))
    assert super_user.is_super
    assert super_user.may(need("WRITE", "new"))
    assert not Known(MIRROR, everything, acls=frozenset({granted})).is_super


@pytest.mark.case("C30")
def test_commands_grant_what_is_missing_resource_by_resource() -> None:
    """One kafka-acls line per resource, in a shell's spelling."""
    missing = [
        need("WRITE", "a b"),
        need("DESCRIBE_CONFIGS", "a b"),
        need("ALTER", "kafka-cluster", kind="CLUSTER"),
        need("WRITE", "kmirror", kind="TRANSACTIONAL_ID", pattern="PREFIXED"),
    ]
    stem = "kafka-acls --bootstrap-server h:1 --add --allow-principal User:mirror"

    assert kafka_acls_lines(missing, principal=MIRROR, bootstrap="h:1") == (
        f"{stem} --operation Alter --cluster",
        f"{stem} --operation DescribeConfigs --operation Write --topic 'a b'",
        f"{stem} --operation Write --transactional-id kmirror --resource-pattern-type prefixed",
    )


def test_client_quotas_need_a_right_where_there_are_any() -> None:
    """DESCRIBE_CONFIGS on the source's cluster, ALTER_CONFIGS, which implies it, on the destination's."""
    more = set(needs(Scope(frozenset({"t"}), quotas=True))) - set(needs(Scope(frozenset({"t"}))))

    assert {(each.side, each.resource_type, each.operation) for each in more} == {
        (SOURCE, "CLUSTER", "DESCRIBE_CONFIGS"),
        (DESTINATION, "CLUSTER", "ALTER_CONFIGS"),
    }


def test_the_source_is_only_ever_read() -> None:
    """No right that changes anything is asked for at the source; without ACLs none on the cluster either."""
    scope = Scope(frozenset({"t"}), frozenset({"g"}), acls=False)
    wanted = {(n.resource_type, n.operation) for n in needs(scope) if n.side == SOURCE}

    assert wanted == {("TOPIC", "READ"), ("TOPIC", "DESCRIBE_CONFIGS"), ("GROUP", "DESCRIBE")}
    assert not [n for n in needs(scope) if n.resource_type == "CLUSTER"]
    assert need("CREATE", "t") in needs(scope)
    assert need("CREATE", "t") not in needs(Scope(frozenset({"t"}), existing=frozenset({"t"})))
