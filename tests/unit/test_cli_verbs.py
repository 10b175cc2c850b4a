"""Verbs of the command line and waiting for what they lead to."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kmirror_dagster.cli import progress, waiting
from kmirror_dagster.lifecycle import MirrorState
from tests.helpers.command_line import FakeNode, install, kmirror, partition, refused, set_states


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """The node every command of the test talks to."""
    return install(monkeypatch)


@pytest.mark.parametrize(
    ("verb", "target"),
    [
        ("start", MirrorState.MIRRORING),
        ("pause", MirrorState.PAUSED),
        ("resume", MirrorState.MIRRORING),
        ("stop", MirrorState.STOPPED),
        ("recover", MirrorState.MIRRORING),
    ],
)
def test_a_verb_waits_for_its_state(node: FakeNode, verb: str, target: MirrorState) -> None:
    """Each verb is sent once and ends with 0 when all partitions are where it leads."""
    set_states(node, MirrorState.LOG_ALIGNMENT)
    looks = 0

    def settle(fake: FakeNode) -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            set_states(fake, target)

    node.on_look = settle
    result = kmirror(verb, "orders")
    assert result.exit_code == 0, result.output
    assert node.log == [(verb, None)]
    assert looks >= 4
    assert f"4 {target}" in result.stdout


def test_patterns_are_split_and_sent(node: FakeNode) -> None:
    """--topics takes comma lists and may be given again; commas within a pattern stay."""
    kmirror("stop", "orders", "--topics", "a{1,2}, b", "--topics", "c", "--no-wait")
    assert node.log == [("stop", ["a{1,2}", "b", "c"])]


def test_an_empty_pattern_is_refused(node: FakeNode) -> None:
    """An empty --topics is a mistake, not all topics."""
    assert kmirror("stop", "orders", "--topics", "").exit_code == 2
    assert node.log == []


def test_only_the_chosen_topics_are_waited_for(node: FakeNode) -> None:
    """With --topics the other topics' states do not matter."""
    node.partitions[-1] = partition("orders-us", 0, MirrorState.STOPPED)
    result = kmirror("stop", "orders", "--topics", "orders-us", "--timeout", "5")
    assert result.exit_code == 0
    assert "1 STOPPED" in result.stdout


def test_a_verb_without_waiting_ends_at_once(node: FakeNode) -> None:
    """--no-wait ends as soon as the wish is stored."""
    result = kmirror("pause", "orders", "--no-wait")
    assert result.exit_code == 0
    assert "MIRRORING" not in result.stdout


def test_a_wait_ends_at_its_deadline(node: FakeNode) -> None:
    """A state that is not reached in time is exit code 1 and names the states there are."""
    result = kmirror("--json", "stop", "orders", "--timeout", "0.1")
    line = refused(result, 1)
    assert "not all partitions are STOPPED after 0.1 s: 4 MIRRORING" in line
    assert "kmirror describe orders" in line


def test_a_failure_nobody_retries_ends_the_wait(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that is FAILED for good ends the wait with its reason."""
    monkeypatch.setattr(waiting, "_FAILURE_GRACE_S", 0.05)
    node.partitions[1] = partition(
        "orders-eu", 1, MirrorState.FAILED, retriable=False, error="foreign write at offset 5"
    )
    line = refused(kmirror("--json", "start", "orders", "--timeout", "30"), 1)
    assert "orders-eu-1 is FAILED and not retried: foreign write at offset 5" in line
    assert "kmirror recover orders" in line


def test_a_topic_that_cannot_be_mirrored_ends_the_wait(node: FakeNode) -> None:
    """A topic's error ends the wait once a refresh has confirmed it."""
    node.partitions[0] = partition("orders-eu", 0, None)
    node.topic_error = "exists at the destination and is not empty"
    line = refused(kmirror("--json", "start", "orders", "--timeout", "30"), 1)
    assert "topic orders-eu cannot be mirrored: exists at the destination" in line


def test_verbs_print_json(node: FakeNode) -> None:
    """JSON of a verb: what changed, and the states that were reached."""
    found = json.loads(kmirror("start", "orders", "--json").stdout)
    assert found["changed"] == ["orders-eu"]
    assert found["states"] == {"MIRRORING": 4}


def test_progress_is_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal a wait tells its progress in lines on stderr, one now and then."""
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    with progress.progress("stop orders") as shown:
        shown.update(3, 8, "3 STOPPED, 5 STOPPING")
    assert capsys.readouterr() == ("", "stop orders: 3/8 3 STOPPED, 5 STOPPING\n")
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 60.0)
    with progress.busy("starting a node"):
        pass
    assert capsys.readouterr() == ("", "")


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the bar is drawn on stderr, while stdout stays clean."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, out = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    with progress.progress("stop orders") as shown:
        shown.update(3, 8, "3 STOPPED")
    assert "stop orders" in terminal.getvalue()
    assert out.getvalue() == ""


def test_ctrl_c_ends_a_wait_with_130(tmp_path: Path) -> None:
    """An interrupted wait is one line and exit code 130, in a real process."""
    script = tmp_path / "waiting.py"
    script.write_text(
        "import sys\n"
        "from tests.helpers.command_line import FakeNode\n"
        "from kmirror_dagster.cli.main import run\n"
        "from kmirror_dagster.coordination.client import NodeClient\n"
        "node = FakeNode(on_look=lambda _: print('looking', flush=True))\n"
        "NodeClient.discover = lambda *_, **__: node\n"
        "sys.exit(run(['stop', 'orders', '--timeout', '60']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "looking\n":
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "kmirror: interrupted\n")
