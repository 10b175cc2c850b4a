"""Proof that two logs are one up to a last mirror position: the records in front of it compared on both sides."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.broker.log_records import LogRange
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.recovery.positions import LastPosition
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.range_comparison import compare_ranges
from kmirror_dagster.verification.ranges import LogEnds
from kmirror_dagster.verification.report import DifferenceLog, Isolation
from kmirror_dagster.verification.streams import Compaction

# Offsets compared in front of each position: several batches of any producer.
WINDOW_OFFSETS = 1_000


@dataclass(frozen=True)
class Proof:
    """What comparing a partition's records in front of its common point said.

    Attributes:
        point: offset up to which both logs were taken to be one: the last mirror position, or the old source's end
            where that is lower.
        first: first offset compared.
        compared: offsets compared; 0 when there is none that both sides still hold.
        difference: the first difference; None when there is none.
        needed: there are records in front of the point that the old source holds.
    """

    point: int
    first: int
    compared: int
    difference: str | None = None
    needed: bool = True

    @property
    def ok(self) -> bool:
        """Whether the logs are known to be one up to the point."""
        return self.difference is None and (self.compared > 0 or not self.needed)


def window(position: LastPosition, old: LogEnds, new: LogEnds) -> LogRange:
    """Offsets to compare: those that both sides hold right in front of the common point."""
    point = min(position.offset, old.end)
    start = max(old.start, new.start, point - WINDOW_OFFSETS)
    return LogRange(position.topic, position.partition, min(start, point), point)


def prove(
    old: ClusterSettings,
    new: ClusterSettings,
    positions: Sequence[LastPosition],
    old_ends: Mapping[Partition, LogEnds],
    new_ends: Mapping[Partition, LogEnds],
    *,
    compacted: Collection[str],
) -> dict[Partition, Proof]:
    """Compare the records in front of each last mirror position, those of aborted transactions too.

    Args:
        old: the mirror's source.
        new: its destination.
        positions: of partitions that both clusters have.
        old_ends, new_ends: ends of their logs.
        compacted: topics a cleaner works on; what it has removed on one side only is no difference.

    Raises:
        KmirrorError: when a cluster cannot be read.
    """
    windows = {p.key: window(p, old_ends[p.key], new_ends[p.key]) for p in positions}
    now_ms = time.time_ns() // 1_000_000
    found = compare_ranges(
        old,
        new,
        windows,
        isolation=Isolation.READ_UNCOMMITTED,
        compactions={topic: Compaction(tombstones_before_ms=now_ms) for topic in compacted},
    )
    return {key: _proof(wanted, old_ends[key], found[key]) for key, wanted in windows.items()}


def _proof(wanted: LogRange, old: LogEnds, found: DifferenceLog) -> Proof:
    difference = f"{found.listed[0].kind}: {found.listed[0].detail}" if found.listed else None
    return Proof(
        point=wanted.end,
        first=wanted.start,
        compared=wanted.end - wanted.start,
        difference=difference,
        needed=old.start < wanted.end,
    )


def compacted_topics(admins: Sequence[ClusterAdmin], topics: Collection[str]) -> frozenset[str]:
    """Topics that a cleaner works on at one of the clusters.

    Raises:
        KmirrorError: when their configurations cannot be read.
    """
    found: set[str] = set()
    for admin in admins:
        answers = admin.topic_configs(topics)
        for topic, error in answers.errors.items():
            raise KmirrorError(f"configurations of {topic} cannot be read: {error}") from error
        for topic, configs in answers.values.items():
            policy = configs.get("cleanup.policy")
            if policy is not None and "compact" in (policy.value or ""):
                found.add(topic)
    return frozenset(found)
