"""`make demo`: two Kafka clusters, seeded data, a node and Dagster's UI; Ctrl-C ends all of it.

With --check nobody is waited for: the UI is asked what it shows, both clusters are compared, one table is printed.
"""

import argparse
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.coordination.launcher import node_endpoint
from kmirror_dagster.coordination.models import CreateMirror
from kmirror_dagster.demo import dagster_ui
from kmirror_dagster.demo.dagster_ui import Shown
from kmirror_dagster.demo.guarded import Guarded, environment, wait_gone
from kmirror_dagster.errors import DeadlineError, KmirrorError
from kmirror_dagster.orchestration.dagster_instance import write_dagster_yaml
from kmirror_dagster.sandbox.pair import MIRROR, Sandbox
from kmirror_dagster.sandbox.seed import Seeder
from kmirror_dagster.settings import load_mirror
from kmirror_dagster.settings.loading import load_document
from kmirror_dagster.verification.compare import VerifyLimits, compare_mirror

_READY_S = 180.0
_POLL_S = 0.25
_DEFINITIONS = Path("definitions.py")


T = TypeVar("T")


@dataclass
class Check:
    """One row of the table."""

    what: str
    ok: bool
    detail: str


@dataclass
class Demo:
    """All processes of the demo below one directory.

    Args:
        home: directory; what an earlier demo left there is deleted.
        console: where progress goes.
    """

    home: Path
    console: Console
    seen: list[psutil.Process] = field(default_factory=list[psutil.Process])

    def __post_init__(self) -> None:
        self.sandbox = Sandbox(self.home / "sandbox")
        self.state_dir = self.home / "node"
        self._guarded: list[Guarded] = []
        self._port = _free_port()
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self._environ = environment(
            DAGSTER_HOME=str(self.home / "dagster"),
            KMIRROR_SANDBOX_HOME=str(self.sandbox.home),
            KMIRROR_STATE_DIR=str(self.state_dir),
        )

    def run(self, *, check: bool) -> int:
        """Start everything, then check it or wait for Ctrl-C; 0 when all is well."""
        began = time.monotonic()
        checks: list[Check] = []
        with ExitStack() as stack:
            self._prepare(stack)
            client = self._start(stack)
            shown = self._wait_ready(client)
            took = time.monotonic() - began
            if check:
                checks = self._checks(client, shown, took)
            else:
                self._announce(client, took)
                _wait_for_ctrl_c()
            self._remember()
        left = wait_gone(self.seen, 10.0)
        if not check:
            return 0
        names = ", ".join(f"{p.pid} {p.name()}" for p in left)
        checks.append(Check("processes left running", not left, names or "none"))
        self._print(checks)
        return 0 if all(row.ok for row in checks) else 1

    def _prepare(self, stack: ExitStack) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        write_dagster_yaml(self.home / "dagster")
        self.console.print("[bold]1/4[/] starting two Kafka clusters")
        stack.callback(self.sandbox.stop)
        self.sandbox.start(console=self.console)

    def _start(self, stack: ExitStack) -> NodeClient:
        self.console.print("[bold]2/4[/] starting a node and Dagster")
        node = Guarded(
            "node",
            self.home,
            _python("-m", "kmirror_dagster.coordination.node")
            + _options(config=self.sandbox.node_file, state_dir=self.state_dir),
            self._environ,
        )
        stack.callback(node.stop)
        dagster = Guarded(
            "dagster",
            self.home,
            _python("-m", "dagster", "dev")
            + _options(python_file=_DEFINITIONS.absolute(), host="127.0.0.1", port=self._port),
            self._environ,
        )
        stack.callback(dagster.stop)
        self._guarded = [node, dagster]
        self.console.print("[bold]3/4[/] writing a workload to the source")
        with Seeder(self.sandbox.source.settings()) as seeder:
            seeder.create_topics()
            seeder.bulk()
            seeder.commit_groups()
        self._wait("a running node", lambda: node_endpoint(self.state_dir))
        client = stack.enter_context(NodeClient.discover(self.state_dir))
        self._wait("a node that is ready", lambda: client.ready() or None)
        client.create(CreateMirror(document=load_document(self.sandbox.mirror_file)))
        return client

    def _wait_ready(self, client: NodeClient) -> Shown:
        self.console.print("[bold]4/4[/] mirroring; waiting for Dagster to show it")

        def ready() -> Shown | None:
            mirror = client.mirror(MIRROR)
            shown = dagster_ui.ask(self.endpoint, MIRROR)
            done = (
                mirror.partitions > 0
                and mirror.states == {"MIRRORING": mirror.partitions}
                and mirror.lag_records == 0
                and shown is not None
                and shown.materialized == shown.partitions == mirror.partitions
            )
            return shown if done else None

        return self._wait("all mirror partitions MIRRORING and materialized in Dagster", ready)

    def _wait(self, what: str, probe: Callable[[], T | None], deadline_s: float = _READY_S) -> T:
        """Wait for something while all processes live.

        Raises:
            DeadlineError: with where to look.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            found = probe()
            if found is not None:
                return found
            for guarded in self._guarded:
                guarded.check()
            if time.monotonic() > deadline:
                raise DeadlineError(f"{what}: not so within {deadline_s:.0f} s; see the logs in {self.home}")
            time.sleep(_POLL_S)

    def _announce(self, client: NodeClient, took: float) -> None:
        mirror = client.mirror(MIRROR)
        self.console.print(
            f"\n[bold green]Ready after {took:.0f} s:[/] {mirror.partitions} mirror partitions of "
            f"{len(mirror.topics)} topics MIRRORING, their materializations are in Dagster's event log.\n\n"
            f"  Dagster   {self.endpoint}/assets/kafka_mirror/{MIRROR}\n"
            f"  commands  export KMIRROR_STATE_DIR={self.state_dir} KMIRROR_SANDBOX_HOME={self.sandbox.home}\n"
            "            kmirror describe sandbox; kmirror verify sandbox; kmirror sandbox seed --rate 100\n\n"
            "Ctrl-C ends all of it.",
            highlight=False,
            soft_wrap=True,
        )
        self.console.file.flush()

    def _checks(self, client: NodeClient, shown: Shown, took: float) -> list[Check]:
        mirror = client.mirror(MIRROR)
        sensors = shown.sensors or {}
        running = sorted(name for name, status in sensors.items() if status == "RUNNING")
        armed = [name for name in running if "failover" in name]
        report = compare_mirror(
            load_mirror(self.sandbox.mirror_file),
            [topic.topic for topic in mirror.topics],
            limits=VerifyLimits(deadline_s=120),
        )
        compared = ", ".join(f"{count:,} {level}" for level, count in report.records.items())
        return [
            Check("mirror partitions MIRRORING", True, f"{mirror.partitions} of {len(mirror.topics)} topics"),
            Check(
                "materialized in Dagster's event log",
                shown.materialized == mirror.partitions,
                f"{shown.materialized} of {shown.partitions}",
            ),
            Check("sensors running", len(running) >= 3 and not armed, ", ".join(running)),
            Check(
                "failover sensor there, not armed",
                any("failover" in name for name in sensors) and not armed,
                ", ".join(name for name in sensors if "failover" in name),
            ),
            Check(
                "clusters compared record by record",
                report.ok,
                f"{compared}: {report.differences_total} differences, {report.duplicates} duplicates",
            ),
            Check("ready after", True, f"{took:.0f} s"),
        ]

    def _remember(self) -> None:
        """Note every process of ours, so that none can be left behind unseen."""
        for cluster in self.sandbox.clusters:
            self.seen += [
                psutil.Process(pid)
                for broker in cluster.running_brokers()
                if (pid := cluster.broker_pid(broker))
            ]
        for guarded in self._guarded:
            self.seen += guarded.descendants()

    def _print(self, checks: Sequence[Check]) -> None:
        table = Table("check", "result", "found")
        for row in checks:
            table.add_row(row.what, "[green]ok[/]" if row.ok else "[red]FAILED[/]", row.detail)
        self.console.print(table)


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def _options(**values: object) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_for_ctrl_c() -> None:
    while True:
        signal.pause()


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM ends the demo like Ctrl-C."""
    del number, frame
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--check", action="store_true", help="check it and end")
    parser.add_argument("--home", type=Path, default=Path(".demo"), help="directory of everything it writes")
    options = parser.parse_args(arguments)
    # a script that starts this with & makes the shell ignore SIGINT
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(stderr=False)
    try:
        return Demo(options.home.absolute(), console).run(check=options.check)
    except KeyboardInterrupt:
        console.print("ended; nothing is left running")
        return 130 if options.check else 0
    except KmirrorError as error:
        console.print(f"[red]demo:[/] {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
