"""Processes that end with this one, however it ends."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.sandbox import guard

_POLL_S = 0.05
_KILL_GRACE_S = 3.0


class Guarded:
    """One process under the sandbox's guard, with its output in a log file.

    Args:
        name: for messages and file names.
        home: directory of the log and the pid file.
        command: what to run.
        environ: its environment.
    """

    def __init__(self, name: str, home: Path, command: Sequence[str], environ: Mapping[str, str]) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = home / f"{name}.log"
        guarded = [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(home / f"{name}.pid")]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*guarded, secrets.token_hex(8), str(self.log), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=output,
                env=dict(environ),
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise when the process has ended.

        Raises:
            KmirrorError: with the log's path.
        """
        if self._process.poll() is not None:
            raise KmirrorError(f"{self.name} ended by itself; see {self.log}")

    def descendants(self) -> list[psutil.Process]:
        """The guard and everything below it, as of now."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self, wait_s: float = 20.0) -> None:
        """End the process and all its descendants."""
        family = self.descendants()
        for member in family[1:]:
            _signal(member, signal.SIGTERM)
        _, alive = psutil.wait_procs(family[1:], timeout=wait_s)
        for member in alive:
            _signal(member, signal.SIGKILL)
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()  # the guard takes this for our end
        try:
            self._process.wait(_KILL_GRACE_S + wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        psutil.wait_procs(alive, timeout=_KILL_GRACE_S)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def wait_gone(processes: Sequence[psutil.Process], wait_s: float) -> list[psutil.Process]:
    """Wait until processes have ended; those that have not."""
    deadline = time.monotonic() + wait_s
    while True:
        left = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_POLL_S)


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes."""
    return {**os.environ, **changes}
