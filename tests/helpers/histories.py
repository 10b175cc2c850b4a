"""Random histories of a source topic: what they consist of, how they are drawn, how they are written.

Contents come from seeds, so that a history prints as a few short lines and can be written again.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from hypothesis import strategies as st
from kafka.protocol.producer.transaction import EndTxnRequest

from kmirror_dagster.broker import batches, codecs, codes, produce
from kmirror_dagster.broker.batches import RawRecord
from kmirror_dagster.broker.transactions import TransactionalProducer
from kmirror_dagster.broker.wire import LATEST, WireCluster
from kmirror_dagster.sandbox.cluster import SandboxCluster
from kmirror_dagster.settings import ClusterSettings
from tests.helpers.kafka import DEADLINE_S, Record, admin, delete_records, log_range, produce_transaction
from tests.helpers.kafka import produce as produce_plainly
from tests.helpers.waiting import wait_until

NOW_MS = 1_760_000_000_000  # fixed, so that a seed means the same records on every day
_OLDEST_MS = 0
CODECS = (codecs.NONE, codecs.GZIP, codecs.SNAPPY, codecs.LZ4, codecs.ZSTD)
LONG = str(2**62)
_LATER = {codes.CONCURRENT_TRANSACTIONS, codes.NOT_LEADER_OR_FOLLOWER, codes.UNKNOWN_TOPIC_OR_PARTITION}


# contents


def header_lists(rng: random.Random) -> list[tuple[bytes, bytes | None]]:
    """Headers of one record: none, one, repeated keys, null and empty values, bytes that are no text, many."""
    kind = rng.choice(("none", "none", "none", "one", "repeated", "null", "empty", "binary", "many"))
    if kind == "one":
        return [(b"source", b"erp")]
    if kind == "repeated":
        return [(b"k", b"1"), (b"other", b"x"), (b"k", b"0"), (b"k", b"1")]
    if kind == "null":
        return [(b"nothing", None), (b"nothing", b"")]
    if kind == "empty":
        return [(b"", b""), (b"", None), (b"void", b"")]
    if kind == "binary":
        return [("schlüssel".encode(), b"\xff\xfe\x00\x80"), (b"raw", rng.randbytes(40))]
    if kind == "many":
        return [(b"h%d" % (n % 7), b"%d" % n) for n in range(rng.randint(20, 500))]
    return []


def contents(
    seed: int, count: int, *, keys: int = 0, at_ms: int = NOW_MS
) -> list[tuple[bytes | None, bytes | None, list[tuple[bytes, bytes | None]], int]]:
    """Key, value, headers and timestamp of records.

    Args:
        seed: the same seed gives the same records.
        count: how many.
        keys: number of different keys, none of them null, as compacted topics want it; 0: any, also null and empty.
        at_ms: time that most timestamps are near to.
    """
    rng = random.Random(seed)
    odd_headers = count <= 200
    shape = rng.choice(("plain", "plain", "old", "unordered", "zero", "future"))
    found: list[tuple[bytes | None, bytes | None, list[tuple[bytes, bytes | None]], int]] = []
    for number in range(count):
        key = b"key-%d" % rng.randrange(keys) if keys else rng.choice((None, b"", b"k%d" % (number % 9)))
        size = rng.choice((0, 1, 10, 30, 100, 300)) if rng.random() < 0.98 or count > 500 else 20_000
        value = None if rng.random() < 0.1 else rng.randbytes(size // 4) + b"." * (size - size // 4)
        timestamp = {
            "plain": at_ms + number,
            "old": at_ms - 400 * 86_400_000 + number,
            "unordered": at_ms + rng.randint(-10_000_000, 10_000),
            "zero": _OLDEST_MS,
            "future": at_ms + 90 * 86_400_000 + number,
        }[shape]
        found.append((key, value, header_lists(rng) if odd_headers else [], timestamp))
    return found


def raw_batch_records(seed: int, count: int, *, keys: int = 0) -> list[RawRecord]:
    """Records of one batch in wire form."""
    return [
        RawRecord(index, timestamp, batches.encode_payload(key, value, headers))
        for index, (key, value, headers, timestamp) in enumerate(contents(seed, count, keys=keys))
    ]


def records(seed: int, count: int, partition: int, *, keys: int = 0) -> list[Record]:
    """The same for a producer."""
    return [
        Record(
            value=value,
            key=key,
            headers=tuple((name.decode(), content) for name, content in headers),
            timestamp=timestamp,
            partition=partition,
        )
        for key, value, headers, timestamp in contents(seed, count, keys=keys)
    ]


# writing batches as they are wanted


class RawWriter:
    """Writes chosen batches, plainly or in transactions of several producers at once.

    Args:
        bootstrap: of the cluster.
        prefix: what the transactional ids begin with.
    """

    def __init__(self, bootstrap: str, prefix: str) -> None:
        self.cluster = WireCluster(
            ClusterSettings(bootstrap_servers=tuple(bootstrap.split(","))), role="source"
        )
        self._prefix = prefix
        self._producers: dict[int, TransactionalProducer] = {}
        self._sequences: dict[tuple[int, str, int], int] = {}
        self._open: dict[int, set[tuple[str, int]]] = {}

    async def plain(self, topic: str, found: dict[int, Sequence[RawRecord]], codec: int = 0) -> None:
        """One batch per partition, of no producer."""
        await self._send(
            [produce.Append(topic, p, batches.encode_batch(r, codec=codec)) for p, r in found.items()]
        )

    async def transactional(
        self, producer: int, topic: str, found: dict[int, Sequence[RawRecord]], codec: int = 0
    ) -> None:
        """One batch per partition in a producer's transaction, which begins with the first one."""
        client = self._producers.get(producer)
        if client is None:
            client = TransactionalProducer(self.cluster, f"{self._prefix}-{producer}")
            await client.start()
            self._producers[producer] = client
        opened = self._open.setdefault(producer, set())
        fresh = [(topic, partition) for partition in found if (topic, partition) not in opened]
        if fresh:
            await client.add_partitions(fresh)
            opened.update(fresh)
        appends: list[produce.Append] = []
        for partition, content in found.items():
            key = (producer, topic, partition)
            base = self._sequences.get(key, 0)
            self._sequences[key] = batches.next_sequence(base, len(content))
            batch = batches.encode_batch(
                content,
                codec=codec,
                producer_id=client.producer_id,
                producer_epoch=client.producer_epoch,
                base_sequence=base,
                transactional=True,
            )
            appends.append(produce.Append(topic, partition, batch))
        await self._send(appends, client.transactional_id)

    async def end(self, producer: int, *, commit: bool) -> None:
        """End a producer's transaction, if it has one."""
        if not self._open.pop(producer, None):
            return
        client = self._producers[producer]
        answer: Any = None
        for _ in range(1_000):
            connection = await self.cluster.coordinator(client.transactional_id)
            request = EndTxnRequest(
                transactional_id=client.transactional_id,
                producer_id=client.producer_id,
                producer_epoch=client.producer_epoch,
                committed=commit,
            )
            answer = await connection.call(request, version=4)
            if answer.error_code != codes.CONCURRENT_TRANSACTIONS:
                break
            await asyncio.sleep(0.005)
        assert answer.error_code == 0, answer

    async def settled(self, topic: str, partitions: Sequence[int]) -> None:
        """Wait until no transaction is open in partitions: markers are written after `end` was answered.

        The last stable offset follows a moment after the marker, when that is replicated.
        """
        wanted = [(topic, partition) for partition in partitions]
        for _ in range(2_000):
            left = False
            for partition in partitions:
                states = await self.cluster.producers(topic, partition)
                left = left or any(state.open_transaction_start >= 0 for state in states)
            stable = await self.cluster.list_offsets(wanted, LATEST, isolation=1)
            if not left and stable == await self.cluster.list_offsets(wanted, LATEST):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"transactions of {topic} stay open")

    async def close(self) -> None:
        """Close connections."""
        await self.cluster.close()

    async def _send(self, appends: list[produce.Append], transactional_id: str | None = None) -> None:
        for _ in range(200):
            leader = await self.cluster.leader(appends[0].topic, appends[0].partition)
            connection = await self.cluster.connection(leader.node_id, "produce")
            correlation_id = connection.next_id()
            frame = await connection.send(
                correlation_id,
                produce.request(
                    appends,
                    correlation_id=correlation_id,
                    client_id="test",
                    timeout_ms=30_000,
                    transactional_id=transactional_id,
                ),
            )
            failed = {a.partition: a for a in produce.answer(frame.view) if a.error_code}
            if not failed:
                return
            # later: the transaction before is still being completed, or the topic is new
            assert all(answer.error_code in _LATER for answer in failed.values()), failed
            appends = [append for append in appends if append.partition in failed]
            await asyncio.sleep(0.01)
        raise AssertionError(f"{appends[0].topic} cannot be written to")


# histories


@dataclass(frozen=True)
class Batch:
    """One batch as it is; `producer` 0: outside of transactions."""

    partition: int
    count: int
    codec: int
    seed: int
    producer: int = 0


@dataclass(frozen=True)
class End:
    """A producer's transaction ends, if one is open."""

    producer: int
    commit: bool


@dataclass(frozen=True)
class Produced:
    """Records by a real producer, which makes batches as it likes; `commit` None: outside of transactions."""

    partition: int
    count: int
    codec: int
    seed: int
    commit: bool | None = None


@dataclass(frozen=True)
class DeleteHead:
    """The first `percent` of a partition's offsets are deleted; only before mirroring begins."""

    partition: int
    percent: int


Op = Batch | End | Produced | DeleteHead


@dataclass(frozen=True)
class History:
    """What happens at the source; mirroring begins behind the first stage.

    Attributes:
        keys: different keys; above 0 the topic is compacted, and the cleaner runs behind the first stage.
        restarts: whether another owner goes on in each stage.
    """

    partitions: int
    stages: tuple[tuple[Op, ...], ...]
    keys: int = 0
    append_time: bool = False
    restarts: bool = False

    @property
    def topic_configs(self) -> dict[str, str]:
        """What the source topic is created with."""
        configs = {"retention.ms": "-1", "message.timestamp.after.max.ms": LONG}
        if self.append_time:
            configs["message.timestamp.type"] = "LogAppendTime"
        if self.keys:
            configs |= {
                "cleanup.policy": "compact,delete",
                "min.cleanable.dirty.ratio": "0.0",
                "delete.retention.ms": "0",
                "min.compaction.lag.ms": "0",
                "internal.segment.bytes": "2000000",  # holds the largest batch
            }
        return configs

    @property
    def mirror_configs(self) -> dict[str, str]:
        """What a mirror creates it with."""
        configs = {
            "retention.ms": "-1",
            "message.timestamp.after.max.ms": LONG,
            "message.timestamp.type": "CreateTime",
            "compression.type": "producer",
        }
        if self.keys:  # cleaning at the destination would come at another time than at the source
            configs |= {"cleanup.policy": "compact,delete", "min.compaction.lag.ms": LONG}
        return configs


COUNTS = st.one_of(st.sampled_from((1, 1, 1, 2, 3)), st.integers(1, 60), st.integers(1, 5_000))


@st.composite
def operations(draw: st.DrawFn, partitions: int, *, first: bool) -> tuple[Op, ...]:
    """One stage."""
    partition = st.integers(0, partitions - 1)
    producer = st.integers(1, 3)
    common: dict[str, Any] = {
        "partition": partition,
        "count": COUNTS,
        "codec": st.sampled_from(CODECS),
        "seed": st.integers(0, 2**32),
    }
    kinds = [
        st.builds(Batch, **common),
        st.builds(Batch, producer=producer, **common),
        st.builds(Batch, producer=producer, **common),
        st.builds(End, producer=producer, commit=st.booleans()),
        st.builds(Produced, commit=st.sampled_from((None, True, False)), **common),
    ]
    if first:
        kinds.append(st.builds(DeleteHead, partition=partition, percent=st.integers(0, 100)))
    return tuple(draw(st.lists(st.one_of(kinds), min_size=3, max_size=14)))


@st.composite
def histories(draw: st.DrawFn) -> History:
    """A history."""
    partitions = draw(st.integers(1, 3))
    stages = draw(st.integers(1, 3))
    return History(
        partitions=partitions,
        stages=tuple(draw(operations(partitions, first=number == 0)) for number in range(stages)),
        keys=draw(st.sampled_from((0, 0, 0, 3, 40))),
        append_time=draw(st.sampled_from((False, False, False, True))),
        restarts=draw(st.booleans()),
    )


def random_history(seed: int) -> History:
    """A history that depends on nothing but the seed: two seeds have nothing in common, unlike two draws."""
    rng = random.Random(seed)
    partitions = rng.randint(1, 3)

    def operation(*, first: bool) -> Op:
        common: dict[str, Any] = {
            "partition": rng.randrange(partitions),
            "count": rng.choice((1, rng.randint(1, 4), rng.randint(1, 60), rng.randint(1, 5_000))),
            "codec": rng.choice(CODECS),
            "seed": rng.randrange(2**32),
        }
        kind = rng.choice(
            ("plain", "transactional", "transactional", "transactional", "end", "end", "client", "head")
        )
        if kind == "end":
            return End(rng.randint(1, 3), rng.random() < 0.5)
        if kind == "client":
            return Produced(commit=rng.choice((None, True, False)), **common)
        if kind == "head" and first:
            return DeleteHead(common["partition"], rng.randint(0, 100))
        return Batch(producer=rng.randint(1, 3) if kind == "transactional" else 0, **common)

    stages = tuple(
        tuple(operation(first=number == 0) for _ in range(rng.randint(3, 16)))
        for number in range(rng.randint(1, 3))
    )
    return History(
        partitions=partitions,
        stages=stages,
        keys=rng.choice((0, 0, 3, 40)),
        append_time=rng.random() < 0.25,
        restarts=rng.random() < 0.5,
    )


@dataclass
class HistoryWriter:
    """Writes a history's stages to a topic that exists."""

    history: History
    cluster: SandboxCluster
    topic: str
    raw: RawWriter
    transactions: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    async def write(self, stage: Sequence[Op]) -> None:
        """Do all of a stage; open transactions stay open."""
        for op in stage:
            if isinstance(op, Batch):
                found = {op.partition: raw_batch_records(op.seed, op.count, keys=self.history.keys)}
                if op.producer:
                    await self.raw.transactional(op.producer, self.topic, found, op.codec)
                else:
                    await self.raw.plain(self.topic, found, op.codec)
            elif isinstance(op, End):
                await self.raw.end(op.producer, commit=op.commit)
            elif isinstance(op, Produced):
                await asyncio.to_thread(self._produce, op)
            else:
                await asyncio.to_thread(self._delete_head, op)

    async def end_transactions(self, seed: int = 0) -> None:
        """End what is open, one way or the other."""
        rng = random.Random(seed)
        for producer in sorted(self.raw._open):
            await self.raw.end(producer, commit=rng.random() < 0.5)
        await self.raw.settled(self.topic, range(self.history.partitions))

    def _produce(self, op: Produced) -> None:
        content = records(op.seed, op.count, op.partition, keys=self.history.keys)
        name = f"{self.topic}-client-{next(self.transactions)}"
        if op.commit is None:
            produce_plainly(
                self.cluster.bootstrap, self.topic, content, {"compression.type": codecs.NAMES[op.codec]}
            )
        else:
            produce_transaction(
                self.cluster.bootstrap, self.topic, content, commit=op.commit, transactional_id=name
            )

    def _delete_head(self, op: DeleteHead) -> None:
        start, end = log_range(self.cluster.bootstrap, self.topic, op.partition)
        # an open transaction holds the last stable offset, which DeleteRecords may pass but readers may not
        before = start + (end - start) * op.percent // 100
        if before > start:
            delete_records(self.cluster.bootstrap, self.topic, before, op.partition)

    async def compact(self, deadline_s: float) -> None:
        """Close the written segments, wait until the log cleaner is through them, and let it rest from then on."""
        partitions = range(self.history.partitions)
        await self.raw.plain(self.topic, {p: raw_batch_records(p, 30, keys=10_000) for p in partitions})
        # the active segment is never cleaned: with this size the next batch begins another one, once the broker
        # has heard of it, which takes a moment
        active = {p: _active_segment(self.cluster, self.topic, p) for p in partitions}
        await self._alter({"internal.segment.bytes": "1000"})
        end = time.monotonic() + deadline_s
        while active:
            assert time.monotonic() < end, f"{self.topic}: no new segment"
            await self.raw.plain(self.topic, {p: raw_batch_records(1, 1, keys=1) for p in active})
            active = {p: at for p, at in active.items() if _active_segment(self.cluster, self.topic, p) == at}
        await asyncio.to_thread(wait_until_cleaned, self.cluster, self.topic, partitions, deadline_s)
        await self._alter({"cleanup.policy": "delete", "internal.segment.bytes": "2000000"})

    async def _alter(self, configs: dict[str, str]) -> None:
        await asyncio.to_thread(alter_topic, self.cluster.bootstrap, self.topic, configs)


def alter_topic(bootstrap: str, topic: str, configs: dict[str, str]) -> None:
    """Change settings of a topic."""
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in configs.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    client = admin(bootstrap)
    client.incremental_alter_configs([resource])[resource].result(DEADLINE_S)


def wait_until_cleaned(
    cluster: SandboxCluster, topic: str, partitions: Sequence[int], deadline_s: float = 60.0
) -> None:
    """Wait until the log cleaner has been through every segment but the active one."""
    data = cluster.brokers[0].data

    def is_cleaned() -> bool:
        checkpoint = data / "cleaner-offset-checkpoint"
        if not checkpoint.exists():
            return False
        lines = [line.split() for line in checkpoint.read_text().splitlines()]
        done = {(line[0], int(line[1])): int(line[2]) for line in lines if len(line) == 3}
        return all(
            done.get((topic, partition), -1) >= _active_segment(cluster, topic, partition)
            for partition in partitions
        )

    wait_until(is_cleaned, deadline_s, what=f"cleaning of {topic}")


def _active_segment(cluster: SandboxCluster, topic: str, partition: int) -> int:
    folder = cluster.brokers[0].data / f"{topic}-{partition}"
    return max(int(path.stem) for path in folder.glob("*.log"))
