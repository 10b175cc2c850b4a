"""A mirror and the way back: A->B, failover, writes on both sides, B->A."""

import json
from dataclasses import dataclass
from pathlib import Path

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.recovery.failback_look import reverse_name
from tests.helpers.command_line import kmirror
from tests.helpers.kafka import Record
from tests.helpers.nodes import NodeMirror, NodeProcess


def numbered(count: int, first: int, side: str) -> list[Record]:
    """Records with values of their own, in order."""
    return [Record(b"%s-%04d" % (side.encode(), n), b"k-%04d" % n) for n in range(first, first + count)]


@dataclass
class Pair:
    """A mirror from A to B, and the nodes of both."""

    forward: NodeMirror
    back_node: NodeProcess
    quarantine: Path

    @property
    def back(self) -> NodeMirror:
        """The mirror from B to A."""
        forward = self.forward
        name = reverse_name(forward.name)
        return NodeMirror(self.back_node, forward.destination, forward.source, name=name)

    def failback(self, *more: str) -> dict[str, object]:
        """Run the command; what it answers as JSON."""
        result = kmirror(
            "--state-dir",
            str(self.forward.node.state_dir),
            "failback",
            self.forward.name,
            "--to-state-dir",
            str(self.back_node.state_dir),
            "--quarantine",
            str(self.quarantine),
            "--json",
            *more,
        )
        assert result.exit_code == 0, result.output
        document: dict[str, object] = json.loads(result.stdout)
        return document

    def fail_over(self, *topics: str) -> None:
        """Stop the mirror; B takes over."""
        self.forward.node.client.verb(self.forward.name, "stop")
        self.forward.await_states(MirrorState.STOPPED, *topics)

    @property
    def turned(self) -> "Pair":
        """The same the other way round: the mirror from B to A is the one that fails over."""
        return Pair(self.back, self.forward.node, self.quarantine)
