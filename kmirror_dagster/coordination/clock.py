"""Wall clock, for what people read; deadlines use monotonic clocks."""

import time


def now_ms() -> int:
    """Epoch milliseconds."""
    return int(time.time() * 1000)
