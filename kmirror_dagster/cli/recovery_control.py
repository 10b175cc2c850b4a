"""What recovery needs of nodes, over their API."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmirror_dagster.errors import UnknownMirrorError, UsageError
from kmirror_dagster.lifecycle import DesiredState, MirrorState

if TYPE_CHECKING:
    from kmirror_dagster.cli.session import Session
    from kmirror_dagster.coordination.client import NodeClient
    from kmirror_dagster.records import RecoveryRecord
    from kmirror_dagster.recovery.failback import ReverseProgress

TO_ENDPOINT = "KMIRROR_TO_ENDPOINT"
TO_TOKEN = "KMIRROR_TO_TOKEN"  # noqa: S105 - the name of a variable
TO_CA = "KMIRROR_TO_CA"

# The node itself waits for both clusters, each with its own connection timeouts.
_CREATE_DEADLINE_S = 120.0


def client_of_other_node(
    session: "Session", state_dir: Path | None, endpoint: str | None, expected_cluster_id: str
) -> "NodeClient":
    """Client of the node that writes to the old source.

    Args:
        session: of this command; its variables are read.
        state_dir: directory of that node, None to go by its endpoint.
        endpoint: of its API, None for the variable's; the token is that of the variable.
        expected_cluster_id: the cluster it has to write to.

    Raises:
        UsageError: when no such node is named, or it writes to another cluster.
        NodeUnavailableError: when it does not run.
    """
    from kmirror_dagster.coordination.client import NodeClient

    variables = dict(session.environ())
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


class NodeJournal:
    """Steps stored by the node that leads the mirror (`recovery.failback.Journal`)."""

    def __init__(self, client: "NodeClient") -> None:
        self._client = client

    def store(self, record: "RecoveryRecord") -> "RecoveryRecord":
        """Store a step."""
        return self._client.record_recovery(record)


class NodeMirrors:
    """Mirrors of the other node (`recovery.failback.ReverseMirrors`)."""

    def __init__(self, client: "NodeClient") -> None:
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
        from kmirror_dagster.coordination.models import CreateMirror

        self._client.create(CreateMirror(document=dict(document)))

    def delete(self, mirror: str) -> None:
        """Delete a mirror that is stopped; topics and data stay."""
        try:
            self._client.delete(mirror)
        except UnknownMirrorError:
            return

    def progress(self, mirror: str, topics: Sequence[str]) -> "ReverseProgress":
        """How far these topics are."""
        from kmirror_dagster.recovery.failback import ReverseProgress

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
        wait_s: longest wait for its topics to be stopped.
    """

    def __init__(self, client: "NodeClient", mirror: str, *, wait_s: float) -> None:
        self._client = client
        self._mirror = mirror
        self._wait_s = wait_s

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
        from kmirror_dagster.cli.progress import progress
        from kmirror_dagster.cli.waiting import StateWait
        from kmirror_dagster.coordination.models import VerbRequest

        names = [topic.replace(".", r"\.") for topic in topics]
        self._client.verb(self._mirror, "stop", VerbRequest(topics=names))
        with progress(f"stop {self._mirror}") as shown:
            StateWait(self._client, self._mirror, MirrorState.STOPPED, topics).run(self._wait_s, shown)
