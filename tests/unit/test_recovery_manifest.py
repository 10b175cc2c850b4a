"""Loss manifest: its figures, its files and its command."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from kmirror_dagster.broker.admin_types import Answers, TopicDescription
from kmirror_dagster.broker.log_records import Chunk, LogRecord
from kmirror_dagster.errors import BrokerError, UsageError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.recovery import manifest as room
from kmirror_dagster.recovery.exports import export_manifest
from kmirror_dagster.recovery.manifest import LossManifest, build_manifest
from kmirror_dagster.recovery.positions import LastPosition, same_topic_id
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.ranges import LogEnds
from tests.helpers.command_line import FakeNode, install, kmirror, partition, refused

SOURCE = ClusterSettings.model_validate({"bootstrap.servers": "127.0.0.1:1"})
ID = uuid.UUID("2f1e0a52-7f0f-4a0c-9a53-8f2a4c6b9d10")


def record(offset: int, timestamp: int, value: bytes | None = b"value") -> LogRecord:
    """A record with a key of one byte and a header of four."""
    return (offset, 1, timestamp, b"k", value, [("he", b"ad")])


class FakeSource:
    """A source in memory: log ends and records by partition."""

    def __init__(self, ends: dict[tuple[str, int], LogEnds], records: list[Chunk]) -> None:
        self.ends = ends
        self.records = records
        self.asked: dict[tuple[str, int], Any] = {}
        self.topic_id = "topic-id"

    def topics(self, names: set[str]) -> Answers[str, TopicDescription]:
        here = {topic for topic, _ in self.ends}
        return Answers(
            {t: TopicDescription(t, self.topic_id, 2, 1) for t in names & here},
            {t: BrokerError(3, "UNKNOWN_TOPIC_OR_PARTITION", "unknown topic") for t in names - here},
        )

    def read(self, _source: object, wanted: dict[tuple[str, int], Any], **_: object) -> Iterator[Chunk]:
        self.asked = wanted
        yield from (chunk for chunk in self.records if (chunk.topic, chunk.partition) in wanted)

    def close(self) -> None: ...


def built(monkeypatch: pytest.MonkeyPatch, source: FakeSource, *positions: LastPosition) -> LossManifest:
    """Manifest of positions against a source in memory."""
    monkeypatch.setattr(room, "check_reachable", lambda *_, **__: "source-id")
    monkeypatch.setattr(room, "ClusterAdmin", lambda _: source)
    monkeypatch.setattr(room, "read_ends", lambda _, keys: ({k: source.ends[k] for k in keys}, {}))
    monkeypatch.setattr(room, "read_ranges", source.read)
    return build_manifest("orders", SOURCE, positions, source_cluster_id="source-id")


def test_manifest_counts_what_is_behind_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets, readable records, bytes and time span behind the last mirror position; nothing where nothing is."""
    chunk = Chunk("t", 0, [record(10, 500), record(11, 300), record(13, 400, None)], 0, True)
    source = FakeSource({("t", 0): LogEnds(0, 15, 15), ("t", 1): LogEnds(0, 7, 7)}, [chunk])
    positions = [
        LastPosition(topic="t", partition=p, offset=o, recorded_ms=50 + p) for p, o in ((1, 7), (0, 10))
    ]
    made = built(monkeypatch, source, *positions)
    first, second = made.partitions
    assert (first.offsets, first.records, first.size_bytes) == (5, 3, 3 + 2 * 5 + 3 * 4)
    assert (first.first_timestamp_ms, first.last_timestamp_ms) == (300, 500)
    assert (second.offsets, second.records, second.problem) == (0, 0, None)
    assert (made.records, made.stopped_ms, made.losses) == (3, 51, [first])
    assert (made.first_timestamp_ms, made.last_timestamp_ms) == (300, 500)
    assert (source.asked["t", 0].start, source.asked["t", 0].end) == (10, 15)


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (LogEnds(12, 20, 20), "2 offsets were deleted"),
        (LogEnds(30, 30, 30), "20 offsets were deleted"),
        (LogEnds(0, 20, 15), "5 offsets belong to transactions"),
        (LogEnds(0, 8, 8), "the source ends at 8"),
    ],
)
def test_manifest_says_what_it_cannot_count(
    monkeypatch: pytest.MonkeyPatch, ends: LogEnds, told: str
) -> None:
    """Offsets deleted meanwhile, undecided ones and a source that lost its tail are named."""
    position = LastPosition(topic="t", partition=0, offset=10)
    made = built(monkeypatch, FakeSource({("t", 0): ends}, []), position)
    assert told in (made.problems[0].problem or "")


def test_manifest_names_topics_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that was deleted, made anew or has fewer partitions gives no figures, and says so."""
    source = FakeSource({("t", 0): LogEnds(0, 5, 5)}, [])
    made = built(
        monkeypatch,
        source,
        LastPosition(topic="gone", partition=0, offset=5),
        LastPosition(topic="t", partition=0, offset=5, source_topic_id="other"),
        LastPosition(topic="t", partition=7, offset=5, source_topic_id="topic-id"),
    )
    problems = [loss.problem or "" for loss in made.partitions]
    assert "unknown topic" in problems[0]
    assert "deleted and created again" in problems[1]
    assert "no such partition" in problems[2]
    assert made.losses == []


def test_other_source_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of another cluster under the same address mean nothing."""
    monkeypatch.setattr(room, "check_reachable", lambda *_, **__: "another")
    with pytest.raises(UsageError, match="is cluster another now"):
        build_manifest("orders", SOURCE, [], source_cluster_id="source-id")


def test_topic_ids_are_compared_in_any_form() -> None:
    """A UUID and Kafka's base64 form of it are one id; an unknown one is any."""
    assert same_topic_id(str(ID), "Lx4KUn8PSgyaU48qTGudEA")
    assert not same_topic_id(str(ID), "AAAAAAAAAAAAAAAAAAAAAQ")
    assert same_topic_id(None, "x")
    assert same_topic_id("AB+/AAAAAAAAAAAAAAAAAQ==", "AB-_AAAAAAAAAAAAAAAAAQ")
    assert same_topic_id("001fbf00-0000-0000-0000-000000000001", "AB+/AAAAAAAAAAAAAAAAAQ")


def a_manifest(monkeypatch: pytest.MonkeyPatch) -> LossManifest:
    """One partition, two offsets lost."""
    source = FakeSource({("t", 0): LogEnds(0, 12, 12)}, [Chunk("t", 0, [record(10, 1)], 0, True)])
    return built(monkeypatch, source, LastPosition(topic="t", partition=0, offset=10))


def test_manifest_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """JSON reads back as the manifest, Parquet has a row for each partition; an existing file is replaced."""
    made = a_manifest(monkeypatch)
    target = tmp_path / "sub" / "loss.json"
    for _ in range(2):
        export_manifest(made, target)
    assert LossManifest.model_validate_json(target.read_text()) == made
    export_manifest(made, tmp_path / "loss.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "loss.parquet").to_pylist()
    assert [(r["mirror"], r["topic"], r["first_offset"], r["records"]) for r in rows] == [
        ("orders", "t", 10, 1)
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.parquet", "sub"]


def test_file_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A path below a file is refused with its name."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"loss\.json cannot be written"):
        export_manifest(a_manifest(monkeypatch), tmp_path / "file" / "loss.json")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """The node every command of the test talks to."""
    return install(monkeypatch)


def stub(monkeypatch: pytest.MonkeyPatch, made: LossManifest) -> list[list[LastPosition]]:
    """Let the manifest be ready at once; returns the positions it was asked for."""
    asked: list[list[LastPosition]] = []

    def build(_mirror: str, _source: object, positions: list[LastPosition], **_: object) -> LossManifest:
        asked.append(positions)
        return made

    class Settings:
        source = SOURCE

    monkeypatch.setattr("kmirror_dagster.recovery.manifest.build_manifest", build)
    monkeypatch.setattr("kmirror_dagster.settings.mirror_from_document", lambda *_, **__: Settings)
    return asked


def test_manifest_command(node: FakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stopped topics only, printed as text or JSON and written to a file."""
    asked = stub(monkeypatch, a_manifest(monkeypatch))
    stopped = {"desired": DesiredState.STOPPED, "last_mirror_offset": 10, "last_mirror_epoch": 3}
    node.partitions.append(partition("stopped", 0, MirrorState.STOPPED, **stopped))
    result = kmirror("manifest", "orders", "--output", str(tmp_path / "loss.json"))
    assert result.exit_code == 0, result.output
    assert "records not mirrored  1" in result.output
    assert [(p.topic, p.offset, p.source_leader_epoch) for p in asked[0]] == [("stopped", 10, 3)]
    assert json.loads((tmp_path / "loss.json").read_text())["records"] == 1
    assert json.loads(kmirror("manifest", "orders", "--json").stdout)["records"] == 1


def test_manifest_wants_stopped_topics(node: FakeNode) -> None:
    """Without a stopped topic there is no last mirror position: exit code 2."""
    assert "no stopped topic" in refused(kmirror("manifest", "orders"))
