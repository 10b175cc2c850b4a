"""Waiting until the partitions of a mirror have reached a state."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kmirror_dagster.cli.output import counts_text
from kmirror_dagster.cli.progress import Progress
from kmirror_dagster.errors import DeadlineError, KmirrorError
from kmirror_dagster.lifecycle import MirrorState

if TYPE_CHECKING:
    from kmirror_dagster.coordination.client import NodeClient
    from kmirror_dagster.coordination.models import PartitionStatus

_POLL_S = 0.2
# How long a failure nobody retries may stand before the wait ends: what was asked for may lead out of it.
_FAILURE_GRACE_S = 3.0
# A partition that never had a state has nothing to stop or pause.
_NO_STATE = "NONE"


@dataclass(frozen=True)
class Observation:
    """Partitions per state at one moment, and those that failed for good."""

    counts: Counter[str]
    failed: "Sequence[PartitionStatus]"


class StateWait:
    """Waits for a mirror's partitions.

    Args:
        client: a node.
        mirror: whose partitions.
        target: state they are to reach; without-state partitions count as done for PAUSED and STOPPED.
        topics: only these, None for all of the mirror.
    """

    def __init__(
        self,
        client: "NodeClient",
        mirror: str,
        target: MirrorState,
        topics: Sequence[str] | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._mirror = mirror
        self._target = target
        self._topics = topics
        self._clock = clock
        self._sleep = sleep
        self._failed_since: dict[tuple[str, int, int], float] = {}

    def run(self, timeout_s: float, shown: Progress) -> dict[str, int]:
        """Wait; returns the partitions per state.

        Raises:
            KmirrorError: when a partition has failed and nobody retries it.
            DeadlineError: when they are not there in time; names the states they are in.
        """
        deadline = self._clock() + timeout_s
        while True:
            seen = self._observe()
            done, total = self._done(seen.counts), seen.counts.total()
            shown.update(done, total, counts_text(seen.counts))
            if total and done == total:
                return dict(seen.counts)
            self._check_failed(seen.failed)
            if self._clock() >= deadline:
                raise DeadlineError(self._late(seen.counts, timeout_s))
            self._sleep(_POLL_S)

    def _done(self, counts: Counter[str]) -> int:
        done = counts[self._target.value]
        if self._target in (MirrorState.STOPPED, MirrorState.PAUSED):
            done += counts[_NO_STATE]
        return done

    def _observe(self) -> Observation:
        if self._topics is None:
            counts = Counter(self._client.mirror(self._mirror).states)
            failed: list[PartitionStatus] = []
            if counts[MirrorState.FAILED.value]:
                failed = list(self._client.iter_partitions(self._mirror, state=MirrorState.FAILED))
            return Observation(counts, failed)
        counts, failed = Counter[str](), []
        for topic in self._topics:
            statuses = list(self._client.iter_partitions(self._mirror, topic=topic))
            counts.update(status.state.value if status.state else _NO_STATE for status in statuses)
            if not statuses:
                counts[_NO_STATE] += 1  # its partitions are known after the next refresh
            failed += [status for status in statuses if status.state is MirrorState.FAILED]
        return Observation(counts, failed)

    def _check_failed(self, failed: "Sequence[PartitionStatus]") -> None:
        now = self._clock()
        final = [status for status in failed if not status.retriable]
        keys = {(status.topic, status.partition, status.state_epoch): status for status in final}
        self._failed_since = {key: self._failed_since.get(key, now) for key in keys}
        for key, since in self._failed_since.items():
            if now - since >= _FAILURE_GRACE_S:
                status = keys[key]
                raise KmirrorError(
                    f"{self._mirror}: {status.topic}-{status.partition} is FAILED and not retried: "
                    f"{status.error}; put it right, then 'kmirror recover {self._mirror}' "
                    f"({len(final)} failed in all, see 'kmirror describe {self._mirror} --failed')"
                )

    def _late(self, counts: Counter[str], timeout_s: float) -> str:
        return (
            f"{self._mirror}: not all partitions are {self._target} after {timeout_s:g} s: "
            f"{counts_text(counts)}; it goes on, see 'kmirror describe {self._mirror}'"
        )
