"""Reference of what the builder puts into a code location."""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from docs.generators.markdown import head, section, table
from kmirror_dagster.orchestration import KMirrorResource, build_mirror_definitions

_MIRROR = "orders"
_TEXT = f"""\
What `build_mirror_definitions` (and the component, which calls it) makes of one mirror, here `{_MIRROR}`. Names of jobs
begin with `prefix`, names of sensors with the mirror's name."""


def page() -> str:
    """The whole page."""
    resource = KMirrorResource()
    defs = build_mirror_definitions(mirrors=[_MIRROR], resource=resource)
    return "".join(
        (
            head("Dagster definitions", "kmirror_dagster/orchestration", _TEXT),
            section("Assets", _assets(defs)),
            section("Asset checks", _checks(defs)),
            section("Sensors", _sensors(defs)),
            section("Schedules", _schedules(defs)),
            section("Jobs", *_jobs(defs)),
            section("Resource", "`KMirrorResource`:", _resource()),
        )
    )


def _assets(defs: dg.Definitions) -> str:
    rows = [
        (f"`{spec.key.to_user_string()}`", _first(spec.description))
        for spec in defs.resolve_all_asset_specs()
    ]
    return table(("key", "what it is"), sorted(rows))


def _checks(defs: dg.Definitions) -> str:
    specs = [spec for checks in defs.asset_checks or () for spec in _specs(checks)]
    return table(("check", "passes when"), [(f"`{spec.name}`", _first(spec.description)) for spec in specs])


def _specs(checks: Any) -> Iterator[dg.AssetCheckSpec]:
    yield from checks.check_specs


def _sensors(defs: dg.Definitions) -> str:
    rows = [
        (
            f"`{sensor.name}`",
            str(sensor.minimum_interval_seconds or ""),
            sensor.default_status.value.lower(),
            _first(sensor.description),
        )
        for sensor in defs.sensors or ()
    ]
    return table(("sensor", "every, seconds", "at first", "what it does"), rows)


def _schedules(defs: dg.Definitions) -> str:
    rows = [
        (
            f"`{schedule.name}`",
            f"`{getattr(schedule, 'cron_schedule', '')}`",
            f"`{schedule.job_name if isinstance(schedule, dg.ScheduleDefinition) else schedule.name}`",
            schedule.default_status.value.lower() if isinstance(schedule, dg.ScheduleDefinition) else "",
        )
        for schedule in defs.schedules or ()
    ]
    return table(("schedule", "cron", "job", "at first"), rows)


def _jobs(defs: dg.Definitions) -> Iterator[str]:
    jobs = [job for job in defs.jobs or () if isinstance(job, dg.JobDefinition)]
    for job in sorted(jobs, key=lambda job: job.name):
        yield f"### `{job.name}`"
        yield _first(job.description)
        (op,) = job.graph.node_defs
        fields = op.config_schema.as_field().config_type.fields if isinstance(op, dg.OpDefinition) else {}
        rows = [
            (
                f"`{name}`",
                "required" if field.is_required else _default(field.default_value),
                field.description or "",
            )
            for name, field in fields.items()
        ]
        yield table(("field", "default", "meaning"), rows) if rows else ""


def _default(value: object) -> str:
    return f"`{value}`" if value not in ("", [], None) else ""


def _resource() -> str:
    rows = [
        (f"`{name}`", f"`{field.default}`" if field.default else "", field.description or "")
        for name, field in KMirrorResource.model_fields.items()
    ]
    return table(("field", "default", "meaning"), rows)


def _first(text: str | None) -> str:
    """First paragraph of a description."""
    return (text or "").strip().split("\n\n")[0]
