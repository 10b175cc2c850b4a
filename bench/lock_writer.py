"""Writes the lock file of MirrorMaker 2's jars anew, at a version change: ``python -m bench.lock_writer``."""

import json
import sys
import tempfile
from pathlib import Path

from bench.jars import LOCK, MIRROR_MAKER_VERSION
from kmirror_dagster.sandbox.jars import LockedJar, load_lock, maven_context, sha256_of

_ROOTS = ("org.apache.kafka:connect-mirror", "org.apache.kafka:connect-runtime")
_LOG4J_GROUP = "org.apache.logging.log4j"


def resolve(repository: Path) -> list[LockedJar]:
    """Resolve and download the class path of MirrorMaker 2, logging backend as the sandbox's brokers have it."""
    context = maven_context(repository, None)
    roots = [context.create_dependency(f"{root}:{MIRROR_MAKER_VERSION}") for root in _ROOTS]
    inputs, transitive = context.resolver.resolve(roots)
    jars: list[LockedJar] = []
    for artifact in [item.artifact for item in [*inputs, *transitive]]:
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
    jars += [jar for jar in load_lock().jars if jar.group == _LOG4J_GROUP]
    wrong = [
        str(jar) for jar in jars if jar.group == "org.apache.kafka" and jar.version != MIRROR_MAKER_VERSION
    ]
    if wrong:
        raise SystemExit(f"not of Kafka {MIRROR_MAKER_VERSION}: {', '.join(wrong)}")
    return sorted(jars, key=str)


def main() -> int:
    """Resolve, then replace the lock file beside this module."""
    with tempfile.TemporaryDirectory() as folder:
        jars = resolve(Path(folder))
    document = {"kafka": MIRROR_MAKER_VERSION, "jars": [jar.model_dump() for jar in jars]}
    LOCK.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{LOCK.name}: {len(jars)} jars\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
