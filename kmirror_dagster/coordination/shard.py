"""Authority over one led coordinator partition: checks each write, appends in groups, then tells the view."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.ports import AppendLog
from kmirror_dagster.coordination.view import Entry, StateView
from kmirror_dagster.errors import (
    DeadlineError,
    FencedError,
    IllegalTransitionError,
    KmirrorError,
    NotLeaderError,
    StaleEpochError,
)
from kmirror_dagster.lifecycle import MirrorState, is_allowed
from kmirror_dagster.records import PartitionRecord, Record, decode_key

logger = logging.getLogger(__name__)

# one append: well below the default max.message.bytes of a topic (1 MiB)
_BATCH_BYTES = 512 * 1024
_BATCH_RECORDS = 2_000
_VIEW_DEADLINE_S = 15.0


@dataclass(frozen=True)
class Write:
    """A record to store, or a key to delete."""

    key: bytes
    record: Record | None

    @classmethod
    def of(cls, record: Record) -> "Write":
        """Store a record."""
        return cls(record.key(), record)

    @classmethod
    def tombstone(cls, key: bytes) -> "Write":
        """Delete a key."""
        return cls(key, None)


@dataclass
class _Waiting:
    writes: Sequence[Write]
    encoded: list[tuple[bytes, bytes | None]]
    size: int
    done: asyncio.Future[None]


class Shard:
    """One coordinator partition while this node leads it.

    Decisions are made against what is stored plus what waits to be stored. When an append fails nothing
    behind it may be trusted: all that waits fails, the shard closes, and leadership is taken anew.

    Args:
        partition: coordinator partition.
        epoch: leader epoch, higher than that of any record in it.
        view: already past this leader's own leader record.
        log: fenced appends.
        now_ms: epoch milliseconds.
        on_broken: called once when an append failed, with its error.
    """

    def __init__(
        self,
        partition: int,
        epoch: int,
        view: StateView,
        log: AppendLog,
        *,
        now_ms: Callable[[], int],
        on_broken: Callable[["Shard", KmirrorError], None],
    ) -> None:
        self.partition = partition
        self.epoch = epoch
        self._view = view
        self._log = log
        self._now_ms = now_ms
        self._on_broken = on_broken
        self._queue: list[_Waiting] = []
        self._pending: dict[PartitionKey, PartitionRecord] = {}
        self._flusher: asyncio.Task[None] | None = None
        self._closed: KmirrorError | None = None

    @property
    def is_open(self) -> bool:
        """Whether this node still leads by it."""
        return self._closed is None

    def state(self, name: PartitionKey) -> PartitionRecord | None:
        """State of a led mirror partition, including one that is being stored."""
        return self._pending.get(name) or self._view.states.get(name)

    async def transition(
        self,
        name: PartitionKey,
        target: MirrorState,
        *,
        expected_state_epoch: int,
        expected_leader_epoch: int | None = None,
        **fields: Any,
    ) -> PartitionRecord:
        """Store the next state of a mirror partition; returns after the commit.

        Args:
            name: a mirror partition led here.
            target: state to go to; the current one re-asserts it under this leader's epoch.
            expected_state_epoch: state epoch the decision was made by; 0 when there was no state.
            expected_leader_epoch: epoch of the stored record it was made by; None when made by this leader.
            fields: further fields of the record; those not named are kept.

        Raises:
            StaleEpochError: the stored epochs are others: read again, decide again.
            IllegalTransitionError: the lifecycle does not allow it.
            NotLeaderError, FencedError, KmirrorError: not stored, or not known to be; leadership is over.
        """
        current = self.state(name)
        self._check(name, current, target, expected_state_epoch, expected_leader_epoch)
        record = self._next(name, current, target, fields)
        await self.write([Write.of(record)])
        return record

    async def write(self, writes: Sequence[Write]) -> None:
        """Store records as one append, together with whatever else waits; returns after the commit.

        Raises:
            NotLeaderError, FencedError, KmirrorError: as `transition`.
        """
        if self._closed is not None:
            raise NotLeaderError(
                f"coordinator partition {self.partition} is no longer led here: {self._closed}"
            )
        encoded = [
            (write.key, write.record.value() if write.record is not None else None) for write in writes
        ]
        size = sum(len(key) + len(value or b"") for key, value in encoded)
        waiting = _Waiting(writes, encoded, size, asyncio.get_running_loop().create_future())
        for write in writes:
            if isinstance(write.record, PartitionRecord):
                self._pending[PartitionKey.of(write.record)] = write.record
        self._queue.append(waiting)
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush(), name=f"shard-{self.partition}")
        # a caller that is cancelled does not take its write back: it may be part of an append under way
        await asyncio.shield(waiting.done)

    def close(self, error: KmirrorError) -> None:
        """End the authority: what waits fails with `error`. Harmless when closed."""
        if self._closed is not None:
            return
        self._closed = error
        self._pending.clear()
        waiting, self._queue = self._queue, []
        for item in waiting:
            _fail(item, error)

    def depose(self, error: KmirrorError) -> None:
        """End the authority because somebody else has it; leadership hears of it. Harmless when closed."""
        if self._closed is None:
            self.close(error)
            self._on_broken(self, error)

    async def drained(self) -> None:
        """Wait for an append under way. Callers bound the wait."""
        if self._flusher is not None:
            await asyncio.shield(self._flusher)

    def _check(
        self,
        name: PartitionKey,
        current: PartitionRecord | None,
        target: MirrorState,
        expected_state_epoch: int,
        expected_leader_epoch: int | None,
    ) -> None:
        state_epoch = current.state_epoch if current else 0
        if state_epoch != expected_state_epoch:
            raise StaleEpochError(
                f"{name}: state epoch {expected_state_epoch} was expected, {state_epoch} is stored"
            )
        leader_epoch = current.leader_epoch if current else 0
        if expected_leader_epoch is not None and leader_epoch != expected_leader_epoch:
            raise StaleEpochError(
                f"{name}: leader epoch {expected_leader_epoch} was expected, {leader_epoch} is stored"
            )
        state = current.state if current else None
        if not is_allowed(state, target, previous=current.previous_state if current else None):
            raise IllegalTransitionError(
                f"{name}: {target} cannot follow {state or 'no state'}; "
                "see 'kmirror describe' for its state and use a verb that fits it"
            )

    def _next(
        self, name: PartitionKey, current: PartitionRecord | None, target: MirrorState, fields: dict[str, Any]
    ) -> PartitionRecord:
        if current is None:
            base = PartitionRecord(
                mirror=name.mirror, topic=name.topic, partition=name.partition, state=target
            )
            changed: dict[str, Any] = {"state_epoch": 1, "since_ms": self._now_ms()}
        elif current.state is target:
            base, changed = current, {}
            if "error" in fields and fields["error"] != current.error:
                changed = {"state_epoch": current.state_epoch + 1}
        else:
            base = current
            changed = {
                "state": target,
                "previous_state": current.state,
                "state_epoch": current.state_epoch + 1,
                "since_ms": self._now_ms(),
            }
        return base.model_copy(update={**changed, **fields, "leader_epoch": self.epoch})

    async def _flush(self) -> None:
        try:
            while self._queue and self._closed is None:
                batch = self._take_batch()
                records = [pair for item in batch for pair in item.encoded]
                try:
                    base = await self._log.append(self.partition, records)
                except KmirrorError as error:
                    self._break(batch, error)
                    return
                try:
                    await self._tell_view(batch, base)
                except DeadlineError as error:
                    self._break(batch, error)
                    return
                self._committed(batch)
        finally:
            self._flusher = None

    def _take_batch(self) -> list[_Waiting]:
        size = count = taken = 0
        for item in self._queue:
            size += item.size
            count += len(item.encoded)
            if taken and (size > _BATCH_BYTES or count > _BATCH_RECORDS):
                break
            taken += 1
        batch, self._queue = self._queue[:taken], self._queue[taken:]
        return batch

    async def _tell_view(self, batch: list[_Waiting], base: int) -> None:
        """Bring a committed batch into the view."""
        writes = [write for item in batch for write in item.writes]
        if base == self._view.position(self.partition):
            now = self._now_ms()
            entries = [
                Entry(self.partition, base + index, now, decode_key(write.key), write.record)
                for index, write in enumerate(writes)
            ]
            self._view.apply(entries)
            return
        # Somebody without a lead has written in between (by hand, say): what that was has to be read first.
        end = base + len(writes)
        try:
            await asyncio.wait_for(self._view.reached(self.partition, end), _VIEW_DEADLINE_S)
        except asyncio.TimeoutError:
            raise DeadlineError(
                f"coordinator partition {self.partition} was not read up to offset {end} "
                f"within {_VIEW_DEADLINE_S:.0f} s"
            ) from None

    def _committed(self, batch: list[_Waiting]) -> None:
        for item in batch:
            for write in item.writes:
                record = write.record
                if isinstance(record, PartitionRecord):
                    name = PartitionKey.of(record)
                    if self._pending.get(name) is record:
                        del self._pending[name]
            if not item.done.done():
                item.done.set_result(None)

    def _break(self, batch: list[_Waiting], error: KmirrorError) -> None:
        log = logger.warning if isinstance(error, FencedError) else logger.error
        log("append to coordinator partition %d failed: %s", self.partition, error)
        for item in batch:
            _fail(item, error)
        self.depose(error)


def _fail(item: _Waiting, error: KmirrorError) -> None:
    if not item.done.done():
        item.done.set_exception(error)
        # the caller may be gone: an outcome nobody waits for is no error of the loop
        item.done.exception()
