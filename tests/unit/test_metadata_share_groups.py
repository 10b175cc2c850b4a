"""Share groups in a refresh: brokers that do not know their positions, one group that is refused."""

from collections.abc import Iterable, Mapping

from kmirror_dagster.broker.admin_types import (
    Answers,
    CommittedOffset,
    GroupListing,
    GroupListings,
    GroupType,
    ListedOffset,
    OffsetKind,
    Partition,
    TopicDescription,
)
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.context import RefreshContext
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.metadata.position_steps import sync_groups
from kmirror_dagster.metadata.snapshot import ClusterSnapshot
from kmirror_dagster.metadata.topics import TopicsPlan, Verdict
from tests.helpers.step_context import step_context

KEY = ("t", 0)
KNOWN = {90: 0, 91: 0}


class MemoryCluster:
    """The group calls of `ClusterAdmin`; groups in `refused` cannot be read or set."""

    def __init__(self, positions: Mapping[str, int], versions: Mapping[int, int] = KNOWN) -> None:
        self.positions = dict(positions)
        self.versions = versions
        self.refused: set[str] = set()

    def groups(self, *, timeout_s: float | None = None) -> GroupListings:
        return GroupListings(tuple(GroupListing(name, GroupType.SHARE, "Empty") for name in self.positions))

    def api_versions(self, *, timeout_s: float | None = None) -> Mapping[int, int]:
        return self.versions

    def share_group_offsets(
        self, groups: Iterable[str], *, timeout_s: float | None = None
    ) -> Answers[str, Mapping[Partition, CommittedOffset]]:
        names = set(groups)
        found = {
            name: {KEY: CommittedOffset(self.positions[name], None, 0)} if name in self.positions else {}
            for name in names - self.refused
        }
        return Answers(found, {name: KmirrorError("refused") for name in names & self.refused})

    def list_offsets(
        self, partitions: Iterable[Partition], at: OffsetKind, *, timeout_s: float | None = None
    ) -> Answers[Partition, ListedOffset]:
        return Answers({key: ListedOffset(100 if at is OffsetKind.LATEST else 0) for key in partitions})

    def alter_share_group_offsets(
        self, offsets: Mapping[str, Mapping[Partition, CommittedOffset]], *, timeout_s: float | None = None
    ) -> Answers[str, Mapping[Partition, KmirrorError | None]]:
        self.positions.update({name: found[KEY].offset for name, found in offsets.items()})
        return Answers({name: {KEY: None} for name in offsets})


def refresh(source: MemoryCluster, destination: MemoryCluster) -> RefreshContext:
    """Run the step of a mirror of one partition."""
    context = step_context(source, destination, mirroring={KEY: MirrorState.MIRRORING})
    context.topics = TopicsPlan({"t": Verdict(Step.GROWTH, in_step=True)})
    context.destination_view = ClusterSnapshot(topics={"t": TopicDescription("t", None, 1, 1)})
    sync_groups(context)
    return context


def test_one_share_group_that_is_refused_names_itself_and_others_are_in_step() -> None:
    """Positions are kept within the copy; one error is one group's."""
    source, destination = MemoryCluster({"a": 5, "b": 6, "c": 700}), MemoryCluster({})
    source.refused = {"b"}
    report = refresh(source, destination).reports[Step.SHARE_GROUPS]

    assert destination.positions == {"a": 5, "c": 100}
    assert (report.errors, report.changes) == ({"b": "refused"}, 2)


def test_brokers_that_do_not_know_share_positions_are_a_note() -> None:
    """On either side: nothing is asked, nothing fails."""
    for versions in ((KNOWN, {}), ({}, KNOWN)):
        source, destination = MemoryCluster({"a": 5}, versions[0]), MemoryCluster({}, versions[1])
        report = refresh(source, destination).reports[Step.SHARE_GROUPS]

        assert destination.positions == {}
        assert report.errors == {}
        assert report.notes[0].startswith("positions of share groups are not mirrored")
