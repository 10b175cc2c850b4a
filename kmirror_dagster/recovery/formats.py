"""Formats of files in quarantine; apart, so that the command line's help imports nothing heavy."""

from enum import Enum


class QuarantineFormat(str, Enum):
    """JSON lines (keys, values and header values as base64), or Parquet (as bytes)."""

    JSONL = "jsonl"
    PARQUET = "parquet"

    def __str__(self) -> str:
        return self.value
