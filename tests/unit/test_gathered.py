"""Reads of many partitions that travel in few requests, without brokers."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.codes import broker_error
from kmirror_dagster.broker.gathered import GatheringCluster
from kmirror_dagster.broker.wire import LATEST, Leader, Outcome, TopicPartition
from kmirror_dagster.errors import BrokerError, ConnectionLostError, KmirrorError
from kmirror_dagster.settings import ClusterSettings
from tests.helpers.coordination import eventually, run


class CountedCluster(GatheringCluster):
    """Answers offsets without a network; partition n of a topic is led by broker n modulo 2 and ends at n."""

    def __init__(self) -> None:
        super().__init__(ClusterSettings(bootstrap_servers=("nowhere:1",)), role="source")
        self.requests: list[list[TopicPartition]] = []
        self.held: dict[int, asyncio.Event] = {}
        self.failure: KmirrorError | None = None
        self.refused: set[TopicPartition] = set()
        self.ends: dict[TopicPartition, int] = {}

    async def leader(self, topic: str, partition: int) -> Leader:
        return Leader(partition % 2, 0, None)

    async def list_offsets(
        self, partitions: Sequence[TopicPartition], timestamp: int, *, isolation: int = 0
    ) -> dict[TopicPartition, Outcome]:
        self.requests.append(list(partitions))
        answers = {tp: self._outcome(tp) for tp in partitions}
        held = self.held.get(partitions[0][1] % 2)
        if held is not None:
            await held.wait()
        if self.failure is not None:
            raise self.failure
        return answers

    def _outcome(self, tp: TopicPartition) -> Outcome:
        if tp in self.refused:
            return Outcome(error=broker_error(codes.NOT_LEADER_OR_FOLLOWER, f"{tp[0]}/{tp[1]}"))
        return Outcome(self.ends.get(tp, tp[1]))


async def ask(cluster: CountedCluster, count: int) -> list[int | BaseException]:
    return await asyncio.gather(
        *(cluster.offset_of(("t", n), LATEST) for n in range(count)), return_exceptions=True
    )


def test_questions_asked_at_once_are_one_request_to_each_broker() -> None:
    """A thousand questions about as many partitions are two requests to two brokers, and each gets its own answer."""

    async def main() -> None:
        cluster = CountedCluster()
        assert await ask(cluster, 1_000) == list(range(1_000))
        assert [len(request) for request in cluster.requests] == [500, 500]

    run(main)


def test_very_many_questions_are_several_requests() -> None:
    """A request has a limit, or its answer would hold the loop for long."""

    async def main() -> None:
        cluster = CountedCluster()
        assert await ask(cluster, 5_000) == list(range(5_000))
        assert max(len(request) for request in cluster.requests) == 1_000
        assert len(cluster.requests) == 6

    run(main)


def test_error_of_one_partition_is_its_own() -> None:
    """A partition whose leader has moved is refused; those beside it in the request are answered."""

    async def main() -> None:
        cluster = CountedCluster()
        cluster.refused = {("t", 4)}
        answers = await ask(cluster, 8)
        assert isinstance(answers[4], BrokerError)
        assert answers[4].retriable
        assert answers[:4] + answers[5:] == [0, 1, 2, 3, 5, 6, 7]

    run(main)


def test_broker_that_hangs_or_fails_leaves_the_others_alone() -> None:
    """While one broker holds its answer back, questions to the other are answered; a lost request fails who asked."""

    async def main() -> None:
        cluster = CountedCluster()
        held = cluster.held[0] = asyncio.Event()
        stuck = asyncio.create_task(cluster.offset_of(("t", 0), LATEST))
        assert await cluster.offset_of(("t", 1), LATEST) == 1
        assert not stuck.done()
        cluster.failure = ConnectionLostError("gone")
        held.set()
        with pytest.raises(ConnectionLostError, match="gone"):
            await stuck
        cluster.failure = None
        assert await cluster.offset_of(("t", 0), LATEST) == 0

    run(main)


def test_answer_is_never_older_than_the_question() -> None:
    """What is asked while a request is under way is not answered by it: the log may have grown in between."""

    async def main() -> None:
        cluster = CountedCluster()
        held = cluster.held[0] = asyncio.Event()
        tp = ("t", 0)
        before = asyncio.create_task(cluster.offset_of(tp, LATEST))
        await eventually(lambda: len(cluster.requests) == 1)
        cluster.ends[tp] = 7
        after = asyncio.create_task(cluster.offset_of(tp, LATEST))
        await asyncio.sleep(0)
        held.set()
        assert (await before, await after) == (0, 7)
        assert cluster.requests == [[tp], [tp]]

    run(main)


def test_cancelled_caller_does_not_take_the_answer_from_others() -> None:
    """Two ask the same at once; one gives up, the other is answered."""

    async def main() -> None:
        cluster = CountedCluster()
        held = cluster.held[0] = asyncio.Event()
        first, second = (asyncio.create_task(cluster.offset_of(("t", 0), LATEST)) for _ in range(2))
        await eventually(lambda: len(cluster.requests) == 1)
        first.cancel()
        held.set()
        assert await second == 0
        assert len(cluster.requests) == 1

    run(main)


def test_closing_ends_all_waits() -> None:
    """Whoever waits for an answer learns that the client is closed."""

    async def main() -> None:
        cluster = CountedCluster()
        cluster.held = {0: asyncio.Event(), 1: asyncio.Event()}
        asked = asyncio.create_task(ask(cluster, 3_000))
        await eventually(lambda: len(cluster.requests) == 2)
        await cluster.close()
        assert {type(each) for each in await asked} == {ConnectionLostError}

    run(main)


def test_answer_that_leaves_a_partition_out_is_an_error() -> None:
    """A broker that does not answer for a partition it was asked about leaves nobody waiting."""

    class Forgetful(CountedCluster):
        async def list_offsets(
            self, partitions: Sequence[TopicPartition], timestamp: int, *, isolation: int = 0
        ) -> dict[TopicPartition, Outcome]:
            answers: Mapping[TopicPartition, Outcome] = await super().list_offsets(partitions, timestamp)
            return {tp: outcome for tp, outcome in answers.items() if tp[1] != 2}

    async def main() -> None:
        answers = await ask(Forgetful(), 4)
        assert isinstance(answers[2], KmirrorError)
        assert [answers[n] for n in (0, 1, 3)] == [0, 1, 3]

    run(main)
