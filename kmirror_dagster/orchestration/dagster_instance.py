"""The `dagster.yaml` this project recommends, and why each line is in it."""

from pathlib import Path

DAGSTER_YAML = """\
# Settings that kmirror-dagster recommends for a Dagster instance.

# One slow sensor must not hold up the others.
sensors:
  use_threads: true
  num_workers: 4
schedules:
  use_threads: true
  num_workers: 4

# A comparison of two clusters may run for hours. It takes one slot; the others stay free for a failover,
# which is never limited.
concurrency:
  runs:
    max_concurrent_runs: 10
    tag_concurrency_limits:
      - key: kmirror/job
        value: verify
        limit: 1
  pools:
    granularity: op

# A run whose process was killed gives its slot back.
run_monitoring:
  enabled: true
  start_timeout_seconds: 120
  cancel_timeout_seconds: 60
  poll_interval_seconds: 15
  free_slots_after_run_end_seconds: 60

# Evaluates the freshness policy of the mirrors' assets.
freshness:
  enabled: true

# Ticks tell what was seen and done; three tick every ten seconds for each mirror.
retention:
  sensor:
    purge_after_days:
      skipped: 1
      success: 30
      failure: 30
  schedule:
    purge_after_days: 90

telemetry:
  enabled: false
nux:
  enabled: false
"""


def write_dagster_yaml(home: Path) -> Path:
    """Write the recommended `dagster.yaml` into a Dagster home, unless there is one; returns its path."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / "dagster.yaml"
    if not path.exists():
        path.write_text(DAGSTER_YAML, encoding="utf-8")
    return path
