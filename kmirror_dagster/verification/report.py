"""What a comparison of both clusters found. Payloads never appear: only lengths and hashes do."""

from collections import Counter
from enum import Enum

from pydantic import BaseModel, ConfigDict, Field

MAX_LISTED_DIFFERENCES = 100


class Isolation(str, Enum):
    """Which records a reader sees: all of them, or those of committed transactions."""

    READ_UNCOMMITTED = "read_uncommitted"
    READ_COMMITTED = "read_committed"

    def __str__(self) -> str:
        return self.value


class DifferenceKind(str, Enum):
    """What differs.

    `missing`: readable at the source only; `extra`: readable at the destination only; `offset_range`: log
    start, log end or existence of a partition; `group_offset`: committed offset of a consumer group.
    """

    MISSING = "missing"
    EXTRA = "extra"
    KEY = "key"
    VALUE = "value"
    HEADERS = "headers"
    TIMESTAMP = "timestamp"
    OFFSET_RANGE = "offset_range"
    GROUP_OFFSET = "group_offset"

    def __str__(self) -> str:
        return self.value


class Difference(BaseModel):
    """One difference.

    Attributes:
        partition: -1 when the difference is about the whole topic.
        offset: offset of the record, None when the difference is not about one.
        isolation: level the difference was seen at, None when it does not depend on it.
        detail: both sides in lengths, hashes and numbers.
    """

    model_config = ConfigDict(frozen=True)

    kind: DifferenceKind
    topic: str
    partition: int
    offset: int | None = None
    isolation: Isolation | None = None
    detail: str


class VerifyReport(BaseModel):
    """Outcome of `compare_mirror`.

    Attributes:
        partitions: partitions compared.
        records: records compared per isolation level.
        groups: committed group offsets compared (one per group and partition).
        groups_skipped: group -> why its offsets are not expected to be equal.
        differences_total: differences at both isolation levels together; the first 100 of them are listed.
        differences_by_kind: how many of each kind there are.
        duplicates: destination records that repeat an earlier one where the source repeats nothing.
        superseded: records of compacted topics that only one side still has, while a newer one of the same
            key stands on both; two clusters do not clean at the same time, so these are no differences.
        timestamp_types: records whose timestamp type is LogAppendTime at the source and CreateTime at the
            destination with the same value; brokers refuse LogAppendTime from a client.
        unreadable_headers: records whose headers were not compared: a name in them is no UTF-8, and the client
            library gives none of them then.
        duration_s: seconds the comparison took.
    """

    model_config = ConfigDict(frozen=True)

    mirror: str
    partitions: int
    records: dict[Isolation, int]
    groups: int = 0
    groups_skipped: dict[str, str] = Field(default_factory=dict)
    differences_total: int = 0
    differences_by_kind: dict[DifferenceKind, int] = Field(default_factory=dict)
    differences: list[Difference] = Field(default_factory=list)
    duplicates: int = 0
    superseded: int = 0
    timestamp_types: int = 0
    unreadable_headers: int = 0
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether both sides are the same."""
        return self.differences_total == 0 and self.duplicates == 0


class DifferenceLog:
    """Counts differences and keeps the first ones."""

    def __init__(self, limit: int = MAX_LISTED_DIFFERENCES) -> None:
        self._limit = limit
        self.listed: list[Difference] = []
        self.by_kind: Counter[DifferenceKind] = Counter()

    @property
    def total(self) -> int:
        """Differences so far, listed or not."""
        return self.by_kind.total()

    @property
    def is_full(self) -> bool:
        """Whether further differences are only counted, so that nobody need describe them."""
        return len(self.listed) >= self._limit

    def add(self, difference: Difference) -> None:
        """Count one difference and list it while there is room."""
        self.by_kind[difference.kind] += 1
        if not self.is_full:
            self.listed.append(difference)

    def count(self, kind: DifferenceKind) -> None:
        """Count one difference without listing it."""
        self.by_kind[kind] += 1

    def merge(self, other: "DifferenceLog") -> None:
        """Take in what another log has counted, and list what there is room for."""
        self.by_kind.update(other.by_kind)
        self.listed += other.listed[: max(0, self._limit - len(self.listed))]
