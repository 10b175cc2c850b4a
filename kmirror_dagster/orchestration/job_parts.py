"""What all jobs share: the mirrors they may name, config fields, executor and tags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from kmirror_dagster.orchestration.views import MirrorView

MIRROR_TAG, TOPICS_TAG = "kmirror/mirror", "kmirror/topics"
_MAX_TAG = 250


@dataclass(frozen=True)
class JobParts:
    """Mirrors, by name, and names of what the jobs use."""

    views: Mapping[str, MirrorView]
    resource_key: str
    prefix: str

    def view(self, mirror: str) -> MirrorView:
        """The mirror of that name.

        Raises:
            Failure: when this code location has none of that name.
        """
        if mirror not in self.views:
            known = ", ".join(sorted(self.views))
            raise dg.Failure(
                f"no mirror {mirror!r} in this code location; it has: {known}", allow_retries=False
            )
        return self.views[mirror]

    def confirmed_view(self, mirror: str, confirm: str) -> MirrorView:
        """The mirror of that name, once its name was typed a second time.

        Raises:
            Failure: when the two differ; nothing was changed.
        """
        if confirm != mirror:
            raise dg.Failure(
                f"not confirmed, nothing was changed: set 'confirm' to the mirror's name, {mirror}",
                allow_retries=False,
            )
        return self.view(mirror)

    def job(self, op: dg.OpDefinition, name: str, description: str, priority: str = "10") -> dg.JobDefinition:
        """A job of one op. In one process: a step's own process costs three more seconds."""
        graph = dg.GraphDefinition(name=name, node_defs=[op])
        return graph.to_job(
            name=name,
            description=description,
            executor_def=dg.in_process_executor,
            tags={"dagster/priority": priority, "kmirror/job": name.removeprefix(f"{self.prefix}_")},
        )


def name_run(context: dg.OpExecutionContext, mirrors: Sequence[str], topics: Sequence[str] = ()) -> None:
    """Tag a run with what it is about, so that lists of runs say so and can be filtered by it."""
    tags = {MIRROR_TAG: ", ".join(mirrors)[:_MAX_TAG]}
    if topics:
        tags[TOPICS_TAG] = ", ".join(topics)[:_MAX_TAG]
    context.instance.add_run_tags(context.run_id, tags)


def mirror_field(parts: JobParts) -> dg.Field:
    """Config field `mirror`; it may be left out where there is only one."""
    names = list(parts.views)
    description = f"Mirror, one of: {', '.join(names)}."
    if len(names) == 1:
        return dg.Field(dg.String, default_value=names[0], description=description)
    return dg.Field(dg.String, is_required=True, description=description)


def mirrors_field(parts: JobParts) -> dg.Field:
    """Config field `mirrors`: all of the code location when left out."""
    return dg.Field([str], default_value=list(parts.views), description="Mirrors to do this for.")


def topics_field() -> dg.Field:
    """Config field `topics`."""
    return dg.Field(
        [str],
        default_value=[],
        description="Topics, as RE2 patterns of whole names. Empty: all of the mirror.",
    )


def confirm_field() -> dg.Field:
    """Config field `confirm` of jobs that cannot be undone by another one."""
    return dg.Field(
        dg.String, default_value="", description="Type the mirror's name again: this ends the mirroring."
    )
