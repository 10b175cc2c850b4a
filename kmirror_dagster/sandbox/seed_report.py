"""What `kmirror sandbox seed` wrote."""

from pydantic import BaseModel, ConfigDict


class TopicReport(BaseModel):
    """One topic.

    Attributes:
        written: records that a read_committed consumer can see, of this run.
        aborted: records in aborted transactions, of this run.
        log_starts: first offset of each partition, afterwards.
        log_ends: end offset of each partition, afterwards.
    """

    model_config = ConfigDict(frozen=True)

    topic: str
    compression: str
    written: int
    aborted: int
    log_starts: tuple[int, ...]
    log_ends: tuple[int, ...]


class GroupReport(BaseModel):
    """Committed offsets of one consumer group, by ``topic/partition``."""

    model_config = ConfigDict(frozen=True)

    group: str
    offsets: dict[str, int]


class SeedReport(BaseModel):
    """One run.

    Attributes:
        seed: seed number.
        base_ms: timestamp of the first record of each topic; with `seed` it makes the data reproducible.
        seconds: how long writing took.
    """

    model_config = ConfigDict(frozen=True)

    seed: int
    base_ms: int
    seconds: float
    topics: tuple[TopicReport, ...]
    groups: tuple[GroupReport, ...]

    @property
    def written(self) -> int:
        """Records that a read_committed consumer can see, over all topics."""
        return sum(topic.written for topic in self.topics)
