"""`kmirror switchover`: the planned change of roles, nothing lost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kmirror_dagster.cli.options import DryRunOption, JsonOption, MirrorArgument, TopicsOption, split_patterns
from kmirror_dagster.cli.recovery_failback import carry_out, confirm, print_outcome
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.lifecycle import DesiredState, MirrorState

if TYPE_CHECKING:
    from kmirror_dagster.coordination.client import NodeClient
    from kmirror_dagster.records import RecoveryRecord

_STOP_WAIT_S = 60.0


def switchover(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    to_state_dir: Annotated[
        Path | None,
        typer.Option("--to-state-dir", metavar="DIR", help="State directory of the node at the source."),
    ] = None,
    to_endpoint: Annotated[
        str | None,
        typer.Option(
            "--to-endpoint", metavar="URL", help="API of the node at the source (KMIRROR_TO_ENDPOINT)."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="MIRROR", help="Name of the mirror back. Default: MIRROR-back."),
    ] = None,
    quiet: Annotated[
        float,
        typer.Option(
            "--quiet",
            metavar="SECONDS",
            min=0.1,
            help="Rest that counts as no writers, where none can be fenced.",
        ),
    ] = 3.0,
    drain: Annotated[
        float, typer.Option("--drain", metavar="SECONDS", min=1, help="Longest wait for equal ends.")
    ] = 60.0,
    dry_run: DryRunOption = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    abort: Annotated[
        bool, typer.Option("--abort", help="Give it up before the mirror is stopped: back to the start.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", min=1, help="Longest wait for the mirror back to take over."
        ),
    ] = 300.0,
    json: JsonOption = False,
) -> None:
    """Change roles on purpose: fence writers, drain, verify, sync groups, stop, mirror back.

    Writers are shut out by an ACL where the source has an authorizer; elsewhere stop them yourself, it waits until
    nothing is written any more. Can be interrupted anywhere and run again; until the mirror is stopped --abort
    returns to the start. Needs a node that writes to the source, for the way back.
    """
    from kmirror_dagster.coordination import recovery_runs as runs
    from kmirror_dagster.coordination.recovery_nodes import client_of_other_node
    from kmirror_dagster.recovery.switchover import OPERATION

    session = session_of(ctx)
    as_json = session.json or json
    with session.client() as client:
        summary = client.mirror(mirror)
        stored = runs.stored_recovery(client, mirror, OPERATION)
        if abort:
            _abort(client, mirror, stored)
            return
        patterns = split_patterns(topics)
        if stored is not None and _is_done(client, stored, patterns):
            typer.echo(f"{mirror}: has been switched over already", err=True)
            print_outcome(stored, as_json=as_json, with_plan=False)
            return
        if stored is not None and not stored.finished:
            record = stored
            typer.echo(f"{mirror}: going on with the switchover under way, at step {record.step}", err=True)
        else:
            record = runs.begun_switchover(client, mirror, stored, patterns, quiet_s=quiet, drain_s=drain)
        if dry_run:
            _print_steps(record, as_json=as_json)
            return
        with client_of_other_node(
            session.environ(), to_state_dir, to_endpoint, summary.source_cluster_id
        ) as other:
            confirm(mirror, yes=yes, hint="say --yes to do it")
            record, downtime_s = _until_stopped(client, record)
            if downtime_s is not None and not as_json:
                typer.echo(f"{mirror}: writers were without a cluster for {downtime_s:.1f} s", err=True)
            directory = session.node_directory() / "quarantine" / mirror
            record = runs.planned_way_back(client, record, runs.WayBack(directory, name=name))
            done = carry_out(client, other, record, timeout)
    print_outcome(done, as_json=as_json, with_plan=False)


def _print_steps(record: "RecoveryRecord", *, as_json: bool) -> None:
    """What would be done, from the step it is at."""
    from kmirror_dagster.cli.output import print_json
    from kmirror_dagster.recovery.failback import FailbackStep
    from kmirror_dagster.recovery.switchover import SwitchoverStep

    names = [*(step.value for step in SwitchoverStep), *(step.value for step in FailbackStep)]
    steps = names[names.index(record.step) :] if record.step in names else names
    topics = record.document.get("topics", [])
    if as_json:
        print_json({"mirror": record.mirror, "topics": topics, "steps": steps, "dry_run": True})
        return
    typer.echo(
        f"{record.mirror}: would switch over {', '.join(topics) or 'what is left'}: {', '.join(steps)}"
    )
    typer.echo("nothing was changed")


def _is_done(client: "NodeClient", stored: "RecoveryRecord", patterns: list[str] | None) -> bool:
    """Whether these topics have been switched over, and none of them has been started again since."""
    from kmirror_dagster.recovery import switchover as room
    from kmirror_dagster.recovery.failback import FailbackState, FailbackStep
    from kmirror_dagster.settings import name_matcher

    if stored.operation != room.OPERATION or stored.step != FailbackStep.DONE.value:
        return False
    selects = name_matcher(patterns)
    back = {topic.topic for topic in FailbackState.model_validate(stored.document).plan.topics}
    statuses = [status for status in client.iter_partitions(stored.mirror) if selects(status.topic)]
    return bool(statuses) and all(
        status.topic in back and status.desired is DesiredState.STOPPED for status in statuses
    )


def _until_stopped(client: "NodeClient", record: "RecoveryRecord") -> "tuple[RecoveryRecord, float | None]":
    """Carry out what is left until the mirror is stopped; seconds writers were shut out, None when not known."""
    from kmirror_dagster.cli.progress import progress
    from kmirror_dagster.cli.waiting import StateWait
    from kmirror_dagster.coordination.recovery_runs import until_stopped

    with progress(f"switchover {record.mirror}") as shown:
        return until_stopped(
            client,
            record,
            wait=lambda topics: _awaited(
                StateWait(client, record.mirror, MirrorState.STOPPED, topics).run(_STOP_WAIT_S, shown)
            ),
            tell=lambda text, done, total: shown.update(done, total, text),
        )


def _awaited(_states: object) -> None:
    """Nothing to tell of a wait that ended."""


def _abort(client: "NodeClient", mirror: str, stored: "RecoveryRecord | None") -> None:
    from kmirror_dagster.coordination.recovery_nodes import NodeJournal
    from kmirror_dagster.recovery.switchover import give_up
    from kmirror_dagster.settings import mirror_from_document

    if stored is None or stored.finished:
        typer.echo(f"{mirror}: no switchover is under way")
        return
    settings = mirror_from_document(client.document(mirror), name=f"mirror {mirror!r}")
    give_up(settings, stored, NodeJournal(client))
    typer.echo(f"{mirror}: switchover given up; it is mirrored as before")
