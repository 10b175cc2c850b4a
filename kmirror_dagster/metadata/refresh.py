"""One pass of the metadata sync of one mirror: everything but the records is kept equal."""

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl, ClusterDescription, Partition, Quota
from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.metadata import acl_steps, position_steps, quota_steps, topic_steps
from kmirror_dagster.metadata.context import RefreshContext
from kmirror_dagster.metadata.identity import destination_problem, identity_problem
from kmirror_dagster.metadata.memory import Memory
from kmirror_dagster.metadata.offsets import OffsetMaps, current_maps, with_translated_starts
from kmirror_dagster.metadata.outcome import (
    RefreshOutcome,
    RefreshPlan,
    RefreshStatus,
    Step,
    TopicIntent,
)
from kmirror_dagster.metadata.reader import read_destination, read_source
from kmirror_dagster.metadata.steps import WHOLE_STEP, StepReports
from kmirror_dagster.metadata.topics import unchanged_intent
from kmirror_dagster.records import TopicRecord
from kmirror_dagster.settings import MirrorSettings


class Refresher:
    """Refreshes one mirror on the node that leads it; blocking, one refresh or plan at a time, `close`
    from any thread.

    Args:
        settings: the mirror.
        source: admin client of the source; closed by `close`.
        destination: admin client of the destination; closed by `close`.
        source_cluster_id: id recorded when the mirror was made.
        destination_cluster_id: id of the cluster that keeps the mirror's state; None: not checked.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch, for reports.
        rng: spreads what need not be done at once.
    """

    def __init__(
        self,
        settings: MirrorSettings,
        source: ClusterAdmin,
        destination: ClusterAdmin,
        *,
        source_cluster_id: str,
        destination_cluster_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._source = source
        self._destination = destination
        self._source_cluster_id = source_cluster_id
        self._destination_cluster_id = destination_cluster_id
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._memory = Memory()
        self._turn = threading.Lock()

    def run(
        self,
        known: Mapping[str, TopicRecord],
        mirroring: Mapping[Partition, MirrorState],
        deadline_s: float,
        *,
        synced_acls: frozenset[Acl] = frozenset(),
        synced_quotas: frozenset[Quota] = frozenset(),
        offset_maps: OffsetMaps | None = None,
    ) -> RefreshOutcome:
        """Bring the destination into step and tell what to store.

        Errors never leave: they are in the status, under the step and the topic or group they belong to.

        Args:
            known: topic records of the mirror by topic.
            mirroring: state of each mirror partition; may be a live mapping.
            deadline_s: seconds after which what is left over is reported as not done.
            synced_acls, synced_quotas: `RefreshOutcome.acls` and `.quotas` of the refresh before.
            offset_maps: of partitions whose offsets are not the source's; None: there are none.
        """
        began = self._now_ms()
        with self._turn:
            context = self._context(
                known, mirroring, deadline_s, (synced_acls, synced_quotas), offset_maps, dry_run=False
            )
            problem, reachable = self._execute(context)
            acl_steps.settle(context)
        status = RefreshStatus(
            started_ms=began,
            finished_ms=self._now_ms(),
            steps=context.reports.statuses(),
            source_reachable=reachable,
        )
        intents = [context.intents[name] for name in sorted(context.intents)]
        return RefreshOutcome(status, intents, problem, context.acls, context.quotas, context.look_again)

    def plan(
        self,
        known: Mapping[str, TopicRecord],
        mirroring: Mapping[Partition, MirrorState],
        deadline_s: float,
        *,
        synced_acls: frozenset[Acl] = frozenset(),
        synced_quotas: frozenset[Quota] = frozenset(),
        offset_maps: OffsetMaps | None = None,
    ) -> RefreshPlan:
        """Tell what `run` would change now, without changing anything."""
        began = self._now_ms()
        with self._turn:
            context = self._context(
                known, mirroring, deadline_s, (synced_acls, synced_quotas), offset_maps, dry_run=True
            )
            _, reachable = self._execute(context)
            acl_steps.settle(context)
        status = RefreshStatus(
            started_ms=began,
            finished_ms=self._now_ms(),
            steps=context.reports.statuses(),
            source_reachable=reachable,
        )
        return RefreshPlan(status, tuple(context.changes))

    def close(self) -> None:
        """End both clients; a refresh under way in another thread gives up within moments."""
        self._source.close()
        self._destination.close()

    def _context(
        self,
        known: Mapping[str, TopicRecord],
        mirroring: Mapping[Partition, MirrorState],
        deadline_s: float,
        synced: tuple[frozenset[Acl], frozenset[Quota]],
        offset_maps: OffsetMaps | None,
        *,
        dry_run: bool,
    ) -> RefreshContext:
        return RefreshContext(
            settings=self._settings,
            source=self._source,
            destination=self._destination,
            known=known,
            mirroring=mirroring,
            memory=self._memory,
            deadline=Deadline(deadline_s, clock=self._clock),
            clock=self._clock,
            rng=self._rng,
            dry_run=dry_run,
            destination_cluster_id=self._destination_cluster_id,
            synced_acls=synced[0],
            synced_quotas=synced[1],
            offset_maps=offset_maps,
            reports=StepReports(),
        )

    def _execute(self, context: RefreshContext) -> tuple[str | None, bool]:
        """Run the steps; returns why the source is not to be trusted, and whether it was reachable."""
        source, destination = self._identify(context)
        if source is None:
            return None, False
        if destination is None:
            return None, True
        other = destination_problem(expected=self._destination_cluster_id, destination=destination.cluster_id)
        if other is not None:
            context.reports[Step.CLUSTER_IDS].errors[WHOLE_STEP] = other
            return None, True
        problem = identity_problem(
            expected=self._source_cluster_id,
            source=source.cluster_id,
            destination=destination.cluster_id,
        )
        if problem is not None:
            context.reports[Step.CLUSTER_IDS].errors[WHOLE_STEP] = problem
            context.intents.update(_refuse_all(context.known, problem))
            return problem, True
        if self._look(context, len(destination.brokers)):
            topic_steps.create(context)
            topic_steps.grow(context)
            topic_steps.sync_configs(context)
            position_steps.sync_groups(context)
            acl_steps.sync_acls(context)
            quota_steps.sync_quotas(context)
            quota_steps.list_users(context)
            position_steps.follow_log_starts(context)
            if not context.dry_run:
                context.look_again |= not context.topics.missing <= self._memory.missing
                self._memory.missing = context.topics.missing
        return None, True

    def _identify(
        self, context: RefreshContext
    ) -> tuple[ClusterDescription | None, ClusterDescription | None]:
        source = destination = None
        with context.reports.running(Step.CLUSTER_IDS):
            source = context.source.describe_cluster(timeout_s=context.timeout())
            destination = context.destination.describe_cluster(timeout_s=context.timeout())
        return source, destination

    def _look(self, context: RefreshContext, brokers: int) -> bool:
        """Look at both clusters and decide about topics; False when it could not be done."""
        with context.reports.running(Step.DISCOVERY) as report:
            context.source_view = read_source(
                context.source,
                filters=context.settings.filters,
                known=context.known,
                deadline=context.deadline,
            )
            context.destination_view = read_destination(
                context.destination,
                source=context.source_view,
                known=context.known,
                brokers=brokers,
                deadline=context.deadline,
            )
            context.source_view = with_translated_starts(context.source_view, current_maps(context))
            topic_steps.decide(context)
        return WHOLE_STEP not in report.errors

    def _now_ms(self) -> int:
        return round(self._wall_clock() * 1000)


def _refuse_all(known: Mapping[str, TopicRecord], problem: str) -> dict[str, TopicIntent]:
    return {
        name: replace(unchanged_intent(record), error=problem)
        for name, record in known.items()
        if record.desired is not DesiredState.STOPPED
    }
