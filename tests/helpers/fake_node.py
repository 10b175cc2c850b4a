"""A node in memory: enough of its API for tests of the Dagster side. States change when a test says so."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kmirror_dagster.coordination.models import (
    AdvanceRequest,
    AdvanceResult,
    ChangeFeed,
    ClusterInfo,
    CreateMirror,
    MirrorPlan,
    MirrorSummary,
    PartitionRef,
    PartitionStatus,
    PlannedItem,
    ProbeHistory,
    ProbeObservation,
    RefreshStatus,
    StateChange,
    StepStatus,
    TopicStatus,
    VerbRequest,
    VerbResult,
)
from kmirror_dagster.errors import UnknownMirrorError
from kmirror_dagster.lifecycle import SETTLED_FOR, DesiredState, MirrorState
from kmirror_dagster.offset_map import OffsetMap
from kmirror_dagster.orchestration import KMirrorResource
from kmirror_dagster.orchestration.node_api import NodeApi

_INTENT = {
    "start": DesiredState.MIRRORING,
    "resume": DesiredState.MIRRORING,
    "recover": DesiredState.MIRRORING,
    "pause": DesiredState.PAUSED,
    "stop": DesiredState.STOPPED,
}


def now_ms() -> int:
    """Epoch milliseconds."""
    return time.time_ns() // 1_000_000


class FakeNode:
    """One mirror's states; `calls` names every call made, `on_call` may hang or raise."""

    def __init__(self, mirror: str = "orders", topics: dict[str, int] | None = None) -> None:
        self.name = mirror
        self.calls: list[str] = []
        self.on_call: Callable[[str], None] = lambda _: None
        self.partitions: dict[tuple[str, int], PartitionStatus] = {}
        self.topic_errors: dict[str, str] = {}
        self.log: list[StateChange] = []
        self.feed_id = "feed1"
        self.refresh_status: RefreshStatus | None = None
        self.planned: list[PlannedItem] = []
        self.plan_steps: list[StepStatus] = []
        self.source_ok = True
        self.destination_ok = True
        self.bad_looks = 10
        self.observers = ["node-1"]
        self.bootstrap = "127.0.0.1:9"
        self.document_text: dict[str, Any] = {"mirror": mirror, "source": {}}
        self.settles = True
        self.created_ms = 1_700_000_000_000
        for topic, count in (topics or {}).items():
            for number in range(count):
                self.add(topic, number)
        self.refreshed()

    # --- what a test sets

    def add(self, topic: str, number: int, state: MirrorState | None = MirrorState.MIRRORING) -> None:
        """Add a partition, in a state of its own epoch 1."""
        self.partitions[topic, number] = PartitionStatus(
            mirror=self.name, topic=topic, partition=number, state=None, desired=DesiredState.MIRRORING
        )
        if state is not None:
            self.set_state(topic, number, state)

    def set_state(self, topic: str, number: int, state: MirrorState, **fields: Any) -> PartitionStatus:
        """Store a state, as a leader does: epoch plus one, a change in the feed."""
        before = self.partitions[topic, number]
        update: dict[str, Any] = {
            "state": state,
            "previous_state": before.state,
            "state_epoch": before.state_epoch + 1,
            "since_ms": max(now_ms(), before.since_ms + 1),
            "error": None,
            "node_id": "node-1",
            "lag_records": 0,
            "lag_seconds": 0.0,
            **fields,
        }
        status = before.model_copy(update=update)
        self.partitions[topic, number] = status
        self.log.append(StateChange.model_validate(status.model_dump(exclude={"desired"})))
        return status

    def set_all(self, state: MirrorState, **fields: Any) -> None:
        """Store a state for all partitions."""
        for topic, number in list(self.partitions):
            self.set_state(topic, number, state, **fields)

    def refreshed(self, *, reachable: bool = True, errors: dict[str, str] | None = None) -> RefreshStatus:
        """Let a refresh end now."""
        step = StepStatus(step="topics", ok=not errors, errors=errors or {})
        at = now_ms()
        self.refresh_status = RefreshStatus(
            started_ms=at, finished_ms=at, steps=[step], source_reachable=reachable
        )
        return self.refresh_status

    # --- NodeApi

    def ready(self) -> bool:
        self._call("ready")
        return True

    def cluster(self) -> ClusterInfo:
        self._call("cluster")
        return ClusterInfo(
            node_id="node-1",
            destination_cluster_id="dst",
            state_partitions=2,
            leaders={0: "node-1", 1: "node-1"},
            endpoints={},
        )

    def mirror(self, name: str) -> MirrorSummary:
        self._call("mirror", name)
        statuses = list(self.partitions.values())
        topics: dict[str, list[PartitionStatus]] = {}
        for status in statuses:
            topics.setdefault(status.topic, []).append(status)
        states: dict[str, int] = {}
        for status in statuses:
            key = status.state.value if status.state else "NONE"
            states[key] = states.get(key, 0) + 1
        return MirrorSummary(
            mirror=name,
            source_bootstrap=self.bootstrap,
            source_cluster_id="src",
            destination_cluster_id="dst",
            created_ms=self.created_ms,
            topics=[
                TopicStatus(
                    topic=topic,
                    partitions=len(found),
                    desired=found[0].desired,
                    error=self.topic_errors.get(topic),
                )
                for topic, found in topics.items()
            ],
            partitions=len(statuses),
            states=states,
            lag_records=sum(status.lag_records or 0 for status in statuses),
            lag_seconds=max((status.lag_seconds or 0.0 for status in statuses), default=0.0),
            records_per_second=0.0,
            bytes_per_second=0.0,
            refresh=self.refresh_status,
            coordinator_node="node-1",
        )

    def create(self, request: CreateMirror) -> MirrorSummary:
        self._call("create", request.document["mirror"])
        self.document_text = dict(request.document)
        return self.mirror(self.name)

    def document(self, name: str) -> dict[str, Any]:
        self._call("document", name)
        return self.document_text

    def refresh(self, name: str) -> RefreshStatus:
        self._call("refresh", name)
        return self.refreshed(reachable=self.source_ok)

    def plan(self, name: str) -> MirrorPlan:
        self._call("plan", name)
        status = RefreshStatus(started_ms=1, finished_ms=2, steps=self.plan_steps)
        return MirrorPlan(mirror=name, status=status, changes=self.planned)

    def iter_partitions(
        self, name: str, *, topic: str | None = None, state: MirrorState | None = None, limit: int = 500
    ) -> Iterator[PartitionStatus]:
        self._call("partitions", name)
        for status in list(self.partitions.values()):
            if topic in (None, status.topic) and state in (None, status.state):
                yield status

    def advance(self, name: str, request: AdvanceRequest) -> AdvanceResult:
        self._call("advance", name)
        status = self.partitions.get((request.topic, request.partition))
        if status is None:
            raise UnknownMirrorError(f"mirror {name} has no partition {request.topic}/{request.partition}")
        wanted = SETTLED_FOR[status.desired]
        if status.state is wanted or not self.settles:
            return AdvanceResult(status=status, advanced=False)
        return AdvanceResult(status=self.set_state(status.topic, status.partition, wanted), advanced=True)

    def verb(self, name: str, verb: str, request: VerbRequest | None = None) -> VerbResult:
        self._call(f"verb {verb}", name)
        topics = request.topics if request and request.topics else None
        touched = [key for key in self.partitions if topics is None or key[0] in topics]
        changed: set[str] = set()
        for topic, number in touched:
            status = self.partitions[topic, number]
            self.partitions[topic, number] = status.model_copy(update={"desired": _INTENT[verb]})
            target = SETTLED_FOR[_INTENT[verb]]
            if status.state is not target:
                changed.add(topic)
                if self.settles:
                    self.set_state(topic, number, target)
        unchanged = {topic for topic, _ in touched} - changed
        return VerbResult(
            mirror=name,
            verb=verb,
            changed=sorted(changed),
            unchanged=sorted(unchanged),
            partitions=len(touched),
        )

    def changes(
        self, *, cursor: str | None = None, mirror: str | None = None, limit: int = 200
    ) -> ChangeFeed:
        self._call("changes")
        feed, _, position = (cursor or "").partition(":")
        is_valid = feed == self.feed_id
        start = int(position) if is_valid else 0
        found = self.log[start : start + limit]
        end = start + len(found)
        return ChangeFeed(
            changes=found,
            cursor=f"{self.feed_id}:{end}",
            reset=bool(cursor) and not is_valid,
            more=end < len(self.log),
        )

    def offset_maps(self, name: str) -> dict[tuple[str, int], OffsetMap]:
        self._call("offset_maps")
        return {}

    def probes(self, name: str) -> list[ProbeHistory]:
        self._call("probes", name)
        at = now_ms()

        def looks(ok: bool) -> list[ProbeObservation]:
            error = None if ok else "timed out"
            return [
                ProbeObservation(at_ms=at - 1000 * back, ok=ok or back >= self.bad_looks, error=error)
                for back in reversed(range(30))
            ]

        return [
            ProbeHistory(node_id=node, source=looks(self.source_ok), destination=looks(self.destination_ok))
            for node in self.observers
        ]

    def read_states(self, refs: Sequence[PartitionRef]) -> list[PartitionStatus]:
        self._call("read_states")
        return [self.partitions[ref.topic, ref.partition] for ref in refs]

    def close(self) -> None:
        self.calls.append("close")

    def _call(self, what: str, name: str | None = None) -> None:
        self.calls.append(what)
        self.on_call(what)
        if name not in (None, self.name):
            raise UnknownMirrorError(f"no mirror {name!r}; there is: {self.name}")


# A resource is copied by Dagster at every tick, so the nodes are found by the endpoint's name.
_NODES: dict[str, FakeNode] = {}
_NUMBERS = itertools.count()


class FakeResource(KMirrorResource):
    """The resource, with a node in memory behind it."""

    def open(self, *, budget_s: float) -> NodeApi:
        return _NODES[self.endpoint]


def fake_resource(node: FakeNode) -> FakeResource:
    """A resource that talks to this node."""
    endpoint = f"fake-{next(_NUMBERS)}"
    _NODES[endpoint] = node
    return FakeResource(endpoint=endpoint)
