"""How a mirror appears in Dagster: keys, groups, owners, tags. Subclass it to change that."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import dagster as dg

from kmirror_dagster.orchestration.targets import MirrorTarget

# The refresh sensor logs at least one event in ten minutes for a mirror that is well.
FRESH_WITHIN = timedelta(minutes=30)
STALE_AFTER = timedelta(hours=1)


@dataclass(frozen=True)
class MirrorProps:
    """What a translator is given.

    Attributes:
        target: the mirror.
        dagster_name: its name as a Dagster identifier, unique in the code location.
    """

    target: MirrorTarget
    dagster_name: str


class KMirrorTranslator:
    """Maps a mirror to Dagster. Override a method and adapt what super() gives (`replace_attributes`)."""

    def get_source_spec(self, props: MirrorProps) -> dg.AssetSpec:
        """External asset of the source's mirrored topics as a whole."""
        return dg.AssetSpec(
            dg.AssetKey(["kafka_source", f"{props.target.name}-source"]),
            description=f"Topics of the source cluster that mirror `{props.target.name}` copies.",
            group_name=props.dagster_name,
            kinds={"kafka"},
        )

    def get_source_topic_spec(self, props: MirrorProps, topic: str) -> dg.AssetSpec:
        """External asset of one topic of the source."""
        return dg.AssetSpec(
            dg.AssetKey(["kafka_source", props.target.name, topic]),
            description=f"Topic `{topic}` of the source cluster of mirror `{props.target.name}`.",
            group_name=props.dagster_name,
            kinds={"kafka"},
        )

    def get_mirrored_topic_spec(self, props: MirrorProps, topic: str, mirror: dg.AssetSpec) -> dg.AssetSpec:
        """External asset of one topic at the destination, downstream of the mirror."""
        return dg.AssetSpec(
            dg.AssetKey(["kafka_topic", props.target.name, topic]),
            deps=[mirror.key],
            description=f"Topic `{topic}` as mirror `{props.target.name}` keeps it at the destination.",
            group_name=props.dagster_name,
            kinds={"kafka"},
            owners=self.get_owners(props),
        )

    def get_mirror_spec(self, props: MirrorProps, sources: Sequence[dg.AssetSpec]) -> dg.AssetSpec:
        """Asset of the mirror; its partitions definition is set by the builder and cannot be changed here."""
        return dg.AssetSpec(
            dg.AssetKey(["kafka_mirror", props.target.name]),
            deps=[source.key for source in sources],
            description=(
                f"Mirror `{props.target.name}`: one asset partition per mirror partition, `topic/partition`. "
                "Materializing one brings it a step towards its desired state; records flow without any run."
            ),
            group_name=props.dagster_name,
            kinds={"kafka"},
            owners=self.get_owners(props),
            freshness_policy=dg.FreshnessPolicy.time_window(
                fail_window=STALE_AFTER, warn_window=FRESH_WITHIN
            ),
        )

    def get_owners(self, props: MirrorProps) -> list[str]:
        """Owners of the mirror: user@example.com or team:name."""
        return []
