"""Materializing a mirror partition."""

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest

from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.orchestration.assets import PARTITIONS_PER_RUN
from tests.helpers.dagster_ticks import Ticker, failure_text, ticker
from tests.helpers.fake_node import FakeNode, fake_resource

KEY = dg.AssetKey(["kafka_mirror", "orders"])


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def materialize(
    instance: dg.DagsterInstance, node: FakeNode, *keys: str, wait_s: float = 5.0
) -> dg.ExecuteInProcessResult:
    made: Ticker = ticker(instance, fake_resource(node))
    instance.add_dynamic_partitions("kmirror/orders", list(keys))
    tags = {"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[-1]}
    return made.defs.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance,
        asset_selection=[KEY],
        run_config={"ops": {"orders_mirror": {"config": {"wait_seconds": wait_s}}}},
        raise_on_error=False,
        **({"partition_key": keys[0]} if len(keys) == 1 else {"tags": tags}),
    )


def metadata(instance: dg.DagsterInstance) -> dict[str, dict[str, Any]]:
    """Metadata values of the materializations in the event log, by partition."""
    return {
        str(record.partition_key): {
            name: value.value for name, value in record.asset_materialization.metadata.items()
        }
        for record in instance.fetch_materializations(KEY, limit=100).records
    }


def test_materializing_advances(instance: dg.DagsterInstance) -> None:
    """A partition without a state is brought to where it is wanted; its figures and its run are recorded."""
    node = FakeNode()
    node.add("a.b", 3, None)
    result = materialize(instance, node, "a.b/3")
    assert result.success
    figures = metadata(instance)["a.b/3"]
    assert figures["state"] == "MIRRORING"
    assert figures["advanced"] is True
    assert figures["run"] == result.run_id
    assert {type(figures[name]) for name in ("state_epoch", "lag_records")} == {int}
    assert type(figures["lag_seconds"]) is float


def test_nothing_to_do_is_harmless(instance: dg.DagsterInstance) -> None:
    """Materializing what is where it is wanted changes nothing and says so."""
    node = FakeNode(topics={"a": 1})
    epoch = node.partitions["a", 0].state_epoch
    result = materialize(instance, node, "a/0")
    assert result.success
    assert metadata(instance)["a/0"]["advanced"] is False
    assert node.partitions["a", 0].state_epoch == epoch


def test_failed_partition_fails_the_step(instance: dg.DagsterInstance) -> None:
    """A FAILED partition is a failed step whose text is the reason; its figures are kept."""
    node = FakeNode(topics={"a": 1})
    node.set_state("a", 0, MirrorState.FAILED, error="offset 7 was written by somebody else", lag_records=4)
    node.settles = False
    result = materialize(instance, node, "a/0")
    assert not result.success
    assert failure_text(result) == "mirror orders, a/0: FAILED: offset 7 was written by somebody else"
    assert metadata(instance) == {}


@pytest.mark.parametrize("key", ["nonsense", "a/01", "b/0"])
def test_bad_key_fails_in_one_line(instance: dg.DagsterInstance, key: str) -> None:
    """A key that is none, or that no mirror partition has, fails the step in one line."""
    result = materialize(instance, FakeNode(topics={"a": 1}), key)
    assert not result.success
    assert key in failure_text(result)
    assert "\n" not in failure_text(result)


def test_unsettled_when_time_is_over(instance: dg.DagsterInstance) -> None:
    """A partition that is still on its way when the budget is spent fails the step; it goes on without it."""
    node = FakeNode()
    node.add("a", 0, MirrorState.LOG_ALIGNMENT)
    node.settles = False
    result = materialize(instance, node, "a/0", wait_s=0.3)
    assert "still LOG_ALIGNMENT" in failure_text(result)


def test_several_partitions_in_one_run(instance: dg.DagsterInstance) -> None:
    """A range of partitions is one run, with each partition's own figures."""
    node = FakeNode()
    for number in range(5):
        node.add("a", number, None)
    result = materialize(instance, node, *[f"a/{number}" for number in range(5)])
    assert result.success
    assert {key: each["state_epoch"] for key, each in metadata(instance).items()} == {
        f"a/{number}": 1 for number in range(5)
    }


def test_one_failed_of_several(instance: dg.DagsterInstance) -> None:
    """One FAILED partition fails the run, and those that got where they are wanted are recorded all the same."""
    node = FakeNode(topics={"a": 3})
    node.set_state("a", 1, MirrorState.FAILED, error="boom")
    node.partitions["a", 1] = node.partitions["a", 1].model_copy(update={"desired": DesiredState.MIRRORING})
    node.on_call = lambda what: setattr(node, "settles", False)
    result = materialize(instance, node, "a/0", "a/1", "a/2")
    assert failure_text(result) == "mirror orders, a/1: FAILED: boom"
    assert set(metadata(instance)) == {"a/0", "a/2"}


def test_pause_wanted_is_settled(instance: dg.DagsterInstance) -> None:
    """A partition that is wanted PAUSED and is so needs nothing."""
    node = FakeNode(topics={"a": 1})
    node.set_state("a", 0, MirrorState.PAUSED)
    node.partitions["a", 0] = node.partitions["a", 0].model_copy(update={"desired": DesiredState.PAUSED})
    result = materialize(instance, node, "a/0")
    assert result.success
    assert metadata(instance)["a/0"]["state"] == "PAUSED"


def test_backfill_is_split() -> None:
    """A backfill makes one run of many partitions, not one of each."""
    made = ticker(dg.DagsterInstance.ephemeral(), fake_resource(FakeNode()))
    assets = made.defs.resolve_assets_def(KEY)
    assert assets.backfill_policy == dg.BackfillPolicy.multi_run(PARTITIONS_PER_RUN)
