"""Ctrl-C in the middle of a benchmark."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.helpers.waiting import wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.unsecured("about the benchmark, which makes clusters of its own"),
]


def test_ctrl_c_leaves_nothing_running(tmp_path: Path) -> None:
    """Brokers, proxy and the measured node end, and their files are gone."""
    command = [sys.executable, "-m", "bench", "wan", "--records", "20000", "--only", "kmirror"]
    lines: list[str] = []
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as bench:
        reader = threading.Thread(target=lambda: lines.extend(iter(bench.stderr.readline, "")), daemon=True)  # type: ignore[union-attr]
        reader.start()
        try:
            wait_until(
                lambda: (
                    bench.poll() is not None
                    or any("kmirror" in line and line.startswith("wan") for line in lines)
                ),
                150,
                what="a round through the proxy",
            )
            assert bench.poll() is None, lines
            started = psutil.Process(bench.pid).children(recursive=True)
            bench.send_signal(signal.SIGINT)
            assert bench.wait(60) == 130, lines
        finally:
            bench.kill()
        reader.join(10)
    assert len(started) >= 6, started  # brokers, proxy and node, each with its guard; the node may be done
    _, left = psutil.wait_procs(started, timeout=20)
    assert not left
    assert not list(tmp_path.glob("kmirror-bench-*"))
