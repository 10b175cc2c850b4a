"""From documents to settings, and the one line that says why not."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kmirror_dagster.settings.base import Settings
from kmirror_dagster.settings.documents import Document, SettingPath, format_path
from kmirror_dagster.settings.mirrors import MirrorSettings
from kmirror_dagster.settings.names import (
    ALL_SECRET_NAMES,
    documented_name,
    is_secret,
    name_problems,
    section_of,
)
from kmirror_dagster.settings.nodes import NodeSettings
from kmirror_dagster.settings.references import has_reference, is_only_references, resolve, texts
from kmirror_dagster.settings.yaml_files import read_file, read_yaml

S = TypeVar("S", bound=Settings)

_MAX_SHOWN = 60  # characters of a refused value

# pydantic's kinds of error -> what was expected, in the words of a document
_EXPECTED: Mapping[str, str] = {
    "missing": "required setting is missing",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "int_parsing_size": "expected a whole number of at most 18 digits",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "tuple_type": "expected a list",
    "list_type": "expected a list",
    "model_type": "expected a section of settings, each as name: value",
    "model_attributes_type": "expected a section of settings, each as name: value",
    "string_too_short": "expected some text, got none",
    "datetime_parsing": "expected a time such as 2026-01-31T00:00:00Z",
    "datetime_from_date_parsing": "expected a time such as 2026-01-31T00:00:00Z",
    "datetime_type": "expected a time such as 2026-01-31T00:00:00Z",
}
_BOUNDS: Mapping[str, str] = {
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "string_too_long": "expected at most {max_length} characters",
    "literal_error": "expected {expected}",
}


@dataclass(frozen=True)
class _Problem:
    """One thing wrong with a document. Lower ranks are told first: they explain the others."""

    rank: int
    path: SettingPath
    message: str


def load_mirror(path: Path, environ: Mapping[str, str] | None = None) -> MirrorSettings:
    """Read a mirror's settings file with its `${ENV}` references resolved.

    Raises:
        SettingsError: one line with file, line, setting and remedy.
    """
    return _build(read_file(path), MirrorSettings, _environment(environ))


def parse_mirror(text: str, name: str, environ: Mapping[str, str] | None = None) -> MirrorSettings:
    """Read a mirror's settings from YAML text; `name` stands for the file in messages.

    Raises:
        SettingsError: one line with name, line, setting and remedy.
    """
    return _build(read_yaml(text, name), MirrorSettings, _environment(environ))


def load_document(path: Path) -> dict[str, Any]:
    """Read a mirror's settings file as the document that is sent to a node and stored, references unresolved.

    All that can be known without the environment is checked: names, types, and that no secret is literal.

    Raises:
        SettingsError: one line with file, line, setting and remedy.
    """
    document = read_file(path)
    check_document(document)
    return document.values


def check_document(document: Document) -> None:
    """Check a mirror's settings document as far as that goes without the environment.

    Raises:
        SettingsError: one line with the place, setting and remedy.
    """
    _check(document, MirrorSettings, None)
    _refuse_literal_secrets(document)


def mirror_from_document(
    document: Mapping[str, Any], environ: Mapping[str, str] | None = None, name: str | None = None
) -> MirrorSettings:
    """Build a mirror's settings from a document, resolving its references in this process's environment.

    Raises:
        SettingsError: one line with the setting and the remedy.
    """
    return _build(_named(document, name), MirrorSettings, _environment(environ))


def refuse_literal_secrets(document: Mapping[str, Any], name: str | None = None) -> None:
    """Refuse a document that is to be stored while it holds a secret instead of a reference to one.

    Raises:
        SettingsError: naming the setting, never the secret.
    """
    _refuse_literal_secrets(_named(document, name))


def load_node(path: Path, environ: Mapping[str, str] | None = None) -> NodeSettings:
    """Read a node's settings file with its `${ENV}` references resolved.

    Raises:
        SettingsError: one line with file, line, setting and remedy.
    """
    return _build(read_file(path), NodeSettings, _environment(environ))


def node_from_document(
    document: Mapping[str, Any], environ: Mapping[str, str] | None = None, name: str | None = None
) -> NodeSettings:
    """Build a node's settings from a document, resolving its references in this process's environment.

    Raises:
        SettingsError: one line with the setting and the remedy.
    """
    named = Document(name=name or "node settings", values=dict(document))
    return _build(named, NodeSettings, _environment(environ))


def _environment(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environ is None else environ


def _named(document: Mapping[str, Any], name: str | None) -> Document:
    mirror = document.get("mirror")
    default = f"mirror {mirror!r}" if isinstance(mirror, str) else "mirror settings"
    return Document(name=name or default, values=dict(document))


def _build(document: Document, model: type[S], environ: Mapping[str, str]) -> S:
    settings = _check(document, model, environ)
    if settings is None:
        raise document.error((), "cannot be used; check it against the documentation")
    return settings


def _check(document: Document, model: type[S], environ: Mapping[str, str] | None) -> S | None:
    """Validate a document.

    Without an environment, what depends on it is left unjudged, and there may be no settings to return.
    """
    problems = [_Problem(0, found.path, found.message) for found in name_problems(document.values, model)]
    values: Any = document.values
    if environ is not None:
        values, unresolved = resolve(values, environ)
        problems += [_Problem(1, path, message) for path, message in unresolved]
    settings: S | None = None
    try:
        settings = model.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True, include_input=False)
        known = {problem.path for problem in problems}
        for detail in details:
            problem = _judge(detail, document, model, unjudged=environ is None)
            if problem is not None and problem.path not in known:
                problems.append(problem)
    if problems:
        # outside the except clause: pydantic's error must not travel along, it knows the values
        raise _worst(document, problems)
    return settings


def _worst(document: Document, problems: Iterable[_Problem]) -> Exception:
    ordered = sorted(problems, key=lambda p: (p.rank, document.line(p.path) or 0))
    first, others = ordered[0], len(ordered) - 1
    more = f" ({others} more problem{'s' if others > 1 else ''} in this document)" if others else ""
    return document.error(first.path, first.message + more)


def _judge(
    detail: ErrorDetails, document: Document, model: type[Settings], *, unjudged: bool
) -> _Problem | None:
    """Translate one of pydantic's errors; None for a name problem or what depends on the environment."""
    kind = detail["type"]
    if kind == "extra_forbidden":
        return None
    context = detail.get("ctx") or {}
    path = _written_path(detail["loc"], document, model)
    written = document.value(path)
    if unjudged and not isinstance(written, dict) and has_reference(written):
        return None
    setting = context.get("setting")
    if setting:
        path = (*path, str(setting))
        written = document.value(path)
    if kind == "refused":
        message = str(context["reason"])
    elif kind in _BOUNDS:
        message = _BOUNDS[kind].format_map(context).replace("'", "")
    else:
        message = _EXPECTED.get(kind) or f"refused: {detail['msg']}"
    if kind == "string_type":
        message = "expected text"
        if isinstance(written, (bool, int, float)):
            message += "; put it in quotes"
    secret = is_secret(model, path)
    shown = "" if secret or not message.startswith("expected") or "got" in message else _shown(written)
    head, separator, advice = message.partition("; ")
    return _Problem(2 if kind == "missing" else 1, path, head + shown + separator + advice)


def _shown(written: object) -> str:
    if isinstance(written, (dict, list)):
        return ""
    if written is None:
        return ", got nothing"
    if isinstance(written, bool):
        return f", got {str(written).lower()}"
    text = repr(written)
    return f", got {text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 4] + '...' + text[-1]}"


def _written_path(loc: tuple[int | str, ...], document: Document, model: type[Settings]) -> SettingPath:
    """Path in the spelling the document uses: pydantic reports documented names only."""
    path: SettingPath = ()
    section: type[Settings] | None = model
    for part in loc:
        around = document.value(path)
        if section is not None and isinstance(part, str) and isinstance(around, dict) and part not in around:
            part = next(
                (
                    attribute
                    for attribute in section.model_fields
                    if documented_name(section, attribute) == part
                    and attribute in cast("dict[str, Any]", around)
                ),
                part,
            )
        path = (*path, part)
        section = section_of(section, str(part)) if section is not None else None
    return path


def _refuse_literal_secrets(document: Document) -> None:
    for path, text in texts(document.values):
        name = next((part for part in path if part in ALL_SECRET_NAMES), None)
        if name is not None and not is_only_references(text):
            variable = "_".join(str(part) for part in path).replace(".", "_").upper()
            raise document.error(
                path, f"a secret must not be stored: write ${{{variable}}} and set that environment variable"
            )


__all__ = [
    "check_document",
    "format_path",
    "load_document",
    "load_mirror",
    "load_node",
    "mirror_from_document",
    "node_from_document",
    "parse_mirror",
    "refuse_literal_secrets",
]
