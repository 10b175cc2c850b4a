"""Drill: a failover rehearsed on topics of its own, measured, verified, and undone.

The shadow topics have the shape of the mirror's, and its clusters, node and policies; nothing of the mirror itself is
touched. Their names begin with `__`, which mirrors leave out unless told otherwise.

Steps: clear what an earlier drill left, make topics and a shadow mirror, write, look at what a loss of the source
would cost right now (RPO), stop the shadow mirror while the writer goes on, write to every partition of the
destination (RTO), compare digests up to the last mirror positions, clear.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import NewTopic, Partition
from kmirror_dagster.errors import KmirrorError, UsageError
from kmirror_dagster.recovery.drill_load import SteadyWriter, await_true, exposure, write_one_each
from kmirror_dagster.recovery.drill_report import DrillReport, DrillStep
from kmirror_dagster.settings import ClusterSettings, MirrorSettings
from kmirror_dagster.verification.both_sides import BothSides
from kmirror_dagster.verification.certifier import recheck
from kmirror_dagster.verification.ranges import read_ends

TOPIC_PREFIX = "__kmirror_drill."
_PATTERN = r"__kmirror_drill\..*"
_MIRROR_SUFFIX = "-drill"
_MAX_NAME = 249
_REPLICAS = 3
_CLEAR_S = 60.0
_MIRRORING_S = 120.0
_STOPPED_S = 120.0
_POLL_S = 0.2


@dataclass(frozen=True)
class DrillWish:
    """What a drill does.

    Attributes:
        partitions: of each shadow topic; at least one topic.
        rate: records per second, all topics together.
        seconds: how long is written before the failover.
        rpo_s: what may be lost, in seconds; more fails the drill.
        rto_s: how long a failover may take, in seconds; None: only measured.
    """

    partitions: Sequence[int]
    rate: float = 500.0
    seconds: float = 10.0
    rpo_s: float = 60.0
    rto_s: float | None = None


class ShadowMirrors(Protocol):
    """Mirrors of the node that leads, as far as a drill needs them."""

    def exists(self, mirror: str) -> bool:
        """Whether there is a mirror of that name."""
        ...

    def create(self, document: Mapping[str, Any]) -> None:
        """Create a mirror; harmless when it exists with this document."""
        ...

    def delete(self, mirror: str) -> None:
        """Delete a mirror, whatever its state; harmless when there is none."""
        ...

    def are_mirroring(self, mirror: str, partitions: int) -> bool:
        """Whether so many partitions are there and all are MIRRORING.

        Raises:
            KmirrorError: when one of them has failed for good.
        """
        ...

    def stop(self, mirror: str) -> None:
        """Ask for a stop of all topics."""
        ...

    def stopped_at(self, mirror: str) -> Mapping[Partition, int] | None:
        """Last mirror positions once all partitions are STOPPED; None before."""
        ...


def shadow_names(mirror: str, topics: int) -> tuple[str, list[str]]:
    """Names of the shadow mirror and its topics.

    Raises:
        UsageError: when the mirror's name is too long for them.
    """
    shadow = f"{mirror}{_MIRROR_SUFFIX}"
    names = [f"{TOPIC_PREFIX}{mirror}.{number}" for number in range(topics)]
    if max(map(len, [shadow, *names])) > _MAX_NAME:
        raise UsageError(f"mirror {mirror!r}: its name is too long for the names of a drill's topics")
    return shadow, names


def shadow_document(document: Mapping[str, Any], shadow: str, topics: Sequence[str]) -> dict[str, Any]:
    """Settings of the shadow mirror: the mirror's clusters and policies, the drill's topics and no groups.

    Args:
        document: the mirror's, `${ENV}` references unresolved.
        shadow: name of the shadow mirror.
        topics: its topics.
    """
    policies = {
        key: value
        for key, value in dict(document.get("policies") or {}).items()
        if key not in ("start", "adopt_topics")
    }
    return {
        **{key: value for key, value in document.items() if key not in ("filters", "policies")},
        "mirror": shadow,
        "filters": {
            "topics.include": [topic.replace(".", r"\.") for topic in topics],
            "topics.exclude": [],
            "groups.include": [],
            "acls.include": [],
        },
        "policies": policies,
    }


class Drill:
    """One drill of one mirror.

    Args:
        settings: the mirror's, its secrets resolved.
        document: the mirror's, `${ENV}` references unresolved.
        mirrors: of a node.
        wish: what to do.
        tell: told what is being done.
    """

    def __init__(
        self,
        settings: MirrorSettings,
        document: Mapping[str, Any],
        mirrors: ShadowMirrors,
        wish: DrillWish,
        *,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._document = document
        self._mirrors = mirrors
        self._wish = wish
        self._tell = tell
        self._shadow, self._topics = shadow_names(settings.mirror, len(wish.partitions))
        self._steps: list[DrillStep] = []
        for topic in self._topics:
            if settings.filters.selects_topic(topic):
                raise UsageError(
                    f"mirror {settings.mirror!r} would mirror the drill's topics itself: add "
                    f"'{_PATTERN}' to filters.topics.exclude"
                )

    @property
    def partitions(self) -> list[Partition]:
        """All shadow partitions."""
        return [
            (topic, number)
            for topic, count in zip(self._topics, self._wish.partitions, strict=True)
            for number in range(count)
        ]

    def run(self) -> DrillReport:
        """Do it; whatever happens, what was made is cleared again. A drill that fails is a report as well.

        Raises:
            KmirrorError: when clearing itself fails: the message says what is left.
        """
        started_ms = time.time_ns() // 1_000_000
        report = DrillReport(
            mirror=self._settings.mirror,
            started_ms=started_ms,
            topics=len(self._topics),
            partitions=len(self.partitions),
            rpo_limit_s=self._wish.rpo_s,
            rto_limit_s=self._wish.rto_s,
        )
        try:
            with self._step("clear"):
                self._clear()
            report = self._rehearse(report)
        except KmirrorError as error:
            report = report.model_copy(update={"error": str(error)})
        finally:
            with self._step("undo"):
                self._clear()
        finished_ms = time.time_ns() // 1_000_000
        return report.model_copy(update={"steps": self._steps, "finished_ms": finished_ms, "undone": True})

    def _rehearse(self, report: DrillReport) -> DrillReport:
        with self._step("prepare"):
            self._prepare()
        writer = SteadyWriter(self._settings.source, self.partitions, rate=self._wish.rate)
        writer.start()
        try:
            with self._step("write"):
                self._write_for(writer)
            with self._step("failover"):
                report = self._fail_over(report, writer)
        finally:
            writer.end()
        written = sum(map(len, writer.acknowledged().values()))
        report = report.model_copy(update={"records_written": written})
        with self._step("verify"):
            return self._verify(report)

    def _prepare(self) -> None:
        with closing(ClusterAdmin(self._settings.source)) as admin:
            replicas = min(_REPLICAS, admin.broker_count())
            topics = [
                NewTopic(topic, count, replicas, {"retention.ms": "-1"})
                for topic, count in zip(self._topics, self._wish.partitions, strict=True)
            ]
            for topic, error in admin.create_topics(topics).items():
                if error is not None:
                    raise KmirrorError(
                        f"shadow topic {topic} cannot be made at the source: {error}"
                    ) from error
        self._mirrors.create(shadow_document(self._document, self._shadow, self._topics))
        wanted = len(self.partitions)
        await_true(
            lambda: self._mirrors.are_mirroring(self._shadow, wanted),
            _MIRRORING_S,
            f"not all of {wanted} shadow partitions were MIRRORING",
            poll_s=_POLL_S,
        )

    def _write_for(self, writer: SteadyWriter) -> None:
        end = time.monotonic() + self._wish.seconds
        while time.monotonic() < end:
            written = sum(map(len, writer.acknowledged().values()))
            self._tell(f"writing: {written} records")
            time.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))

    def _fail_over(self, report: DrillReport, writer: SteadyWriter) -> DrillReport:
        """Look, stop and write; the writer goes on, as those of a source that is out of reach would."""
        with closing(ClusterAdmin(self._settings.destination)) as admin:
            ends, errors = read_ends(admin, self.partitions)
        for error in errors.values():
            raise KmirrorError(f"log ends of the shadow topics cannot be looked up: {error}") from error
        called = time.monotonic()
        seen = exposure(writer.acknowledged(), {key: each.end for key, each in ends.items()}, called)
        self._mirrors.stop(self._shadow)
        positions: Mapping[Partition, int] | None = None

        def are_stopped() -> bool:
            nonlocal positions
            positions = self._mirrors.stopped_at(self._shadow)
            return positions is not None

        await_true(are_stopped, _STOPPED_S, "the shadow mirror was not STOPPED")
        stopped_s = time.monotonic() - called
        written_at = write_one_each(self._settings.destination, self.partitions, wait_s=_STOPPED_S)
        writable_s = time.monotonic() - called
        assert positions is not None  # noqa: S101 - what was waited for
        foreign = [key for key, offset in written_at.items() if offset != positions[key]]
        problem = (
            f"{foreign[0][0]}/{foreign[0][1]} did not end at its last mirror position" if foreign else None
        )
        return report.model_copy(
            update={
                "rpo_records": seen.records,
                "rpo_s": round(seen.seconds, 3),
                "rto_stopped_s": round(stopped_s, 3),
                "rto_s": round(writable_s, 3),
                "positions": {f"{topic}/{number}": at for (topic, number), at in positions.items()},
                "error": problem,
            }
        )

    def _verify(self, report: DrillReport) -> DrillReport:
        """Compare what was mirrored; what the source has behind the positions is what was lost."""
        ceilings = _parsed(report.positions)
        with BothSides(self._settings) as sides:
            found = recheck(sides, self._topics, ceilings=ceilings)
            ends, _ = read_ends(sides.source, self.partitions)
        lost = sum(max(0, ends[key].end - at) for key, at in ceilings.items() if key in ends)
        faults = [each.problem or each.differing[0].examples[0] for each in found.certificate.faults]
        return report.model_copy(
            update={
                "verified_records": found.certificate.records,
                "verified": not faults and not found.behind,
                "differences": faults[:10],
                "unmirrored_records": lost,
            }
        )

    def _clear(self) -> None:
        """Delete shadow mirror and topics on both sides; harmless when there are none."""
        self._mirrors.delete(self._shadow)
        await_true(lambda: not self._mirrors.exists(self._shadow), _CLEAR_S, "the shadow mirror was not gone")
        for side, cluster in (("source", self._settings.source), ("destination", self._settings.destination)):
            clear_topics(cluster, f"{TOPIC_PREFIX}{self._settings.mirror}.", side)

    @contextmanager
    def _step(self, name: str) -> Generator[None]:
        self._tell(name)
        began = time.monotonic()
        try:
            yield
        finally:
            self._steps.append(DrillStep(name=name, seconds=round(time.monotonic() - began, 3)))


def clear_topics(cluster: ClusterSettings, prefix: str, side: str) -> None:
    """Delete the topics whose names are `prefix` and a number, and wait until they are gone.

    Raises:
        KmirrorError: when one cannot be deleted.
    """
    with closing(ClusterAdmin(cluster)) as admin:

        def left() -> list[str]:
            names = admin.topic_names()
            return sorted(n for n in names if n.startswith(prefix) and n[len(prefix) :].isdigit())

        found = left()
        if not found:
            return
        for topic, error in admin.delete_topics(found).items():
            if error is not None and topic in left():
                raise KmirrorError(
                    f"shadow topic {topic} cannot be deleted at the {side}: {error}"
                ) from error
        await_true(
            lambda: not left(), _CLEAR_S, f"shadow topics were not deleted at the {side}", poll_s=_POLL_S
        )


def _parsed(positions: Mapping[str, int]) -> dict[Partition, int]:
    found: dict[Partition, int] = {}
    for name, at in positions.items():
        topic, _, number = name.rpartition("/")
        found[topic, int(number)] = at
    return found
