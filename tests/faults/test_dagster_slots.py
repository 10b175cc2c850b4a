"""Runs that are cancelled or killed give their slot back, and a failover waits for none (C38)."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.dagster_processes import DagsterProcesses
from tests.helpers.waiting import wait_until

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

_POOL = "kmirror"
# the recommended settings: looked after every 15 s, slots freed 60 s after the end of a run
_BOUND_S = 240.0

_CODE = '''\
"""A mirror whose pauses never end; stops do. Each process tells its id, and waits while it is to."""

import os
import time
from pathlib import Path

from kmirror_dagster.orchestration import build_mirror_definitions
from tests.helpers.fake_node import _NODES, FakeNode, FakeResource

HOME = Path({home!r})


class Stuck(FakeNode):
    def verb(self, name, verb, request=None):
        (HOME / "verb.pid").write_text(str(os.getpid()))
        self.settles = verb == "stop"
        return super().verb(name, verb, request)


class SlowResource(FakeResource):
    def setup_for_execution(self, context):
        if (HOME / "hang").exists() and context.run:
            (HOME / "setup.pid").write_text(str(os.getpid()))
            while (HOME / "hang").exists():
                time.sleep(0.2)


_NODES["stuck"] = Stuck(topics={{"a": 1}})
defs = build_mirror_definitions(mirrors=["orders"], resource=SlowResource(endpoint="stuck"))
'''


@pytest.fixture(scope="module")
def dagster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterProcesses]:
    """Dagster with the recommended settings and one slot for what a mirror's verbs do."""
    home = tmp_path_factory.mktemp("slots")
    made = DagsterProcesses(
        home, _CODE.format(home=str(home)), {"PYTHONPATH": str(Path(__file__).parents[2])}
    )
    try:
        made.start()
        answer = made.query(
            "mutation ($pool: String!) { setConcurrencyLimit(concurrencyKey: $pool, limit: 1) }",
            pool=_POOL,
        )
        assert answer["setConcurrencyLimit"]
        yield made
    finally:
        made.stop()


def config(wait_s: float) -> dict[str, object]:
    """Run configuration of a pause."""
    return {"ops": {"kmirror_pause_op": {"config": {"wait_seconds": wait_s}}}}


def long_run(dagster: DagsterProcesses, mark: str = "verb.pid") -> tuple[str, int]:
    """Start a run that lasts; its id and its process."""
    (dagster.home / mark).unlink(missing_ok=True)
    run = dagster.launch("kmirror_pause", config(1_200.0))
    wait_until(lambda: _pid(dagster, mark), 120, what=f"run {run} at work; see {dagster.log}", poll_s=0.3)
    pid = _pid(dagster, mark)
    assert pid is not None
    return run, pid


def _pid(dagster: DagsterProcesses, mark: str) -> int | None:
    path = dagster.home / mark
    text = path.read_text() if path.exists() else ""
    return int(text) if text else None


def await_free(dagster: DagsterProcesses, begun: float, what: str) -> None:
    """A short run gets the slot and succeeds."""
    assert dagster.wait_run(dagster.launch("kmirror_pause", config(0.0)), _BOUND_S) == "SUCCESS"
    logger.info(f"{what}: another run had come and gone {time.monotonic() - begun:.0f} s later")


@pytest.mark.case("C38")
def test_terminated_run(dagster: DagsterProcesses) -> None:
    """A run that is terminated in the UI ends as CANCELED and its slot is free."""
    run, _ = long_run(dagster)
    begun = time.monotonic()
    dagster.terminate(run)
    assert dagster.wait_run(run, _BOUND_S) == "CANCELED"
    await_free(dagster, begun, "terminated")


@pytest.mark.case("C38")
def test_killed_run_and_a_failover_beside_it(dagster: DagsterProcesses) -> None:
    """A failover does not wait for a long run that holds the slot; killed, that one fails and gives it back."""
    run, pid = long_run(dagster)
    queued = dagster.launch("kmirror_pause", config(0.0))
    options = {"mirror": "orders", "confirm": "orders", "force": True}
    begun = time.monotonic()
    failover = dagster.launch("kmirror_failover", {"ops": {"kmirror_failover_op": {"config": options}}})
    assert dagster.wait_run(failover, _BOUND_S) == "SUCCESS"
    logger.info(f"failover beside a run that holds the slot: {time.monotonic() - begun:.0f} s")
    assert dagster.run(run)["status"] == "STARTED"
    assert dagster.run(queued)["status"] not in ("SUCCESS", "FAILURE")
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert dagster.wait_run(run, _BOUND_S) == "FAILURE"
    assert dagster.wait_run(queued, _BOUND_S) == "SUCCESS"
    logger.info(f"killed: the run that waited for its slot was done {time.monotonic() - begun:.0f} s later")


@pytest.mark.case("C38")
def test_killed_while_the_resource_is_set_up(dagster: DagsterProcesses) -> None:
    """A run killed before its work began holds nothing back."""
    hang = dagster.home / "hang"
    hang.touch()
    try:
        run, pid = long_run(dagster, "setup.pid")
        begun = time.monotonic()
        os.kill(pid, signal.SIGKILL)
    finally:
        hang.unlink()
    assert dagster.wait_run(run, _BOUND_S) == "FAILURE"
    await_free(dagster, begun, "killed in set-up")
