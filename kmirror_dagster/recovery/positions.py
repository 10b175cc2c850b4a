"""Where mirroring ended: the last mirror positions that a stop leaves behind; and where it is before one."""

import base64
import uuid

from pydantic import BaseModel, ConfigDict

from kmirror_dagster.broker.admin_types import Partition

# librdkafka writes ids in plain base64
_URL_SAFE = str.maketrans("+/", "-_")


class LastPosition(BaseModel):
    """Last mirror position of a stopped partition.

    Attributes:
        offset: source and destination are the same log below it.
        source_leader_epoch: leader epoch of the last mirrored batch at the source, -1 when unknown.
        recorded_ms: when the stop recorded it, epoch milliseconds.
        source_topic_id: topic id at the source while it was mirrored, None when it had none.
        source_offset: the source's offset there, where offsets are translated; None: the same one.
    """

    model_config = ConfigDict(frozen=True)

    topic: str
    partition: int
    offset: int
    source_leader_epoch: int = -1
    recorded_ms: int = 0
    source_topic_id: str | None = None
    source_offset: int | None = None

    @property
    def at_source(self) -> int:
        """The source's offset of this position."""
        return self.offset if self.source_offset is None else self.source_offset

    @property
    def translated(self) -> bool:
        """Whether the destination's offsets are not the source's."""
        return self.source_offset is not None

    @property
    def key(self) -> Partition:
        """Topic and partition."""
        return (self.topic, self.partition)


class KnownPartition(BaseModel):
    """What a node knows of one partition: enough for a forecast while the source does not answer.

    Attributes:
        source_end: log end of the source as last seen, None when never.
        lag_seconds: how long ago the source had the first record that is still missing.
    """

    model_config = ConfigDict(frozen=True)

    topic: str
    partition: int
    source_end: int | None = None
    lag_seconds: float = 0.0

    @property
    def key(self) -> Partition:
        """Topic and partition."""
        return (self.topic, self.partition)


def same_topic_id(one: str | None, other: str | None) -> bool:
    """Whether two topic ids are one, whichever way they are written; an unknown one is any."""
    return one is None or other is None or _canonical(one) == _canonical(other)


def _canonical(text: str) -> str:
    """Kafka's form (base64, URL-safe, without padding) of an id written like that, in plain base64 or as a UUID."""
    try:
        return base64.urlsafe_b64encode(uuid.UUID(text).bytes).rstrip(b"=").decode()
    except ValueError:
        return text.rstrip("=").translate(_URL_SAFE)
