"""One refresh of a mirror between clusters in memory, for the steps that are tried alone."""

import random
from typing import Any

from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.metadata.context import RefreshContext
from kmirror_dagster.metadata.memory import Memory
from kmirror_dagster.metadata.steps import StepReports
from kmirror_dagster.settings import MirrorSettings


def step_context(
    source: Any, destination: Any, *, policies: dict[str, object] | None = None, **more: Any
) -> RefreshContext:
    """A refresh under way; `source` and `destination` have the calls of `ClusterAdmin` that the step makes."""
    settings = MirrorSettings.model_validate(
        {
            "mirror": "m",
            "source": {"bootstrap.servers": "source:9092"},
            "destination": {"bootstrap.servers": "destination:9092"},
            "policies": policies or {},
        }
    )
    fields: dict[str, Any] = {"known": {}, "mirroring": {}, "memory": Memory(), "dry_run": False} | more
    return RefreshContext(
        settings=settings,
        source=source,
        destination=destination,
        deadline=Deadline(60),
        clock=lambda: 0.0,
        rng=random.Random(1),
        reports=StepReports(),
        **fields,
    )
