"""One deadline shared by the calls of a piece of work, on the monotonic clock."""

import time
from collections.abc import Callable

from kmirror_dagster.errors import DeadlineError


class Deadline:
    """A point in time after which work is given up.

    Args:
        seconds: time from now.
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = seconds
        self._end = clock() + seconds

    def remaining(self, *, at_most: float = float("inf")) -> float:
        """Seconds left, at most `at_most` and at least 0."""
        return max(0.0, min(at_most, self._end - self._clock()))

    def check(self, doing: str) -> None:
        """Give up when the time is over.

        Raises:
            DeadlineError: naming what was being done.
        """
        if self.remaining() <= 0:
            raise DeadlineError(f"{doing}: not done within {self._seconds:g} s")
