"""Reference of the Dagster component, from the schema that `dg check yaml` uses."""

from collections.abc import Iterator
from typing import Any

from docs.generators.markdown import head, paragraphs, section, table
from kmirror_dagster.orchestration import KafkaMirrorComponent
from kmirror_dagster.orchestration.scaffolder import ScaffoldParams

_TEXT = """\
`type: kmirror_dagster.KafkaMirrorComponent` in a `defs.yaml`; a project may have several, each with a `prefix` of its
own. `dg check yaml` points at the line of a wrong name or value; `dg check defs` also judges what a schema cannot.
`{{ env.NAME }}` is a variable of the code location. A subclass may override `translator()` for what `translation` does
not reach."""


def page() -> str:
    """The whole page."""
    schema = KafkaMirrorComponent.attributes_schema()
    attributes = schema["properties"]
    return "".join(
        (
            head("Dagster component", "kmirror_dagster/orchestration/component.py", _TEXT),
            section("`attributes`", paragraphs(KafkaMirrorComponent.__doc__), _fields(schema)),
            section("`attributes.mirrors`", "A list; each of:", _fields(attributes["mirrors"]["items"])),
            section("`attributes.node`", _fields(attributes["node"])),
            section("Scaffold", "Options of `dg scaffold defs`, each as `--name`:", _fields(_scaffold())),
        )
    )


def _scaffold() -> dict[str, Any]:
    return ScaffoldParams.model_json_schema()


def _fields(schema: dict[str, Any]) -> str:
    return table(("name", "default", "meaning"), list(_rows(schema)))


def _rows(schema: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    required = set(schema.get("required", ()))
    for name, field in schema["properties"].items():
        default = field.get("default")
        shown = "" if default in ("", None, "__DAGSTER_UNSET_DEFAULT__") else f"`{default}`"
        yield f"`{name}`", "required" if name in required else shown, str(field.get("description", ""))
