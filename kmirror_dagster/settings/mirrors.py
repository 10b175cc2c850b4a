"""One mirror: source, destination, filters and policies. One YAML document describes one."""

import re

from pydantic import Field, field_validator

from kmirror_dagster.settings.base import Settings, refused
from kmirror_dagster.settings.clusters import ClusterSettings
from kmirror_dagster.settings.filters import FilterSettings
from kmirror_dagster.settings.policies import PolicySettings
from kmirror_dagster.settings.schema_registry import SchemaRegistrySettings

# Kafka's rule for topic names: a mirror's name becomes part of ids, keys and paths.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


class MirrorSettings(Settings):
    """Everything there is to say about one mirror."""

    mirror: str = Field(description="Name: letters, digits, '.', '_' and '-', at most 249.")
    source: ClusterSettings = Field(description="Cluster to copy from.")
    destination: ClusterSettings = Field(description="Cluster to copy to.")
    filters: FilterSettings = Field(default_factory=FilterSettings, description="What is mirrored.")
    policies: PolicySettings = Field(default_factory=PolicySettings, description="Choices.")
    schema_registry: SchemaRegistrySettings = Field(
        default_factory=SchemaRegistrySettings, description="The destination's schema registry, for checks."
    )

    @field_validator("filters", "policies", "schema_registry", mode="before")
    @classmethod
    def _empty_section(cls, value: object) -> object:
        return {} if value is None else value  # all of its settings commented out

    @field_validator("mirror")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value) or value in (".", ".."):
            raise refused("expected 1 to 249 letters, digits, '.', '_' or '-'")
        return value
