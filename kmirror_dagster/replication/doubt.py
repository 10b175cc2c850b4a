"""Whose records lie at the destination's end after an uncertain answer: pure decisions.

Log end and producer state are read together. What a copier sent and the broker did not append is known twice then: by
offsets, and by sequence numbers. When the two disagree, somebody else wrote in between.
"""

from dataclasses import dataclass
from enum import Enum

_HALF = 1 << 30
_MASK = 0x7FFFFFFF


class Verdict(Enum):
    """Who wrote what lies behind the acknowledged end."""

    OURS = "ours"
    ANOTHER_OWNER = "another owner"  # or somebody else: aligning again compares with the source
    SOMEBODY_ELSE = "somebody else"


@dataclass(frozen=True)
class Doubt:
    """What is known when an answer stayed out.

    Attributes:
        acked: log end as acknowledged.
        sent: log end if all that was sent has been appended.
        end: log end as it is.
        control: whether control records are in doubt; data otherwise.
        sent_sequence: sequence number behind all that was sent under the identity in doubt.
        end_sequence: the same as the broker knows it; None when it knows nothing of that identity.
        owner_epoch: of this owner.
        seen_epoch: the highest one the broker saw in control records of this identity.
    """

    acked: int
    sent: int
    end: int
    control: bool
    sent_sequence: int
    end_sequence: int | None
    owner_epoch: int
    seen_epoch: int

    @property
    def missing(self) -> int | None:
        """Records sent and not appended, by sequence numbers; negative when there are more than were sent."""
        return None if self.end_sequence is None else _distance(self.end_sequence, self.sent_sequence)

    @property
    def expected(self) -> int:
        """Log end by sequence numbers."""
        return self.sent if self.control or self.missing is None else self.sent - self.missing


def judge(doubt: Doubt) -> Verdict:
    """Tell whether copying may go on at the log's end."""
    missing = doubt.missing
    if (
        doubt.seen_epoch > doubt.owner_epoch
        or (missing is not None and missing < 0)
        or doubt.end > doubt.sent
    ):
        return Verdict.ANOTHER_OWNER
    if doubt.end < doubt.acked or missing is None:
        return Verdict.OURS  # the log was cut, or the broker forgot our producer: nothing to compare with
    if missing != (0 if doubt.control else doubt.sent - doubt.end):
        return Verdict.SOMEBODY_ELSE
    return Verdict.OURS


def _distance(first: int, last: int) -> int:
    """How far one sequence number is ahead of another; they wrap at 2^31 (KIP-98)."""
    return ((last - first + _HALF) & _MASK) - _HALF
