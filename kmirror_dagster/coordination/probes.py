"""Looks at both clusters of each mirror once a second, kept for two minutes."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kmirror_dagster.coordination.links import LinkPool
from kmirror_dagster.coordination.models import ProbeHistory, ProbeObservation
from kmirror_dagster.coordination.ports import ProbeResult
from kmirror_dagster.errors import KmirrorError

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
KEPT = 120


@dataclass
class _History:
    source: deque[ProbeObservation] = field(default_factory=lambda: deque[ProbeObservation](maxlen=KEPT))
    destination: deque[ProbeObservation] = field(default_factory=lambda: deque[ProbeObservation](maxlen=KEPT))
    pending: asyncio.Task[None] | None = None
    problem: str | None = None


class Prober:
    """Probes the clusters of every mirror this node works for.

    Args:
        links: links of the node; one is opened for a mirror that is to be probed.
        mirrors: mirrors to look at now.
        now_ms: epoch milliseconds.
    """

    def __init__(
        self, links: LinkPool, mirrors: Callable[[], set[str]], *, node_id: str, now_ms: Callable[[], int]
    ) -> None:
        self._links = links
        self._mirrors = mirrors
        self._node_id = node_id
        self._now_ms = now_ms
        self._histories: dict[str, _History] = {}

    def tick(self) -> None:
        """Start the looks of this second; one that is still under way is not doubled."""
        wanted = self._mirrors()
        for mirror in tuple(self._histories):
            if mirror not in wanted:
                pending = self._histories.pop(mirror).pending
                if pending is not None:
                    pending.cancel()
        for mirror in wanted:
            history = self._histories.setdefault(mirror, _History())
            if history.pending is None or history.pending.done():
                history.pending = asyncio.create_task(self._look(mirror, history), name=f"probe-{mirror}")

    def history(self, mirror: str) -> ProbeHistory | None:
        """What was seen of a mirror's clusters; None when this node does not work for it."""
        history = self._histories.get(mirror)
        if history is None:
            return None
        return ProbeHistory(
            node_id=self._node_id, source=list(history.source), destination=list(history.destination)
        )

    async def close(self) -> None:
        """End looks that are under way."""
        pending = [history.pending for history in self._histories.values() if history.pending is not None]
        self._histories.clear()
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _look(self, mirror: str, history: _History) -> None:
        at_ms = self._now_ms()
        try:
            source, destination = await self._links.get(mirror).probe()
        except KmirrorError as error:
            # cannot be looked at from here at all (a missing variable): that is no statement about the
            # clusters
            if history.problem != str(error):
                history.problem = str(error)
                logger.warning("mirror %s cannot be probed: %s", mirror, error, extra={"mirror": mirror})
            return
        history.problem = None
        history.source.append(_observation(at_ms, source))
        history.destination.append(_observation(at_ms, destination))


def _observation(at_ms: int, result: ProbeResult) -> ProbeObservation:
    return ProbeObservation(at_ms=at_ms, ok=result.ok, error=result.error)
