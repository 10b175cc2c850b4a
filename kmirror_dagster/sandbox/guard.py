"""Runs one broker and ends it when whoever started it is gone, however that happened.

Started by its path under ``python -I -S``, so it imports the standard library only and costs about 10 MB. Its
standard input is a pipe whose other end the caller holds: end of file means that the caller died (or let go)
and the broker is ended too; the byte ``d`` means that the broker is to live on by itself. Should the guard
itself be killed, the kernel kills the broker (PR_SET_PDEATHSIG).

Usage: guard.py PID_FILE TOKEN CONSOLE_LOG COMMAND...
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.3
_GRACE_S = 5.0


def _die_with_guard() -> None:
    """In the child, before exec: have the kernel send SIGKILL when the guard dies."""
    # The guard has one thread, so "the thread that forked" lives as long as the guard does.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _write_pid_file(path: Path, token: str, pid: int) -> None:
    """Write the pid file in one step, so that a reader never sees half of it."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps({"pid": pid, "guard": os.getpid(), "token": token}), encoding="utf-8")
    temporary.replace(path)


def _remove_pid_file(path: Path, token: str) -> None:
    """Remove the pid file unless it is a later launch's by now."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8"))["token"] == token:
            path.unlink()


def _caller_is_gone(caller: int, timeout_s: float) -> bool | None:
    """Wait for a word of the caller: True when it is gone, None when it lets the broker live on."""
    readable, _, _ = select.select([0], [], [], timeout_s)
    if readable:
        return None if os.read(0, 1) == b"d" else True
    # A child that the caller forked may hold the pipe open; the parent's pid tells the truth then.
    return os.getppid() != caller


def _end(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, then SIGKILL: a stopped (SIGSTOP) broker does not act on the first."""
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _watch(process: "subprocess.Popen[bytes]", caller: int) -> None:
    while process.poll() is None:
        gone = _caller_is_gone(caller, _POLL_S)
        if gone is None:
            process.wait()
        elif gone:
            _end(process)


def _start(command: list[str], console: str) -> "subprocess.Popen[bytes]":
    with open(console, "ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_guard
        )


def _announce(pid: int) -> None:
    """Tell the caller the pid, then let go of its pipes.

    Nobody may wait for the end of our output: `kmirror sandbox start` returns while brokers run.
    """
    with contextlib.suppress(BrokenPipeError):  # the caller died, which `_watch` sees
        os.write(1, f"{pid}\n".encode())
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)


def main(arguments: list[str]) -> int:
    """Start the command, announce its pid on standard output, watch over it."""
    pid_file, token, console, *command = arguments
    caller = os.getppid()
    # A terminal's Ctrl-C is for the caller, which ends its brokers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGTERM to the guard (a service manager, a person) ends the broker as well, by the `finally` below.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    process = _start(command, console)
    try:
        _write_pid_file(Path(pid_file), token, process.pid)
        _announce(process.pid)
        _watch(process, caller)
    finally:
        if process.poll() is None:
            _end(process)
        _remove_pid_file(Path(pid_file), token)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
