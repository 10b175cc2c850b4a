"""The verbs of the lifecycle: start, pause, resume, stop, recover."""

from typing import TYPE_CHECKING

import typer

from kmirror_dagster.cli.options import (
    DryRunOption,
    JsonOption,
    MirrorArgument,
    TimeoutOption,
    TopicsOption,
    WaitOption,
    split_patterns,
)
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.lifecycle import MirrorState

if TYPE_CHECKING:
    from kmirror_dagster.coordination.client import NodeClient
    from kmirror_dagster.coordination.models import VerbResult

_SHOWN = 20

# What to wait for; a recovered partition goes back to whatever is wanted of it.
_TARGETS: dict[str, MirrorState | None] = {
    "start": MirrorState.MIRRORING,
    "pause": MirrorState.PAUSED,
    "resume": MirrorState.MIRRORING,
    "stop": MirrorState.STOPPED,
    "recover": None,
}


def start(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    wait: WaitOption = True,
    timeout: TimeoutOption = 60.0,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Start mirroring topics, also such as were stopped."""
    _run(ctx, mirror, "start", topics, wait=wait and not dry_run, timeout=timeout, dry_run=dry_run, json=json)


def pause(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    wait: WaitOption = True,
    timeout: TimeoutOption = 60.0,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Pause mirroring; the destination's topics stay read-only."""
    _run(ctx, mirror, "pause", topics, wait=wait and not dry_run, timeout=timeout, dry_run=dry_run, json=json)


def resume(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    wait: WaitOption = True,
    timeout: TimeoutOption = 60.0,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Resume paused topics where they were paused."""
    _run(
        ctx, mirror, "resume", topics, wait=wait and not dry_run, timeout=timeout, dry_run=dry_run, json=json
    )


def stop(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    wait: WaitOption = True,
    timeout: TimeoutOption = 60.0,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """End mirroring and make the destination's topics writable; the source need not answer."""
    _run(ctx, mirror, "stop", topics, wait=wait and not dry_run, timeout=timeout, dry_run=dry_run, json=json)


def recover(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    wait: WaitOption = True,
    timeout: TimeoutOption = 60.0,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Retry FAILED partitions at once, also those that are not retried by themselves."""
    _run(
        ctx, mirror, "recover", topics, wait=wait and not dry_run, timeout=timeout, dry_run=dry_run, json=json
    )


def _run(
    ctx: typer.Context,
    mirror: str,
    verb: str,
    topics: list[str] | None,
    *,
    wait: bool,
    timeout: float,
    dry_run: bool,
    json: bool,
) -> None:
    from kmirror_dagster.cli.output import counts_text, print_json
    from kmirror_dagster.coordination.models import VerbRequest

    session = session_of(ctx)
    as_json = session.json or json
    patterns = split_patterns(topics)
    with session.client() as client:
        result = client.verb(mirror, verb, VerbRequest(topics=patterns, dry_run=dry_run))
        if not as_json:
            typer.echo(_told(result, dry_run=dry_run))
        states: dict[str, int] | None = None
        if wait and (result.changed or result.unchanged):
            states = _wait(client, result, restricted=patterns is not None, timeout_s=timeout)
    if as_json:
        print_json({**result.model_dump(mode="json"), "states": states, "dry_run": dry_run})
    elif states is not None:
        typer.echo(f"{mirror}: {counts_text(states)}")


def _wait(
    client: "NodeClient", result: "VerbResult", *, restricted: bool, timeout_s: float
) -> dict[str, int]:
    from kmirror_dagster.cli.progress import progress
    from kmirror_dagster.cli.waiting import StateWait

    topics = [*result.changed, *result.unchanged]
    if not restricted and len(topics) == len(client.mirror(result.mirror).topics):
        topics = None  # the whole mirror: its counts are one small answer, however many partitions there are
    with progress(f"{result.verb} {result.mirror}") as shown:
        return StateWait(client, result.mirror, _TARGETS[result.verb], topics).run(timeout_s, shown)


def _told(result: "VerbResult", *, dry_run: bool) -> str:
    changed, unchanged = len(result.changed), len(result.unchanged)
    already = f", {unchanged} had nothing to change" if unchanged else ""
    text = f"{result.mirror}: {result.verb} of {changed} topics ({result.partitions} partitions){already}"
    if not dry_run:
        return text
    names = ", ".join(result.changed[:_SHOWN]) + (f" and {changed - _SHOWN} more" if changed > _SHOWN else "")
    return f"{text}; nothing was changed{f'; topics: {names}' if names else ''}"
