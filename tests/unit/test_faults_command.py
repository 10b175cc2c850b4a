"""`kmirror faults` around the run itself, and what the run does with what breaks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kmirror_dagster.broker.admin_types import Answers, ListedOffset, Partition, TopicDescription
from kmirror_dagster.errors import ClusterUnreachableError, DeadlineError
from kmirror_dagster.settings import mirror_from_document
from kmirror_dagster.verification import fault_run as room
from kmirror_dagster.verification.fault_run import FaultRun, FaultRunPlan
from tests.helpers.command_line import FakeNode, install, kmirror, refused

SETTINGS = mirror_from_document(
    {"mirror": "m", "source": {"bootstrap.servers": "a:1"}, "destination": {"bootstrap.servers": "b:1"}}, {}
)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return install(monkeypatch)


@pytest.mark.usefixtures("node")
def test_what_cannot_be_done_is_said_first(tmp_path: Path) -> None:
    """A topic that is not mirrored, a mend without a break, a history that is there: nothing is written."""
    assert "does not mirror a topic 'x'" in refused(kmirror("faults", "orders", "--topic", "x"))
    line = refused(kmirror("faults", "orders", "--topic", "orders-eu", "--mend", "true"))
    assert "--mend without --break" in line
    there = tmp_path / "h.jsonl"
    there.touch()
    line = refused(kmirror("faults", "orders", "--topic", "orders-eu", "--history", str(there)))
    assert "exists: name another file" in line


class World:
    """Both clusters in memory: what the producer sends is in both logs, unless something is broken."""

    def __init__(self) -> None:
        self.broken = False
        self.calls: list[str] = []
        self.end = 0
        self.copied = 0

    def break_it(self) -> None:
        self.calls.append("break")
        self.broken = True

    def mend_it(self) -> None:
        self.calls.append("mend")
        self.broken = False


class Side:
    def __init__(self, world: World, *, source: bool) -> None:
        self.world, self.source = world, source

    def topics(self, names: Iterable[str]) -> Answers[str, TopicDescription]:
        return Answers({name: TopicDescription(name, "id", 1, 1) for name in names})

    def list_offsets(
        self, partitions: Iterable[Partition], *_: Any, **__: Any
    ) -> Answers[Partition, ListedOffset]:
        if not self.world.broken:
            self.world.copied = self.world.end
        end = self.world.end if self.source else self.world.copied
        return Answers({key: ListedOffset(end, -1) for key in partitions})

    def close(self) -> None: ...


class Client:
    """Producer or reader: the producer makes the log longer, the reader reads what there is."""

    def __init__(self, world: World, history: Any = None, **_: Any) -> None:
        self.world, self.sent = world, 0

    def start(self) -> None:
        self.world.end += 10

    def stop(self) -> None: ...

    def check(self) -> None: ...

    def position(self, *_: Any) -> int:
        return self.world.end


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(room, "ClusterAdmin", lambda settings: Side(made, source=settings is SETTINGS.source))
    for name in ("SteadyProducer", "SteadyReader"):
        monkeypatch.setattr(room, name, lambda *_, **more: Client(made, **more))
    monkeypatch.setattr(room, "_POLL_S", 0.001)
    return made


def plan(world: World, tmp_path: Path, **more: Any) -> FaultRunPlan:
    given: dict[str, Any] = {"hold_s": 0.01, "every_s": 0.01, "wait_s": 0.2, **more}
    history = tmp_path / "history.jsonl"
    return FaultRunPlan("t", 0.1, 10, history, world.break_it, world.mend_it, **given)


def test_each_fault_is_timed(world: World, tmp_path: Path) -> None:
    """Broken and mended in turn; how long it lasted and how long until all was copied."""
    report = FaultRun(SETTINGS, plan(world, tmp_path)).run()
    assert report.faults
    assert world.calls == ["break", "mend"] * len(report.faults)
    assert all(each.lasted_s >= 0.01 for each in report.faults)
    assert report.history.ok


def test_what_is_never_copied_ends_the_run(world: World, tmp_path: Path) -> None:
    """A destination that does not follow is named, and what was broken is put right all the same."""
    world.mend_it = lambda: world.calls.append("mend")  # type: ignore[method-assign]
    world.end = 5
    broken = plan(world, tmp_path)
    with pytest.raises(
        DeadlineError, match=r"not all of t is copied after 0\.2 s: the destination is behind"
    ):
        FaultRun(SETTINGS, broken).run()
    assert world.calls == ["break", "mend"]


def test_interrupted_in_a_fault(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while something is broken: it is put right."""
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(room.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        FaultRun(SETTINGS, plan(world, tmp_path)).run()
    assert world.calls == ["break", "mend"]


def test_a_cluster_that_is_away_is_waited_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that fails in the middle of a fault is repeated."""
    ends = FaultRun._ends
    failing = [False, False, False, True, True]

    def flaky(self: FaultRun, admin: Any, keys: Any) -> Any:
        if failing and failing.pop(0):
            raise ClusterUnreachableError("away")
        return ends(self, admin, keys)

    monkeypatch.setattr(FaultRun, "_ends", flaky)
    assert FaultRun(SETTINGS, plan(world, tmp_path)).run().history.ok
    assert failing == []
