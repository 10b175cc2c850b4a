"""A measured process: started under the sandbox's guard, so that it ends with the benchmark however that ends."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.errors import BenchError
from kmirror_dagster.sandbox import guard

_START_S = 20.0
_END_S = 20.0


@dataclass(frozen=True)
class Usage:
    """What a process has used up to now.

    Attributes:
        cpu_s: processor seconds, user and system, of all its threads.
        rss_bytes: resident memory now.
        peak_rss_bytes: highest resident memory so far (the kernel's own figure).
    """

    cpu_s: float
    rss_bytes: int
    peak_rss_bytes: int


class GuardedProcess:
    """One process and its log file."""

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it.

        Args:
            command: program and arguments.
            log: file for its output.
            environment: its environment; this process's own when not given.
        """
        self.log = log
        watcher = [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(log) + ".pid"]
        with log.open("ab") as output:
            self._guard = subprocess.Popen(
                [*watcher, secrets.token_hex(8), str(log), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(environment) if environment is not None else None,
                start_new_session=True,
            )
        self._process = psutil.Process(self._announced())

    def _announced(self) -> int:
        assert self._guard.stdout is not None
        with self._guard.stdout as pipe:
            os.set_blocking(pipe.fileno(), False)
            end = time.monotonic() + _START_S
            while time.monotonic() < end and self._guard.poll() is None:
                line = pipe.read()
                if line:
                    return int(line)
                time.sleep(0.01)
        self.stop()
        raise BenchError(f"{self.log.name}: process did not start; see {self.log}")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE

    def usage(self) -> Usage:
        """Processor time and memory as the operating system counts them."""
        times = self._process.cpu_times()
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii", errors="replace")
        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
        return Usage(times.user + times.system, self._process.memory_info().rss, peak * 1024)

    def tail(self, lines: int = 5) -> str:
        """Last lines of its log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def interrupt(self) -> None:
        """Ask it to end and wait for that; its guard is collected by `stop`."""
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_S)
            except psutil.TimeoutExpired:
                return

    def stop(self) -> None:
        """End it; harmless when it has ended."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()  # the guard sees this and ends what it watches
        try:
            self._guard.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
