"""Steps that are stored before anything depends on them, so that anybody can go on with them."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from kmirror_dagster.errors import KmirrorError, StaleEpochError
from kmirror_dagster.records import RecoveryRecord

logger = logging.getLogger(__name__)


class Journal(Protocol):
    """Where the steps are stored."""

    def store(self, record: RecoveryRecord) -> RecoveryRecord:
        """Store a step; the answer has the revision that the next write names.

        Raises:
            StaleEpochError: when somebody else has gone on meanwhile.
        """
        ...


class StepRunner(ABC):
    """Carries out step after step; the reason why one did not end is stored with it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._latest: RecoveryRecord | None = None

    @abstractmethod
    def step(self, record: RecoveryRecord) -> RecoveryRecord:
        """Do the step a record names; the stored record behind it."""

    def run_until(self, record: RecoveryRecord, is_done: Callable[[RecoveryRecord], bool]) -> RecoveryRecord:
        """Do what is left.

        Args:
            record: as stored, or a first one.
            is_done: whether a record needs no further step.

        Raises:
            StaleEpochError: when somebody else goes on with it.
            KmirrorError: when a step does not end; run it again once the reason is gone.
        """
        # a new revision: whoever had it before is refused at the next write
        record = self.store(record.model_copy(update={"error": None}))
        while not is_done(record):
            try:
                record = self.step(record)
            except StaleEpochError:
                raise
            except KmirrorError as error:
                self._note(error)
                raise
        return record

    def store(self, record: RecoveryRecord) -> RecoveryRecord:
        """Store a step."""
        self._latest = self._journal.store(record)
        return self._latest

    def _note(self, error: KmirrorError) -> None:
        """Store why a step did not end; where that cannot be stored, the reason itself is told all the same."""
        if self._latest is None:
            return
        try:
            self.store(self._latest.model_copy(update={"error": str(error)}))
        except KmirrorError as second:
            logger.warning("the reason of the failure could not be stored: %s", second)
