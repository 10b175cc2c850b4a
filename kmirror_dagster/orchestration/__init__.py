"""The mirror in Dagster: assets, checks, sensors, schedules, jobs, resource."""
