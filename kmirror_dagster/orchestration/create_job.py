"""Create job: the mirrors of a code location made known to the nodes, as `kmirror create` does."""

import dagster as dg
from pydantic import BaseModel, ConfigDict

from kmirror_dagster.coordination.models import CreateMirror
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.orchestration.job_parts import JobParts, mirrors_field, name_run
from kmirror_dagster.orchestration.resources import resource_of

# The node asks both clusters for their ids first, each with its own connection timeouts.
_CREATE_BUDGET_S = 120.0


class CreateConfig(BaseModel):
    """Configuration of a create run; the fields' texts are in the launchpad."""

    model_config = ConfigDict(frozen=True)
    mirrors: list[str]
    replace: bool


def create_job(parts: JobParts) -> dg.JobDefinition:
    """Build the job that creates mirrors from the settings in the code location."""
    name = f"{parts.prefix}_create"

    @dg.op(
        name=f"{name}_op",
        required_resource_keys={parts.resource_key},
        config_schema={
            "mirrors": mirrors_field(parts),
            "replace": dg.Field(
                dg.Bool,
                default_value=False,
                description="Change the settings of a mirror of that name; otherwise one that differs is refused.",
            ),
        },
        out=dg.Out(dg.Nothing),
        pool=parts.prefix,
    )
    def create(context: dg.OpExecutionContext) -> dg.Output[None]:
        config = CreateConfig.model_validate(context.op_config)
        name_run(context, config.mirrors)
        problems: list[str] = []
        with resource_of(context, parts.resource_key).connect(budget_s=_CREATE_BUDGET_S) as node:
            for mirror in config.mirrors:
                settings = parts.view(mirror).target.settings
                if settings is None:
                    problems.append(f"{mirror}: only its name is known here; give its settings or their file")
                    continue
                try:
                    made = node.create(CreateMirror(document=dict(settings), replace=config.replace))
                    context.log.info(f"{mirror}: {made.source_cluster_id} to {made.destination_cluster_id}")
                except KmirrorError as error:  # the other mirrors have their turn all the same
                    problems.append(f"{mirror}: {error}")
        if problems:
            raise dg.Failure("; ".join(problems), allow_retries=False)
        return dg.Output(None)

    return parts.job(
        create,
        name,
        "Create the mirrors on the nodes from the settings in this code location; twice is harmless.",
    )
