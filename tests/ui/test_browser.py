"""A person steers a mirror in Dagster's UI: a real Chromium on a real webserver, over two real clusters."""

from pathlib import Path

import pytest

from tests.ui import story
from tests.ui.browser import Browser
from tests.ui.stack import ui_stack

pytestmark = [pytest.mark.ui, pytest.mark.integration, pytest.mark.timeout(600)]


def test_a_mirror_is_seen_and_steered_in_the_browser(tmp_path: Path) -> None:
    """Chromium sees plots and partitions, materializes one, pauses, resumes, arms the sensor, sees the failed check."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    with ui_stack(tmp_path, records=2_000) as stack, Browser(stack.dagster.url) as browser:
        stack.await_shown()
        story.tell(browser, stack, lambda name: browser.picture(pictures / f"{name}.png"))
    assert len(list(pictures.iterdir())) >= 10
