"""Formats of files in quarantine; apart, so that the command line's help imports nothing heavy."""

from enum import Enum


class QuarantineFormat(str, Enum):
    """JSON lines (keys, values and header values as base64), Parquet (as bytes), or a topic of the new source."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    TOPIC = "topic"

    def __str__(self) -> str:
        return self.value
