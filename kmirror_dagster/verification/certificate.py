"""Certificates: up to which offset each partition was found to be the same on both sides. Pure, and a file.

A certificate grows: what is verified once is not read again, unless somebody asks for it.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field

from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.broker.log_records import LogRange
from kmirror_dagster.errors import UsageError
from kmirror_dagster.files import lock_file, write_text
from kmirror_dagster.verification.digests import Digest
from kmirror_dagster.verification.ranges import LogEnds
from kmirror_dagster.verification.report import Difference, DifferenceLog, Isolation

# Ranges that differ are kept for each partition up to this many; a partition that has more is beyond lists.
MAX_DIFFERING = 100
_EXAMPLES = 5


class DifferingRange(BaseModel):
    """Offsets [first, end) whose records are not the same on both sides.

    Attributes:
        first: offset of the first record that differs.
        differences: how many there are, at all levels together.
        examples: the first ones in words: lengths and hashes, never contents.
    """

    model_config = ConfigDict(frozen=True)

    first: int
    end: int
    differences: int
    examples: list[str] = Field(default_factory=list)


class PartitionCertificate(BaseModel):
    """What is known of one partition.

    Attributes:
        source_topic_id, destination_topic_id: of the topics that were read; another one begins a new certificate.
        verified_from: first offset that was compared; below it there was nothing to read on one side.
        checked_to: everything below it was read, whether it was the same or not.
        digests: of all records read at each level, as `verification.digests` makes them. The source's; that of
            the destination is the same while nothing differs and `explained` is 0.
        records: records read at each level.
        explained: ranges whose digests differ only because one side's cleaner was ahead.
        skipped_offsets: deleted by retention before they were read.
        differing: ranges that are not the same, lowest first, at most 100.
        problem: what is wrong besides the contents; None when nothing is.
        source_start, source_end, destination_end: at the last look (ends as of decided transactions).
        checked_ms: time of the last look, epoch milliseconds.
    """

    model_config = ConfigDict(frozen=True)

    topic: str
    partition: int
    source_topic_id: str | None = None
    destination_topic_id: str | None = None
    verified_from: int = 0
    checked_to: int = 0
    digests: dict[Isolation, str] = Field(default_factory=dict)
    records: dict[Isolation, int] = Field(default_factory=dict)
    explained: int = 0
    skipped_offsets: int = 0
    differing: list[DifferingRange] = Field(default_factory=list[DifferingRange])
    problem: str | None = None
    source_start: int = 0
    source_end: int = 0
    destination_end: int = 0
    checked_ms: int = 0

    @property
    def key(self) -> Partition:
        """Topic and partition."""
        return (self.topic, self.partition)

    @computed_field
    @property
    def verified_to(self) -> int:
        """Every record from `verified_from` to here (exclusive) is the same on both sides."""
        return min([self.checked_to, *(each.first for each in self.differing)])

    @property
    def ok(self) -> bool:
        """Whether nothing was found to differ."""
        return not self.differing and self.problem is None

    @property
    def unchecked(self) -> int:
        """Offsets that both sides held at the last look and that were not read yet."""
        return max(0, min(self.source_end, self.destination_end) - self.checked_to)

    def digest(self, isolation: Isolation) -> Digest:
        """Digest of what was read at a level so far."""
        return Digest.from_hex(self.digests.get(isolation, "0"), self.records.get(isolation, 0))


class Certificate(BaseModel):
    """What is known of a mirror's contents.

    Attributes:
        isolations: levels that were read.
        began_ms, checked_ms: when it was begun, and when it was last gone on with; epoch milliseconds.
        partitions: by topic and number.
        problems: topics that could not be read, with the reasons.
    """

    model_config = ConfigDict(frozen=True)

    mirror: str
    source_cluster_id: str
    destination_cluster_id: str
    isolations: list[Isolation]
    began_ms: int
    checked_ms: int
    partitions: list[PartitionCertificate] = Field(default_factory=list[PartitionCertificate])
    problems: dict[str, str] = Field(default_factory=dict)

    @computed_field
    @property
    def ok(self) -> bool:
        """Whether nothing was found to differ."""
        return not self.problems and all(each.ok for each in self.partitions)

    @property
    def records(self) -> int:
        """Records read at the level that shows most."""
        return sum(max(each.records.values(), default=0) for each in self.partitions)

    @property
    def unchecked(self) -> int:
        """Offsets that both sides hold and that were not read yet."""
        return sum(each.unchecked for each in self.partitions)

    @property
    def faults(self) -> list[PartitionCertificate]:
        """Partitions that are not the same on both sides."""
        return [each for each in self.partitions if not each.ok]

    def by_key(self) -> dict[Partition, PartitionCertificate]:
        """Partitions by topic and number."""
        return {each.key: each for each in self.partitions}


class WindowOutcome(BaseModel):
    """What reading one range on both sides said; one entry for each level.

    Attributes:
        source: digests of the source's records.
        equal: whether the destination's is the same one.
        differences: found where it is not, by comparing record by record; none of them: a cleaner explains it.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    source: Mapping[Isolation, Digest]
    equal: Mapping[Isolation, bool]
    differences: Mapping[Isolation, DifferenceLog] = Field(default_factory=dict[Isolation, DifferenceLog])


def begun(
    known: PartitionCertificate | None,
    key: Partition,
    topic_ids: tuple[str | None, str | None],
) -> PartitionCertificate:
    """The certificate to go on with: the known one, or a new one when a topic was made anew."""
    if known is not None and (known.source_topic_id, known.destination_topic_id) == topic_ids:
        return known
    return PartitionCertificate(
        topic=key[0],
        partition=key[1],
        source_topic_id=topic_ids[0],
        destination_topic_id=topic_ids[1],
    )


def looked_at(
    known: PartitionCertificate, source: LogEnds, destination: LogEnds, *, now_ms: int
) -> PartitionCertificate:
    """Take in where the logs begin and end now."""
    problem = None
    for side, ends in (("source", source), ("destination", destination)):
        if ends.end < known.checked_to:
            problem = (
                f"the {side} ends at {ends.end} and was read to {known.checked_to} before: its tail is gone"
            )
    return known.model_copy(
        update={
            "problem": problem,
            "source_start": source.start,
            "source_end": source.stable_end,
            "destination_end": destination.stable_end,
            "checked_ms": now_ms,
        }
    )


def next_window(
    known: PartitionCertificate,
    source: LogEnds,
    destination: LogEnds,
    *,
    limit: int,
    ceiling: int | None = None,
) -> LogRange:
    """Offsets to read next: what both sides hold of decided transactions; empty when there is nothing new.

    Args:
        known: what was read so far.
        source, destination: ends of both logs.
        limit: most offsets.
        ceiling: nothing at or above it is a copy (a stopped mirror's last position).
    """
    end = min(source.stable_end, destination.stable_end)
    if ceiling is not None:
        end = min(end, ceiling)
    start = max(known.checked_to, source.start, destination.start)
    return LogRange(*known.key, start, max(start, min(end, start + limit)))


def extended(known: PartitionCertificate, window: LogRange, outcome: WindowOutcome) -> PartitionCertificate:
    """Take in what reading a window said."""
    is_first = not known.records
    differing = list(known.differing)
    found = _differing(window, outcome.differences)
    if found is not None and len(differing) < MAX_DIFFERING:
        differing.append(found)
    is_explained = found is None and not all(outcome.equal.values())
    sums = {level: known.digest(level) + digest for level, digest in outcome.source.items()}
    return known.model_copy(
        update={
            "verified_from": window.start if is_first else known.verified_from,
            "checked_to": window.end,
            "skipped_offsets": known.skipped_offsets + (0 if is_first else window.start - known.checked_to),
            "digests": {level: digest.hex for level, digest in sums.items()},
            "records": {level: digest.records for level, digest in sums.items()},
            "explained": known.explained + is_explained,
            "differing": differing,
        }
    )


def _differing(window: LogRange, differences: Mapping[Isolation, DifferenceLog]) -> DifferingRange | None:
    total = sum(log.total for log in differences.values())
    if not total:
        return None
    listed = [difference for log in differences.values() for difference in log.listed]
    first = min((each.offset for each in listed if each.offset is not None), default=window.start)
    return DifferingRange(
        first=first,
        end=window.end,
        differences=total,
        examples=[in_words(each) for each in listed[:_EXAMPLES]],
    )


def in_words(difference: Difference) -> str:
    """One difference as text."""
    where = "" if difference.offset is None else f" at offset {difference.offset}"
    return f"{difference.kind}{where} ({difference.isolation}): {difference.detail}"


def merged(
    certificate: Certificate, partitions: Sequence[PartitionCertificate], *, now_ms: int
) -> Certificate:
    """A certificate with newer partitions in place of those of the same name."""
    known = certificate.by_key()
    known.update({each.key: each for each in partitions})
    return certificate.model_copy(
        update={"partitions": [known[key] for key in sorted(known)], "checked_ms": now_ms}
    )


class CertificateStore:
    """The file a certificate is kept in; written anew after every step, complete or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> Certificate | None:
        """The certificate so far; None when there is none.

        Raises:
            UsageError: when the file cannot be read.
        """
        try:
            return Certificate.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"certificate {self.path} cannot be read ({reason}): move it away to begin anew"
            ) from error

    def save(self, certificate: Certificate) -> None:
        """Replace the file."""
        write_text(self.path, certificate.model_dump_json(indent=1) + "\n")

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes of this machine from going on with the same certificate meanwhile.

        Raises:
            UsageError: on entering, when somebody else does already.
        """
        lock = self.path.with_name(f".{self.path.name}.lock")
        return lock_file(lock, f"another process goes on with certificate {self.path}")
