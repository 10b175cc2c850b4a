"""The steps of a switchover: nothing is stopped before both sides are equal and at rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kmirror_dagster.broker.admin_types import Answers, TopicDescription
from kmirror_dagster.errors import DeadlineError, KmirrorError, StaleEpochError, UsageError
from kmirror_dagster.records import RecoveryRecord
from kmirror_dagster.recovery import switchover as room
from kmirror_dagster.recovery.switchover import Switchover, SwitchoverState, give_up
from kmirror_dagster.settings import mirror_from_document
from kmirror_dagster.verification.ranges import LogEnds
from kmirror_dagster.verification.report import VerifyReport

SETTINGS = mirror_from_document(
    {"mirror": "m", "source": {"bootstrap.servers": "a:1"}, "destination": {"bootstrap.servers": "b:1"}}, {}
)


class Crash(BaseException):
    """The process ends here."""


@dataclass
class World:
    """Both clusters, the mirror and the state topic in memory; may end the process at any effect."""

    source: int = 100
    stable: int | None = None
    copied: int = 100
    grows: int = 0
    no_authorizer: bool = False
    fenced: bool = False
    differences: int = 0
    sync_errors: dict[str, str] = field(default_factory=dict)
    stopped: list[int] = field(default_factory=list)
    written_at_stop: int = 0
    stored: RecoveryRecord | None = None
    effects: int = 0
    crash_at: int | None = None

    def happen(self) -> None:
        """Something reaches the outside world now, or the process is gone before it does."""
        self.effects += 1
        if self.effects == self.crash_at:
            raise Crash

    def store(self, record: RecoveryRecord) -> RecoveryRecord:
        self.happen()
        if record.revision != (self.stored.revision if self.stored else 0):
            raise StaleEpochError("somebody else")
        self.stored = record.model_copy(update={"revision": record.revision + 1})
        if record.step == "stop" and self.written_at_stop:
            self.source += self.written_at_stop
            self.written_at_stop = 0
        return self.stored

    def topics(self, names: Sequence[str]) -> Answers[str, TopicDescription]:
        return Answers({name: TopicDescription(name, "id", 1, 1) for name in names})

    def close(self) -> None: ...

    def ends(self, side: object, keys: Sequence[Any]) -> tuple[dict[Any, LogEnds], dict[Any, Any]]:
        if side == "source":
            if self.grows:
                self.grows -= 1
                self.source += 1
            found = LogEnds(0, self.source, self.source if self.stable is None else self.stable)
        else:
            self.copied = min(self.source, self.copied + 5)
            found = LogEnds(0, self.copied, self.copied)
        return dict.fromkeys(keys, found), {}

    def sync(self) -> Mapping[str, str]:
        self.happen()
        return self.sync_errors

    def is_stopped(self, topics: Sequence[str]) -> bool:
        return bool(self.stopped)

    def stop(self, topics: Sequence[str]) -> None:
        self.happen()
        assert topics == ["t"]
        assert self.fenced or self.no_authorizer or self.stopped
        self.stopped.append(self.source - self.copied)


class Side:
    """Admin client of one cluster."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.topics = world.topics

    def close(self) -> None: ...


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world that the room acts on."""
    made = World()

    def side(settings: object) -> Side:
        return Side(made, "source" if settings is SETTINGS.source else "destination")

    def fence(admin: Side, _: Sequence[str]) -> str | None:
        made.happen()
        assert admin.name == "source"
        made.fenced = not made.no_authorizer
        return "the cluster has no authorizer" if made.no_authorizer else None

    def unfence(admin: Side, _: Sequence[str]) -> str | None:
        made.happen()
        assert admin.name == "source"
        made.fenced = False
        return None

    def compare(*_: object, **__: object) -> VerifyReport:
        return VerifyReport(mirror="m", partitions=1, records={}, differences_total=made.differences)

    monkeypatch.setattr(room, "ClusterAdmin", side)
    monkeypatch.setattr(room, "read_ends", lambda admin, keys: made.ends(admin.name, keys))
    monkeypatch.setattr(room, "fence", fence)
    monkeypatch.setattr(room, "unfence", unfence)
    monkeypatch.setattr(room, "compare_mirror", compare)
    monkeypatch.setattr(room, "_POLL_S", 0.001)
    monkeypatch.setattr(room, "_FENCED_QUIET_S", 0.005)
    return made


def first_record(drain_s: float = 5.0) -> RecoveryRecord:
    """A switchover of one topic."""
    state = SwitchoverState(topics=["t"], quiet_s=0.02, drain_s=drain_s)
    return RecoveryRecord(
        mirror="m",
        operation="switchover",
        operation_id="x",
        step="fence",
        document=state.model_dump(mode="json"),
    )


def run(world: World, drain_s: float = 5.0) -> RecoveryRecord:
    """Do all that is left."""
    return Switchover(SETTINGS, world, world).run(world.stored or first_record(drain_s))


@pytest.mark.parametrize("no_authorizer", [False, True])
def test_all_steps(world: World, no_authorizer: bool) -> None:
    """Writers are shut out or come to rest, all is copied, then the mirror is stopped; the fence is gone again."""
    world.no_authorizer = no_authorizer
    world.grows, world.copied = 7, 60
    record = run(world)
    assert record.step == "stopped"
    assert not record.finished  # the way back follows
    assert world.stopped == [0]
    assert not world.fenced
    state = SwitchoverState.model_validate(record.document)
    assert 0 < state.fenced_ms <= state.stopped_ms


def test_interrupted_anywhere_and_gone_on_with(world: World) -> None:
    """The process ends before each of its effects in turn; the next one ends up at the same."""
    run(world)
    effects = world.effects
    assert effects > 7
    for crash_at in range(1, effects + 1):
        world.__init__()
        world.crash_at = crash_at
        with pytest.raises(Crash):
            run(world)
        assert run(world).step == "stopped"
        assert set(world.stopped) == {0}
        assert not world.fenced


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        ({"stable": 90}, "t/0 has a transaction that does not end"),
        (
            {"grows": 10_000_000, "no_authorizer": True, "copied": 100},
            "the source is still written to|is not copied",
        ),
    ],
)
def test_what_does_not_come_to_rest_is_named(world: World, problem: dict[str, Any], told: str) -> None:
    """An open transaction and writers that go on end the wait; nothing is stopped."""
    for name, value in problem.items():
        setattr(world, name, value)
    with pytest.raises(DeadlineError, match=told):
        run(world, drain_s=0.1)
    assert world.stopped == []
    assert world.stored is not None
    assert world.stored.step == "drain"
    assert world.stored.error


def test_differences_and_group_errors_stop_it(world: World) -> None:
    """Sides that differ and groups that are not up to date are no ground to switch over on."""
    world.differences = 2
    with pytest.raises(KmirrorError, match="both sides differ"):
        run(world)
    world.differences = 0
    world.sync_errors = {"billing": "coordinator not available"}
    with pytest.raises(KmirrorError, match="billing: coordinator"):
        run(world)
    assert world.stopped == []
    world.sync_errors = {}
    assert run(world).step == "stopped"


def test_a_late_record_is_drained_before_the_stop(world: World) -> None:
    """Something written after the drain sends it back to drain, not on to stop."""
    world.no_authorizer = True
    world.written_at_stop = 30
    run(world)
    assert world.stopped == [0]
    assert world.copied == world.source == 130


@pytest.mark.parametrize("problem", [{"stable": 90}, {"differences": 1}, {"sync_errors": {"g": "x"}}])
def test_given_up_before_the_stop(world: World, problem: dict[str, Any]) -> None:
    """At any step before the stop: writers are let in again, the mirror has never ended."""
    for name, value in problem.items():
        setattr(world, name, value)
    with pytest.raises(KmirrorError):
        run(world, drain_s=0.05)
    assert world.fenced
    assert world.stored is not None
    assert give_up(SETTINGS, world.stored, world).finished
    assert not world.fenced
    assert world.stopped == []


def test_stopped_and_interrupted_there(world: World) -> None:
    """Once the mirror is stopped, what somebody writes to the former source does not send it back to drain."""
    world.no_authorizer = True
    run(world)
    assert world.stored is not None
    world.stored = world.stored.model_copy(update={"step": "stop"})
    world.source += 5
    assert run(world).step == "stopped"


def test_too_late_to_give_up(world: World) -> None:
    """Once the mirror is stopped there is only the way on."""
    record = run(world)
    with pytest.raises(UsageError, match="too late to give it up"):
        give_up(SETTINGS, record, world)
