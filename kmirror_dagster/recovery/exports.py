"""Writing a manifest to a file: JSON, or Parquet where pyarrow is installed."""

import importlib
from pathlib import Path
from typing import Any

from kmirror_dagster.errors import UsageError
from kmirror_dagster.files import write_atomically, write_text
from kmirror_dagster.recovery.manifest import LossManifest

PARQUET_SUFFIX = ".parquet"


def export_manifest(manifest: LossManifest, path: Path) -> None:
    """Write a manifest; the file appears complete or not at all, an existing one is replaced.

    Args:
        manifest: what to write. JSON holds all of it; Parquet one row per partition, with the mirror's name, the
            source's cluster id and the time in each.
        path: `*.parquet` for Parquet, anything else for JSON.

    Raises:
        UsageError: when the file cannot be written, or Parquet is asked for without pyarrow.
    """
    if path.suffix == PARQUET_SUFFIX:
        rows = [
            {
                "mirror": manifest.mirror,
                "source_cluster_id": manifest.source_cluster_id,
                "made_ms": manifest.made_ms,
                **loss.model_dump(mode="json"),
            }
            for loss in manifest.partitions
        ]
        write_parquet(rows, path, MANIFEST_COLUMNS)
        return
    write_text(path, manifest.model_dump_json(indent=2) + "\n")


# column -> Arrow type, so that a manifest without losses has the same schema
MANIFEST_COLUMNS: dict[str, str] = {
    "mirror": "string",
    "source_cluster_id": "string",
    "made_ms": "int64",
    "topic": "string",
    "partition": "int32",
    "first_offset": "int64",
    "end_offset": "int64",
    "records": "int64",
    "size_bytes": "int64",
    "first_timestamp_ms": "int64",
    "last_timestamp_ms": "int64",
    "deleted_offsets": "int64",
    "undecided_offsets": "int64",
    "problem": "string",
}


def write_parquet(rows: list[dict[str, Any]], path: Path, columns: dict[str, str]) -> None:
    """Write rows as one Parquet file.

    Raises:
        UsageError: without pyarrow, or when the file cannot be written.
    """
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(
            f"{path}: Parquet needs pyarrow: pip install 'kmirror-dagster[parquet]', or name a .json file"
        ) from error
    schema = arrow.schema([(name, arrow.type_for_alias(kind)) for name, kind in columns.items()])
    table = arrow.Table.from_pylist(rows, schema=schema)
    write_atomically(path, lambda temporary: parquet.write_table(table, str(temporary)))
