"""The mirrors a code location shows: what must be known of them while definitions load, without network."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from kmirror_dagster.errors import UsageError
from kmirror_dagster.orchestration.keys import PartitionKey
from kmirror_dagster.settings import MirrorSettings, PolicySettings, load_document
from kmirror_dagster.settings.documents import Document
from kmirror_dagster.settings.loading import check_document
from kmirror_dagster.settings.references import resolve

MirrorLike: TypeAlias = "MirrorTarget | MirrorSettings | Path | str"

# each is an asset of its own in every process that imports the code, and one request at every refresh
MAX_SHOWN_TOPICS = 200


@dataclass(frozen=True)
class MirrorTarget:
    """One mirror to show.

    Attributes:
        name: the mirror's name, as the nodes know it.
        policies: limits of the checks and of the failover sensor.
        source_topics: topics to show one by one as external assets upstream of the mirror; besides them there
            is always one for the source as a whole: which topics it has is not known while definitions load.
        mirrored_topics: topics to show one by one as assets downstream of the mirror, for their readers'
            assets to depend on.
        document: path of the settings document, None when there is no file.
        settings: the settings document, `${ENV}` references unresolved; None when only the name is known.
    """

    name: str
    policies: PolicySettings = field(default_factory=PolicySettings)
    source_topics: Sequence[str] = ()
    mirrored_topics: Sequence[str] = ()
    document: Path | None = None
    settings: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)

    def __post_init__(self) -> None:
        # a mirror's name obeys the same rule as a topic's
        for name in (self.name, *self.source_topics, *self.mirrored_topics):
            PartitionKey(name, 0)
        if len(self.mirrored_topics) > MAX_SHOWN_TOPICS:
            raise UsageError(
                f"mirror {self.name}: {len(self.mirrored_topics)} mirrored_topics; show at most "
                f"{MAX_SHOWN_TOPICS} one by one"
            )

    def showing(self, source_topics: Sequence[str], mirrored_topics: Sequence[str]) -> "MirrorTarget":
        """The same mirror with these topics shown one by one."""
        return replace(self, source_topics=tuple(source_topics), mirrored_topics=tuple(mirrored_topics))


def mirror_target(mirror: MirrorLike) -> MirrorTarget:
    """Make a target of a mirror's name, its settings, or the path of its document.

    A path is read, nothing else: `${ENV}` references stay unresolved, since only nodes need what they name; those in
    `policies` are resolved, for the limits of checks.

    Raises:
        SettingsError: when the document cannot be read or names no mirror.
    """
    if isinstance(mirror, MirrorTarget):
        return mirror
    if isinstance(mirror, MirrorSettings):
        return MirrorTarget(mirror.mirror, mirror.policies)
    if isinstance(mirror, Path) or mirror.endswith((".yaml", ".yml")):
        return _from_document(Path(mirror))
    return MirrorTarget(mirror)


def target_of_document(document: Document) -> MirrorTarget:
    """Make a target of a settings document that stands somewhere else, such as in `defs.yaml`.

    Raises:
        SettingsError: one line with place, setting and remedy.
    """
    check_document(document)
    return MirrorTarget(
        name=str(document.values["mirror"]), policies=_policies(document), settings=document.values
    )


def _from_document(path: Path) -> MirrorTarget:
    values: dict[str, Any] = load_document(path)
    target = target_of_document(Document(str(path), values))
    return replace(target, document=path)


def _policies(document: Document) -> PolicySettings:
    """Limits of checks and sensors; they are the only settings whose references are resolved here."""
    written = document.values.get("policies") or {}
    values, unresolved = resolve(written, os.environ, ("policies",))
    for path, message in unresolved:
        raise document.error(path, f"{message} (checks need it in the code location as well)")
    try:
        return PolicySettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise document.error(("policies", *first["loc"]), first["msg"]) from None
