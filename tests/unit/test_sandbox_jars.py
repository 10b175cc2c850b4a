"""The broker's jars: only the locked ones are used."""

import hashlib
import threading
from pathlib import Path

import pytest

from kmirror_dagster.errors import SandboxError
from kmirror_dagster.sandbox import jars
from kmirror_dagster.sandbox.jars import JarLock, LockedJar

CONTENT = b"a jar"


def locked(content: bytes = CONTENT, artifact: str = "thing") -> LockedJar:
    return LockedJar(
        group="org.example",
        artifact=artifact,
        version="1",
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
    )


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> JarLock:
    lock = JarLock(kafka="0", jars=(locked(), locked(artifact="other")))
    monkeypatch.setattr(jars, "load_lock", lambda: lock)
    return lock


class Repository:
    """Stands for Maven Central; counts what is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, content: bytes = CONTENT, failures: int = 0) -> None:
        self.asked = 0
        self.failures = failures
        self.content = content
        self._lock = threading.Lock()
        monkeypatch.setattr(jars, "_fetch", self.fetch)
        monkeypatch.setattr(jars, "_BACKOFF_CAP_S", 0.0)

    def fetch(self, jar: LockedJar, repository: Path, advance: object) -> Path:
        with self._lock:
            self.asked += 1
            if self.asked <= self.failures:
                raise OSError("no route")
        path = repository / "download"
        path.write_bytes(self.content)
        return path


def test_lock_of_the_package_is_one_kafka_version() -> None:
    """Every Kafka jar in the lock has the broker's version, and an slf4j backend is among the jars."""
    lock = jars.load_lock()
    versions = {jar.version for jar in lock.jars if jar.group == "org.apache.kafka"}
    assert versions == {jars.KAFKA_VERSION} == {lock.kafka}
    assert {"kafka_2.13", "kafka-clients", "log4j-slf4j-impl", "log4j-core"} <= {
        j.artifact for j in lock.jars
    }
    assert len({jar.file_name for jar in lock.jars}) == len(lock.jars)


def test_downloads_once(lock: JarLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the cache and whole is not asked for again."""
    repository = Repository(monkeypatch)
    first = jars.class_path(cache=tmp_path)
    again = jars.class_path(cache=tmp_path)
    assert first == again
    assert [path.read_bytes() for path in first] == [CONTENT, CONTENT]
    assert repository.asked == 2


def test_damaged_jar_is_replaced(lock: JarLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A jar in the cache that is not the locked one, though of its size, is downloaded anew."""
    repository = Repository(monkeypatch)
    path = jars.class_path(cache=tmp_path)[0]
    path.write_bytes(b"X" * len(CONTENT))
    assert jars.class_path(cache=tmp_path)[0].read_bytes() == CONTENT
    assert repository.asked == 3


def test_wrong_download_is_refused(lock: JarLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download with another SHA-256 is refused, named, and leaves nothing behind."""
    Repository(monkeypatch, content=b"evil!")
    with pytest.raises(SandboxError, match=r"org\.example:.*:1: downloaded file has SHA-256 .*not used"):
        jars.class_path(cache=tmp_path)
    assert [path.name for path in (tmp_path / "kafka-0").iterdir()] == [".lock"]


def test_download_is_tried_again(lock: JarLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection is not the end."""
    Repository(monkeypatch, failures=2)
    assert all(path.read_bytes() == CONTENT for path in jars.class_path(cache=tmp_path))


def test_unreachable_repository_is_one_line(
    lock: JarLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no way to download, the message names the jar, the reason and what to do."""
    Repository(monkeypatch, failures=1000)
    with pytest.raises(
        SandboxError, match=r"^cannot download org\.example:.*no route.*check the network[^\n]*$"
    ):
        jars.class_path(cache=tmp_path)


def test_two_downloads_at_once_do_not_collide(
    lock: JarLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes second waits for the first and downloads nothing."""
    repository = Repository(monkeypatch)
    threads = [threading.Thread(target=jars.class_path, kwargs={"cache": tmp_path}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert repository.asked == 2


def test_cache_directory_is_configurable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """KMIRROR_CACHE_DIR moves the cache."""
    monkeypatch.setenv(jars.CACHE_ENV, str(tmp_path))
    assert jars.cache_dir() == tmp_path
