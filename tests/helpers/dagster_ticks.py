"""What Dagster's daemon does with a sensor, in a test's own process."""

from dataclasses import dataclass, field

import dagster as dg

from kmirror_dagster.orchestration import KMirrorResource, build_mirror_definitions
from kmirror_dagster.orchestration.targets import MirrorLike


@dataclass
class Ticker:
    """Evaluates sensors one tick after the other, keeping their cursors and storing their events."""

    instance: dg.DagsterInstance
    defs: dg.Definitions
    resource: KMirrorResource
    cursors: dict[str, str | None] = field(default_factory=dict)

    def tick(self, name: str) -> "Tick":
        """Evaluate one tick of a sensor and store what it returned, in the daemon's order."""
        with dg.build_sensor_context(
            instance=self.instance,
            cursor=self.cursors.get(name),
            definitions=self.defs,
            sensor_name=name,
            resources={"kmirror": self.resource},
        ) as context:
            data = self.defs.get_repository_def().get_sensor_def(name).evaluate_tick(context)
        for event in data.asset_events:
            self.instance.report_runless_asset_event(event)
        self.cursors[name] = data.cursor
        return Tick(data.skip_message, list(data.run_requests or []), list(data.asset_events))

    def launch(self, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
        """Run what a sensor asked for."""
        assert request.job_name is not None
        job = self.defs.resolve_job_def(request.job_name)
        return job.execute_in_process(
            run_config=request.run_config,
            instance=self.instance,
            tags={**request.tags, "dagster/run_key": request.run_key or ""},
            raise_on_error=False,
        )

    def run(self, job: str, config: dict[str, object] | None = None) -> dg.ExecuteInProcessResult:
        """Run a job as from the launchpad."""
        return self.defs.resolve_job_def(job).execute_in_process(
            run_config={"ops": {f"{job}_op": {"config": config or {}}}},
            instance=self.instance,
            raise_on_error=False,
        )


@dataclass
class Tick:
    """What a tick gave."""

    seen: str | None
    runs: list[dg.RunRequest]
    events: list[object]

    def of(self, kind: type) -> list:
        """Events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def ticker(
    instance: dg.DagsterInstance, resource: KMirrorResource, *mirrors: MirrorLike, **options: object
) -> Ticker:
    """A ticker over the definitions of these mirrors ("orders" when none is named)."""
    defs = build_mirror_definitions(mirrors=list(mirrors) or ["orders"], resource=resource, **options)
    return Ticker(instance, defs, resource)


def failure_text(result: dg.ExecuteInProcessResult) -> str:
    """Description of the failure that ended a run's step."""
    for event in result.all_events:
        if event.is_step_failure:
            data = event.step_failure_data
            user = data.user_failure_data
            return str(user.description) if user else str(data.error)
    return ""
