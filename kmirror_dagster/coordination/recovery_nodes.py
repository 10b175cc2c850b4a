"""Nodes as failback and switchover see them, over their API; shared by the command line and Dagster."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.coordination.models import CreateMirror, PartitionStatus, VerbRequest
from kmirror_dagster.errors import UnknownMirrorError, UsageError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.records import RecoveryRecord
from kmirror_dagster.recovery.failback import ReverseProgress
from kmirror_dagster.recovery.positions import LastPosition
from kmirror_dagster.settings import name_matcher

TO_ENDPOINT = "KMIRROR_TO_ENDPOINT"
TO_TOKEN = "KMIRROR_TO_TOKEN"  # noqa: S105 - the name of a variable
TO_CA = "KMIRROR_TO_CA"

# The node itself waits for both clusters, each with its own connection timeouts.
_CREATE_DEADLINE_S = 120.0


def exact_patterns(topics: Sequence[str]) -> list[str]:
    """Patterns that match these topics and no others."""
    return [topic.replace(".", r"\.") for topic in topics]


def client_of_other_node(
    variables: Mapping[str, str], state_dir: Path | None, endpoint: str | None, expected_cluster_id: str
) -> NodeClient:
    """Client of the node that writes to the old source.

    Args:
        variables: of this process.
        state_dir: directory of that node, None to go by its endpoint.
        endpoint: of its API, None for the variable's; the token is that of the variable.
        expected_cluster_id: the cluster it has to write to.

    Raises:
        UsageError: when no such node is named, or it writes to another cluster.
        NodeUnavailableError: when it does not run.
    """
    endpoint = endpoint or variables.get(TO_ENDPOINT)
    if state_dir is None and not endpoint:
        raise UsageError(
            "failback needs a node that writes to the old source: start one there ('kmirror --state-dir DIR node "
            f"start') and name it with --to-state-dir or --to-endpoint ({TO_ENDPOINT}, {TO_TOKEN})"
        )
    if state_dir is not None:
        client = NodeClient.discover(state_dir, {}, deadline_s=_CREATE_DEADLINE_S)
    else:
        names = {TO_TOKEN: "KMIRROR_TOKEN", TO_CA: "KMIRROR_CA"}
        other = {names[name]: variables[name] for name in names if name in variables}
        other["KMIRROR_ENDPOINT"] = endpoint or ""
        client = NodeClient.discover(None, other, deadline_s=_CREATE_DEADLINE_S)
    found = client.node().destination_cluster_id
    if found != expected_cluster_id:
        client.close()
        raise UsageError(
            f"the node named for the way back writes to cluster {found}, the old source is {expected_cluster_id}: "
            "name a node of that cluster"
        )
    return client


def stopped_positions(
    client: NodeClient, mirror: str, patterns: list[str] | None
) -> tuple[list[LastPosition], list[str]]:
    """Last mirror positions of stopped topics, and the names of those that are not stopped.

    Args:
        client: a node.
        mirror: whose topics.
        patterns: whole-name patterns of topics; None for all of the mirror.

    Raises:
        UnknownMirrorError: when there is no such mirror.
        UsageError: when a pattern is malformed, or no stopped topic is selected.
    """
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


def _position(status: PartitionStatus) -> LastPosition | None:
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


class NodeJournal:
    """Steps stored by the node that leads the mirror (`recovery.failback.Journal`)."""

    def __init__(self, client: NodeClient) -> None:
        self._client = client

    def store(self, record: RecoveryRecord) -> RecoveryRecord:
        """Store a step."""
        return self._client.record_recovery(record)


class NodeMirrors:
    """Mirrors of the other node (`recovery.failback.ReverseMirrors`)."""

    def __init__(self, client: NodeClient) -> None:
        self._client = client

    def document(self, mirror: str) -> Mapping[str, Any] | None:
        """Settings document of a mirror; None when there is none of that name."""
        try:
            return self._client.document(mirror)
        except UnknownMirrorError:
            return None

    def is_idle(self, mirror: str) -> bool:
        """Whether all its topics are stopped."""
        summary = self._client.mirror(mirror)
        wanted = {topic.desired for topic in summary.topics}
        states = {state for state, count in summary.states.items() if count} - {"NONE"}
        return wanted <= {DesiredState.STOPPED} and states <= {MirrorState.STOPPED.value}

    def create(self, document: Mapping[str, Any]) -> None:
        """Create a mirror; harmless when it exists with this document."""
        self._client.create(CreateMirror(document=dict(document)))

    def delete(self, mirror: str) -> None:
        """Delete a mirror that is stopped; topics and data stay."""
        try:
            self._client.delete(mirror)
        except UnknownMirrorError:
            return

    def progress(self, mirror: str, topics: Sequence[str]) -> ReverseProgress:
        """How far these topics are."""
        summary = self._client.mirror(mirror)
        wanted = set(topics)
        known = {topic.topic: topic for topic in summary.topics if topic.topic in wanted}
        errors = {name: topic.error for name, topic in known.items() if topic.error}
        waiting = total = 0
        seen: set[str] = set()
        for status in self._client.iter_partitions(mirror):
            if status.topic not in wanted:
                continue
            seen.add(status.topic)
            total += 1
            if status.state is not MirrorState.MIRRORING:
                waiting += 1
                if status.error:
                    errors[f"{status.topic}/{status.partition}"] = status.error
        return ReverseProgress(waiting, total, errors, sorted(wanted - seen))


class NodeSwitch:
    """A mirror at its node while it is switched over (`recovery.switchover.SwitchedMirror`).

    Args:
        client: a node.
        mirror: its name.
        wait: waits until these topics are stopped.
    """

    def __init__(self, client: NodeClient, mirror: str, *, wait: Callable[[Sequence[str]], None]) -> None:
        self._client = client
        self._mirror = mirror
        self._wait = wait

    def sync(self) -> Mapping[str, str]:
        """Refresh its metadata; what of the groups did not succeed, with the reasons."""
        status = self._client.refresh(self._mirror)
        # topics and configurations are none of a switchover's business, unreachable clusters are
        steps = [step for step in status.steps if step.step in ("cluster-ids", "groups")]
        return {name: reason for step in steps for name, reason in step.errors.items()}

    def is_stopped(self, topics: Sequence[str]) -> bool:
        """Whether all of these topics are stopped already."""
        return all(
            status.state is MirrorState.STOPPED
            for topic in topics
            for status in self._client.iter_partitions(self._mirror, topic=topic)
        )

    def stop(self, topics: Sequence[str]) -> None:
        """Stop topics and wait until they are; harmless when they are stopped."""
        self._client.verb(self._mirror, "stop", VerbRequest(topics=exact_patterns(topics)))
        self._wait(topics)
