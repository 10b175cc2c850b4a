"""A node that exists in memory only, and the command line run against it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kmirror_dagster.cli import waiting
from kmirror_dagster.cli.main import app
from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.coordination.models import (
    ClusterInfo,
    CreateMirror,
    MirrorPlan,
    MirrorSummary,
    NodeInfo,
    PartitionOffsets,
    PartitionStatus,
    RefreshStatus,
    StepStatus,
    TopicStatus,
    VerbRequest,
    VerbResult,
)
from kmirror_dagster.errors import UnknownMirrorError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.offset_map import OffsetMap


def partition(topic: str, number: int, state: MirrorState | None, **more: Any) -> PartitionStatus:
    fields: dict[str, Any] = {
        "desired": DesiredState.MIRRORING,
        "source_end_offset": 1_000 + number,
        "destination_end_offset": 990 + number,
        "lag_records": 10,
        "retry_attempt": 0,
    } | more
    return PartitionStatus(mirror="orders", topic=topic, partition=number, state=state, **fields)


@dataclass
class FakeNode:
    """A node's answers; `log` is what it was asked to change."""

    partitions: list[PartitionStatus] = field(
        default_factory=lambda: (
            [partition("orders-eu", n, MirrorState.MIRRORING) for n in range(3)]
            + [partition("orders-us", 0, MirrorState.MIRRORING)]
        )
    )
    log: list[tuple[str, Any]] = field(default_factory=list)
    error: BaseException | None = None
    refresh_ok: bool = True
    planned: MirrorPlan | None = None
    known_offsets: PartitionOffsets | None = None
    topic_error: str | None = None
    looks: int = 0
    on_look: Callable[["FakeNode"], None] = lambda _: None

    def __enter__(self) -> "FakeNode":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error

    def ready(self) -> bool:
        return True

    def mirrors(self) -> list[MirrorSummary]:
        self._fail()
        return [self.mirror("orders")]

    def mirror(self, name: str) -> MirrorSummary:
        self._fail()
        if name != "orders":
            raise UnknownMirrorError(f"there is no mirror {name!r}; see 'kmirror list'")
        self.on_look(self)
        states: dict[str, int] = {}
        self.looks += 1
        for status in self.partitions:
            key = status.state.value if status.state else "NONE"
            states[key] = states.get(key, 0) + 1
        topics = sorted({status.topic: status for status in self.partitions}.items())
        return MirrorSummary(
            mirror=name,
            source_bootstrap="source.example:9092",
            source_cluster_id="source-id",
            destination_cluster_id="destination-id",
            created_ms=1,
            topics=[
                TopicStatus(topic=t, partitions=3, desired=s.desired, error=self.topic_error)
                for t, s in topics
            ],
            partitions=len(self.partitions),
            states=states,
            lag_records=40,
            lag_seconds=0.5,
            records_per_second=12.0,
            bytes_per_second=1_200.0,
            refresh=self.refresh("orders"),
        )

    def iter_partitions(
        self, name: str, *, topic: str | None = None, state: MirrorState | None = None
    ) -> Iterator[PartitionStatus]:
        for status in self.partitions:
            if topic in (None, status.topic) and state in (None, status.state):
                yield status

    def document(self, name: str) -> dict[str, Any]:
        return {"mirror": name}

    def offsets(self, name: str) -> list[PartitionOffsets]:
        return []

    def offset_maps(self, name: str) -> dict[tuple[str, int], OffsetMap]:
        return {}

    def offsets_of(self, name: str, topic: str, partition: int) -> PartitionOffsets:
        assert self.known_offsets is not None
        assert (self.known_offsets.topic, self.known_offsets.partition) == (topic, partition)
        return self.known_offsets

    def plan(self, name: str) -> MirrorPlan:
        self.mirror(name)
        assert self.planned is not None
        return self.planned

    def create(self, request: CreateMirror) -> MirrorSummary:
        self._fail()
        self.log.append(("create", request))
        return self.mirror("orders")

    def delete(self, name: str, *, force: bool = False, dry_run: bool = False) -> None:
        self.mirror(name)
        self.log.append(("would delete" if dry_run else "delete", force))

    def verb(self, name: str, verb: str, request: VerbRequest) -> VerbResult:
        self.mirror(name)
        self.log.append((f"would {verb}" if request.dry_run else verb, request.topics))
        topics = sorted({status.topic for status in self.partitions})
        if request.topics is not None:
            topics = [topic for topic in topics if topic in request.topics]
        return VerbResult(
            mirror=name, verb=verb, changed=topics[:1], unchanged=topics[1:], partitions=len(self.partitions)
        )

    def refresh(self, name: str) -> RefreshStatus:
        errors = {} if self.refresh_ok else {"orders-eu": "not allowed to CREATE topic"}
        step = StepStatus(step="topics", ok=self.refresh_ok, changes=1, duration_ms=5, errors=errors)
        finished = int(time.time() * 1000)
        return RefreshStatus(started_ms=finished - 5, finished_ms=finished, steps=[step])

    def node(self) -> NodeInfo:
        self._fail()
        return NodeInfo(
            node_id="node-1",
            endpoint="http://127.0.0.1:1",
            version="1",
            started_ms=1,
            destination_cluster_id="destination-id",
            coordinator_partitions=[0, 1],
            mirror_partitions=4,
            cpu_seconds=1.5,
            memory_bytes=50 << 20,
            max_retry_attempts=20,
            quarantined_records=["__mirror_state-3@17: value of record ... cannot be read"],
        )

    def cluster(self) -> ClusterInfo:
        return ClusterInfo(
            node_id="node-1",
            destination_cluster_id="destination-id",
            state_partitions=50,
            leaders={0: "node-1"},
            endpoints={"node-1": "http://127.0.0.1:1"},
        )


def install(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """Make every command of the test talk to one node in memory, and look at it often."""
    fake = FakeNode()

    def discover(*_: object, **__: object) -> FakeNode:
        return fake

    monkeypatch.setattr(NodeClient, "discover", discover)
    monkeypatch.setattr(waiting, "_POLL_S", 0.001)
    return fake


def kmirror(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="kmirror")


def refused(result: Result, code: int = 2) -> str:
    """The one line on stderr of a command that printed nothing else."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("kmirror: ")
    return lines[0].removeprefix("kmirror: ")


def set_states(node: FakeNode, state: MirrorState | None, **more: Any) -> None:
    node.partitions = [s.model_copy(update={"state": state, **more}) for s in node.partitions]
