"""What recovery commands need to know of a mirror: which of its topics are stopped, and where."""

from typing import TYPE_CHECKING

from kmirror_dagster.errors import UsageError
from kmirror_dagster.lifecycle import MirrorState

if TYPE_CHECKING:
    from kmirror_dagster.coordination.client import NodeClient
    from kmirror_dagster.coordination.models import PartitionStatus
    from kmirror_dagster.recovery.positions import LastPosition


def stopped_positions(
    client: "NodeClient", mirror: str, patterns: list[str] | None
) -> "tuple[list[LastPosition], list[str]]":
    """Last mirror positions of stopped topics, and the names of those that are not stopped.

    Args:
        client: a node.
        mirror: whose topics.
        patterns: whole-name patterns of topics; None for all of the mirror.

    Raises:
        UnknownMirrorError: when there is no such mirror.
        UsageError: when a pattern is malformed, or no stopped topic is selected.
    """
    from kmirror_dagster.settings import name_matcher

    client.mirror(mirror)
    try:
        selects = name_matcher(patterns)
    except ValueError as error:
        raise UsageError(str(error)) from error
    positions: list[LastPosition] = []
    active: set[str] = set()
    for status in client.iter_partitions(mirror):
        if not selects(status.topic) or status.state is None:
            continue
        position = _position(status)
        if position is None:
            active.add(status.topic)
        else:
            positions.append(position)
    positions = [position for position in positions if position.topic not in active]
    if not positions:
        what = f"topic matching {', '.join(patterns)}" if patterns else "topic"
        raise UsageError(
            f"mirror {mirror} has no stopped {what}: stop it first ('kmirror stop {mirror}'), that records "
            "the last mirror position"
        )
    return positions, sorted(active)


def _position(status: "PartitionStatus") -> "LastPosition | None":
    from kmirror_dagster.recovery.positions import LastPosition

    if status.state is not MirrorState.STOPPED or status.last_mirror_offset is None:
        return None
    return LastPosition(
        topic=status.topic,
        partition=status.partition,
        offset=status.last_mirror_offset,
        source_leader_epoch=-1 if status.last_mirror_epoch is None else status.last_mirror_epoch,
        recorded_ms=status.last_mirror_ms or 0,
        source_topic_id=status.source_topic_id,
        source_offset=status.last_mirror_source_offset,
    )
