"""What a leader knows of a mirror partition besides its records."""

import asyncio
from dataclasses import dataclass
from typing import Any

from kmirror_dagster.coordination.ports import Progress
from kmirror_dagster.errors import KmirrorError


@dataclass
class LivePartition:
    """What is known of one led partition besides its records; gone when it is no longer led."""

    task: asyncio.Task[None] | None = None
    action: "asyncio.Future[Any] | None" = None
    preempted: bool = False
    running: bool = False
    failure: KmirrorError | None = None
    seen: Progress | None = None  # as last reported: a copy that failed can no longer be asked
    timer: asyncio.TimerHandle | None = None
    retry_at_ms: int | None = None
    due: bool = False
    orphan_since: float | None = None
    deleted: bool = False
    storing: "asyncio.Future[None] | None" = None  # a map of its offsets that is being stored

    async def settled(self) -> None:
        """Wait until what is being stored of it is stored, or known not to be."""
        if self.storing is not None:
            await asyncio.wait([self.storing])
            self.storing = None

    def disarm(self) -> None:
        """Cancel a retry that waits."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.retry_at_ms = None
