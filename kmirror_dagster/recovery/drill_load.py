"""Writers of a drill: a steady stream at the source, one record into each partition of the destination."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.broker.clients import producer
from kmirror_dagster.errors import DeadlineError, KmirrorError
from kmirror_dagster.settings import ClusterSettings

_TICK_S = 0.05
_FLUSH_S = 15.0
_POLL_S = 0.02
_VALUE_BYTES = 100


@dataclass(frozen=True)
class Acknowledged:
    """One record that the source has: its offset, and the monotonic time its acknowledgement came."""

    offset: int
    at_s: float


class SteadyWriter:
    """Writes to partitions in turn, at a rate, until it is ended.

    Args:
        settings: cluster to write to.
        partitions: at least one.
        rate: records per second, all partitions together.
    """

    def __init__(self, settings: ClusterSettings, partitions: Sequence[Partition], *, rate: float) -> None:
        self._partitions = list(partitions)
        self._rate = rate
        self._producer = producer(settings, linger_ms=5)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._acknowledged: dict[Partition, list[Acknowledged]] = {key: [] for key in partitions}
        self._errors: list[str] = []
        self._sent = 0
        self._thread = threading.Thread(target=self._write, name="drill-writer", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self) -> None:
        """Write no more and wait for what is under way; harmless when ended.

        Raises:
            KmirrorError: when records were refused, or their acknowledgements do not come.
        """
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_FLUSH_S)
        left = self._producer.flush(_FLUSH_S)
        if self._errors:
            raise KmirrorError(f"the drill's records are refused at the source: {self._errors[0]}")
        if left:
            raise DeadlineError(f"{left} of the drill's records were not acknowledged within {_FLUSH_S:g} s")

    def acknowledged(self) -> dict[Partition, list[Acknowledged]]:
        """Records the source has acknowledged so far, in the order of their offsets."""
        with self._lock:
            return {key: list(found) for key, found in self._acknowledged.items()}

    def _write(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(_TICK_S):
            due = int((time.monotonic() - began) * self._rate)
            while self._sent < due and not self._ended.is_set():
                key = self._partitions[self._sent % len(self._partitions)]
                value = b"%012d" % self._sent
                try:
                    self._producer.produce(
                        key[0],
                        value.ljust(_VALUE_BYTES, b"."),
                        key=value,
                        partition=key[1],
                        on_delivery=self._told,
                    )
                except BufferError:
                    break
                self._sent += 1
            self._producer.poll(0)

    def _told(self, error: Any, message: Any) -> None:
        if error is not None:
            self._errors.append(str(error))
            return
        found = Acknowledged(message.offset(), time.monotonic())
        with self._lock:
            self._acknowledged[message.topic(), message.partition()].append(found)


def write_one_each(
    settings: ClusterSettings, partitions: Sequence[Partition], *, wait_s: float
) -> dict[Partition, int]:
    """Write one record into each partition; the offsets they got.

    Raises:
        DeadlineError: when not all were taken in time.
        KmirrorError: when one is refused.
    """
    client = producer(settings, linger_ms=0)
    offsets: dict[Partition, int] = {}
    errors: list[str] = []

    def told(error: Any, message: Any) -> None:
        if error is not None:
            errors.append(f"{message.topic()}/{message.partition()}: {error}")
        else:
            offsets[message.topic(), message.partition()] = message.offset()

    for topic, number in partitions:
        client.produce(topic, b"written after the drill's failover", partition=number, on_delivery=told)
    deadline = time.monotonic() + wait_s
    while len(offsets) < len(partitions):
        client.poll(_POLL_S)
        if errors:
            raise KmirrorError(f"the destination cannot be written to after the failover: {errors[0]}")
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{len(partitions) - len(offsets)} of {len(partitions)} partitions could not be written to within "
                f"{wait_s:g} s of the failover"
            )
    return offsets


@dataclass(frozen=True)
class Exposure:
    """What a loss of the source at one moment would have cost.

    Attributes:
        records: acknowledged at the source and not at the destination.
        seconds: how long ago the oldest of them was acknowledged; 0 without any.
    """

    records: int
    seconds: float


def exposure(
    acknowledged: Mapping[Partition, Sequence[Acknowledged]],
    destination_ends: Mapping[Partition, int],
    at_s: float,
) -> Exposure:
    """Measure it from what was acknowledged before a moment and where the destination ended then. Pure."""
    missing = [
        each
        for key, records in acknowledged.items()
        for each in records
        if each.at_s <= at_s and each.offset >= destination_ends[key]
    ]
    oldest = min((each.at_s for each in missing), default=at_s)
    return Exposure(len(missing), at_s - oldest)


def await_true(condition: Callable[[], bool], wait_s: float, what: str, *, poll_s: float = _POLL_S) -> None:
    """Wait for a condition.

    Raises:
        DeadlineError: when it is not met in time.
    """
    deadline = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineError(f"{what} within {wait_s:g} s")
        time.sleep(poll_s)
