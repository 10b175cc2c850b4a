"""Consistent cut: one source time to which a set of failed-over topics is complete, and where it is in each log.

The common time T is the greatest one such that every readable record of these topics with a timestamp of at most T is
at the destination: one millisecond before the earliest record that was never mirrored. A partition's cut is the first
offset at the destination whose record is later than T; below it nothing is later. What the destination holds behind
its cut came from partitions that were further: a log's tail cannot be cut through Kafka's API, so it is listed, and
can be saved to files, for readers that need one state across topics.

An earlier time may be chosen, a later one not: records are missing there.
"""

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, computed_field

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.errors import KmirrorError, UsageError
from kmirror_dagster.files import write_text
from kmirror_dagster.recovery.exports import PARQUET_SUFFIX, write_parquet
from kmirror_dagster.recovery.formats import QuarantineFormat
from kmirror_dagster.recovery.manifest import LossManifest
from kmirror_dagster.recovery.quarantine import Quarantine, SavedTail
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.ranges import LogEnds


class PartitionCut(BaseModel):
    """Where the cut is in one log of the destination.

    Attributes:
        offset: everything below it is of the cut's time or earlier.
        mirrored_to: last mirror position.
    """

    model_config = ConfigDict(frozen=True)

    topic: str
    partition: int
    offset: int
    mirrored_to: int

    @property
    def key(self) -> Partition:
        """Topic and partition."""
        return (self.topic, self.partition)

    @computed_field
    @property
    def surplus(self) -> int:
        """Offsets that the destination holds behind the cut."""
        return max(0, self.mirrored_to - self.offset)


class ConsistentCut(BaseModel):
    """A cut through all logs of a mirror at one source time.

    Attributes:
        at_ms: the time, epoch milliseconds.
        latest_ms: the latest time the topics are complete to; None: nothing is missing.
        partitions: by topic and number.
    """

    model_config = ConfigDict(frozen=True)

    mirror: str
    at_ms: int
    latest_ms: int | None
    partitions: list[PartitionCut] = Field(default_factory=list[PartitionCut])

    @computed_field
    @property
    def surplus(self) -> int:
        """Offsets behind the cut in all logs."""
        return sum(each.surplus for each in self.partitions)


def common_time(manifest: LossManifest) -> int | None:
    """Latest time to which all topics of a manifest are complete; None when nothing is missing. Pure.

    Raises:
        UsageError: when it is not known what is missing.
    """
    if manifest.problems:
        first = manifest.problems[0]
        raise UsageError(
            f"{manifest.mirror}: no common time can be told, {first.topic}/{first.partition}: {first.problem}"
        )
    if manifest.records and manifest.first_timestamp_ms is None:
        raise UsageError(f"{manifest.mirror}: no common time can be told: what is missing has no timestamps")
    if not manifest.records or manifest.first_timestamp_ms is None:
        return None
    return manifest.first_timestamp_ms - 1


def chosen_time(latest_ms: int | None, wanted_ms: int | None, *, stopped_ms: int) -> int:
    """The time to cut at: the latest one, or an earlier one that is asked for. Pure.

    Args:
        latest_ms: what `common_time` says.
        wanted_ms: time asked for; None for the latest.
        stopped_ms: when mirroring ended; the latest time where nothing is missing.

    Raises:
        UsageError: when records of that time are missing.
    """
    latest = stopped_ms if latest_ms is None else latest_ms
    if wanted_ms is None:
        return latest
    if wanted_ms > latest:
        raise UsageError(
            f"records are missing from {latest + 1} ms on: the latest common time is {latest} (epoch "
            f"milliseconds), {wanted_ms} was asked for"
        )
    return wanted_ms


def cut_at(
    manifest: LossManifest, at_ms: int, latest_ms: int | None, later: Mapping[Partition, int]
) -> ConsistentCut:
    """Put a cut together. Pure.

    Args:
        manifest: of the failover.
        at_ms: time of the cut.
        latest_ms: what `common_time` says.
        later: first offset of the destination whose record is later than that; -1 where there is none.
    """
    cuts = [
        PartitionCut(
            topic=loss.topic,
            partition=loss.partition,
            offset=_within(later[loss.topic, loss.partition], loss.first_offset),
            mirrored_to=loss.first_offset,
        )
        for loss in manifest.partitions
    ]
    return ConsistentCut(mirror=manifest.mirror, at_ms=at_ms, latest_ms=latest_ms, partitions=cuts)


def _within(offset: int, mirrored_to: int) -> int:
    """What was written after the failover is none of the cut."""
    return mirrored_to if offset < 0 else min(offset, mirrored_to)


def find_cut(
    destination: ClusterSettings, manifest: LossManifest, *, wanted_ms: int | None = None
) -> ConsistentCut:
    """Look the cut up at the destination; nothing is written there.

    Raises:
        UsageError: when no time can be told, or records of the one asked for are missing.
        KmirrorError: when the destination cannot be asked.
    """
    latest = common_time(manifest)
    stopped_ms = manifest.stopped_ms or time.time_ns() // 1_000_000
    at_ms = chosen_time(latest, wanted_ms, stopped_ms=stopped_ms)
    keys = [(loss.topic, loss.partition) for loss in manifest.partitions]
    with closing(ClusterAdmin(destination)) as admin:
        answers = admin.list_offsets(keys, at_ms + 1)
    for error in answers.errors.values():
        raise KmirrorError(f"offsets at a time cannot be looked up at the destination: {error}") from error
    return cut_at(manifest, at_ms, latest, {key: found.offset for key, found in answers.values.items()})


def save_surplus(
    destination: ClusterSettings, cut: ConsistentCut, directory: Path, kept_as: QuarantineFormat
) -> list[SavedTail]:
    """Write what is behind the cut to files, one for each partition; it stays at the destination as well.

    Raises:
        UsageError: when the directory cannot be written to.
        KmirrorError: when the destination cannot be read.
    """
    tails = {
        each.key: (each.offset, LogEnds(0, each.mirrored_to, each.mirrored_to))
        for each in cut.partitions
        if each.surplus
    }
    return Quarantine(directory, kept_as).save(destination, tails) if tails else []


CUT_COLUMNS: dict[str, str] = {
    "mirror": "string",
    "at_ms": "int64",
    "topic": "string",
    "partition": "int32",
    "offset": "int64",
    "mirrored_to": "int64",
    "surplus": "int64",
}


def export_cut(cut: ConsistentCut, path: Path) -> None:
    """Write a cut: `*.parquet` with one row a partition, anything else as JSON.

    Raises:
        UsageError: when the file cannot be written, or Parquet is asked for without pyarrow.
    """
    if path.suffix == PARQUET_SUFFIX:
        rows = [
            {"mirror": cut.mirror, "at_ms": cut.at_ms, **each.model_dump(mode="json")}
            for each in cut.partitions
        ]
        write_parquet(rows, path, CUT_COLUMNS)
        return
    write_text(path, cut.model_dump_json(indent=2) + "\n")
