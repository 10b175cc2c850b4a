"""Keeping the steps of a refresh apart: what each did, how long it took, and what went wrong in it."""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.metadata.outcome import Step, StepStatus

_log = logging.getLogger(__name__)

# Error under this name is the step's own, not a topic's or a group's.
WHOLE_STEP = "*"
_MAX_NOTES = 50


@dataclass
class StepReport:
    """What one step has to tell so far."""

    step: Step
    changes: int = 0
    seconds: float = 0.0
    errors: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])

    def status(self) -> StepStatus:
        """The report as it is stored and shown; a long list of notes is cut, with the number left out."""
        notes = self.notes[:_MAX_NOTES]
        if len(self.notes) > _MAX_NOTES:
            notes.append(f"and {len(self.notes) - _MAX_NOTES} more")
        return StepStatus(
            step=str(self.step),
            ok=not self.errors,
            changes=self.changes,
            duration_ms=round(self.seconds * 1000),
            errors=dict(sorted(self.errors.items())),
            notes=notes,
        )


class StepReports:
    """Reports of all steps of one refresh, in the order of `Step`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports = {step: StepReport(step) for step in Step}

    def __getitem__(self, step: Step) -> StepReport:
        return self._reports[step]

    @contextmanager
    def running(self, step: Step) -> Generator[StepReport, None, None]:
        """Run a part of a step: whatever is raised inside stays in its report."""
        report = self._reports[step]
        began = self._clock()
        try:
            yield report
        except KmirrorError as error:
            report.errors[WHOLE_STEP] = str(error)
        except Exception as error:  # noqa: BLE001
            # a fault of ours in one step must not keep the other steps, or the next refresh, from running
            _log.exception("step %s of a metadata refresh failed", step)
            report.errors[WHOLE_STEP] = f"internal error, see the node's log: {type(error).__name__}: {error}"
        finally:
            report.seconds += self._clock() - began

    def statuses(self) -> list[StepStatus]:
        """All reports."""
        return [report.status() for report in self._reports.values()]
