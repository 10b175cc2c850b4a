"""`kmirror faults`: a load on your own clusters, faults of your own making, and proof that nothing went wrong."""

import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kmirror_dagster.cli.options import JsonOption, MirrorArgument
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.errors import KmirrorError, UsageError
from kmirror_dagster.lifecycle import DesiredState

if TYPE_CHECKING:
    from kmirror_dagster.verification.fault_run import FaultRunReport

_COMMAND_S = 120.0


def faults(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topic: Annotated[
        str, typer.Option("--topic", metavar="TOPIC", help="Mirrored topic to write to; nobody else may.")
    ],
    break_command: Annotated[
        str | None,
        typer.Option("--break", metavar="COMMAND", help="Breaks something, such as 'docker pause broker-1'."),
    ] = None,
    mend_command: Annotated[
        str | None, typer.Option("--mend", metavar="COMMAND", help="Puts it right again.")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", min=1, help="How long records are written.")
    ] = 60.0,
    rate: Annotated[
        float, typer.Option("--rate", metavar="RECORDS", min=1, help="Records a second.")
    ] = 100.0,
    hold: Annotated[
        float, typer.Option("--hold", metavar="SECONDS", min=0, help="How long it stays broken.")
    ] = 5.0,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, help="From one fault's end to the next.")
    ] = 10.0,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=1, help="Longest wait for the destination.")
    ] = 120.0,
    history: Annotated[
        Path | None,
        typer.Option(
            "--history", metavar="FILE", help="Where the history goes. Default: below the state directory."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Break things under load, on your own clusters, and check every record that was written and read.

    Writes unique values to one topic at the source and reads it at both clusters, while your own commands break
    something and put it right again. Prints how long each fault lasted and how long it took to be back, and looks
    for lost, duplicate, reordered and unseen records and the other anomalies of 'kmirror history check'. Ends with 1
    when there is any. The values stay in the topic.
    """
    from kmirror_dagster.cli.output import print_json
    from kmirror_dagster.cli.progress import progress
    from kmirror_dagster.settings import mirror_from_document
    from kmirror_dagster.verification.fault_run import FaultRun, FaultRunPlan

    if mend_command is not None and break_command is None:
        raise UsageError("--mend without --break has nothing to put right")
    session = session_of(ctx)
    file = history or session.node_directory() / "faults" / f"{mirror}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    with session.client() as client:
        wanted = {t.topic for t in client.mirror(mirror).topics if t.desired is DesiredState.MIRRORING}
        if topic not in wanted:
            raise UsageError(
                f"mirror {mirror} does not mirror a topic {topic!r}: make one at the source for this and let the "
                f"mirror select it; see 'kmirror describe {mirror}'"
            )
        _make_room(file)
        settings = mirror_from_document(client.document(mirror), name=f"mirror {mirror!r}")
    plan = FaultRunPlan(
        topic=topic,
        seconds=seconds,
        rate=rate,
        history=file,
        break_it=_command(break_command),
        mend_it=_command(mend_command),
        hold_s=hold,
        every_s=every,
        wait_s=wait,
    )
    with progress(f"faults {mirror}") as shown:
        report = FaultRun(settings, plan, tell=lambda text: shown.update(0, None, text)).run()
    if session.json or json:
        print_json({**report.model_dump(mode="json"), "ok": report.history.ok, "file": str(file)})
    else:
        _print_report(report, file)
    if not report.history.ok:
        raise KmirrorError(f"{mirror}: {report.history.anomalies_total} anomalies found, history: {file}")


def _make_room(file: Path) -> None:
    """See to it that the history is one of its own: what is there already would be gone on with."""
    if file.exists():
        raise UsageError(f"{file} exists: name another file with --history")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{file.parent} cannot be made: {error.strerror or error}") from error


def _command(text: str | None) -> Callable[[], None] | None:
    """A call that runs a command line, without a shell."""
    if text is None:
        return None
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is no command line: {error}") from error
    if not arguments:
        raise UsageError("an empty command breaks nothing")

    def run() -> None:
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{text!r} cannot be run: {error}") from error
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise UsageError(f"{text!r} ended with {done.returncode}: {said[-1] if said else 'nothing said'}")

    return run


def _print_report(report: "FaultRunReport", file: Path) -> None:
    from kmirror_dagster.cli.output import print_table
    from kmirror_dagster.cli.recovery_history import print_history

    rows = (
        (str(number), f"{each.lasted_s:.1f} s", f"{each.back_s:.1f} s")
        for number, each in enumerate(report.faults, start=1)
    )
    if report.faults:
        print_table(("FAULT", "LASTED", "ALL COPIED AFTER"), rows)
        typer.echo("")
    print_history(report.history)
    typer.echo(f"history: {file}")
