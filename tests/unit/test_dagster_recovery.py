"""Jobs of recovery: what they ask for before they touch anything, and what a drill logs."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from kmirror_dagster.orchestration.drill_job import drill_metadata
from kmirror_dagster.recovery.drill_report import DrillReport
from tests.helpers.dagster_ticks import Ticker, failure_text, ticker
from tests.helpers.fake_node import FakeNode, fake_resource


@pytest.fixture
def node() -> FakeNode:
    return FakeNode(topics={"a": 2})


@pytest.fixture
def made(node: FakeNode) -> Iterator[Ticker]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield ticker(instance, fake_resource(node))


@pytest.mark.parametrize("job", ["kmirror_switchover", "kmirror_failback", "kmirror_failover"])
def test_dangerous_jobs_ask_for_the_name(made: Ticker, node: FakeNode, job: str) -> None:
    """A change of roles wants the mirror's name typed; another one, or none, changes and asks nothing."""
    for confirm in ({}, {"confirm": "order"}):
        result = made.run(job, confirm)
        assert "set 'confirm' to the mirror's name, orders" in failure_text(result)
    assert not any(call.startswith("verb") for call in node.calls)


def test_jobs_have_their_fields(made: Ticker) -> None:
    """The launchpad shows a described field for all that can be chosen."""
    for job in ("switchover", "failback", "drill", "certify", "reverify", "forecast", "approve_failover"):
        definition = made.defs.resolve_job_def(f"kmirror_{job}")
        (op,) = definition.graph.node_defs
        fields = op.config_schema.config_type.fields  # type: ignore[union-attr]
        assert fields
        assert all(field.description for field in fields.values()), job


def test_schedules_wait_to_be_armed(made: Ticker) -> None:
    """What reads or writes both clusters by itself is off until somebody switches it on."""
    status = {each.name: each.default_status for each in made.defs.get_repository_def().schedule_defs}
    for name in ("certify", "forecast", "drill"):
        assert status[f"kmirror_{name}_schedule"] is dg.DefaultScheduleStatus.STOPPED


def test_drill_logs_what_it_measured() -> None:
    """Figures to plot only where something was measured; the report and the failures always."""
    report = DrillReport(
        mirror="orders",
        started_ms=1,
        topics=1,
        partitions=1,
        rpo_limit_s=60,
        rto_s=1.25,
        rpo_s=0.5,
        rpo_records=9,
        verified=True,
    )
    figures = drill_metadata(report, Path("/reports/x.html"))
    assert (figures["drill_rto_seconds"].value, figures["drill_rpo_records"].value) == (1.25, 9)
    assert figures["drill_report"].value == "/reports/x.html"
    broken = report.model_copy(update={"rto_s": None, "error": "no broker answers"})
    figures = drill_metadata(broken, Path("x"))
    assert "drill_rto_seconds" not in figures
    assert figures["drill_failures"].value == "no broker answers"
