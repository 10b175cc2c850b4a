"""Looks at both clusters and makes the plan of a failback; nothing is written anywhere."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Partition, TopicDescription
from kmirror_dagster.broker.clients import check_reachable
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.recovery.common_point import compacted_topics, prove
from kmirror_dagster.recovery.failback import FailbackState, reverse_document
from kmirror_dagster.recovery.failback_plan import FailbackPlan, FailbackWorld, plan_topics
from kmirror_dagster.recovery.formats import QuarantineFormat
from kmirror_dagster.recovery.manifest import check_source
from kmirror_dagster.recovery.positions import LastPosition, same_topic_id
from kmirror_dagster.recovery.quarantine_topic import quarantine_topic
from kmirror_dagster.settings import MirrorSettings
from kmirror_dagster.verification.ranges import LogEnds, read_ends

_REACH_DEADLINE_S = 10.0


@dataclass(frozen=True)
class FailbackWish:
    """What is asked for.

    Attributes:
        settings: of the stopped mirror, secrets resolved.
        document: the same as stored, references unresolved.
        positions: last mirror positions of the topics to fail back.
        source_cluster_id: cluster the mirror was made for.
        everything: all topics of the mirror are stopped and meant: the mirror back keeps the filters, so that
            topics that appear later are mirrored back too.
        reverse: name of the mirror back.
        quarantine, quarantine_format: where tails go; the directory means nothing for a topic.
    """

    settings: MirrorSettings
    document: Mapping[str, Any]
    positions: Sequence[LastPosition]
    source_cluster_id: str
    everything: bool
    reverse: str
    quarantine: Path
    quarantine_format: QuarantineFormat = QuarantineFormat.JSONL


def reverse_name(mirror: str) -> str:
    """Name of the mirror back; that of a mirror back is the first one's again."""
    return mirror.removesuffix("-back") if mirror.endswith("-back") else f"{mirror}-back"


def plan_failback(wish: FailbackWish) -> FailbackState:
    """Look at both clusters, compare the records in front of the last mirror positions, and plan.

    Raises:
        UsageError: when the old source is another cluster, or the new one lacks what was mirrored.
        ClusterUnreachableError, AuthenticationError: when a cluster cannot be reached.
    """
    settings = wish.settings
    check_source(settings.mirror, settings.source, wish.source_cluster_id)
    new_id = check_reachable(settings.destination, _REACH_DEADLINE_S, role="destination")
    with closing(ClusterAdmin(settings.source)) as old, closing(ClusterAdmin(settings.destination)) as new:
        world = _look(old, new, settings, wish.positions)
    plan = FailbackPlan(
        mirror=settings.mirror,
        reverse=wish.reverse,
        old_source_id=wish.source_cluster_id,
        new_source_id=new_id,
        stopped_ms=max((p.recorded_ms for p in wish.positions), default=0),
        quarantine=quarantine_topic(settings.mirror)
        if wish.quarantine_format is QuarantineFormat.TOPIC
        else str(wish.quarantine.absolute()),
        quarantine_format=wish.quarantine_format.value,
        topics=plan_topics(world),
    )
    names = [topic.topic.replace(".", r"\.") for topic in plan.topics]
    patterns = list(settings.filters.topics_include) if wish.everything else []
    document = reverse_document(
        wish.document,
        plan,
        list(dict.fromkeys([*patterns, *names])),
        replication_factor=max(
            (topic.replication_factor for topic in world.old_topics.values()), default=None
        ),
    )
    return FailbackState(plan=plan, document=document)


def _look(
    old: ClusterAdmin, new: ClusterAdmin, settings: MirrorSettings, positions: Sequence[LastPosition]
) -> FailbackWorld:
    names = sorted({position.topic for position in positions})
    old_topics, new_topics = _topics(old, names, "old"), _topics(new, names, "new")
    old_ends, new_ends = _ends(old, old_topics, "old"), _ends(new, new_topics, "new")
    both = [
        p
        for p in positions
        if p.key in old_ends
        and p.key in new_ends
        and new_ends[p.key].end >= p.offset
        and not p.translated
        and same_topic_id(p.source_topic_id, old_topics[p.topic].topic_id)
    ]
    compacted = compacted_topics([old, new], {p.topic for p in both}) if both else frozenset[str]()
    proofs = prove(settings.source, settings.destination, both, old_ends, new_ends, compacted=compacted)
    return FailbackWorld(positions, old_topics, new_topics, old_ends, new_ends, proofs)


def _topics(admin: ClusterAdmin, names: Sequence[str], which: str) -> dict[str, TopicDescription]:
    listed = admin.topic_names()
    answers = admin.topics([name for name in names if name in listed])
    for name, error in answers.errors.items():
        raise KmirrorError(f"topic {name} cannot be described at the {which} source: {error}") from error
    return dict(answers.values)


def _ends(
    admin: ClusterAdmin, topics: Mapping[str, TopicDescription], which: str
) -> dict[Partition, LogEnds]:
    found, errors = read_ends(
        admin, [(name, number) for name, topic in topics.items() for number in range(topic.partitions)]
    )
    for error in errors.values():
        raise KmirrorError(f"ends of the {which} source's logs cannot be looked up: {error}") from error
    return found
