"""Names in Dagster: partition keys of mirror partitions, identifiers made of mirror names."""

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from kmirror_dagster.errors import UsageError

# Kafka's rule for topic names. Neither "/" nor "%" is in it, which is what makes the keys unambiguous.
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_PARTITION = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_PARTITION = 2**31 - 1
# Dagster reads "..." in a list of keys as a range and refuses it inside one
_RANGE_MARK = "..."
_DOTS, _ESCAPED_DOTS = "..", ".%2E"


@dataclass(frozen=True)
class PartitionKey:
    """Dagster's partition key of one mirror partition: `topic/partition`.

    Dagster takes any text for a key of a dynamic partition, so what comes back from it is checked here.
    """

    topic: str
    partition: int

    def __post_init__(self) -> None:
        if not _TOPIC.fullmatch(self.topic) or self.topic in (".", ".."):
            raise UsageError(f"{self.topic!r} is no topic name: 1 to 249 letters, digits, '.', '_' or '-'")
        if not 0 <= self.partition <= _MAX_PARTITION:
            raise UsageError(f"{self.partition} is no partition number of topic {self.topic!r}")

    def __str__(self) -> str:
        topic = self.topic.replace(_DOTS, _ESCAPED_DOTS) if _RANGE_MARK in self.topic else self.topic
        return f"{topic}/{self.partition}"

    @classmethod
    def parse(cls, text: str) -> "PartitionKey":
        """Read a key, from the right.

        Raises:
            UsageError: when the text is none; nothing is guessed.
        """
        topic, slash, number = text.rpartition("/")
        if not slash or not _PARTITION.fullmatch(number):
            raise UsageError(f"bad partition key {text!r}: expected topic/partition, such as orders/3")
        key = cls(topic.replace(_ESCAPED_DOTS, _DOTS), int(number))
        if str(key) != text:  # a second spelling would be a second asset partition
            raise UsageError(f"bad partition key {text!r}: write it {str(key)!r}")
        return key


def dagster_name(mirror: str) -> str:
    """Mirror name as a Dagster identifier (letters, digits, `_`)."""
    return re.sub(r"[^A-Za-z0-9_]", "_", mirror)


def dagster_names(mirrors: Iterable[str]) -> dict[str, str]:
    """Identifier of each mirror; where two would be one, all but the literal one carry a checksum."""
    names = list(mirrors)
    plain = [dagster_name(name) for name in names]
    return {
        name: short if short == name or plain.count(short) == 1 else f"{short}_{_checksum(name)}"
        for name, short in zip(names, plain, strict=True)
    }


def _checksum(name: str) -> str:
    return f"{zlib.crc32(name.encode()):08x}"
