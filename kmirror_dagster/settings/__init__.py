"""Settings of clusters, mirrors and nodes. One YAML document describes one mirror."""

from kmirror_dagster.settings.clusters import (
    ClusterSettings,
    LibrdkafkaValue,
    SaslMechanismName,
    SecurityProtocol,
    parse_address,
)
from kmirror_dagster.settings.filters import FilterSettings, matches_any, name_matcher
from kmirror_dagster.settings.loading import (
    load_document,
    load_mirror,
    load_node,
    mirror_from_document,
    node_from_document,
    parse_mirror,
    refuse_literal_secrets,
)
from kmirror_dagster.settings.mirrors import MirrorSettings
from kmirror_dagster.settings.nodes import NodeSettings
from kmirror_dagster.settings.policies import FailoverSettings, PolicySettings, StartPolicy
from kmirror_dagster.settings.schema_registry import SchemaRegistrySettings

__all__ = [
    "ClusterSettings",
    "FailoverSettings",
    "FilterSettings",
    "LibrdkafkaValue",
    "MirrorSettings",
    "NodeSettings",
    "PolicySettings",
    "SaslMechanismName",
    "SchemaRegistrySettings",
    "SecurityProtocol",
    "StartPolicy",
    "load_document",
    "load_mirror",
    "load_node",
    "matches_any",
    "mirror_from_document",
    "name_matcher",
    "node_from_document",
    "parse_address",
    "parse_mirror",
    "refuse_literal_secrets",
]
