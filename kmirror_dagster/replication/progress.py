"""How far one partition is and how fast it goes."""

from collections import deque
from dataclasses import dataclass, field

_RATE_WINDOW_S = 10.0
_SAMPLE_EVERY_S = 0.5


@dataclass(frozen=True)
class Progress:
    """Snapshot of one partition's copying. Offsets are -1 while unknown; rates are over the last ten seconds.

    Attributes:
        lag_records: offsets between the destination's log end and the source's high watermark.
        lag_seconds: how long ago the source already had the first record that is still missing.
    """

    source_start: int
    source_end: int
    destination_start: int
    destination_end: int
    lag_records: int
    lag_seconds: float
    records_per_second: float
    bytes_per_second: float
    records_total: int
    bytes_total: int
    batches_total: int
    resyncs_total: int


@dataclass
class Meter:
    """Counts one partition's appends. Times are monotonic seconds, given by the caller."""

    records: int = 0
    bytes: int = 0
    batches: int = 0
    resyncs: int = 0
    _rate: deque[tuple[float, int, int]] = field(default_factory=deque[tuple[float, int, int]])
    _ends: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def appended(self, now: float, records: int, size: int) -> None:
        """Count one acknowledged batch."""
        self.records += records
        self.bytes += size
        self.batches += 1
        if not self._rate or now - self._rate[-1][0] >= _SAMPLE_EVERY_S:
            self._rate.append((now, self.records, self.bytes))
            while now - self._rate[0][0] > _RATE_WINDOW_S and len(self._rate) > 1:
                self._rate.popleft()

    def source_end(self, now: float, end: int) -> None:
        """Note the source's high watermark; the history of it is what lag in seconds is read from."""
        if not self._ends or end > self._ends[-1][1]:
            if len(self._ends) > 1 and now - self._ends[-2][0] < _SAMPLE_EVERY_S:
                # within one sampling step only the newest end counts; the older time is kept for it
                self._ends[-1] = (self._ends[-1][0], end)
            else:
                self._ends.append((now, end))
        elif end < self._ends[-1][1]:
            self._ends.clear()
            self._ends.append((now, end))

    def lag_seconds(self, now: float, destination_end: int) -> float:
        """Age of the oldest source end that the destination has not reached; 0 when caught up."""
        while self._ends and self._ends[0][1] <= destination_end:
            self._ends.popleft()
        return now - self._ends[0][0] if self._ends else 0.0

    def rates(self, now: float) -> tuple[float, float]:
        """Records and bytes per second over the last ten seconds."""
        if not self._rate or now - self._rate[-1][0] > _RATE_WINDOW_S:
            return 0.0, 0.0
        began, records, size = self._rate[0]
        elapsed = max(now - began, _SAMPLE_EVERY_S)
        return (self.records - records) / elapsed, (self.bytes - size) / elapsed
