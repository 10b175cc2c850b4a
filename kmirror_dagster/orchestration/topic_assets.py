"""Mirrored topics as assets of their own, so that assets of their readers can depend on "mirrored and fresh".

They are external: nodes make them, and the refresh sensor of their mirror says when. One is materialized when records
came and all that the source has is there within the mirror's limits; while nothing comes it stays as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from kmirror_dagster.coordination.models import MirrorSummary, PartitionStatus, RefreshStatus
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.orchestration.checks import Finding
from kmirror_dagster.orchestration.figures import rate, seconds
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import resource_of
from kmirror_dagster.orchestration.views import MirrorView
from kmirror_dagster.settings import PolicySettings

FRESH = "mirrored_and_fresh"
_CHECK_BUDGET_S = 20.0
_CHECK_TEXT = "All partitions of the topic are MIRRORING, within the mirror's limits of lag."


@dataclass(frozen=True)
class TopicReading:
    """One topic at the destination.

    Attributes:
        problem: why it is not mirrored and fresh, empty when it is.
        end: sum of the log ends of its partitions; grows with each record.
    """

    topic: str
    problem: str
    end: int
    partitions: int
    lag_records: int
    lag_seconds: float
    records_per_second: float

    def metadata(self) -> dict[str, dg.MetadataValue]:
        """Figures, with the labels that the mirror's have."""
        return {
            "partitions": dg.MetadataValue.int(self.partitions),
            "destination_end_offset": dg.MetadataValue.int(self.end),
            "lag_records": dg.MetadataValue.int(self.lag_records),
            "lag_seconds": seconds(self.lag_seconds),
            "records_per_second": rate(self.records_per_second),
        }


def read_topics(node: NodeApi, view: MirrorView, summary: MirrorSummary) -> list[TopicReading]:
    """Ask a node for the topics that are shown one by one; nothing is asked when there are none."""
    known = {topic.topic for topic in summary.topics}
    return [
        judge_topic(
            topic,
            list(node.iter_partitions(view.mirror, topic=topic)) if topic in known else [],
            summary.refresh,
            view.target.policies,
        )
        for topic in view.topics
    ]


def judge_topic(
    topic: str, statuses: Sequence[PartitionStatus], refresh: RefreshStatus | None, policies: PolicySettings
) -> TopicReading:
    """Whether a topic is mirrored and fresh, and its figures."""
    lag_s = max((status.lag_seconds or 0.0 for status in statuses), default=0.0)
    lag = sum(status.lag_records or 0 for status in statuses)
    others = [status for status in statuses if status.state is not MirrorState.MIRRORING]
    problem = ""
    if not statuses:
        problem = "not mirrored"
    elif others:
        example = f"partition {others[0].partition} is {others[0].state or 'not mirrored yet'}"
        problem = f"{len(others)} of {len(statuses)} partitions are not MIRRORING: {example}"
    elif refresh is None or not refresh.source_reachable:
        problem = "the source is not reached: nobody knows what it has"
    elif lag_s > policies.rpo_seconds:
        problem = f"{lag_s:.1f} s behind, {policies.rpo_seconds:g} s are allowed"
    elif policies.max_lag_records is not None and lag > policies.max_lag_records:
        problem = f"{lag} records behind, {policies.max_lag_records} are allowed"
    return TopicReading(
        topic,
        problem,
        end=sum(status.destination_end_offset or 0 for status in statuses),
        partitions=len(statuses),
        lag_records=lag,
        lag_seconds=lag_s,
        records_per_second=sum(status.records_per_second for status in statuses),
    )


def topic_finding(view: MirrorView, reading: TopicReading) -> Finding:
    """The check's outcome for one topic."""
    return Finding(
        FRESH,
        not reading.problem,
        reading.problem or "mirrored and fresh",
        metadata=reading.metadata(),
        asset_key=view.topics[reading.topic].key,
    )


def topic_events(
    view: MirrorView, readings: Sequence[TopicReading], before: Mapping[str, int]
) -> tuple[list[dg.AssetMaterialization], dict[str, int]]:
    """Materializations that are due, and the log ends to remember: only new records are news."""
    events: list[dg.AssetMaterialization] = []
    after = dict(before)
    for reading in readings:
        if reading.problem or before.get(reading.topic) == reading.end:
            continue
        after[reading.topic] = reading.end
        tags = {"dagster/data_version": str(reading.end)}  # lets readers tell new records from a mere event
        key = view.topics[reading.topic].key
        events.append(dg.AssetMaterialization(key, metadata=reading.metadata(), tags=tags))
    return events, after


def topic_check_specs(view: MirrorView) -> list[dg.AssetCheckSpec]:
    """One check for each topic shown; a reader's condition can ask for it."""
    return [
        dg.AssetCheckSpec(FRESH, asset=spec.key, description=_CHECK_TEXT, blocking=True)
        for spec in view.topics.values()
    ]


def topic_checks(view: MirrorView) -> dg.AssetChecksDefinition:
    """Build the checks of a mirror's topics; they ask the node once for all of them."""

    @dg.multi_asset_check(
        name=f"{view.name}_topic_checks",
        specs=topic_check_specs(view),
        required_resource_keys={view.resource_key},
        can_subset=True,
    )
    def check_topics(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        resource = resource_of(context, view.resource_key)
        readings = resource.ask(
            lambda node: read_topics(node, view, node.mirror(view.mirror)),
            budget_s=_CHECK_BUDGET_S,
            what="the node",
        )
        for finding in (topic_finding(view, reading) for reading in readings):
            key = finding.asset_key or view.asset_key
            if dg.AssetCheckKey(key, FRESH) in context.selected_asset_check_keys:
                yield dg.AssetCheckResult(
                    asset_key=key,
                    check_name=FRESH,
                    passed=finding.passed,
                    description=finding.text,
                    metadata=finding.metadata,
                )

    return check_topics
