"""Decisions after an uncertain answer: whose records are at the destination's end."""

import pytest

from kmirror_dagster.replication.doubt import Doubt, Verdict, judge

_MOST = 0x7FFFFFFF


def doubt(**changes: object) -> Doubt:
    """Ten records were sent behind offset 100, sequence 50."""
    known = {
        "acked": 100,
        "sent": 110,
        "end": 110,
        "control": False,
        "sent_sequence": 60,
        "end_sequence": 60,
        "owner_epoch": 3,
        "seen_epoch": 3,
    }
    return Doubt(**{**known, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("landed", range(11))
def test_what_landed_is_ours_when_offsets_and_sequence_agree(landed: int) -> None:
    """Any part of what was sent may have been appended."""
    assert judge(doubt(end=100 + landed, end_sequence=50 + landed)) is Verdict.OURS


def test_a_record_without_a_sequence_of_ours_is_somebody_elses() -> None:
    """The log grew by one, and our sequence did not: that record is not ours."""
    assert judge(doubt(end=101, end_sequence=50)) is Verdict.SOMEBODY_ELSE
    assert judge(doubt(end=108, end_sequence=57)) is Verdict.SOMEBODY_ELSE


def test_a_longer_log_or_sequence_is_another_owners() -> None:
    """More than we sent: aligning again tells whether it is the source's."""
    assert judge(doubt(end=111)) is Verdict.ANOTHER_OWNER
    assert judge(doubt(end=110, end_sequence=61)) is Verdict.ANOTHER_OWNER
    assert judge(doubt(seen_epoch=4)) is Verdict.ANOTHER_OWNER


def test_sequences_are_compared_across_their_wrap() -> None:
    """They begin again at 0 behind 2^31 - 1 (KIP-98)."""
    assert judge(doubt(sent_sequence=4, end_sequence=_MOST - 5, end=100)) is Verdict.OURS
    assert judge(doubt(sent_sequence=4, end_sequence=4)) is Verdict.OURS
    assert judge(doubt(sent_sequence=_MOST - 5, end_sequence=4)) is Verdict.ANOTHER_OWNER


def test_without_producer_state_only_offsets_are_compared() -> None:
    """Brokers forget producers whose newest record is old (producer.id.expiration.ms)."""
    assert judge(doubt(end=104, end_sequence=None)) is Verdict.OURS
    assert judge(doubt(end=111, end_sequence=None)) is Verdict.ANOTHER_OWNER


def test_control_records_do_not_move_the_sequence() -> None:
    """Any number of those that were asked for may be there; a sequence that moved shows data in between."""
    assert judge(doubt(control=True, sent_sequence=50, end_sequence=50, end=107)) is Verdict.OURS
    assert judge(doubt(control=True, sent_sequence=50, end_sequence=49, end=107)) is Verdict.SOMEBODY_ELSE


def test_a_log_that_lost_its_tail_is_ours() -> None:
    """Behind an unclean election of the destination copying goes on at what is left."""
    assert judge(doubt(end=90, end_sequence=40)) is Verdict.OURS
