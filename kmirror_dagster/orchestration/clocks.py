"""Wall-clock time, in the unit the node's API uses."""

import time


def epoch_ms() -> int:
    """Milliseconds since the epoch; for comparing with times of other machines, never for deadlines."""
    return time.time_ns() // 1_000_000
