"""`${NAME}` in a text value stands for an environment variable; `$${` is a literal `${`.

Where `NAME` is not set and `NAME_FILE` is, the file named by it is read: that is how secrets are mounted.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from kmirror_dagster.errors import SettingsError
from kmirror_dagster.settings.documents import SettingPath

_TOKEN = re.compile(r"\$\$\{|\$\{([^}]*)\}|\$\{")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ONLY_REFERENCES = re.compile(r"(?:\$\{[A-Za-z_][A-Za-z0-9_]*\})+")


# appended to a variable's name: the variable that names a file with its value
FILE_SUFFIX = "_FILE"


class ReferenceProblem(Exception):
    """Error when a reference cannot be resolved; the message names the variable and the remedy."""


def variable(name: str, environ: Mapping[str, str]) -> str | None:
    """Value of an environment variable, else what is in the file that `NAME_FILE` names; None with neither.

    One line end at the end of the file is not part of the value. The file is read at each call: a secret that
    was changed is seen by whoever asks next.

    Raises:
        SettingsError: when the file cannot be read or is empty; the message never shows its content.
    """
    if name in environ:
        return environ[name]
    file = environ.get(name + FILE_SUFFIX)
    if not file:
        return None
    try:
        value = Path(file).read_bytes().decode()  # as it is: no line ends translated
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or "unreadable") if isinstance(error, OSError) else "not UTF-8 text"
        raise SettingsError(
            f"{name}{FILE_SUFFIX}: {file}: {reason}; name a file that this process may read"
        ) from None
    value = value.removesuffix("\n").removesuffix("\r")
    if not value:
        raise SettingsError(f"{name}{FILE_SUFFIX}: {file} is empty; put the value of {name} into it")
    return value


def escape_references(text: str) -> str:
    """Write a literal text so that resolving gives it back."""
    return text.replace("${", "$${")


def has_reference(value: object) -> bool:
    """Tell whether a value holds a reference, at any depth."""
    if isinstance(value, str):
        return any(match[0] != "$${" for match in _TOKEN.finditer(value))
    if isinstance(value, dict):
        return any(has_reference(item) for item in cast("dict[object, object]", value).values())
    return isinstance(value, list) and any(has_reference(item) for item in cast("list[object]", value))


def is_only_references(text: str) -> bool:
    """Tell whether a text is made of references alone, with nothing literal in it."""
    return _ONLY_REFERENCES.fullmatch(text) is not None


def resolve_text(text: str, environ: Mapping[str, str]) -> str:
    """Put the variables' values in place of the references; values are not resolved again.

    Raises:
        ReferenceProblem: when a variable is not set, or a reference is malformed.
    """

    def replacement(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        name = match[1]
        if name is None or not _NAME.fullmatch(name):
            raise ReferenceProblem(
                "expected ${NAME} with a name of letters, digits and _; write $${ where ${ is meant literally"
            )
        try:
            value = variable(name, environ)
        except SettingsError as error:
            raise ReferenceProblem(str(error)) from None
        if value is None:
            raise ReferenceProblem(
                f"environment variable {name} is not set; set it where this process starts, "
                f"or write $${{{name}}} for the literal text"
            )
        return value

    return _TOKEN.sub(replacement, text)


def resolve(
    value: Any, environ: Mapping[str, str], path: SettingPath = ()
) -> tuple[Any, list[tuple[SettingPath, str]]]:
    """Resolve all references in a document's values.

    Returns:
        The values, and for each reference that could not be resolved its path and what is wrong with it.
    """
    problems: list[tuple[SettingPath, str]] = []

    def walk(item: Any, where: SettingPath) -> Any:
        if isinstance(item, str):
            try:
                return resolve_text(item, environ)
            except ReferenceProblem as problem:
                problems.append((where, str(problem)))
                return item
        if isinstance(item, dict):
            return {key: walk(part, (*where, str(key))) for key, part in cast("dict[Any, Any]", item).items()}
        if isinstance(item, list):
            return [walk(part, (*where, index)) for index, part in enumerate(cast("list[Any]", item))]
        return item

    return walk(value, path), problems


def texts(value: Any, path: SettingPath = ()) -> Iterator[tuple[SettingPath, str]]:
    """All texts of a document with their paths."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, part in cast("dict[Any, Any]", value).items():
            yield from texts(part, (*path, str(key)))
    elif isinstance(value, list):
        for index, part in enumerate(cast("list[Any]", value)):
            yield from texts(part, (*path, index))
