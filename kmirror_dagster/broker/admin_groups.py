"""Admin calls about consumer groups and their committed positions."""

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

from kmirror_dagster.broker.admin_calls import AdminCalls
from kmirror_dagster.broker.admin_errors import Right
from kmirror_dagster.broker.admin_types import (
    Answers,
    CommittedOffset,
    GroupDescription,
    GroupListing,
    GroupListings,
    GroupMember,
    GroupType,
    Partition,
)
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
_WRITE_GROUP = Right("READ", "group")


class GroupCalls(AdminCalls):
    """Groups, members and committed positions."""

    def groups(self, *, timeout_s: float | None = None) -> GroupListings:
        """List groups whose positions are committed offsets; brokers that did not answer are in `errors`."""
        wait = self.timeout(timeout_s)
        future = self.client.list_consumer_groups(request_timeout=wait)
        answer = self.result(future, doing="listing groups", right=_READ_GROUP, timeout_s=wait)
        errors = tuple(
            self.translate(error, doing="listing groups", right=_READ_GROUP) for error in answer.errors or ()
        )
        return GroupListings(tuple(_listing(item) for item in answer.valid or ()), errors)

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

    def group_offsets(
        self, groups: Iterable[str], *, timeout_s: float | None = None
    ) -> Answers[str, Mapping[Partition, CommittedOffset]]:
        """All committed positions of groups; partitions without a commit are absent."""
        wait = self.timeout(timeout_s)
        futures: dict[str, concurrent.futures.Future[Any]] = {}
        for group in sorted(set(groups)):
            # the client library takes one group per call; all are under way together
            request = [ConsumerGroupTopicPartitions(group)]
            futures.update(self.client.list_consumer_group_offsets(request, request_timeout=wait))
        return self.gather(
            futures, _committed, doing="reading positions of group", right=_READ_GROUP, timeout_s=wait
        )

    def alter_group_offsets(
        self,
        offsets: Mapping[str, Mapping[Partition, CommittedOffset]],
        *,
        timeout_s: float | None = None,
    ) -> Answers[str, Mapping[Partition, KmirrorError | None]]:
        """Commit positions for groups without live members; brokers refuse it for others.

        The answer has, for each group, one entry per partition: None when it was committed.
        """
        wait = self.timeout(timeout_s)
        futures: dict[str, concurrent.futures.Future[Any]] = {}
        for group, positions in sorted(offsets.items()):
            if positions:
                request = ConsumerGroupTopicPartitions(group, _positions(positions))
                futures.update(self.client.alter_consumer_group_offsets([request], request_timeout=wait))
        return self.gather(
            futures,
            self._altered,
            doing="committing positions of group",
            right=_WRITE_GROUP,
            timeout_s=wait,
        )

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

    def _altered(self, group: str, answer: Any) -> Mapping[Partition, KmirrorError | None]:
        outcomes: dict[Partition, KmirrorError | None] = {}
        for item in answer.topic_partitions:
            doing = f"committing {item.topic}/{item.partition} of group {group}"
            error = None
            if item.error is not None:
                error = self.translate(item.error, doing=doing, right=_WRITE_GROUP, name=group)
            outcomes[item.topic, item.partition] = error
        return outcomes


def _listing(item: Any) -> GroupListing:
    return GroupListing(item.group_id, _type_of(item), _state_of(item))


def _type_of(item: Any) -> GroupType:
    name = getattr(getattr(item, "type", None), "name", "UNKNOWN").lower()
    return GroupType(name) if name in GroupType.__members__.values() else GroupType.UNKNOWN


def _state_of(item: Any) -> str:
    name = getattr(getattr(item, "state", None), "name", "UNKNOWN")
    return _STATES.get(name, "Unknown")


def _description(group: str, item: Any) -> GroupDescription:
    members = tuple(GroupMember(member.member_id, member.client_id, member.host) for member in item.members)
    return GroupDescription(group, _state_of(item), members)


def _committed(_group: str, answer: Any) -> Mapping[Partition, CommittedOffset]:
    return {
        (item.topic, item.partition): CommittedOffset(item.offset, item.metadata, item.leader_epoch)
        for item in answer.topic_partitions
        if item.offset >= 0 and item.error is None
    }


def _positions(positions: Mapping[Partition, CommittedOffset]) -> list[TopicPartition]:
    return [
        _position(key, committed) for key, committed in sorted(positions.items(), key=lambda item: item[0])
    ]


def _position(key: Partition, committed: CommittedOffset) -> TopicPartition:
    metadata = committed.metadata or ""
    if committed.leader_epoch is None:  # the client library takes a number or no argument, not None
        return TopicPartition(*key, committed.offset, metadata)
    return TopicPartition(*key, committed.offset, metadata, committed.leader_epoch)


_Convert = Callable[[str, Any], Any]
