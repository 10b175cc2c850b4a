"""States as a refresh under way sees them."""

from types import SimpleNamespace
from typing import Any, cast

from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.refreshes import LiveStates
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import PartitionRecord


def test_a_stop_in_mid_refresh_is_seen() -> None:
    """Every look-up answers what is stored now; other mirrors and partitions without a state are not in it."""
    states: dict[PartitionKey, Any] = {}
    names = {PartitionKey("m", "t", 0), PartitionKey("m", "t", 1)}
    view = cast(StateView, SimpleNamespace(states=states, partitions_of=lambda _mirror: names))
    live = LiveStates(view, "m")

    def store(mirror: str, state: MirrorState) -> None:
        states[PartitionKey(mirror, "t", 0)] = PartitionRecord(
            mirror=mirror, topic="t", partition=0, state=state
        )

    store("other", MirrorState.MIRRORING)
    assert live.get(("t", 0)) is None
    store("m", MirrorState.MIRRORING)
    assert dict(live) == {("t", 0): MirrorState.MIRRORING}
    store("m", MirrorState.STOPPING)
    assert live.get(("t", 0)) is MirrorState.STOPPING
    assert len(live) == 1
