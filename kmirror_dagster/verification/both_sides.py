"""Both clusters of a mirror while they are verified by digests."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.broker.clients import check_reachable
from kmirror_dagster.broker.log_records import LogRange
from kmirror_dagster.errors import KmirrorError, SameClusterError
from kmirror_dagster.settings import ClusterSettings, MirrorSettings
from kmirror_dagster.verification.certificate import WindowOutcome
from kmirror_dagster.verification.digests import Digest, digest_of
from kmirror_dagster.verification.range_comparison import compactions_of, compare_ranges
from kmirror_dagster.verification.range_reads import ProgressCallback, ReadLimits, read_ranges
from kmirror_dagster.verification.ranges import LogEnds, read_ends
from kmirror_dagster.verification.report import DifferenceLog, Isolation

BOTH_LEVELS = (Isolation.READ_UNCOMMITTED, Isolation.READ_COMMITTED)

_REACH_DEADLINE_S = 10.0


def _nobody(_phase: str, _done: int, _total: int) -> None:
    return


@dataclass(frozen=True)
class Look:
    """Both sides at one moment.

    Attributes:
        source, destination: log ends of the partitions that both have.
        topic_ids: of the topics at source and destination.
        problems: topics that are not the same set of partitions on both sides, or cannot be read.
    """

    source: Mapping[Partition, LogEnds]
    destination: Mapping[Partition, LogEnds]
    topic_ids: Mapping[str, tuple[str | None, str | None]]
    problems: Mapping[str, str]


class BothSides:
    """Both clusters of a mirror while they are verified; a context manager.

    Args:
        settings: the mirror, its secrets resolved.
        isolations: levels to read at.
        progress: told phase, offsets done and offsets in all.
        stall_s: longest time without a single record.

    Raises:
        ClusterUnreachableError, AuthenticationError: on entering, when a cluster cannot be reached.
        SameClusterError: when both are one.
    """

    def __init__(
        self,
        settings: MirrorSettings,
        *,
        isolations: Sequence[Isolation] = BOTH_LEVELS,
        progress: ProgressCallback = _nobody,
        stall_s: float = 60.0,
    ) -> None:
        self.settings = settings
        self.isolations = tuple(isolations)
        self.source_id = self.destination_id = ""
        self.unreadable_headers = 0
        self._progress = progress
        self._limits = ReadLimits(stall_s=stall_s)
        self._stack = ExitStack()
        self.source = ClusterAdmin(settings.source)
        self.destination = ClusterAdmin(settings.destination)

    def __enter__(self) -> "BothSides":
        self._stack.callback(self.source.close)
        self._stack.callback(self.destination.close)
        try:
            self.source_id = check_reachable(self.settings.source, _REACH_DEADLINE_S, role="source")
            self.destination_id = check_reachable(
                self.settings.destination, _REACH_DEADLINE_S, role="destination"
            )
            if self.source_id == self.destination_id:
                raise SameClusterError(f"source and destination are the same cluster ({self.source_id})")
        except KmirrorError:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def look(self, topics: Sequence[str]) -> Look:
        """Look at topics of both sides; ends of the destination first, so what it has beyond the source is wrong.

        Raises:
            KmirrorError: when log ends cannot be looked up.
        """
        here, there = self.source.topics(topics), self.destination.topics(topics)
        problems: dict[str, str] = {}
        partitions: list[Partition] = []
        ids: dict[str, tuple[str | None, str | None]] = {}
        for topic in sorted(set(topics)):
            for side, answers in (("source", here), ("destination", there)):
                if topic not in answers.values:
                    problems[topic] = (
                        f"cannot be read at the {side}: {answers.errors.get(topic, 'not there')}"
                    )
            if topic in problems:
                continue
            mine, theirs = here.values[topic], there.values[topic]
            ids[topic] = (mine.topic_id, theirs.topic_id)
            partitions += [(topic, number) for number in range(min(mine.partitions, theirs.partitions))]
            if mine.partitions != theirs.partitions:
                problems[topic] = f"source has {mine.partitions} partitions, destination {theirs.partitions}"
        destination = self._ends(self.destination, partitions)
        source = self._ends(self.source, partitions)
        return Look(source, destination, ids, problems)

    def _ends(self, admin: ClusterAdmin, partitions: Sequence[Partition]) -> dict[Partition, LogEnds]:
        found, errors = read_ends(admin, partitions)
        for error in errors.values():
            raise KmirrorError(f"log ends cannot be looked up: {error}") from error
        return found

    def check(self, windows: Mapping[Partition, LogRange]) -> dict[Partition, WindowOutcome]:
        """Read windows on both sides; those whose beginning is deleted meanwhile are left out of the answer."""
        sums = {
            level: (
                self._digests(self.settings.source, windows, level, "source"),
                self._digests(self.settings.destination, windows, level, "destination"),
            )
            for level in self.isolations
        }
        unequal = {
            key for source, destination in sums.values() for key in windows if source[key] != destination[key]
        }
        moved = self._moved({key: windows[key] for key in unequal})
        differences = self._differences({key: windows[key] for key in unequal - moved})
        return {
            key: WindowOutcome(
                source={level: source[key] for level, (source, _) in sums.items()},
                equal={level: source[key] == there[key] for level, (source, there) in sums.items()},
                differences=differences.get(key, {}),
            )
            for key in windows
            if key not in moved
        }

    def _digests(
        self,
        side: ClusterSettings,
        windows: Mapping[Partition, LogRange],
        isolation: Isolation,
        name: str,
    ) -> dict[Partition, Digest]:
        found = {key: Digest() for key in windows}
        for chunk in read_ranges(
            side,
            windows,
            isolation=isolation,
            limits=self._limits,
            progress=self._progress,
            unreadable=self._count_unreadable,
            phase=f"reading the {name}, {isolation}",
        ):
            key = (chunk.topic, chunk.partition)
            found[key] += digest_of(chunk.records)
        return found

    def _count_unreadable(self, records: int) -> None:
        self.unreadable_headers += records

    def _moved(self, windows: Mapping[Partition, LogRange]) -> set[Partition]:
        """Windows whose beginning is gone by now on one side."""
        if not windows:
            return set()
        sides = [self._ends(admin, sorted(windows)) for admin in (self.source, self.destination)]
        return {
            key for key, wanted in windows.items() if any(ends[key].start > wanted.start for ends in sides)
        }

    def _differences(
        self, windows: Mapping[Partition, LogRange]
    ) -> dict[Partition, dict[Isolation, DifferenceLog]]:
        if not windows:
            return {}
        compactions = compactions_of(self.source, self.destination, {topic for topic, _ in windows})
        found: dict[Partition, dict[Isolation, DifferenceLog]] = {key: {} for key in windows}
        for level in self.isolations:
            logs = compare_ranges(
                self.settings.source,
                self.settings.destination,
                windows,
                isolation=level,
                compactions=compactions,
            )
            for key, log in logs.items():
                found[key][level] = log
        return found
