"""Client of the node's HTTP API: blocking, typed, safe to repeat. What Dagster and the command line use."""

import os
import random
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, SecretStr, TypeAdapter, ValidationError

from kmirror_dagster import errors
from kmirror_dagster.coordination.models import (
    AdvanceRequest,
    AdvanceResult,
    ChangeFeed,
    ClusterInfo,
    CreateMirror,
    ErrorBody,
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
from kmirror_dagster.coordination.state_directory import (
    ENDPOINT_VARIABLE,
    TOKEN_VARIABLE,
    StateDirectory,
    default_state_dir,
)
from kmirror_dagster.coordination.tls import CA_VARIABLE, ClientIdentity, identity_of, verifying_context
from kmirror_dagster.errors import (
    ApiAuthenticationError,
    DeadlineError,
    KmirrorError,
    NodeUnavailableError,
)
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.offset_map import OffsetMap, Run
from kmirror_dagster.records import RecoveryRecord

START_HINT = "start one with: kmirror node start"

# Answers that change by themselves within seconds: a take-over is under way, or the node still loads.
_ASK_AGAIN = 503
_RETRY_CAP_S = 1.0
_RETRY_INITIAL_S = 0.05

_ERRORS: dict[str, type[KmirrorError]] = {
    name: cls
    for name, cls in vars(errors).items()
    # a broker's error takes more than a message; its text says all the caller needs
    if isinstance(cls, type) and issubclass(cls, KmirrorError) and cls is not errors.BrokerError
}

_T = TypeVar("_T")


def error_from(body: ErrorBody) -> KmirrorError:
    """Rebuild the error a node answered with; an unknown class becomes a plain `KmirrorError`."""
    return _ERRORS.get(body.code, KmirrorError)(body.message)


class _AskAgainError(Exception):
    """Error when an answer may be another one shortly: a take-over, a lost connection."""

    def __init__(self, error: KmirrorError) -> None:
        super().__init__(str(error))
        self.error = error


class NodeClient:
    """One connection to a node, opened at the first call.

    Every call may be repeated: reads change nothing, verbs and writes state what is wanted. Calls that meet a
    take-over (answered 503) or lose their connection are repeated until `deadline_s`.

    Args:
        endpoint: base URL of a node; several, comma-separated, are tried in turn.
        token: API token.
        timeout_s: longest wait for one answer, on top of what the call itself asks the node to wait.
        deadline_s: longest a call may take with its repetitions.
        ca: PEM file to verify an `https` endpoint with; None for the system's authorities.
    """

    def __init__(
        self,
        endpoint: str,
        token: SecretStr,
        *,
        timeout_s: float = 5.0,
        deadline_s: float = 30.0,
        ca: Path | None = None,
        identity: ClientIdentity | None = None,
    ) -> None:
        self.endpoints = [part.strip().rstrip("/") for part in endpoint.split(",") if part.strip()]
        if not self.endpoints:
            raise NodeUnavailableError(f"no node endpoint given; set {ENDPOINT_VARIABLE} or {START_HINT}")
        self._token = token
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._ca = ca
        self._identity = identity
        self._http: httpx.Client | None = None
        self._rng = random.Random()  # noqa: S311 - jitter, not secrets

    @classmethod
    def discover(
        cls,
        state_dir: Path | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 5.0,
        deadline_s: float = 30.0,
    ) -> "NodeClient":
        """Client of the node named by the environment, else of the one that runs on the state directory.

        Args:
            state_dir: directory to look in; None for the default one.
            environ: variables to read (`KMIRROR_ENDPOINT`, `KMIRROR_TOKEN`, `KMIRROR_CA`, `KMIRROR_CERTIFICATE`,
                `KMIRROR_KEY`, `KMIRROR_STATE_DIR`); None for this process's.

        Raises:
            NodeUnavailableError: when neither names a running node.
        """
        variables = os.environ if environ is None else environ
        directory = StateDirectory(state_dir or default_state_dir(variables))
        token = directory.token(variables)
        endpoint = variables.get(ENDPOINT_VARIABLE)
        ca, identity = variables.get(CA_VARIABLE), identity_of(variables)
        # a directory named by the caller is a closer word than the environment's endpoint
        if not endpoint or state_dir is not None:
            running = directory.read_endpoint()
            if running is None:
                raise NodeUnavailableError(f"no node runs on {directory.path}; {START_HINT}")
            endpoint, ca, identity = running.endpoint, ca or running.ca, identity or running.identity
        if token is None:
            raise ApiAuthenticationError(
                f"no API token: set {TOKEN_VARIABLE} or keep it in {directory.path}/token"
            )
        return cls(
            endpoint,
            token,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            ca=Path(ca) if ca else None,
            identity=identity,
        )

    def live(self) -> bool:
        """Whether a node process answers at all."""
        return self._probe("/health/live")

    def ready(self) -> bool:
        """Whether the node has loaded the state topic and joined the group."""
        return self._probe("/health/ready")

    def node(self) -> NodeInfo:
        """The answering node."""
        return self._get("/v1/node", NodeInfo)

    def cluster(self) -> ClusterInfo:
        """All nodes as the answering one knows them."""
        return self._get("/v1/cluster", ClusterInfo)

    def metrics(self) -> str:
        """Prometheus text of the answering node."""
        return self._send("GET", "/metrics").text

    def mirrors(self) -> list[MirrorSummary]:
        """All mirrors, by name."""
        return self._get("/v1/mirrors", TypeAdapter(list[MirrorSummary]))

    def mirror(self, name: str) -> MirrorSummary:
        """One mirror.

        Raises:
            UnknownMirrorError: when there is none of that name.
        """
        return self._get(_mirror_path(name), MirrorSummary)

    def document(self, name: str) -> dict[str, Any]:
        """Settings document of a mirror, `${ENV}` references unresolved."""
        return self._get(_mirror_path(name, "document"), TypeAdapter(dict[str, Any]))

    def create(self, request: CreateMirror) -> MirrorSummary:
        """Create a mirror, or change its settings with `replace`; repeating it changes nothing.

        Raises:
            SettingsError: when the document is refused.
            SameClusterError: when source and destination are one cluster; nothing has been written then.
            MirrorExistsError: when one of that name has other settings and `replace` is not set.
            ClusterUnreachableError, AuthenticationError: when a cluster cannot be asked for its id.
        """
        answer = self._send("POST", "/v1/mirrors", body=request, extra_s=self._deadline_s)
        return _read(answer, MirrorSummary)

    def delete(self, name: str, *, force: bool = False, dry_run: bool = False) -> None:
        """Delete a mirror; the destination's topics and data stay. A dry run only tells whether it could be.

        Raises:
            UnknownMirrorError: when there is none of that name.
            IllegalTransitionError: when a partition is not STOPPED and `force` is not set.
        """
        chosen = {"force": force, "dry_run": dry_run}
        self._send(
            "DELETE", _mirror_path(name), params={key: "true" for key, is_set in chosen.items() if is_set}
        )

    def verb(self, name: str, verb: str, request: VerbRequest | None = None) -> VerbResult:
        """Ask for `start`, `pause`, `resume`, `stop` or `recover`; returns when the wish is stored.

        Raises:
            UnknownMirrorError: when there is no such mirror.
            IllegalTransitionError: when a topic cannot go there from where it is.
            UsageError: when a pattern is malformed or matches no topic.
        """
        answer = self._send("POST", _mirror_path(name, verb), body=request or VerbRequest())
        return _read(answer, VerbResult)

    def refresh(self, name: str) -> RefreshStatus:
        """Run one metadata refresh of a mirror now and wait for it."""
        answer = self._send("POST", _mirror_path(name, "refresh"), extra_s=self._deadline_s)
        return _read(answer, RefreshStatus)

    def plan(self, name: str) -> MirrorPlan:
        """What a metadata refresh of a mirror would change now; changes nothing.

        Raises:
            UnknownMirrorError: when there is none of that name.
        """
        answer = self._send("GET", _mirror_path(name, "plan"), extra_s=self._deadline_s)
        return _read(answer, MirrorPlan)

    def partitions(
        self,
        name: str,
        *,
        topic: str | None = None,
        state: MirrorState | None = None,
        cursor: str | None = None,
        limit: int = 500,
    ) -> Page[PartitionStatus]:
        """One page of a mirror's partitions, by topic and partition."""
        params = {"topic": topic, "state": state and state.value, "cursor": cursor, "limit": str(limit)}
        return self._get(_mirror_path(name, "partitions"), Page[PartitionStatus], params)

    def recovery(self, name: str) -> RecoveryRecord | None:
        """How far the last failback or switchover of a mirror is; None when there was none."""
        return self._get(_mirror_path(name, "recovery"), TypeAdapter(RecoveryRecord | None))

    def record_recovery(self, record: RecoveryRecord) -> RecoveryRecord:
        """Store how far a recovery is; the answer has the revision that the next write has to name.

        Raises:
            StaleEpochError: when somebody else has written meanwhile.
            IllegalTransitionError: when another one is under way.
        """
        return _read(self._send("PUT", _mirror_path(record.mirror, "recovery"), body=record), RecoveryRecord)

    def iter_partitions(
        self, name: str, *, topic: str | None = None, state: MirrorState | None = None, limit: int = 500
    ) -> Iterator[PartitionStatus]:
        """All partitions of a mirror, fetched page by page."""
        cursor: str | None = None
        while True:
            page = self.partitions(name, topic=topic, state=state, cursor=cursor, limit=limit)
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return

    def advance(self, name: str, request: AdvanceRequest) -> AdvanceResult:
        """Bring one partition a step further towards its desired state and wait for it, at most `wait_ms`."""
        answer = self._send(
            "POST", _mirror_path(name, "advance"), body=request, extra_s=request.wait_ms / 1000
        )
        return _read(answer, AdvanceResult)

    def changes(
        self, *, cursor: str | None = None, mirror: str | None = None, limit: int = 200
    ) -> ChangeFeed:
        """State changes behind a cursor; without a cursor all current states."""
        params = {"cursor": cursor, "mirror": mirror, "limit": str(limit)}
        return self._get("/v1/changes", ChangeFeed, params)

    def offsets(self, name: str) -> list[PartitionOffsets]:
        """Partitions of a mirror whose offsets are not the source's."""
        return self._get(_mirror_path(name, "offsets"), TypeAdapter(list[PartitionOffsets]))

    def offset_maps(self, name: str) -> dict[tuple[str, int], OffsetMap]:
        """Maps of these partitions by topic and partition."""
        return {
            (told.topic, told.partition): OffsetMap(tuple(Run(*run) for run in told.runs))
            for told in self.offsets(name)
        }

    def offsets_of(self, name: str, topic: str, partition: int) -> PartitionOffsets:
        """Offsets of one partition at both sides.

        Raises:
            UsageError: when the mirror has no such partition.
        """
        tail = f"offsets/{quote(topic, safe='')}/{partition}"
        return self._get(_mirror_path(name, tail), PartitionOffsets)

    def probes(self, name: str) -> list[ProbeHistory]:
        """What each node of a mirror saw of its clusters in the last two minutes."""
        return self._get(_mirror_path(name, "probes"), TypeAdapter(list[ProbeHistory]))

    def read_states(self, refs: Sequence[PartitionRef]) -> list[PartitionStatus]:
        """States of the named partitions, in the order asked for."""
        return _read(
            self._send("POST", "/v1/states/read", body=list(refs)), TypeAdapter(list[PartitionStatus])
        )

    def write_states(self, writes: Sequence[StateWrite]) -> list[StateWriteResult]:
        """Write states, each refused by itself when an epoch is not the stored one."""
        return _read(
            self._send("POST", "/v1/states/write", body=list(writes)), TypeAdapter(list[StateWriteResult])
        )

    def shutdown(self) -> None:
        """Ask the node to drain and end."""
        self._send("POST", "/v1/node/shutdown")

    def close(self) -> None:
        """Close the connection; a later call opens it again."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def __enter__(self) -> "NodeClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _client(self) -> httpx.Client:
        if self._http is None:
            # the bare context spares plain HTTP the 30 ms of reading the system's authorities
            secure = any(endpoint.startswith("https:") for endpoint in self.endpoints)
            verify = (
                verifying_context(self._ca, self._identity)
                if secure
                else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            )
            self._http = httpx.Client(
                verify=verify,
                trust_env=False,  # a proxy variable must not catch calls to loopback
                headers={"Authorization": f"Bearer {self._token.get_secret_value()}"},
            )
        return self._http

    def _probe(self, path: str) -> bool:
        return any(self._answers(endpoint + path) for endpoint in self.endpoints)

    def _answers(self, url: str) -> bool:
        try:
            return self._client().get(url, timeout=self._timeout_s).is_success
        except httpx.TransportError:
            return False

    def _get(
        self,
        path: str,
        model: "type[_T] | TypeAdapter[_T]",
        params: Mapping[str, str | None] | None = None,
    ) -> _T:
        return _read(self._send("GET", path, params=params), model)

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | list[Any] | None = None,
        params: Mapping[str, str | None] | None = None,
        extra_s: float = 0.0,
    ) -> httpx.Response:
        """Send until there is a final answer; `extra_s` is what the node itself may wait."""
        content = _BODY.dump_json(body) if body is not None else None
        query = {key: value for key, value in (params or {}).items() if value is not None}
        deadline = time.monotonic() + self._deadline_s + extra_s
        delay = _RETRY_INITIAL_S
        while True:
            left = deadline - time.monotonic()
            try:
                return self._attempt(
                    method, path, content, query, min(self._timeout_s + extra_s, max(left, 0.05))
                )
            except _AskAgainError as again:
                pause = self._rng.uniform(delay / 2, delay)
                if time.monotonic() + pause >= deadline:
                    raise again.error from again
            time.sleep(pause)
            delay = min(delay * 2, _RETRY_CAP_S)

    def _attempt(
        self, method: str, path: str, content: bytes | None, query: dict[str, str], timeout_s: float
    ) -> httpx.Response:
        """One pass over the endpoints: the first that accepts the connection answers."""
        headers = {"Content-Type": "application/json"} if content is not None else None
        for endpoint in self.endpoints:
            try:
                answer = self._client().request(
                    method, endpoint + path, content=content, params=query, headers=headers, timeout=timeout_s
                )
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            except httpx.TransportError as error:
                what = type(error).__name__
                raise _AskAgainError(
                    DeadlineError(f"node at {endpoint} did not answer {method} {path}: {what}")
                ) from error
            if answer.status_code == _ASK_AGAIN:
                raise _AskAgainError(_failure(answer, endpoint))
            if answer.is_error:
                raise _failure(answer, endpoint)
            return answer
        raise NodeUnavailableError(f"no node answers at {', '.join(self.endpoints)}; {START_HINT}")


_BODY: TypeAdapter[Any] = TypeAdapter(Any)


def _mirror_path(name: str, tail: str | None = None) -> str:
    path = f"/v1/mirrors/{quote(name, safe='')}"
    return f"{path}/{tail}" if tail else path


def _read(answer: httpx.Response, model: "type[_T] | TypeAdapter[_T]") -> _T:
    adapter = model if isinstance(model, TypeAdapter) else TypeAdapter(model)
    try:
        return adapter.validate_json(answer.content)
    except ValidationError as error:
        first = str(error).splitlines()[0]
        raise KmirrorError(f"{answer.url} answered something unexpected: {first}") from error


def _failure(answer: httpx.Response, endpoint: str) -> KmirrorError:
    try:
        return error_from(ErrorBody.model_validate_json(answer.content))
    except ValidationError:
        return KmirrorError(f"{endpoint} answered {answer.status_code} and is no kmirror node")
