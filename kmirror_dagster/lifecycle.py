"""Lifecycle of a mirror partition: states, allowed transitions and what to do next. Pure, no I/O.

Source of the table and of the decision order: KIP-1279 "Cluster Mirroring", state machine of the newest
drafts.
"""

import random
from dataclasses import dataclass
from enum import Enum


class MirrorState(str, Enum):
    """Actual state of one mirror partition."""

    LOG_ALIGNMENT = "LOG_ALIGNMENT"
    EPOCH_FENCING = "EPOCH_FENCING"
    ULE_RECOVERY = "ULE_RECOVERY"
    MIRRORING = "MIRRORING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"

    def __str__(self) -> str:
        return self.value


class DesiredState(str, Enum):
    """What an operator wants of a topic (intent); kept apart from the actual state."""

    MIRRORING = "MIRRORING"
    PAUSED = "PAUSED"
    STOPPED = "STOPPED"

    def __str__(self) -> str:
        return self.value


_S = MirrorState

# One line each, for people: documentation and descriptions.
MEANINGS: dict[MirrorState, str] = {
    _S.LOG_ALIGNMENT: "Finding out where the destination's log ends and what the source has there.",
    _S.EPOCH_FENCING: "The source's leader changed: its epoch is looked up before copying goes on.",
    _S.ULE_RECOVERY: "The source lost its tail (unclean leader election): both logs are compared.",
    _S.MIRRORING: "Records are copied as they come.",
    _S.PAUSING: "Copying ends; the position is kept.",
    _S.PAUSED: "Nothing is copied; the topic stays read-only and keeps its position.",
    _S.STOPPING: "Mirroring ends: what is in flight is resolved, the last position recorded.",
    _S.STOPPED: "No mirror any more: an ordinary, writable topic.",
    _S.FAILED: "Something is in the way; the reason is stored. Retried, or not, by kind of error.",
}

# None stands for "no state yet" (UNKNOWN in the KIP). FAILED may follow and re-enter any state, see
# `is_allowed`.
ALLOWED_FROM: dict[MirrorState, frozenset[MirrorState | None]] = {
    _S.LOG_ALIGNMENT: frozenset({None, _S.STOPPED, _S.FAILED}),
    _S.EPOCH_FENCING: frozenset({_S.MIRRORING}),
    _S.ULE_RECOVERY: frozenset({_S.MIRRORING}),
    _S.MIRRORING: frozenset({_S.LOG_ALIGNMENT, _S.EPOCH_FENCING, _S.ULE_RECOVERY, _S.PAUSED, _S.FAILED}),
    _S.PAUSING: frozenset({_S.MIRRORING}),
    _S.PAUSED: frozenset({_S.PAUSING}),
    _S.STOPPING: frozenset(
        {
            _S.LOG_ALIGNMENT,
            _S.EPOCH_FENCING,
            _S.ULE_RECOVERY,
            _S.MIRRORING,
            _S.PAUSING,
            _S.PAUSED,
            _S.FAILED,
        }
    ),
    _S.STOPPED: frozenset({_S.STOPPING}),
    _S.FAILED: frozenset({None, *_S}),
}

# States in which nothing is left to do until somebody wants something else.
SETTLED_STATES = frozenset({_S.MIRRORING, _S.PAUSED, _S.STOPPED, _S.FAILED})

# States whose work is to find out where the destination's log ends and what the source has there.
ALIGNING_STATES = frozenset({_S.LOG_ALIGNMENT, _S.EPOCH_FENCING, _S.ULE_RECOVERY})

SETTLED_FOR: dict[DesiredState, MirrorState] = {
    DesiredState.MIRRORING: _S.MIRRORING,
    DesiredState.PAUSED: _S.PAUSED,
    DesiredState.STOPPED: _S.STOPPED,
}


def is_allowed(
    current: MirrorState | None, target: MirrorState, *, previous: MirrorState | None = None
) -> bool:
    """Tell whether `target` may follow `current`.

    Args:
        current: state now, None when the partition has none yet.
        target: state asked for.
        previous: state before `current` became FAILED; a FAILED partition may always go back there.
    """
    if current == target:
        return True  # re-asserted, to run its side effects again on a new leader
    if current is _S.FAILED and previous is not None and target is previous:
        return True
    return current in ALLOWED_FROM[target]


def next_state(
    current: MirrorState | None, desired: DesiredState, *, previous: MirrorState | None = None
) -> MirrorState | None:
    """Decide which state comes next on the way to `desired`; None when `current` is to be worked on as it is.

    The order is KIP-1279's: a stop beats FAILED (failover must work in any state), FAILED beats the rest (its
    retry or `recover` leads out), then pause, resume and start.
    """
    if desired is DesiredState.STOPPED:
        if current is None:
            return None  # nothing was ever mirrored
        if current is _S.FAILED and previous is _S.STOPPING:
            return None  # the stop itself failed: its own retry goes on
        return None if current in (_S.STOPPING, _S.STOPPED) else _S.STOPPING
    if current is _S.FAILED:
        return None
    if current is None or current is _S.STOPPED:
        return _S.LOG_ALIGNMENT if desired is DesiredState.MIRRORING else None
    if desired is DesiredState.PAUSED:
        return _S.PAUSING if current is _S.MIRRORING else None
    return _S.MIRRORING if current is _S.PAUSED else None


def completion_of(state: MirrorState) -> MirrorState | None:
    """State that follows when the work of a transient state is done; None for settled states."""
    return {
        _S.LOG_ALIGNMENT: _S.MIRRORING,
        _S.EPOCH_FENCING: _S.MIRRORING,
        _S.ULE_RECOVERY: _S.MIRRORING,
        _S.PAUSING: _S.PAUSED,
        _S.STOPPING: _S.STOPPED,
    }.get(state)


def retry_target(previous: MirrorState | None) -> MirrorState:
    """State a FAILED partition is retried into: the one it failed in.

    A partition that failed while MIRRORING aligns again first, so that the log end is read before the next
    write.
    """
    if previous is None or previous in (_S.FAILED, _S.MIRRORING, _S.EPOCH_FENCING, _S.ULE_RECOVERY):
        return _S.LOG_ALIGNMENT
    return previous


@dataclass(frozen=True)
class RetryPolicy:
    """Full-jitter back-off of FAILED partitions (KIP-1279 `mirror.failed.retry.*`).

    Attributes:
        initial_ms: base of the first delay.
        max_ms: cap of one delay.
        max_attempts: automatic retries before a partition waits for `recover`; 0 switches them off.
    """

    initial_ms: int = 100
    max_ms: int = 300_000
    max_attempts: int = 20

    def delay_ms(self, attempt: int, rng: random.Random) -> float:
        """Delay before retry `attempt` (from 1): uniform in [0, min(cap, initial * 2^(attempt-1))]."""
        ceiling = min(self.max_ms, self.initial_ms * 2 ** min(attempt - 1, 40))
        return rng.uniform(0, ceiling)

    def is_exhausted(self, attempt: int) -> bool:
        """Tell whether retry `attempt` (counted from 1) is one too many."""
        return attempt > self.max_attempts
