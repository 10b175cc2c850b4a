"""What a failback will do to each topic at the old source: decisions apart from everything that carries them out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pydantic import BaseModel, ConfigDict, Field

from kmirror_dagster.broker.admin_types import Partition, TopicDescription
from kmirror_dagster.errors import UsageError
from kmirror_dagster.recovery.common_point import Proof
from kmirror_dagster.recovery.positions import LastPosition, same_topic_id
from kmirror_dagster.verification.ranges import LogEnds

# What one node has copied at least in every measurement, for the estimate of the time; small records.
COPIED_PER_SECOND = 50_000


class TopicAction(str, Enum):
    """What happens to a topic at the old source.

    `continue`: its log is the beginning of the new source's; only what is new is copied. `recreate`: it is deleted
    once its unmirrored tail is in quarantine, made again and copied anew (a tail cannot be cut through Kafka's
    public API). `create`: it is not there (any more), and is made and copied.
    """

    CONTINUE = "continue"
    RECREATE = "recreate"
    CREATE = "create"

    def __str__(self) -> str:
        return self.value


class PartitionPlan(BaseModel):
    """One partition at the old source.

    Attributes:
        keep_to: common point; what the old source has from there on goes to quarantine.
        old_start, old_end: ends of its log when the plan was made.
        proven: offsets compared in front of the common point.
    """

    model_config = ConfigDict(frozen=True)

    partition: int
    keep_to: int
    old_start: int = 0
    old_end: int = 0
    proven: int = 0

    @property
    def tail(self) -> int:
        """Offsets that go to quarantine."""
        return max(0, self.old_end - max(self.keep_to, self.old_start))


class TopicPlan(BaseModel):
    """One topic.

    Attributes:
        reason: why it cannot be gone on with; None when it is, or when it is not there.
        old_topic_id: of the topic that may be deleted, and no other.
        copy_offsets: offsets to be copied back.
    """

    model_config = ConfigDict(frozen=True)

    topic: str
    action: TopicAction
    reason: str | None = None
    old_topic_id: str | None = None
    partitions: list[PartitionPlan] = Field(default_factory=list[PartitionPlan])
    copy_offsets: int = 0

    @property
    def tail(self) -> int:
        """Offsets that go to quarantine."""
        return sum(partition.tail for partition in self.partitions) if self.deletes else 0

    @property
    def deletes(self) -> bool:
        """Whether the topic is deleted at the old source."""
        return self.action is TopicAction.RECREATE


class FailbackPlan(BaseModel):
    """Everything a failback will do; stored, so that whoever goes on with it does the same.

    Attributes:
        mirror: the stopped mirror.
        reverse: name of the mirror back.
        stopped_ms: when the last of the topics was stopped.
        quarantine: directory of the tails.
        quarantine_format: of its files.
    """

    model_config = ConfigDict(frozen=True)

    mirror: str
    reverse: str
    old_source_id: str
    new_source_id: str
    stopped_ms: int
    quarantine: str
    quarantine_format: str = "jsonl"
    topics: list[TopicPlan] = Field(default_factory=list[TopicPlan])

    def names(self, action: TopicAction) -> list[str]:
        """Topics that something happens to."""
        return [topic.topic for topic in self.topics if topic.action is action]

    @property
    def tail(self) -> int:
        """Offsets that go to quarantine."""
        return sum(topic.tail for topic in self.topics)

    @property
    def copy_offsets(self) -> int:
        """Offsets to be copied back."""
        return sum(topic.copy_offsets for topic in self.topics)

    @property
    def copy_seconds(self) -> float:
        """Estimated time of the copying, one node, small records."""
        return self.copy_offsets / COPIED_PER_SECOND


@dataclass(frozen=True)
class FailbackWorld:
    """What a plan rests on: both clusters as they are, and the proofs where both have the topic.

    Attributes:
        old_topics, new_topics: those of the stopped ones that exist.
        old_ends, new_ends: of all their partitions.
        proofs: of partitions that have a position and exist at both clusters.
    """

    positions: Sequence[LastPosition]
    old_topics: Mapping[str, TopicDescription]
    new_topics: Mapping[str, TopicDescription]
    old_ends: Mapping[Partition, LogEnds]
    new_ends: Mapping[Partition, LogEnds]
    proofs: Mapping[Partition, Proof] = field(default_factory=dict[Partition, Proof])


def plan_topics(world: FailbackWorld) -> list[TopicPlan]:
    """Decide about each stopped topic.

    Raises:
        UsageError: when the new source no longer has what was mirrored.
    """
    by_topic: dict[str, dict[int, LastPosition]] = {}
    for position in world.positions:
        by_topic.setdefault(position.topic, {})[position.partition] = position
    return [_plan_topic(world, topic, by_topic[topic]) for topic in sorted(by_topic)]


def _plan_topic(world: FailbackWorld, topic: str, positions: Mapping[int, LastPosition]) -> TopicPlan:
    new = world.new_topics.get(topic)
    if new is None:
        raise UsageError(
            f"topic {topic} is gone from the new source: there is nothing to copy back; leave it out (--topics)"
        )
    for number, position in positions.items():
        ends = world.new_ends.get((topic, number))
        if ends is None or ends.end < position.offset:
            told = "has no such partition" if ends is None else f"ends at {ends.end}"
            raise UsageError(
                f"topic {topic}, partition {number}: the new source {told}, below the last mirror position "
                f"{position.offset}: it is not what was mirrored; leave the topic out (--topics)"
            )
    everything = sum(_length(world.new_ends.get((topic, n))) for n in range(new.partitions))
    old = world.old_topics.get(topic)
    if old is None:
        return TopicPlan(topic=topic, action=TopicAction.CREATE, copy_offsets=everything)
    known = same_topic_id(next(iter(positions.values())).source_topic_id, old.topic_id)
    partitions = [_plan_partition(world, topic, n, positions, known=known) for n in range(old.partitions)]
    reason = _obstacle(world, old, new, positions, partitions, known=known)
    if reason is None:
        missing = sum(
            max(0, world.new_ends[topic, n].end - world.old_ends[topic, n].end) for n in range(old.partitions)
        ) + sum(_length(world.new_ends.get((topic, n))) for n in range(old.partitions, new.partitions))
        return TopicPlan(
            topic=topic,
            action=TopicAction.CONTINUE,
            old_topic_id=old.topic_id,
            partitions=partitions,
            copy_offsets=missing,
        )
    return TopicPlan(
        topic=topic,
        action=TopicAction.RECREATE,
        reason=reason,
        old_topic_id=old.topic_id,
        partitions=partitions,
        copy_offsets=everything,
    )


def _length(ends: LogEnds | None) -> int:
    return ends.end - ends.start if ends is not None else 0


def _plan_partition(
    world: FailbackWorld, topic: str, number: int, positions: Mapping[int, LastPosition], *, known: bool
) -> PartitionPlan:
    """What of a partition goes to quarantine: all of it when it is not known to be what was mirrored."""
    ends = world.old_ends[topic, number]
    proof = world.proofs.get((topic, number))
    keep_to = ends.start
    if known and number in positions and (proof is None or proof.difference is None):
        keep_to = min(positions[number].at_source, ends.end)
    return PartitionPlan(
        partition=number,
        keep_to=keep_to,
        old_start=ends.start,
        old_end=ends.end,
        proven=proof.compared if proof else 0,
    )


def _obstacle(
    world: FailbackWorld,
    old: TopicDescription,
    new: TopicDescription,
    positions: Mapping[int, LastPosition],
    partitions: Sequence[PartitionPlan],
    *,
    known: bool,
) -> str | None:
    """Why a topic cannot be gone on with; None when its log is the beginning of the new source's."""
    if not known:
        return "it was deleted and created again since it was mirrored"
    if old.partitions > new.partitions:
        return f"it has {old.partitions} partitions there and {new.partitions} at the new source"
    if any(position.translated for position in positions.values()):
        return "its offsets at the new source are translated: the two are not one log"
    for number in range(old.partitions):
        proof = world.proofs.get((old.name, number))
        if number not in positions:
            if partitions[number].old_end:
                return f"partition {number} was never mirrored"
        elif proof is not None and proof.difference is not None:
            return f"partition {number} differs in front of offset {proof.point} ({proof.difference})"
        elif proof is None or not proof.ok:
            return f"partition {number}: neither side's records in front of the common point can be compared"
    tails = [partition for partition in partitions if partition.tail]
    if tails:
        offsets = sum(partition.tail for partition in tails)
        return f"{offsets} offsets in {len(tails)} partitions were never mirrored"
    return None
