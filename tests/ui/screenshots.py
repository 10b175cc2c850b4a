"""Takes the pictures of the documentation: a sandbox mirrored, seen in Dagster's UI by a headless Chromium.

python -m tests.ui.screenshots docs/images
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kmirror_dagster.coordination.launcher import start_node, stop_node
from kmirror_dagster.coordination.models import CreateMirror
from kmirror_dagster.sandbox.pair import HOME_ENV, MIRROR, Sandbox
from kmirror_dagster.sandbox.seed import Seeder
from kmirror_dagster.settings import load_document
from tests.helpers.dagster_processes import LOCATION, DagsterProcesses
from tests.helpers.waiting import wait_until

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1600, 1000
_SETTLE_MS = 12_000
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Page:
    """One picture: file name and path in the UI."""

    name: str
    path: str


_ASSET = f"/assets/kafka_mirror/{MIRROR}"
PAGES = (
    Page("mirror", f"{_ASSET}?view=overview"),
    Page("partitions", f"{_ASSET}?view=partitions&partition=orders%2F0"),
    Page("checks", f"{_ASSET}?view=checks"),
    Page("events", f"{_ASSET}?view=events"),
    Page("lineage", f"/locations/__repository__@{LOCATION}/asset-groups/{MIRROR}"),
    Page("automation", "/automation"),
)


def browser() -> str:
    """Path of an installed Chromium.

    Raises:
        SystemExit: when there is none.
    """
    for name in BROWSERS:
        found = shutil.which(name)
        if found:
            return found
    raise SystemExit("no Chromium found; install one, such as: apt-get install chromium")


def shoot(url: str, target: Path) -> None:
    """Take a picture of a page once its scripts had time to draw it."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser(),
            "--headless=new",
            "--no-sandbox",  # in a container there is no user namespace for one; the page is our own
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--window-size={WIDTH},{HEIGHT}",
            f"--virtual-time-budget={_SETTLE_MS}",
            f"--screenshot={target}",
            url,
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def take(out: Path, names: Sequence[str]) -> list[Path]:
    """Run a seeded sandbox, its mirror and Dagster, and take the named pictures."""
    out.mkdir(parents=True, exist_ok=True)
    pages = [page for page in PAGES if not names or page.name in names]
    with tempfile.TemporaryDirectory(prefix="kmirror-pictures-") as home:
        return _take(Path(home), out, pages)


def _take(home: Path, out: Path, pages: Sequence[Page]) -> list[Path]:
    sandbox = Sandbox(home / "sandbox")
    state_dir = home / "state"
    environ = {HOME_ENV: str(sandbox.home), "KMIRROR_STATE_DIR": str(state_dir), "PYTHONPATH": str(_ROOT)}
    dagster = DagsterProcesses(home / "dagster", (_ROOT / "definitions.py").read_text(), environ)
    stop = threading.Event()
    writer = threading.Thread(target=_write, args=(sandbox, stop), daemon=True)
    try:
        sandbox.start()
        with Seeder(sandbox.source.settings()) as seeder:
            seeder.create_topics()
            seeder.bulk(20_000)
            seeder.commit_groups()
        node = start_node(state_dir, sandbox.node_file)
        with node.client() as client:
            client.create(CreateMirror(document=load_document(sandbox.mirror_file)))
        writer.start()
        dagster.start()
        _await_drawn(dagster)
        targets = [out / f"{page.name}.png" for page in pages]
        for page, target in zip(pages, targets, strict=True):
            shoot(dagster.url + page.path, target)
        return targets
    finally:
        stop.set()
        dagster.stop()
        stop_node(state_dir)
        sandbox.stop()


def _write(sandbox: Sandbox, stop: threading.Event) -> None:
    with Seeder(sandbox.source.settings()) as seeder:
        seeder.stream(200, stop)


def _await_drawn(dagster: DagsterProcesses) -> None:
    """Wait until all partitions, and a few aggregate events, are in the event log."""
    asset = ("kafka_mirror", MIRROR)

    def complete() -> bool:
        keys = dagster.partition_keys(*asset)
        states = dagster.newest_states(*asset)
        return bool(keys) and all(states.get(key) == "MIRRORING" for key in keys)

    wait_until(complete, 120, what=f"all partitions MIRRORING; see {dagster.log}", poll_s=1)
    # a mirror that copies logs its figures once a minute
    sensor = f"{MIRROR}_refresh"
    wait_until(lambda: len(dagster.ticks(sensor, 5)) >= 4, 240, what="four refresh ticks", poll_s=2)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="directory for the pictures")
    parser.add_argument("names", nargs="*", help=f"which ones: {', '.join(page.name for page in PAGES)}")
    arguments = parser.parse_args()
    for target in take(arguments.out, arguments.names):
        sys.stdout.write(f"{target}\n")


if __name__ == "__main__":
    main()
