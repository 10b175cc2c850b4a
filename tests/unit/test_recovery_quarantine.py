"""Quarantine: tails as files that hold everything and are never overwritten."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from kmirror_dagster.broker.log_records import Chunk, LogRecord
from kmirror_dagster.errors import KmirrorError, UsageError
from kmirror_dagster.recovery import quarantine as room
from kmirror_dagster.recovery.formats import QuarantineFormat
from kmirror_dagster.recovery.quarantine import Quarantine, SavedTail, check_saved, read_tail
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.ranges import LogEnds
from kmirror_dagster.verification.report import Isolation

SOURCE = ClusterSettings.model_validate({"bootstrap.servers": "127.0.0.1:1"})
RECORDS: list[LogRecord] = [
    (10, 1, 500, b"k\xff", b"v\x00", [("h", b"\xfe"), ("h", None)]),
    (11, 2, 501, None, None, None),
    (13, 1, 502, b"", b"aborted", None),
]


def serve(monkeypatch: pytest.MonkeyPatch, records: list[LogRecord], *, fail: bool = False) -> None:
    """Let partition 0 hold these records, the last of them of an aborted transaction."""

    def read(_: object, ranges: dict[Any, Any], *, isolation: Isolation, **__: object) -> Iterator[Chunk]:
        shown = records[:-1] if isolation is Isolation.READ_COMMITTED else records
        wanted = ranges["t", 0]
        found = [record for record in shown if wanted.start <= record[0] < wanted.end]
        yield Chunk("t", 0, found[:1], 0, False)
        if fail and isolation is Isolation.READ_UNCOMMITTED:
            raise KmirrorError("connection lost")
        yield Chunk("t", 0, found[1:], 0, True)

    monkeypatch.setattr(room, "read_ranges", read)


def saved(
    directory: Path, end: int = 15, file_format: QuarantineFormat = QuarantineFormat.JSONL
) -> SavedTail:
    """Save the tail from offset 10 on."""
    (tail,) = Quarantine(directory, file_format).save(SOURCE, {("t", 0): (10, LogEnds(0, end, end))})
    return tail


def test_everything_of_a_record_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bytes, nulls, header order, timestamps and what was aborted read back as they were."""
    serve(monkeypatch, RECORDS)
    tail = saved(tmp_path)
    assert Path(tail.file).name == "t-0-10-15.jsonl"
    assert (tail.records, tail.first, tail.end) == (3, 10, 15)
    first, second, third = read_tail(Path(tail.file))
    assert (first["key"], first["value"], first["headers"]) == (
        b"k\xff",
        b"v\x00",
        [("h", b"\xfe"), ("h", None)],
    )
    assert (first["timestamp_ms"], first["timestamp_type"], first["committed"]) == (500, "CreateTime", True)
    assert (second["key"], second["value"], second["headers"]) == (None, None, [])
    assert second["timestamp_type"] == "LogAppendTime"
    assert (third["key"], third["offset"], third["committed"]) == (b"", 13, False)


def test_parquet_holds_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other format has the same columns, as bytes."""
    serve(monkeypatch, RECORDS)
    rows = pyarrow.parquet.read_table(saved(tmp_path, file_format=QuarantineFormat.PARQUET).file).to_pylist()
    assert [(row["offset"], row["key"], row["value"], row["committed"]) for row in rows] == [
        (10, b"k\xff", b"v\x00", True),
        (11, None, None, True),
        (13, b"", b"aborted", False),
    ]
    assert rows[0]["headers"] == [{"name": "h", "value": b"\xfe"}, {"name": "h", "value": None}]


def test_saving_again_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same tail is the same file; other records of the same offsets get a file of their own."""
    serve(monkeypatch, RECORDS)
    first = saved(tmp_path)
    assert saved(tmp_path) == first
    serve(monkeypatch, [(10, 1, 1, b"other", b"", None), *RECORDS[1:]])
    other = saved(tmp_path)
    assert other.file != first.file
    check_saved(first)
    check_saved(other)


def test_interrupted_saving_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file is complete or not there."""
    serve(monkeypatch, RECORDS, fail=True)
    with pytest.raises(KmirrorError, match="connection lost"):
        saved(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_changed_or_missing_file_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was saved has to be there, as it was."""
    serve(monkeypatch, RECORDS)
    tail = saved(tmp_path)
    with Path(tail.file).open("a") as file:
        file.write("\n")
    with pytest.raises(UsageError, match="has been changed"):
        check_saved(tail)
    Path(tail.file).unlink()
    with pytest.raises(UsageError, match="not there any more"):
        check_saved(tail)


def test_directory_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A path below a file is refused."""
    serve(monkeypatch, RECORDS)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written to"):
        saved(tmp_path / "file" / "quarantine")
