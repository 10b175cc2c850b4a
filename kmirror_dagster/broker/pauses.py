"""Keeping the interpreter's own pauses out of the event loop that copies."""

import gc
import sys

# New container objects until the collector looks at the young ones; Python's default is 700.
_COLLECT_AFTER = 50_000
_SWITCH_INTERVAL_S = 0.0005


def favour_the_loop() -> None:
    """Keep pauses out of the data path, which runs in one thread; to be called once everything is imported.

    What is imported by now lives as long as the process: the collector need not walk through it again and again.
    The refresh works in threads beside the loop: a thread that computes gives way after half a millisecond, not
    after Python's usual five.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 50)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
