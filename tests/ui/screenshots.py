"""Takes the pictures of the documentation: the story that tests/ui/test_browser.py tells, with a picture of each step.

python -m tests.ui.screenshots docs/images [NAME ...]
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kmirror_dagster.sandbox.pair import MIRROR
from tests.helpers.waiting import wait_until
from tests.ui import story
from tests.ui.browser import Browser
from tests.ui.stack import UiStack, ui_stack

_RECORDS = 20_000
# A mirror that copies logs its figures once a minute: plots want a few points.
_REFRESHES = 4


def take(out: Path, names: Sequence[str]) -> list[Path]:
    """Tell the story and keep the named pictures, all of them when none is named."""
    out.mkdir(parents=True, exist_ok=True)
    taken: list[Path] = []
    with (
        tempfile.TemporaryDirectory(prefix="kmirror-pictures-") as home,
        ui_stack(Path(home), records=_RECORDS) as stack,
        Browser(stack.dagster.url) as browser,
    ):

        def picture(name: str) -> None:
            if not names or name in names:
                taken.append(out / f"{name}.png")
                browser.picture(taken[-1])

        _await_figures(stack)
        story.tell(browser, stack, picture)
    return taken


def _await_figures(stack: UiStack) -> None:
    stack.await_shown()
    sensor = f"{MIRROR}_refresh"
    wait_until(
        lambda: len(stack.dagster.ticks(sensor, _REFRESHES)) >= _REFRESHES, 240, what="refreshes", poll_s=2
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="directory for the pictures")
    parser.add_argument(
        "names", nargs="*", help="which ones, such as mirror or plots; all when none is named"
    )
    arguments = parser.parse_args()
    for path in take(arguments.out, arguments.names):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
