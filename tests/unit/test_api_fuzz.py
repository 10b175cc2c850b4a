"""The API under anything: requests made from its own schema, right and wrong, and floods of them. No brokers."""

import asyncio
import json
import logging
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from kmirror_dagster.coordination.api import build_app
from kmirror_dagster.coordination.http_guard import OPEN_PATHS
from kmirror_dagster.coordination.models import ErrorBody
from kmirror_dagster.coordination.server import ApiServer, bind
from kmirror_dagster.settings import ClusterSettings, NodeSettings
from tests.helpers.coordination import TOKEN, MemoryNode, World, mirrored

SECRET = TOKEN.get_secret_value()
# answers a request may get: done, or refused for what it is or for what the node is just now
FINE = frozenset({200, 202, 204})
REFUSED = frozenset({400, 404, 405, 409, 413, 415, 502, 503})

SCHEMA = schemathesis.openapi.from_dict(build_app(lambda: None, None).openapi())  # type: ignore[arg-type,return-value]
OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]
ANY = st.sampled_from(OPERATIONS)
# those that wait for something to happen would do so for each example
BRIEF = [
    each for each in OPERATIONS if not each.path.endswith(("/refresh", "/advance", "/shutdown", "/plan"))
]
RIGHT = st.sampled_from(BRIEF).flatmap(lambda each: each.as_strategy())
WRONG = st.sampled_from([each for each in BRIEF if list(each.iter_parameters()) or each.body]).flatmap(
    lambda each: each.as_strategy(generation_mode=GenerationMode.NEGATIVE)
)
fuzzing = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Fuzzed:
    """A node with a mirror, in a loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.world = World()
        self.node = self.loop.run_until_complete(self._start())
        self.client = self.node.http()

    async def _start(self) -> MemoryNode:
        node = MemoryNode(self.world)
        await node.lead()
        await mirrored(node, t=3)
        return node

    def send(self, case: Case, headers: dict[str, str]) -> httpx.Response:
        """Send a generated request as it is, with these headers on top."""
        told = case.as_transport_kwargs(base_url=self.node.endpoint)
        content = told.get("data")
        if told.get("json") is not None:
            content = json.dumps(told["json"])
        if isinstance(content, str):
            content = content.encode("utf-8", "surrogatepass")
        passed = {name: str(value) for name, value in dict(told.get("headers") or {}).items()}
        try:
            url = httpx.URL(told["url"], params=told.get("params"))
        except httpx.InvalidURL:
            reject()  # so long that no client would send it
        request = httpx.Request(
            told["method"],
            url,
            content=content if isinstance(content, bytes) else b"",
            headers={
                name: value.encode("utf-8", "surrogatepass") for name, value in (passed | headers).items()
            },
        )
        return self.loop.run_until_complete(asyncio.wait_for(self.client.send(request), 30))

    def is_unharmed(self) -> None:
        """The node answers, and serves its mirror as before."""
        answer = self.loop.run_until_complete(self.client.get("/v1/node"))
        assert answer.status_code == 200
        assert self.node.leadership.shard(0) is not None
        assert not self.node.shutdown_asked

    def close(self) -> None:
        self.loop.run_until_complete(self.client.aclose())
        self.loop.run_until_complete(self.node.close())
        self.loop.close()


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    made = Fuzzed()
    try:
        yield made
    finally:
        made.close()


def refusal(answer: httpx.Response) -> ErrorBody:
    """What a refused request is answered with: one line, no trace."""
    body = ErrorBody.model_validate_json(answer.content)
    assert body.message.strip()
    assert "Traceback" not in body.message
    return body


@pytest.mark.parametrize("given_token", [None, "", f"{SECRET}x", SECRET[:-1], "\u00fcber"])
def test_any_request_without_the_token_is_refused(fuzzed: Fuzzed, given_token: str | None) -> None:
    """Whatever else is right or wrong with it, a request without the token gets 401 and does nothing."""
    before = dict(fuzzed.node.view.states)
    header = {} if given_token is None else {"Authorization": f"Bearer {given_token}"}

    @settings(fuzzing, max_examples=40)
    @given(case=ANY.flatmap(lambda each: each.as_strategy()))
    def each(case: Case) -> None:
        if case.operation.path in OPEN_PATHS:
            return
        fuzzed.client.headers.pop("Authorization", None)
        answer = fuzzed.send(case, header)
        assert answer.status_code == 401
        assert refusal(answer).code == "ApiAuthenticationError"

    try:
        each()
    finally:
        fuzzed.client.headers["Authorization"] = f"Bearer {SECRET}"
    assert fuzzed.node.view.states == before
    fuzzed.is_unharmed()


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_any_request_with_the_token_is_done_or_refused_in_one_line(
    fuzzed: Fuzzed, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Made from the API's own schema, and from what it forbids: never an internal error, never the token in a log."""
    caplog.set_level(logging.DEBUG, logger="kmirror_dagster")

    @fuzzing
    @given(case=RIGHT if kind == "right" else WRONG)
    def each(case: Case) -> None:
        answer = fuzzed.send(case, {"Authorization": f"Bearer {SECRET}"})
        assert answer.status_code in FINE | REFUSED, (answer.status_code, answer.text)
        if answer.status_code in REFUSED:
            refusal(answer)

    each()
    fuzzed.is_unharmed()
    assert SECRET not in caplog.text
    assert "Traceback" not in caplog.text


def test_any_bytes_are_done_or_refused(fuzzed: Fuzzed) -> None:
    """A body that is no JSON, or is of another shape, is refused as any malformed request."""

    @settings(fuzzing, max_examples=100)
    @given(
        method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]),
        path=st.sampled_from([each.path.replace("{mirror}", "m") for each in BRIEF]),
        body=st.binary(max_size=2_000)
        | st.recursive(st.none() | st.text() | st.floats(), st.lists).map(_json),
    )
    def each(method: str, path: str, body: bytes) -> None:
        headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
        request = httpx.Request(method, fuzzed.node.endpoint + path, content=body, headers=headers)
        answer = fuzzed.loop.run_until_complete(fuzzed.client.send(request))
        assert answer.status_code in FINE | REFUSED, (answer.status_code, answer.text)

    each()
    fuzzed.is_unharmed()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def test_flood_is_refused_and_over_when_it_ends() -> None:
    """With hundreds of connections that hang, further requests are refused at once; without them all is as before."""

    async def work() -> None:
        node = MemoryNode(World())
        own = NodeSettings(destination=ClusterSettings(bootstrap_servers=("nowhere:1",)))
        listener = bind(own)
        server = ApiServer(node.app, listener, settings=own)
        server.start()
        port = listener.getsockname()[1]
        hanging: list[asyncio.StreamWriter] = []
        async with httpx.AsyncClient(
            base_url=server.endpoint, headers={"Authorization": f"Bearer {SECRET}"}
        ) as client:
            assert (await _settled(client, 200)).status_code == 200
            for _ in range(300):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"POST /v1/states/read HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n")
                hanging.append(writer)
            refused = await _settled(client, 503)
            assert SECRET not in refused.text
            for writer in hanging:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for writer in hanging), return_exceptions=True)
            assert (await _settled(client, 200)).status_code == 200
        await server.close()
        await node.close()

    asyncio.run(asyncio.wait_for(work(), 60))


async def _settled(client: httpx.AsyncClient, status: int) -> httpx.Response:
    """Ask until the answer has a status; how soon a closed connection is noticed is the system's business."""
    for _ in range(300):
        answer = await client.get("/v1/node")
        if answer.status_code == status:
            return answer
        await asyncio.sleep(0.05)
    raise AssertionError(f"never {status}: {answer.status_code}")
