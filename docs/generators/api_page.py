"""Reference of a node's HTTP API, from its OpenAPI document."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from docs.generators.markdown import head, paragraphs, section, table
from docs.generators.settings_page import kind
from kmirror_dagster.coordination import models
from kmirror_dagster.coordination.api import NodeControl, build_app
from kmirror_dagster.coordination.service import NodeService
from kmirror_dagster.errors import NodeUnavailableError

_TEXT = """\
Every node answers for all mirrors; what another node leads is handed on to it. All calls but `/health/…` need
`Authorization: Bearer TOKEN`. `GET /openapi.json` of a node is the machine's version of this page. An error's body
is an `ErrorBody`; its `code` is a class of [errors](errors.md)."""

_REF = "#/components/schemas/"


def page() -> str:
    """The whole page."""
    document = openapi()
    parts = [head("HTTP API", "kmirror_dagster/coordination/api.py", _TEXT)]
    used: dict[str, None] = {"ErrorBody": None}
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            parts.append(section(f"`{method.upper()} {path}`", *_call(call)))
            used.update(dict.fromkeys(_references(call)))
    parts.append(section("Models", "Fields without a default are always there."))
    for name in sorted(_closure(used, document["components"]["schemas"])):
        schema = document["components"]["schemas"].get(name)
        if schema is not None and "properties" in schema:
            parts.append(section(f"`{name}`", _description(name), _fields(schema), level=3))
    return "".join(parts)


def openapi() -> dict[str, Any]:
    """The API's OpenAPI document; no node is needed for it."""

    def no_service() -> NodeService:
        raise NodeUnavailableError("this application only describes itself")

    return build_app(no_service, cast("NodeControl", None)).openapi()


def _call(call: Mapping[str, Any]) -> Iterator[str]:
    yield call.get("description", "").strip()
    parameters = [
        (
            f"`{each['name']}`",
            each["in"],
            _link(each["schema"]),
            "required" if each["required"] else str(each["schema"].get("default", "")),
        )
        for each in call.get("parameters", ())
    ]
    if parameters:
        yield table(("parameter", "in", "value", "default"), parameters)
    body = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body:
        yield f"Body: {_link(body)}"
    for status, answer in call.get("responses", {}).items():
        if status.startswith("2"):
            content = answer.get("content", {}).get("application/json", {}).get("schema")
            yield f"Answer {status}" + (f": {_link(content)}" if content else "")


def _description(name: str) -> str:
    model = getattr(models, name.split("_")[0], None)
    return paragraphs(getattr(model, "__doc__", None))


def _fields(schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (
            f"`{name}`",
            _link(field),
            "" if name in required or field.get("default") is None else f"`{field['default']}`",
            field.get("description", ""),
        )
        for name, field in schema["properties"].items()
    ]
    return table(("field", "value", "default", "meaning"), rows)


def _link(schema: Mapping[str, Any]) -> str:
    """A schema in words, with links to the models below."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return f"[{name}](#{name.lower()})" if name[0].isupper() and name not in _ENUMS else f"`{name}`"
    if schema.get("type") == "array" and schema.get("items"):
        return f"list of {_link(schema['items'])}"
    if "anyOf" in schema:
        return " or ".join(_link(each) for each in schema["anyOf"])
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        return f"object of {_link(inner)}" if isinstance(inner, dict) and inner else "object"
    return "null" if schema.get("type") == "null" else kind(dict(schema), {})


_ENUMS = frozenset({"MirrorState", "DesiredState", "HTTPValidationError"})


def _references(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "$ref":
                yield value.removeprefix(_REF)
            else:
                yield from _references(value)
    elif isinstance(part, list):
        for each in part:
            yield from _references(each)


def _closure(names: Mapping[str, None], schemas: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    waiting = [name for name in names if "Validation" not in name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [each for each in _references(schemas.get(name, {})) if "Validation" not in each]
    return found
