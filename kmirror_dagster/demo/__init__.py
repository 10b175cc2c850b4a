"""From nothing to a verified mirror in Dagster: `make demo`."""
