"""The client of the node's API: which errors it raises, what it repeats, where it finds its node."""

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from kmirror_dagster import errors
from kmirror_dagster.coordination.client import NodeClient, error_from
from kmirror_dagster.coordination.models import (
    AdvanceRequest,
    ChangeFeed,
    ErrorBody,
    Page,
    PartitionStatus,
    VerbRequest,
)
from kmirror_dagster.coordination.state_directory import StateDirectory
from kmirror_dagster.errors import (
    ApiAuthenticationError,
    IllegalTransitionError,
    KmirrorError,
    NodeRunningError,
    NodeUnavailableError,
    NotLeaderError,
)
from kmirror_dagster.lifecycle import DesiredState

Answer = Callable[[httpx.Request], httpx.Response]


def client(answer: Answer, *, endpoint: str = "http://n1:1", deadline_s: float = 5.0) -> NodeClient:
    """A client whose calls are answered by a function."""
    made = NodeClient(endpoint, SecretStr("tok"), timeout_s=1.0, deadline_s=deadline_s)
    made._http = httpx.Client(transport=httpx.MockTransport(answer), headers={"Authorization": "Bearer tok"})
    return made


def refusal(error: KmirrorError, status: int) -> httpx.Response:
    body = ErrorBody(code=type(error).__name__, message=str(error))
    return httpx.Response(status, text=body.model_dump_json())


EMPTY_FEED = ChangeFeed(changes=[], cursor="c")


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, KmirrorError) and kind is not errors.BrokerError
    ],
)
def test_error_keeps_its_class(kind: type[KmirrorError]) -> None:
    """What a node raised is raised at the caller, so that flags and exit codes are the same."""
    error = error_from(ErrorBody(code=kind.__name__, message="why"))
    assert type(error) is kind
    assert str(error) == "why"


@pytest.mark.parametrize("code", ["BrokerError", "SomethingNew", "annotations", ""])
def test_unknown_error_is_a_plain_one(code: str) -> None:
    """A class this version does not know is an error all the same."""
    assert type(error_from(ErrorBody(code=code, message="why"))) is KmirrorError


def test_final_refusal_is_raised_at_once() -> None:
    """What repeating cannot change is not repeated."""
    calls: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.path)
        return refusal(IllegalTransitionError("m/t is STOPPED: use 'start'"), 409)

    with pytest.raises(IllegalTransitionError, match="use 'start'"), client(answer) as node:
        node.verb("m", "pause")
    assert calls == ["/v1/mirrors/m/pause"]


def test_take_over_is_waited_out() -> None:
    """A call that meets a take-over is repeated until somebody leads."""
    answers = [refusal(NotLeaderError("moving"), 503)] * 3 + [
        httpx.Response(200, text=EMPTY_FEED.model_dump_json())
    ]

    with client(lambda _request: answers.pop(0)) as node:
        assert node.changes() == EMPTY_FEED


def test_take_over_that_lasts_is_told_when_the_deadline_passes() -> None:
    """The last reason is raised, within the deadline."""
    began = time.monotonic()
    with pytest.raises(NotLeaderError, match="moving"):
        client(lambda _request: refusal(NotLeaderError("moving"), 503), deadline_s=0.5).changes()
    assert time.monotonic() - began < 2


def test_node_that_does_not_answer_is_named_with_the_remedy() -> None:
    """A refused connection is one line that says how to start a node; it is not waited for."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    began = time.monotonic()
    with pytest.raises(NodeUnavailableError, match=r"no node answers at http://n1:1; .*kmirror node start"):
        client(refuse).mirrors()
    assert time.monotonic() - began < 1
    assert client(refuse).live() is False


def test_second_endpoint_answers_when_the_first_is_gone() -> None:
    """Of several endpoints the first that accepts the connection answers."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "n1":
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, text="[]")

    assert client(answer, endpoint="http://n1:1, http://n2:2/").mirrors() == []


def test_lost_answer_is_asked_for_again() -> None:
    """A connection that ends before the answer is no failure: the call is safe to repeat."""
    calls: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(1)
        if len(calls) == 1:
            raise httpx.RemoteProtocolError("closed", request=request)
        return httpx.Response(200, text=EMPTY_FEED.model_dump_json())

    assert client(answer).changes() == EMPTY_FEED
    assert len(calls) == 2


def test_something_else_at_the_endpoint_is_said_to_be_so() -> None:
    """An answer that is not the API's is named, not raised as a parsing trace."""
    with pytest.raises(KmirrorError, match="is no kmirror node"):
        client(lambda _request: httpx.Response(404, text="<html>")).mirrors()
    with pytest.raises(KmirrorError, match="something unexpected"):
        client(lambda _request: httpx.Response(200, text="<html>")).mirrors()


def test_names_are_quoted_and_bodies_typed() -> None:
    """A mirror's name cannot change the path, and bodies are JSON."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return refusal(NodeRunningError("x"), 400)

    with client(answer) as node:
        for call in (
            lambda: node.mirror("a/../b?c"),
            lambda: node.verb("m", "stop", VerbRequest(topics=["t"])),
            lambda: node.advance("m", AdvanceRequest(topic="t", partition=0)),
        ):
            with pytest.raises(NodeRunningError):
                call()
    assert seen[0].url.raw_path == b"/v1/mirrors/a%2F..%2Fb%3Fc"
    assert seen[1].headers["content-type"] == "application/json"
    assert seen[1].content == b'{"topics":["t"],"operation_id":null,"dry_run":false}'
    assert seen[2].headers["authorization"] == "Bearer tok"


def test_all_pages_are_read() -> None:
    """Iterating fetches page after page."""

    def answer(request: httpx.Request) -> httpx.Response:
        first = "cursor" not in request.url.params
        item = PartitionStatus(
            mirror="m", topic="t", partition=0 if first else 1, state=None, desired=DesiredState.MIRRORING
        )
        page = Page[PartitionStatus](items=[item], next_cursor="next" if first else None)
        return httpx.Response(200, text=page.model_dump_json())

    assert [item.partition for item in client(answer).iter_partitions("m")] == [0, 1]


# where the node is found


def test_environment_names_the_node() -> None:
    """Endpoint and token are taken from the environment."""
    found = NodeClient.discover(environ={"KMIRROR_ENDPOINT": "http://x:1", "KMIRROR_TOKEN": "t"})
    assert found.endpoints == ["http://x:1"]


def test_endpoint_without_a_token_says_what_is_missing(tmp_path: Path) -> None:
    """Without a token nothing is tried."""
    environ = {"KMIRROR_ENDPOINT": "http://x:1", "KMIRROR_STATE_DIR": str(tmp_path)}
    with pytest.raises(ApiAuthenticationError, match="KMIRROR_TOKEN"):
        NodeClient.discover(environ=environ)


def test_state_directory_without_a_node_names_the_remedy(tmp_path: Path) -> None:
    """A directory no node runs on is named together with the command that starts one."""
    for environ in ({}, {"KMIRROR_STATE_DIR": str(tmp_path / "other")}):
        with pytest.raises(NodeUnavailableError, match=r"no node runs on .*kmirror node start"):
            NodeClient.discover(tmp_path, environ)


def test_state_directory_names_the_running_node(tmp_path: Path) -> None:
    """The node that holds a directory is found by it; one that is gone is not."""
    directory = StateDirectory(tmp_path)
    token = directory.ensure_token({})
    directory.write_endpoint(endpoint="http://127.0.0.1:5", node_id="n")
    assert NodeClient.discover(tmp_path, {}).endpoints == ["http://127.0.0.1:5"]
    assert directory.token({}) == token
    dead = directory.path / "node.json"
    dead.write_text(dead.read_text().replace('"started_s":', '"started_s":1'))
    with pytest.raises(NodeUnavailableError):
        NodeClient.discover(tmp_path, {})


def test_files_are_the_owners_only(tmp_path: Path) -> None:
    """Token and endpoint can be read by their owner alone, and the token is kept over restarts."""
    directory = StateDirectory(tmp_path / "node")
    first = directory.ensure_token({})
    directory.write_endpoint(endpoint="http://127.0.0.1:5", node_id="n")
    assert StateDirectory(tmp_path / "node").ensure_token({}) == first
    for name in ("token", "node.json"):
        assert (directory.path / name).stat().st_mode & 0o777 == 0o600
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert first.get_secret_value() not in repr(first)


def test_token_of_the_environment_is_used_and_kept(tmp_path: Path) -> None:
    """Nodes of one group share a token; clients on the same machine find it in the directory."""
    directory = StateDirectory(tmp_path)
    directory.ensure_token({})
    assert directory.ensure_token({"KMIRROR_TOKEN": "shared"}).get_secret_value() == "shared"
    assert directory.token({}) == SecretStr("shared")


def test_directory_is_held_by_one_process(tmp_path: Path) -> None:
    """A second holder is refused by name until the first lets go."""
    one, two = StateDirectory(tmp_path), StateDirectory(tmp_path)
    one.acquire()
    one.write_endpoint(endpoint="http://127.0.0.1:5", node_id="n-one")
    with pytest.raises(NodeRunningError, match="n-one"):
        two.acquire()
    one.release()
    two.acquire()
    two.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"endpoint": 1}', "\x00\xff"])
def test_damaged_endpoint_file_means_no_node(tmp_path: Path, content: str) -> None:
    """A file that was cut short by a full disk is no reason to fail."""
    (tmp_path / "node.json").write_text(content, encoding="latin-1")
    assert StateDirectory(tmp_path).read_endpoint() is None
