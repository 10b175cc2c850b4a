"""Ending background tasks."""

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.1


async def cancel_and_wait(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """Cancel tasks and wait until they have ended; what they raise is dropped.

    Cancels again and again: before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes in the same
    moment as the result it waits for, and a loop cancelled once would go on for ever.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()
