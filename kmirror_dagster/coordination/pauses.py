"""Notices that this process did not run for a while (SIGSTOP, a suspended machine, a blocked loop)."""

import time
from collections.abc import Callable


def steady_seconds() -> float:
    """Monotonic seconds that go on while the machine sleeps, where the system has such a clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class PauseGuard:
    """Half a session timeout without a tick means that other nodes may have taken over.

    Writes ask `is_sure` first, so that nothing is sent between waking up and noticing it.

    Args:
        limit_s: longest gap between two ticks that is not a pause.
        clock: steady seconds.
    """

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = steady_seconds) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._ticked = clock()
        self._doubt = False

    def tick(self) -> float:
        """Note that the loop runs; returns the seconds since the last tick when that was a pause, else 0."""
        now = self._clock()
        gap, self._ticked = now - self._ticked, now
        if gap <= self.limit_s:
            return 0.0
        self._doubt = True
        return gap

    def is_sure(self) -> bool:
        """Whether leadership may be relied on."""
        return not self._doubt and self._clock() - self._ticked <= self.limit_s

    def clear(self) -> None:
        """Everything led before the pause has been given up: what is led from now on is led surely."""
        self._doubt = False
