"""One mirror as its Dagster definitions share it: target, keys, specs, names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import dagster as dg

from kmirror_dagster.orchestration.targets import MirrorTarget


@dataclass(frozen=True)
class MirrorView:
    """Everything the definitions of one mirror have in common.

    Attributes:
        name: the mirror's name as a Dagster identifier.
        partitions_name: name of the dynamic partitions definition that lists its mirror partitions.
        resource_key: key of the `KMirrorResource` to talk through.
        prefix: begins the names of jobs, pools and sensors that all mirrors of one builder call share.
        topics: assets of the mirrored topics that are shown one by one.
    """

    target: MirrorTarget
    name: str
    spec: dg.AssetSpec
    partitions_name: str
    resource_key: str
    prefix: str
    topics: Mapping[str, dg.AssetSpec] = field(default_factory=dict[str, dg.AssetSpec], hash=False)

    @property
    def mirror(self) -> str:
        """The mirror's own name."""
        return self.target.name

    @property
    def asset_key(self) -> dg.AssetKey:
        """Key of the mirror's asset."""
        return self.spec.key
