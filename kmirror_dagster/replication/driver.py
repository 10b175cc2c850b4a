"""What a running partition needs next: send, work at a barrier, read the destination again, or end with a reason."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.admin_errors import Right, rights_error
from kmirror_dagster.broker.batches import next_sequence
from kmirror_dagster.broker.fetch import FetchedPartition
from kmirror_dagster.broker.gathered import GatheringCluster
from kmirror_dagster.broker.reads import topic_config
from kmirror_dagster.broker.transactions import TransactionalProducer
from kmirror_dagster.broker.wire import EARLIEST, LATEST, ProducerState, WireCluster, retrying
from kmirror_dagster.errors import FencedError, KmirrorError, ReplicationError, SourceLossError
from kmirror_dagster.replication.alignment import DestinationEnd, DivergedError, destination_end
from kmirror_dagster.replication.appender import TOO_LARGE
from kmirror_dagster.replication.copier import Copier, Phase, Sequence
from kmirror_dagster.replication.doubt import Doubt, Verdict, judge
from kmirror_dagster.replication.markers import MarkerWriter, foreign_write
from kmirror_dagster.replication.plan import Append, Hole, Marker, Skip
from kmirror_dagster.replication.rhythm import Rhythm
from kmirror_dagster.settings import PolicySettings

log = logging.getLogger(__name__)

GIVE_UP_AFTER_S = 15.0
_FUTILE_RESYNCS = 10


class Attachment(Protocol):
    """How a copier is tied to the brokers that lead its partition."""

    async def locate(self, copier: Copier) -> None:
        """Find the leaders and attach."""
        ...

    def detach(self, copier: Copier) -> None:
        """Neither read nor send for it."""
        ...

    def send(self, copier: Copier) -> None:
        """Its head can be sent."""
        ...

    def resume(self, copier: Copier) -> None:
        """Its queue may have room again."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the loops."""
        ...

    def rhythm(self, node_id: int) -> Rhythm:
        """Rhythm of the requests to a destination broker."""
        ...


class CopierDriver:
    """Drives the copiers of one mirror.

    Args:
        source: cluster read from.
        destination: cluster written to.
        policies: of the mirror.
        attachment: ties copiers to readers and appenders.
        transactional_prefix: what the mirror's transactional ids begin with.
        may_send: False while this node is not sure to be the owner.
    """

    def __init__(
        self,
        source: WireCluster,
        destination: GatheringCluster,
        policies: PolicySettings,
        attachment: Attachment,
        *,
        transactional_prefix: str,
        may_send: Callable[[], bool],
    ) -> None:
        self._source = source
        self._destination = destination
        self._policies = policies
        self._attachment = attachment
        self._prefix = transactional_prefix
        self._may_send = may_send
        self._markers: MarkerWriter | None = None

    async def close(self) -> None:
        """End writing control records."""
        if self._markers is not None:
            await self._markers.close()

    # driving a copier

    def advance(self, copier: Copier) -> None:
        """Do what a copier needs next: send its head, work at a barrier, fetch more, or end with its error."""
        if copier.phase is not Phase.RUNNING:
            return
        if copier.can_append:
            self._attachment.send(copier)
        elif copier.needs_barrier_work:
            copier.blocked = True
            if isinstance(copier.head, (Append, Skip)) or (
                copier.transaction_open and isinstance(copier.head, Marker)
            ):
                self._attachment.spawn(self._guarded(copier, lambda: self._at_barrier(copier)))
            else:
                self._write_control(copier)
        elif copier.error is not None and not copier.queue and not copier.in_flight:
            copier.on_failure(copier.error)
            return
        self._attachment.resume(copier)

    async def _guarded(self, copier: Copier, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A bug in work beside the loops must end in a FAILED partition with its name, not in one that hangs."""
        try:
            await work()
        except Exception as error:
            log.exception("%s", copier.name)
            copier.on_failure(ReplicationError(f"{copier.name}: {type(error).__name__}: {error}"))

    async def _at_barrier(self, copier: Copier) -> None:
        """Open an own transaction, end it, or leave a hole out: each needs everything before acknowledged."""
        step = copier.head
        try:
            self._assure_ownership()
            if isinstance(step, Append):
                await self._open_transaction(copier, step.start)
            elif isinstance(step, Skip):
                await self._leave_out(copier, step)
            elif step is not None and copier.transaction is not None:
                await self._end_transaction(copier, copier.transaction, step)
        except KmirrorError as error:
            self._troubled(copier, error)
            return
        if isinstance(step, Marker):
            self._written(copier, step.end)
            return
        copier.blocked = False
        if isinstance(step, Skip) and copier.head is step:
            copier.pop().lease.drop()
            copier.futile = 0
        self.advance(copier)

    async def _leave_out(self, copier: Copier, step: Skip) -> None:
        """Have the map stored first: what is appended from then on has the offsets it says."""
        end = await destination_end(self._destination, copier.key, copier.plain.producer_id)
        if end.offset != step.start:
            raise KmirrorError(f"{copier.name}: the destination ends at {end.offset} instead of {step.start}")
        copier.unproven = False
        self._assure_ownership()
        await copier.translation.leave_out(copier.name, step.start, step.source)
        log.info(
            "%s: offsets up to %d hold no record at the source and are left out; it is mirrored at %d",
            copier.name,
            step.source - 1,
            step.start,
        )

    def _write_control(self, copier: Copier) -> None:
        """Have the control records written that the queue begins with."""
        head = copier.head
        if not self._may_send():
            self._troubled(copier, KmirrorError("this node is not sure of its leadership"))
        elif isinstance(head, Hole) and head.end - head.start > self._policies.max_hole_records:
            copier.on_failure(self._long_hole(copier, head))
        else:
            copier.sent = copier.control_end(self._policies.max_hole_records)
            self._marker_writer().write(copier, copier.acked, copier.sent)

    def _written(self, copier: Copier, end: int) -> None:
        """Control records up to `end` are in the log: go on behind them."""
        copier.blocked = False
        if copier.phase not in (Phase.RUNNING, Phase.STOPPED):
            return
        while (step := copier.head_step) is not None and step.end <= end and not isinstance(step, Skip):
            entry = copier.pop()
            copier.acked_epoch = entry.step.leader_epoch
            entry.lease.drop()
        copier.acked = copier.sent = end
        copier.futile = 0
        self.advance(copier)

    def _troubled(self, copier: Copier, error: KmirrorError) -> None:
        if isinstance(error, FencedError):
            # going on would fence the other one in turn: whose partition it is has to be looked up first
            error = ReplicationError(f"{copier.name}: {error}")
        if isinstance(error, ReplicationError):
            copier.on_failure(error)
            return
        copier.blocked = False
        self.doubt(copier, str(error), control=True)

    def _assure_ownership(self) -> None:
        if not self._may_send():
            raise KmirrorError("this node is not sure of its leadership")

    def _long_hole(self, copier: Copier, hole: Hole) -> ReplicationError:
        error = ReplicationError(
            f"{copier.name}: {hole.end - hole.start} offsets from {hole.start} on hold no record at the source, more "
            f"than policies.max_hole_records ({self._policies.max_hole_records}): raise it to fill them, or set "
            "policies.offsets to translated to leave them out"
        )
        error.retriable = False
        return error

    async def _open_transaction(self, copier: Copier, start: int) -> None:
        """Open the own transaction that records from offset `start` on are aborted in."""
        opened: bool | None = False
        if copier.transaction is None:
            transaction = TransactionalProducer(self._destination, self.transactional_id(*copier.key))
            opened = await transaction.adopt(copier.key)
            if opened is None:
                await transaction.start()
            copier.transaction = transaction
            copier.aborting = await self._sequence_at(copier, transaction, start)
            copier.inherited = opened is not None
        if not opened:
            await copier.transaction.add_partitions([copier.key])
        copier.transaction_open = True

    async def _sequence_at(self, copier: Copier, transaction: TransactionalProducer, start: int) -> Sequence:
        """Where an identity goes on, which may have ended transactions in the partition before.

        Read together with the log's end: the sequence number stands for that offset and no other.
        """
        end = await destination_end(self._destination, copier.key, copier.plain.producer_id)
        if end.offset != start:
            raise KmirrorError(f"{copier.name}: the destination ends at {end.offset} instead of {start}")
        identity = (transaction.producer_id, transaction.producer_epoch)
        following = end.sequence_of(*identity)
        return Sequence(*identity, following or 0, known=bool(following))

    def inherit(self, copier: Copier, state: ProducerState) -> None:
        """Go on with a transaction the former owner left open, under its identity."""
        copier.transaction = TransactionalProducer(self._destination, self.transactional_id(*copier.key))
        copier.transaction.inherit(state.producer_id, state.producer_epoch)
        following = next_sequence(state.last_sequence, 1)
        copier.aborting = Sequence(state.producer_id, state.producer_epoch, following, known=True)
        copier.transaction_open = True
        copier.inherited = True

    async def _end_transaction(
        self, copier: Copier, transaction: TransactionalProducer, step: "Marker | Hole"
    ) -> None:
        if copier.inherited:
            # the identity is the former owner's as well: it may have ended this one, and begun another
            await self._await_end(copier, step.start)
        copier.sent = step.end
        await transaction.abort()
        await self._await_end(copier, step.end)
        copier.transaction_open = False
        if copier.inherited:
            # the shared identity ends with its transaction: a late request of the former owner is refused from now on
            await transaction.start()
            copier.aborting = Sequence(transaction.producer_id, transaction.producer_epoch)
            copier.inherited = False

    async def _await_end(self, copier: Copier, wanted: int) -> None:
        """Wait until the log ends at an offset, for a marker that is to be the last record."""
        end = time.monotonic() + GIVE_UP_AFTER_S
        while True:
            reached = (await self._destination.list_offsets([copier.key], LATEST))[copier.key].value()
            if reached == wanted:
                break
            if reached > wanted:
                raise foreign_write(copier, reached, wanted)
            if time.monotonic() > end:
                raise KmirrorError(f"{copier.name}: the destination ends at {reached}, {wanted} did not show")
            await asyncio.sleep(0.002)

    def transactional_id(self, topic: str, partition: int) -> str:
        return f"{self._prefix}/{topic}/{partition}"

    def _marker_writer(self) -> MarkerWriter:
        if self._markers is None:
            self._markers = MarkerWriter(
                self._destination,
                self._prefix,
                on_written=self._written,
                on_trouble=self._troubled,
                may_send=self._may_send,
                rhythm_of=self._attachment.rhythm,
            )
        return self._markers

    # doubt and failure

    def doubt(self, copier: Copier, reason: str, *, control: bool = False) -> None:
        """Stop sending until the destination's log end has been read again.

        Args:
            copier: whose outcome is unknown.
            reason: why.
            control: whether control records are in doubt; data otherwise.
        """
        if copier.phase is not Phase.RUNNING:
            return
        log.info("%s: %s; reading the destination's log end again", copier.name, reason)
        copier.meter.resyncs += 1
        copier.futile += 1
        self._quiesce(copier)
        self._attachment.spawn(self._guarded(copier, lambda: self._resync(copier, reason, control)))

    def _quiesce(self, copier: Copier) -> None:
        """Send nothing more and take no answers any more."""
        copier.phase = Phase.RESYNCING
        copier.generation += 1
        self._attachment.detach(copier)
        copier.drop_queue()

    def turned_down(self, copier: Copier, error: ReplicationError, code: int) -> None:
        """A batch was refused for good: end with that, and with the limit when it is too large."""
        if copier.phase is not Phase.RUNNING or code not in TOO_LARGE:
            copier.on_failure(error)
            return
        self._quiesce(copier)
        self._attachment.spawn(self._guarded(copier, lambda: self._name_limit(copier, error, code)))

    async def _name_limit(self, copier: Copier, error: ReplicationError, code: int) -> None:
        name = "max.message.bytes" if code == codes.MESSAGE_TOO_LARGE else "segment.bytes"
        try:
            limit = await topic_config(self._destination, copier.topic, name)
        except KmirrorError as unknown:
            log.info("%s: %s", copier.name, unknown)
            copier.on_failure(error)
            return
        copier.on_failure(ReplicationError(f"{error} (it is {limit})"))

    async def _resync(self, copier: Copier, reason: str, control: bool) -> None:
        """After an uncertain answer: read log end and producer state before anything is sent again."""
        try:
            while copier.in_flight:
                await asyncio.sleep(0.002)
            # the first time at once, then with full jitter
            ceiling = min(0.01 * (2**copier.futile - 2), 2.0)
            await asyncio.sleep(random.uniform(0, ceiling))  # noqa: S311 - jitter, no secret
            await retrying(self._destination.refresh, deadline_s=GIVE_UP_AFTER_S)
            end = await destination_end(self._destination, copier.key, copier.plain.producer_id)
        except KmirrorError as error:
            if copier.phase is Phase.RESYNCING:
                copier.on_failure(ReplicationError(f"destination: {error}"))
            return
        if copier.phase is not Phase.RESYNCING:
            return
        if copier.futile > _FUTILE_RESYNCS:
            copier.on_failure(
                ReplicationError(
                    f"{copier.name}: the destination does not take offset {end.offset}: {reason}"
                )
            )
            return
        uncertain = _doubt_of(copier, end, control)
        verdict = judge(uncertain)
        if verdict is Verdict.ANOTHER_OWNER:
            copier.on_failure(
                ReplicationError(
                    f"{copier.name}: the destination ends at {end.offset}, further than this node has written "
                    f"({copier.sent}): another owner of this mirror is at work, or somebody else writes to this topic"
                )
            )
            return
        if verdict is Verdict.SOMEBODY_ELSE:
            copier.on_failure(foreign_write(copier, end.offset, uncertain.expected))
            return
        if end.offset < copier.acked:
            log.warning(
                "%s: the destination lost offsets %d to %d (unclean leader election?); they are mirrored again",
                copier.name,
                end.offset,
                copier.acked - 1,
            )
        if copier.translation.offsets.truncated(end.offset) != copier.translation.offsets:
            copier.on_failure(
                ReplicationError(f"{copier.name}: its log was cut at {end.offset}: aligning again")
            )
            return
        log.info("%s: goes on at %d after: %s", copier.name, end.offset, reason)
        copier.plain.next = end.next_sequence
        copier.plain.known = end.own is not None and end.own.last_sequence >= 0
        copier.transaction = copier.aborting = None
        copier.transaction_open = copier.inherited = False
        if end.open_transaction is not None:
            self.inherit(copier, end.open_transaction)
        copier.last_epoch = -1
        copier.error = None
        copier.restart_at(end.offset)
        copier.phase = Phase.RUNNING
        await self._attachment.locate(copier)

    def refused(self, copier: Copier, fetched: FetchedPartition) -> None:
        self._attachment.spawn(self._guarded(copier, lambda: self._explain(copier, fetched)))

    async def _explain(self, copier: Copier, fetched: FetchedPartition) -> None:
        """Say why the source refuses a position, and end with that."""
        if fetched.diverging_end_offset >= 0:
            lost = copier.planned_source - fetched.diverging_end_offset
            copier.on_failure(
                DivergedError(
                    f"{copier.name}: the source lost its offsets {fetched.diverging_end_offset} to "
                    f"{copier.planned_source - 1} ({lost}) in an unclean leader election, the destination holds them; "
                    "delete the topic at the destination to mirror the source anew"
                )
            )
            return
        if fetched.error_code != codes.OFFSET_OUT_OF_RANGE:
            reason = f"the source refuses to be read: {codes.error_name(fetched.error_code)}"
            if fetched.error_code == codes.TOPIC_AUTHORIZATION_FAILED:
                reason = str(rights_error(Right("READ", "topic"), copier.key[0], self._source.settings))
            copier.on_failure(ReplicationError(f"{copier.name}: {reason}"))
            return
        try:
            first = (await self._source.list_offsets([copier.key], EARLIEST))[copier.key].value()
            last = (await self._source.list_offsets([copier.key], LATEST))[copier.key].value()
        except KmirrorError as error:
            copier.on_failure(ReplicationError(f"{copier.name}: source: {error}"))
            return
        copier.on_failure(self._out_of_range(copier, first, last))

    def _out_of_range(self, copier: Copier, first: int, last: int) -> ReplicationError:
        if (wanted := copier.planned_source) < first:
            loss = SourceLossError(
                f"{copier.name}: offsets {wanted} to {first - 1} ({first - wanted}) were deleted at "
                "the source before they were mirrored: set policies.source_log_start_beyond_cursor to skip-to-start to "
                "go on without them",
                (wanted, first),
            )
            # alignment goes on at the source's first offset when the policy says so
            loss.retriable = self._policies.source_log_start_beyond_cursor == "skip-to-start"
            return loss
        return ReplicationError(
            f"{copier.name}: the source ends at {last}, before the destination's end {copier.planned_source}: it "
            "lost its tail; delete the topic at the destination to mirror the source anew"
        )


def _doubt_of(copier: Copier, end: DestinationEnd, control: bool) -> Doubt:
    own, sent = end.own, copier.sent
    sent_sequence = copier.plain.next
    end_sequence = None if own is None else end.sequence_of(own.producer_id, own.producer_epoch)
    if not control and copier.aborted_in_flight and copier.aborting is not None:
        identity = (copier.aborting.producer_id, copier.aborting.producer_epoch)
        sent_sequence, end_sequence = copier.aborting.next, end.sequence_of(*identity)
        if end.open_transaction is None:
            # ended by its timeout or by another owner: its marker took an offset, of a record when it was early
            sent, end_sequence = sent + 1, None
    return Doubt(
        acked=copier.acked,
        sent=sent,
        end=end.offset,
        control=control,
        sent_sequence=sent_sequence,
        end_sequence=end_sequence,
        owner_epoch=copier.owner_epoch,
        seen_epoch=-1 if own is None else own.coordinator_epoch,
    )
