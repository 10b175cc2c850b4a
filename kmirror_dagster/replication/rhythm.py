"""When to send little: together with what else gets ready in the same moment.

A broker, and this node, spend as much on a request with one small batch as on one with a hundred. So while a request
is out, little waits for its answer, which sets other partitions free, for at most two milliseconds; control records
wait for data that is about to go as well. Partitions that take turns between data and control records (many small
transactions) so keep step with each other.
"""

import time
from collections.abc import Callable

SMALL_BYTES = 64 * 1024
ENOUGH_BYTES = 384 * 1024
_HOLD_S = 0.002


class Rhythm:
    """Requests of all kinds that are out to one broker of one mirror.

    Attributes:
        data_waits: whether data is ready to go; the appender keeps it up to date.
    """

    def __init__(self) -> None:
        self.data_waits = False
        self._out = 0
        self._last_sent = 0.0
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each answer."""
        self._listeners.append(listener)

    def hold_s(self, *, control: bool = False) -> float:
        """Seconds that little data, or control records, should wait at most; 0 or less: send now."""
        waits = self._out or (control and self.data_waits)
        return self._last_sent + _HOLD_S - time.monotonic() if waits else 0.0

    def sent(self) -> None:
        """Note a request."""
        self._out += 1
        self._last_sent = time.monotonic()

    def answered(self) -> None:
        """Note the end of a request, whatever it was; called after its outcome was acted on."""
        self._out -= 1
        for listener in self._listeners:
            listener()
