"""Group calls over the wire against scripted brokers: moving coordinators, old versions, silence."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kmirror_dagster.broker import group_wire
from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import CommittedOffset, GroupType
from kmirror_dagster.errors import AuthorizationError, BrokerError, ConnectionLostError, KmirrorError
from kmirror_dagster.settings import ClusterSettings
from tests.helpers.waiting import wait_until

NOT_COORDINATOR = 16
Answer = Callable[[Any], Any]


class ScriptedConnection:
    """Answers requests by the name of their kind."""

    def __init__(self, answers: dict[str, Answer], versions: int) -> None:
        self.answers = answers
        self.versions = versions
        self.asked: list[str] = []

    def version(self, _api_key: int, highest: int) -> int:
        """Highest version both sides speak."""
        return min(highest, self.versions)

    async def call(self, request: Any, *, version: int | None = None) -> Any:
        """The scripted answer."""
        name = type(request).__name__.split("_")[0]
        self.asked.append(name)
        answer = self.answers[name](request)
        if isinstance(answer, KmirrorError):
            raise answer
        return answer


class ScriptedCluster:
    """Two brokers, each with its own script."""

    def __init__(self, *connections: ScriptedConnection) -> None:
        self.connections = connections
        self.settings = ClusterSettings(bootstrap_servers=("127.0.0.1:1",))

    async def refresh(self) -> None:
        """Nothing to look up."""

    async def any_connection(self) -> ScriptedConnection:
        """The first broker."""
        return self.connections[0]

    async def any_call(self, _request: Any) -> Any:
        """The list of brokers."""
        brokers = [SimpleNamespace(node_id=index) for index in range(len(self.connections))]
        return SimpleNamespace(brokers=brokers)

    async def connection(self, node_id: int) -> ScriptedConnection:
        """One broker."""
        return self.connections[node_id]


def found(request: Any) -> Any:
    """Groups ending in an even digit are at broker 0, others at broker 1."""
    if request.coordinator_keys:
        coordinators = [
            SimpleNamespace(key=key, node_id=int(key[-1]) % 2, error_code=0)
            for key in request.coordinator_keys
        ]
        return SimpleNamespace(coordinators=coordinators)
    return SimpleNamespace(node_id=int(request.key[-1]) % 2, error_code=0)


def topic_of(offset: int, metadata: str | None = "text", error_code: int = 0) -> Any:
    """A topic with one partition."""
    entry = SimpleNamespace(
        partition_index=0,
        committed_offset=offset,
        committed_leader_epoch=7,
        metadata=metadata,
        error_code=error_code,
    )
    return SimpleNamespace(name="t", partitions=[entry])


def fetched(code: Callable[[str], int]) -> Answer:
    """Positions of all groups asked for, or an error."""

    def answer(request: Any) -> Any:
        if request.groups:
            groups = [
                SimpleNamespace(group_id=each.group_id, error_code=code(each.group_id), topics=[topic_of(5)])
                for each in request.groups
            ]
            return SimpleNamespace(groups=groups)
        return SimpleNamespace(error_code=code(request.group_id), topics=[topic_of(5)])

    return answer


def run(work: Any) -> Any:
    """Run a coroutine."""
    return asyncio.run(work)


@pytest.mark.parametrize("versions", [9, 3])
def test_positions_of_all_groups_are_read_from_their_coordinators(versions: int) -> None:
    """New brokers are asked once for many groups, old ones once for each."""
    answers: dict[str, Answer] = {
        "FindCoordinatorRequest": found,
        "OffsetFetchRequest": fetched(lambda _group: 0),
    }
    brokers = [ScriptedConnection(answers, versions) for _ in range(2)]

    result = run(group_wire.fetch_offsets(ScriptedCluster(*brokers), ["g1", "g2", "g3"]))  # pyright: ignore

    position = {("t", 0): CommittedOffset(5, "text", 7)}
    assert result.values == {"g1": position, "g2": position, "g3": position}
    fetches = sum(broker.asked.count("OffsetFetchRequest") for broker in brokers)
    assert fetches == (2 if versions == 9 else 3)


@pytest.mark.case("C27")
def test_a_coordinator_that_moved_is_asked_for_again() -> None:
    """NOT_COORDINATOR is answered with a fresh look-up; only the groups concerned are asked again."""
    moved = {"g1": 2}

    def code(group: str) -> int:
        moved[group] = moved.get(group, 0) - 1
        return NOT_COORDINATOR if moved[group] >= 0 else 0

    broker = ScriptedConnection({"FindCoordinatorRequest": found, "OffsetFetchRequest": fetched(code)}, 9)

    result = run(group_wire.fetch_offsets(ScriptedCluster(broker, broker), ["g1", "g2"]))  # pyright: ignore

    assert set(result.values) == {"g1", "g2"}
    assert not result.errors
    assert broker.asked.count("FindCoordinatorRequest") == 3


@pytest.mark.case("C27")
def test_one_coordinator_out_of_reach_leaves_other_groups_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection, a missing right and a coordinator that stays away are errors of their groups only."""
    monkeypatch.setattr(group_wire, "_PATIENCE_S", 0.2)
    codes = {"g2": 30, "g4": NOT_COORDINATOR}
    good = ScriptedConnection(
        {"FindCoordinatorRequest": found, "OffsetFetchRequest": fetched(lambda group: codes.get(group, 0))}, 9
    )
    lost = ScriptedConnection({"OffsetFetchRequest": lambda _request: ConnectionLostError("gone")}, 9)

    cluster = ScriptedCluster(good, lost)
    result = run(group_wire.fetch_offsets(cluster, ["g1", "g2", "g4", "g6"]))  # pyright: ignore

    assert set(result.values) == {"g6"}
    assert isinstance(result.errors["g1"], ConnectionLostError)
    assert isinstance(result.errors["g2"], AuthorizationError)
    assert "User:ANONYMOUS lacks DESCRIBE on group g2" in str(result.errors["g2"])
    assert isinstance(result.errors["g4"], BrokerError)
    assert result.errors["g4"].code == NOT_COORDINATOR


def test_commits_name_what_was_refused() -> None:
    """Each partition has its outcome; the epoch is left out when there is none."""
    sent: list[Any] = []

    def committed(request: Any) -> Any:
        sent.append(request)
        topics = [
            SimpleNamespace(name=name, partitions=[SimpleNamespace(partition_index=0, error_code=code)])
            for name, code in (("t", 0), ("u", 3), ("v", 29))
        ]
        return SimpleNamespace(topics=topics)

    broker = ScriptedConnection({"FindCoordinatorRequest": found, "OffsetCommitRequest": committed}, 9)
    offsets = {
        ("t", 0): CommittedOffset(1),
        ("u", 0): CommittedOffset(2, "x", 4),
        ("v", 0): CommittedOffset(3),
    }

    result = run(group_wire.commit_offsets(ScriptedCluster(broker, broker), {"g2": offsets}))  # pyright: ignore

    outcomes = result.values["g2"]
    assert outcomes["t", 0] is None
    assert isinstance(outcomes["u", 0], BrokerError)
    assert "lacks READ on topic v" in str(outcomes["v", 0])
    entries = {topic.name: topic.partitions[0] for topic in sent[0].topics}
    assert (sent[0].generation_id_or_member_epoch, sent[0].member_id) == (-1, "")
    assert (entries["t"].committed_leader_epoch, entries["u"].committed_leader_epoch) == (-1, 4)


def test_group_types_are_told_apart_on_old_brokers_too() -> None:
    """Without a type the protocol tells share and streams groups; a broker that fails is listed as an error."""

    def listed(_request: Any) -> Any:
        groups = [
            SimpleNamespace(
                group_id="a", protocol_type="consumer", group_state="Stable", group_type="Consumer"
            ),
            SimpleNamespace(group_id="b", protocol_type="share", group_state=None, group_type=None),
            SimpleNamespace(group_id="c", protocol_type="", group_state="", group_type=""),
        ]
        return SimpleNamespace(error_code=0, groups=groups)

    good = ScriptedConnection({"ListGroupsRequest": listed}, 5)
    failing = ScriptedConnection(
        {"ListGroupsRequest": lambda _request: SimpleNamespace(error_code=15, groups=[])}, 5
    )

    listings = run(group_wire.list_groups(ScriptedCluster(good, failing)))  # pyright: ignore

    assert [(item.group, item.type, item.state) for item in listings.groups] == [
        ("a", GroupType.CONSUMER, "Stable"),
        ("b", GroupType.SHARE, "Unknown"),
        ("c", GroupType.UNKNOWN, "Unknown"),
    ]
    assert len(listings.errors) == 1


@pytest.fixture
def silent_port() -> Any:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_broker_that_never_answers_costs_no_more_than_the_deadline(silent_port: int) -> None:
    """The call ends in time with one line that names the address."""
    admin = ClusterAdmin(ClusterSettings(bootstrap_servers=(f"127.0.0.1:{silent_port}",)))
    began = time.monotonic()

    with pytest.raises(KmirrorError, match=f"127.0.0.1:{silent_port}"):
        admin.groups(timeout_s=1)

    assert time.monotonic() - began < 4
    admin.close()


def test_closing_ends_a_call_and_its_thread(silent_port: int) -> None:
    """A caller in another thread gives up at once, and no thread is left behind."""
    others = set(threading.enumerate())  # of clients that other tests of this process use
    admin = ClusterAdmin(ClusterSettings(bootstrap_servers=(f"127.0.0.1:{silent_port}",)))
    outcome: list[KmirrorError] = []

    def own() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "kmirror-admin" and t not in others]

    def ask() -> None:
        try:
            admin.groups(timeout_s=60)
        except KmirrorError as error:
            outcome.append(error)

    caller = threading.Thread(target=ask)
    caller.start()
    wait_until(lambda: bool(own()))
    admin.close()
    caller.join(10)

    assert "closed" in str(outcome[0])
    assert own() == []
    with pytest.raises(KmirrorError, match="closed"):
        admin.groups()
