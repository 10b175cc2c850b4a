"""Start, find and stop the node of a state directory; it runs detached and outlives whoever started it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
from pydantic import SecretStr

from kmirror_dagster.coordination.client import NodeClient, error_from
from kmirror_dagster.coordination.models import ErrorBody
from kmirror_dagster.coordination.state_directory import EndpointFile, StateDirectory
from kmirror_dagster.coordination.tls import ClientIdentity, identity_of
from kmirror_dagster.errors import DeadlineError, KmirrorError, NodeRunningError
from kmirror_dagster.settings import NodeSettings
from kmirror_dagster.settings.references import escape_references

_POLL_S = 0.05
_KILL_GRACE_S = 2.0
_LOG_BYTES = 50 * 1024 * 1024
_REASON_GRACE_S = 10.0
# interpreter start and imports of the child, before it has forked itself off
_FORK_DEADLINE_S = 60.0


@dataclass(frozen=True)
class NodeEndpoint:
    """A running node of this machine.

    Attributes:
        endpoint: base URL of its API.
        token: API token.
        ca: PEM file that verifies an `https` endpoint, None for the system's authorities.
        identity: what is shown to a node that asks for a certificate.
    """

    endpoint: str
    token: SecretStr
    pid: int
    node_id: str
    ca: str | None = None
    identity: ClientIdentity | None = None

    def client(self, *, timeout_s: float = 5.0, deadline_s: float = 30.0) -> NodeClient:
        """Client of this node."""
        ca = Path(self.ca) if self.ca else None
        return NodeClient(
            self.endpoint,
            self.token,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            ca=ca,
            identity=self.identity,
        )


def node_endpoint(state_dir: Path) -> NodeEndpoint | None:
    """The node that runs on a state directory, None when none does."""
    directory = StateDirectory(state_dir)
    running = directory.read_endpoint()
    token = directory.token()
    return _endpoint(running, token) if running and token else None


def require_no_node(state_dir: Path) -> None:
    """Refuse to start another node on a state directory.

    Raises:
        NodeRunningError: naming the node that runs there.
    """
    running = StateDirectory(state_dir).read_endpoint()
    if running is not None:
        raise NodeRunningError(
            f"{state_dir}: node {running.node_id} (pid {running.pid}) runs on this state directory; "
            "stop it with 'kmirror node stop' or name another one with --state-dir"
        )


def start_node(
    state_dir: Path,
    config: Path | NodeSettings,
    *,
    wait_s: float = 60.0,
    environ: Mapping[str, str] | None = None,
) -> NodeEndpoint:
    """Start a detached node and wait until it is ready.

    Args:
        state_dir: directory of the node; made when missing.
        config: node document, or settings handed over through a pipe (nothing of them is written down).
        wait_s: longest wait for readiness; a node that is not ready 10 s later is ended again.
        environ: variables of the node's process; None for this process's.

    Raises:
        NodeRunningError: when a node runs on the directory already.
        SettingsError, PortInUseError, ClusterUnreachableError, AuthenticationError: the node's own reason.
        DeadlineError: when it was not ready in time.
    """
    # a node that waits for its cluster gives up by itself, and says why a moment later
    deadline = time.monotonic() + wait_s + _REASON_GRACE_S
    directory = StateDirectory(state_dir)
    require_no_node(state_dir)
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory.mark_stopped(False)
    log_start = _rotated(directory.log_file)
    pids = _spawn(directory, config, wait_s, environ)
    while time.monotonic() < deadline:
        if len(pids) < 2 or not _is_running(pids[-1]):
            raise _reason(directory.log_file, log_start, pids)
        ready = _ready(directory, pids[-1])
        if ready is not None:
            return ready
        time.sleep(_POLL_S)
    _end(pids[-1])
    raise DeadlineError(f"node on {state_dir} was not ready within {wait_s:.0f} s; see {directory.log_file}")


def stop_node(state_dir: Path, *, wait_s: float = 30.0) -> bool:
    """Drain and end the node of a state directory; True when there was one.

    The directory remembers that this was on purpose, so that no keeper starts the node again.
    A node that has not ended within `wait_s` is killed: its work is then taken over like after a crash.
    """
    directory = StateDirectory(state_dir)
    running = directory.read_endpoint()
    if state_dir.exists():
        directory.mark_stopped(True)
    if running is None:
        return False
    _signal(running.pid, signal.SIGTERM)
    if not _wait_gone(running, wait_s):
        _signal(running.pid, signal.SIGKILL)
        _wait_gone(running, _KILL_GRACE_S)
    return True


def ensure_node(
    state_dir: Path,
    config: Path | NodeSettings,
    *,
    wait_s: float = 60.0,
    environ: Mapping[str, str] | None = None,
) -> NodeEndpoint:
    """The node of a state directory, started when none runs; callers may race, one node comes of it.

    Raises:
        As `start_node`, except `NodeRunningError`.
    """
    deadline = time.monotonic() + wait_s
    while True:
        running = node_endpoint(state_dir)
        if running is not None:
            return running
        left = deadline - time.monotonic()
        try:
            return start_node(state_dir, config, wait_s=max(left, 1.0), environ=environ)
        except NodeRunningError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_S)


def _endpoint(running: EndpointFile, token: SecretStr) -> NodeEndpoint:
    identity = identity_of(os.environ) or running.identity
    return NodeEndpoint(running.endpoint, token, running.pid, running.node_id, running.ca, identity)


def _spawn(
    directory: StateDirectory, config: Path | NodeSettings, wait_s: float, environ: Mapping[str, str] | None
) -> list[int]:
    """Run the node module, which forks itself off; pids of that process and, if it came so far, the node."""
    from_pipe = isinstance(config, NodeSettings)
    command = [sys.executable, "-m", "kmirror_dagster.coordination.node", "--detach"]
    command += ["--config", "-" if from_pipe else str(config), "--state-dir", str(directory.path)]
    command += ["--startup-wait", f"{wait_s:.1f}"]
    document = (
        json.dumps(_revealed(config.model_dump(by_alias=True, exclude_unset=True))).encode()
        if from_pipe
        else b""
    )
    descriptor = os.open(directory.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=descriptor,
            start_new_session=True,
            env=dict(environ) if environ is not None else None,
        ) as process:
            try:
                output, _ = process.communicate(document, timeout=_FORK_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise DeadlineError(f"node process did not start; see {directory.log_file}") from None
    finally:
        os.close(descriptor)
    return [process.pid, int(output)] if process.returncode == 0 else [process.pid]


def _revealed(value: Any) -> Any:
    """A dumped document with its secrets in the clear: it goes through a pipe to the node, nowhere else."""
    if isinstance(value, SecretStr):
        return _revealed(value.get_secret_value())
    if isinstance(value, dict):
        return {str(key): _revealed(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_revealed(item) for item in cast("list[Any]", value)]
    # values may look like references to variables and are not: they were resolved when the settings were made
    return escape_references(value) if isinstance(value, str) else value


def _rotated(log_file: Path) -> int:
    """Set a long log aside (one is kept) and tell how long the current one is, bytes."""
    if not log_file.exists():
        return 0
    size = log_file.stat().st_size
    if size <= _LOG_BYTES:
        return size
    log_file.replace(log_file.with_suffix(".log.1"))
    return 0


def _ready(directory: StateDirectory, pid: int) -> NodeEndpoint | None:
    running = directory.read_endpoint()
    token = directory.token()
    if running is None or running.pid != pid or token is None:
        return None
    endpoint = _endpoint(running, token)
    with endpoint.client(timeout_s=2.0) as client:
        return endpoint if client.ready() else None


def _reason(log_file: Path, offset: int, pids: list[int]) -> KmirrorError:
    """Why the node ended: the error its last log line names."""
    with log_file.open("rb") as file:
        file.seek(offset)
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("pid") in pids and "error" in entry:
            return error_from(ErrorBody(code=str(entry["error"]), message=str(entry["message"])))
    return KmirrorError(f"node process ended without a reason; see {log_file}")


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_gone(running: EndpointFile, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while running.is_alive():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _end(pid: int) -> None:
    _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + _KILL_GRACE_S
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if _is_running(pid):
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
