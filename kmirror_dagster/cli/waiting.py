"""Waiting until the partitions of a mirror have reached a state."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kmirror_dagster.cli.output import counts_text
from kmirror_dagster.cli.progress import Progress
from kmirror_dagster.errors import DeadlineError, KmirrorError
from kmirror_dagster.lifecycle import SETTLED_FOR, MirrorState

if TYPE_CHECKING:
    from kmirror_dagster.coordination.client import NodeClient
    from kmirror_dagster.coordination.models import MirrorSummary, PartitionStatus

_POLL_S = 0.2
# How long a failure nobody retries may stand before the wait ends: what was asked for may lead out of it.
_FAILURE_GRACE_S = 3.0
# How the API counts partitions that never had a state: there is nothing to stop or pause.
_NO_STATE = "NONE"
_IDLE_TARGETS = (MirrorState.STOPPED, MirrorState.PAUSED)


@dataclass
class _Observation:
    """Partitions at one moment: how many are where they should be, and which failed."""

    counts: Counter[str] = field(default_factory=lambda: Counter[str]())
    done: int = 0
    failed: "list[PartitionStatus]" = field(default_factory=lambda: list["PartitionStatus"]())


class StateWait:
    """Waits for a mirror's partitions.

    Args:
        client: a node.
        mirror: whose partitions.
        target: state they are to reach, None: the one that is wanted of each; partitions without a state count
            as done for PAUSED and STOPPED.
        topics: only these, None for all of the mirror.
        may_be_empty: a mirror without any partition is fine once it was refreshed.
    """

    def __init__(
        self,
        client: "NodeClient",
        mirror: str,
        target: MirrorState | None,
        topics: Sequence[str] | None,
        *,
        may_be_empty: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._mirror = mirror
        self._target = target
        self._topics = topics
        self._may_be_empty = may_be_empty
        self._clock = clock
        self._sleep = sleep
        self._failed_since: dict[tuple[str, int, int], float] = {}
        self._known_refresh: int | None = None

    def run(self, timeout_s: float, shown: Progress) -> dict[str, int]:
        """Wait; returns the partitions per state.

        Raises:
            KmirrorError: when a partition has failed and nobody retries it, or a topic cannot be mirrored.
            DeadlineError: when they are not there in time; names the states they are in.
        """
        deadline = self._clock() + timeout_s
        while True:
            summary = self._client.mirror(self._mirror)
            seen = self._observe(summary)
            total = seen.counts.total()
            shown.update(seen.done, total, counts_text(seen.counts))
            is_fresh = not self._may_be_empty or summary.refresh is not None
            if is_fresh and seen.done == total and (total or self._may_be_empty):
                return dict(seen.counts)
            self._check_failed(seen.failed)
            self._check_topics(summary)
            if self._clock() >= deadline:
                raise DeadlineError(self._late(seen.counts, timeout_s))
            self._sleep(_POLL_S)

    def _observe(self, summary: "MirrorSummary") -> _Observation:
        if self._topics is None and self._target is not None:
            return self._observe_all(summary, self._target)
        seen = _Observation()
        for topic in self._topics if self._topics is not None else [t.topic for t in summary.topics]:
            statuses = list(self._client.iter_partitions(self._mirror, topic=topic))
            for status in statuses:
                state = status.state
                seen.counts[state.value if state else _NO_STATE] += 1
                target = self._target or SETTLED_FOR[status.desired]
                seen.done += state is target or (state is None and target in _IDLE_TARGETS)
                if state is MirrorState.FAILED:
                    seen.failed.append(status)
            if not statuses:
                seen.counts[_NO_STATE] += 1  # its partitions are known after the next refresh
        return seen

    def _observe_all(self, summary: "MirrorSummary", target: MirrorState) -> _Observation:
        """The same from the counts: one small answer, however many partitions there are."""
        counts = Counter(summary.states)
        done = counts[target.value] + (counts[_NO_STATE] if target in _IDLE_TARGETS else 0)
        failed: list[PartitionStatus] = []
        if counts[MirrorState.FAILED.value]:
            failed = list(self._client.iter_partitions(self._mirror, state=MirrorState.FAILED))
        return _Observation(counts, done, failed)

    def _check_failed(self, failed: "Sequence[PartitionStatus]") -> None:
        now = self._clock()
        final = {(s.topic, s.partition, s.state_epoch): s for s in failed if not s.retriable}
        self._failed_since = {key: self._failed_since.get(key, now) for key in final}
        for key, since in self._failed_since.items():
            if now - since >= _FAILURE_GRACE_S:
                status = final[key]
                raise KmirrorError(
                    f"{self._mirror}: {status.topic}-{status.partition} is FAILED and not retried: "
                    f"{status.error}; put it right, then 'kmirror recover {self._mirror}' "
                    f"({len(final)} failed in all, see 'kmirror describe {self._mirror} --failed')"
                )

    def _check_topics(self, summary: "MirrorSummary") -> None:
        """End the wait for a topic that cannot be mirrored, once a refresh has confirmed it meanwhile."""
        if self._target in _IDLE_TARGETS:
            return
        newest = summary.refresh.finished_ms if summary.refresh else 0
        if self._known_refresh is None:
            self._known_refresh = newest
        if newest == self._known_refresh:
            return
        for topic in summary.topics:
            if topic.error and (self._topics is None or topic.topic in self._topics):
                raise KmirrorError(f"{self._mirror}: topic {topic.topic} cannot be mirrored: {topic.error}")

    def _late(self, counts: Counter[str], timeout_s: float) -> str:
        goal = self._target or "settled"
        return (
            f"{self._mirror}: not all partitions are {goal} after {timeout_s:g} s: "
            f"{counts_text(counts)}; it goes on, see 'kmirror describe {self._mirror}'"
        )
