"""What a person does with a mirror in Dagster's UI, step by step; the test and the pictures share it."""

from collections.abc import Callable

from kmirror_dagster.sandbox.pair import MIRROR
from tests.helpers.dagster_processes import LOCATION
from tests.ui.browser import Browser
from tests.ui.stack import ASSET, UiStack

_ASSET_PATH = "/assets/" + "/".join(ASSET)
_LOCATION_PATH = f"/locations/__repository__@{LOCATION}"
PARTITION = "orders/0"
# A run takes 5 to 10 s to start and end on an idle machine.
RUN_S = 120.0
_SOURCE_DOWN_S = 120.0

Picture = Callable[[str], None]


def open_mirror(browser: Browser, picture: Picture) -> None:
    """The mirror's asset: figures as a table and as plots."""
    browser.open(f"{_ASSET_PATH}?view=overview")
    browser.see("lag_records", "lag_seconds", "records_per_second", "partitions_mirroring")
    picture("mirror")
    browser.click_button("Plots")
    browser.find("canvas")
    browser.see("lag_records", "records_per_second")
    picture("plots")


def see_partitions(browser: Browser, picture: Picture) -> None:
    """One asset partition per mirror partition, each with its state."""
    browser.open(f"{_ASSET_PATH}?view=partitions&partition=orders%2F0")
    browser.see("audit-log/0", "clicks.lz4/1", PARTITION, "MIRRORING", "destination_end_offset")
    picture("partitions")
    browser.open(f"{_ASSET_PATH}?view=checks")
    browser.see("node_alive", "no_failed_partition", "lag_within_limits", "refresh_fresh")
    picture("checks")


def see_lineage(browser: Browser, picture: Picture) -> None:
    """Source, mirror and what is downstream; sensors and schedules."""
    browser.open(f"{_LOCATION_PATH}/asset-groups/{MIRROR}")
    browser.see(f"{MIRROR}-source")
    picture("lineage")
    browser.open("/automation")
    browser.see(f"{MIRROR}_refresh", f"{MIRROR}_failover", "kmirror_node_keeper")
    picture("automation")


def materialize(browser: Browser, picture: Picture, stack: UiStack) -> None:
    """Materialize one partition: the run succeeds, since it is where it is wanted."""
    browser.open(f"{_ASSET_PATH}?view=partitions&partition=orders%2F0")
    browser.see(PARTITION, "MIRRORING")
    browser.click("//button[contains(normalize-space(.), 'Materialize')]")
    browser.see("Partition selection", "1 partition", "Launch 1 run")
    picture("materialize")
    browser.click_button("Launch 1 run")
    browser.until(lambda: _ended(stack, "__ASSET_JOB"), "end of the materialization", RUN_S)
    (run,) = stack.dagster.runs("__ASSET_JOB")
    browser.open(f"/runs/{run['runId']}")
    browser.see("Success", "RUN_SUCCESS")
    browser.open(f"{_ASSET_PATH}?view=partitions&partition=orders%2F0")
    browser.see("advanced", run["runId"][:8])


def _ended(stack: UiStack, job: str) -> bool:
    runs = stack.dagster.runs(job)
    return bool(runs) and runs[0]["status"] in ("SUCCESS", "FAILURE", "CANCELED")


def pause_and_resume(browser: Browser, picture: Picture, stack: UiStack) -> None:
    """From the launchpad: one topic is paused, then resumed; the partition page shows it."""
    for verb, state in (("pause", "PAUSED"), ("resume", "MIRRORING")):
        browser.open(f"{_LOCATION_PATH}/jobs/kmirror_{verb}/playground")
        browser.find(".CodeMirror")
        browser.see("No errors")
        browser.edit(_config(verb))
        browser.see("No errors")
        picture(verb)
        browser.click_button("Launch Run")
        browser.await_page("/runs/")
        browser.see("Success", deadline_s=RUN_S)
        assert stack.state_of(PARTITION) == state
    browser.open(f"{_ASSET_PATH}?view=partitions&partition=orders%2F0")
    browser.see("previous_state", "PAUSED", deadline_s=RUN_S)
    picture("resumed")


def _config(verb: str) -> str:
    return f"ops:\n  kmirror_{verb}_op:\n    config:\n      mirror: {MIRROR}\n      topics: [orders]\n"


def arm_failover(browser: Browser, picture: Picture, stack: UiStack) -> None:
    """Switch the failover sensor on; its ticks say what was seen."""
    sensor = f"{MIRROR}_failover"
    browser.open(f"{_LOCATION_PATH}/sensors/{sensor}")
    browser.see(sensor)
    browser.switch()
    browser.until(lambda: stack.dagster.sensors()[sensor] == "RUNNING", "sensor armed")
    browser.until(lambda: stack.dagster.ticks(sensor, 1), "a tick of the sensor")
    browser.see("0 runs requested")
    picture("failover-armed")


def lose_the_source(browser: Browser, picture: Picture, stack: UiStack) -> None:
    """The source is lost: a check fails and says so, and the armed sensor fails the mirror over."""
    stack.sandbox.source.kill_broker()
    browser.until(
        lambda: stack.dagster.runs("kmirror_failover"), "failover run of the sensor", _SOURCE_DOWN_S
    )
    browser.open(f"{_ASSET_PATH}?view=checks&checkDetail=refresh_fresh")
    browser.see("refresh_fresh", "the source was not reachable", deadline_s=_SOURCE_DOWN_S)
    picture("check-failed")
    browser.until(lambda: _ended(stack, "kmirror_failover"), "end of the failover", RUN_S)
    (run,) = stack.dagster.runs("kmirror_failover")
    browser.open(f"/runs/{run['runId']}")
    browser.see("Success")
    picture("failed-over")
    assert stack.state_of(PARTITION) == "STOPPED"


def tell(browser: Browser, stack: UiStack, picture: Picture) -> None:
    """The whole story."""
    open_mirror(browser, picture)
    see_partitions(browser, picture)
    see_lineage(browser, picture)
    materialize(browser, picture, stack)
    pause_and_resume(browser, picture, stack)
    arm_failover(browser, picture, stack)
    lose_the_source(browser, picture, stack)
