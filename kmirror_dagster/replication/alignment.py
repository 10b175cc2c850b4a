"""LOG_ALIGNMENT: find where copying goes on, and prove that both logs are the same up to there.

The destination's log end is the cursor. Nothing is written before that end, the producer state and the last record
have been read.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kmirror_dagster.broker import codes, produce
from kmirror_dagster.broker.batches import next_sequence
from kmirror_dagster.broker.gathered import GatheringCluster
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.broker.reads import BatchLook
from kmirror_dagster.broker.transactions import SHARED_EPOCH, shared_producer_id
from kmirror_dagster.broker.wire import EARLIEST, LATEST, ProducerState, TopicPartition, retrying
from kmirror_dagster.errors import (
    BrokerError,
    ConnectionLostError,
    KmirrorError,
    ReplicationError,
    SourceLossError,
)
from kmirror_dagster.records import PartitionRecord
from kmirror_dagster.replication.filler import BATCH_RECORDS, PAYLOAD, filler_batch
from kmirror_dagster.replication.plan import Hole
from kmirror_dagster.replication.translation import NoStore, OffsetStore, Translation
from kmirror_dagster.settings import PolicySettings

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_DEADLINE_S = 30.0
# Metadata names the leaders of new partitions at once, the brokers become it one by one: thousands take minutes.
_NEW_LEADER_S = 180.0
_FILL_TIMEOUT_MS = 60_000
_OVERTAKEN = frozenset({codes.OUT_OF_ORDER_SEQUENCE_NUMBER, codes.DUPLICATE_SEQUENCE_NUMBER})


class DivergedError(ReplicationError):
    """Error when source and destination are not the same log up to the destination's end."""

    retriable = False


class RecreatedError(ReplicationError):
    """Error when the source topic was deleted and created again: the destination holds the former one's log."""

    retriable = False


@dataclass(frozen=True)
class Alignment:
    """Where copying goes on.

    Attributes:
        producer_id: idempotent producer id of all data of this partition.
        producer_epoch: its epoch.
        next_sequence: sequence number of the next record.
        source_topic_id: topic id at the source as text, None when it has none.
        source_leader_epoch: leader epoch of the source batch in front of the cursor, -1 when there is none.
        start_offset: the cursor, which is the destination's log end.
        destination_start: its log start.
        source_start: log start of the source.
        open_transaction: producer of a transaction of ours that is still open, None normally.
        translation: source offsets of the destination's, and how they may come to differ further.
    """

    producer_id: int
    producer_epoch: int
    next_sequence: int
    source_topic_id: str | None
    source_leader_epoch: int
    start_offset: int
    destination_start: int
    source_start: int
    source_end: int
    open_transaction: ProducerState | None = None
    translation: Translation = field(default_factory=Translation)


@dataclass(frozen=True)
class DestinationEnd:
    """What the destination's leader knows: log end, and the state of our producers.

    Attributes:
        next_sequence: that of the next batch of the producer asked for; 0 when it does not know.
        own: what it knows of the producer asked for, None when nothing.
        producers: all producers it knows.
    """

    offset: int
    next_sequence: int
    open_transaction: ProducerState | None
    own: ProducerState | None = None
    producers: tuple[ProducerState, ...] = ()

    def sequence_of(self, producer_id: int, producer_epoch: int) -> int | None:
        """Sequence number that comes next of an identity; None when it is not known.

        A broker that has forgotten a producer knows it again after a marker of it, but not its sequence.
        """
        for state in self.producers:
            if (state.producer_id, state.producer_epoch) == (producer_id, producer_epoch):
                return None if state.last_sequence < 0 else next_sequence(state.last_sequence, 1)
        return None


async def destination_end(cluster: GatheringCluster, tp: TopicPartition, producer_id: int) -> DestinationEnd:
    """Read log end and producer state once both ends agree (nothing is on its way to the followers).

    Raises:
        KmirrorError: retriable, when they do not agree within the deadline.
    """

    async def attempt() -> DestinationEnd:
        before = await cluster.log_end_of(tp)
        known = await cluster.producers_of(tp)
        visible = await cluster.offset_of(tp, LATEST)
        after = await cluster.log_end_of(tp)
        if not before == visible == after:
            raise codes.broker_error(codes.OFFSET_NOT_AVAILABLE, f"log end of {tp[0]}/{tp[1]} is not settled")
        own = next((state for state in known if state.producer_id == producer_id), None)
        opened = next((state for state in known if state.open_transaction_start >= 0), None)
        sequence = 0 if own is None or own.last_sequence < 0 else next_sequence(own.last_sequence, 1)
        return DestinationEnd(after, sequence, opened, own, tuple(known))

    return await patiently(attempt)


async def patiently(
    attempt: Callable[[], Awaitable[_T]],
    *,
    deadline_s: float = _DEADLINE_S,
    new_leader_s: float = _NEW_LEADER_S,
) -> _T:
    """Repeat a call while its error is retriable; for longer while a broker does not know yet that it leads.

    Raises:
        KmirrorError: the last error, when it is not retriable or the time is up.
    """
    end = time.monotonic() + new_leader_s
    while True:
        try:
            return await retrying(attempt, deadline_s=deadline_s)
        except BrokerError as error:
            if error.code != codes.NOT_LEADER_OR_FOLLOWER or time.monotonic() >= end:
                raise


async def align(
    source: GatheringCluster,
    destination: GatheringCluster,
    record: PartitionRecord,
    policies: PolicySettings,
    *,
    filler_id: str,
    fill_slots: asyncio.Semaphore,
    store: OffsetStore | None = None,
) -> Alignment:
    """Do the work of LOG_ALIGNMENT for one partition.

    Args:
        source: cluster read from.
        destination: cluster written to.
        record: what is stored of the partition.
        policies: of the mirror.
        filler_id: transactional id that gives filler its producer id; the same for every owner of the partition.
        fill_slots: bounds how many partitions are filled at a time.
        store: where the map of translated offsets is kept; None: they are not translated.

    Raises:
        ReplicationError: cannot be aligned; its `retriable` flag tells whether time may help.
    """
    tp = (record.topic, record.partition)
    try:
        return await _align(
            source, destination, tp, record, policies, filler_id, fill_slots, store or NoStore()
        )
    except ReplicationError:
        raise
    except BrokerError as error:
        failure = ReplicationError(str(error))
        failure.retriable = error.retriable or "AUTHORIZATION" in error.name
        raise failure from error
    except KmirrorError as error:
        raise ReplicationError(str(error)) from error


async def _align(
    source: GatheringCluster,
    destination: GatheringCluster,
    tp: TopicPartition,
    record: PartitionRecord,
    policies: PolicySettings,
    filler_id: str,
    fill_slots: asyncio.Semaphore,
    store: OffsetStore,
) -> Alignment:
    await source.refresh([tp[0]])
    leader = await retrying(lambda: source.leader(*tp), deadline_s=_DEADLINE_S)
    topic_id = str(leader.topic_id) if leader.topic_id else None
    if record.source_topic_id and topic_id and record.source_topic_id != topic_id:
        raise RecreatedError(
            f"source topic {tp[0]} was deleted and created again (topic id {record.source_topic_id} before, "
            f"{topic_id} now): delete it at the destination and run recover to mirror the new one"
        )
    producer_id, producer_epoch = record.producer_id, record.producer_epoch
    if producer_id < 0:
        producer_id, producer_epoch = await retrying(destination.data_identity, deadline_s=_DEADLINE_S)
    source_start = await _listed(source, tp, EARLIEST)
    start = await _listed(destination, tp, EARLIEST)
    end = await destination_end(destination, tp, producer_id)
    # behind the destination's: a former owner that is still at work must not seem to be ahead of the source
    source_end = await _listed(source, tp, LATEST)
    translation = await _translation(destination, tp, policies, store, start, end.offset)
    cursor = translation.offsets.to_source(end.offset)
    filling = await _is_filling(destination, tp, policies, source_start, start, end.offset, cursor)
    fresh = cursor == 0 or filling
    first = await _first_offset(source, tp, policies, source_start, source_end, fresh=fresh)
    if cursor > source_end:
        raise ReplicationError(
            f"{tp[0]}/{tp[1]}: the destination ends at {cursor}, the source at {source_end}: the source lost "
            "its tail, or somebody else wrote to the destination; compare both and delete the topic at the "
            "destination to mirror it anew"
        )
    if cursor < first or (filling and cursor == first):
        if start < end.offset and not filling:
            _refuse_loss(tp, policies, cursor, first, record)
        start = await _go_to(translation, tp, end.offset, first)
        if start:
            async with fill_slots:
                await Filler(destination, tp, filler_id).up_to(start)
            end = await destination_end(destination, tp, producer_id)
        translation.destination_start = start
    last_epoch = -1
    cursor = translation.offsets.to_source(end.offset)
    if cursor > source_start and end.offset > start:
        last = end.offset - 1
        last_epoch = await _prove_common(source, destination, tp, last, translation.offsets.to_source(last))
    return Alignment(
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        next_sequence=end.next_sequence,
        source_topic_id=topic_id,
        source_leader_epoch=last_epoch,
        start_offset=end.offset,
        destination_start=start,
        source_start=source_start,
        source_end=source_end,
        open_transaction=end.open_transaction,
        translation=translation,
    )


async def _translation(
    destination: GatheringCluster,
    tp: TopicPartition,
    policies: PolicySettings,
    store: OffsetStore,
    start: int,
    end: int,
) -> Translation:
    """Offsets of the copy as it is: what was mapped behind its end is gone with the records there."""
    may_translate = policies.may_translate(tp[0])
    if store.is_empty and not may_translate:
        return Translation()
    await destination.refresh([tp[0]])  # a copy that was made anew has another id, and nothing in it
    leader = await retrying(lambda: destination.leader(*tp), deadline_s=_DEADLINE_S)
    topic_id = str(leader.topic_id) if leader.topic_id else None
    stored = store.load(topic_id)
    offsets = stored.truncated(end)
    if offsets != stored:
        # it must be out of the way before the log reaches those offsets again
        await store.save(topic_id, offsets)
    translation = Translation(offsets, store=store, destination_topic_id=topic_id, destination_start=start)
    if may_translate:
        translation.longest = policies.max_hole_records
    return translation


async def _go_to(translation: Translation, tp: TopicPartition, end: int, first: int) -> int:
    """Where the destination's log has to begin for source offset `first`, filled up to there or with a new run."""
    reached = translation.offsets.to_source(end)
    if translation.leaves_out(Hole(reached, first, -1)):
        await translation.leave_out(f"{tp[0]}/{tp[1]}", end, first)
        return end
    return end + first - reached


async def _listed(cluster: GatheringCluster, tp: TopicPartition, which: int) -> int:
    """Offset of one kind; right after a topic was made its leader may not know so yet."""

    return await patiently(lambda: cluster.offset_of(tp, which))


async def _batch_at(cluster: GatheringCluster, tp: TopicPartition, offset: int) -> BatchLook | None:
    return await patiently(lambda: cluster.batch_at(tp, offset))


async def _first_offset(
    source: GatheringCluster,
    tp: TopicPartition,
    policies: PolicySettings,
    source_start: int,
    source_end: int,
    *,
    fresh: bool,
) -> int:
    """Offset mirroring has to begin at: the source's log start, or later by the start policy on a new log."""
    if not fresh or policies.start.at == "earliest":
        return source_start
    if policies.start.at == "latest":
        return source_end
    timestamp = policies.start.timestamp_ms
    if timestamp is None:
        return source_start
    found = await source.offset_of(tp, timestamp)
    # -1 is no error: no record is that new, so mirroring begins with what comes next
    return source_end if found < 0 else found


async def _is_filling(
    destination: GatheringCluster,
    tp: TopicPartition,
    policies: PolicySettings,
    source_start: int,
    start: int,
    end: int,
    cursor: int,
) -> bool:
    """Whether the last record is filler of an alignment that was interrupted before it deleted it."""
    if start == end or (cursor > source_start and policies.start.at == "earliest"):
        return False
    look = await _batch_at(destination, tp, end - 1)
    record = look.record_at(end - 1) if look is not None else None
    return record is not None and record.payload == PAYLOAD


def _refuse_loss(
    tp: TopicPartition, policies: PolicySettings, end: int, first: int, record: PartitionRecord
) -> None:
    """End with a loss, unless it is to be gone on without and has been recorded."""
    lost = f"{tp[0]}/{tp[1]}: offsets {end} to {first - 1} ({first - end}) were deleted at the source before they were"
    if policies.source_log_start_beyond_cursor != "skip-to-start":
        raise SourceLossError(
            f"{lost} mirrored: set policies.source_log_start_beyond_cursor to skip-to-start to go on without them",
            (end, first),
        )
    if (record.lost_from, record.lost_to) != (end, first):
        recorded = SourceLossError(f"{lost} mirrored; going on behind them", (end, first))
        recorded.retriable = True
        raise recorded
    log.warning("%s mirrored; going on behind them", lost)


async def _prove_common(
    source: GatheringCluster,
    destination: GatheringCluster,
    tp: TopicPartition,
    offset: int,
    source_offset: int,
) -> int:
    """Compare the last mirrored record on both sides.

    Returns:
        Leader epoch of the source's batch, -1 when the source has nothing at that offset any more.
    """
    ours, theirs = await asyncio.gather(
        _batch_at(destination, tp, offset), _batch_at(source, tp, source_offset)
    )
    if theirs is None or theirs.header.base_offset > source_offset:
        return -1
    if ours is None or ours.header.base_offset > offset:
        return theirs.header.leader_epoch
    here, there = ours.record_at(offset), theirs.record_at(source_offset)
    # a record that only one side has was compacted away on the other
    if here is not None and (theirs.header.is_control or (there is not None and here[1:] != there[1:])):
        raise DivergedError(
            f"{tp[0]}/{tp[1]}: the record at offset {source_offset} differs between source and destination: they are "
            "not the same log; delete the topic at the destination to mirror it anew"
        )
    return theirs.header.leader_epoch


class Filler:
    """Appends filler up to an offset and deletes it again; can be interrupted and begun again anywhere.

    All owners of a partition append filler under one producer id, which no stored record is needed for: sequence
    numbers keep them from filling the same offsets twice.
    """

    def __init__(self, destination: GatheringCluster, tp: TopicPartition, filler_id: str) -> None:
        self._destination = destination
        self._tp = tp
        self._filler_id = filler_id
        self._producer_id = -1
        self._end = DestinationEnd(0, 0, None)

    async def up_to(self, first: int) -> None:
        """Bring log end and log start to `first`.

        Raises:
            KmirrorError: as the broker answered; what was appended stays and is gone on from.
        """
        self._producer_id = await shared_producer_id(self._destination, self._filler_id)
        self._end = await destination_end(self._destination, self._tp, self._producer_id)
        await self._delete()
        while self._end.offset < first:
            await self._append(min(first - self._end.offset, BATCH_RECORDS))
            # at once, so that filler never shows for longer than one request and takes no space
            await self._delete()

    async def _delete(self) -> None:
        if self._end.offset:
            outcome = await self._destination.delete_records({self._tp: self._end.offset})
            outcome[self._tp].value()

    async def _append(self, count: int) -> None:
        topic, partition = self._tp
        batch = filler_batch(
            count,
            int(time.time() * 1000),
            producer_id=self._producer_id,
            producer_epoch=SHARED_EPOCH,
            base_sequence=self._end.next_sequence,
        )
        leader = await self._destination.leader(topic, partition)
        connection = await self._destination.connection(leader.node_id, "produce")
        correlation_id = connection.next_id()
        future = connection.send(
            correlation_id,
            produce.request(
                [produce.Append(topic, partition, batch)],
                correlation_id=correlation_id,
                client_id=self._destination.settings.client_id,
                timeout_ms=_FILL_TIMEOUT_MS,
            ),
        )
        try:
            frame = await asyncio.wait_for(asyncio.shield(future), _FILL_TIMEOUT_MS / 1000 + 5)
        except asyncio.TimeoutError:
            connection.close()
            raise ConnectionLostError(f"filling {topic}/{partition} unanswered") from None
        answer = produce.answer(frame.view)[0]
        if answer.error_code in _OVERTAKEN:
            raise ReplicationError(f"{topic}/{partition}: another owner fills offset {self._end.offset}")
        if answer.error_code:
            doing = f"filling {topic}/{partition} at {self._end.offset}"
            raise self._destination.refusal(answer.error_code, doing, Right("WRITE", "topic"), topic)
        if answer.base_offset != self._end.offset:
            raise DivergedError(
                f"{topic}/{partition}: somebody else wrote at offset {self._end.offset} of the destination"
            )
        self._end = DestinationEnd(
            self._end.offset + count,
            next_sequence(self._end.next_sequence, count),
            self._end.open_transaction,
        )
