"""Which pages are generated."""

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generators import (
    api_page,
    commands_page,
    component_page,
    dagster_page,
    errors_page,
    metrics_page,
    settings_page,
    states_page,
)

ROOT = Path(__file__).parents[1]

PAGES: Mapping[str, Callable[[], str]] = {
    "metrics.md": metrics_page.page,
    "reference/api.md": api_page.page,
    "reference/commands.md": commands_page.page,
    "reference/component.md": component_page.page,
    "reference/dagster.md": dagster_page.page,
    "reference/errors.md": errors_page.page,
    "reference/settings.md": settings_page.page,
    "reference/states.md": states_page.page,
}
