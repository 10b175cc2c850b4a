"""The mirror in Dagster: assets, checks, sensors, schedules, jobs, resource."""

from dagster_shared.libraries import DagsterLibraryRegistry

from kmirror_dagster.orchestration.component import KafkaMirrorComponent, MirrorItem, NodeConnection
from kmirror_dagster.orchestration.definitions_builder import build_mirror_definitions
from kmirror_dagster.orchestration.keys import PartitionKey
from kmirror_dagster.orchestration.resources import KMirrorResource
from kmirror_dagster.orchestration.targets import MirrorTarget
from kmirror_dagster.orchestration.translator import KMirrorTranslator, MirrorProps
from kmirror_dagster.version import __version__

__all__ = [
    "KMirrorResource",
    "KMirrorTranslator",
    "KafkaMirrorComponent",
    "MirrorItem",
    "MirrorProps",
    "MirrorTarget",
    "NodeConnection",
    "PartitionKey",
    "build_mirror_definitions",
]

DagsterLibraryRegistry.register("kmirror-dagster", __version__, is_dagster_package=False)
