"""The state machine of a mirror partition (KIP-1279, allowed transitions)."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.lifecycle import (
    ALIGNING_STATES,
    ALLOWED_FROM,
    SETTLED_FOR,
    SETTLED_STATES,
    DesiredState,
    MirrorState,
    RetryPolicy,
    completion_of,
    is_allowed,
    next_state,
    retry_target,
)

S = MirrorState
STATES: list[MirrorState | None] = [None, *MirrorState]

# written out a second time on purpose: target -> what it may follow
TABLE = {
    S.LOG_ALIGNMENT: {None, S.STOPPED, S.FAILED},
    S.EPOCH_FENCING: {S.MIRRORING},
    S.ULE_RECOVERY: {S.MIRRORING},
    S.MIRRORING: {S.LOG_ALIGNMENT, S.EPOCH_FENCING, S.ULE_RECOVERY, S.PAUSED, S.FAILED},
    S.PAUSING: {S.MIRRORING},
    S.PAUSED: {S.PAUSING},
    S.STOPPING: {
        S.LOG_ALIGNMENT,
        S.EPOCH_FENCING,
        S.ULE_RECOVERY,
        S.MIRRORING,
        S.PAUSING,
        S.PAUSED,
        S.FAILED,
    },
    S.STOPPED: {S.STOPPING},
    S.FAILED: set(STATES),
}


@pytest.mark.parametrize("target", list(MirrorState), ids=str)
@pytest.mark.parametrize("current", STATES, ids=str)
def test_transition_table(current: MirrorState | None, target: MirrorState) -> None:
    """Each of the 90 pairs is allowed exactly when the reference's table says so, or when nothing changes."""
    assert is_allowed(current, target) == (current in TABLE[target] or current is target)


@pytest.mark.parametrize("target", list(MirrorState), ids=str)
def test_failed_partition_may_return_to_where_it_failed(target: MirrorState) -> None:
    """FAILED may go back to its previous state, whatever that was."""
    assert is_allowed(S.FAILED, target, previous=target)


def test_previous_state_counts_for_failed_only() -> None:
    """A stored previous state opens no way out of any other state."""
    assert not is_allowed(S.STOPPED, S.MIRRORING, previous=S.MIRRORING)


def test_every_state_can_be_reached_from_none() -> None:
    """No state of the table is dead."""
    reached: set[MirrorState | None] = {None}
    while True:
        further = {target for target, sources in ALLOWED_FROM.items() if sources & reached} - reached
        if not further:
            break
        reached |= further
    assert reached == set(STATES)


class Driven:
    """A partition that does what `next_state` says and finishes every work it begins."""

    def __init__(self, state: MirrorState | None, previous: MirrorState | None) -> None:
        self.state = state
        self.previous = previous

    def go(self, target: MirrorState) -> None:
        assert is_allowed(self.state, target, previous=self.previous)
        if target is not self.state:
            self.previous = self.state
        self.state = target

    def step(self, desired: DesiredState) -> bool:
        target = next_state(self.state, desired, previous=self.previous)
        if target is None and self.state is S.FAILED:
            target = retry_target(self.previous)
        if target is None and self.state is not None:
            target = completion_of(self.state)
        if target is None:
            return False
        self.go(target)
        return True


@given(
    state=st.sampled_from(STATES),
    previous=st.sampled_from(STATES),
    desired=st.lists(st.sampled_from(list(DesiredState)), min_size=1, max_size=5),
)
def test_every_wish_is_reached_by_allowed_steps(
    state: MirrorState | None, previous: MirrorState | None, desired: list[DesiredState]
) -> None:
    """From any state, with wishes changing on the way, the last wish is reached, by allowed steps only."""
    partition = Driven(state, previous if state is S.FAILED else None)
    for wish in desired[:-1]:
        partition.step(wish)
    last = desired[-1]
    for _ in range(10):
        if not partition.step(last):
            break
    nothing_to_do = {DesiredState.PAUSED: {None, S.STOPPED}, DesiredState.STOPPED: {None}}.get(last, set())
    assert partition.state is SETTLED_FOR[last] or partition.state in nothing_to_do


@pytest.mark.parametrize("state", [s for s in MirrorState if s is not S.STOPPED], ids=str)
def test_stop_beats_everything(state: MirrorState) -> None:
    """A stop begins at once from every state that is not stopping: failover must work in any of them."""
    expected = None if state is S.STOPPING else S.STOPPING
    assert next_state(state, DesiredState.STOPPED, previous=S.MIRRORING) is expected


def test_failed_stop_is_left_to_its_own_retry() -> None:
    """A partition that failed while stopping is not begun anew: its retry goes on with the stop."""
    assert next_state(S.FAILED, DesiredState.STOPPED, previous=S.STOPPING) is None
    assert retry_target(S.STOPPING) is S.STOPPING


def test_failed_beats_pause_and_start() -> None:
    """Only a retry, `recover` or a stop leads out of FAILED."""
    for desired in (DesiredState.MIRRORING, DesiredState.PAUSED):
        assert next_state(S.FAILED, desired, previous=S.MIRRORING) is None


def test_resume_does_not_align_again() -> None:
    """A paused partition goes straight back to MIRRORING."""
    assert next_state(S.PAUSED, DesiredState.MIRRORING) is S.MIRRORING


@pytest.mark.parametrize("previous", [None, *ALIGNING_STATES, S.MIRRORING, S.FAILED], ids=str)
def test_retry_reads_the_log_end_first(previous: MirrorState | None) -> None:
    """What failed while copying, or before, aligns before it writes again."""
    assert retry_target(previous) is S.LOG_ALIGNMENT


def test_settled_and_completed_states_are_apart() -> None:
    """A state either is settled or has work that leads on, never both."""
    for state in MirrorState:
        assert (state in SETTLED_STATES) == (completion_of(state) is None)


@given(attempt=st.integers(1, 10_000), seed=st.integers(0, 2**32))
def test_retry_delay_is_full_jitter_under_its_cap(attempt: int, seed: int) -> None:
    """A delay lies between 0 and the smaller of cap and initial * 2^(attempt-1)."""
    policy = RetryPolicy(initial_ms=100, max_ms=300_000)
    delay = policy.delay_ms(attempt, random.Random(seed))
    assert 0 <= delay <= min(300_000, 100 * 2 ** min(attempt - 1, 40))


def test_retry_delays_spread_over_the_whole_range() -> None:
    """Delays of one attempt are spread, so that a crowd does not come back at once."""
    rng = random.Random(7)
    policy = RetryPolicy(initial_ms=100, max_ms=300_000)
    delays = [policy.delay_ms(5, rng) for _ in range(1_000)]
    assert min(delays) < 160 < 1_440 < max(delays) <= 1_600


def test_retries_end_after_the_last_attempt() -> None:
    """Attempts are counted from 1; with 0 allowed there is none."""
    assert not RetryPolicy(max_attempts=20).is_exhausted(20)
    assert RetryPolicy(max_attempts=20).is_exhausted(21)
    assert RetryPolicy(max_attempts=0).is_exhausted(1)
