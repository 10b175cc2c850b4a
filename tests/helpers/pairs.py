"""A mirror and the way back: A->B, failover, writes on both sides, B->A."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.recovery.failback_look import reverse_name
from tests.helpers.command_line import kmirror
from tests.helpers.kafka import Record
from tests.helpers.nodes import NodeMirror, NodeProcess

ROOT = Path(__file__).parents[2]


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

    def arguments(self, command: str, *more: str) -> list[str]:
        """Command line of `failback` or `switchover`."""
        state_dir, to_state_dir = str(self.forward.node.state_dir), str(self.back_node.state_dir)
        return [
            *("--state-dir", state_dir, command, self.forward.name, "--to-state-dir", to_state_dir),
            *(("--quarantine", str(self.quarantine)) if command == "failback" else ("--quiet", "0.5")),
            *("--json", *more),
        ]

    def run(self, command: str, *more: str) -> dict[str, object]:
        """Run a command; what it answers as JSON."""
        result = kmirror(*self.arguments(command, *more))
        assert result.exit_code == 0, result.output
        document: dict[str, object] = json.loads(result.stdout)
        return document

    def failback(self, *more: str) -> dict[str, object]:
        """Run `failback`; what it answers as JSON."""
        return self.run("failback", *more)

    def ended(self, command: str, *more: str, kill_at: int = 0) -> tuple[int, str]:
        """Run a command in a process of its own, killed at a point; its exit code and what it said on stderr."""
        line = [sys.executable, "-m", "tests.helpers.killed_command", str(kill_at)]
        done = subprocess.run(
            [*line, *self.arguments(command, *more)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=180,
            check=False,
        )
        return done.returncode, done.stderr

    def killed(self, point: int, command: str, *more: str) -> bool:
        """Run a command in a process of its own that is killed at a point; whether it was."""
        code, said = self.ended(command, *more, kill_at=point)
        assert code in (0, -signal.SIGKILL), said
        return code != 0

    def step(self) -> str:
        """Step of the recovery under way, as stored."""
        stored = self.forward.node.client.recovery(self.forward.name)
        return stored.step if stored is not None else "nothing"

    def fail_over(self, *topics: str) -> None:
        """Stop the mirror; B takes over."""
        self.forward.node.client.verb(self.forward.name, "stop")
        self.forward.await_states(MirrorState.STOPPED, *topics)

    @property
    def turned(self) -> "Pair":
        """The same the other way round: the mirror from B to A is the one that fails over."""
        return Pair(self.back, self.forward.node, self.quarantine)
