"""Decisions about log starts and cluster identity."""

from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.broker.admin_types import ConfigValue, TopicDescription
from kmirror_dagster.errors import DeadlineError
from kmirror_dagster.metadata.identity import destination_problem, identity_problem
from kmirror_dagster.metadata.log_starts import LogStartsPlan, plan_log_starts
from kmirror_dagster.metadata.snapshot import ClusterSnapshot, head_missing

KEY = ("t", 0)
TOPICS = {"t": TopicDescription("t", "id", 1, 1)}


def plan(
    source_start: int | None, start: int, end: int, *, policy: str = "delete", mirroring: bool = True
) -> LogStartsPlan:
    """Plan for one partition."""
    starts = {} if source_start is None else {KEY: source_start}
    source = ClusterSnapshot(topics=TOPICS, starts=starts, offset_errors={KEY: DeadlineError("slow")})
    destination = ClusterSnapshot(
        topics=TOPICS,
        starts={KEY: start},
        ends={KEY: end},
        configs={"t": {"cleanup.policy": ConfigValue(policy)}},
    )
    return plan_log_starts(["t"], source=source, destination=destination, mirroring=lambda _key: mirroring)


@given(
    source_start=st.integers(0, 30),
    start=st.integers(0, 30),
    length=st.integers(0, 30),
    policy=st.sampled_from(["delete", "compact", "compact,delete"]),
    mirroring=st.booleans(),
)
def test_cuts_are_forward_within_the_copy_and_only_where_allowed(
    source_start: int, start: int, length: int, policy: str, mirroring: bool
) -> None:
    """A cut goes to the source's start, never back, never past the end; applied, nothing is left to do."""
    cuts = plan(source_start, start, start + length, policy=policy, mirroring=mirroring).cuts

    expected = mirroring and "delete" in policy and start < source_start <= start + length
    assert cuts == ({KEY: source_start} if expected else {})
    for offset in cuts.values():
        assert plan(source_start, offset, start + length, policy=policy).cuts == {}


def test_an_unknown_log_start_is_reported_and_nothing_is_cut() -> None:
    """Without the source's answer the topic is named; partitions that are not mirroring are not."""
    assert "not known: slow" in plan(None, 0, 10).errors["t"]
    assert plan(None, 0, 10).cuts == {}
    assert plan(None, 0, 10, mirroring=False).errors == {}


def test_a_head_is_missing_until_the_copy_starts_where_the_source_does() -> None:
    """An unknown source start counts as missing, a copy without a log starts at 0."""
    source = ClusterSnapshot(topics=TOPICS, starts={KEY: 10})

    assert head_missing(source, ClusterSnapshot(), "t")
    assert head_missing(source, ClusterSnapshot(starts={KEY: 9}), "t")
    assert not head_missing(source, ClusterSnapshot(starts={KEY: 10}), "t")
    assert head_missing(ClusterSnapshot(topics=TOPICS), ClusterSnapshot(starts={KEY: 10}), "t")
    assert not head_missing(ClusterSnapshot(topics=TOPICS, starts={KEY: 0}), ClusterSnapshot(), "t")


def test_only_the_destination_that_keeps_the_state_is_written_to() -> None:
    """A rebuilt destination is named with the remedy; where nothing is expected anything goes."""
    assert destination_problem(expected=None, destination="a") is None
    assert destination_problem(expected="a", destination="a") is None
    assert "restart the node" in (destination_problem(expected="a", destination="b") or "")
    assert "not told" in (destination_problem(expected="a", destination=None) or "")


def test_only_the_recorded_source_is_accepted() -> None:
    """Another id, no id any more, or the destination's own: a reason; nothing recorded: the first one is fine."""
    assert identity_problem(expected="a", source="a", destination="b") is None
    assert identity_problem(expected="", source="a", destination="b") is None
    assert identity_problem(expected="", source=None, destination=None) is None
    assert "another cluster" in (identity_problem(expected="a", source="c", destination="b") or "")
    assert "another cluster" in (identity_problem(expected="a", source=None, destination="b") or "")
    assert "same cluster" in (identity_problem(expected="b", source="b", destination="b") or "")
