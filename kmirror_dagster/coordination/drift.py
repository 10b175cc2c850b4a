"""Is a mirror's metadata in step? For checks: a refresh's plan is empty, or says what differs."""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from kmirror_dagster.coordination.models import MirrorPlan, PlannedItem


class PlanSource(Protocol):
    """Whoever can be asked for a plan (`coordination.client.NodeClient`)."""

    def plan(self, name: str) -> MirrorPlan: ...


@dataclass(frozen=True)
class Drift:
    """Difference between source and destination that a refresh would level out.

    Attributes:
        changes: what it would do.
        errors: what could not be looked at, "step: name: reason".
    """

    changes: tuple[PlannedItem, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def in_step(self) -> bool:
        """Whether everything was looked at and nothing differs."""
        return not self.changes and not self.errors

    @property
    def summary(self) -> str:
        """One line about it."""
        if self.errors:
            return f"not known: {'; '.join(self.errors)}"
        if not self.changes:
            return "in step"
        counts = Counter(change.step for change in self.changes)
        return f"{len(self.changes)} change(s): {', '.join(f'{step} {n}' for step, n in counts.items())}"


def find_drift(node: PlanSource, mirror: str) -> Drift:
    """Ask a node whether a mirror's topics, configurations, groups and ACLs are in step.

    Raises:
        KmirrorError: when the node cannot be asked.
    """
    planned = node.plan(mirror)
    errors = tuple(
        f"{step.step}: {name}: {reason}"
        for step in planned.status.steps
        for name, reason in step.errors.items()
    )
    return Drift(tuple(planned.changes), errors)
