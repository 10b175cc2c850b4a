"""Drift in Dagster: a check, the job that runs it, its schedule."""

from collections.abc import Iterator

import dagster as dg
import pytest

from kmirror_dagster.coordination.models import PlannedItem, StepStatus
from kmirror_dagster.errors import DeadlineError
from tests.helpers.dagster_ticks import Ticker, ticker
from tests.helpers.fake_node import FakeNode, fake_resource


@pytest.fixture
def node() -> FakeNode:
    return FakeNode(topics={"a": 2})


@pytest.fixture
def made(node: FakeNode) -> Iterator[Ticker]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield ticker(instance, fake_resource(node))


def drift(made: Ticker) -> dg.AssetCheckEvaluation:
    result = made.defs.resolve_job_def("kmirror_drift").execute_in_process(instance=made.instance)
    assert result.success
    (found,) = result.get_asset_check_evaluations()
    return found


def test_in_step_is_a_check_that_passes(made: Ticker) -> None:
    """Nothing to change: passed, by the job as by hand."""
    found = drift(made)

    assert (found.check_name, found.passed, found.description) == ("drift", True, "in step")
    assert found.metadata["changes"].value == 0


def test_what_differs_is_a_table(made: Ticker, node: FakeNode) -> None:
    """A warning that counts the changes by step and lists them."""
    node.planned = [
        PlannedItem(step="configs", subject="a", text="set retention.ms=1"),
        PlannedItem(step="quotas", subject="user=x", text="unset producer_byte_rate"),
    ]
    found = drift(made)

    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert found.description == "2 change(s): configs 1, quotas 1"
    rows = found.metadata["would_be_changed"].value.records
    assert rows[0].data == {"step": "configs", "subject": "a", "change": "set retention.ms=1"}


def test_what_is_not_known_is_not_taken_for_being_in_step(made: Ticker, node: FakeNode) -> None:
    """A step that failed, and a node that does not answer, fail the check with the reason; the run succeeds."""
    node.plan_steps = [StepStatus(step="acls", ok=False, errors={"*": "User:m lacks DESCRIBE"})]
    unread = drift(made)

    def silent(what: str) -> None:
        if what == "plan":
            raise DeadlineError("no answer")

    node.on_call = silent
    unanswered = drift(made)

    assert (unread.passed, unread.description) == (False, "not known: acls: *: User:m lacks DESCRIBE")
    assert (unanswered.passed, unanswered.description) == (False, "not known: no answer")


def test_the_schedule_is_off_until_somebody_wants_it(made: Ticker) -> None:
    """Refreshes level drift out by themselves."""
    schedule = made.defs.get_repository_def().get_schedule_def("kmirror_drift_schedule")

    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
    assert schedule.job_name == "kmirror_drift"
