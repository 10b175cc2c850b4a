"""MirrorMaker 2's jars: pinned by version and SHA-256 like the sandbox's."""

from pathlib import Path

from rich.console import Console

from kmirror_dagster.sandbox import jars

MIRROR_MAKER_VERSION = "4.3.1"
LOCK = Path(__file__).with_name(f"mirrormaker-{MIRROR_MAKER_VERSION}.lock.json")


def class_path(console: Console | None = None) -> list[Path]:
    """Paths of all jars MirrorMaker 2 needs; downloads what is missing."""
    lock = jars.JarLock.model_validate_json(LOCK.read_text(encoding="utf-8"))
    return jars.class_path(console, lock=lock)
