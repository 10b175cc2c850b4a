"""HTTP API of a node. Routes only: what they answer is the service's, who may ask is the guard's."""

import logging
from collections.abc import Callable
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from kmirror_dagster import errors
from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.models import (
    AdvanceRequest,
    AdvanceResult,
    ChangeFeed,
    ClusterInfo,
    CreateMirror,
    ErrorBody,
    LocalMirror,
    MirrorPlan,
    MirrorSummary,
    NodeInfo,
    Page,
    PartitionOffsets,
    PartitionRef,
    PartitionStatus,
    ProbeHistory,
    RefreshStatus,
    StateWrite,
    StateWriteResult,
    VerbRequest,
    VerbResult,
)
from kmirror_dagster.coordination.peers import FORWARDED_HEADER
from kmirror_dagster.coordination.service import MAX_PAGE, NodeService
from kmirror_dagster.errors import KmirrorError, NotLeaderError, UsageError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.records import RecoveryRecord

logger = logging.getLogger(__name__)

# most of one request's references or writes; more are sent in several requests
_MAX_ITEMS = 5_000
_MAX_CHANGES = 10_000

_STATUS: list[tuple[type[KmirrorError], int]] = [
    (errors.ApiAuthenticationError, 401),
    (errors.UnknownMirrorError, 404),
    (errors.MirrorExistsError, 409),
    (errors.IllegalTransitionError, 409),
    (errors.StaleEpochError, 409),
    (errors.NotLeaderError, 503),
    (errors.FencedError, 503),
    (errors.DeadlineError, 503),
    (errors.NodeUnavailableError, 503),
    (errors.ClusterUnreachableError, 502),
    (errors.AuthenticationError, 502),
    (errors.UsageError, 400),
]

Mirror = Annotated[str, Path(max_length=249)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]


class NodeControl(Protocol):
    """What the API asks of the process it runs in."""

    def info(self) -> NodeInfo: ...

    def is_ready(self) -> bool: ...

    def request_shutdown(self) -> None: ...

    def metrics(self) -> bytes: ...


def build_app(service: Callable[[], NodeService], node: NodeControl) -> FastAPI:
    """Build the API.

    Args:
        service: gives the service; raises `NotLeaderError` while the node still loads.
        node: the process.
    """
    app = FastAPI(
        title="kmirror node",
        docs_url="/docs",
        redoc_url=None,
    )
    _add_errors(app)
    _add_node_routes(app, service, node)
    _add_mirror_routes(app, service)
    _add_state_routes(app, service)
    return app


def status_of(error: KmirrorError) -> int:
    """HTTP status an error is answered with."""
    fallback = 503 if error.retriable else 500
    return next((status for kind, status in _STATUS if isinstance(error, kind)), fallback)


def error_response(error: KmirrorError, *, leader: str | None = None) -> Response:
    """Answer that carries an error's class, so that the client raises the same."""
    kind = type(error)
    if isinstance(error, errors.FencedError) and not isinstance(error, errors.StaleEpochError):
        kind = NotLeaderError  # what it means to a caller: ask again, somebody else will answer
    body = ErrorBody(code=kind.__name__, message=str(error), leader_endpoint=leader)
    return Response(body.model_dump_json(), status_of(error), media_type="application/json")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(KmirrorError)
    async def known(_request: Request, error: Exception) -> Response:  # pyright: ignore[reportUnusedFunction]
        return error_response(error if isinstance(error, KmirrorError) else KmirrorError(str(error)))

    @app.exception_handler(RequestValidationError)
    async def malformed(_request: Request, error: Exception) -> Response:  # pyright: ignore[reportUnusedFunction]
        problems = error.errors() if isinstance(error, RequestValidationError) else []
        return error_response(UsageError(_first_problem(problems)))

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: Exception) -> Response:  # pyright: ignore[reportUnusedFunction]
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = str(error.detail) if isinstance(error, HTTPException) else str(error)
        body = ErrorBody(code=UsageError.__name__, message=detail)
        return JSONResponse(body.model_dump(), status)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:  # pyright: ignore[reportUnusedFunction]
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(KmirrorError("internal error of the node; its log has the trace"))


def _first_problem(problems: Any) -> str:
    """One line about what is wrong with a request, without the value: it may be a secret."""
    for problem in problems:
        where = ".".join(str(part) for part in problem.get("loc", ()))
        return f"request: {where}: {problem.get('msg', 'malformed')}"
    return "request: malformed"


def _add_node_routes(app: FastAPI, service: Callable[[], NodeService], node: NodeControl) -> None:
    @app.get("/health/live", response_class=PlainTextResponse)
    async def live() -> str:  # pyright: ignore[reportUnusedFunction]
        """Whether the process answers."""
        return "live\n"

    @app.get("/health/ready", response_class=PlainTextResponse)
    async def ready() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Whether the state topic is loaded and the group is joined."""
        is_ready = node.is_ready()
        return PlainTextResponse("ready\n" if is_ready else "not ready\n", 200 if is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Prometheus metrics."""
        return Response(node.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/node")
    async def info() -> NodeInfo:  # pyright: ignore[reportUnusedFunction]
        """This node."""
        return node.info()

    @app.post("/v1/node/shutdown", status_code=202)
    async def shutdown() -> dict[str, bool]:  # pyright: ignore[reportUnusedFunction]
        """Drain and end."""
        node.request_shutdown()
        return {"stopping": True}

    @app.get("/v1/cluster")
    async def cluster() -> ClusterInfo:  # pyright: ignore[reportUnusedFunction]
        """All nodes."""
        return service().cluster()

    @app.get("/v1/local/mirrors")
    async def local_mirrors(probes: bool = False) -> list[LocalMirror]:  # pyright: ignore[reportUnusedFunction]
        """What this node contributes to each mirror; asked by other nodes."""
        return service().local_mirrors(probes=probes)


def _add_mirror_routes(app: FastAPI, service: Callable[[], NodeService]) -> None:
    @app.get("/v1/mirrors")
    async def mirrors() -> list[MirrorSummary]:  # pyright: ignore[reportUnusedFunction]
        """All mirrors."""
        return await service().mirrors()

    @app.post("/v1/mirrors", response_model=MirrorSummary)
    async def create(body: CreateMirror, request: Request) -> Response | MirrorSummary:  # pyright: ignore[reportUnusedFunction]
        """Create a mirror or replace its settings."""
        name = body.document.get("mirror")
        away = await _forwarded(service(), request, name) if isinstance(name, str) else None
        if away is not None:
            return away
        record = await service().operations.create(body)
        return await service().mirror(record.mirror)

    @app.get("/v1/mirrors/{mirror}")
    async def one(mirror: Mirror) -> MirrorSummary:  # pyright: ignore[reportUnusedFunction]
        """One mirror."""
        return await service().mirror(mirror)

    @app.delete("/v1/mirrors/{mirror}", status_code=204, response_model=None)
    async def delete(  # pyright: ignore[reportUnusedFunction]
        mirror: Mirror, request: Request, force: bool = False, dry_run: bool = False
    ) -> Response:
        """Delete a mirror; topics and data stay."""
        away = await _forwarded(service(), request, mirror)
        if away is not None:
            return away
        await service().operations.delete(mirror, force=force, dry_run=dry_run)
        return Response(status_code=204)

    @app.get("/v1/mirrors/{mirror}/document")
    async def document(mirror: Mirror) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """Its settings document, references unresolved."""
        return service().known(mirror).document

    @app.get("/v1/mirrors/{mirror}/recovery")
    async def recovery(mirror: Mirror) -> RecoveryRecord | None:  # pyright: ignore[reportUnusedFunction]
        """How far its last failback or switchover is; null when there was none."""
        service().known(mirror)
        return service().operations.recovery(mirror)

    @app.put("/v1/mirrors/{mirror}/recovery", response_model=RecoveryRecord)
    async def record_recovery(  # pyright: ignore[reportUnusedFunction]
        mirror: Mirror, body: RecoveryRecord, request: Request
    ) -> Response | RecoveryRecord:
        """Record a step of a failback or switchover; refused unless it names the stored revision."""
        service().known(mirror)
        away = await _forwarded(service(), request, mirror)
        if away is not None:
            return away
        return await service().operations.record_recovery(mirror, body)

    @app.get("/v1/mirrors/{mirror}/partitions")
    async def partitions(  # pyright: ignore[reportUnusedFunction]
        mirror: Mirror,
        topic: str | None = None,
        state: MirrorState | None = None,
        cursor: str | None = None,
        limit: Limit = 500,
    ) -> Page[PartitionStatus]:
        """Its partitions, page by page."""
        return await service().partitions(mirror, topic=topic, state=state, cursor=cursor, limit=limit)

    @app.get("/v1/mirrors/{mirror}/offsets")
    async def offsets(mirror: Mirror) -> list[PartitionOffsets]:  # pyright: ignore[reportUnusedFunction]
        """Its partitions whose offsets are not the source's."""
        return service().offsets(mirror)

    @app.get("/v1/mirrors/{mirror}/offsets/{topic}/{partition}", response_model=PartitionOffsets)
    async def offsets_of(  # pyright: ignore[reportUnusedFunction]
        mirror: Mirror, topic: Mirror, partition: Annotated[int, Path(ge=0)], request: Request
    ) -> Response | PartitionOffsets:
        """Offsets of one partition at both sides, as its leader has stored them."""
        name = PartitionKey(mirror, topic, partition)
        away = await _handed_on(service(), request, service().leader_of(name))
        return away if away is not None else service().offsets_of(name)

    @app.get("/v1/mirrors/{mirror}/probes")
    async def probes(mirror: Mirror) -> list[ProbeHistory]:  # pyright: ignore[reportUnusedFunction]
        """What nodes saw of its clusters in the last two minutes."""
        return await service().probes(mirror)

    @app.get("/v1/mirrors/{mirror}/plan", response_model=MirrorPlan)
    async def plan(mirror: Mirror, request: Request) -> Response | MirrorPlan:  # pyright: ignore[reportUnusedFunction]
        """What a refresh would change now."""
        service().known(mirror)
        away = await _forwarded(service(), request, mirror)
        return away if away is not None else await service().plan(mirror)

    @app.post("/v1/mirrors/{mirror}/refresh", response_model=RefreshStatus)
    async def refresh(mirror: Mirror, request: Request) -> Response | RefreshStatus:  # pyright: ignore[reportUnusedFunction]
        """Refresh its metadata now."""
        service().known(mirror)
        away = await _forwarded(service(), request, mirror)
        return away if away is not None else await service().refreshes.refresh(mirror)

    @app.post("/v1/mirrors/{mirror}/advance", response_model=AdvanceResult)
    async def advance(mirror: Mirror, body: AdvanceRequest, request: Request) -> Response | AdvanceResult:  # pyright: ignore[reportUnusedFunction]
        """Bring one partition a step further."""
        leader = service().leader_of(PartitionKey(mirror, body.topic, body.partition))
        away = await _handed_on(service(), request, leader)
        return away if away is not None else await service().advance(mirror, body)

    @app.post("/v1/mirrors/{mirror}/{verb}", response_model=VerbResult)
    async def act(mirror: Mirror, verb: str, request: Request, body: VerbRequest) -> Response | VerbResult:  # pyright: ignore[reportUnusedFunction]
        """start, pause, resume, stop or recover."""
        service().known(mirror)
        away = await _forwarded(service(), request, mirror)
        if away is not None:
            return away
        if verb == "recover":
            return await service().recover(mirror, body)
        return await service().operations.verb(mirror, verb, body)


def _add_state_routes(app: FastAPI, service: Callable[[], NodeService]) -> None:
    @app.get("/v1/changes")
    async def changes(  # pyright: ignore[reportUnusedFunction]
        cursor: Annotated[str | None, Query(max_length=200_000)] = None,
        mirror: str | None = None,
        limit: Annotated[int, Query(ge=1, le=_MAX_CHANGES)] = 200,
    ) -> ChangeFeed:
        """State changes behind a cursor."""
        return service().changes(cursor=cursor, mirror=mirror, limit=limit)

    @app.post("/v1/states/read")
    async def read(refs: list[PartitionRef], local: bool = False) -> list[PartitionStatus]:  # pyright: ignore[reportUnusedFunction]
        """States of partitions."""
        _bounded(len(refs))
        return await service().read_states([PartitionKey.of(ref) for ref in refs], local=local)

    @app.post("/v1/states/write")
    async def write(writes: list[StateWrite], local: bool = False) -> list[StateWriteResult]:  # pyright: ignore[reportUnusedFunction]
        """Write states, guarded by their epochs."""
        _bounded(len(writes))
        return await service().write_states(writes, local=local)


def _bounded(count: int) -> None:
    if count > _MAX_ITEMS:
        raise UsageError(f"request: {count} items, at most {_MAX_ITEMS} at a time")


async def _forwarded(service: NodeService, request: Request, mirror: str) -> Response | None:
    """The answer of the node that leads the mirror; None when that is this node."""
    return await _handed_on(service, request, service.leader_of_mirror(mirror))


async def _handed_on(service: NodeService, request: Request, leader: str | None) -> Response | None:
    if leader is None:
        return None
    if FORWARDED_HEADER in request.headers:
        # leadership is moving: the two nodes disagree for a moment, and a circle must not come of it
        return error_response(NotLeaderError("leadership is moving: try again"), leader=leader)
    try:
        answer = await service.peers.forward(
            leader, request.method, request.url.path, query=request.url.query, content=await request.body()
        )
    except errors.NodeUnavailableError as error:
        return error_response(NotLeaderError(f"{error}; its work is being taken over"), leader=leader)
    # who asks this node next is to see what it has just done by way of another one
    await service.seen(answer.ends)
    return Response(answer.content, answer.status, media_type=answer.content_type)
