"""`kmirror sandbox`: two real Kafka clusters on this machine."""

import json
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from kmirror_dagster.errors import UsageError
from kmirror_dagster.sandbox import jars
from kmirror_dagster.sandbox.cluster import START_S, SandboxCluster
from kmirror_dagster.sandbox.pair import DESTINATION, SOURCE, Sandbox
from kmirror_dagster.sandbox.seed import DEFAULT_RECORDS, DEFAULT_SEED, Seeder
from kmirror_dagster.sandbox.seed_report import SeedReport
from kmirror_dagster.sandbox.status import ClusterState, SandboxStatus, cluster_status

sandbox_app = typer.Typer(
    name="sandbox",
    help="Two real Apache Kafka clusters on this machine, a source and a destination, to try things on.",
    no_args_is_help=True,
)

_COLOURS = {
    ClusterState.RUNNING: "green",
    ClusterState.PARTLY_RUNNING: "yellow",
    ClusterState.STOPPED: "blue",
    ClusterState.ABSENT: "dim",
}

JsonOption: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON to stdout and nothing else there.")
]
DryRunOption: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Only say what would be done; nothing is changed.")
]


def _wants_json(ctx: typer.Context, as_json: bool) -> bool:
    """Whether this command or `kmirror` itself was given ``--json``."""
    return as_json or bool(getattr(ctx.obj, "json", False))


def _out() -> Console:
    """Tables go to stdout; where nobody sees them they are not wrapped."""
    return Console(width=None if sys.stdout.isatty() else 200)


def _progress_out() -> Console:
    """Progress goes to stderr, so that stdout holds the result only."""
    return Console(stderr=True)


@sandbox_app.command()
def start(
    ctx: typer.Context,
    brokers: Annotated[
        int | None,
        typer.Option("--brokers", help="Brokers of each cluster, 1 or 3. Default: as before, else 1."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Longest wait.")
    ] = START_S,
    as_json: JsonOption = False,
) -> None:
    """Start both clusters and leave them running; harmless when they run.

    The first time it downloads Apache Kafka (45 MB).
    """
    console = _progress_out()
    sandbox = Sandbox(brokers=brokers)
    # Apart from the start itself: a console shows one live display at a time.
    jars.class_path(console)
    with console.status("starting both clusters"):
        sandbox.start(timeout, detach=True)
    _show(sandbox.status(), as_json=_wants_json(ctx, as_json))


@sandbox_app.command()
def stop(dry_run: DryRunOption = False) -> None:
    """Stop both clusters; their data stays. Harmless when they do not run."""
    sandbox = Sandbox()
    if dry_run:
        typer.echo(_running(sandbox) or "nothing is running")
        return
    stopped = sandbox.stop()
    typer.echo("stopped" if stopped else "nothing was running")


@sandbox_app.command()
def status(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Show what runs where. Exit code 1 when a broker does not run."""
    found = Sandbox().status()
    _show(found, as_json=_wants_json(ctx, as_json))
    if not found.is_running:
        raise typer.Exit(1)


@sandbox_app.command()
def reset(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Stop both clusters and delete their data, logs and documents; the next start makes new ones."""
    sandbox = Sandbox()
    if dry_run:
        typer.echo(_running(sandbox) or "nothing is running")
        typer.echo(f"would delete all data of the sandbox in {sandbox.home}")
        return
    if not yes:
        typer.confirm(f"Delete all data of the sandbox in {sandbox.home}?", abort=True)
    sandbox.reset()
    typer.echo(f"deleted both clusters in {sandbox.home}")


@sandbox_app.command()
def seed(
    ctx: typer.Context,
    records: Annotated[
        int | None,
        typer.Option(
            "--records", min=0, help=f"Records to write at once. Default: {DEFAULT_RECORDS}; 0 with --rate."
        ),
    ] = None,
    seed_number: Annotated[
        int, typer.Option("--seed", help="Seed number: the same gives the same records.")
    ] = DEFAULT_SEED,
    base_ms: Annotated[
        int | None,
        typer.Option(
            "--base-time", metavar="MS", help="Timestamp of the first records, ms. Default: an hour ago."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.1, help="Then keep writing so many records a second.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", metavar="SECONDS", min=0, help="End --rate after this time.")
    ] = None,
    cluster: Annotated[str, typer.Option("--cluster", help=f"{SOURCE} or {DESTINATION}.")] = SOURCE,
    as_json: JsonOption = False,
) -> None:
    """Write a believable workload: keyed, transactional, compacted, compressed and odd records; groups."""
    if duration is not None and rate is None:
        raise UsageError("--duration is for --rate; add --rate")
    target = _running_cluster(cluster)
    count = records if records is not None else DEFAULT_RECORDS if rate is None else 0
    with Seeder(target.settings(), seed=seed_number, base_ms=base_ms) as seeder:
        seeder.create_topics()
        if count:
            with _bar("writing", count) as progress:
                seeder.bulk(count, progress)
        if rate is not None:
            title = f"{rate:g} records/s, Ctrl-C ends it"
            with _stopped_by_signal(duration) as over, _bar(title, None) as progress:
                seeder.stream(rate, over, progress)
        _show_report(seeder.report(), as_json=_wants_json(ctx, as_json))


def _running(sandbox: Sandbox) -> str:
    """What a stop would end, one line per cluster; nothing where nothing runs."""
    return "\n".join(
        f"would stop the cluster {each.name}"
        for each in sandbox.status().clusters
        if each.state in (ClusterState.RUNNING, ClusterState.PARTLY_RUNNING)
    )


def _running_cluster(name: str) -> SandboxCluster:
    sandbox = Sandbox()
    clusters = {SOURCE: sandbox.source, DESTINATION: sandbox.destination}
    if name not in clusters:
        raise UsageError(f"no cluster {name!r} in the sandbox; --cluster takes {SOURCE} or {DESTINATION}")
    if cluster_status(clusters[name]).state in (ClusterState.ABSENT, ClusterState.STOPPED):
        raise UsageError(f"sandbox cluster {name} is not running; start it with: kmirror sandbox start")
    return clusters[name]


class _Counter:
    """Feeds a progress bar; called once per record, so it redraws for every hundredth only."""

    def __init__(self, progress: Progress, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._pending = 0

    def __call__(self, count: int) -> None:
        self._pending += count
        if self._pending >= 100:
            self.settle()

    def settle(self) -> None:
        self._progress.advance(self._task, self._pending)
        self._pending = 0


@contextmanager
def _bar(title: str, total: int | None) -> Generator[_Counter]:
    columns = (SpinnerColumn(), TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_progress_out(), transient=True) as progress:
        counter = _Counter(progress, total)
        yield counter
        counter.settle()


@contextmanager
def _stopped_by_signal(duration_s: float | None) -> Generator[threading.Event]:
    """An event that Ctrl-C, SIGTERM or the end of the duration sets: the usual ways to end a stream."""
    over = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        over.set()

    former = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    timer = threading.Timer(duration_s, over.set) if duration_s is not None else None
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield over
    finally:
        if timer is not None:
            timer.cancel()
        for number, handler in former.items():
            signal.signal(number, handler)


def _show(found: SandboxStatus, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found.model_dump(mode="json"), indent=2))
        return
    table = Table("cluster", "state", "bootstrap.servers", "cluster id", "pid", box=None, pad_edge=False)
    for cluster in found.clusters:
        table.add_row(
            cluster.name,
            f"[{_COLOURS[cluster.state]}]{cluster.state.value}[/]",
            cluster.bootstrap_servers or "-",
            cluster.cluster_id or "-",
            " ".join(str(broker.pid or "-") for broker in cluster.brokers) or "-",
        )
    console = _out()
    console.print(table)
    for cluster in found.clusters:
        for broker in cluster.brokers:
            console.print(f"log: {broker.log}", soft_wrap=True, highlight=False)
    if found.mirror_file is not None:
        console.print(f"mirror: {found.mirror_file}", soft_wrap=True, highlight=False)


def _show_report(report: SeedReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.model_dump(mode="json"), indent=2))
        return
    table = Table(
        "topic", "partitions", "compression", "written", "aborted", "log start", "log end", box=None
    )
    for topic in report.topics:
        table.add_row(
            topic.topic,
            str(len(topic.log_ends)),
            topic.compression,
            str(topic.written),
            str(topic.aborted),
            str(sum(topic.log_starts)),
            str(sum(topic.log_ends)),
        )
    console = _out()
    console.print(table)
    groups = ", ".join(group.group for group in report.groups) or "none"
    again = f"--seed {report.seed} --base-time {report.base_ms}"
    console.print(
        f"{report.written} records in {report.seconds:.1f} s; the same again: {again}; groups: {groups}",
        soft_wrap=True,
        highlight=False,
    )
