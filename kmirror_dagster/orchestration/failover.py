"""Whether to fail over: a pure decision on what was seen. Acting on it is a job's business."""

from collections.abc import Sequence
from dataclasses import dataclass

from kmirror_dagster.coordination.models import ProbeHistory, ProbeObservation
from kmirror_dagster.settings import FailoverSettings

# Nodes look every second; one that has not looked for this long knows nothing of the present.
MAX_OBSERVATION_AGE_MS = 10_000
# Looks at the destination in a row that must be good: writing into a sick cluster helps nobody.
GOOD_DESTINATION_LOOKS = 3
# A failover run that failed did not finish its work: it is repeated sooner than a successful one would be.
RETRY_AFTER_SECONDS = 60


@dataclass(frozen=True)
class Incident:
    """Failovers of a mirror so far, from the run storage.

    Attributes:
        open_run: id of one that has not ended, None when there is none.
        ended_ms: end of the newest one, None when there was none.
        succeeded: whether that one did what it was for.
        count: how many there were.
    """

    open_run: str | None = None
    ended_ms: int | None = None
    succeeded: bool = False
    count: int = 0


@dataclass(frozen=True)
class FailedPartition:
    """One FAILED partition: since when, and whether it is retried by itself."""

    name: str
    since_ms: int
    retriable: bool


@dataclass(frozen=True)
class Replicas:
    """How the destination keeps its replicas: partitions without a leader, and those with too few in sync."""

    leaderless: Sequence[str] = ()
    under_replicated: Sequence[str] = ()


@dataclass(frozen=True)
class Evidence:
    """All that is looked at.

    Attributes:
        now_ms: time of the decision, epoch milliseconds.
        histories: what each node saw.
        own_look: what Dagster itself saw of the source just now.
        partitions_to_stop: partitions that are neither STOPPED nor without a state.
        lag_seconds: age of the oldest record that is still missing; it grows while the source is down.
        rpo_seconds: what the mirror's policy allows to be lost; None: anything.
        failed: FAILED partitions.
        replicas: of the destination; None: not looked at.
        approved_ms: newest approval of a failover by a person; None when there is none.
    """

    now_ms: int
    histories: Sequence[ProbeHistory]
    own_look: ProbeObservation
    partitions_to_stop: int
    lag_seconds: float
    incident: Incident = Incident()
    rpo_seconds: float | None = None
    failed: Sequence[FailedPartition] = ()
    replicas: Replicas | None = None
    approved_ms: int | None = None


@dataclass(frozen=True)
class Verdict:
    """The decision and what it rests on.

    Attributes:
        first_bad_ms: when the source was first seen down.
        awaits: nothing but this stands between here and a failover: "approval" or "dry run".
    """

    fail_over: bool
    reason: str
    first_bad_ms: int | None = None
    awaits: str | None = None


def decide(evidence: Evidence, settings: FailoverSettings) -> Verdict:
    """Decide on a failover; every condition has to hold, and the reason says which one did not.

    In this order: something is left to stop, no other failover is open, the cool-down is over, nodes look,
    enough of them saw the source down `bad_observations` times in a row, Dagster sees it down as well, so
    does the majority of all that look, the destination answers, no more would be lost than is allowed, nothing was
    FAILED before, every partition has a leader and all its replicas, and a person has approved it where one has to.
    """
    if evidence.partitions_to_stop == 0:
        return Verdict(False, "nothing to fail over: no partition is mirrored")
    held_back = _held_back(evidence, settings)
    if held_back:
        return Verdict(False, held_back)
    looking = [history for history in evidence.histories if _is_fresh(history, evidence.now_ms)]
    if not looking:
        return Verdict(False, _nobody_looks(evidence))
    bad = [history for history in looking if _bad_streak(history.source) >= settings.bad_observations]
    seen = _seen(looking, evidence.own_look)
    if len(bad) < settings.probe_quorum:
        agree = f"{len(bad)} of {settings.probe_quorum} nodes needed see it down"
        return Verdict(False, f"{seen}; {agree} {settings.bad_observations} times in a row")
    if evidence.own_look.ok:
        return Verdict(False, f"{seen}; Dagster itself reaches the source")
    if 2 * (len(bad) + 1) <= len(looking) + 1:
        return Verdict(False, f"{seen}; most of those that look still reach the source")
    unwell = _unwell_destination(looking)
    if unwell:
        return Verdict(False, f"{seen}; but the destination is unwell: {unwell}")
    first_bad_ms = min(history.source[-_bad_streak(history.source)].at_ms for history in bad)
    unfit = _unfit(evidence, settings, first_bad_ms)
    if unfit:
        return Verdict(False, f"{seen}; but {unfit}")
    if settings.dry_run:
        return Verdict(False, f"{seen}; dry run: would fail over now", first_bad_ms, "dry run")
    if settings.approval == "required" and not _is_approved(evidence, first_bad_ms):
        return Verdict(
            False, f"{seen}; everything speaks for a failover: approve it", first_bad_ms, "approval"
        )
    return Verdict(True, f"{seen}; failing over", first_bad_ms)


def _is_approved(evidence: Evidence, first_bad_ms: int) -> bool:
    """An approval is of the outage it was given in."""
    return evidence.approved_ms is not None and evidence.approved_ms >= first_bad_ms


def _unfit(evidence: Evidence, settings: FailoverSettings, first_bad_ms: int) -> str | None:
    """Why the destination should not take over by itself; a person can decide otherwise (`force`)."""
    limit = settings.max_destination_lag_seconds or evidence.rpo_seconds
    # what is missing had come before the source went: the time since is none of the loss
    lost_s = max(0.0, evidence.lag_seconds - (evidence.now_ms - first_bad_ms) / 1000)
    if limit is not None and lost_s > limit:
        return f"{lost_s:.0f} s would be lost, {limit:.0f} s are allowed"
    # a source that is down makes partitions fail too, and they are retried
    broken = [each.name for each in evidence.failed if not each.retriable or each.since_ms < first_bad_ms]
    if broken:
        return f"{_named(broken)} FAILED already before the source went down"
    replicas = evidence.replicas or Replicas()
    if replicas.leaderless:
        return f"{_named(replicas.leaderless)} without a leader at the destination"
    if replicas.under_replicated:
        return f"{_named(replicas.under_replicated)} under-replicated at the destination"
    return None


def _named(partitions: Sequence[str]) -> str:
    verb = "is" if len(partitions) == 1 else "are"
    more = f" and {len(partitions) - 3} more" if len(partitions) > 3 else ""
    return f"{', '.join(partitions[:3])}{more} {verb}"


def _held_back(evidence: Evidence, settings: FailoverSettings) -> str | None:
    incident = evidence.incident
    if incident.open_run is not None:
        return f"failover run {incident.open_run} is still open"
    if incident.ended_ms is None:
        return None
    pause_s = settings.cool_down_seconds
    if not incident.succeeded:
        pause_s = min(pause_s, RETRY_AFTER_SECONDS)
    since_s = (evidence.now_ms - incident.ended_ms) / 1000
    if since_s >= pause_s:
        return None
    return f"the last failover ended {max(0, since_s):.0f} s ago, cool-down is {pause_s} s"


def _is_fresh(history: ProbeHistory, now_ms: int) -> bool:
    # a node whose clock is ahead of ours is not older for it
    return bool(history.source) and now_ms - history.source[-1].at_ms <= MAX_OBSERVATION_AGE_MS


def _bad_streak(observations: Sequence[ProbeObservation]) -> int:
    """Bad looks at the end of a history."""
    streak = 0
    for observation in reversed(observations):
        if observation.ok:
            break
        streak += 1
    return streak


def _unwell_destination(looking: Sequence[ProbeHistory]) -> str | None:
    for history in looking:
        newest = history.destination[-GOOD_DESTINATION_LOOKS:]
        if not newest:
            return f"{history.node_id} has not looked at it yet"
        bad = [observation for observation in newest if not observation.ok]
        if bad:
            return f"{history.node_id} could not reach it: {bad[-1].error or 'no reason given'}"
    return None


def _nobody_looks(evidence: Evidence) -> str:
    ages = [
        (evidence.now_ms - history.source[-1].at_ms) / 1000
        for history in evidence.histories
        if history.source
    ]
    if not ages:
        return "no node looks at the source of this mirror"
    return f"the newest look of a node at the source is {min(ages):.0f} s old (do the clocks agree?)"


def _seen(looking: Sequence[ProbeHistory], own_look: ProbeObservation) -> str:
    parts = [f"{history.node_id} {_streak_text(history)}" for history in looking]
    own = "reached" if own_look.ok else f"down ({own_look.error or 'no reason given'})"
    return f"source: {', '.join(parts)}, Dagster {own}"


def _streak_text(history: ProbeHistory) -> str:
    streak = _bad_streak(history.source)
    if streak == 0:
        return "reached"
    return f"down {streak} times in a row ({history.source[-1].error or 'no reason given'})"
