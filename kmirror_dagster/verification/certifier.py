"""Goes on with a certificate; also re-verifies a window of time without one."""

import time
from collections.abc import Callable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.broker.log_records import LogRange
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.verification.both_sides import BothSides, Look
from kmirror_dagster.verification.certificate import (
    Certificate,
    CertificateStore,
    PartitionCertificate,
    begun,
    extended,
    looked_at,
    merged,
    next_window,
)
from kmirror_dagster.verification.ranges import LogEnds, beyond_source

# What is read between two writes of the certificate, all partitions together: some seconds of work.
ROUND_OFFSETS = 1_000_000
_ROUND_PARTITIONS = 500


def certify(
    sides: BothSides,
    store: CertificateStore,
    topics: Sequence[str],
    *,
    ceilings: Mapping[Partition, int] | None = None,
    restart: bool = False,
    go_on: Callable[[], bool] = lambda: True,
    round_offsets: int = ROUND_OFFSETS,
) -> Certificate:
    """One pass: read what both sides hold and the certificate does not cover yet, up to the ends as of now.

    The certificate is stored after every round, so a pass that is interrupted is gone on with by the next one.

    Args:
        sides: both clusters.
        store: where the certificate is; hold its lock.
        topics: topics to go on with; what is known of others stays.
        ceilings: last mirror positions of stopped partitions.
        restart: begin these topics anew.
        go_on: asked between rounds; False ends the pass early.
        round_offsets: offsets read between two writes of the certificate.

    Raises:
        KmirrorError: when a cluster cannot be read; what was read before is stored.
    """
    look = sides.look(topics)
    certificate = _opened(sides, store.load(), topics, look, restart=restart)
    store.save(certificate)
    rounds = _Rounds(sides, topics, look, ceilings or {}, go_on, round_offsets)
    return rounds.run(certificate, store.save)


class _Rounds:
    """Reads window after window of many partitions until their ends of the beginning are reached."""

    def __init__(
        self,
        sides: BothSides,
        topics: Sequence[str],
        look: Look,
        ceilings: Mapping[Partition, int],
        go_on: Callable[[], bool],
        round_offsets: int,
    ) -> None:
        self._sides = sides
        self._topics = topics
        self._look = look
        self._ceilings = ceilings
        self._go_on = go_on
        self._round_offsets = round_offsets
        self._open = set(look.source)

    def run(self, certificate: Certificate, save: Callable[[Certificate], None]) -> Certificate:
        """Read; `save` is given what is known after every round."""
        while True:
            known = certificate.by_key()
            windows = self._windows(known)
            if not windows or not self._go_on():
                return certificate
            outcomes = self._sides.check(windows)
            if len(outcomes) < len(windows):  # something was deleted while it was read
                self._look = _with_new_starts(self._look, self._sides.look(self._topics))
            grown = [extended(known[key], windows[key], outcome) for key, outcome in outcomes.items()]
            certificate = merged(certificate, grown, now_ms=_now_ms())
            save(certificate)

    def _windows(self, known: Mapping[Partition, PartitionCertificate]) -> dict[Partition, LogRange]:
        windows: dict[Partition, LogRange] = {}
        limit = max(1, self._round_offsets // max(1, min(len(self._open), _ROUND_PARTITIONS)))
        for key in sorted(self._open):
            if len(windows) == _ROUND_PARTITIONS:
                break
            window = next_window(
                known[key],
                self._look.source[key],
                self._look.destination[key],
                limit=limit,
                ceiling=self._ceilings.get(key),
            )
            if window.start < window.end:
                windows[key] = window
            else:
                self._open.discard(key)
        return windows


def _opened(
    sides: BothSides, stored: Certificate | None, topics: Sequence[str], look: Look, *, restart: bool
) -> Certificate:
    """The certificate a pass begins with: that of the file where it is of these clusters and levels."""
    if stored is None or not _is_of(stored, sides):
        stored = _new(sides)
    known = {} if restart else stored.by_key()
    opened: list[PartitionCertificate] = []
    for key, source in look.source.items():
        each = begun(known.get(key), key, look.topic_ids[key[0]])
        each = looked_at(each, source, look.destination[key], now_ms=_now_ms())
        beyond = next(iter(beyond_source(key, source, look.destination[key])), None)
        if beyond is not None and each.problem is None:
            each = each.model_copy(update={"problem": f"more than the source has: {beyond.detail}"})
        opened.append(each)
    others = {topic: text for topic, text in stored.problems.items() if topic not in set(topics)}
    stored = stored.model_copy(update={"problems": {**others, **look.problems}})
    return merged(stored, opened, now_ms=_now_ms())


def _new(sides: BothSides) -> Certificate:
    now_ms = _now_ms()
    return Certificate(
        mirror=sides.settings.mirror,
        source_cluster_id=sides.source_id,
        destination_cluster_id=sides.destination_id,
        isolations=list(sides.isolations),
        began_ms=now_ms,
        checked_ms=now_ms,
    )


def _is_of(certificate: Certificate, sides: BothSides) -> bool:
    ids = (certificate.source_cluster_id, certificate.destination_cluster_id)
    return ids == (sides.source_id, sides.destination_id) and set(certificate.isolations) == set(
        sides.isolations
    )


def _with_new_starts(before: Look, now: Look) -> Look:
    """The ends of before, so that a pass ends where it was to end, with the starts of now."""

    def moved(
        ends: Mapping[Partition, LogEnds], newer: Mapping[Partition, LogEnds]
    ) -> dict[Partition, LogEnds]:
        return {
            key: LogEnds(newer[key].start if key in newer else each.start, each.end, each.stable_end)
            for key, each in ends.items()
        }

    return Look(
        moved(before.source, now.source),
        moved(before.destination, now.destination),
        before.topic_ids,
        before.problems,
    )


class WindowReport(BaseModel):
    """Outcome of `recheck`.

    Attributes:
        since_ms, until_ms: the window, epoch milliseconds; None: open.
        certificate: of this window alone.
        behind: partitions whose copy does not reach the window's end yet; they were read as far as it goes.
    """

    model_config = ConfigDict(frozen=True)

    since_ms: int | None
    until_ms: int | None
    certificate: Certificate
    behind: list[str] = Field(default_factory=list)
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether both sides are the same."""
        return self.certificate.ok


def recheck(
    sides: BothSides,
    topics: Sequence[str],
    *,
    since_ms: int | None = None,
    until_ms: int | None = None,
    ceilings: Mapping[Partition, int] | None = None,
    round_offsets: int = ROUND_OFFSETS,
) -> WindowReport:
    """Read a window of time again on both sides, whatever a certificate says; writes nothing.

    The window is that of the source's index: from the first record at or after `since_ms` to the first one at or
    after `until_ms`, which is not read. Where timestamps do not grow with the offsets, that takes in others as well.

    Raises:
        KmirrorError: when a cluster cannot be read.
    """
    began = time.monotonic()
    look = sides.look(topics)
    keys = sorted(look.source)
    first, end = _offsets_at(sides.source, keys, since_ms), _offsets_at(sides.source, keys, until_ms)
    last: dict[Partition, int] = {}
    behind: list[str] = []
    known: list[PartitionCertificate] = []
    for key in keys:
        ends = [look.source[key].stable_end, end.get(key, -1), (ceilings or {}).get(key, -1)]
        last[key] = min(each for each in ends if each >= 0)
        if look.destination[key].stable_end < last[key]:
            behind.append(f"{key[0]}/{key[1]}")
        start = 0 if since_ms is None else first[key]
        reached = min(last[key], look.destination[key].stable_end)
        start = reached if start < 0 else min(start, reached)
        each = PartitionCertificate(topic=key[0], partition=key[1], checked_to=start)
        known.append(looked_at(each, look.source[key], look.destination[key], now_ms=_now_ms()))
    certificate = merged(_new(sides), known, now_ms=_now_ms())
    certificate = certificate.model_copy(update={"problems": dict(look.problems)})
    rounds = _Rounds(sides, topics, look, last, lambda: True, round_offsets)
    return WindowReport(
        since_ms=since_ms,
        until_ms=until_ms,
        certificate=rounds.run(certificate, lambda _: None),
        behind=behind,
        duration_s=round(time.monotonic() - began, 3),
    )


def _offsets_at(
    admin: ClusterAdmin, partitions: Sequence[Partition], at_ms: int | None
) -> dict[Partition, int]:
    """Offset of the first record at or after a time; -1 where there is none."""
    if at_ms is None:
        return {}
    answers = admin.list_offsets(partitions, at_ms)
    for error in answers.errors.values():
        raise KmirrorError(f"offsets at a time cannot be looked up: {error}") from error
    return {key: found.offset for key, found in answers.values.items()}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
