"""What the steps of one refresh share."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl, Partition, Quota
from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.memory import Memory
from kmirror_dagster.metadata.offsets import OffsetMaps
from kmirror_dagster.metadata.outcome import PlannedChange, Step, TopicIntent
from kmirror_dagster.metadata.reader import CALL_S
from kmirror_dagster.metadata.snapshot import ClusterSnapshot
from kmirror_dagster.metadata.steps import StepReports
from kmirror_dagster.metadata.topics import TopicsPlan
from kmirror_dagster.records import TopicRecord
from kmirror_dagster.settings import MirrorSettings


@dataclass
class RefreshContext:
    """One refresh under way.

    Attributes:
        mirroring: states of mirror partitions; looked at again right before positions or logs are changed, so
            a live mapping keeps a stop that came in between.
        dry_run: plan only.
        changes: altering requests, planned or made.
        intents: what the coordinator is to store, by topic.
        synced_acls, synced_quotas: ACLs and client quotas that were at the destination because of the mirror.
        offset_maps: of partitions whose offsets are not the source's; None: there are none.
        acls, quotas: those that are now; None while that was not looked at.
        look_again: the next refresh has something to go on with.
    """

    settings: MirrorSettings
    source: ClusterAdmin
    destination: ClusterAdmin
    known: Mapping[str, TopicRecord]
    mirroring: Mapping[Partition, MirrorState]
    memory: Memory
    deadline: Deadline
    clock: Callable[[], float]
    rng: random.Random
    dry_run: bool
    reports: StepReports
    destination_cluster_id: str | None = None
    synced_acls: frozenset[Acl] = frozenset()
    synced_quotas: frozenset[Quota] = frozenset()
    offset_maps: OffsetMaps | None = None
    source_view: ClusterSnapshot = field(default_factory=ClusterSnapshot)
    destination_view: ClusterSnapshot = field(default_factory=ClusterSnapshot)
    topics: TopicsPlan = field(default_factory=TopicsPlan)
    acls: frozenset[Acl] | None = None
    quotas: frozenset[Quota] | None = None
    look_again: bool = False
    changes: list[PlannedChange] = field(default_factory=list[PlannedChange])
    intents: dict[str, TopicIntent] = field(default_factory=dict[str, TopicIntent])

    def timeout(self) -> float:
        """Seconds the next call may take.

        Raises:
            DeadlineError: when the refresh has used up its time.
        """
        self.deadline.check("metadata refresh")
        return self.deadline.remaining(at_most=CALL_S)

    def is_mirroring(self, key: Partition) -> bool:
        """Tell whether a partition is being mirrored at this moment."""
        return self.mirroring.get(key) is MirrorState.MIRRORING

    def note_change(self, step: Step, subject: str, text: str) -> None:
        """Take down one altering request."""
        self.changes.append(PlannedChange(step, subject, text))
