"""A settings document as written: values, and the line on which each stands."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from kmirror_dagster.errors import SettingsError

SettingPath: TypeAlias = tuple[str | int, ...]

_MAX_NAME = 80  # characters; the longest known name has 45


@dataclass(frozen=True)
class Document:
    """A settings document as written.

    Attributes:
        name: file name or another description, put before every message about it.
        values: the settings, `${ENV}` references unresolved.
        lines: line of each setting, counted from 1; empty when the document was no file.
    """

    name: str
    values: dict[str, Any]
    lines: dict[SettingPath, int] = field(default_factory=dict[SettingPath, int])

    def line(self, path: SettingPath) -> int | None:
        """Line of a setting or of the nearest one around it; None when unknown."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None

    def value(self, path: SettingPath) -> object:
        """Value as written at a path; the text around it where a list was written as one text; else None."""
        value: object = self.values
        for part in path:
            if isinstance(value, dict):
                value = cast("dict[object, object]", value).get(part)
            elif (
                isinstance(value, list) and isinstance(part, int) and part < len(cast("list[object]", value))
            ):
                value = cast("list[object]", value)[part]
            else:
                return value if isinstance(value, str) else None
        return value

    def error(self, path: SettingPath, message: str) -> SettingsError:
        """Build the one-line error about one setting."""
        line = self.line(path)
        where = f"{self.name}:{line}" if line else self.name
        return SettingsError(": ".join(part for part in (where, format_path(path), message) if part))


def format_path(path: SettingPath) -> str:
    """Write a path as `source.bootstrap.servers[0]`; names of any characters and length stay on one line."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        name = part if part.isprintable() else repr(part)[1:-1]
        name = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}..."
        text += f".{name}" if text else name
    return text
