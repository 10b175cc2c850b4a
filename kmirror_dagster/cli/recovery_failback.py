"""`kmirror failback`: the old source becomes the copy of the cluster that has taken over."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kmirror_dagster.cli.options import JsonOption, MirrorArgument, TopicsOption, split_patterns
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.errors import IllegalTransitionError, UsageError
from kmirror_dagster.recovery.formats import QuarantineFormat

if TYPE_CHECKING:
    from kmirror_dagster.coordination.client import NodeClient
    from kmirror_dagster.coordination.recovery_runs import WayBack
    from kmirror_dagster.records import RecoveryRecord
    from kmirror_dagster.recovery.failback_plan import FailbackPlan

_NUMERIC = frozenset({"PARTITIONS", "QUARANTINE", "COPY"})
_SHOWN_TOPICS = 50


def failback(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    to_state_dir: Annotated[
        Path | None,
        typer.Option("--to-state-dir", metavar="DIR", help="State directory of the node at the old source."),
    ] = None,
    to_endpoint: Annotated[
        str | None,
        typer.Option(
            "--to-endpoint",
            metavar="URL",
            help="API of the node at the old source (KMIRROR_TO_ENDPOINT); its token is KMIRROR_TO_TOKEN.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="MIRROR", help="Name of the mirror back. Default: MIRROR-back."),
    ] = None,
    quarantine: Annotated[
        Path | None,
        typer.Option(
            "--quarantine",
            metavar="DIR",
            help="Where records go that were never mirrored. Default: below the state directory.",
        ),
    ] = None,
    quarantine_format: Annotated[
        QuarantineFormat,
        typer.Option("--format", help="Format of those files; or topic: __kmirror_quarantine.MIRROR."),
    ] = QuarantineFormat.JSONL,
    plan: Annotated[
        bool, typer.Option("--plan", "--dry-run", help="Print what would be done and end.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    abort: Annotated[
        bool, typer.Option("--abort", help="Give up a failback under way, as long as nothing was deleted.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", min=1, help="Longest wait for the mirror back to take over."
        ),
    ] = 300.0,
    json: JsonOption = False,
) -> None:
    """Mirror back: make the old source of a stopped mirror the copy of the cluster that took over.

    Compares both logs in front of the last mirror positions first and prints the plan. A topic whose log is the
    beginning of the new source's is gone on with; one with records that were never mirrored is saved to quarantine,
    deleted and copied anew, since a log's tail cannot be cut through Kafka's API. Can be interrupted anywhere: run it
    again, from any machine that has the quarantine, and it goes on. Needs a node that writes to the old source.
    """
    from kmirror_dagster.coordination.recovery_nodes import client_of_other_node
    from kmirror_dagster.coordination.recovery_runs import WayBack, stored_recovery
    from kmirror_dagster.recovery.failback import OPERATION, FailbackState

    session = session_of(ctx)
    as_json = session.json or json
    directory = quarantine or session.node_directory() / "quarantine" / mirror
    with session.client() as client:
        stored = stored_recovery(client, mirror, OPERATION)
        if abort:
            _abort(client, mirror, stored)
            return
        record = _resumed(stored)
        if record is None:
            way = WayBack(directory, quarantine_format, name)
            record = _planned(client, mirror, stored, split_patterns(topics), way)
        if record.finished:
            print_outcome(record, as_json=as_json)
            return
        state = FailbackState.model_validate(record.document)
        if plan:
            print_outcome(record, as_json=as_json)
            return
        if not as_json:
            _print_plan(state.plan, record)
        with client_of_other_node(
            session.environ(), to_state_dir, to_endpoint, state.plan.old_source_id
        ) as other:
            confirm(mirror, yes=yes)
            done = carry_out(client, other, record, timeout)
    print_outcome(done, as_json=as_json, with_plan=False)


def _resumed(stored: "RecoveryRecord | None") -> "RecoveryRecord | None":
    """A failback that is under way; its plan stays what it was."""
    if stored is None or stored.finished:
        return None
    typer.echo(
        f"{stored.mirror}: going on with the failback under way, at step {stored.step}"
        f"{f' (last: {stored.error})' if stored.error else ''}",
        err=True,
    )
    return stored


def _planned(
    client: "NodeClient",
    mirror: str,
    stored: "RecoveryRecord | None",
    patterns: list[str] | None,
    way: "WayBack",
) -> "RecoveryRecord":
    """A first record with the plan; the stored one when these topics have been failed back already."""
    from kmirror_dagster.cli.progress import busy
    from kmirror_dagster.coordination.recovery_runs import is_failed_back, planned_failback
    from kmirror_dagster.recovery.failback import FailbackState

    if is_failed_back(client, mirror, stored, patterns) and stored is not None:
        last = FailbackState.model_validate(stored.document).plan
        typer.echo(f"{mirror}: has been failed back already, by mirror {last.reverse}", err=True)
        return stored
    with busy(f"comparing both clusters of {mirror}"):
        return planned_failback(client, mirror, stored, patterns, way)


def carry_out(
    client: "NodeClient", other: "NodeClient", record: "RecoveryRecord", timeout_s: float
) -> "RecoveryRecord":
    """Do what is left of a failback; the finished record."""
    from kmirror_dagster.cli.progress import progress
    from kmirror_dagster.coordination import recovery_runs as runs

    with progress(f"failback {record.mirror}") as shown:
        return runs.carry_out(
            client,
            other,
            record,
            follow_s=timeout_s,
            tell=lambda text, done, total: shown.update(done, total, text),
        )


def _abort(client: "NodeClient", mirror: str, stored: "RecoveryRecord | None") -> None:
    from kmirror_dagster.recovery.failback import FailbackStep, give_up
    from kmirror_dagster.settings import mirror_from_document

    if stored is None or stored.finished:
        typer.echo(f"{mirror}: no failback is under way")
        return
    if stored.step != FailbackStep.SAVE.value:
        raise IllegalTransitionError(
            f"mirror {mirror!r}: the failback is at step {stored.step}, topics may have been deleted at the old "
            "source: go on with it ('kmirror failback')"
        )
    settings = mirror_from_document(client.document(mirror), name=f"mirror {mirror!r}")
    give_up(settings.source, stored, client.record_recovery)
    typer.echo(f"{mirror}: failback given up; what is in quarantine stays there")


def confirm(mirror: str, *, yes: bool, hint: str = "") -> None:
    """Ask whether it shall be done, unless that was said already.

    Raises:
        UsageError: when there is nobody to ask.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        told = hint or f"read the plan ('kmirror failback {mirror} --plan'), then say --yes"
        raise UsageError(f"nobody to ask: {told}")
    typer.confirm("Do it?", abort=True, err=True)


def print_outcome(record: "RecoveryRecord", *, as_json: bool, with_plan: bool = True) -> None:
    """Print how far it is, as JSON or text."""
    from kmirror_dagster.cli.output import print_json
    from kmirror_dagster.recovery.failback import FailbackState

    state = FailbackState.model_validate(record.document)
    if as_json:
        plan = {
            **state.plan.model_dump(mode="json"),
            "tail": state.plan.tail,
            "copy_offsets": state.plan.copy_offsets,
            "copy_seconds": round(state.plan.copy_seconds, 1),
        }
        print_json(
            {
                "mirror": record.mirror,
                "step": record.step,
                "finished": record.finished,
                "plan": plan,
                "saved": [tail.model_dump(mode="json") for tail in state.saved],
                "unfenced": state.unfenced,
            }
        )
        return
    if with_plan:
        _print_plan(state.plan, record)
    if record.finished:
        saved = sum(tail.records for tail in state.saved)
        typer.echo(
            f"{record.mirror}: done; mirror {state.plan.reverse} copies back, {saved} records are in "
            f"{state.plan.quarantine if state.saved else 'quarantine'}; "
            f"compare with 'kmirror verify {state.plan.reverse}' at that node"
        )


def _print_plan(plan: "FailbackPlan", record: "RecoveryRecord") -> None:
    from kmirror_dagster.cli.output import print_pairs, print_table
    from kmirror_dagster.recovery.failback_plan import COPIED_PER_SECOND

    print_pairs(
        {
            "mirror": f"{plan.mirror} (stays stopped)",
            "mirror back": plan.reverse,
            "old source": f"{plan.old_source_id} (becomes the copy)",
            "new source": plan.new_source_id,
            "step": record.step,
            "to quarantine": f"{plan.tail} offsets, {plan.quarantine}",
            "to copy": f"{plan.copy_offsets} offsets, about {plan.copy_seconds:.0f} s at {COPIED_PER_SECOND} a second",
        }
    )
    typer.echo("")
    rows = (
        (
            topic.topic,
            str(len(topic.partitions)),
            topic.action.value,
            str(topic.tail),
            str(topic.copy_offsets),
            topic.reason or "-",
        )
        for topic in plan.topics[:_SHOWN_TOPICS]
    )
    print_table(("TOPIC", "PARTITIONS", "ACTION", "QUARANTINE", "COPY", "WHY"), rows, numeric=_NUMERIC)
    if len(plan.topics) > _SHOWN_TOPICS:
        typer.echo(f"... and {len(plan.topics) - _SHOWN_TOPICS} more (--json lists all)")
