"""Broker processes: never taken for somebody else's, never left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kmirror_dagster.errors import SandboxError
from kmirror_dagster.sandbox.processes import BrokerProcess, PidFile
from tests.helpers.waiting import wait_until

# Stands for the Java launcher: takes the broker's arguments and runs until told to end.
FAKE_JAVA = """#!{python}
import signal, sys, time
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--fail" in sys.argv:
    sys.exit("cannot start")
print("ready", flush=True)
while True:
    time.sleep(60)
"""


@pytest.fixture
def java(tmp_path: Path) -> Path:
    path = tmp_path / "java"
    path.write_text(FAKE_JAVA.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def broker(tmp_path: Path) -> BrokerProcess:
    return BrokerProcess(pid_file=tmp_path / "broker.pid", console=tmp_path / "console.log")


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def started(broker: BrokerProcess, java: Path, *arguments: str) -> int:
    """Start, wait until the fake has set its signals up, and give its pid."""
    broker.start(java, list(arguments), [])
    wait_until(lambda: "ready" in broker.console.read_text(), 10)
    pid = broker.pid
    assert pid is not None
    return pid


def test_stop_ends_it_and_its_guard(broker: BrokerProcess, java: Path) -> None:
    """After stop neither broker nor guard nor pid file is there; a second stop is harmless."""
    pid = started(broker, java)
    guard = json.loads(broker.pid_file.read_text())["guard"]
    broker.stop(wait_s=5)
    assert is_gone(pid)
    assert is_gone(guard)
    assert not broker.pid_file.exists()
    broker.stop(wait_s=5)


def test_stubborn_broker_is_killed(broker: BrokerProcess, java: Path) -> None:
    """A broker that ignores SIGTERM is killed when the wait is over."""
    pid = started(broker, java, "--stubborn")
    broker.stop(wait_s=0.2)
    assert is_gone(pid)


def test_stopped_broker_is_killed(broker: BrokerProcess, java: Path) -> None:
    """A broker under SIGSTOP cannot act on SIGTERM and is killed."""
    pid = started(broker, java)
    broker.send_signal(signal.SIGSTOP)
    broker.stop(wait_s=0.2)
    assert is_gone(pid)


def test_second_start_is_refused(broker: BrokerProcess, java: Path) -> None:
    """One pid file, one broker."""
    started(broker, java)
    with pytest.raises(SandboxError, match="runs already"):
        broker.start(java, [], [])
    broker.stop(wait_s=5)


def test_another_process_finds_and_ends_it(broker: BrokerProcess, java: Path) -> None:
    """The pid file alone is enough to stop a broker that outlived its starter."""
    pid = started(broker, java)
    broker.detach()
    found = BrokerProcess(pid_file=broker.pid_file, console=broker.console)
    assert found.pid == pid
    found.stop(wait_s=5)
    assert is_gone(pid)


@pytest.mark.parametrize("holder_forked", [False, True])
def test_broker_dies_with_a_killed_starter(tmp_path: Path, java: Path, holder_forked: bool) -> None:
    """SIGKILL for the starter ends the broker, even while a forked child of it keeps the pipe open."""
    script = tmp_path / "starter.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from kmirror_dagster.sandbox.processes import BrokerProcess\n"
        f"home = Path({str(tmp_path)!r})\n"
        "broker = BrokerProcess(home / 'broker.pid', home / 'console.log')\n"
        f"broker.start(Path({str(java)!r}), [], [])\n"
        "if sys.argv[1] == 'True' and os.fork() == 0:\n"
        "    signal.alarm(60)\n"
        "else:\n"
        "    (home / 'started').touch()\n"
        "signal.pause()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, str(script), str(holder_forked)], cwd=Path.cwd(), start_new_session=True
    )
    try:
        wait_until((tmp_path / "started").exists, 20, what="broker started by the other process")
        pid_file = PidFile.read(tmp_path / "broker.pid")
        assert pid_file is not None
        assert not is_gone(pid_file.pid)
        starter.kill()
        starter.wait(10)
        wait_until(lambda: is_gone(pid_file.pid), 15, what="end of the broker")
    finally:
        os.killpg(starter.pid, signal.SIGKILL) if holder_forked else starter.kill()
        starter.wait(10)


def test_broker_dies_with_a_killed_guard(broker: BrokerProcess, java: Path) -> None:
    """SIGKILL for the guard ends the broker: the kernel does it."""
    pid = started(broker, java)
    os.kill(json.loads(broker.pid_file.read_text())["guard"], signal.SIGKILL)
    wait_until(lambda: is_gone(pid), 10, what="end of the broker")
    broker.stop(wait_s=1)
    assert not broker.pid_file.exists()


def test_pid_of_somebody_else_is_left_alone(broker: BrokerProcess) -> None:
    """A pid file whose number now belongs to another program finds nothing, and stop ends nothing."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        broker.pid_file.write_text(json.dumps({"pid": other.pid, "guard": 1, "token": "0" * 24}))
        assert not broker.is_alive()
        broker.stop(wait_s=1)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_damaged_pid_file_finds_nothing(broker: BrokerProcess) -> None:
    """A pid file that is none is as good as absent."""
    broker.pid_file.write_text("{")
    assert broker.pid is None
    broker.stop(wait_s=1)


def test_broker_that_ends_at_once_leaves_nothing(broker: BrokerProcess, java: Path) -> None:
    """A broker that fails right away is seen as dead, and its words are in the console file."""
    broker.start(java, ["--fail"], [])
    wait_until(lambda: not broker.is_alive(), 10)
    wait_until(lambda: "cannot start" in broker.console.read_text(), 10)
    broker.stop(wait_s=1)
    assert not broker.pid_file.exists()
