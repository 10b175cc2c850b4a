"""Commands about mirrors as a whole: create, list, describe, delete, refresh."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmirror_dagster.cli.check import preview_creation
from kmirror_dagster.cli.options import (
    DryRunOption,
    JsonOption,
    MirrorArgument,
    TimeoutOption,
    TopicsOption,
    split_patterns,
)
from kmirror_dagster.cli.plan import show_plan
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.errors import KmirrorError, UsageError
from kmirror_dagster.lifecycle import DesiredState, MirrorState

if TYPE_CHECKING:
    from kmirror_dagster.coordination.client import NodeClient
    from kmirror_dagster.coordination.models import MirrorSummary, PartitionStatus, RefreshStatus

# The node itself waits for both clusters, each with its own connection timeouts.
_CREATE_DEADLINE_S = 120.0
_NUMERIC = frozenset({"TOPICS", "PARTITIONS", "PARTITION", "SOURCE-OFFSET", "DESTINATION-OFFSET", "LAG"})


def create(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The mirror's settings (YAML).")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Change the settings of a mirror of that name.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until every partition found is MIRRORING.")
    ] = False,
    timeout: TimeoutOption = 60.0,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Create a mirror from a settings file.

    The node asks both clusters for their ids first: an unreachable cluster, refused credentials and a source
    that is the destination end it before anything is written. Creating the same mirror again changes nothing.
    """
    from kmirror_dagster.cli.output import print_json
    from kmirror_dagster.cli.progress import busy, progress
    from kmirror_dagster.cli.waiting import StateWait
    from kmirror_dagster.coordination.models import CreateMirror
    from kmirror_dagster.settings import load_document

    session = session_of(ctx)
    if dry_run:
        preview_creation(session, file, replace=replace, timeout_s=timeout, as_json=session.json or json)
        return
    document = load_document(file)
    with session.client(deadline_s=_CREATE_DEADLINE_S) as client:
        with busy(f"asking {_servers(document)} for their cluster ids"):
            created = client.create(CreateMirror(document=document, replace=replace))
        if wait:
            with progress(created.mirror) as shown:
                wait_for = StateWait(client, created.mirror, MirrorState.MIRRORING, None, may_be_empty=True)
                wait_for.run(timeout, shown)
            created = client.mirror(created.mirror)
    if session.json or json:
        print_json(created.model_dump(mode="json"))
        return
    typer.echo(
        f"mirror {created.mirror}: {created.source_bootstrap} ({created.source_cluster_id}) is mirrored to "
        f"cluster {created.destination_cluster_id}"
    )


def list_mirrors(ctx: typer.Context, json: JsonOption = False) -> None:
    """List all mirrors."""
    from kmirror_dagster.cli.output import counts_text, print_models, print_table

    session = session_of(ctx)
    with session.client() as client:
        summaries = client.mirrors()
    if session.json or json:
        print_models(summaries)
        return
    header = ("MIRROR", "TOPICS", "SOURCE-CLUSTER-ID", "SOURCE-BOOTSTRAP-SERVER", "LAG", "STATES")
    print_table(
        header,
        (
            (
                s.mirror,
                str(len(s.topics)),
                s.source_cluster_id,
                s.source_bootstrap,
                str(s.lag_records),
                counts_text(s.states),
            )
            for s in summaries
        ),
        numeric=_NUMERIC,
    )


def describe(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic's partitions.")
    ] = None,
    state: Annotated[
        MirrorState | None,
        typer.Option("--state", case_sensitive=False, help="Only partitions in this state."),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only FAILED partitions, with their retries and reasons.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show the partitions of a mirror: offsets, lag and state.

    Offsets are shown while a partition is MIRRORING; what is not known is a dash. Topics that cannot be
    mirrored and errors of the newest refresh follow below the table.
    """
    from kmirror_dagster.cli.output import print_json

    session = session_of(ctx)
    if failed and state not in (None, MirrorState.FAILED):
        raise typer.BadParameter(f"--failed and --state {state} exclude each other")
    wanted = MirrorState.FAILED if failed else state
    selected = _topic_filter(topics)
    with session.client() as client:
        summary = client.mirror(mirror)
        found = client.iter_partitions(mirror, topic=topic, state=wanted)
        partitions = [status for status in found if selected(status.topic)]
        attempts = _max_attempts(client) if failed and partitions else None
    if session.json or json:
        print_json([_as_document(status) for status in partitions])
        return
    if failed:
        _print_failed(partitions, attempts)
    else:
        _print_partitions(partitions)
        _print_troubles(summary)


def delete(
    ctx: typer.Context,
    mirror: MirrorArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Delete it though its topics are not all STOPPED.")
    ] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Delete a mirror; topics and data at the destination stay.

    Its topics have to be STOPPED first ('kmirror stop MIRROR'), unless --force is given.
    """
    with session_of(ctx).client() as client:
        client.delete(mirror, force=force, dry_run=dry_run)
        if dry_run:
            typer.echo(_deletion_text(client.mirror(mirror)))
            return
    typer.echo(f"mirror {mirror} deleted; its topics stay at the destination")


def refresh(
    ctx: typer.Context, mirror: MirrorArgument, dry_run: DryRunOption = False, json: JsonOption = False
) -> None:
    """Run one metadata refresh now: topics, partitions, configurations, groups, ACLs, quotas.

    A dry run shows what it would change, as 'kmirror plan' does.
    """
    from kmirror_dagster.cli.output import print_json, print_table
    from kmirror_dagster.cli.progress import busy

    session = session_of(ctx)
    if dry_run:
        show_plan(session, mirror, as_json=session.json or json)
        return
    with session.client() as client, busy(f"refreshing {mirror}"):
        status = client.refresh(mirror)
    if session.json or json:
        print_json(status.model_dump(mode="json"))
    else:
        rows = (
            (s.step, "ok" if s.ok else "failed", str(s.changes), str(s.duration_ms)) for s in status.steps
        )
        print_table(("STEP", "RESULT", "CHANGES", "MS"), rows, numeric=frozenset({"CHANGES", "MS"}))
    if not status.ok:
        raise KmirrorError(f"refresh of {mirror} has errors: {'; '.join(_step_errors(status))}")


def _deletion_text(summary: "MirrorSummary") -> str:
    active = summary.partitions - summary.states.get(MirrorState.STOPPED.value, 0)
    first = f", {active} partitions would be stopped first" if active else ""
    return (
        f"mirror {summary.mirror} would be deleted with its state of {len(summary.topics)} topics{first}; "
        "its topics stay at the destination; nothing was changed"
    )


def _servers(document: dict[str, Any]) -> str:
    """Bootstrap servers of both clusters as written, for the line that is shown while they are asked."""
    named: list[str] = []
    for side in ("source", "destination"):
        section = document.get(side)
        servers: Any = section.get("bootstrap.servers", section.get("bootstrap_servers")) if section else None
        named.append(f"{side} {','.join(servers) if isinstance(servers, list) else servers}")
    return " and ".join(named)


def _topic_filter(topics: list[str] | None) -> Any:
    from kmirror_dagster.settings import name_matcher

    try:
        return name_matcher(split_patterns(topics))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _max_attempts(client: "NodeClient") -> int | None:
    return client.node().max_retry_attempts


def _print_partitions(partitions: "Iterable[PartitionStatus]") -> None:
    from kmirror_dagster.cli.output import number_or_unknown, print_table

    def row(status: "PartitionStatus") -> tuple[str, ...]:
        known = status.state is MirrorState.MIRRORING
        return (
            status.mirror,
            status.topic,
            str(status.partition),
            number_or_unknown(status.source_end_offset if known else None),
            number_or_unknown(status.destination_end_offset if known else None),
            number_or_unknown(status.lag_records if known else None),
            _state_text(status),
        )

    header = ("MIRROR", "TOPIC", "PARTITION", "SOURCE-OFFSET", "DESTINATION-OFFSET", "LAG", "STATE")
    print_table(header, map(row, partitions), numeric=_NUMERIC)


def _print_failed(partitions: "Iterable[PartitionStatus]", max_attempts: int | None) -> None:
    from kmirror_dagster.cli.output import print_table

    def retry(status: "PartitionStatus") -> str:
        if not status.retriable:
            return "non-retryable"
        return (
            f"{status.retry_attempt}/{max_attempts}"
            if max_attempts is not None
            else str(status.retry_attempt)
        )

    rows = ((s.mirror, s.topic, str(s.partition), retry(s), s.error or "-") for s in partitions)
    print_table(("MIRROR", "TOPIC", "PARTITION", "RETRY", "ERROR"), rows, numeric=_NUMERIC)


def _print_troubles(summary: "MirrorSummary") -> None:
    troubles = [f"topic {t.topic}: {t.error}" for t in summary.topics if t.error]
    if summary.refresh is None:
        troubles.append("no metadata refresh has run yet")
    else:
        age = max(0.0, time.time() - summary.refresh.finished_ms / 1000)
        troubles += [f"refresh {age:.0f} s ago: {text}" for text in _step_errors(summary.refresh)]
    if troubles:
        typer.echo("\n" + "\n".join(troubles))


def _step_errors(status: "RefreshStatus") -> list[str]:
    errors = [f"{s.step}: {name}: {reason}" for s in status.steps for name, reason in s.errors.items()]
    errors += [f"{s.step} failed" for s in status.steps if not s.ok and not s.errors]
    return errors if status.source_reachable else ["source unreachable", *errors]


def _state_text(status: "PartitionStatus") -> str:
    if status.state is None:
        return "NONE" if status.desired is DesiredState.MIRRORING else "-"
    return status.state.value


def _as_document(status: "PartitionStatus") -> dict[str, object]:
    """One partition under the names KIP-1279's command line uses, and what it has no name for."""
    return {
        "mirror": status.mirror,
        "topic": status.topic,
        "partition": status.partition,
        "sourceOffset": status.source_end_offset,
        "destinationOffset": status.destination_end_offset,
        "lag": status.lag_records,
        "state": status.state.value if status.state else None,
        "retryAttempt": status.retry_attempt,
        "errorMessage": status.error,
        "desiredState": status.desired.value,
        "previousState": status.previous_state.value if status.previous_state else None,
        "retriable": status.retriable,
        "stateEpoch": status.state_epoch,
        "leaderEpoch": status.leader_epoch,
        "sinceMs": status.since_ms,
        "lagSeconds": status.lag_seconds,
        "recordsPerSecond": status.records_per_second,
        "bytesPerSecond": status.bytes_per_second,
        "node": status.node_id,
        "lostOffsets": status.lost_offsets,
        "lastLoss": [status.lost_from, status.lost_to] if status.lost_offsets else None,
    }
