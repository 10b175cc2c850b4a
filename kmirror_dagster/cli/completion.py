"""Shell completion of names that only a node knows."""

import typer

from kmirror_dagster.cli.session import session_of

# A shell waits for this: rather no suggestion than a hanging prompt.
_DEADLINE_S = 1.0


def mirror_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of mirrors that begin with `incomplete`; none when no node answers at once."""
    from kmirror_dagster.errors import KmirrorError

    try:
        with session_of(ctx).client(timeout_s=_DEADLINE_S, deadline_s=_DEADLINE_S) as client:
            names = [summary.mirror for summary in client.mirrors()]
    except KmirrorError:
        return []
    return [name for name in names if name.startswith(incomplete)]
