"""Formatting the storage of new brokers."""

from pathlib import Path

import pytest

from kmirror_dagster.sandbox import storage
from kmirror_dagster.sandbox.plan import ClusterPlan, random_uuid
from kmirror_dagster.sandbox.properties import BrokerPlan


class Tool:
    """Stands for Kafka's tool; counts the brokers it formats."""

    def __init__(self) -> None:
        self.formatted: list[int] = []

    def __call__(self, brokers: list[BrokerPlan], cluster_id: str, class_path: list[Path]) -> None:
        for broker in brokers:
            self.formatted.append(broker.node_id)
            features = broker.data / storage._FEATURES
            features.parent.mkdir(parents=True)
            features.write_bytes(b"features")
            (broker.data / "meta.properties").write_text(f"cluster.id={cluster_id}\n")


def test_tool_runs_for_the_first_cluster_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second cluster gets copies, with a cluster id, node ids and directory ids of its own."""
    tool = Tool()
    monkeypatch.setattr(storage, "format_with_tool", tool)
    class_path = [tmp_path / "cache" / "a.jar"]
    class_path[0].parent.mkdir()
    first = [BrokerPlan(1, {}, tmp_path / "first")]
    second = [BrokerPlan(number, {}, tmp_path / f"second-{number}") for number in (1, 2, 3)]
    storage.format_brokers(first, "first-id", class_path)
    storage.format_brokers(second, "second-id", class_path)
    assert tool.formatted == [1]
    metas = [(broker.data / "meta.properties").read_text().splitlines() for broker in second]
    assert [meta[:3] for meta in metas] == [
        ["version=1", "cluster.id=second-id", f"node.id={number}"] for number in (1, 2, 3)
    ]
    assert len({meta[3] for meta in metas}) == 3
    assert all((broker.data / storage._FEATURES).read_bytes() == b"features" for broker in second)


def test_formatted_broker_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formatting again changes nothing, whatever the cluster id."""
    monkeypatch.setattr(storage, "format_with_tool", Tool())
    class_path = [tmp_path / "a.jar"]
    broker = BrokerPlan(1, {}, tmp_path / "broker")
    storage.format_brokers([broker], "id", class_path)
    storage.format_brokers([broker], "other", class_path)
    assert (broker.data / "meta.properties").read_text() == "cluster.id=id\n"


def test_ids_are_kafkas() -> None:
    """22 characters of URL-safe base64 that never look like an option."""
    ids = {random_uuid() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(each) for each in ids} == {22}
    assert not any(each.startswith("-") for each in ids)


def test_plan_survives_a_restart(tmp_path: Path) -> None:
    """What is saved is what is loaded; where nothing is saved there is no plan."""
    assert ClusterPlan.load(tmp_path) is None
    plan = ClusterPlan(name="source", cluster_id=random_uuid(), ports=({"CLIENT": 1, "CONTROLLER": 2},))
    plan.save(tmp_path)
    assert ClusterPlan.load(tmp_path) == plan
    assert [broker.home.name for broker in plan.brokers(tmp_path)] == ["broker-1"]
