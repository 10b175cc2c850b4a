"""Proof of a mirror: both clusters compared record by record, offset by offset."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.broker.clients import check_reachable
from kmirror_dagster.broker.log_records import LogRange
from kmirror_dagster.broker.reader import RangeReader
from kmirror_dagster.errors import DeadlineError, KmirrorError, SameClusterError
from kmirror_dagster.settings import MirrorSettings
from kmirror_dagster.verification.groups import GroupFindings, compare_groups
from kmirror_dagster.verification.lockstep import Lockstep
from kmirror_dagster.verification.range_comparison import compactions_of
from kmirror_dagster.verification.ranges import (
    LogEnds,
    beyond_source,
    compared_range,
    is_settled,
    range_differences,
    read_ends,
    waves,
)
from kmirror_dagster.verification.report import (
    Difference,
    DifferenceKind,
    DifferenceLog,
    Isolation,
    VerifyReport,
)
from kmirror_dagster.verification.streams import DUPLICATE_WINDOW_BYTES, Compaction, PartitionComparison
from kmirror_dagster.verification.translated import MapsLookup, TranslatedAdmin, TranslatedReader

# Between two looks at a destination that is not there yet.
_POLL_S = 0.25
_GROUP_POLL_S = 1.0
# Partitions one consumer of each side reads at a time.
_WAVE = 500
# Newest records kept of all these partitions together, for telling repeated records from wrong ones.
_WINDOWS_BYTES = 128 * 1024 * 1024
# How often a partition whose log start moved while it was read is read again.
_ROUNDS = 3
_REACH_DEADLINE_S = 10.0


@dataclass(frozen=True)
class VerifyLimits:
    """How much is compared and how long is waited.

    Attributes:
        last_offsets: compare only so many offsets at the end of each partition; None for all of them.
        isolations: levels to compare at.
        groups: compare committed group offsets.
        settle_s: longest wait for the destination to reach what the source was when the comparison began.
        stall_s: longest time without a single record from either side.
        deadline_s: longest time for everything, None for no limit.
    """

    last_offsets: int | None = None
    isolations: tuple[Isolation, ...] = (Isolation.READ_UNCOMMITTED, Isolation.READ_COMMITTED)
    groups: bool = True
    settle_s: float = 60.0
    stall_s: float = 60.0
    deadline_s: float | None = None


@dataclass(frozen=True)
class VerifyProgress:
    """How far a comparison is: offsets done and in all (None while unknown), and what it is doing."""

    phase: str
    done: int = 0
    total: int | None = None


ProgressCallback = Callable[[VerifyProgress], None]


def compare_mirror(
    settings: MirrorSettings,
    topics: Sequence[str],
    *,
    group_topics: Sequence[str] | None = None,
    limits: VerifyLimits | None = None,
    progress: ProgressCallback | None = None,
    offset_maps: MapsLookup = dict,
) -> VerifyReport:
    """Compare topics of a mirror at source and destination.

    The source's ends are taken first; the destination then gets time to reach them, and what both hold is
    compared. So a source that is written to is compared as it was at the beginning.

    Args:
        settings: the mirror, its secrets resolved.
        topics: topics to compare, all their partitions.
        group_topics: topics whose committed group offsets are compared; None for `topics`.
        limits: how much and how long.
        progress: told about every step, at least a few times a second while records are read.
        offset_maps: looks up the maps of partitions whose offsets are translated; differences have the destination's.

    Raises:
        ClusterUnreachableError, AuthenticationError: when a cluster cannot be read.
        SameClusterError: when both are one cluster.
        DeadlineError: when it did not end in time, or no record came for `stall_s`.
    """
    comparison = _MirrorComparison(
        settings, limits or VerifyLimits(), progress or (lambda _: None), offset_maps
    )
    with ExitStack() as stack:
        comparison.open(stack)
        return comparison.run(topics, topics if group_topics is None else group_topics)


class _MirrorComparison:
    """One run of `compare_mirror`."""

    def __init__(
        self,
        settings: MirrorSettings,
        limits: VerifyLimits,
        progress: ProgressCallback,
        offset_maps: MapsLookup,
    ) -> None:
        self._offset_maps = offset_maps
        self._settings = settings
        self._limits = limits
        self._progress = progress
        self._started = time.monotonic()
        self._deadline = None if limits.deadline_s is None else self._started + limits.deadline_s
        self._found = DifferenceLog()
        self._source = TranslatedAdmin(settings.source, offset_maps)
        self._destination = ClusterAdmin(settings.destination)
        self._done = 0
        self._total = 0
        self._counts = _Counts()

    def open(self, stack: ExitStack) -> None:
        """Make sure that both clusters answer and are two."""
        stack.callback(self._source.close)
        stack.callback(self._destination.close)
        self._tell("reaching both clusters")
        source_id = check_reachable(self._settings.source, _REACH_DEADLINE_S, role="source")
        destination_id = check_reachable(self._settings.destination, _REACH_DEADLINE_S, role="destination")
        if source_id == destination_id:
            raise SameClusterError(f"source and destination are the same cluster ({source_id})")

    def run(self, topics: Sequence[str], group_topics: Sequence[str]) -> VerifyReport:
        partitions = self._partitions(topics)
        source, destination, waited_s = self._settle(partitions)
        compared = sorted(source.keys() & destination.keys())
        for partition in compared:
            for difference in range_differences(
                partition, source[partition], destination[partition], waited_s
            ):
                self._found.add(difference)
        self._check_beyond_source(destination)
        records = self._compare_records(compared, source, destination)
        groups = GroupFindings()
        if self._limits.groups:
            groups = self._compare_groups([p for p in compared if p[0] in set(group_topics)])
        return VerifyReport(
            mirror=self._settings.mirror,
            partitions=len(compared),
            records=records,
            groups=groups.compared,
            groups_skipped=groups.skipped,
            differences_total=self._found.total,
            differences_by_kind=dict(self._found.by_kind),
            differences=self._found.listed,
            duplicates=self._counts.duplicates,
            superseded=self._counts.superseded,
            timestamp_types=self._counts.timestamp_types,
            unreadable_headers=self._counts.unreadable_headers,
            duration_s=round(time.monotonic() - self._started, 3),
        )

    def _tell(self, phase: str) -> None:
        self._progress(VerifyProgress(phase, self._done, self._total or None))

    def _partitions(self, topics: Sequence[str]) -> list[Partition]:
        """Partitions that exist on both sides; those that do not are differences."""
        source, destination = self._source.topics(topics), self._destination.topics(topics)
        found: list[Partition] = []
        for topic in sorted(set(topics)):
            if topic not in source.values:
                self._add_range(topic, -1, f"cannot be read at the source: {source.errors.get(topic)}")
                continue
            if topic not in destination.values:
                reason = destination.errors.get(topic)
                self._add_range(topic, -1, f"cannot be read at the destination: {reason}")
                continue
            here, there = source.values[topic].partitions, destination.values[topic].partitions
            found += [(topic, number) for number in range(min(here, there))]
            if here != there:
                self._add_range(topic, -1, f"source has {here} partitions, destination {there}")
        return found

    def _settle(
        self, partitions: Sequence[Partition]
    ) -> tuple[dict[Partition, LogEnds], dict[Partition, LogEnds], float]:
        """Ends of the source, then those of the destination once it has reached them; seconds that took.

        The starts of the source are looked up again with those of the destination: retention goes on.
        """
        first = self._ends(self._source, partitions, "source")
        destination: dict[Partition, LogEnds] = {}
        source = dict(first)
        began = time.monotonic()
        waiting = set(first)
        while True:
            destination.update(self._ends(self._destination, sorted(waiting), "destination"))
            for key, ends in self._ends(self._source, sorted(waiting), "source").items():
                source[key] = LogEnds(ends.start, first[key].end, first[key].stable_end)
            waiting = {k for k in waiting & destination.keys() if not is_settled(source[k], destination[k])}
            waited_s = time.monotonic() - began
            if not waiting or waited_s > self._limits.settle_s:
                return source, destination, waited_s
            self._check_deadline(f"{len(waiting)} partitions of the destination are behind the source")
            self._tell(f"waiting for {len(waiting)} partitions of the destination to catch up")
            time.sleep(_POLL_S)

    def _ends(
        self, admin: ClusterAdmin, partitions: Sequence[Partition], side: str
    ) -> dict[Partition, LogEnds]:
        found, errors = read_ends(admin, partitions)
        for error in errors.values():
            raise KmirrorError(f"ends of the {side}'s logs cannot be looked up: {error}") from error
        return found

    def _check_beyond_source(self, destination: Mapping[Partition, LogEnds]) -> None:
        now = self._ends(self._source, sorted(destination), "source")
        for partition, ends in destination.items():
            for difference in beyond_source(partition, now[partition], ends):
                self._found.add(difference)

    def _compare_records(
        self,
        partitions: Sequence[Partition],
        source: Mapping[Partition, LogEnds],
        destination: Mapping[Partition, LogEnds],
    ) -> dict[Isolation, int]:
        compaction = compactions_of(self._source, self._destination, {topic for topic, _ in partitions})
        plans = {
            isolation: {
                key: compared_range(
                    key,
                    source[key],
                    destination[key],
                    isolation,
                    last_offsets=self._limits.last_offsets,
                )
                for key in partitions
            }
            for isolation in self._limits.isolations
        }
        self._total = sum(r.end - r.start for plan in plans.values() for r in plan.values())
        records: dict[Isolation, int] = {}
        for isolation, plan in plans.items():
            records[isolation] = 0
            for wave in waves(plan, _WAVE):
                finished = self._compare_wave(wave, isolation, compaction)
                records[isolation] += sum(pair.compared for pair in finished.values())
        return records

    def _compare_wave(
        self,
        ranges: Mapping[Partition, LogRange],
        isolation: Isolation,
        compaction: Mapping[str, Compaction],
    ) -> dict[Partition, PartitionComparison]:
        """Compare some partitions; those whose log start moved meanwhile are compared again from there."""
        finished: dict[Partition, PartitionComparison] = {}
        logs: dict[Partition, DifferenceLog] = {}
        left = dict(ranges)
        for _ in range(_ROUNDS):
            found = {key: DifferenceLog() for key in left}
            finished.update(self._read(left, isolation, compaction, found))
            logs.update(found)
            left = self._moved({key: left[key] for key, log in found.items() if log.total})
            if not left:
                break
        for key in sorted(finished):
            self._found.merge(logs[key])
            self._counts.add(finished[key])
        return finished

    def _read(
        self,
        ranges: Mapping[Partition, LogRange],
        isolation: Isolation,
        compaction: Mapping[str, Compaction],
        found: Mapping[Partition, DifferenceLog],
    ) -> dict[Partition, PartitionComparison]:
        pairs = {
            key: PartitionComparison(
                *key,
                isolation=isolation,
                differences=found[key],
                compaction=compaction.get(key[0]),
                window_bytes=min(DUPLICATE_WINDOW_BYTES, _WINDOWS_BYTES // len(ranges)),
            )
            for key in ranges
        }

        def note(compared: int) -> None:
            self._done += compared
            self._tell(f"comparing records, {isolation}")

        with (
            closing(
                TranslatedReader(
                    self._settings.source,
                    ranges.values(),
                    isolation=isolation.value,
                    maps=self._offset_maps(),
                )
            ) as source,
            closing(
                RangeReader(self._settings.destination, ranges.values(), isolation=isolation.value)
            ) as destination,
        ):
            Lockstep((source, destination), pairs, stall_s=self._limits.stall_s, deadline=self._deadline).run(
                note
            )
            self._counts.unreadable_headers += max(source.unreadable_headers, destination.unreadable_headers)
        return pairs

    def _moved(self, ranges: Mapping[Partition, LogRange]) -> dict[Partition, LogRange]:
        """Those of the ranges whose beginning is gone by now on a side, without what is gone."""
        if not ranges:
            return {}
        starts = [
            self._ends(admin, sorted(ranges), "clusters") for admin in (self._source, self._destination)
        ]
        moved: dict[Partition, LogRange] = {}
        for key, wanted in ranges.items():
            start = max(ends[key].start for ends in starts)
            if start > wanted.start:
                moved[key] = LogRange(*key, min(start, wanted.end), wanted.end)
        return moved

    def _compare_groups(self, partitions: Sequence[Partition]) -> GroupFindings:
        end = time.monotonic() + self._limits.settle_s

        def go_on() -> bool:
            self._tell("waiting for committed group offsets")
            if time.monotonic() >= end or (self._deadline is not None and time.monotonic() >= self._deadline):
                return False
            time.sleep(_GROUP_POLL_S)
            return True

        self._tell("comparing committed group offsets")
        findings = compare_groups(
            self._source,
            self._destination,
            selects=self._settings.filters.selects_group,
            partitions=partitions,
            ends=lambda: self._ends(self._destination, partitions, "destination"),
            go_on=go_on,
        )
        for difference in findings.differences:
            self._found.add(difference)
        return findings

    def _check_deadline(self, what: str) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise DeadlineError(f"comparison did not end within {self._limits.deadline_s:g} s: {what}")

    def _add_range(self, topic: str, partition: int, detail: str) -> None:
        self._found.add(
            Difference(kind=DifferenceKind.OFFSET_RANGE, topic=topic, partition=partition, detail=detail)
        )


@dataclass
class _Counts:
    duplicates: int = 0
    superseded: int = 0
    timestamp_types: int = 0
    unreadable_headers: int = 0

    def add(self, finished: PartitionComparison) -> None:
        self.duplicates += finished.duplicates
        self.superseded += finished.superseded
        self.timestamp_types += finished.timestamp_types
