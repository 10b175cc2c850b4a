"""A mirror's metadata refresh without a node: plays the coordinator that stores intents and runs partitions."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl, Quota
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.outcome import PlannedChange, RefreshOutcome, Step, StepStatus
from kmirror_dagster.metadata.refresh import Refresher
from kmirror_dagster.records import TopicRecord
from kmirror_dagster.settings import ClusterSettings, FilterSettings, MirrorSettings, PolicySettings
from tests.helpers import kafka
from tests.helpers.waiting import wait_until

DEADLINE_S = 60.0


class ManualClock:
    """Monotonic seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass
class RefreshedMirror:
    """A mirror whose topics are refreshed; partitions of stored topics count as MIRRORING."""

    source: ClusterSettings
    destination: ClusterSettings
    filters: FilterSettings
    source_cluster_id: str
    policies: PolicySettings = field(default_factory=PolicySettings)
    clock: ManualClock = field(default_factory=ManualClock)
    known: dict[str, TopicRecord] = field(default_factory=dict)
    states: dict[tuple[str, int], MirrorState] = field(default_factory=dict)
    acls: frozenset[Acl] = frozenset()
    quotas: frozenset[Quota] = frozenset()
    source_admin: Callable[[ClusterSettings], ClusterAdmin] = ClusterAdmin
    destination_admin: Callable[[ClusterSettings], ClusterAdmin] = ClusterAdmin

    deadline_s: float = DEADLINE_S
    destination_cluster_id: str | None = None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what only a running node remembers."""
        settings = MirrorSettings(
            mirror="m",
            source=self.source,
            destination=self.destination,
            filters=self.filters,
            policies=self.policies,
        )
        self.refresher = Refresher(
            settings,
            self.source_admin(self.source),
            self.destination_admin(self.destination),
            source_cluster_id=self.source_cluster_id,
            destination_cluster_id=self.destination_cluster_id,
            clock=self.clock,
            rng=random.Random(7),
        )

    def refresh(self) -> RefreshOutcome:
        """One refresh, its intents stored."""
        outcome = self.refresher.run(
            self.known, self.states, self.deadline_s, synced_acls=self.acls, synced_quotas=self.quotas
        )
        self.acls = outcome.acls if outcome.acls is not None else self.acls
        self.quotas = outcome.quotas if outcome.quotas is not None else self.quotas
        for intent in outcome.topics:
            record = self.known.get(intent.topic) or TopicRecord(mirror="m", topic=intent.topic, partitions=0)
            acls: dict[str, object] = {} if intent.held_acls is None else {"held_acls": intent.held_acls}
            if intent.read_only_acl is not None:
                acls["read_only_acl"] = intent.read_only_acl
            record = record.model_copy(update=acls)
            self.known[intent.topic] = record
            if intent.settled:
                continue
            self.known[intent.topic] = record.model_copy(
                update={
                    "partitions": intent.partitions,
                    "source_topic_id": intent.source_topic_id,
                    "destination_topic_id": intent.destination_topic_id,
                    "error": intent.error,
                    "source_configs": dict(intent.held),
                    "synced_configs": list(intent.synced),
                }
            )
            for partition in range(intent.partitions):
                self.states.setdefault((intent.topic, partition), MirrorState.MIRRORING)
        return outcome

    def planned(self) -> tuple[PlannedChange, ...]:
        """What a refresh would change now."""
        plan = self.refresher.plan(
            self.known, self.states, self.deadline_s, synced_acls=self.acls, synced_quotas=self.quotas
        )
        return plan.changes

    def close(self) -> None:
        """End both clients."""
        self.refresher.close()


def commit(bootstrap: str, group: str, offsets: list[tuple[str, int, int]], metadata: str = "") -> None:
    """Commit positions of a group without members; waits while the cluster makes its offsets topic."""
    client = kafka.admin(bootstrap)
    partitions = [TopicPartition(*position, metadata) for position in offsets]

    def committed() -> bool:
        request = [ConsumerGroupTopicPartitions(group, partitions)]
        future = client.alter_consumer_group_offsets(request, request_timeout=3)[group]
        try:
            return all(item.error is None for item in future.result(kafka.DEADLINE_S).topic_partitions)
        except KafkaException:
            return False  # a cluster that makes its offsets topic just now may leave the first request unanswered

    wait_until(committed, what=f"{group} commits {offsets}")


def step_of(outcome: RefreshOutcome, step: Step) -> StepStatus:
    """Status of one step."""
    return next(status for status in outcome.status.steps if status.step == str(step))


def changes_of(outcome: RefreshOutcome) -> int:
    """Altering requests of a refresh."""
    return sum(status.changes for status in outcome.status.steps)


def errors_of(outcome: RefreshOutcome) -> dict[str, str]:
    """All errors of a refresh."""
    return {name: text for status in outcome.status.steps for name, text in status.errors.items()}
