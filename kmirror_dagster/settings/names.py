"""Names of settings: which are known, which hold secrets, what was meant by another one."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from pydantic import SecretStr

from kmirror_dagster.settings.base import Settings
from kmirror_dagster.settings.clusters import ClusterSettings
from kmirror_dagster.settings.documents import SettingPath
from kmirror_dagster.settings.mirrors import MirrorSettings
from kmirror_dagster.settings.nodes import NodeSettings
from kmirror_dagster.settings.policies import StartPolicy
from kmirror_dagster.settings.schema_registry import SchemaRegistrySettings

_MAX_LISTED = 12

# Names that other clients use for the same thing, or that have no counterpart on purpose.
_FOREIGN_NAMES: Mapping[str, str] = {
    "sasl.mechanisms": "did you mean 'sasl.mechanism'?",
    "sasl.jaas.config": "use sasl.username and sasl.password",
    "sasl.login.callback.handler.class": "use sasl.oauthbearer.token.endpoint.url",
    "sasl.oauthbearer.client.credentials.client.id": "use sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "use sasl.oauthbearer.client.secret",
    "ssl.truststore.location": "use ssl.ca.location with a PEM file",
    "ssl.truststore.password": "use ssl.ca.location with a PEM file, which needs no password",
    "ssl.keystore.location": "use ssl.certificate.location and ssl.key.location with PEM files",
    "ssl.keystore.password": "use ssl.key.password with PEM files",
    "enable.ssl.certificate.verification": "TLS is always verified: name the authority in ssl.ca.location",
    "socket.timeout.ms": "use request.timeout.ms",
    "topics": "use topics.include under 'filters'",
    "groups": "use groups.include under 'filters'",
    "name": "use mirror",
}


@dataclass(frozen=True)
class NameProblem:
    """A name that a section does not know, or knows under two spellings at once."""

    path: SettingPath
    message: str


def documented_name(model: type[Settings], attribute: str) -> str:
    """Name of a field as it is written in documents."""
    return model.model_fields[attribute].alias or attribute


def section_of(model: type[Settings], name: str) -> type[Settings] | None:
    """Model of the section that a documented or attribute name opens; None for a plain setting."""
    for attribute, field in model.model_fields.items():
        if name in (attribute, field.alias):
            annotation = field.annotation
            if isinstance(annotation, type) and issubclass(annotation, Settings):
                return None if annotation is StartPolicy else annotation
    return None


def is_secret(model: type[Settings], path: SettingPath) -> bool:
    """Tell whether the setting at a path holds a secret."""
    section: type[Settings] | None = model
    for part in path:
        if section is None or not isinstance(part, str):
            return False
        if part in secret_names(section):
            return True
        section = section_of(section, part)
    return False


def secret_names(model: type[Settings]) -> frozenset[str]:
    """Names, in both spellings, of the secrets of one section."""
    names: set[str] = set()
    for attribute, field in model.model_fields.items():
        if field.annotation is SecretStr or SecretStr in get_args(field.annotation):
            names |= {attribute, field.alias or attribute}
    return frozenset(names)


ALL_SECRET_NAMES = (
    secret_names(ClusterSettings) | secret_names(NodeSettings) | secret_names(SchemaRegistrySettings)
)


def name_problems(
    values: Mapping[str, Any], model: type[Settings], path: SettingPath = ()
) -> Iterator[NameProblem]:
    """Find names that are unknown, or given in both spellings, in a section and those below it."""
    spelling: dict[str, str] = {}
    for attribute, field in model.model_fields.items():
        spelling[attribute] = attribute
        spelling[field.alias or attribute] = attribute
    seen: dict[str, str] = {}
    for key, value in values.items():
        attribute = spelling.get(key)
        if attribute is None:
            yield NameProblem((*path, key), f"unknown setting; {_advice(key, model)}")
            continue
        if attribute in seen:
            yield NameProblem((*path, key), f"given twice, also as {seen[attribute]}; remove one")
        seen[attribute] = key
        section = section_of(model, key)
        if section is not None and isinstance(value, dict):
            yield from name_problems(cast("dict[str, Any]", value), section, (*path, key))


def _advice(key: str, model: type[Settings]) -> str:
    known = [documented_name(model, attribute) for attribute in model.model_fields]
    plain = key.lower().replace("_", ".")
    by_plain = {name.replace("_", "."): name for name in known}
    if plain not in by_plain:
        place = _place_of(plain, model)
        if place is not None:
            return f"it belongs under {place}"
        if plain in _FOREIGN_NAMES:
            return _FOREIGN_NAMES[plain]
    close = difflib.get_close_matches(plain, by_plain, n=1, cutoff=0.6)
    if close:
        return f"did you mean {by_plain[close[0]]!r}?"
    if len(known) <= _MAX_LISTED:
        return f"known here: {', '.join(known)}"
    return "remove it (names here are Kafka's client properties)" if model is ClusterSettings else "remove it"


def _place_of(plain: str, model: type[Settings]) -> str | None:
    """Section of a mirror in which a name is known, when `model` is not that section."""
    for section_name in ("source", "filters", "policies", "policies.failover"):
        section: type[Settings] | None = MirrorSettings
        for part in section_name.split("."):
            section = section_of(section, part) if section else None
        if section is None or section is model:
            continue
        if plain in {documented_name(section, name).replace("_", ".") for name in section.model_fields}:
            if section is ClusterSettings:
                return "'destination'" if model is NodeSettings else "'source' or 'destination'"
            return None if model is NodeSettings else f"'{section_name}'"
    return None
