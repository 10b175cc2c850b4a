"""Jobs: verbs, full refresh, reconcile, checks run by people."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from kmirror_dagster.errors import DeadlineError
from kmirror_dagster.lifecycle import MirrorState
from tests.helpers.dagster_ticks import Ticker, failure_text, ticker
from tests.helpers.fake_node import FakeNode, fake_resource

# jobs that no other job can undo
ENDING = {"kmirror_stop", "kmirror_failover", "kmirror_approve_failover"}

KEY = dg.AssetKey(["kafka_mirror", "orders"])


@pytest.fixture
def node() -> FakeNode:
    return FakeNode(topics={"a": 2, "b": 1})


@pytest.fixture
def made(node: FakeNode) -> Iterator[Ticker]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield ticker(instance, fake_resource(node))


def states(node: FakeNode, topic: str) -> set[MirrorState | None]:
    return {status.state for status in node.partitions.values() if status.topic == topic}


def test_verbs_reach_what_they_want(made: Ticker, node: FakeNode) -> None:
    """Pause and resume of chosen topics, stop and start of all; each may run twice."""
    for _ in range(2):
        assert made.run("kmirror_pause", {"topics": ["a"]}).success
    assert (states(node, "a"), states(node, "b")) == ({MirrorState.PAUSED}, {MirrorState.MIRRORING})
    assert made.run("kmirror_resume").success
    assert made.run("kmirror_stop", {"confirm": "orders"}).success
    assert states(node, "a") | states(node, "b") == {MirrorState.STOPPED}
    assert made.run("kmirror_start").success
    assert states(node, "a") == {MirrorState.MIRRORING}


def test_create_makes_mirrors_known(node: FakeNode, tmp_path: Path) -> None:
    """The create job sends the settings of the code location as they stand; without settings it says so."""
    path = tmp_path / "orders.yaml"
    path.write_text(
        "mirror: orders\nsource: {bootstrap.servers: '${S}'}\ndestination: {bootstrap.servers: 'b:1'}\n"
    )
    with dg.DagsterInstance.ephemeral() as instance:
        made = ticker(instance, fake_resource(node), path, "users")
        assert made.run("kmirror_create", {"mirrors": ["orders"]}).success
        assert node.document_text["source"] == {"bootstrap.servers": "${S}"}
        text = failure_text(made.run("kmirror_create", {"replace": True}))
    assert text == "users: only its name is known here; give its settings or their file"


def test_runs_say_what_they_are_about(made: Ticker) -> None:
    """A run is tagged with the mirror and the topics it is about; its job's name says what it does."""
    result = made.run("kmirror_pause", {"topics": ["a"]})
    run = made.instance.get_run_by_id(result.run_id)
    assert run is not None
    assert (run.tags["kmirror/mirror"], run.tags["kmirror/topics"]) == ("orders", "a")
    assert run.tags["kmirror/job"] == "pause"


def test_launchpad_explains_every_field(made: Ticker) -> None:
    """Each job and each of its fields has a text in plain words; what ends mirroring asks for the name."""
    for job in made.defs.resolve_all_job_defs():
        if job.name.startswith("__"):
            continue
        assert job.description
        (op,) = job.graph.node_defs
        assert isinstance(op, dg.OpDefinition)
        fields = getattr(op.config_schema.config_type, "fields", {})
        assert [name for name, field in fields.items() if not field.description] == [], job.name
        assert "confirm" in fields or job.name not in ENDING, job.name


def test_stop_asks_for_the_name(made: Ticker, node: FakeNode) -> None:
    """Stopping ends the mirroring, so the mirror's name has to be typed."""
    result = made.run("kmirror_stop")
    assert "not confirmed, nothing was changed" in failure_text(result)
    assert states(node, "a") == {MirrorState.MIRRORING}


def test_unknown_mirror_is_named(made: Ticker) -> None:
    """A mirror that is not in the code location is refused with the ones that are."""
    assert failure_text(made.run("kmirror_pause", {"mirror": "nope"})) == (
        "no mirror 'nope' in this code location; it has: orders"
    )


def test_verb_that_does_not_get_there(made: Ticker, node: FakeNode) -> None:
    """A verb whose partitions do not arrive in time fails and lists them."""
    node.settles = False
    result = made.run("kmirror_pause", {"wait_seconds": 0.2})
    assert "3 partitions are not PAUSED yet, such as a/0 (MIRRORING" in failure_text(result)


def test_node_error_is_one_line(made: Ticker, node: FakeNode) -> None:
    """What the node refuses is the run's failure, in the node's words."""

    def refuse(what: str) -> None:
        if what.startswith("verb"):
            raise DeadlineError("node did not answer")

    node.on_call = refuse
    assert failure_text(made.run("kmirror_resume")) == "resume orders: node did not answer"


def test_reconcile_logs_what_is_missing(made: Ticker, node: FakeNode) -> None:
    """Reconciling logs each state once, and nothing but the figures when run again."""
    assert made.run("kmirror_reconcile").success
    assert made.instance.get_materialized_partitions(KEY) == {"a/0", "a/1", "b/0"}
    assert sorted(made.instance.get_dynamic_partitions("kmirror/orders")) == ["a/0", "a/1", "b/0"]
    before = len(made.instance.fetch_materializations(KEY, limit=100).records)
    node.set_state("b", 0, MirrorState.FAILED, error="x")
    assert made.run("kmirror_reconcile").success
    assert len(made.instance.fetch_materializations(KEY, limit=100).records) == before
    observed = [record.partition_key for record in made.instance.fetch_observations(KEY, limit=10).records]
    assert observed.count("b/0") == 1


@pytest.mark.parametrize("batches", [True, False])
def test_reconciled_states_link_to_their_run(
    made: Ticker, node: FakeNode, monkeypatch: pytest.MonkeyPatch, batches: bool
) -> None:
    """Each state that a run logs is an event of that run, also with a Dagster that has no batches."""
    if not batches:
        monkeypatch.setattr("kmirror_dagster.orchestration.event_batches._entry_maker", lambda _: None)
    node.set_state("b", 0, MirrorState.FAILED, error="x")
    result = made.run("kmirror_reconcile")
    reached = made.instance.fetch_materializations(KEY, limit=10).records
    observed = made.instance.fetch_observations(KEY, limit=10).records
    assert {(record.partition_key, record.run_id) for record in reached} == {
        ("a/0", result.run_id),
        ("a/1", result.run_id),
    }
    assert {record.partition_key for record in observed} == {"b/0", None}
    assert {record.run_id for record in observed} == {result.run_id}


def test_full_refresh_reports_errors(made: Ticker, node: FakeNode) -> None:
    """A full refresh that could not reach the source fails, after the event log was brought up to date."""
    node.source_ok = False
    result = made.run("kmirror_full_refresh")
    assert failure_text(result) == "orders: refresh: the source was not reachable"
    assert len(made.instance.get_materialized_partitions(KEY)) == 3
    assert "refresh" in node.calls


def test_checks_by_hand(made: Ticker, node: FakeNode) -> None:
    """The checks run by themselves, without materializing anything."""
    node.set_state("a", 0, MirrorState.FAILED, error="boom", lag_seconds=120.0)
    job = made.defs.resolve_implicit_global_asset_job_def()
    keys = made.defs.resolve_asset_graph().asset_check_keys
    result = job.get_subset(asset_selection=set(), asset_check_selection=keys).execute_in_process(
        instance=made.instance
    )
    found = {check.check_name: check for check in result.get_asset_check_evaluations()}
    assert {name: check.passed for name, check in found.items()} == {
        "node_alive": True,
        "no_failed_partition": False,
        "lag_within_limits": False,
        "refresh_fresh": True,
        "nobody_else_writes": True,
        "contents_verified": False,  # there are no clusters to read
        "rpo_kept": False,
        "drift": True,
    }
    assert found["lag_within_limits"].description == "120.0 s and 0 records behind, allowed: 60 s"
    assert made.instance.get_materialized_partitions(KEY) == set()


def test_checks_without_a_node(made: Ticker, node: FakeNode) -> None:
    """With no node only its own check fails; the others do not pretend to know."""

    def down(_: str) -> None:
        raise DeadlineError("no answer")

    node.on_call = down
    job = made.defs.resolve_implicit_global_asset_job_def()
    keys = made.defs.resolve_asset_graph().asset_check_keys
    result = job.get_subset(asset_selection=set(), asset_check_selection=keys).execute_in_process(
        instance=made.instance, raise_on_error=False
    )
    found = {check.check_name: check for check in result.get_asset_check_evaluations()}
    for name in ("contents_verified", "rpo_kept", "drift"):
        assert (found[name].passed, found.pop(name).description) == (False, "not known: no answer")
    (check,) = found.values()
    assert (check.check_name, check.passed, check.description) == ("node_alive", False, "no answer")
    assert result.success


def test_jobs_run_in_one_process_with_priority(made: Ticker) -> None:
    """Jobs of ours run in one process; the failover job comes first and has a pool of its own."""
    jobs = {job.name: job for job in made.defs.resolve_all_job_defs() if job.name.startswith("kmirror_")}
    assert {job.executor_def.name for job in jobs.values()} == {"in_process"}
    priority = {name: int(job.tags["dagster/priority"]) for name, job in jobs.items()}
    assert priority.pop("kmirror_failover") > max(priority.values())
    (op,) = jobs["kmirror_failover"].graph.node_defs
    assert op.pool == "kmirror_failover"
