"""Other versions of Kafka, Python and Dagster than those that everyday tests run on: `make compat`."""
