"""Faults on somebody's own clusters: a steady load over one mirrored topic, something broken now and then, and proof.

What breaks and what puts it right is the caller's: this room writes, reads, measures and checks the history.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.errors import DeadlineError, KmirrorError
from kmirror_dagster.settings import MirrorSettings
from kmirror_dagster.verification.history import read_history
from kmirror_dagster.verification.history_checker import HistoryReport, check_history
from kmirror_dagster.verification.history_clients import SteadyProducer, SteadyReader
from kmirror_dagster.verification.history_recorder import HistoryWriter
from kmirror_dagster.verification.ranges import read_ends

SOURCE, DESTINATION = "source", "destination"

_POLL_S = 0.2


class FaultTime(BaseModel):
    """One fault.

    Attributes:
        lasted_s: seconds from its beginning until it was put right.
        back_s: seconds from then until all that the source had was at the destination.
    """

    model_config = ConfigDict(frozen=True)

    lasted_s: float
    back_s: float


class FaultRunReport(BaseModel):
    """Outcome of a run: the faults in their order, and what the history says."""

    model_config = ConfigDict(frozen=True)

    topic: str
    seconds: float
    faults: list[FaultTime]
    history: HistoryReport


@dataclass(frozen=True)
class FaultRunPlan:
    """What is done.

    Attributes:
        topic: a mirrored topic; nobody else may write to it meanwhile.
        seconds: how long records are written.
        rate: records a second.
        break_it, mend_it: called to break something and to put it right; None: nothing is broken.
        hold_s: how long it stays broken.
        every_s: seconds from one fault's end to the next one.
        wait_s: longest wait for the destination to have it all.
        history: file the history is written to.
    """

    topic: str
    seconds: float
    rate: float
    history: Path
    break_it: Callable[[], None] | None = None
    mend_it: Callable[[], None] | None = None
    hold_s: float = 5.0
    every_s: float = 10.0
    wait_s: float = 120.0


class FaultRun:
    """Carries a plan out.

    Args:
        settings: of the mirror, secrets resolved.
        plan: what is done.
        tell: told what is being done.
    """

    def __init__(
        self, settings: MirrorSettings, plan: FaultRunPlan, *, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._tell = tell

    def run(self) -> FaultRunReport:
        """Write, break, mend, read to the end and check.

        Raises:
            DeadlineError: when the destination does not get it all in time, which is a finding as well.
            KmirrorError: when a cluster cannot be looked at in the beginning, or a client fails for good.
        """
        began = time.monotonic()
        with ExitStack() as stack:
            admins = {
                name: stack.enter_context(closing(ClusterAdmin(settings)))
                for name, settings in (
                    (SOURCE, self._settings.source),
                    (DESTINATION, self._settings.destination),
                )
            }
            keys = self._partitions(admins[SOURCE])
            begin = self._ends(admins[SOURCE], keys)
            history = stack.enter_context(HistoryWriter(self._plan.history))
            readers = self._readers(history, begin)
            for reader in readers.values():
                stack.callback(reader.stop)
                reader.start()
            faults = self._under_load(history, admins, keys)
            ends = self._await_copied(admins, keys)
            self._await_read(readers, ends)
        report = check_history(read_history(self._plan.history), complete=[SOURCE, DESTINATION])
        return FaultRunReport(
            topic=self._plan.topic,
            seconds=round(time.monotonic() - began, 1),
            faults=faults,
            history=report,
        )

    def _under_load(
        self, history: HistoryWriter, admins: Mapping[str, ClusterAdmin], keys: list[Partition]
    ) -> list[FaultTime]:
        plan = self._plan
        producer = SteadyProducer(
            self._settings.source,
            history,
            cluster=SOURCE,
            name=f"writer-{uuid.uuid4().hex[:8]}",
            topics={plan.topic: len(keys)},
            rate=plan.rate,
        )
        faults: list[FaultTime] = []
        producer.start()
        try:
            end = time.monotonic() + plan.seconds
            while (left := end - time.monotonic()) > 0:
                self._tell(f"{producer.sent} records sent, {len(faults)} faults")
                producer.check()
                time.sleep(min(left, plan.every_s))
                if plan.break_it is not None and time.monotonic() < end:
                    faults.append(self._fault(admins, keys, len(faults) + 1))
        finally:
            producer.stop()
        return faults

    def _fault(self, admins: Mapping[str, ClusterAdmin], keys: list[Partition], number: int) -> FaultTime:
        plan = self._plan
        began = time.monotonic()
        self._tell(f"fault {number}")
        if plan.break_it is not None:
            plan.break_it()
        try:
            time.sleep(plan.hold_s)
        finally:  # whatever ends the wait, nothing stays broken
            if plan.mend_it is not None:
                plan.mend_it()
        mended = time.monotonic()
        self._await_copied(admins, keys)
        back = time.monotonic()
        return FaultTime(lasted_s=round(mended - began, 2), back_s=round(back - mended, 2))

    def _partitions(self, source: ClusterAdmin) -> list[Partition]:
        topic = self._plan.topic
        described = source.topics([topic])
        for error in described.errors.values():
            raise KmirrorError(f"topic {topic} cannot be described at the source: {error}") from error
        return [(topic, number) for number in range(described.values[topic].partitions)]

    def _readers(self, history: HistoryWriter, begin: Mapping[Partition, int]) -> dict[str, SteadyReader]:
        clusters = {SOURCE: self._settings.source, DESTINATION: self._settings.destination}
        name = uuid.uuid4().hex[:8]
        return {
            cluster: SteadyReader(
                settings,
                history,
                cluster=cluster,
                name=f"reader-{cluster}-{name}",
                topics={self._plan.topic: len(begin)},
                begin=begin,
            )
            for cluster, settings in clusters.items()
        }

    def _ends(self, admin: ClusterAdmin, keys: list[Partition]) -> dict[Partition, int]:
        ends, errors = read_ends(admin, keys)
        for error in errors.values():
            raise KmirrorError(f"ends of the logs cannot be looked up: {error}") from error
        return {key: each.end for key, each in ends.items()}

    def _await_copied(
        self, admins: Mapping[str, ClusterAdmin], keys: list[Partition]
    ) -> dict[Partition, int]:
        """Wait until the destination has what the source has now; the source's ends."""
        wanted: dict[Partition, int] | None = None
        last = "the destination is behind"
        deadline = time.monotonic() + self._plan.wait_s
        while time.monotonic() < deadline:
            try:
                wanted = wanted or self._ends(admins[SOURCE], keys)
                there = self._ends(admins[DESTINATION], keys)
            except KmirrorError as error:  # a cluster that has just been broken
                last = str(error)
            else:
                if all(there[key] >= end for key, end in wanted.items()):
                    return wanted
                last = "the destination is behind"
            time.sleep(_POLL_S)
        raise DeadlineError(f"not all of {self._plan.topic} is copied after {self._plan.wait_s:g} s: {last}")

    def _await_read(self, readers: Mapping[str, SteadyReader], ends: Mapping[Partition, int]) -> None:
        deadline = time.monotonic() + self._plan.wait_s
        for cluster, reader in readers.items():
            while any(reader.position(*key) < end for key, end in ends.items()):
                reader.check()
                if time.monotonic() > deadline:
                    raise DeadlineError(f"{self._plan.topic} cannot be read to its end at the {cluster}")
                time.sleep(_POLL_S)
