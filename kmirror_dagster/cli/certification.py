"""`kmirror certify`: what is the same on both sides, kept and gone on with."""

import time
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kmirror_dagster.cli.boundary import complain
from kmirror_dagster.cli.options import JsonOption, MirrorArgument, TopicsOption, split_patterns
from kmirror_dagster.cli.session import Session, session_of
from kmirror_dagster.cli.verification import choose_topics
from kmirror_dagster.errors import KmirrorError, UsageError
from kmirror_dagster.lifecycle import MirrorState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kmirror_dagster.settings import MirrorSettings
    from kmirror_dagster.verification.certificate import Certificate, CertificateStore
    from kmirror_dagster.verification.certifier import WindowReport
    from kmirror_dagster.verification.report import Isolation

_NUMERIC = frozenset({"PARTITION", "FROM", "VERIFIED TO", "RECORDS", "UNREAD"})
_SHOWN_PARTITIONS = 50
_SHOWN_DIGITS = 16


class Level(str, Enum):
    """Isolation levels to read at; both: read_uncommitted and read_committed."""

    BOTH = "both"
    READ_UNCOMMITTED = "read_uncommitted"
    READ_COMMITTED = "read_committed"

    def __str__(self) -> str:
        return self.value


def certify(
    ctx: typer.Context,
    mirror: MirrorArgument,
    topics: TopicsOption = None,
    continuous: Annotated[
        bool, typer.Option("--continuous", help="Go on for ever (or until --timeout), pass after pass.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Between two passes.")
    ] = 10.0,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="TIME", help="Re-verify a window of time (ISO-8601 with offset from UTC)."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="End of the window; not in it.")
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--certificate",
            metavar="FILE",
            help="Where it is kept. Default: certificates/MIRROR.json in the state directory.",
        ),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Begin the certificate anew.")] = False,
    level: Annotated[Level, typer.Option("--level", help="Isolation levels to read at.")] = Level.BOTH,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="End after that time.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Read both clusters once, digest by digest, and certify up to which offset they are the same.

    Each pass reads only what the certificate does not cover yet, and can be interrupted anywhere. Where digests
    differ the range is compared record by record, and the certificate ends at the first record that differs until it
    is begun anew. With --since or --until a window of time is read again instead, whatever the certificate says.
    Ends with 1 when anything differs.
    """
    session = session_of(ctx)
    as_json = session.json or json
    run = _Run(session, mirror, split_patterns(topics), level, timeout)
    if since is not None or until is not None:
        if continuous or restart:
            raise UsageError("--since and --until read a window once: leave --continuous and --restart out")
        run.window(moment(since, "--since"), moment(until, "--until"), as_json=as_json)
        return
    path = certificate or session.node_directory() / "certificates" / f"{mirror}.json"
    run.passes(path, interval if continuous else None, restart=restart, as_json=as_json)


class _Run:
    """One call of the command."""

    def __init__(
        self, session: Session, mirror: str, patterns: list[str] | None, level: Level, timeout_s: float | None
    ) -> None:
        self._session = session
        self._mirror = mirror
        self._patterns = patterns
        self._level = level
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def passes(self, path: Path, interval_s: float | None, *, restart: bool, as_json: bool) -> None:
        """Go on with a certificate, once or until the time is over."""
        from kmirror_dagster.cli.output import print_json
        from kmirror_dagster.verification.certificate import CertificateStore

        store = CertificateStore(path)
        with store.locked():
            while True:
                made = self._pass_or_none(store, restart=restart, is_last=interval_s is None)
                restart = False
                if interval_s is None or self._is_over(interval_s):
                    break
                if made is not None and not as_json:
                    typer.echo(_line(made))
                time.sleep(interval_s)
        made = made or store.load()
        if made is None:
            raise KmirrorError(f"{self._mirror}: nothing could be read in time")
        if as_json:
            print_json(made.model_dump(mode="json"))
        else:
            print_certificate(made)
            typer.echo(f"certificate: {path}")
        _raise_unless_ok(self._mirror, made)

    def _is_over(self, ahead_s: float) -> bool:
        return self._deadline is not None and time.monotonic() + ahead_s >= self._deadline

    def _pass_or_none(
        self, store: "CertificateStore", *, restart: bool, is_last: bool
    ) -> "Certificate | None":
        """One pass; while others follow, what passes by itself is told and tried again."""
        try:
            return self._pass(store, restart=restart)
        except KmirrorError as error:
            if is_last or not error.retriable:
                raise
            complain(f"{self._mirror}: {error}; trying again")
            return None

    def _pass(self, store: "CertificateStore", *, restart: bool) -> "Certificate":
        from kmirror_dagster.cli.progress import progress
        from kmirror_dagster.verification.both_sides import BothSides
        from kmirror_dagster.verification.certifier import certify as go_on_with

        settings, chosen, ceilings = self._subject()
        with (
            progress(f"certify {self._mirror}") as shown,
            BothSides(
                settings,
                isolations=_isolations(self._level),
                progress=lambda phase, done, total: shown.update(done, total, phase),
            ) as sides,
        ):
            return go_on_with(
                sides,
                store,
                chosen,
                ceilings=ceilings,
                restart=restart,
                go_on=lambda: not self._is_over(0),
            )

    def window(self, since_ms: int | None, until_ms: int | None, *, as_json: bool) -> None:
        """Read a window of time again."""
        from kmirror_dagster.cli.output import print_json
        from kmirror_dagster.cli.progress import progress
        from kmirror_dagster.verification.both_sides import BothSides
        from kmirror_dagster.verification.certifier import recheck

        settings, chosen, ceilings = self._subject()
        with (
            progress(f"certify {self._mirror}") as shown,
            BothSides(
                settings,
                isolations=_isolations(self._level),
                progress=lambda phase, done, total: shown.update(done, total, phase),
            ) as sides,
        ):
            report = recheck(sides, chosen, since_ms=since_ms, until_ms=until_ms, ceilings=ceilings)
        if as_json:
            print_json({**report.model_dump(mode="json"), "ok": report.ok})
        else:
            _print_window(report)
        _raise_unless_ok(self._mirror, report.certificate)

    def _subject(self) -> "tuple[MirrorSettings, list[str], Mapping[tuple[str, int], int]]":
        """Settings, topics, and the last mirror positions of those that are stopped."""
        from kmirror_dagster.settings import mirror_from_document

        with self._session.client() as client:
            chosen, _ = choose_topics(client.mirror(self._mirror), self._patterns)
            document = client.document(self._mirror)
            wanted = set(chosen)
            stopped = client.iter_partitions(self._mirror, state=MirrorState.STOPPED)
            ceilings = {
                (status.topic, status.partition): status.last_mirror_offset
                for status in stopped
                if status.topic in wanted and status.last_mirror_offset is not None
            }
        return mirror_from_document(document, name=f"mirror {self._mirror!r}"), chosen, ceilings


def _isolations(level: Level) -> "tuple[Isolation, ...]":
    from kmirror_dagster.verification.both_sides import BOTH_LEVELS
    from kmirror_dagster.verification.report import Isolation

    return BOTH_LEVELS if level is Level.BOTH else (Isolation(level.value),)


def moment(text: str | None, option: str) -> int | None:
    """Epoch milliseconds of an ISO-8601 time.

    Raises:
        UsageError: when it is none, or lacks its offset from UTC.
    """
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise UsageError(f"{option}: {text!r} is no time; write it as 2026-01-31T00:00:00Z") from error
    if found.tzinfo is None:
        raise UsageError(f"{option}: {text!r} needs its offset from UTC: append Z, or +01:00 and the like")
    return round(found.timestamp() * 1_000)


def _raise_unless_ok(mirror: str, made: "Certificate") -> None:
    if made.ok:
        return
    reasons = [f"{topic}: {problem}" for topic, problem in sorted(made.problems.items())]
    for each in made.faults:
        what = each.problem or each.differing[0].examples[0]
        reasons.append(f"{each.topic}/{each.partition}: {what}")
    raise KmirrorError(f"{mirror}: {len(reasons)} partitions or topics are not the same: {reasons[0]}")


def _line(made: "Certificate") -> str:
    state = "the same" if made.ok else f"{len(made.faults) + len(made.problems)} NOT THE SAME"
    return (
        f"{made.mirror}: {len(made.partitions)} partitions, {made.records} records read, "
        f"{made.unchecked} offsets unread, {state}"
    )


def print_certificate(made: "Certificate") -> None:
    """Print a certificate: its sums, then the partitions, those that differ first."""
    from kmirror_dagster.cli.output import print_pairs, print_table

    print_pairs(
        {
            "mirror": made.mirror,
            "source": made.source_cluster_id,
            "destination": made.destination_cluster_id,
            "read at": ", ".join(made.isolations),
            "last read": _time(made.checked_ms),
            "partitions": f"{len(made.partitions)}, of which {len(made.faults)} are not the same",
            "records": str(made.records),
            "offsets unread": str(made.unchecked),
            **{f"topic {topic}": problem for topic, problem in sorted(made.problems.items())},
        }
    )
    shown = sorted(made.partitions, key=lambda each: (each.ok, each.key))
    if not shown:
        return
    typer.echo("")
    rows = (
        (
            each.topic,
            str(each.partition),
            str(each.verified_from),
            str(each.verified_to),
            str(max(each.records.values(), default=0)),
            str(each.unchecked),
            next(iter(each.digests.values()), "-")[:_SHOWN_DIGITS],
            each.problem or (each.differing[0].examples[0] if each.differing else "the same"),
        )
        for each in shown[:_SHOWN_PARTITIONS]
    )
    header = ("TOPIC", "PARTITION", "FROM", "VERIFIED TO", "RECORDS", "UNREAD", "DIGEST", "FOUND")
    print_table(header, rows, numeric=_NUMERIC)
    if len(shown) > _SHOWN_PARTITIONS:
        typer.echo(f"... and {len(shown) - _SHOWN_PARTITIONS} more (--json lists all)")


def _print_window(report: "WindowReport") -> None:
    print_certificate(report.certificate)
    rate = report.certificate.records / max(report.duration_s, 1e-3)
    typer.echo(f"read in {report.duration_s:.1f} s ({rate:,.0f} records/s)")
    if report.behind:
        typer.echo(f"not copied to the window's end yet: {', '.join(report.behind)}")


def _time(epoch_ms: int) -> str:
    return datetime.fromtimestamp(epoch_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
