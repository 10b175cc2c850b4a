"""Commands about the local node: start, stop, status."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kmirror_dagster.cli.options import DryRunOption, JsonOption, TimeoutOption
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.errors import UsageError

if TYPE_CHECKING:
    from kmirror_dagster.cli.session import Session

# A node's settings where nobody names a file.
CONFIG_NAME = "node.yaml"

app = typer.Typer(no_args_is_help=True, help="The local node: start, stop, status.")

StateDirOption = Annotated[
    Path | None,
    typer.Option("--state-dir", metavar="DIR", help="State directory; default: the global option's."),
]


@app.command()
def start(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="The node's settings (YAML). Default: node.yaml there."
        ),
    ] = None,
    state_dir: StateDirOption = None,
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground", help="Run it in this process, as a supervisor wants it; ends with INT or TERM."
        ),
    ] = False,
    timeout: TimeoutOption = 60.0,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Start a detached node and wait until it is ready.

    It outlives this command and ends with 'kmirror node stop'. One node runs per state directory. A dry run reads
    the settings, and says so where a node runs already.
    """
    from kmirror_dagster.cli.output import print_json
    from kmirror_dagster.cli.progress import busy
    from kmirror_dagster.coordination.launcher import require_no_node, start_node
    from kmirror_dagster.settings import load_node

    session = session_of(ctx)
    directory = _directory(session, state_dir)
    file = config or directory / CONFIG_NAME
    if not file.is_file():
        remedy = "name another one with --config" if config else "name the node's settings with --config FILE"
        raise UsageError(f"{file}: no such file; {remedy}")
    settings = load_node(file)  # refused here rather than by a process that ends at once
    if dry_run:
        require_no_node(directory)
        if session.json or json:
            print_json(
                {"state_dir": str(directory), "destination": settings.destination.address, "dry_run": True}
            )
        else:
            typer.echo(
                f"would start a node on {directory} for the destination {settings.destination.address}"
            )
        return
    if foreground:
        _become_node(directory, file, timeout)
    with busy(f"starting a node on {directory}"):
        node = start_node(directory, file, wait_s=timeout)
    if session.json or json:
        print_json({"node": node.node_id, "endpoint": node.endpoint, "pid": node.pid})
    else:
        typer.echo(f"node {node.node_id} runs at {node.endpoint} (pid {node.pid})")


@app.command()
def stop(
    ctx: typer.Context,
    state_dir: StateDirOption = None,
    timeout: TimeoutOption = 30.0,
    dry_run: DryRunOption = False,
) -> None:
    """Drain and end the node of the state directory; harmless when none runs."""
    from kmirror_dagster.cli.progress import busy
    from kmirror_dagster.coordination.launcher import node_endpoint, stop_node

    directory = _directory(session_of(ctx), state_dir)
    if dry_run:
        node = node_endpoint(directory)
        runs = f"would stop the node {node.node_id} (pid {node.pid})" if node else None
        typer.echo(runs or f"no node runs on {directory}")
        return
    with busy(f"stopping the node on {directory}"):
        stopped = stop_node(directory, wait_s=timeout)
    typer.echo("node stopped" if stopped else f"no node runs on {directory}")


@app.command()
def status(ctx: typer.Context, state_dir: StateDirOption = None, json: JsonOption = False) -> None:
    """Show the node: what it leads, what it uses, records it could not read."""
    from kmirror_dagster.cli.output import print_json, print_pairs

    session = session_of(ctx)
    if state_dir is not None:
        session = session.on(state_dir)
    with session.client() as client:
        ready, node, cluster = client.ready(), client.node(), client.cluster()
    if session.json or json:
        print_json({**node.model_dump(mode="json"), "ready": ready, "nodes": cluster.endpoints})
        return
    led = len(node.coordinator_partitions)
    print_pairs(
        {
            "node": node.node_id,
            "endpoint": node.endpoint,
            "version": node.version,
            "ready": "yes" if ready else "no",
            "destination": node.destination_cluster_id,
            "leads": f"{led} of {cluster.state_partitions} coordinator partitions",
            "mirror partitions": str(node.mirror_partitions),
            "nodes": ", ".join(sorted(cluster.endpoints)) or node.node_id,
            "cpu": f"{node.cpu_seconds:.1f} s",
            "memory": f"{node.memory_bytes / 1024 / 1024:.0f} MiB",
        }
    )
    for record in node.quarantined_records:
        typer.echo(f"quarantined record: {record}")


def _become_node(directory: Path, config: Path, startup_wait_s: float) -> NoReturn:
    """Replace this process by the node: signals reach it, and nothing of the command line stays in memory."""
    import os
    import sys

    command = [sys.executable, "-m", "kmirror_dagster.coordination.node", "--config", str(config)]
    command += ["--state-dir", str(directory), "--startup-wait", str(startup_wait_s)]
    os.execv(command[0], command)  # noqa: S606


def _directory(session: "Session", state_dir: Path | None) -> Path:
    return state_dir or session.node_directory()
