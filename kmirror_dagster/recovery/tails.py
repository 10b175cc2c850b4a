"""The end of source logs that was never mirrored."""

from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.broker.log_records import HEADERS, KEY, VALUE, LogRange, LogRecord
from kmirror_dagster.verification.ranges import LogEnds
from kmirror_dagster.verification.report import Isolation


def tail_range(key: Partition, position: int, ends: LogEnds, isolation: Isolation) -> LogRange:
    """Offsets of a source log behind the last mirror position that can still be read."""
    end = ends.at(isolation)
    start = min(max(position, ends.start), end)
    return LogRange(*key, start, end)


def record_bytes(record: LogRecord) -> int:
    """Bytes of key, value and headers."""
    headers = record[HEADERS] or []
    return (
        len(record[KEY] or b"")
        + len(record[VALUE] or b"")
        + sum(len(name.encode()) + len(value or b"") for name, value in headers)
    )
