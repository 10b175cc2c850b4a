"""Quarantine: unmirrored tails written to files before their topic is made anew. Nothing is ever overwritten."""

import base64
import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from kmirror_dagster.broker.admin_types import Partition
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
from kmirror_dagster.errors import UsageError
from kmirror_dagster.recovery.formats import QuarantineFormat
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.range_reads import ProgressCallback, ReadLimits, read_ranges
from kmirror_dagster.verification.ranges import LogEnds
from kmirror_dagster.verification.report import Isolation

_TYPES = {1: "CreateTime", 2: "LogAppendTime"}
_DIGEST_CHUNK = 1024 * 1024
_OPEN_FILES = 200


class SavedTail(BaseModel):
    """One tail in quarantine: the records of offsets [first, end) of a partition of the old source.

    Attributes:
        records: readable ones, those of aborted and open transactions too (marked `committed: false`).
        file: its path, or `topic:NAME`.
        sha256: of the file, hexadecimal; of a topic's records the digest of `verification.digests`.
    """

    model_config = ConfigDict(frozen=True)

    topic: str
    partition: int
    first: int
    end: int
    records: int
    file: str
    sha256: str


class Quarantine:
    """Directory of tails, one file each: `<topic>-<partition>-<first>-<end>.<format>`.

    Args:
        directory: made when missing.
        file_format: of new files.
    """

    def __init__(self, directory: Path, file_format: QuarantineFormat = QuarantineFormat.JSONL) -> None:
        self.directory = directory
        self.format = file_format

    def save(
        self,
        source: ClusterSettings,
        tails: Mapping[Partition, tuple[int, LogEnds]],
        *,
        limits: ReadLimits | None = None,
        progress: ProgressCallback = lambda _phase, _done, _total: None,
    ) -> list[SavedTail]:
        """Save tails: each file appears complete, on disk, or not at all.

        Args:
            source: cluster to read.
            tails: first offset to save, and the ends of the log.
            limits: of time.
            progress: told phase, offsets done and offsets in all.

        Raises:
            UsageError: when the directory cannot be written to.
            KmirrorError: when the source cannot be read; files that are complete stay.
        """
        saved: list[SavedTail] = []
        keys = sorted(tails)
        for begin in range(0, len(keys), _OPEN_FILES):
            wave = {key: tails[key] for key in keys[begin : begin + _OPEN_FILES]}
            saved += self._save(source, wave, limits or ReadLimits(), progress)
        return saved

    def _save(
        self,
        source: ClusterSettings,
        tails: Mapping[Partition, tuple[int, LogEnds]],
        limits: ReadLimits,
        progress: ProgressCallback,
    ) -> list[SavedTail]:
        ranges = _ranges(tails)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                files = {key: stack.enter_context(self._file(wanted)) for key, wanted in ranges.items()}
                for key, records, committed in tail_pieces(source, tails, limits, progress):
                    files[key].add(records, committed)
                return [files[key].complete() for key in sorted(files)]
        except OSError as error:
            raise UsageError(f"{self.directory} cannot be written to: {error.strerror or error}") from error

    def _file(self, wanted: LogRange) -> "_TailFile":
        name = f"{wanted.topic}-{wanted.partition}-{wanted.start}-{wanted.end}.{self.format}"
        return _TailFile(self.directory / name, wanted, self.format)


def _ranges(tails: Mapping[Partition, tuple[int, LogEnds]]) -> dict[Partition, LogRange]:
    return {key: LogRange(*key, max(first, ends.start), ends.end) for key, (first, ends) in tails.items()}


def tail_pieces(
    source: ClusterSettings,
    tails: Mapping[Partition, tuple[int, LogEnds]],
    limits: ReadLimits,
    progress: ProgressCallback,
) -> Iterator[tuple[Partition, Sequence[LogRecord], set[int]]]:
    """Read tails whole: records of aborted and open transactions too, with the offsets of those that are not.

    Raises:
        KmirrorError: when the source cannot be read, or a record not be saved as it is.
    """
    ranges = _ranges(tails)
    stable = {
        key: LogRange(*key, wanted.start, max(wanted.start, min(wanted.end, tails[key][1].stable_end)))
        for key, wanted in ranges.items()
    }
    committed: dict[Partition, set[int]] = {key: set() for key in ranges}
    for chunk in read_ranges(
        source, stable, isolation=Isolation.READ_COMMITTED, limits=limits, progress=progress
    ):
        committed[chunk.topic, chunk.partition].update(record[OFFSET] for record in chunk.records)
    for chunk in read_ranges(
        source,
        ranges,
        isolation=Isolation.READ_UNCOMMITTED,
        limits=limits,
        progress=progress,
        whole=True,
    ):
        key = (chunk.topic, chunk.partition)
        yield key, chunk.records, committed[key]


def check_saved(tail: SavedTail) -> None:
    """Make sure that a file in quarantine is what was saved.

    Raises:
        UsageError: when it is missing or has been changed.
    """
    path = Path(tail.file)
    try:
        digest = _sha256(path)
    except OSError as error:
        raise UsageError(f"quarantined tail {path} is not there any more: {error.strerror}") from error
    if digest != tail.sha256:
        raise UsageError(f"quarantined tail {path} has been changed: its SHA-256 is not {tail.sha256}")


def read_tail(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file, keys, values and header values as bytes."""
    with path.open(encoding="utf-8") as lines:
        return [_decoded(json.loads(line)) for line in lines]


def _decoded(document: dict[str, Any]) -> dict[str, Any]:
    headers = [(name, _bytes(value)) for name, value in document["headers"]]
    return {
        **document,
        "key": _bytes(document["key"]),
        "value": _bytes(document["value"]),
        "headers": headers,
    }


class _Writer(Protocol):
    def write(self, rows: list[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


class _TailFile:
    """A file being written under a name of its own until it is complete."""

    def __init__(self, path: Path, wanted: LogRange, file_format: QuarantineFormat) -> None:
        self._path = path
        self._wanted = wanted
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._records = 0
        self._writer: _Writer = (
            _ParquetRows(self._temporary)
            if file_format is QuarantineFormat.PARQUET
            else _JsonLines(self._temporary)
        )

    def __enter__(self) -> "_TailFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, records: Sequence[LogRecord], committed: set[int]) -> None:
        if records:
            self._records += len(records)
            self._writer.write([self._row(record, record[OFFSET] in committed) for record in records])

    def complete(self) -> SavedTail:
        self._writer.close()
        with self._temporary.open("rb") as written:
            os.fsync(written.fileno())
        digest = _sha256(self._temporary)
        target = self._path
        if target.exists() and _sha256(target) != digest:
            target = target.with_name(f"{target.stem}-{digest[:8]}{target.suffix}")
        self._temporary.replace(target)
        _sync_directory(target.parent)
        return SavedTail(
            topic=self._wanted.topic,
            partition=self._wanted.partition,
            first=self._wanted.start,
            end=self._wanted.end,
            records=self._records,
            file=str(target.absolute()),
            sha256=digest,
        )

    def _row(self, record: LogRecord, committed: bool) -> dict[str, Any]:
        return {
            "topic": self._wanted.topic,
            "partition": self._wanted.partition,
            "offset": record[OFFSET],
            "timestamp_ms": record[TIMESTAMP],
            "timestamp_type": _TYPES.get(record[TIMESTAMP_TYPE]),
            "key": record[KEY],
            "value": record[VALUE],
            "headers": record[HEADERS] or [],
            "committed": committed,
        }


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            headers = [[name, _text(value)] for name, value in row["headers"]]
            document = {**row, "key": _text(row["key"]), "value": _text(row["value"]), "headers": headers}
            self._file.write(json.dumps(document, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


class _ParquetRows:
    def __init__(self, path: Path) -> None:
        try:
            arrow: Any = importlib.import_module("pyarrow")
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise UsageError(
                "quarantine in Parquet needs pyarrow: pip install 'kmirror-dagster[parquet]', or take jsonl"
            ) from error
        header = arrow.struct([("name", arrow.string()), ("value", arrow.binary())])
        self._arrow = arrow
        self._schema = arrow.schema(
            [
                ("topic", arrow.string()),
                ("partition", arrow.int32()),
                ("offset", arrow.int64()),
                ("timestamp_ms", arrow.int64()),
                ("timestamp_type", arrow.string()),
                ("key", arrow.binary()),
                ("value", arrow.binary()),
                ("headers", arrow.list_(header)),
                ("committed", arrow.bool_()),
            ]
        )
        self._writer = parquet.ParquetWriter(str(path), self._schema)

    def write(self, rows: list[dict[str, Any]]) -> None:
        shaped = [
            {**row, "headers": [{"name": name, "value": value} for name, value in row["headers"]]}
            for row in rows
        ]
        self._writer.write_table(self._arrow.Table.from_pylist(shaped, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while chunk := data.read(_DIGEST_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
