"""Every kind of change that is made at a source, and when the destination is right."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl, CommittedOffset, ConfigChange, NewTopic, OffsetKind
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.lifecycle import MirrorState
from tests.helpers import kafka
from tests.helpers.nodes import NodeMirror
from tests.helpers.waiting import wait_until

RATE = "producer_byte_rate"
_KEPT = ("grown", "configured", "read", "trimmed", "deleted", "recreated")


@dataclass
class Change:
    """One change: how it is made at the source, and how it is seen that the destination is right."""

    name: str
    make: Callable[[], object]
    is_right: Callable[[], bool]


@dataclass
class SourceChanges:
    """Changes to the topics of a mirror that begins with its source in step.

    Args:
        mirror: of a node.
        source, destination: admin clients.
        with_acls: the clusters have authorizers.
    """

    mirror: NodeMirror
    source: ClusterAdmin
    destination: ClusterAdmin
    with_acls: bool = True
    topics: dict[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        """Make topics, positions, quotas and ACLs at the source, and wait until everything is mirrored."""
        self.topics = {name: self.mirror.topic(name) for name in (*_KEPT, "created")}
        new = [NewTopic(self.topics[name], 1, 1, {"retention.ms": "-1"}) for name in _KEPT]
        assert set(self.source.create_topics(new).values()) == {None}
        kept = [self.topics[name] for name in _KEPT]
        wait_until(lambda: not self.source.topics(kept).errors)
        for topic in kept:
            kafka.produce(self.mirror.source, topic, [kafka.Record(b"%d" % n) for n in range(20)])
        self._configure({"retention.bytes": "1000000"})
        self._commit("forward", 5)
        self._commit("back", 15)
        self._quota("changed", 1000.0)
        self._quota("removed", 1000.0)
        self._share(3)
        if self.with_acls:
            wait_until(
                lambda: self.source.create_acls([self._acl("removed")]) == {self._acl("removed"): None}
            )
        self.mirror.node.client.refresh(self.mirror.name)
        self.mirror.await_states(MirrorState.MIRRORING, *kept)
        self.mirror.await_copied(*kept)
        wait_until(self._in_step, 90)

    def clean_up(self) -> None:
        """Take the quotas away, which belong to no topic, and wait until the destination has followed."""
        for name in ("changed", "removed"):
            self._quota(name, None)
        wait_until(lambda: self._rate("changed") is None and self._rate("removed") is None, 60)

    def _in_step(self) -> bool:
        planned = self.mirror.node.client.plan(self.mirror.name)
        there = self._committed()
        return planned.changes == [] and there["forward"] == 5 and there["back"] == 15

    def all(self) -> list[Change]:
        """All changes."""
        topics = self.topics
        changes = [
            Change("create a topic", self._create, lambda: self._end("created") == 7),
            Change("grow a topic", self._grow, lambda: self._partitions("grown") == 3),
            Change(
                "set a configuration",
                lambda: self._configure({"segment.bytes": "2000000"}),
                lambda: self._config("segment.bytes") == "2000000",
            ),
            Change(
                "unset a configuration",
                lambda: self._configure({}, "retention.bytes"),
                lambda: self._config("retention.bytes") is None,
            ),
            Change(
                "commit a position",
                lambda: self._commit("forward", 11),
                lambda: self._committed()["forward"] == 11,
            ),
            Change("reset a group", lambda: self._commit("back", 2), lambda: self._committed()["back"] == 2),
            Change("move a share group", lambda: self._share(9), lambda: self._shared() == 9),
            Change(
                "change a quota",
                lambda: self._quota("changed", 2000.0),
                lambda: self._rate("changed") == 2000,
            ),
            Change(
                "remove a quota", lambda: self._quota("removed", None), lambda: self._rate("removed") is None
            ),
            Change(
                "trim a log",
                lambda: kafka.delete_records(self.mirror.source, topics["trimmed"], 12),
                lambda: self._start("trimmed") == 12,
            ),
            Change(
                "delete a topic",
                lambda: self._delete("deleted"),
                lambda: self._told("deleted", "was deleted"),
            ),
            Change("recreate a topic", self._recreate, lambda: self._told("recreated", "was recreated")),
        ]
        return changes + (self._acl_changes() if self.with_acls else [])

    def _acl_changes(self) -> list[Change]:
        added, removed = self._acl("added"), self._acl("removed")
        return [
            Change(
                "add an ACL",
                lambda: self.source.create_acls([added]),
                lambda: added in self.destination.acls(),
            ),
            Change(
                "remove an ACL",
                lambda: self.source.delete_acls([removed]),
                lambda: removed not in self.destination.acls(),
            ),
        ]

    # making

    def _create(self) -> None:
        assert self.source.create_topics([NewTopic(self.topics["created"], 2, 1)]) == {
            self.topics["created"]: None
        }
        wait_until(lambda: not self.source.topics([self.topics["created"]]).errors)
        kafka.produce(self.mirror.source, self.topics["created"], [kafka.Record(b"x")] * 7)

    def _grow(self) -> None:
        kafka.grow_topic(self.mirror.source, self.topics["grown"], 3)

    def _configure(self, sets: Mapping[str, str], *unsets: str) -> None:
        topic = self.topics["configured"]
        assert self.source.alter_configs({topic: ConfigChange(sets, unsets)}) == {topic: None}

    def _commit(self, name: str, offset: int) -> None:
        position = {self._group(name): {(self.topics["read"], 0): CommittedOffset(offset)}}

        def committed() -> bool:
            answers = self.source.alter_group_offsets(position)
            return [*answers.values.values()] == [{(self.topics["read"], 0): None}]

        wait_until(committed)

    def _share(self, offset: int) -> None:
        position = {self._group("share"): {(self.topics["read"], 0): CommittedOffset(offset)}}

        def moved() -> bool:
            answers = self.source.alter_share_group_offsets(position)
            return [*answers.values.values()] == [{(self.topics["read"], 0): None}]

        wait_until(moved)

    def _quota(self, name: str, rate: float | None) -> None:
        entity = (("user", f"{self.mirror.name}-{name}"),)
        assert self.source.alter_client_quotas({entity: {RATE: rate}}) == {entity: None}

    def _delete(self, name: str) -> None:
        kafka.delete_topic(self.mirror.source, self.topics[name])

    def _recreate(self) -> None:
        self._delete("recreated")
        topic = NewTopic(self.topics["recreated"], 1, 1)
        wait_until(lambda: self.source.create_topics([topic]) == {topic.name: None})

    # looking

    def _group(self, name: str) -> str:
        return f"{self.mirror.name}-{name}"

    def _acl(self, name: str) -> Acl:
        user = f"User:{self.mirror.name}-{name}"
        return Acl("TOPIC", self.topics["read"], "LITERAL", user, "*", "READ", "ALLOW")

    def _partitions(self, name: str) -> int:
        found = self.destination.topics([self.topics[name]]).values
        return found[self.topics[name]].partitions if found else 0

    def _config(self, key: str) -> str | None:
        topic = self.topics["configured"]
        entry = self.destination.topic_configs([topic]).values[topic][key]
        return entry.value if entry.is_override else None

    def _committed(self) -> dict[str, int]:
        names = {self._group(name): name for name in ("forward", "back")}
        found = self.destination.group_offsets(names).values
        key = (self.topics["read"], 0)
        offsets = {
            names[group]: positions[key].offset for group, positions in found.items() if key in positions
        }
        return {"forward": -1, "back": -1} | offsets

    def _shared(self) -> int:
        found = self.destination.share_group_offsets([self._group("share")]).values
        positions = found.get(self._group("share"), {})
        return positions[self.topics["read"], 0].offset if positions else -1

    def _rate(self, name: str) -> float | None:
        return self.destination.client_quotas().get((("user", f"{self.mirror.name}-{name}"),), {}).get(RATE)

    def _start(self, name: str) -> int:
        return self._offset(name, OffsetKind.EARLIEST)

    def _end(self, name: str) -> int:
        return self._offset(name, OffsetKind.LATEST)

    def _offset(self, name: str, at: OffsetKind) -> int:
        if not self._partitions(name):
            return (
                -1
            )  # asked for a topic that is long in coming, librdkafka goes on saying that there is none
        found = self.destination.list_offsets([(self.topics[name], 0)], at).values
        return found[self.topics[name], 0].offset if found else -1

    def _told(self, name: str, text: str) -> bool:
        """A topic's error says so, and its copy is there as it was."""
        errors = {topic.topic: topic.error or "" for topic in self.mirror.summary.topics}
        return text in errors[self.topics[name]] and self._end(name) == 20


def measure(changes: list[Change], *, deadline_s: float) -> dict[str, float]:
    """Make all changes, one right after the other; seconds until each was right, from when it had been made.

    Those that are still wrong at the deadline are missing.
    """
    made: dict[str, float] = {}
    for change in changes:
        change.make()
        made[change.name] = time.monotonic()
    seconds: dict[str, float] = {}
    end = time.monotonic() + deadline_s
    while len(seconds) < len(changes) and time.monotonic() < end:
        for change in changes:
            if change.name not in seconds and _is_right(change):
                seconds[change.name] = time.monotonic() - made[change.name]
        time.sleep(0.1)
    return seconds


def _is_right(change: Change) -> bool:
    try:
        return change.is_right()
    except KmirrorError:  # asked again
        return False
