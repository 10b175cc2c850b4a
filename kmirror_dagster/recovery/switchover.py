"""Switchover: the planned change of roles that loses nothing. Ends where failback's way back begins.

1. `fence`: nobody writes to the topics at the source any more (an ACL, where there is an authorizer).
2. `drain`: wait until the source's logs have come to rest and the destination's end where they do.
3. `verify`: compare the ends of both logs record by record.
4. `sync`: bring committed group positions up to date.
5. `stop`: make sure that the source is still at rest, then stop mirroring: the destination is writable.

Up to `sync` everything can be given up, which lets the writers in again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from enum import Enum
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.errors import DeadlineError, KmirrorError, UsageError
from kmirror_dagster.records import RecoveryRecord
from kmirror_dagster.recovery.fences import fence, unfence
from kmirror_dagster.recovery.journal import Journal, StepRunner
from kmirror_dagster.settings import MirrorSettings
from kmirror_dagster.verification.compare import VerifyLimits, compare_mirror
from kmirror_dagster.verification.ranges import LogEnds, read_ends

OPERATION = "switchover"

_POLL_S = 0.1
# behind a fence only what was on its way already can still arrive
_FENCED_QUIET_S = 0.5


class SwitchoverStep(str, Enum):
    """What is to be done next; `stopped`: the destination is writable, the way back is what follows."""

    FENCE = "fence"
    DRAIN = "drain"
    VERIFY = "verify"
    SYNC = "sync"
    STOP = "stop"
    STOPPED = "stopped"

    def __str__(self) -> str:
        return self.value


REVOCABLE = frozenset(
    {SwitchoverStep.FENCE, SwitchoverStep.DRAIN, SwitchoverStep.VERIFY, SwitchoverStep.SYNC}
)


class SwitchoverState(BaseModel):
    """Document of a switchover's record until the mirror is stopped.

    Attributes:
        topics: what is switched over.
        quiet_s: seconds without a new record that count as rest where writers cannot be fenced.
        drain_s: longest wait for that and for the destination to have it all.
        verify_last: offsets compared at the end of each partition.
        unfenced: why writers could not be fenced; None when they were.
        fenced_ms, stopped_ms: when writers were shut out, and let in at the destination; 0 before.
    """

    model_config = ConfigDict(frozen=True)

    topics: list[str]
    quiet_s: float = 3.0
    drain_s: float = 60.0
    verify_last: int = 1_000
    unfenced: str | None = None
    fenced_ms: int = 0
    stopped_ms: int = 0


class SwitchedMirror(Protocol):
    """The mirror at its node."""

    def sync(self) -> Mapping[str, str]:
        """Refresh its metadata; what did not succeed, with the reasons."""
        ...

    def is_stopped(self, topics: Sequence[str]) -> bool:
        """Whether all of these topics are stopped already."""
        ...

    def stop(self, topics: Sequence[str]) -> None:
        """Stop topics and wait until they are; harmless when they are stopped."""
        ...


class Switchover(StepRunner):
    """Carries a switchover out until the mirror is stopped.

    Args:
        settings: of the mirror, secrets resolved.
        journal: where the steps are stored.
        mirror: at its node.
        tell: told what is being done, how much of it is done and how much there is.
    """

    def __init__(
        self,
        settings: MirrorSettings,
        journal: Journal,
        mirror: SwitchedMirror,
        *,
        tell: Callable[[str, int, int | None], None] = lambda _text, _done, _total: None,
    ) -> None:
        super().__init__(journal)
        self._settings = settings
        self._mirror = mirror
        self._tell = tell

    def run(self, record: RecoveryRecord) -> RecoveryRecord:
        """Do all that is left up to the stop.

        Raises:
            StaleEpochError: when somebody else goes on with it.
            KmirrorError: when a step does not end; run it again, or give it up.
        """
        return self.run_until(record, lambda current: current.step == SwitchoverStep.STOPPED.value)

    def step(self, record: RecoveryRecord) -> RecoveryRecord:
        """One step; the record that says so."""
        state = SwitchoverState.model_validate(record.document)
        with ExitStack() as stack:
            source = stack.enter_context(closing(ClusterAdmin(self._settings.source)))
            destination = stack.enter_context(closing(ClusterAdmin(self._settings.destination)))
            match SwitchoverStep(record.step):
                case SwitchoverStep.FENCE:
                    self._tell("fencing writers", 0, None)
                    unfenced = fence(source, state.topics)
                    told = {"unfenced": unfenced, "fenced_ms": _now_ms()}
                    return self._next(record, state.model_copy(update=told), SwitchoverStep.DRAIN)
                case SwitchoverStep.DRAIN:
                    self._drain(source, destination, state)
                    return self._next(record, state, SwitchoverStep.VERIFY)
                case SwitchoverStep.VERIFY:
                    self._verify(state)
                    return self._next(record, state, SwitchoverStep.SYNC)
                case SwitchoverStep.SYNC:
                    self._sync(state)
                    return self._next(record, state, SwitchoverStep.STOP)
                case _:
                    return self._stop(source, destination, record, state)

    def _next(self, record: RecoveryRecord, state: SwitchoverState, step: SwitchoverStep) -> RecoveryRecord:
        update = {"step": step.value, "document": state.model_dump(mode="json"), "error": None}
        return self.store(record.model_copy(update=update))

    def _drain(self, source: ClusterAdmin, destination: ClusterAdmin, state: SwitchoverState) -> None:
        quiet_s = state.quiet_s if state.unfenced is not None else _FENCED_QUIET_S
        began = latest = time.monotonic()
        before: dict[Partition, LogEnds] = {}
        while True:
            partitions = _partitions(source, state.topics)
            ends, copied = _ends(source, partitions), _ends(destination, partitions)
            now = time.monotonic()
            if {key: each.end for key, each in ends.items()} != {k: e.end for k, e in before.items()}:
                latest = now
            before = ends
            open_ends = [key for key, each in ends.items() if each.stable_end < each.end]
            behind = [key for key in ends if copied[key].end < ends[key].end]
            self._tell("draining", len(ends) - len(behind), len(ends))
            if not behind and not open_ends and now - latest >= quiet_s:
                return
            if now - began > state.drain_s:
                raise DeadlineError(_not_drained(state, behind, open_ends))
            time.sleep(_POLL_S)

    def _verify(self, state: SwitchoverState) -> None:
        self._tell("comparing both ends", 0, None)
        limits = VerifyLimits(last_offsets=state.verify_last, groups=False, deadline_s=state.drain_s)
        report = compare_mirror(self._settings, state.topics, limits=limits)
        if not report.ok:
            first = report.differences[0].detail if report.differences else "repeated records"
            raise KmirrorError(
                f"both sides differ ({report.differences_total} differences, first: {first}): give the switchover "
                f"up (--abort) and look into it with 'kmirror verify {self._settings.mirror}'"
            )

    def _sync(self, state: SwitchoverState) -> None:
        self._tell("bringing group positions up to date", 0, None)
        errors = self._mirror.sync()
        if errors:
            name, reason = min(errors.items())
            raise KmirrorError(
                f"group positions are not up to date ({len(errors)} errors, first {name}: {reason}): put it right and "
                "go on, or give the switchover up (--abort)"
            )

    def _stop(
        self,
        source: ClusterAdmin,
        destination: ClusterAdmin,
        record: RecoveryRecord,
        state: SwitchoverState,
    ) -> RecoveryRecord:
        # stopped by whoever was interrupted here: nothing flows any more, so there is nothing to wait for
        if not self._mirror.is_stopped(state.topics):
            partitions = _partitions(source, state.topics)
            ends, copied = _ends(source, partitions), _ends(destination, partitions)
            if any(copied[key].end < ends[key].end for key in ends):
                return self._next(record, state, SwitchoverStep.DRAIN)
        self._tell("stopping", 0, None)
        self._mirror.stop(state.topics)
        # writers go to the destination now; where the source is mirrored to it may not deny its mirror
        unfence(source, state.topics)
        state = state.model_copy(update={"stopped_ms": _now_ms()})
        return self._next(record, state, SwitchoverStep.STOPPED)


def give_up(settings: MirrorSettings, record: RecoveryRecord, journal: Journal) -> RecoveryRecord:
    """Return to the start: writers are let in again, the mirror has never ended.

    Raises:
        UsageError: when the mirror is being stopped or is stopped.
        StaleEpochError: when somebody goes on with it.
    """
    if record.step not in {step.value for step in REVOCABLE}:
        raise UsageError(
            f"mirror {record.mirror!r}: the switchover is at step {record.step}, too late to give it up: go on with "
            "it, then switch back"
        )
    record = journal.store(record)
    state = SwitchoverState.model_validate(record.document)
    with closing(ClusterAdmin(settings.source)) as source:
        unfence(source, state.topics)
    return journal.store(record.model_copy(update={"finished": True, "error": "given up"}))


def _partitions(source: ClusterAdmin, topics: Sequence[str]) -> list[Partition]:
    described = source.topics(topics)
    for name, error in described.errors.items():
        raise KmirrorError(f"topic {name} cannot be described at the source: {error}") from error
    return [(name, number) for name, topic in described.values.items() for number in range(topic.partitions)]


def _ends(admin: ClusterAdmin, partitions: Sequence[Partition]) -> dict[Partition, LogEnds]:
    ends, errors = read_ends(admin, partitions)
    for error in errors.values():
        raise KmirrorError(f"ends of the logs cannot be looked up: {error}") from error
    return ends


def _not_drained(state: SwitchoverState, behind: Sequence[Partition], open_ends: Sequence[Partition]) -> str:
    if open_ends:
        what = f"{open_ends[0][0]}/{open_ends[0][1]} has a transaction that does not end at the source"
    elif behind:
        what = f"{behind[0][0]}/{behind[0][1]} is not copied to its end ({len(behind)} partitions are behind)"
    else:
        what = f"the source is still written to ({state.unfenced}): stop its writers"
    return f"not drained within {state.drain_s:g} s: {what}; run it again, or give it up (--abort)"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
