"""The node's HTTP API over ASGI: who may ask, what is refused, which errors come back."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from kmirror_dagster.coordination.client import error_from
from kmirror_dagster.coordination.http_guard import MAX_BODY_BYTES
from kmirror_dagster.coordination.models import ErrorBody
from kmirror_dagster.errors import (
    ApiAuthenticationError,
    ClusterUnreachableError,
    ForeignWriteError,
    IllegalTransitionError,
    KmirrorError,
    MirrorExistsError,
    NotLeaderError,
    ReplicationError,
    SameClusterError,
    SettingsError,
    UnknownMirrorError,
    UsageError,
)
from kmirror_dagster.lifecycle import MirrorState, RetryPolicy
from tests.helpers.coordination import (
    DESTINATION_ID,
    SOURCE,
    SOURCE_ID,
    MemoryNode,
    World,
    document,
    eventually,
    mirrored,
    run,
)

ROUTES = [
    ("GET", "/metrics"),
    ("GET", "/v1/node"),
    ("GET", "/v1/cluster"),
    ("GET", "/v1/mirrors"),
    ("POST", "/v1/mirrors"),
    ("GET", "/v1/mirrors/m"),
    ("DELETE", "/v1/mirrors/m"),
    ("GET", "/v1/mirrors/m/document"),
    ("GET", "/v1/mirrors/m/partitions"),
    ("GET", "/v1/mirrors/m/probes"),
    ("POST", "/v1/mirrors/m/stop"),
    ("POST", "/v1/mirrors/m/advance"),
    ("GET", "/v1/mirrors/m/plan"),
    ("POST", "/v1/mirrors/m/refresh"),
    ("GET", "/v1/changes"),
    ("POST", "/v1/states/read"),
    ("POST", "/v1/states/write"),
    ("POST", "/v1/node/shutdown"),
    ("GET", "/v1/local/mirrors"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/nothing/here"),
]

Test = Callable[[World, MemoryNode, httpx.AsyncClient], Awaitable[None]]


def with_api(test: Test, policy: RetryPolicy | None = None, **partitions: int) -> None:
    """Run a test against one node's API, with mirror `m` when partitions are given."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, policy=policy) as node, node.http() as http:
            await node.lead()
            if partitions:
                await mirrored(node, **partitions)
            await test(world, node, http)

    run(work)


def failure(answer: httpx.Response) -> KmirrorError:
    """The error a client raises for an answer."""
    return error_from(ErrorBody.model_validate_json(answer.content))


def assert_fails(answer: httpx.Response, status: int, kind: type[KmirrorError], text: str = "") -> None:
    """An answer is one line of a known class."""
    error = failure(answer)
    assert (answer.status_code, type(error)) == (status, kind), answer.text
    assert text in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic token-of-the-tests", "Bearer", "Bearer "])
def test_every_route_needs_the_token(method: str, path: str, header: str | None) -> None:
    """Without the right bearer token nothing is answered, not even whether a route exists."""

    async def test(world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        del http.headers["Authorization"]
        headers = {"Authorization": header} if header is not None else {}
        answer = await http.request(method, path, headers=headers, content=b"{}")
        assert_fails(answer, 401, ApiAuthenticationError)
        assert not node.shutdown_asked

    with_api(test)


def test_health_needs_no_token() -> None:
    """Liveness and readiness are open, and readiness follows the node."""

    async def test(_world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        del http.headers["Authorization"]
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/health/ready")).status_code == 200
        node.is_loaded = False
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/health/ready")).status_code == 503

    with_api(test)


def test_long_body_is_refused_before_it_is_read() -> None:
    """A body over the limit is refused by its announced length."""

    async def test(_world: World, _node: MemoryNode, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/states/read", content=b"x" * (MAX_BODY_BYTES + 1))
        assert_fails(answer, 413, UsageError, "longer than")

    with_api(test)


def test_long_body_without_a_length_is_refused_while_it_is_read() -> None:
    """A body that does not say how long it is, is refused once it is over the limit."""

    async def chunks() -> Any:
        for _ in range(20):
            yield b"x" * (MAX_BODY_BYTES // 10)

    async def test(_world: World, _node: MemoryNode, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/states/read", content=chunks())
        assert_fails(answer, 413, UsageError)

    with_api(test)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"document": 3}', b'{"document": {"mirror": 5}}', b"\xff\xfe", b"[" * 5000],
)
def test_malformed_body_is_one_line(body: bytes) -> None:
    """Junk is a usage error, never a trace, and the node goes on."""

    async def test(_world: World, _node: MemoryNode, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/mirrors", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert isinstance(failure(answer), UsageError)
        assert (await http.get("/v1/node")).status_code == 200

    with_api(test)


def test_secret_in_a_malformed_request_is_not_repeated() -> None:
    """An error tells what is wrong, not what was sent."""

    async def test(_world: World, _node: MemoryNode, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/mirrors", json={"document": "hunter2-secret"})
        assert answer.status_code == 400
        assert "hunter2" not in answer.text

    with_api(test)


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=-1", "limit=100000", "limit=x", "state=SLEEPING", "cursor=%25%25", "cursor=W10="],
)
def test_malformed_query_is_one_line(query: str) -> None:
    """Page sizes, states and cursors that are none are refused."""

    async def test(_world: World, _node: MemoryNode, http: httpx.AsyncClient) -> None:
        answer = await http.get(f"/v1/mirrors/m/partitions?{query}")
        assert answer.status_code == 400
        assert isinstance(failure(answer), UsageError)

    with_api(test, t=1)


@pytest.mark.parametrize("path", ["", "/document", "/partitions", "/plan", "/probes"])
def test_unknown_mirror_is_named(path: str) -> None:
    """A mirror that does not exist is 404 and names those that do."""

    async def test(_world: World, _node: MemoryNode, http: httpx.AsyncClient) -> None:
        answer = await http.get(f"/v1/mirrors/orders{path}")
        assert_fails(answer, 404, UnknownMirrorError, "'orders' does not exist; there are: m")
        for verb in ("stop", "refresh"):
            answer = await http.post(f"/v1/mirrors/orders/{verb}", json={})
            assert_fails(answer, 404, UnknownMirrorError)
        assert_fails(await http.delete("/v1/mirrors/orders"), 404, UnknownMirrorError)

    with_api(test, t=1)


def test_creation_identifies_both_clusters_before_it_writes() -> None:
    """Source and destination being one cluster is refused, and nothing was stored."""

    async def test(world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        appends = world.topic.appends
        world.cluster_ids[SOURCE] = DESTINATION_ID
        answer = await http.post("/v1/mirrors", json={"document": document()})
        assert_fails(answer, 400, SameClusterError, "same cluster")
        world.cluster_ids[SOURCE] = ClusterUnreachableError("source cluster at source:9092 does not answer")
        answer = await http.post("/v1/mirrors", json={"document": document()})
        assert_fails(answer, 502, ClusterUnreachableError, "source:9092")
        world.cluster_ids |= {SOURCE: SOURCE_ID, "destination:9092": "third-cluster"}
        answer = await http.post("/v1/mirrors", json={"document": document()})
        assert_fails(answer, 400, UsageError, "this node writes to")
        assert (world.topic.appends, dict(node.view.mirrors)) == (appends, {})

    with_api(test)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sorce": {}}, "sorce"),
        ({"source": {"bootstrap.server": "a:1"}}, "bootstrap.servers"),
        ({"filters": {"topics.include": ["("]}}, "topics.include"),
        ({"mirror": "no spaces"}, "mirror"),
        ({"source": {"bootstrap.servers": "${UNSET_VARIABLE}:1"}}, "UNSET_VARIABLE"),
    ],
)
def test_bad_document_is_refused_by_name(change: dict[str, Any], text: str) -> None:
    """A document with a mistake names the setting and changes nothing."""

    async def test(world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/mirrors", json={"document": document() | change})
        assert_fails(answer, 400, SettingsError, text)
        assert not node.view.mirrors

    with_api(test)


def test_literal_secret_is_not_stored() -> None:
    """A document that would put a password into the state topic is refused, without repeating it."""

    async def test(_world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        source = {
            "bootstrap.servers": SOURCE,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "u",
            "sasl.password": "hunter2-secret",
        }
        answer = await http.post("/v1/mirrors", json={"document": document(source=source)})
        assert_fails(answer, 400, SettingsError, "sasl.password")
        assert "hunter2" not in answer.text
        assert not node.view.mirrors

    with_api(test)


def test_creation_may_be_repeated_and_replaced() -> None:
    """The same document again is no error; another one needs `replace`, and the source must stay the same."""

    async def test(world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        appends = world.topic.appends
        again = await http.post("/v1/mirrors", json={"document": document()})
        assert (again.status_code, world.topic.appends) == (200, appends)
        other = document(topics=["t.*"])
        answer = await http.post("/v1/mirrors", json={"document": other})
        assert_fails(answer, 409, MirrorExistsError, "--replace")
        answer = await http.post("/v1/mirrors", json={"document": other, "replace": True})
        assert answer.status_code == 200
        assert (await http.get("/v1/mirrors/m/document")).json() == other
        world.cluster_ids[SOURCE] = "another-cluster"
        answer = await http.post("/v1/mirrors", json={"document": document(), "replace": True})
        assert_fails(answer, 400, UsageError, "a mirror keeps its source")
        assert node.view.mirrors["m"].revision == 2

    with_api(test, t=1)


def test_verbs_answer_what_they_changed() -> None:
    """A verb lists the topics it changed; repeated, it changes nothing and is no error."""

    async def test(_world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        answer = (await http.post("/v1/mirrors/m/pause", json={"topics": ["t"]})).json()
        assert (answer["changed"], answer["unchanged"], answer["partitions"]) == (["t"], [], 2)
        answer = (await http.post("/v1/mirrors/m/pause", json={"topics": ["t"]})).json()
        assert (answer["changed"], answer["unchanged"]) == ([], ["t"])
        await eventually(lambda: node.state("t") is MirrorState.PAUSED)
        assert node.state("u") is MirrorState.MIRRORING

    with_api(test, t=2, u=1)


def test_operation_id_makes_a_repeated_call_answer_the_same() -> None:
    """A call that is repeated because its answer was lost gets that answer."""

    async def test(_world: World, _node: MemoryNode, http: httpx.AsyncClient) -> None:
        body = {"operation_id": "op-1"}
        first = (await http.post("/v1/mirrors/m/pause", json=body)).json()
        assert first["changed"] == ["t"]
        assert (await http.post("/v1/mirrors/m/pause", json=body)).json() == first

    with_api(test, t=1)


@pytest.mark.parametrize(
    ("before", "verb", "hint"),
    [("pause", "start", "resume"), ("stop", "resume", "start"), ("stop", "pause", "start")],
)
def test_verb_that_does_not_fit_is_refused_with_the_remedy(before: str, verb: str, hint: str) -> None:
    """An illegal transition names the topic, the state it is in and the verb to use; nothing is changed."""

    async def test(world: World, _node: MemoryNode, http: httpx.AsyncClient) -> None:
        await http.post(f"/v1/mirrors/m/{before}", json={})
        appends = len([1 for log in world.topic.logs for key, _ in log if b'"topic"' in key])
        answer = await http.post(f"/v1/mirrors/m/{verb}", json={})
        assert_fails(answer, 409, IllegalTransitionError, f"'{hint}'")
        assert "m/t is" in answer.text
        assert appends == len([1 for log in world.topic.logs for key, _ in log if b'"topic"' in key])

    with_api(test, t=1)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"topics": ["nothing"]}, "no topic matches nothing"),
        ({"topics": ["("]}, "topics"),
        ({"topics": []}, "no topic"),
    ],
)
def test_verb_needs_topics_it_can_find(body: dict[str, Any], text: str) -> None:
    """Patterns that are malformed or select nothing are refused."""

    async def test(_world: World, _node: MemoryNode, http: httpx.AsyncClient) -> None:
        assert_fails(await http.post("/v1/mirrors/m/stop", json=body), 400, UsageError, text)

    with_api(test, t=1)


def test_unknown_verb_is_refused() -> None:
    """A verb that is none is named together with those there are."""

    async def test(_world: World, _node: MemoryNode, http: httpx.AsyncClient) -> None:
        assert_fails(await http.post("/v1/mirrors/m/explode", json={}), 400, UsageError, "start, pause")

    with_api(test, t=1)


def test_patterns_match_whole_names() -> None:
    """`t` is the topic t, not every topic with a t in it."""

    async def test(_world: World, _node: MemoryNode, http: httpx.AsyncClient) -> None:
        answer = (await http.post("/v1/mirrors/m/pause", json={"topics": ["t"]})).json()
        assert answer["changed"] == ["t"]

    with_api(test, t=1, tt=1, ot=1)


def test_start_by_name_and_by_pattern() -> None:
    """A name becomes an intent of its own, a pattern part of the stored filter; excluded names are refused."""

    async def test(world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        before = world.refreshes
        answer = await http.post("/v1/mirrors/m/start", json={"topics": ["new-topic", "logs-.*"]})
        assert answer.json()["changed"] == ["new-topic"]
        assert node.view.topics["m"]["new-topic"].started_by == "operator"
        stored = (await http.get("/v1/mirrors/m/document")).json()
        assert stored["filters"]["topics.include"] == [".*", "logs-.*"]
        await eventually(lambda: world.refreshes > before)
        answer = await http.post("/v1/mirrors/m/start", json={"topics": ["__internal"]})
        assert_fails(answer, 400, UsageError, "topics.exclude")

    with_api(test, t=1)


def test_deletion_is_refused_while_something_is_mirrored() -> None:
    """A mirror with partitions that are not STOPPED is kept; stopped, it goes; forced, it is stopped first."""

    async def test(_world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        answer = await http.delete("/v1/mirrors/m")
        assert_fails(answer, 409, IllegalTransitionError, "2 partition(s) are not STOPPED, t/0 is MIRRORING")
        assert (await http.delete("/v1/mirrors/m?force=true")).status_code == 204
        assert sorted(node.link().finals) == [("t", 0), ("t", 1)]
        await eventually(lambda: not node.view.states)
        assert (await http.get("/v1/mirrors")).json() == []

    with_api(test, t=2)


def test_partitions_come_in_pages() -> None:
    """Pages are sorted by topic and partition number, complete and without overlap."""

    async def test(_world: World, _node: MemoryNode, http: httpx.AsyncClient) -> None:
        got: list[tuple[str, int]] = []
        cursor = None
        while True:
            params = {"limit": 5} | ({"cursor": cursor} if cursor else {})
            page = (await http.get("/v1/mirrors/m/partitions", params=params)).json()
            assert len(page["items"]) <= 5
            got += [(item["topic"], item["partition"]) for item in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert got == [*(("a", n) for n in range(12)), ("b", 0)]

    with_api(test, a=12, b=1)


def test_partitions_are_filtered_by_topic_and_state() -> None:
    """Filters narrow the listing down to what was asked for."""

    async def test(_world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        await http.post("/v1/mirrors/m/pause", json={"topics": ["a"]})
        await eventually(lambda: node.state("a") is MirrorState.PAUSED)
        page = (await http.get("/v1/mirrors/m/partitions?state=PAUSED")).json()
        assert [item["topic"] for item in page["items"]] == ["a"]
        page = (await http.get("/v1/mirrors/m/partitions?topic=b")).json()
        assert [item["state"] for item in page["items"]] == ["MIRRORING", "MIRRORING"]

    with_api(test, a=1, b=2)


def test_summary_adds_up_what_is_copied() -> None:
    """A mirror's figures are sums over its partitions, lag in seconds the worst of them."""

    async def test(_world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        node.link().lag = 7
        summary = (await http.get("/v1/mirrors/m")).json()
        assert summary["states"] == {"MIRRORING": 3}
        assert (summary["partitions"], summary["lag_records"], summary["lag_seconds"]) == (3, 21, 0.5)
        assert (summary["source_bootstrap"], summary["coordinator_node"]) == (SOURCE, "n1")
        assert summary["refresh"] is not None

    with_api(test, t=2, u=1)


def test_states_are_written_by_epochs() -> None:
    """Each write is judged by itself: one with old epochs is refused beside one that is stored."""

    async def test(_world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        refs = [{"mirror": "m", "topic": "t", "partition": n} for n in range(2)]
        states = (await http.post("/v1/states/read", json=refs)).json()
        writes = [
            {
                **ref,
                "state": "PAUSING",
                "expected_state_epoch": state["state_epoch"] - lag,
                "expected_leader_epoch": state["leader_epoch"],
            }
            for ref, state, lag in zip(refs, states, (0, 1), strict=True)
        ]
        results = (await http.post("/v1/states/write", json=writes)).json()
        assert [result["error_code"] for result in results] == [None, "StaleEpochError"]
        assert results[1]["status"]["state_epoch"] == states[1]["state_epoch"]
        illegal = [{**writes[1], "state": "STOPPED", "expected_state_epoch": states[1]["state_epoch"]}]
        (result,) = (await http.post("/v1/states/write", json=illegal)).json()
        assert result["error_code"] == "IllegalTransitionError"

    with_api(test, t=2)


def test_advance_waits_for_the_next_settled_state() -> None:
    """Advance retries a FAILED partition at once, waits for it, and does nothing when nothing is to be done."""

    async def test(_world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        body = {"topic": "t", "partition": 0, "wait_ms": 3_000}
        answer = (await http.post("/v1/mirrors/m/advance", json=body)).json()
        assert (answer["advanced"], answer["status"]["state"]) == (False, "MIRRORING")
        node.link().fail("t", 0, ReplicationError("away"))
        await eventually(lambda: node.state() is not MirrorState.MIRRORING)
        answer = (await http.post("/v1/mirrors/m/advance", json=body)).json()
        assert answer["status"]["state"] == "MIRRORING"
        node.link().fail("t", 0, ForeignWriteError("written by somebody"))
        await eventually(lambda: node.state() is MirrorState.FAILED)
        answer = (await http.post("/v1/mirrors/m/advance", json=body)).json()
        assert (answer["advanced"], answer["status"]["error"]) == (False, "written by somebody")
        unknown = {"topic": "t", "partition": 9}
        assert_fails(await http.post("/v1/mirrors/m/advance", json=unknown), 400, UsageError, "t/9")

    with_api(test, RetryPolicy(initial_ms=3_600_000, max_ms=3_600_000), t=1)


def test_node_that_loads_says_try_again() -> None:
    """While the state is not loaded, questions about it are answered 503, retriable."""

    async def test(_world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        node.is_loaded = False
        assert_fails(await http.get("/v1/mirrors"), 503, NotLeaderError)
        assert (await http.get("/v1/node")).status_code == 200

    with_api(test)


def test_probe_history_is_kept() -> None:
    """Looks at source and destination are listed by the node that took them, oldest first, bounded."""

    async def test(_world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        node.link().probe_error = "refused"
        for _ in range(130):
            node.prober.tick()
            await eventually(
                lambda: all(h.pending.done() for h in node.prober._histories.values() if h.pending)
            )
        (history,) = (await http.get("/v1/mirrors/m/probes")).json()
        assert history["node_id"] == "n1"
        assert len(history["source"]) == len(history["destination"]) == 120
        assert history["source"][-1]["error"] == "refused"
        assert history["destination"][-1]["ok"]
        times = [look["at_ms"] for look in history["source"]]
        assert times == sorted(times)

    with_api(test, t=1)


def test_changes_are_followed_with_a_cursor() -> None:
    """The feed begins with all states, ends with a cursor, and goes on from there."""

    async def test(_world: World, node: MemoryNode, http: httpx.AsyncClient) -> None:
        first = (await http.get("/v1/changes?mirror=m")).json()
        assert [change["state"] for change in first["changes"]] == ["LOG_ALIGNMENT", "MIRRORING"]
        await http.post("/v1/mirrors/m/pause", json={})
        await eventually(lambda: node.state() is MirrorState.PAUSED)
        answer = (await http.get("/v1/changes", params={"cursor": first["cursor"]})).json()
        assert [change["state"] for change in answer["changes"]] == ["PAUSING", "PAUSED"]

    with_api(test, t=1)


# several nodes


def test_any_node_answers_for_all() -> None:
    """Reads are completed by the other nodes, verbs go to the leader, and the asked node then sees the outcome."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            owner = one.view.mirror_owner("m")
            rest = [p for p in range(5) if p != owner]
            await one.lead(owner)
            await two.lead(*rest)
            world.topics(t=20)
            async with two.http() as http:
                answer = await http.post("/v1/mirrors", json={"document": document()})
                assert answer.status_code == 200, answer.text
                assert (await http.get("/v1/mirrors/m")).status_code == 200
                await eventually(lambda: len(one.partitions.running()) + len(two.partitions.running()) == 20)
                one.link().lag = two.link().lag = 3
                summary = (await http.get("/v1/mirrors/m")).json()
                assert (summary["lag_records"], summary["coordinator_node"]) == (60, "n1")
                page = (await http.get("/v1/mirrors/m/partitions")).json()
                assert {item["lag_records"] for item in page["items"]} == {3}
                assert {item["node_id"] for item in page["items"]} == {"n1", "n2"}
                assert (await http.post("/v1/mirrors/m/refresh")).status_code == 200
                verb = (await http.post("/v1/mirrors/m/stop", json={})).json()
                assert verb["partitions"] == 20
                assert (await http.get("/v1/mirrors/m")).json()["topics"][0]["desired"] == "STOPPED"

    run(work)


def test_dead_node_does_not_hide_its_partitions() -> None:
    """Partitions of a node that is gone are listed from their stored state; verbs say try again."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            owner = one.view.mirror_owner("m")
            await one.lead(owner)
            await two.lead(*(p for p in range(5) if p != owner))
            world.topics(t=10)
            async with two.http() as http:
                await http.post("/v1/mirrors", json={"document": document()})
                await eventually(lambda: len(one.partitions.running()) + len(two.partitions.running()) == 10)
                await one.crash()
                page = (await http.get("/v1/mirrors/m/partitions")).json()
                assert len(page["items"]) == 10
                assert {item["state"] for item in page["items"]} == {"MIRRORING"}
                mine = len(two.partitions.running())
                assert sum(item["lag_records"] is not None for item in page["items"]) == mine
                assert_fails(await http.post("/v1/mirrors/m/stop", json={}), 503, NotLeaderError)

    run(work)


def test_forwarding_never_goes_in_circles() -> None:
    """A request that was handed on already is not handed on again when leadership is moving."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            await one.lead()
            await mirrored(one, t=1)
            async with two.http() as http:
                answer = await http.post("/v1/mirrors/m/stop", json={}, headers={"X-Kmirror-Forwarded": "1"})
                assert_fails(answer, 503, NotLeaderError)
                assert json.loads(answer.content)["leader_endpoint"] == "http://n1"

    run(work)


def test_recover_reaches_partitions_of_all_nodes() -> None:
    """FAILED partitions are recovered wherever they are led."""

    async def work() -> None:
        world = World()
        async with MemoryNode(world, "n1") as one, MemoryNode(world, "n2") as two:
            owner = one.view.mirror_owner("m")
            await one.lead(owner)
            await two.lead(*(p for p in range(5) if p != owner))
            world.topics(t=10)
            async with two.http() as http:
                await http.post("/v1/mirrors", json={"document": document()})
                await eventually(lambda: len(one.partitions.running()) + len(two.partitions.running()) == 10)
                for node in (one, two):
                    for topic, partition in list(node.link().running):
                        node.link().fail(topic, partition, ForeignWriteError("no"))
                await eventually(lambda: one.states() == two.states() == {MirrorState.FAILED})
                answer = (await http.post("/v1/mirrors/m/recover", json={})).json()
                assert (answer["changed"], answer["partitions"]) == (["t"], 10)
                await eventually(lambda: len(one.partitions.running()) + len(two.partitions.running()) == 10)

    run(work)
