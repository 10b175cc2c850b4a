"""Mirror Kafka clusters, same record at the same offset, steered in Dagster."""

from importlib import import_module
from typing import TYPE_CHECKING

from kmirror_dagster.version import __version__ as __version__

if TYPE_CHECKING:
    from kmirror_dagster.orchestration import KafkaMirrorComponent as KafkaMirrorComponent
    from kmirror_dagster.orchestration import KMirrorResource as KMirrorResource
    from kmirror_dagster.orchestration import KMirrorTranslator as KMirrorTranslator
    from kmirror_dagster.orchestration import MirrorProps as MirrorProps
    from kmirror_dagster.orchestration import MirrorTarget as MirrorTarget
    from kmirror_dagster.orchestration import build_mirror_definitions as build_mirror_definitions

# Loaded when asked for: nodes and the command line import this package too and need no Dagster.
_FROM_ORCHESTRATION = (
    "KMirrorResource",
    "KMirrorTranslator",
    "KafkaMirrorComponent",
    "MirrorProps",
    "MirrorTarget",
    "build_mirror_definitions",
)


def __getattr__(name: str) -> object:
    if name in _FROM_ORCHESTRATION:
        return getattr(import_module("kmirror_dagster.orchestration"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_FROM_ORCHESTRATION]
