"""The steps of a failback: interrupted anywhere, gone on with by anybody."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kmirror_dagster.broker.admin_types import Answers, TopicDescription
from kmirror_dagster.errors import DeadlineError, KmirrorError, StaleEpochError, UsageError
from kmirror_dagster.records import RecoveryRecord
from kmirror_dagster.recovery import failback as room
from kmirror_dagster.recovery.failback import Failback, FailbackState, ReverseProgress, give_up
from kmirror_dagster.recovery.failback_plan import FailbackPlan, PartitionPlan, TopicAction, TopicPlan
from kmirror_dagster.recovery.quarantine import SavedTail
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.ranges import LogEnds

SOURCE = ClusterSettings.model_validate({"bootstrap.servers": "127.0.0.1:1"})


class Crash(BaseException):
    """The process ends here."""


@dataclass
class World:
    """Old source, state topic and the node at the old source, in memory; may end the process at any call."""

    ends: dict[str, dict[int, int]] = field(default_factory=lambda: {"t": {0: 120, 1: 100}, "u": {0: 5}})
    ids: dict[str, str] = field(default_factory=lambda: {"t": "old-t", "u": "old-u"})
    fenced: set[str] = field(default_factory=set)
    stored: RecoveryRecord | None = None
    mirrors: dict[str, dict[str, Any]] = field(default_factory=dict)
    saved: list[tuple[str, int, int, int]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    waiting: int = 0
    stale: bool = False
    fresh: bool = False
    calls: int = 0
    crash_at: int | None = None
    writes_left: int = 0
    error: KmirrorError | None = None

    def happen(self) -> None:
        """Something reaches the outside world now, or the process is gone before it does."""
        self.calls += 1
        if self.calls == self.crash_at:
            raise Crash

    # journal
    def store(self, record: RecoveryRecord) -> RecoveryRecord:
        self.happen()
        if record.revision != (self.stored.revision if self.stored else 0):
            raise StaleEpochError("somebody else")
        self.stored = record.model_copy(update={"revision": record.revision + 1})
        return self.stored

    # old source
    def topic_names(self) -> frozenset[str]:
        return frozenset(self.ends)

    def topics(self, names: Sequence[str]) -> Answers[str, TopicDescription]:
        return Answers(
            {n: TopicDescription(n, self.ids[n], len(self.ends[n]), 1) for n in names if n in self.ends}
        )

    def delete_topics(self, names: Sequence[str]) -> Mapping[str, KmirrorError | None]:
        self.happen()
        for name in names:
            assert self.ids[name].startswith("old")
            self.deleted.append(name)
            del self.ends[name]
        return dict.fromkeys(names)

    def close(self) -> None: ...

    # quarantine
    def save(self, _source: object, tails: Mapping[Any, Any], **_: object) -> list[SavedTail]:
        self.happen()
        made: list[SavedTail] = []
        for (topic, partition), (first, ends) in sorted(tails.items()):
            self.saved.append((topic, partition, first, ends.end))
            tail = SavedTail(
                topic=topic, partition=partition, first=first, end=ends.end, records=1, file="f", sha256="s"
            )
            made.append(tail)
            if self.writes_left:
                self.writes_left -= 1
                self.ends[topic][partition] += 1
        return made

    # node at the old source
    def document(self, mirror: str) -> Mapping[str, Any] | None:
        return self.mirrors.get(mirror)

    def is_idle(self, mirror: str) -> bool:
        return self.stale or self.mirrors[mirror].get("idle", False)

    def create(self, document: Mapping[str, Any]) -> None:
        self.happen()
        self.stale = False
        self.mirrors["m-back"] = dict(document)
        for name in ("t", "u"):
            if name not in self.ends:
                self.ends[name], self.ids[name] = {0: 150}, "new"

    def delete(self, mirror: str) -> None:
        self.happen()
        del self.mirrors[mirror]

    def progress(self, mirror: str, topics: Sequence[str]) -> ReverseProgress:
        missing, self.fresh = topics if self.fresh else (), False
        return ReverseProgress(self.waiting, 3, {"t": "not allowed"} if self.waiting else {}, missing)


def first_record() -> RecoveryRecord:
    """A plan: t is made anew, u gone on with."""
    plan = FailbackPlan(
        mirror="m",
        reverse="m-back",
        old_source_id="a",
        new_source_id="b",
        stopped_ms=1,
        quarantine="q",
        topics=[
            TopicPlan(
                topic="t",
                action=TopicAction.RECREATE,
                old_topic_id="old-t",
                partitions=[
                    PartitionPlan(partition=0, keep_to=100, old_end=120),
                    PartitionPlan(partition=1, keep_to=100, old_end=100),
                ],
            ),
            TopicPlan(topic="u", action=TopicAction.CONTINUE, old_topic_id="old-u"),
        ],
    )
    state = FailbackState(plan=plan, document={"mirror": "m-back"})
    return RecoveryRecord(
        mirror="m",
        operation="failback",
        operation_id="x",
        step="save",
        document=state.model_dump(mode="json"),
    )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world that the room acts on."""
    made = World()

    def read_ends(_: object, keys: Sequence[tuple[str, int]]) -> tuple[dict[Any, LogEnds], dict[Any, Any]]:
        return {(t, p): LogEnds(0, made.ends[t][p], made.ends[t][p]) for t, p in keys}, {}

    def fence(_: object, topics: Sequence[str]) -> str | None:
        made.happen()
        made.fenced.update(topics)
        return None

    def unfence(_: object, topics: Sequence[str]) -> str | None:
        made.happen()
        made.fenced.difference_update(topics)
        return None

    monkeypatch.setattr(room, "ClusterAdmin", lambda _: made)
    monkeypatch.setattr(room, "Quarantine", lambda *_: made)
    monkeypatch.setattr(room, "check_saved", lambda _: None)
    monkeypatch.setattr(room, "read_ends", read_ends)
    monkeypatch.setattr(room, "fence", fence)
    monkeypatch.setattr(room, "unfence", unfence)
    monkeypatch.setattr(room, "_POLL_S", 0.001)
    return made


def run(world: World, record: RecoveryRecord | None = None, follow_s: float = 1.0) -> RecoveryRecord:
    """Do all that is left."""
    return Failback(SOURCE, world, world, follow_s=follow_s).run(record or world.stored or first_record())


def assert_done(world: World) -> None:
    """All is as it should be in the end."""
    assert world.stored is not None
    assert world.stored.finished
    assert world.deleted == ["t"]
    assert ("t", 0, 100, 120) in world.saved
    assert {tail[0] for tail in world.saved} == {"t"}
    assert world.fenced == set()
    assert world.mirrors == {"m-back": {"mirror": "m-back"}}
    assert world.ends == {"t": {0: 150}, "u": {0: 5}}


def test_all_steps(world: World) -> None:
    """The tail is saved, its topic deleted, the mirror back created; topics gone on with are not touched."""
    assert run(world).step == "done"
    assert world.saved == [("t", 0, 100, 120)]
    assert_done(world)


def test_interrupted_anywhere_and_gone_on_with(world: World) -> None:
    """The process ends before each of its effects in turn; the next one ends up at the same, deleting once."""
    run(world)
    effects = world.calls
    assert effects > 6
    for crash_at in range(1, effects + 1):
        world.__init__()
        world.crash_at = crash_at
        with pytest.raises(Crash):
            run(world)
        run(world)
        assert_done(world)


def test_done_twice_changes_nothing(world: World) -> None:
    """A finished one has nothing left to do."""
    done = run(world)
    again = run(world, done)
    assert again.finished
    assert world.deleted == ["t"]


def test_two_operators(world: World) -> None:
    """Who goes on with an older step is refused before anything is deleted."""
    first = world.store(first_record())
    run(world, first)
    with pytest.raises(StaleEpochError):
        run(world, first)
    assert_done(world)


def test_a_tail_that_grows_is_saved_to_its_end(world: World) -> None:
    """What is written while the tail is saved is saved too, piece by piece, before anything is deleted."""
    world.writes_left = 3
    run(world)
    assert world.saved == [("t", 0, 100, 120), ("t", 0, 120, 121), ("t", 0, 121, 122), ("t", 0, 122, 123)]
    assert world.deleted == ["t"]


def test_writers_that_do_not_end_are_named(world: World) -> None:
    """A topic that is written to for ever is not deleted; the reason is stored."""
    world.writes_left = 1_000
    with pytest.raises(UsageError, match="t/0 is still written to"):
        run(world)
    assert world.deleted == []
    assert world.stored is not None
    assert "still written to" in (world.stored.error or "")


def test_topic_made_anew_by_somebody_else(world: World) -> None:
    """A topic of another id is never deleted, unless the mirror back made it: then it is left alone."""
    world.ids["t"] = "foreign"
    with pytest.raises(UsageError, match="made anew at the old source and written to"):
        run(world)
    assert world.deleted == []
    world.ends["t"] = {0: 0}
    run(world)
    assert world.deleted == []


def test_mirror_of_that_name(world: World) -> None:
    """A stopped mirror of the name is replaced, one that works is not."""
    world.mirrors["m-back"] = {"mirror": "m-back", "other": True}
    with pytest.raises(UsageError, match="has other settings and is not stopped"):
        run(world)
    world.mirrors["m-back"]["idle"] = True
    run(world)
    assert_done(world)


def test_stopped_mirror_of_an_earlier_round_is_made_anew(world: World) -> None:
    """There and back again and once more: its settings are the same, its topics would stay stopped."""
    run(world)
    made = world.mirrors["m-back"]
    world.__init__()
    world.mirrors["m-back"], world.stale = made, True
    run(world)
    assert_done(world)
    assert not world.stale


def test_mirror_back_that_has_just_been_made_is_left_alone(world: World) -> None:
    """Interrupted right behind its creation: it knows no topic yet, which is not the same as being stopped."""
    run(world)
    made = world.mirrors["m-back"]
    world.__init__()
    world.mirrors["m-back"], world.stale, world.fresh = made, True, True
    assert run(world).finished
    assert world.stale  # neither deleted nor made again


def test_mirror_back_that_does_not_take_over(world: World) -> None:
    """The wait ends with what is in the way, and can be gone on with."""
    world.waiting = 2
    with pytest.raises(DeadlineError, match=r"2 partitions.*t: not allowed"):
        run(world, follow_s=0.01)
    world.waiting = 0
    run(world)
    assert_done(world)


def test_given_up_before_anything_was_deleted(world: World) -> None:
    """Writers are let in again and another failback may begin."""
    world.writes_left = 1_000
    with pytest.raises(UsageError):
        run(world)
    assert world.fenced == {"t"}
    assert world.stored is not None
    ended = give_up(SOURCE, world.stored, world.store)
    assert ended.finished
    assert world.fenced == set()


def test_quarantine_is_checked_before_anything_is_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A saved tail that is gone or changed stops the failback in front of the deletion."""

    def changed(_: SavedTail) -> None:
        raise UsageError("has been changed")

    monkeypatch.setattr(room, "check_saved", changed)
    with pytest.raises(UsageError, match="has been changed"):
        run(world)
    assert world.deleted == []
