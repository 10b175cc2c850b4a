"""Copying of one mirror partition: cursor, queue of steps, producer identity. No I/O of its own.

The reader feeds it what was fetched, the appender takes steps from its head and reports what became of them.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kmirror_dagster.broker import batches
from kmirror_dagster.broker.connection import BufferPool
from kmirror_dagster.broker.fetch import FetchedPartition, FetchPosition
from kmirror_dagster.broker.transactions import TransactionalProducer
from kmirror_dagster.errors import ReplicationError
from kmirror_dagster.replication.plan import NO_LIMITS, Append, Hole, Limits, Marker, Skip, Step, plan
from kmirror_dagster.replication.progress import Meter, Progress
from kmirror_dagster.replication.translation import Translation

TopicPartition = tuple[str, int]

# Bytes one partition may have fetched and not yet appended; a busy one cannot take the whole budget.
QUEUE_BYTES = 3 * 1024 * 1024 // 4


class Phase(Enum):
    """What a copier is doing."""

    RUNNING = "running"
    RESYNCING = "resyncing"
    STOPPED = "stopped"
    FAILED = "failed"


class Lease:
    """Shared hold on a receive buffer: it goes back to the pool when the last step that uses it is done."""

    __slots__ = ("_buffer", "_holds", "_on_free", "_pool", "size")

    def __init__(
        self, pool: BufferPool, buffer: bytearray | None, size: int, on_free: Callable[[int], None]
    ) -> None:
        self._pool = pool
        self._buffer = buffer
        self._holds = 1
        self._on_free = on_free
        self.size = size

    def hold(self) -> None:
        """Add a user."""
        self._holds += 1

    def drop(self) -> None:
        """End one use."""
        self._holds -= 1
        if self._holds == 0:
            buffer, self._buffer = self._buffer, None
            self._pool.release(buffer)
            self._on_free(self.size)


@dataclass(slots=True)
class Queued:
    """A step and the buffer its bytes lie in."""

    step: Step
    lease: Lease


@dataclass
class Sequence:
    """Producer identity data is appended with, and the sequence number that comes next.

    Attributes:
        known: whether the partition's leader knows the identity. Until then it takes any sequence number, also that
            of a batch behind one that it refused.
    """

    producer_id: int
    producer_epoch: int
    next: int = 0
    known: bool = False


@dataclass(eq=False)
class Copier:
    """State of one running partition. Offsets are the destination's where nothing else is said.

    Attributes:
        fenced_lane: coordinator partition, whose owner alone writes here.
        owner_epoch: that owner's leader epoch.
        acked: the destination's log end as acknowledged; all before it is appended for sure.
        sent: end of what was sent.
        planned: offset that what is fetched next will have.
        planned_source: next offset to fetch, which is the source's.
        in_flight: batches sent and unanswered.
    """

    topic: str
    partition: int
    plain: Sequence
    acked: int
    topic_id: bytes
    on_failure: Callable[[ReplicationError], None]
    fenced_lane: int
    owner_epoch: int
    leader_epoch: int = -1
    last_epoch: int = -1
    planned: int = 0
    planned_source: int = 0
    sent: int = 0
    in_flight: int = 0
    aborted_in_flight: bool = False
    blocked: bool = False
    phase: Phase = Phase.RUNNING
    generation: int = 0
    queue: deque[Queued] = field(default_factory=deque[Queued])
    queued_bytes: int = 0
    last_take: int = 0
    transaction: TransactionalProducer | None = None
    transaction_open: bool = False
    aborting: Sequence | None = None
    inherited: bool = False
    source_start: int = -1
    source_end: int = -1
    destination_start: int = -1
    meter: Meter = field(default_factory=Meter)
    acked_epoch: int = -1
    doubtful: bool = False
    unproven: bool = False
    futile: int = 0
    limits: Limits = NO_LIMITS
    translation: Translation = field(default_factory=Translation)
    error: ReplicationError | None = None
    trouble_since: float | None = None

    def __post_init__(self) -> None:
        self.restart_at(self.acked)

    @property
    def name(self) -> str:
        """`topic/partition`."""
        return f"{self.topic}/{self.partition}"

    @property
    def key(self) -> TopicPartition:
        """Topic and partition."""
        return self.topic, self.partition

    def restart_at(self, offset: int) -> None:
        """Begin again behind the destination's log end; the queue must be empty."""
        self.acked = self.sent = self.planned = offset
        self.planned_source = self.translation.offsets.to_source(offset)
        self.blocked = False

    # reading side

    @property
    def wants_more(self) -> bool:
        """Whether more should be fetched now: while one answer is worked on, the next is under way."""
        return self.phase is Phase.RUNNING and self.queued_bytes < max(QUEUE_BYTES, self.last_take)

    def position(self, max_bytes: int) -> FetchPosition:
        """What to fetch next."""
        return FetchPosition(
            self.topic_id, self.planned_source, self.leader_epoch, self.last_epoch, max_bytes
        )

    def take(self, fetched: FetchedPartition, asked_offset: int, lease: Lease) -> None:
        """Plan what was fetched and queue it.

        Args:
            fetched: answer for this partition.
            asked_offset: offset the request asked for; an answer to an older question is dropped, because
                records far behind the cursor would look like a hole.
            lease: the buffer the records lie in.

        Raises:
            UnsupportedDataError: with everything before the offending batch queued.
        """
        self.source_end = fetched.high_watermark
        self.source_start = max(self.source_start, fetched.log_start_offset)
        self.meter.source_end(time.monotonic(), fetched.high_watermark)
        if not len(fetched.records) or asked_offset != self.planned_source:
            return
        self.last_take = len(fetched.records)
        hole: Hole | None = None
        try:
            for step in plan(fetched.records, self.planned_source, fetched.aborted, self.limits):
                if isinstance(step, Hole):
                    # one that goes through several emptied batches is one
                    hole = step if hole is None else Hole(hole.start, step.end, step.leader_epoch)
                    continue
                if hole is not None:
                    self._plan(hole, lease)
                    hole = None
                self._plan(step, lease)
        finally:
            if hole is not None:
                self._plan(hole, lease)

    def _plan(self, step: Step, lease: Lease) -> None:
        """Queue a step, which has the source's offsets yet."""
        self.planned_source = step.end
        if self.planned != step.start or (isinstance(step, Hole) and self.translation.leaves_out(step)):
            step = self._at_destination(step)
        self.queue.append(Queued(step, lease))
        lease.hold()
        if isinstance(step, Append):
            self.queued_bytes += step.size
        self.planned = step.end
        self.last_epoch = step.leader_epoch

    def _at_destination(self, step: Step) -> Step:
        """The same step with the offsets it has at the destination."""
        if isinstance(step, Hole) and self.translation.leaves_out(step):
            return Skip(self.planned, step.end, step.leader_epoch)
        end = self.planned + step.end - step.start
        if isinstance(step, Append):
            step.start, step.end = self.planned, end
            return step
        return (
            Marker(self.planned, step.leader_epoch)
            if isinstance(step, Marker)
            else Hole(self.planned, end, step.leader_epoch)
        )

    # appending side

    @property
    def head(self) -> Step | None:
        """Next step to be done, None when there is none or the copier is not running."""
        return self.queue[0].step if self.queue and self.phase is Phase.RUNNING else None

    @property
    def head_step(self) -> Step | None:
        """First step of the queue, whatever the phase."""
        return self.queue[0].step if self.queue else None

    @property
    def can_append(self) -> bool:
        """Whether the head is a batch that may be sent now, behind those in flight."""
        if not self.queue or self.blocked or self.phase is not Phase.RUNNING:
            return False
        head = self.queue[0].step
        if not isinstance(head, Append) or (head.aborted and not self.transaction_open):
            return False
        sequence = self.aborting if head.aborted else self.plain
        if self.in_flight and not (sequence is not None and sequence.known):
            return False
        # plain and transactional batches have sequences of their own, so the broker keeps no order between the
        # two when one is refused: never both in flight
        return self.in_flight == 0 or self.aborted_in_flight == head.aborted

    @property
    def needs_barrier_work(self) -> bool:
        """Whether the head can only be worked on with nothing in flight, and nothing is."""
        head = self.head
        if head is None or self.blocked or self.in_flight:
            return False
        return not isinstance(head, Append) or (head.aborted and not self.transaction_open)

    def control_end(self, longest: int) -> int:
        """Offset behind the control records the queue begins with; they are written in one go.

        Args:
            longest: hole to be filled at most; a longer one ends them.
        """
        end = self.acked
        for entry in self.queue:
            step = entry.step
            if isinstance(step, (Append, Skip)) or (self.transaction_open and isinstance(step, Marker)):
                break
            if isinstance(step, Hole) and step.end - step.start > longest:
                break
            end = step.end
        return end

    def pop(self) -> Queued:
        """Take the head."""
        entry = self.queue.popleft()
        if isinstance(entry.step, Append):
            self.queued_bytes -= entry.step.size
        return entry

    def stamp(self, step: Append) -> memoryview:
        """Bytes of a step under the identity it belongs to, whose sequence moves on."""
        sequence = self.aborting if step.aborted else self.plain
        assert sequence is not None  # noqa: S101 - can_append saw the open transaction
        base = sequence.next
        sequence.next = batches.next_sequence(base, step.count)
        identity = (sequence.producer_id, sequence.producer_epoch, base)
        return batches.stamp(step.view, step.header, *identity, transactional=step.aborted)

    def make_smaller(self, step: Append) -> None:
        """Plan smaller batches from now on: this one was too large."""
        self.limits = self.limits.after_refusal(step, self.translation.offsets.to_source(step.end - 1) + 1)

    def drop_queue(self) -> None:
        """Throw away what was planned and not sent."""
        for entry in self.queue:
            entry.lease.drop()
        self.queue.clear()
        self.queued_bytes = 0
        self.planned = self.sent
        self.planned_source = self.translation.offsets.to_source(self.sent)

    def progress(self) -> Progress:
        """Snapshot for people and metrics."""
        now = time.monotonic()
        records_per_second, bytes_per_second = self.meter.rates(now)
        reached = self.translation.offsets.to_source(self.acked)
        return Progress(
            source_start=self.source_start,
            source_end=self.source_end,
            destination_start=self.destination_start,
            destination_end=self.acked,
            lag_records=max(0, self.source_end - reached) if self.source_end >= 0 else 0,
            lag_seconds=self.meter.lag_seconds(now, reached),
            records_per_second=records_per_second,
            bytes_per_second=bytes_per_second,
            records_total=self.meter.records,
            bytes_total=self.meter.bytes,
            batches_total=self.meter.batches,
            resyncs_total=self.meter.resyncs,
        )
