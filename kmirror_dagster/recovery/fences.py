"""Fences: nobody writes to topics any more, by an ACL that denies it, where the cluster has an authorizer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.errors import AuthorizationError, BrokerError, KmirrorError

_AclCall: TypeAlias = Callable[[Sequence[Acl]], Mapping[Acl, KmirrorError | None]]


def fence_acl(topic: str) -> Acl:
    """ACL that denies everybody but super users to write to a topic."""
    return Acl("TOPIC", topic, "LITERAL", "User:*", "*", "WRITE", "DENY")


def fence(admin: ClusterAdmin, topics: Iterable[str]) -> str | None:
    """Deny writing; harmless when denied already.

    Returns:
        Why topics are not fenced: no authorizer, or no right to change ACLs. None when they are.

    Raises:
        KmirrorError: for any other reason.
    """
    return _apply(admin.create_acls, topics)


def unfence(admin: ClusterAdmin, topics: Iterable[str]) -> str | None:
    """Take fences away again, exactly those; as `fence`."""
    return _apply(admin.delete_acls, topics)


def _apply(call: _AclCall, topics: Iterable[str]) -> str | None:
    acls = [fence_acl(topic) for topic in sorted(set(topics))]
    if not acls:
        return None
    try:
        for error in call(acls).values():
            if error is not None:
                raise error
    except AuthorizationError as error:
        return str(error)
    except BrokerError as error:
        if error.code != codes.SECURITY_DISABLED:
            raise
        return "the cluster has no authorizer"
    return None
