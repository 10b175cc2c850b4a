"""The event log as history: partition keys in one diff, states logged once."""

import time
from collections.abc import Iterator

import dagster as dg
import pytest

from kmirror_dagster.coordination.models import StateChange
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.orchestration.history import (
    MAX_DELETIONS,
    LoggedState,
    is_news,
    logged_states,
    state_event,
    sync_partitions,
)

KEY = dg.AssetKey(["kafka_mirror", "orders"])


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def change(
    state: MirrorState | None = MirrorState.MIRRORING,
    *,
    epoch: int = 2,
    since_ms: int = 1_700_000_000_123,
    error: str | None = None,
    topic: str = "orders",
    partition: int = 0,
) -> StateChange:
    return StateChange(
        mirror="orders",
        topic=topic,
        partition=partition,
        state=state,
        previous_state=MirrorState.LOG_ALIGNMENT,
        state_epoch=epoch,
        since_ms=since_ms,
        error=error,
    )


def test_keys_are_the_wanted_ones(instance: dg.DagsterInstance) -> None:
    """Only differences are written, and a second call changes nothing."""
    assert sync_partitions(instance, "p", ["a/0", "a/1"]).added == 2
    diff = sync_partitions(instance, "p", ["a/1", "b/0"])
    assert (diff.added, diff.removed) == (1, 1)
    assert sorted(instance.get_dynamic_partitions("p")) == ["a/1", "b/0"]
    assert sync_partitions(instance, "p", ["a/1", "b/0"]) == type(diff)()


@pytest.mark.case("C40")
def test_forty_thousand_keys_on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> None:
    """40,000 new keys go into the default SQLite instance within seconds; removals are spread over ticks."""
    with dg.DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as instance:
        keys = [f"topic-{number // 100}/{number % 100}" for number in range(40_000)]
        begun = time.monotonic()
        assert sync_partitions(instance, "p", keys).added == 40_000
        assert time.monotonic() - begun < 10
        diff = sync_partitions(instance, "p", keys[1_000:])
        assert (diff.removed, diff.postponed) == (MAX_DELETIONS, 1_000 - MAX_DELETIONS)
        assert sync_partitions(instance, "p", keys[1_000:]).postponed == 0
        assert len(instance.get_dynamic_partitions("p")) == 39_000


def test_logged_state_is_the_newest(instance: dg.DagsterInstance) -> None:
    """The newest of materializations and observations counts, for each partition by itself."""
    for event in (
        state_event(KEY, change(epoch=2)),
        state_event(KEY, change(MirrorState.FAILED, epoch=3, error="gone")),
        state_event(KEY, change(epoch=5, partition=1)),
    ):
        instance.report_runless_asset_event(event)
    logged = logged_states(instance, KEY, ["orders/0", "orders/1", "orders/2"])
    assert logged == {
        "orders/0": LoggedState("FAILED", 3, 1_700_000_000_123, "gone"),
        "orders/1": LoggedState("MIRRORING", 5, 1_700_000_000_123),
    }


def test_foreign_events_are_no_states(instance: dg.DagsterInstance) -> None:
    """Events that others log for the asset are not taken for states."""
    instance.report_runless_asset_event(
        dg.AssetMaterialization(KEY, partition="orders/0", metadata={"state": "x"})
    )
    assert logged_states(instance, KEY, ["orders/0"]) == {}


def test_failed_is_no_materialization() -> None:
    """What somebody wanted materializes the partition; FAILED is only observed, so it starts nothing downstream."""
    for state in (MirrorState.MIRRORING, MirrorState.PAUSED, MirrorState.STOPPED):
        assert isinstance(state_event(KEY, change(state)), dg.AssetMaterialization)
    assert isinstance(state_event(KEY, change(MirrorState.FAILED, error="x")), dg.AssetObservation)


LOGGED = LoggedState("MIRRORING", 5, 1_000)


@pytest.mark.parametrize(
    ("item", "logged", "news"),
    [
        (change(), None, True),
        (change(epoch=6, since_ms=900), LOGGED, True),  # clocks of nodes differ, epochs do not
        (change(epoch=5, since_ms=2_000), LOGGED, False),  # stored again by a new leader
        (change(epoch=4, since_ms=900), LOGGED, False),  # came late
        (change(epoch=2, since_ms=2_000), LOGGED, True),  # the mirror was deleted and created anew
        (change(MirrorState.LOG_ALIGNMENT, epoch=6), LOGGED, False),  # passes through
        (change(None, epoch=6), LOGGED, False),
        (change(MirrorState.FAILED, epoch=6, error="a"), LOGGED, True),
        (change(MirrorState.FAILED, epoch=8, error="a"), LoggedState("FAILED", 6, 1_000, "a"), False),
        (change(MirrorState.FAILED, epoch=8, error="b"), LoggedState("FAILED", 6, 1_000, "a"), True),
    ],
)
def test_news(item: StateChange, logged: LoggedState | None, news: bool) -> None:
    """A state is news when it is settled, newer than the logged one, and no repeated failure."""
    assert is_news(item, logged) is news
