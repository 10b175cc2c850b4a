"""Broker processes: started under a guard, found again by a pid file that is checked against the process."""

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kmirror_dagster.errors import SandboxError

_log = logging.getLogger(__name__)

_GUARD = Path(__file__).with_name("guard.py")
_TOKEN_PROPERTY = "-Dkmirror.launch="  # noqa: S105 - names a launch, opens nothing
_SPAWN_S = 20.0
_POLL_S = 0.02
_KILL_S = 10.0
_UNLINK_S = 2.0


@dataclass(frozen=True)
class PidFile:
    """Contents of a pid file.

    Attributes:
        pid: process id of the broker.
        token: random word in the broker's command line; a process without it is somebody else's.
    """

    pid: int
    token: str

    @classmethod
    def read(cls, path: Path) -> "PidFile | None":
        """Contents of the file, None when there is none or it cannot be read."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            return cls(pid=int(document["pid"]), token=str(document["token"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("%s is not a pid file (%s); ignored", path, error)
            return None

    def process(self) -> psutil.Process | None:
        """The live process that this file was written for; None when it ended or the pid is another's now."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            return process if f"{_TOKEN_PROPERTY}{self.token}" in process.cmdline() else None
        except psutil.NoSuchProcess:
            return None


@dataclass
class BrokerProcess:
    """One broker process, started here or found running.

    Attributes:
        pid_file: written by the guard, removed when the broker has ended.
        console: file that takes the JVM's own output.
    """

    pid_file: Path
    console: Path
    _guard: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)
    _detached_guard: int | None = field(default=None, repr=False)

    def start(self, java: Path, arguments: list[str], class_path: list[Path]) -> None:
        """Start the JVM under a guard, so that it ends with this process unless `detach` is called.

        Args:
            java: the launcher.
            arguments: everything behind it.
            class_path: jars; handed over in the environment, which keeps the process list readable.

        Raises:
            SandboxError: a broker of this pid file runs already, or the process cannot be started.
        """
        if self.is_alive():
            raise SandboxError(f"a broker with pid file {self.pid_file} runs already; stop it first")
        self._reap()
        token = secrets.token_hex(12)
        guard = [sys.executable, "-I", "-S", str(_GUARD), str(self.pid_file), token, str(self.console)]
        with self.console.open("ab") as log:
            self._guard = subprocess.Popen(
                [*guard, str(java), f"{_TOKEN_PROPERTY}{token}", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.console.parent,
                env=java_environment(class_path),
                start_new_session=True,
            )
        if not self._await_pid(self._guard):
            self.stop(wait_s=0)
            raise SandboxError(f"the JVM did not start; see {self.console}")

    def _await_pid(self, guard: "subprocess.Popen[bytes]") -> bool:
        """Wait for the guard's one line; by then the pid file is written."""
        assert guard.stdout is not None  # noqa: S101 - made with PIPE above
        with guard.stdout as output:
            os.set_blocking(output.fileno(), False)
            deadline = time.monotonic() + _SPAWN_S
            while time.monotonic() < deadline:
                line = output.read()
                if line is not None:
                    return bool(line.strip())
                time.sleep(_POLL_S)
        return False

    def detach(self) -> None:
        """Let the broker outlive this process."""
        guard, self._guard = self._guard, None
        if guard is None or guard.stdin is None:
            return
        with guard.stdin as pipe:
            pipe.write(b"d")
        # Popen's finalizer warns about children that were not waited for; this one is meant to stay.
        self._detached_guard = guard.pid
        guard.returncode = 0

    def process(self) -> psutil.Process | None:
        """The live broker, None when there is none."""
        pid_file = PidFile.read(self.pid_file)
        return pid_file.process() if pid_file else None

    @property
    def pid(self) -> int | None:
        """Process id of the live broker."""
        process = self.process()
        return process.pid if process else None

    def is_alive(self) -> bool:
        """Whether the broker's process exists (a stopped one does)."""
        return self.process() is not None

    def send_signal(self, number: signal.Signals) -> bool:
        """Send a signal to the broker; False when there is none."""
        process = self.process()
        if process is None:
            return False
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    def stop(self, *, wait_s: float, first: signal.Signals = signal.SIGTERM) -> None:
        """End the broker: by `first`, and by SIGKILL when it is still there after `wait_s` seconds."""
        found = PidFile.read(self.pid_file)
        if found is not None:
            self.send_signal(first)
            if not _becomes(lambda: found.process() is None, wait_s):
                self.send_signal(signal.SIGKILL)
                if not _becomes(lambda: found.process() is None, _KILL_S):
                    raise SandboxError(f"broker process {found.pid} does not end; see {self.console}")
        self._reap()
        # The guard removes its file; one that was killed could not.
        if not _becomes(lambda: not self.pid_file.exists(), _UNLINK_S):
            self.pid_file.unlink(missing_ok=True)

    def _reap(self) -> None:
        """Collect the exit codes of guards that are children of this process."""
        guard, self._guard = self._guard, None
        if guard is not None:
            if guard.stdin is not None:
                guard.stdin.close()
            try:
                guard.wait(_KILL_S)
            except subprocess.TimeoutExpired:
                guard.kill()
                guard.wait()
        detached, self._detached_guard = self._detached_guard, None
        if detached is not None:
            with contextlib.suppress(ChildProcessError):
                _becomes(lambda: os.waitpid(detached, os.WNOHANG)[0] == detached, _UNLINK_S)


def java_environment(class_path: list[Path]) -> dict[str, str]:
    """Environment for a JVM: ours, less what would change the JVM behind our back, plus the class path."""
    ignored = {"JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "CLASSPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in ignored}
    return environment | {"CLASSPATH": os.pathsep.join(str(path) for path in class_path)}


def _becomes(condition: Callable[[], bool], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
