"""Reference of the settings documents."""

from typing import Any

from docs.generators.markdown import head, paragraphs, section, table
from kmirror_dagster.settings import (
    ClusterSettings,
    FailoverSettings,
    FilterSettings,
    MirrorSettings,
    NodeSettings,
    PolicySettings,
    SchemaRegistrySettings,
)
from kmirror_dagster.settings.base import Settings

_TEXT = """\
Two kinds of documents, both YAML: one for each mirror, one for each node. A setting is written by its name below (or
with `_` for `.`). `${NAME}` in a value is an environment variable of the node; what is secret must be given that way.
Unknown names are refused with file, line and the nearest known name."""

_SECTIONS: tuple[tuple[str, type[Settings], str], ...] = (
    ("Mirror document", MirrorSettings, "top level"),
    ("`source` and `destination`", ClusterSettings, "of a mirror; a node has `destination` alone"),
    ("`filters`", FilterSettings, "of a mirror"),
    ("`policies`", PolicySettings, "of a mirror"),
    ("`policies.failover`", FailoverSettings, "of a mirror"),
    ("`schema_registry`", SchemaRegistrySettings, "of a mirror"),
    ("Node document", NodeSettings, "top level"),
)


def page() -> str:
    """The whole page."""
    parts = [head("Settings", "kmirror_dagster/settings", _TEXT)]
    for title, model, where in _SECTIONS:
        parts.append(section(title, f"({where}) {paragraphs(model.__doc__)}", _settings(model)))
    return "".join(parts)


def _settings(model: type[Settings]) -> str:
    schema = model.model_json_schema(by_alias=True)
    required = set(schema.get("required", ()))
    rows = [
        (
            f"`{name}`",
            kind(field, schema),
            "required" if name in required else _default(field),
            str(field.get("description", "")),
        )
        for name, field in schema["properties"].items()
    ]
    return table(("setting", "value", "default", "meaning"), rows)


def kind(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """What may be written for a field of a JSON schema, in words."""
    choices = [each for each in field.get("anyOf", [field]) if each.get("type") != "null"]
    return " or ".join(_one_kind(each, schema) for each in choices)


def _one_kind(field: dict[str, Any], schema: dict[str, Any]) -> str:
    if "$ref" in field:
        return _reference(field["$ref"].rsplit("/", 1)[-1])
    if "allOf" in field:
        return _one_kind(field["allOf"][0], schema)
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if field.get("format") == "password":
        return "secret: `${NAME}`"
    if field.get("type") == "array":
        return f"list of {kind(field['items'], schema)}" if field.get("items") else "list"
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true`, `false`"}
    return words.get(str(field.get("type")), "section") + _bounds(field)


def _reference(name: str) -> str:
    return {"StartPolicy": "`earliest`, `latest` or `{timestamp: …}`"}.get(name, "section, see below")


def _bounds(field: dict[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    above = field.get("exclusiveMinimum")
    if low is not None and high is not None:
        return f", {_number(low)} to {_number(high)}"
    parts = [f"at least {_number(low)}"] if low is not None else []
    parts += [f"above {_number(above)}"] if above is not None else []
    parts += [f"at most {_number(high)}"] if high is not None else []
    return ", " + ", ".join(parts) if parts else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    if value is None:
        return "" if "default" in field else "see its settings"
    if isinstance(value, (list, tuple)):
        return "<br>".join(f"`{each}`" for each in value) or "none"
    if isinstance(value, dict):
        return "see its settings"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:,}`".replace(",", "") if isinstance(value, (int, float)) else f"`{value}`"
