"""State directory of a node: its lock, API token, endpoint file and log. One node per directory."""

import fcntl
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import platformdirs
import psutil
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from kmirror_dagster.coordination.tls import ClientIdentity
from kmirror_dagster.errors import NodeRunningError
from kmirror_dagster.settings.references import variable

STATE_DIR_VARIABLE = "KMIRROR_STATE_DIR"
TOKEN_VARIABLE = "KMIRROR_TOKEN"  # noqa: S105 - a variable's name
ENDPOINT_VARIABLE = "KMIRROR_ENDPOINT"

# psutil and the kernel round a process's start differently by up to one clock tick (10 ms)
_START_TOLERANCE_S = 0.5


class EndpointFile(BaseModel):
    """Content of `node.json`: where the node of this directory listens.

    Attributes:
        ca: PEM file that verifies it.
        certificate, key: files that whoever may read them can show to a node that asks for a certificate.
        started_s: start of the process as psutil reports it (epoch seconds); guards against a reused pid.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    endpoint: str
    pid: int
    node_id: str
    started_s: float
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    @property
    def identity(self) -> ClientIdentity | None:
        """What clients on this machine show to a node that asks for a certificate."""
        return (
            ClientIdentity(Path(self.certificate), Path(self.key)) if self.certificate and self.key else None
        )

    def is_alive(self) -> bool:
        """Whether the very process that wrote the file still runs."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return abs(process.create_time() - self.started_s) < _START_TOLERANCE_S
        except psutil.Error:
            return False


def default_state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """State directory used when none is named: `KMIRROR_STATE_DIR`, else the user's state directory."""
    configured = (os.environ if environ is None else environ).get(STATE_DIR_VARIABLE)
    return Path(configured) if configured else platformdirs.user_state_path("kmirror") / "node"


class StateDirectory:
    """Files of one node. Nothing is created before it is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log_file = path / "node.log"
        self._endpoint_file = path / "node.json"
        self._token_file = path / "token"
        self._lock_file = path / "lock"
        self._node_id_file = path / "node_id"
        self._stopped_file = path / "stopped"
        self._lock: int | None = None

    def acquire(self) -> None:
        """Take the directory for this process; given back by `release` or by the end of the process.

        Raises:
            NodeRunningError: when another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            running = self.read_endpoint()
            who = f"node {running.node_id} (pid {running.pid})" if running else "another node"
            raise NodeRunningError(
                f"{self.path}: {who} runs on this state directory; stop it with 'kmirror node stop' "
                "or name another one with --state-dir"
            ) from None
        self._lock = handle

    def release(self) -> None:
        """Withdraw the endpoint and give the lock back; harmless when not held."""
        if self._lock is None:
            return
        self._endpoint_file.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None

    def token(self, environ: Mapping[str, str] | None = None) -> SecretStr | None:
        """API token: the one stored here, else `KMIRROR_TOKEN` (or `KMIRROR_TOKEN_FILE`); None with neither.

        Raises:
            SettingsError: when the file that `KMIRROR_TOKEN_FILE` names cannot be read.
        """
        try:
            stored = self._token_file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            stored = ""
        token = stored or variable(TOKEN_VARIABLE, os.environ if environ is None else environ)
        return SecretStr(token) if token else None

    def ensure_token(self, environ: Mapping[str, str] | None = None) -> SecretStr:
        """Token a node of this directory asks for: `KMIRROR_TOKEN`, else the stored one, else a new one.

        It is stored, readable by the owner only, so that clients on this machine find it.

        Raises:
            SettingsError: when the file that `KMIRROR_TOKEN_FILE` names cannot be read.
        """
        configured = variable(TOKEN_VARIABLE, os.environ if environ is None else environ)
        stored = self.token({})
        token = SecretStr(configured) if configured else stored or SecretStr(secrets.token_urlsafe(32))
        if token != stored:
            self._write(self._token_file, token.get_secret_value())
        return token

    def node_id(self) -> str | None:
        """Name of this directory's node; None when none was started on it yet."""
        try:
            return self._node_id_file.read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None

    def ensure_node_id(self, proposed: str) -> str:
        """Name of this directory's node, the same after every restart."""
        known = self.node_id()
        if known is None:
            self._write(self._node_id_file, proposed)
        return known or proposed

    def write_endpoint(
        self, *, endpoint: str, node_id: str, ca: str | None = None, identity: ClientIdentity | None = None
    ) -> None:
        """Announce where this process listens, and what clients of this machine can show to it.

        A key with a password is not announced: `KMIRROR_CERTIFICATE` and `KMIRROR_KEY` name another one.
        """
        process = psutil.Process()
        shown = identity if identity and identity.password is None else None
        content = EndpointFile(
            endpoint=endpoint,
            pid=process.pid,
            node_id=node_id,
            started_s=process.create_time(),
            ca=ca,
            certificate=str(shown.certificate.resolve()) if shown else None,
            key=str(shown.key.resolve()) if shown and shown.key else None,
        )
        self._write(self._endpoint_file, content.model_dump_json())

    def read_endpoint(self) -> EndpointFile | None:
        """Endpoint of the node that runs on this directory; None when none does."""
        try:
            content = EndpointFile.model_validate_json(self._endpoint_file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        return content if content.is_alive() else None

    def mark_stopped(self, stopped: bool) -> None:
        """Note that somebody stopped the node on purpose, or that it is wanted again."""
        if stopped:
            self._write(self._stopped_file, "")
        else:
            self._stopped_file.unlink(missing_ok=True)

    @property
    def is_stopped(self) -> bool:
        """Whether the node was stopped on purpose: a keeper then leaves it alone."""
        return self._stopped_file.exists()

    def _write(self, path: Path, content: str) -> None:
        """Replace a file in one step, so that no reader sees half of it."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        temporary.replace(path)
