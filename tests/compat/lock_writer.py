"""Writes the lock files of the Kafka releases that are tried: ``python -m tests.compat.lock_writer [VERSION ...]``."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from kmirror_dagster.sandbox.jars import JarLock, LockedJar, maven_context, sha256_of
from tests.compat.releases import LOCKS, VERSIONS

_RELOAD4J = (("ch.qos.reload4j", "reload4j", "1.2.25"), ("org.slf4j", "slf4j-reload4j", "1.7.36"))


def resolve(version: str, repository: Path) -> JarLock:
    """Resolve and download a broker's class path; its logging backend is resolved apart."""
    context = maven_context(repository, None)
    broker = context.create_dependency(f"org.apache.kafka:kafka_2.13:{version}")
    inputs, transitive = context.resolver.resolve([broker])
    artifacts: list[Any] = [item.artifact for item in [*inputs, *transitive]]
    log4j2 = [each.version for each in artifacts if each.artifactId == "log4j-core"]
    backend = (
        [("org.apache.logging.log4j", "log4j-slf4j-impl", version) for version in log4j2]
        if log4j2
        else [each for each in _RELOAD4J if each[1] not in {artifact.artifactId for artifact in artifacts}]
    )
    artifacts += [
        context.project(group, name).at_version(number).artifact() for group, name, number in backend
    ]
    return JarLock(kafka=version, jars=tuple(sorted((_locked(each) for each in artifacts), key=str)))


def _locked(artifact: Any) -> LockedJar:
    path = artifact.resolve()
    return LockedJar(
        group=artifact.groupId,
        artifact=artifact.artifactId,
        version=artifact.version,
        sha256=sha256_of(path),
        size=path.stat().st_size,
    )


def main() -> None:
    """Resolve, then write the lock files."""
    for version in sys.argv[1:] or VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            lock = resolve(version, Path(folder))
        own = {jar.version for jar in lock.jars if jar.group == "org.apache.kafka"}
        assert own == {version}, own
        target = LOCKS / f"kafka-{version}.lock.json"
        target.write_text(lock.model_dump_json() + "\n", encoding="utf-8")
        sys.stdout.write(f"{target.name}: {len(lock.jars)} jars\n")


if __name__ == "__main__":
    main()
