"""Failover: the decision by its table, the sensor, the job."""

import socket
from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest

from kmirror_dagster.broker.replicas import ReplicaHealth
from kmirror_dagster.coordination.models import ProbeHistory, ProbeObservation
from kmirror_dagster.errors import DeadlineError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.orchestration import MirrorTarget
from kmirror_dagster.orchestration.failover import Evidence, FailedPartition, Incident, Replicas, decide
from kmirror_dagster.orchestration.mirror_probe import FAILOVER_TAG
from kmirror_dagster.settings import FailoverSettings, PolicySettings
from tests.helpers.dagster_ticks import Ticker, failure_text, ticker
from tests.helpers.fake_node import FakeNode, fake_resource

NOW = 1_700_000_000_000
SETTINGS = FailoverSettings(bad_observations=5, probe_quorum=1, cool_down_seconds=600)


def history(
    node: str = "n1", *, bad: int = 8, good: int = 20, age_ms: int = 500, destination: str = "ggg"
) -> ProbeHistory:
    """Looks one second apart: good ones, then bad ones; the destination's as letters g and b."""
    end = NOW - age_ms
    source = [
        ProbeObservation(at_ms=end - 1_000 * back, ok=back >= bad, error=None if back >= bad else "timed out")
        for back in reversed(range(bad + good))
    ]
    looks = [
        ProbeObservation(at_ms=end, ok=letter == "g", error=None if letter == "g" else "refused")
        for letter in destination
    ]
    return ProbeHistory(node_id=node, source=source, destination=looks)


def evidence(*histories: ProbeHistory, own_ok: bool = False, **fields: Any) -> Evidence:
    own = ProbeObservation(at_ms=NOW, ok=own_ok, error=None if own_ok else "refused")
    given: dict[str, Any] = {"partitions_to_stop": 10, "lag_seconds": 3.0, **fields}
    return Evidence(now_ms=NOW, histories=list(histories), own_look=own, **given)


def ended(seconds_ago: float, *, succeeded: bool = True) -> Incident:
    return Incident(ended_ms=round(NOW - seconds_ago * 1000), succeeded=succeeded)


LOSS_LIMIT = SETTINGS.model_copy(update={"max_destination_lag_seconds": 2.0})
APPROVAL = SETTINGS.model_copy(update={"approval": "required"})
DRY_RUN = SETTINGS.model_copy(update={"dry_run": True})


def failed(seconds_after_the_source: float, *, retriable: bool = True) -> FailedPartition:
    """A partition that is FAILED since so long after the source was first seen down (7.5 s ago)."""
    return FailedPartition("a/0", round(NOW - 7_500 + seconds_after_the_source * 1_000), retriable)


QUORUM_2 = SETTINGS.model_copy(update={"probe_quorum": 2})


@pytest.mark.parametrize(
    ("seen", "settings", "acts", "says"),
    [
        (evidence(history()), SETTINGS, True, "failing over"),
        (evidence(history(bad=5)), SETTINGS, True, "failing over"),
        (evidence(history(bad=4)), SETTINGS, False, "0 of 1 nodes needed see it down 5 times in a row"),
        (evidence(history(bad=0)), SETTINGS, False, "n1 reached"),
        (evidence(history(), own_ok=True), SETTINGS, False, "Dagster itself reaches the source"),
        (evidence(history(), partitions_to_stop=0), SETTINGS, False, "nothing to fail over"),
        (
            evidence(history(), incident=Incident(open_run="r1")),
            SETTINGS,
            False,
            "failover run r1 is still open",
        ),
        (evidence(history(), incident=ended(599)), SETTINGS, False, "cool-down is 600 s"),
        (evidence(history(), incident=ended(601)), SETTINGS, True, "failing over"),
        (evidence(history(), incident=ended(30, succeeded=False)), SETTINGS, False, "cool-down is 60 s"),
        (evidence(history(), incident=ended(61, succeeded=False)), SETTINGS, True, "failing over"),
        (evidence(), SETTINGS, False, "no node looks"),
        (evidence(history(age_ms=30_000)), SETTINGS, False, "is 30 s old (do the clocks agree?)"),
        (evidence(history(age_ms=-2_000)), SETTINGS, True, "failing over"),
        (
            evidence(history(destination="ggb")),
            SETTINGS,
            False,
            "destination is unwell: n1 could not reach it",
        ),
        (evidence(history(destination="bgg")), SETTINGS, False, "destination is unwell"),
        (evidence(history(destination="bggg")), SETTINGS, True, "failing over"),
        (evidence(history(destination="")), SETTINGS, False, "has not looked at it yet"),
        (evidence(history(), history("n2", destination="b")), SETTINGS, False, "unwell: n2"),
        (evidence(history()), QUORUM_2, False, "1 of 2 nodes needed"),
        (evidence(history(), history("n2")), QUORUM_2, True, "failing over"),
        (evidence(history(), history("n2", bad=0)), SETTINGS, True, "n2 reached"),
        (
            evidence(history(), history("n2", bad=0), history("n3", bad=0)),
            SETTINGS,
            False,
            "most of those that look still reach the source",
        ),
        (evidence(history(), history("n2", bad=0, age_ms=60_000)), SETTINGS, True, "failing over"),
        # down for 7.5 s: what is 10.5 s old came 3 s before
        (evidence(history(), lag_seconds=10.5), LOSS_LIMIT, False, "3 s would be lost, 2 s are allowed"),
        (evidence(history(), lag_seconds=9.0), LOSS_LIMIT, True, "failing over"),
        (evidence(history(), lag_seconds=17.5, rpo_seconds=9.0), SETTINGS, False, "10 s would be lost, 9 s"),
        (evidence(history(), lag_seconds=17.5, rpo_seconds=11.0), SETTINGS, True, "failing over"),
        (evidence(history(), failed=[failed(-60)]), SETTINGS, False, "a/0 is FAILED already before"),
        (evidence(history(), failed=[failed(1, retriable=False)]), SETTINGS, False, "a/0 is FAILED"),
        (evidence(history(), failed=[failed(1)]), SETTINGS, True, "failing over"),
        (evidence(history(), replicas=Replicas(["a/0"])), SETTINGS, False, "a/0 is without a leader"),
        (
            evidence(history(), replicas=Replicas((), ["a/0", "a/1", "a/2", "b/0"])),
            SETTINGS,
            False,
            "a/0, a/1, a/2 and 1 more are under-replicated",
        ),
        (evidence(history(), replicas=Replicas()), SETTINGS, True, "failing over"),
        (evidence(history()), APPROVAL, False, "everything speaks for a failover: approve it"),
        (evidence(history(), approved_ms=NOW - 9_000), APPROVAL, False, "approve it"),
        (evidence(history(), approved_ms=NOW - 1_000), APPROVAL, True, "failing over"),
        (evidence(history(), approved_ms=NOW), DRY_RUN, False, "dry run: would fail over now"),
        (evidence(history(), replicas=Replicas(["a/0"])), DRY_RUN, False, "without a leader"),
    ],
)
def test_decision(seen: Evidence, settings: FailoverSettings, acts: bool, says: str) -> None:
    """Every condition has to hold, and the reason says which one did not."""
    verdict = decide(seen, settings)
    assert verdict.fail_over is acts
    assert says in verdict.reason
    assert "\n" not in verdict.reason


def test_first_bad_look_is_known() -> None:
    """The verdict tells when the source was first seen down, by the node that saw it first."""
    verdict = decide(evidence(history(bad=8), history("n2", bad=6)), SETTINGS)
    assert verdict.first_bad_ms == NOW - 500 - 7_000


# --- sensor and job


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def dead_port() -> str:
    """Address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def node(dead_port: str) -> FakeNode:
    """A mirror whose source is down, as its node sees it."""
    made = FakeNode(topics={"a": 2, "b": 1})
    made.bootstrap = dead_port
    made.source_ok = False
    return made


def failover_ticker(
    instance: dg.DagsterInstance, node: FakeNode, *, cool_down_s: int = 0, **more: Any
) -> Ticker:
    failover = FailoverSettings(bad_observations=5, cool_down_seconds=cool_down_s, **more)
    target = MirrorTarget("orders", PolicySettings(failover=failover))
    return ticker(instance, fake_resource(node), target)


def states(node: FakeNode) -> set[MirrorState | None]:
    return {status.state for status in node.partitions.values()}


def test_sensor_waits_while_the_source_lives(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """As long as the node reaches the source nothing is started, and the tick says what was seen."""
    node.source_ok = True
    tick = failover_ticker(instance, node).tick("orders_failover")
    assert tick.runs == []
    assert "node-1 reached" in (tick.seen or "")


def test_sensor_starts_the_failover_once(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """One tick decides on the nodes' history; the job stops all topics; afterwards there is nothing to do."""
    made = failover_ticker(instance, node)
    (request,) = made.tick("orders_failover").runs
    assert (request.job_name, request.tags[FAILOVER_TAG]) == ("kmirror_failover", "orders")
    (again,) = made.tick("orders_failover").runs
    assert again.run_key == request.run_key  # the daemon starts one run for one key
    result = made.launch(request)
    assert result.success
    assert states(node) == {MirrorState.STOPPED}
    after = made.tick("orders_failover")
    assert after.runs == []
    assert "nothing to fail over" in (after.seen or "")


def test_second_failover_fires_again(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """After the mirror was set up again, the next failure of its source has a run key of its own."""
    made = failover_ticker(instance, node)
    keys: list[str | None] = []
    for _ in range(3):
        (request,) = made.tick("orders_failover").runs
        keys.append(request.run_key)
        assert made.launch(request).success
        node.source_ok = True
        assert made.run("kmirror_start").success
        assert states(node) == {MirrorState.MIRRORING}
        assert made.tick("orders_failover").runs == []
        node.source_ok = False
    assert len(set(keys)) == 3


def test_no_failover_within_the_cool_down(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """A mirror that was just failed over is left alone for a while, whoever started the failover."""
    made = failover_ticker(instance, node, cool_down_s=600)
    assert made.run("kmirror_failover", {"confirm": "orders"}).success
    made.run("kmirror_start")
    tick = made.tick("orders_failover")
    assert tick.runs == []
    assert "cool-down is 600 s" in (tick.seen or "")


def test_open_failover_holds_the_sensor(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """While a failover run of the mirror is open no other one is started."""
    made = failover_ticker(instance, node)
    job = made.defs.resolve_job_def("kmirror_failover")
    run = instance.create_run_for_job(job, tags={FAILOVER_TAG: "orders"}, status=dg.DagsterRunStatus.STARTED)
    tick = made.tick("orders_failover")
    assert tick.runs == []
    assert run.run_id in (tick.seen or "")


def test_job_checks_again(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """When the source is back by the time the run starts, the failover is called off and nothing is changed."""
    made = failover_ticker(instance, node)
    (request,) = made.tick("orders_failover").runs
    node.source_ok = True
    result = made.launch(request)
    assert not result.success
    assert failure_text(result).startswith("called off, nothing was changed: source: node-1 reached")
    assert states(node) == {MirrorState.MIRRORING}


def test_failed_failover_is_tried_again(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """A failover that could not finish has used up its run key, so the next one has another."""
    made = failover_ticker(instance, node)
    node.settles = False
    (first,) = made.tick("orders_failover").runs
    first.run_config["ops"]["kmirror_failover_op"]["config"]["wait_seconds"] = 0.2
    result = made.launch(first)
    assert "3 partitions of mirror orders are not STOPPED yet" in failure_text(result)
    node.settles = True
    (second,) = made.tick("orders_failover").runs
    assert second.run_key != first.run_key
    assert made.launch(second).success
    assert states(node) == {MirrorState.STOPPED}


def test_manual_failover_asks_for_the_name(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """From the launchpad the mirror's name has to be typed; without it nothing is changed."""
    made = failover_ticker(instance, node)
    result = made.run("kmirror_failover", {"mirror": "orders"})
    assert "set 'confirm' to the mirror's name, orders" in failure_text(result)
    assert states(node) == {MirrorState.MIRRORING}
    assert instance.get_runs_count(dg.RunsFilter(tags={FAILOVER_TAG: "orders"})) == 0


def test_forced_failover_of_some_topics(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """With force, chosen topics are stopped although the source lives; the report says what is lost at most."""
    node.source_ok = True
    node.partitions["b", 0] = node.partitions["b", 0].model_copy(update={"lag_records": 7})
    made = failover_ticker(instance, node)
    result = made.run("kmirror_failover", {"confirm": "orders", "force": True, "topics": ["b"]})
    assert result.success
    assert node.partitions["b", 0].state is MirrorState.STOPPED
    assert node.partitions["a", 0].state is MirrorState.MIRRORING
    (record,) = instance.fetch_observations(dg.AssetKey(["kafka_mirror", "orders"]), limit=1).records
    report = record.event_log_entry.asset_observation.metadata
    assert report["lost_records_at_most"].value == 7
    assert report["failover_partitions"].value == 1


def test_frozen_source_port_counts_as_down(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """A source that accepts connections and never answers is down for Dagster's own look too."""
    made = failover_ticker(instance, node)
    with socket.create_server(("127.0.0.1", 0)) as server:
        node.bootstrap = f"127.0.0.1:{server.getsockname()[1]}"
        tick = made.tick("orders_failover")
    assert len(tick.runs) == 1


def test_failover_waits_for_a_person(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """With approval required nothing starts before somebody has typed the mirror's name, in this very outage."""
    made = failover_ticker(instance, node, approval="required")
    tick = made.tick("orders_failover")
    assert tick.runs == []
    assert "approve it" in (tick.seen or "")
    assert not made.run("kmirror_approve_failover").success
    assert made.tick("orders_failover").runs == []
    assert made.run("kmirror_approve_failover", {"confirm": "orders"}).success
    (request,) = made.tick("orders_failover").runs
    assert made.launch(request).success
    assert states(node) == {MirrorState.STOPPED}


def test_dry_run_changes_nothing(instance: dg.DagsterInstance, node: FakeNode) -> None:
    """A dry run of sensor and job says what would be done, and does nothing."""
    tick = failover_ticker(instance, node, dry_run=True).tick("orders_failover")
    assert tick.runs == []
    assert "dry run: would fail over now" in (tick.seen or "")
    made = failover_ticker(instance, node)
    result = made.run("kmirror_failover", {"confirm": "orders", "dry_run": True, "topics": ["a"]})
    assert result.success
    (record,) = instance.fetch_observations(dg.AssetKey(["kafka_mirror", "orders"]), limit=1).records
    report = record.event_log_entry.asset_observation.metadata
    assert (report["dry_run"].value, report["failover_partitions"].value) == (True, 2)
    assert states(node) == {MirrorState.MIRRORING}


@pytest.mark.parametrize(
    ("health", "reason"),
    [
        (ReplicaHealth(3, ("a/0",)), "a/0 is without a leader"),
        (ReplicaHealth(3, (), ("b/0",)), "b/0 is under-replicated"),
        (DeadlineError("no answer"), "the destination's replicas are not known: no answer"),
        (ReplicaHealth(3), "failing over"),
    ],
)
def test_replicas_of_the_destination_are_looked_at(
    instance: dg.DagsterInstance,
    node: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
    health: ReplicaHealth | DeadlineError,
    reason: str,
) -> None:
    """Where Dagster has the credentials, partitions without leader or replicas keep the sensor from acting."""
    clusters = {side: {"bootstrap.servers": f"{side}:9092"} for side in ("source", "destination")}
    node.document_text = {"mirror": "orders", **clusters}
    asked: list[list[str]] = []

    def look(_settings: object, topics: list[str], *, timeout_s: float) -> ReplicaHealth:
        asked.append(topics)
        if isinstance(health, DeadlineError):
            raise health
        return health

    monkeypatch.setattr("kmirror_dagster.broker.replicas.replica_health", look)
    made = failover_ticker(instance, node)
    tick = made.tick("orders_failover")
    assert len(tick.runs) == (reason == "failing over")
    assert tick.runs or reason in (tick.seen or "")
    assert asked == [["a", "b"]]
    node.source_ok = True
    made.tick("orders_failover")
    assert len(asked) == 1  # nobody is asked while nothing speaks for a failover
