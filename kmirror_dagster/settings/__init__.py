"""Settings of clusters, mirrors and nodes. One YAML document describes one mirror."""

from kmirror_dagster.settings.clusters import ClusterSettings, SaslMechanismName, SecurityProtocol, parse_address
from kmirror_dagster.settings.filters import FilterSettings, matches_any, name_matcher
from kmirror_dagster.settings.mirrors import MirrorSettings
from kmirror_dagster.settings.nodes import NodeSettings
from kmirror_dagster.settings.policies import FailoverSettings, PolicySettings, StartPolicy

__all__ = [
    "ClusterSettings",
    "FailoverSettings",
    "FilterSettings",
    "MirrorSettings",
    "NodeSettings",
    "PolicySettings",
    "SaslMechanismName",
    "SecurityProtocol",
    "StartPolicy",
    "matches_any",
    "name_matcher",
    "parse_address",
]
