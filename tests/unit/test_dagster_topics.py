"""Mirrored topics as assets: readers depend on "mirrored and fresh"; examples of automation and alerts."""

from collections.abc import Iterator

import dagster as dg
import pytest

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.orchestration import KMirrorResource, MirrorTarget, build_mirror_definitions
from kmirror_dagster.settings import PolicySettings
from tests.helpers.dagster_ticks import Tick, Ticker, failure_text, ticker
from tests.helpers.documents import DOCS, blocks
from tests.helpers.fake_node import FakeNode, fake_resource

PAGE = DOCS / "howto" / "automate.md"

MIRROR = dg.AssetKey(["kafka_mirror", "orders"])
TOPIC = dg.AssetKey(["kafka_topic", "orders", "a"])
TARGET = MirrorTarget("orders", PolicySettings(rpo_seconds=10), mirrored_topics=["a"])


@pytest.fixture
def node() -> FakeNode:
    made = FakeNode(topics={"a": 2, "b": 1})
    made.set_state("a", 0, MirrorState.MIRRORING, destination_end_offset=5)
    return made


@pytest.fixture
def made(node: FakeNode) -> Iterator[Ticker]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield ticker(instance, fake_resource(node), TARGET)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, node: FakeNode) -> "Clock":
    return Clock(monkeypatch, node)


class Clock:
    """The sensor's wall clock, moved by the test; the node's refreshes keep up with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, node: FakeNode) -> None:
        assert node.refresh_status is not None
        self.now_ms, self._node = node.refresh_status.finished_ms, node
        monkeypatch.setattr("kmirror_dagster.orchestration.refresh_sensor.epoch_ms", lambda: self.now_ms)

    def forward(self, seconds: int) -> None:
        """Let time pass."""
        assert self._node.refresh_status is not None
        self.now_ms += seconds * 1000
        self._node.refresh_status = self._node.refresh_status.model_copy(update={"finished_ms": self.now_ms})


def topic_events(tick: Tick) -> list[dg.AssetMaterialization]:
    return [event for event in tick.of(dg.AssetMaterialization) if event.asset_key == TOPIC]


def topic_check(tick: Tick) -> list[tuple[bool, str]]:
    return [
        (event.passed, event.description)
        for event in tick.of(dg.AssetCheckEvaluation)
        if event.asset_key == TOPIC
    ]


def test_topics_are_downstream() -> None:
    """A shown topic is an external asset downstream of the mirror, with a blocking check of its own."""
    graph = build_mirror_definitions(mirrors=[TARGET], resource=KMirrorResource()).resolve_asset_graph()
    node = graph.get(TOPIC)
    assert node.parent_keys == {MIRROR}
    assert not node.is_executable
    assert dg.AssetCheckKey(TOPIC, "mirrored_and_fresh") in graph.asset_check_keys


def test_new_records_materialize_a_topic(made: Ticker, node: FakeNode, clock: Clock) -> None:
    """A topic is materialized when records came and all of them are there: at most once a minute, not while idle."""
    first = made.tick("orders_refresh")
    (event,) = topic_events(first)
    assert event.metadata["destination_end_offset"].value == 5
    assert event.tags["dagster/data_version"] == "5"
    assert topic_check(first) == [(True, "mirrored and fresh")]
    counts = []
    for _ in range(40):
        clock.forward(30)
        counts.append(len(topic_events(made.tick("orders_refresh"))))
    assert sum(counts) == 0
    for end in range(6, 26):
        node.set_state("a", 0, MirrorState.MIRRORING, destination_end_offset=end)
        clock.forward(30)
        counts.append(len(topic_events(made.tick("orders_refresh"))))
    assert sum(counts) == 10


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lag_seconds": 11.0, "lag_records": 3}, "11.0 s behind, 10 s are allowed"),
        ({"state": MirrorState.PAUSED}, "1 of 2 partitions are not MIRRORING: partition 0 is PAUSED"),
    ],
)
def test_topic_that_is_not_fresh(
    made: Ticker, node: FakeNode, clock: Clock, change: dict[str, object], reason: str
) -> None:
    """A topic that is behind or held gets no event, and its check says why."""
    made.tick("orders_refresh")
    state = change.pop("state", MirrorState.MIRRORING)
    assert isinstance(state, MirrorState)
    node.set_state("a", 0, state, destination_end_offset=9, **change)
    seen = []
    for _ in range(3):
        clock.forward(61)
        tick = made.tick("orders_refresh")
        assert topic_events(tick) == []
        seen += topic_check(tick)
    assert seen == [(False, reason)]


def test_topic_check_by_hand(made: Ticker, node: FakeNode) -> None:
    """The check runs by itself as well; a topic the mirror does not have is not mirrored."""
    for partition in range(2):
        del node.partitions["a", partition]
    job = made.defs.resolve_implicit_global_asset_job_def()
    check = dg.AssetCheckKey(TOPIC, "mirrored_and_fresh")
    result = job.get_subset(asset_selection=set(), asset_check_selection={check}).execute_in_process(
        instance=made.instance, raise_on_error=False
    )
    (found,) = result.get_asset_check_evaluations()
    assert (found.passed, found.description) == (False, "not mirrored")


def test_too_many_topics_are_refused() -> None:
    """Assets of their own are for a few topics: thousands would cost every process that loads the code."""
    with pytest.raises(Exception, match="show at most 200"):
        MirrorTarget("orders", mirrored_topics=[f"t{number}" for number in range(201)])


# --- examples of automation


def example(mark: str, names: dict[str, str], **given: object) -> dict[str, object]:
    """What an example of the documentation defines, with this test's names in it."""
    (code,) = [each.text for each in blocks("python") if each.page == PAGE and mark in each.text]
    for shown, ours in names.items():
        code = code.replace(shown, ours)
    scope = dict(given)
    exec(code, scope)
    return scope


@pytest.mark.filterwarnings("ignore:.* is currently in beta")
def test_reader_runs_when_its_topic_is_mirrored_and_fresh(made: Ticker, node: FakeNode, clock: Clock) -> None:
    """Example: a reader's asset with a condition runs after new records, and not while the check fails."""

    report = example("def report", {'"shop", "orders"': '"orders", "a"'})["report"]
    assert isinstance(report, dg.AssetsDefinition)
    defs = dg.Definitions.merge(made.defs, dg.Definitions(assets=[report]))
    cursor = None

    def requested() -> int:
        nonlocal cursor
        result = dg.evaluate_automation_conditions(defs=defs, instance=made.instance, cursor=cursor)
        cursor = result.cursor
        return result.get_num_requested(report.key)

    requested()  # the first evaluation only takes note
    made.tick("orders_refresh")
    assert requested() == 1
    assert requested() == 0
    node.set_state("a", 0, MirrorState.PAUSED, destination_end_offset=9)
    for _ in range(2):
        clock.forward(61)
        made.tick("orders_refresh")
    assert requested() == 0
    node.set_state("a", 0, MirrorState.MIRRORING, destination_end_offset=9)
    clock.forward(61)
    made.tick("orders_refresh")
    assert requested() == 1


def test_alert_on_failed_runs_of_a_mirror(made: Ticker, node: FakeNode) -> None:
    """Example: a run-status sensor sends one message for a failed run of a mirror, with the mirror's name."""
    sent: list[str] = []

    alerts = example("def kmirror_alerts", {}, send=sent.append)["kmirror_alerts"]
    assert isinstance(alerts, dg.SensorDefinition)
    node.settles = False
    result = made.run("kmirror_pause", {"wait_seconds": 0.1})
    assert "are not PAUSED yet" in failure_text(result)
    context = dg.build_run_status_sensor_context(
        sensor_name="kmirror_alerts",
        dagster_event=result.get_run_failure_event(),
        dagster_instance=made.instance,
        dagster_run=made.instance.get_run_by_id(result.run_id),
    )
    alerts(context.for_run_failure())
    assert len(sent) == 1
    assert sent[0].startswith("kmirror_pause of orders: ")
