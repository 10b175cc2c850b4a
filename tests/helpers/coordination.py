"""A destination in memory and nodes on it: the coordinator's own code, nothing but the clusters replaced."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr

from kmirror_dagster.broker.admin_types import Acl, Quota
from kmirror_dagster.coordination.api import build_app
from kmirror_dagster.coordination.http_guard import HttpGuard
from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.leadership import Identity, Leadership
from kmirror_dagster.coordination.links import LinkPool
from kmirror_dagster.coordination.models import CreateMirror, NodeInfo
from kmirror_dagster.coordination.operations import MirrorOperations
from kmirror_dagster.coordination.partitions import PartitionCoordinator
from kmirror_dagster.coordination.peers import ENDS_HEADER, Peers, encode_ends
from kmirror_dagster.coordination.probes import Prober
from kmirror_dagster.coordination.refreshes import RefreshCoordinator
from kmirror_dagster.coordination.service import NodeService, Parts
from kmirror_dagster.coordination.stops import StopWork, TopicReleaser
from kmirror_dagster.coordination.view import StateView, decode_entry
from kmirror_dagster.errors import FencedError, KmirrorError, NotLeaderError, ReplicationError
from kmirror_dagster.lifecycle import ALIGNING_STATES, MirrorState, RetryPolicy
from kmirror_dagster.metadata.acls import TopicAcls
from kmirror_dagster.metadata.offsets import OffsetMaps
from kmirror_dagster.metadata.outcome import (
    PlannedChange,
    RefreshOutcome,
    RefreshPlan,
    RefreshStatus,
    TopicIntent,
)
from kmirror_dagster.records import MirrorRecord, PartitionRecord, TopicRecord
from kmirror_dagster.replication.alignment import Alignment
from kmirror_dagster.replication.link import Position, ProbeResult
from kmirror_dagster.replication.progress import Progress
from kmirror_dagster.replication.translation import OffsetStore
from kmirror_dagster.settings import ClusterSettings

T = TypeVar("T")

SOURCE_ID, DESTINATION_ID = "source-cluster", "destination-cluster"
TOKEN = SecretStr("token-of-the-tests")
SOURCE, DESTINATION = "source:9092", "destination:9092"


def run(work: Callable[[], Coroutine[Any, Any, T]], *, deadline_s: float = 20.0) -> T:
    """Run an asynchronous test, bounded."""

    async def bounded() -> T:
        return await asyncio.wait_for(work(), deadline_s)

    return asyncio.run(bounded())


async def eventually(condition: Callable[[], T], *, deadline_s: float = 5.0) -> T:
    """Wait in the loop until the condition is truthy, and return it."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    while not (answer := condition()):
        assert loop.time() < end, f"not within {deadline_s} s; last answer {answer!r}"
        await asyncio.sleep(0.002)
    return answer


@dataclass
class MemoryTopic:
    """The state topic: partitions of (key, value), with the broker's fencing by producer epochs."""

    count: int = 5
    topic_id: str = "state-topic-1"
    logs: list[list[tuple[bytes, bytes | None]]] = field(default_factory=list[Any])
    epochs: dict[int, int] = field(default_factory=dict[int, int])
    appended_epochs: dict[int, int] = field(default_factory=dict[int, int])
    appends: int = 0
    views: list[StateView] = field(default_factory=list[StateView])
    held_back: bool = False
    fail_before: list[KmirrorError] = field(default_factory=list[KmirrorError])
    fail_after: list[KmirrorError] = field(default_factory=list[KmirrorError])

    def __post_init__(self) -> None:
        self.logs = [[] for _ in range(self.count)]

    def put(self, partition: int, key: bytes, value: bytes | None) -> int:
        """Append one record as nobody in particular; returns its offset."""
        self.logs[partition].append((key, value))
        self.deliver()
        return len(self.logs[partition]) - 1

    def deliver(self) -> None:
        """Bring all views up to date, unless reading is held back."""
        if not self.held_back:
            for view in self.views:
                self.feed(view)

    def feed(self, view: StateView) -> None:
        """Give a view everything it has not seen."""
        for partition, log in enumerate(self.logs):
            first = view.position(partition)
            view.apply(
                [decode_entry(partition, first + i, first + i, k, v) for i, (k, v) in enumerate(log[first:])]
            )


class MemoryLog:
    """One node's fenced appends (`AppendLog`)."""

    def __init__(self, topic: MemoryTopic) -> None:
        self._topic = topic
        self._epochs: dict[int, int] = {}

    async def acquire(self, partition: int) -> int:
        await asyncio.sleep(0)
        epoch = self._topic.epochs.get(partition, 0) + 1
        self._topic.epochs[partition] = self._epochs[partition] = epoch
        return epoch

    async def append(self, partition: int, records: Sequence[tuple[bytes, bytes | None]]) -> int:
        topic = self._topic
        epoch = self._epochs.get(partition)
        await self.pass_on()
        if topic.fail_before:
            raise topic.fail_before.pop(0)
        if epoch is None:
            raise NotLeaderError(f"{partition} is not acquired")
        if epoch < topic.appended_epochs.get(partition, 0):
            raise FencedError(f"coordinator partition {partition} was taken over")
        topic.appended_epochs[partition] = epoch
        base = len(topic.logs[partition])
        topic.logs[partition].extend(records)
        topic.appends += 1
        asyncio.get_running_loop().call_soon(topic.deliver)
        if topic.fail_after:
            raise topic.fail_after.pop(0)
        return base

    async def release(self, partition: int) -> None:
        self._epochs.pop(partition, None)

    async def pass_on(self) -> None:
        """The way from the node to the broker."""
        await asyncio.sleep(0)


class MemoryLink:
    """A link that copies nothing and does what the test says (`Link`)."""

    def __init__(self, record: MirrorRecord, view: StateView) -> None:
        self.record = record
        self.view = view
        self.running: dict[tuple[str, int], Callable[[ReplicationError], None]] = {}
        self.epochs: dict[tuple[str, int], int] = {}
        self.aligned: list[PartitionRecord] = []
        self.stores: dict[tuple[str, int], OffsetStore] = {}
        self.finals: list[tuple[str, int]] = []
        self.align_errors: dict[str, list[Exception]] = {}
        self.stop_errors: dict[str, list[KmirrorError]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.copied = 0
        self.lag = 0
        self.probe_error: str | None = None
        self.closed = False

    async def align(
        self, topic: str, partition: int, record: PartitionRecord, store: OffsetStore
    ) -> Alignment:
        self.stores[topic, partition] = store
        self.aligned.append(record)
        self._assert_stored(topic, partition, ALIGNING_STATES | {MirrorState.MIRRORING})
        await self.gate.wait()
        errors = self.align_errors.get(topic)
        if errors:
            raise errors.pop(0)
        return Alignment(
            producer_id=100 + partition,
            producer_epoch=0,
            next_sequence=0,
            source_topic_id="topic-id",
            source_leader_epoch=4,
            start_offset=10,
            destination_start=0,
            source_start=0,
            source_end=10,
        )

    def start(
        self,
        topic: str,
        partition: int,
        alignment: Alignment,
        on_failure: Callable[[ReplicationError], None],
        *,
        owner_epoch: int,
    ) -> None:
        assert (topic, partition) not in self.running
        self._assert_stored(topic, partition, {MirrorState.MIRRORING})
        self.running[topic, partition] = on_failure
        self.epochs[topic, partition] = owner_epoch

    async def stop(self, topic: str, partition: int, deadline_s: float, *, final: bool = False) -> Position:
        self.running.pop((topic, partition), None)
        await asyncio.sleep(0)
        errors = self.stop_errors.get(topic)
        if errors:
            raise errors.pop(0)
        if final:
            self._assert_stored(topic, partition, {MirrorState.STOPPING})
            self.finals.append((topic, partition))
        return Position(10, 4)

    def _assert_stored(self, topic: str, partition: int, states: Collection[MirrorState]) -> None:
        """Every act follows the commit of the state it belongs to."""
        assert self.view.states[PartitionKey(self.record.mirror, topic, partition)].state in states

    def fail(self, topic: str, partition: int, error: ReplicationError) -> None:
        self.running.pop((topic, partition))(error)

    def progress(self, topic: str, partition: int) -> Progress | None:
        if (topic, partition) not in self.running:
            return None
        return Progress(0, 10 + self.lag, 0, 10, self.lag, 0.5, 2.0, 20.0, self.copied, 10, 1, 0)

    async def probe(self) -> tuple[ProbeResult, ProbeResult]:
        return ProbeResult(self.probe_error is None, self.probe_error), ProbeResult(True)

    async def close(self, deadline_s: float) -> None:
        self.closed = True
        self.running.clear()


class MemoryRefresher:
    """Tells the intents the test has put down (`MetadataRefresher`)."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.closed = False

    def run(
        self,
        known: Mapping[str, TopicRecord],
        mirroring: Mapping[tuple[str, int], MirrorState],
        deadline_s: float,
        *,
        synced_acls: frozenset[Acl] = frozenset(),
        synced_quotas: frozenset[Quota] = frozenset(),
        offset_maps: OffsetMaps | None = None,
    ) -> RefreshOutcome:
        self._world.refreshes += 1
        if self._world.refresh_error is not None:
            raise self._world.refresh_error
        status = RefreshStatus(started_ms=1, finished_ms=2, steps=[])
        again = self._world.look_again.pop(0) if self._world.look_again else False
        acls, quotas = self._world.acls, self._world.quotas
        return RefreshOutcome(status, list(self._world.intents), None, acls, quotas, again)

    def plan(
        self,
        known: Mapping[str, TopicRecord],
        mirroring: Mapping[tuple[str, int], MirrorState],
        deadline_s: float,
        *,
        synced_acls: frozenset[Acl] = frozenset(),
        synced_quotas: frozenset[Quota] = frozenset(),
        offset_maps: OffsetMaps | None = None,
    ) -> RefreshPlan:
        if self._world.refresh_error is not None:
            raise self._world.refresh_error
        status = RefreshStatus(started_ms=1, finished_ms=2, steps=[])
        return RefreshPlan(status, tuple(self._world.changes))

    def close(self) -> None:
        self.closed = True


@dataclass
class World:
    """What the nodes of a test share."""

    topic: MemoryTopic = field(default_factory=MemoryTopic)
    intents: list[TopicIntent] = field(default_factory=list[TopicIntent])
    acls: frozenset[Acl] | None = None
    quotas: frozenset[Quota] | None = None
    look_again: list[bool] = field(default_factory=list[bool])
    changes: list[PlannedChange] = field(default_factory=list[PlannedChange])
    refreshes: int = 0
    refresh_error: Exception | None = None
    released: list[Mapping[str, Mapping[str, str | None]]] = field(default_factory=list[Any])
    release_error: KmirrorError | None = None
    released_acls: list[Mapping[str, TopicAcls]] = field(default_factory=list[Any])
    release_acls_error: KmirrorError | None = None
    cluster_ids: dict[str, str | KmirrorError] = field(
        default_factory=lambda: {SOURCE: SOURCE_ID, DESTINATION: DESTINATION_ID}
    )
    now_ms: int = 1_000_000
    nodes: dict[str, "MemoryNode"] = field(default_factory=dict[str, "MemoryNode"])

    def topics(self, **partitions: int) -> None:
        """Have the next refresh find these topics: name -> partitions."""
        self.intents = [
            TopicIntent(name, count, source_topic_id=f"id-{name}", destination_topic_id=f"copy-{name}")
            for name, count in partitions.items()
        ]

    def cluster_id(self, settings: ClusterSettings, deadline_s: float, role: str) -> str:
        answer = self.cluster_ids[settings.address]
        if isinstance(answer, KmirrorError):
            raise answer
        return answer


class MemoryNode:
    """One node without process, group and network; calls between nodes go through its ASGI app."""

    def __init__(
        self,
        world: World,
        name: str = "n1",
        *,
        policy: RetryPolicy | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.world = world
        self.name = name
        self.endpoint = f"http://{name}"
        self.is_up = True
        self.is_loaded = True
        self.links_made: dict[str, MemoryLink] = {}
        self.executor = ThreadPoolExecutor(4)
        self.view = StateView(world.topic.count, world.topic.topic_id)
        world.topic.views.append(self.view)
        world.topic.feed(self.view)
        rng = random.Random(1)
        self.log = MemoryLog(world.topic)
        self.leadership = Leadership(
            self.view,
            self.log,
            Identity(name, self.endpoint),
            now_ms=self.now,
            rng=rng,
            on_gained=self._gained,
            on_losing=self._losing,
        )
        shard_of = self.leadership.shard
        self.links = LinkPool(self.view.mirrors, self._link)
        releaser = TopicReleaser(self._release, self.executor)
        acl_releaser = TopicReleaser(self._release_acls, self.executor)
        self.partitions = PartitionCoordinator(
            self.view,
            shard_of,
            self.links,
            StopWork(self.view, releaser, acl_releaser, now_ms=self.now),
            policy or RetryPolicy(initial_ms=1, max_ms=5, max_attempts=3),
            rng=rng,
            now_ms=self.now,
        )
        self.refreshes = RefreshCoordinator(
            self.view,
            shard_of,
            lambda _record: MemoryRefresher(world),
            self.executor,
            interval_s=3_600,
            now_ms=self.now,
        )
        self.operations = MirrorOperations(
            self.view,
            shard_of,
            self.refreshes,
            world.cluster_id,
            self.executor,
            destination_cluster_id=DESTINATION_ID,
            environ=environ or {},
            now_ms=self.now,
        )
        self.prober = Prober(self.links, self.partitions.active_mirrors, node_id=name, now_ms=self.now)
        self.peers = Peers(TOKEN, transport=_Between(world))
        parts = Parts(
            self.view, shard_of, self.partitions, self.refreshes, self.operations, self.prober, self.peers
        )
        self.service = NodeService(
            parts, node_id=name, destination_cluster_id=DESTINATION_ID, now_ms=self.now
        )
        self.shutdown_asked = False
        self.app = HttpGuard(build_app(self._service, self), TOKEN, forwarded_headers=self._ends)
        self.view.subscribe(self.partitions.changed)
        self.view.subscribe(self.refreshes.changed)
        world.nodes[name] = self

    async def lead(self, *partitions: int) -> None:
        """Assign coordinator partitions (all of them when none is named) and wait until they are led."""
        wanted = partitions or tuple(range(self.view.count))
        self.leadership.assign(wanted)
        await eventually(lambda: all(self.leadership.shard(p) for p in wanted))

    async def crash(self) -> None:
        """Be gone without a word: nothing more is written, nothing is stopped in order."""
        self.is_up = False
        self.world.topic.views.remove(self.view)
        for link in self.links_made.values():
            link.running.clear()
        self.log._epochs.clear()

    async def close(self) -> None:
        """End everything."""
        self.is_up = False
        await self.leadership.revoke_all()
        await self.prober.close()
        await self.links.close(self.links.open_mirrors(), deadline_s=1)
        await self.peers.close()
        self.executor.shutdown(wait=True)

    async def __aenter__(self) -> "MemoryNode":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def link(self, mirror: str = "m") -> MemoryLink:
        """The newest link made for a mirror."""
        return self.links_made[mirror]

    def state(self, topic: str = "t", partition: int = 0, mirror: str = "m") -> MirrorState | None:
        """Stored state of a partition as this node knows it."""
        record = self.view.states.get(PartitionKey(mirror, topic, partition))
        return record.state if record else None

    def states(self, mirror: str = "m") -> set[MirrorState | None]:
        """States that occur in a mirror."""
        names = self.view.partitions_of(mirror)
        return {self.view.states[name].state if name in self.view.states else None for name in names}

    def http(self) -> httpx.AsyncClient:
        """Client of this node's API."""
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False),
            base_url=self.endpoint,
            headers={"Authorization": f"Bearer {TOKEN.get_secret_value()}"},
        )

    def now(self) -> int:
        self.world.now_ms += 1
        return self.world.now_ms

    def info(self) -> NodeInfo:
        return NodeInfo(
            node_id=self.name,
            endpoint=self.endpoint,
            version="0",
            started_ms=0,
            destination_cluster_id=DESTINATION_ID,
            coordinator_partitions=sorted(self.leadership.shards),
            mirror_partitions=len(self.partitions.running()),
            cpu_seconds=0,
            memory_bytes=0,
            quarantined_records=sorted(self.view.quarantined.values()),
        )

    def is_ready(self) -> bool:
        return self.is_loaded

    def request_shutdown(self) -> None:
        self.shutdown_asked = True

    def metrics(self) -> bytes:
        return b""

    def _service(self) -> NodeService:
        if not self.is_loaded:
            raise NotLeaderError("this node is starting or ending: try again")
        return self.service

    def _ends(self) -> list[tuple[bytes, bytes]]:
        return [(ENDS_HEADER.lower().encode(), encode_ends(self.service.ends()).encode())]

    def _gained(self, partition: int) -> None:
        self.partitions.gained(partition)
        self.refreshes.gained(partition)

    async def _losing(self, partitions: frozenset[int]) -> None:
        await self.partitions.losing(partitions)
        await self.refreshes.losing(partitions)

    def _link(self, record: MirrorRecord) -> MemoryLink:
        link = self.links_made[record.mirror] = MemoryLink(record, self.view)
        return link

    def _release(self, held: Mapping[str, Mapping[str, str | None]]) -> Mapping[str, KmirrorError | None]:
        self.world.released.append(held)
        return dict.fromkeys(held, self.world.release_error)

    def _release_acls(self, topics: Mapping[str, TopicAcls]) -> Mapping[str, KmirrorError | None]:
        self.world.released_acls.append(topics)
        return dict.fromkeys(topics, self.world.release_acls_error)


class _Between(httpx.AsyncBaseTransport):
    """Carries calls from node to node in memory; a node that is down refuses the connection."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        node = self._world.nodes.get(urlsplit(str(request.url)).hostname or "")
        if node is None or not node.is_up:
            raise httpx.ConnectError("refused")
        return await httpx.ASGITransport(node.app, raise_app_exceptions=False).handle_async_request(request)


def document(mirror: str = "m", *, topics: list[str] | None = None, **sections: Any) -> dict[str, Any]:
    """A mirror's settings document."""
    return {
        "mirror": mirror,
        "source": {"bootstrap.servers": SOURCE},
        "destination": {"bootstrap.servers": DESTINATION},
        "filters": {"topics.include": topics or [".*"]},
        **sections,
    }


async def mirrored(node: MemoryNode, **partitions: int) -> None:
    """Create mirror `m` with these topics and wait until all of it is MIRRORING."""
    node.world.topics(**partitions)
    await node.operations.create(CreateMirror(document=document()))
    total = sum(partitions.values())
    await eventually(
        lambda: len(node.view.partitions_of("m")) == total and node.states() == {MirrorState.MIRRORING}
    )
    await eventually(lambda: len(node.partitions.running()) == total)


def led_world(test: Callable[[World, MemoryNode], Awaitable[T]], *, policy: RetryPolicy | None = None) -> T:
    """Run a test with one node that leads everything."""

    async def work() -> T:
        world = World()
        async with MemoryNode(world, policy=policy) as node:
            await node.lead()
            return await test(world, node)

    return run(work)
