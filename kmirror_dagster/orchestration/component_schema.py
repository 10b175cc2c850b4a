"""JSON schema of a mirror's settings inside `defs.yaml`, so that `dg check yaml` points at the line at fault.

A reference (`${NAME}`, `{{ env.NAME }}`) may stand for any value, so each plain setting takes one as well. The
schema has no alternatives between sections: a checker can only say of those that none of them fits.
"""

import re
from typing import Any, cast

from kmirror_dagster.settings import MirrorSettings, StartPolicy

Schema = dict[str, Any]

_REFERENCE = r"\$\{|\{\{"
_KEPT = ("title", "description", "default", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def settings_schema() -> Schema:
    """Schema of one mirror's settings document, in documented names."""
    schema = MirrorSettings.model_json_schema()
    return _section(schema, schema.get("$defs", {}))


def without_alternatives(schema: Schema) -> Schema:
    """A component's schema with its references put in place and without "or a template" for whole sections.

    Dagster lets a template stand for every attribute. Where an attribute has a structure, that would hide
    which part of it is wrong.
    """
    return cast("Schema", _placed(schema, schema.get("$defs", {})))


def _placed(node: object, definitions: Schema) -> object:
    if isinstance(node, list):
        return [_placed(each, definitions) for each in cast("list[object]", node)]
    if not isinstance(node, dict):
        return node
    found = cast("Schema", node)
    if "$ref" in found:
        target = definitions[str(found["$ref"]).rpartition("/")[2]]
        others = {key: value for key, value in found.items() if key != "$ref"}
        return _placed({**target, **others}, definitions)
    placed: Schema = {key: _placed(value, definitions) for key, value in found.items() if key != "$defs"}
    choices = cast("list[Schema] | None", placed.pop("anyOf", None))
    if not choices:
        return placed
    structured = [choice for choice in choices if choice.get("type") in ("object", "array")]
    if len(structured) == 1:
        return {**structured[0], **placed}
    # a template's text fits anything else, so it is told from a misspelt word by its braces
    others = [choice for choice in choices if choice != {"type": "string"}]
    if len(others) == 1 and len(others) < len(choices):
        return _with_references(others[0], sorted({others[0]["type"], "string"}), placed)
    return {"anyOf": choices, **placed}


def _section(schema: Schema, definitions: Schema) -> Schema:
    properties = {name: _setting(each, definitions) for name, each in schema["properties"].items()}
    kept = {key: schema[key] for key in ("title", "description", "required") if key in schema}
    return {"type": "object", "additionalProperties": False, "properties": properties, **kept}


def _setting(schema: Schema, definitions: Schema) -> Schema:
    kept = {key: schema[key] for key in _KEPT if key in schema}
    given = cast("list[Schema]", schema.get("anyOf") or [schema])
    choices = [choice for choice in given if choice.get("type") != "null"]
    optional = ["null"] if len(choices) < len(given) else []
    reference = choices[0].get("$ref")
    if reference:
        target = definitions[reference.rpartition("/")[2]]
        if target.get("title") == StartPolicy.__name__:
            return {"type": ["string", "object"], **kept}
        if "properties" in target:
            return {**_section(target, definitions), "type": ["object", *optional], **kept}
        choices = [target]
    types = {str(choice["type"]) for choice in choices} | {"string", *optional}
    return _with_references({**choices[0], **kept}, sorted(types), kept)


def _with_references(merged: Schema, types: list[str], kept: Schema) -> Schema:
    allowed = merged.get("enum") or ([merged["const"]] if "const" in merged else [])
    bounds = {key: merged[key] for key in _KEPT if key in merged}
    schema: Schema = {"type": types, **bounds, **kept}
    if allowed:
        schema["pattern"] = f"^({'|'.join(re.escape(str(word)) for word in allowed)})$|{_REFERENCE}"
    elif merged["type"] == "array":
        schema["items"] = merged.get("items", {})
    elif merged["type"] not in ("string", "null"):
        schema["pattern"] = _REFERENCE
    return schema
