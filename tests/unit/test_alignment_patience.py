"""How long an alignment waits for a broker that does not know yet that it leads a new partition."""

import asyncio

import pytest

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.codes import broker_error
from kmirror_dagster.errors import BrokerError
from kmirror_dagster.replication.alignment import patiently


class Asked:
    """A broker that answers with an error some times, then with an offset."""

    def __init__(self, code: int, times: int) -> None:
        self.code = code
        self.left = times

    async def __call__(self) -> int:
        if self.left:
            self.left -= 1
            raise broker_error(self.code, "asking")
        return 7


def test_a_broker_that_will_lead_is_waited_for() -> None:
    """Beyond the usual time while it answers that it does not lead."""
    asked = Asked(codes.NOT_LEADER_OR_FOLLOWER, 20)
    assert asyncio.run(patiently(asked, deadline_s=0.0, new_leader_s=60.0)) == 7


def test_other_errors_have_the_usual_time() -> None:
    """A partition without any leader fails, and says so."""
    asked = Asked(codes.LEADER_NOT_AVAILABLE, 20)
    with pytest.raises(BrokerError, match="LEADER_NOT_AVAILABLE"):
        asyncio.run(patiently(asked, deadline_s=0.0, new_leader_s=60.0))


def test_waiting_for_a_leader_ends() -> None:
    """A broker that never comes to lead is told of in the end."""
    asked = Asked(codes.NOT_LEADER_OR_FOLLOWER, 1_000_000)
    with pytest.raises(BrokerError, match="NOT_LEADER"):
        asyncio.run(patiently(asked, deadline_s=0.0, new_leader_s=0.1))
