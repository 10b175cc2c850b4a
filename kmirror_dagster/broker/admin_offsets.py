"""Admin calls about the ends of partition logs: look-ups, and cutting the head."""

from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin._listoffsets import OffsetSpec

from kmirror_dagster.broker.admin_calls import AdminCalls
from kmirror_dagster.broker.admin_types import Answers, ListedOffset, OffsetKind, Partition
from kmirror_dagster.broker.missing_rights import Right


def partition_name(key: Partition) -> str:
    """Name of a partition in messages."""
    return f"{key[0]}/{key[1]}"


class OffsetCalls(AdminCalls):
    """Log starts, log ends, offsets for timestamps, DeleteRecords."""

    def list_offsets(
        self,
        partitions: Iterable[Partition],
        at: OffsetKind | int,
        *,
        read_committed: bool = False,
        timeout_s: float | None = None,
    ) -> Answers[Partition, ListedOffset]:
        """Look up one offset in each partition.

        Args:
            partitions: partitions of existing topics.
            at: earliest, latest, or a time in epoch milliseconds (first record at or after it).
            read_committed: "latest" is then the last stable offset instead of the high watermark.
            timeout_s: seconds; the client's default when None.
        """
        spec = _spec(at)
        wanted = {TopicPartition(topic, partition): spec for topic, partition in sorted(set(partitions))}
        if not wanted:
            return Answers()
        wait = self.timeout(timeout_s)
        isolation = IsolationLevel.READ_COMMITTED if read_committed else IsolationLevel.READ_UNCOMMITTED
        futures = self.client.list_offsets(wanted, isolation_level=isolation, request_timeout=wait)
        return self.gather(
            {(key.topic, key.partition): future for key, future in futures.items()},
            _listed,
            doing="looking up offsets of",
            right=Right("DESCRIBE", "topic"),
            timeout_s=wait,
            named=partition_name,
            resource=lambda key: key[0],
        )

    def delete_records(
        self, before: Mapping[Partition, int], *, timeout_s: float | None = None
    ) -> Answers[Partition, int]:
        """Cut logs below an offset; the answer is the new log start of each partition."""
        if not before:
            return Answers()
        wait = self.timeout(timeout_s)
        request = [
            TopicPartition(topic, partition, offset) for (topic, partition), offset in sorted(before.items())
        ]
        futures = self.client.delete_records(request, request_timeout=wait, operation_timeout=wait)
        return self.gather(
            {(key.topic, key.partition): future for key, future in futures.items()},
            lambda _key, answer: int(answer.low_watermark),
            doing="cutting",
            right=Right("DELETE", "topic"),
            timeout_s=wait,
            named=partition_name,
            resource=lambda key: key[0],
        )


def _spec(at: OffsetKind | int) -> OffsetSpec:
    spec: OffsetSpec | None
    if isinstance(at, OffsetKind):
        spec = OffsetSpec.earliest() if at is OffsetKind.EARLIEST else OffsetSpec.latest()
    else:
        spec = OffsetSpec.for_timestamp(at)
    assert spec is not None  # noqa: S101 - the client library's annotation is wider than what it does
    return spec


def _listed(_key: Partition, answer: Any) -> ListedOffset:
    epoch = getattr(answer, "leader_epoch", None)
    return ListedOffset(
        offset=int(answer.offset),
        timestamp_ms=int(answer.timestamp) if answer.timestamp is not None else -1,
        leader_epoch=epoch if epoch is not None and epoch >= 0 else None,
    )
