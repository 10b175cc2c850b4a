"""The Dagster component: mirrors in `defs.yaml`, checked by `dg check`, scaffolded by `dg scaffold defs`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import dagster as dg
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import BaseModel, ConfigDict, Field

from kmirror_dagster.errors import SettingsError
from kmirror_dagster.orchestration.component_schema import Schema, settings_schema, without_alternatives
from kmirror_dagster.orchestration.definitions_builder import DEFAULT_PREFIX, build_mirror_definitions
from kmirror_dagster.orchestration.refresh_sensor import DEFAULT_HEARTBEAT_S
from kmirror_dagster.orchestration.resources import KMirrorResource
from kmirror_dagster.orchestration.scaffolder import KafkaMirrorScaffolder
from kmirror_dagster.orchestration.targets import MirrorTarget, mirror_target, target_of_document
from kmirror_dagster.orchestration.translator import KMirrorTranslator, MirrorProps
from kmirror_dagster.settings.documents import Document, SettingPath


def _document(context: dg.ResolutionContext, value: object) -> Document | None:
    """Settings as written, with the line of each, so that an error can say where it is."""
    if value is None:
        return None
    values = cast("dict[str, Any]", context.resolve_value(value, as_type=dict))
    tree = context.source_position_tree
    for part in context.path:
        tree = tree.children.get(part) if tree else None
    if tree is None:
        return Document(f"mirror {values.get('mirror')!r}", values)
    lines: dict[SettingPath, int] = {}
    _collect_lines(tree, (), lines)
    return Document(str(tree.position.filename), values, lines)


def _collect_lines(tree: Any, path: SettingPath, lines: dict[SettingPath, int]) -> None:
    for part, child in tree.children.items():
        lines[(*path, part)] = child.position.start.line
        _collect_lines(child, (*path, part), lines)


class MirrorItem(dg.Resolvable, dg.Model):
    """One mirror: by its settings here, by a file with them, or by the name that the nodes know it by."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    settings: Annotated[
        Document | None,
        dg.Resolver(
            _document,
            model_field_type=dict,
            description="The mirror's settings: mirror, source, destination, filters, policies. "
            "${NAME} stands for an environment variable of the nodes.",
        ),
    ] = None
    document: Annotated[
        str | None,
        dg.Resolver.default(
            description="Path of a file with the mirror's settings, relative to this one's directory."
        ),
    ] = None
    name: Annotated[
        str | None,
        dg.Resolver.default(description="Name of a mirror that was created on the nodes by other means."),
    ] = None
    source_topics: Annotated[
        list[str],
        dg.Resolver.default(
            description="Topics to show one by one as assets upstream of the mirror, at the source."
        ),
    ] = Field(default_factory=list)
    mirrored_topics: Annotated[
        list[str],
        dg.Resolver.default(
            description="Topics to show one by one as assets downstream of the mirror, at the destination, each with "
            "a check that it is mirrored and fresh. Assets of their readers can depend on them."
        ),
    ] = Field(default_factory=list)

    def target(self, directory: Path) -> MirrorTarget:
        """What the builder needs of it.

        Raises:
            SettingsError: when not exactly one of the three is given, or the settings are refused.
        """
        given = [self.settings, self.document, self.name]
        if sum(each is not None for each in given) != 1:
            raise SettingsError(
                f"{directory}: a mirror needs exactly one of settings, document and name; "
                f"given: {', '.join(self._given()) or 'none'}"
            )
        if self.settings is not None:
            target = target_of_document(self.settings)
        elif self.document is not None:
            target = mirror_target(directory / self.document)
        else:
            target = mirror_target(MirrorTarget(str(self.name)))
        return target.showing(self.source_topics, self.mirrored_topics)

    def _given(self) -> list[str]:
        return [name for name in ("settings", "document", "name") if getattr(self, name) is not None]


class NodeConnection(dg.Resolvable, dg.Model):
    """How Dagster reaches the nodes. Without any of it: KMIRROR_ENDPOINT, else this machine's node."""

    mode: Annotated[
        Literal["attach", "local"],
        dg.Resolver.default(
            description="attach: nodes have their own supervisor. local: one is started here when none runs."
        ),
    ] = "attach"
    endpoint: Annotated[
        str,
        dg.Resolver.default(
            description="Base URL of a node, or several with commas between them; each will do."
        ),
    ] = ""
    token_variable: Annotated[
        str,
        dg.Resolver.default(
            description="Environment variable with the API token (never written here); KMIRROR_TOKEN when not set."
        ),
    ] = ""
    state_dir: Annotated[
        str,
        dg.Resolver.default(
            description="State directory of a node on this machine, relative to this file's directory."
        ),
    ] = ""
    node_config: Annotated[
        str,
        dg.Resolver.default(
            description="The node's settings file, relative to this file's directory; needed in local mode."
        ),
    ] = ""

    def resource(self, directory: Path) -> KMirrorResource:
        """The resource of these settings."""
        return KMirrorResource(
            mode=self.mode,
            endpoint=self.endpoint,
            token=dg.EnvVar(self.token_variable) if self.token_variable else "",
            state_dir=str(directory / self.state_dir) if self.state_dir else "",
            node_config=str(directory / self.node_config) if self.node_config else "",
        )


_TRANSLATION = TranslationFnResolver[MirrorProps](
    lambda props: {"mirror": props.target.name, "dagster_name": props.dagster_name}
)
_TRANSLATION.description = (
    "Changes the mirrors' assets: key, group_name, owners, tags, metadata, automation_condition and the like. "
    "{{ mirror }} is the mirror's name."
)


@dg.scaffold_with(KafkaMirrorScaffolder)
class KafkaMirrorComponent(dg.Component, dg.Resolvable, dg.Model):
    """Mirrors of Kafka clusters: same record at the same offset.

    Each mirror is an asset with one partition per mirror partition (`topic/partition`), with checks, sensors that
    keep it current, and jobs that start, pause, resume, stop, verify it and fail it over. Records flow between
    the clusters whether or not Dagster runs; nodes copy them.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    mirrors: Sequence[MirrorItem] = Field(description="The mirrors to show and steer, of one destination.")
    node: Annotated[
        NodeConnection, dg.Resolver.default(description="How to reach the nodes that do the copying.")
    ] = Field(default_factory=NodeConnection)
    prefix: Annotated[
        str,
        dg.Resolver.default(
            description="Begins the names of jobs, pools, node keeper and resource: letters, digits and _. "
            "Each component of a project needs another one."
        ),
    ] = DEFAULT_PREFIX
    heartbeat_seconds: Annotated[
        int,
        dg.Resolver.default(
            description="A mirror that does not change logs its figures this often, seconds."
        ),
    ] = DEFAULT_HEARTBEAT_S
    translation: Annotated[TranslationFn[MirrorProps] | None, _TRANSLATION] = None

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """What `dg list components` and Dagster's pages say of the component."""
        return dg.ComponentTypeSpec(
            description="Mirrors Kafka clusters, same record at the same offset.",
            tags=["kafka", "replication", "disaster-recovery"],
        )

    @classmethod
    def get_model_cls(cls) -> type[BaseModel] | None:
        """Model of the attributes; its schema is the one that `dg check yaml` uses."""
        return _precise(cls.model())

    @classmethod
    def attributes_schema(cls) -> Schema:
        """JSON schema of the attributes, with a description of each."""
        return _precise(cls.model()).model_json_schema()

    def translator(self) -> KMirrorTranslator:
        """Maps mirrors to assets; override it to do in Python what `translation` does not reach."""
        return _YamlTranslator(self.translation) if self.translation else KMirrorTranslator()

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the definitions; nothing is asked of a node or a cluster."""
        return build_mirror_definitions(
            mirrors=[item.target(context.path) for item in self.mirrors],
            resource=self.node.resource(context.path),
            translator=self.translator(),
            prefix=self.prefix,
            heartbeat_seconds=self.heartbeat_seconds,
        )


class _YamlTranslator(KMirrorTranslator):
    """The translator, with what `translation` says put on the mirror's asset."""

    def __init__(self, translation: Callable[[dg.AssetSpec, MirrorProps], dg.AssetSpec]) -> None:
        self._translation = translation

    def get_mirror_spec(self, props: MirrorProps, sources: Sequence[dg.AssetSpec]) -> dg.AssetSpec:
        return self._translation(super().get_mirror_spec(props, sources), props)


def _precise(derived: type[BaseModel]) -> type[BaseModel]:
    """The derived model with a schema whose errors name the setting at fault."""

    class PreciseModel(derived):
        @classmethod
        def model_json_schema(cls, *args: Any, **kwargs: Any) -> Schema:
            schema = without_alternatives(derived.model_json_schema(*args, **kwargs))
            item: Mapping[str, Schema] = schema["properties"]["mirrors"]["items"]["properties"]
            described = {"description": item["settings"]["description"]}
            item["settings"].clear()
            item["settings"].update({**settings_schema(), **described})
            return schema

    PreciseModel.__name__ = derived.__name__
    return PreciseModel
