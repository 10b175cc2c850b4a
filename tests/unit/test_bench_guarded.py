"""Processes that are measured end with the benchmark, however that ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.errors import BenchError
from bench.guarded import GuardedProcess

_SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
_STARTER = """
import sys, time
from pathlib import Path
from bench.guarded import GuardedProcess
process = GuardedProcess([sys.executable, "-c", "import time; time.sleep(600)"], log=Path(sys.argv[1]))
print(process.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    """Whether a process has ended within 20 s."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_stop_ends_the_process(tmp_path: Path) -> None:
    """Ending it twice is harmless."""
    process = GuardedProcess(_SLEEP, log=tmp_path / "log")
    assert process.is_alive
    assert process.usage().rss_bytes > 0
    process.stop()
    process.stop()
    assert gone(process.pid)


def test_interrupt_is_a_polite_end(tmp_path: Path) -> None:
    """The process gets SIGTERM and is waited for."""
    process = GuardedProcess(_SLEEP, log=tmp_path / "log")
    process.interrupt()
    assert not process.is_alive
    process.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_end_of_the_benchmark_ends_the_process(number: signal.Signals, tmp_path: Path) -> None:
    """Also when it had no chance to clean up."""
    command = [sys.executable, "-c", _STARTER, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.send_signal(number)
        starter.wait(20)
    assert gone(pid)


def test_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The message says where to look."""
    with pytest.raises(BenchError, match="process did not start; see "):
        GuardedProcess([str(tmp_path / "nothing")], log=tmp_path / "log")
