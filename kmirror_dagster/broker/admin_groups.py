"""Admin calls about consumer groups through librdkafka; positions are in group_wire.py."""

from collections.abc import Iterable, Mapping
from typing import Any

from kmirror_dagster.broker.admin_calls import AdminCalls
from kmirror_dagster.broker.admin_types import (
    Answers,
    GroupDescription,
    GroupMember,
)
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.errors import KmirrorError

# The client library names states and types by number; these are Kafka's own words.
_STATES = {
    "PREPARING_REBALANCING": "PreparingRebalance",
    "COMPLETING_REBALANCING": "CompletingRebalance",
    "STABLE": "Stable",
    "DEAD": "Dead",
    "EMPTY": "Empty",
}
_READ_GROUP = Right("DESCRIBE", "group")


class GroupCalls(AdminCalls):
    """Groups and their members."""

    def describe_groups(
        self, groups: Iterable[str], *, timeout_s: float | None = None
    ) -> Answers[str, GroupDescription]:
        """Describe groups with their live members."""
        wanted = sorted(set(groups))
        if not wanted:
            return Answers()
        wait = self.timeout(timeout_s)
        futures = self.client.describe_consumer_groups(wanted, request_timeout=wait)
        return self.gather(futures, _description, doing="describing group", right=_READ_GROUP, timeout_s=wait)

    def delete_groups(
        self, groups: Iterable[str], *, timeout_s: float | None = None
    ) -> Mapping[str, KmirrorError | None]:
        """Delete groups without live members, with all their positions."""
        wanted = sorted(set(groups))
        if not wanted:
            return {}
        wait = self.timeout(timeout_s)
        futures = self.client.delete_consumer_groups(wanted, request_timeout=wait)
        answers = self.gather(
            futures,
            lambda _group, _value: None,
            doing="deleting group",
            right=Right("DELETE", "group"),
            timeout_s=wait,
        )
        return dict(answers.values) | dict(answers.errors)


def _state_of(item: Any) -> str:
    name = getattr(getattr(item, "state", None), "name", "UNKNOWN")
    return _STATES.get(name, "Unknown")


def _description(group: str, item: Any) -> GroupDescription:
    members = tuple(GroupMember(member.member_id, member.client_id, member.host) for member in item.members)
    return GroupDescription(group, _state_of(item), members)
