"""Loss manifest: what a failover has left behind at the source, partition by partition."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import TopicDescription
from kmirror_dagster.broker.clients import check_reachable
from kmirror_dagster.broker.log_records import TIMESTAMP, LogRecord
from kmirror_dagster.errors import KmirrorError, UsageError
from kmirror_dagster.recovery.positions import LastPosition, same_topic_id
from kmirror_dagster.recovery.tails import record_bytes, tail_range
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.range_reads import ProgressCallback, ReadLimits, read_ranges
from kmirror_dagster.verification.ranges import LogEnds, read_ends
from kmirror_dagster.verification.report import Isolation

_REACH_DEADLINE_S = 10.0


class PartitionLoss(BaseModel):
    """What one source partition holds that was never mirrored. Offsets are the source's.

    Attributes:
        first_offset: the last mirror position; everything below it is at the destination.
        end_offset: log end of the source; equal to `first_offset`: nothing is missing.
        records: readable records in between (of committed transactions and outside of any).
        size_bytes: of their keys, values and headers.
        first_timestamp_ms, last_timestamp_ms: earliest and latest timestamp among them; None without records.
        deleted_offsets: offsets in between that the source itself has deleted since (retention).
        undecided_offsets: offsets behind the source's last stable offset: of transactions still open there.
        problem: why the figures do not tell everything; None when they do.
    """

    model_config = ConfigDict(frozen=True)

    topic: str
    partition: int
    first_offset: int
    end_offset: int
    records: int = 0
    size_bytes: int = 0
    first_timestamp_ms: int | None = None
    last_timestamp_ms: int | None = None
    deleted_offsets: int = 0
    undecided_offsets: int = 0
    problem: str | None = None

    @property
    def offsets(self) -> int:
        """Offsets that the destination lacks."""
        return max(0, self.end_offset - self.first_offset)


class LossManifest(BaseModel):
    """What a failover of a mirror has cost.

    Attributes:
        made_ms: when the source was read, epoch milliseconds.
        stopped_ms: when the last of the partitions was stopped.
        records, size_bytes: of all partitions.
        first_timestamp_ms, last_timestamp_ms: span of all of them.
        partitions: every stopped partition, also those that lack nothing.
        not_stopped: topics left out because they are not stopped.
    """

    model_config = ConfigDict(frozen=True)

    mirror: str
    source_cluster_id: str
    made_ms: int
    stopped_ms: int
    records: int
    size_bytes: int
    first_timestamp_ms: int | None = None
    last_timestamp_ms: int | None = None
    partitions: list[PartitionLoss] = Field(default_factory=list[PartitionLoss])
    not_stopped: list[str] = Field(default_factory=list)

    @property
    def losses(self) -> list[PartitionLoss]:
        """Partitions of which the destination lacks offsets."""
        return [loss for loss in self.partitions if loss.offsets]

    @property
    def problems(self) -> list[PartitionLoss]:
        """Partitions whose figures do not tell everything."""
        return [loss for loss in self.partitions if loss.problem is not None]


@dataclass
class _Tally:
    """Readable records of one tail."""

    records: int = 0
    size_bytes: int = 0
    first_ms: int | None = None
    last_ms: int | None = None

    def add(self, records: Sequence[LogRecord]) -> None:
        if not records:
            return
        self.records += len(records)
        self.size_bytes += sum(map(record_bytes, records))
        times = [record[TIMESTAMP] for record in records if record[TIMESTAMP] >= 0]
        if times:
            self.first_ms = min(times) if self.first_ms is None else min(self.first_ms, *times)
            self.last_ms = max(times) if self.last_ms is None else max(self.last_ms, *times)


def build_manifest(
    mirror: str,
    source: ClusterSettings,
    positions: Sequence[LastPosition],
    *,
    source_cluster_id: str,
    not_stopped: Sequence[str] = (),
    limits: ReadLimits | None = None,
    progress: ProgressCallback = lambda _phase, _done, _total: None,
) -> LossManifest:
    """Read the source behind the last mirror positions; nothing is written anywhere.

    The source's log ends are taken once, at the beginning: what is written to it later is not in the manifest.

    Args:
        mirror: name of the mirror.
        source: cluster it copied from.
        positions: of its stopped partitions.
        source_cluster_id: id of the cluster the mirror was made for.
        not_stopped: topics left out, for the report.
        limits: of time.
        progress: told phase, offsets done and offsets in all.

    Raises:
        UsageError: when the source is another cluster now.
        ClusterUnreachableError, AuthenticationError: when it cannot be reached yet.
        DeadlineError: when reading it does not get on.
    """
    check_source(mirror, source, source_cluster_id)
    with closing(ClusterAdmin(source)) as admin:
        topics = admin.topics({position.topic for position in positions})
        problems = {p.key: _topic_problem(p, topics.values, topics.errors) for p in positions}
        readable = [key for key, problem in problems.items() if problem is None]
        ends, errors = read_ends(admin, readable)
    problems.update({key: f"log ends cannot be looked up: {error}" for key, error in errors.items()})
    tallies = {key: _Tally() for key in ends}
    wanted = {
        p.key: tail_range(p.key, p.at_source, ends[p.key], Isolation.READ_COMMITTED)
        for p in positions
        if p.key in ends
    }
    chunks = read_ranges(
        source,
        wanted,
        isolation=Isolation.READ_COMMITTED,
        limits=limits or ReadLimits(),
        progress=progress,
    )
    for chunk in chunks:
        tallies[chunk.topic, chunk.partition].add(chunk.records)
    losses = [
        _loss(position, ends.get(position.key), tallies.get(position.key), problems[position.key])
        for position in sorted(positions, key=lambda p: p.key)
    ]
    return LossManifest(
        mirror=mirror,
        source_cluster_id=source_cluster_id,
        made_ms=time.time_ns() // 1_000_000,
        stopped_ms=max((p.recorded_ms for p in positions), default=0),
        records=sum(loss.records for loss in losses),
        size_bytes=sum(loss.size_bytes for loss in losses),
        first_timestamp_ms=min(
            (t for loss in losses if (t := loss.first_timestamp_ms) is not None), default=None
        ),
        last_timestamp_ms=max(
            (t for loss in losses if (t := loss.last_timestamp_ms) is not None), default=None
        ),
        partitions=losses,
        not_stopped=sorted(not_stopped),
    )


def check_source(mirror: str, source: ClusterSettings, expected_id: str) -> None:
    """Make sure that the source can be reached and is the one the mirror was made for.

    Raises:
        UsageError: when it is another cluster now.
        ClusterUnreachableError, AuthenticationError: when it cannot be reached.
    """
    found = check_reachable(source, _REACH_DEADLINE_S, role="source")
    if expected_id and found != expected_id:
        raise UsageError(
            f"mirror {mirror!r}: the source at {source.address} is cluster {found} now, it was {expected_id}: "
            "its offsets have nothing to do with what was mirrored"
        )


def _topic_problem(
    position: LastPosition,
    topics: Mapping[str, TopicDescription],
    errors: Mapping[str, KmirrorError],
) -> str | None:
    topic = topics.get(position.topic)
    if topic is None:
        return f"the topic cannot be read at the source: {errors.get(position.topic, 'it is gone')}"
    if not same_topic_id(position.source_topic_id, topic.topic_id):
        return "the topic was deleted and created again at the source: what the former one held is gone"
    if position.partition >= topic.partitions:
        return "the source has no such partition any more"
    return None


def _loss(
    position: LastPosition, ends: LogEnds | None, tally: _Tally | None, problem: str | None
) -> PartitionLoss:
    first = position.at_source
    if ends is None or tally is None:
        return PartitionLoss(
            topic=position.topic,
            partition=position.partition,
            first_offset=first,
            end_offset=first,
            problem=problem or "unknown",
        )
    deleted = max(0, min(ends.start, ends.end) - first)
    undecided = max(0, ends.end - max(ends.stable_end, first))
    if ends.end < first:
        problem = f"the source ends at {ends.end}, below the last mirror position: it lost its own tail"
    elif deleted:
        problem = f"{deleted} offsets were deleted at the source before they could be counted"
    elif undecided:
        problem = f"{undecided} offsets belong to transactions that are still open at the source"
    return PartitionLoss(
        topic=position.topic,
        partition=position.partition,
        first_offset=first,
        end_offset=ends.end,
        records=tally.records,
        size_bytes=tally.size_bytes,
        first_timestamp_ms=tally.first_ms,
        last_timestamp_ms=tally.last_ms,
        deleted_offsets=deleted,
        undecided_offsets=undecided,
        problem=problem,
    )
