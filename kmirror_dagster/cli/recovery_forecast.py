"""`kmirror forecast`: what a failover right now would mean, group by group."""

from typing import TYPE_CHECKING

import typer

from kmirror_dagster.cli.options import JsonOption, MirrorArgument, TopicsOption, split_patterns
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.errors import KmirrorError

if TYPE_CHECKING:
    from kmirror_dagster.recovery.forecast import Forecast

_NUMERIC = frozenset({"RE-READS", "LOSES", "READ AHEAD", "NO POSITION"})
_SHOWN_GROUPS = 50


def forecast(
    ctx: typer.Context, mirror: MirrorArgument, topics: TopicsOption = None, json: JsonOption = False
) -> None:
    """Say what a failover right now would cost: records lost, and per group where it would go on.

    RE-READS are records a group has read already and would get again, LOSES those it has not read and would never
    get, READ AHEAD those it has read that the destination does not have. While the source does not answer its log
    ends are the last that a node saw. Changes nothing. Ends with 1 when more would be lost than
    policies.rpo_seconds allows.
    """
    from kmirror_dagster.cli.output import print_json
    from kmirror_dagster.cli.progress import busy
    from kmirror_dagster.coordination.recovery_ports import known_partitions
    from kmirror_dagster.recovery.forecast import look_ahead
    from kmirror_dagster.settings import mirror_from_document

    session = session_of(ctx)
    with session.client() as client:
        known = known_partitions(client, mirror, split_patterns(topics))
        settings = mirror_from_document(client.document(mirror), name=f"mirror {mirror!r}")
    with busy(f"forecast {mirror}"):
        found = look_ahead(settings, known)
    if session.json or json:
        print_json(found.model_dump(mode="json"))
    else:
        _print(found)
    if not found.within_rpo:
        raise KmirrorError(
            f"{mirror}: a failover now would lose {found.loses_seconds:.1f} s, {found.rpo_seconds:g} s are allowed"
        )


def _print(found: "Forecast") -> None:
    from kmirror_dagster.cli.output import UNKNOWN, print_pairs, print_table

    print_pairs(
        {
            "mirror": found.mirror,
            "source": "answers" if found.source_reachable else "does not answer: as last seen by a node",
            "would be lost": f"{found.loses_records} records, {found.loses_seconds:.1f} s "
            f"(allowed: {found.rpo_seconds:g} s)",
            **{f"not known {number}": problem for number, problem in enumerate(found.problems, 1)},
        }
    )
    if not found.groups:
        return
    typer.echo("")
    rows = (
        (
            each.group,
            str(each.re_reads) if found.source_reachable else UNKNOWN,
            str(each.loses),
            str(each.read_ahead) if found.source_reachable else UNKNOWN,
            str(each.without_position),
            ", ".join(
                f"{p.topic}/{p.partition}@{UNKNOWN if p.resumes_at is None else p.resumes_at}"
                for p in each.partitions[:3]
            )
            + (f" and {len(each.partitions) - 3} more" if len(each.partitions) > 3 else ""),
        )
        for each in found.groups[:_SHOWN_GROUPS]
    )
    header = ("GROUP", "RE-READS", "LOSES", "READ AHEAD", "NO POSITION", "RESUMES AT")
    print_table(header, rows, numeric=_NUMERIC)
    if len(found.groups) > _SHOWN_GROUPS:
        typer.echo(f"... and {len(found.groups) - _SHOWN_GROUPS} more (--json lists all)")
