"""What the browser looks at: a seeded sandbox, its mirror, a node and a real Dagster."""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import KafkaException

from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.coordination.launcher import start_node, stop_node
from kmirror_dagster.coordination.models import CreateMirror
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.sandbox.pair import HOME_ENV, MIRROR, Sandbox
from kmirror_dagster.sandbox.seed import Seeder
from kmirror_dagster.settings import load_document
from tests.helpers.dagster_processes import DagsterProcesses
from tests.helpers.waiting import wait_until

_ROOT = Path(__file__).parents[2]
_RATE = 200
# A looked-at source that is down shall be noticed soon.
_REFRESH_MS = 2_000

ASSET = ("kafka_mirror", MIRROR)


@dataclass(frozen=True)
class UiStack:
    """Everything that runs."""

    sandbox: Sandbox
    dagster: DagsterProcesses
    state_dir: Path

    def client(self) -> NodeClient:
        """Client of the node."""
        return NodeClient.discover(self.state_dir)

    def state_of(self, key: str) -> str | None:
        """State of a partition as the node has it."""
        topic, _, partition = key.rpartition("/")
        with self.client() as client:
            found = [
                each
                for each in client.iter_partitions(MIRROR, topic=topic)
                if str(each.partition) == partition
            ]
        return found[0].state.value if found and found[0].state else None

    def await_shown(self) -> None:
        """Wait until Dagster's event log has every partition as MIRRORING."""

        def complete() -> bool:
            keys = self.dagster.partition_keys(*ASSET)
            states = self.dagster.newest_states(*ASSET)
            return bool(keys) and all(states.get(key) == "MIRRORING" for key in keys)

        wait_until(complete, 120, what=f"all partitions MIRRORING; see {self.dagster.log}", poll_s=0.5)


@contextmanager
def ui_stack(home: Path, *, records: int) -> Iterator[UiStack]:
    """Start everything, and end all of it."""
    sandbox, state_dir = Sandbox(home / "sandbox"), home / "state"
    environ = {HOME_ENV: str(sandbox.home), "KMIRROR_STATE_DIR": str(state_dir), "PYTHONPATH": str(_ROOT)}
    dagster = DagsterProcesses(home / "dagster", (_ROOT / "definitions.py").read_text(), environ)
    with ExitStack() as stack:
        stack.callback(sandbox.stop, wait_s=5)
        sandbox.start()
        with sandbox.node_file.open("a") as settings:
            settings.write(f"mirror.metadata.refresh.interval.ms: {_REFRESH_MS}\n")
        loading = threading.Thread(target=dagster.start, daemon=True)
        stack.callback(dagster.stop)
        loading.start()
        with Seeder(sandbox.source.settings()) as seeder:
            seeder.create_topics()
            seeder.bulk(records)
            seeder.commit_groups()
        stack.callback(stop_node, state_dir)
        node = start_node(state_dir, sandbox.node_file)
        with node.client() as client:
            client.create(CreateMirror(document=load_document(sandbox.mirror_file)))
        loading.join(180)
        stopped = threading.Event()
        stack.callback(stopped.set)
        threading.Thread(target=_write, args=(sandbox, stopped), daemon=True).start()
        yield UiStack(sandbox, dagster, state_dir)


def _write(sandbox: Sandbox, stopped: threading.Event) -> None:
    """Write to the source until told to stop, or until the source is gone."""
    # the source is lost on purpose in the end
    with contextlib.suppress(KmirrorError, KafkaException), Seeder(sandbox.source.settings()) as seeder:
        seeder.stream(_RATE, stopped)
