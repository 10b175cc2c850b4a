"""Granting what was held back when a topic stops being a mirror; needs the destination only."""

from collections.abc import Mapping

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.errors import AuthorizationError, BrokerError, KmirrorError
from kmirror_dagster.metadata.acls import TopicAcls, acl_text, plan_release
from kmirror_dagster.metadata.reader import CALL_S


def release_acls(
    destination: ClusterAdmin, topics: Mapping[str, TopicAcls], *, deadline_s: float
) -> Mapping[str, KmirrorError | None]:
    """Let writers in at stopped topics; the second time changes nothing.

    Args:
        destination: admin client of the destination.
        topics: what ends, by topic.
        deadline_s: seconds it may take.

    Returns:
        For each topic None, or why (some of) its writers are still kept out.
    """
    deadline = Deadline(deadline_s)

    def timeout() -> float:
        deadline.check("releasing ACLs")
        return deadline.remaining(at_most=CALL_S)

    outcomes: dict[str, KmirrorError | None] = dict.fromkeys(topics)
    try:
        present = destination.acls(timeout_s=timeout())
    except AuthorizationError:
        present = None  # not readable, may still be writable
    except BrokerError as error:
        if error.code == codes.SECURITY_DISABLED:
            return outcomes  # nobody is kept out where nobody is asked
        raise
    plans = {topic: plan_release(topic, acls, present) for topic, acls in topics.items()}
    creates = sorted({acl for plan in plans.values() for acl in plan.creates})
    deletes = sorted({acl for plan in plans.values() for acl in plan.deletes})
    failed: dict[Acl, KmirrorError | None] = {}
    if creates:
        failed.update(destination.create_acls(creates, timeout_s=timeout()))
    # what was given instead of a grant of everything goes when that is in force
    missing = {acl for acl, error in failed.items() if error is not None}
    deletes = [acl for acl in deletes if not _replaces(acl, missing)]
    if deletes:
        failed.update(destination.delete_acls(deletes, timeout_s=timeout()))
    for topic, plan in plans.items():
        errors = [(acl, error) for acl in (*plan.creates, *plan.deletes) if (error := failed.get(acl))]
        if errors:
            outcomes[topic] = _summary(topic, errors)
    return outcomes


def _replaces(acl: Acl, missing: set[Acl]) -> bool:
    return acl.permission == "ALLOW" and any(
        (acl.resource_name, acl.pattern_type, acl.principal, acl.host)
        == (other.resource_name, other.pattern_type, other.principal, other.host)
        for other in missing
    )


def _summary(topic: str, errors: list[tuple[Acl, KmirrorError]]) -> KmirrorError:
    """One error for a topic, of the first one's class: whether it may be tried again depends on it."""
    first = errors[0][1]
    text = (
        f"{topic}: writers are kept out: {first}; not in place: {'; '.join(acl_text(a) for a, _ in errors)}"
    )
    return AuthorizationError(text) if isinstance(first, AuthorizationError) else KmirrorError(text)
