"""One real Apache Kafka cluster on this machine: one or three KRaft brokers, each a JVM of its own."""

import contextlib
import logging
import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console

from kmirror_dagster.errors import SandboxError
from kmirror_dagster.sandbox import jars, storage
from kmirror_dagster.sandbox.plan import ClusterPlan, choose_ports, random_uuid
from kmirror_dagster.sandbox.ports import PortClaim, require_free
from kmirror_dagster.sandbox.probe import await_ready, first_error
from kmirror_dagster.sandbox.processes import BrokerProcess
from kmirror_dagster.sandbox.properties import (
    CLIENT,
    HOST,
    BrokerPlan,
    ListenerPlan,
    log4j2_properties,
    render,
    server_properties,
)
from kmirror_dagster.sandbox.security import ClusterSecurity, certificate_folder
from kmirror_dagster.settings import ClusterSettings

_log = logging.getLogger(__name__)

# C1 only and the serial collector: on two cores a broker is up in half the time of a default JVM.
QUICK_JVM = ("-Xms64m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
# As a server would run: for measurements.
SERVER_JVM = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC")
_JVM = (
    "-XX:+ExitOnOutOfMemoryError",
    # No files in the machine's temporary directory.
    "-XX:-UsePerfData",
    # Java 24 and later warn about the native parts of the compression libraries.
    "--enable-native-access=ALL-UNNAMED",
    "--sun-misc-unsafe-memory-access=allow",
)
START_S = 90.0
STOP_S = 20.0
_PORT_TRIES = 3


class SandboxCluster:
    """A Kafka cluster that is started, broken and stopped at will.

    Brokers are numbered by their node id, from 1. Ports and data stay the same over stops and starts. Unless
    `detach` is called, the brokers end with this process, however it ends.

    Attributes:
        name: name of the cluster.
        home: directory with everything of the cluster; logs are at ``broker-N/server.log``.
    """

    def __init__(
        self,
        name: str,
        home: Path,
        brokers: int = 1,
        overrides: Mapping[str, str] | None = None,
        *,
        security: ClusterSecurity | None = None,
        listeners: Sequence[ListenerPlan] = (ListenerPlan(CLIENT),),
        jvm_options: Sequence[str] = QUICK_JVM,
    ) -> None:
        """Describe a cluster; nothing is started or written yet.

        Args:
            name: name of the cluster.
            home: parent directory; the cluster's own is ``home/name``.
            brokers: 1 or 3, all of them controllers as well.
            overrides: broker settings that win over the sandbox's own.
            security: how clients get in; default: everybody does, without encryption.
            listeners: instead of the listeners that `security` asks for; the first one, which must be
                PLAINTEXT, is what brokers use among themselves.
            jvm_options: heap and compiler options.
        """
        if brokers not in (1, 3):
            raise SandboxError(f"a sandbox cluster has 1 or 3 brokers, not {brokers}")
        self.name = name
        self.home = home.expanduser().absolute() / name
        self._size = brokers
        self._overrides = dict(overrides or {})
        self._security = security
        self._given_listeners = tuple(listeners)
        self._jvm_options = tuple(jvm_options)
        self._processes: dict[int, BrokerProcess] = {}
        # Brokers started here and not ended on purpose: when one of them ends, waiting for it is pointless.
        self._expected: set[int] = set()
        # Brokers that the `start` under way has launched.
        self._launched: list[BrokerProcess] = []
        self._interrupted = threading.Event()

    def __enter__(self) -> "SandboxCluster":
        """Start the cluster."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the cluster."""
        self.stop()

    @property
    def plan(self) -> ClusterPlan:
        """Ports and cluster id, fixed at the first start.

        Raises:
            SandboxError: the cluster was never started.
        """
        plan = ClusterPlan.load(self.home)
        if plan is None:
            raise SandboxError(f"sandbox cluster {self.name} does not exist yet; start it first")
        return plan

    @property
    def cluster_id(self) -> str:
        """Kafka's cluster id."""
        return self.plan.cluster_id

    @property
    def bootstrap(self) -> str:
        """``bootstrap.servers`` of the listener for clients."""
        return self.bootstrap_of(CLIENT)

    def bootstrap_of(self, listener: str) -> str:
        """``bootstrap.servers`` of one listener."""
        return ",".join(f"{HOST}:{ports[listener]}" for ports in self.plan.ports)

    def settings(self, user: str | None = None) -> ClusterSettings:
        """Connection settings for clients of this cluster.

        Args:
            user: one of the users of `security`; the first when not given.
        """
        return ClusterSettings.model_validate(dict(self.client_properties(user)))

    def client_properties(self, user: str | None = None) -> Mapping[str, str]:
        """The same as Kafka client properties; holds passwords."""
        properties = {"bootstrap.servers": self.bootstrap}
        if self._security is None:
            return properties
        who, certificates = self._security.user(user), certificate_folder(self.home)
        return {**properties, **self._security.client_properties(who, certificates)}

    def _listeners(self) -> tuple[ListenerPlan, ...]:
        if self._security is None:
            return self._given_listeners
        return self._security.listeners(certificate_folder(self.home))

    @property
    def brokers(self) -> tuple[BrokerPlan, ...]:
        """Plans of the brokers: node id, ports and directories."""
        return self.plan.brokers(self.home)

    def broker_log(self, broker: int = 1) -> Path:
        """Log file of a broker."""
        return self._broker(broker).log

    def broker_pid(self, broker: int = 1) -> int | None:
        """Process id of a broker; None when it is not running."""
        return self._process(self._broker(broker)).pid

    def is_alive(self, broker: int | None = None) -> bool:
        """Whether the broker, or all brokers, have a process (which may be paused)."""
        plan = ClusterPlan.load(self.home)
        if plan is None:
            return False
        chosen = plan.brokers(self.home) if broker is None else (self._broker(broker),)
        return all(self._process(each).is_alive() for each in chosen)

    def running_brokers(self) -> list[int]:
        """Node ids of the brokers that have a process."""
        plan = ClusterPlan.load(self.home)
        return (
            []
            if plan is None
            else [b.node_id for b in plan.brokers(self.home) if self._process(b).is_alive()]
        )

    def start(self, wait_s: float = START_S, *, console: Console | None = None) -> None:
        """Start what is not running, and wait until the cluster serves.

        Args:
            wait_s: seconds until it must serve.
            console: where the progress of a first download is shown.

        Raises:
            PortInUseError: a port of a cluster that exists already is taken by another program.
            SandboxError: it does not come up; the message names the log and its first error.
        """
        self._interrupted.clear()
        self._launched.clear()
        class_path = self._class_path(console)
        deadline = time.monotonic() + wait_s
        try:
            if ClusterPlan.load(self.home) is None:
                self._start_new(class_path, deadline)
            else:
                self._start_existing(class_path, deadline)
        except BaseException:
            # Also on Ctrl-C: a half-started cluster helps nobody.
            self._stop_launched()
            raise

    def _start_existing(self, class_path: list[Path], deadline: float) -> None:
        idle = [each for each in self.brokers if not self._process(each).is_alive()]
        for each in idle:
            for listener, port in each.ports.items():
                require_free(port, f"sandbox cluster {self.name} ({listener})")
        self._launch(idle, class_path)
        self._await_ready(deadline)

    def _start_new(self, class_path: list[Path], deadline: float) -> None:
        # What a start that was killed half-way left has no plan, hence no known cluster id.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.home)
        self.home.mkdir(parents=True)
        names = tuple(listener.name for listener in self._listeners())
        plan = ClusterPlan(name=self.name, cluster_id=random_uuid(), ports=())
        for attempt in range(1, _PORT_TRIES + 1):
            with PortClaim() as claim:
                plan = plan.model_copy(update={"ports": choose_ports(claim, self._size, names)})
                try:
                    self._launch(plan.brokers(self.home), class_path, plan)
                    self._await_ready(deadline, plan)
                    self._create_users(plan)
                except SandboxError as error:
                    # Somebody took a port between our look and the broker's bind.
                    if "Address already in use" not in str(error) or attempt == _PORT_TRIES:
                        raise
                    _log.info("port conflict at start of %s, trying others: %s", self.name, error)
                    self._stop_launched()
                    continue
            plan.save(self.home)
            return

    def _create_users(self, plan: ClusterPlan) -> None:
        if self._security is not None:
            ports = [ports[self._listeners()[0].name] for ports in plan.ports]
            self._security.create_users(",".join(f"{HOST}:{port}" for port in ports))

    def _launch(
        self, chosen: Sequence[BrokerPlan], class_path: list[Path], plan: ClusterPlan | None = None
    ) -> None:
        plan = plan or self.plan
        everybody = plan.brokers(self.home)
        for each in chosen:
            self._write_files(each, everybody)
        self._format(chosen, plan, class_path)
        for each in chosen:
            process = self._process(each)
            process.start(jars.java(), self._command(each), class_path)
            self._launched.append(process)
            self._expected.add(each.node_id)

    def _write_files(self, broker: BrokerPlan, everybody: Sequence[BrokerPlan]) -> None:
        (broker.home / "tmp").mkdir(parents=True, exist_ok=True)
        config = broker.home / "server.properties"
        config.touch(mode=0o600)
        config.write_text(render(self._properties(broker, everybody)), encoding="latin-1")
        (broker.home / "log4j2.properties").write_text(log4j2_properties(broker.log), encoding="latin-1")

    # What follows is another release's own in the tests of compatibility.

    def _class_path(self, console: Console | None = None) -> list[Path]:
        return jars.class_path(console)

    def _format(self, brokers: Sequence[BrokerPlan], plan: ClusterPlan, class_path: list[Path]) -> None:
        storage.format_brokers(brokers, plan.cluster_id, class_path)

    def _properties(self, broker: BrokerPlan, everybody: Sequence[BrokerPlan]) -> Mapping[str, str]:
        secured = self._security.broker_properties() if self._security else {}
        return server_properties(broker, everybody, self._listeners(), {**secured, **self._overrides})

    def _command(self, broker: BrokerPlan) -> list[str]:
        return [
            *_JVM,
            *self._jvm_options,
            f"-Dlog4j2.configurationFile={broker.home / 'log4j2.properties'}",
            f"-Djava.io.tmpdir={broker.home / 'tmp'}",
            "kafka.Kafka",
            str(broker.home / "server.properties"),
        ]

    def wait_ready(self, wait_s: float = START_S) -> None:
        """Wait until all running brokers answer as one cluster.

        Raises:
            SandboxError: they do not within `wait_s` seconds, or one ended meanwhile.
        """
        self._await_ready(time.monotonic() + wait_s)

    def _await_ready(self, deadline: float, plan: ClusterPlan | None = None) -> None:
        plan = plan or self.plan
        brokers = plan.brokers(self.home)
        started = [
            each for each in brokers if each.node_id in self._expected or self._process(each).is_alive()
        ]
        listener = self._listeners()[0].name
        addresses = [f"{HOST}:{each.ports[listener]}" for each in started]

        def check() -> None:
            if self._interrupted.is_set():
                raise SandboxError(f"start of sandbox cluster {self.name} was interrupted")
            for each in started:
                if not self._process(each).is_alive():
                    raise SandboxError(
                        f"broker {each.node_id} of sandbox cluster {self.name} ended: "
                        f"{first_error(each)}; see {each.log}"
                    )

        try:
            await_ready(addresses, deadline, check, leaders=len(started) == len(brokers))
        except TimeoutError as error:
            raise SandboxError(
                f"sandbox cluster {self.name} at {','.join(addresses)} does not answer ({error}); "
                f"see {started[0].log}"
            ) from error

    def stop(self, wait_s: float = STOP_S) -> None:
        """Stop all brokers, also those of another process; data stays. Harmless when nothing runs."""
        plan = ClusterPlan.load(self.home)
        processes = [self._process(each) for each in plan.brokers(self.home)] if plan else []
        self._expected.clear()
        _stop_all(processes, wait_s)

    def _stop_launched(self) -> None:
        self._expected.clear()
        _stop_all(self._launched, STOP_S)
        self._launched.clear()

    def interrupt(self) -> None:
        """Make a `start` or `wait_ready` that goes on in another thread end now."""
        self._interrupted.set()

    def detach(self) -> None:
        """Let the brokers live on when this process ends; `stop` of a later object ends them."""
        for process in self._processes.values():
            process.detach()

    def remove(self) -> None:
        """Stop the cluster and delete its directory with all data and logs."""
        self.stop(wait_s=0)  # nothing is worth an orderly end, which takes a cluster of three 5 s
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.home)

    def kill_broker(self, broker: int = 1, number: signal.Signals = signal.SIGKILL) -> None:
        """End one broker the hard way, and wait until its process is gone."""
        self._expected.discard(broker)
        self._process(self._broker(broker)).stop(wait_s=STOP_S, first=number)

    def stop_broker(self, broker: int = 1, wait_s: float = STOP_S) -> None:
        """Stop one broker in order."""
        self._expected.discard(broker)
        self._process(self._broker(broker)).stop(wait_s=wait_s)

    def start_broker(self, broker: int = 1, wait_s: float = START_S) -> None:
        """Start one broker again, on its old ports and data, and wait until the running brokers serve."""
        plan = self._broker(broker)
        if not self._process(plan).is_alive():
            for listener, port in plan.ports.items():
                require_free(port, f"sandbox cluster {self.name} ({listener})")
            self._launch([plan], self._class_path())
        self.wait_ready(wait_s)

    def pause(self, broker: int | None = None) -> None:
        """Stop the broker, or all brokers, from running (SIGSTOP): connections stay open, nothing answers."""
        self._signal(broker, signal.SIGSTOP)

    def resume(self, broker: int | None = None) -> None:
        """End a `pause`."""
        self._signal(broker, signal.SIGCONT)

    def _signal(self, broker: int | None, number: signal.Signals) -> None:
        for each in self.brokers if broker is None else (self._broker(broker),):
            self._process(each).send_signal(number)

    def _broker(self, number: int) -> BrokerPlan:
        for each in self.brokers:
            if each.node_id == number:
                return each
        raise SandboxError(f"sandbox cluster {self.name} has no broker {number}; they are numbered from 1")

    def _process(self, broker: BrokerPlan) -> BrokerProcess:
        known = self._processes.get(broker.node_id)
        if known is None:
            known = BrokerProcess(pid_file=broker.home / "broker.pid", console=broker.console)
            self._processes[broker.node_id] = known
        return known


def _stop_all(processes: Sequence[BrokerProcess], wait_s: float) -> None:
    """Ask all brokers first and wait then: brokers of one cluster wait for each other when they go down."""
    for process in processes:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + wait_s
    for process in processes:
        process.stop(wait_s=max(0.0, deadline - time.monotonic()))
