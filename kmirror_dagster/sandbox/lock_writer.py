"""Writes the lock file anew, at a version change: ``python -m kmirror_dagster.sandbox.lock_writer``."""

import json
import sys
import tempfile
from pathlib import Path

from kmirror_dagster.errors import SandboxError
from kmirror_dagster.sandbox.jars import KAFKA_VERSION, LOCK_NAME, LockedJar, maven_context, sha256_of

_BROKER = f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}"
_LOG4J_GROUP = "org.apache.logging.log4j"


def resolve(repository: Path) -> list[LockedJar]:
    """Resolve and download the broker's class path.

    The slf4j backend is taken by itself: resolved together with the broker its BOM would pull kafka-clients
    down to an older version, and the broker would die at start.

    Args:
        repository: directory for POMs and jars.

    Raises:
        SandboxError: the result mixes Kafka versions or holds two jars of one name.
    """
    context = maven_context(repository, None)
    inputs, transitive = context.resolver.resolve([context.create_dependency(_BROKER)])
    artifacts = [item.artifact for item in [*inputs, *transitive]]
    log4j = next(item.version for item in artifacts if item.artifactId == "log4j-core")
    # slf4j-api 1.7 (Kafka's) takes log4j-slf4j-impl; log4j-slf4j2-impl is for slf4j 2.
    artifacts.append(context.project(_LOG4J_GROUP, "log4j-slf4j-impl").at_version(log4j).artifact())
    jars: list[LockedJar] = []
    for artifact in artifacts:
        path = artifact.resolve()
        jars.append(
            LockedJar(
                group=artifact.groupId,
                artifact=artifact.artifactId,
                version=artifact.version,
                sha256=sha256_of(path),
                size=path.stat().st_size,
            )
        )
    _check(jars)
    return sorted(jars, key=str)


def _check(jars: list[LockedJar]) -> None:
    for jar in jars:
        if jar.group == "org.apache.kafka" and jar.version != KAFKA_VERSION:
            raise SandboxError(f"{jar} does not fit Kafka {KAFKA_VERSION}; resolve what brought it apart")
    names = [jar.file_name for jar in jars]
    if len(set(names)) != len(names):
        raise SandboxError("two jars of the class path have one file name")


def main() -> int:
    """Resolve, then replace the lock file beside this module."""
    with tempfile.TemporaryDirectory() as folder:
        jars = resolve(Path(folder))
    document = {"kafka": KAFKA_VERSION, "jars": [jar.model_dump() for jar in jars]}
    target = Path(__file__).with_name(LOCK_NAME)
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{target}: {len(jars)} jars\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
