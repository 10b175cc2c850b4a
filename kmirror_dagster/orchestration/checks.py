"""What is checked of a mirror. One judgement serves the checks people run and those a sensor reports."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import dagster as dg

from kmirror_dagster.coordination.models import MirrorSummary, PartitionStatus, RefreshStatus
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.orchestration.clocks import epoch_ms
from kmirror_dagster.orchestration.figures import MAX_TABLE_ROWS, Metadata, partition_table, seconds
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import resource_of
from kmirror_dagster.orchestration.views import MirrorView
from kmirror_dagster.settings import PolicySettings

NODE_ALIVE = "node_alive"
NO_FAILED = "no_failed_partition"
LAG = "lag_within_limits"
REFRESH = "refresh_fresh"
WRITERS = "nobody_else_writes"

# how the refresh's ACL step tells of somebody whose rights allow it, and a partition of somebody who did
WRITER_NOTE = " may write to "
FOREIGN_WRITE = "somebody else"

# Four intervals of the nodes' own refresh: one that is slow, or repeated once, is no news.
MAX_REFRESH_AGE_S = 120.0
CHECK_BUDGET_S = 20.0
_LISTED_ERRORS = 5


@dataclass(frozen=True)
class Finding:
    """Outcome of one check; `asset_key` when it is not the mirror's own."""

    check: str
    passed: bool
    text: str
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR
    metadata: Metadata | None = None
    asset_key: dg.AssetKey | None = None

    @property
    def name(self) -> str:
        """Name that is unique among all checks of a mirror and its topics."""
        return self.check if self.asset_key is None else f"{self.asset_key.to_user_string()}/{self.check}"


_DESCRIPTIONS = {
    NODE_ALIVE: "A node answers and knows the mirror.",
    NO_FAILED: "No mirror partition is FAILED.",
    LAG: "Lag is within policies.rpo_seconds and policies.max_lag_records.",
    REFRESH: "The newest metadata refresh is recent, reached the source and had no errors.",
    WRITERS: "Nobody else wrote to a copy (an error) or is allowed to (a warning).",
}


def check_specs(asset_key: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """The checks of a mirror's asset."""
    return [
        dg.AssetCheckSpec(name, asset=asset_key, description=text) for name, text in _DESCRIPTIONS.items()
    ]


def mirror_checks(view: MirrorView) -> dg.AssetChecksDefinition:
    """Build the checks of one mirror; they ask the node once for all of them."""

    @dg.multi_asset_check(
        name=f"{view.name}_checks",
        specs=check_specs(view.asset_key),
        required_resource_keys={view.resource_key},
        can_subset=True,
    )
    def check_mirror(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        resource = resource_of(context, view.resource_key)
        try:
            findings = resource.ask(
                lambda node: read_findings(node, view), budget_s=CHECK_BUDGET_S, what="the node"
            )
        except KmirrorError as error:
            findings = unanswered(str(error))
        for finding in findings:
            if dg.AssetCheckKey(view.asset_key, finding.check) in context.selected_asset_check_keys:
                yield dg.AssetCheckResult(
                    asset_key=view.asset_key,
                    check_name=finding.check,
                    passed=finding.passed,
                    severity=finding.severity,
                    description=finding.text,
                    metadata=finding.metadata,
                )

    return check_mirror


def read_findings(node: NodeApi, view: MirrorView) -> list[Finding]:
    """Ask a node for what the checks need and judge it."""
    summary = node.mirror(view.mirror)
    return assess(summary, failed_partitions(node, summary), view.target.policies, now_ms=epoch_ms())


def failed_partitions(node: NodeApi, summary: MirrorSummary) -> list[PartitionStatus]:
    """FAILED partitions of a mirror, at most one table of them; asked for only when there are any."""
    if not summary.states.get(MirrorState.FAILED.value):
        return []
    found = node.iter_partitions(summary.mirror, state=MirrorState.FAILED, limit=MAX_TABLE_ROWS)
    return [status for _, status in zip(range(MAX_TABLE_ROWS), found, strict=False)]


def assess(
    summary: MirrorSummary, failed: Sequence[PartitionStatus], policies: PolicySettings, *, now_ms: int
) -> list[Finding]:
    """Judge a mirror that a node answered for."""
    return [
        Finding(NODE_ALIVE, True, f"led by node {summary.coordinator_node or 'unknown'}"),
        _no_failed(summary, failed),
        _lag(summary, policies),
        _refresh(summary.refresh, now_ms),
        _writers(summary.refresh, failed),
    ]


def unanswered(reason: str) -> list[Finding]:
    """Judge a mirror that no node answers for: the other checks say nothing, they cannot see."""
    return [Finding(NODE_ALIVE, False, reason)]


def _no_failed(summary: MirrorSummary, failed: Sequence[PartitionStatus]) -> Finding:
    count = summary.states.get(MirrorState.FAILED.value, 0)
    broken = {topic.topic: topic.error for topic in summary.topics if topic.error}
    if not count and not broken:
        return Finding(NO_FAILED, True, f"none of {summary.partitions} partitions is FAILED")
    reasons = [f"{status.topic}/{status.partition}: {status.error}" for status in failed[:_LISTED_ERRORS]]
    reasons += [f"topic {topic}: {error}" for topic, error in list(broken.items())[:_LISTED_ERRORS]]
    text = f"{count} of {summary.partitions} partitions FAILED, {len(broken)} topics in error: "
    metadata = {"failed_partitions": partition_table(failed)} if failed else None
    return Finding(NO_FAILED, False, text + "; ".join(reasons), metadata=metadata)


def _lag(summary: MirrorSummary, policies: PolicySettings) -> Finding:
    seen = f"{summary.lag_seconds:.1f} s and {summary.lag_records} records behind"
    limits = f"{policies.rpo_seconds:g} s"
    passed = keeps_rpo = summary.lag_seconds <= policies.rpo_seconds
    if policies.max_lag_records is not None:
        passed = passed and summary.lag_records <= policies.max_lag_records
        limits += f" and {policies.max_lag_records} records"
    metadata: Metadata = {
        "lag_seconds": seconds(summary.lag_seconds),
        "lag_records": dg.MetadataValue.int(summary.lag_records),
    }
    text = f"{seen}, allowed: {limits}"
    # how much may be lost is a promise, how many records are behind a hint
    severity = dg.AssetCheckSeverity.WARN if keeps_rpo else dg.AssetCheckSeverity.ERROR
    return Finding(LAG, passed, text, severity, metadata)


def _refresh(refresh: RefreshStatus | None, now_ms: int) -> Finding:
    if refresh is None:
        return Finding(REFRESH, False, "no refresh has ended yet", dg.AssetCheckSeverity.WARN)
    age_s = max(0.0, (now_ms - refresh.finished_ms) / 1000)
    if not refresh.source_reachable:
        return Finding(REFRESH, False, f"the source was not reachable {age_s:.0f} s ago")
    errors = [f"{what}: {why}" for step in refresh.steps for what, why in step.errors.items()]
    failed = [step.step for step in refresh.steps if not step.ok]
    if failed or errors:
        text = "; ".join([f"step {step} failed" for step in failed] + errors[:_LISTED_ERRORS])
        return Finding(REFRESH, False, text, dg.AssetCheckSeverity.WARN)
    if age_s > MAX_REFRESH_AGE_S:
        return Finding(REFRESH, False, f"the newest refresh is {age_s:.0f} s old")
    return Finding(REFRESH, True, f"refreshed {age_s:.0f} s ago", dg.AssetCheckSeverity.WARN)


def _writers(refresh: RefreshStatus | None, failed: Sequence[PartitionStatus]) -> Finding:
    """Judge who else writes: one that did made a partition FAILED; who may is in the notes of the ACL step."""
    written = [status for status in failed if FOREIGN_WRITE in (status.error or "")]
    if written:
        reasons = [
            f"{status.topic}/{status.partition}: {status.error}" for status in written[:_LISTED_ERRORS]
        ]
        metadata = {"partitions_written_to": partition_table(written)}
        return Finding(WRITERS, False, "; ".join(reasons), metadata=metadata)
    notes = (
        [note for step in refresh.steps if step.step == Step.ACLS for note in step.notes] if refresh else []
    )
    allowed = [note for note in notes if WRITER_NOTE in note]
    if allowed:
        more = f"; and {len(allowed) - _LISTED_ERRORS} more" if len(allowed) > _LISTED_ERRORS else ""
        text = "; ".join(allowed[:_LISTED_ERRORS]) + more
        return Finding(WRITERS, False, text, dg.AssetCheckSeverity.WARN)
    seen = "; ".join(note for note in notes if "write" in note or "read-only" in note)
    return Finding(WRITERS, True, seen or "no foreign write was seen", dg.AssetCheckSeverity.WARN)
