"""Sensors that look: what a tick asks, logs and says."""

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.instance.utils import RUNLESS_RUN_ID

from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.coordination.models import StepStatus
from kmirror_dagster.errors import ApiAuthenticationError, ClusterUnreachableError, DeadlineError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.acls import Writer, writer_text
from kmirror_dagster.orchestration import KMirrorResource
from kmirror_dagster.orchestration.keeper_sensor import KeeperCursor, keep
from kmirror_dagster.orchestration.state_sensor import MAX_EVENTS
from tests.helpers.dagster_ticks import Tick, ticker
from tests.helpers.fake_node import FakeNode, fake_resource

KEY = dg.AssetKey(["kafka_mirror", "orders"])


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def figures(event: dg.AssetMaterialization | dg.AssetObservation) -> dict[str, object]:
    return {name: value.value for name, value in event.metadata.items()}


def checks(tick: Tick) -> dict[str, bool]:
    return {event.check_name: event.passed for event in tick.of(dg.AssetCheckEvaluation)}


# --- refresh sensor


def test_first_tick_tells_everything(instance: dg.DagsterInstance) -> None:
    """The first tick lists the keys, logs one aggregate event and the results of all checks."""
    node = FakeNode(topics={"a": 2, "b.c": 1})
    tick = ticker(instance, fake_resource(node)).tick("orders_refresh")
    assert sorted(instance.get_dynamic_partitions("kmirror/orders")) == ["a/0", "a/1", "b.c/0"]
    (aggregate,) = tick.of(dg.AssetMaterialization)
    assert aggregate.partition is None
    shown = figures(aggregate)
    assert (shown["partitions"], shown["partitions_mirroring"], shown["partitions_failed"]) == (3, 3, 0)
    assert len(aggregate.metadata["worst_partitions"].records) == 3
    assert checks(tick) == {
        "node_alive": True,
        "no_failed_partition": True,
        "lag_within_limits": True,
        "refresh_fresh": True,
        "nobody_else_writes": True,
    }
    assert "3 partitions, 3 MIRRORING" in (tick.seen or "")


@pytest.mark.case("C40")
def test_idle_day_logs_heartbeats_only(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day of ticks without a change adds one aggregate event in ten minutes to the event log, and nothing else."""
    node = FakeNode(topics={"a": 3})
    made = ticker(instance, fake_resource(node))
    clock = time.time_ns() // 1_000_000
    monkeypatch.setattr("kmirror_dagster.orchestration.refresh_sensor.epoch_ms", lambda: clock)
    made.tick("orders_refresh")
    made.tick("orders_states")
    begun = count_events(instance)
    assert begun == {"ASSET_MATERIALIZATION": 1 + 3, "ASSET_OBSERVATION": 0, "ASSET_CHECK_EVALUATION": 5}
    for number in range(24 * 120):
        clock += 30_000
        node.refresh_status = node.refresh_status.model_copy(update={"finished_ms": clock - 1_000})
        made.tick("orders_refresh")
        if number % 60 == 0:
            assert made.tick("orders_states").events == []
            assert made.tick("orders_failover").events == made.tick("kmirror_node_keeper").events == []
    added = {kind: count - begun[kind] for kind, count in count_events(instance).items()}
    assert added == {"ASSET_MATERIALIZATION": 24 * 6, "ASSET_OBSERVATION": 0, "ASSET_CHECK_EVALUATION": 0}
    assert "refresh" not in node.calls


def count_events(instance: dg.DagsterInstance) -> dict[str, int]:
    """Rows of the event log by the kinds of events that sensors may write."""
    kinds = (
        dg.DagsterEventType.ASSET_MATERIALIZATION,
        dg.DagsterEventType.ASSET_OBSERVATION,
        dg.DagsterEventType.ASSET_CHECK_EVALUATION,
    )
    entries = instance.all_logs(RUNLESS_RUN_ID, of_type=set(kinds))
    return {kind.value: sum(each.dagster_event_type is kind for each in entries) for kind in kinds}


# twenty threads cannot each redirect the one standard output of their process
_NO_COMPUTE_LOGS = {
    "compute_logs": {
        "module": "dagster._core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    }
}


@pytest.mark.case("C40")
def test_twenty_runs_at_once_on_sqlite(tmp_path: Path) -> None:
    """Twenty runs at once on the default storage all succeed, and log each state once and their figures each."""
    node = FakeNode(topics={"a": 3})
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides=_NO_COMPUTE_LOGS) as instance:
        made = ticker(instance, fake_resource(node))
        made.tick("orders_refresh")
        assert made.run("kmirror_reconcile").success
        logged = len(instance.fetch_materializations(KEY, limit=1_000).records)
        with ThreadPoolExecutor(20) as pool:
            runs = [pool.submit(made.run, "kmirror_reconcile") for _ in range(20)]
            assert all(run.result().success for run in runs)
        assert len(instance.fetch_materializations(KEY, limit=1_000).records) == logged
        assert len(instance.fetch_observations(KEY, limit=1_000).records) == 1 + 20


def test_changed_figures_are_logged_once(instance: dg.DagsterInstance) -> None:
    """A changed lag is one event at the next tick, with the worst partition first, and none at the one after."""
    node = FakeNode(topics={"a": 3})
    made = ticker(instance, fake_resource(node))
    made.tick("orders_refresh")
    node.partitions["a", 1] = node.partitions["a", 1].model_copy(
        update={"lag_records": 9, "lag_seconds": 2.5}
    )
    (event,) = made.tick("orders_refresh").events
    assert figures(event)["lag_records"] == 9
    assert event.metadata["worst_partitions"].records[0].data["partition"] == "a/1"
    assert made.tick("orders_refresh").events == []


def test_labels_and_types_are_fixed(instance: dg.DagsterInstance) -> None:
    """A figure has the same label and type each time, also when it is zero or a whole number."""
    node = FakeNode(topics={"a": 1})
    made = ticker(instance, fake_resource(node))
    (first,) = made.tick("orders_refresh").of(dg.AssetMaterialization)
    node.set_state("a", 0, MirrorState.FAILED, error="x", lag_records=3, lag_seconds=1)
    (second,) = made.tick("orders_refresh").of(dg.AssetMaterialization)
    kinds = [{name: type(value) for name, value in event.metadata.items()} for event in (first, second)]
    assert kinds[0] == kinds[1]


def test_new_and_removed_topics(instance: dg.DagsterInstance) -> None:
    """A new partition gets its key at the next tick, a removed topic loses its keys without an error."""
    node = FakeNode(topics={"a": 1, "b": 2})
    made = ticker(instance, fake_resource(node))
    made.tick("orders_refresh")
    node.add("a", 1)
    for number in range(2):
        del node.partitions["b", number]
    tick = made.tick("orders_refresh")
    assert sorted(instance.get_dynamic_partitions("kmirror/orders")) == ["a/0", "a/1"]
    assert "1 partition keys added, 2 removed" in (tick.seen or "")


def test_stale_refresh_is_asked_for(instance: dg.DagsterInstance) -> None:
    """A refresh is asked for only where the node has not made one of its own."""
    node = FakeNode(topics={"a": 1})
    made = ticker(instance, fake_resource(node))
    made.tick("orders_refresh")
    assert "refresh" not in node.calls
    node.refresh_status = None
    made.tick("orders_refresh")
    assert node.calls.count("refresh") == 1


def test_unreachable_source_shows_and_gets_stale(instance: dg.DagsterInstance) -> None:
    """While the source is away figures are observations, so that the freshness policy turns, and a check fails."""
    node = FakeNode(topics={"a": 1})
    made = ticker(instance, fake_resource(node))
    made.tick("orders_refresh")
    node.refreshed(reachable=False)
    first = made.tick("orders_refresh")
    assert first.of(dg.AssetMaterialization) == []
    assert len(first.of(dg.AssetObservation)) == 1
    assert checks(first) == {}  # one bad look is no news
    assert checks(made.tick("orders_refresh")) == {"refresh_fresh": False}
    assert checks(made.tick("orders_refresh")) == {}
    node.refreshed()
    assert checks(made.tick("orders_refresh")) == {"refresh_fresh": True}


def test_failed_partition_fails_the_check(instance: dg.DagsterInstance) -> None:
    """A FAILED partition makes its check fail, with the reason in the text."""
    node = FakeNode(topics={"a": 2})
    made = ticker(instance, fake_resource(node))
    node.set_state("a", 1, MirrorState.FAILED, error="foreign write at offset 7")
    made.tick("orders_refresh")
    (event,) = [
        event
        for event in made.tick("orders_refresh").of(dg.AssetCheckEvaluation)
        if event.check_name == "no_failed_partition"
    ]
    assert (event.check_name, event.passed) == ("no_failed_partition", False)
    assert "a/1: foreign write at offset 7" in event.description


def test_others_that_write_fail_a_check(instance: dg.DagsterInstance) -> None:
    """Who may write to copies is a warning with the ACL that allows it; who did is an error with the partition."""
    node = FakeNode(topics={"a": 2})
    made = ticker(instance, fake_resource(node))
    made.tick("orders_refresh")
    acl = Acl("TOPIC", "a", "LITERAL", "User:app", "*", "WRITE", "ALLOW")
    noted = [StepStatus(step="acls", ok=True, notes=[writer_text(Writer(acl, ("a",)))])]
    found: list[dg.AssetCheckEvaluation] = []
    for _ in range(3):
        node.refresh_status = node.refreshed().model_copy(update={"steps": noted})
        found += made.tick("orders_refresh").of(dg.AssetCheckEvaluation)
    (warned,) = [each for each in found if each.check_name == "nobody_else_writes"]
    assert (warned.passed, warned.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert "User:app may write to a" in warned.description


def test_foreign_write_is_an_error(instance: dg.DagsterInstance) -> None:
    """A partition that somebody else wrote to fails the check at once as an error, naming offset and partition."""
    node = FakeNode(topics={"a": 2})
    made = ticker(instance, fake_resource(node))
    node.set_state("a", 1, MirrorState.FAILED, error="a/1: ends at 9 instead of 7: somebody else writes")
    made.tick("orders_refresh")
    found = made.tick("orders_refresh").of(dg.AssetCheckEvaluation)
    (written,) = [each for each in found if each.check_name == "nobody_else_writes"]
    assert (written.passed, written.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert "a/1: " in written.description


def test_dead_node_is_a_skip_and_a_failed_check(instance: dg.DagsterInstance) -> None:
    """No node: the tick says so and the check fails; when it is back, the check passes again."""
    node = FakeNode(topics={"a": 1})
    made = ticker(instance, fake_resource(node))
    made.tick("orders_refresh")

    def down(_: str) -> None:
        raise ApiAuthenticationError("the node refuses the token")

    node.on_call = down
    assert made.tick("orders_refresh").seen == "the node refuses the token"
    assert checks(made.tick("orders_refresh")) == {"node_alive": False}
    node.on_call = lambda _: None
    assert checks(made.tick("orders_refresh")) == {"node_alive": True}


def test_unknown_mirror_keeps_keys(instance: dg.DagsterInstance) -> None:
    """A mirror the node does not know is said to be so; its keys and history are left alone."""
    node = FakeNode(topics={"a": 1})
    made = ticker(instance, fake_resource(node))
    made.tick("orders_refresh")
    node.name = "other"
    assert "orders" in (made.tick("orders_refresh").seen or "")
    assert instance.get_dynamic_partitions("kmirror/orders") == ["a/0"]


# --- state sensor


def test_each_state_is_logged_once(instance: dg.DagsterInstance) -> None:
    """Current states first, then only what changed; FAILED is an observation with its reason."""
    node = FakeNode(topics={"a": 3})
    made = ticker(instance, fake_resource(node))
    assert len(made.tick("orders_states").of(dg.AssetMaterialization)) == 3
    assert made.tick("orders_states").events == []
    node.set_state("a", 1, MirrorState.FAILED, error="boom", lag_records=4)
    (event,) = made.tick("orders_states").events
    assert isinstance(event, dg.AssetObservation)
    shown = figures(event)
    assert (event.partition, shown["state"], shown["error"], shown["lag_records"]) == (
        "a/1",
        "FAILED",
        "boom",
        4,
    )


@pytest.mark.case("C40")
def test_at_most_200_events_a_tick(instance: dg.DagsterInstance) -> None:
    """A thousand new states are logged 200 at a time, none twice and none left out."""
    node = FakeNode(topics={"a": 1_000})
    made = ticker(instance, fake_resource(node))
    counts = []
    while not counts or counts[-1]:
        counts.append(len(made.tick("orders_states").events))
    assert counts == [MAX_EVENTS] * 5 + [0]
    assert len(instance.get_materialized_partitions(KEY)) == 1_000


def test_lost_cursor_logs_nothing_twice(instance: dg.DagsterInstance) -> None:
    """A lost or foreign cursor reads all states anew and logs only those the event log lacks."""
    node = FakeNode(topics={"a": 5})
    made = ticker(instance, fake_resource(node))
    made.tick("orders_states")
    made.cursors["orders_states"] = None
    assert made.tick("orders_states").events == []
    node.set_state("a", 0, MirrorState.PAUSED)
    node.feed_id = "feed2"
    tick = made.tick("orders_states")
    assert [event.partition for event in tick.events] == ["a/0"]
    assert "all states are read anew" in (tick.seen or "")


@pytest.mark.case("C40")
def test_purged_event_log_is_rebuilt(instance: dg.DagsterInstance) -> None:
    """After the asset's events are wiped, the reconcile job logs all states again from the node's."""
    node = FakeNode(topics={"a": 30})
    made = ticker(instance, fake_resource(node))
    made.tick("orders_refresh")
    made.tick("orders_states")
    instance.wipe_assets([KEY])
    assert instance.get_materialized_partitions(KEY) == set()
    assert made.run("kmirror_reconcile").success
    assert len(instance.get_materialized_partitions(KEY)) == 30
    assert made.tick("orders_states").events == []


def test_logged_states_are_read_through_in_one_tick(instance: dg.DagsterInstance) -> None:
    """What a reconcile run has logged costs the sensor no ticks: news behind it is logged at once."""
    node = FakeNode(topics={"a": 600})
    made = ticker(instance, fake_resource(node))
    assert made.run("kmirror_reconcile").success
    node.set_state("a", 599, MirrorState.PAUSED)
    tick = made.tick("orders_states")
    assert [event.partition for event in tick.events] == ["a/599"]
    assert tick.seen == "601 changes read, 1 states logged"


def test_retry_storm_is_one_event(instance: dg.DagsterInstance) -> None:
    """A partition that fails again and again for the same reason is logged once, however far behind the tick is."""
    node = FakeNode(topics={"a": 50})
    made = ticker(instance, fake_resource(node))
    made.tick("orders_states")
    total = 0
    for _ in range(10):
        for _ in range(4):
            node.set_all(MirrorState.LOG_ALIGNMENT)
            node.set_all(MirrorState.FAILED, error="source unreachable")
        total += len(made.tick("orders_states").events)
    assert total == 50
    node.set_all(MirrorState.MIRRORING)
    assert len(made.tick("orders_states").of(dg.AssetMaterialization)) == 50


def test_run_and_sensor_do_not_log_twice(instance: dg.DagsterInstance) -> None:
    """What a run has logged already is no event of the sensor."""
    node = FakeNode()
    node.add("a", 0, None)
    made = ticker(instance, fake_resource(node))
    made.tick("orders_refresh")
    job = made.defs.resolve_implicit_global_asset_job_def()
    assert job.execute_in_process(instance=instance, partition_key="a/0", asset_selection=[KEY]).success
    assert made.tick("orders_states").events == []


# --- budgets


SENSORS = ("orders_refresh", "orders_states", "orders_failover", "kmirror_node_keeper")


def tick_all(resource: KMirrorResource) -> dict[str, tuple[float, Tick]]:
    """Evaluate all sensors side by side, as the daemon's threads do; seconds and outcome of each."""

    def one(sensor: str) -> tuple[float, Tick]:
        with dg.DagsterInstance.ephemeral() as instance:
            begun = time.monotonic()
            tick = ticker(instance, resource).tick(sensor)
            return time.monotonic() - begun, tick

    with ThreadPoolExecutor(len(SENSORS)) as pool:
        return dict(zip(SENSORS, pool.map(one, SENSORS), strict=True))


@pytest.mark.case("C36")
def test_ticks_end_with_hanging_client() -> None:
    """A node call that never returns costs a tick less than 10 s, and the tick says what happened."""
    node = FakeNode(topics={"a": 500})
    released = threading.Event()
    node.on_call = lambda _: void(released.wait(60))
    try:
        ticks = tick_all(fake_resource(node))
    finally:
        released.set()
    for seconds, tick in ticks.values():
        assert seconds < 10
        assert "gave no answer within" in (tick.seen or "")
        assert tick.runs == []
    assert node.calls.count("close") >= len(SENSORS)


def void(_: object) -> None:
    """Drop a value."""


@pytest.mark.case("C36")
def test_ticks_end_when_the_port_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that accepts and never answers ends each real client's tick in less than 10 s."""
    monkeypatch.setenv("KMIRROR_TOKEN", "t")
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        for seconds, tick in tick_all(KMirrorResource(endpoint=endpoint)).values():
            assert seconds < 10
            assert tick.seen
            assert tick.runs == []


@pytest.mark.case("C36")
def test_silent_source_is_told_and_holds_nobody_up() -> None:
    """A source that accepts and never answers: every tick ends, the failover is decided on what was seen, once."""
    node = FakeNode(topics={"a": 500})
    node.source_ok = False
    node.refreshed(reachable=False)
    node.set_all(MirrorState.MIRRORING, lag_seconds=20.0, lag_records=9)
    with socket.create_server(("127.0.0.1", 0)) as server:
        node.bootstrap = f"127.0.0.1:{server.getsockname()[1]}"
        ticks = tick_all(fake_resource(node))
    assert max(seconds for seconds, _ in ticks.values()) < 10
    (run,) = ticks["orders_failover"][1].runs  # no run had to fail for it
    assert run.job_name == "kmirror_failover"
    assert len(ticks["orders_states"][1].events) == MAX_EVENTS
    assert "500 partitions, 500 MIRRORING" in (ticks["orders_refresh"][1].seen or "")
    assert checks(ticks["orders_refresh"][1])["node_alive"]
    with dg.DagsterInstance.ephemeral() as instance:
        made = ticker(instance, fake_resource(node))
        told = [checks(made.tick("orders_refresh")) for _ in range(6)]
    red = [name for tick in told for name, passed in tick.items() if not passed]
    assert red == ["refresh_fresh"]


def test_no_node_named(instance: dg.DagsterInstance, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where no node runs the tick names the remedy."""
    state_dir = tmp_path_factory.mktemp("state") / "none"
    made = ticker(instance, KMirrorResource(state_dir=str(state_dir)))
    assert "kmirror node start" in (made.tick("orders_refresh").seen or "")
    assert not state_dir.exists()


# --- node keeper


class KeptResource(KMirrorResource):
    """A resource in local mode whose node is what the test says."""

    def is_node_running(self) -> bool:
        return self.node_config == "runs"

    def is_node_stopped(self) -> bool:
        return self.node_config == "stopped"

    def ensure_node(self, *, wait_s: float = 1.0) -> str:
        if self.node_config == "fails":
            raise ClusterUnreachableError("localhost:9092 does not answer")
        return "node-7"


def test_keeper_starts_a_missing_node() -> None:
    """Local mode starts the node that is missing, and says which."""
    seen, cursor = keep(KeptResource(mode="local", node_config="none"), KeeperCursor(), now_ms=0)
    assert "started node-7" in seen
    assert cursor == KeeperCursor()


def test_keeper_leaves_a_stopped_node() -> None:
    """A node that somebody stopped on purpose stays stopped."""
    seen, _ = keep(KeptResource(mode="local", node_config="stopped"), KeeperCursor(), now_ms=0)
    assert "on purpose" in seen


def test_keeper_backs_off() -> None:
    """A node that does not start is tried again at growing intervals, at most five minutes apart."""
    resource, cursor, now_ms, tries = KeptResource(mode="local", node_config="fails"), KeeperCursor(), 0, []
    for now_ms in range(0, 3_600_000, 15_000):
        seen, cursor = keep(resource, cursor, now_ms=now_ms)
        if "does not answer" in seen:
            tries.append(now_ms)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert gaps[:4] == [15_000, 30_000, 60_000, 120_000]
    assert max(gaps) == 300_000


def test_keeper_only_looks_in_attach_mode(instance: dg.DagsterInstance) -> None:
    """In attach mode nothing is started; the tick says which nodes there are."""
    tick: Tick = ticker(instance, fake_resource(FakeNode())).tick("kmirror_node_keeper")
    assert tick.seen == "node node-1 answers; 1 nodes lead 2 coordinator partitions"


def test_deadline_error_names_the_wait() -> None:
    """The resource's own budget ends a call and says so."""
    node = FakeNode(topics={"a": 1})
    released = threading.Event()
    node.on_call = lambda _: void(released.wait(30))
    with pytest.raises(DeadlineError, match="the node gave no answer within 0 s"):
        fake_resource(node).ask(lambda api: api.ready(), budget_s=0.2, what="the node")
    released.set()
