"""Names of mirror partitions as the coordinator handles them."""

from typing import NamedTuple

from kmirror_dagster.coordination.models import PartitionRef
from kmirror_dagster.records import PartitionRecord, PositionRecord, partition_owner


class PartitionKey(NamedTuple):
    """A mirror partition."""

    mirror: str
    topic: str
    partition: int

    @classmethod
    def of(cls, named: PartitionRecord | PositionRecord | PartitionRef) -> "PartitionKey":
        """Key of what a record or a reference names."""
        return cls(named.mirror, named.topic, named.partition)

    def owner(self, count: int) -> int:
        """Coordinator partition of `count` that leads it."""
        return partition_owner(self.mirror, self.topic, self.partition, count)

    def __str__(self) -> str:
        return f"{self.mirror}/{self.topic}/{self.partition}"
