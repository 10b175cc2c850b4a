"""`kmirror verify`: both clusters compared record by record."""

from typing import TYPE_CHECKING, Annotated

import typer

from kmirror_dagster.cli.boundary import complain
from kmirror_dagster.cli.options import JsonOption, MirrorArgument, TopicsOption, split_patterns
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.errors import KmirrorError, UsageError
from kmirror_dagster.lifecycle import DesiredState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmirror_dagster.coordination.client import NodeClient
    from kmirror_dagster.coordination.models import MirrorSummary
    from kmirror_dagster.verification.report import VerifyReport

_SHOWN_DIFFERENCES = 20


def verify(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    last: Annotated[
        int | None,
        typer.Option("--last", metavar="OFFSETS", min=1, help="Compare only the end of each partition."),
    ] = None,
    groups: Annotated[
        bool, typer.Option("--groups/--no-groups", help="Compare committed group offsets too.")
    ] = True,
    settle: Annotated[
        float,
        typer.Option(
            "--settle", metavar="SECONDS", min=0, help="Longest wait for the destination to catch up."
        ),
    ] = 60.0,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0.1, help="End the comparison after that time."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare both clusters record by record, at both isolation levels.

    Offset, key, value, headers as an ordered list, timestamp, log start and end, and the committed offsets of
    the groups that the mirror's filters select. What is written meanwhile is left out: the source's ends are
    taken first, then the destination gets time to reach them. Stopped topics are left out unless named with
    --topics. Ends with 1 when anything differs. The clusters are read with this process's environment.
    """
    from kmirror_dagster.cli.output import print_json
    from kmirror_dagster.cli.progress import progress
    from kmirror_dagster.settings import mirror_from_document
    from kmirror_dagster.verification.compare import VerifyLimits, VerifyProgress, compare_mirror

    session = session_of(ctx)
    with session.client() as client:
        summary = client.mirror(mirror)
        settings = mirror_from_document(client.document(mirror), name=f"mirror {mirror!r}")
        chosen, skipped = choose_topics(summary, split_patterns(topics))
        # committed offsets are kept equal while a topic is mirrored, neither before nor afterwards
        mirrored = [
            t.topic for t in summary.topics if t.desired is DesiredState.MIRRORING and t.topic in chosen
        ]
        if groups and mirrored:
            _refresh(client, mirror)
        limits = VerifyLimits(last_offsets=last, groups=groups, settle_s=settle, deadline_s=timeout)
        with progress(f"verify {mirror}") as shown:

            def tell(seen: VerifyProgress) -> None:
                shown.update(seen.done, seen.total, seen.phase)

            report = compare_mirror(
                settings,
                chosen,
                group_topics=mirrored,
                limits=limits,
                progress=tell,
                offset_maps=lambda: client.offset_maps(mirror),
            )
    if session.json or json:
        print_json({**report.model_dump(mode="json"), "ok": report.ok, "skipped_topics": skipped})
    else:
        _print_report(report, skipped)
    if not report.ok:
        raise KmirrorError(
            f"{mirror}: {report.differences_total} differences and {report.duplicates} duplicates found"
        )


def _refresh(client: "NodeClient", mirror: str) -> None:
    """Bring committed offsets up to date, so that nobody waits for the next refresh to compare them."""
    from kmirror_dagster.cli.progress import busy

    try:
        with busy(f"refreshing {mirror}"):
            client.refresh(mirror)
    except KmirrorError as error:
        complain(f"refresh of {mirror} failed, comparing what there is: {error}")


def choose_topics(summary: "MirrorSummary", patterns: list[str] | None) -> "tuple[list[str], list[str]]":
    """Topics to compare, and those left out because they are no mirrors any more.

    A topic that cannot be mirrored is compared all the same: that it is not equal is what one wants to know.
    """
    from kmirror_dagster.settings import name_matcher

    try:
        selects = name_matcher(patterns)
    except ValueError as error:
        raise UsageError(str(error)) from error
    named = [topic for topic in summary.topics if selects(topic.topic)]
    left_out = {t.topic for t in named if patterns is None and t.desired is DesiredState.STOPPED}
    chosen = [topic.topic for topic in named if topic.topic not in left_out]
    if not chosen:
        what = f"no topic matching {', '.join(patterns)}" if patterns else "no topic that is not stopped"
        raise UsageError(f"mirror {summary.mirror} has {what}; see 'kmirror describe {summary.mirror}'")
    return chosen, sorted(left_out)


def _print_report(report: "VerifyReport", skipped: "Sequence[str]") -> None:
    from kmirror_dagster.cli.output import print_pairs, print_table

    records = sum(report.records.values())
    pairs = {
        "mirror": report.mirror,
        "partitions": str(report.partitions),
        **{f"records {level}": str(count) for level, count in report.records.items()},
        "group offsets": str(report.groups),
        "differences": str(report.differences_total),
        "duplicates": str(report.duplicates),
        "duration": f"{report.duration_s:.1f} s ({records / max(report.duration_s, 1e-3):,.0f} records/s)",
    }
    if report.superseded:
        pairs["compacted on one side"] = str(report.superseded)
    if report.timestamp_types:
        pairs["LogAppendTime as CreateTime"] = str(report.timestamp_types)
    if report.unreadable_headers:
        pairs["headers not compared"] = f"{report.unreadable_headers} (names that are no UTF-8)"
    if skipped:
        pairs["topics left out"] = ", ".join(skipped)
    for group, reason in report.groups_skipped.items():
        pairs[f"group {group} left out"] = reason
    print_pairs(pairs)
    if report.differences:
        typer.echo("")
        rows = (
            (d.kind.value, d.topic, str(d.partition), "-" if d.offset is None else str(d.offset), d.detail)
            for d in report.differences[:_SHOWN_DIFFERENCES]
        )
        print_table(("DIFFERENCE", "TOPIC", "PARTITION", "OFFSET", "DETAIL"), rows)
        left = report.differences_total - min(len(report.differences), _SHOWN_DIFFERENCES)
        if left:
            typer.echo(f"... and {left} more (--json lists the first {len(report.differences)})")
