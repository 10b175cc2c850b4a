"""The mirrors a code location shows: what must be known of them while definitions load, without network."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from kmirror_dagster.errors import SettingsError
from kmirror_dagster.orchestration.keys import PartitionKey
from kmirror_dagster.settings import MirrorSettings, PolicySettings, load_document

MirrorLike: TypeAlias = "MirrorTarget | MirrorSettings | Path | str"


@dataclass(frozen=True)
class MirrorTarget:
    """One mirror to show.

    Attributes:
        name: the mirror's name, as the nodes know it.
        policies: limits of the checks and of the failover sensor.
        source_topics: topics to show one by one as external assets upstream of the mirror; besides them there
            is always one for the source as a whole: which topics it has is not known while definitions load.
        document: path of the settings document, None when only the name is known.
    """

    name: str
    policies: PolicySettings = field(default_factory=PolicySettings)
    source_topics: Sequence[str] = ()
    document: Path | None = None

    def __post_init__(self) -> None:
        # a mirror's name obeys the same rule as a topic's
        for name in (self.name, *self.source_topics):
            PartitionKey(name, 0)


def mirror_target(mirror: MirrorLike) -> MirrorTarget:
    """Make a target of a mirror's name, its settings, or the path of its document.

    A path is read, nothing else: `${ENV}` references stay unresolved, since only nodes need what they name.

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


def _from_document(path: Path) -> MirrorTarget:
    document: dict[str, Any] = load_document(path)
    name = document.get("mirror")
    if not isinstance(name, str):
        raise SettingsError(f"{path}: no mirror named; add 'mirror: NAME'")
    try:
        policies = PolicySettings.model_validate(document.get("policies") or {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("policies", *first["loc"]))
        raise SettingsError(f"{path}: {where}: {first['msg']}") from error
    return MirrorTarget(name, policies, document=path)
