"""Quarantine in a topic of the new source: each record as it was, with headers that say where it came from.

The topic's name begins with `__`, so that mirrors leave it out. Records are written in transactions by one producer
identity per failback, so a second writer is fenced, and a run that was interrupted goes on behind what is committed
already: nothing is in it twice.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import NewTopic, Partition
from kmirror_dagster.broker.clients import producer
from kmirror_dagster.broker.log_records import (
    HEADERS,
    KEY,
    OFFSET,
    TIMESTAMP,
    TIMESTAMP_TYPE,
    VALUE,
    LogRange,
    LogRecord,
)
from kmirror_dagster.errors import KmirrorError, UsageError
from kmirror_dagster.recovery.quarantine import SavedTail, tail_pieces
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.digests import Digest, digest_of
from kmirror_dagster.verification.range_reads import ProgressCallback, ReadLimits, read_ranges
from kmirror_dagster.verification.ranges import LogEnds, read_ends
from kmirror_dagster.verification.report import Isolation

TOPIC_PREFIX = "__kmirror_quarantine."

# what the headers of a quarantined record begin with
_OURS = "kmirror."
_FIELDS = ("failback", "topic", "partition", "offset", "timestamp", "timestamp-type", "committed")
_REPLICAS = 3
_MAX_NAME = 249
_CHUNK = 5_000
_TIMEOUT_S = 60.0
# added to the largest record of the source, for the headers
_HEADROOM_BYTES = 64 * 1024
_DEFAULT_MAX_BYTES = 1_048_588


def quarantine_topic(mirror: str) -> str:
    """Name of the topic of a mirror.

    Raises:
        UsageError: when the mirror's name is too long for it.
    """
    name = f"{TOPIC_PREFIX}{mirror}"
    if len(name) > _MAX_NAME:
        raise UsageError(f"mirror {mirror!r}: its name is too long for a quarantine topic: take files")
    return name


def wrapped(
    record: LogRecord, key: Partition, failback: str, *, committed: bool
) -> list[tuple[str, bytes | None]]:
    """Headers of a quarantined record: its own, then where it came from."""
    values: tuple[object, ...] = (
        failback,
        key[0],
        key[1],
        record[OFFSET],
        record[TIMESTAMP],
        record[TIMESTAMP_TYPE],
        "true" if committed else "false",
    )
    ours = [(_OURS + name, str(value).encode()) for name, value in zip(_FIELDS, values, strict=True)]
    return [*(record[HEADERS] or []), *ours]


def unwrapped(record: LogRecord) -> tuple[str, Partition, LogRecord] | None:
    """Failback, partition and the record as it was; None for one that is not of quarantine."""
    headers = record[HEADERS] or []
    own, ours = headers[: -len(_FIELDS)], headers[-len(_FIELDS) :]
    if [name for name, _ in ours] != [_OURS + name for name in _FIELDS]:
        return None
    failback, topic, partition, offset, timestamp, kind, _ = ((value or b"").decode() for _, value in ours)
    restored: LogRecord = (int(offset), int(kind), int(timestamp), record[KEY], record[VALUE], own or None)
    return failback, (topic, int(partition)), restored


class TopicQuarantine:
    """Tails of one failback in a topic.

    Args:
        cluster: the new source, whose topic it is.
        topic: made when missing, kept for ever.
        failback: id of the failback.
    """

    def __init__(self, cluster: ClusterSettings, topic: str, failback: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._failback = failback

    def save(
        self,
        source: ClusterSettings,
        tails: Mapping[Partition, tuple[int, LogEnds]],
        *,
        limits: ReadLimits | None = None,
        progress: ProgressCallback = lambda _phase, _done, _total: None,
    ) -> list[SavedTail]:
        """Save tails; as `recovery.quarantine.Quarantine.save`.

        Raises:
            KmirrorError: when the source cannot be read, or the topic not be written to; what is committed stays.
        """
        limit = self._make(source, {topic for topic, _ in tails})
        writer = _Writer(self._cluster, self._topic, self._failback, limit)
        present = self._present()  # after the writer has fenced any other one
        digests = {key: Digest() for key in tails}
        for key, records, committed in tail_pieces(source, tails, limits or ReadLimits(), progress):
            have = present.get(key, frozenset())
            writer.write([r for r in records if r[OFFSET] not in have], key, committed)
            digests[key] += digest_of(records)
        writer.end()
        return [
            SavedTail(
                topic=key[0],
                partition=key[1],
                first=max(first, ends.start),
                end=ends.end,
                records=digests[key].records,
                file=f"topic:{self._topic}",
                sha256=digests[key].hex,
            )
            for key, (first, ends) in sorted(tails.items())
        ]

    def check(self, tails: Sequence[SavedTail]) -> None:
        """Make sure that the topic holds what was saved.

        Raises:
            UsageError: when records are missing or have been changed.
        """
        found = self._read()
        for tail in tails:
            records = found.get((tail.topic, tail.partition), {})
            digest = digest_of(r for at, r in records.items() if tail.first <= at < tail.end)
            if (digest.hex, digest.records) != (tail.sha256, tail.records):
                raise UsageError(
                    f"topic {self._topic} does not hold the {tail.records} quarantined records of "
                    f"{tail.topic}/{tail.partition} as they were saved: it has {digest.records}"
                )

    def _present(self) -> dict[Partition, frozenset[int]]:
        return {key: frozenset(records) for key, records in self._read().items()}

    def _read(self) -> dict[Partition, dict[int, LogRecord]]:
        """Committed records of this failback in the topic, by partition and offset of the old source."""
        with closing(ClusterAdmin(self._cluster)) as admin:
            known = admin.topics([self._topic]).values.get(self._topic)
            if known is None:
                return {}
            keys = [(self._topic, number) for number in range(known.partitions)]
            ends, errors = read_ends(admin, keys)
        for error in errors.values():
            raise KmirrorError(f"quarantine topic {self._topic} cannot be read: {error}") from error
        ranges = {key: LogRange(*key, each.start, each.stable_end) for key, each in ends.items()}
        found: dict[Partition, dict[int, LogRecord]] = {}
        for chunk in read_ranges(
            self._cluster,
            ranges,
            isolation=Isolation.READ_COMMITTED,
            limits=ReadLimits(),
            progress=lambda _phase, _done, _total: None,
        ):
            for record in chunk.records:
                mine = unwrapped(record)
                if mine is not None and mine[0] == self._failback:
                    found.setdefault(mine[1], {})[mine[2][OFFSET]] = mine[2]
        return found

    def _make(self, source: ClusterSettings, topics: set[str]) -> int:
        """Make the topic, wide enough for the largest record of the source's topics; that limit in bytes."""
        with closing(ClusterAdmin(source)) as old:
            sizes = [_DEFAULT_MAX_BYTES]
            for configs in old.topic_configs(topics).values.values():
                value = configs.get("max.message.bytes")
                if value is not None and value.value:
                    sizes.append(int(value.value))
        limit = min(max(sizes) + _HEADROOM_BYTES, 2**31 - 1)
        wanted = {
            "retention.ms": "-1",
            "retention.bytes": "-1",
            "cleanup.policy": "delete",
            "message.timestamp.type": "CreateTime",
            "max.message.bytes": str(limit),
        }
        with closing(ClusterAdmin(self._cluster)) as admin:
            if self._topic in admin.topic_names():
                return limit
            new = NewTopic(self._topic, 1, min(_REPLICAS, admin.broker_count()), wanted)
            error = admin.create_topics([new])[self._topic]
            if error is not None and self._topic not in admin.topic_names():
                raise KmirrorError(f"quarantine topic {self._topic} cannot be made: {error}") from error
        return limit


class _Writer:
    """Writes records in transactions, a few thousand at a time."""

    def __init__(self, cluster: ClusterSettings, topic: str, failback: str, max_bytes: int) -> None:
        self._topic = topic
        self._failback = failback
        self._errors: list[str] = []
        self._pending = 0
        self._client: Any = producer(
            cluster,
            transactional_id=f"kmirror-quarantine/{topic}",
            linger_ms=5,
            message_max_bytes=min(max_bytes, 1_000_000_000),
        )
        self._do("fencing other writers of", lambda: self._client.init_transactions(_TIMEOUT_S))

    def write(self, records: Sequence[LogRecord], key: Partition, committed: set[int]) -> None:
        for record in records:
            if not self._pending:
                self._do("writing to", self._client.begin_transaction)
            self._send(record, key, committed=record[OFFSET] in committed)
            self._pending += 1
            if self._pending >= _CHUNK:
                self.end()

    def end(self) -> None:
        """Commit what is under way."""
        if not self._pending:
            return
        self._do("writing to", lambda: self._client.commit_transaction(_TIMEOUT_S))
        self._pending = 0
        if self._errors:
            raise KmirrorError(f"quarantine topic {self._topic} does not take a record: {self._errors[0]}")

    def _send(self, record: LogRecord, key: Partition, *, committed: bool) -> None:
        arguments = {"timestamp": record[TIMESTAMP]} if record[TIMESTAMP] > 0 else {}
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                self._client.produce(
                    self._topic,
                    record[VALUE],
                    record[KEY],
                    headers=wrapped(record, key, self._failback, committed=committed),
                    partition=0,
                    on_delivery=self._told,
                    **arguments,
                )
            except BufferError:
                self._client.poll(0.1)
                if time.monotonic() > deadline:
                    raise KmirrorError(f"quarantine topic {self._topic} takes no records") from None
            else:
                return

    def _told(self, error: Any, _message: Any) -> None:
        if error is not None:
            self._errors.append(str(error))

    def _do(self, doing: str, work: Any) -> None:
        try:
            work()
        except Exception as error:
            if type(error).__name__ != "KafkaException":
                raise
            raise KmirrorError(f"{doing} quarantine topic {self._topic}: {error}") from error
