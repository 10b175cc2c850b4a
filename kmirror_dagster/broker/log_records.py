"""A record as one reads it from a log, as a plain tuple: readers handle hundreds of thousands a second."""

from dataclasses import dataclass
from typing import Final, TypeAlias

Headers: TypeAlias = list[tuple[str, bytes | None]]
# (offset, timestamp type, timestamp in ms, key, value, headers); no headers at all are None
LogRecord: TypeAlias = tuple[int, int, int, bytes | None, bytes | None, Headers | None]

# positions within a LogRecord
OFFSET: Final = 0
TIMESTAMP_TYPE: Final = 1
TIMESTAMP: Final = 2
KEY: Final = 3
VALUE: Final = 4
HEADERS: Final = 5

# timestamp types as librdkafka numbers them; 0 stands for none
CREATE_TIME: Final = 1
LOG_APPEND_TIME: Final = 2


@dataclass(frozen=True)
class LogRange:
    """Offsets `start` (inclusive) to `end` (exclusive) of one partition."""

    topic: str
    partition: int
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """Consecutive readable records of one partition.

    Attributes:
        size: bytes it takes in memory, about.
        done: the range has been read to its end; no further chunk of this partition follows.
    """

    topic: str
    partition: int
    records: list[LogRecord]
    size: int
    done: bool
