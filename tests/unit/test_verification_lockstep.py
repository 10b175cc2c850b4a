"""Reading two sides in lockstep: complete, bounded in memory, ends by itself."""

import random
from collections.abc import Callable, Collection, Sequence

import pytest

from kmirror_dagster.broker.log_records import Chunk, LogRecord
from kmirror_dagster.errors import ClusterUnreachableError, DeadlineError, KmirrorError
from kmirror_dagster.verification.lockstep import Lockstep
from kmirror_dagster.verification.report import DifferenceLog, Isolation
from kmirror_dagster.verification.streams import PartitionComparison

RECORD_BYTES = 100
CHUNK = 10


class FakeReader:
    """Delivers logs chunk by chunk; which partition comes next is up to `choose`."""

    def __init__(
        self,
        logs: dict[tuple[str, int], list[LogRecord]],
        choose: Callable[[Sequence[tuple[str, int]]], tuple[str, int]],
        *,
        error: KmirrorError | None = None,
        stop_after: int | None = None,
    ) -> None:
        self.rest = {key: list(log) for key, log in logs.items()}
        self.paused: set[tuple[str, int]] = set()
        self.pauses = 0
        self._error = error
        self._choose = choose
        self._left = stop_after

    def failure(self) -> KmirrorError | None:
        return self._error

    def read(self, timeout_s: float) -> list[Chunk]:
        keys = [key for key in self.rest if key not in self.paused]
        if not keys or self._left == 0:
            return []
        if self._left is not None:
            self._left -= 1
        key = self._choose(keys)
        records, rest = self.rest[key][:CHUNK], self.rest[key][CHUNK:]
        if rest:
            self.rest[key] = rest
        else:
            del self.rest[key]
        return [Chunk(*key, records, RECORD_BYTES * len(records), not rest)]

    def pause(self, partitions: Collection[tuple[str, int]]) -> None:
        self.paused.update(partitions)
        self.pauses += 1

    def resume(self, partitions: Collection[tuple[str, int]]) -> None:
        self.paused.difference_update(partitions)


class Clock:
    """Time that passes a tenth of a second with each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def log_of(count: int) -> list[LogRecord]:
    return [(offset, 1, offset, None, b"%d" % offset, None) for offset in range(count)]


LOGS = {("orders", p): log_of(200 + p) for p in range(4)} | {("empty", 0): []}


def comparisons(differences: DifferenceLog) -> dict[tuple[str, int], PartitionComparison]:
    return {
        key: PartitionComparison(*key, isolation=Isolation.READ_COMMITTED, differences=differences)
        for key in LOGS
    }


@pytest.mark.parametrize("seed", range(5))
def test_partitions_in_any_order_are_compared_completely(seed: int) -> None:
    """Whatever order both sides deliver partitions in, every record is compared once."""
    found = DifferenceLog()
    readers = (
        FakeReader(LOGS, random.Random(seed).choice),
        FakeReader(LOGS, random.Random(-seed - 1).choice),
    )
    compared: list[int] = []
    Lockstep(readers, comparisons(found), limit_bytes=500).run(compared.append)
    assert (sum(compared), found.total) == (sum(map(len, LOGS.values())), 0)
    assert not any(reader.rest for reader in readers)


def test_opposite_orders_stay_within_the_memory_limit() -> None:
    """Two sides that begin at opposite partitions are held back instead of being collected in memory."""
    found = DifferenceLog()
    readers = (FakeReader(LOGS, lambda keys: keys[0]), FakeReader(LOGS, lambda keys: keys[-1]))
    pairs = comparisons(found)
    peak = 0

    def note(_: int) -> None:
        nonlocal peak
        peak = max(peak, *(sum(c.pending_bytes(s) for c in pairs.values()) for s in (0, 1)))  # type: ignore[arg-type]

    limit = 2_000
    Lockstep(readers, pairs, limit_bytes=limit).run(note)
    assert found.total == 0
    assert all(reader.pauses for reader in readers)
    assert peak <= limit + 2 * CHUNK * RECORD_BYTES


def test_a_difference_does_not_stop_the_rest() -> None:
    """A differing partition is reported and the others are compared to the end."""
    found = DifferenceLog()
    other = LOGS | {("orders", 1): log_of(150)}
    readers = (FakeReader(LOGS, random.Random(1).choice), FakeReader(other, random.Random(2).choice))
    Lockstep(readers, comparisons(found)).run(lambda _: None)
    assert found.total == 51
    assert {(d.topic, d.partition) for d in found.listed} == {("orders", 1)}


def test_a_side_that_delivers_nothing_ends_the_wait() -> None:
    """When nothing comes any more the comparison ends with the partition it waits for."""
    readers = (
        FakeReader(LOGS, lambda keys: keys[0]),
        FakeReader(LOGS, lambda keys: keys[0], stop_after=3),
    )
    with pytest.raises(DeadlineError, match=r"no record came for 5 s; 5 partitions.*first empty-0"):
        Lockstep(readers, comparisons(DifferenceLog()), stall_s=5, clock=Clock(), limit_bytes=10_000).run(
            lambda _: None
        )


def test_a_lost_connection_is_named() -> None:
    """A side whose connection failed is named instead of the time that passed."""
    readers = (
        FakeReader(
            LOGS,
            lambda keys: keys[0],
            stop_after=0,
            error=ClusterUnreachableError("cannot reach cluster at localhost:9092"),
        ),
        FakeReader(LOGS, lambda keys: keys[0]),
    )
    with pytest.raises(ClusterUnreachableError, match="localhost:9092"):
        Lockstep(readers, comparisons(DifferenceLog()), stall_s=5, clock=Clock()).run(lambda _: None)


def test_the_deadline_ends_a_comparison() -> None:
    """A comparison that has not ended at its deadline says how much is left."""
    readers = (FakeReader(LOGS, lambda keys: keys[0]), FakeReader(LOGS, lambda keys: keys[0]))
    with pytest.raises(DeadlineError, match="partitions are left"):
        Lockstep(readers, comparisons(DifferenceLog()), deadline=0.5, clock=Clock()).run(lambda _: None)
